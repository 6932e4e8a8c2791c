"""Which modules of a model its captured program reaches."""

from __future__ import annotations

from torch import nn

from rewrite.program import Program, Region


def uncovered(model: nn.Module, program: Program) -> list[str]:
    """Paths of the modules that hold parameters and are neither walked into, nor called, nor read by a graph."""
    reached: set[str] = set()
    for region in program.regions:
        for instance in region.instances:
            reached |= _reached(region, instance)
    leaves = _leaves(program)
    known = dict(model.named_modules(remove_duplicate=False))
    modules = {id(known[path]) for path in reached if path in known}
    modules |= {id(part) for path in reached & leaves if path in known for part in known[path].modules()}
    return [path for path, module in model.named_modules() if module._parameters and id(module) not in modules]


def _reached(region: Region, instance: str) -> set[str]:
    """Modules whose forward made a node, that a node calls, or whose parameter a node reads."""
    found = set()
    for node in region.graph.nodes:
        if node.op == "call_module":
            found.add(_join(instance, str(node.target)))
        if node.op == "get_attr":
            found.add(_join(instance, str(node.target)).rpartition(".")[0])
        path = node.meta.get("module_path")
        if path is not None and (path == region.path or path.startswith(f"{region.path}.") or not region.path):
            found.add(instance + path[len(region.path) :])
    return found


def _leaves(program: Program) -> set[str]:
    """Modules called from a graph that are no region: they run whole, their children inside them."""
    called = {
        _join(instance, str(node.target))
        for region in program.regions
        for instance in region.instances
        for node in region.graph.nodes
        if node.op == "call_module"
    }
    opaque = {opaque.path for opaque in program.opaque}
    return called - opaque - {instance for region in program.regions for instance in region.instances}


def _join(instance: str, path: str) -> str:
    return f"{instance}.{path}" if instance and path else instance or path
