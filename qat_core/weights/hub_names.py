"""Names of weights on the hub: one matrix an expert, where transformers 5 holds fused experts.

`mlp.experts.gate_up_proj` (E, 2 I, H) is `mlp.experts.{e}.gate_proj.weight` (I, H) and
`up_proj.weight` (I, H); `mlp.experts.down_proj` (E, H, I) is `mlp.experts.{e}.down_proj.weight`.
"""

import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from qat_core.nvfp4 import PackedTensor
from qat_core.options import BLOCK_SIZE
from qat_core.plan import QuantPlan

Weight = Tensor | PackedTensor

FUSED_LEAVES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# Model types whose experts are named as above; transformers renames those of other types its way.
EXPERT_MODEL_TYPES = ("qwen2_moe", "qwen3_moe")


def refuse_renamed(model: nn.Module) -> None:
    """ValueError if the hub's names of this model are neither transformers' nor the above."""
    model_type: str = model.config.model_type  # type: ignore[assignment,union-attr]
    renamed = get_checkpoint_conversion_mapping(model_type) is not None
    if renamed and model_type not in EXPERT_MODEL_TYPES:
        raise ValueError(
            f"model_type {model_type}: its weights are named differently on the hub, which is "
            f"known here for {', '.join(EXPERT_MODEL_TYPES)} and dense models only"
        )


def split_experts(weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
    """The same weights under the hub's names, fused experts cut into matrices (views)."""
    for name, weight in weights:
        if len(weight.shape) != 3:
            yield name, weight
            continue
        prefix, _, fused_leaf = name.rpartition(".")
        leaves = FUSED_LEAVES[fused_leaf]
        num_rows = weight.shape[1] // len(leaves)
        for expert in range(weight.shape[0]):
            for index, leaf in enumerate(leaves):
                rows = slice(index * num_rows, (index + 1) * num_rows)
                yield f"{prefix}.{expert}.{leaf}.weight", _matrix(weight, expert, rows)


def read_fused(name: str, shape: tuple[int, ...], read: Callable[[str], Tensor]) -> Tensor:
    """The parameter `name` of transformers, put together from matrices of the hub."""
    if len(shape) != 3:
        return read(name)
    prefix, _, fused_leaf = name.rpartition(".")
    leaves = FUSED_LEAVES[fused_leaf]
    fused = torch.empty(shape, dtype=read(f"{prefix}.0.{leaves[0]}.weight").dtype)
    for expert, matrix in enumerate(fused):
        for leaf, rows in zip(leaves, matrix.chunk(len(leaves)), strict=True):
            rows.copy_(read(f"{prefix}.{expert}.{leaf}.weight"))
    return fused


def fused_module(module_name: str) -> str:
    """Where transformers holds a module of the hub: experts in a fused parameter, others as is."""
    found = re.fullmatch(r"(.*\.experts)\.\d+\.(gate|up|down)_proj", module_name)
    if not found:
        return module_name
    leaf = "down_proj" if found[2] == "down" else "gate_up_proj"
    return f"{found[1]}.{leaf}"


def meta_weights(plan: QuantPlan) -> Iterator[tuple[str, Weight]]:
    """What a plan's weights look like when they travel: shapes and dtypes, on the meta device."""
    for entry in plan.entries:
        weight = torch.empty(entry.shape, dtype=torch.bfloat16, device="meta")
        yield entry.name, _meta_packed(weight) if entry.quantized else weight


def _meta_packed(weight: Tensor) -> PackedTensor:
    *lead, num_rows, num_columns = weight.shape
    return PackedTensor(
        weight.new_empty((*lead, num_rows, num_columns // 2), dtype=torch.uint8),
        weight.new_empty((*lead, num_rows, num_columns // BLOCK_SIZE), dtype=torch.float8_e4m3fn),
        weight.new_empty(lead, dtype=torch.float32),
    )


def _matrix(weight: Weight, expert: int, rows: slice) -> Weight:
    if isinstance(weight, PackedTensor):
        return PackedTensor(
            weight.codes[expert, rows],
            weight.block_scale[expert, rows],
            weight.global_scale[expert],
        )
    return weight[expert, rows]
