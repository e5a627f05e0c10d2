"""Studies that could be trained and not judged are refused before."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from analysis.collapse.judge import judge_study as judge_grid_study
from analysis.judgeable import require_judgeable
from analysis.parity.judge import judge_study
from analysis.results import Results
from experiments.study.load import load_study
from experiments.study.schema import STUDIES, Study

# random weights, without a checkpoint
UNJUDGED = {"qwen3_moe_smoke", "qwen3_moe_half_smoke", "qwen3_moe_replay"}


def changed(tmp_path: Path, name: str, **changes: Any) -> Study:
    """A study of the repository with other sections, of `rl` with other keys."""
    content = yaml.safe_load((STUDIES / f"{name}.yaml").read_text())
    for key, value in changes.items():
        content[key] = content[key] | value if key == "rl" else value
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return load_study(path)


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_studies_of_the_repository_can_be_judged(path: Path) -> None:
    study = load_study(path)
    if path.stem not in UNJUDGED:
        require_judgeable(study)
        return
    with pytest.raises(ValueError, match=r"rl\.save_every: 5 is more than rl\.steps, 4, so that"):
        require_judgeable(study)


def test_verl_saves_a_checkpoint_in_every_cell(tmp_path: Path) -> None:
    models = ["nano-dense-verl"], ["nano-moe-verl"]
    cells = {"long": {"models": models[0]}, "short": {"models": models[1], "steps": 1}}
    fault = r"^study verl-nano: rl\.save_every: 2 is more than cells\.short\.steps, 1, so that verl"
    with pytest.raises(ValueError, match=fault):
        require_judgeable(changed(tmp_path, "verl_nano", cells=cells))
    rl = {"steps": 1}
    cells = {name: cell | {"steps": 2} for name, cell in cells.items()}
    require_judgeable(changed(tmp_path, "verl_nano", cells=cells, rl=rl))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"arms": ["nvfp4-noqat", "nvfp4-qat"]}, id="no BF16"),
        pytest.param(
            {"cells": {"tis": {"correction": "token_tis"}}}, id="BF16 with a correction alone"
        ),
    ],
)
def test_a_study_of_collapses_needs_plain_bf16(tmp_path: Path, changes: dict[str, Any]) -> None:
    study = changed(tmp_path, "collapse_cpu", **changes)
    with pytest.raises(ValueError, match="study collapse-cpu: cells: none has model nano-dense"):
        require_judgeable(study)


def test_arms_of_other_numbers_of_steps_are_refused(tmp_path: Path) -> None:
    cells = {"short": {"arms": ["nvfp4-qat"], "steps": 10}, "long": {"arms": ["bf16"]}}
    study = changed(tmp_path, "default_long", cells=cells, arms=["bf16", "nvfp4-qat"])
    fault = (
        r"^study default-long: cells: arms of nano-dense have 20 and 10 rl.steps; judged_by: par"
    )
    with pytest.raises(ValueError, match=fault):
        require_judgeable(study)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"rollout_is_threshold": 2.0}, {"rollout_is_threshold": 5.0}),
        ({}, {"arms": ["nvfp4-noqat"]}),
    ],
    ids=["threshold", "overlap"],
)
def test_runs_of_two_cells_are_never_one_sample(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    tis = {"correction": "token_tis"}
    cells = {"plain": {}, "one": tis | first, "two": tis | second}
    study = changed(tmp_path, "collapse_cpu", cells=cells)
    both = "nano-dense-collapse, nvfp4-noqat at 6e-4, token_tis, as cells.one has"
    with pytest.raises(ValueError, match=rf"study collapse-cpu: cells\.two: has {both}"):
        require_judgeable(study)
    with pytest.raises(ValueError, match=r"cells\.two"):
        judge_grid_study(study, tmp_path)
    require_judgeable(changed(tmp_path, "collapse_cpu", cells={"plain": {}, "one": tis | first}))


def test_collapses_are_of_runs_of_one_length(tmp_path: Path) -> None:
    cells = {"plain": {}, "long": {"correction": "token_tis", "steps": 120}}
    study = changed(tmp_path, "collapse_cpu", cells=cells)
    with pytest.raises(ValueError, match=r"cells\.long: steps: judged_by: collapse compares runs"):
        require_judgeable(study)


@pytest.mark.parametrize(
    "changes", [{"rl": {"steps": 1}}, {"cells": {"short": {"steps": 1}}}], ids=["rl", "cell"]
)
def test_one_step_has_no_reward_gain(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"rl\.steps: one step has no reward gain; use 2 or more"):
        require_judgeable(changed(tmp_path, "default_long", **changes))
    require_judgeable(changed(tmp_path, "default_long", **changes, arms=["nvfp4-qat"]))


@pytest.mark.parametrize(
    ("of_high", "message"),
    [
        ({}, "cells: nano-moe has arm nvfp4-noqat in low and high; judged_by: parity needs it in"),
        ({"arms": ["nvfp4-qat"]}, "cells: nano-moe has arm nvfp4-noqat in none; judged_by"),
    ],
    ids=["two", "none"],
)
def test_with_parity_an_arm_of_a_model_is_in_one_cell(
    tmp_path: Path, of_high: dict[str, Any], message: str
) -> None:
    """Without BF16 too, where of two cells the last one would have been taken."""
    low = {"models": ["nano-dense"]} if of_high else {}
    cells = {"low": low, "high": {"models": ["nano-moe"]} | of_high}
    study = changed(tmp_path, "default_long", cells=cells, arms=["nvfp4-noqat", "nvfp4-qat"])
    with pytest.raises(ValueError, match=f"study default-long: {message}"):
        require_judgeable(study)
    with pytest.raises(ValueError, match=message):
        judge_study(study, Results(pd.DataFrame(), pd.DataFrame(), {}, {}))


def test_with_parity_models_may_be_in_cells_of_their_own(tmp_path: Path) -> None:
    cells = {"low": {"models": ["nano-dense"], "lr": 1e-5}, "high": {"models": ["nano-moe"]}}
    require_judgeable(changed(tmp_path, "default_long", cells=cells))
