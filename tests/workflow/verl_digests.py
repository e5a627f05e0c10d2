"""Digests of every weight that verl's trainers send and its vLLM workers take, by sync.

verl's processes import this beside `qat_core.verl.cpu` (`VERL_USE_EXTERNAL_MODULES`); they write
`sent-<pid>-<sync>.json` and `received-<pid>-<sync>.json` into the folder that VERL_DIGESTS names.
"""

import json
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest  # a model of true size has 6 GB a sync

import qat_core.weights.transfer as transfer
from qat_core.nvfp4 import PackedTensor
from qat_core.rollout.vllm.bucketed_loader import BucketedLoader

_syncs = {"sent": count(), "received": count()}
_send, _counted, _exit = transfer.transfer_tensors, BucketedLoader._counted, BucketedLoader.__exit__


def _digest(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {tuple(tensor.shape)} {xxh3_128_hexdigest(content)}"


def _write(side: str, digests: dict[str, str]) -> None:
    file = f"{side}-{os.getpid()}-{next(_syncs[side])}.json"
    (Path(os.environ["VERL_DIGESTS"]) / file).write_text(json.dumps(digests))


def _transfer_tensors(*arguments: Any) -> Iterator[tuple[str, Tensor]]:
    digests = {}
    for name, tensor in _send(*arguments):
        if not name.startswith("qat_core:"):
            digests[name] = _digest(tensor)
        yield name, tensor
    _write("sent", digests)


def _counted_with_digests(loader: Any, weights: Any) -> Iterator[tuple[str, Any]]:
    digests = vars(loader).setdefault("digests", {})
    for name, weight in _counted(loader, weights):
        if isinstance(weight, PackedTensor):
            parts = {f"{name}:{part}": getattr(weight, part) for part in transfer.PARTS}
        else:
            parts = {name: weight}
        digests |= {part: _digest(tensor) for part, tensor in parts.items()}
        yield name, weight


def _exit_with_digests(loader: Any, *exception: Any) -> None:
    _exit(loader, *exception)
    _write("received", loader.digests)


transfer.transfer_tensors = _transfer_tensors
BucketedLoader._counted = _counted_with_digests
BucketedLoader.__exit__ = _exit_with_digests
