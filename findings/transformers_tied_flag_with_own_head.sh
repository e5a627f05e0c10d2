#!/usr/bin/env bash
# Versions: transformers 5.10.2, torch 2.13.0 (CPU), safetensors 0.8.0.
# Behaviour: a checkpoint has a head of its own, and its config says tie_word_embeddings: true.
#   from_pretrained unties, with a warning, but leaves the flag true. Whoever then builds the model
#   from that config ties it: load_state_dict is content ("All keys matched") and the head
#   overwrites the embedding. resize_token_embeddings ties the loaded model again and drops the head.
# Output seen:
#   ... both are present in the checkpoints with different values, so we will NOT tie them. ...
#   loaded: flag True, tied False, apart 0.00
#   built from its config: <All keys matched successfully>, tied True, apart 0.46
#   loaded, then resized: tied True
# Why it matters: in RL a trainer reads the weights, and the engine that it sends them to is built
#   from the flag. They are then two policies, and a 4-bit recipe that skips "the head" by the
#   flag treats the wrong tensor. Compare the tensors; do not trust the flag.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet transformers==5.10.2 torch==2.13.0 safetensors==0.8.0
cat > head.py <<'PY'
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

SIZES = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
HEADS = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=8)
torch.manual_seed(0)
made = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, **HEADS, tie_word_embeddings=False))
made.save_pretrained("checkpoint")
config = AutoConfig.from_pretrained("checkpoint")
config.tie_word_embeddings = True
config.save_pretrained("checkpoint")


def tied(model):
    return model.lm_head.weight is model.model.embed_tokens.weight


def apart(model):  # largest difference of logits from the model that was saved
    tokens = torch.arange(8)[None]
    return (model(tokens).logits - made(tokens).logits).abs().max().item()


loaded = AutoModelForCausalLM.from_pretrained("checkpoint")
flag = loaded.config.tie_word_embeddings
print(f"loaded: flag {flag}, tied {tied(loaded)}, apart {apart(loaded):.2f}")
built = AutoModelForCausalLM.from_config(loaded.config)
keys = built.load_state_dict(loaded.state_dict())
print(f"built from its config: {keys}, tied {tied(built)}, apart {apart(built):.2f}")
as_told = flag and not tied(loaded) and apart(loaded) == 0
as_told = as_told and tied(built) and apart(built) > 0.01
loaded.resize_token_embeddings(40)
print(f"loaded, then resized: tied {tied(loaded)}")
raise SystemExit(0 if as_told and tied(loaded) else "behaviour changed")
PY
venv/bin/python head.py 2>&1 | tee log
grep -q "so we will NOT tie them" log
