#!/usr/bin/env bash
# Versions: humming-kernels 0.1.19, as vLLM 0.33.0 uses it for NVFP4 experts; torch 2.13.0.
# Behaviour: which tensors an expert's weight becomes depends on values. Where gate and up of every
#   expert have the same global scale it is kept for the expert, in FP32; where those of one differ,
#   for each row, in the model's dtype: rounded to BF16's eight bits.
# Output seen:
#   same: weight_scale_2 (4,) torch.float32
#   one differs: weight_scale_2 (4, 64) torch.bfloat16, 0.333333 became 0.333984
# Why it matters: with vLLM 0.33.0 on an H200 an engine that starts without weights, as in RL, draws
#   the two apart, and the first reload of an MoE then ends in a RuntimeError about sizes, as
#   trainers that round gate and up together send one scale. A checkpoint with two scales is served
#   with them rounded.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet humming-kernels==0.1.19 torch==2.13.0
cat >convert.py <<'PY'
import torch
from humming.schema.compressed_tensors import CompressedTensorsWeightSchema

EXPERTS, ROWS, COLUMNS = 4, 64, 32  # rows: half gate's, half up's
schema = CompressedTensorsWeightSchema(
    format="nvfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=16
)


def converted(multipliers: torch.Tensor) -> torch.Tensor:
    """What becomes of global scales, which a checkpoint has inverted."""
    tensors = {
        "weight_packed": torch.zeros(EXPERTS, ROWS, COLUMNS // 2, dtype=torch.uint8),
        "weight_scale": torch.ones(EXPERTS, ROWS, COLUMNS // 16).to(torch.float8_e4m3fn),
        "weight_global_scale": multipliers,
    }
    # the public method of this name asks for a GPU first
    _, found = schema._convert_humming(
        tensors, [ROWS // 2] * 2, [COLUMNS], torch.bfloat16, num_experts=EXPERTS
    )
    return found["weight_scale_2"]


same = torch.full((EXPERTS, 2), 3.0)
one_differs = same.clone()
one_differs[-1, -1] = 4.0
found = converted(same)
print("same: weight_scale_2", tuple(found.shape), found.dtype)
found = converted(one_differs)
print(
    "one differs: weight_scale_2", tuple(found.shape), str(found.dtype) + ",",
    f"{1 / 3:.6f} became {found[0, 0].item():.6f}",
)
PY
venv/bin/python -W ignore convert.py 2>/dev/null >found.txt || { echo "failed"; exit 1; }
cat found.txt
diff found.txt - <<'TXT'
same: weight_scale_2 (4,) torch.float32
one differs: weight_scale_2 (4, 64) torch.bfloat16, 0.333333 became 0.333984
TXT
