"""The runs that a study has, and what decides each of them."""

from pathlib import Path

import pytest

from experiments.study.load import load_study
from experiments.study.schema import STUDIES, Run
from tests.study_files import load_changed


def test_runs_are_models_times_arms_times_seeds() -> None:
    study = load_study(STUDIES / "default_long.yaml")
    assert len(study.runs) == len(study.models) * len(study.arms) * len(study.seeds)
    assert len({run.id for run in study.runs}) == len(study.runs)
    assert study.find_run("nano-moe_nvfp4-qat_seed1") == Run("nano-moe", "nvfp4-qat", 1)


def test_unknown_run_lists_those_that_there_are() -> None:
    study = load_study(STUDIES / "default_long.yaml")
    with pytest.raises(ValueError, match="has no run 'x'; it has nano-dense_bf16_seed0, "):
        study.find_run("x")


def test_training_config_holds_what_decides_the_training_and_no_more(tmp_path: Path) -> None:
    run = load_study(STUDIES / "default_long.yaml").runs[0]
    plain = load_changed(tmp_path, "study", "default").training_config(run)
    assert load_changed(tmp_path, "claims/qat_kl_ratio", 9.0).training_config(run) == plain
    assert load_changed(tmp_path, "evaluation/prompts", 9).training_config(run) == plain
    assert load_changed(tmp_path, "rl/lr", 1e-9).training_config(run) != plain
    assert load_changed(tmp_path, "task/largest", 7).training_config(run) != plain


def test_studies_name_their_models_apart() -> None:
    """Runs are found by name in `results`: of equal names, one study would redo the other's."""
    files = sorted(STUDIES.glob("*.yaml"))
    names = [name for file in files for name in load_study(file).models]
    assert len(names) == len(set(names))


def test_seeds_may_have_bases_of_their_own(tmp_path: Path) -> None:
    shared, own = (load_changed(tmp_path, "own_base", value) for value in (False, True))
    run = shared.find_run("nano-moe_bf16_seed2")
    assert (shared.base_of(run), own.base_of(run)) == ("nano-moe", "nano-moe_seed2")
    assert shared.bases == {name: (name, 0) for name in shared.models}
    assert own.bases["nano-moe_seed2"] == ("nano-moe", 2)
    assert set(own.bases) == {own.base_of(run) for run in own.runs}
