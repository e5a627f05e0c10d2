"""vLLM as rollout engine on a CPU: what it computes, what a sync does, what it refuses."""

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from vllm import SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from experiments.rl.policy import Policy
from qat_core import convert
from qat_core.options import CheckpointFormat
from qat_core.planning.plan import QuantPlan, plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.engine import Rollouts
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.rollout.vllm.weight_memory import parameter_bytes
from qat_core.training.preparation import prepare
from qat_core.weights.stream import weight_stream
from tests.nano_models import SETTINGS, without_token, write_nano

PROMPTS = [[3, 14, 4, 17], [5, 17], [3, 3, 14, 9, 15, 4, 17]] * 4
RECIPE = Recipe.full()
_Q, _K = (f"model.layers.0.self_attn.{matrix}_proj.weight" for matrix in "qk")
_NORM = "model.layers.1.input_layernorm.weight"

# Mean |log-prob difference|, 8 seeds: 0.0033 to 0.0063 for the same weights (BF16 noise, rerouted
# tokens), 0.079 to 0.13 for weights not rounded, 0.60 to 0.77 for other weights.
CLOSE, NOT_ROUNDED, OTHER_WEIGHTS = 0.02, 0.05, 0.3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Two BF16 checkpoints, A and B, with random weights: a dense layer, and one of experts."""
    made = [tmp_path_factory.mktemp("mixed") / str(seed) for seed in (0, 1)]
    for seed, folder in enumerate(made):
        write_nano("nano-moe", folder, num_layers=2, seed=seed, mlp_only_layers=[0])
    yield made
    cleanup_dist_env_and_memory()  # a MoE model needs other process groups than a dense one


@pytest.fixture(scope="module")
def trained(folders: list[Path]) -> list[nn.Module]:
    """A and B, prepared."""
    models = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.bfloat16) for f in folders]
    for model in models:
        prepare(model, RECIPE)
    return models


@pytest.fixture(scope="module")
def packed(trained: list[nn.Module]) -> QuantPlan:
    return plan(trained[0], RECIPE)


@pytest.fixture(scope="module")
def engine(folders: list[Path], packed: QuantPlan) -> VllmEngine:
    return VllmEngine(folders[0], packed, **SETTINGS)


Sync = Callable[[int], None]


@pytest.fixture(scope="module")
def sync(engine: VllmEngine, trained: list[nn.Module], packed: QuantPlan) -> Sync:
    """Brings the engine A or B, as planned."""
    return lambda index: engine.sync(weight_stream(trained[index], packed, RECIPE), packed)


@pytest.fixture
def before(engine: VllmEngine, sync: Sync) -> Rollouts:
    """What the engine samples with A, which it has from now on."""
    sync(0)
    return _sample(engine)


def _sample(engine: VllmEngine) -> Rollouts:
    return engine.generate(PROMPTS, max_new_tokens=16, temperature=1.0, seed=0)


def _require_same(first: Rollouts, second: Rollouts) -> None:
    assert torch.equal(first.input_ids, second.input_ids)
    assert torch.equal(first.log_probs, second.log_probs)


def test_an_engine_without_weights_does_not_generate(engine: VllmEngine) -> None:
    with pytest.raises(ValueError, match="no weights"):
        _sample(engine)


@pytest.mark.parametrize("with_plan", [True, False], ids=["with-plan", "collected"])
def test_a_b_a_gives_a_again(
    engine: VllmEngine, trained: list[nn.Module], packed: QuantPlan, with_plan: bool
) -> None:
    samples = []
    for model in (trained[0], trained[1], trained[0]):
        engine.sync(weight_stream(model, packed, RECIPE), packed if with_plan else None)
        samples.append(_sample(engine))
    _require_same(samples[0], samples[2])
    assert not torch.equal(samples[0].log_probs, samples[1].log_probs)


@pytest.mark.parametrize("index", [0, 1], ids=["a", "b"])
def test_log_probs_are_the_trainers(
    engine: VllmEngine, folders: list[Path], sync: Sync, index: int
) -> None:
    sync(index)
    sampled = _sample(engine)
    assert _mean_difference(folders[index], RECIPE, sampled) < CLOSE
    assert _mean_difference(folders[index], None, sampled) > NOT_ROUNDED
    assert _mean_difference(folders[1 - index], RECIPE, sampled) > OTHER_WEIGHTS


def _mean_difference(folder: Path, recipe: Recipe | None, sampled: Rollouts) -> float:
    log_probs_BT, _ = Policy(folder, recipe, "cpu").log_probs(sampled)
    return (log_probs_BT - sampled.log_probs)[sampled.response_mask > 0].abs().mean().item()


@pytest.mark.parametrize("form", get_args(CheckpointFormat))
def test_a_synced_engine_equals_one_that_loaded_the_checkpoint(
    engine: VllmEngine, folders: list[Path], sync: Sync, tmp_path: Path, form: CheckpointFormat
) -> None:
    convert(folders[1], tmp_path / "packed", RECIPE, form)
    loaded = VllmEngine(tmp_path / "packed", **SETTINGS)
    sync(1)
    _require_same(_sample(engine), _sample(loaded))
    if form == "modelopt":
        with pytest.raises(ValueError, match="ModelOpt"):
            loaded.sync([])


def test_bf16_parity_and_reload(folders: list[Path]) -> None:
    models = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.bfloat16) for f in folders]
    engine = VllmEngine(folders[0], **SETTINGS)
    first = _sample(engine)
    assert _mean_difference(folders[0], None, first) < CLOSE
    engine.sync(weight_stream(models[1], None, None))
    assert _mean_difference(folders[1], None, _sample(engine)) < CLOSE
    engine.sync(weight_stream(models[0], None, None))
    _require_same(_sample(engine), first)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({_NORM: torch.ones(3)}, rf"{_NORM} is"),
        ({_Q: torch.zeros(128, 128, dtype=torch.bfloat16)}, "weight_packed"),
    ],
    ids=["shape", "unpacked"],
)
def test_a_wrong_sync_replaces_nothing(
    engine: VllmEngine,
    trained: list[nn.Module],
    packed: QuantPlan,
    before: Rollouts,
    changed: dict[str, Tensor],
    message: str,
) -> None:
    stream = dict(weight_stream(trained[1], packed, RECIPE)) | changed
    with pytest.raises(ValueError, match=message):
        engine.sync(stream.items())
    _require_same(_sample(engine), before)


def test_the_plan_of_another_recipe_is_refused(
    engine: VllmEngine, folders: list[Path], before: Rollouts
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.bfloat16)
    other = plan(plain, Recipe.ffn())
    with pytest.raises(ValueError, match=r"weight sync.*q_proj"):
        engine.sync(weight_stream(plain, other, Recipe.ffn()), other)
    _require_same(_sample(engine), before)


def _broken(stream: list) -> Iterator:
    yield stream[0]
    raise ConnectionError("trainer is gone")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: [w for w in s if w[0] != _K], f"1 weights missing: {_K}"),
        (lambda s: {**dict(s), _NORM: torch.ones(3)}.items(), rf"{_NORM} came as .*\(3,\)"),
        (_broken, "trainer is gone"),
    ],
    ids=["missing", "shape", "broken"],
)
def test_a_stream_other_than_planned_stops_the_engine_from_generating(
    engine: VllmEngine,
    trained: list[nn.Module],
    packed: QuantPlan,
    sync: Sync,
    before: Rollouts,
    spoil: Callable[[list], Iterable],
    message: str,
) -> None:
    with pytest.raises((ValueError, ConnectionError), match=message):
        engine.sync(spoil(list(weight_stream(trained[1], packed, RECIPE))), packed)
    with pytest.raises(ValueError, match="no weights"):
        _sample(engine)
    sync(0)
    _require_same(_sample(engine), before)


def test_a_parameter_that_vllms_loader_passes_over_is_named(
    engine: VllmEngine, sync: Sync, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine.on_worker(lambda worker: worker.model_runner.get_model())
    load = type(model).load_weights

    def load_others(self: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return load(self, (item for item in weights if item[0] != _NORM))

    monkeypatch.setattr(type(model), "load_weights", load_others)
    with pytest.raises(ValueError, match=f"weight sync: {_NORM} got no new values in vLLM's"):
        sync(0)


def test_a_sync_into_an_interrupted_generation_is_refused(engine: VllmEngine, sync: Sync) -> None:
    """What it has computed with the older weights would go on to serve prompts."""
    vllm_engine = engine._llm.llm_engine
    prompt = {"prompt_token_ids": PROMPTS[0]}
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    request = vllm_engine.add_request("left", prompt, sampling)
    vllm_engine.step()
    with pytest.raises(ValueError, match="weight sync: vLLM keeps what an interrupted generation"):
        sync(0)
    with pytest.raises(ValueError, match="no weights"):
        _sample(engine)
    vllm_engine.abort_request([request or "left"], internal=request is not None)
    vllm_engine.step()
    sync(0)
    _sample(engine)


def test_responses_end_with_the_end_of_sequence(engine: VllmEngine, sync: Sync) -> None:
    sync(0)
    sampled = engine.generate(PROMPTS * 8, max_new_tokens=40, temperature=1.0, seed=1)
    lengths = sampled.response_mask.sum(-1).long()
    for ids, length, truncated in zip(
        sampled.response_ids, lengths, sampled.truncated, strict=True
    ):
        assert (ids[:length] == engine.end_ids[0]).sum() == int(not truncated)
    assert not sampled.truncated.all()


def test_prompts_beyond_a_steps_tokens_wait_whole_and_need_no_token_for_padding(
    folders: list[Path], tmp_path: Path
) -> None:
    """vLLM 0.28 fails where a prompt with a seed is prefilled in parts on a CPU."""
    folder = without_token(folders[0], tmp_path, "pad_token")
    engine = VllmEngine(folder, **SETTINGS, max_num_batched_tokens=64)
    prompts = 2 * PROMPTS  # 104 tokens
    sampled = engine.generate(prompts, max_new_tokens=16, temperature=1.0, seed=0)
    assert sampled.response_mask[:, 0].sum() == len(prompts)
    assert engine.pad_id == engine.end_ids[0]
    assert (sampled.input_ids[sampled.attention_mask == 0] == engine.end_ids[0]).all()


@pytest.mark.parametrize("name", ["tensor_parallel_size", "data_parallel_size"])
def test_several_workers_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: 2: weight syncs reach one worker"):
        VllmEngine(tmp_path, **{name: 2})


def test_vllm_in_another_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ValueError, match="VLLM_ENABLE_V1_MULTIPROCESSING: needs to be 0"):
        VllmEngine(tmp_path)


def test_what_the_engine_reports(engine: VllmEngine) -> None:
    assert engine.kv_cache_tokens > 64
    rotary_bytes = 256 * 64 * 2  # its cache, no parameter: positions, head size, BF16
    # on a CPU vLLM measures nothing, and its parameters are the report
    assert engine.on_worker(parameter_bytes) == engine.weight_bytes
    others = engine.tensor_bytes - engine.weight_bytes - rotary_bytes
    assert 0 <= others < 1024  # a few scalars a layer
    with pytest.raises(ValueError, match="CPU"):
        engine.sleep()


def test_the_plugin_is_an_entry_point() -> None:
    found = {entry.value for entry in entry_points(group="vllm.general_plugins")}
    assert "qat_core.rollout.vllm.plugin:register" in found
