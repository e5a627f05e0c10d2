"""A model comes from its folder's files whole and as they say, or not at all."""

import ast
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from experiments.rl.policy import Policy
from experiments.study.schema import ROOT
from qat_core import convert
from qat_core.checkpoint.load import load_model, require_whole
from qat_core.doctor.served import served_stream
from qat_core.planning.recipe import Recipe
from qat_core.rollout.eager import EagerEngine

WEIGHTS, MATRIX = "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
READERS: dict[str, Callable[[Path], object]] = {
    "load_model": load_model,
    "require_whole": require_whole,
    "trainer": lambda folder: Policy(folder, None, "cpu"),
    "eager engine": EagerEngine,
    "doctor's served checkpoint": lambda folder: served_stream(folder, None),
    "convert": lambda folder: convert(folder, folder.with_name("packed"), Recipe.full()),
}
EVERYWHERE = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda weights: weights.pop(MATRIX), rf"missing.*: {re.escape(MATRIX)}"),
        (
            lambda weights: weights.update({"model.layers.9.x.weight": torch.ones(2)}),
            r"(unexpected|unknown).*: model\.layers\.9\.x\.weight",
        ),
    ],
    ids=["missing", "without a place"],
)
@EVERYWHERE
def test_a_tensor_that_model_or_file_lacks_is_named(
    nano_dir: Path, tmp_path: Path, read: Callable[[Path], object], edit: Any, message: str
) -> None:
    folder = shutil.copytree(nano_dir, tmp_path / "model")
    weights = load_file(folder / WEIGHTS)
    edit(weights)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match=f"{folder}: .*{message}"):
        read(folder)


@pytest.mark.parametrize("with_index", [True, False], ids=["indexed", "left over"])
@EVERYWHERE
def test_two_sets_of_weights_are_refused(
    nano_dir: Path,
    tmp_path: Path,
    read: Callable[[Path], object],
    with_index: bool,
) -> None:
    folder = shutil.copytree(nano_dir, tmp_path / "model")
    (folder / WEIGHTS).unlink()
    load_model(nano_dir).save_pretrained(folder, max_shard_size="100KB")
    index = folder / f"{WEIGHTS}.index.json"
    other = index.name
    if not with_index:
        index.unlink()
        other = min(path.name for path in folder.glob("*.safetensors"))
    (folder / WEIGHTS).symlink_to(nano_dir / WEIGHTS)
    with pytest.raises(ValueError, match=rf"{folder}: holds two sets .*{WEIGHTS}.*{other}"):
        read(folder)


BESIDE = {"adapter_config.json": "holds .* beside weights", "model.fp16.safetensors": "two sets"}


@pytest.mark.parametrize(("file", "message"), BESIDE.items(), ids=["adapter", "only vLLM's"])
@EVERYWHERE
def test_a_file_that_only_some_programs_would_read_is_refused(
    nano_dir: Path, tmp_path: Path, read: Callable[[Path], object], file: str, message: str
) -> None:
    folder = shutil.copytree(nano_dir, tmp_path / "model")
    (folder / file).symlink_to(nano_dir / WEIGHTS)
    with pytest.raises(ValueError, match=rf"{folder}: (?=.*{re.escape(file)}).*{message}"):
        read(folder)


def test_an_index_of_one_file_is_no_second_set(nano_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(nano_dir, tmp_path / "model")
    names = dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": names}))
    stored = load_model(folder).state_dict()
    plain = AutoModelForCausalLM.from_pretrained(nano_dir, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(stored[name], weight) for name, weight in plain.items())


def test_no_other_code_loads_a_model() -> None:
    """A file of GGUF has no names that could be looked up before."""
    allowed = {"qat_core/checkpoint/load.py", "qat_core/checkpoint/architecture.py"}
    allowed |= {"experiments/base/gguf.py"}
    files = [file for room in ("qat_core", "experiments") for file in (ROOT / room).rglob("*.py")]
    found = {
        str(file.relative_to(ROOT))
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "from_pretrained"
        if ast.unparse(node.value) not in ("AutoConfig", "AutoTokenizer")
    }
    assert found == allowed
