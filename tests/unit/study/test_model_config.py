"""A model's config.json: what is refused before anything is made of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.study.model_config import read_model_config
from experiments.study.schema import ROOT
from experiments.support.json_files import read_json

MODELS = ROOT / "experiments" / "models"
HINT = "correct it"
DENSE = read_json(MODELS / "nano-dense.json")
MOE = read_json(MODELS / "nano-moe.json")
REMOVED = object()

ERRORS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no hidden size": (DENSE, {"hidden_size": REMOVED}, "hidden_size: missing"),
    "hidden size 0": (DENSE, {"hidden_size": 0}, "hidden_size: should be greater than or equal"),
    "negative layers": (DENSE, {"num_hidden_layers": -1}, "num_hidden_layers: should be greater"),
    "ten million layers": (DENSE, {"num_hidden_layers": 10**7}, "num_hidden_layers: should be le"),
    "text": (DENSE, {"vocab_size": "18"}, "vocab_size: should be a valid integer"),
    "fraction": (DENSE, {"hidden_size": 128.0}, "hidden_size: should be a valid integer"),
    "truth value": (DENSE, {"head_dim": True}, "head_dim: should be a valid integer"),
    "list": (DENSE, {"intermediate_size": [256]}, "intermediate_size: should be a valid integer"),
    "null": (DENSE, {"intermediate_size": None}, "intermediate_size: missing"),
    "odd head": (DENSE, {"head_dim": 63}, "head_dim: odd; rotary embeddings turn pairs"),
    "no head size": (DENSE, {"head_dim": REMOVED}, "head_dim: missing"),
    "heads": (DENSE, {"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_at"),
    "epsilon": (DENSE, {"rms_norm_eps": 0.0}, "rms_norm_eps: should be greater than 0"),
    "infinite": (DENSE, {"rope_theta": float("inf")}, "rope_theta: should be a finite number"),
    "activation": (DENSE, {"hidden_act": "silly"}, "hidden_act: should be 'silu'"),
    "tied": (DENSE, {"tie_word_embeddings": "no"}, "tie_word_embeddings: should be a valid bool"),
    "architecture": (DENSE, {"model_type": "gpt2"}, "model_type: 'gpt2' is not one of llama, qw"),
    "no architecture": (DENSE, {"model_type": REMOVED}, "model_type: missing"),
    "no experts": (MOE, {"num_experts": REMOVED}, "num_experts: missing"),
    "top-k 0": (MOE, {"num_experts_per_tok": 0}, "num_experts_per_tok: should be greater than or"),
    "top-k": (MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than the 8 experts"),
    "no expert size": (MOE, {"moe_intermediate_size": REMOVED}, "moe_intermediate_size: missing"),
}


@pytest.mark.parametrize(("base", "changes", "line"), ERRORS.values(), ids=ERRORS.keys())
def test_error_names_file_and_key(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], line: str
) -> None:
    content = {key: value for key, value in (base | changes).items() if value is not REMOVED}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError) as refused:
        read_model_config(path, HINT)
    assert str(refused.value).startswith(f"{path}: {line}")
    assert str(refused.value).endswith(f"; {HINT}")
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.json")), ids=lambda path: path.stem)
def test_models_of_the_studies_are_valid(path: Path) -> None:
    assert read_model_config(path, HINT) == read_json(path)
