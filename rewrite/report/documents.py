"""Results as JSON documents. Each names its schema; a change that breaks readers gives it a new number."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rewrite.options import REQUIRED, annotation_text

if TYPE_CHECKING:
    from rewrite.bisect.result import Bisection
    from rewrite.certificate import Certificate, Row
    from rewrite.diff.model import GraphDiff, Hunk, PassRecord, View
    from rewrite.memory.timeline import Estimate
    from rewrite.plan.document import Plan
    from rewrite.registry import Description
    from rewrite.report.fit import FitTable
    from rewrite.value_range import Ranges

DIFF_SCHEMA = "rewrite/diff/1"
SHOW_SCHEMA = "rewrite/show/1"
PASSES_SCHEMA = "rewrite/passes/1"
PLAN_SCHEMA = "rewrite/plan/1"
FIT_SCHEMA = "rewrite/fit/1"
BISECT_SCHEMA = "rewrite/bisect/1"

Document = dict[str, Any]


def document_text(document: Mapping[str, Any]) -> str:
    """JSON, indented, ASCII, with a line break at its end."""
    return json.dumps(document, indent=2) + "\n"


def diff_document(diff: GraphDiff) -> Document:
    """Both sides of a diff in bytes, every hunk, what was refused and what stayed opaque."""
    return {
        "schema": DIFF_SCHEMA,
        "model": diff.model,
        "device": diff.after.device,
        "optimizer": diff.after.optimizer,
        "modified": diff.modified,
        "passes": [_pass_document(record) for record in diff.passes],
        "before": estimate_document(diff.before),
        "after": estimate_document(diff.after),
        "stat": {
            "peak_delta_bytes": diff.peak_delta_bytes,
            "saved_delta_bytes": diff.after.saved_bytes - diff.before.saved_bytes,
            "recompute_flops": diff.recompute_flops,
            "time_ratio": diff.time_ratio,
            "device_profile": diff.profile or None,
            "casts": [asdict(count) for count in diff.casts],
        },
        "changes": [_hunk_document(hunk) for hunk in diff.hunks],
        "refusals": [
            {"pass": record.name, "path": refusal.path, "reason": refusal.reason, "source": refusal.source}
            for record in diff.passes
            for refusal in record.refusals
        ],
        "opaque": [asdict(part) for part in diff.opaque],
    }


def view_document(view: View) -> Document:
    """A model's regions and the memory of its step."""
    return {
        "schema": SHOW_SCHEMA,
        "model": view.model,
        "device": view.estimate.device,
        "optimizer": view.estimate.optimizer,
        "step": estimate_document(view.estimate),
        "regions": [_region_document(hunk) for hunk in view.hunks],
        "opaque": [asdict(part) for part in view.opaque],
    }


def certificate_document(certificate: Certificate, model: str, spec: str) -> Document:
    """Every comparison of a verification, under the certificate's own schema."""
    return {**certificate.to_json(), "model": model, "passes": spec}


def bisect_document(found: Bisection, ranges: Ranges | None, model: str) -> Document:
    """What is to be kept in fp32, what that was found from, and the values near overflow."""
    return {
        "schema": BISECT_SCHEMA,
        "model": model,
        "spec": found.spec,
        "keep_fp32": list(found.selectors),
        "option": found.keep_fp32,
        "minimal": found.minimal,
        "trials": found.trials,
        "tolerance": found.tolerance,
        "kept": list(found.kept),
        "candidates": len(found.candidates),
        "before": [_output_document(row) for row in found.before],
        "after": [_output_document(row) for row in found.after],
        "ranges": None if ranges is None else _ranges_document(ranges),
    }


def _output_document(row: Row) -> Document:
    """One output of a trial; an infinite difference becomes null."""
    return {
        "name": row.name,
        "passed": row.passed,
        "max_abs": row.max_abs if math.isfinite(row.max_abs) else None,
        "max_rel": row.max_rel if math.isfinite(row.max_rel) else None,
        "tolerance": row.tolerance,
    }


def _ranges_document(ranges: Ranges) -> Document:
    return {
        "dtype": ranges.dtype,
        "limit": ranges.limit,
        "share": ranges.share,
        "values": len(ranges.values),
        "near": [asdict(each) for each in ranges.near],
        "unseen": list(ranges.unseen),
    }


