"""What is tried with a tiny model of each family, and the table of it: docs/families.md.

python -m tests.family_checks > docs/families.md
"""

import copy
import re
import tempfile
from collections.abc import Callable, Collection
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from qat_core import convert, export
from qat_core.checkpoint.read import read_checkpoint
from qat_core.nvfp4 import PackedTensor, dequantize
from qat_core.planning.explanation import DTYPES
from qat_core.planning.plan import QuantPlan, plan, state_tensors
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare
from qat_core.weights.hub_names import HubNames, Weight
from qat_core.weights.stream import weight_stream
from tests.families import (
    FAMILIES,
    FP32_IN_VLLM,
    MAX_PARAMETERS,
    SERVED,
    SERVED_FROM_FILES,
    SERVED_WITH_TORCHVISION,
    num_parameters,
    tiny_family,
)
from tests.prepared_pairs import round_weights

YES = "yes"
LAYER = r"\.\d+\."
HEADER = """# Model families

Every family of causal language models that transformers 5.10 has, as a model of two small layers
with random weights, under `Recipe.full()`. A cell says `yes` or why not. `not built`: no such small
model could be made in BF16, for the reason given; nothing is known of the family. A test makes this
table again and compares it.

* **NVFP4**: share of the weights, without embeddings and output head, that is quantized.
* **trains**: logits and all gradients equal, bit for bit, those of a model whose weights were
  rounded by hand.
* **streams**: what goes to a rollout engine holds the model's whole state, and unpacks to just
  those rounded weights.
* **exports**: a checkpoint is written, verified, and gives the same logits, bit for bit, when
  transformers' own loader reads its unpacked weights.
* **converts**: `convert` of the family's files, with what is not packed in FP32 and a key for each
  pattern of transformers' lists of keys to leave out (draft layers, old buffers): the former stays
  as it is in every bit, the latter are left out and named.
* **served**: vLLM's CPU build loads that checkpoint and generates from it with the trainer's
  probabilities, and from other weights that are streamed to it then
  (`tests/integration/test_vllm_families.py`); `-` where that is not tested. For Qwen3.5's images
  vLLM imports torchvision. gpt-oss cannot be synced: vLLM loads its experts and sinks by a path
  that the reload does not cover.

| family | NVFP4 | trains | streams | exports | converts | served |
|---|---|---|---|---|---|---|
"""
DTYPES_HEADER = """
## What is not in BF16

Tensors outside the recipe that transformers, asked for BF16, or vLLM's CPU build holds in another
dtype. `export` writes the trainer's dtypes. `convert` writes FP32 where the source has it beside
weights of BF16, here and for all other tensors outside the recipe. A sync sends the trainer's, so
vLLM's FP32 then holds BF16 numbers where the trainer has BF16. `-`: not tested with vLLM.

| family | tensor | trainer, export | convert from FP32 | vLLM |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """One family's line of the table."""

    family: str
    quantized: str
    trains: str = ""
    streams: str = ""
    exports: str = ""
    converts: str = ""
    served: str = ""

    def __str__(self) -> str:
        return "| " + " | ".join(astuple(self)) + " |"


