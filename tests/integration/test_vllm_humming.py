"""Humming in place of Marlin: the choice, weights over reloads, and on a GPU the products."""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from vllm.model_executor import parameter
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_nvfp4 as scheme,
)
from vllm.model_executor.model_loader.reload import layerwise

from qat_core.nvfp4 import PackedTensor, dequantize, global_scale, group_amax, quantize
from qat_core.rollout.vllm import plugin
from qat_core.rollout.vllm.humming import library as humming
from qat_core.rollout.vllm.humming import linear as humming_linear
from qat_core.rollout.vllm.humming.linear import UNPACK_FROM, HummingLinearKernel
from qat_core.rollout.vllm.in_place.targets import find_targets
from qat_core.rollout.vllm.kernel_choice import use_for_linear
from qat_core.rollout.vllm.tile_layout import to_layout, unpack
from qat_core.rollout.vllm.worker import reloading
from tests.pinned import OF_PINNED

pytestmark = OF_PINNED

N, K = 256, 128
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def packed_weight(seed: int, n: int = N, k: int = K) -> PackedTensor:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return quantize(weight, global_scale(group_amax([[weight]])[0], "pow2"))


def activations(rows: int) -> Tensor:
    return torch.randn(rows, K, device=DEVICE).bfloat16()


class Method(QuantizeMethodBase):
    """What vLLM calls of a quantized layer, handed to its NVFP4 scheme."""

    def __init__(self) -> None:
        self.scheme = scheme.CompressedTensorsW4A4Fp4(use_a16=True)

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        def load(param: Tensor, loaded_weight: Tensor) -> None:
            param.data.copy_(loaded_weight)

        self.scheme.create_weights(layer, [N], K, torch.bfloat16, load)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.scheme.process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        return self.scheme.apply_weights(layer, x)


