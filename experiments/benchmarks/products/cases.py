"""One layer and one number of tokens: the calls of every arm, their errors and equal bits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.benchmarks.products.dense import ARMS as DENSE_ARMS
from experiments.benchmarks.products.experts import ARMS as EXPERT_ARMS
from experiments.benchmarks.products.experts import Routing, in_token_order, random_routing
from experiments.benchmarks.products.layers import BYTES_PER_WEIGHT, Layer, random_weight
from qat_core.nvfp4 import PackedTensor
from qat_core.options import ScalePolicy

COLD_BYTES = 160e6  # more than three times the L2 cache of an H100 or H200
ROWS_CHECKED = 64
REPEATS = 20

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Weights:
    """A layer's weight, and every arm's copies of it."""

    layer: Layer
    packed: PackedTensor
    weight: Tensor
    products: dict[str, list[Any]]


def prepare(
    layer: Layer,
    arms: Sequence[str],
    tokens: Sequence[int],
    device: str,
    scale: ScalePolicy = "pow2",
    *,
    cold: bool = True,
) -> Weights:
    """Lay a random weight out for each arm.

    Args:
        layer: the product.
        arms: names of ways to multiply.
        tokens: all numbers of tokens that will be asked for.
        device: "cuda", or "cpu" for a rehearsal.
        scale: the global scale's policy.
        cold: make so many copies of a dense weight that one does not wait in the L2 cache.
    """
    packed, weight = random_weight(layer, device, scale)
    products: dict[str, list[Any]] = {}
    for arm in arms:
        try:
            products[arm] = _products(layer, arm, packed, weight, tokens, cold)
        except Exception as error:  # reported when it is asked for an output
            products[arm] = [partial(_refuse, error)]
    return Weights(layer, packed, weight, products)


def _products(
    layer: Layer,
    arm: str,
    packed: PackedTensor,
    weight: Tensor,
    tokens: Sequence[int],
    cold: bool,
) -> list[Any]:
    if layer.experts:
        rows = [layer.experts_per_token * count for count in tokens]
        return [EXPERT_ARMS[arm](layer, packed, weight, rows)]
    kind = "bf16" if arm in ("bf16", "triton persistent") else "nvfp4"
    nbytes = layer.n * layer.k * BYTES_PER_WEIGHT[kind]
    copies = 1 + int(COLD_BYTES / nbytes) if cold else 1
    build = DENSE_ARMS[arm]
    return [build(_copy(packed), weight.clone(), tokens) for _ in range(copies)]


def _refuse(error: Exception, *_: Any) -> Tensor:
    raise error


@dataclass(frozen=True)
class Case:
    """Inputs of one number of tokens; experts get several routings, one a call."""

    weights: Weights
    tokens: int
    x: Tensor
    routings: list[Routing]

    @property
    def experts_hit(self) -> float:
        """How many different experts a batch visits; 0 for a dense layer."""
        hits = [routing.experts_hit for routing in self.routings]
        return sum(hits) / max(len(hits), 1)

    def calls(self, arm: str) -> list[Call]:
        """What to time: each call reads other weights than the one before, of experts most."""
        products = self.weights.products[arm]
        if self.routings:
            return [partial(products[0], self.x, routing) for routing in self.routings]
        return [partial(product, self.x) for product in products]

    def outputs(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Results of the arms that take this case, and what the others said."""
        outputs, refusals = {}, {}
        for arm in self.weights.products:
            try:
                outputs[arm] = self.output(arm)
            except Exception as error:  # a kernel that refuses a shape is a result too
                refusals[arm] = f"{type(error).__name__}: {error}"
        return outputs, refusals

    def output(self, arm: str) -> Tensor:
        """The first call's result, BF16 (rows, n), rows in the order of tokens."""
        out = self.calls(arm)[0]()
        return in_token_order(arm, out, self.routings[0]) if self.routings else out

    def reference(self) -> tuple[Tensor, Tensor]:
        """Some rows' indices, and these rows in FP64 from the values that `packed` stands for."""
        layer, weights = self.weights.layer, self.weights
        count = self.tokens * layer.experts_per_token
        rows = torch.linspace(0, count - 1, min(count, ROWS_CHECKED)).long().to(self.x.device)
        if not self.routings:
            return rows, F.linear(self.x[rows].double(), weights.weight.double())
        routing = self.routings[0]
        x = self.x[rows // routing.pairs_per_row].double()
        experts = routing.experts.flatten()[rows].long()
        pairs = zip(x, experts.tolist(), strict=True)
        return rows, torch.stack([weights.weight[expert].double() @ row for row, expert in pairs])


def case(weights: Weights, tokens: int, copies: int = 1) -> Case:
    """Random inputs; `copies` batches are routed for experts."""
    layer, device = weights.layer, weights.weight.device
    rows = tokens * layer.rows_per_token
    x = torch.randn(rows, layer.k, device=device, dtype=torch.bfloat16)
    routings = random_routing(layer, tokens, str(device), copies) if layer.experts else []
    return Case(weights, tokens, x, routings)


def relative_error(out: Tensor, rows: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference|| over the rows; NaN where out holds one."""
    return float((out[rows].double() - reference).norm() / reference.norm())


def different(out: Tensor, other: Tensor) -> int:
    """How many elements have other bits."""
    return int((out.view(torch.int16) != other.view(torch.int16)).sum())


def differing_repeats(call: Call, out: Tensor) -> int:
    """How many of REPEATS further calls give other bits than `out`."""
    return sum(different(call(), out) > 0 for _ in range(REPEATS))


def _copy(packed: PackedTensor) -> PackedTensor:
    return replace(packed, codes=packed.codes.clone(), block_scale=packed.block_scale.clone())
