"""Table of goals for speed, and what NVFP4 came to with Humming and with Marlin."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

from analysis.markdown import MarkdownTable
from analysis.tables.engines import SyncedEngine, synced_engines
from analysis.tables.serving import Served, ServingEngine, read_servings, served

PREFILL = "prefill"
# These goals are this project's own. No dated document shows that they came before what was
# measured.
SPEED_GOALS = {  # tokens a second over BF16's, at least: decoding by sequences at once, and prefill
    "qwen3-8b": {"1": 1.25, "32": 1.25, "256": 0.93, PREFILL: 0.95},
    "qwen3-30b-a3b": {"1": 1.20, "32": 1.30, "256": 1.30, PREFILL: 0.95},
}
IN_PLACE_SYNC_GOALS_S = {"qwen3-8b": 0.1, "qwen3-30b-a3b": 0.2}  # at most
MOES = ("qwen3-30b-a3b",)

NOTE = (
    "Speeds: tokens a second over BF16's of the same run. Decoding: so many sequences of 32 prompt "
    "and 128 new tokens each; counted are new ones, and the time includes the prompts' prefill. "
    "Weight sync: median. Judged before rounding. torch.compile of vLLM: as the table of decoding "
    "says; off for weight syncs."
)


class Goal(NamedTuple):
    """A goal, and what was measured, by precision."""

    model: str
    what: str
    bound: float
    is_time: bool
    measured: Mapping[str, float]

    @property
    def shown_bound(self) -> str:
        """What is asked for."""
        return f"at most {self.bound:g} s" if self.is_time else f"at least {self.bound:g}x"

    def result(self, precision: str) -> str:
        """What was measured, and whether it meets the goal."""
        if precision not in self.measured:
            return "not measured"
        value = self.measured[precision]
        is_met = value <= self.bound if self.is_time else value >= self.bound
        shown = f"{value:.3f} s" if self.is_time else f"{value:.2f}x"
        return f"{shown}, {verdict(is_met)}"


TABLE: MarkdownTable[Goal] = MarkdownTable(
    {
        "Model": lambda row: row.model,
        "What": lambda row: row.what,
        "Goal": lambda row: row.shown_bound,
        "Humming": lambda row: row.result("humming"),
        "Experts alone by Humming": lambda row: (
            row.result("humming-experts") if row.model in MOES else ""
        ),
        "Marlin": lambda row: row.result("nvfp4"),
    }
)


def verdict(is_met: bool) -> str:
    """In words, a missed goal in bold."""
    return "met" if is_met else "**missed**"


def goals_sections(folder: Path, machine: str) -> list[str]:
    """A row for each goal in vLLM, by model.

    Raises:
        ValueError: a record is missing or damaged.
    """
    engines = [row for record in read_servings(folder, machine) for row in served(record)]
    synced = synced_engines(folder, machine)
    rows: list[Goal] = []
    for model, goals in SPEED_GOALS.items():
        rows += [_speed(model, setting, bound, engines) for setting, bound in goals.items()]
        rows.append(_sync(model, synced))
    return [TABLE.markdown(rows), NOTE]


def _speed(model: str, setting: str, bound: float, engines: Iterable[Served]) -> Goal:
    def speed(engine: ServingEngine) -> float | None:
        return engine.prefill if setting == PREFILL else engine.tokens_per_s[setting][1]

    measured = {
        row.precision: ratio
        for row in engines
        if row.model == model and (ratio := row.speed_ratio(speed))
    }
    what = PREFILL if setting == PREFILL else f"decoding with prefill, {setting} at once"
    return Goal(model, what, bound, False, measured)


def _sync(model: str, engines: Mapping[str, SyncedEngine]) -> Goal:
    measured = {
        name.partition(":")[2]: median(sync.seconds for sync in engine.in_place_syncs)
        for name, engine in engines.items()
        if name.startswith(f"{model}:") and engine.in_place_syncs
    }
    return Goal(model, "weight sync in place", IN_PLACE_SYNC_GOALS_S[model], True, measured)
