"""Syncs into vLLM that would leave something out are refused: biases, block FP8, lost tensors."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qat_core.rollout.vllm import bucketed_loader
from qat_core.rollout.vllm.landing import Landing
from qat_core.rollout.vllm.served_layers import require_biases


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(2, 6), nn.Linear(2, 2, bias=False)


class Served(nn.Module):
    """As vLLM holds a model: projections fused, a stage of a pipeline missing."""

    def __init__(self) -> None:
        super().__init__()
        self.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        self.attn, self.norm, self.lm_head = Attention(), nn.LayerNorm(2), nn.Identity()


def names(*held: str) -> Any:
    return SimpleNamespace(pieces={name: (SimpleNamespace(name=name),) for name in held})


@pytest.mark.parametrize(
    "held",
    [
        "attn.q_proj.bias",
        "norm.bias",
        "lm_head.bias",  # of another stage
        "mlp.router.bias",  # vLLM has another name for it
        "attn.o_proj.weight",
    ],
)
def test_what_vllm_holds_or_may_hold_elsewhere_passes(held: str) -> None:
    require_biases(Served(), names(held))


def test_a_bias_that_vllm_lacks_is_named() -> None:
    with pytest.raises(ValueError, match=r"^weight sync: attn\.o_proj\.bias: vLLM's Linear has no"):
        require_biases(Served(), names("norm.bias", "attn.o_proj.bias"))


@pytest.mark.parametrize(("stored", "refused"), [(["attn.o_proj.bias"], True), ([], False)])
def test_a_model_that_renames_or_drops_what_is_stored(stored: list[str], refused: bool) -> None:
    model: Any = Served()
    model.hf_to_vllm_mapper = SimpleNamespace(apply_list=lambda _: stored)
    if refused:
        with pytest.raises(ValueError, match="self_attn"):
            require_biases(model, names("self_attn.o_proj.bias"))
    else:
        require_biases(model, names("self_attn.o_proj.bias"))


Weights = Iterable[tuple[str, Tensor]]
Load = Callable[[Tensor], None]


def _one_by_one(weights: Weights, load: Load, dropped: str) -> None:
    for name, weight in weights:
        if name != dropped:
            load(weight.contiguous())


def _all_at_the_end(weights: Weights, load: Load, dropped: str) -> None:
    """In slices, as that of Granite's experts."""
    for name, weight in list(weights):
        if name != dropped:
            load(weight[1:].T)


@pytest.mark.parametrize("dropped", ["", "first", "second", "last"])
@pytest.mark.parametrize("loader", [_one_by_one, _all_at_the_end])
def test_a_tensor_that_a_loader_drops_is_named(
    loader: Callable[[Weights, Load, str], None], dropped: str
) -> None:
    landed = Landing()
    weights = ((name, torch.ones(2, 2).T) for name in ("first", "second", "last"))
    loader(landed.noted(weights), landed.counting(lambda _: None), dropped)
    if not dropped:
        landed.require_all(nn.Linear(1, 1))
        return
    with pytest.raises(ValueError, match=f"^weight sync: {dropped}: sent, but vLLM's Linear puts"):
        landed.require_all(nn.Linear(1, 1))


def worker(scale: str) -> SimpleNamespace:
    """As far as a sync looks at one before it writes: its model, recorded when it was loaded."""
    layerwise = pytest.importorskip(
        "vllm.model_executor.model_loader.reload.layerwise", reason="needs vLLM"
    )
    linear = nn.Linear(4, 4)
    linear.register_parameter(scale, nn.Parameter(torch.ones(1, 1)))
    model = nn.Sequential(linear)
    layerwise.record_metadata_for_reloading(model)
    return SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))


@pytest.mark.verl_table("a base in block FP8, with rollouts in BF16", "refused by the first sync")
@pytest.mark.parametrize("scale", ["weight_scale_inv", "w13_weight_scale_inv"])
def test_a_stream_in_bf16_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, scale: str
) -> None:
    monkeypatch.setattr(bucketed_loader, "worker_names", lambda _: SimpleNamespace(pieces={}))
    monkeypatch.setattr(bucketed_loader, "reloading", None)  # not reached
    with (
        pytest.raises(ValueError, match="comes in BF16, but 0 is served in block FP8: give a base"),
        bucketed_loader.BucketedLoader(worker(scale)) as loader,
    ):
        loader.take([("0.weight", torch.zeros(4, 4))])


def test_an_engine_without_such_scales_is_accepted() -> None:
    bucketed_loader.require_not_block_fp8(worker("bias_of_its_own"))
