"""Heads, routers and attention are recognised by their place in the model, not by their names."""

import pytest
import torch
from torch import nn
from transformers import Qwen3ForSequenceClassification, Qwen3ForTokenClassification

from qat_core.planning.plan import plan, unchecked_plan
from qat_core.planning.recipe import Recipe
from qat_core.planning.structure import head_names, router_names
from tests.families import tiny_config, tiny_family

ROUTERS = {
    "deepseek_v2": "model.layers.1.mlp.gate",
    "granitemoe": "model.layers.0.block_sparse_moe.router.layer",
    "granitemoehybrid": "model.layers.0.block_sparse_moe.router.layer",
    "granitemoeshared": "model.layers.0.block_sparse_moe.router.layer",
    "hunyuan_v1_moe": "model.layers.0.mlp.gate.wg",
    "jamba": "model.layers.1.feed_forward.router",
    "llama4_text": "model.layers.1.feed_forward.router",
    "longcat_flash": "model.layers.0.mlp.router.classifier",
    "qwen2_moe": "model.layers.0.mlp.shared_expert_gate",
}


@pytest.mark.parametrize(("family", "router"), ROUTERS.items(), ids=ROUTERS)
def test_routers_stay_in_bf16(family: str, router: str) -> None:
    with torch.device("meta"):
        model = tiny_family(family)
    if not isinstance(dict(model.named_modules()).get(router), nn.Linear):
        pytest.skip("a class of its own, with no linear layer, since a later transformers")
    assert router in router_names(model)
    quantized = plan(model, Recipe.full()).quantized
    assert f"{router}.weight" not in quantized
    mlp = [n for n in quantized if n.endswith("down_proj.weight") or "output_linear" in n]
    assert mlp or family == "granitemoe"  # whose experts stay in BF16 too


def test_routers_inside_jetmoes_attention_stay_in_bf16() -> None:
    with torch.device("meta"):
        routers = router_names(tiny_family("jetmoe"))
    assert {name.removeprefix("model.layers.0.") for name in routers if ".0." in name} == {
        "mlp.router.layer",
        "self_attention.experts.router.layer",
    }


def test_a_list_of_experts_has_a_router() -> None:
    """As in models whose code is not transformers' own."""
    block = nn.Module()
    block.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
    block.choice, block.shared = nn.Linear(32, 4), nn.Sequential(nn.Linear(32, 32), nn.ReLU())
    model = nn.ModuleDict({"block": block})
    assert router_names(model) == {"block.choice"}


@pytest.mark.parametrize(
    "model_class", [Qwen3ForSequenceClassification, Qwen3ForTokenClassification]
)
def test_heads_of_classifiers_stay_in_bf16(model_class: type) -> None:
    config = tiny_config("qwen3")
    config.num_labels = 16
    with torch.device("meta"):
        model = model_class(config)
    assert head_names(model) == {"score"}
    assert "score.weight" not in plan(model, Recipe.full()).quantized


@pytest.mark.parametrize("family", ["gpt_neox", "bloom", "falcon", "llama", "llama4_text", "phi"])
def test_output_heads_stay_in_bf16(family: str) -> None:
    with torch.device("meta"):
        model = tiny_family(family)
    head = model.get_output_embeddings().weight
    quantized = plan(model, Recipe.full()).quantized
    assert not any(model.get_parameter(name) is head for name in quantized)
    assert head_names(model) <= {"lm_head", "embed_out"}


ATTENTION = {
    "falcon": "self_attention.",
    "bloom": "self_attention.",
    "gpt_neox": ".attention.",
    "qwen3_next": "linear_attn.",
    "lfm2": ".conv.",
    "jamba": ".mamba.",
    "llama": "self_attn.",
}


@pytest.mark.parametrize(("family", "part"), ATTENTION.items(), ids=ATTENTION)
def test_ffn_recipe_quantizes_no_attention(family: str, part: str) -> None:
    with torch.device("meta"):
        model = tiny_family(family)
    whole, ffn = (plan(model, r).quantized for r in (Recipe.full(), Recipe.ffn()))
    assert [name for name in whole if part in name]
    assert ffn and not [name for name in ffn if part in name]
    assert {name for name in whole if "mlp." in name or "feed_forward." in name} <= set(ffn)


def test_experts_below_an_attention_layers_class_are_no_attention() -> None:
    with torch.device("meta"):
        model = tiny_family("jamba")
    assert type(model.model.layers[1]).__name__ == "JambaAttentionDecoderLayer"
    quantized = plan(model, Recipe.ffn()).quantized
    assert "model.layers.1.feed_forward.experts.down_proj" in quantized


def test_buffers_and_fp32_tensors_have_entries_of_their_dtype() -> None:
    with torch.device("meta"):
        models = [tiny_family("deepseek_v3"), tiny_family("deepseek_v3").float()]
    for model in models:
        entries = {entry.name: entry for entry in unchecked_plan(model, Recipe()).entries}
        bias = entries["model.layers.1.mlp.gate.e_score_correction_bias"]
        assert (bias.dtype, bias.reason, bias.quantized) == ("float32", "buffer", False)
        assert entries["model.norm.weight"].dtype == "bfloat16"
