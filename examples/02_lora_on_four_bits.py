"""Fine-tune a small Llama with LoRA: frozen weights in 4 bits, 8-bit Adam, recompute. Save, and go on from the file."""

import io

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import rewrite
from passes import Checkpoint, ChunkLoss, QuantizeFrozen

STEPS = 4


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4000, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8
    )
    return LlamaForCausalLM(config).requires_grad_(False)


def adapted(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.05))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict, steps: range) -> list[float]:
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def small(batch: dict) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    passes = [QuantizeFrozen(bits=4), ChunkLoss(), Checkpoint()]
    model = adapted(rewrite.optimize(build(), passes, example_inputs=batch, inplace=True))
    return model, rewrite.optimizer(model, "adamw8bit", lr=2e-3)


ids = torch.randint(0, 4000, (4, 128), generator=torch.Generator().manual_seed(2))
batch = {"input_ids": ids, "labels": ids}
plain = adapted(build())
model, optimizer = small(batch)
for change in rewrite.report(model).changes:
    print(change.path or "(root)", change.summary)

before = rewrite.estimate(plain, batch, optimizer="adamw")
after = rewrite.estimate(model, batch, optimizer="adamw8bit")
print(f"peak of a step  {before.peak_bytes:,} -> {after.peak_bytes:,} bytes")

print("plain", train(plain, rewrite.optimizer(plain, "adamw", lr=2e-3), batch, range(STEPS)))
print("small", train(model, optimizer, batch, range(STEPS)))

file = io.BytesIO()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
expected = train(model, optimizer, batch, range(STEPS, 2 * STEPS))

file.seek(0)
saved = torch.load(file, weights_only=True)
again, resumed = small(batch)
again.load_state_dict(saved["model"])
resumed.load_state_dict(saved["optimizer"])
print("the same from the file:", train(again, resumed, batch, range(STEPS, 2 * STEPS)) == expected)
