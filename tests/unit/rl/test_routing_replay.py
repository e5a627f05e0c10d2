"""Routing replay in the local trainer: the engine names its experts, the policy uses them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiments.rl.config import GrpoConfig
from experiments.rl.policy import Policy, Scores
from experiments.study.arms import ArmName, make_recipes
from qat_core.rollout.eager import EagerEngine
from qat_core.rollout.engine import Rollouts
from qat_core.routing import capture
from tests.nano_models import CONFIG, nano_trainer, write_nano

PROMPTS = [[3, 14, 4, 17], [5, 17], [3, 3, 14, 9, 15, 4, 17]]
REPLAYING = CONFIG.model_copy(
    update={"routing_replay": True, "advantage": "reward", "lr": 1e-2}  # so that routes would move
)
ON_POLICY = REPLAYING.model_copy(update={"mini_batch_prompts": CONFIG.prompts_per_step})
CONFIGS = {"off-policy": REPLAYING, "on-policy": ON_POLICY}


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe") / "model"
    write_nano("nano-moe", folder, num_layers=2)
    return folder


@pytest.fixture(scope="module")
def rollouts(moe_dir: Path) -> Rollouts:
    return EagerEngine(moe_dir, returns_routes=True).generate(PROMPTS, 12, 1.0, seed=0)


def test_routes_of_a_decoding_are_those_of_all_positions_but_the_last(
    rollouts: Rollouts, moe_dir: Path
) -> None:
    assert rollouts.routes is not None
    sequences, positions = rollouts.input_ids.shape
    assert rollouts.routes.shape == (sequences, positions - 1, 2, 2)
    plain = EagerEngine(moe_dir).generate(PROMPTS, 12, 1.0, seed=0)
    assert plain.routes is None
    assert torch.equal(plain.input_ids, rollouts.input_ids), "capture changes no token"
    assert torch.equal(plain.log_probs, rollouts.log_probs)
    picked = rollouts.select(torch.tensor([2, 0]))
    assert picked.routes is not None and torch.equal(picked.routes, rollouts.routes[[2, 0]])


def test_the_policy_uses_the_engines_experts(rollouts: Rollouts, moe_dir: Path) -> None:
    policy = Policy(moe_dir, make_recipes("nvfp4-qat").train, "cpu", replays_routes=True)
    assert rollouts.routes is not None
    changed = replace(rollouts, routes=(rollouts.routes.sort(-1).values + 1) % 8)
    with capture(policy.model) as captured:
        policy.scores(changed)
    used = captured.routes(len(PROMPTS))
    assert changed.routes is not None and torch.equal(used[:, :-1], changed.routes)


def test_rollouts_without_their_routes_are_refused(rollouts: Rollouts, moe_dir: Path) -> None:
    policy = Policy(moe_dir, None, "cpu", replays_routes=True)
    with pytest.raises(ValueError, match="the rollouts name no experts"):
        policy.scores(replace(rollouts, routes=None))
    assert rollouts.routes is not None
    with pytest.raises(ValueError, match=r"routes \(tokens, k\) are"):
        policy.scores(replace(rollouts, routes=rollouts.routes[:, 1:]))


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    write_nano("nano-dense", tmp_path / "model", num_layers=1)
    trainer = nano_trainer(tmp_path / "model", tmp_path, None, None, grpo=REPLAYING)
    with pytest.raises(ValueError, match="the model has no experts"):
        trainer.step(1)


@pytest.mark.parametrize("arm", ["bf16", "nvfp4-qat"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_old_and_new_log_probs_are_of_the_same_routes(
    config: GrpoConfig, arm: ArmName, moe_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every scoring of a response, before the updates and in them, uses the engine's routes."""
    trainer = nano_trainer(moe_dir, tmp_path, *make_recipes(arm), grpo=config)
    seen: dict[tuple[int, ...], list[Tensor]] = {}
    scores = Policy.scores

    def noting(policy: Policy, rollouts: Rollouts) -> Scores:
        with capture(policy.model) as captured:
            found = scores(policy, rollouts)
        used = captured.routes(len(rollouts.input_ids))
        assert rollouts.routes is not None
        for ids, mask, row, engines in zip(
            rollouts.input_ids, rollouts.attention_mask, used[:, :-1], rollouts.routes, strict=True
        ):
            is_token = mask[:-1] > 0
            assert torch.equal(row[is_token], engines[is_token])
            seen.setdefault(tuple(ids.tolist()), []).append(row[is_token])
        return found

    monkeypatch.setattr(Policy, "scores", noting)
    metrics = trainer.step(1)
    scorings = 1 if config.is_on_policy else 2
    sampled = {len(rows) // scorings for rows in seen.values()}
    assert sampled == {1}, "responses differ, and each is scored as often as needed"
    assert all(torch.equal(rows[0], rows[-1]) for rows in seen.values())
    assert metrics["actor/grad_norm"] > 0


def test_replay_leaves_less_mismatch(moe_dir: Path, tmp_path: Path) -> None:
    """Of the same rollouts, by the same weights."""
    trainer = nano_trainer(moe_dir, tmp_path, *make_recipes("nvfp4-qat"), grpo=REPLAYING)
    trainer._sync()
    rollouts = trainer._generate(trainer._draw_problems(1) * 8, 1)
    mask_BT = rollouts.response_mask

    def largest(replays: bool) -> float:
        trainer.policy.replays_routes = replays
        with torch.no_grad():
            log_probs_BT, _ = trainer.policy.log_probs(rollouts)
        return float(((log_probs_BT - rollouts.log_probs) * mask_BT).abs().max())

    assert largest(replays=True) < largest(replays=False)
