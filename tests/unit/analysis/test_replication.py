"""A recorded study again with fresh seeds: what is planned, compared and kept."""

import shutil
from pathlib import Path

import pytest
import yaml

from analysis import claims
from analysis.claims_table import ClaimsTable, read_table
from analysis.record import record_study
from analysis.replication import (
    compare,
    judge,
    planned_study,
    read_replications,
    replications_text,
)
from experiments.runs.record import FILES
from experiments.study.load import load_study
from experiments.study.schema import ROOT, Study
from tests.files import edit_json
from tests.records import set_manifests
from tests.study_files import write_study
from tests.unit.analysis.synthetic_results import NOISE_FLOOR, rewrite_metrics, write_results


def run_again(record: Path, folder: Path) -> Study:
    """The planned study, finished in a folder of results."""
    folder.mkdir(exist_ok=True)
    path = folder / "planned.yaml"
    path.write_text(yaml.safe_dump(planned_study(record)))
    study = load_study(path)
    write_results(study, folder)
    return study


def test_seeds_are_fresh_and_all_else_is_the_records(record: Path, study: Study) -> None:
    planned = planned_study(record)
    assert planned["seeds"] == [5, 6, 7, 8, 9]
    assert planned["study"] == "default-seeds5-9"
    recorded = yaml.safe_load((record / "study.yaml").read_text())
    same = recorded.keys() - {"seeds", "study"}
    assert {key: planned[key] for key in same} == {key: recorded[key] for key in same}


def test_claims_that_cannot_be_read_are_named_before_anything_is_trained(record: Path) -> None:
    (record / "claims.json").write_text("{")
    with pytest.raises(ValueError, match=r"claims\.json"):
        planned_study(record)


