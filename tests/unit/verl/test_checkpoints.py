"""From which of verl's checkpoints a run resumes after a crash."""

import shutil
from pathlib import Path

import pytest

from experiments.verl.checkpoints import TRACKER, rewind

RANKS = 2


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Whole checkpoints of steps 5, 10 and 15."""
    for step in (5, 10, 15):
        actor = tmp_path / f"global_step_{step}" / "actor"
        actor.mkdir(parents=True)
        for rank in range(RANKS):
            (actor / f"model_world_size_{RANKS}_rank_{rank}.pt").touch()
    (tmp_path / TRACKER).write_text("15")
    return tmp_path


def left(checkpoints: Path) -> tuple[list[int], int | None]:
    """Steps of the checkpoints, and the one that verl resumes from."""
    steps = [int(path.name.rpartition("_")[2]) for path in checkpoints.glob("global_step_*")]
    tracker = checkpoints / TRACKER
    return sorted(steps), int(tracker.read_text()) if tracker.exists() else None


@pytest.mark.parametrize(
    ("last_recorded", "steps", "latest"),
    [(20, [5, 10, 15], 15), (15, [5, 10, 15], 15), (14, [5, 10], 10)],
    ids=["ahead", "equal", "its metrics lost"],
)
def test_goes_on_from_the_last_step_with_metrics(
    checkpoints: Path, last_recorded: int, steps: list[int], latest: int | None
) -> None:
    rewind(checkpoints, last_recorded)
    assert left(checkpoints) == (steps, latest)


@pytest.mark.parametrize(
    ("last_recorded", "what"),
    [(0, "no step of the run is recorded"), (4, "the last recorded step is 4")],
)
def test_complete_checkpoints_are_not_deleted_where_their_steps_are_not_recorded(
    checkpoints: Path, last_recorded: int, what: str
) -> None:
    with pytest.raises(ValueError) as refused:
        rewind(checkpoints, last_recorded)
    assert str(refused.value) == (
        f"{checkpoints / TRACKER}: step 15 was saved, but {what}; restore "
        f"metrics.jsonl of the run's attempts, or delete {checkpoints} to train from the first step"
    )
    assert left(checkpoints) == ([5, 10, 15], 15)


@pytest.mark.parametrize("step", [1, 5])
def test_a_crash_between_saving_and_logging_costs_the_steps_since_the_checkpoint_before(
    checkpoints: Path, step: int
) -> None:
    for later in (10, 15):
        shutil.rmtree(checkpoints / f"global_step_{later}")
    (checkpoints / "global_step_5").rename(checkpoints / f"global_step_{step}")
    (checkpoints / TRACKER).write_text(str(step))
    assert rewind(checkpoints, step - 1) == 0
    assert left(checkpoints) == ([], None)


def test_incomplete_checkpoints_are_dropped_where_nothing_is_recorded(checkpoints: Path) -> None:
    (checkpoints / TRACKER).unlink()
    rewind(checkpoints, 0)
    assert left(checkpoints) == ([], None)


def test_checkpoint_without_all_shards_is_passed_over(checkpoints: Path) -> None:
    (checkpoints / "global_step_15" / "actor" / "model_world_size_2_rank_1.pt").unlink()
    rewind(checkpoints, 20)
    assert left(checkpoints) == ([5, 10], 10)


def test_unfinished_save_is_dropped(checkpoints: Path) -> None:
    (checkpoints / TRACKER).write_text("10")
    rewind(checkpoints, 20)
    assert left(checkpoints) == ([5, 10], 10)


def test_run_without_checkpoints_starts_from_nothing(tmp_path: Path) -> None:
    rewind(tmp_path / "checkpoints", 3)
    assert list(tmp_path.iterdir()) == []


def test_renamed_folders_do_not_count(checkpoints: Path) -> None:
    (checkpoints / "global_step_10").rename(checkpoints / "global_step_10.bak")
    rewind(checkpoints, 14)
    assert (checkpoints / TRACKER).read_text() == "5"
    assert (checkpoints / "global_step_10.bak").exists()


@pytest.mark.parametrize("content", [b"", b"x", b"-1", b"1.5", b"\xff\xfe"])
def test_a_damaged_tracker_is_named(checkpoints: Path, content: bytes) -> None:
    (checkpoints / TRACKER).write_bytes(content)
    with pytest.raises(ValueError) as refused:
        rewind(checkpoints, 15)
    assert str(refused.value).startswith(f"{checkpoints / TRACKER}: ")
    assert len(str(refused.value).splitlines()) == 1
