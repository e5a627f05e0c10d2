"""The replay buffer of `+sampler=quick` is verl's own but for how often it looks."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from qat_core.verl.sampler import make_replay_buffer
from tests.verl_configurations import composed

FILTERED = [
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.metric=acc",
    "algorithm.filter_groups.max_inflight_gen_batches=2",
]
CASES: dict[str, tuple[str, list[str]]] = {
    "sync": ("sync", []),
    "filtered": ("sync", FILTERED),
    "generation batches": ("sync", ["data.gen_batch_size=64"]),
    "refill": ("sync", ["trainer.v1.sampler.sync_refill_failed_groups=true"]),
    "async": ("separate_async", FILTERED),
}


def built(mode: str, *overrides: str) -> Any:
    """As verl's trainer builds it for a command."""
    config = composed(*overrides)
    trainer = SimpleNamespace(config=config, trainer_mode=mode, _add_prompts_to_generate=len)
    trainer._resolve_filter_groups_metric = lambda: PPOTrainer._resolve_filter_groups_metric(
        trainer
    )
    return PPOTrainer._build_replay_buffer(trainer)


@pytest.mark.parametrize(("mode", "overrides"), CASES.values(), ids=CASES)
def test_it_differs_from_verls_own_in_how_often_it_looks(mode: str, overrides: list[str]) -> None:
    own, quick = built(mode, *overrides), built(mode, *overrides, "+sampler=quick")
    assert type(own) is type(quick)
    settings = [vars(buffer) | {"sampler_kwargs": None} for buffer in (own, quick)]
    assert settings[0].pop("poll_interval") == 2.0, "once verl looks more often, drop the sampler"
    assert settings[1].pop("poll_interval") == 0.2
    assert settings[0] == settings[1]


def test_filtered_groups_need_a_metric() -> None:
    groups = OmegaConf.create({"enable": True, "metric": None})
    asked = OmegaConf.create(
        {"filter_groups": groups, "poll_interval": 0.2, "sync_refill_failed_groups": False}
    )
    with pytest.raises(ValueError, match=r"filter_groups\.metric: missing; name one, such as acc"):
        make_replay_buffer(trainer_mode="sync", sampler_kwargs=asked)
