"""verl's checkpoints of a run, in step with what has been recorded of it."""

import re
import shutil
from pathlib import Path

# holds a step's number once its checkpoint is complete
TRACKER = "latest_checkpointed_iteration.txt"
STEP = re.compile(r"global_step_(\d+)")


def rewind(folder: Path, last_recorded_step: int) -> int:
    """Makes verl resume from its newest complete checkpoint of a recorded step, or from the start.

    Returns that step, 0 for the start. A crash can leave two others, which verl would take. It
    saves a step before it logs it: resumed from there, the step would never have metrics. And it
    may remove an old checkpoint before the new one is complete.
    """
    steps = steps_on_disk(folder)
    tracker = folder / TRACKER
    last_saved = tracked_step(folder)
    complete = [
        step for step, path in steps.items() if 0 < step <= last_saved and _is_complete(path)
    ]
    latest = max((step for step in complete if step <= last_recorded_step), default=0)
    if not latest and max(complete, default=0) > last_recorded_step + 1:
        known = f"the last recorded step is {last_recorded_step}" if last_recorded_step else ""
        raise ValueError(
            f"{tracker}: step {max(complete)} was saved, but "
            f"{known or 'no step of the run is recorded'}; restore metrics.jsonl of the run's "
            f"attempts, or delete {folder} to train from the first step"
        )
    for step, path in steps.items():
        if step > latest:
            shutil.rmtree(path)
    if latest:
        tracker.write_text(str(latest))
    else:
        tracker.unlink(missing_ok=True)
    return latest


def steps_on_disk(folder: Path) -> dict[int, Path]:
    """verl's checkpoints by step, complete or not."""
    found = ((STEP.fullmatch(path.name), path) for path in folder.glob("global_step_*"))
    return {int(match[1]): path for match, path in found if match}


def tracked_step(folder: Path) -> int:
    """The step of verl's last complete checkpoint, 0 if there is none."""
    tracker = folder / TRACKER
    if not tracker.exists():
        return 0
    text = tracker.read_text(errors="replace").strip()
    if not text.isdecimal():
        raise ValueError(
            f"{tracker}: {text[:20]!r} is not a step; write the number of the last complete "
            f"global_step folder, or delete {folder} to train from the first step"
        )
    return int(text)


def _is_complete(path: Path) -> bool:
    """Whether all ranks' shards are there, which are called model_world_size_<ranks>_rank_<i>."""
    shards = list((path / "actor").glob("model_world_size_*_rank_*.pt"))
    return bool(shards) and len(shards) == int(shards[0].name.split("_")[3])
