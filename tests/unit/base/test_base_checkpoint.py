"""A base checkpoint: made by one process, refused early, and checked before it is used."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from experiments.base import make
from experiments.base.make import make_base
from experiments.launch import run as launch
from experiments.rl.config import RolloutConfig
from experiments.runs.base_manifest import check_base
from experiments.runs.manifest import MANIFEST
from experiments.runs.provenance import digest_file
from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES, Study
from experiments.support.json_files import write_json

ROOMY = RolloutConfig(max_prompt_tokens=64, max_response_tokens=8)
SMOKE = ROOT / "tests" / "workflow" / "smoke.yaml"


@pytest.fixture(params=["local", "verl"])
def study(tmp_path: Path, request: pytest.FixtureRequest) -> Study:
    """A study with room for one prompt token."""
    path = {"local": SMOKE, "verl": STUDIES / "verl_nano.yaml"}[request.param]
    content = yaml.safe_load(path.read_text())
    content["rl"]["rollout"]["max_prompt_tokens"] = 1
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_study(path)


def test_prompts_too_long_are_refused_before_pretraining(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "pretrain", lambda *_: pytest.fail("pretrained"))
    with pytest.raises(ValueError, match=r"^rl.rollout.max_prompt_tokens: 1 is less than the \d"):
        make_base(study, next(iter(study.bases)), tmp_path / "base" / "tiny")
    assert [path.name for path in (tmp_path / "base").iterdir()] == ["tiny.lock"]


def test_a_limit_lowered_after_the_base_was_made_is_refused_at_launch(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = study.rl.model_copy(update={"rollout": ROOMY})
    name = next(iter(study.bases))
    monkeypatch.setattr(make, "pretrain", lambda *arguments: arguments[-1](1, 0.0))
    make_base(study.model_copy(update={"rl": roomy}), name, tmp_path / "base" / name)
    run = next(run for run in study.runs if study.base_of(run) == name)
    options = ("--study", str(tmp_path / "study.yaml"), "--run", run.id)
    log = tmp_path / "train.log"
    files = ("--results", str(tmp_path), "--log", str(log), "--untracked")
    monkeypatch.setattr(sys, "argv", ["run", *options, *files])
    monkeypatch.setattr(launch, "check_settings", lambda *_: None)
    monkeypatch.setattr(launch, "training_digests", lambda *_: {})
    with pytest.raises(ValueError, match=r"^rl.rollout.max_prompt_tokens: 1 is less than the \d"):
        launch.main()
    assert not log.exists()


@pytest.mark.parametrize("held", ["run_a/manifest.json", "manifest.json"], ids=["all", "a run"])
def test_results_are_not_replaced(study: Study, tmp_path: Path, held: str) -> None:
    results = tmp_path / "results"
    for name in (held, "attempts/1/metrics.jsonl"):
        (results / name).parent.mkdir(parents=True, exist_ok=True)
        (results / name).touch()
    with pytest.raises(ValueError, match=r"--out: .*results: would be deleted"):
        make_base(study, next(iter(study.bases)), results)
    assert (results / held).exists()


def test_a_base_is_made_by_one_process_at_a_time(study: Study, tmp_path: Path) -> None:
    out = tmp_path / "base" / "tiny"
    out.parent.mkdir()
    with (
        FileLock(out.parent / "tiny.lock"),
        pytest.raises(ValueError, match="tiny: another process makes it; wait for it or end it"),
    ):
        make_base(study, next(iter(study.bases)), out)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", [truncate, flip_bit, Path.unlink])
def test_a_damaged_base_is_named(tmp_path: Path, file: str, damage: Callable[[Path], None]) -> None:
    names = ("model.safetensors", "config.json", "tokenizer.json")
    for name in names:
        (tmp_path / name).write_text(name)
    digests = {name: digest_file(tmp_path / name) for name in names}
    weights = {"model.safetensors": digests.pop("model.safetensors")}
    write_json(tmp_path / MANIFEST, {"weights": weights, "files": digests, "weight_bytes": 1})
    check_base(tmp_path)
    damage(tmp_path / file)
    with pytest.raises(ValueError) as refused:
        check_base(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path}/{file}: ")
    assert str(refused.value).endswith(f"; delete {tmp_path} and run the study again")
