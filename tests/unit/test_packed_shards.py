from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from qat_core.nvfp4 import (
    fake_quantize,
    global_scale,
    group_amax,
    pack_shards,
    shard_layout,
    unpack_shards,
)


@given(
    array_shapes(min_dims=1, max_dims=2, max_side=9),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_gathered_shards_are_the_rounded_weight(
    lead: tuple[int, ...], blocks: int, num_shards: int, dtype: torch.dtype
) -> None:
    w = torch.randn(*lead, 16 * blocks, generator=torch.Generator().manual_seed(0))
    scale = global_scale(group_amax([[w]])[0], "amax")
    layout = shard_layout(w.shape, ceil(len(w) / num_shards))
    shards = [w[rank * layout.num_rows :][: layout.num_rows] for rank in range(num_shards)]
    scales = [
        scale[rank * layout.num_rows :][: layout.num_rows] if scale.ndim else scale
        for rank in range(num_shards)
    ]
    buffers = pack_shards(shards, scales, [layout] * num_shards, names=["w"] * num_shards)
    assert {len(buffer) for buffer in buffers} == {layout.num_bytes}
    out = torch.full(w.shape, torch.nan, dtype=dtype)
    unpack_shards(torch.cat(buffers), layout, scale, out)
    assert torch.equal(out, fake_quantize(w, scale).to(dtype))


def test_a_weight_without_rows_is_gathered_too() -> None:
    w, scale = torch.empty(0, 16), torch.ones(())
    layout = shard_layout(w.shape, 0)
    shards = torch.cat(pack_shards([w, w], [scale] * 2, [layout] * 2, names=["w"] * 2))
    unpack_shards(shards, layout, scale, w)
    assert len(shards) == 0


@pytest.mark.parametrize(
    ("shape", "num_rows", "num_bytes"),
    [((8, 32), 4, 4 * 2 * 9 + 8), ((3, 16), 2, 2 * 9 + 14), ((4, 2, 16), 2, 2 * 2 * 9 + 12)],
)
def test_buffers_are_of_equal_size_and_aligned(
    shape: tuple[int, ...], num_rows: int, num_bytes: int
) -> None:
    assert shard_layout(torch.Size(shape), num_rows).num_bytes == num_bytes


def test_names_a_shard_that_cannot_be_packed() -> None:
    w, scale = torch.randn(4, 24), torch.ones(())
    with pytest.raises(ValueError, match=r"layers\.0: needs shape \(\.\.\., N, K\)"):
        pack_shards([w], [scale], [shard_layout(w.shape, 4)], names=["layers.0"])
