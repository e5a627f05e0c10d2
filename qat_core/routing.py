"""Which experts tokens went to: captured in one forward pass, replayed in another.

A router takes the `torch.topk` of one score an expert and makes weights of the chosen scores:
softmax before or after, normalized or not, with a bias or by groups, each family in its own way.
Only that one call is replaced here: it then gives the experts of another pass, with the scores of
this one. All else, the way of the gradient to the router included, is the model's own code.

Routing replay (R3): arXiv 2510.11370.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qat_core.planning.structure import expert_blocks

NO_ROUTE = -1  # a token of which no choice is known: it is routed by the model itself

Routes = Mapping[str, Tensor]  # ids (tokens, k), by the name of a block of experts
Choice = tuple[Tensor, Tensor]  # the scores (tokens, k) and the ids (tokens, k)
# from a block's name, its scores (tokens, E) and its own choice of them to the choice that counts
Choose = Callable[[str, Tensor, Choice], Choice]


class Capture:
    """The choices of all forward passes of a decoding, which bring some positions each."""

    def __init__(self, names: Iterable[str]) -> None:
        # of each block its choice in each pass, (sequences times positions, k)
        self.parts: dict[str, list[Tensor]] = {name: [] for name in names}

    def routes(self, num_sequences: int) -> Tensor:
        """Ids of all positions so far, int16 (B, L, layers with experts, k)."""
        layers = [
            torch.cat([ids.view(num_sequences, -1, ids.shape[-1]) for ids in parts], dim=1)
            for parts in self.parts.values()
        ]
        return torch.stack(layers, dim=2).to(torch.int16)


@contextmanager
def capture(model: nn.Module) -> Iterator[Capture]:
    """Inside, notes which experts the model's tokens go to.

    Of a replay that starts inside, it sees the replayed experts; inside of a replay that runs
    already, those that the model would have chosen.

    Raises:
        ValueError: the model has no experts, or chooses them in a way that is not known.
    """
    blocks = _require_blocks(model)
    found = Capture(blocks)

    def note(name: str, _scores: Tensor, own: Choice) -> Choice:
        found.parts[name].append(own[1])
        return own

    with _choosing(model, blocks, note):
        yield found


@contextmanager
def replay(model: nn.Module, routes: Routes) -> Iterator[None]:
    """Inside, the model's tokens go to the given experts, weighed by the model's own scores.

    A backward pass that computes blocks again (gradient checkpointing) has to be inside too.

    Args:
        model: of any family that `expert_blocks` knows.
        routes: integer ids (tokens, k) of each block, a token's all different, in the order of the
            tokens that come; rows of `NO_ROUTE` leave the choice to the model.

    Raises:
        ValueError: the model has no experts or chooses them in a way that is not known; a block has
            no routes; they are of other experts, another k or another number of tokens.
    """
    blocks = _require_blocks(model)
    if routes.keys() != blocks.keys():
        differing = sorted(routes.keys() ^ blocks.keys())
        raise ValueError(f"routing replay: blocks without routes, or unknown: {differing[:3]}")
    for name, ids in routes.items():
        _require_valid(name, ids, blocks[name])
    with _choosing(model, blocks, partial(_replayed, routes)):
        yield


def by_block(model: nn.Module, routes: Tensor) -> Routes:
    """Routes (..., layers with experts, k) as `Capture.routes` stacks them, for `replay`."""
    names = list(expert_blocks(model))
    if routes.shape[-2] != len(names):
        raise ValueError(f"routing replay: routes of {routes.shape[-2]} layers for {len(names)}")
    layers = routes.flatten(0, -3).unbind(-2)
    return dict(zip(names, layers, strict=True))


def decoder_layers(model: nn.Module) -> list[int]:
    """The decoder layer of each block of experts, counted from 0, dense layers included.

    Read off the blocks' names: gradient checkpointing calls blocks again in another order.
    """
    layers = []
    for name in expert_blocks(model):
        number = re.search(r"\.(\d+)\.", f".{name}.")
        assert number is not None, f"{name}: in no layer"
        layers.append(int(number[1]))
    return layers


def _require_blocks(model: nn.Module) -> dict[str, int]:
    blocks = expert_blocks(model)
    if not blocks:
        raise ValueError("routing replay: the model has no experts; turn it off for dense models")
    return blocks


def _require_valid(name: str, ids: Tensor, num_experts: int) -> None:
    """Each row either all `NO_ROUTE`, or different experts of the block."""
    if not ids.numel():
        raise ValueError(f"routing replay: {name}: no routes")
    ordered = ids.sort(-1).values.long()
    known = (ordered[:, 0] >= 0) & (ordered[:, -1] < num_experts)
    different = (ordered.diff(dim=-1) > 0).all(-1)
    missing = (ids == NO_ROUTE).all(-1)
    if not bool((missing | (known & different)).all()):
        raise ValueError(
            f"routing replay: {name}: routes are not different experts out of {num_experts}"
        )


def _replayed(routes: Routes, name: str, scores: Tensor, own: Choice) -> Choice:
    ids = routes[name].long().to(scores.device)
    if own[1].shape != ids.shape:
        raise ValueError(
            f"routing replay: {name}: routes (tokens, k) are {tuple(ids.shape)}, "
            f"the model's are {tuple(own[1].shape)}"
        )
    ids = ids.where(ids >= 0, own[1])
    return scores.gather(-1, ids), ids


@contextmanager
def _choosing(model: nn.Module, blocks: Mapping[str, int], choose: Choose) -> Iterator[None]:
    with ExitStack() as patches:
        for name, num_experts in blocks.items():
            block = model.get_submodule(name)
            forward = partial(_forward, block.forward, name, num_experts, partial(choose, name))
            patches.enter_context(patch.object(block, "forward", forward))
        yield


def _forward(
    original: Callable[..., Any],
    name: str,
    num_experts: int,
    choose: Callable[[Tensor, Choice], Choice],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A block's forward pass under another choice; the mode is on inside the block alone."""
    with _ChoiceMode(num_experts, choose) as mode:
        output = original(*args, **kwargs)
    if mode.count != 1:
        raise ValueError(
            f"routing replay: {name}: its router is of an unknown kind ({mode.count} calls of topk "
            f"over {num_experts} scores, not 1); turn it off for this model"
        )
    return output


class _ChoiceMode(TorchFunctionMode):
    """Replaces the choice among as many scores as there are experts."""

    def __init__(self, num_experts: int, choose: Callable[[Tensor, Choice], Choice]) -> None:
        super().__init__()
        self.num_experts, self.choose, self.count = num_experts, choose, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.ndim != 2 or scores.shape[-1] != self.num_experts:
            return result  # the choice of groups that a choice of experts may start with
        self.count += 1
        return torch.return_types.topk(self.choose(scores, tuple(result)))
