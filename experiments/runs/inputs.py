"""What runs start from, as the manifests of base checkpoints and of data describe it."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from experiments.rl.config import TaskConfig
from experiments.runs.manifest import MANIFEST
from experiments.runs.provenance import digest_file, digest_json, require_digests
from experiments.study.models import GgufModel, HubModel, Model
from experiments.study.schema import ROOT, Study
from experiments.support.json_files import Parsed, read_model


class BaseManifest(BaseModel):
    """What runs read of it; it also says how the checkpoint was made."""

    model_config = ConfigDict(frozen=True, strict=True)

    weights: dict[str, str] = Field(description="SHA-256 of each file of weights")
    files: dict[str, str] = Field({}, description="SHA-256 of each other file")
    weight_bytes: NonNegativeInt
    settings: str | None = Field(None, description="`base_digest`; older manifests have none")
    longest_prompt_tokens: NonNegativeInt = Field(0, description="0 where the task has files")


def read_base_manifest(base_dir: Path) -> BaseManifest:
    """The manifest of a base checkpoint."""
    return _read(base_dir / MANIFEST, BaseManifest, "base checkpoint")


def base_digest(study: Study, name: str) -> str:
    """What a study says of a base checkpoint."""
    base = study.bases[name]
    model = study.models[base.model]
    described = [
        model.training_config(),
        *([base.seed] if study.own_base else []),
        study.task.model_dump(mode="json"),
        study.device,
        *([study.rl.rollout.max_response_tokens] if _stops_at_an_accuracy(model) else []),
    ]
    config = [] if isinstance(model, GgufModel) else [digest_file(ROOT / model.config)]
    return digest_json(described + config)


def _stops_at_an_accuracy(model: Model) -> bool:
    """Whether answers decide when its pretraining ends; what is cut off is no right one."""
    pretrain = None if isinstance(model, HubModel) else model.pretrain
    return pretrain is not None and pretrain.stop_accuracy is not None


def require_prompts_fit(longest_tokens: int, study: Study) -> None:
    """Refuses prompts that are longer than a study allows: verl would leave them out in silence."""
    allowed = study.rl.rollout.max_prompt_tokens
    if longest_tokens > allowed:
        raise ValueError(
            f"rl.rollout.max_prompt_tokens: {allowed} is less than the {longest_tokens} tokens of "
            "a prompt; raise it"
        )


def check_base(base_dir: Path) -> None:
    """Compares a base checkpoint's files with its manifest."""
    manifest = read_base_manifest(base_dir)
    require_digests(base_dir, manifest.weights | manifest.files)


DATA_MANIFEST = "data.json"


class DataSplit(BaseModel):
    """What it says of a split, as far as runs depend on it."""

    sha256: str


class DataManifest(BaseModel):
    """What programs read of it."""

    model_config = ConfigDict(frozen=True)

    settings: str | None = Field(None, description="`data_digest`; older files have none")
    train: DataSplit
    test: DataSplit


def read_data_manifest(folder: Path) -> DataManifest:
    """The description of a study's data."""
    return _read(folder / DATA_MANIFEST, DataManifest, "data")


def _read(path: Path, kind: type[Parsed], what: str) -> Parsed:
    if not path.is_file():
        raise ValueError(f"{path}: no {what}; make it with `snakemake {path}`")
    return read_model(path, kind)


def check_data(folder: Path) -> None:
    """Compares a study's data with their description."""
    manifest = read_data_manifest(folder)
    digests = {"train.parquet": manifest.train.sha256, "test.parquet": manifest.test.sha256}
    require_digests(folder, digests)


def data_digest(task: TaskConfig) -> str:
    """What a study says of its data."""
    return digest_json(task.model_dump(mode="json"))
