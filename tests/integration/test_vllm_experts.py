"""Experts loaded whole into vLLM's layer-wise reload, with layers that act as vLLM 0.24's do."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import reload

from qat_core.nvfp4 import PackedTensor, global_scale, group_amax, quantize
from qat_core.rollout.vllm.experts import loading_experts_whole
from qat_core.rollout.vllm.worker import _loading_experts

LAYERS, EXPERTS, HIDDEN, INNER = 3, 2, 32, 16
SHAPES = {"w13": (EXPERTS, 2 * INNER, HIDDEN), "w2": (EXPERTS, HIDDEN, INNER)}
NAMES = {"w13": "gate_up_proj", "w2": "down_proj"}


class NamedAsHere:
    """The hub's names, where they are the trainer's."""

    @staticmethod
    def experts_at(prefix: str) -> list[str]:
        return [f"{prefix}.{leaf}" for leaf in NAMES.values()]

    @staticmethod
    def expert_prefix(name: str) -> str:
        return name.rpartition(".")[0]


HUB_NAMES = NamedAsHere()


class Method(QuantizeMethodBase):
    """Binds its kernel to new tensors, before the reload has copied them to where they are kept."""

    def create_weights(self, layer: nn.Module, *_: object, **__: object) -> None:
        for matrix, (experts, rows, columns) in SHAPES.items():
            tensors = {
                "weight_packed": torch.zeros(experts, rows, columns // 2, dtype=torch.uint8),
                "weight_scale": torch.zeros(experts, rows, columns // 16).to(torch.float8_e4m3fn),
                "weight_global_scale": torch.zeros(experts, 2 if matrix == "w13" else 1).squeeze(1),
                "input_global_scale": torch.zeros(experts, 2 if matrix == "w13" else 1).squeeze(1),
            }
            for name, tensor in tensors.items():
                parameter = nn.Parameter(tensor, requires_grad=False)
                parameter.weight_loader = None  # type: ignore[attr-defined]
                layer.register_parameter(f"{matrix}_{name}", parameter)

    def apply(self, *_: object, **__: object) -> Tensor:
        raise AssertionError("not called here")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        for matrix in SHAPES:
            scale = getattr(layer, f"{matrix}_weight_scale").data.clone()
            setattr(layer, f"{matrix}_weight_scale", nn.Parameter(scale, requires_grad=False))
        config = self.get_fused_moe_quant_config(layer)
        self.moe_kernel = SimpleNamespace(fused_experts=SimpleNamespace(quant_config=config))

    def get_fused_moe_quant_config(self, layer: nn.Module) -> SimpleNamespace:
        return SimpleNamespace(w13=layer.w13_weight_scale, w2=layer.w2_weight_scale)


@pytest.fixture
def model() -> nn.Module:
    model = nn.Module()
    for index in range(LAYERS):
        layer = nn.Module()
        layer.quant_method = Method()
        parallel = SimpleNamespace(tp_rank=0, tp_size=1, ep_size=1)
        layer.moe_config = SimpleNamespace(moe_parallel_config=parallel)
        layer.quant_method.create_weights(layer)
        model.add_module(f"{index}", nn.ModuleDict({"experts": layer}))
    reload.record_metadata_for_reloading(model)
    for layer in (module["experts"] for module in model.children()):
        layer.quant_method.process_weights_after_loading(layer)
    return model


def _packed_experts() -> Iterator[tuple[str, PackedTensor]]:
    torch.manual_seed(0)
    for index in range(LAYERS):
        for matrix, shape in SHAPES.items():
            weight = torch.randn(shape, dtype=torch.bfloat16)
            (amax,) = group_amax([[weight]])
            yield f"{index}.experts.{NAMES[matrix]}", quantize(weight, global_scale(amax))


def test_kernels_read_the_kept_scales_as_soon_as_a_layer_is_loaded(model: nn.Module) -> None:
    layers = [module["experts"] for module in model.children()]
    kept = [(layer.w13_weight_scale, layer.w2_weight_scale) for layer in layers]
    sent = list(_packed_experts())
    with loading_experts_whole(model, HUB_NAMES) as experts:
        reload.initialize_layerwise_reload(model)
        for index, layer in enumerate(layers):
            assert not list(_loading_experts(sent[2 * index : 2 * index + 2], experts, HUB_NAMES))
            config = layer.quant_method.moe_kernel.fused_experts.quant_config
            assert config.w13 is kept[index][0] and config.w2 is kept[index][1]
            for scale, (_, weight) in zip(kept[index], sent[2 * index :], strict=False):
                assert torch.equal(scale.view(torch.uint8), weight.block_scale.view(torch.uint8))
