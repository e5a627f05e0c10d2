"""The grid of the study `collapse`: what became of the runs of each setting."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from analysis.load import read_metrics
from analysis.survival import Outcome, outcome, share_collapsed
from experiments.runs.manifest import MANIFEST, read_manifest
from experiments.study.schema import Run, Study
from qat_core.rl.metric_names import REWARD

DENSE, MOE = "small-dense", "small-moe"
BF16, NOQAT, QAT, FFN = "bf16", "nvfp4-noqat", "nvfp4-qat", "nvfp4-qat-ffn"
HINT = "run the study"


class Setting(NamedTuple):
    """What distinguishes the runs of a grid, less their seed."""

    model: str
    arm: str
    lr: float
    correction: str = "none"
    advantage: str = "reward"


Grid = Mapping[Setting, Sequence[Outcome]]
"""Outcomes by seed, in the order of the study's seeds, of settings that have all their runs."""


def setting_of(study: Study, run: Run) -> Setting:
    """The setting that a run belongs to."""
    rl = study.rl_of(run.cell)
    return Setting(run.model, run.arm, rl.lr, rl.correction, rl.advantage)


def read_grid(study: Study, results: Path) -> Grid:
    """Outcomes of all finished runs; settings that lack a run are left out."""
    found: dict[Setting, dict[int, Outcome]] = {}
    for run in study.runs:
        folder = results / run.id
        if not (folder / MANIFEST).exists():
            continue
        if read_manifest(folder, HINT).status == "finished":
            rewards_T = read_metrics(folder)[REWARD].to_numpy(float)
            found.setdefault(setting_of(study, run), {})[run.seed] = outcome(rewards_T)
    return {
        setting: [by_seed[seed] for seed in study.seeds]
        for setting, by_seed in found.items()
        if by_seed.keys() == set(study.seeds)
    }


def table_rows(grid: Grid) -> Iterator[str]:
    """The outcomes of all complete settings as a Markdown table."""
    yield "| model | arm | lr | correction | advantage | collapsed, 95 % | at steps | area |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for setting, outcomes in grid.items():
        share = share_collapsed(outcomes)
        steps = ", ".join("-" if it.collapsed is None else str(it.collapsed) for it in outcomes)
        area = sum(it.area for it in outcomes) / len(outcomes)
        yield (
            f"| {setting.model} | {setting.arm} | {setting.lr:g} | {setting.correction} "
            f"| {setting.advantage} | {share.estimate:.0%} ({share.low:.0%} to {share.high:.0%}) "
            f"| {steps} | {area:.3f} |"
        )


def num_collapsed(outcomes: Sequence[Outcome]) -> int:
    """How many of the runs collapsed."""
    return sum(it.collapsed is not None for it in outcomes)
