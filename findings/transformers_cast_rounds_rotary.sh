#!/usr/bin/env bash
# Versions: transformers 5.10.2, torch 2.13.0 (CPU).
# Behaviour: a model made, or loaded, with dtype=torch.bfloat16 keeps the frequencies of its rotary
#   embedding in FP32. `model.to(torch.bfloat16)` rounds them as well, as they are a buffer, even
#   where all parameters were in BF16 before and nothing else changes. At 1,024 tokens the
#   gradients are then over four times as far from those of FP32.
# Output seen:
#   made in BF16: inv_freq torch.float32, error 0.010
#   and cast to BF16: inv_freq torch.bfloat16, error 0.046
# Why it matters: trainers end with such a cast to be sure of the dtype (verl 0.9.1 with
#   model_dtype=bfloat16), and engines compute their own table. The policy that is trained is then
#   not the one that sampled. Compare the buffers' dtypes, not the parameters' alone.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet transformers==5.10.2 torch==2.13.0
cat > cast.py <<'PY'
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

SIZES = dict(vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2)
HEADS = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=128)
CONFIG = Qwen3Config(**SIZES, **HEADS, max_position_embeddings=2048)
IDS = torch.randint(256, (1, 1024), generator=torch.Generator().manual_seed(0))


def made():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)


def gradients(model):
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: weight.grad.float() for name, weight in model.named_parameters()}


def error(model):
    found = gradients(model)
    each = [(found[name] - grad).norm() / grad.norm() for name, grad in REFERENCE.items()]
    return torch.stack(each).median().item()


REFERENCE = gradients(made().float())
kept, cast = made(), made().to(torch.bfloat16)
errors = []
for name, model in (("made in BF16", kept), ("and cast to BF16", cast)):
    errors.append(error(model))
    print(f"{name}: inv_freq {model.model.rotary_emb.inv_freq.dtype}, error {errors[-1]:.3f}")
rounded = cast.model.rotary_emb.inv_freq.dtype is torch.bfloat16
raise SystemExit(0 if rounded and errors[1] > 3 * errors[0] else "behaviour changed")
PY
venv/bin/python cast.py
