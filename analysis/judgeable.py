"""Whether a study can be judged: asked when it is planned, as no result changes the answer."""

from experiments.study.schema import Study


def require_judgeable(study: Study) -> None:
    """Checks what training does not need, but evaluating and judging do.

    Raises:
        ValueError: one line, "study <name>: <key>: <what>; <fix>".
    """
    rl = study.rl
    if study.trainer == "verl" and rl.save_every > rl.steps:
        raise ValueError(
            f"study {study.study}: rl.save_every: {rl.save_every} is more than rl.steps, "
            f"{rl.steps}, so that verl saves nothing to evaluate; lower it, or run random weights "
            "by python -m experiments.launch.side_by_side --random-weights"
        )
    if study.judged_by == "collapse":
        from analysis.collapse.grid import design_of  # pandas and SciPy, needed here alone

        design_of(study)
    elif any(run.arm == "bf16" and study.rl_of(run.cell).steps < 2 for run in study.runs):
        raise ValueError(
            f"study {study.study}: rl.steps: one step has no reward gain; use 2 or more"
        )
