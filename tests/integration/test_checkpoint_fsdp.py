"""An FSDP2-sharded model, prepared or not, exports the bytes of the unsharded one."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

from qat_core.checkpoint import export, read_checkpoint
from qat_core.prepare import prepare
from qat_core.recipe import Recipe
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.slow
RECIPE = Recipe.full()


def export_sharded(rank: int, world: int, family: str, folder: str) -> None:
    """One rank: FP32 masters sharded over all, packed from their BF16 values."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world
    )
    mesh = init_device_mesh("cpu", (world,))
    for prepared in (True, False):
        model = tiny_model(family).float()
        if prepared:
            prepare(model, RECIPE)
        _shard(model, mesh)
        export(model, RECIPE, Path(folder) / f"sharded-{prepared}")
        dist.barrier()
    dist.destroy_process_group()


def _shard(model: nn.Module, mesh: dist.device_mesh.DeviceMesh) -> None:
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_sharded_export_equals_unsharded(family: str, tmp_path: Path) -> None:
    export(tiny_model(family), RECIPE, tmp_path / "whole")
    spawn(export_sharded, (2, family, str(tmp_path)), nprocs=2)
    assert list(read_checkpoint(tmp_path / "whole"))
    shards = sorted(path.name for path in (tmp_path / "whole").glob("*.safetensors"))
    for folder in ("sharded-True", "sharded-False"):
        assert list(read_checkpoint(tmp_path / folder))
        for name in shards:
            expected = (tmp_path / "whole" / name).read_bytes()
            assert (tmp_path / folder / name).read_bytes() == expected, name
    assert torch.float32 not in {t.dtype for _, t in _plain(tmp_path / "sharded-True")}


def _plain(folder: Path) -> list[tuple[str, torch.Tensor]]:
    return [(n, w) for n, w in read_checkpoint(folder) if isinstance(w, torch.Tensor)]