VARIABLES = [plugin.LINEAR_VARIABLE, plugin.EXPERTS_VARIABLE]


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A layer whose scheme was told to use Humming; without a GPU its product is F.linear."""
    monkeypatch.setattr(scheme, "init_nvfp4_linear_kernel", scheme.init_nvfp4_linear_kernel)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(HummingLinearKernel, "is_supported", lambda *_: (True, None))
    if not ON_GPU:
        monkeypatch.setattr(
            humming_linear, "multiply", lambda x, *weight, **_: F.linear(x, unpack(*weight[:3]))
        )
    use_for_linear(HummingLinearKernel)
    use_for_linear(HummingLinearKernel)  # by vLLM's plugins once more
    made: Any = nn.Module()
    made.quant_method = method = Method()
    made.input_size_per_partition, made.output_partition_sizes = K, [N]
    made.input_size, made.output_size = K, N
    made.tp_rank, made.tp_size = 0, 1
    with torch.device(DEVICE):
        method.create_weights(made)
        layerwise.record_metadata_for_reloading(made)
    load(made, packed_weight(0))
    method.process_weights_after_loading(made)
    return made


def load(layer: Any, packed: PackedTensor) -> None:
    """As a checkpoint or a sync brings a weight: through the loaders of the parameters."""
    for name, tensor in (
        ("weight_packed", packed.codes),
        ("weight_scale", packed.block_scale),
        ("weight_global_scale", packed.global_scale.reshape(1)),
    ):
        param = getattr(layer, name)
        param.weight_loader(param, tensor)


def addresses(layer: Any) -> list[int]:
    names = ("weight", "weight_scale", "weight_global_scale", "humming_locks")
    return [getattr(layer, name).data_ptr() for name in names]


def held(layer: Any) -> Tensor:
    return unpack(layer.weight, layer.weight_scale, layer.weight_global_scale)


def test_weights_are_the_oracles_at_the_same_addresses_after_each_of_several_syncs(
    layer: nn.Module,
) -> None:
    assert isinstance(layer.quant_method.scheme.kernel, HummingLinearKernel)
    before = addresses(layer)
    for seed in range(5):
        packed = packed_weight(seed)
        layerwise.initialize_layerwise_reload(layer)
        load(layer, packed)
        layerwise.finalize_layerwise_reload(layer, None)
        assert torch.equal(held(layer).cpu(), dequantize(packed))
    assert addresses(layer) == before
    assert not layer.humming_locks.any()


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_compiled_model_with_marlin_is_not_loaded_in_its_place(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm as installed

    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "1")
    monkeypatch.setenv("HUMMING_CACHE_DIR", "set")  # so that it is unset again
    monkeypatch.setenv(variable, "humming")
    monkeypatch.setattr(plugin, "_chosen", {})
    monkeypatch.setattr(installed, "__version__", "0.24.0")
    monkeypatch.setattr(humming, "version", lambda _: humming.VERSION)
    monkeypatch.setattr(humming, "is_hopper", lambda: True)
    assert plugin.asked_for(variable) == "humming"
    assert os.environ["VLLM_USE_AOT_COMPILE"] == "0"


def test_a_sync_in_place_writes_what_a_reload_makes(layer: Any) -> None:
    before = addresses(layer)
    layer.scheme, layer.humming_locks[3] = layer.quant_method.scheme, 1  # left by a sleep
    targets = find_targets([(layer, ["o"])], {})
    targets["o"].take("o", packed_weight(1))
    assert torch.equal(held(layer).cpu(), dequantize(packed_weight(1)))
    assert addresses(layer) == before and not layer.humming_locks.any()


@pytest.mark.parametrize("rows", [1, 33, UNPACK_FROM - 1, UNPACK_FROM])
def test_products_are_near_fp64s_and_cublas_where_unpacked(layer: Any, rows: int) -> None:
    x = activations(rows)
    out = layer.quant_method.apply(layer, x)
    weight = dequantize(packed_weight(0)).to(x.device)
    exact = F.linear(x.double(), weight.double())
    # Rounding to BF16 alone costs 1.7e-3 in the root mean square; Humming's stream-K, which adds
    # parts of sums in BF16, up to 4e-3 (matmul_h100.json). Single weights are tested below.
    assert (out.double() - exact).norm() < 6e-3 * exact.norm()
    if rows >= UNPACK_FROM:
        assert torch.equal(out, F.linear(x, weight))


def test_each_weight_is_multiplied_as_it_is(layer: Any) -> None:
    """By rows that are one at one place: each output is a weight, in BF16 without an error."""
    weight = dequantize(packed_weight(0)).to(layer.weight.device)
    for first in range(0, K, 64):
        rows = torch.eye(K, device=weight.device, dtype=torch.bfloat16)[first : first + 64]
        assert torch.equal(layer.quant_method.apply(layer, rows), weight.T[first : first + 64])


def test_leading_dimensions_and_bias_are_kept(layer: Any) -> None:
    x, bias = activations(6).view(2, 3, K), activations(N)[:, 0]
    kernel = layer.quant_method.scheme.kernel
    out = kernel.apply_weights(layer, x, bias)
    assert out.shape == (2, 3, N)
    assert torch.equal(out, kernel.apply_weights(layer, x) + bias)


def test_torch_compile_keeps_the_product_whole(layer: Any) -> None:
    compiled = torch.compile(
        lambda x: layer.quant_method.apply(layer, x), backend="eager", fullgraph=True
    )
    x = activations(3)
    assert torch.equal(compiled(x), layer.quant_method.apply(layer, x))


def test_activations_in_four_bits_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheme, "init_nvfp4_linear_kernel", lambda use_a16: "vLLM's")
    monkeypatch.setattr(HummingLinearKernel, "is_supported", lambda *_: (True, None))
    use_for_linear(HummingLinearKernel)
    assert scheme.init_nvfp4_linear_kernel(use_a16=False) == "vLLM's"
    assert isinstance(scheme.init_nvfp4_linear_kernel(use_a16=True), HummingLinearKernel)


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize(
    ("vllm", "found", "message"),
    [
        ("0.28.0", humming.VERSION, r"made for vLLM 0\.24, not 0\.28\.0: unset it"),
        ("0.24.0", "0.1.6", r"needs humming-kernels==0\.1\.19, found 0\.1\.6"),
        pytest.param(
            "0.24.0",
            humming.VERSION,
            r"that of Hopper GPUs \(sm_90\); unset it to use Marlin",
            marks=pytest.mark.skipif(ON_GPU, reason="needs a machine without a GPU"),
        ),
    ],
)
def test_what_cannot_run_is_refused_with_a_fix(
    variable: str, vllm: str, found: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm as installed

    monkeypatch.setenv(variable, "humming")
    monkeypatch.setattr(installed, "__version__", vllm)
    monkeypatch.setattr(humming, "version", lambda _: found)
    with pytest.raises(ValueError, match=f"^{variable}.*{message}"):
        plugin.register()


SERVED_BY_PLUGIN = [(plugin.EXACT_VARIABLE, "1", "exact rollouts")]
SERVED_BY_PLUGIN += [(it, "humming", f"{it}=humming") for it in VARIABLES]


@pytest.mark.parametrize(("variable", "value", "asked"), SERVED_BY_PLUGIN)
def test_a_sync_to_a_worker_without_the_plugin_is_refused(
    variable: str, value: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "_is_loaded", False)
    monkeypatch.setenv(variable, value)
    message = f"^{asked}: vLLM's worker has not loaded .* install the package"
    with pytest.raises(ValueError, match=message), reloading(None, None):
        pass


@pytest.mark.gpu
def test_the_layout_is_that_of_hummings_own_transformation() -> None:
    transform = pytest.importorskip("humming.transform", reason="needs humming-kernels")

    packed = packed_weight(0)
    packed = PackedTensor(
        packed.codes.cuda(), packed.block_scale.cuda(), packed.global_scale.cuda()
    )
    _, expected = transform.prepare_and_transform_humming_tensors(
        {
            "weight": packed.codes.contiguous().view(torch.int32),
            "weight_scale": packed.block_scale.contiguous(),
            "weight_scale_2": packed.global_scale.reciprocal().reshape(-1),
        },
        shape_n=N,
        shape_k=K,
        weight_schema=humming.weight_schema(),
        torch_dtype=torch.bfloat16,
    )
    words, scale = to_layout(packed.codes, packed.block_scale)
    assert torch.equal(words, expected["weight"].view_as(words))
    assert torch.equal(scale.view(torch.uint8), expected["weight_scale"].view(torch.uint8))


@pytest.mark.gpu
def test_a_captured_graph_multiplies_with_the_weights_of_the_last_sync(layer: Any) -> None:
    x = activations(32)
    layer.quant_method.apply(layer, x)  # warm up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.quant_method.apply(layer, x)
    for seed in range(1, 101):
        layerwise.initialize_layerwise_reload(layer)
        load(layer, packed_weight(seed))
        layerwise.finalize_layerwise_reload(layer, None)
        graph.replay()
        assert torch.equal(out, layer.quant_method.apply(layer, x))
