"""Tensors of published files that are not packed: their dtypes, and keys that no model reads."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from qat_core.planning.plan import Entry, QuantPlan
from qat_core.weights.hub_names import HubNames


def left_out(model: nn.Module, unknown: Iterable[str]) -> set[str]:
    """Of keys that a model has no place for, those that transformers leaves out by its own lists.

    Draft layers (`mtp.*`, `model.layers.46.*` of GLM-4.5), and what older versions stored, as
    `rotary_emb.inv_freq`. Nothing in the trainer reads them.
    """
    asked = set(unknown)
    loading: Any = SimpleNamespace(missing_keys=set(), unexpected_keys=set(asked))
    known: Any = model
    known._adjust_missing_and_unexpected_keys(loading)
    return asked - set(loading.unexpected_keys)


def as_stored(checked: QuantPlan, names: HubNames, stored: Mapping[str, Tensor]) -> QuantPlan:
    """The plan, with FP32 for unpacked tensors that files hold in FP32 beside weights of BF16.

    Files of FP32 throughout say nothing about a tensor: all go to the dtypes that transformers
    loads. `stored` is what files hold, by the hub's names, on the meta device.
    """
    in_fp32 = {name for name, tensor in stored.items() if tensor.dtype == torch.float32}

    pieces = {e.name: {piece.name for piece in names.pieces[e.name]} for e in checked.entries}
    floating = [e for e in checked.entries if getattr(torch, e.dtype).is_floating_point]
    if all(pieces[entry.name] <= in_fp32 for entry in floating):
        return checked

    def kept(entry: Entry) -> Entry:
        is_fp32 = entry.dtype == "bfloat16" and not entry.quantized and pieces[entry.name] & in_fp32
        return replace(entry, dtype="float32") if is_fp32 else entry

    return QuantPlan(tuple(map(kept, checked.entries)))
