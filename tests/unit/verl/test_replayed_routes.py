"""`+routing_replay=r3` in verl's configurations: what it sets, and what cannot replay routes."""

import pytest
import torch

from qat_core.routing import NO_ROUTE
from qat_core.verl.configuration import complete
from tests.verl_configurations import COMMAND, CONFIGS, ROLLOUT, completed, composed

# isort: split
from verl.utils.config import omega_conf_to_dataclass

from qat_core.verl.routing_replay import _as_the_model_gets_them


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
REFUSED: dict[str, tuple[list[str], str]] = {
    "without rollouts": ([f"{RETURNED}=false"], "return their routes; use true"),
    "R2": ([f"actor_rollout_ref.actor.{MODE}=R2"], "mode: R2: FSDP2 replays the rollouts' routes"),
    "fsdp1": (
        ["actor_rollout_ref.actor.strategy=fsdp"],
        "strategy: fsdp: syncs come from FSDP2; use fsdp2",
    ),
    "sequence parallel engine": (
        [f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"],
        r"fsdp_config\.ulysses_sequence_parallel_size: 2: routes are not split among ranks; use 1",
    ),
    "sequence parallel": (
        [f"{ACTOR}.ulysses_sequence_parallel_size=2"],
        r"actor\.ulysses_sequence_parallel_size: 2: routes are not split among ranks; use 1",
    ),
    "tools": (
        [f"{ROLLOUT}.agent.default_agent_loop=tool_agent"],
        r"default_agent_loop: tool_agent: what .* did not sample has no routes; use single_turn_ag",
    ),
    "trainer apart": (
        ["trainer.v1.trainer_mode=separate_async"],
        rf"trainer\.v1\.trainer_mode: separate_async: {OTHER_ROUTES}; use sync",
    ),
    "rollouts ahead": (
        ["trainer.v1.trainer_mode=colocate_async"],
        rf"trainer\.v1\.trainer_mode: colocate_async: {OTHER_ROUTES}; use sync",
    ),
    "several turns": ([f"{ROLLOUT}.multi_turn.enable=true"], "did not sample has no routes"),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_routes_is_refused(overrides: list[str], message: str) -> None:
    content = composed("+nvfp4=off", "+routing_replay=r3", *COMMAND[1:], *overrides)
    with pytest.raises(ValueError, match=message):
        complete(content)


@pytest.mark.parametrize("name", ["one-step-off", "fully-async"])
def test_trainers_apart_from_their_rollouts_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{OTHER_ROUTES}; use ppo_trainer"):
        completed("+routing_replay=r3", config=CONFIGS[name])


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


def test_routing_replay_alone_is_refused() -> None:
    content = composed("+routing_replay=r3", *COMMAND[1:])
    with pytest.raises(ValueError, match=r"give \+nvfp4=w4a16 too, or \+nvfp4=off"):
        complete(content)
