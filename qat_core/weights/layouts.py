"""How a packed weight is laid out in tensors: the two formats that engines load.

compressed-tensors (`nvfp4-pack-quantized`) keeps the global scale as a divisor, ModelOpt
(`W4A16_NVFP4`) as a multiplier. Codes and block scales are the same bytes in both.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from qat_core.nvfp4 import PackedTensor
from qat_core.options import CheckpointFormat
from qat_core.weights.hub_names import Weight


@dataclass(frozen=True)
class Layout:
    """Names of the three tensors behind a module's name, and what the third holds."""

    codes: str
    block_scale: str
    global_scale: str
    global_shape: tuple[int, ...]
    is_multiplier: bool

    def to_tensors(self, name: str, packed: PackedTensor) -> dict[str, Tensor]:
        """A packed matrix `<module>.weight` as the tensors that a file holds.

        The global scale is copied: fused weights share theirs, which files cannot.

        Raises:
            ValueError: it holds several matrices, as where the hub stores experts whole.
        """
        if packed.codes.ndim != 2:
            raise ValueError(
                f"{name}: the hub has these experts as one tensor, and NVFP4 files have no form "
                "for that: add them to ignore"
            )
        module = name.removesuffix(".weight")
        divisor = packed.global_scale.reshape(self.global_shape)
        scale = divisor.reciprocal() if self.is_multiplier else divisor.clone()
        return {
            f"{module}.{self.codes}": packed.codes,
            f"{module}.{self.block_scale}": packed.block_scale,
            f"{module}.{self.global_scale}": scale,
        }

    def from_tensors(self, codes: Tensor, block_scale: Tensor, scale: Tensor) -> PackedTensor:
        """Inverse of `to_tensors`, exact if the global scale is a power of two or a divisor."""
        divisor = scale.reciprocal() if self.is_multiplier else scale
        return PackedTensor(codes, block_scale, divisor.reshape(()))


LAYOUTS: dict[CheckpointFormat, Layout] = {
    "compressed-tensors": Layout(
        "weight_packed", "weight_scale", "weight_global_scale", (1,), is_multiplier=False
    ),
    "modelopt": Layout("weight", "weight_scale", "weight_scale_2", (), is_multiplier=True),
}


def require_layout(kind: str) -> None:
    """ValueError for a kind of checkpoint that there is not."""
    if kind not in LAYOUTS:
        raise ValueError(f"kind: needs one of {', '.join(LAYOUTS)}, got {kind!r}")


def stored_tensors(
    weights: Iterable[tuple[str, Weight]], layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    """Weights under the hub's names as the tensors of a file, or of a sync to an engine."""
    for name, weight in weights:
        if isinstance(weight, PackedTensor):
            yield from layout.to_tensors(name, weight).items()
        else:
            yield name, weight
