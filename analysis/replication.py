"""A recorded study once more, with fresh seeds: which of its claims hold again?

    python -m analysis.replication plan RECORD --out FILE
    python -m analysis.replication judge RECORD --study FILE [--keep]

RECORD is a folder of `experiments/records`. `make verify RECORD=name` plans, runs the planned study
and judges it. `--keep` adds the outcome to the record's folder `replications`, which the tables of
`docs/results.md` show.
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from analysis.claims import judge as judge_results
from analysis.claims_table import COLORS, Claim, ClaimsTable, ClaimVerdict, read_table
from analysis.load import read_metrics, require_distinct_runs
from analysis.markdown import markdown_table
from analysis.record import require_commit
from analysis.replication_file import REPLICATIONS, Replication, read_replications, replication_of
from experiments.runs.settings import read_run
from experiments.study.load import load_study
from experiments.study.schema import Study
from experiments.support.cli import RESULTS, run_cli
from experiments.support.json_files import REMAKE, write_json

STUDY_FILE = "study.yaml"  # of a record
RENEWED = {"study", "seeds"}  # keys of the study that a replication replaces
OUTCOMES: Mapping[ClaimVerdict, str] = {
    "PASS": "holds",
    "FAIL": "does not hold",
    "INCONCLUSIVE": "undecided",
    "REPORTED": "nothing to hold",
    "NOT RUN": "not run",
}
NOTE = (
    "Again: the same study with seeds that are not in the record, judged alone. Recorded before: "
    "the record that this one has replaced, of other code or from another machine. Undecided: the "
    "interval straddles the bound; it is of 90 % for mean rewards, of 95 % for all else. What the "
    "recorded study claims is judged by it alone; verdicts are not averaged."
)


class Comparison(BaseModel):
    """One claim, recorded and again."""

    recorded: Claim
    again: Claim

    @property
    def outcome(self) -> str:
        """What the second study says of the claim."""
        return OUTCOMES[self.again.verdict]

    @property
    def is_contradicted(self) -> bool:
        """Whether what passed now fails."""
        return (self.recorded.verdict, self.again.verdict) == ("PASS", "FAIL")


def planned_study(record: Path) -> dict[str, object]:
    """The record's study with as many seeds, the next ones after all that are recorded."""
    study = _recorded_study(record)
    read_table(record / "claims.json")  # what will be compared, before anything is trained
    first = max(_used_seeds(record)) + 1
    seeds = list(range(first, first + len(study.seeds)))
    named = {"study": f"{study.study}-seeds{seeds[0]}-{seeds[-1]}", "seeds": seeds}
    return yaml.safe_load((record / STUDY_FILE).read_text()) | named  # type: ignore[no-any-return]


def require_replication(record: Path, study: Study) -> None:
    """ValueError where a study is not the recorded one with seeds that no replication has."""
    if used := sorted(_used_seeds(record) & set(study.seeds)):
        raise ValueError(
            f"study {study.study}: seeds: {', '.join(map(str, used))}: in {record} already; "
            "plan again"
        )
    own, recorded = (it.model_dump(exclude=RENEWED) for it in (study, _recorded_study(record)))
    if changed := [key for key in own if own[key] != recorded[key]]:
        raise ValueError(
            f"study {study.study}: {', '.join(changed)}: not as in {record / STUDY_FILE}; "
            "plan again"
        )


def _recorded_study(record: Path) -> Study:
    path = record / STUDY_FILE
    if not path.is_file():
        raise ValueError(f"{path}: missing; name a folder of experiments/records")
    return load_study(path)


def _used_seeds(record: Path) -> set[int]:
    again = (seed for it in read_replications(record) for seed in it.seeds)
    return {*_recorded_study(record).seeds, *again}


def compare(recorded: ClaimsTable, again: ClaimsTable) -> list[Comparison]:
    """Claim by claim, in the record's order; ValueError where the claims are not the same."""
    by_key = {(claim.model, claim.name): claim for claim in again.claims}
    if again.keys != recorded.keys:
        raise ValueError(
            f"{again.study}: makes other claims than the record of {recorded.study}; run "
            "make figures, which judges the record again, and plan again"
        )
    return [
        Comparison(recorded=claim, again=by_key[claim.model, claim.name])
        for claim in recorded.claims
    ]


