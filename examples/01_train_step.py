"""Train a small BERT for a few steps with its blocks recomputed, beside the untouched one: same losses, less memory."""

import copy

import torch
from transformers import BertConfig, BertForMaskedLM

import rewrite
from passes import Checkpoint

STEPS = 3


def train(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    losses = []
    for _ in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(hidden_size=256, num_hidden_layers=8, num_attention_heads=4, vocab_size=2000))
    ids = torch.randint(0, 2000, (8, 128))
    batch = {"input_ids": ids, "labels": ids}

    small = rewrite.optimize(copy.deepcopy(model), passes=[Checkpoint()], example_inputs=batch)
    before = rewrite.estimate(model, batch, optimizer="adamw")
    after = rewrite.estimate(small, batch, optimizer="adamw")
    expected, losses = train(model, batch), train(small, batch)

    print(f"peak of a step  {before.peak_bytes:>13,} bytes before  {after.peak_bytes:>13,} bytes after")
    print(f"saved           {before.saved_bytes:>13,} bytes before  {after.saved_bytes:>13,} bytes after")
    print(f"losses          {losses}, {'equal' if losses == expected else 'NOT EQUAL'} to the untouched model's")
    if losses != expected:
        raise SystemExit(3)


if __name__ == "__main__":
    main()
