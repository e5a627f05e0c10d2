"""Pages and their tables are what templates, records and the catalogue of metrics give."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from analysis.claims_table import read_table
from analysis.collapse.judge import judge_study as judge_grid_study
from analysis.documents import PAGES, RECORDS, Page, pages, written
from analysis.figure_files import recorded_names
from analysis.figures import FIGURES
from analysis.load import load_results, recorded_study
from analysis.metrics import CATALOGUE
from analysis.parity.judge import judge_study
from analysis.results import Results
from analysis.tables import SECTIONS, benchmark_text
from experiments.rl.metric_names import K3_KL
from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES, Study
from qat_core.mismatch import mismatch_metrics

PAGE = """before
{{ claims("default") }}
between
{{ figures("default", "kl", "memory") }}
after
"""


@pytest.fixture
def root(study: Study, study_file: Path, results: Results, tmp_path: Path) -> Path:
    """A repository root that holds a record of the default study."""
    record = tmp_path / "root" / "experiments" / "records" / "default"
    (record / "figures").mkdir(parents=True)
    (record / "claims.json").write_text(judge_study(study, results).model_dump_json())
    shutil.copy(study_file, record / "study.yaml")
    for name in FIGURES:
        (record / "figures" / f"{name}.png").touch()
    return tmp_path / "root"


def test_tables_and_figures_are_filled_in_and_the_rest_is_kept(root: Path) -> None:
    filled = written(PAGE, root, root / "docs")
    assert filled.startswith("before\n| Model | ")
    assert filled.endswith("memory.png)\nafter\n")
    assert "\nbetween\n" in filled
    assert filled.count("| nano-dense | **") == 11
    assert "In all arms: advantages `group`, correction `token_tis`." in filled
    assert "](../experiments/records/default/figures/kl.png)" in filled
    assert filled.count("![default: ") == 2, "the text for who cannot see it names the study"


TABLE = """Goals

