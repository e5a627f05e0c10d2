"""What operators make of a fake-quantized weight: rounded values, full precision, or an error."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor, nn

from qat_core.planning.recipe import Recipe
from qat_core.training.parameter import FakeQuantizedTensor
from qat_core.training.preparation import prepare
from tests.tiny_models import tiny_model, tokens


@torch.library.custom_op("qat_tests::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.mT


@torch.library.custom_op("qat_tests::sgd_", mutates_args=("weight",))
def sgd_(weight: Tensor, grad: Tensor) -> None:
    weight.sub_(grad)


# Times one, the product of a matrix is the matrix, in every bit.
ONE, ONES = torch.eye(64).bfloat16(), torch.eye(32).bfloat16().expand(6, 32, 32)
FIRST_EXPERT = torch.zeros(1, 64, 32, dtype=torch.long)
Weights = tuple[FakeQuantizedTensor, FakeQuantizedTensor]
Use = Callable[[Tensor, Tensor], Tensor]
# Of a linear weight (32, 64) and of experts (6, 64, 32).
ROUNDED: dict[str, Use] = {
    "linear": lambda w, _: F.linear(ONE, w),
    "matmul": lambda w, _: w @ ONE,
    "custom kernel": lambda w, _: product(ONE, w),
    "transpose": lambda w, _: ONE @ w.t(),
    "copied transpose": lambda w, _: ONE @ w.t().contiguous(),
    "rows": lambda w, _: torch.cat([rows @ ONE for rows in w.split([8, 24])]),
    "experts": lambda _, e: e.bmm(ONES),
    "copied experts": lambda _, e: ONES.bmm(e.transpose(1, 2).contiguous()),
    "each expert": lambda _, e: torch.stack([expert @ ONES[0] for expert in e]),
    "copied expert": lambda _, e: e[-1].clone() @ ONES[0],
    "gate and up": lambda _, e: torch.cat([half.bmm(ONES) for half in e.split([16, 48], 1)], 1),
    "copied gate": lambda _, e: e.chunk(2, 1)[0].contiguous().bmm(ONES),
    "chosen experts": lambda _, e: e[[1, 0]].bmm(ONES[:2]),
    "inner product": lambda w, _: torch.inner(ONE, w),
    "vmap": lambda w, _: torch.func.vmap(lambda row: F.linear(row, w))(ONE),
    "jvp": lambda w, _: torch.func.jvp(lambda x: F.linear(x, w), (ONE,), (ONE,))[1],
    "sparse product": lambda w, _: torch.sparse.mm(ONE.float().to_sparse(), w.float().t()),
    "distances": lambda w, _: torch.cdist(ONE.float(), w.float()),
    "gathered experts": lambda _, e: torch.gather(e, 0, FIRST_EXPERT).bmm(ONES[:1]),
}
# Made part of another matrix: rounded before in a forward pass, elsewhere no factor of a product.
MIXED: dict[str, Use] = {
    "concatenated": lambda w, _: ONE @ torch.cat([w, w]).t(),
    "plus an adapter": lambda w, _: ONE @ (w + torch.zeros_like(w)).t(),
    "scaled": lambda w, _: ONE @ (w * 0.5).t(),
    "normalized": lambda w, _: ONE @ F.normalize(w).t(),
    "masked": lambda w, _: ONE @ torch.where(w > 0, w, 0).t(),
    "rows, cloned": lambda w, _: ONE @ w[:8].clone().t(),
    "cloned": lambda w, _: ONE @ w.clone().t(),
    "transposed, then scaled": lambda w, _: ONE @ (w.t() * 2),
    "of another dtype": lambda w, _: ONE.float() @ (w.float() * 2).t(),
    "stacked": lambda w, _: ONE @ torch.stack([w])[0].t(),
    "scaled together": lambda w, _: ONE @ torch._foreach_mul([w], 0.5)[0].t(),
}
# The same, without a product, or through memory of others.
MIXED_ALONE: dict[str, Use] = {
    "transformed": lambda w, _: torch.fft.rfft(w.float()).abs(),
    "copied into a buffer": lambda w, _: ONE @ torch.empty(32, 64).bfloat16().copy_(w).t(),
    "squares": lambda w, _: (w * w).float(),
}
# What serves penalties, logs, optimizers and files.
FULL_PRECISION: dict[str, Use] = {
    "norm": lambda w, _: w.float().norm(),
    "flattened": lambda w, _: torch.cat([w.flatten(), w.view(-1)]),
    "distance to a reference": lambda w, _: (w.flatten() - 1).square(),
    "detached": lambda w, _: w.detach() * 1,
    "data": lambda w, _: w.data + 1,
    "vector of parameters": lambda w, e: torch.nn.utils.parameters_to_vector([w, e]),
    "DLPack": lambda w, _: torch.from_dlpack(w.detach()),
    "safetensors": lambda w, _: load(save({"w": w.detach()}))["w"],
    "numpy": lambda w, _: torch.from_numpy(w.detach().float().numpy()),
}
REFUSED: dict[str, Use] = {
    "unsqueeze": lambda w, _: w.unsqueeze(0),
    "other dtype": lambda w, _: w.view(torch.int16),
    "einsum": lambda w, _: torch.einsum("bi,oi->bo", ONE, w),
    "permuted experts": lambda _, e: e.movedim(0, 1),
    "some experts": lambda _, e: e[1:3].bmm(ONES[:2]),
    "all experts as one": lambda _, e: e @ ONES[0],
    "one row": lambda w, _: ONE @ w[0],
    "columns": lambda w, _: ONE[:, :16] @ w[:, 8:24].t(),
    "columns, transposed": lambda w, _: ONE[:, :16] @ w.t()[8:24],
    "convolution": lambda w, _: F.conv2d(ONE[..., None, None], w.view(32, 64, 1, 1)),
}
REFUSED_IN_FORWARD: dict[str, Use] = {
    "rows as vectors": lambda w, _: torch.stack([w[0], w[1]]),
    "flattened": lambda w, _: w.flatten() * 2,
}


@pytest.fixture
def model() -> nn.Module:
    prepared = tiny_model("qwen3-moe")
    prepare(prepared, Recipe())
    return prepared


@pytest.fixture
def weights(model: nn.Module) -> Weights:
    """A linear weight and experts of a prepared model."""
    layer: Any = model.model.layers[0]
    return layer.self_attn.k_proj.weight, layer.mlp.experts.down_proj


@pytest.mark.parametrize("use", ROUNDED.values(), ids=ROUNDED)
def test_products_read_rounded_values(use: Use, weights: Weights) -> None:
    expected = use(*(weight.rounded() for weight in weights))
    assert torch.equal(use(*weights), expected)
    assert not torch.equal(use(*(weight.plain() for weight in weights)), expected)


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED)
def test_refuses_what_it_cannot_round(use: Use, weights: Weights) -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.(self_attn\.k_proj|mlp\.experts\.down_proj)"):
        use(*weights)


def in_forward(model: nn.Module, use: Callable[[], Tensor]) -> Tensor:
    """What `use` gives while a forward pass of the model runs."""
    results: list[Tensor] = []
    handle = model.get_submodule("model.layers.0").register_forward_pre_hook(
        lambda *_: results.append(use())
    )
    model(input_ids=tokens(), use_cache=False)
    handle.remove()
    return results[0]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad], ids=["train", "evaluate"])
@pytest.mark.parametrize("name", [*MIXED, *MIXED_ALONE])
def test_a_part_of_another_matrix_is_rounded_in_a_forward_pass(
    name: str, mode: Callable[[], Any], model: nn.Module, weights: Weights
) -> None:
    use = (MIXED | MIXED_ALONE)[name]
    with mode():
        values = [(weight.rounded(), weight.plain()) for weight in weights]
        rounded, plain = (use(*read) for read in zip(*values, strict=True))
        assert torch.equal(in_forward(model, lambda: use(*weights)), rounded)
        assert not torch.equal(plain, rounded)
        if name in MIXED:
            with pytest.raises(ValueError, match=r"outside a forward pass of the model: do it in"):
                use(*weights)
            weights = weights[0].detach(), weights[1].detach()
        assert torch.equal(use(*weights), plain)


@pytest.mark.parametrize("use", REFUSED_IN_FORWARD.values(), ids=REFUSED_IN_FORWARD)
def test_a_forward_pass_refuses_views_without_blocks(
    use: Use, model: nn.Module, weights: Weights
) -> None:
    assert torch.equal(use(*weights), use(*(weight.plain() for weight in weights)))
    message = r"k_proj\.weight: computed with through a view of shape \(.*\), which is not a whole "
    with pytest.raises(ValueError, match=message):
        in_forward(model, lambda: use(*weights))


def test_a_forward_pass_reads_what_a_weight_is_of_the_weight(
    model: nn.Module, weights: Weights
) -> None:
    def same(weight: Tensor) -> Tensor:
        return torch.tensor([torch.equal(weight, weight.plain()), weight.is_pinned()])  # type: ignore[attr-defined]

    assert in_forward(model, lambda: same(weights[0])).tolist() == [True, False]


class Scaled(nn.Module):
    """A product that a weight's own mean square scales."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.only = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.only(x).detach() * self.only.weight.square().mean()


