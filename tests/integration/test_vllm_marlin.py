"""Marlin: weights repacked with less are what vLLM makes of them; unpacked for many rows."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel
from vllm.model_executor.layers.quantization.utils import marlin_utils
from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as marlin

from qat_core.nvfp4 import dequantize, global_scale, group_amax, quantize
from qat_core.rollout.vllm.in_place.targets import find_targets
from qat_core.rollout.vllm.marlin import unpacking as marlin_linear
from qat_core.rollout.vllm.marlin.layout import (
    are_padded,
    fit_tiles,
    lean_repacking,
    prepare_experts,
)
from qat_core.rollout.vllm.marlin.unpacking import UNPACK_FROM, MarlinUnpackKernel
from qat_core.rollout.vllm.tile_layout import unpack_marlin
from tests.marlin_layers import DEVICE, ON_GPU, packed_group, prepare_for_marlin_on_a_cpu
from tests.marlin_layers import marlin_linear as marlin_layer

EXPERTS, HIDDEN, INNER = 4, 256, 128


def _packed(rows: int, columns: int) -> tuple[Tensor, ...]:
    """Codes, block scales and multipliers of experts whose sizes differ up to 64 times."""
    torch.manual_seed(0)
    weight = torch.randn(EXPERTS, rows, columns, device=DEVICE)
    weight *= torch.logspace(-3, 3, EXPERTS, base=2, device=DEVICE)[:, None, None]
    (amax,) = group_amax([[weight.bfloat16()]])
    scale = global_scale(amax, "pow2") / 4  # leaves block scales that Marlin's factor widens
    packed = quantize(weight.bfloat16(), scale, "max")
    return packed.codes, packed.block_scale, packed.global_scale.reciprocal()


@pytest.mark.parametrize("largest", [0.0, 2.0**-6, 0.3, 17.0, 224.0, 448.0])
def test_the_factor_of_block_scales_is_vllms(largest: float) -> None:
    scales = largest * torch.rand(64, 16, generator=torch.Generator().manual_seed(0))
    scales[::3] = 0  # blocks of zeros
    scales[1, 1] = largest
    scales = scales.to(torch.float8_e4m3fn).bfloat16()
    expected = marlin._nvfp4_compute_scale_factor(scales, torch.bfloat16)
    with lean_repacking():
        assert marlin._nvfp4_compute_scale_factor(scales, torch.bfloat16) == expected
    power = 0 if largest in (0.0, 448.0) else math.floor(math.log2(448 / largest))
    assert expected == 2.0**power


def _experts(inner: int, hidden: int = HIDDEN) -> dict[str, Any]:
    """Arguments of vLLM's preparation."""
    layer = SimpleNamespace(num_experts=EXPERTS, hidden_size=hidden, params_dtype=torch.bfloat16)
    layer.intermediate_size_per_partition = inner
    arguments = {"layer": layer, "is_act_and_mul": True}
    for matrix, sizes in {"w13": (2 * inner, hidden), "w2": (hidden, inner)}.items():
        names = (matrix, f"{matrix}_scale", f"{matrix}_scale_2")
        arguments |= zip(names, _packed(*sizes), strict=True)
    return arguments


@pytest.mark.skipif(ON_GPU, reason="with a stand-in for a kernel of CUDA")
@pytest.mark.parametrize("hidden", [192, 256])
@pytest.mark.parametrize("inner", [64, 96, 128])
def test_experts_are_padded_where_vllm_pads(hidden: int, inner: int) -> None:
    arguments = _experts(inner, hidden)
    layer = arguments["layer"]
    prepared = marlin.prepare_nvfp4_moe_layer_for_marlin(**arguments)
    layer.w13_weight, _, _, layer.w2_weight, _, _ = prepared
    fit = inner % 64 == 0 and (hidden % 128 == 0 or inner % 128 == 0)
    assert fit_tiles(hidden, inner) == (not are_padded(layer)) == fit


def _linear() -> nn.Module:
    """A linear layer of vLLM as it is before it is prepared for Marlin."""
    layer = nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition = 2 * INNER, HIDDEN
    layer.params_dtype = torch.bfloat16
    names = ("weight", "weight_scale", "weight_global_scale")
    for name, of_experts in zip(names, _packed(2 * INNER, HIDDEN), strict=True):
        layer.register_parameter(name, nn.Parameter(of_experts[0], requires_grad=False))
    return layer


def test_a_linear_layer_is_vllms() -> None:
    mine, vllms = _linear(), _linear()
    marlin.prepare_fp4_layer_for_marlin(vllms)
    with lean_repacking():
        marlin.prepare_fp4_layer_for_marlin(mine)
    for name, expected in vllms.named_parameters():
        found = mine.get_parameter(name)
        assert torch.equal(found.flatten().view(torch.uint8), expected.flatten().view(torch.uint8))


@pytest.mark.parametrize("inner", [INNER, 192])
def test_experts_are_those_of_vllms_loop(inner: int) -> None:
    """On a CPU with vLLM's reference of the repacking kernel."""
    arguments = _experts(inner)
    expected = marlin.prepare_nvfp4_moe_layer_for_marlin(**arguments)
    for mine, vllms in zip(prepare_experts(**arguments), expected, strict=True):
        assert mine.shape == vllms.shape and mine.dtype == vllms.dtype
        assert torch.equal(mine.view(torch.uint8), vllms.view(torch.uint8))
    layer = arguments["layer"]
    shares_locks = hasattr(marlin_utils, "get_marlin_workspace")  # since vLLM 0.30
    assert hasattr(layer, "workspace") != shares_locks
    assert shares_locks or layer.workspace.eq(0).all()


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
