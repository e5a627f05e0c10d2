"""The claims of a study of any kind, judged from its results or its record."""

from pathlib import Path

from analysis import claims
from analysis.claims_table import ClaimsTable
from analysis.collapse import judge as collapse
from analysis.load import load_results
from experiments.study.schema import Study


def judge(study: Study, folder: Path) -> ClaimsTable:
    """All claims of a study.

    Raises:
        ValueError: a run is missing, damaged, or of other settings, or cannot be judged.
    """
    if study.judged_by == "collapse":
        return collapse.judge_study(study, folder)
    return claims.judge_study(study, load_results(study, folder))


def write_claims(study: Study, folder: Path, out: Path) -> ClaimsTable:
    """As `judge`, and writes claims.json and claims.md."""
    if study.judged_by == "collapse":
        return collapse.write_claims(study, folder, out)
    table = judge(study, folder)
    table.write(out)
    return table
