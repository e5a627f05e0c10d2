"""Parts of verl that are replaced: replay buffer, loading and saving of actors' weights."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import fsdp_utils

import qat_core.verl.saved_weights  # noqa: F401  it changes verl's functions
from qat_core.checkpoint.load import load_model
from qat_core.planning.recipe import Recipe
from qat_core.verl.engine import NvFp4Engine, ReplayEngine
from qat_core.verl.sampler import make_replay_buffer
from tests.verl_configurations import composed

HALF_A_SECOND = 10**9  # cycles of an H100 or H200, about


@pytest.fixture
def model(tmp_path: Path) -> Iterator[nn.Module]:
    """A layer that one rank shards."""
    torch.cuda.set_device(0)
    rendezvous = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("cuda:nccl,cpu:gloo", init_method=rendezvous, rank=0, world_size=1)
    yield fully_shard(nn.Linear(2048, 2048, device="cuda"))
    dist.destroy_process_group()


def offload_late(model: nn.Module, value: float) -> None:
    """As verl does; copies of weights of this value begin when the host has long gone on."""
    model.to("cuda", non_blocking=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    torch.cuda.synchronize()
    torch.cuda._sleep(HALF_A_SECOND)
    model.to("cpu", non_blocking=True)


@pytest.mark.gpu
def test_shards_on_their_way_to_the_host_are_saved_and_restored_whole(model: nn.Module) -> None:
    for value in (1.0, 2.0):  # pinned memory is there from the second time on
        offload_late(model, value)
    shards, spec = fsdp_utils.fsdp2_sharded_save_to_cpu(model)
    assert all((shard == 2.0).all() for shard, _ in shards.values())
    offload_late(model, 3.0)
    fsdp_utils.fsdp2_sharded_load_from_cpu(model, shards, spec)
    torch.cuda.synchronize()
    assert all((it.to_local() == 2.0).all() for it in model.parameters())  # type: ignore[attr-defined]


def test_an_actor_of_a_checkpoint_that_lacks_a_weight_is_refused(
    nano_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(nano_dir, tmp_path / "model")
    model = load_model(folder)
    monkeypatch.setattr(ReplayEngine, "_build_module", lambda _: model)
    engine = object.__new__(NvFp4Engine)
    engine.model_config, engine.rank = SimpleNamespace(local_path=str(folder)), 0
    engine._recipe, engine._trains_rounded = Recipe.full(), False
    assert engine._build_module() is model
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"/model: .*missing keys: lm_head.weight"):
        engine._build_module()


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
