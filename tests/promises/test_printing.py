"""What `print` says of the records that the public functions return: one screen, with the figures."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint
from tests.promises.test_changes import Stack, hidden


def test_records_print_as_sentences() -> None:
    model = Stack()
    small = rewrite.optimize(model, [Checkpoint()], example_inputs=(hidden(),))

    estimate, certificate = rewrite.estimate(small, (hidden(),)), rewrite.verify(model, small, (hidden(),))

    assert str(estimate).startswith("peak ")
    assert f"saved {rewrite.size_text(estimate.saved_bytes)} (device cpu, optimizer none)" in str(estimate)
    assert str(certificate) == certificate.summary
    assert str(rewrite.report(small)).splitlines()[0].startswith("checkpoint: ")


def test_a_report_prints_refusals() -> None:
    flat = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    small = rewrite.optimize(flat, [Checkpoint()], example_inputs=(torch.randn(2, 4),))

    assert "refused (root): " in str(rewrite.report(small))


def test_a_name_in_a_list_of_passes_says_how_texts_are_given() -> None:
    with pytest.raises(rewrite.InputError, match=r"passes='checkpoint': a text is a whole pipeline"):
        rewrite.optimize(Stack(), ["checkpoint"], example_inputs=(hidden(),))  # type: ignore[list-item]
