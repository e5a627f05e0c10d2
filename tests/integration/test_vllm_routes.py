"""vLLM reports which experts it chose, on a CPU too, after syncs and out of its prefix cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

import vllm
from packaging.version import Version
from vllm import SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from experiments.rl.policy import Policy
from experiments.study.arms import make_recipes
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.engine import Rollouts
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.routing import NO_ROUTE, capture
from qat_core.training.preparation import prepare
from qat_core.weights.stream import weight_stream
from tests.nano_models import CONFIG, nano_trainer, write_nano

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        Version(vllm.__version__) >= Version("0.31") and not torch.cuda.is_available(),
        reason="vLLM from 0.31 returns routes on a CPU with Triton only",
    ),
]

PROMPTS = [[3, 14, 4, 17], [5, 17], [3, 3, 14, 9, 15, 4, 17]]
SETTINGS = {"max_model_len": 256, "kv_cache_memory_bytes": 2**26, "enforce_eager": True}
RECIPE = Recipe.full()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Two MoE checkpoints with random weights."""
    made = [tmp_path_factory.mktemp("moe") / str(seed) for seed in (0, 1)]
    for seed, folder in enumerate(made):
        write_nano("nano-moe", folder, num_layers=2, seed=seed)
    yield made
    cleanup_dist_env_and_memory()


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def engine(folders: list[Path]) -> VllmEngine:
    """Serves NVFP4; weights come with the syncs."""
    packed = plan(load(folders[0]), RECIPE)
    return VllmEngine(folders[0], packed, enable_return_routed_experts=True, **SETTINGS)


def routes_by(folder: Path, rollouts: Rollouts) -> Tensor:
    """What the trainer's model of the same weights chooses for the same tokens."""
    policy = Policy(folder, RECIPE, "cpu")
    with torch.no_grad(), capture(policy.model) as captured:
        policy.scores(rollouts)
    return captured.routes(len(rollouts.input_ids))[:, :-1]


def agreement(rollouts: Rollouts, routes: Tensor) -> float:
    """Share of choices of the same experts, of positions that vLLM has routed."""
    known = (rollouts.routes != NO_ROUTE).all(-1)
    same = (rollouts.routes.sort(-1).values == routes.sort(-1).values).all(-1)
    return float(same[known].float().mean())


def test_routes_are_of_the_weights_last_synced(engine: VllmEngine, folders: list[Path]) -> None:
    for synced, other in (folders, reversed(folders)):
        model = load(synced)
        engine.sync(weight_stream(model, prepare(model, RECIPE), RECIPE))
        rollouts = engine.generate(PROMPTS, 12, 1.0, seed=0)
        assert rollouts.routes is not None and rollouts.routes.dtype == torch.int16
        sequences, positions = rollouts.input_ids.shape
        assert rollouts.routes.shape == (sequences, positions - 1, 2, 2)
        known = (rollouts.routes != NO_ROUTE).all(-1).all(-1)
        lengths = rollouts.attention_mask.sum(-1)
        assert torch.equal(known.sum(-1), lengths - 1), "every token but the last"
        # 0.98 to 1 seen for the same weights (BF16 noise), below 0.2 for others
        assert agreement(rollouts, routes_by(synced, rollouts)) > 0.9
        assert agreement(rollouts, routes_by(other, rollouts)) < 0.5


def test_a_cached_prompt_keeps_its_routes(engine: VllmEngine, folders: list[Path]) -> None:
    model = load(folders[0])
    engine.sync(weight_stream(model, prepare(model, RECIPE), RECIPE))
    prompt = [PROMPTS[2][index % 7] for index in range(240)]  # vLLM caches 128 tokens at a time
    once = SamplingParams(max_tokens=2, temperature=0.0, logprobs=0, detokenize=False)
    fresh, cached = (engine._run([prompt], [once])[0] for _ in range(2))
    assert fresh.num_cached_tokens == 0 and cached.num_cached_tokens >= 128
    routes = [output.outputs[0].routed_experts for output in (fresh, cached)]
    assert routes[0].shape == routes[1].shape == (241, 2, 2)
    assert (routes[0][:128] == routes[1][:128]).all() and routes[0].any()


def test_the_local_trainer_replays_vllms_routes(folders: list[Path], tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"routing_replay": True, "advantage": "reward"})
    trainer = nano_trainer(folders[0], tmp_path, *make_recipes("nvfp4-qat"), config, "vllm")
    _, rollouts = trainer.sample(1)
    with torch.no_grad(), capture(trainer.policy.model) as captured:
        trainer.policy.scores(rollouts)
    used = captured.routes(len(rollouts.input_ids))[:, :-1]
    known = (rollouts.routes != NO_ROUTE).all(-1).all(-1)
    assert torch.equal(used[known], rollouts.routes[known])
    assert trainer.step(1)["actor/grad_norm"] > 0
