"""Every way in which a weight is written: the next forward pass and the stream follow.

Through pointers and storages, and through NumPy or DLPack of state dicts, the stream alone does.
"""

import copy
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

from qat_core import Recipe, prepare, weight_stream
from qat_core.parameter import FakeQuantizedTensor
from qat_core.plan import plan
from qat_core.preparation import scales_of
from tests.mlp import UP, Mlp, assert_follows, fresh, used_mlp, x


@pytest.fixture
def model() -> nn.Module:
    """Prepared and used, so that old scales and rounded values are known."""
    return used_mlp()


def assign(model: nn.Module, new: Tensor) -> None:
    model.get_parameter(UP).data = new.clone()


def assign_difference(model: nn.Module, new: Tensor) -> None:
    weight = model.get_parameter(UP)
    weight.data = weight.data - 0.5 * weight.data.sign()
    new.copy_(weight.detach())


def assign_flat_buffer(model: nn.Module, new: Tensor) -> None:
    """As DeepSpeed and Apex do: the weight becomes a view, and then the buffer is written."""
    buffer = torch.zeros(2 * new.numel(), dtype=new.dtype)
    model.get_parameter(UP).data = buffer[: new.numel()].view_as(new).data
    model(x(model))
    buffer[: new.numel()] = new.flatten()


def swap_and_back(model: nn.Module, new: Tensor) -> None:
    """An average takes the weight's place for an evaluation, and the weight comes back."""
    weight = model.get_parameter(UP)
    weight.data.copy_(new)
    kept, weight.data = weight.data, torch.randn(new.shape).to(new.dtype)
    model(x(model))
    weight.data = kept


def vector(model: nn.Module, new: Tensor) -> None:
    values = parameters_to_vector(model.parameters()).detach().clone()
    start = model.get_parameter("gate_proj.weight").numel()
    values[start : start + new.numel()] = new.flatten()
    vector_to_parameters(values, model.parameters())


def optimize(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Any:
    """Whatever an optimizer makes of it: the new values are looked up afterwards."""

    def write(model: nn.Module, new: Tensor) -> None:
        optimizer = make(list(model.parameters()))

        def loss() -> Tensor:
            optimizer.zero_grad()
            value: Tensor = model(x(model)).float().pow(2).sum()
            value.backward()
            return value

        optimizer.step(loss)  # type: ignore[arg-type]
        new.copy_(model.get_parameter(UP).detach())

    return write


def in_backward(model: nn.Module, new: Tensor) -> None:
    handles = []
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        step: Any = lambda _, optimizer=optimizer: optimizer.step()  # noqa: E731
        handles.append(parameter.register_post_accumulate_grad_hook(step))
    model(x(model)).float().pow(2).sum().backward()
    for handle in handles:
        handle.remove()
    new.copy_(model.get_parameter(UP).detach())


def load(model: nn.Module, new: Tensor, **options: Any) -> None:
    model.load_state_dict({**model.state_dict(), UP: new}, **options)


Write = Callable[[nn.Module, Tensor], Any]


WAYS: dict[str, Write] = {
    "in place": lambda m, new: m.get_parameter(UP).copy_(new),
    "through .data": lambda m, new: m.get_parameter(UP).data.copy_(new),
    "through detach()": lambda m, new: m.get_parameter(UP).detach().copy_(new),
    "through a view": lambda m, new: m.get_parameter(UP).view(-1).copy_(new.flatten()),
    "rows": lambda m, new: [row.copy_(n) for row, n in zip(m.get_parameter(UP), new, strict=True)],
    "out=": lambda m, new: torch.mul(new, 1, out=m.get_parameter(UP)),
    "indexed": lambda m, new: m.get_parameter(UP).__setitem__(slice(None), new),
    ".data =": assign,
    ".data = .data - ...": assign_difference,
    ".data = view of a flat buffer": assign_flat_buffer,
    ".data swapped and back": swap_and_back,
    "vector_to_parameters": vector,
    "set_data of rows": lambda m, new: m.get_parameter(UP).data[:].copy_(new),
    "state dict entry": lambda m, new: m.state_dict()[UP].copy_(new),
    "view of a state dict entry": lambda m, new: m.state_dict()[UP].view(-1).copy_(new.flatten()),
    "load_state_dict": load,
    "load_state_dict(assign=True)": lambda m, new: load(m, new, assign=True),
    "in inference mode": torch.inference_mode()(lambda m, new: m.get_parameter(UP).copy_(new)),
    "in shared memory": lambda m, new: m.get_parameter(UP).share_memory_().detach().copy_(new),
    "foreach": lambda m, new: torch._foreach_copy_([m.get_parameter(UP)], [new]),
    "scatter": lambda m, new: dist.scatter(m.get_parameter(UP).data, [new]),
    "all-gather": lambda m, new: dist.all_gather([m.get_parameter(UP).detach()], new),
    "all-gather into the tensor": lambda m, new: dist.all_gather_into_tensor(
        m.get_parameter(UP).data, new
    ),
    "scatter into a state dict": lambda m, new: dist.scatter(m.state_dict()[UP], [new]),
    "all-gather into a view": lambda m, new: dist.all_gather([m.state_dict()[UP][:]], new),
    "SGD": optimize(lambda parameters: torch.optim.SGD(parameters, lr=0.5)),
    "AdamW": optimize(lambda parameters: torch.optim.AdamW(parameters, lr=0.1)),
    "AdamW, fused": optimize(lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True)),
    "Muon": optimize(lambda parameters: torch.optim.Muon(parameters, lr=0.1)),
    "LBFGS": optimize(lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)),
    "optimizer in backward": in_backward,
}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group, in which this rank's collectives are with itself."""
    file = tmp_path_factory.mktemp("gloo") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("write", WAYS.values(), ids=WAYS)
