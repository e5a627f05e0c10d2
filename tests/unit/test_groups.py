"""Groups that share a scale are those that vLLM's model classes fuse."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qat_core.planning.groups import FUSED_SIBLINGS, fused_siblings
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from tests.families import tiny_family


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