def test_what_is_kept_is_shown_and_its_seeds_are_not_used_again(
    record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replications_text(record) == ""
    again = run_again(record, tmp_path / "again")
    judge(record, again, tmp_path / "again", keep=True)
    shown = capsys.readouterr().out
    assert shown.count("holds") >= 4, shown
    (kept,) = read_replications(record)
    assert kept.seeds == again.seeds and len(kept.runs) == len(again.runs)
    text = replications_text(record)
    assert text.startswith("**Seeds 5, 6, 7, 8, 9; commit ")
    assert text.count("| nano-dense |") == text.count("| nano-moe |") == 11
    assert planned_study(record)["seeds"] == [10, 11, 12, 13, 14]


def test_a_study_that_is_recorded_again_keeps_its_replications(
    record: Path, study: Study, study_file: Path, results_dir: Path, tmp_path: Path
) -> None:
    judge(record, run_again(record, tmp_path / "again"), tmp_path / "again", keep=True)
    kept = read_replications(record)
    (record / "a_former_run").mkdir()
    assert record_study(study_file, results_dir, record.parent) == record
    assert kept and read_replications(record) == kept
    assert planned_study(record)["seeds"] == [10, 11, 12, 13, 14]
    files = {"replications", "claims.json", "study.yaml"}
    assert {path.name for path in record.iterdir()} == files | set(FILES.values())


ANOTHER_TIME = "2031-05-06T07:08:09+00:00"  # as if other runs had come to the same numbers


def test_a_record_that_others_replace_stays_as_one_more_replication(
    record: Path, study: Study, study_file: Path, results_dir: Path
) -> None:
    before = claims.judge(study, results_dir)
    set_manifests(results_dir, started_at=ANOTHER_TIME)
    record_study(study_file, results_dir, record.parent)
    (kept,) = read_replications(record)
    assert (kept.study, kept.seeds, kept.claims) == (study.study, study.seeds, before)
    assert replications_text(record).startswith("**Recorded before: seeds 0, 1, 2, 3, 4; commit ")
    record_study(study_file, results_dir, record.parent)
    assert read_replications(record) == [kept]


def test_outcomes_that_the_study_no_longer_claims_are_left_to_the_history(
    record: Path, study_file: Path, results_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_json(record / "claims.json", lambda table: table["claims"].pop(0))
    set_manifests(results_dir, started_at=ANOTHER_TIME)
    record_study(study_file, results_dir, record.parent)
    assert "the record before makes other claims" in capsys.readouterr().out
    assert read_replications(record) == []


def test_replications_of_other_settings_stay_in_no_record(
    record: Path, study_file: Path, results_dir: Path, tmp_path: Path
) -> None:
    judge(record, run_again(record, tmp_path / "again"), tmp_path / "again", keep=True)
    changed_file = write_study(tmp_path, {"rl/lr": 2e-5}, study_file)
    shutil.rmtree(results_dir)
    write_results(load_study(changed_file), results_dir)
    with pytest.raises(ValueError, match=r"default/replications: of other settings than study"):
        record_study(changed_file, results_dir, record.parent)
    assert (record / "claims.json").is_file() and len(read_replications(record)) == 1


def test_runs_of_uncommitted_code_are_compared_and_not_kept(record: Path, tmp_path: Path) -> None:
    again = run_again(record, tmp_path / "again")
    path = tmp_path / "again" / again.runs[3].id / "manifest.json"
    edit_json(path, lambda manifest: manifest["git"].update(dirty=True))
    judge(record, again, tmp_path / "again", keep=False)
    with pytest.raises(ValueError, match=f"{again.runs[3].id}/manifest.json: git: trained by"):
        judge(record, again, tmp_path / "again", keep=True)
    assert read_replications(record) == []


def test_what_is_not_the_recorded_study_with_fresh_seeds_is_refused(
    record: Path, study: Study, results_dir: Path, tmp_path: Path
) -> None:
    again = run_again(record, tmp_path / "again")
    one_old = again.model_copy(update={"seeds": (4, *again.seeds)})
    other_rate = again.model_copy(update={"rl": again.rl.model_copy(update={"lr": 1e-5})})
    for refused, results, reason in (
        (study, results_dir, "study default: seeds: 0, 1, 2, 3, 4: in"),
        (one_old, tmp_path / "again", "study default-seeds5-9: seeds: 4: in"),
        (other_rate, tmp_path / "again", "study default-seeds5-9: rl: not as in"),
    ):
        with pytest.raises(ValueError, match=reason):
            judge(record, refused, results, keep=True)
    assert read_replications(record) == []
    judge(record, again, tmp_path / "again", keep=True)
    with pytest.raises(ValueError, match="seeds: 5, 6, 7, 8, 9: in"):
        judge(record, again, tmp_path / "again", keep=True)


def changed(table: ClaimsTable, index: int, **fields: object) -> ClaimsTable:
    edited = list(table.claims)
    edited[index] = edited[index].model_copy(update=fields)
    return table.model_copy(update={"claims": tuple(edited)})


@pytest.mark.parametrize(
    ("recorded", "again", "outcome", "is_contradicted"),
    [
        ("PASS", "PASS", "holds", False),
        ("PASS", "FAIL", "does not hold", True),
        ("PASS", "INCONCLUSIVE", "undecided", False),
        ("INCONCLUSIVE", "FAIL", "does not hold", False),
        ("REPORTED", "REPORTED", "nothing to hold", False),
        ("PASS", "NOT RUN", "not run", False),
    ],
)
def test_outcome_is_the_second_studys(
    recorded: str, again: str, outcome: str, is_contradicted: bool
) -> None:
    table = read_table(ROOT / "experiments" / "records" / "default-long" / "claims.json")
    pairs = compare(changed(table, 1, verdict=recorded), changed(table, 1, verdict=again))
    assert (pairs[1].outcome, pairs[1].is_contradicted) == (outcome, is_contradicted)
    assert not any(pair.is_contradicted for pair in pairs[:1] + pairs[2:])


def test_a_contradicted_claim_ends_in_an_error_that_names_it(record: Path, tmp_path: Path) -> None:
    results = tmp_path / "again"
    again = run_again(record, results)
    rewrite_metrics(results, again, "nvfp4-qat", **{"rollout_corr/k3_kl": 100 * NOISE_FLOOR})
    with pytest.raises(ValueError, match="now FAIL: nano-dense: k3 KL, nvfp4-qat / bf16"):
        judge(record, again, results, keep=False)


def test_claims_of_other_runs_that_lie_in_the_results_are_not_compared(
    record: Path, tmp_path: Path
) -> None:
    results = tmp_path / "again"
    again = run_again(record, results)
    judged = results / "studies" / again.study
    judged.mkdir(parents=True)
    changed(read_table(record / "claims.json"), 1, verdict="FAIL").write(judged)
    judge(record, again, results, keep=True)
    (kept,) = read_replications(record)
    assert kept.claims == claims.judge(again, results)


def test_other_claims_and_missing_records_are_refused(record: Path, tmp_path: Path) -> None:
    table = read_table(record / "claims.json")
    fewer = table.model_copy(update={"claims": table.claims[:-1]})
    with pytest.raises(ValueError, match="makes other claims than the record of default"):
        compare(table, fewer)
    with pytest.raises(ValueError, match=r"study.yaml: missing; name a folder of"):
        planned_study(tmp_path / "none")


def test_copies_of_recorded_runs_are_no_replication(
    record: Path, study: Study, results_dir: Path, tmp_path: Path
) -> None:
    again = run_again(record, tmp_path / "again")
    copied, source = again.runs[0], study.runs[0]
    shutil.copy(results_dir / source.id / "metrics.jsonl", tmp_path / "again" / copied.id)
    with pytest.raises(ValueError, match=rf"{copied.id}: has the metrics of {source.id} in every"):
        judge(record, again, tmp_path / "again", keep=False)
