"""Judged claims as JSON, Markdown and a table: `python -m analysis.claims_table claims.json`."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from analysis.markdown import markdown_table, without_empty
from analysis.stats import LEVEL, Verdict
from experiments.runs.summary import ArmSummary
from experiments.support.cli import run_cli
from experiments.support.json_files import read_model


def show_ratio(ratio: float) -> str:
    """A ratio in three digits or so: 0.97x, 1.30x, 15.2x, 1,240x; overflow where infinite."""
    if ratio == float("inf"):
        return "overflow"
    digits = 2 if ratio < 10 else 1 if ratio < 100 else 0
    return f"{ratio:,.{digits}f}x"


# Processors add in different orders, and records are to be the same bytes on all of them.
Rounded = Annotated[float, AfterValidator(lambda value: float(f"{value:.12g}"))]
SYMBOLS = {"at least": ">=", "at most": "<=", "within": "within"}
SHOWN: Mapping[str, Callable[[float], str]] = {
    "x": show_ratio,
    "%": "{:.2%}".format,
    "log-odds": "{:+.2f}".format,
    "": "{:.3f}".format,
    "count": "{:,.0f}".format,
}
MARK = "†"
STATEMENT_BESIDE_NUMBERS = 40  # characters that 80 columns leave for it
ClaimVerdict = Literal[Verdict, "REPORTED", "NOT RUN"]
COLORS: Mapping[ClaimVerdict, str] = {
    "PASS": "green",
    "FAIL": "red",
    "INCONCLUSIVE": "yellow",
    "REPORTED": "dim",
    "NOT RUN": "dim",
}
# of claims about mismatch and accuracy
NOTE = (
    "PASS: the whole 95 % interval meets what is required. FAIL: none of it does. INCONCLUSIVE: it "
    "straddles the bound, or the row says what is too few. REPORTED: nothing required, or a single "
    "seed. Intervals: Student's t over seeds. k3 KL: mean over all sampled tokens of a run, ratio "
    "in the typical seed. Accuracy: difference in log-odds of answers sampled at temperature "
    "{temperature}; `accuracy` with all checkpoints evaluated in BF16, `served` with NVFP4 arms "
    "evaluated in NVFP4. Noise floor: k3 KL of the bf16 arm in the typical seed, in nats a token. "
    "Verdicts are not adjusted for the number of claims."
)


class Claim(BaseModel, frozen=True, extra="forbid", ser_json_inf_nan="strings"):
    """One judged claim about one model."""

    model: str
    name: str  # key in the study's `claims` section, or a name of ours where nothing is required
    statement: str  # the quantity that is estimated
    # point estimate; low and high bound its interval. None where the data give none
    estimate: Rounded | None
    low: Rounded | None
    high: Rounded | None
    exact: bool = False  # nothing is random, low and high equal the estimate
    # how the threshold binds; "within" means between -threshold and threshold
    bound: Literal["at least", "at most", "within"] | None
    threshold: float | None
    verdict: ClaimVerdict
    noise_floor: Rounded | None = None  # k3 KL of the bf16 arm in the typical seed, in nats a token
    num_seeds: int
    # "x" for a ratio of arms, "%" for a share, "count", empty for a plain difference
    unit: Literal["x", "%", "log-odds", "", "count"]
    detail: str  # what a reader wants to see next to the estimate

    @property
    def required(self) -> str:
        """The bound and its threshold."""
        if self.bound is None or self.threshold is None:
            return "-"
        return f"{SYMBOLS[self.bound]} {SHOWN[self.unit](self.threshold).removeprefix('+')}"

    @property
    def shown_estimate(self) -> str:
        """The point estimate."""
        return "-" if self.estimate is None else SHOWN[self.unit](self.estimate)

    @property
    def interval(self) -> str:
        """Both ends of the interval."""
        if self.low is None or self.high is None:
            return "-"
        show = SHOWN[self.unit]
        return "exact" if self.exact else f"{show(self.low)} to {show(self.high)}"

    @property
    def with_interval(self) -> str:
        """Estimate and, where there is one, its interval."""
        interval = f" ({self.interval})" if self.interval != "-" else ""
        return f"{self.shown_estimate}{interval}"

    def cells(self) -> tuple[str, ...]:
        """Verdict, statement, what is required, estimate and interval."""
        return (self.verdict, self.statement, self.required, self.shown_estimate, self.interval)


class ClaimsTable(BaseModel, frozen=True, extra="forbid", ser_json_inf_nan="strings"):
    """All judged claims of a study, in the order of its models."""

    study: str
    claims: tuple[Claim, ...]
    level: float = LEVEL  # of the intervals
    # by model, what a reader must know of its runs before any verdict
    marks: Mapping[str, tuple[str, ...]] = {}
    # by run id, the step of its collapse, of the runs that collapsed
    collapsed_at: Mapping[str, int] = {}
    note: str  # how verdicts, estimates and intervals come about
    arms: tuple[ArmSummary, ...] = ()  # what the runs of each model and arm come to

    @property
    def keys(self) -> set[tuple[str, str]]:
        """Model and name of each claim."""
        return {(claim.model, claim.name) for claim in self.claims}

    @property
    def interval_heading(self) -> str:
        """Of the column of intervals."""
        return f"{100 * self.level:g} % interval"

    def to_markdown(self) -> str:
        """A GitHub table without empty columns, marked rows, and the notes that explain them."""
        explained = [f"{MARK} {model}: {'; '.join(it)}." for model, it in self.marks.items() if it]
        rows = [
            {
                "Model": claim.model,
                "Verdict": f"**{claim.verdict}**",
                "Claim": f"{claim.statement}<br><sub>{claim.detail}</sub>",
                "Required": claim.required,
                "Estimate": claim.shown_estimate,
                self.interval_heading: claim.interval,
                "Noise floor": f"{claim.noise_floor:.2e}" if claim.noise_floor else "",
                "Seeds": str(claim.num_seeds),
            }
            for claim in map(self._marked, self.claims)
        ]
        table = markdown_table(without_empty(rows))
        return "\n\n".join([table, *explained, self.note]) + "\n"

    def write(self, folder: Path) -> None:
        """Writes claims.json."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "claims.json").write_text(self.model_dump_json(indent=2) + "\n")

    def _marked(self, claim: Claim) -> Claim:
        if not self.marks.get(claim.model):
            return claim
        return claim.model_copy(update={"model": f"{claim.model} {MARK}"})

    def show(self, console: Console, with_details: bool = False) -> None:
        """Prints a table a model with one line a claim; with details a second line each."""
        models = dict.fromkeys([*(claim.model for claim in self.claims), *self.marks])
        for model in models:
            claims = tuple(claim for claim in self.claims if claim.model == model)
            for line in self._heading(model, claims):
                console.print(line, highlight=False, soft_wrap=True)
            if claims:
                console.print(self._terminal_table(claims, with_details))
        if with_details:
            console.print(f"[dim]{self.note}[/]", highlight=False)

    def _heading(self, model: str, claims: Sequence[Claim]) -> list[str]:
        floors = [claim.noise_floor for claim in claims if claim.noise_floor is not None]
        noise_floor = f", noise floor {floors[0]:.2e} nats a token" if floors else ""
        num_seeds = claims[0].num_seeds if claims else 0
        seeds = f", {num_seeds} seed{'s' if num_seeds > 1 else ''}" if claims else ""
        return [
            f"[bold]{self.study}: {model}[/]{seeds}{noise_floor}",
            *(f"[yellow]{mark}[/]" for mark in self.marks.get(model, ())),
        ]

    def _terminal_table(self, claims: tuple[Claim, ...], with_details: bool) -> Table:
        """At most 80 columns wide, never folded without details.

        Numbers have columns where most claims have numbers and all statements leave room for them;
        else they follow the statement.
        """
        have_numbers = 2 * sum(claim.estimate is not None for claim in claims) > len(claims)
        leave_room = max(len(claim.statement) for claim in claims) <= STATEMENT_BESIDE_NUMBERS
        has_columns = have_numbers and leave_room
        table = Table(box=None, show_header=has_columns, pad_edge=False, padding=(0, 1, 0, 0))
        headings = ("", "", "value", self.interval_heading, "required") if has_columns else ("", "")
        for heading in headings:
            table.add_column(heading, header_style="dim", no_wrap=not with_details)
        for claim in claims:
            _, statement, required, estimate, interval = claim.cells()
            # arms in short: of four, three are in NVFP4
            statement = statement.replace("nvfp4-", "")
            detail = claim.detail
            if claim.estimate is not None and not has_columns:
                statement += f": {estimate}"
                detail += f"; {self.interval_heading} {interval}, required {required}"
            if with_details:
                statement += f"\n[dim]{escape(detail)}[/]"
            colored = f"[{COLORS[claim.verdict]}]{claim.verdict}[/]"
            numbers = (estimate, interval, required) if has_columns else ()
            table.add_row(colored, statement, *numbers)
        return table


def read_table(path: Path, hint: str = "judge the claims with make run") -> ClaimsTable:
    """The table in a claims.json; ValueError names a missing or damaged file."""
    return read_model(path, ClaimsTable, hint)


def show_file(path: Path, with_details: bool = False) -> None:
    """Prints a claims.json, and what says more of it."""
    read_table(path).show(Console(), with_details)
    if not with_details:
        print(f"more: python -m analysis.claims_table --details {path}")


def main() -> None:
    """Prints the claims.json that the command line names."""
    parser = argparse.ArgumentParser(description="Print a table of judged claims.")
    parser.add_argument("table", type=Path, help="a claims.json")
    parser.add_argument("--details", action="store_true", help="say more of every claim")
    arguments = parser.parse_args()
    show_file(arguments.table, arguments.details)


if __name__ == "__main__":
    run_cli(main)
