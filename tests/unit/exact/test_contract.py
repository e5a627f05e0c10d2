"""The contract between trainer and engine."""

import pytest

from qat_core.exact.contract import ALIGNMENT, from_tensor, require_kept, to_tensor

CONTRACT = {"vllm": "0.24.0", "norm": "ours"}


def test_a_contract_travels_as_bytes_that_keep_tensors_aligned() -> None:
    tensor = to_tensor(CONTRACT)
    assert tensor.nbytes % ALIGNMENT == 0
    assert from_tensor(tensor) == CONTRACT


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (CONTRACT | {"norm": "vLLM's"}, "norm: the trainer needs ours, vLLM has vLLM's"),
        ({"vllm": "0.24.0"}, "norm: the trainer needs ours, vLLM has None"),
        (CONTRACT | {"more": "1"}, "more: the trainer needs None, vLLM has 1"),
    ],
)
def test_a_difference_is_named(found: dict[str, str], named: str) -> None:
    require_kept(CONTRACT, dict(CONTRACT))
    with pytest.raises(ValueError, match=named):
        require_kept(CONTRACT, found)
