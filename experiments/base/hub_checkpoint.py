"""A published checkpoint as a base checkpoint: links to its files, on this machine or fetched."""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from experiments.study.model_config import read_model_config
from experiments.study.models import HubModel
from experiments.study.schema import ROOT
from experiments.support.hub_errors import explain_download_errors
from qat_core.checkpoint.load import require_whole
from qat_core.checkpoint.shards import Shards
from qat_core.planning.predicted_memory import weight_shapes

FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja")


def link_checkpoint(name: str, source: HubModel, out: Path) -> dict[str, Any]:
    """Links the checkpoint's files into the folder `out`; returns where they are from."""
    folder = _local_folder(name, source) if source.path else _fetched_folder(name, source)
    files = [path for pattern in FILES for path in folder.glob(pattern)]
    for needed in ("config.json", "tokenizer_config.json", "*.safetensors"):
        if not any(fnmatch(path.name, needed) for path in files):
            raise ValueError(f"models.{name}: {folder} has no {needed}; name a whole checkpoint")
    _require_shapes(name, source, folder)
    require_whole(folder)
    read = Shards(folder).files  # others, such as consolidated.safetensors, vLLM would read instead
    out.mkdir(parents=True)
    for path in (it for it in files if it.suffix != ".safetensors" or it.name in read):
        (out / path.name).symlink_to(path.resolve())
    return {"folder": str(folder)}  # a fetched one is named after its commit


def _local_folder(name: str, source: HubModel) -> Path:
    assert source.path is not None
    folder = ROOT / source.path
    if not folder.is_dir():
        raise ValueError(f"models.{name}.path: no folder {source.path}; name the checkpoint's")
    return folder


def _fetched_folder(name: str, source: HubModel) -> Path:
    wanted = f"models.{name}.repo: {source.repo}, revision {source.revision}"
    hint = (
        "try again, correct it, set HF_TOKEN if it is gated, or name a local copy in "
        f"models.{name}.path"
    )
    with explain_download_errors(wanted, hint):
        return Path(
            snapshot_download(
                source.repo,
                revision=source.revision,
                allow_patterns=[*FILES],
                ignore_patterns="*/*",  # the patterns match in subfolders too
            )
        )


def _require_shapes(name: str, source: HubModel, folder: Path) -> None:
    hint = f"name another checkpoint or config in models.{name}"
    expected, found = (
        weight_shapes(read_model_config(path, hint))
        for path in (ROOT / source.config, folder / "config.json")
    )
    if expected != found:
        raise ValueError(
            f"models.{name}.config: {source.config} has other shapes than {folder}/config.json; "
            "name the checkpoint's own"
        )
