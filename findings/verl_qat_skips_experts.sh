#!/usr/bin/env bash
# Versions: verl 0.9.1, transformers 5.10.2, torch 2.13.0 (CPU), triton 3.6.0,
#   compressed-tensors 0.13.0 and 0.17.0.
# Behaviour: verl's QAT replaces nn.Linear layers. transformers 5 keeps a layer's experts in two
#   tensors that are none, so they train without QAT, and apply_qat says nothing. verl's weight sync
#   splits them into matrices and packs each to 4 bits. With compressed-tensors 0.17.0 the module
#   that packs cannot be imported.
# Output seen (Qwen3-MoE, two layers of eight experts):
#   trained with QAT: attention 8, experts 0
#   packed for the engine: attention 8, experts 48
#   compressed-tensors 0.17.0: No module named 'compressed_tensors.compressors.quantized_compressors'
# Why it matters: nearly all weights of an MoE are in experts. The engine rounds them, the trainer
#   does not, and the run is called QAT all the same.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet verl==0.9.1 transformers==5.10.2 torch==2.13.0
venv/bin/pip install --quiet --no-deps compressed-tensors==0.13.0 triton==3.6.0 loguru==0.7.3
cat >experts.py <<'PY'
from collections import Counter

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from verl.utils.qat.core import QATConfig, apply_qat
from verl.utils.qat.linear import QATLinear
from verl.utils.qat.quantizer import QATQuantizer
from verl.workers.engine.fsdp.utils import unfuse_moe_params

SIZES = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
HEADS = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=32)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS))
model = apply_qat(model, QATConfig(enable=True))
# as FSDPEngine.get_per_tensor_param sends them
stream = unfuse_moe_params(model.state_dict().items(), "qwen3_moe")
sent = QATQuantizer(device=torch.device("cpu")).quantize_with_fusion(stream)


def of_parts(names):
    count = Counter("experts" if ".experts." in name else "attention" for name in names)
    return f"attention {count['attention']}, experts {count['experts']}"


trained = of_parts(n for n, module in model.named_modules() if isinstance(module, QATLinear))
packed = of_parts(name for name, _ in sent if name.endswith("weight_packed"))
print(f"trained with QAT: {trained}")
print(f"packed for the engine: {packed}")
as_told = (trained, packed) == ("attention 8, experts 0", "attention 8, experts 48")
raise SystemExit(0 if as_told else "behaviour changed")
PY
venv/bin/python experts.py >log 2>&1 || { tail -n 20 log; exit 1; }
tail -n 2 log
if grep -i expert log | grep -vE "^(trained|packed)"; then exit 1; fi # a warning by now
venv/bin/pip install --quiet --no-deps compressed-tensors==0.17.0
venv/bin/python experts.py >log 2>&1 && exit 1
sed -n '$s/^.*Error: /compressed-tensors 0.17.0: /p' log
grep -q "No module named 'compressed_tensors.compressors.quantized_compressors'" log
