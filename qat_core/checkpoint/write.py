"""Write packed checkpoints layer by layer; a folder appears when it is complete, or not at all."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from qat_core.checkpoint.architecture import meta_model, require_loadable, without_tied_copies
from qat_core.checkpoint.content import require_valid
from qat_core.checkpoint.conversion import Conversion
from qat_core.checkpoint.ignored_modules import declared_plan, ignored_modules
from qat_core.checkpoint.load import full_precision_shards
from qat_core.checkpoint.manifest import MANIFEST, verify_manifest, write_manifest
from qat_core.checkpoint.ranks import on_first_rank
from qat_core.checkpoint.read import require_described
from qat_core.checkpoint.shards import HF_QUANT_CONFIG, INDEX, Shards, read_json
from qat_core.checkpoint.unpacked import as_stored, left_out
from qat_core.options import CheckpointFormat
from qat_core.planning.plan import QuantPlan, meta_copy_of, plan, state_tensors, uncompiled
from qat_core.planning.quantization_config import hf_quant_config, quantization_config
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import is_prepared
from qat_core.weights.comparison import require_same
from qat_core.weights.coverage import coverage
from qat_core.weights.hub_names import HubNames, Weight
from qat_core.weights.layouts import LAYOUTS, require_layout, stored_tensors
from qat_core.weights.stream import packed_weights, weight_stream

TEMPLATES = "additional_chat_templates"  # where transformers keeps chat templates with a name
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def export(
    model: nn.Module,
    recipe: Recipe,
    folder: str | Path,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    kind: CheckpointFormat = "compressed-tensors",
) -> None:
    """Write a model, prepared, FSDP2-sharded, compiled or none of these.

    Of a sharded model all ranks call it, the first one writes, and it ends on all together: where
    rank 0 fails to write, the others raise a ValueError of the same text.

    Args:
        model: a transformers model, BF16 or FP32; what it holds in FP32 beside BF16 stays so.
        recipe: what to pack and how.
        folder: must not exist.
        tokenizer: saved beside the weights.
        kind: how packed weights are stored.

    Raises:
        ValueError: see `plan`; the folder exists or cannot be written; the model was trained with
            another recipe, is not what transformers makes of its config, or holds a weight that is
            not finite. Nothing is then left behind.
    """
    require_layout(kind)
    folder, model = Path(folder), uncompiled(model)
    names = HubNames(model)
    _require_what_its_config_says(model, names)
    held = (
        (n, torch.empty(t.shape, dtype=t.dtype, device="meta")) for n, t in state_tensors(model)
    )
    checked = as_stored(plan(model, recipe), names, dict(names.split(held)))  # type: ignore[arg-type]
    _require_declared(model, checked, names, qat=is_prepared(model))
    weights = weight_stream(model, checked, recipe)

    def write() -> None:
        with _complete_or_absent(folder) as partial:
            _save_settings(model, partial)
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
            _write(partial, weights, checked, names, kind, progress=False)

    if any(isinstance(p, DTensor) for p in model.parameters()):
        on_first_rank(lambda: _refuse_existing(folder))
        on_first_rank(write, gathers=weights)
    else:
        write()


def convert(
    source: str | Path,
    destination: str | Path,
    recipe: Recipe,
    kind: CheckpointFormat = "compressed-tensors",
    progress: bool = False,
) -> Conversion:
    """Pack a BF16 or FP32 checkpoint folder into a new one; what was done, in words as `str`.

    Tokenizer and the like are copied.
    Tensors that are not packed keep their dtype, so what stands in FP32 beside weights of BF16
    stays as it is. Of a checkpoint that is FP32 throughout they get the dtypes that transformers
    loads, most of them BF16. Keys that transformers leaves out by its own lists are left out.

    Args:
        source: folder of the checkpoint.
        destination: must not exist.
        recipe: what to pack and how.
        kind: how packed weights are stored.
        progress: show a bar.

    Raises:
        ValueError: as `export`; or the source is damaged, quantized, or not what its config says.
    """
    require_layout(kind)
    source, destination = Path(source), Path(destination)
    shards = full_precision_shards(source)
    if (source / MANIFEST).is_file():
        verify_manifest(source)
    model = meta_model(source)
    names = HubNames(model)
    try:
        checked = plan(model, recipe)
    except ValueError as error:  # of shapes, which config.json gives
        raise ValueError(f"{source / 'config.json'}: {error}") from None
    _require_declared(model, checked, names, qat=False)
    unread = _require_full_precision(source, model, checked, names, shards)
    checked = as_stored(checked, names, shards.described)
    entries = {entry.name: entry for entry in checked.entries}

    def read(name: str) -> Tensor:
        dtype = None if entries[name].quantized else getattr(torch, entries[name].dtype)
        return names.join(name, entries[name].shape, lambda piece: shards.read(piece).to(dtype))

    with _complete_or_absent(destination) as partial:
        _copy_all_but_weights(source, partial)
        weights = packed_weights(checked, recipe, read)
        size = _write(partial, weights, checked, names, kind, progress)
    stored = sum(tensor.nbytes for tensor in shards.described.values())
    has_experts = any(names.expert_prefix(name) for name in checked.quantized)
    return Conversion(checked, unread, stored, size, has_experts)


def _copy_all_but_weights(source: Path, partial: Path) -> None:
    for path in source.iterdir():
        if path.is_file() and path.name != MANIFEST and not path.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(path, partial / path.name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, partial / TEMPLATES)


def _require_declared(model: nn.Module, checked: QuantPlan, names: HubNames, *, qat: bool) -> None:
    """ValueError unless readers of config.json will look for just the plan's weights packed."""
    served = declared_plan(model, names, ignored_modules(checked, names)).quantized
    coverage(model, checked, served, qat=qat)


