import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from analysis.claims import judge
from analysis.claims_table import ClaimsTable, read_table
from analysis.record import portable, record_study, require_commit, require_one_base_a_seed
from experiments.runs.manifest import RunManifest
from experiments.study.schema import Study
from experiments.support.json_files import read_json, write_json
from tests.manifests import make_manifest

COMMITTED = {"commit": "abc", "dirty": False, "diff_sha256": "d"}


def test_runs_of_committed_code_are_recorded() -> None:
    require_commit(make_manifest(git=COMMITTED), Path("run"))


@pytest.mark.parametrize(
    ("git", "message"),
    [
        (COMMITTED | {"dirty": True}, "trained by changes that no commit holds"),
        (COMMITTED | {"commit": None}, "trained by code that no commit holds"),
        (None, "trained by code that no commit holds"),
    ],
    ids=["dirty", "no-commit", "no-checkout"],
)
def test_runs_of_uncommitted_code_are_refused(git: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(ValueError, match=rf"run/manifest.json: git: {message}; commit and"):
        require_commit(make_manifest(git=git), Path("run"))


def run_from(base: str, arm: str, seed: int) -> RunManifest:
    run = f"nano_{arm}.cell_seed{seed}"
    named = {"run": run, "arm": arm, "cell": "cell", "seed": seed, "seeds": {"run": seed}}
    return make_manifest(**named, digests={"base": base})


def test_a_cell_has_one_base_a_seed() -> None:
    bf16, qat = "bf16", "nvfp4-qat"
    whole = [run_from("x", bf16, 0), run_from("x", qat, 0), run_from("y", bf16, 1)]
    require_one_base_a_seed("cell", [*whole, run_from("y", qat, 1)])
    names = "cell cell: nano_bf16.cell_seed1 and nano_nvfp4-qat.cell_seed1 start from different"
    with pytest.raises(ValueError, match=names):
        require_one_base_a_seed("cell", [*whole, run_from("z", qat, 1)])


def test_a_recorded_command_names_no_folder_of_a_machine() -> None:
    command = "/a/python3 -m experiments.launch.run --study s/x.yaml --log '/b c/train.log'"
    shown = "python3 -m experiments.launch.run --study s/x.yaml --log train.log"
    assert portable(command) == shown and portable(shown) == shown


@pytest.fixture
def record(study_file: Path, results_dir: Path, tmp_path: Path) -> Path:
    """The record of a study."""
    return record_study(study_file, results_dir, tmp_path / "records")


def content_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_recorded_claims_are_of_the_recorded_runs(
    study: Study, study_file: Path, results_dir: Path, tmp_path: Path
) -> None:
    stale = results_dir / "studies" / study.study
    judge(study.model_copy(update={"seeds": (0, 1)}), results_dir).write(stale)
    record = record_study(study_file, results_dir, tmp_path)
    recorded = read_table(record / "claims.json")
    assert recorded == judge(study, record) != read_table(stale / "claims.json")


@pytest.mark.parametrize("file", ["manifest.json", "metrics.jsonl", "eval.json", "drift.jsonl"])
def test_a_source_that_cannot_be_read_leaves_the_old_record_as_it_is(
    study: Study, study_file: Path, results_dir: Path, record: Path, file: str
) -> None:
    before = content_of(record.parent)
    damaged = results_dir / study.runs[-1].id / file
    damaged.write_text("{")
    with pytest.raises(ValueError, match=re.escape(str(damaged))):
        record_study(study_file, results_dir, record.parent)
    assert content_of(record.parent) == before


def test_a_disk_that_fills_up_leaves_the_old_record_as_it_is(
    study_file: Path, results_dir: Path, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content_of(record.parent)
    monkeypatch.setattr(ClaimsTable, "write", Mock(side_effect=OSError("full")))
    with pytest.raises(OSError, match="full"):
        record_study(study_file, results_dir, record.parent)
    assert content_of(record.parent) == before


def test_what_a_kill_left_is_put_right(
    study: Study, study_file: Path, results_dir: Path, record: Path
) -> None:
    before = content_of(record.parent)
    record.rename(record.with_name(".default.former"))
    record.with_name(".default.partial").mkdir()
    damaged = results_dir / study.runs[0].id / "metrics.jsonl"
    whole = damaged.read_text()
    damaged.write_text("{")
    with pytest.raises(ValueError, match=re.escape(str(damaged))):
        record_study(study_file, results_dir, record.parent)
    assert content_of(record.parent) == before
    damaged.write_text(whole)
    record_study(study_file, results_dir, record.parent)
    assert [path.name for path in record.parent.iterdir()] == ["default"]


def test_evaluations_of_other_settings_are_not_recorded(
    study_file: Path, results_dir: Path, tmp_path: Path
) -> None:
    hotter = tmp_path / "hotter.yaml"
    content = yaml.safe_load(study_file.read_text())
    content["evaluation"]["temperature"] = 0.9
    hotter.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=r"eval.json: settings.temperature: 0.6, and in study"):
        record_study(hotter, results_dir, tmp_path / "records")
    assert not (tmp_path / "records").exists()


def test_records_of_one_day_keep_each_others_outcomes(
    study: Study, study_file: Path, results_dir: Path, record: Path
) -> None:
    for hour in ("08", "12"):
        for run in study.runs:
            path = results_dir / run.id / "manifest.json"
            manifest = read_json(path) | {"started_at": f"2027-01-01T{hour}:00:00+00:00"}
            write_json(path, manifest)
        record_study(study_file, results_dir, record.parent)
    kept = {path.name for path in (record / "replications").iterdir()}
    assert kept == {f"recorded-2027-01-01T{hour}-00-00.json" for hour in ("00", "08")}
