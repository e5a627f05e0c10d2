"""Judged claims as JSON, Markdown and a table: `python -m analysis.claims_table claims.json`."""

import argparse
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from analysis.read import read_json
from experiments.support.cli import run_cli


def show_ratio(ratio: float) -> str:
    """A ratio in three digits or so: 0.97x, 1.30x, 15.2x, 1,240x; overflow where infinite."""
    if ratio == float("inf"):
        return "overflow"
    digits = 2 if ratio < 10 else 1 if ratio < 100 else 0
    return f"{ratio:,.{digits}f}x"


HEADINGS = ("Verdict", "Claim", "Required", "Estimate", "95 % interval")
SYMBOLS = {"at least": ">=", "at most": "<=", "within": "within"}
SHOWN: Mapping[str, Callable[[float], str]] = {
    "x": show_ratio,
    "%": "{:.2%}".format,
    "": "{:.3f}".format,
}
COLORS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow", "REPORTED": "dim"}
NOTE = (
    "PASS: the whole 95 % interval meets what is required. FAIL: none of it does. INCONCLUSIVE: it "
    "straddles the bound, or the row says what is too few. REPORTED: nothing required. k3 KL: "
    "interquartile mean over steps and seeds. Noise floor: that of the bf16 arm, in nats a token. "
    "One seed: the interval is within that run; another may differ more. With few seeds intervals "
    "are rough (see analysis/stats.py)."
)


class Claim(BaseModel):
    """One judged claim about one model.

    Attributes:
        name: key in the study's `claims` section, or a name of ours where nothing is required.
        statement: the quantity that is estimated.
        estimate: point estimate; low and high bound its 95 % interval. None where the data give
            none.
        exact: nothing is random, low and high equal the estimate.
        bound: how the threshold binds; "within" means between -threshold and threshold.
        noise_floor: interquartile mean of the bf16 arm's k3 KL in nats a token.
        unit: "x" for a ratio of arms, "%" for a share, empty for a difference.
        detail: what a reader wants to see next to the estimate.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    model: str
    name: str
    statement: str
    estimate: float | None
    low: float | None
    high: float | None
    exact: bool = False
    bound: Literal["at least", "at most", "within"] | None
    threshold: float | None
    verdict: Literal["PASS", "FAIL", "INCONCLUSIVE", "REPORTED"]
    noise_floor: float | None = None
    num_seeds: int
    unit: Literal["x", "%", ""]
    detail: str

    def cells(self) -> tuple[str, ...]:
        """The row's texts, one for each of HEADINGS."""
        show = SHOWN[self.unit]
        required = "-"
        if self.bound is not None and self.threshold is not None:
            required = f"{SYMBOLS[self.bound]} {show(self.threshold)}"
        estimate, interval = "-", "-"
        if self.estimate is not None and self.low is not None and self.high is not None:
            estimate, low, high = map(show, (self.estimate, self.low, self.high))
            interval = "exact" if self.exact else f"{low} to {high}"
        return (self.verdict, self.statement, required, estimate, interval)


class ClaimsTable(BaseModel):
    """All judged claims of a study, in the order of its models."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    study: str
    claims: tuple[Claim, ...]

    def to_markdown(self) -> str:
        """A GitHub table and the note that explains its verdicts."""
        headings = ("Model", *HEADINGS, "Noise floor", "Seeds")
        rows = [headings, ("---",) * len(headings), *map(_markdown_cells, self.claims)]
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([*lines, "", NOTE, ""])

    def show(self, console: Console) -> None:
        """Prints one table a model, with coloured verdicts."""
        for model, claims in groupby(self.claims, lambda claim: claim.model):
            console.print(_model_table(f"{self.study}: {model}", list(claims)))
        console.print(f"[dim]{NOTE}[/]")


def _model_table(title: str, claims: list[Claim]) -> Table:
    floors = [claim.noise_floor for claim in claims if claim.noise_floor is not None]
    noise_floor = f", noise floor {floors[0]:.2e} nats a token" if floors else ""
    title = f"{title}, number of seeds: {claims[0].num_seeds}{noise_floor}"
    table = Table(*HEADINGS, title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for claim in claims:
        verdict, statement, *rest = claim.cells()
        explained = f"{statement}\n[dim]{claim.detail}[/]"
        table.add_row(f"[{COLORS[verdict]}]{verdict}[/]", explained, *rest)
    return table


def _markdown_cells(claim: Claim) -> tuple[str, ...]:
    verdict, statement, *rest = claim.cells()
    noise_floor = "" if claim.noise_floor is None else f"{claim.noise_floor:.2e}"
    explained = f"{statement}<br><sub>{claim.detail}</sub>"
    return (claim.model, f"**{verdict}**", explained, *rest, noise_floor, str(claim.num_seeds))


def read_table(path: Path) -> ClaimsTable:
    """The table in a claims.json; ValueError names a missing or garbled file."""
    return read_json(path, ClaimsTable, "judge the claims with make run")


def main() -> None:
    """Prints the claims.json that the command line names."""
    parser = argparse.ArgumentParser(description="Print a table of judged claims.")
    parser.add_argument("table", type=Path, help="a claims.json")
    read_table(parser.parse_args().table).show(Console())


if __name__ == "__main__":
    run_cli(main)
