"""Humming in place of Marlin for experts: the choice, weights, and on a GPU the products."""

from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle

from qat_core.nvfp4 import PackedTensor, dequantize, global_scale, group_amax, quantize
from qat_core.rollout.vllm.humming import experts as humming_experts
from qat_core.rollout.vllm.humming.experts import HummingExperts, prepare_experts
from qat_core.rollout.vllm.in_place.targets import find_targets
from qat_core.rollout.vllm.marlin.layout import lean_repacking
from qat_core.rollout.vllm.tile_layout import unpack
from tests.pinned import OF_PINNED

pytestmark = OF_PINNED

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
EXPERTS, HIDDEN, INNER, TOP_K = 16, 256, 128, 2
NAMES = ["l.mlp.experts.gate_up_proj", "l.mlp.experts.down_proj"]


@pytest.fixture(autouse=True)
def products_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, products and sums of plain PyTorch in place of the kernels."""
    if ON_GPU:
        return

    def multiply(x: Tensor, *arguments: Any) -> None:
        *weight, routing, out = arguments
        rows = x.repeat_interleave(len(out) // len(x), dim=0)
        for pair, expert in enumerate(routing.topk_ids.flatten().tolist()):
            words, scale, multiplier = (tensor[expert] for tensor in weight)
            out[pair] = F.linear(rows[pair], unpack(words, scale, multiplier.reshape(1)))

    def weighted_sum(down: Tensor, weights: Tensor, out: Tensor, *_: Any) -> None:
        out.copy_((down.float() * weights[..., None]).sum(1))

    def gate(self: Any, activation: Any, output: Tensor, input: Tensor) -> None:
        left, right = input.chunk(2, dim=-1)
        output.copy_(F.silu(left) * right)

    monkeypatch.setattr(humming_experts, "_kernels", lambda *_: None)
    monkeypatch.setattr(humming_experts, "multiply", multiply)
    monkeypatch.setattr(humming_experts, "moe_fused_mul_sum", weighted_sum)
    monkeypatch.setattr(HummingExperts, "activation", gate)


def packed_experts(seed: int) -> list[PackedTensor]:
    """w13 and w2 of experts that differ in size."""
    torch.manual_seed(seed)
    packed = []
    for shape in ((EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)):
        size = torch.logspace(-2, 2, EXPERTS, base=2)[:, None, None]
        weight = (0.1 * size * torch.randn(shape)).bfloat16().to(DEVICE)
        packed.append(quantize(weight, global_scale(group_amax([[weight]])[0], "pow2")))
    return packed


def served(weights: list[PackedTensor]) -> Any:
    """A layer of experts after vLLM's preparation."""
    layer: Any = nn.Module()
    layer.hidden_size, layer.intermediate_size_per_partition = HIDDEN, INNER
    layer.workspace = torch.zeros(8, dtype=torch.int32)
    parallel = SimpleNamespace(ep_size=1, tp_rank=0, tp_size=1)
    layer.moe_config = SimpleNamespace(num_experts=EXPERTS, moe_parallel_config=parallel)
    arguments: dict[str, Any] = {"layer": layer, "is_act_and_mul": True}
    for matrix, packed in zip(("w13", "w2"), weights, strict=True):
        arguments[matrix], arguments[f"{matrix}_scale"] = packed.codes, packed.block_scale
        arguments[f"{matrix}_scale_2"] = packed.global_scale.reciprocal()
    with lean_repacking():  # as in a reload
        prepared = oracle.prepare_nvfp4_moe_layer_for_marlin(**arguments)
    for matrix, tensors in (("w13", prepared[:3]), ("w2", prepared[3:])):
        for kind, tensor in zip(("weight", "weight_scale"), tensors, strict=False):
            setattr(layer, f"{matrix}_{kind}", nn.Parameter(tensor, requires_grad=False))
        setattr(layer, f"{matrix}_weight_scale_2", tensors[2])
    backend = SimpleNamespace(name="MARLIN")
    layer.quant_method = SimpleNamespace(nvfp4_backend=backend, experts_cls=HummingExperts)
    return layer


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("backend_to_kernel_cls", "prepare_nvfp4_moe_layer_for_marlin"):
        monkeypatch.setattr(oracle, name, getattr(oracle, name))
    humming_experts.install()
    humming_experts.install()  # by vLLM's plugins once more
    return served(packed_experts(0))


