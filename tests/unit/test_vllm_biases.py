"""Biases for which vLLM has no place are refused; all others pass."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

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
