"""Coverage: is every weight rounded alike in training, on its way and in the engine?

A weight that is packed for the rollouts but trained in BF16 (or the reverse) makes the two policies
differ without any error. This compares the three places weight by weight and fails closed.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from qat_core.planning.plan import QuantPlan
from qat_core.training.parameter import FakeQuantizedTensor


@dataclass(frozen=True)
class Row:
    """One weight: `trained` is whether training rounds it, None if training is not to round any."""

    name: str
    trained: bool | None
    packed: bool
    served: bool

    @property
    def agrees(self) -> bool:
        """Whether all places treat the weight alike."""
        return len({self.trained, self.packed, self.served} - {None}) == 1


@dataclass(frozen=True)
class Coverage:
    """A row for every parameter of the trained model."""

    rows: tuple[Row, ...]

    def check(self) -> None:
        """ValueError that names the weights on which the places disagree."""
        wrong = [row for row in self.rows if not row.agrees]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ValueError("coverage: " + "; ".join(map(_disagreement, wrong[:3])) + more)

    def as_dicts(self) -> list[dict[str, Any]]:
        """The rows, ready for JSON: a run's manifest holds them."""
        return [asdict(row) for row in self.rows]


def coverage(
    model: nn.Module, packed: QuantPlan | None, served: Collection[str], *, qat: bool
) -> Coverage:
    """Look at a model, at what travels and at what an engine or checkpoint quantizes.

    Args:
        model: what its parameters are is looked at, not what a recipe says.
        packed: plan of the weight stream; None packs nothing.
        served: parameters, under their names in `model`, that the receiver holds in NVFP4.
        qat: whether training is meant to round; False for post-training quantization.
    """
    names = [name for name, _ in model.named_parameters()]
    unknown = sorted(set(served) - set(names))
    if unknown:
        raise ValueError(f"coverage: the engine quantizes {unknown[0]}, unknown to the trainer")
    quantized = set(packed.quantized) if packed is not None else set()
    return Coverage(
        tuple(
            Row(name, _is_rounded(parameter) if qat else None, name in quantized, name in served)
            for name, parameter in model.named_parameters()
        )
    )


def _is_rounded(parameter: nn.Parameter) -> bool:
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return isinstance(local, FakeQuantizedTensor)


def _disagreement(row: Row) -> str:
    precision = {True: "NVFP4", False: "BF16"}
    trained = f"trained in {precision[row.trained]}, " if row.trained is not None else ""
    sent, served = precision[row.packed], precision[row.served]
    return f"{row.name}: {trained}sent in {sent}, served in {served}"
