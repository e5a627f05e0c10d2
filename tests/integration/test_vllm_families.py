"""Exported checkpoints of several families, loaded and served by vLLM on a CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from vllm.distributed import cleanup_dist_env_and_memory

from experiments.benchmarks.random_model import spread_rows
from qat_core.checkpoint import export
from qat_core.preparation import prepare
from qat_core.recipe import Recipe
from qat_core.rl.tokenizer import character_tokenizer
from qat_core.rollout.engine import Rollouts
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.weights.stream import weight_stream
from tests.families import SERVED, sizes_for_vllm, tiny_family

pytestmark = pytest.mark.slow

PROMPTS = [[3, 14, 4, 17], [5, 17], [3, 3, 14, 9, 15, 4, 17]] * 4
SETTINGS = {"max_model_len": 64, "kv_cache_memory_bytes": 2**26, "enforce_eager": True}
RECIPE = Recipe.full()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    cleanup_dist_env_and_memory()


# Mean |log-prob difference|, one seed of each family: 0.009 to 0.033 for the same weights (BF16
# noise, rerouted tokens), 0.27 to 0.58 for weights not rounded, 1.8 to 3.1 for other weights.
CLOSE, NOT_ROUNDED, OTHER_WEIGHTS = 0.1, 0.2, 1.0


@pytest.mark.parametrize("family", SERVED)
def test_vllm_serves_an_exported_checkpoint_and_what_is_streamed(
    family: str, tmp_path: Path
) -> None:
    trained, plain, other = (_model(family, seed) for seed in (0, 0, 1))
    packed = prepare(trained, RECIPE)
    prepare(other, RECIPE)
    export(trained, RECIPE, tmp_path / "packed", character_tokenizer())
    engine = VllmEngine(tmp_path / "packed", **SETTINGS)
    sampled = engine.generate(PROMPTS, max_new_tokens=16, temperature=1.0, seed=0)
    assert _mean_difference(trained, sampled) < CLOSE
    assert _mean_difference(plain, sampled) > NOT_ROUNDED
    assert _mean_difference(other, sampled) > OTHER_WEIGHTS
    engine.sync(weight_stream(other, packed, RECIPE), packed)
    sampled = engine.generate(PROMPTS, max_new_tokens=16, temperature=1.0, seed=0)
    assert _mean_difference(other, sampled) < CLOSE
    assert _mean_difference(trained, sampled) > OTHER_WEIGHTS


def _model(family: str, seed: int) -> PreTrainedModel:
    model = tiny_family(family, seed, **sizes_for_vllm(family))
    spread_rows(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)
    return model.eval()


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
