"""Tables of the simulated studies behind the choice of intervals."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from analysis.markdown import MarkdownTable
from analysis.tables.record import read_record

CHOSEN = "t_over_seeds"
SHOWN = {
    CHOSEN: "t over seeds",
    "t_of_pooled_means": "t, pooled",
    "wider_of_both_t": "wider of both t",
    "wider_with_one_more_spike": "one more spike",
    "bootstrap_t": "bootstrap-t",
    "median_of_means": "median of means",
    "block_bootstrap": "bootstrap, means",
    "interquartile_bootstrap": "bootstrap, IQM",
    "t_of_typical_steps": "t, log steps",
}


class Found(BaseModel):
    """How often an interval held the truth, and passed a claim."""

    coverage: float
    passes: float


class Row(BaseModel):
    """A population of studies and a size; see analysis/simulation/generator.py."""

    population: str
    ratio: float
    seeds: int
    steps: int
    seed_sd: float
    candidates: dict[str, Found]


class AccuracyRow(Found):
    """A population of accuracies; see analysis/simulation/accuracy.py."""

    seeds: int
    answers: int
    shift: float
    seed_sd: float


class AccuracyPart(BaseModel):
    """Simulated accuracies."""

    margin_log_odds: float
    accuracy: float
    scenarios: list[AccuracyRow]


class SimulationRecord(BaseModel):
    """Of analysis/simulation."""

    bound: float
    studies: dict[str, int]
    ratios: list[Row]
    accuracy: AccuracyPart


ACCURACY_TABLE: MarkdownTable[AccuracyRow] = MarkdownTable(
    {
        "Seeds": lambda row: str(row.seeds),
        "Answers a seed": lambda row: str(row.answers),
        "True difference": lambda row: f"{row.shift:+.1f}",
        "Spread of seeds": lambda row: f"{row.seed_sd:.1f}",
        "Coverage": lambda row: f"{row.coverage:.1%}",
        "Passes": lambda row: f"{row.passes:.1%}",
    }
)


def read_simulation(folder: Path) -> SimulationRecord:
    """The record; `folder` is that of the benchmarks next to it."""
    path = folder.parent / "simulation" / "intervals.json"
    return read_record(path, SimulationRecord)


def simulation_sections(folder: Path, size: str) -> list[str]:
    """Coverage and passes of all candidates at one size, `<seeds>x<steps>`.

    Raises:
        ValueError: the record is missing or damaged, or has no study of that size.
    """
    record = read_simulation(folder)
    rows = [row for row in record.ratios if f"{row.seeds}x{row.steps}" == size]
    if not rows:
        raise ValueError(
            f"intervals.json: no studies of size {size}; run analysis.simulation again"
        )
    # the true ratio moves a log interval, it does not change its width
    by_population = {(row.population, row.seed_sd): row for row in rows}
    return [
        f"**Coverage of 95 % intervals, {size} (seeds x steps)**",
        _table(rows, "coverage").markdown(by_population.values()),
        f'**How often a claim "at most {record.bound:g}" passes**',
        _table(rows, "passes").markdown(rows),
        f"{record.studies['t']} studies a row, {record.studies['bootstrap']} of what is resampled.",
    ]


def chosen_sections(folder: Path, _: str) -> list[str]:
    """How the chosen interval does in studies of several sizes."""
    record = read_simulation(folder)
    sizes = list(dict.fromkeys((row.seeds, row.steps) for row in record.ratios))
    by_size = [[row for row in record.ratios if (row.seeds, row.steps) == it] for it in sizes]
    table: MarkdownTable[tuple[Row, ...]] = MarkdownTable(
        {
            "Population": lambda rows: rows[0].population,
            "True ratio": lambda rows: f"{rows[0].ratio:.1f}",
            "Spread of seeds": lambda rows: f"{rows[0].seed_sd:.0%}",
        }
        | {
            f"{seeds} x {steps}": lambda rows, at=at: f"{rows[at].candidates[CHOSEN].passes:.1%}"
            for at, (seeds, steps) in enumerate(sizes)
        }
    )
    title = f'**How often "at most {record.bound:g}" passes, t over seeds, by seeds x steps**'
    return [title, table.markdown(zip(*by_size, strict=True))]


def accuracy_sections(folder: Path, _: str) -> list[str]:
    """Coverage and power of differences in log-odds."""
    part = read_simulation(folder).accuracy
    title = (
        f"**Accuracies around {part.accuracy:.0%}: the claim that arms are equivalent within "
        f"{part.margin_log_odds:g} in log-odds**"
    )
    return [title, ACCURACY_TABLE.markdown(part.scenarios)]


def _table(rows: Sequence[Row], what: str) -> MarkdownTable[Row]:
    names = [name for name in SHOWN if all(name in row.candidates for row in rows)]
    return MarkdownTable(
        {
            "Population": lambda row: row.population,
            "True ratio": lambda row: f"{row.ratio:.1f}",
            "Spread of seeds": lambda row: f"{row.seed_sd:.0%}",
        }
        | {
            SHOWN[name]: lambda row, name=name: f"{getattr(row.candidates[name], what):.1%}"
            for name in names
        }
    )
