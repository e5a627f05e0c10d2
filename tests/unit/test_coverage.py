"""The coverage agrees, or names the weights on which training and engine differ."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from qat_core import export
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare
from qat_core.weights.coverage import coverage


@pytest.fixture
def model(nano_dir: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(nano_dir, dtype=torch.bfloat16)


@pytest.mark.parametrize("recipe", [Recipe.full(), Recipe.ffn()], ids=["full", "ffn"])
@pytest.mark.parametrize("qat", [True, False], ids=["qat", "no-qat"])
def test_agreement_passes_and_lists_every_weight(
    model: nn.Module, recipe: Recipe, qat: bool
) -> None:
    packed = prepare(model, recipe) if qat else plan(model, recipe)
    rows = coverage(model, packed, packed.quantized, qat=qat)
    assert [row["name"] for row in rows] == [name for name, _ in model.named_parameters()]
    assert {row["name"] for row in rows if row["packed"]} == set(packed.quantized)
    assert {row["trained"] for row in rows} == ({True, False} if qat else {None})


def test_a_weight_packed_but_not_trained_so_is_named(model: nn.Module) -> None:
    """What happens to experts elsewhere: only attention is rounded, all is packed."""
    experts_left_out = Recipe.full(ignore=("mlp",))
    prepare(model, experts_left_out)
    packed = plan(model, Recipe.full())
    with pytest.raises(ValueError, match=r"mlp\S+: trained in BF16, sent in NVFP4, served in NVFP"):
        coverage(model, packed, packed.quantized, qat=True)


def test_an_unprepared_model_is_no_qat(model: nn.Module) -> None:
    packed = plan(model, Recipe.full())
    with pytest.raises(ValueError, match=r"q_proj\.weight: trained in BF16.* and \d+ more"):
        coverage(model, packed, packed.quantized, qat=True)


def test_an_engine_of_another_recipe_is_refused(model: nn.Module) -> None:
    packed = prepare(model, Recipe.full())
    served = plan(model, Recipe.ffn()).quantized
    with pytest.raises(ValueError, match=r"q_proj.weight: trained in NVFP4, .* served in BF16"):
        coverage(model, packed, served, qat=True)
    with pytest.raises(ValueError, match="quantizes nowhere, unknown to the trainer"):
        coverage(model, packed, [*served, "nowhere"], qat=True)


def test_export_refuses_another_recipe_than_trained(model: nn.Module, tmp_path: Path) -> None:
    prepare(model, Recipe.ffn())
    with pytest.raises(ValueError, match="trained in BF16, sent in NVFP4"):
        export(model, Recipe.full(), tmp_path / "packed")
    assert not list(tmp_path.iterdir())
