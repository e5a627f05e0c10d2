"""What leaves a sharded model: the stream's and the export's bytes are those of one device."""

import errno
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from qat_core import export
from qat_core.checkpoint import write
from qat_core.checkpoint.read import read_checkpoint
from qat_core.nvfp4 import PackedTensor
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare
from qat_core.weights.stream import weight_stream
from qat_core.weights.transfer import PLAN_NAME, Assembler, transfer_tensors
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


def _shard(model: Any, mesh: dist.device_mesh.DeviceMesh | None = None) -> None:
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


STREAMED = [
    ("qwen3", Recipe()),
    ("qwen3-tied", Recipe()),
    ("qwen3-moe", Recipe()),
    ("qwen3-moe", Recipe(scale_policy="amax", block_scale_method="four_over_six")),
    ("qwen3-moe", Recipe.ffn()),
]
# the last is finite in FP32 and rounds to infinity in BF16
BAD_VALUES = (float("nan"), float("inf"), 3.4e38)
BAD_WEIGHTS = (
    ("qwen3", "model.layers.1.mlp.up_proj.weight"),
    ("qwen3", "lm_head.weight"),
    ("qwen3-moe", "model.layers.1.mlp.experts.gate_up_proj"),
)


def stream_sharded(rank: int, world: int, folder: str) -> None:
    """Streams sharded models and compares them with the same models on one device."""
    store = f"file://{folder}/store{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    found = {
        (family, str(recipe), trained): _differing(family, recipe, trained)
        for family, recipe in STREAMED
        for trained in (True, False)
    }
    if rank == 0:
        torch.save(found, Path(folder) / f"world{world}.pt")
    refusals = [_refusal(*weight, bad) for weight in BAD_WEIGHTS for bad in BAD_VALUES]
    torch.save(refusals, Path(folder) / f"refusals{rank}.pt")
    dist.destroy_process_group()


def _differing(family: str, recipe: Recipe, trained: bool) -> list[str]:
    """Names of weights that differ, after the transfer, in buckets of three tensors."""
    model = tiny_model(family).float()
    checked = prepare(model, recipe) if trained else plan(model, recipe)
    whole = tiny_model(family)
    expected = dict(weight_stream(whole, plan(whole, recipe), recipe))
    _shard(model)
    stream = weight_stream(model, checked, recipe, torch.device("cpu"))
    tensors = list(transfer_tensors(checked, stream))
    assert tensors.pop(0)[0] == PLAN_NAME
    assembler = Assembler()
    buckets = [tensors[start : start + 3] for start in range(0, len(tensors), 3)]
    received = [weight for bucket in buckets for weight in assembler.take(bucket)]
    assembler.require_complete()
    assert sorted(name for name, _ in received) == sorted(expected)
    return [name for name, weight in received if not _equal(weight, expected[name])]


def _refusal(family: str, name: str, bad: float) -> str:
    """The error of a weight of which one value on the second rank is not finite."""
    model = tiny_model(family).float()
    _shard(model)
    weight: Any = model.get_parameter(name)
    if dist.get_rank() == 1:
        weight.to_local().detach().view(-1)[5] = bad
    checked = plan(model, Recipe())
    try:
        next(weight_stream(model, checked, Recipe(), torch.device("cpu")))
    except ValueError as error:
        return str(error)
    return "accepted"


def _equal(first: torch.Tensor | PackedTensor, second: torch.Tensor | PackedTensor) -> bool:
    if isinstance(first, PackedTensor) and isinstance(second, PackedTensor):
        return all(
            torch.equal(getattr(first, part).float(), getattr(second, part).float())
            for part in ("codes", "block_scale", "global_scale")
        )
    return type(first) is type(second) and torch.equal(first, second)


@pytest.mark.parametrize("world", [1, 4], ids=["1-rank", "4-ranks"])
def test_sharded_equals_one_device(world: int, tmp_path: Path) -> None:
    # 6 experts and 64 rows: over four ranks one has no expert at all
    run_ranks(stream_sharded, (world, str(tmp_path)), world)
    found = torch.load(tmp_path / f"world{world}.pt")
    assert len(found) == 2 * len(STREAMED)
    assert {case: names for case, names in found.items() if names} == {}
    if world > 1:
        refused = [torch.load(tmp_path / f"refusals{rank}.pt") for rank in range(world)]
        assert all(errors == refused[0] for errors in refused)
        names = [name for _, name in BAD_WEIGHTS for _ in range(3)]
        for name, error in zip(names, refused[0], strict=True):
            assert error.startswith(f"{name}: holds NaN or infinity")
