"""Names of weights on the hub: what transformers 5 holds fused, files hold a matrix an expert.

`mlp.experts.gate_up_proj` (E, 2 I, H) of a Qwen3-MoE is `mlp.experts.{e}.gate_proj.weight` (I, H)
and `up_proj.weight` (I, H) in files, Mixtral's is `block_sparse_moe.experts.{e}.w1.weight` and
`w3.weight`. transformers itself is asked: of tensors full of numbers, what `save_pretrained` would
write tells the name and the place of every piece.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from qat_core.nvfp4 import PackedTensor
from qat_core.options import BLOCK_SIZE
from qat_core.planning.plan import QuantPlan

Weight = Tensor | PackedTensor

ROWS, COLUMNS = 12, 2  # of a numbered matrix; can be cut into 2, 3, 4 or 6 parts
STRIDE = 2**40  # the numbers of the i-th tensor start at i * STRIDE


@dataclass(frozen=True)
class Piece:
    """A tensor of a file: a whole tensor of the trainer's, or some rows of one of its experts."""

    name: str
    expert: int | None = None
    part: int = 0
    num_parts: int = 1

    def rows(self, num_rows: int) -> slice:
        """Which ones of the expert's `num_rows` rows."""
        share = num_rows // self.num_parts
        return slice(self.part * share, (self.part + 1) * share)


class HubNames:
    """Where the tensors of a model stand in the hub's files.

    Args:
        model: of transformers; on any device, prepared, sharded or neither.

    Attributes:
        pieces: of every tensor of the model's state, by the trainer's name.
        tied: the hub's second names of tied weights, each with the first.

    Raises:
        ValueError: the model is not of transformers; or transformers stores one of its tensors
            neither whole nor as matrices of its experts.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, PreTrainedModel):
            raise ValueError(
                f"{type(model).__name__}: not a model of transformers, so the hub's names of its "
                "weights are not known; pass the model that it wraps, or a merged one"
            )
        shapes = {name: tensor.shape for name, tensor in model.state_dict(keep_vars=True).items()}
        self.pieces = _pieces(shapes, lambda numbered: _as_saved(model, numbered))
        firsts: dict[int, str] = {}
        named = model.named_parameters(remove_duplicate=False)
        tied = [(n, first) for n, p in named if (first := firsts.setdefault(id(p), n)) != n]
        self.tied = {self.renamed(name): self.renamed(first) for name, first in tied}
        self._embeddings = {
            f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Embedding)
        }
        self._owners = {piece.name: name for name, some in self.pieces.items() for piece in some}

    def split(self, weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """The same weights under the hub's names, fused experts cut into matrices (views).

        What the model does not have passes through, for the caller to refuse by name.
        """
        for name, weight in weights:
            for piece in self.pieces.get(name, (Piece(name),)):
                yield piece.name, _cut(weight, piece)

    def join(self, name: str, shape: tuple[int, ...], read: Callable[[str], Tensor]) -> Tensor:
        """The trainer's tensor of that name and shape, put together from tensors of the hub."""
        first, *others = self.pieces[name]
        if first.expert is None:
            return read(first.name)
        matrix = read(first.name)
        fused = torch.empty(shape, dtype=matrix.dtype)
        fused[first.expert, first.rows(shape[1])] = matrix
        for piece in others:
            fused[piece.expert, piece.rows(shape[1])] = read(piece.name)
        return fused

    def refuse_own_values(self, weights: Iterable[str], source: str) -> None:
        """ValueError naming one of the trainer's weights that this model has tied to another."""
        own = {self.renamed(name) for name in weights}
        for second, first in self.tied.items():
            if second in own and first in own:
                raise _own_values(second, first, source)

    def is_embedding(self, name: str) -> bool:
        """Whether a trainer's tensor is an embedding, which no format quantizes."""
        return name in self._embeddings

    def renamed(self, name: str) -> str:
        """The hub's name of a tensor that is stored whole; of one that is not known, its own."""
        return self.pieces[name][0].name if name in self.pieces else name

    def expert_prefix(self, name: str) -> str | None:
        """Where files have the experts of a trainer's tensor, `...experts`; None if it has none."""
        first = self.pieces[name][0] if name in self.pieces else None
        if first is None or first.expert is None:
            return None
        return f"{first.name.partition('.experts.')[0]}.experts"

    def experts_at(self, prefix: str) -> list[str]:
        """The trainer's tensors that hold the experts below a prefix of the hub."""
        return [name for name in self.pieces if self.expert_prefix(name) == prefix]

    def owner(self, name: str) -> str | None:
        """The trainer's tensor that a tensor of the hub is a piece of; None if there is none."""
        return self._owners.get(name)


