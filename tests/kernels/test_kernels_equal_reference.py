"""Triton kernels against the plain PyTorch specification: every bit of codes, scales and values."""

from itertools import product
from math import ceil

import pytest
import torch

from qat_core.nvfp4 import reference, shard_layout
from tests.kernels.conftest import BLOCK_SCALES, POLICIES, assert_same_bits

SHAPES = [(1, 16), (3, 48), (257, 48), (5, 3, 32), (2, 3, 4, 64), (16, 256), (0, 16), (2, 0, 32)]
# Tests marked gpu would take the interpreter minutes.
LARGE = pytest.param((257, 4096), marks=pytest.mark.gpu)


def all_finite_bf16() -> torch.Tensor:
    """Every finite BF16 bit pattern: 65,280 values."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return patterns[patterns.isfinite()]


def pattern_matrices() -> dict[str, torch.Tensor]:
    """All patterns as neighbours in value, shuffled, and each in a block with one fixed maximum."""
    patterns = all_finite_bf16()
    shuffled = patterns[torch.randperm(len(patterns), generator=torch.Generator().manual_seed(0))]
    alone = torch.zeros(len(patterns), 16, dtype=torch.bfloat16)
    alone[:, 7] = patterns
    below_one = alone.clone()
    below_one[:, 3] = 0.9375
    return {
        "sorted": patterns.view(-1, 16),
        "shuffled": shuffled.view(-1, 16),
        "alone": alone,
        "beside 0.9375": below_one[patterns.abs() < 8],
        "subnormals": patterns[patterns.abs() < 2.0**-100].view(-1, 16),
    }


def special_matrices() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(33, 64, generator=generator)
    zero_blocks = normal.clone()
    zero_blocks[::2, 16:48] = 0
    tiny_rows = normal.clone()
    tiny_rows[::3] *= 1e-3
    tiny_blocks = normal.clone()
    tiny_blocks[:, :16] *= 1e-6
    return {
        "zeros": torch.zeros(4, 32).bfloat16(),
        "minus zeros": -torch.zeros(4, 32).bfloat16(),
        "zero blocks": zero_blocks.bfloat16(),
        "rows scaled by 1e-3": tiny_rows.bfloat16(),
        "blocks scaled by 1e-6": tiny_blocks.bfloat16(),
        "fp32 master": normal,
    }


def ties(global_scale: float) -> torch.Tensor:
    """Blocks with every E4M3 mantissa as scale and weights on all E2M1 rounding thresholds."""
    scale = torch.arange(8, 16).repeat_interleave(2)[:, None] * 2.0 ** torch.arange(-3, 5)
    scale = scale.reshape(-1, 1)
    threshold = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    row = torch.cat((threshold, -threshold))
    return (row * scale / global_scale).bfloat16()


def assert_kernels_equal_reference(launch, device, w, global_scale, block_scale) -> None:
    fake = reference.fake_quantize(w, global_scale, block_scale)
    codes, scale = reference.quantize(w, global_scale, block_scale)
    w, on_device = w.to(device), global_scale.to(device)
    assert_same_bits(launch.fake_quantize(w, on_device, block_scale), fake)
    kernel_codes, kernel_scale = launch.quantize(w, on_device, block_scale)
    assert_same_bits(kernel_scale, scale)
    assert_same_bits(kernel_codes, codes)
    for dtype in (torch.bfloat16, torch.float32):
        expected = reference.dequantize(codes, scale, global_scale, dtype)
        assert_same_bits(launch.dequantize(kernel_codes, kernel_scale, on_device, dtype), expected)
        assert_same_bits(expected.bfloat16(), fake)


@pytest.mark.parametrize("block_scale", BLOCK_SCALES)
@pytest.mark.parametrize("shape", [*SHAPES, LARGE], ids=str)
def test_shapes(launch, device, shape, block_scale):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    amax = reference.group_amax([[w]])
    global_scale = reference.global_scale(amax[0], "amax")
    assert_kernels_equal_reference(launch, device, w, global_scale, block_scale)
    assert_same_bits(launch.group_amax([[w.to(device)]])[0], amax[0])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", list(pattern_matrices()))
def test_every_finite_bit_pattern(launch, device, name, policy, monkeypatch):
    if device.type == "cpu":  # the interpreter takes its time by the tile
        monkeypatch.setattr(launch, "TILE_BLOCKS", 4096)
    w = pattern_matrices()[name]
    global_scale = reference.global_scale(reference.amax(w), policy)
    assert_kernels_equal_reference(launch, device, w, global_scale, "max")


@pytest.mark.parametrize("block_scale", BLOCK_SCALES)
@pytest.mark.parametrize("name", list(special_matrices()))
def test_special_blocks(launch, device, name, block_scale):
    w = special_matrices()[name]
    global_scale = reference.global_scale(reference.amax(w), "amax")
    assert_kernels_equal_reference(launch, device, w, global_scale, block_scale)


@pytest.mark.parametrize("block_scale", BLOCK_SCALES)
@pytest.mark.parametrize("global_scale", [1.0, 2.0**11, 2.0**94, 2688 / 0.37, 2688 / 1.9])
def test_ties(launch, device, global_scale, block_scale):
    w = ties(global_scale)
    assert_kernels_equal_reference(launch, device, w, torch.tensor(global_scale), block_scale)


def test_saturates_under_a_stale_global_scale(launch, device):
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    global_scale = reference.global_scale(reference.amax(w) / 1000, "pow2")
    assert_kernels_equal_reference(launch, device, w, global_scale, "max")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("block_scale", BLOCK_SCALES)
def test_not_finite_turns_its_block_into_nan(launch, device, bad, block_scale):
    w = torch.ones(4, 48, dtype=torch.bfloat16)
    w[2, 20] = bad
    for quantizer in (reference, launch):
        on = w.to(device if quantizer is launch else "cpu")
        fake = quantizer.fake_quantize(on, torch.ones((), device=on.device), block_scale)
        codes, scale = quantizer.quantize(on, torch.ones((), device=on.device), block_scale)
        assert fake[2, 16:32].isnan().all() and scale[2, 1].float().isnan()
        assert fake.isnan().sum() == 16 and scale.float().isnan().sum() == 1
        values = quantizer.dequantize(codes, scale, torch.ones((), device=on.device), w.dtype)
        assert torch.equal(values.isnan(), fake.isnan())


def test_not_contiguous(launch, device):
    base = torch.randn(64, 96, generator=torch.Generator().manual_seed(4)).bfloat16()
    for w in (base.t(), base[::2, 16:80], base[:, 1:65], base.view(2, 32, 96).transpose(0, 1)):
        global_scale = reference.global_scale(reference.amax(w), "pow2")
        assert_kernels_equal_reference(launch, device, w, global_scale, "max")
        assert_same_bits(launch.group_amax([[w.to(device)]])[0], reference.amax(w))


@pytest.mark.gpu
def test_quotients_beside_every_rounding_threshold(launch, device):
    """For each BF16 significand and threshold the steps, place by place, that make them meet."""
    w = torch.arange(128, 256) / 128
    threshold = torch.tensor([0.25, 0.75, 1.25, 1.75])
    scale = (threshold[:, None] / w).view(torch.int32)[..., None] + torch.arange(-8, 9)
    scale = scale.to(torch.int32).view(torch.float32)
    blocks = torch.zeros(*scale.shape, 1, 16)
    blocks[..., 0, :4] = w[None, :, None, None] * torch.tensor([1, -1, 2, -2])
    blocks[..., 0, 4] = 6 / scale  # makes the block scale 1.0, so that the step is 1 / scale
    blocks, scale = blocks.bfloat16().flatten(0, 2), scale.flatten()
    assert (reference.quantize(blocks, scale, "max")[1].float() == 1.0).all()
    assert_kernels_equal_reference(launch, device, blocks, scale, "max")


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_sixteen_million_weights(launch, policy):
    """The divisions that `amax` scales need: random quotients meet roundings no table lists."""
    generator = torch.Generator("cuda").manual_seed(6)
    w = torch.randn(4096, 4096, generator=generator, device="cuda").bfloat16()
    for spread in (1.0, 0.02, 3e-5):
        global_scale = reference.global_scale(reference.amax(w * spread), policy)
        expected = reference.quantize(w * spread, global_scale, "max")
        actual = launch.quantize(w * spread, global_scale, "max")
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1].view(torch.uint8), expected[1].view(torch.uint8))


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
    on_device = [[w.to(device) for w in members] for members in groups]
    expected_amax = reference.group_amax(groups)
    for actual, expected in zip(launch.group_amax(on_device), expected_amax, strict=True):
        assert_same_bits(actual, expected)
    right = [reference.global_scale(amax, policy) for amax in expected_amax]
    before = [scale if last is None else torch.full_like(scale, last) for scale in right]
    before[1][2] = right[1][2]
    amax, rounded = reference.measure_and_round(groups, before, policy, block_scale)
    found = launch.measure_and_round(
        on_device, [scale.to(device) for scale in before], policy, block_scale
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