def plan_document(plan: Plan) -> Document:
    """A plan with what it was made for; equal plans of one release give equal text."""
    return {
        "schema": PLAN_SCHEMA,
        "model": plan.model,
        "spec": plan.spec,
        "numerics": plan.numerics.value,
        "budget_bytes": plan.budget_bytes,
        "device": plan.after.device,
        "device_profile": plan.profile,
        "optimizer": plan.after.optimizer,
        "fingerprint": {
            "graph": plan.fingerprint.graph,
            "parameters": plan.fingerprint.parameters,
            "inputs": list(plan.fingerprint.inputs),
        },
        "time_ratio": round(plan.time_ratio, 4),
        "before": _step_document(plan.before),
        "after": _step_document(plan.after),
        "floor": _step_document(plan.floor),
        "frontier": [
            {"peak_bytes": each.peak_bytes, "time_ratio": round(each.time_ratio, 4), "spec": each.spec}
            for each in plan.frontier
        ],
        "kept": [
            {
                "instances": list(each.instances),
                "keep": list(each.keep),
                "keep_state": list(each.keep_state),
                "again": list(each.again),
                "release": list(each.release),
                "passing": each.passing,
            }
            for each in plan.kept
        ],
    }


def _step_document(estimate: Estimate) -> Document:
    """One side without its curve."""
    document = estimate_document(estimate)
    del document["curve"]
    return document


def fit_document(table: FitTable) -> Document:
    """The sizes that fit, for each question."""
    return {
        "schema": FIT_SCHEMA,
        "model": table.model,
        "unit": table.unit,
        "memory_bytes": table.memory_bytes,
        "device": table.device,
        "optimizer": table.optimizer,
        "rows": [
            {
                "for": row.label,
                "plain": row.fit.plain,
                "plain_peak_bytes": row.fit.plain_peak_bytes,
                "planned": row.fit.planned,
                "planned_peak_bytes": row.fit.planned_peak_bytes,
                "spec": row.fit.spec,
                "time_ratio": round(row.fit.time_ratio, 4),
            }
            for row in table.rows
        ],
    }


def passes_document(descriptions: Sequence[Description]) -> Document:
    """Passes with their options."""
    return {"schema": PASSES_SCHEMA, "passes": [_description_document(each) for each in descriptions]}


def _description_document(description: Description) -> Document:
    return {
        "name": description.name,
        "distribution": description.distribution,
        "summary": description.summary,
        "numerics": description.numerics.value if description.numerics is not None else None,
        "fault": description.fault or None,
        "options": [
            {
                "name": option.name,
                "type": annotation_text(option.annotation),
                "required": option.default is REQUIRED,
                "default": None if option.default is REQUIRED else option.default,
                "doc": option.doc,
            }
            for option in description.options
        ],
        "table": [list(row) for row in description.table],
        "settings": dict(description.settings),
    }


def _pass_document(record: PassRecord) -> Document:
    return {
        "name": record.name,
        "spec": record.spec,
        "numerics": record.numerics,
        "modified": record.modified,
        "seconds": round(record.seconds, 6),
        "changes": [asdict(change) for change in record.changes],
    }


def estimate_document(estimate: Estimate) -> Document:
    """One side in full, but for the list of places, which the hunks hold."""
    peak = estimate.peak
    return {
        "peak_bytes": estimate.peak_bytes,
        "saved_bytes": estimate.saved_bytes,
        "by_category": dict(estimate.by_category),
        "phases": dict(estimate.phases),
        "peak": {
            "phase": peak.phase,
            "module_path": peak.module_path,
            "region": peak.region,
            "node": peak.node,
            "largest": [held._asdict() for held in peak.largest],
        },
        "flops": {"forward": estimate.flops.forward, "backward": estimate.flops.backward},
        "moved_bytes": estimate.moved_bytes,
        "loss": estimate.loss,
        "assumptions": list(estimate.assumptions),
        "not_counted": list(estimate.not_counted),
        "curve": [list(point) for point in estimate.curve],
    }


def _hunk_document(hunk: Hunk) -> Document:
    changed = [line for line in hunk.lines if line.mark != " "]
    return {
        "path": hunk.path,
        "instances": list(hunk.instances),
        "class": hunk.class_name,
        "before_bytes": hunk.before_bytes,
        "after_bytes": hunk.after_bytes,
        "saved_bytes": hunk.saved_bytes,
        "recomputed_nodes": hunk.recomputed_nodes,
        "nodes": [asdict(line) for line in changed],
    }


def _region_document(hunk: Hunk) -> Document:
    return {
        "path": hunk.path,
        "instances": list(hunk.instances),
        "class": hunk.class_name,
        "kept_bytes": hunk.after_bytes,
        "nodes": [
            {
                "name": line.name,
                "label": line.label,
                "shape": line.shape,
                "dtype": line.dtype,
                "value_bytes": line.value_bytes,
                "kept_bytes": line.after_bytes,
                "source": line.source,
            }
            for line in hunk.lines
        ],
    }
