"""Read packed checkpoints back, after everything about them was checked."""

from collections.abc import Iterator
from pathlib import Path

from qat_core.checkpoint.architecture import meta_model, without_tied_copies
from qat_core.checkpoint.manifest import verify_manifest
from qat_core.checkpoint.quantization_config import declared_plan, format_of
from qat_core.checkpoint.shards import Shards, read_json
from qat_core.nvfp4 import PackedTensor
from qat_core.plan import QuantPlan
from qat_core.weights.comparison import require_same
from qat_core.weights.hub_names import Weight, meta_weights, split_experts
from qat_core.weights.layouts import LAYOUTS, Layout, stored_tensors


def read_checkpoint(folder: Path) -> Iterator[tuple[str, Weight]]:
    """All weights under the hub's names, packed ones as they are stored.

    Everything is verified before the first weight is read: SHA-256 of all files, index, and names,
    shapes and dtypes against config.json.

    Raises:
        ValueError: naming the file or weight that is wrong.
    """
    verify_manifest(folder)
    settings = read_json(folder / "config.json")
    kind, ignored = format_of(settings, str(folder / "config.json"))
    layout, shards, model = LAYOUTS[kind], Shards(folder), meta_model(folder)
    declared = declared_plan(model, ignored)
    expected = dict(stored_tensors(split_experts(meta_weights(declared)), layout))
    require_same(expected, without_tied_copies(model, shards.described), str(folder))
    return _weights(declared, shards, layout)


def _weights(declared: QuantPlan, shards: Shards, layout: Layout) -> Iterator[tuple[str, Weight]]:
    for name, weight in split_experts(meta_weights(declared)):
        if isinstance(weight, PackedTensor):
            stored = layout.to_tensors(name, weight)
            yield name, layout.from_tensors(*(shards.read(tensor) for tensor in stored))
        else:
            yield name, shards.read(name)
