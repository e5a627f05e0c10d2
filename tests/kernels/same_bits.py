"""Options of the codec, and what equal means."""

import torch

POLICIES = ["pow2", "amax"]
BLOCK_SCALES = ["max", "four_over_six", "mse"]


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    as_int = torch.int32 if actual.dtype == torch.float32 else torch.int16
    as_int = torch.uint8 if actual.element_size() == 1 else as_int
    different = actual.cpu().view(as_int) != expected.view(as_int)
    assert not different.any(), f"{different.sum()} of {different.numel()} differ"
