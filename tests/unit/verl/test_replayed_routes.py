"""`+routing_replay=r3` in verl's configurations: what it sets, and what cannot replay routes."""

import pytest

from qat_core.verl.configuration import complete
from tests.verl_configurations import COMMAND, ROLLOUT, completed, composed

# isort: split
from verl.utils.config import omega_conf_to_dataclass


@pytest.mark.parametrize("nvfp4", ["w4a16", "off"])
def test_routing_replay_is_one_more_word(nvfp4: str) -> None:
    content = composed(f"+nvfp4={nvfp4}", "+routing_replay=r3", *COMMAND[1:])
    complete(content)
    actor = omega_conf_to_dataclass(content.actor_rollout_ref.actor)
    assert actor.engine.router_replay.mode == "R3"
    assert content.actor_rollout_ref.rollout.enable_rollout_routing_replay


RETURNED, MODE = f"{ROLLOUT}.enable_rollout_routing_replay", "fsdp_config.router_replay.mode"
REFUSED: dict[str, tuple[list[str], str]] = {
    "without rollouts": ([f"{RETURNED}=false"], "return their routes; use true"),
    "R2": ([f"actor_rollout_ref.actor.{MODE}=R2"], "mode: R2: FSDP2 replays the rollouts' routes"),
    "fsdp1": (["actor_rollout_ref.actor.strategy=fsdp"], "fsdp: routes are replayed with FSDP2"),
    "sequence parallel": (
        ["actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"],
        "parallel_size: 2: routes are not split among ranks; use 1",
    ),
    "several turns": ([f"{ROLLOUT}.multi_turn.enable=true"], "did not sample has no routes"),
    "pipeline": ([f"{ROLLOUT}.pipeline_model_parallel_size=2"], "returns no routes with it; use 1"),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_routes_is_refused(overrides: list[str], message: str) -> None:
    content = composed("+nvfp4=off", "+routing_replay=r3", *COMMAND[1:], *overrides)
    with pytest.raises(ValueError, match=message):
        complete(content)


def test_routes_are_not_returned_in_vain() -> None:
    """verl's FSDP2 engine would ignore them."""
    with pytest.raises(ValueError, match="use routing_replay=r3"):
        completed(f"{RETURNED}=true")
    completed(f"{RETURNED}=true", f"{ROLLOUT}.moe_load_balance_metrics_interval=1")


def test_routing_replay_alone_is_refused() -> None:
    content = composed("+routing_replay=r3", *COMMAND[1:])
    with pytest.raises(ValueError, match=r"give \+nvfp4=w4a16 too, or \+nvfp4=off"):
        complete(content)