def test_forward_and_stream_follow(write: Write, model: nn.Module) -> None:
    new = model.get_parameter(UP).detach().clone() * 4 + 0.1
    before = new.clone()
    context = torch.enable_grad() if "optim" in str(write) or write is in_backward else None
    with context or torch.no_grad():
        write(model, new)
    assert_follows(model, new, bare=write is not assign_flat_buffer)
    assert not torch.equal(new, before / 4) and isinstance(
        model.get_parameter(UP), FakeQuantizedTensor
    )


@pytest.mark.parametrize(
    "collective",
    [
        lambda t: dist.broadcast(t, 0),
        dist.all_reduce,
        lambda t: dist.all_reduce(t, async_op=True).wait(),
        lambda t: dist.reduce(t, 0),
        lambda t: dist.all_to_all_single(t, t.clone()),
    ],
    ids=["broadcast", "all-reduce", "async", "reduce", "all-to-all"],
)
@pytest.mark.parametrize(
    "show",
    [
        lambda m: m.get_parameter(UP).data,
        lambda m: m.get_parameter(UP).detach(),
        lambda m: m.state_dict()[UP],
        lambda m: m.state_dict()[UP].view(-1),
    ],
    ids=["data", "detach", "state dict", "view"],
)
def test_collectives_count_as_writes(
    collective: Callable[[Tensor], Any], show: Callable[[nn.Module], Tensor], model: nn.Module
) -> None:
    """With one rank they write the values that were there: the mark is looked at."""
    scales = scales_of(model)
    assert scales is not None and not scales.weights.written
    with torch.no_grad():
        dist.all_reduce(torch.ones(3))
        assert not scales.weights.written
        collective(show(model))
    assert scales.weights.written == {UP}


def bytes_of(array: Any) -> memoryview:
    return memoryview(array).cast("B")


def pointed_at(weight: Tensor) -> Any:
    memory = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
    return np.ctypeslib.as_array(memory).reshape(weight.shape)


def of_memory(storage: Any, like: Tensor) -> Tensor:
    return torch.empty(0, dtype=like.dtype).set_(storage).view_as(like)


LENT: dict[str, Write] = {
    "NumPy": lambda m, new: np.copyto(m.get_parameter(UP).detach().numpy(), new.numpy()),
    "NumPy of .data": lambda m, new: np.copyto(np.asarray(m.get_parameter(UP).data), new.numpy()),
    "memoryview": lambda m, new: bytes_of(m.get_parameter(UP).detach().numpy()).__setitem__(
        slice(None), bytes_of(new.numpy())
    ),
    "DLPack": lambda m, new: torch.from_dlpack(m.get_parameter(UP).detach()).copy_(new),
}
UNSEEN: dict[str, Write] = {
    "NumPy of a state dict": lambda m, new: np.copyto(m.state_dict()[UP].numpy(), new.numpy()),
    "DLPack of a state dict": lambda m, new: torch.from_dlpack(m.state_dict()[UP]).copy_(new),
    "storage of a state dict": lambda m, new: of_memory(
        m.state_dict()[UP].untyped_storage(), new
    ).copy_(new),
    "storage": lambda m, new: of_memory(m.get_parameter(UP).storage().untyped(), new).copy_(new),
    "pointer": lambda m, new: np.copyto(pointed_at(m.get_parameter(UP)), new.numpy()),
}
NO_MEMORY: dict[str, Write] = {
    "to_dlpack": lambda m, _: torch.utils.dlpack.to_dlpack(m.get_parameter(UP).detach()),
    "untyped_storage": lambda m, new: of_memory(m.get_parameter(UP).untyped_storage(), new).copy_(
        new
    ),
}


