"""Tables of what routing replay does to the k3 KL of a mixture of experts, and of its cost."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, Field
from scipy.stats import ttest_1samp

from analysis.claims_table import show_ratio
from analysis.collapse.survival import holm
from analysis.markdown import MarkdownTable
from analysis.stats import Array, find_spikes, ratio_over_seeds
from analysis.style import arm_style
from analysis.tables.record import Hardware, Record, read_record
from experiments.study.arms import ArmName

Side = Literal["off", "on"]
TITLE = "**k3 KL of the same sampled tokens, scored without and with routing replay**"
NOTE = (
    "Mean and 99.9th percentile over a seed's tokens, averaged over seeds; ratios with over "
    "without replay in the typical seed, with Student's 95 % interval. Rerouted: tokens whose "
    "position went to other experts than in the engine, in any layer, and what they carry of the "
    "k3 without replay. Steps: above ten times their run's median, without and with."
)
P_TITLE = "**p-values of these ratios, after Holm's correction for all of them together**"
ARM_TITLE = "**Mean k3 KL over that of BF16, without and with replay on both sides**"
TIME_TITLE = "**Time of a training step of seed 0, in turns**"


class Cpu(Hardware):
    """A machine without GPUs, or whose GPUs were not used."""

    cpu: str

    @property
    def name(self) -> str:
        """The processor."""
        return self.cpu


class Tails(BaseModel):
    """k3 KL of a run's tokens, nats; `steps` are means."""

    mean: float
    p999: float = Field(alias="p99.9")
    max: float
    steps: list[float]


class RunTokens(BaseModel):
    """All tokens of a seed and arm."""

    arm: ArmName
    seed: int
    tokens: int
    rerouted: float
    k3_share_of_rerouted: float
    off: Tails
    on: Tails


class Times(BaseModel):
    """Quartiles over rounds of an arm's step."""

    arm: ArmName
    off_ms: tuple[float, float, float]
    on_ms: tuple[float, float, float]
    on_of_off: tuple[float, float, float]


class ReplayRecord(Record):
    """Of experiments/benchmarks/routing_replay.py."""

    hardware: Cpu
    model: str
    threads: int
    runs: list[RunTokens]
    times: list[Times]


class ArmTokens(NamedTuple):
    """One arm's runs, a seed each."""

    arm: ArmName
    runs: Sequence[RunTokens]

    def mean(self, side: Side) -> Array:
        """Of each seed."""
        return np.array([getattr(run, side).mean for run in self.runs])

    def p999(self, side: Side) -> Array:
        """Of each seed."""
        return np.array([getattr(run, side).p999 for run in self.runs])

    def spikes(self, side: Side) -> str:
        """How many steps stand out, and the largest in medians of its run, if none is 0."""
        found = find_spikes(np.array([getattr(run, side).steps for run in self.runs]))
        if found is None:
            return "not defined"
        return f"{found.count} of {found.steps} (largest {found.largest:.0f}x)"

    def share(self, name: str) -> str:
        """Mean over seeds."""
        return f"{np.mean([getattr(run, name) for run in self.runs]):.1%}"


TABLE: MarkdownTable[ArmTokens] = MarkdownTable(
    {
        "Arm": lambda row: arm_style(row.arm).label,
        "Tokens a seed": lambda row: f"{min(run.tokens for run in row.runs):,}",
        "Rerouted": lambda row: row.share("rerouted"),
        "Their share of k3": lambda row: row.share("k3_share_of_rerouted"),
        "Mean, without": lambda row: f"{row.mean('off').mean():.2e}",
        "Mean, with": lambda row: f"{row.mean('on').mean():.2e}",
        "Ratio of means": lambda row: _ratio(row.mean("on"), row.mean("off")),
        "p99.9, without": lambda row: f"{row.p999('off').mean():.2e}",
        "p99.9, with": lambda row: f"{row.p999('on').mean():.2e}",
        "Ratio of p99.9": lambda row: _ratio(row.p999("on"), row.p999("off")),
        "Steps, without": lambda row: row.spikes("off"),
        "Steps, with": lambda row: row.spikes("on"),
    }
)
P_TABLE: MarkdownTable[tuple[ArmName, float, float]] = MarkdownTable(
    {
        "Arm": lambda row: arm_style(row[0]).label,
        "Mean": lambda row: f"{row[1]:.3f}",
        "p99.9": lambda row: f"{row[2]:.3f}",
    }
)
TIME_TABLE: MarkdownTable[Times] = MarkdownTable(
    {
        "Arm": lambda row: arm_style(row.arm).label,
        "Without, ms": lambda row: f"{row.off_ms[1]:.0f}",
        "With, ms": lambda row: f"{row.on_ms[1]:.0f}",
        "With / without (quartiles)": lambda row: (
            f"{row.on_of_off[1]:.2f} ({row.on_of_off[0]:.2f} to {row.on_of_off[2]:.2f})"
        ),
    }
)


