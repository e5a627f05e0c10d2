"""A base checkpoint: made by one process or linked, refused early, checked before it is used."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from experiments.base import make
from experiments.base.hub_checkpoint import link_checkpoint
from experiments.base.make import build_model, make_base, read_config
from experiments.launch import run as launch
from experiments.rl.config import RolloutConfig
from experiments.rl.tokenizer import character_tokenizer
from experiments.runs.inputs import base_digest, check_base
from experiments.runs.manifest import MANIFEST
from experiments.runs.provenance import digest_file
from experiments.study.load import load_study
from experiments.study.models import HubModel
from experiments.study.schema import ROOT, Study
from experiments.support.json_files import write_json
from tests.files import flip_bit, set_keys, truncate
from tests.study_files import changed_study
from tests.workflow.programs import SMOKE

ROOMY = RolloutConfig(max_prompt_tokens=64, max_response_tokens=8)


@pytest.fixture(params=["local", "verl"])
def study(tmp_path: Path, request: pytest.FixtureRequest) -> Study:
    """A study with room for one prompt token."""
    source = {"local": SMOKE, "verl": "verl_nano"}[request.param]
    return changed_study(tmp_path, {"rl/rollout/max_prompt_tokens": 1}, source)


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


CONFIG = ROOT / "experiments" / "models" / "nano-dense.json"
STUDY = """
study: hub
trainer: verl
rollout: vllm
models:
  m: {{kind: hub, config: {config}, repo: owner/name, path: {path}, recipe: nano}}
arms: [bf16]
seeds: [0]
task: {{name: dapo-math}}
rl: {{steps: 1, rollout: {{max_prompt_tokens: 4}}}}
"""
WEIGHTS = "model.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    build_model(CONFIG, read_config(CONFIG)).save_pretrained(folder)
    (folder / "config.json").write_text(CONFIG.read_text())
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture
def of_hub(tmp_path: Path, checkpoint: Path) -> Study:
    (tmp_path / "study.yaml").write_text(STUDY.format(config=CONFIG, path=checkpoint))
    return load_study(tmp_path / "study.yaml")


def test_base_links_to_the_checkpoint(of_hub: Study, checkpoint: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_base(of_hub, "m", base)
    linked = {path.name for path in base.iterdir()} - {"manifest.json"}
    assert linked == {path.name for path in checkpoint.iterdir()}
    assert all((base / name).resolve() == checkpoint / name for name in linked)
    manifest = json.loads((base / "manifest.json").read_text())
    num_weights = sum(weight.numel() for weight in load_file(checkpoint / WEIGHTS).values())
    assert manifest["weight_bytes"] == 2 * num_weights and manifest["folder"] == str(checkpoint)
    assert manifest["settings"] == base_digest(of_hub, "m")
    assert list(manifest["weights"]) == [WEIGHTS]


def test_weights_that_the_trainer_does_not_read_are_not_linked(
    of_hub: Study, checkpoint: Path, tmp_path: Path
) -> None:
    """vLLM would take Mistral's second form of them, by its name, before the first."""
    shutil.copy(checkpoint / WEIGHTS, checkpoint / "consolidated.safetensors")
    make_base(of_hub, "m", tmp_path / "base")
    assert [path.name for path in (tmp_path / "base").glob("*.safetensors")] == [WEIGHTS]


def test_a_prompt_of_tokens_that_a_checkpoint_lacks_is_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<think>"])
    tokenizer.chat_template = "{{ messages[0]['content'] }}<think>"
    tokenizer.save_pretrained(checkpoint)
    text = STUDY.format(config=CONFIG, path=checkpoint).replace("dapo-math", "chain-sum")
    (tmp_path / "study.yaml").write_text(text.replace("_tokens: 4", "_tokens: 99"))
    with pytest.raises(
        ValueError, match=r"^token 18 of a prompt: the model's embedding has 18 row"
    ):
        make_base(load_study(tmp_path / "study.yaml"), "m", tmp_path / "base")


def lose_a_weight(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    del weights["model.norm.weight"]
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda it: (it / "config.json").unlink(), "has no config.json; name a whole checkpoint"),
        (lambda it: (it / "tokenizer_config.json").unlink(), "has no tokenizer_config.json; name"),
        (lambda it: (it / WEIGHTS).unlink(), r"has no \*\.safetensors; name a whole checkpoint"),
        (lose_a_weight, r"finds missing keys: model\.norm\.weight$"),
        (shutil.rmtree, r"models\.m\.path: no folder .*checkpoint; name the"),
        (
            lambda it: set_keys(it / "config.json", num_hidden_layers=2),
            r"models\.m\.config: .* has other shapes than",
        ),
    ],
    ids=["no config", "no tokenizer", "no weights", "a weight lost", "no folder", "other shapes"],
)
def test_a_damaged_checkpoint_is_refused(
    of_hub: Study, checkpoint: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(checkpoint)
    with pytest.raises(ValueError, match=message):
        make_base(of_hub, "m", tmp_path / "base")
    assert not (tmp_path / "base").exists()


PUBLISHED = ["README.md", "pytorch_model.bin", "original/params.json", ".gitattributes"]
WANTED = ["config.json", "merges.txt", "chat_template.jinja", WEIGHTS]


def test_a_checkpoint_is_fetched_at_its_revision_without_what_is_not_read(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def snapshot_download(repo: str, **arguments: object) -> str:
        asked.update(arguments, repo=repo)
        return str(checkpoint)

    monkeypatch.setattr("experiments.base.hub_checkpoint.snapshot_download", snapshot_download)
    source = HubModel(kind="hub", config=CONFIG, repo="owner/name", revision="v1", recipe="nano")
    described = link_checkpoint("m", source, tmp_path / "base")
    assert described == {"folder": str(checkpoint)}
    assert (asked["repo"], asked["revision"]) == ("owner/name", "v1")
    selected = filter_repo_objects(
        [*PUBLISHED, *WANTED],
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(selected) == WANTED