def replications_text(record: Path) -> str:
    """Markdown of all replications of a record, a table each; empty where there is none."""
    recorded = read_table(record / "claims.json")
    parts = [part for it in read_replications(record) for part in _sections(recorded, it)]
    return "\n\n".join([*parts, NOTE]) + "\n" if parts else ""


def _sections(recorded: ClaimsTable, again: Replication) -> Iterator[str]:
    commits = sorted({(run.commit or "none")[:7] for run in again.runs})
    machines = sorted({" and ".join(run.gpus) or run.cpu for run in again.runs})
    seeds = ", ".join(map(str, again.seeds))
    before = "Recorded before: seeds" if again.study == recorded.study else "Seeds"
    yield f"**{before} {seeds}; commit {', '.join(commits)}; {', '.join(machines)}**"
    yield markdown_table(
        {
            "Model": it.recorded.model,
            "Claim": it.recorded.statement,
            "Required": it.recorded.required,
            "Recorded": f"{it.recorded.verdict}: {_shown(it.recorded)}",
            "Again, or before": f"**{it.outcome}**: {_shown(it.again)}",
        }
        for it in compare(recorded, again.claims)
    )


def _shown(claim: Claim) -> str:
    return claim.detail if claim.estimate is None and claim.detail else claim.with_interval


def show(comparisons: list[Comparison], console: Console) -> None:
    """One line a claim, as wide as a terminal."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("again", "claim", "recorded", "again"):
        table.add_column(heading)
    for it in comparisons:
        color = COLORS[it.again.verdict]
        statement = f"{it.recorded.model}: {it.recorded.statement.replace('nvfp4-', '')}"
        recorded = f"{it.recorded.verdict} {it.recorded.shown_estimate}"
        table.add_row(f"[{color}]{it.outcome}[/]", statement, recorded, it.again.shown_estimate)
    console.print(table)


def judge(record: Path, study: Study, results: Path, keep: bool) -> None:
    """Prints the comparison and, if asked for, keeps it.

    Raises:
        ValueError: a claim that the record passed now fails, a run is missing or of other settings,
            or a copy of a recorded one, or the study is no replication of the record; of what is
            kept, no commit holds the code.
    """
    require_replication(record, study)
    manifests = [read_run(study, run, results, REMAKE) for run in study.runs]
    folders = {run: record / run.id for run in _recorded_study(record).runs}
    folders |= {run: results / run.id for run in study.runs}
    require_distinct_runs({run: read_metrics(it) for run, it in folders.items()})
    claims = judge_results(study, results)
    comparisons = compare(read_table(record / "claims.json"), claims)
    show(comparisons, Console())
    if keep:
        for manifest in manifests:
            require_commit(manifest, results / manifest.run)
        (record / REPLICATIONS).mkdir(exist_ok=True)
        path = record / REPLICATIONS / f"seeds{study.seeds[0]}-{study.seeds[-1]}.json"
        write_json(path, replication_of(study, claims, manifests).model_dump(mode="json"))
        print(f"{path}: show it with make figures and commit it")
    contradicted = [it.recorded for it in comparisons if it.is_contradicted]
    if contradicted:
        names = ", ".join(f"{claim.model}: {claim.statement}" for claim in contradicted)
        raise ValueError(f"recorded as PASS and now FAIL: {names}")


def main() -> None:
    """Parses the command line and plans or judges a replication."""
    parser = argparse.ArgumentParser(description="Run a recorded study again with fresh seeds.")
    commands = parser.add_subparsers(required=True, dest="command")
    plan = commands.add_parser("plan", help="write a study file with fresh seeds")
    plan.add_argument("record", type=Path, help="folder of a recorded study")
    plan.add_argument("--out", type=Path, required=True, help="the study file")
    judged = commands.add_parser("judge", help="compare its claims", parents=[RESULTS])
    judged.add_argument("record", type=Path, help="folder of a recorded study")
    judged.add_argument("--study", type=Path, required=True, help="the planned study file")
    judged.add_argument("--keep", action="store_true", help="add it to the record")
    arguments = parser.parse_args()
    if arguments.command == "judge":
        study = load_study(arguments.study)
        judge(arguments.record, study, arguments.results, arguments.keep)
        return
    planned = planned_study(arguments.record)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(yaml.safe_dump(planned, sort_keys=False))
    print(f"{arguments.out}: seeds {', '.join(map(str, planned['seeds']))}")  # type: ignore[call-overload]


if __name__ == "__main__":
    run_cli(main)