def _require_what_its_config_says(model: nn.Module, names: HubNames) -> None:
    """ValueError if an engine, which goes by config.json, would look for other weights."""
    source = f"{type(model).__name__}, as config.json describes it"
    own = {n: torch.empty(t.shape, device="meta") for n, t in state_tensors(model)}
    whole = meta_copy_of(model)
    HubNames(whole).refuse_own_values(own, source)
    needed = {n: torch.empty(t.shape, device="meta") for n, t in state_tensors(whole)}
    require_same(needed, own, source)
    stored: Any = names.split((n, t.to(torch.bfloat16)) for n, t in own.items())
    require_loadable(whole, dict(stored), source)


def _save_settings(model: nn.Module, folder: Path) -> None:
    """config.json and generation_config.json, as `save_pretrained` writes them."""
    saved: Any = model
    saved.config.save_pretrained(folder)
    config = read_json(folder / "config.json")
    config["architectures"] = [type(saved).__name__.removeprefix("FSDP")]
    _write_json(folder / "config.json", config)
    if saved.can_generate():
        try:
            saved.generation_config.save_pretrained(folder)
        except ValueError as error:
            raise ValueError(f"generation_config: {' '.join(str(error).split())}") from error


def _require_full_precision(
    source: Path, model: nn.Module, checked: QuantPlan, names: HubNames, shards: Shards
) -> tuple[str, ...]:
    """The names of what is left out. ValueError unless the rest is all that the model needs."""
    stored = without_tied_copies(names, shards, str(source))
    unread = left_out(model, [name for name in stored if names.owner(name) is None])
    stored = {name: tensor for name, tensor in stored.items() if name not in unread}
    for name, tensor in stored.items():
        if tensor.is_floating_point() and tensor.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"{source}: {name}: needs bfloat16 or float32, got {tensor.dtype}")
    needed = {
        e.name: _in_bf16(torch.empty(e.shape, dtype=getattr(torch, e.dtype), device="meta"))
        for e in checked.entries
    }
    found = {name: _in_bf16(tensor) for name, tensor in stored.items()}
    require_same(dict(names.split(needed.items())), found, str(source))  # type: ignore[arg-type]
    require_loadable(model, found, str(source))
    return tuple(sorted(unread))


def _in_bf16(tensor: Tensor) -> Tensor:
    """FP32 is as good where BF16 is needed, and the other way round; integers are not."""
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


@contextmanager
def _complete_or_absent(folder: Path) -> Iterator[Path]:
    """A folder beside the wanted one, renamed to it at the end; removed on any error."""
    _refuse_existing(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as made:
            partial = Path(made) / "partial"
            partial.mkdir()
            yield partial
            partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder}: not written: {error}; nothing was left behind") from error


def _refuse_existing(folder: Path) -> None:
    if os.path.lexists(folder):
        raise ValueError(f"{folder}: exists; choose another name or remove it")


def _write(
    folder: Path,
    weights: Iterable[tuple[str, Weight]],
    checked: QuantPlan,
    names: HubNames,
    kind: CheckpointFormat,
    progress: bool,
) -> int:
    """Shards, index, and what config.json lacks; the bytes of all tensors."""
    num_shards = sum(1 for _ in groupby(checked.entries, key=lambda entry: _layer(entry.name)))
    layers = groupby(weights, key=lambda item: _layer(item[0]))
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for index, (_, layer) in enumerate(
        track(layers, "Writing layers", total=num_shards, disable=not progress), start=1
    ):
        file = f"model-{index:05d}-of-{num_shards:05d}.safetensors"
        packed = dict(layer)
        for name, weight in packed.items():
            require_valid(name, weight, "checkpoint")
        tensors = dict(stored_tensors(names.split(packed.items()), LAYOUTS[kind]))
        save_file(
            {n: t.contiguous().cpu() for n, t in tensors.items()}, folder / file, {"format": "pt"}
        )
        weight_map |= dict.fromkeys(tensors, file)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    ignored = ignored_modules(checked, names)
    config = read_json(folder / "config.json")
    config.pop("torch_dtype", None)  # older name of dtype, which transformers 5 still reads
    config |= {"dtype": "bfloat16", "quantization_config": quantization_config(kind, ignored)}
    _write_json(folder / "config.json", config)
    if kind == "modelopt":
        _write_json(folder / HF_QUANT_CONFIG, hf_quant_config(ignored))
    require_described(folder)
    write_manifest(folder)
    return total_bytes


def _layer(name: str) -> str:
    """The layer of a weight, by the first number in its name; "" for those outside of any."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else ""


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
