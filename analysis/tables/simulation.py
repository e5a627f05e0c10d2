"""Tables of the simulated studies behind the choice of intervals."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from analysis.collapse.rules import AREA_LEVEL, AREA_MARGIN
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


class RewardRow(BaseModel):
    """A population of differences of mean reward; see analysis/simulation/rewards.py."""

    seeds: int
    difference: float
    seed_sd: float
    lost_share: float
    loss: float
    coverage: float
    c9_passes: float
    c9_fails: float
    c4_passes: float
    c4_fails: float

    @property
    def population(self) -> str:
        """How the seeds differ."""
        usual = f"normal, sd {self.seed_sd:g}"
        if not self.lost_share:
            return usual
        return f"{usual}, and {self.lost_share:.0%} of the seeds {self.loss:g} lower"


class SimulationRecord(BaseModel):
    """Of analysis/simulation."""

    bound: float
    studies: dict[str, int]
    ratios: list[Row]
    accuracy: AccuracyPart
    rewards: list[RewardRow]


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


REWARD_TABLE: MarkdownTable[RewardRow] = MarkdownTable(
    {
        "Differences of the seeds": lambda row: row.population,
        "Seeds": lambda row: str(row.seeds),
        "True mean": lambda row: f"{row.difference:+.2f}",
        "Coverage": lambda row: f"{row.coverage:.1%}",
        "C9 passes": lambda row: f"{row.c9_passes:.1%}",
        "C9 FAILs": lambda row: f"{row.c9_fails:.1%}",
        "C4 passes": lambda row: f"{row.c4_passes:.1%}",
        "C4 FAILs": lambda row: f"{row.c4_fails:.1%}",
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


def reward_sections(folder: Path, _: str) -> list[str]:
    """Coverage and decisions about differences of mean reward."""
    rows = read_simulation(folder).rewards
    title = (
        f"**Differences of mean reward: {100 * AREA_LEVEL:g} % intervals; C9 asks for a difference "
        f"below {-AREA_MARGIN:g}, C4 for one within {AREA_MARGIN:g}**"
    )
    in_order = sorted(rows, key=lambda row: (row.lost_share, row.seed_sd, row.seeds))
    return [title, REWARD_TABLE.markdown(in_order)]


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
