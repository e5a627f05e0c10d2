#!/usr/bin/env bash
# Versions: triton 3.6.0 and 3.7.0, numpy 2.4.6, torch 2.13.0 (CPU).
# Behaviour: under TRITON_INTERPRET=1, a `for` over a range with a bound known only at run time
#   (tl.program_id, tl.num_programs, an argument) raises. A `while` of the same meaning works.
#   Compiled for a GPU, both are valid. NumPy 2.4 made int() of a one-element array an error, and
#   Triton 3.6.0 still called it; 3.7.0 does not.
# Output seen:
#   triton 3.6.0
#     for: InterpreterError: TypeError('only 0-dimensional arrays can be converted to Python scalars')
#     while: [0, 1, 2, 3, 4, 5, 6]
#   triton 3.7.0: both as the `while` above
# Why it matters: people without a GPU test 4-bit quantizers in this interpreter, and the usual
#   persistent loop over tiles fails there with a message about NumPy, not about the loop.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 triton==3.6.0
cat > loops.py <<'PY'
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def with_for(out, n):
    for i in range(tl.program_id(0), n, tl.num_programs(0)):
        tl.store(out + i, i)


@triton.jit
def with_while(out, n):
    i = tl.program_id(0)
    while i < n:
        tl.store(out + i, i)
        i += tl.num_programs(0)


def result_of(kernel):
    out = torch.full((7,), -1)
    try:
        kernel[(3,)](out, 7)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return str(out.tolist())


seen = [result_of(with_for), result_of(with_while)]
print(f"triton {triton.__version__}", "for: " + seen[0], "while: " + seen[1], sep="\n  ")
message = "only 0-dimensional arrays can be converted to Python scalars"
told = message if sys.argv[1] == "fails" else seen[1]
sys.exit(0 if told in seen[0] and seen[1] == str(list(range(7))) else "behaviour changed")
PY
TRITON_INTERPRET=1 venv/bin/python loops.py fails
venv/bin/pip install --quiet triton==3.7.0
TRITON_INTERPRET=1 venv/bin/python loops.py works