def run(layer: Any, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """The product as vLLM calls it: the first workspace and the experts' rows share memory."""
    experts: Any = object.__new__(HummingExperts)
    experts.quant_config = SimpleNamespace(
        gemm1_clamp_limit=None,
        w1_scale=layer.w13_weight_scale,
        w2_scale=layer.w2_weight_scale,
        g1_alphas=layer.w13_weight_scale_2,
        g2_alphas=layer.w2_weight_scale_2,
    )
    shapes = experts.workspace_shapes(len(x), INNER, HIDDEN, TOP_K)
    shared, second = x.new_empty(max(prod(shapes[0]), prod(shapes[2]))), x.new_empty(shapes[1])
    first, rows = (shared[: prod(shape)].view(shape) for shape in shapes[::2])
    experts.apply(
        rows,
        x,
        layer.w13_weight,
        layer.w2_weight,
        topk_weights,
        topk_ids,
        MoEActivation.SILU,
        EXPERTS,
        None,
        None,
        None,
        first,
        second,
        None,
        False,
    )
    output = torch.empty_like(x)
    add_up = experts.finalize_weight_and_reduce_impl()
    add_up.apply(output, rows, topk_weights, topk_ids, False)
    return output


def routed(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, and experts with their weights for each token."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16()
    weights, ids = torch.rand(tokens, EXPERTS, device=DEVICE).topk(TOP_K)
    return x, ids.int(), weights


@pytest.mark.parametrize("tokens", [1, 5, 300, 1100])
def test_experts_give_what_their_weights_say(layer: Any, tokens: int) -> None:
    x, ids, weights = routed(tokens)
    w13, w2 = (dequantize(packed).double() for packed in packed_experts(0))
    expected = torch.zeros(tokens, HIDDEN, dtype=torch.float64, device=DEVICE)
    for token, (own_ids, own) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, weight in zip(own_ids, own, strict=True):
            gate, up = (w13[expert] @ x[token].double()).chunk(2)
            expected[token] += weight * (w2[expert] @ (F.silu(gate) * up))
    found = run(layer, x, ids, weights).double()
    # Of each token, as experts differ in size. Three roundings to BF16 one after the other: 0.0066
    # at most on a CPU; an expert that is lost costs a token far more.
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max() < 1e-2


def test_a_sync_in_place_writes_what_a_reload_makes(layer: Any) -> None:
    kinds = ("weight", "weight_scale", "weight_scale_2")
    names = [f"{matrix}_{kind}" for matrix in ("w13", "w2") for kind in kinds]
    before = [getattr(layer, name).data_ptr() for name in names]
    targets = find_targets([(layer, NAMES)], {})
    for name, packed in zip(NAMES, packed_experts(1), strict=True):
        targets[name].take(name, packed)
    wanted = served(packed_experts(1))
    for name in names:
        found, expected = (getattr(owner, name).data.cpu() for owner in (layer, wanted))
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert [getattr(layer, name).data_ptr() for name in names] == before


def test_only_what_marlin_would_multiply_is_chosen(layer: Any) -> None:
    chosen = oracle.backend_to_kernel_cls
    assert chosen(oracle.NvFp4MoeBackend.MARLIN) == [HummingExperts]
    assert HummingExperts not in chosen(oracle.NvFp4MoeBackend.EMULATION)
    assert oracle.prepare_nvfp4_moe_layer_for_marlin is prepare_experts


def test_few_pairs_have_a_tile_each_and_are_not_sorted() -> None:
    topk_ids = torch.tensor([[5, 2], [2, 9]], dtype=torch.int32, device=DEVICE)
    ids, of_experts, padded = humming_experts._Routing(topk_ids, EXPERTS, None).order(8)
    tiles = ids.view(4, 8)
    assert tiles[:, 0].tolist() == [0, 1, 2, 3]
    assert tiles[:, 1:].min() >= 4  # no pair
    assert (of_experts.tolist(), padded.tolist()) == ([5, 2, 2, 9], [32])


@pytest.mark.parametrize(
    ("tokens", "tile_rows", "mapped"),
    [
        pytest.param(3, 8, False, id="more-pairs-than-a-quarter-of-the-experts"),
        pytest.param(2, 16, False, id="larger-tiles"),
        pytest.param(2, 8, True, id="experts-of-other-ranks"),
    ],
)
def test_other_pairs_are_sorted(
    monkeypatch: pytest.MonkeyPatch, tokens: int, tile_rows: int, mapped: bool
) -> None:
    ids = torch.zeros(tokens, TOP_K, dtype=torch.int32, device=DEVICE)
    expert_map = torch.zeros(EXPERTS, dtype=torch.int32, device=DEVICE) if mapped else None
    monkeypatch.setattr(humming_experts, "moe_align_block_size", lambda *_, **__: "sorted")
    assert humming_experts._Routing(ids, EXPERTS, expert_map).order(tile_rows) == "sorted"


@pytest.mark.parametrize(("clamp", "weighted"), [(7.0, False), (None, True)])
def test_experts_that_humming_would_compute_wrong_are_refused(
    clamp: float | None, weighted: bool
) -> None:
    experts: Any = object.__new__(HummingExperts)
    experts.quant_config = SimpleNamespace(gemm1_clamp_limit=clamp)
    with pytest.raises(ValueError, match=r"clamp or that weight.*unset it to use Marlin"):
        experts.apply(*[None] * 14, weighted)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 32, 256, 1000])
def test_experts_give_the_same_bits_each_time(layer: Any, tokens: int) -> None:
    x, ids, weights = routed(tokens)
    first = run(layer, x, ids, weights)
    assert all(torch.equal(run(layer, x, ids, weights), first) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 32, 256])
def test_a_captured_graph_multiplies_with_the_weights_of_the_last_sync(
    layer: Any, tokens: int
) -> None:
    x, ids, weights = routed(tokens)
    run(layer, x, ids, weights)  # warm up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(layer, x, ids, weights)
    targets = find_targets([(layer, NAMES)], {})
    for seed in range(1, 20):
        for name, packed in zip(NAMES, packed_experts(seed), strict=True):
            targets[name].take(name, packed)
        graph.replay()
        assert torch.equal(out, run(layer, x, ids, weights))
