"""The rungs of a ladder: what the recorded studies of its sizes say, seed by seed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from analysis.claims_table import ClaimsTable, read_table
from analysis.collapse.data import GridData
from analysis.collapse.grid import BF16, NOQAT, QAT, Setting, num_collapsed, show_rate
from analysis.collapse.survival import show_difference
from analysis.ladder.sizes import config_of, num_parameters
from analysis.ladder.slope import slope_over_sizes
from analysis.load import recorded_study
from analysis.markdown import markdown_table
from analysis.results import Array
from analysis.stats import LEVEL, Interval, over_seeds
from experiments.runs.summary import ACCURACIES, KL
from experiments.study.arms import ArmName
from experiments.study.models import HubModel, ScratchModel
from experiments.study.schema import Study

ARMS: Sequence[ArmName] = (NOQAT, QAT, BF16)
LOSS, COST = "no QAT less QAT", "QAT less BF16"
EFFECTS: dict[str, tuple[ArmName, ArmName]] = {LOSS: (NOQAT, QAT), COST: (QAT, BF16)}
WHAT_CHANGES = {LOSS: "the loss without QAT", COST: "what QAT costs"}
WEIGHT_STEPS = "drift_term/weight_steps"
NOTE = (
    f"Mean reward over all steps, BF16's and differences within a seed; intervals: {LEVEL:.0%}, "
    "Student's t over seeds. Three numbers: no QAT, QAT, BF16. k3 KL: nats a token. Answers: right "
    "ones of the last checkpoint. Drift: distance of the weights from the base at the last step, "
    "in quantization steps."
)


class Rung(NamedTuple):
    """One size."""

    model: str
    lr: float
    num_parameters: int
    effects: dict[str, Array]  # by key of `EFFECTS`, (seeds,)
    data: GridData
    table: ClaimsTable


def read_rungs(records: Sequence[Path]) -> list[Rung]:
    """The rungs in the order of their size; ValueError where they differ in more, or not in it."""
    rungs = sorted(map(_read_rung, records), key=lambda it: it.num_parameters)
    if len({it.num_parameters for it in rungs}) < max(2, len(rungs)):
        raise ValueError(
            f"{', '.join(map(str, records))}: of one size; name the records of several sizes, "
            "one of each"
        )
    first, *others = rungs
    for rung in others:
        shared, own = _beside_size(first.data.study), _beside_size(rung.data.study)
        if differing := [key for key in shared if shared[key] != own[key]]:
            raise ValueError(
                f"{rung.data.results}: {', '.join(differing)}: not as in {first.data.results}; "
                "name records that differ in size alone, dense models or MoE"
            )
    return rungs


def _beside_size(study: Study) -> dict[str, Any]:
    """What the rungs of a ladder have in common."""
    (model,) = study.models.values()
    assert isinstance(model, ScratchModel | HubModel)
    keys = ("trainer", "rollout", "scale_policy", "block_scale_method", "task", "evaluation")
    pretrain = model.pretrain if isinstance(model, ScratchModel) else None
    return {
        **{key: getattr(study, key) for key in keys},
        "rl": study.rl.model_dump(exclude={"lr", "micro_batch_responses"}),
        "pretrain": pretrain and pretrain.model_dump(exclude={"lr"}),
        "num_experts": config_of(study).get("num_experts"),
    }


def _read_rung(record: Path) -> Rung:
    study = recorded_study(record)
    data = GridData(study, record)
    lr = data.design.decisive_lr
    settings = {arm: data.design.plain(arm, lr) for arm in ARMS}
    if missing := [arm for arm, setting in settings.items() if setting not in data.grid]:
        raise ValueError(
            f"{record}: {missing[0]}: not all runs; run study {study.study} to its end"
        )
    if len(study.seeds) < 2:
        raise ValueError(f"{record}: seeds: one has no spread; run study {study.study} with more")
    reward = {arm: np.array([it.area for it in data.grid[its]]) for arm, its in settings.items()}
    return Rung(
        data.design.dense,
        lr,
        num_parameters(config_of(study)),
        {name: reward[first] - reward[second] for name, (first, second) in EFFECTS.items()},
        data,
        read_table(record / "claims.json"),
    )


def slopes(rungs: Sequence[Rung]) -> dict[str, Interval]:
    """Of each effect, its change a tenfold size."""
    sizes = [it.num_parameters for it in rungs]
    return {name: slope_over_sizes(sizes, [it.effects[name] for it in rungs]) for name in EFFECTS}


def answer(effect: str, slope: Interval) -> str:
    """What a slope says of a loss or cost: an effect below zero."""
    assert slope.low is not None and slope.high is not None
    if slope.high < 0:
        return f"{WHAT_CHANGES[effect]} grows with size"
    return f"{WHAT_CHANGES[effect]} shrinks with size" if slope.low > 0 else "open"


def is_lossless(rungs: Sequence[Rung]) -> bool:
    """Whether the interval of the loss holds zero at every size."""
    intervals = [over_seeds(rung.effects[LOSS]) for rung in rungs]
    return not any(it.low and it.high and it.low * it.high > 0 for it in intervals)


def ladder_text(rungs: Sequence[Rung]) -> str:
    """Markdown: whether there is a loss at all, a row a size, and a row a slope."""
    first = f"No loss is shown: {LOSS} holds zero at every size.\n\n" if is_lossless(rungs) else ""
    summary = [
        {"Effect": name, "Change a tenfold size": show_difference(it), "Answer": answer(name, it)}
        for name, it in slopes(rungs).items()
    ]
    sizes = markdown_table(map(_row, rungs))
    return f"{first}{sizes}\n\n{markdown_table(summary)}\n\n{NOTE}\n"


def _row(rung: Rung) -> dict[str, str]:
    settings = [rung.data.design.plain(arm, rung.lr) for arm in ARMS]
    estimates = [_estimates(rung, it) for it in settings]
    drift = [
        f"{rung.data.series(it, WEIGHT_STEPS)[:, -1].mean():.2f}"
        for it in settings
        if rung.data.records(it, WEIGHT_STEPS)
    ]
    return {
        "Model": rung.model,
        "Parameters": f"{rung.num_parameters:,}",
        "Learning rate": show_rate(rung.lr),
        "Seeds": str(len(rung.data.study.seeds)),
        "BF16": f"{np.mean([it.area for it in rung.data.grid[settings[-1]]]):.3f}",
        **{name: show_difference(over_seeds(it)) for name, it in rung.effects.items()},
        "Collapsed": ", ".join(str(num_collapsed(rung.data.grid[it])) for it in settings),
        "k3 KL": ", ".join(it.get(KL, "-") for it in estimates),
        "Answers, NVFP4": ", ".join(it.get(ACCURACIES["nvfp4"], "-") for it in estimates),
        "Answers, BF16": ", ".join(it.get(ACCURACIES["bf16"], "-") for it in estimates),
        "Drift": ", ".join(drift) or "-",
    }


def _estimates(rung: Rung, setting: Setting) -> dict[str, str]:
    first = rung.data.runs[setting][0].id
    (summary,) = (it for it in rung.table.arms if first in it.runs)
    return {key: f"{it.estimate:.2g}" for key, it in summary.estimates.items()}
