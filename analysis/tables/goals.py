"""Table of goals for speed, and what NVFP4 came to with Humming and with Marlin."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from analysis.markdown import MarkdownTable
from analysis.tables.engines import Engines, engines_of, number, read_servings, read_synced
from analysis.tables.rows import verdict
from experiments.benchmarks.engine_tables import over_bf16

PREFILL = "prefill"
IN_PLACE = "in_place_syncs.seconds"
# These goals are this project's own. No dated document shows that they came before what was
# measured.
SPEED_GOALS = {  # tokens a second over BF16's, at least: decoding by sequences at once, and prefill
    "qwen3-8b": {"1": 1.25, "32": 1.25, "256": 0.93, PREFILL: 0.95},
    "qwen3-30b-a3b": {"1": 1.20, "32": 1.30, "256": 1.30, PREFILL: 0.95},
}
SYNC_GOALS_S = {"qwen3-8b": 0.1, "qwen3-30b-a3b": 0.2}  # at most
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


def goals_sections(folder: Path, machine: str) -> list[str]:
    """A row for each goal in vLLM, by model.

    Raises:
        ValueError: a record is missing or damaged.
    """
    served, synced = engines_of(read_servings(folder, machine)), read_synced(folder, machine)
    rows: list[Goal] = []
    for model, goals in SPEED_GOALS.items():
        for setting, bound in goals.items():
            is_prefill = setting == PREFILL
            what = PREFILL if is_prefill else f"decoding with prefill, {setting} at once"
            key = over_bf16("prefill_tokens_per_s" if is_prefill else f"tokens_per_s.{setting}")
            rows.append(Goal(model, what, bound, False, _by_precision(served, model, key)))
        in_place = _by_precision(synced, model, IN_PLACE)
        rows.append(Goal(model, "weight sync in place", SYNC_GOALS_S[model], True, in_place))
    return [TABLE.markdown(rows), NOTE]


def _by_precision(engines: Engines, model: str, key: str) -> dict[str, float]:
    """What a model's engines have of a column."""
    return {
        name.partition(":")[2]: number(row, key)
        for name, row in engines.items()
        if name.startswith(f"{model}:") and row.get(key) is not None
    }