@pytest.fixture
def fp32_model() -> nn.Module:
    """NumPy knows no BF16."""
    return used_mlp(torch.float32)


@torch.no_grad()
@pytest.mark.parametrize("write", LENT.values(), ids=LENT)
def test_memory_lent_to_another_library_is_followed(write: Write, fp32_model: nn.Module) -> None:
    new = fp32_model.state_dict()[UP] * 4 + 0.1
    write(fp32_model, new)
    assert_follows(fp32_model, new, bare=False)


@torch.no_grad()
@pytest.mark.parametrize("write", UNSEEN.values(), ids=UNSEEN)
def test_an_unseen_write_lasts_until_the_next_stream(write: Write, fp32_model: nn.Module) -> None:
    new, old = fp32_model.state_dict()[UP] * 4 + 0.1, fp32_model(x(fp32_model))
    write(fp32_model, new)
    assert torch.equal(fp32_model(x(fp32_model)), old)
    weight_stream(fp32_model, plan(fp32_model, Recipe()), Recipe())
    assert_follows(fp32_model, new)


@pytest.mark.parametrize("read", NO_MEMORY.values(), ids=NO_MEMORY)
def test_the_wrappers_own_memory_is_an_error(read: Write, fp32_model: nn.Module) -> None:
    """Not a null pointer, which C code would write to."""
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        read(fp32_model, torch.zeros(48, 32))


def test_a_new_dtype_through_data_is_the_weights() -> None:
    """As accelerate upcasts before it shards."""
    model = Mlp()
    prepare(model, Recipe())
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    weight: Any = model.get_parameter(UP)
    assert weight.rounded().dtype == torch.float32
    assert_follows(model, Mlp().get_parameter(UP).detach().float())


def test_averaged_models_follow(model: nn.Module) -> None:
    average = AveragedModel(model, avg_fn=lambda _, current, __: current * 2)
    average.update_parameters(model)
    average.update_parameters(model)
    assert_follows(average.module, model.get_parameter(UP).detach() * 2)
    assert_follows(model, Mlp().get_parameter(UP).detach())


def test_tensors_that_take_the_place_for_a_call_are_followed_and_left(model: nn.Module) -> None:
    expected = model(x(model))
    for grad_mode in (torch.enable_grad, torch.no_grad):
        with grad_mode():
            others = {name: p.detach().mT.mT for name, p in model.named_parameters()}
            others[UP] = model.get_parameter(UP).detach().t().contiguous().t()
            with torch.no_grad():
                others[UP].mul_(8)
            called = torch.func.functional_call(model, others, (x(model),))
        single = Mlp()
        single.load_state_dict({**single.state_dict(), UP: single.state_dict()[UP] * 8})
        prepare(single, Recipe())
        assert torch.equal(called, single(x(model)))
        assert torch.equal(model(x(model)), expected)


def test_an_optimizer_in_backward_refreshes_once_a_step(model: nn.Module) -> None:
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        step: Any = lambda _, optimizer=optimizer: optimizer.step()  # noqa: E731
        parameter.register_post_accumulate_grad_hook(step)
    plain = fresh(model)
    model.zero_grad()
    together = torch.optim.SGD(plain.parameters(), lr=0.5)
    scales = scales_of(model)
    assert scales is not None
    before = scales.num_refreshes
    for _ in range(3):
        model(x(model)).float().pow(2).sum().backward()
        plain(x(model)).float().pow(2).sum().backward()
        together.step()
        for each in (model, plain):
            each.zero_grad()
    assert scales.num_refreshes - before == 2  # the first forward pass found nothing new
    assert_follows(model, plain.get_parameter(UP).detach())


def test_hooks_and_attributes_stay_on_the_parameter(tmp_path: Path) -> None:
    model, calls = Mlp(), []
    weight: Any = model.get_parameter(UP)
    weight.no_decay = True
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
    handle = weight.register_hook(lambda grad: calls.append("hook"))
    prepare(model, Recipe())
    model(x(model)).sum().backward()
    assert calls == ["hook", "after"] and model.get_parameter(UP).no_decay
    handle.remove()
    model(x(model)).sum().backward()
    assert calls == ["hook", "after", "after"]
    assert copy.deepcopy(model)(x(model)).equal(model(x(model)))
