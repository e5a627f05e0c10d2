"""Rows of studies that ask whether QAT is as safe as BF16, of another study's runs."""

import shutil
from pathlib import Path

import yaml

from analysis.claims import write_claims
from analysis.claims_table import ClaimsTable
from analysis.tables.collapses import collapses_text
from experiments.runs.record import FILES
from experiments.study.load import load_study
from experiments.study.schema import ROOT

RECORD = ROOT / "experiments" / "records" / "collapse-confirm"


def judged(folder: Path, without: tuple[str, ...]) -> tuple[ClaimsTable, str]:
    """Claims, and the row, of QAT and BF16 and what is left of the other cells."""
    folder.mkdir()
    study = yaml.safe_load((RECORD / "study.yaml").read_text()) | {"primary": "C4"}
    study["cells"]["lr2e-4"]["arms"] = ["nvfp4-qat", "bf16"]
    for cell in without:
        del study["cells"][cell]
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    for name in FILES.values():
        if (RECORD / name).is_file():
            shutil.copy(RECORD / name, folder)
    table = write_claims(load_study(folder / "study.yaml"), folder, folder)
    lines = collapses_text(folder.parent).splitlines()
    return table, next(line for line in lines if "small-dense" in line)


def test_without_a_plain_arm_the_corrected_one_stands_for_no_qat(tmp_path: Path) -> None:
    table, row = judged(tmp_path / "safety", ("lr2e-4-centred",))
    assert {claim.name: claim.verdict for claim in table.claims} == {
        "C3": "INCONCLUSIVE",
        "C4": "INCONCLUSIVE",
        "C10": "INCONCLUSIVE",
        "C11": "INCONCLUSIVE",
    }
    assert "p of C10" in table.note
    counts = "| 2e-4 | 1 of 10, token TIS | 2 of 10 | 0 of 10 |"
    assert counts in row and row.endswith("| C4 INCONCLUSIVE |"), row
    assert "| +0.013 (" in row, "token TIS less QAT"


def test_a_study_of_qat_and_bf16_alone_has_a_row_too(tmp_path: Path) -> None:
    cells = yaml.safe_load((RECORD / "study.yaml").read_text())["cells"]
    table, row = judged(tmp_path / "again", tuple(cell for cell in cells if cell != "lr2e-4"))
    assert [claim.name for claim in table.claims] == ["C3", "C4", "C11"]
    assert "C10" not in table.note and "C4 is primary" in table.note
    assert "| 2e-4 | not run | 2 of 10 | 0 of 10 | not run | C4 INCONCLUSIVE |" in row, row
