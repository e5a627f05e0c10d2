"""Whether a study can be judged: asked when it is planned, as no result changes the answer."""

from itertools import product

from experiments.study.schema import Study


def require_judgeable(study: Study) -> None:
    """Checks what training does not need, but evaluating and judging do.

    Raises:
        ValueError: one line, "study <name>: <key>: <what>; <fix>".
    """
    shortest = min(study.runs, key=lambda run: study.rl_of(run.cell).steps)
    steps, save_every = study.rl_of(shortest.cell).steps, study.rl.save_every
    if study.trainer == "verl" and save_every > steps:
        raise ValueError(
            f"study {study.study}: rl.save_every: {save_every} is more than "
            f"{study.key_of(shortest.cell, 'steps')}, {steps}, so that verl saves nothing to "
            "evaluate; lower it, or run random weights by "
            "python -m experiments.launch.side_by_side --random-weights"
        )
    if study.judged_by == "collapse":
        from analysis.collapse.grid import design_of  # pandas and SciPy, needed here alone

        design_of(study)
    else:
        _require_parity(study)


def _require_parity(study: Study) -> None:
    """Claims compare the arms of a model seed by seed: of each one run a seed, of two steps."""
    steps_of: dict[str, int] = {}
    for model, arm in product(study.models, study.arms):
        cells = {run.cell: None for run in study.runs if (run.model, run.arm) == (model, arm)}
        if len(cells) != 1:
            raise ValueError(
                f"study {study.study}: cells: {model} has arm {arm} in "
                f"{' and '.join(map(str, cells)) or 'none'}; judged_by: parity needs it in one"
            )
        steps = study.rl_of(*cells).steps
        if steps != (of_first := steps_of.setdefault(model, steps)):
            raise ValueError(
                f"study {study.study}: cells: arms of {model} have {of_first} and {steps} "
                "rl.steps; judged_by: parity compares them step by step, so use one number"
            )
        if arm == "bf16" and steps < 2:
            raise ValueError(
                f"study {study.study}: rl.steps: one step has no reward gain; use 2 or more"
            )
