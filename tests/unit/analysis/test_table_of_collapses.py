"""The row of a study that asks whether QAT is as safe as BF16, of another study's runs."""

from pathlib import Path

import yaml

from analysis.collapse.judge import write_claims
from analysis.tables.collapses import collapses_text
from experiments.study.load import load_study
from experiments.study.schema import ROOT

RECORD = ROOT / "experiments" / "records" / "collapse-confirm"


def test_without_a_plain_arm_the_corrected_one_stands_for_no_qat(tmp_path: Path) -> None:
    folder = tmp_path / "safety"
    folder.mkdir()
    study = yaml.safe_load((RECORD / "study.yaml").read_text()) | {"primary": "C4"}
    study["cells"]["lr2e-4"]["arms"] = ["nvfp4-qat", "bf16"]
    del study["cells"]["lr2e-4-centred"]
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    for run in RECORD.glob("*_seed*"):
        (folder / run.name).symlink_to(run)
    table = write_claims(load_study(folder / "study.yaml"), folder, folder)
    assert {claim.name: claim.verdict for claim in table.claims} == {
        "C3": "INCONCLUSIVE",
        "C4": "INCONCLUSIVE",
        "C10": "INCONCLUSIVE",
        "C11": "INCONCLUSIVE",
    }
    row = next(line for line in collapses_text(tmp_path).splitlines() if "small-dense" in line)
    counts = "| 2e-4 | 1 of 10, token TIS | 2 of 10 | 0 of 10 |"
    assert counts in row and row.endswith("| C4 INCONCLUSIVE |"), row
    assert "| +0.013 (" in row, "token TIS less QAT"
