"""Train the head and last layers of a BERT: the frozen rest runs once an example, and is looked up from then on."""

import copy
import time

import torch
from transformers import BertConfig, BertForSequenceClassification

import rewrite
from passes import DetachFrozen

EPOCHS = 3


def train(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> tuple[list[float], list[float]]:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    losses, seconds = [], []
    for epoch in range(EPOCHS):
        torch.manual_seed(epoch)
        started = time.process_time()
        order = torch.randperm(len(ids))
        for rows in order.split(8):
            torch.manual_seed(len(losses))
            loss = model(input_ids=ids[rows], labels=labels[rows]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        seconds.append(time.process_time() - started)
    return losses, seconds


def main() -> None:
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(hidden_size=128, num_attention_heads=4, vocab_size=2000))
    ids, labels = torch.randint(0, 2000, (32, 64)), torch.arange(32) % 2
    print(rewrite.freeze(model, "embeddings", "encoder.layer.[0-9]"))

    passes = [DetachFrozen(eval_mode=True, cache="memory")]
    small = rewrite.optimize(copy.deepcopy(model), passes, example_inputs={"input_ids": ids[:8], "labels": labels[:8]})
    for change in rewrite.report(small).changes:
        print(f"{change.path or '(root)'}: {change.summary}")

    for module in (model.bert.embeddings, *model.bert.encoder.layer[:10]):
        module.eval()  # by hand, until somebody calls train()
    expected, before = train(model, ids, labels)
    losses, after = train(small.train(), ids, labels)
    close = torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-3)
    print(f"losses          {'equal' if close else 'NOT EQUAL'} to the untouched model's, up to the order of sums")
    print(f"seconds         {', '.join(f'{each:.2f}' for each in before)} an epoch before")
    print(f"                {', '.join(f'{each:.2f}' for each in after)} an epoch after")
    if not close:
        raise SystemExit(3)


if __name__ == "__main__":
    main()
