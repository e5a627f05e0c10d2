"""Exported checkpoints of several families, loaded and served by vLLM on a CPU."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from vllm.distributed import cleanup_dist_env_and_memory

from experiments.base.random_model import spread_rows
from experiments.rl.tokenizer import character_tokenizer
from experiments.study.schema import ROOT
from qat_core import convert, export
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.engine import Rollouts
from qat_core.rollout.vllm import compat
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.training.preparation import prepare
from qat_core.weights.stream import weight_stream
from tests.families import (
    FP32_IN_VLLM,
    SERVED,
    SERVED_FROM_FILES,
    SERVED_WITH_TORCHVISION,
    sizes_for_vllm,
    tiny_family,
)
from tests.nano_models import SETTINGS

pytestmark = pytest.mark.long

PROMPTS = [[3, 14, 4, 17], [5, 17], [3, 3, 14, 9, 15, 4, 17]] * 4
RECIPE = Recipe.full()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    known = dict(CONFIG_MAPPING._extra_content)
    yield
    cleanup_dist_env_and_memory()
    # vLLM puts configs of its own in the place of transformers', for all later tests too
    CONFIG_MAPPING._extra_content = known


# of torchvision's modules
STAND_IN = """
from unittest.mock import MagicMock
__version__ = "0.28.0"
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)
"""

# Mean |log-prob difference|, one seed of each family: 0.008 to 0.044 for the same weights (BF16
# noise, rerouted tokens), 0.24 to 0.74 for weights not rounded, 1.5 to 5.0 for other weights.
CLOSE, NOT_ROUNDED, OTHER_WEIGHTS = 0.1, 0.2, 1.0
# Families that scale logits down: 0.0002 to 0.0024, 0.011 to 0.039 and 0.069 to 1.4.
SMALL_LOGITS = dict.fromkeys(("gemma2", "gemma3_text", "cohere2"), 0.05)


@pytest.mark.parametrize("family", SERVED)
def test_vllm_serves_an_exported_checkpoint_and_what_is_streamed(
    family: str, tmp_path: Path
) -> None:
    require_served(family, tmp_path)


def test_vllm_holds_what_a_converted_file_has_in_fp32_in_every_bit(tmp_path: Path) -> None:
    """With norms, embeddings and biases in FP32 too, which vLLM holds in BF16."""
    model = _model("qwen3_next", 0)
    model.save_pretrained(tmp_path / "source")
    character_tokenizer().save_pretrained(tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    packed = set(plan(model, RECIPE).quantized)
    stored = {
        name: tensor if name in packed or ".experts." in name else tensor.float() + 2**-12
        for name, tensor in load_file(file).items()
    }
    save_file(stored, file, {"format": "pt"})
    convert(tmp_path / "source", tmp_path / "packed", RECIPE)
    engine = VllmEngine(tmp_path / "packed", **SETTINGS)
    held = engine.on_worker(_parameters)
    for name in ("linear_attn.A_log", "input_layernorm.weight"):
        full_name = f"model.layers.0.{name}"
        assert torch.equal(held[full_name], stored[full_name].to(held[full_name].dtype)), name
    assert held["model.layers.0.linear_attn.A_log"].dtype == torch.float32


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_tied_output_head_gets_the_embedding_that_is_streamed(
    family: str, tmp_path: Path
) -> None:
    require_served(family, tmp_path, tie_word_embeddings=True)


def test_families_for_which_vllm_imports_torchvision_are_served_alike(tmp_path: Path) -> None:
    """There is none for a CPU's torch. A stand-in will do: no image is looked at."""
    for module in ("torchvision", "torchvision/transforms", "torchvision/transforms/v2"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text(STAND_IN)
    for module in ("io", "ops", "transforms/functional", "transforms/v2/functional"):
        (tmp_path / "torchvision" / f"{module}.py").write_text(STAND_IN)
    version = tmp_path / "torchvision-0.28.0.dist-info" / "METADATA"
    version.parent.mkdir()
    version.write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    program = "import sys, tests.integration.test_vllm_families as t; t.require_all(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def require_all(folder: str) -> None:
    """Called in a process that finds a torchvision."""
    for family in SERVED_WITH_TORCHVISION:
        require_served(family, Path(folder) / family)
        cleanup_dist_env_and_memory()


def require_served(family: str, folder: Path, **sizes: int) -> None:
    """Asserts that a checkpoint is served, and then other weights that are streamed."""
    trained, plain, other = (_model(family, seed, **sizes) for seed in (0, 0, 1))
    packed = prepare(trained, RECIPE)
    prepare(other, RECIPE)
    export(trained, RECIPE, folder / "packed", character_tokenizer())
    engine = VllmEngine(folder / "packed", **SETTINGS)
    sampled = engine.generate(PROMPTS, max_new_tokens=16, temperature=1.0, seed=0)
    held, expected = engine.on_worker(_in_fp32), FP32_IN_VLLM.get(family, ())
    assert all(name.endswith(expected) for name in held), held
    assert all(any(name.endswith(end) for name in held) for end in expected), held
    scale = SMALL_LOGITS.get(family, 1.0)
    assert _mean_difference(trained, sampled) < CLOSE * scale
    assert _mean_difference(plain, sampled) > NOT_ROUNDED * scale
    assert _mean_difference(other, sampled) > OTHER_WEIGHTS * scale
    engine.sync(weight_stream(other, packed, RECIPE), packed)
    sampled = engine.generate(PROMPTS, max_new_tokens=16, temperature=1.0, seed=0)
    assert _mean_difference(other, sampled) < CLOSE * scale
    assert _mean_difference(trained, sampled) > OTHER_WEIGHTS * scale


@pytest.mark.verl_table(
    "a bias for which vLLM has no place, such as that of Qwen3's `o_proj` with `attention_bias`",
    "refused by the first sync, before a weight is replaced",
)
def test_a_bias_for_which_vllm_has_no_place_is_refused(tmp_path: Path) -> None:
    """vLLM's loader would skip it."""
    model = _model("qwen3", 0, attention_bias=True)
    packed = prepare(model, RECIPE)
    export(model, RECIPE, tmp_path / "packed", character_tokenizer())
    engine = VllmEngine(tmp_path / "packed", packed, **SETTINGS)
    message = r"^weight sync: model\.layers\.0\.self_attn\.o_proj\.bias: vLLM's Row\S+ has no bias"
    with pytest.raises(ValueError, match=message):
        engine.sync(weight_stream(model, packed, RECIPE), packed)
    with pytest.raises(
        ValueError, match=r"packed: model\.layers\.0\.self_attn\.o_proj\.bias: vLLM"
    ):
        VllmEngine(tmp_path / "packed", **SETTINGS)


@pytest.mark.parametrize("family", SERVED_FROM_FILES)
def test_a_model_that_vllm_cannot_reload_is_served_from_files_alone(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(family, 0)
    packed = prepare(model, RECIPE)
    folder = tmp_path / "packed"
    export(model, RECIPE, folder, character_tokenizer())
    with pytest.raises(ValueError, match="GptOssForCausalLM copies experts and attention sinks"):
        VllmEngine(folder, packed, **SETTINGS)
    engine = VllmEngine(folder, **SETTINGS)
    with pytest.raises(ValueError, match="GptOssForCausalLM copies experts and attention sinks"):
        engine.sync(weight_stream(model, packed, RECIPE), packed)
    sampled = engine.generate(PROMPTS, max_new_tokens=16, temperature=1.0, seed=0)
    assert _mean_difference(model, sampled) < CLOSE
    # as if it were not known: the reload finds out by itself
    monkeypatch.setattr(compat, "PAST_THE_RELOAD", {})
    with pytest.raises(ValueError, match=r"copies model\.layers\.0\.\S+ past its own reload"):
        engine.sync(weight_stream(model, packed, RECIPE), packed)
    with pytest.raises(ValueError, match="the engine has no weights"):
        engine.generate(PROMPTS, max_new_tokens=16, temperature=1.0, seed=0)


def _model(family: str, seed: int, **sizes: int) -> PreTrainedModel:
    model = tiny_family(family, seed, **sizes_for_vllm(family), **sizes)
    spread_rows(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)
    return model.eval()


def _parameters(worker: Any) -> dict[str, torch.Tensor]:
    named = worker.model_runner.get_model().named_parameters()
    return {name: parameter.data.clone() for name, parameter in named}


def _in_fp32(worker: Any) -> list[str]:
    """vLLM's parameters in FP32, without scales of packed weights and of the KV cache."""
    named = worker.model_runner.get_model().named_parameters()
    return [name for name, p in named if p.dtype == torch.float32 and "_scale" not in name]


@torch.no_grad()
def _mean_difference(model: PreTrainedModel, sampled: Rollouts) -> float:
    """Mean |log-prob of the trainer's - of the engine's| over sampled tokens."""
    differences = []
    for row, tokens in enumerate(sampled.input_ids):
        real = sampled.attention_mask[row] > 0
        num_sampled = int(sampled.response_mask[row].sum())
        log_probs = model(tokens[real][None]).logits[0].float().log_softmax(-1)
        chosen = log_probs[:-1].gather(-1, tokens[real][1:, None])[-num_sampled:, 0]
        differences.append(chosen - sampled.log_probs[row, :num_sampled])
    return torch.cat(differences).abs().mean().item()
