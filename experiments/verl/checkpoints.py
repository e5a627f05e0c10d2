"""verl's checkpoints of a run, in step with what has been recorded of it."""

import shutil
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"


def drop_unrecorded(folder: Path, last_recorded_step: int) -> None:
    """Drops checkpoints of steps whose metrics a crash lost, so that verl does them again.

    verl saves a step before it logs it; gone on from such a checkpoint, the step would stay
    without metrics for ever.
    """
    kept = []
    for path in folder.glob("global_step_*"):
        step = int(path.name.removeprefix("global_step_"))
        if step > last_recorded_step:
            shutil.rmtree(path)
        else:
            kept.append(step)
    tracker = folder / TRACKER
    if not tracker.exists() or int(tracker.read_text()) <= last_recorded_step:
        return
    if kept:
        tracker.write_text(str(max(kept)))
    else:
        tracker.unlink()
