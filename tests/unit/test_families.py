"""Families of models: heads, routers, attention and fused groups are recognised by their place, not
by names; docs/families.md says what happens with each.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from experiments.study.schema import ROOT
from qat_core.planning.groups import FUSED_SIBLINGS, fused_siblings
from qat_core.planning.plan import plan, unchecked_plan
from qat_core.planning.recipe import Recipe
from qat_core.planning.structure import head_names, router_names
from tests.families import FAMILIES, SERVED, tiny_family
from tests.family_checks import DTYPES_HEADER, HEADER, YES, check_family, dtype_rows, summary

PAGE = ROOT / "docs" / "families.md"
of_the_tables_version = pytest.mark.skipif(
    not transformers.__version__.startswith("5.10."), reason="the table is of transformers 5.10"
)
ASKED_FOR = ("mixtral", "olmoe", "deepseek_v3", "glm4_moe", "deepseek_v2", "qwen3_next")


@pytest.fixture(scope="module")
def documented() -> dict[str, str]:
    """Lines of the table by family."""
    text = PAGE.read_text().partition(DTYPES_HEADER)[0]
    assert text.startswith(HEADER), "make it again: python -m tests.family_checks"
    lines = re.findall(r"^(\| (\S+) .*)$", text.removeprefix(HEADER), re.M)
    return {family: line for line, family in lines}


def documented_dtypes(family: str) -> list[str]:
    """A family's lines of the second table."""
    text = PAGE.read_text().partition(DTYPES_HEADER)[2]
    return [line for line in text.splitlines() if line.startswith(f"| {family} ")]


@of_the_tables_version
def test_every_family_of_transformers_is_in_the_table(documented: dict[str, str]) -> None:
    assert list(documented) == list(FAMILIES)


def test_the_table_ends_with_how_many_families_do_what(documented: dict[str, str]) -> None:
    assert f"|\n\n{summary(documented.values())}\n{DTYPES_HEADER}" in PAGE.read_text()


def test_what_users_ask_for_trains_streams_exports_and_converts(documented: dict[str, str]) -> None:
    for family in ASKED_FOR:
        assert documented[family].count(f" {YES} ") >= 4, documented[family]
    assert all(documented[family].endswith(f" {YES} |") for family in SERVED)


@pytest.mark.long
@of_the_tables_version
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tables_lines_are_what_happens(family: str, documented: dict[str, str]) -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models are too small for more
    try:
        found = check_family(family)
        assert str(found) == documented[family]
        assert documented_dtypes(family) == (dtype_rows(family) if found.trains else [])
    finally:
        torch.set_num_threads(num_threads)


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


@pytest.fixture(scope="module")
def fused_by_vllm() -> dict[tuple[str, ...], str]:
    """What vLLM fuses, and in which file, of all architectures that transformers has too."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs requirements/engines.txt")
    models = Path(next(iter(found.submodule_search_locations))) / "model_executor" / "models"
    files = {models / f"{file}.py" for file in _files_of_architectures(models / "registry.py")}
    return {m: path.name for path in files if path.is_file() for m in _fused_in(path)}


def test_every_set_that_vllm_fuses_is_in_one_of_ours(fused_by_vllm) -> None:
    assert len(fused_by_vllm) > 3
    for members, file in fused_by_vllm.items():
        assert set(members) <= set(fused_siblings(members[0])), (file, members)


def test_every_set_of_ours_is_one_that_vllm_fuses(fused_by_vllm) -> None:
    fused = {frozenset(members) for members in fused_by_vllm}
    assert {frozenset(siblings) for siblings in FUSED_SIBLINGS} <= fused


def test_linear_attention_of_qwen3_5_has_a_scale_for_each_fused_pair() -> None:
    groups = plan(tiny_family("qwen3_5_text"), Recipe.full()).groups
    linear = {name.rpartition(".")[2] for name in groups if "linear_attn" in name}
    assert linear == {"in_proj_qkv+in_proj_z", "in_proj_b+in_proj_a", "out_proj"}


def _files_of_architectures(registry: Path) -> Iterator[str]:
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    for node in ast.walk(ast.parse(registry.read_text())):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                is_entry = isinstance(key, ast.Constant) and isinstance(value, ast.Tuple)
                if is_entry and key.value in known:
                    yield str(ast.literal_eval(value)[0])


def _fused_in(path: Path) -> Iterator[tuple[str, ...]]:
    """Sets of two or more, written as a whole mapping or added to one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Assign):
            continue
        if "packed_modules_mapping" not in ast.unparse(node.targets[0]):
            continue
        try:
            value = ast.literal_eval(node.value)
        except ValueError:  # computed from another class's
            continue
        for members in value.values() if isinstance(value, dict) else [value]:
            if len(members) > 1:
                yield tuple(members)