def check_family(family: str) -> Row:
    """Builds, trains, streams and exports the family's tiny model."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        if (num := num_parameters(family)) > MAX_PARAMETERS:
            return Row(family, f"not built: {num:,} parameters in spite of small sizes")
        model = tiny_family(family)
        _step(tiny_family(family))
    except Exception as error:  # whatever transformers has against these sizes, or BF16
        return Row(family, f"not built: {_sentence(error)}")
    recipe = Recipe.full()
    try:
        packed = plan(model, recipe)
    except ValueError as error:
        return Row(family, f"refused: {_sentence(error)}")
    round_weights(rounded := copy.deepcopy(model), packed, recipe)
    prepare(model, recipe)
    return Row(
        family,
        f"{_share(packed):.0%}",
        _outcome(lambda: _require_equal_training(model, rounded)),
        _outcome(lambda: _require_equal_stream(model, packed, rounded)),
        _outcome(lambda: _require_equal_export(model, rounded)),
        _outcome(lambda: _require_exact_conversion(family)),
        _served(family),
    )


def dtype_rows(family: str) -> list[str]:
    """Lines of the second table, of a family that is built; none if all is in BF16."""
    model, in_vllm = tiny_family(family), FP32_IN_VLLM.get(family, ())
    entries = plan(model, Recipe.full()).entries
    found = [e for e in entries if e.dtype != "bfloat16" or e.name.endswith(in_vllm)]
    if not found:
        return []
    names, rows = HubNames(model), []
    with tempfile.TemporaryDirectory() as folder:
        packed = _converted(family, Path(folder))[1]
        for entry in found:
            hub_name = names.renamed(entry.name)
            stored = packed[hub_name].dtype
            served = "FP32" if entry.name.endswith(in_vllm) else "BF16"
            cells = (
                family,
                f"`{re.sub(LAYER, '.*.', hub_name)}`",
                DTYPES[entry.dtype],
                DTYPES[str(stored).removeprefix("torch.")],
                served if _served(family) != "-" else "-",
            )
            rows.append("| " + " | ".join(cells) + " |")
    return list(dict.fromkeys(rows))


def _served(family: str) -> str:
    if family in SERVED_WITH_TORCHVISION:
        return f"{YES}, with torchvision"
    if family in SERVED_FROM_FILES:
        return "checkpoints only"
    return YES if family in SERVED else "-"


def _require_equal_training(model: PreTrainedModel, rounded: PreTrainedModel) -> None:
    (logits, gradients), (wanted, wanted_gradients) = _step(model), _step(rounded)
    assert torch.equal(logits, wanted), "logits differ"
    for name, gradient in gradients.items():
        assert torch.equal(gradient, wanted_gradients[name]), f"gradient of {name} differs"
    assert gradients.keys() == wanted_gradients.keys()


def _step(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(3)
    ids = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(1))
    outputs = model(input_ids=ids, labels=ids, use_cache=False)
    outputs.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return outputs.logits.detach(), gradients


def _require_equal_stream(
    model: PreTrainedModel, packed: QuantPlan, rounded: PreTrainedModel
) -> None:
    streamed = dict(weight_stream(model, packed, Recipe.full()))
    wanted = rounded.state_dict()
    tied = {n for n, _ in rounded.named_parameters(remove_duplicate=False)}
    tied -= {n for n, _ in rounded.named_parameters()}
    assert streamed.keys() == wanted.keys() - tied, "state differs"
    for name, weight in streamed.items():
        unpacked = dequantize(weight) if isinstance(weight, PackedTensor) else weight
        assert torch.equal(unpacked.to(wanted[name].dtype), wanted[name]), f"{name} differs"


def _require_equal_export(model: PreTrainedModel, rounded: PreTrainedModel) -> None:
    with tempfile.TemporaryDirectory() as folder:
        export(model, Recipe.full(), Path(folder) / "packed")
        stored = {
            name: dequantize(weight) if isinstance(weight, PackedTensor) else weight
            for name, weight in read_checkpoint(Path(folder) / "packed")
        }
    loaded, wanted = _loaded(rounded, stored), _loaded(rounded, rounded.state_dict())
    planned = {e.name: getattr(torch, e.dtype) for e in plan(model, Recipe.full()).entries}
    assert planned == {n: t.dtype for n, t in state_tensors(loaded)}, "dtypes differ"
    assert torch.equal(_step(loaded)[0], _step(wanted)[0]), "loaded logits differ"


def _require_exact_conversion(family: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stored, packed = _converted(family, Path(folder))
        for name, weight in packed.items():
            if isinstance(weight, Tensor) and name in stored:  # else stored under another name
                assert weight.dtype == stored[name].dtype, f"{name}: {weight.dtype}"
                assert torch.equal(weight, stored[name]), f"{name} differs"


def _converted(family: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Weight]]:
    """The tensors of a file as families publish them, and what `convert` makes of it."""
    model = tiny_family(family)
    model.save_pretrained(folder / "source")
    names = HubNames(model)
    stored = load_file(folder / "source" / "model.safetensors")
    for entry in plan(model, Recipe.full()).entries:
        for piece in names.pieces[entry.name]:
            tensor = stored.get(piece.name)  # none of a weight stored under another of its names
            if tensor is not None and not entry.quantized and tensor.is_floating_point():
                stored[piece.name] = tensor.float() + 2**-12
    unread = {key: torch.ones(2) for key in _left_out_keys(model)}
    save_file(stored | unread, folder / "source" / "model.safetensors", {"format": "pt"})
    done = convert(folder / "source", folder / "packed", Recipe.full())
    assert done.left_out == tuple(sorted(unread)), f"left out: {done.left_out}"
    return stored, dict(read_checkpoint(folder / "packed"))


def _left_out_keys(model: PreTrainedModel) -> set[str]:
    """A key for each pattern of transformers' lists, and for what it leaves out of all models."""
    keys = {
        pattern: re.sub(r"\(\^\|\\\.\)|\^|\$", "", pattern).replace(".*", ".x").replace("\\.", ".")
        for pattern in model._keys_to_ignore_on_load_unexpected or ()
    }
    assert all(re.search(pattern, key) for pattern, key in keys.items()), keys
    if any(name.endswith("rotary_emb.inv_freq") for name, _ in model.named_buffers()):
        keys["rotary"] = "model.layers.0.self_attn.rotary_emb.inv_freq"
    return set(keys.values())


def _loaded(model: PreTrainedModel, tensors: dict[str, Tensor]) -> PreTrainedModel:
    """By transformers' own loader, which also makes again what is computed, as rotary tables."""
    loaded, found = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=dict(tensors),
        dtype=torch.bfloat16,
        output_loading_info=True,
    )
    assert not any(found.values()), found
    return loaded.train()


def _share(packed: QuantPlan) -> float:
    sizes = {e.name: torch.Size(e.shape).numel() for e in packed.entries if "head" not in e.reason}
    return sum(sizes[name] for name in packed.quantized) / sum(sizes.values())


def _outcome(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as error:
        return _sentence(error)
    return YES


def _sentence(error: Any) -> str:
    """First sentence of a message, fit for a table."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"/tmp/\S+/", "", text).replace("|", "\\|")[:160]


def summary(lines: Collection[str]) -> str:
    """How many lines of the table say what."""
    do_all = sum(f"| {YES} | {YES} | {YES} | {YES} |" in line for line in lines)
    refused = sum("| refused: " in line for line in lines)
    not_built = sum("| not built: " in line for line in lines)
    others = len(lines) - do_all - refused - not_built
    return (
        f"{len(lines)} families: {do_all} train, stream, export and convert, {refused} are "
        f"refused, {not_built} are not built, {others} only in part."
    )


if __name__ == "__main__":
    print(HEADER, end="")
    rows = []
    for name in FAMILIES:
        rows.append(check_family(name))
        print(rows[-1], flush=True)
    print(f"\n{summary([str(row) for row in rows])}\n{DTYPES_HEADER}", end="")
    for each in rows:
        for line in dtype_rows(each.family) if each.trains else []:
            print(line, flush=True)
