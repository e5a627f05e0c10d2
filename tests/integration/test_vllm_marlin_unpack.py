"""Linear layers by Marlin for few rows and unpacked for many; without a GPU, Marlin is F.linear."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel

from qat_core.nvfp4 import dequantize
from qat_core.rollout.vllm.in_place.targets import find_targets
from qat_core.rollout.vllm.marlin import unpacking as marlin_linear
from qat_core.rollout.vllm.marlin.unpacking import UNPACK_FROM, MarlinUnpackKernel
from qat_core.rollout.vllm.tile_layout import unpack_marlin
from tests.marlin_layers import DEVICE, ON_GPU, packed_group, prepare_for_marlin_on_a_cpu
from tests.marlin_layers import marlin_linear as marlin_layer

N, K = 256, 128


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        prepare_for_marlin_on_a_cpu(monkeypatch)
        monkeypatch.setattr(MarlinUnpackKernel, "is_supported", lambda *_: (True, None))


@pytest.fixture
def by_marlin(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows Marlin was asked to multiply, call by call."""
    asked: list[int] = []
    vllms = marlin_linear.apply_fp4_marlin_linear

    def apply(x: Tensor, *held: Tensor, **sizes: int) -> Tensor:
        asked.append(len(x))
        if ON_GPU:
            return vllms(x, *held, **sizes)
        return F.linear(x, unpack_marlin(*held[:3]))

    monkeypatch.setattr(marlin_linear, "apply_fp4_marlin_linear", apply)
    return asked


@pytest.fixture
def layer(by_marlin: list[int]) -> Any:
    made = marlin_layer(packed_group([(N, K)], seed=0))
    made.scheme.kernel = MarlinUnpackKernel(NvFp4LinearLayerConfig())
    return made


def activations(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape, K, device=DEVICE).bfloat16()


@pytest.mark.parametrize("rows", [1, UNPACK_FROM - 1, UNPACK_FROM, 3 * UNPACK_FROM])
def test_products_are_marlins_for_few_rows_and_cublas_for_many(
    layer: Any, by_marlin: list[int], rows: int
) -> None:
    x = activations(rows)
    weight = dequantize(packed_group([(N, K)], seed=0)[0])
    out = layer.scheme.kernel.apply_weights(layer, x)
    assert by_marlin == ([rows] if rows < UNPACK_FROM else [])
    exact = F.linear(x.double(), weight.double())
    # rounding to BF16 alone costs 1.7e-3 in the root mean square
    assert (out.double() - exact).norm() < 3e-3 * exact.norm()
    if rows >= UNPACK_FROM:
        assert torch.equal(out, F.linear(x, weight))


def test_a_sync_in_place_is_that_of_marlin(layer: Any) -> None:
    targets = find_targets([(layer, ["o"])], {})
    (packed,) = packed_group([(N, K)], seed=1)
    targets["o"].take("o", packed)
    x = activations(2, UNPACK_FROM)
    out = layer.scheme.kernel.apply_weights(layer, x)
    assert out.shape == (2, UNPACK_FROM, N)
    assert torch.equal(out.flatten(0, 1), F.linear(x.flatten(0, 1), dequantize(packed)))


@pytest.mark.parametrize("what", ["bias", "padding", "fp16"])
def test_what_cannot_be_unpacked_so_is_left_to_marlin(
    what: str, layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bias = torch.zeros(N, device=DEVICE).bfloat16() if what == "bias" else None
    if what == "padding":
        layer.input_size_per_partition = K - 16
    monkeypatch.setattr(MarlinNvFp4LinearKernel, "apply_weights", lambda *_: "Marlin's")
    x = activations(UNPACK_FROM)
    x = x.half() if what == "fp16" else x
    assert layer.scheme.kernel.apply_weights(layer, x, bias) == "Marlin's"


def test_torch_compile_keeps_the_product_whole(layer: Any) -> None:
    kernel = layer.scheme.kernel
    compiled = torch.compile(
        lambda x: kernel.apply_weights(layer, x), backend="eager", fullgraph=True, dynamic=True
    )
    for rows in (3, UNPACK_FROM):
        x = activations(rows)
        assert torch.equal(compiled(x), kernel.apply_weights(layer, x))
