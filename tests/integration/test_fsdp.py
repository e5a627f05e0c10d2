"""FSDP2 with gloo: sharded steps equal those of one device in every bit.

All ranks see the same batch, and the mean of equal gradients over 2 or 4 ranks is exact, so that
also gradients must be equal.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare
from tests.integration import fsdp_ranks, fsdp_steps
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model

CASES = [f"{family}, reshard {r}" for family in fsdp_steps.FAMILIES for r in (True, False)]
CASES += [
    *(f"{family}, exact" for family in ("qwen3", "qwen3-moe")),
    "qwen3-moe, exact in halves",
    "uneven",
    "offload",
    "fp32",
    "hybrid",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of 4 ranks, and of 2 ranks that also load the checkpoint of the 4, and of 1."""
    path = tmp_path_factory.mktemp("fsdp")
    for world, saved_by in ((4, 0), (2, 4), (1, 2)):
        run_ranks(fsdp_ranks.run, (world, str(path), saved_by), world)
    return path


@pytest.fixture(params=[4, 2, 1], ids=["4-ranks", "2-ranks", "1-rank"])
def results(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    return torch.load(folder / f"world{request.param}.pt", weights_only=False)


@pytest.mark.parametrize("case", CASES)
def test_a_step_equals_that_of_one_device(results: dict[str, Any], case: str) -> None:
    assert results[case] == {
        "same_output": True,
        "grads_that_differ": [],
        "weights_that_differ": [],
    }


EXPECTED: dict[str, Any] = {
    # the third step's refresh comes with the next forward
    "trained": {
        "refreshes": 2,
        "local_types": ["Tensor"],
        "optimizer_types": ["DTensor", "Tensor"],
    },
    "packed": {"bytes_per_weight": 0.5625},  # four and a half bits
    "written": {"read": True, "DTensor": True, "local": True},
    "moved": {"freed": True, "same_output": True},
    "assigned": {"same_output": True, "from_meta": True},
    "two meshes": {"flat first": True, "hybrid first": True},
    "collectives": dict.fromkeys(("to_local", "data", "detach", "state dict"), True),
}


@pytest.mark.parametrize(("case", "expected"), EXPECTED.items(), ids=EXPECTED)
def test_what_ranks_saw(results: dict[str, Any], case: str, expected: dict[str, Any]) -> None:
    found = results[case]
    found.pop("loss_after", None)
    assert found == expected


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("infinity", r"layers\.0\.mlp\.down_proj\.weight: holds NaN or infinity"),
        ("columns", r"layers\.0\.mlp\.experts\.gate_up_proj: has the placements \(Shard\(dim=1"),
        ("split group", r"mlp\.gate_proj\.weight, \S+\.up_proj\.weight: share a global scale but"),
    ],
)
def test_every_rank_refuses(results: dict[str, Any], case: str, message: str) -> None:
    assert [error for error in results[case] if not re.search(message, error)] == []


def test_checkpoints_reshard_from_4_to_2_to_1(folder: Path) -> None:
    saved = {w: torch.load(folder / f"world{w}.pt", weights_only=False) for w in (4, 2, 1)}
    assert torch.equal(saved[2]["resumed"], saved[4]["trained"]["loss_after"])
    assert torch.equal(saved[1]["resumed"], saved[2]["trained"]["loss_after"])


def test_checkpoints_load_without_fsdp(folder: Path) -> None:
    model = tiny_model("qwen3-moe", seed=1).float()
    prepare(model, Recipe())
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder / "checkpoint4", no_dist=True)
    model.load_state_dict(state)
    plain = tiny_model("qwen3-moe").float()
    reference = plain.state_dict()
    dcp.load(reference, checkpoint_id=folder / "checkpoint4", no_dist=True)
    plain.load_state_dict(reference)
    prepare(plain, Recipe())
    assert torch.equal(fsdp_steps.step(model), fsdp_steps.step(plain))
