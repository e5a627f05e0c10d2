"""A base without a file of weights: what its folder says, and which models have none."""

from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig, AutoTokenizer

from experiments.base.seeded import write_seeded_base
from experiments.rl.tokenizer import character_tokenizer
from experiments.runs.base_manifest import base_digest, check_base, read_base_manifest
from experiments.study.load import load_study
from experiments.study.schema import STUDIES, Study
from experiments.verl.seeded_weights import SEED
from qat_core.planning.predicted_memory import predict_weight_memory_gib
from qat_core.units import BYTES_PER_GIB

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


def changed(tmp_path: Path, **model: object) -> Study:
    content = yaml.safe_load((STUDIES / "qwen3_moe_smoke.yaml").read_text())
    content["models"][MODEL] |= model
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(content))
    return load_study(file)


def test_only_models_of_random_weights_have_none(tmp_path: Path) -> None:
    trained = changed(tmp_path, pretrain={"steps": 1, "batch_size": 1, "lr": 1e-3})
    for study, model in ((trained, MODEL), (STUDY, "other")):
        with pytest.raises(
            ValueError, match=f"--model: {model}: no model of the study with random"
        ):
            write_seeded_base(study, model, tmp_path / "base")


def test_prompts_must_fit(tmp_path: Path) -> None:
    rollout = STUDY.rl.rollout.model_copy(update={"max_prompt_tokens": 1})
    rl = STUDY.rl.model_copy(update={"rollout": rollout})
    with pytest.raises(ValueError, match=r"^rl.rollout.max_prompt_tokens: 1 is less than the \d"):
        write_seeded_base(STUDY.model_copy(update={"rl": rl}), MODEL, tmp_path / "base")


def test_further_tokens_change_no_text() -> None:
    small, large = character_tokenizer(), character_tokenizer(64)
    assert len(large) == 64 and len(character_tokenizer(1)) == len(small)
    assert large("1+2=3")["input_ids"] == small("1+2=3")["input_ids"]
    assert large.decode([63]).startswith("<unused")