def require_copy(copy: Tensor, original: Tensor, name: str, first: str, source: str) -> None:
    """ValueError if a tensor has other values than the one that config.json ties it to."""
    if copy.shape == original.shape:
        differs = (copy != original) & ~(copy.isnan() & original.isnan())
        if not bool(differs.any()):
            return
    raise _own_values(name, first, source)


def _own_values(name: str, first: str, source: str) -> ValueError:
    return ValueError(
        f"{source}: {name}: has values of its own, but config.json ties it to {first} "
        "(tie_word_embeddings), so that engines would not read it: set tie_word_embeddings: false "
        "there, or train with both tied"
    )


def meta_weights(plan: QuantPlan) -> Iterator[tuple[str, Weight]]:
    """What a plan's weights look like when they travel: shapes and dtypes, on the meta device."""
    for entry in plan.entries:
        weight = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
        yield entry.name, _meta_packed(weight) if entry.quantized else weight


def _as_saved(model: PreTrainedModel, tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """What `save_pretrained` would write for these tensors in place of the model's own.

    A prefix that only wrapped checkpoints have (Qwen3.5's `language_model`) is not added, however
    the model was loaded: the file then fits the architecture that its config.json names.
    """
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    kept = [c for c in conversions if type(c).__name__ != "PrefixChange"]
    # of the model itself: a sharded one cannot be copied
    with patch.object(model, "_weight_conversions", kept, create=True):
        saved: Mapping[str, Tensor] = revert_weight_conversion(model, tensors)
    return saved


def _pieces(
    shapes: Mapping[str, torch.Size], saved: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
) -> dict[str, tuple[Piece, ...]]:
    names = list(shapes)
    numbered = {name: _numbered(index, shapes[name]) for index, name in enumerate(names)}
    found = defaultdict(list)
    try:
        for hub_name, tensor in saved(numbered).items():
            owner = names[int(tensor.flatten()[0]) // STRIDE]
            found[owner].append(_piece(hub_name, tensor, numbered[owner]))
    except (ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"the hub's names of this model's weights: {error}") from error
    for name in names:
        whole, part = numbered[name].numel(), ROWS * COLUMNS
        held = sum(whole if p.expert is None else part // p.num_parts for p in found[name])
        if held != whole:
            raise ValueError(f"{name}: stored by transformers in a form that is not known here")
    return {name: tuple(found[name]) for name in names}


def _numbered(index: int, shape: torch.Size) -> Tensor:
    """Distinct numbers in place of a tensor; as many experts, but few rows and columns."""
    leading = shape[:1] if len(shape) == 3 else ()
    numbers = torch.arange(torch.Size((*leading, ROWS, COLUMNS)).numel())
    return (index * STRIDE + numbers).view(*leading, ROWS, COLUMNS)


def _piece(hub_name: str, tensor: Tensor, whole: Tensor) -> Piece:
    if torch.equal(tensor, whole):
        return Piece(hub_name)
    if whole.ndim == 3 and tensor.ndim == 2 and tensor.shape[1] == COLUMNS:
        first = int(tensor[0, 0]) % STRIDE // COLUMNS
        expert, row = divmod(first, ROWS)
        piece = Piece(hub_name, expert, row // len(tensor), ROWS // len(tensor))
        if torch.equal(tensor, whole[expert, piece.rows(ROWS)]):
            return piece
    raise ValueError(f"{hub_name}: neither a whole tensor of the model nor rows of one expert")


def _meta_packed(weight: Tensor) -> PackedTensor:
    *lead, num_rows, num_columns = weight.shape
    return PackedTensor(
        weight.new_empty((*lead, num_rows, num_columns // 2), dtype=torch.uint8),
        weight.new_empty((*lead, num_rows, num_columns // BLOCK_SIZE), dtype=torch.float8_e4m3fn),
        weight.new_empty(lead, dtype=torch.float32),
    )


def _cut(weight: Weight, piece: Piece) -> Weight:
    if piece.expert is None:
        return weight
    rows = piece.rows(weight.shape[1])
    if isinstance(weight, PackedTensor):
        return PackedTensor(
            weight.codes[piece.expert, rows],
            weight.block_scale[piece.expert, rows],
            weight.global_scale[piece.expert],
        )
    return weight[piece.expert, rows]
