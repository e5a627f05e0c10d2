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
    layout = shard_layout(w.shape, num_shards)
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


@pytest.mark.parametrize(
    ("shape", "num_shards", "num_bytes"),
    [((8, 32), 2, 4 * 2 * 9 + 8), ((3, 16), 2, 2 * 9 + 14), ((4, 2, 16), 3, 2 * 2 * 9 + 12)],
)
def test_buffers_are_of_equal_size_and_aligned(
    shape: tuple[int, ...], num_shards: int, num_bytes: int
) -> None:
    assert shard_layout(torch.Size(shape), num_shards).num_bytes == num_bytes


def test_names_a_shard_that_cannot_be_packed() -> None:
    w, scale = torch.randn(4, 24), torch.ones(())
    with pytest.raises(ValueError, match=r"layers\.0: needs shape \(\.\.\., N, K\)"):
        pack_shards([w], [scale], [shard_layout(w.shape, 1)], names=["layers.0"])
