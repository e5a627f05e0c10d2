"""The local trainer: all arms run, the mismatch is where it belongs, a resumed run is the same, and
replayed routes are the engine's.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from analysis.metrics import CATALOGUE
from experiments.rl.config import Correction, GrpoConfig
from experiments.rl.policy import Policy, Scores
from experiments.rl.update import old_scores, update_policy
from experiments.study.arms import ArmName, make_recipes
from qat_core.rollout.eager import EagerEngine
from qat_core.rollout.engine import Rollouts
from qat_core.routing import capture
from tests.nano_models import CONFIG, nano_trainer, write_nano

TIMES = ("timing_s/", "perf/")


def run(
    base: Path, arm_name: ArmName, checkpoints: Path, stop_after: int | None = None
) -> dict[int, dict[str, float]]:
    history: dict[int, dict[str, float]] = {}

    def on_step(step: int, metrics: dict[str, float]) -> None:
        history[step] = {k: v for k, v in metrics.items() if not k.startswith(TIMES)}
        if step == stop_after:
            raise KeyboardInterrupt

    trainer = nano_trainer(base, checkpoints, *make_recipes(arm_name))
    try:
        trainer.train(on_step)
    except KeyboardInterrupt:
        assert stop_after is not None
    return history


def test_the_mismatch_is_where_it_belongs(nano_dir: Path, tmp_path: Path) -> None:
    k3 = {}
    for arm in ("bf16", "nvfp4-noqat", "nvfp4-qat", "nvfp4-qat-ffn"):
        history = run(nano_dir, arm, tmp_path / arm)
        assert sorted(history) == [1, 2, 3, 4]
        k3[arm] = sum(m["rollout_corr/k3_kl"] for m in history.values()) / 4
    # seen: 6,000 times (dense) and 300 times (MoE) the largest of the others
    assert k3["bf16"] > 0
    assert k3["nvfp4-noqat"] > 20 * max(k3["bf16"], k3["nvfp4-qat"], k3["nvfp4-qat-ffn"])


@pytest.fixture
def _some_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights solve nothing: without this no advantage would differ from zero."""

    def is_even(task: Any, response: str, answer: str) -> float:
        return float(sum(map(ord, response)) % 2 == 0)

    monkeypatch.setattr("experiments.rl.trainer.score", is_even)


@pytest.mark.usefixtures("_some_are_right")
def test_a_resumed_run_repeats_the_uninterrupted_one(nano_dir: Path, tmp_path: Path) -> None:
    whole = run(nano_dir, "nvfp4-qat", tmp_path / "whole")
    first = run(nano_dir, "nvfp4-qat", tmp_path / "cut", stop_after=3)
    second = run(nano_dir, "nvfp4-qat", tmp_path / "cut")
    assert sorted(second) == [3, 4], "step 3 was not saved, so it is run again"
    assert {**first, **second} == whole


