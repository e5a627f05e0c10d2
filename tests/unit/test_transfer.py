"""Weights as named tensors: what a receiver can tell from them, and what coverage agrees on."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from qat_core import export
from qat_core.nvfp4 import global_scale, quantize
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare
from qat_core.weights.coverage import coverage
from qat_core.weights.hub_names import meta_weights
from qat_core.weights.stream import weight_stream
from qat_core.weights.transfer import (
    Assembler,
    ExpectedWeights,
    TiedCopies,
    read_plan,
    transfer_tensors,
)
from tests.tiny_models import tiny_model


def test_the_plan_comes_first() -> None:
    model = tiny_model("qwen3-moe")
    checked = plan(model, Recipe())
    _, first = next(transfer_tensors(checked, weight_stream(model, checked, Recipe())))
    assert read_plan(first) == checked


@pytest.mark.verl_table(
    "the nccl and nixl transports' layout of the stream",
    "each tensor starts where its dtype can be read: packed weights, BF16, FP32",
)
def test_each_tensor_starts_where_its_dtype_can_be_read() -> None:
    """As verl's nccl and nixl transports lay them out: one after the other, without gaps."""
    packed = quantize(torch.randn(3, 16), global_scale(torch.tensor(3.0), "pow2"))
    odd = torch.randn(3, dtype=torch.bfloat16)
    stream = [("w", packed), ("v", odd), ("u", torch.randn(2)), ("x", packed)]
    sent = list(transfer_tensors(plan(tiny_model("qwen3"), Recipe()), stream))
    buffer = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in sent])
    offset, received = 0, []
    for name, tensor in sent:
        piece = buffer[offset : offset + tensor.nbytes]
        received.append((name, piece.view(tensor.dtype).view(tensor.shape)))
        offset += tensor.nbytes
    came = dict(Assembler().take(received[1:]))
    assert list(came) == ["w", "v", "u", "x"]
    assert torch.equal(came["v"], odd)
    assert torch.equal(
        came["x"].block_scale.view(torch.uint8), packed.block_scale.view(torch.uint8)
    )
    assert torch.equal(came["x"].global_scale, packed.global_scale)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied", "qwen3-moe"])
def test_a_stream_is_what_its_plan_says(family: str) -> None:
    model = tiny_model(family)
    checked = plan(model, Recipe())
    expected = ExpectedWeights(dict(meta_weights(checked)))
    stream = list(weight_stream(model, checked, Recipe()))
    came = [weight for part in (stream[:2], stream[2:]) for weight in expected.checked(part)]
    assert came == stream
    expected.require_none()


def test_missing_weights_are_counted_and_the_first_named() -> None:
    expected = ExpectedWeights({name: torch.zeros(2) for name in "abcde"})
    assert list(expected.checked([("b", torch.ones(2))]))
    with pytest.raises(ValueError, match="4 weights missing: a, c, d: stream every weight"):
        expected.require_none()


@pytest.mark.parametrize(
    ("name", "weight", "message"),
    [
        ("c", torch.zeros(2), "c was not expected"),
        ("a", torch.zeros(2), "a was not expected or came before"),
        ("b", torch.zeros(3), r"b came as torch.float32 \(3,\), not as torch.float32 \(2,\)"),
        ("b", torch.zeros(2).bfloat16(), "b came as torch.bfloat16"),
    ],
    ids=["unknown", "again", "shape", "dtype"],
)
def test_a_weight_that_was_not_expected_is_named(
    name: str, weight: torch.Tensor, message: str
) -> None:
    expected = ExpectedWeights({"a": torch.zeros(2), "b": torch.zeros(2)})
    assert list(expected.checked([("a", torch.ones(2))]))
    with pytest.raises(ValueError, match=message):
        list(expected.checked([(name, weight)]))


def test_a_tensor_that_comes_again_is_named() -> None:
    assembler = Assembler()
    for bucket in ([("w:codes", torch.zeros(2))], [("v", torch.zeros(2))]):
        list(assembler.take(bucket))
        with pytest.raises(ValueError, match=f"{bucket[0][0]} came before"):
            list(assembler.take(bucket))


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


@pytest.mark.parametrize("order", ["abc", "cab"])
def test_second_names_of_tied_weights_are_left_out_if_their_values_are_the_firsts(
    order: str,
) -> None:
    stream = {"a": torch.tensor([1.0, torch.nan]), "b": torch.zeros(2)}
    stream["c"] = stream["a"].clone()
    copies = TiedCopies({"c": "a"})
    assert [n for k in order for n, _ in copies.left_out([(k, stream[k])])] == ["a", "b"]
    stream["c"] = torch.tensor([2.0, torch.nan])
    with pytest.raises(ValueError, match=r"^weight sync: c: .* ties it to a \(tie_word_embedd"):
        list(TiedCopies({"c": "a"}).left_out((name, stream[name]) for name in order))


@pytest.fixture
def model(nano_dir: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(nano_dir, dtype=torch.bfloat16)


@pytest.mark.parametrize("recipe", [Recipe.full(), Recipe.ffn()], ids=["full", "ffn"])
@pytest.mark.parametrize("qat", [True, False], ids=["qat", "no-qat"])
def test_agreement_passes_and_lists_every_weight(
    model: nn.Module, recipe: Recipe, qat: bool
) -> None:
    packed = prepare(model, recipe) if qat else plan(model, recipe)
    rows = coverage(model, packed, packed.quantized, qat=qat)
    assert [row["name"] for row in rows] == [name for name, _ in model.named_parameters()]
    assert {row["name"] for row in rows if row["packed"]} == set(packed.quantized)
    assert {row["trained"] for row in rows} == ({True, False} if qat else {None})


def test_an_unprepared_model_is_no_qat(model: nn.Module) -> None:
    packed = plan(model, Recipe.full())
    with pytest.raises(ValueError, match=r"q_proj\.weight: trained in BF16.* and \d+ more"):
        coverage(model, packed, packed.quantized, qat=True)


def test_an_engine_of_another_recipe_is_refused(model: nn.Module) -> None:
    packed = prepare(model, Recipe.full())
    served = plan(model, Recipe.ffn()).quantized
    with pytest.raises(ValueError, match=r"q_proj.weight: trained in NVFP4, .* served in BF16"):
        coverage(model, packed, served, qat=True)
    with pytest.raises(ValueError, match="quantizes nowhere, unknown to the trainer"):
        coverage(model, packed, [*served, "nowhere"], qat=True)


def test_export_refuses_another_recipe_than_trained(model: nn.Module, tmp_path: Path) -> None:
    prepare(model, Recipe.ffn())
    with pytest.raises(ValueError, match="trained in BF16, sent in NVFP4"):
        export(model, Recipe.full(), tmp_path / "packed")
    assert not list(tmp_path.iterdir())
