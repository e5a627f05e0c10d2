import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.claims_table import read_table
from analysis.collapse.judge import judge_study as judge_grid_study
from analysis.documents import RECORDS, documents, fill_blocks
from analysis.figure_files import NAMES
from analysis.figures import FIGURES
from analysis.load import load_results
from analysis.parity.judge import judge_study
from analysis.results import Results
from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES, Study

BLOCKS = """before
<!-- begin:claims default -->
old
<!-- end:claims -->
between
<!-- begin:figures default kl memory -->
<!-- end:figures -->
after
"""


@pytest.fixture
def root(study: Study, results: Results, tmp_path: Path) -> Path:
    """A repository root that holds a record of the default study."""
    record = tmp_path / "root" / "experiments" / "records" / "default"
    (record / "figures").mkdir(parents=True)
    (record / "claims.json").write_text(judge_study(study, results).model_dump_json())
    shutil.copy(STUDIES / "default.yaml", record / "study.yaml")
    for name in FIGURES:
        (record / "figures" / f"{name}.png").touch()
    return tmp_path / "root"


def test_blocks_are_filled_and_the_rest_is_kept(root: Path) -> None:
    filled = fill_blocks(BLOCKS, root, root)
    assert filled.startswith("before\n<!-- begin:claims default -->\n")
    assert filled.endswith("<!-- end:figures -->\nafter\n")
    assert "\nold\n" not in filled
    assert "\nbetween\n" in filled
    assert filled.count("| nano-dense | **") == 11
    assert "In all arms: advantages `group`, correction `token_tis`." in filled
    assert "](experiments/records/default/figures/kl.png)" in filled
    assert filled.count("![default: ") == 2, "the text for who cannot see it names the study"
    assert "memory.svg" not in filled


def test_filling_twice_changes_nothing(root: Path) -> None:
    once = fill_blocks(BLOCKS, root, root)
    assert fill_blocks(once, root, root) == once


