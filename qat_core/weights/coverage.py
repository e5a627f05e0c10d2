"""Coverage: is every weight rounded alike in training, on its way and in the engine?

A weight that is packed for the rollouts but trained in BF16 (or the reverse) makes the two policies
differ without any error. This compares the three places weight by weight and fails closed.
"""

from collections.abc import Collection
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from qat_core.planning.plan import QuantPlan
from qat_core.training.parameter import FakeQuantizedTensor

Row = dict[str, Any]  # ready for JSON


def coverage(
    model: nn.Module, packed: QuantPlan | None, served: Collection[str], *, qat: bool
) -> list[Row]:
    """Of every parameter, whether it is in NVFP4 in a model, on its way and in an engine or file.

    A row has name, trained, packed and served; `trained` is None if training is not to round any.

    Args:
        model: what its parameters are is looked at, not what a recipe says.
        packed: plan of the weight stream; None packs nothing.
        served: parameters, under their names in `model`, that the receiver holds in NVFP4.
        qat: whether training is meant to round; False for post-training quantization.

    Raises:
        ValueError: naming the weights on which the places disagree, or what the receiver alone has.
    """
    parameters = dict(model.named_parameters())
    if unknown := sorted(set(served) - parameters.keys()):
        raise ValueError(f"coverage: the engine quantizes {unknown[0]}, unknown to the trainer")
    quantized = set(packed.quantized) if packed is not None else set()
    rows: list[Row] = [
        {
            "name": name,
            "trained": _is_rounded(parameter) if qat else None,
            "packed": name in quantized,
            "served": name in served,
        }
        for name, parameter in parameters.items()
    ]
    wrong = [
        row for row in rows if len({row["trained"], row["packed"], row["served"]} - {None}) > 1
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError("coverage: " + "; ".join(map(_disagreement, wrong[:3])) + more)
    return rows


def _is_rounded(parameter: nn.Parameter) -> bool:
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return isinstance(local, FakeQuantizedTensor)


def _disagreement(row: Row) -> str:
    precision = {True: "NVFP4", False: "BF16"}
    trained = f"trained in {precision[row['trained']]}, " if row["trained"] is not None else ""
    sent, served = precision[row["packed"]], precision[row["served"]]
    return f"{row['name']}: {trained}sent in {sent}, served in {served}"
