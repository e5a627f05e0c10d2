import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.load import load_results, read_metrics
from experiments.study.schema import Run, Study
from experiments.support.json_files import write_json, write_jsonl
from tests.files import edit_json, read_rows, set_keys
from tests.records import pack
from tests.unit.analysis.synthetic_results import stop

RUN = Run("nano-dense", "nvfp4-qat", 1)


@pytest.fixture
def of_one(study: Study) -> Study:
    """A study of that run alone."""
    models = {RUN.model: study.models[RUN.model]}
    return study.model_copy(update={"models": models, "arms": (RUN.arm,), "seeds": (RUN.seed,)})


def test_series_are_seeds_by_steps(study: Study, results_dir: Path) -> None:
    results = load_results(study, results_dir)
    kl = results.series("nano-dense", "nvfp4-qat", "rollout_corr/k3_kl")
    assert kl.shape == (len(study.seeds), 30)
    lines = (results_dir / RUN.id / "metrics.jsonl").read_text().splitlines()
    assert kl[1].tolist() == [json.loads(line)["rollout_corr/k3_kl"] for line in lines]


def test_correct_answers_are_seeds_by_prompts(study: Study, results_dir: Path) -> None:
    results = load_results(study, results_dir)
    step = results.last_evaluated("nano-dense", "nvfp4-qat")
    trained_SP, samples = results.correct_answers("nano-dense", "nvfp4-qat", step, "bf16")
    base_SP, _ = results.correct_answers("nano-dense", "nvfp4-qat", 0, "bf16")
    assert trained_SP.shape == base_SP.shape == (len(study.seeds), 256) and samples == 4
    assert set(np.unique(trained_SP)) <= {0, 1, 2, 3, 4}
    assert trained_SP.mean() > base_SP.mean()


def test_of_a_repeated_step_the_last_row_wins(tmp_path: Path) -> None:
    rows = [{"step": 1, "x": 1.0}, {"step": 2, "x": 2.0}, {"step": 2, "x": 3.0}]
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    assert read_metrics(tmp_path).to_dict("list") == {"step": [1, 2], "x": [1.0, 3.0]}


def test_records_load_like_results(study: Study, results_dir: Path, tmp_path: Path) -> None:
    pack(results_dir, tmp_path / "record")
    read, expected = (load_results(study, it) for it in (tmp_path / "record", results_dir))
    pd.testing.assert_frame_equal(read.metrics, expected.metrics, check_like=True)
    pd.testing.assert_frame_equal(read.evals, expected.evals)
    assert read.manifests == expected.manifests and read.drift.keys() == expected.drift.keys()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"ste', r"metrics.jsonl: line 2: not JSON"),
        ("metrics.jsonl", "", r"metrics.jsonl: empty"),
        ("eval.json", "[{}]", r"eval.json: 0.step: missing"),
        ("eval.json", "{", r"eval.json: not JSON"),
        ("manifest.json", '{"status": "finished", "run": "x"}', r"manifest.json: study: missing"),
        *(
            (file, None, rf"{RUN.id}/{file}: missing; run the study")
            for file in ("metrics.jsonl", "eval.json", "manifest.json")
        ),
    ],
)
def test_garbled_or_missing_file_is_named(
    of_one: Study, results_dir: Path, file: str, content: str | None, message: str
) -> None:
    path = results_dir / RUN.id / file
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_results(of_one, results_dir)


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        ("failed", "out of memory", r"the run is failed \(out of memory\); run it to the end"),
        ("running", None, r"the run is running; run it to the end"),
    ],
)
def test_unfinished_run_is_refused(
    of_one: Study, results_dir: Path, status: str, reason: str | None, message: str
) -> None:
    path = results_dir / RUN.id / "manifest.json"
    edit_json(path, lambda it: it["memory"].update(measured_bf16_gib=None))  # as while it trains
    set_keys(path, status=status, reason=reason)
    with pytest.raises(ValueError, match=message):
        load_results(of_one, results_dir)


def test_prompt_count_must_fit(of_one: Study, results_dir: Path) -> None:
    edit_json(results_dir / RUN.id / "eval.json", lambda rows: rows[0]["correct"].pop())
    with pytest.raises(ValueError, match=r"eval.json: 0: correct: 255 of 256 prompts"):
        load_results(of_one, results_dir)


def test_a_run_of_too_few_steps_is_refused(of_one: Study, results_dir: Path) -> None:
    path = results_dir / RUN.id / "metrics.jsonl"
    write_jsonl(path, read_rows(path)[:-1])
    with pytest.raises(ValueError, match=rf"{RUN.id}/metrics.jsonl: step 30 is missing; delete"):
        load_results(of_one, results_dir)


def test_an_evaluation_in_one_precision_alone_is_refused(study: Study, results_dir: Path) -> None:
    path = results_dir / RUN.id / "eval.json"
    *others, last = json.loads(path.read_text())
    write_json(path, others)
    missing = f"step {last['step']}: no {last['decoding']} evaluation in {last['precision']}"
    with pytest.raises(ValueError, match=f"eval.json: {missing}"):
        load_results(study, results_dir)


def test_missing_evaluation_is_refused(study: Study, results_dir: Path) -> None:
    path = results_dir / RUN.id / "eval.json"
    write_json(path, [it for it in json.loads(path.read_text()) if it["step"] == 0])
    results = load_results(study, results_dir)
    with pytest.raises(ValueError, match="nvfp4-qat: no trained step is evaluated in all runs"):
        results.last_evaluated(RUN.model, RUN.arm)
    with pytest.raises(ValueError, match="sampled evaluation in nvfp4 at step 30: 4 of 5 seeds"):
        results.correct_answers(RUN.model, RUN.arm, 30, "nvfp4")


def test_stopped_arm_is_compared_over_the_steps_that_all_its_runs_did(
    study: Study, results_dir: Path
) -> None:
    arm = "nvfp4-noqat"
    for seed, num_steps in zip(study.seeds, (12, 20, 30), strict=False):
        stop(results_dir, Run("nano-dense", arm, seed), num_steps)
    results = load_results(study, results_dir)
    whole = results.series("nano-dense", "bf16", "rollout_corr/k3_kl")
    kl, noise = results.series_beside("nano-dense", arm, "bf16", "rollout_corr/k3_kl")
    assert kl.shape == noise.shape == (len(study.seeds), 12)
    assert np.array_equal(noise, whole[:, :12])
    assert results.steps("nano-dense", arm).tolist() == list(range(1, 13))


def test_evaluations_of_other_settings_are_refused(study: Study, results_dir: Path) -> None:
    hotter = study.evaluation.model_copy(update={"temperature": 0.9})
    refused = r"eval.json: settings.temperature: 0.6, and in study default 0.9; evaluate again"
    with pytest.raises(ValueError, match=refused):
        load_results(study.model_copy(update={"evaluation": hotter}), results_dir)


def test_evaluations_that_do_not_name_their_settings_are_read_from_records_alone(
    of_one: Study, results_dir: Path
) -> None:
    path = results_dir / RUN.id / "eval.json"
    edit_json(path, lambda rows: [it.update(settings=None) for it in rows])
    with pytest.raises(ValueError, match=r"eval.json: settings.prompts: None, and in study"):
        load_results(of_one, results_dir)
    pack(results_dir, results_dir / "record")
    load_results(of_one, results_dir / "record")
