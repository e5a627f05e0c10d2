"""The benchmark that counts which blocks of a weight stream changed."""

from dataclasses import replace

import torch

from experiments.benchmarks.changed_blocks import compare
from qat_core.nvfp4 import global_scale, group_amax, quantize


def test_every_block_that_differs_counts_once() -> None:
    torch.manual_seed(0)
    weight, norm = torch.randn(8, 64).bfloat16(), torch.randn(32).bfloat16()
    packed = quantize(weight, global_scale(group_amax([[weight]])[0]))
    codes, scale = packed.codes.clone(), packed.block_scale.view(torch.uint8).clone()
    codes[0, :2] ^= 1  # two bytes of block 0
    scale[0, 0] ^= 1
    scale[7, 3] ^= 1  # the last block
    changed = replace(packed, codes=codes, block_scale=scale.view(torch.float8_e4m3fn))
    found = compare({"w": packed, "n": norm}, {"w": changed, "n": norm})
    assert found["nvfp4"]["changed_blocks"] == 2 and found["nvfp4"]["blocks"] == 8 * 64 // 16
    assert found["nvfp4"]["touched_weights"] == 1
    assert found["bf16"] == {
        "weights": 1,
        "touched_weights": 0,
        "blocks": 2,
        "changed_blocks": 0,
        "changed_fraction": 0.0,
    }
    assert found["delta_bytes"] == 2 * (9 + 4)
