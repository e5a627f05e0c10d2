"""The public functions of the codec: what they refuse and return, torch.compile, shards."""

from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes
from torch.utils._python_dispatch import TorchDispatchMode

from qat_core.nvfp4 import (
    PackedTensor,
    dequantize,
    dequantize_into,
    fake_quantize,
    global_scale,
    group_amax,
    pack_shards,
    quantize,
    quantize_all,
    require_finite,
    shard_layout,
    unpack_shards,
)

ONE = torch.ones(())


@pytest.mark.parametrize(
    ("w", "scale", "message"),
    [
        (torch.zeros(2, 16, dtype=torch.float16), ONE, "gate: needs bfloat16 or float32"),
        (torch.zeros(2, 24), ONE, "gate: needs shape .* K a multiple of 16, got \\(2, 24\\)"),
        (torch.zeros(16), ONE, "gate: needs shape"),
        (torch.zeros(3, 2, 16), ONE, "gate: its global scale needs to be float32 \\(3,\\)"),
        (torch.zeros(2, 16), ONE.double(), "gate: its global scale needs to be float32"),
        (torch.zeros(2, 16), ONE.to("meta"), "gate is on cpu, its global scale on meta"),
    ],
    ids=["dtype", "columns", "1-D", "scale shape", "scale dtype", "device"],
)
@pytest.mark.parametrize("function", [fake_quantize, quantize])
def test_refusals_name_the_weight(function, w, scale, message):
    with pytest.raises(ValueError, match=message):
        function(w, scale, name="gate")


REFUSALS = {
    "block scale": (
        lambda: fake_quantize(torch.zeros(2, 16), ONE, "best"),
        "block scale method 'best': use",
    ),
    "policy": (lambda: global_scale(ONE, "pow3"), "scale policy 'pow3': use one of pow2, amax"),
    "empty group": (lambda: group_amax([[torch.zeros(2, 16)], []]), "groups\\[1\\] is empty"),
    "group shapes": (
        lambda: group_amax([[torch.zeros(2, 16), torch.zeros(3, 2, 16)]]),
        "groups\\[0\\]: leading dimensions differ",
    ),
    "amax devices": (
        lambda: group_amax([[torch.zeros(2, 16)] * 2, [torch.zeros(2, 16, device="meta")]]),
        "groups\\[0\\]\\[0\\] is on cpu, groups\\[1\\]\\[0\\] on meta",
    ),
    "quantize devices": (
        lambda: quantize_all(
            [torch.zeros(2, 16), torch.zeros(2, 16, device="meta")],
            [ONE, ONE.to("meta")],
            names=["q_proj", "k_proj"],
        ),
        "q_proj is on cpu, k_proj on meta",
    ),
    "output dtype": (
        lambda: dequantize(quantize(torch.zeros(2, 16), ONE), torch.float16),
        "dtype: needs bfloat16 or float32",
    ),
    "output shape": (
        lambda: dequantize_into(quantize(torch.zeros(4, 32), ONE), torch.empty(32, 4).t()),
        "out: needs contiguous \\(4, 32\\)",
    ),
    "shard": (
        lambda: pack_shards(
            [torch.zeros(4, 24)], [ONE], [shard_layout(torch.Size((4, 24)), 4)], names=["layers.0"]
        ),
        "layers\\.0: needs shape \\(\\.\\.\\., N, K\\)",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# the last is finite in FP32 and rounds to infinity in BF16
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3.4e38], ids=str)
def test_require_finite_names_the_weight(bad):
    weights = {
        "q_proj": torch.ones(2, 16),
        "k_proj": torch.ones(4, 16),
        "experts": torch.ones(3, 2, 16),
    }
    require_finite(amax_of(weights), list(weights))
    weights["experts"][2, 1, 5] = bad
    with pytest.raises(ValueError, match="experts: holds NaN or infinity"):
        require_finite(amax_of(weights), list(weights))
    weights["k_proj"][0, 0] = bad
    with pytest.raises(ValueError, match="k_proj: holds NaN or infinity"):
        require_finite(amax_of(weights), list(weights))


def amax_of(weights):
    return group_amax([[w] for w in weights.values()])


def test_group_amax_is_taken_over_members_after_rounding_to_bf16():
    low, high = torch.full((2, 16), 0.5), torch.full((4, 16), -1.001)
    experts = torch.stack((low, 3 * low))
    amax = group_amax([[low, high], [experts, experts / 2]])
    assert amax[0].shape == () and amax[0] == torch.tensor(1.001).bfloat16()
    assert amax[1].tolist() == [0.5, 1.5]
    assert group_amax([]) == []


