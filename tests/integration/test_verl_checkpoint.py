"""Checkpoints that verl writes of fake-quantized FSDP2 shards, and loads into others."""

import json
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from tests.integration import verl_checkpoint_ranks
from tests.ranks import run_ranks

pytestmark = pytest.mark.long
RANKS = 2


@pytest.mark.verl_table(
    "verl's checkpoints on two ranks, as `trainer.resume_mode=auto` loads them",
    "of the same batch, the step after loading equals the one after saving to the bit",
)
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """Output, which the loaded weights' new scales decide, and weights after the next step."""
    run_ranks(verl_checkpoint_ranks.resume, (RANKS, str(tmp_path)), RANKS)
    for rank in range(RANKS):
        same = json.loads((tmp_path / f"same{rank}.json").read_text())
        assert same == {"output": True, "weights": True}
