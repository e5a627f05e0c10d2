"""GRPO with NVFP4 rollouts on one machine: python examples/train_and_sync.py CHECKPOINT."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qat_core import Recipe, VllmEngine, prepare, weight_stream
from qat_core.mismatch import k3

folder, device = sys.argv[1], "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
plan = prepare(model, Recipe.full())  # from now on it trains with the values of NVFP4
memory = {"kv_cache_memory_bytes": 2**28, "gpu_memory_utilization": 0.3}  # beside the trainer
engine = VllmEngine(folder, plan, max_model_len=64, **memory)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
prompts, answer = [tokenizer.encode("3+4=")] * 8, tokenizer.encode("7")[-1]

for step in range(3):
    engine.sync(weight_stream(model), plan)  # the same values, packed
    batch = engine.generate(prompts, max_new_tokens=16, temperature=1.0, seed=step).to(device)
    rewards = (batch.response_ids == answer).any(-1).float()
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    mask, num_tokens = batch.response_mask, batch.response_mask.sum()
    logits = model(batch.input_ids, attention_mask=batch.attention_mask).logits
    log_probs = logits[:, -mask.shape[1] - 1 : -1].float().log_softmax(-1)
    log_probs = log_probs.gather(-1, batch.response_ids[..., None]).squeeze(-1)
    kl = k3((log_probs.detach() - batch.log_probs) * mask).sum() / num_tokens  # nats a token
    print(f"step {step}: reward {rewards.mean():.2f}, k3 KL {kl:.1e}")
    (-(advantages[:, None] * log_probs * mask).sum() / num_tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
