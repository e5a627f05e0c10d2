"""Checkpoints that verl writes of fake-quantized FSDP2 shards, and loads into others."""

import json
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from torch.multiprocessing import spawn

from tests.integration import verl_checkpoint_ranks

pytestmark = pytest.mark.slow
RANKS = 2


@pytest.mark.verl_table(
    "verl's checkpoints on two ranks, as `trainer.resume_mode=auto` loads them",
    "of the same batch, the step after loading equals the one after saving to the bit",
)
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """Output, which the loaded weights' new scales decide, and weights after the next step."""
    spawn(verl_checkpoint_ranks.resume, (RANKS, str(tmp_path)), nprocs=RANKS)
    for rank in range(RANKS):
        same = json.loads((tmp_path / f"same{rank}.json").read_text())
        assert same == {"output": True, "weights": True}
