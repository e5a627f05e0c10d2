"""The cells of a study: runs of their own, with other keys of `rl`."""

import re
from pathlib import Path

import pytest

from experiments.study.load import load_study
from experiments.study.schema import STUDIES
from tests.study_files import load_changed

CELLS = {
    "low": {"lr": 1e-5},
    "masked": {"arms": ["nvfp4-noqat"], "correction": "sequence_mask", "models": ["nano-moe"]},
}


def test_cells_are_runs_of_their_own(tmp_path: Path) -> None:
    study = load_changed(tmp_path, "cells", CELLS)
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
    study = load_changed(tmp_path, "cells", cells)
    replaying = {run.model for run in study.runs if study.rl_of(run.cell).routing_replay}
    assert replaying == {"nano-moe"}
    with pytest.raises(ValueError, match="routing_replay: nano-dense has no experts"):
        load_changed(tmp_path, "cells", {"r3": {"routing_replay": True}})


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
        load_changed(tmp_path, "cells", {"x": cell})
