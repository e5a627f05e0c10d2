"""What routing replay cannot do is refused by the key that asks for it."""

from pathlib import Path

import pytest

from tests.verl_configurations import CONFIGS, ROLLOUT, completed

ACTOR = "actor_rollout_ref.actor"
OTHER_ROUTES = "old log-probs could be of other routes than the update's; use "
REFUSED = {
    "sequence parallel": (
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        r"actor\.ulysses_sequence_parallel_size: 2: routes are not split among ranks; use 1",
    ),
    "sequence parallel engine": (
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2",
        r"fsdp_config\.ulysses_sequence_parallel_size: 2: routes are not split among ranks; use 1",
    ),
    "tools": (
        f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
        r"default_agent_loop: tool_agent: what .* did not sample has no routes; use single_turn_ag",
    ),
    "apart": ("trainer.v1.trainer_mode=separate_async", f"mode: separate_async: {OTHER_ROUTES}sy"),
    "ahead": ("trainer.v1.trainer_mode=colocate_async", f"mode: colocate_async: {OTHER_ROUTES}sy"),
}


@pytest.mark.parametrize(("override", "message"), REFUSED.values(), ids=REFUSED)
def test_what_replay_cannot_do_is_refused_by_name(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        completed("+routing_replay=r3", override)


@pytest.mark.parametrize("name", ["one-step-off", "fully-async"])
def test_trainers_apart_from_their_rollouts_are_refused(name: str) -> None:
    config: Path = CONFIGS[name]
    with pytest.raises(ValueError, match=f"{OTHER_ROUTES}ppo_trainer"):
        completed("+routing_replay=r3", config=config)


@pytest.mark.parametrize(
    "override",
    [
        f"{ACTOR}.use_prefix_grouper=true",
        f"{ACTOR}.fsdp_config.pad_to_length=true",
        "actor_rollout_ref.model.use_fused_kernels=true",
    ],
)
def test_what_leaves_tokens_in_their_order_is_accepted(override: str) -> None:
    completed("+routing_replay=r3", override)
