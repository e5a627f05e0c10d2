"""BF16 syncs into an engine that serves block FP8 are refused: its scales would stay."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qat_core.rollout.vllm import bucketed_loader

layerwise = pytest.importorskip(
    "vllm.model_executor.model_loader.reload.layerwise", reason="needs requirements/engines.txt"
)


def worker(scale: str) -> SimpleNamespace:
    """As far as a sync looks at one before it writes: its model, recorded when it was loaded."""
    linear = nn.Linear(4, 4)
    linear.register_parameter(scale, nn.Parameter(torch.ones(1, 1)))
    model = nn.Sequential(linear)
    layerwise.record_metadata_for_reloading(model)
    return SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))


@pytest.mark.verl_table("a base in block FP8, with rollouts in BF16", "refused by the first sync")
@pytest.mark.parametrize("scale", ["weight_scale_inv", "w13_weight_scale_inv"])
def test_a_stream_in_bf16_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, scale: str
) -> None:
    monkeypatch.setattr(bucketed_loader, "worker_names", lambda _: SimpleNamespace(pieces={}))
    monkeypatch.setattr(bucketed_loader, "reloading", None)  # not reached
    with (
        pytest.raises(ValueError, match="comes in BF16, but 0 is served in block FP8: give a base"),
        bucketed_loader.BucketedLoader(worker(scale)) as loader,
    ):
        loader.take([("0.weight", torch.zeros(4, 4))])


def test_an_engine_without_such_scales_is_accepted() -> None:
    bucketed_loader.require_not_block_fp8(worker("bias_of_its_own"))
