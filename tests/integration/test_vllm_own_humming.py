"""With a vLLM that has a Humming of its own, on a GPU: syncs leave the bytes of a fresh load."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from experiments.base.random_model import write_architecture
from experiments.benchmarks.architectures import ARCHITECTURES, engine_settings
from experiments.benchmarks.engines import set_kernels
from experiments.support.subprocess_call import call_in_subprocess
from qat_core.checkpoint.write import export
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.vllm.compat import WITH_OWN_HUMMING, is_one_of, vllm_version
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.weights.stream import weight_stream
from tests.marlin_layers import all_tensors, drawn

RECIPE = Recipe.full()
MIXED = Recipe.full(ignore=(r"re:.*\.layers\.0\.mlp\.experts.*",))  # experts of one layer in BF16
WITH_IT = pytest.mark.skipif(
    not is_one_of(vllm_version(), WITH_OWN_HUMMING), reason=f"of vLLM {', '.join(WITH_OWN_HUMMING)}"
)


@pytest.mark.gpu
@WITH_IT
@pytest.mark.parametrize(
    ("kernels", "recipe"),
    [
        ("vllm-humming", RECIPE),
        ("vllm-humming-invariant", RECIPE),
        ("vllm-humming-experts", RECIPE),
        ("vllm-humming-experts", MIXED),
        ("nvfp4", MIXED),
    ],
)
def test_syncs_to_an_moe_that_started_without_weights_leave_a_fresh_loads_bytes(
    kernels: str, recipe: Recipe, tmp_path: Path
) -> None:
    synced = call_in_subprocess(_synced, kernels, recipe, tmp_path / "model")
    loaded = call_in_subprocess(_loaded, kernels, tmp_path / "model")
    assert loaded == synced


def _synced(kernels: str, recipe: Recipe, folder: Path) -> dict[str, str]:
    """Weights after two syncs, a sleep and a third one; what came last is exported beside them."""
    set_kernels(kernels)
    write_architecture(ARCHITECTURES["moe"] | {"num_hidden_layers": 2}, folder)
    models = [drawn(folder, seed) for seed in range(2)]
    planned = plan(models[0], recipe)
    settings = engine_settings("cuda", 4) | {"enable_sleep_mode": True}
    engine = VllmEngine(folder, planned, load_format="dummy", **settings)
    for model in models:
        engine.sync(weight_stream(model, planned, recipe), planned)
    engine.sleep()
    engine.wake_up()
    engine.sync(weight_stream(models[1], planned, recipe), planned)
    export(models[1], recipe, folder / "packed", AutoTokenizer.from_pretrained(folder))
    return _weights(engine)


def _loaded(kernels: str, folder: Path) -> dict[str, str]:
    set_kernels(kernels)
    return _weights(VllmEngine(folder / "packed", **engine_settings("cuda", 4)))


def _weights(engine: VllmEngine) -> dict[str, str]:
    """Digests of their bytes."""
    found = engine.on_worker(all_tensors)
    return {
        name: sha256(tensor.cpu().numpy()).hexdigest()
        for name, tensor in found.items()
        if "weight" in name
    }


@pytest.mark.gpu
@WITH_IT
def test_sums_in_one_block_of_threads_repeat(tmp_path: Path) -> None:
    first, again = call_in_subprocess(_sampled_twice, tmp_path / "model")
    assert first == again


def _sampled_twice(folder: Path) -> list[tuple[Any, Any]]:
    """Ids and log-probs of the same prompts and seed."""
    set_kernels("vllm-humming-invariant")
    write_architecture(ARCHITECTURES["moe"] | {"num_hidden_layers": 2}, folder)
    model = drawn(folder, 0)
    planned = plan(model, RECIPE)
    engine = VllmEngine(folder, planned, **engine_settings("cuda", 64))
    engine.sync(weight_stream(model, planned, RECIPE), planned)
    found = []
    for _ in range(2):
        engine.forget_prefixes()
        prompts = [[token, 7, 9] for token in range(100, 164)]
        rollouts = engine.generate(prompts, max_new_tokens=32, temperature=1.0, seed=0)
        found.append((rollouts.response_ids.tolist(), rollouts.log_probs.tolist()))
    return found