@pytest.mark.parametrize("lead", [(), (5,), (2, 3)], ids=str)
def test_packed_tensor_has_the_logical_shape_and_its_bytes(lead):
    packed = quantize(torch.randn(*lead, 8, 32), torch.ones(lead))
    matrices = torch.Size(lead).numel()
    assert isinstance(packed, PackedTensor) and packed.shape == (*lead, 8, 32)
    assert packed.codes.shape == (*lead, 8, 16) and packed.block_scale.shape == (*lead, 8, 2)
    assert packed.nbytes == matrices * (8 * 32 * 9 // 16 + 4)
    assert dequantize(packed).shape == packed.shape


def test_each_matrix_of_a_stack_has_its_own_global_scale():
    w = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    w *= torch.tensor([1.0, 1e-3, 40.0]).bfloat16()[:, None, None]
    scales = global_scale(group_amax([[w]])[0])
    assert len(set(scales.tolist())) == 3
    one_by_one = [fake_quantize(w[i], scales[i]) for i in range(3)]
    assert torch.equal(fake_quantize(w, scales), torch.stack(one_by_one))


def test_fp32_is_rounded_to_bf16_first():
    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    scale = global_scale(group_amax([[w]])[0])
    assert torch.equal(fake_quantize(w, scale), fake_quantize(w.bfloat16(), scale))


def test_inputs_are_left_as_they_were():
    w = torch.randn(16, 64).bfloat16()
    before, scale = w.clone(), torch.tensor(2.0**9)
    fake_quantize(w, scale, "mse")
    quantize(w, scale, "four_over_six")
    assert torch.equal(w, before) and scale == 2.0**9


def test_results_carry_no_gradient():
    w = torch.randn(16, 64, requires_grad=True)
    assert not fake_quantize(w, torch.tensor(2.0**9)).requires_grad


class Seen(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("fake_quantize", lambda w, scale: fake_quantize(w, scale)),
        ("quantize", lambda w, scale: quantize(w, scale).codes),
        ("dequantize", lambda w, scale: dequantize(quantize(w, scale))),
    ],
)
def test_a_mode_sees_one_operator_that_gives_the_same_bits(name, call):
    w, scale = torch.randn(16, 64).bfloat16(), torch.tensor(2.0**9)
    with Seen() as seen:
        traced = call(w, scale)
    assert f"nvfp4::{name}" in seen.names and "aten::abs" not in seen.names
    assert torch.equal(traced, call(w, scale))


def test_weights_of_the_meta_device_have_shapes():
    w, scale = torch.empty(3, 16, 64, device="meta"), torch.empty(3, device="meta")
    assert fake_quantize(w, scale).shape == dequantize(quantize(w, scale)).shape == w.shape


def test_compiles_whole():
    w = torch.randn(16, 64).bfloat16()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def round_trip(w, scale):
        packed = quantize(w, scale)
        return fake_quantize(w, scale) * 2, dequantize(packed)

    scale = torch.tensor(2.0**9)
    doubled, unpacked = round_trip(w, scale)
    assert torch.equal(doubled, fake_quantize(w, scale) * 2)
    assert torch.equal(unpacked, fake_quantize(w, scale))


# every code once, in order; both zeros read as +0.0
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES = torch.tensor([*MAGNITUDES, 0.0, *(-x for x in MAGNITUDES[1:])])
CODES = torch.tensor([low | low + 1 << 4 for low in range(0, 16, 2)], dtype=torch.uint8)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_writes_what_the_bytes_say_and_nothing_beside(dtype: torch.dtype) -> None:
    block_scale = torch.tensor([[[1.0, 448.0]], [[0.015625, 13.0]]])  # 2 experts, 1 row, 2 blocks
    divisor = torch.tensor([4.0, 3.0])  # thirds are exact in neither dtype
    packed = PackedTensor(CODES.repeat(2, 1, 2), block_scale.to(torch.float8_e4m3fn), divisor)
    memory = torch.full((4, 1, 32), torch.nan, dtype=dtype)
    dequantize_into(packed, memory[1:3])
    expected = VALUES * (block_scale / divisor[:, None, None])[..., None]
    assert torch.equal(bits(memory[1:3]), bits(expected.flatten(-2).to(dtype)))
    assert memory[[0, 3]].isnan().all()


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
