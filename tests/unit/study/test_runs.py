"""The runs of a study and of its cells: what decides each, and what a dry run says of them."""

import re
from pathlib import Path

import pytest

from experiments.launch.progress import expected_time
from experiments.study.load import load_study
from experiments.study.preview import preview
from experiments.study.schema import STUDIES, Run
from tests.study_files import changed_study


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
    plain = changed_study(tmp_path, {"study": "default"}).training_config(run)
    assert changed_study(tmp_path, {"claims/qat_kl_ratio": 9.0}).training_config(run) == plain
    assert changed_study(tmp_path, {"evaluation/prompts": 9}).training_config(run) == plain
    assert changed_study(tmp_path, {"rl/lr": 1e-9}).training_config(run) != plain
    assert changed_study(tmp_path, {"task/largest": 7}).training_config(run) != plain


def test_studies_name_their_models_apart() -> None:
    """Runs are found by name in `results`: of equal names, one study would redo the other's."""
    files = sorted(STUDIES.glob("*.yaml"))
    names = [name for file in files for name in load_study(file).models]
    assert len(names) == len(set(names))


def test_seeds_may_have_bases_of_their_own(tmp_path: Path) -> None:
    shared, own = (changed_study(tmp_path, {"own_base": value}) for value in (False, True))
    run = shared.find_run("nano-moe_bf16_seed2")
    assert (shared.base_of(run), own.base_of(run)) == ("nano-moe", "nano-moe_seed2")
    assert shared.bases == {name: (name, 0) for name in shared.models}
    assert own.bases["nano-moe_seed2"] == ("nano-moe", 2)
    assert set(own.bases) == {own.base_of(run) for run in own.runs}


CELLS = {
    "low": {"lr": 1e-5},
    "masked": {"arms": ["nvfp4-noqat"], "correction": "sequence_mask", "models": ["nano-moe"]},
}


def test_cells_are_runs_of_their_own(tmp_path: Path) -> None:
    study = changed_study(tmp_path, {"cells": CELLS})
    assert len(study.runs) == (2 * 4 + 1) * len(study.seeds)
    assert len({run.id for run in study.runs}) == len(study.runs)
    low = study.find_run("nano-dense_bf16.low_seed0")
    masked = study.find_run("nano-moe_nvfp4-noqat.masked_seed2")
    assert study.rl_of(low.cell).lr == 1e-5
    assert study.rl_of(masked.cell) == study.rl.model_copy(update={"correction": "sequence_mask"})
    config = study.training_config(masked)
    assert (config["cell"], config["rl"]["correction"]) == ("masked", "sequence_mask")
    assert [run.arm for run in study.runs[:4]] == list(study.arms), "arms of a seed in a row"


def test_a_cell_replays_routes_in_models_with_experts(tmp_path: Path) -> None:
    cells = {"plain": {}, "r3": {"models": ["nano-moe"], "routing_replay": True}}
    study = changed_study(tmp_path, {"cells": cells})
    replaying = {run.model for run in study.runs if study.rl_of(run.cell).routing_replay}
    assert replaying == {"nano-moe"}
    line = "rl.routing_replay: nano-dense has no experts; remove the key, or set it in cells of oth"
    with pytest.raises(ValueError, match=line):
        changed_study(tmp_path, {"cells": {"r3": {"routing_replay": True}}})


def test_without_cells_a_run_has_none() -> None:
    study = load_study(STUDIES / "default_long.yaml")
    assert "cell" not in study.training_config(study.runs[0])
    assert study.rl_of(None) is study.rl


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        pytest.param({"lrr": 1.0}, "cells.x.lrr: unknown key; did you mean lr?", id="unknown key"),
        pytest.param({"lr": -1.0}, "cells.x.lr: -1.0 does not fit", id="out of range"),
        pytest.param({"lr": 2.0}, "cells.x.lr: Input should be less than", id="of rl alone"),
        pytest.param({"arms": ["bf15"]}, "cells.x.arms.0: 'bf15' is not allowed", id="unknown arm"),
        pytest.param({"models": ["m"]}, "cells.x.models: m is not in the study", id="no model"),
        pytest.param(
            {"correction": "score_centering"},
            "cells.x: correction: score_centering is defined for one update a batch",
            id="does not fit rl",
        ),
    ],
)
def test_cells_that_do_not_fit_are_refused(
    tmp_path: Path, cell: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        changed_study(tmp_path, {"cells": {"x": cell}})


def test_columns_are_aligned_whatever_the_number_of_seeds() -> None:
    study = load_study(STUDIES / "collapse_safety_again.yaml")
    head, *rows, cell = preview(study.model_copy(update={"seeds": (*range(70), 90)})).splitlines()
    assert head.endswith(": 142 runs, trainer local, 1 GPU each") and cell.startswith("cell")
    columns = [row.index(it) for row, it in zip(rows, ("seeds", "0 to", "0 to"), strict=True)]
    assert len(set(columns)) == 1
    assert "  71    0 to 69, 90  12.03 MiB" in rows[1]


def test_the_time_is_that_of_the_record_for_as_many_runs() -> None:
    study = load_study(STUDIES / "collapse_safety_again.yaml")
    hours = float(expected_time(study).split()[2])
    half = float(expected_time(study.model_copy(update={"seeds": study.seeds[:36]})).split()[2])
    assert hours > 1 and abs(half - hours / 2) <= 0.1
    assert "(NVIDIA H200)" in expected_time(study)
    assert "no record" in expected_time(study.model_copy(update={"study": "new"}))
