"""Kernels that take many weights in a launch, against the plain PyTorch specification."""

from itertools import product
from math import ceil

import pytest
import torch

from qat_core.nvfp4 import reference, shard_layout
from tests.kernels.same_bits import BLOCK_SCALES, POLICIES, assert_same_bits


def test_groups_of_mixed_shapes_and_dtypes(launch, device):
    generator = torch.Generator().manual_seed(5)
    shapes: list[list[tuple[int, ...]]] = [
        [(64, 32), (16, 32), (16, 32)],
        [(3, 32, 64), (3, 16, 64)],
        [(0, 16), (1, 16)],
    ]
    groups = [[torch.randn(s, generator=generator) for s in members] for members in shapes]
    groups[0][1] = groups[0][1].bfloat16() * 2
    expected = reference.group_amax(groups)
    actual = launch.group_amax([[w.to(device) for w in members] for members in groups])
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a, e)


@pytest.mark.parametrize("block_scale", BLOCK_SCALES)
def test_quantize_all_equals_quantize_of_each(launch, device, block_scale):
    """Shapes and dtypes of a sharded model: full tiles, part tiles, experts, an empty shard."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(64, 128), (5, 48), (3, 32, 64), (0, 16), (1, 16)]
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    weights[1] = weights[1].bfloat16()
    scales = [reference.global_scale(reference.amax(w), "pow2") for w in weights]
    scales[2] = torch.cat((torch.ones(2), scales[2]))[2:]  # one rank's slice of all experts'
    on_device = [scale.to(device) for scale in scales]
    actual = launch.quantize_all([w.to(device) for w in weights], on_device, block_scale)
    for (codes, scale), w, global_scale in zip(actual, weights, scales, strict=True):
        expected_codes, expected_scale = reference.quantize(w, global_scale, block_scale)
        assert_same_bits(codes, expected_codes)
        assert_same_bits(scale, expected_scale)


LASTS = [1.0, 2.0**-20, 2.0**94, float("nan"), None]
# a search for the block scale takes the interpreter seconds: once with a new scale, once with it
SEARCHES = product((1.0, None), ["amax"], BLOCK_SCALES[1:])


@pytest.mark.parametrize(
    ("last", "policy", "block_scale"),
    [*product(LASTS, POLICIES, BLOCK_SCALES[:1]), *SEARCHES],
    ids=str,
)
def test_weights_rounded_while_they_are_measured(launch, device, last, policy, block_scale):
    """Whatever the last scales were, the right ones among them (None): each other one's own."""
    generator = torch.Generator().manual_seed(9)
    shapes: list[list[tuple[int, ...]]] = [
        [(64, 128), (5, 48)],
        [(3, 32, 64), (3, 5, 48)],
        [(0, 16), (1, 16)],
        [(5, 48)],
    ]
    groups = [[torch.randn(s, generator=generator) for s in members] for members in shapes]
    groups[0][1], groups[3][0] = groups[0][1].bfloat16(), groups[3][0].bfloat16()
    groups[1][0][1] = 0.0
    right = [reference.global_scale(amax, policy) for amax in reference.group_amax(groups)]
    before = [scale if last is None else torch.full_like(scale, last) for scale in right]
    before[1][2] = right[1][2]
    amax, rounded = reference.measure_and_round(groups, before, policy, block_scale)
    found = launch.measure_and_round(
        [[w.to(device) for w in members] for members in groups],
        [scale.to(device) for scale in before],
        policy,
        block_scale,
    )
    for actual, expected in zip(found[0], amax, strict=True):
        assert_same_bits(actual, expected)
    for members, expected_members in zip(found[1], rounded, strict=True):
        for actual, expected in zip(members, expected_members, strict=True):
            assert_same_bits(actual, expected)


def test_a_matrix_that_is_not_finite_is_rounded_to_nan(launch, device):
    w = torch.ones(2, 4, 48, device=device)
    w[1, 2, 20] = float("nan")
    amax, rounded = launch.measure_and_round([[w]], [torch.ones(2, device=device)], "pow2", "max")
    assert torch.equal(amax[0].isnan().cpu(), torch.tensor([False, True]))
    assert rounded[0][0][1].isnan().all() and not rounded[0][0][0].isnan().any()


def test_not_finite_shows_in_amax(launch, device):
    w = torch.ones(4, 48, dtype=torch.bfloat16, device=device)
    w[1, 3], w[2, 20] = float("inf"), float("nan")
    assert launch.group_amax([[w]])[0].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize(
    "shape", [(64, 128), (7, 48), (1, 16), (5, 32, 64), (2, 3, 48), (0, 16)], ids=str
)
def test_shards_hold_and_give_what_the_reference_does(shape, num_shards, dtype, launch, device):
    """Full tiles, part tiles, fewer rows or experts than shards; all ranks' shards at once."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(8))
    global_scale = reference.global_scale(reference.amax(w), "amax")
    layout = shard_layout(w.shape, ceil(len(w) / num_shards))
    rows = max(layout.num_rows, 1)
    cut = [slice(rank * rows, (rank + 1) * rows) for rank in range(num_shards)]
    shards, layouts = [w[rows] for rows in cut], [layout] * num_shards
    scales = [global_scale[rows] if global_scale.ndim else global_scale for rows in cut]
    expected = reference.pack_shards(shards, scales, layouts, "max")
    on_device = [[tensor.to(device) for tensor in tensors] for tensors in (shards, scales)]
    actual = launch.pack_shards(*on_device, layouts, "max")
    for buffer, wanted, shard in zip(actual, expected, shards, strict=True):
        codes, start = shard.numel() // 2, layout.num_blocks * 8
        assert torch.equal(buffer[:codes].cpu(), wanted[:codes])
        scale_bytes = slice(start, start + shard.numel() // 16)
        assert torch.equal(buffer[scale_bytes].cpu(), wanted[scale_bytes])
    memory = torch.full((2 + shape[0], *shape[1:]), 7.0, dtype=dtype, device=device)
    launch.unpack_shards(torch.cat(actual), layout, global_scale.to(device), memory[1:-1])
    whole = reference.fake_quantize(w, global_scale, "max").to(dtype)
    assert_same_bits(memory[1:-1], whole)
    assert (memory[[0, -1]] == 7).all()