def test_a_run_on_the_cpu_leaves_the_gpus_alone(
    nano_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = nano_trainer(nano_dir, tmp_path, None, None)

    def take_gpu() -> None:
        pytest.fail("it would have made a context on a GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", take_gpu)
    trainer.sample(1)
    assert trainer.timings_s.keys() == {"update_weights", "gen"}


ON_POLICY = CONFIG.model_copy(
    update={"mini_batch_prompts": CONFIG.prompts_per_step, "measure_drift_term": True}
)


def steps_of(
    base: Path, folder: Path, config: GrpoConfig, arm: ArmName = "nvfp4-noqat"
) -> list[dict[str, float]]:
    """Two steps' metrics, less times."""
    trainer = nano_trainer(base, folder, *make_recipes(arm), grpo=config)
    steps = [trainer.step(step) for step in (1, 2)]
    assert all(step.keys() <= CATALOGUE.keys() for step in steps), "all metrics are documented"
    return [{k: v for k, v in step.items() if not k.startswith(TIMES)} for step in steps]


@pytest.mark.parametrize("arm", ["bf16", "nvfp4-noqat", "nvfp4-qat"])
def test_on_policy_one_forward_pass_says_as_much_as_two(
    nano_dir: Path, tmp_path: Path, arm: ArmName, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = steps_of(nano_dir, tmp_path, ON_POLICY, arm)
    monkeypatch.setattr("experiments.rl.trainer.needs_old_scores", lambda config: True)
    assert steps_of(nano_dir, tmp_path, ON_POLICY, arm) == one


def test_corrections_update_differently(nano_dir: Path, tmp_path: Path) -> None:
    norms = {
        correction: steps_of(
            nano_dir,
            tmp_path,
            ON_POLICY.model_copy(update={"correction": correction, "advantage": "reward"}),
        )[0]["actor/grad_norm"]
        for correction in get_args(Correction)
    }
    assert len(set(norms.values())) == len(norms), norms
    # a geometric mask of a few random tokens may keep none of them
    assert all(norm > 0 for name, norm in norms.items() if name != "geometric_mask"), norms


def test_metrics_of_an_update_are_of_the_tokens_that_a_mask_keeps(
    nano_dir: Path, tmp_path: Path
) -> None:
    config = ON_POLICY.model_copy(update={"correction": "geometric_mask"})
    trainer = nano_trainer(nano_dir, tmp_path, *make_recipes("bf16"), grpo=config)
    _, sampled = trainer.sample(1)
    old = old_scores(trainer.policy, sampled, config)
    old.log_probs_BT[:] -= 1  # the ratio is e, which is clipped
    old.log_probs_BT[1::2] -= 1  # of dropped ones another
    drops_B1 = torch.arange(len(old.log_probs_BT))[:, None] % 2
    rollouts = replace(sampled, log_probs=old.log_probs_BT - drops_B1)
    advantages_B1 = torch.ones(len(drops_B1), 1)
    metrics, _ = update_policy(
        trainer.policy, trainer.optimizer, rollouts, old, advantages_B1, config
    )
    assert metrics["actor/pg_clipfrac"] == pytest.approx(1.0)
    assert metrics["actor/ppo_kl"] == pytest.approx(-1.0)


@pytest.mark.usefixtures("_some_are_right")
def test_drift_is_that_of_the_arm(nano_dir: Path, tmp_path: Path) -> None:
    config = ON_POLICY.model_copy(update={"advantage": "reward"})
    first, second = zip(
        *(steps_of(nano_dir, tmp_path, config, arm) for arm in ("nvfp4-noqat", "nvfp4-qat")),
        strict=True,
    )
    assert (
        first[0]["drift_term/score"] > 10 * first[1]["drift_term/score"]
    )  # seen: 15 (MoE) and 38 times
    assert 0 < first[0]["critic/score/mean"] < 1
    # of tokens, while responses differ a little in length
    of_responses = 2 * first[0]["critic/score/mean"] - 1
    assert first[0]["drift_term/advantage"] == pytest.approx(of_responses, abs=0.2)
    assert 0 < first[0]["drift_term/weight_steps"] < second[0]["drift_term/weight_steps"]


@pytest.mark.parametrize(
    ("trained", "rolled_out", "message"),
    [
        ("nvfp4-qat-ffn", "nvfp4-qat", r"_proj.weight: would be packed, but prepare\(\) did not"),
        ("nvfp4-qat", "bf16", r"q_proj.weight: trained in NVFP4, sent in BF16, served in BF16"),
    ],
    ids=["packs-more", "packs-nothing"],
)
def test_other_weights_trained_than_served_are_refused(
    nano_dir: Path, tmp_path: Path, trained: ArmName, rolled_out: ArmName, message: str
) -> None:
    recipes = make_recipes(trained).train, make_recipes(rolled_out).rollout
    trainer = nano_trainer(nano_dir, tmp_path, *recipes)
    with pytest.raises(ValueError, match=message):
        trainer.train(lambda step, metrics: None)
    assert not list(tmp_path.iterdir())


PROMPTS = [[3, 14, 4, 17], [5, 17], [3, 3, 14, 9, 15, 4, 17]]
REPLAYING = CONFIG.model_copy(
    update={"routing_replay": True, "advantage": "reward", "lr": 1e-2}  # so that routes would move
)
REPLAYING_ON_POLICY = REPLAYING.model_copy(update={"mini_batch_prompts": CONFIG.prompts_per_step})
CONFIGS = {"off-policy": REPLAYING, "on-policy": REPLAYING_ON_POLICY}


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
    sequences, positions = rollouts.input_ids.shape
    assert rollouts.routes.shape == (sequences, positions - 1, 2, 2)
    plain = EagerEngine(moe_dir).generate(PROMPTS, 12, 1.0, seed=0)
    assert plain.routes is None
    assert torch.equal(plain.input_ids, rollouts.input_ids), "capture changes no token"
    assert torch.equal(plain.log_probs, rollouts.log_probs)
    picked = rollouts.select(torch.tensor([2, 0]))
    assert picked.routes is not None and torch.equal(picked.routes, rollouts.routes[[2, 0]])


def test_rollouts_without_their_routes_are_refused(rollouts: Rollouts, moe_dir: Path) -> None:
    policy = Policy(moe_dir, None, "cpu", replays_routes=True)
    with pytest.raises(ValueError, match="the rollouts name no experts"):
        policy.scores(replace(rollouts, routes=None))
    with pytest.raises(ValueError, match=r"routes \(tokens, k\) are"):
        policy.scores(replace(rollouts, routes=rollouts.routes[:, 1:]))


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
