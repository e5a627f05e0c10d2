"""Put a recipe onto a model: from then on its quantized weights train fake-quantized."""

from collections.abc import Mapping
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qat_core.options import Keep
from qat_core.planning.plan import QuantPlan, plan, uncompiled
from qat_core.planning.recipe import Recipe
from qat_core.training.parameter import FakeQuantizedTensor
from qat_core.training.state.uncounted_writes import watch
from qat_core.training.state.weight_state import WeightState
from qat_core.training.state_dicts import adopt_assigned, fake_quantized, plain_entries


@torch.inference_mode(False)  # else what is made here could never be trained
def prepare(
    model: nn.Module, recipe: Recipe, *, allow_meta: bool = False, keep: Keep | None = None
) -> QuantPlan:
    """Make the weights that `recipe` quantizes read as NVFP4 in every matrix product, in place.

    The Parameter objects, their names, module classes and state dicts stay as they were, so that
    optimizers and checkpoints, made before or after, need to know nothing. Call it before
    `fully_shard`.

    Args:
        model: BF16 or FP32 weights on one device.
        recipe: what to quantize and how.
        allow_meta: take weights on the meta device, to be loaded (without `assign`) before the
            first forward pass.
        keep: on one device, round each weight once an optimizer step and keep it until the next,
            for more memory and the same bits. "rounded": in the weight's dtype, 2 bytes a weight in
            BF16; no further use rounds, as is the rule on a CPU. "packed": in 0.56 bytes a weight,
            unpacked where it is used, which pays where several micro-batches use it (times and
            memory: docs/performance.md). No effect under FSDP2, where shards are kept packed
            anyway; refused by layers that torch.compile compiles.

    Raises:
        ValueError: `keep` is none of these; see `plan`; or the model has adapters of PEFT; or a
            weight is on the meta device or another one than the rest, prepared, sharded, of another
            dtype, made in inference mode, in use by a graph of autograd, or holds NaN or infinity.
            The model is then unchanged.
    """
    if keep not in (None, *get_args(Keep)):
        raise ValueError(f'keep: needs "packed", "rounded" or None, got {keep!r}')
    model = uncompiled(model)
    refuse_adapters(model)
    checked = plan(model, recipe)
    weights = {name: model.get_parameter(name) for name in checked.quantized}
    _refuse_unfit(weights, allow_meta)
    _forget_previous(model)
    state = WeightState(model, checked, recipe, keep=keep)
    _put_in_place(weights, state)
    watch(state.weights)
    _register_hooks(model, state)
    return checked


def is_prepared(model: nn.Module) -> bool:
    """Whether `prepare` was called on the model, or on one around it, sharded since or not."""
    return state_of(model) is not None


def state_of(model: nn.Module) -> WeightState | None:
    """Of a prepared model, a part of it, or one inside a wrapper such as DDP's."""
    for parameter in model.parameters():
        held = getattr(parameter, "_local_tensor", parameter)
        if isinstance(held, FakeQuantizedTensor):
            return held.state
    return _hooked_state(model)  # while FSDP2 shows gathered weights


def _hooked_state(model: nn.Module) -> WeightState | None:
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, WeightState):
                return owner
    return None


def require_as_prepared(model: nn.Module, plan: QuantPlan, recipe: Recipe) -> None:
    """ValueError if a prepared model would be packed otherwise than it trains."""
    state = state_of(model)
    if state is None:
        return
    options = {"scale_policy": state.policy, "block_scale_method": state.method}
    for option, value in options.items():
        asked = getattr(recipe, option)
        if asked != value:
            raise ValueError(
                f"{option}: {asked}, but the model was prepared with {value}: it would be packed "
                "to other weights than it trains with; use the recipe that prepare() got"
            )
    trained = {
        f"{prefix}.{leaf}" if prefix else leaf
        for prefix, module in model.named_modules()
        for leaf in module._parameters
        if state.weights.name_of(module, leaf)
    }
    differing = sorted(trained ^ set(plan.quantized))
    if differing:
        now, then = ("", "not ") if differing[0] in plan.quantized else ("not ", "")
        raise ValueError(
            f"{differing[0]}: would {now}be packed, but prepare() did {then}quantize it; use the "
            "plan that prepare() returned"
        )


