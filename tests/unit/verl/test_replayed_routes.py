"""`+routing_replay=r3` and `+exact=on` in verl: what they imply, and what they refuse."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import Qwen3Config
from verl.utils.config import omega_conf_to_dataclass

from qat_core.exact.count import COUNT
from qat_core.routing import NO_ROUTE
from qat_core.verl.configuration import complete
from qat_core.verl.processes import ENVIRONMENT
from qat_core.verl.routing_replay import _as_the_model_gets_them
from tests.verl_configurations import COMMAND, CONFIGS, ROLLOUT, completed, composed


@pytest.mark.parametrize("nvfp4", ["w4a16", "off"])
def test_routing_replay_is_one_more_word(nvfp4: str) -> None:
    content = composed(f"+nvfp4={nvfp4}", "+routing_replay=r3", *COMMAND[1:])
    complete(content)
    actor = omega_conf_to_dataclass(content.actor_rollout_ref.actor)
    assert actor.engine.router_replay.mode == "R3"
    assert content.actor_rollout_ref.rollout.enable_rollout_routing_replay


ACTOR = "actor_rollout_ref.actor"
OTHER_ROUTES = "old log-probs could be of other routes than the update's"
RETURNED, MODE = f"{ROLLOUT}.enable_rollout_routing_replay", "fsdp_config.router_replay.mode"
REFUSED = {
    "without rollouts": (f"{RETURNED}=false", "return their routes; use true"),
    "R2": (f"{ACTOR}.{MODE}=R2", "mode: R2: FSDP2 replays the rollouts' routes"),
    **{
        f"sequence parallel {section}": (
            f"{ACTOR}.{section}ulysses_sequence_parallel_size=2",
            rf"{section}ulysses_sequence_parallel_size: 2: routes are not split among ranks; use 1",
        )
        for section in ("fsdp_config.", "")
    },
    "tools": (
        f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
        r"default_agent_loop: tool_agent: what .* did not sample has no routes; use single_turn_ag",
    ),
    **{
        mode: (
            f"trainer.v1.trainer_mode={mode}",
            rf"trainer\.v1\.trainer_mode: {mode}: {OTHER_ROUTES}; use sync",
        )
        for mode in ("separate_async", "colocate_async")
    },
    "several turns": (f"{ROLLOUT}.multi_turn.enable=true", "did not sample has no routes"),
}


@pytest.mark.parametrize(("override", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_routes_is_refused(override: str, message: str) -> None:
    content = composed("+nvfp4=off", "+routing_replay=r3", *COMMAND[1:], override)
    with pytest.raises(ValueError, match=message):
        complete(content)


@pytest.mark.parametrize("name", ["one-step-off", "fully-async"])
def test_trainers_apart_from_their_rollouts_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"rollout: {OTHER_ROUTES}; use ppo_trainer"):
        completed("+routing_replay=r3", config=CONFIGS[name])
    with pytest.raises(ValueError, match=r"rollout: older weights .*; use ppo_trainer") as refused:
        completed("+exact=on", config=CONFIGS[name])
    assert "bypass_mode" not in str(refused.value), "set by verl"


def test_what_leaves_tokens_in_their_order_is_accepted() -> None:
    """Padding behind the tokens has no routes; verl's engine does not read use_prefix_grouper."""
    completed(
        "+routing_replay=r3",
        f"{ACTOR}.use_prefix_grouper=true",
        f"{ACTOR}.fsdp_config.pad_to_length=true",
        "actor_rollout_ref.model.use_fused_kernels=true",
    )


def test_padding_to_a_length_has_no_routes() -> None:
    """`pad_to_length` lengthens the one row of packed sequences."""
    ids, lengths = torch.arange(10).view(5, 1, 2), torch.tensor([3, 2])
    padded = _as_the_model_gets_them(ids, lengths, torch.zeros(1, 8))
    assert torch.equal(padded[:5], ids)
    assert (padded[5:] == NO_ROUTE).all() and len(padded) == 8


def test_routes_are_not_returned_in_vain() -> None:
    """verl's FSDP2 engine would ignore them."""
    with pytest.raises(ValueError, match=r"use \+routing_replay=r3"):
        completed(f"{RETURNED}=true")
    completed(f"{RETURNED}=true", f"{ROLLOUT}.moe_load_balance_metrics_interval=1")


@pytest.mark.parametrize("group", ["+routing_replay=r3", "+exact=on"])
def test_a_group_alone_is_refused(group: str) -> None:
    content = composed(group, *COMMAND[1:])
    with pytest.raises(
        ValueError, match=r"give \+nvfp4@_global_=w4a16 too, or \+nvfp4@_global_=off"
    ):
        complete(content)


