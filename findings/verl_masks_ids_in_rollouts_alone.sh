#!/usr/bin/env bash
# Versions: verl 0.9.1, transformers 5.10.2, torch 2.13.0 (CPU).
# Behaviour: verl makes the logits of ids that the tokenizer lacks minus infinity in its vLLM, so that
#   none is sampled (monkey_patch_compute_logits, called with len(tokenizer)). Its FSDP trainer
#   computes log-probs over all ids of the model (logprobs_from_logits). Where a vocabulary is padded,
#   the two differ for equal logits.
# Output seen (64 ids, 48 tokens, logits from a normal distribution):
#   trainer less rollout: -0.284 nats a token on average, 0 of 256 equal
#   without ids beyond the tokenizer: 256 of 256 equal
# Why it matters: Qwen's checkpoints are padded so. A trained model gives those ids little
#   probability, but what they have is a mismatch that no precision removes, and counts of
#   differing log-probs are not zero.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet verl==0.9.1 transformers==5.10.2 torch==2.13.0
cat >masked.py <<'PY'
import ast
from importlib.metadata import distribution
from types import MethodType, SimpleNamespace
from typing import Optional

import torch
from verl.utils.torch_functional import logprobs_from_logits

# out of its file, whose first lines import vLLM
path = distribution("verl").locate_file("verl/workers/rollout/vllm_rollout/utils.py")
(found,) = (
    node
    for node in ast.parse(path.read_text()).body
    if getattr(node, "name", "") == "monkey_patch_compute_logits"
)
names = {"torch": torch, "MethodType": MethodType, "Optional": Optional}
exec(compile(ast.Module([found], []), str(path), "exec"), names)

IDS, TOKENS = 64, 48
torch.manual_seed(0)


def told(logits):
    """What vLLM's sampler makes its log-probs of, as verl sets vLLM up."""
    model = SimpleNamespace(compute_logits=lambda hidden: hidden.clone())
    names["monkey_patch_compute_logits"](model, TOKENS)
    return model.compute_logits(logits).log_softmax(-1)


def compared(ids):
    logits = torch.randn(256, IDS)
    logits[:, ids:] = -torch.inf
    sampled = torch.randint(TOKENS, (256,))
    rollout = told(logits).gather(1, sampled[:, None])[:, 0]
    trainer = logprobs_from_logits(logits, sampled)
    difference = trainer - rollout
    return difference.mean().item(), int((difference.abs() < 1e-6).sum())


mean, equal = compared(IDS)
print(f"trainer less rollout: {mean:.3f} nats a token on average, {equal} of 256 equal")
_, equal_without = compared(TOKENS)
print(f"without ids beyond the tokenizer: {equal_without} of 256 equal")
raise SystemExit(0 if mean < -0.2 and equal == 0 and equal_without == 256 else "behaviour changed")
PY
venv/bin/python masked.py >log 2>&1 || { tail -n 20 log; exit 1; }
tail -n 2 log
