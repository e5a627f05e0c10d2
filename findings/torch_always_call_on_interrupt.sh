#!/usr/bin/env bash
# Versions: torch 2.13.0 (CPU).
# Behaviour: a forward hook registered with always_call=True runs after an Exception in forward,
#   but not after a BaseException (KeyboardInterrupt, SystemExit, asyncio.CancelledError). Its
#   documentation says that it runs whether or not an exception is raised.
# Output seen:
#   weight 0.3 after ValueError: 0.3
#   weight 0.3 after KeyboardInterrupt: 0.0
#   weight 0.3 after SystemExit: 0.0
#   weight 0.3 after CancelledError: 0.0
# Why it matters: a pre-hook that swaps in 4-bit weights, and an always_call hook that swaps the
#   master weights back, is the natural pair. Ctrl-C inside forward leaves the rounded weights in
#   the model, and a handler that saves it then saves those. Use try/finally around forward.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
cat > hooks.py <<'PY'
import asyncio

import torch


class Raises(torch.nn.Module):
    def __init__(self, error):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.3))
        self.error = error

    def forward(self, _):
        raise self.error


def weight_after(error):
    module = Raises(error)
    master = module.weight.detach().clone()
    module.register_forward_pre_hook(lambda m, _: m.weight.data.round_())
    module.register_forward_hook(lambda m, *_: m.weight.data.copy_(master), always_call=True)
    try:
        module(None)
    except type(error):
        return round(module.weight.item(), 3)


TOLD = {ValueError: 0.3, KeyboardInterrupt: 0.0, SystemExit: 0.0, asyncio.CancelledError: 0.0}
seen = {error: weight_after(error()) for error in TOLD}
for error, weight in seen.items():
    print(f"weight 0.3 after {error.__name__}: {weight}")
raise SystemExit(0 if seen == TOLD else "behaviour changed")
PY
venv/bin/python hooks.py