EXACT = ["+exact=on", f"{ROLLOUT}.name=vllm"]


def _completed(*overrides: str) -> Any:
    content = composed(*EXACT, *overrides)
    complete(content)
    return content


@pytest.mark.parametrize("precision", ["w4a16", "off"])
def test_one_key_sets_all_that_exact_runs_need(precision: str) -> None:
    config = composed(*EXACT, f"+nvfp4={precision}")
    assert complete(config).endswith("; kernels: exact")
    variables = OmegaConf.select(config, ENVIRONMENT)
    assert variables.QAT_CORE_EXACT == "1"
    assert (variables.QAT_CORE_EXACT_RANKS, variables.QAT_CORE_EXACT_EXPERT_PARALLEL) == ("1", "0")
    assert variables.VERL_USE_EXTERNAL_MODULES == "qat_core.verl.exact_count"
    asked = OmegaConf.select(config, f"{ROLLOUT}.engine_kwargs.vllm")
    assert asked.compilation_config == {"mode": 0, "cudagraph_mode": "FULL"}
    assert asked.attention_config == {"backend": "FLASH_ATTN", "flash_attn_version": 3}
    assert "qat_core.verl.exact" in config.actor_rollout_ref.model.external_lib


@pytest.mark.parametrize("expert_parallel", [1, 2])
def test_trainers_know_the_ranks_of_rollouts(expert_parallel: int) -> None:
    both = ("tensor_model_parallel_size=2", f"expert_parallel_size={expert_parallel}")
    variables = OmegaConf.select(
        _completed("+nvfp4=w4a16", *(f"{ROLLOUT}.{it}" for it in both)), ENVIRONMENT
    )
    assert variables.QAT_CORE_EXACT_RANKS == "2"
    assert str(expert_parallel - 1) == variables.QAT_CORE_EXACT_EXPERT_PARALLEL


def test_experts_are_shared_out_by_the_tensor_parallel_ranks() -> None:
    with pytest.raises(ValueError, match=r"expert_parallel_size: 2: .* use the same for both"):
        _completed("+nvfp4=w4a16", f"{ROLLOUT}.expert_parallel_size=2")


