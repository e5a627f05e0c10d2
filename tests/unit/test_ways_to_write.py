"""Every way in which a weight is written: the next forward pass and the stream follow.

Memory that a weight lends to NumPy or DLPack is followed too; a write through a pointer, a storage
or a state dict's memory is seen by the next stream alone.
"""

import copy
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from qat_core import Recipe, prepare, weight_stream
from qat_core.planning.plan import plan
from qat_core.training.parameter import FakeQuantizedTensor
from qat_core.training.preparation import state_of
from tests.tiny_models import UP, Mlp, assert_follows, fresh, used_mlp, x


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
    """As DeepSpeed, Apex and `vector_to_parameters` do; and then the buffer is written."""
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


def optimize(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Any:
    """Whatever an optimizer makes of it: the new values are looked up afterwards."""

    def write(model: nn.Module, new: Tensor) -> None:
        optimizer = make(list(model.parameters()))

        def loss() -> Tensor:
            optimizer.zero_grad()
            value: Tensor = model(x(model)).float().pow(2).sum()
            value.backward()
            return value

        optimizer.step(loss)
        new.copy_(model.get_parameter(UP).detach())

    return write


class ThroughPointers(torch.optim.Optimizer):
    """As kernels write that get addresses, such as Triton's."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        for parameter in self.param_groups[0]["params"]:
            new = parameter.detach().clone() * 4
            ctypes.memmove(parameter.data_ptr(), new.data_ptr(), new.nbytes)


def load(model: nn.Module, new: Tensor, **options: Any) -> None:
    model.load_state_dict({**model.state_dict(), UP: new}, **options)


def load_and_write_source(model: nn.Module, new: Tensor) -> None:
    source = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(source, assign=True)
    model(x(model))
    source[UP].copy_(new)


Write = Callable[[nn.Module, Tensor], Any]

WAYS: dict[str, Write] = {
    "in place": lambda m, new: m.get_parameter(UP).copy_(new),
    "through .data": lambda m, new: m.get_parameter(UP).data.copy_(new),
    "through detach()": lambda m, new: m.get_parameter(UP).detach().copy_(new),
    "through a view": lambda m, new: m.get_parameter(UP).view(-1).copy_(new.flatten()),
    "rows": lambda m, new: [row.copy_(n) for row, n in zip(m.get_parameter(UP), new, strict=True)],
    "out=": lambda m, new: torch.mul(new, 1, out=m.get_parameter(UP)),
    ".data =": assign,
    ".data = .data - ...": assign_difference,
    ".data = view of a flat buffer": assign_flat_buffer,
    ".data swapped and back": swap_and_back,
    "state dict entry": lambda m, new: m.state_dict()[UP].copy_(new),
    "view of a state dict entry": lambda m, new: m.state_dict()[UP].view(-1).copy_(new.flatten()),
    "load_state_dict": load,
    "load_state_dict(assign=True)": lambda m, new: load(m, new, assign=True),
    "source of load_state_dict(assign=True)": load_and_write_source,
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
    "LBFGS": optimize(lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)),
    "optimizer through pointers": optimize(ThroughPointers),
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
    before = model.get_parameter(UP).detach().clone()
    new = before * 4 + 0.1
    with torch.enable_grad() if "optim" in str(write) else torch.no_grad():
        write(model, new)
    assert_follows(model, new)
    written = model.get_parameter(UP)
    assert isinstance(written, FakeQuantizedTensor) and not torch.equal(written.plain(), before)


@torch.no_grad()
def test_a_call_of_the_model_looks_at_assigned_memory_itself(model: nn.Module) -> None:
    """Before any read outside of a call has, as in `assert_follows`."""
    assign_flat_buffer(model, torch.ones(48, 32).bfloat16() * 100)
    assert torch.equal(model(x(model)), fresh(model)(x(model)))


def test_a_state_dict_of_before_prepare_is_followed() -> None:
    model = Mlp()
    entry = model.state_dict()[UP]
    prepare(model, Recipe())
    model(x(model))
    new = torch.randn(entry.shape).to(entry.dtype)
    entry.copy_(new)
    assert_follows(model, new)


def test_a_collective_on_a_copied_model_is_followed(model: nn.Module) -> None:
    copied = copy.deepcopy(model)
    copied(x(copied))
    new = torch.randn(copied.get_parameter(UP).shape).bfloat16()
    with torch.no_grad():
        dist.scatter(copied.state_dict()[UP], [new])
    assert_follows(copied, new)


def test_sharded_copies_have_scales_of_their_own(model: nn.Module) -> None:
    copied = copy.deepcopy(model)
    expected = model(x(model))
    for each in (model, copied):
        fully_shard(each, reshard_after_forward=True)
        assert torch.equal(each(x(each)), expected)
    with torch.no_grad():
        copied.get_parameter(UP).mul_(64)
    copied(x(copied))
    assert torch.equal(model(x(model)), expected)


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
    state = state_of(model)
    assert state is not None and not state.weights.written
    with torch.no_grad():
        dist.all_reduce(torch.ones(3))
        assert not state.weights.written
        collective(show(model))
    assert state.weights.written == {UP}


def test_a_write_to_memory_that_a_weight_has_left_is_none_to_it(model: nn.Module) -> None:
    """As of an offloaded model, whose stream gathers shards in the memory that they had before."""
    weight = model.get_parameter(UP)
    assert isinstance(weight, FakeQuantizedTensor)
    left = weight.plain()
    model._apply(lambda tensor: tensor.detach().clone())
    stream = weight_stream(model)
    next(stream)
    dist.all_reduce(left)
    assert UP in dict(stream)


def pointed_at(weight: Tensor) -> Any:
    memory = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
    return np.ctypeslib.as_array(memory).reshape(weight.shape)


def of_memory(storage: Any, like: Tensor) -> Tensor:
    return torch.empty(0, dtype=like.dtype).set_(storage).view_as(like)


LENT: dict[str, Write] = {
    "NumPy": lambda m, new: np.copyto(m.get_parameter(UP).detach().numpy(), new.numpy()),
    "NumPy of .data": lambda m, new: np.copyto(np.asarray(m.get_parameter(UP).data), new.numpy()),
    "DLPack": lambda m, new: torch.from_dlpack(m.get_parameter(UP).detach()).copy_(new),
}

UNSEEN: dict[str, Write] = {
    "NumPy of a state dict": lambda m, new: np.copyto(m.state_dict()[UP].numpy(), new.numpy()),
    "DLPack of a state dict": lambda m, new: torch.from_dlpack(m.state_dict()[UP]).copy_(new),
    "storage": lambda m, new: of_memory(m.get_parameter(UP).storage().untyped(), new).copy_(new),
    "pointer": lambda m, new: np.copyto(pointed_at(m.get_parameter(UP)), new.numpy()),
}

NO_MEMORY: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "to_dlpack": (torch.utils.dlpack.to_dlpack, "Cannot access data pointer"),
    "pointer": (lambda w: w.untyped_storage().data_ptr(), "Cannot access data pointer"),
    "tensor of it": (lambda w: of_memory(w.untyped_storage(), w), "invalid for input of size 0"),
    "of rows": (lambda w: of_memory(w[8:].untyped_storage(), w), "invalid for input of size 0"),
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
    assert_follows(fp32_model, new)


@torch.no_grad()
@pytest.mark.parametrize("write", UNSEEN.values(), ids=UNSEEN)
def test_an_unseen_write_lasts_until_the_next_stream(write: Write, fp32_model: nn.Module) -> None:
    new, old = fp32_model.state_dict()[UP] * 4 + 0.1, fp32_model(x(fp32_model))
    write(fp32_model, new)
    assert torch.equal(fp32_model(x(fp32_model)), old)
    weight_stream(fp32_model, plan(fp32_model, Recipe()), Recipe())
    assert_follows(fp32_model, new)


@pytest.mark.parametrize(("read", "message"), NO_MEMORY.values(), ids=NO_MEMORY)
def test_the_wrappers_own_memory_is_an_error(
    read: Callable[[Tensor], Any], message: str, fp32_model: nn.Module
) -> None:
    """Not a null pointer, which C code would read and write."""
    with pytest.raises(RuntimeError, match=message):
        read(fp32_model.get_parameter(UP).detach())