def test_gradients_of_other_uses_than_products_are_taken_at_full_precision() -> None:
    model, oracle = Scaled(), Scaled()
    prepare(model, Recipe())
    x, weight = torch.randn(4, 32), model.only.weight
    out = model(x)
    out.sum().backward()
    with torch.no_grad():
        oracle.only.weight.copy_(weight.rounded())  # type: ignore[attr-defined]
    assert torch.equal(out, oracle(x))
    factor = F.linear(x, oracle.only.weight).sum() * 2 / weight.numel()
    torch.testing.assert_close(weight.grad, factor * weight.plain())  # type: ignore[attr-defined]


@pytest.mark.parametrize("use", FULL_PRECISION.values(), ids=FULL_PRECISION)
def test_reads_full_precision(use: Use, weights: Weights) -> None:
    expected = use(*(weight.plain() for weight in weights))
    assert torch.equal(use(*weights), expected)
    assert not torch.equal(use(*(weight.rounded() for weight in weights)), expected)


def test_the_fast_path_of_encoder_layers_reads_rounded_values() -> None:
    """PyTorch's own layers have one without gradients."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer).eval()
    plain, x = copy.deepcopy(model), torch.randn(2, 5, 64)
    prepare(model, Recipe())
    with_gradient = model(x).detach()
    with torch.no_grad():
        # Another order of sums: the largest difference seen was 1e-6, the rounding makes 0.1.
        assert torch.allclose(model(x), with_gradient, atol=1e-5)
        assert not torch.allclose(plain(x), with_gradient, atol=1e-2)


def copied_to_a_buffer(tensor: Tensor) -> Tensor:
    """As `save_on_cpu(pin_memory=True)` packs on a GPU."""
    return torch.empty(tensor.size(), dtype=tensor.dtype).copy_(tensor)


@pytest.mark.parametrize(
    "pack",
    [lambda t: t.cpu(), lambda t: t.detach().clone(), copied_to_a_buffer],
    ids=["cpu", "clone", "pinned buffer"],
)
def test_saved_tensors_bring_the_same_gradients(pack: Callable[[Tensor], Tensor]) -> None:
    gradients = []
    for hook in (lambda t: t, pack):
        model = tiny_model("qwen3-moe")
        prepare(model, Recipe())
        with torch.autograd.graph.saved_tensors_hooks(hook, lambda t: t):
            loss = model(input_ids=tokens(), labels=tokens(), use_cache=False).loss
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    expected, actual = gradients
    assert {name for name in expected if not torch.equal(expected[name], actual[name])} == set()


@torch.no_grad()
def test_kernels_of_optimizers_write_the_weight(weights: Weights) -> None:
    weight, before = weights[0], weights[0].plain().clone()
    sgd_(weight, -before)
    assert torch.equal(weight.plain(), before * 2) and weight.weight_name in weight.held_by.written
    weight.state.refresh_if_stale(weight)
    torch.mm(before, ONE, out=weight)
    assert torch.equal(weight.plain(), before) and weight.weight_name in weight.held_by.written


@torch.no_grad()
def test_copies_of_the_whole_weight_and_of_shards_are_plain(weights: Weights) -> None:
    for weight in weights:
        assert type(weight.detach().clone()) is type(weight.detach()[:2].clone()) is Tensor
        assert torch.equal(weight.clone(), weight.plain())


@torch.no_grad()
def test_a_copied_view_keeps_its_values(weights: Weights) -> None:
    weight = weights[0]
    copied, rounded = weight.t().contiguous(), weight.rounded().clone()
    weight.mul_(2)
    assert torch.equal(ONE @ copied, rounded.t())
    assert torch.equal(ONE @ weight.t(), rounded.t() * 2)
