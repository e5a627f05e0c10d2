"""Tiles of Humming, where they are chosen and what they multiply; our products of few rows."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from qat_core.exact.functions import linear
from qat_core.exact.operators import forbid_split_sums
from qat_core.exact.slices import add_up, slices_of
from qat_core.nvfp4 import PackedTensor, dequantize, global_scale, group_amax, quantize
from qat_core.rollout.vllm.humming import experts as humming_experts
from qat_core.rollout.vllm.humming import few_rows
from qat_core.rollout.vllm.humming import library as humming
from qat_core.rollout.vllm.humming import linear as humming_linear
from qat_core.rollout.vllm.humming.tiles import (
    BUSY_FROM,
    BUSY_OFTEN_FROM,
    EXACT_ROWS,
    EXACT_UNPACK_FROM,
    expert_tile,
    faster,
    linear_tile,
)
from qat_core.rollout.vllm.tile_layout import to_layout
from tests.pinned import OF_PINNED

pytestmark = OF_PINNED


@pytest.mark.parametrize(
    ("n", "k", "rows", "block", "splits"),
    [
        pytest.param(6144, 4096, 8, (8, 64, 256), False, id="columns-enough"),
        pytest.param(6144, 4096, 32, (32, 64, 256), False, id="columns-enough-32-rows"),
        pytest.param(24576, 4096, 8, (8, 64, 128), False, id="columns-for-several-blocks"),
        pytest.param(24576, 4096, 32, (32, 64, 128), False, id="columns-for-several-blocks-32"),
        pytest.param(4096, 4096, 8, (8, 64, 256), False, id="short-sums"),
        pytest.param(5120, 2048, 32, (32, 64, 128), False, id="short-sums-32-rows"),
        pytest.param(4096, 4096, 32, (16, 64, 256), False, id="half-the-columns"),
        pytest.param(2048, 4096, 32, (16, 64, 256), True, id="a-quarter-of-the-columns"),
        pytest.param(4096, 12288, 32, (32, 64, 256), True, id="half-the-columns-long-sums"),
    ],
)
def test_sums_are_split_where_whole_ones_leave_half_of_the_gpu_idle(
    n: int, k: int, rows: int, block: tuple[int, int, int], splits: bool
) -> None:
    tile = linear_tile(n, k, rows)
    assert (tile["block_shape"], tile["use_stream_k"]) == (block, splits)


@pytest.mark.parametrize(
    ("n", "k", "rows"),
    [
        pytest.param(4096, 12288, 8, id="long-sums-few-rows"),
        pytest.param(5120, 12288, 32, id="long-sums-between"),
        pytest.param(6144, 4096, 64, id="many-rows"),
        pytest.param(6144, 4224, 8, id="odd-depth"),
        pytest.param(6176, 4096, 8, id="odd-columns"),
    ],
)
def test_hummings_own_choice_stays_where_nothing_better_was_found(
    n: int, k: int, rows: int
) -> None:
    assert linear_tile(n, k, rows) is None


def test_only_hummings_own_tile_of_256_rows_is_changed() -> None:
    own = {"mma_type": "wgmma", "num_stages": 4}
    assert faster(own, 256) == own | {"wgmma_split_issue_wait": True}
    assert faster(own, 128) == own
    assert faster(own | {"mma_type": "mma"}, 256) == own | {"mma_type": "mma"}


@pytest.mark.parametrize(
    ("n", "k", "pairs", "block"),
    [
        pytest.param(1536, 2048, 8, (8, 64, 128), id="one-token"),
        pytest.param(2048, 768, 8, (8, 64, 64), id="one-token-short-sums"),
        pytest.param(1536, 2048, 256, (8, 128, 128), id="two-rows-an-expert"),
        pytest.param(2048, 768, 256, (8, 512, 32), id="two-rows-an-expert-short-sums"),
        pytest.param(1536, 2048, 2048, None, id="16-rows-an-expert"),
        pytest.param(2048, 768, 2048, (24, 512, 64), id="16-rows-an-expert-short-sums"),
        pytest.param(2048, 768, 1280, None, id="not-timed"),
        pytest.param(1920, 768, 256, None, id="odd-columns"),
        pytest.param(1536, 2112, 256, None, id="odd-depth"),
    ],
)
def test_tiles_of_experts_hold_the_rows_that_one_has(
    n: int, k: int, pairs: int, block: tuple[int, int, int] | None
) -> None:
    tile = expert_tile(128, n, k, pairs)
    assert (tile["block_shape"] if tile else None) == block


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "rows", "max_error"),
    [
        # Rounding to BF16 costs 1.7e-3; where Humming splits sums the record has up to 4.1e-3.
        *((64 * BUSY_FROM, rows, 1.8e-3) for rows in (1, 8, 9, 32)),
        *((64 * BUSY_OFTEN_FROM, rows, 1.8e-3) for rows in (1, 8, 9, 32)),
        (5120, 32, 1.8e-3),
        (4096, 32, 1.8e-3),
        (2048, 17, 2.6e-3),  # two parts, each rounded, and their sum: 2.4e-3
        (2048, 32, 2.6e-3),
    ],
)
@pytest.mark.parametrize("k", [256, 2560])  # fewer steps along K than a tile has stages, and more
def test_bits_of_linear_layers_repeat(n: int, rows: int, max_error: float, k: int) -> None:
    assert linear_tile(n, k, 8 if rows <= 8 else 32)
    packed = packed_weight(n, k)
    locks = torch.zeros(humming.NUM_LOCKS, dtype=torch.int32, device="cuda")
    x = torch.randn(rows, k, device="cuda").bfloat16()
    outs = [humming_linear.multiply(x, *served(packed), locks) for _ in range(20)]
    assert all(torch.equal(outs[0], out) for out in outs)
    exact = F.linear(x.double(), dequantize(packed).double())
    assert (outs[0].double() - exact).norm() < max_error * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(1536, 2048), (2048, 768)], ids=["gate-up", "down"])
@pytest.mark.parametrize("pairs", [8, 16, 32, 40, 256, 800, 2048])  # to 32 not sorted
def test_bits_of_experts_repeat(n: int, k: int, pairs: int) -> None:
    packed = packed_weight(128, n, k)
    weight = dequantize(packed)
    topk_ids = torch.randint(128, (pairs // 8, 8), device="cuda", dtype=torch.int32)
    x = torch.randn(pairs, k, device="cuda").bfloat16()
    outs = [x.new_empty(pairs, n) for _ in range(20)]
    for out in outs:
        routing = humming_experts._Routing(topk_ids, 128, None)
        humming_experts.multiply(x, *served(packed), routing, out)
    assert all(torch.equal(outs[0], out) for out in outs)
    exact = torch.stack(
        [
            weight[expert].double() @ row
            for expert, row in zip(topk_ids.flatten(), x.double(), strict=True)
        ]
    )
    assert (outs[0].double() - exact).norm() < 1.8e-3 * exact.norm()


def packed_weight(*shape: int) -> PackedTensor:
    """A random one."""
    weight = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    weight = weight.bfloat16()
    return quantize(weight, global_scale(group_amax([[weight]])[0], "pow2"))


def served(packed: PackedTensor) -> tuple[Tensor, Tensor, Tensor]:
    """As vLLM's layers keep it."""
    multiplier = packed.global_scale.reciprocal().reshape(-1)
    return *to_layout(packed.codes, packed.block_scale), multiplier