def refuse_adapters(model: nn.Module) -> None:
    """ValueError that names a layer with an adapter of PEFT, the weights of which are not a plan's.

    An adapter would be quantized as if it were a layer, and its base layers have lost the names by
    which engines fuse them.
    """
    for name, module in model.named_modules():
        is_peft = any(base.__module__.startswith("peft.") for base in type(module).__mro__)
        if is_peft and hasattr(module, "base_layer"):
            raise ValueError(
                f"{name}: holds an adapter of PEFT: call prepare() before get_peft_model(), and "
                "merge_and_unload() before weights are streamed or exported"
            )


def _refuse_unfit(weights: Mapping[str, Tensor], allow_meta: bool) -> None:
    for name, weight in weights.items():
        _refuse_unfit_weight(name, weight, allow_meta)
    first, first_weight = next(iter(weights.items()))
    for name, weight in weights.items():
        if weight.device != first_weight.device:
            raise ValueError(
                f"{name}: is on {weight.device}, {first} on {first_weight.device}; quantized "
                "weights need to be on one device: move the model before prepare()"
            )


def _refuse_unfit_weight(name: str, weight: Tensor, allow_meta: bool) -> None:
    if isinstance(weight, FakeQuantizedTensor):
        raise ValueError(f"{name}: already prepared; prepare() is called once on a model")
    if isinstance(weight, DTensor):
        raise ValueError(f"{name}: already sharded; call prepare() before fully_shard()")
    if weight.is_meta and not allow_meta:
        raise ValueError(
            f"{name}: is on the meta device; load the weights first, or pass allow_meta=True and "
            "load them before the first forward pass"
        )
    if weight.is_inference():
        raise ValueError(f"{name}: was made in inference mode, so it cannot train; load it outside")
    if not weight.is_meta and _num_references(weight) > 1:
        raise ValueError(
            f"{name}: a graph of autograd holds it: call prepare() before the first forward pass "
            "and before DistributedDataParallel, or drop the outputs of earlier passes first"
        )
    if weight.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{name}: needs bfloat16 or float32, got {weight.dtype}")


def _forget_previous(model: nn.Module) -> None:
    """Remove the hooks of a prepared model that was pickled: its weights came back plain."""
    previous = _hooked_state(model)
    if previous is None:
        return
    for module in model.modules():
        for hooks in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._state_dict_hooks,
            module._load_state_dict_post_hooks,
        ):
            for key, hook in list(hooks.items()):
                is_own = hook in (plain_entries, previous.before_forward, previous.after_forward)
                if is_own or (isinstance(hook, partial) and hook.func is adopt_assigned):
                    del hooks[key]


def _put_in_place(weights: Mapping[str, nn.Parameter], state: WeightState) -> None:
    """Turn weights into fake-quantized ones, unless one of them is not finite."""
    swapped = [(weight, fake_quantized(name, weight, state)) for name, weight in weights.items()]
    _swap(swapped)
    if not any(weight.is_meta for weight in weights.values()):
        try:
            state.refresh()
            state.require_finite()
        except ValueError:
            _swap(swapped)
            raise
        state.release_weights()
    for weight, replaced in swapped:
        weight.__dict__.update(replaced.__dict__)  # attributes such as no_decay


def _register_hooks(model: nn.Module, state: WeightState) -> None:
    model.register_forward_pre_hook(state.before_forward)
    model.register_forward_hook(state.after_forward, always_call=True)
    for owner in state.weights.modules:
        owner.register_state_dict_post_hook(plain_entries)  # type: ignore[no-untyped-call]
        adopt = partial(adopt_assigned, state)
        owner.register_load_state_dict_post_hook(adopt)  # type: ignore[no-untyped-call]


def _num_references(weight: Any) -> int:
    """From C++: 1 of Python, more where graphs hold it."""
    count: int = weight._use_count()
    return count


def _swap(pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Exchange contents, not objects: optimizers and tied modules keep the objects.

    Hooks stay with the first objects. An error leaves all as it was.
    """
    swapped: list[tuple[nn.Parameter, nn.Parameter]] = []
    for first, second in pairs:
        hooks, after = first._backward_hooks, first._post_accumulate_grad_hooks
        first._backward_hooks = None
        first._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        try:
            torch.utils.swap_tensors(first, second)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            first._backward_hooks, first._post_accumulate_grad_hooks = hooks, after
            _swap(swapped)
            raise ValueError(f"a weight cannot be prepared: {error}") from error
        first._backward_hooks, first._post_accumulate_grad_hooks = hooks, after
        swapped.append((first, second))
