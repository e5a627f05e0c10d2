"""Weights as named tensors: what a receiver can tell from them."""

import pytest
import torch

from qat_core.nvfp4 import global_scale, quantize
from qat_core.plan import plan
from qat_core.recipe import Recipe
from qat_core.rollout.packed import weight_stream
from qat_core.rollout.wire import Assembler, read_announcement, to_wire
from tests.tiny_models import tiny_model


def test_the_announcement_comes_first_and_names_every_weight() -> None:
    model = tiny_model("qwen3-moe")
    checked = plan(model, Recipe())
    _, announcement = next(to_wire(checked, weight_stream(model, checked, Recipe())))
    announced = read_announcement(announcement)
    assert {name: shape for name, (shape, _) in announced.items()} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    assert [name for name, (_, packed) in announced.items() if packed] == list(checked.quantized)


def test_received_weights_outlive_their_bucket() -> None:
    weight = torch.randn(4, 32)
    bucket = [("w", weight)]
    ((_, received),) = Assembler().take(bucket)
    kept = received.clone()
    weight.zero_()
    assert torch.equal(received, kept)


def test_a_weight_that_never_becomes_complete_is_named() -> None:
    packed = quantize(torch.randn(4, 32), global_scale(torch.tensor(3.0), "pow2"))
    assembler = Assembler()
    assert not list(assembler.take([("w:codes", packed.codes)]))
    with pytest.raises(ValueError, match="w came without all its parts"):
        assembler.require_complete()
