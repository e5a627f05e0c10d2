"""The table of all settings of a grid: which runs collapsed and when, and what was learnt."""

from collections.abc import Iterable, Sequence
from itertools import chain, compress
from math import inf
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from analysis.collapse.grid import (
    Setting,
    num_collapsed,
    read_grid,
    runs_by_setting,
    show_rate,
)
from analysis.collapse.survival import Outcome, share_collapsed
from analysis.load import HINT, read_metric
from analysis.markdown import MarkdownTable
from experiments.rl.metric_names import K3_KL
from experiments.rl.tasks import GENERATED_TASKS, have_new_sums
from experiments.runs.evaluation import EVALUATIONS, Evaluation, Precision
from experiments.runs.record import has_file
from experiments.runs.settings import read_evaluations_of
from experiments.study.schema import Run, Study


class Row(NamedTuple):
    """One setting.

    Attributes:
        seeds: of the runs.
        outcomes: by seed.
        kl: median k3 KL of the steps up to the collapse, or of all, by seed.
        in_bf16: offline accuracy of the last checkpoint by seed, sampled, BF16 weights; of the
            runs that were evaluated.
        in_nvfp4: likewise with the weights in NVFP4, as they are served.
        of_new_sums: of that the problems whose sum no training problem has; empty if all are so.
    """

    setting: Setting
    seeds: Sequence[int]
    outcomes: Sequence[Outcome]
    kl: Sequence[float]
    in_bf16: Sequence[float]
    in_nvfp4: Sequence[float]
    of_new_sums: Sequence[float]


def outcome_table(study: Study, results: Path) -> str:
    """The outcomes of all complete settings as Markdown, from a results or records folder.

    What all settings have in common is left out.

    Raises:
        ValueError: a run's metrics or evaluations are damaged, or of other settings.
    """
    runs, are_new = runs_by_setting(study, results), _have_new_sums(study)
    rows = []
    for setting, outcomes in read_grid(runs, results).items():
        evaluated = read_evaluated(study, results, runs[setting])
        with_runs = zip(runs[setting], outcomes, strict=True)
        rows.append(
            Row(
                setting,
                [run.seed for run in runs[setting]],
                outcomes,
                [_median_kl(results / run.id, it) for run, it in with_runs],
                last_accuracies(evaluated, "bf16"),
                last_accuracies(evaluated, "nvfp4"),
                last_accuracies(evaluated, "nvfp4", are_new) if are_new else (),
            )
        )
    return TABLE.without_constant(rows)


def _have_new_sums(study: Study) -> list[bool]:
    """Of each problem that is evaluated; empty if all have, or they are not made here."""
    if study.task.name not in GENERATED_TASKS or study.task.name == "chain-sum":  # asked once each
        return []
    are_new = have_new_sums(study.task)[: study.evaluation.prompts]
    return [] if all(are_new) else are_new


def read_evaluated(study: Study, results: Path, runs: Sequence[Run]) -> list[list[Evaluation]]:
    """The evaluations of each run that was evaluated.

    Raises:
        ValueError: they are damaged, or of other settings.
    """
    folders = (results / run.id for run in runs)
    return [read_evaluations_of(study, it, HINT) for it in folders if has_file(it, EVALUATIONS)]


def last_accuracies(
    evaluated: Iterable[Sequence[Evaluation]], precision: Precision, among: Sequence[bool] = ()
) -> list[float]:
    """Offline accuracy of each run's last checkpoint, of sampled answers.

    Args:
        evaluated: each run's evaluations; a run without any after training is left out.
        precision: of the weights.
        among: which problems count; all by default.
    """
    found = []
    for of_run in evaluated:
        its = [e for e in of_run if (e.precision, e.decoding) == (precision, "sampled")]
        last = max((e.step for e in its), default=0)
        found += [_accuracy(e, among) for e in its if e.step == last > 0]
    return found


def base_accuracies(evaluated: Iterable[Sequence[Evaluation]], precision: Precision) -> list[float]:
    """As `last_accuracies`, before training."""
    wanted = (0, precision, "sampled")
    evaluations = chain.from_iterable(evaluated)
    return [it.accuracy for it in evaluations if (it.step, it.precision, it.decoding) == wanted]


def _accuracy(evaluation: Evaluation, among: Sequence[bool]) -> float:
    if not among:
        return evaluation.accuracy
    counted = list(compress(evaluation.correct, among))
    return sum(counted) / (len(counted) * evaluation.samples_per_prompt)


def _median_kl(run_dir: Path, outcome: Outcome) -> float:
    return float(read_metric(run_dir, K3_KL)[: outcome.collapsed].fillna(inf).median())


def _shown_steps(row: Row) -> str:
    """Of the runs that collapsed."""
    with_seeds = zip(row.outcomes, row.seeds, strict=True)
    steps = [f"{it.collapsed} ({seed})" for it, seed in with_seeds if it.collapsed is not None]
    return ", ".join(steps) or "-"


def _shown_share(outcomes: Sequence[Outcome]) -> str:
    share = share_collapsed(outcomes)
    # never None of a share, but an Interval may have ends that are
    return f"{share.low:.0%} to {share.high:.0%}"


def _shown_range(values: Sequence[float]) -> str:
    low, high = (f"{end:.1e}".replace("e-0", "e-") for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _shown_accuracy(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean, low, high = fmean(values), min(values), max(values)
    return f"{mean:.3f} ({low:.3f} to {high:.3f})" if len(values) > 1 else f"{mean:.3f}"


TABLE: MarkdownTable[Row] = MarkdownTable(
    {
        "Model": lambda row: row.setting.model,
        "Learning rate": lambda row: show_rate(row.setting.lr),
        "Arm": lambda row: row.setting.arm,
        "Correction": lambda row: row.setting.correction,
        "Advantage": lambda row: row.setting.advantage,
        "Collapsed": lambda row: f"{num_collapsed(row.outcomes)} of {len(row.outcomes)}",
        "95 % interval": lambda row: _shown_share(row.outcomes),
        "At step (seed)": _shown_steps,
        "k3 KL, median step": lambda row: _shown_range(row.kl),
        "Mean reward": lambda row: f"{fmean(it.area for it in row.outcomes):.3f}",
        "Offline, BF16": lambda row: _shown_accuracy(row.in_bf16),
        "Offline, NVFP4": lambda row: _shown_accuracy(row.in_nvfp4),
        "Offline, NVFP4, new sums": lambda row: _shown_accuracy(row.of_new_sums),
    }
)
