"""Table of goals for speed, and what NVFP4 came to with Humming and with Marlin."""

from collections.abc import Mapping
from pathlib import Path

from analysis.markdown import Row, markdown_table
from analysis.tables.rows import Engines, engines_of, number, read_servings, read_synced, verdict
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


def goals_sections(folder: Path, machine: str) -> list[str]:
    """A row for each goal in vLLM, by model."""
    served, synced = engines_of(read_servings(folder, machine)), read_synced(folder, machine)
    rows: list[Row] = []
    for model, goals in SPEED_GOALS.items():
        for setting, bound in goals.items():
            is_prefill = setting == PREFILL
            what = PREFILL if is_prefill else f"decoding with prefill, {setting} at once"
            key = over_bf16("prefill_tokens_per_s" if is_prefill else f"tokens_per_s.{setting}")
            rows.append(_row(model, what, bound, False, _by_precision(served, model, key)))
        in_place = _by_precision(synced, model, IN_PLACE)
        rows.append(_row(model, "weight sync in place", SYNC_GOALS_S[model], True, in_place))
    return [markdown_table(rows), NOTE]


def _row(model: str, what: str, bound: float, is_time: bool, measured: Mapping[str, float]) -> Row:
    """A goal, and what was measured by precision."""

    def result(precision: str) -> str:
        if precision not in measured:
            return "not measured"
        value = measured[precision]
        is_met = value <= bound if is_time else value >= bound
        return (
            f"{value:.3f} s, {verdict(is_met)}" if is_time else f"{value:.2f}x, {verdict(is_met)}"
        )

    return {
        "Model": model,
        "What": what,
        "Goal": f"at most {bound:g} s" if is_time else f"at least {bound:g}x",
        "Humming": result("humming"),
        "Experts alone by Humming": result("humming-experts") if model in MOES else "",
        "Marlin": result("nvfp4"),
    }


def _by_precision(engines: Engines, model: str, key: str) -> dict[str, float]:
    """What a model's engines have of a column."""
    return {
        name.partition(":")[2]: number(row, key)
        for name, row in engines.items()
        if name.startswith(f"{model}:") and row.get(key) is not None
    }
