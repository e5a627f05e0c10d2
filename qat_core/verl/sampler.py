"""verl's own replay buffer, which looks for finished rollouts more often: `+sampler=quick`.

verl 0.9.1 looks every 2 s, and has no key for it: each step waits up to 2 s for nothing, and longer
where groups are filtered and replaced. Unneeded once `poll_interval` can be set.
"""

from typing import Any

from omegaconf import DictConfig
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync


def make_replay_buffer(
    *, trainer_mode: str, sampler_kwargs: DictConfig, **common: Any
) -> ReplayBuffer:
    """Called by verl's trainer as the class of `trainer.v1.sampler.custom_sampler`."""
    asked, groups = sampler_kwargs, sampler_kwargs.filter_groups
    filters = bool(groups and groups.get("enable", False))
    arguments = common | {
        "trainer_mode": trainer_mode,
        "sampler_kwargs": sampler_kwargs,
        "poll_interval": asked.poll_interval,
        "filter_groups_metric": groups.metric if filters else None,
        "sync_refill_failed_groups": asked.sync_refill_failed_groups,
    }
    if filters and not groups.metric:
        raise ValueError("algorithm.filter_groups.metric: missing; name one, such as acc")
    if trainer_mode != "sync":
        return ReplayBufferAsync(**arguments)
    one_by_one = filters or asked.sync_refill_failed_groups
    batch_size = asked.gen_batch_size or asked.train_batch_size
    return ReplayBuffer(
        **arguments,
        train_batch_size=asked.train_batch_size,
        gen_batch_size=1 if one_by_one else batch_size,
        max_inflight_gen_batches=groups.get("max_inflight_gen_batches", 1) if filters else 1,
    )
