"""Read packed checkpoints back, after everything about them was checked."""

from collections.abc import Iterator
from pathlib import Path

import torch

from qat_core.checkpoint.architecture import meta_model, require_loadable, without_tied_copies
from qat_core.checkpoint.content import SharedScales, require_valid
from qat_core.checkpoint.conversion import RANDOM_EXPERTS
from qat_core.checkpoint.ignored_modules import declared_plan
from qat_core.checkpoint.manifest import verify_manifest
from qat_core.checkpoint.shards import Shards, read_json
from qat_core.checkpoint.unpacked import as_stored
from qat_core.nvfp4 import PackedTensor
from qat_core.planning.plan import QuantPlan
from qat_core.planning.quantization_config import format_of
from qat_core.weights.comparison import require_same
from qat_core.weights.hub_names import HubNames, Weight, meta_weights
from qat_core.weights.layouts import LAYOUTS, Layout, stored_tensors


def verify(folder: str | Path) -> str:
    """Checks a packed checkpoint, every byte of it; what was found, in words.

    Raises:
        ValueError: naming the file or weight that is wrong.
    """
    num_weights, packed_experts = 0, False
    for name, weight in read_checkpoint(folder):
        num_weights += 1
        packed_experts |= isinstance(weight, PackedTensor) and ".experts." in name
    found = f"{Path(folder)}: {num_weights} weights, all as recorded"
    return f"{found}\n{RANDOM_EXPERTS}" if packed_experts else found


def read_checkpoint(folder: str | Path) -> Iterator[tuple[str, Weight]]:
    """All weights under the hub's names, packed ones as they are stored.

    Before the first weight is read, SHA-256 of all files, index, settings, names, shapes and dtypes
    are verified, the latter by transformers' own loader too. Values are verified as they are read.

    Raises:
        ValueError: naming the file or weight that is wrong.
    """
    folder = Path(folder)
    verify_manifest(folder)
    return _weights(*require_described(folder), str(folder))


def require_described(folder: Path) -> tuple[QuantPlan, HubNames, Shards, Layout]:
    """What config.json says of a packed checkpoint, and its files; ValueError if these differ."""
    file = folder / "config.json"
    kind, ignored = format_of(
        read_json(file).get("quantization_config") or {}, f"{file}: quantization_config"
    )
    layout, shards, model = LAYOUTS[kind], Shards(folder), meta_model(folder)
    names = HubNames(model)
    declared = as_stored(declared_plan(model, names, ignored), names, shards.described)
    expected = dict(stored_tensors(names.split(meta_weights(declared)), layout))
    require_same(expected, without_tied_copies(names, shards, str(folder)), str(folder))
    unpacked = {
        name: torch.empty(weight.shape, dtype=torch.bfloat16, device="meta")
        for name, weight in names.split(meta_weights(declared))
    }
    require_loadable(model, unpacked, str(folder))
    return declared, names, shards, layout


def _weights(
    declared: QuantPlan, names: HubNames, shards: Shards, layout: Layout, source: str
) -> Iterator[tuple[str, Weight]]:
    scales = SharedScales(declared, names, source)
    for name, weight in names.split(meta_weights(declared)):
        if isinstance(weight, PackedTensor):
            stored = layout.to_tensors(name, weight)
            weight = layout.from_tensors(*(shards.read(tensor) for tensor in stored))
        else:
            weight = shards.read(name)
        require_valid(name, weight, source)
        if isinstance(weight, PackedTensor):
            scales.check(name, weight)
        yield name, weight
