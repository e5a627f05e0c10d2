from pathlib import Path

import pytest

from analysis.claims import judge_study
from analysis.claims_table import read_table
from analysis.figures import FIGURES
from analysis.load import load_results
from analysis.readme import fill_blocks
from analysis.results import Results
from experiments.study.load import load_study
from experiments.study.schema import ROOT, Study

BLOCKS = """before
<!-- begin:claims -->
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
    for name in FIGURES:
        (record / "figures" / f"{name}.png").touch()
    return tmp_path / "root"


def test_blocks_are_filled_and_the_rest_is_kept(root: Path) -> None:
    filled = fill_blocks(BLOCKS, root)
    assert filled.startswith("before\n<!-- begin:claims -->\n")
    assert filled.endswith("<!-- end:figures -->\nafter\n")
    assert "old" not in filled
    assert "\nbetween\n" in filled
    assert filled.count("| nano-dense | **") == 7
    assert "(experiments/records/default/figures/kl.png)" in filled
    assert "reward.png" not in filled


def test_filling_twice_changes_nothing(root: Path) -> None:
    once = fill_blocks(BLOCKS, root)
    assert fill_blocks(once, root) == once


def test_without_names_all_figures_are_shown(root: Path) -> None:
    filled = fill_blocks("<!-- begin:figures -->\n<!-- end:figures -->", root)
    assert [f"{name}.png" in filled for name in FIGURES] == [True] * len(FIGURES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- begin:claims -->\n", "has no partner"),
        ("<!-- begin:claims -->\n<!-- end:figures -->", "has no partner"),
        ("<!-- begin:clams -->\n<!-- end:clams -->", "misspelt"),
        ("<!-- begin:figures default kll -->\n<!-- end:figures -->", "no figure 'kll'"),
        ("<!-- begin:claims other -->\n<!-- end:claims -->", "other/claims.json: missing"),
        ("<!-- begin:benchmarks -->\n<!-- end:benchmarks -->", "rollout_h200.json: missing"),
    ],
    ids=["no end", "crossed", "misspelt", "unknown figure", "unknown study", "no benchmark"],
)
def test_bad_markers_are_refused(root: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fill_blocks(text, root)


def test_missing_figure_is_named(root: Path) -> None:
    (root / "experiments/records/default/figures/kl.png").unlink()
    with pytest.raises(ValueError, match=r"kl.png: missing; draw it with make figures"):
        fill_blocks(BLOCKS, root)


COMMITTED = sorted(path.parent for path in (ROOT / "experiments" / "records").glob("*/study.yaml"))


@pytest.mark.parametrize("record", COMMITTED, ids=lambda path: path.name)
def test_committed_claims_follow_from_the_committed_runs(record: Path) -> None:
    study = load_study(record / "study.yaml")
    results = load_results(record, [run.id for run in study.runs])
    judged = judge_study(study, results)
    recorded = read_table(record / "claims.json")
    # as shown: the last digits of a mean depend on numpy's version
    assert [it.cells() for it in judged.claims] == [it.cells() for it in recorded.claims]


@pytest.mark.skipif(not COMMITTED, reason="no study is recorded yet")
def test_readme_shows_the_committed_records() -> None:
    current = (ROOT / "README.md").read_text()
    assert "<!-- begin:claims" in current
    assert fill_blocks(current, ROOT) == current
