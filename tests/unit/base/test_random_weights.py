"""Random weights, in a checkpoint or drawn from a seed: what is made, what is refused."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from experiments.base import random_model
from experiments.base.__main__ import main
from experiments.base.seeded import write_seeded_base
from experiments.rl.tokenizer import character_tokenizer
from experiments.runs.inputs import base_digest, check_base, read_base_manifest
from experiments.study.load import load_study
from experiments.study.schema import STUDIES
from experiments.support.cli import run_cli
from experiments.verl.seeded_weights import SEED
from qat_core.planning.predicted_memory import predict_weight_memory_gib
from qat_core.units import BYTES_PER_GIB
from tests.study_files import changed_study
from tests.workflow.programs import ROOT

NANO = ROOT / "experiments" / "models" / "nano-dense.json"


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--sigma=nan", "--sigma: nan: needs a number from 0 to 10"),
        ("--sigma=-1", "--sigma: -1.0: needs a number from 0 to 10"),
        ("--sigma=x", "--sigma: invalid float value: 'x'"),
        ("--layers=0", "--layers: 0: needs a whole number above 0"),
        pytest.param(
            "--device=cuda",
            "--device: cuda: no CUDA GPU here; --device cpu only rehearses",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_options_that_cannot_be_are_refused_before_a_folder_is_made(
    tmp_path: Path, refusal: Callable[..., str], option: str, line: str
) -> None:
    said = refusal(partial(run_cli, main), "random_model", NANO, tmp_path / "out", option)
    assert said.endswith(f"{line}\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "key"), [({"hidden_size": -3}, "hidden_size"), ({"model_type": "x"}, "model_type")]
)
def test_a_shape_that_cannot_be_is_refused(
    tmp_path: Path, refusal: Callable[..., str], changes: dict[str, Any], key: str
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(NANO.read_text()) | changes))
    said = refusal(partial(run_cli, main), "random_model", config, tmp_path / "out")
    assert said.splitlines()[-1].startswith(f"error: {config}: {key}: ")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_kept(tmp_path: Path, refusal: Callable[..., str]) -> None:
    said = refusal(partial(run_cli, main), "random_model", NANO, tmp_path)
    assert said == f"error: {tmp_path}: is there already; name a new folder\n"


def test_weights_of_the_largest_sigma_are_finite(tmp_path: Path) -> None:
    config, sigma = json.loads(NANO.read_text()), float(random_model.LARGEST_SIGMA)
    random_model.write_random_checkpoint(config, tmp_path / "out", 0, "cpu", sigma)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())


MODEL = "qwen3-30b-a3b-random"
STUDY = load_study(STUDIES / "qwen3_moe_smoke.yaml")


def test_the_folder_has_shape_tokenizer_and_seed(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "former").touch()
    write_seeded_base(STUDY, MODEL, folder, seed=3)
    check_base(folder)
    assert not (folder / "former").exists()
    assert read_base_manifest(folder).settings == base_digest(STUDY, MODEL)
    config = AutoConfig.from_pretrained(folder)
    assert getattr(config, SEED) == 3
    assert len(AutoTokenizer.from_pretrained(folder)) == config.vocab_size == 151_936
    predicted_gib = predict_weight_memory_gib(config.to_dict(), "bf16")
    assert read_base_manifest(folder).weight_bytes / BYTES_PER_GIB == pytest.approx(predicted_gib)


def test_only_models_of_random_weights_have_none(tmp_path: Path) -> None:
    pretrain = {"steps": 1, "batch_size": 1, "lr": 1e-3}
    trained = changed_study(tmp_path, {f"models/{MODEL}/pretrain": pretrain}, "qwen3_moe_smoke")
    for study, model in ((trained, MODEL), (STUDY, "other")):
        with pytest.raises(
            ValueError, match=f"--model: {model}: no model of the study with random"
        ):
            write_seeded_base(study, model, tmp_path / "base")


def test_further_tokens_change_no_text() -> None:
    small, large = character_tokenizer(), character_tokenizer(64)
    assert len(large) == 64 and len(character_tokenizer(1)) == len(small)
    assert large("1+2=3")["input_ids"] == small("1+2=3")["input_ids"]
    assert large.decode([63]).startswith("<unused")
