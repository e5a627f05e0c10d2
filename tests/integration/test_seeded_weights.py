"""Weights that ranks draw for themselves: the same on any number of ranks, with and without QAT."""

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.study.schema import ROOT
from experiments.verl.seeded_weights import draw, draw_weights
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare
from tests.ranks import run_ranks

pytestmark = pytest.mark.long
CONFIG = AutoConfig.from_pretrained(ROOT / "experiments" / "models" / "nano-moe.json")
DTYPES = (torch.bfloat16, torch.float32)
SEED = 7
WORLD = 3  # which shards 8 experts unevenly


def drawn(dtype: torch.dtype, prepared: bool) -> nn.Module:
    """A model whose weights the ranks have drawn, for BF16 rollouts or with QAT."""
    with init_empty_weights():
        model: nn.Module = AutoModelForCausalLM.from_config(copy.copy(CONFIG), dtype=dtype)
    if prepared:
        prepare(model, Recipe.full(), allow_meta=True)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer)
    fully_shard(model)
    draw_weights(model, SEED, CONFIG.initializer_range, torch.device("cpu"))
    return model


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every weight, gathered, in BF16."""
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return {name: value.bfloat16().contiguous() for name, value in state.items()}


def draw_on_rank(rank: int, world: int, folder: str) -> None:
    """Weights and logits of all kinds of model on one rank; those of rank 0 go to a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous{world}", rank=rank, world_size=world
    )
    found = []
    for dtype, prepared in product(DTYPES, (False, True)):
        model = drawn(dtype, prepared)
        logits = model(input_ids=torch.arange(16)[None], use_cache=False).logits.detach()
        found.append({"weights": whole(model), "logits": logits.float()})
    if rank == 0:
        torch.save(found, Path(folder, f"world{world}.pt"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Plain and prepared, in BF16 and FP32."""
    folder = tmp_path_factory.mktemp("seeded")
    run_ranks(draw_on_rank, (WORLD, str(folder)), WORLD)
    return torch.load(folder / f"world{WORLD}.pt")


def test_shards_are_parts_of_what_one_device_draws(models: list[dict[str, Any]]) -> None:
    assert len(models) == 4
    std, device = CONFIG.initializer_range, torch.device("cpu")
    for model in models:
        for name, weight in model["weights"].items():
            expected = draw(name, weight.shape, SEED, std, device)
            assert torch.equal(weight, expected), name


def test_weights_are_those_of_a_new_model(models: list[dict[str, Any]]) -> None:
    weights = models[0]["weights"]
    norms = {name: value for name, value in weights.items() if value.ndim == 1}
    assert norms and all((value == 1).all() for value in norms.values())
    std = CONFIG.initializer_range
    matrices = [value.float() for name, value in weights.items() if name not in norms]
    assert all(abs(value.std() / std - 1) < 0.1 for value in matrices)
    assert len({value.flatten()[0].item() for value in matrices}) > len(matrices) / 2


def test_logits_are_finite_and_of_a_uniform_policy(models: list[dict[str, Any]]) -> None:
    for model in models:
        assert model["logits"].isfinite().all()
        assert model["logits"].std() < 2
