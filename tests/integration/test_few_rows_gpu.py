"""Our products of few rows have the bits of cuBLAS without split sums, and of grouped products."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from qat_core.exact.operators import forbid_split_sums
from qat_core.nvfp4 import PackedTensor, dequantize, global_scale, group_amax, quantize
from qat_core.rollout.vllm.tile_layout import to_layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

ROWS = (2, 7, 8, 9, 31, 64, 65, 300)
LAYERS = [(64, 64), (4096, 12288), (6144, 4096), (576, 1536), (192, 320)]


def _packed(*shape: int) -> PackedTensor:
    torch.manual_seed(0)
    weight = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    weight *= torch.exp(torch.randn(*shape[:-1], 1, device="cuda")).bfloat16()
    weight.flatten()[:16] = 1e-30  # of a block that is zero
    return quantize(weight, global_scale(group_amax([[weight]])[0], "pow2"))


def _laid_out(packed: PackedTensor) -> tuple[Tensor, Tensor, Tensor]:
    return *to_layout(packed.codes, packed.block_scale), packed.global_scale.reciprocal().reshape(
        -1
    )


@pytest.mark.parametrize(("n", "k"), LAYERS)
def test_bits_of_every_tile_are_those_of_the_unpacked_weight(
    n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qat_core.rollout.vllm.humming import few_rows

    forbid_split_sums()
    packed = _packed(n, k)
    weight = dequantize(packed)
    for tile in [it for it in few_rows.TILES if n % (16 * it[1]) == 0]:
        monkeypatch.setattr(few_rows, "fastest", lambda *_, tile=tile: tile)
        for rows in ROWS:
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            found = few_rows.multiply(x, *_laid_out(packed))
            assert torch.equal(found, F.linear(x, weight)), (tile, rows)
            assert torch.equal(found[:1], few_rows.multiply(x[:1], *_laid_out(packed)))


@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("tokens", [1, 5, 70, 600])
def test_experts_have_the_bits_of_the_grouped_product(tokens: int, top_k: int) -> None:
    from qat_core.rollout.vllm.humming import experts, few_rows

    count, n, k = 16, 384, 192
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
    for tile in few_rows.TILE_ROWS:
        found = torch.empty_like(expected)
        order = routing.order(tile)
        few_rows.multiply_experts(x, words, scale, multiplier, tile, order, found)
        assert torch.equal(found, expected), tile
