"""A run belongs to a study that has its settings; what a study cannot say of an old run is left."""

from pathlib import Path
from typing import Any

import pytest

from experiments.runs.settings import read_run
from experiments.study.load import load_study
from experiments.study.schema import STUDIES, Study
from tests.manifests import make_manifest
from tests.records import pack

LOCAL, OF_VERL = (load_study(STUDIES / f"{name}.yaml") for name in ("default", "verl_nano"))


def write_run(
    study: Study, results: Path, seeds: dict[str, int] | None = None, **changes: Any
) -> None:
    """The first run of a study, with changed settings; None takes a key away."""
    run = study.runs[0]
    config = study.training_config(run) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    named = {"run": run.id, **run._asdict(), "seeds": seeds or {"run": run.seed}}
    (results / run.id).mkdir()
    make_manifest(**named, config=kept).write(results / run.id)


def read(study: Study, results: Path) -> None:
    read_run(study, study.runs[0], results, "train it")


def test_keys_that_are_younger_than_a_run_have_their_defaults(tmp_path: Path) -> None:
    rl = LOCAL.training_config(LOCAL.runs[0])["rl"]
    older = {key: value for key, value in rl.items() if key not in ("advantage", "routing_replay")}
    write_run(LOCAL, tmp_path, rl=older)
    read(LOCAL, tmp_path)
    other = LOCAL.model_copy(update={"rl": LOCAL.rl.model_copy(update={"advantage": "reward"})})
    with pytest.raises(
        ValueError, match=r"config.rl.advantage: 'group', and in study default 'rew"
    ):
        read(other, tmp_path)


def test_a_run_from_another_base_is_refused(tmp_path: Path) -> None:
    study = LOCAL.model_copy(update={"seeds": (1,)})
    write_run(study, tmp_path, {"run": 1, "base": 0})
    read(study.model_copy(update={"own_base": False}), tmp_path)
    with pytest.raises(ValueError, match=r"seeds.base: 0, and in study default 1 \(own_base\)"):
        read(study, tmp_path)


def test_of_a_record_verls_recipe_may_have_changed(tmp_path: Path) -> None:
    write_run(OF_VERL, tmp_path, recipe={"trainer.nnodes": 2})
    with pytest.raises(
        ValueError, match=r"config.recipe.trainer.nnodes: 2, and in study verl-nano"
    ):
        read(OF_VERL, tmp_path)
    (tmp_path / OF_VERL.runs[0].id / "metrics.jsonl").write_text('{"step": 1}\n')
    pack(tmp_path, tmp_path / "record")
    read(OF_VERL, tmp_path / "record")


def test_settings_that_are_none_are_named(tmp_path: Path) -> None:
    write_run(LOCAL, tmp_path, rl={"steps": 20, "lr": "fast"})
    with pytest.raises(ValueError, match=r"manifest.json: config.rl.lr: .* number.*; train it$"):
        read(LOCAL, tmp_path)
