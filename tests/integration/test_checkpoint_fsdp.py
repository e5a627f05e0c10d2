"""An FSDP2-sharded model exports the bytes of the unsharded one, or fails on all ranks at once."""

import errno
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from qat_core import export
from qat_core.checkpoint import write
from qat_core.checkpoint.read import read_checkpoint
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.long
RECIPE = Recipe.full()


def export_sharded(rank: int, world: int, family: str, folder: str) -> None:
    """One rank: FP32 masters sharded over all, packed from their BF16 values."""
    mesh = _mesh(rank, world, folder)
    for prepared in (True, False):
        model = tiny_model(family).float()
        if prepared:
            prepare(model, RECIPE)
        _shard(model, mesh)
        export(model, RECIPE, Path(folder) / f"sharded-{prepared}")
        dist.barrier()
    dist.destroy_process_group()


def fail_sharded(rank: int, world: int, folder: str) -> None:
    """One rank: exports that only one of the ranks has a reason to refuse."""
    mesh = _mesh(rank, world, folder)
    model = tiny_model("qwen3").float()
    _shard(model, mesh)
    errors = [_error(model, Path(folder, "taken") if rank == 0 else Path(folder, "free"))]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(write, "write_manifest", _no_space)
        errors.append(_error(model, Path(folder, "late")))
        if rank == 0:
            patch.setattr(write, "save_file", _no_space)
        errors.append(_error(model, Path(folder, "early")))
    if rank == 1:
        model.model.layers[1].mlp.up_proj.weight.to_local().detach()[0, 0] = torch.nan
    errors.append(_error(model, Path(folder, "nan")))
    torch.save(errors, Path(folder, f"errors{rank}"))
    dist.destroy_process_group()


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _error(model: nn.Module, folder: Path) -> str:
    try:
        export(model, RECIPE, folder)
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def _mesh(rank: int, world: int, folder: str) -> dist.device_mesh.DeviceMesh:
    store = f"file://{folder}/store{world}"
    timeout = timedelta(seconds=60)  # ends a test whose ranks wait for each other
    dist.init_process_group("gloo", store, timeout, world, rank)
    return init_device_mesh("cpu", (world,))


def _shard(model: nn.Module, mesh: dist.device_mesh.DeviceMesh) -> None:
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_sharded_export_equals_unsharded(family: str, tmp_path: Path) -> None:
    export(tiny_model(family), RECIPE, tmp_path / "whole")
    run_ranks(export_sharded, (2, family, str(tmp_path)), 2)
    assert list(read_checkpoint(tmp_path / "whole"))
    shards = sorted(path.name for path in (tmp_path / "whole").glob("*.safetensors"))
    for folder in ("sharded-True", "sharded-False"):
        assert list(read_checkpoint(tmp_path / folder))
        for name in shards:
            expected = (tmp_path / "whole" / name).read_bytes()
            assert (tmp_path / folder / name).read_bytes() == expected, name
    assert torch.float32 not in {t.dtype for _, t in _plain(tmp_path / "sharded-True")}


def test_a_failure_of_one_rank_ends_all(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    run_ranks(fail_sharded, (2, str(tmp_path)), 2)
    first, second = (torch.load(tmp_path / f"errors{rank}") for rank in range(2))
    exists = f"ValueError: {tmp_path / 'taken'}: exists; choose another name or remove it"
    full = (
        "ValueError: {}: not written: [Errno 28] No space left on device; nothing was left behind"
    )
    unwritten = [full.format(tmp_path / name) for name in ("late", "early")]
    nan = "ValueError: model.layers.1.mlp.up_proj.weight: holds NaN or infinity"
    assert first[:3] == second[:3] == [exists, *unwritten]
    assert first[3] == second[3] and first[3].startswith(nan)
    left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert left == {"taken"}


def _plain(folder: Path) -> list[tuple[str, torch.Tensor]]:
    return [(n, w) for n, w in read_checkpoint(folder) if isinstance(w, torch.Tensor)]
