import pytest
import torch

from qat_core.nvfp4 import dequantize, dequantize_into, global_scale, group_amax, quantize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(6, 32), (3, 4, 48), (0, 16)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_equals_dequantize(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")
    w = torch.randn(shape, device=device)
    packed = quantize(w, global_scale(group_amax([[w]])[0]))
    out = torch.full(shape, torch.nan, dtype=dtype, device=device)
    dequantize_into(packed, out)
    assert torch.equal(out, dequantize(packed, dtype))


def test_refuses_other_shapes() -> None:
    w = torch.randn(4, 32)
    packed = quantize(w, global_scale(group_amax([[w]])[0]))
    with pytest.raises(ValueError, match=r"out: needs contiguous \(4, 32\)"):
        dequantize_into(packed, torch.empty(32, 4).t())
