"""What frozen parts cost: a twelve-layer BERT, embeddings and nine layers frozen, against the untouched model.

Run with `OMP_NUM_THREADS=1 python -m tests.bench.frozen`. Times are processor time of whole steps (forward, backward,
AdamW), one step of each kind in turn; the ratio is the median over pairs of neighbouring steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import rewrite
from passes import Checkpoint, DetachFrozen

Batch = dict[str, torch.Tensor]


def model(layers: int = 12, frozen: int = 9, width: int = 256) -> nn.Module:
    """In train mode; dropout as BERT has it."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=2000, hidden_size=width, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=4 * width
    )
    made = BertForSequenceClassification(config).train()
    rewrite.freeze(made, "embeddings", f"encoder.layer.[0-{frozen - 1}]")
    return made


def batches(count: int, rows: int = 4, length: int = 128) -> list[Batch]:
    """An epoch of examples that differ."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 2000, (count * rows, length), generator=generator)
    labels = torch.arange(count * rows) % 2
    return [
        {"input_ids": ids[at : at + rows], "attention_mask": torch.ones(rows, length), "labels": labels[at : at + rows]}
        for at in range(0, count * rows, rows)
    ]


def stepper(trained: nn.Module) -> Callable[[Batch], float]:
    """Takes one step and returns the seconds of processor time it took."""
    optimizer = torch.optim.AdamW([each for each in trained.parameters() if each.requires_grad], lr=1e-4)

    def step(batch: Batch) -> float:
        started = time.process_time()
        trained(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - started

    return step


def ratio(one: nn.Module, other: nn.Module, epoch: Sequence[Batch], warm: int = 2) -> float:
    """Time of a step of `one` over one of `other`: the median over pairs, the order within a pair turned each time."""
    steps = [stepper(each) for each in (one, other)]
    for batch in epoch[:warm]:
        for step in steps:
            step(batch)
    found = []
    for number, batch in enumerate(epoch):
        order = (0, 1) if number % 2 else (1, 0)
        seconds = dict.fromkeys(order, 0.0)
        for which in order:
            seconds[which] = steps[which](batch)
        found.append(seconds[0] / seconds[1])
    return statistics.median(found)


def epochs(trained: nn.Module, epoch: Sequence[Batch]) -> tuple[float, float]:
    """Seconds of the steps of two epochs over the same examples, the second in another order."""
    step = stepper(trained)
    step({name: value * 0 if name == "input_ids" else value for name, value in epoch[0].items()})
    ids = {name: torch.cat([batch[name] for batch in epoch]) for name in epoch[0]}
    order = torch.randperm(len(ids["labels"]), generator=torch.Generator().manual_seed(2))
    rows = len(epoch[0]["labels"])
    shuffled = [{name: value[each] for name, value in ids.items()} for each in order.split(rows)]
    return sum(map(step, epoch)), sum(map(step, shuffled))


def main() -> None:
    """Print each ratio beside its bar."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=30)
    given = parser.parse_args()
    epoch = batches(given.pairs)
    for more in ([], [Checkpoint()]):
        small = rewrite.optimize(model(), [DetachFrozen(), *more], example_inputs=epoch[0])
        plain = rewrite.optimize(model(), more, example_inputs=epoch[0]) if more else model()
        named = "with" if more else "without"
        print(f"step over requires_grad=False, {named} checkpoint  {ratio(small, plain, epoch):.4f}  (at most 1.01)")
    cached = rewrite.optimize(model(), [DetachFrozen(eval_mode=True, cache="memory")], example_inputs=epoch[0])
    first, second = epochs(cached, epoch[: given.pairs // 2])
    print(f"second epoch over the first, prefix cached  {second / first:.4f}  (at most 0.60)")


if __name__ == "__main__":
    main()
