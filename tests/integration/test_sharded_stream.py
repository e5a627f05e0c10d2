"""The weight stream of a sharded model: the very bytes that one device would send."""

from pathlib import Path

import pytest
import torch

from tests.integration import sharded_stream_ranks
from tests.ranks import run_ranks

pytestmark = pytest.mark.long


@pytest.mark.parametrize("world", [1, 4], ids=["1-rank", "4-ranks"])
def test_sharded_equals_one_device(world: int, tmp_path: Path) -> None:
    # 6 experts and 64 rows: over four ranks one has no expert at all
    run_ranks(sharded_stream_ranks.run, (world, str(tmp_path)), world)
    found = torch.load(tmp_path / f"world{world}.pt")
    assert len(found) == 18
    assert {case: names for case, names in found.items() if names} == {}
    if world > 1:
        refused = [torch.load(tmp_path / f"refusals{rank}.pt") for rank in range(world)]
        assert all(errors == refused[0] for errors in refused)
        names = [n for n in sharded_stream_ranks.BAD_WEIGHTS.values() for _ in range(3)]
        for name, error in zip(names, refused[0], strict=True):
            assert error.startswith(f"{name}: holds NaN or infinity")