| Model | At | Speed |
| --- | --- | --- |
| dense | 32 | 1,140 (1.14x) |
| dense | 256 | 650 (0.65x), **missed** |
| moe | 256 | 1080 (1.08x) |
"""


@pytest.mark.parametrize(
    ("sentence", "filled"),
    [
        ('{{ cell(t, "Speed", "dense", "256") }}', "650 (0.65x), **missed**"),
        ('{{ cell(t, "Speed", "dense", "256")|number }}', "650"),
        ('{{ cell(t, "Speed", "dense", "256")|number(2) }}', "0.65"),
        ('{{ cells(t, "Speed", "dense")|span }}', "650 to 1,140"),
        ('{{ cells(t, "Speed", "256")|span(2) }}', "0.65 to 1.08"),
        ('{{ cells(t, "At", "moe")|span }}', "256"),
        ('{{ "1.5e-04 nats"|number }}', "1.5e-04"),
    ],
)
def test_a_sentence_shows_a_cell_of_a_table(root: Path, sentence: str, filled: str) -> None:
    assert written(f"{{% set t = {TABLE!r} %}}{sentence}", root, root) == filled


def test_a_sentence_shows_a_claim_as_it_is_or_the_other_way_round() -> None:
    c9 = 'claim("collapse-smollm2-confirm", "C9")'
    sentences = f"{{{{ {c9}|shown }}}}; {{{{ {c9}|opposite|shown }}}}"
    assert written(sentences, ROOT, ROOT) == "-0.161 (-0.217 to -0.105); 0.161 (0.105 to 0.217)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ clams('default') }}", "'clams' is undefined"),
        ("{{ claims('default' }}", "unexpected '}'"),
        ("{{ figures('default', 'kll') }}", "no figure 'kll'"),
        ("{{ figures('default', 'curves') }}", "curves.png: missing; draw it with make figures"),
        ("{{ claims('other') }}", "other/study.yaml"),
        ("{{ benchmarks('h200') }}", "rollout_h200.json: missing"),
        ("{{ claim('default', 'C9').estimate }}", "0 claims 'C9'; there are reward_gain of nano"),
        ("{{ claim('default', 'reward_gain') }}", "2 claims 'reward_gain'"),
        ("{{ cell('', 'Speed', 'dense') }}", "no row with dense and a column 'Speed'"),
        (f"{{{{ cell({TABLE!r}, 'Speed', 'dense') }}}}", "2 rows with dense and a column 'Speed'"),
        ("{{ 'none'|number }}", "'none' has no number 1"),
    ],
)
def test_what_cannot_be_filled_in_is_named(root: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        written(text, root, root)


def test_a_template_is_named_with_its_fault(root: Path) -> None:
    source = root / PAGES / "docs" / "page.md.j2"
    source.parent.mkdir(parents=True)
    source.write_text("{{ clams() }}")
    with pytest.raises(ValueError, match=r"^analysis/pages/docs/page.md.j2: 'clams'"):
        Page(root / "docs" / "page.md", "docs/page.md.j2").text(root)


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


@pytest.mark.parametrize("page", pages(), ids=lambda it: str(it.path.relative_to(ROOT)))
def test_pages_are_what_their_templates_and_the_records_give(page: Page) -> None:
    assert page.path.read_text() == page.text()


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


@pytest.mark.long
@pytest.mark.parametrize("record", ["verl-nano", "collapse-verl"])
def test_figures_are_drawn_again_to_the_same_bytes(record: str, tmp_path: Path) -> None:
    folder = ROOT / RECORDS / record
    options = ["--study", folder / "study.yaml", "--results", folder, "--out", tmp_path]
    subprocess.run([sys.executable, "-m", "analysis.figures", *options], cwd=ROOT, check=True)
    committed = {path.name: path.read_bytes() for path in (folder / "figures").iterdir()}
    kept = {f"{name}.png" for name in recorded_names(recorded_study(folder))}
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name in kept}
    assert drawn == committed and len(drawn) > 1


def test_catalogue_has_every_mismatch_metric_and_no_other() -> None:
    log_probs = torch.log(torch.tensor([[0.5, 0.25], [0.5, 0.125]]))
    computed = mismatch_metrics(log_probs, log_probs, torch.ones(2, 2), threshold=2.0)
    assert set(computed) == {key for key in CATALOGUE if key.startswith("rollout_corr/")}


def recorded_columns() -> set[str]:
    files = (ROOT / "experiments" / "records").glob("*/metrics.parquet")
    return {name for file in files for name in pq.read_schema(file).names}


def test_catalogue_has_every_metric_of_the_records() -> None:
    columns = recorded_columns()
    assert K3_KL in columns and "perf/mfu/actor" in columns, "of both trainers"
    assert columns - set(CATALOGUE) == {"run", "step"}


def test_catalogue_has_what_mlflow_gets_at_the_end_of_a_run() -> None:
    accuracies = {f"eval/{p}/{d}" for p in ("bf16", "nvfp4") for d in ("greedy", "sampled")}
    assert {key for key in CATALOGUE if key.startswith("eval/")} == accuracies


SETUP = {
    "hardware": {"gpus": ["GPU X"]},
    "versions": {"torch": "3.4", "transformers": "5.6"},
    "settings": {"rounds": 2048},
    "columns": {
        "call": {"heading": "Kernel"},
        "us": {"heading": "us", "format": ",.1f"},
        "ratio": {"heading": "of BF16's", "format": ".2f"},
        "goal": {"heading": "Goal", "format": "g", "bounds": "ratio"},
    },
    "note": "How to read it.",
}
ROW = {"call": "pack", "us": [1, 1036.44, 9000], "ratio": 1.01, "goal": 1.01, "hidden": True}


def _text(folder: Path, *records: dict[str, Any]) -> str:
    for number, record in enumerate(records):
        name = f"codec_x{number or ''}.json"
        (folder / name).write_text(json.dumps(SETUP | record))
    return benchmark_text("codec", folder, "x")


def test_a_row_has_its_columns_units_quartiles_and_goal(tmp_path: Path) -> None:
    rows = [ROW, ROW | {"us": None, "ratio": 1.0101}, ROW | {"goal": None}]
    assert _text(tmp_path, {"rows": rows}).splitlines() == [
        "Measured on: GPU X, torch 3.4, transformers 5.6, commit not recorded; rounds 2,048.",
        "",
        "| Kernel | us | of BF16's | Goal |",
        "| --- | --- | --- | --- |",
        "| pack | 1,036.4 (1.0 to 9,000.0) | 1.01 | 1.01, met |",
        "| pack |  | 1.01 | 1.01, **missed** |",
        "| pack | 1,036.4 (1.0 to 9,000.0) | 1.01 |  |",
        "",
        "How to read it.",
    ]


def test_settings_that_records_do_not_share_are_columns(tmp_path: Path) -> None:
    commit = {"git": {"commit": "0123456789", "dirty": False}}
    other = {"rows": [ROW], "settings": {"rounds": 2048, "host": "D"}, **commit}
    lines = _text(tmp_path, {"rows": [ROW]}, other).splitlines()
    assert lines[2].startswith("| commit | host | Kernel |") and "; rounds 2,048." in lines[0]
    assert lines[4].startswith("| not recorded |  | pack |")
    assert lines[5].startswith("| 0123456 | D | pack |")


WITHOUT_GOAL = {key: ROW[key] for key in ("call", "us", "ratio")}


@pytest.mark.parametrize(
    ("row", "said"),
    [(ROW | {"ratio": "fast"}, "ratio"), (ROW | {"us": []}, "us"), (WITHOUT_GOAL, "goal: missing")],
)
def test_a_row_that_its_columns_cannot_hold_is_refused_by_name(
    row: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"(?s)codec_x\.json.*{said}"):
        _text(tmp_path, {"rows": [row]})


@pytest.mark.parametrize("kind", sorted(SECTIONS))
def test_a_missing_record_is_named(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"_y\.json: missing; run the benchmark"):
        benchmark_text(kind, tmp_path, "y")