ROWS = (2, 7, 8, 9, 31, 64, 65, 300)
LAYERS = [(64, 64), (4096, 12288), (2048, 4096), (6144, 4096), (576, 1536), (192, 320), (192, 4224)]


def _packed(*shape: int) -> PackedTensor:
    torch.manual_seed(0)
    weight = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    weight *= torch.exp(torch.randn(*shape[:-1], 1, device="cuda")).bfloat16()
    weight.flatten()[:16] = 1e-30  # of a block that is zero
    return quantize(weight, global_scale(group_amax([[weight]])[0], "pow2"))


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:few_rows.cu is slow")
@pytest.mark.parametrize(("n", "k"), LAYERS)
def test_bits_of_every_tile_are_those_of_the_unpacked_weight(
    n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_split_sums()
    packed = _packed(n, k)
    weight = dequantize(packed)
    products = {1: F.linear, slices_of(n, k): add_up}
    for tile in [it for it in few_rows.TILES if n % it.columns == 0]:
        monkeypatch.setattr(few_rows, "fastest", lambda *_, tile=tile: tile)
        for rows, (slices, product) in itertools.product(ROWS, products.items()):
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            found = few_rows.multiply(x, *served(packed), slices)
            assert torch.equal(found, product(x, weight)), (tile, rows, slices)
            assert torch.equal(found[:1], few_rows.multiply(x[:1], *served(packed), slices))


@pytest.mark.parametrize(
    ("rows", "n", "slices", "tile"),
    [
        pytest.param(1, 6144, 1, (8, 64, 4), id="one-row"),
        pytest.param(16, 4096, 1, (16, 32, 4), id="narrow"),
        pytest.param(64, 24576, 1, (64, 192, 12), id="as-many-blocks-as-multiprocessors"),
        pytest.param(64, 4096, 2, (64, 64, 4), id="twice-the-blocks-by-halves"),
        pytest.param(256, 24576, 1, (128, 128, 8), id="several-blocks-a-multiprocessor"),
    ],
)
def test_the_tile_that_was_timed_fastest_is_chosen(
    rows: int, n: int, slices: int, tile: tuple[int, int, int]
) -> None:
    assert few_rows.fastest(rows, n, slices) == tile


@pytest.mark.parametrize(
    ("n", "k"), [(24576, 4096), (4096, 12288), (2048, 4096), (576, 1536), (192, 4224)]
)
def test_no_kernel_is_compiled_while_a_graph_is_captured(
    n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: set[few_rows.Kernel] = set()
    monkeypatch.setattr(few_rows, "_compiled", lambda kernel: compiled.add(kernel))
    slices, experts = slices_of(n, k), 8
    few_rows.prepare(n, k, EXACT_UNPACK_FROM - 1, slices)
    few_rows.prepare_experts(n, k, EXACT_ROWS)
    for rows in range(1, EXACT_UNPACK_FROM):
        tile = few_rows.fastest(rows, n, slices)
        assert few_rows.Kernel.of(tile, k, slices=slices) in compiled
    for pairs in range(1, EXACT_ROWS * experts + 1):
        tile = few_rows.widest(few_rows.tile_rows(pairs, experts), n)
        assert few_rows.Kernel.of(tile, k, experts=True) in compiled


@pytest.mark.parametrize(
    ("tokens", "rows"), [(1, 8), (85, 8), (86, 16), (128, 16), (171, 32), (256, 32)]
)
def test_a_tile_holds_most_experts_pairs(tokens: int, rows: int) -> None:
    assert few_rows.tile_rows(8 * tokens, 128) == rows


@pytest.mark.parametrize(("pairs", "rows"), [(24, 8), (64, 16), (128, 32)])
def test_ranks_that_share_out_experts_choose_tiles_by_the_pairs_of_all(
    monkeypatch: pytest.MonkeyPatch, pairs: int, rows: int
) -> None:
    """Of 8 experts of two ranks; a rank has half of the pairs, and of the experts."""
    from qat_core.rollout.vllm.humming import experts

    chosen: list[int] = []
    monkeypatch.setattr(experts, "is_exact", lambda: True)
    monkeypatch.setattr(few_rows, "multiply_experts", lambda *given: chosen.append(given[4]))
    monkeypatch.setattr(experts._Routing, "order", lambda *_: None)
    ids = torch.zeros(pairs // 2, 2, dtype=torch.int32)
    routing = experts._Routing(ids, 8, torch.zeros(8, dtype=torch.int32))
    of_four = torch.zeros(4, 1)
    experts.multiply(of_four, of_four, of_four, of_four, routing, of_four)
    assert chosen == [rows]


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 12288), (2048, 4096), (2048, 8192)])
def test_halves_of_long_sums_are_added_whatever_the_rows(n: int, k: int) -> None:
    forbid_split_sums()
    x = torch.randn(5000, k, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    pairs = zip(x.chunk(2, -1), weight.chunk(2, -1), strict=True)
    first, second = (torch.mm(part, it.T, out_dtype=torch.float32) for part, it in pairs)
    expected = (first + second).bfloat16()
    for rows in (1, *ROWS, 4096, 4097, 5000):
        assert torch.equal(add_up(x[:rows], weight), expected[:rows]), rows
    assert not torch.equal(F.linear(x, weight), expected)


@pytest.mark.gpu
def test_a_single_row_is_multiplied_with_whatever_lies_behind_it() -> None:
    forbid_split_sums()
    x = torch.randn(2, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(128, 4096, device="cuda", dtype=torch.bfloat16)
    expected = F.linear(x, weight)[:1]
    x[1] = torch.nan
    assert torch.equal(linear(x[:1], weight), expected)
    assert torch.equal(linear(x[:1].clone(), weight), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize(("tokens", "k"), [(1, 192), (5, 256), (70, 192), (70, 256), (600, 256)])
def test_experts_have_the_bits_of_the_grouped_product(tokens: int, k: int, top_k: int) -> None:
    from qat_core.rollout.vllm.humming import experts

    count, n = 16, 384
    packed = _packed(count, n, k)
    words, scale = to_layout(packed.codes, packed.block_scale)
    multiplier = packed.global_scale.reciprocal().expand(count).contiguous()
    x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
    chosen = torch.rand(tokens, count, device="cuda").topk(top_k).indices.int()
    routing = experts._Routing(chosen, count, None)
    sort = chosen.flatten().argsort(stable=True)
    ends = chosen.flatten().bincount(minlength=count).cumsum(0).int()
    weight = dequantize(packed).transpose(-2, -1)
    expected = torch.empty(tokens * top_k, n, device="cuda", dtype=torch.bfloat16)
    expected[sort] = torch._grouped_mm(x[sort // top_k], weight, ends)
    for tile in few_rows.EXPERT_STAGES:
        found = torch.empty_like(expected)
        order = routing.order(tile)
        few_rows.multiply_experts(x, words, scale, multiplier, tile, order, found)
        assert torch.equal(found, expected), tile
