"""Judges a study's claims: `python -m analysis.claims --study FILE --results DIR --out DIR`.

There is one way to judge and there are two sets of rules, one a room: a study's `judged_by` says
which.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from analysis.arms import summarize_arms
from analysis.claims_table import ClaimsTable
from analysis.collapse import judge as collapse
from analysis.collapse.outcome_table import outcome_table
from analysis.load import load_results
from analysis.parity import judge as parity
from experiments.runs.manifest import MANIFEST, read_manifest
from experiments.runs.record import file_of, has_file
from experiments.study.load import load_study
from experiments.study.protocol import judging_digest, protocol_digest
from experiments.study.schema import Study
from experiments.support.cli import STUDY, run_cli
from experiments.support.json_files import REMAKE

RULE_SETS: Mapping[str, Callable[[Study, Path], ClaimsTable]] = {
    "parity": lambda study, folder: parity.judge_study(study, load_results(study, folder)),
    "collapse": collapse.judge_study,
}


def judge(study: Study, folder: Path) -> ClaimsTable:
    """All claims of a study, and its arms."""
    _require_protocol(study, folder)
    table = RULE_SETS[study.judged_by](study, folder)
    return table.model_copy(update={"arms": summarize_arms(study, folder)})


def _require_protocol(study: Study, folder: Path) -> None:
    """Refuses runs of another protocol; those that are older than a digest are judged without."""
    page, judging = protocol_digest(study), judging_digest(study)
    for run in study.runs:
        if not has_file(folder / run.id, MANIFEST):
            continue
        where = file_of(folder / run.id, MANIFEST)
        manifest = read_manifest(folder / run.id, REMAKE)
        if page is not None and manifest.protocol_sha256 != page:
            raise ValueError(
                f"{where}: protocol_sha256: not that of {study.protocol}; what changed after the "
                "runs goes below its heading Changes"
            )
        if manifest.judging_sha256 not in (None, judging):
            raise ValueError(
                f"{where}: judging_sha256: study {study.study} was to be judged in another way "
                "when this run started (models, arms, seeds, own_base, cells, judged_by, primary, "
                "protocol, claims, evaluation, rl.advantage or margins); put the study file back "
                "as it was, or give it and its models new names and run it again"
            )


def outcomes_text(study: Study, folder: Path) -> str:
    """Markdown of what became of each setting's runs; empty where the study has no settings."""
    return outcome_table(study, folder) if study.judged_by == "collapse" else ""


def claims_page(study: Study, folder: Path, table: ClaimsTable) -> str:
    """Markdown of judged claims, and of what became of the runs."""
    return "\n".join(filter(None, [table.to_markdown(), outcomes_text(study, folder)]))


def main() -> None:
    """Writes claims.json and claims.md, and prints the table."""
    parser = argparse.ArgumentParser(description="Judge a study's claims.", parents=[STUDY])
    parser.add_argument("--results", type=Path, required=True, help="results or records folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of claims.json, claims.md")
    args = parser.parse_args()
    study = load_study(args.study)
    table = judge(study, args.results)
    table.write(args.out)
    (args.out / "claims.md").write_text(claims_page(study, args.results, table))
    table.show(Console())


if __name__ == "__main__":
    run_cli(main)