def replay_sections(folder: Path, machine: str) -> list[str]:
    """k3 KL and times of a machine, whose seeds may be spread over several records.

    Raises:
        ValueError: a record is missing or damaged, or two hold the same seed.
    """
    first = folder / f"routing_replay_{machine}.json"
    others = sorted(folder.glob(f"routing_replay_{machine}_*.json"))
    records = [read_record(path, ReplayRecord) for path in (first, *others)]
    arms = _by_arm(run for record in records for run in record.runs)
    seeds = [run.seed for run in arms["bf16"].runs]
    setups = dict.fromkeys(record.setup(("torch", "torch")) for record in records)
    origin = (
        f"Measured on: {'; '.join(setups)}; {records[0].model}, "
        f"{records[0].threads} thread, seeds {', '.join(map(str, seeds))} of "
        f"{len(arms['bf16'].runs[0].off.steps)} steps each."
    )
    return [
        origin,
        TITLE,
        TABLE.markdown(arms.values()),
        NOTE,
        P_TITLE,
        P_TABLE.markdown(_p_values(arms)),
        ARM_TITLE,
        _arm_table(arms).markdown([arms[name] for name in arms if name != "bf16"]),
        TIME_TITLE,
        TIME_TABLE.markdown(records[0].times),
    ]


def _by_arm(runs: Iterable[RunTokens]) -> Mapping[ArmName, ArmTokens]:
    """Of the seeds that all arms have finished, in order."""
    found: dict[ArmName, dict[int, RunTokens]] = {}
    for run in runs:
        if run.seed in found.setdefault(run.arm, {}):
            raise ValueError(f"routing_replay: seed {run.seed} is in two records; remove one")
        found[run.arm][run.seed] = run
    whole = sorted(set.intersection(*(set(seeds) for seeds in found.values())))
    return {arm: ArmTokens(arm, [seeds[seed] for seed in whole]) for arm, seeds in found.items()}


def _p_values(arms: Mapping[ArmName, ArmTokens]) -> Iterable[tuple[ArmName, float, float]]:
    """Of Student's t of the seeds' log ratios, two-sided; of the mean and the 99.9th percentile."""
    pairs = [
        (of_side("on"), of_side("off")) for row in arms.values() for of_side in (row.mean, row.p999)
    ]
    p_values = [float(ttest_1samp(np.log(on / off), 0).pvalue) for on, off in pairs]
    corrected = holm(p_values, len(p_values))
    return zip(arms, corrected[::2], corrected[1::2], strict=True)


def _arm_table(arms: Mapping[ArmName, ArmTokens]) -> MarkdownTable[ArmTokens]:
    control = arms["bf16"]
    return MarkdownTable(
        {
            "Arm": lambda row: arm_style(row.arm).label,
            "Without": lambda row: _ratio(row.mean("off"), control.mean("off")),
            "With": lambda row: _ratio(row.mean("on"), control.mean("on")),
        }
    )


def _ratio(first: Array, second: Array) -> str:
    found = ratio_over_seeds(first, second)
    if found is None:
        return "no ratio"
    if found.low is None or found.high is None:
        return show_ratio(found.estimate)
    return f"{show_ratio(found.estimate)} ({show_ratio(found.low)} to {show_ratio(found.high)})"
