"""Rounded weights that are kept have the same bits, and go in time: by `prepare(keep=...)` until a
weight changes, by a recompute until their backward product.
"""

import gc
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError

from qat_core import Recipe, prepare
from qat_core.options import Keep
from qat_core.planning.plan import plan
from qat_core.training.state.finiteness import Later
from qat_core.training.state.rounded_weights import Kept, RoundedWeights
from tests.prepared_pairs import assert_same_run, count_roundings, kept, known, pair, round_weights
from tests.tiny_models import tiny_model, tokens

# A CPU keeps rounded weights until they change, unless they are kept packed: then it unpacks them.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
EVERY_CASE = [("qwen3", None), *(("qwen3-moe", experts) for experts in EXPERTS_IMPLEMENTATIONS)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "experts"), EVERY_CASE)
@pytest.mark.parametrize(
    ("keep", "rounding"), [("packed", "quantize"), ("rounded", "measure_and_round")]
)
def test_weights_that_are_kept_give_the_same_bits_and_are_rounded_once_a_change(
    keep: Keep,
    rounding: str,
    family: str,
    experts: str | None,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, oracle = pair(family, experts, keep=keep)
    model, oracle = model.to(device), oracle.to(device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    num_weights = len(known(model).values)
    rounded = count_roundings(monkeypatch, ("quantize", "fake_quantize", "measure_and_round"))
    for _ in range(2):  # micro-batches
        assert_same_run(model, oracle)
    assert rounded == num_weights * [rounding]
    rounded.clear()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.3)
    copied = tiny_model(family).to(device)
    if experts:
        copied.set_experts_implementation(experts)
    copied.load_state_dict(model.state_dict())
    round_weights(copied, plan(copied, Recipe()), Recipe())
    for _ in range(2):
        assert_same_run(model, copied)
    assert rounded == num_weights * [rounding]


@pytest.mark.parametrize(
    ("keep", "first_of"),
    [
        ("packed", lambda rounded: next(iter(rounded._packed.values())).codes),
        ("rounded", lambda rounded: next(iter(rounded._whole.values())).rounded),
    ],
    ids=["packed", "rounded"],
)
def test_what_is_kept_goes_when_its_weight_moves(
    keep: Keep, first_of: Callable[[RoundedWeights], Tensor]
) -> None:
    model, oracle = pair("qwen3", keep=keep)
    assert_same_run(model, oracle)
    state = known(model)
    kept = weakref.ref(first_of(state.kept))
    model.to("meta")
    assert kept() is None


def test_an_unknown_way_to_keep_weights_is_refused() -> None:
    with pytest.raises(ValueError, match='keep: needs "packed", "rounded" or None, got True'):
        pair("qwen3", keep=True)


@pytest.mark.parametrize("keep", ["packed", "rounded"])
def test_compiled_layers_refuse_to_keep_weights(keep: Keep) -> None:
    model, _ = pair("qwen3", keep=keep)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    with pytest.raises(TorchRuntimeError, match=r"keep: layers compiled by torch\.compile"):
        model(torch.zeros(1, 4, dtype=torch.long))


PARAMETERS_OF_A_LAYER = {"qwen3": 7, "qwen3-moe": 6}
CASES = [("qwen3", None), *(("qwen3-moe", experts) for experts in ("grouped_mm", "eager"))]


def prepared(family: str, device: str, experts: str | None = None) -> Any:
    model = tiny_model(family, num_hidden_layers=3)
    if experts:
        model.set_experts_implementation(experts)
    prepare(model, Recipe(), keep="packed" if device == "cpu" else None)
    return model.to(device)


def step(model: Any, roundings: list[str]) -> tuple[list[Tensor], int, int]:
    """Logits and gradients; how many weights the forward and the backward pass rounded."""
    model.zero_grad()
    roundings.clear()
    ids = tokens().to(model.device)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    in_forward = len(roundings)
    out.loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    return [out.logits.detach(), *gradients], in_forward, len(roundings) - in_forward


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "experts"), CASES)
def test_a_backward_pass_rounds_each_weight_once(
    family: str, experts: str | None, device: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, roundings = prepared(family, device, experts), count_roundings(monkeypatch)
    expected, in_forward, in_backward = step(model, roundings)
    assert in_forward == in_backward > 0
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for _ in range(2):  # micro-batches
        results, *counts = step(model, roundings)
        assert all(map(torch.equal, results, expected))
        assert counts == [in_forward, in_forward] and not kept(model)
    assert set(roundings) == {"dequantize" if device == "cpu" else "fake_quantize"}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_no_more_is_kept_than_one_segment(
    family: str, device: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prepared(family, device)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found: list[set[str]] = []
    read = Kept.read
    monkeypatch.setattr(Kept, "read", lambda *args: (read(*args), found.append(kept(model)))[0])
    step(model, [])
    layers = [{name.split(".")[2] for name in names} for names in found]
    assert max(map(len, layers)) == 1
    assert max(map(len, found)) >= PARAMETERS_OF_A_LAYER[family] - 1
    assert not kept(model)


def test_experts_gathered_for_a_product_are_not_kept() -> None:
    """Their backward product reads what was gathered: the weight would stay for nothing."""
    model = prepared("qwen3-moe", "cpu", "batched_mm")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found: set[str] = set()
    for layer in model.model.layers:
        layer.mlp.register_full_backward_hook(lambda *_: found.update(kept(model)))
    step(model, [])
    assert found and not any("experts" in name for name in found)


@pytest.mark.parametrize("reentrant", [True, False])
def test_compiled_layers_keep_nothing(reentrant: bool) -> None:
    """Of a reentrant checkpoint they are traced in the backward pass, and traces stay."""
    model, expected = tiny_model("qwen3"), tiny_model("qwen3")
    for each in (model, expected):
        prepare(each, Recipe())
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for layer in model.model.layers:
        layer.mlp.compile(backend="aot_eager")
    for _ in range(2):
        results = [step(each, [])[0] for each in (model, expected)]
        assert all(map(torch.equal, *results))
    assert not known(model).kept._recomputed


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_backward_pass_leaves_no_memory_taken(reentrant: bool) -> None:
    model = prepared("qwen3", "cuda")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    taken = []
    for _ in range(3):
        step(model, [])
        model.zero_grad(set_to_none=True)
        gc.collect()
        taken.append(torch.cuda.memory_allocated())
    assert taken[1] == taken[2]  # the first step makes workspaces of libraries


@pytest.mark.gpu
def test_what_another_stream_rounded_is_rounded_again() -> None:
    each, device = Kept(), torch.device("cuda")
    rounded = partial(torch.ones, 1, device=device)
    first = each.read(device, rounded)
    with torch.cuda.stream(torch.cuda.Stream()):
        second = each.read(device, rounded)
        assert each.read(device, rounded) is second is not first


@pytest.mark.gpu
@pytest.mark.parametrize("keep", ["packed", "rounded"])
def test_a_captured_graph_reads_the_weights_of_its_replay(keep: Keep) -> None:
    model = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16, device="cuda")
    prepare(model, Recipe(), keep=keep)
    x = torch.randn(4, 64, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        before = model(x)
        with torch.cuda.graph(graph):
            captured = model(x)
        model.weight.neg_()  # which leaves its scale as it is
        expected = model(x)
        graph.replay()
    assert torch.equal(captured, expected) and not torch.equal(captured, before)


CYCLES = 2_000_000_000  # about a second of a GPU


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("expected", [True, False])
def test_it_is_the_value_that_the_tensor_had(expected: bool, device: str) -> None:
    value = torch.tensor(expected, device=device)
    later = Later(value)
    assert bool(later) is bool(later) is expected
    assert bool(pickle.loads(pickle.dumps(later))) is expected


@pytest.mark.gpu
def test_work_that_came_after_it_is_not_waited_for() -> None:
    value = torch.tensor(False, device="cuda")
    later = Later(value)
    value.fill_(True)
    torch.cuda._sleep(CYCLES)
    ended = torch.cuda.current_stream().record_event()
    assert not later and not ended.query()
