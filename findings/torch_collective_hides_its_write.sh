#!/usr/bin/env bash
# Versions: torch 2.13.0 (CPU, gloo, two processes).
# Behaviour: a collective writes its tensor without counting the write. PyTorch's version counter of
#   the tensor stays as it was, so that autograd, which refuses a saved tensor that was written since,
#   does not notice: a gradient is computed from the new values, without a word. `copy_` is refused.
# Output seen (rank 1):
#   version of a tensor: 0, after broadcast 0, after all_reduce 0, after copy_ 1
#   gradient of w * x, where x was 2 in the forward pass: 1.0 after a broadcast of 1 into x
#   the same after copy_: RuntimeError
# Why it matters: whoever caches by tensor and version (as this project's exact mode cached which rows
#   are one sequence) sees the last batch where micro-batches are broadcast into one buffer.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 --no-deps
venv/bin/pip install --quiet typing_extensions sympy jinja2 filelock networkx fsspec numpy "setuptools>=77.0.3"
cat >ranks.py <<'PY'
from pathlib import Path

import torch
import torch.distributed as dist


def gradient(write, rank):
    w, x = torch.ones(3, requires_grad=True), torch.full((3,), rank + 1.0)
    product = (w * x).sum()
    write(x)
    try:
        product.backward()
    except RuntimeError:
        return "RuntimeError"
    return w.grad[0].item()


def run(rank):
    dist.init_process_group("gloo", init_method="file://" + FILE, rank=rank, world_size=2)
    tensor = torch.zeros(3)
    versions = [tensor._version]
    for write in (lambda it: dist.broadcast(it, 0), dist.all_reduce, lambda it: it.copy_(it + 1)):
        write(tensor)
        versions.append(tensor._version)
    broadcast = gradient(lambda it: dist.broadcast(it, 0), rank)
    copied = gradient(lambda it: it.copy_(torch.ones(3)), rank)
    if rank == 1:
        names = ("", "after broadcast ", "after all_reduce ", "after copy_ ")
        print("version of a tensor:", ", ".join(f"{n}{v}" for n, v in zip(names, versions)))
        print("gradient of w * x, where x was 2 in the forward pass:", broadcast, end=" ")
        print("after a broadcast of 1 into x")
        print("the same after copy_:", copied)
        assert versions == [0, 0, 0, 1] and broadcast == 1.0 and copied == "RuntimeError"
    dist.destroy_process_group()


FILE = str(Path("meet").absolute())
if __name__ == "__main__":
    torch.multiprocessing.spawn(run, nprocs=2)
PY
venv/bin/python ranks.py
