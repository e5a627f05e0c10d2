"""The table of all settings of a grid: which runs collapsed and when, and what was learnt."""

from collections.abc import Iterable, Sequence
from itertools import chain, compress
from math import inf
from pathlib import Path
from statistics import fmean

from analysis.collapse.grid import num_collapsed, read_grid, runs_by_setting, show_rate
from analysis.collapse.survival import Outcome, share_collapsed
from analysis.load import HINT, metric_of, read_metrics
from analysis.markdown import markdown_table, without_constant
from experiments.rl.metric_names import K3_KL
from experiments.rl.tasks import GENERATED_TASKS, have_new_sums
from experiments.runs.evaluation import EVALUATIONS, Evaluation, Precision
from experiments.runs.record import has_file
from experiments.runs.settings import read_evaluations_of
from experiments.study.schema import Run, Study


def outcome_table(study: Study, results: Path) -> str:
    """The outcomes of all complete settings as Markdown, from a results or records folder.

    What all settings have in common is left out.
    """
    runs, are_new = runs_by_setting(study, results), _have_new_sums(study)
    rows = []
    for setting, outcomes in read_grid(runs, results).items():
        evaluated = read_evaluated(study, results, runs[setting])
        with_runs = list(zip(runs[setting], outcomes, strict=True))
        ends = [f"{it.collapsed} ({r.seed})" for r, it in with_runs if it.collapsed is not None]
        share = share_collapsed(outcomes)
        rows.append(
            {
                "Model": setting.model,
                "Learning rate": show_rate(setting.lr),
                "Arm": setting.arm,
                "Correction": setting.correction,
                "Advantage": setting.advantage,
                "Collapsed": f"{num_collapsed(outcomes)} of {len(outcomes)}",
                "95 % interval": f"{share.low:.0%} to {share.high:.0%}",
                "At step (seed)": ", ".join(ends) or "-",
                "k3 KL, median step": _shown_range(
                    [_median_kl(results / run.id, it) for run, it in with_runs]
                ),
                "Mean reward": f"{fmean(it.area for it in outcomes):.3f}",
                "Offline, BF16": _shown_accuracy(last_accuracies(evaluated, "bf16")),
                "Offline, NVFP4": _shown_accuracy(last_accuracies(evaluated, "nvfp4")),
                "Offline, NVFP4, new sums": _shown_accuracy(
                    last_accuracies(evaluated, "nvfp4", are_new) if are_new else ()
                ),
            }
        )
    return markdown_table(without_constant(rows))


def _have_new_sums(study: Study) -> list[bool]:
    """Of each problem that is evaluated; empty if all have, or they are not made here."""
    if study.task.name not in GENERATED_TASKS or study.task.name == "chain-sum":  # asked once each
        return []
    are_new = have_new_sums(study.task)[: study.evaluation.prompts]
    return [] if all(are_new) else are_new


def read_evaluated(study: Study, results: Path, runs: Sequence[Run]) -> list[list[Evaluation]]:
    """The evaluations of each run that was evaluated."""
    folders = (results / run.id for run in runs)
    return [read_evaluations_of(study, it, HINT) for it in folders if has_file(it, EVALUATIONS)]


def last_accuracies(
    evaluated: Iterable[Sequence[Evaluation]], precision: Precision, among: Sequence[bool] = ()
) -> list[float]:
    """Offline accuracy of each run's last checkpoint, of sampled answers to some problems, or all.

    A run without an evaluation after training is left out.
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
    kl_T = metric_of(read_metrics(run_dir), K3_KL, str(run_dir))
    return float(kl_T[: outcome.collapsed].fillna(inf).median())


def _shown_range(values: Sequence[float]) -> str:
    low, high = (f"{end:.1e}".replace("e-0", "e-") for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _shown_accuracy(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean, low, high = fmean(values), min(values), max(values)
    return f"{mean:.3f} ({low:.3f} to {high:.3f})" if len(values) > 1 else f"{mean:.3f}"
