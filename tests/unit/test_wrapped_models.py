"""Prepared models inside wrappers, and wrapped models that cannot be prepared."""

import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qat_core import Recipe, export, is_prepared, prepare, weight_stream
from qat_core.checkpoint.read import read_checkpoint
from qat_core.nvfp4 import PackedTensor, dequantize
from qat_core.planning.plan import plan
from tests.tiny_models import tiny_model, tokens

NAME = "model.layers.0.mlp.up_proj.weight"


def with_adapters(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=16, target_modules=["up_proj", "q_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    return peft.get_peft_model(model, config)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=tokens(), use_cache=False).logits
    return out


def test_adapters_before_prepare_are_refused() -> None:
    model = with_adapters(tiny_model("qwen3"))
    with pytest.raises(ValueError, match=r"q_proj: holds an adapter of PEFT: call prepare\(\)"):
        prepare(model, Recipe())
    assert not is_prepared(model)


@pytest.mark.parametrize("safe", [True, False], ids=["safe", "in-place"])
def test_adapters_after_prepare_are_streamed_once_merged(safe: bool) -> None:
    base = tiny_model("qwen3")
    checked = prepare(base, Recipe())
    model = with_adapters(base)
    assert is_prepared(model)
    before = base.get_parameter(NAME.replace(".weight", ".base_layer.weight")).detach().clone()
    with pytest.raises(ValueError, match="holds an adapter of PEFT"):
        weight_stream(base, checked, Recipe())
    merged = model.merge_and_unload(safe_merge=safe)
    weight = merged.get_parameter(NAME)
    assert not torch.equal(weight.detach(), before)
    fresh = tiny_model("qwen3")
    fresh.load_state_dict(merged.state_dict())
    prepare(fresh, Recipe())
    assert torch.equal(logits(merged), logits(fresh))
    packed = dict(weight_stream(merged, checked, Recipe()))[NAME]
    assert isinstance(packed, PackedTensor) and torch.equal(dequantize(packed), weight.rounded())


def test_a_compiled_model_is_planned_prepared_and_trained_as_itself(tmp_path: Path) -> None:
    model, plain = tiny_model("qwen3"), tiny_model("qwen3")
    compiled: Any = torch.compile(model, backend="eager")
    assert plan(compiled, Recipe()) == plan(plain, Recipe())
    checked = prepare(compiled, Recipe())
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.5)
    compiled(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
    optimizer.step()
    packed = dict(weight_stream(compiled, checked, Recipe()))
    export(compiled, Recipe(), tmp_path / "packed")
    assert logits(compiled).shape == (2, 16, 128)  # takes up what the optimizer wrote
    exported = dict(read_checkpoint(tmp_path / "packed"))
    before = plain.get_parameter(NAME)
    trained: Any = model.get_parameter(NAME)
    assert not torch.equal(trained.detach(), before)
    for weight in (packed[NAME], exported[NAME]):
        assert isinstance(weight, PackedTensor) and torch.equal(
            dequantize(weight), trained.rounded()
        )


class WithValues(nn.Module):
    """As a critic wraps a language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pretrained_model, self.values = model, nn.Linear(64, 16)


@pytest.mark.parametrize(
    "shared",
    [
        lambda model: (WithValues(model), model),
        lambda model: (torch.compile(model, backend="eager"), model),
        lambda model: (model, torch.compile(model, backend="eager")),
        lambda model: (model, model.model),
        lambda model: (model.model, model),
    ],
    ids=["inside a wrapper", "inside a compiled one", "compiled later", "a part", "around a part"],
)
def test_a_part_or_a_wrapper_is_packed_as_it_was_prepared(
    shared: Callable[[Any], tuple[nn.Module, nn.Module]], tmp_path: Path
) -> None:
    prepared, streamed = shared(tiny_model("qwen3"))
    prepare(prepared, Recipe())
    assert is_prepared(streamed)
    with pytest.raises(ValueError, match="prepared with pow2"):
        export(streamed, Recipe(scale_policy="amax"), tmp_path / "packed")
    with pytest.raises(ValueError, match=r"k_proj\.weight: would not be packed, but"):
        weight_stream(streamed, plan(streamed, Recipe.ffn()), Recipe.ffn())
    packed = dict(weight_stream(streamed, plan(streamed, Recipe()), Recipe()))
    assert sum(isinstance(weight, PackedTensor) for weight in packed.values()) == 14


def test_heads_inside_and_around_a_wrapped_model_stay_in_bf16() -> None:
    model = WithValues(tiny_model("qwen3"))
    names = [name.removeprefix("pretrained_model.") for name in plan(model, Recipe()).quantized]
    assert names == list(plan(tiny_model("qwen3"), Recipe()).quantized)


def test_parts_prepared_apart_are_not_packed_together() -> None:
    model = tiny_model("qwen3")
    prepare(model.model.layers[0], Recipe())
    with pytest.raises(
        ValueError, match=r"layers\.1\.\S+: would be packed, but prepare\(\) did not"
    ):
        weight_stream(model, plan(model, Recipe()), Recipe())
    with pytest.raises(ValueError, match=r"layers\.0\.\S+: already prepared"):
        prepare(model, Recipe())


def in_use(model: nn.Module) -> object:
    return model(input_ids=tokens(), labels=tokens()).loss


def in_inference_mode(_: nn.Module) -> nn.Module:
    with torch.inference_mode():
        return tiny_model("qwen3")


UNFIT: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "graph": (in_use, r"q_proj\.weight: a graph of autograd holds it: call prepare\(\) before"),
    "inference": (in_inference_mode, r"q_proj\.weight: was made in inference mode"),
    "weakref": (
        lambda model: weakref.ref(model.get_parameter(NAME)),
        "a weight cannot be prepared: .* weakref",
    ),
}


@pytest.mark.parametrize(("use", "message"), UNFIT.values(), ids=UNFIT)
def test_weights_in_use_are_refused(use: Callable[[nn.Module], object], message: str) -> None:
    model = tiny_model("qwen3")
    held = use(model)
    unfit = held if isinstance(held, nn.Module) else model
    with pytest.raises(ValueError, match=message):
        prepare(unfit, Recipe())
    assert not is_prepared(unfit)
    assert {type(parameter) for parameter in unfit.parameters()} == {nn.Parameter}


def test_a_model_can_be_prepared_in_inference_mode_and_trained_later() -> None:
    model, expected = tiny_model("qwen3"), tiny_model("qwen3")
    with torch.inference_mode():
        prepare(model, Recipe())
    prepare(expected, Recipe())
    for each in (model, expected):
        in_use(each).backward()  # type: ignore[attr-defined]
    gradients = zip(model.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in gradients)


def test_an_unpickled_model_is_refused_until_it_is_prepared_again() -> None:
    model, buffer = tiny_model("qwen3"), io.BytesIO()
    prepare(model, Recipe())
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    with pytest.raises(ValueError, match=r"replaced after prepare.* on an unpickled model"):
        logits(loaded)
    prepare(loaded, Recipe())
    assert torch.equal(logits(loaded), logits(model))
    loaded.load_state_dict(tiny_model("qwen3", seed=1).state_dict(), assign=True)
    fresh = tiny_model("qwen3", seed=1)
    prepare(fresh, Recipe())
    assert torch.equal(logits(loaded), logits(fresh))


@pytest.mark.parametrize("options", [{"use_dora": True}, {"modules_to_save": ["up_proj"]}], ids=str)
def test_other_adapters_train_and_start_as_the_model_they_are_put_on(options: Any) -> None:
    peft = pytest.importorskip("peft")
    base = tiny_model("qwen3")
    prepare(base, Recipe())
    expected = logits(base)
    config = peft.LoraConfig(r=16, target_modules=["q_proj"], **options)
    model = peft.get_peft_model(base, config)
    model(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained and all(parameter.grad is not None for parameter in trained)
    # DoRA's magnitude and norm round apart: the largest difference seen was 0.004
    tolerance = 0.02 if "use_dora" in options else 0.0
    assert torch.allclose(logits(model), expected, rtol=0, atol=tolerance)
