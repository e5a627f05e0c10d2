import pytest
import torch

from qat_core.nvfp4 import (
    PackedTensor,
    dequantize_into,
    global_scale,
    group_amax,
    quantize,
    reference,
)

# every code once, in order; both zeros read as +0.0
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES = torch.tensor([*MAGNITUDES, 0.0, *(-x for x in MAGNITUDES[1:])])
CODES = torch.tensor([low | low + 1 << 4 for low in range(0, 16, 2)], dtype=torch.uint8)

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


@DTYPES
def test_writes_what_the_bytes_say_and_nothing_beside(dtype: torch.dtype) -> None:
    block_scale = torch.tensor([[[1.0, 448.0]], [[0.015625, 13.0]]])  # 2 experts, 1 row, 2 blocks
    divisor = torch.tensor([4.0, 3.0])  # thirds are exact in neither dtype
    packed = PackedTensor(CODES.repeat(2, 1, 2), block_scale.to(torch.float8_e4m3fn), divisor)
    memory = torch.full((4, 1, 32), torch.nan, dtype=dtype)
    dequantize_into(packed, memory[1:3])
    expected = VALUES * (block_scale / divisor[:, None, None])[..., None]
    assert torch.equal(bits(memory[1:3]), bits(expected.flatten(-2).to(dtype)))
    assert memory[[0, 3]].isnan().all()


@DTYPES
@pytest.mark.parametrize("shape", [(6, 32), (3, 4, 48), (0, 16)], ids=str)
@pytest.mark.gpu
def test_kernel_writes_what_the_reference_says(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed = quantize(w, global_scale(group_amax([[w]])[0], "amax"))
    out = torch.full(shape, torch.nan, dtype=dtype, device="cuda")
    parts = packed.codes, packed.block_scale, packed.global_scale
    dequantize_into(PackedTensor(*(part.cuda() for part in parts)), out)
    expected = reference.dequantize(*parts, dtype)
    assert torch.equal(bits(out.cpu()), bits(expected))


def test_refuses_other_shapes() -> None:
    w = torch.randn(4, 32)
    packed = quantize(w, global_scale(group_amax([[w]])[0]))
    with pytest.raises(ValueError, match=r"out: needs contiguous \(4, 32\)"):
        dequantize_into(packed, torch.empty(32, 4).t())