def test_without_names_all_figures_but_that_of_drift_are_shown(root: Path) -> None:
    filled = fill_blocks("<!-- begin:figures default -->\n<!-- end:figures -->", root, root)
    assert [f"{name}.png" in filled for name in FIGURES] == [name in NAMES for name in FIGURES]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- begin:claims -->\n", "has no partner"),
        ("<!-- begin:claims -->\n<!-- end:figures -->", "has no partner"),
        ("<!-- begin:clams -->\n<!-- end:clams -->", "misspelt"),
        ("<!-- begin:figures default kll -->\n<!-- end:figures -->", "no figure 'kll'"),
        ("<!-- begin:claims other -->\n<!-- end:claims -->", "other/claims.json: missing"),
        ("<!-- begin:benchmarks h200 -->\n<!-- end:benchmarks -->", "rollout_h200.json: missing"),
        ("<!-- begin:claims -->\n<!-- end:claims -->", "name a study"),
    ],
    ids=[
        "no end",
        "crossed",
        "misspelt",
        "unknown figure",
        "unknown study",
        "no benchmark",
        "no name",
    ],
)
def test_bad_markers_are_refused(root: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fill_blocks(text, root, root)


def test_missing_figure_is_named(root: Path) -> None:
    (root / "experiments/records/default/figures/kl.png").unlink()
    with pytest.raises(ValueError, match=r"kl.png: missing; draw it with make figures"):
        fill_blocks(BLOCKS, root, root)


COMMITTED = sorted(path.parent for path in (ROOT / "experiments" / "records").glob("*/study.yaml"))


@pytest.mark.parametrize("record", COMMITTED, ids=lambda path: path.name)
def test_committed_claims_follow_from_the_committed_runs(record: Path) -> None:
    study = load_study(record / "study.yaml")
    if study.judged_by == "collapse":
        judged = judge_grid_study(study, record)
    else:
        judged = judge_study(study, load_results(study, record))
    recorded = read_table(record / "claims.json")
    # as shown: the last digits of a mean depend on numpy's version
    assert [it.cells() for it in judged.claims] == [it.cells() for it in recorded.claims]


@pytest.mark.parametrize("path", list(documents(ROOT)), ids=lambda path: path.name)
def test_documents_show_the_committed_records(path: Path) -> None:
    text = path.read_text()
    assert fill_blocks(text, ROOT, path.parent) == text


def test_benchmarks_have_figures_too(root: Path) -> None:
    folder = root / "experiments" / "records" / "benchmarks" / "figures"
    folder.mkdir(parents=True)
    (folder / "qwen3_memory.png").touch()
    block = "<!-- begin:figures benchmarks qwen3_memory -->\n<!-- end:figures -->"
    filled = fill_blocks(block, root, root)
    assert "![benchmarks: Weights of Qwen3" in filled
    assert "(experiments/records/benchmarks/figures/qwen3_memory.png)" in filled


def test_figures_are_linked_from_where_the_document_lies(root: Path) -> None:
    block = "<!-- begin:figures default kl -->\n<!-- end:figures -->"
    filled = fill_blocks(block, root, root / "docs")
    assert "(../experiments/records/default/figures/kl.png)" in filled


def test_summary_has_a_row_for_each_model(root: Path) -> None:
    filled = fill_blocks("<!-- begin:studies -->\n<!-- end:studies -->", root, root)
    rows = [line for line in filled.splitlines() if line.startswith("| `default`")]
    assert [row.split(" | ")[1] for row in rows] == ["nano-dense", "nano-moe"]
    assert all("PASS" in row and "| `token_tis` |" in row for row in rows)


def test_claims_name_commits_and_machines_of_their_runs() -> None:
    filled = fill_blocks("<!-- begin:claims collapse -->\n<!-- end:claims -->", ROOT, ROOT)
    h200, h100 = (f"a run on 1 NVIDIA {it}" for it in ("H200", "H100 80GB HBM3"))
    cpu = "cores of Intel(R) Xeon(R) Processor"
    assert f"35 runs at commit fff47d7 on 64 {cpu}, {h200}" in filled
    assert f"60 runs at commit 999aef5 on 16 {cpu}, {h100}" in filled


def test_a_study_is_called_not_recorded_if_and_only_if_it_has_no_record() -> None:
    rows = [line.split(" | ") for line in (STUDIES / "README.md").read_text().splitlines()]
    listed = {
        file: text for files, *text in rows for file in re.findall(r"`(\w+)\.yaml`", files) if text
    }
    studies = {path.stem: load_study(path) for path in STUDIES.glob("*.yaml")}
    assert listed.keys() == studies.keys()
    for name, (text,) in listed.items():
        # runs of random weights have no record of their own
        has_record = (
            ROOT / RECORDS / studies[name].study
        ).is_dir() or "`records/benchmarks`" in text
        assert ("not recorded yet" in text) != has_record, name


def test_outcomes_have_a_row_for_each_setting() -> None:
    filled = fill_blocks("<!-- begin:outcomes collapse -->\n<!-- end:outcomes -->", ROOT, ROOT)
    rows = [line for line in filled.splitlines() if line.startswith("| small-")]
    assert len(rows) == 19
    assert "| 2e-4 | nvfp4-noqat | none | reward | 4 of 5 | 28% to 99% |" in filled


@pytest.mark.parametrize("record", ["verl-nano", "collapse-verl"])
def test_figures_are_drawn_again_to_the_same_bytes(record: str, tmp_path: Path) -> None:
    folder = ROOT / RECORDS / record
    options = ["--study", folder / "study.yaml", "--results", folder, "--out", tmp_path]
    subprocess.run([sys.executable, "-m", "analysis.figures", *options], cwd=ROOT, check=True)
    committed = {path.name: path.read_bytes() for path in (folder / "figures").iterdir()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == committed
