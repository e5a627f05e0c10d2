"""The grid of a study of collapses: what it compares, and what became of the runs of each setting.

Which settings are compared follows from the study file, so that a smaller study of the same kind is
judged by the same code.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from analysis.collapse.survival import Outcome, outcome
from analysis.load import HINT, metric_of, read_metrics, require_distinct_runs
from experiments.rl.config import Correction
from experiments.rl.metric_names import REWARD
from experiments.runs.manifest import read_manifest
from experiments.runs.settings import complete_cells
from experiments.study.arms import ArmName
from experiments.study.schema import Run, Study

BF16: ArmName = "bf16"
NOQAT: ArmName = "nvfp4-noqat"
QAT: ArmName = "nvfp4-qat"
FFN: ArmName = "nvfp4-qat-ffn"
BF16_EXACT: ArmName = "bf16-exact"
QAT_EXACT: ArmName = "nvfp4-qat-exact"
CORRECTIONS: Mapping[Correction, str] = {
    "token_tis": "token TIS",
    "sequence_mask": "sequence mask",
    "geometric_mask": "geometric mask",
    "score_centering": "score centering",
}


class Setting(NamedTuple):
    """What distinguishes the runs of a grid, less their seed."""

    model: str
    arm: str
    lr: float
    correction: Correction = "none"
    advantage: str = "reward"

    def __str__(self) -> str:
        correction = "" if self.correction == "none" else f", {self.correction}"
        advantage = "" if self.advantage == "reward" else f", {self.advantage}-centred advantages"
        return f"{self.model}, {self.arm} at {show_rate(self.lr)}{correction}{advantage}"


Grid = Mapping[Setting, Sequence[Outcome]]
"""Outcomes by seed, in the order of the study's seeds, of all settings of complete cells."""


class Design(NamedTuple):
    """What a study of collapses compares."""

    dense: str  # model of most cells, the study's first
    moe: str | None  # its second model; None if there is one model alone
    lrs: tuple[float, ...]  # learning rates at which the arms are compared on `dense`, ascending
    settings: frozenset[Setting]  # all that the study plans; claims about others are not made
    # with which the arms are compared; further cells may have another one
    advantage: str = "reward"
    primary: str = "C1"  # the claim that decides

    @property
    def decisive_lr(self) -> float:
        """The highest rate, at which corrections and further cells are tried too."""
        return self.lrs[-1]

    def plain(self, arm: str, lr: float) -> Setting:
        """An arm of `dense` at a learning rate, without a correction."""
        return Setting(self.dense, arm, lr, advantage=self.advantage)


def design_of(study: Study) -> Design:
    """What a study compares; ValueError where its runs do not compare."""
    if own := [it for it in study.cells if study.rl_of(it).steps != study.rl.steps]:
        raise ValueError(
            f"study {study.study}: cells.{own[0]}: steps: judged_by: collapse compares runs over "
            "rl.steps alone; remove it, or give these runs a study of their own"
        )
    cell_of: dict[Setting, str | None] = {}
    for run in study.runs:
        setting = setting_of(study, run)
        first = cell_of.setdefault(setting, run.cell)
        if first != run.cell:
            raise ValueError(
                f"study {study.study}: cells.{run.cell}: has {setting}, as cells.{first} has; "
                "judged_by: collapse tells no other keys apart; move one to a study of its own"
            )
    dense, *others = study.models
    settings = frozenset(cell_of)
    moe = others[0] if others else None
    design = Design(dense, moe, (), settings, study.rl.advantage, study.primary)
    compared = BF16 if BF16 in study.arms or study.primary != "C12" else QAT
    lrs = sorted({it.lr for it in settings if it == design.plain(compared, it.lr)})
    if not lrs:
        raise ValueError(
            f"study {study.study}: cells: none has model {dense}, arm {compared}, correction: none "
            f"and advantage: {design.advantage}; add one, or set judged_by: parity"
        )
    return design._replace(lrs=tuple(lrs))


def setting_of(study: Study, run: Run) -> Setting:
    """The setting that a run belongs to."""
    rl = study.rl_of(run.cell)
    return Setting(run.model, run.arm, rl.lr, rl.correction, rl.advantage)


def runs_by_setting(study: Study, results: Path) -> dict[Setting, list[Run]]:
    """The runs of all cells that can be judged, in the order of the study's seeds.

    After the protocol these are trained to their last steps. Only of a single seed, where nothing
    is decided, runs that were stopped before count up to where they came.
    """
    found: dict[Setting, list[Run]] = {}
    for runs in complete_cells(study, results).values():
        manifests = (read_manifest(results / run.id, HINT) for run in runs)
        if len(study.seeds) > 1 and any(it.was_stopped for it in manifests):
            continue
        for run in runs:
            found.setdefault(setting_of(study, run), []).append(run)
    return found


def read_grid(runs: Mapping[Setting, Sequence[Run]], results: Path) -> Grid:
    """What became of the runs."""
    manifests = {run: read_manifest(results / run.id, HINT) for run in chain(*runs.values())}
    metrics = {
        run: read_metrics(results / run.id, it.planned_steps) for run, it in manifests.items()
    }
    require_distinct_runs(metrics)

    def outcome_of(run: Run) -> Outcome:
        rewards_T = metric_of(metrics[run], REWARD, run.id).to_numpy(float)
        return outcome(rewards_T)._replace(base=manifests[run].digests.get("base", ""))

    return {setting: [outcome_of(run) for run in its] for setting, its in runs.items()}


def show_correction(setting: Setting) -> str:
    """What corrects the mismatch, empty where nothing does."""
    labels: Mapping[str, str] = {str(name): label for name, label in CORRECTIONS.items()}
    return labels.get(setting.correction, "")


def show_rate(lr: float) -> str:
    """A learning rate as studies write it, such as 3e-4; "none" of 0."""
    if lr == 0:
        return "none"
    mantissa, exponent = f"{lr:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def num_collapsed(outcomes: Sequence[Outcome]) -> int:
    """How many of the runs collapsed."""
    return sum(it.collapsed is not None for it in outcomes)
