"""A published checkpoint on this machine becomes a base checkpoint of links."""

import json
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from experiments.base.hub_checkpoint import link_checkpoint
from experiments.base.make import make_base
from experiments.runs.base_manifest import base_digest
from experiments.study.load import load_study
from experiments.study.models import HubModel
from experiments.study.schema import ROOT, Study
from qat_core.rl.tokenizer import character_tokenizer

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
HEADER = json.dumps({"w": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}}).encode()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The files of a checkpoint; of its weights the form counts here."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(CONFIG.read_text())
    (folder / "tokenizer_config.json").write_text("{}")
    weights = len(HEADER).to_bytes(8, "little") + HEADER + bytes(6)
    (folder / "model-00001-of-00001.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
def study(tmp_path: Path, checkpoint: Path) -> Study:
    (tmp_path / "study.yaml").write_text(STUDY.format(config=CONFIG, path=checkpoint))
    return load_study(tmp_path / "study.yaml")


def test_base_links_to_the_checkpoint(study: Study, checkpoint: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_base(study, "m", base)
    linked = {path.name for path in base.iterdir()} - {"manifest.json"}
    assert linked == {path.name for path in checkpoint.iterdir()}
    assert all((base / name).resolve() == checkpoint / name for name in linked)
    manifest = json.loads((base / "manifest.json").read_text())
    assert manifest["weight_bytes"] == 6 and manifest["folder"] == str(checkpoint)
    assert manifest["settings"] == base_digest(study, "m")
    assert list(manifest["weights"]) == ["model-00001-of-00001.safetensors"]


def test_generated_problems_must_fit_a_checkpoint_of_the_hub(
    checkpoint: Path, tmp_path: Path
) -> None:
    character_tokenizer().save_pretrained(checkpoint)
    text = STUDY.format(config=CONFIG, path=checkpoint).replace("dapo-math", "chain-sum")
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"^rl.rollout.max_prompt_tokens: 4 is less than the \d"):
        make_base(load_study(tmp_path / "study.yaml"), "m", tmp_path / "base")
    assert not (tmp_path / "base").exists()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "has no config.json; name a whole checkpoint"),
        ("tokenizer_config.json", "has no tokenizer_config.json; name a whole checkpoint"),
        ("model-00001-of-00001.safetensors", r"has no \*\.safetensors; name a whole checkpoint"),
    ],
)
def test_incomplete_checkpoint_is_refused(
    study: Study, checkpoint: Path, tmp_path: Path, missing: str, message: str
) -> None:
    (checkpoint / missing).unlink()
    with pytest.raises(ValueError, match=message):
        make_base(study, "m", tmp_path / "base")
    assert not (tmp_path / "base").exists()


def test_missing_folder_is_refused(study: Study, checkpoint: Path, tmp_path: Path) -> None:
    checkpoint.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"models\.m\.path: no folder .*checkpoint; name the"):
        make_base(study, "m", tmp_path / "base")


def test_checkpoint_of_other_shapes_is_refused(
    study: Study, checkpoint: Path, tmp_path: Path
) -> None:
    config = json.loads(CONFIG.read_text()) | {"num_hidden_layers": 2}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"models\.m\.config: .* has other shapes than"):
        make_base(study, "m", tmp_path / "base")


PUBLISHED = ["README.md", "pytorch_model.bin", "original/params.json", ".gitattributes"]
WANTED = ["config.json", "merges.txt", "chat_template.jinja", "model-00001-of-00001.safetensors"]


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