@pytest.mark.parametrize(
    ("ranks", "named"),
    [((2, 1), "num_key_value_heads 1: two ranks"), ((2, 2), "qwen3 has no experts")],
)
def test_a_model_that_ranks_cannot_share_is_refused_before_ray_starts(
    tmp_path: Path, ranks: tuple[int, int], named: str
) -> None:
    sizes = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": ranks[1]}
    Qwen3Config(**sizes, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    keys = zip(("tensor_model_parallel_size", "expert_parallel_size"), ranks, strict=True)
    overrides = [f"{ROLLOUT}.{key}={count}" for key, count in keys]
    model = f"actor_rollout_ref.model.path={tmp_path}"
    with pytest.raises(ValueError, match=named):
        _completed("+nvfp4=off", model, *overrides)


def test_the_model_is_judged_as_verl_trains_it(tmp_path: Path) -> None:
    Qwen3Config(head_dim=64, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    changes = (
        f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides",
        "actor_rollout_ref.model.override_config",
    )
    overrides = [f"+{section}.hidden_act=gelu" for section in changes]
    with pytest.raises(
        ValueError,
        match=r"temperature: 0\.7: .*\n.*path: exact: hidden_act gelu: proven for silu only; train",
    ):
        overrides += [f"{ROLLOUT}.temperature=0.7", f"actor_rollout_ref.model.path={tmp_path}"]
        _completed("+nvfp4=off", *overrides)


def test_modules_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine")
    variables = OmegaConf.select(_completed("+nvfp4=off"), ENVIRONMENT)
    assert variables.VERL_USE_EXTERNAL_MODULES == "mine,qat_core.verl.exact_count"


@pytest.mark.parametrize(
    "override",
    [
        f"{ROLLOUT}.tensor_model_parallel_size=4",
        f"{ROLLOUT}.expert_parallel_size=4",
        f"{ROLLOUT}.temperature=0.7",
        f"+{ROLLOUT}.repetition_penalty=1.1",
        f"{ROLLOUT}.calculate_log_probs=false",
        "algorithm.rollout_correction.bypass_mode=true",
        "actor_rollout_ref.model.use_fused_kernels=true",
        "actor_rollout_ref.model.use_liger=true",
        "actor_rollout_ref.actor.fsdp_config.qat.scale_policy=amax",
        f"{ROLLOUT}.multi_turn.enable=true",
        f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
        f"{ROLLOUT}.logprobs_mode=raw_logprobs",
        "actor_rollout_ref.actor.fsdp_config.qat.train=false",
        "actor_rollout_ref.actor.use_prefix_grouper=true",
        "actor_rollout_ref.model.tiled_mlp.enabled=true",
        f"+{ROLLOUT}.engine_kwargs.vllm.attention_backend=TRITON_ATTN",
        f"+{ROLLOUT}.engine_kwargs.vllm.decode_context_parallel_size=2",
        f"+{ROLLOUT}.engine_kwargs.vllm.compilation_config.mode=3",
        f"+{ROLLOUT}.engine_kwargs.vllm.attention_config.flash_attn_version=2",
        f"+{ROLLOUT}.engine_kwargs.vllm.attention_config='{{backend: FLASHINFER}}'",
        f"+{ROLLOUT}.engine_kwargs.vllm.compilation_config='{{mode: 3}}'",
        f"+{ROLLOUT}.engine_kwargs.vllm.compilation_config.custom_ops=[none]",
        f"+{ROLLOUT}.engine_kwargs.vllm.hf_overrides.max_position_embeddings=512",
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size=2",
        "+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=fp32",
        "skip.rollout.enable=true",
        "reward.reward_model.enable=true",
        "distillation.enabled=true",
        "skip.rollout_tq.enable=true",
    ],
)
def test_what_is_not_exact_is_refused_by_its_key(override: str) -> None:
    key = override.partition("=")[0].lstrip("+")
    with pytest.raises(ValueError, match=key):
        _completed("+nvfp4=w4a16", override)


@pytest.mark.parametrize("count", ["0", "two", "'2'", "true", "1.5"])
@pytest.mark.parametrize("key", ["tensor_model_parallel_size", "expert_parallel_size"])
def test_no_count_of_ranks_is_told_what_one_is(key: str, count: str) -> None:
    with pytest.raises(ValueError, match=rf"\A[^\n]*\.{key}: \w[^ ]*: use 1 or 2, as a number\Z"):
        _completed("+nvfp4=off", f"{ROLLOUT}.{key}={count}")


@pytest.mark.parametrize(
    ("exact", "variable", "value"),
    [
        (True, "QAT_CORE_EXPERTS_KERNEL", "humming"),
        (True, "QAT_CORE_LINEAR_KERNEL", "marlin"),
        (False, "QAT_CORE_EXACT", "1"),
        (False, "QAT_CORE_EXACT_RANKS", "2"),
    ],
)
def test_variables_that_would_change_it_are_refused(
    exact: bool, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable}: .*; unset it"):
        complete(composed(*EXACT[not exact :], "+nvfp4=w4a16"))


def _data(theirs: list[list[float]]) -> Any:
    batch = {
        "old_log_probs": torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]),
        "rollout_log_probs": torch.tensor(theirs),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
        "responses": torch.zeros(2, 2, dtype=torch.long),
    }
    return SimpleNamespace(batch=batch)


def test_a_log_prob_with_other_bits_ends_the_run_with_its_place_but_not_in_padding() -> None:
    from qat_core.verl.exact_count import with_count

    assert with_count(_data([[-1.0, -2.0], [-3.0, 9.0]]))[COUNT] == 0
    one_bit_off = float(torch.nextafter(torch.tensor(-2.0), torch.tensor(0.0)))
    with pytest.raises(ValueError, match="1 of 3 log-probs differ, first of response 0 at token 1"):
        with_count(_data([[-1.0, one_bit_off], [-3.0, 9.0]]))


@pytest.mark.parametrize(
    ("metrics", "is_refused"),
    [
        pytest.param({"actor/grad_norm": 1.0}, True, id="trained-and-not-counted"),
        pytest.param({"actor/grad_norm": 1.0, COUNT: 0.0}, False, id="counted"),
        pytest.param({"val-core/reward": 1.0}, False, id="validated"),
    ],
)
def test_a_step_that_was_not_counted_ends_the_run(
    metrics: dict[str, float], is_refused: bool
) -> None:
    from qat_core.verl.exact_count import Tracking

    logged: list[dict[str, float]] = []
    backend = SimpleNamespace(log=lambda data, step: logged.append(data))
    tracking: Any = SimpleNamespace(logger={"file": backend})
    refused = pytest.raises(ValueError, match=r"step 3: .* no log-prob was compared")
    with refused if is_refused else nullcontext():
        Tracking.log(tracking, metrics, step=3)
    assert logged == [metrics] * (not is_refused)
