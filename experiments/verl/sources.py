"""The files that mathematical problems come from: of the hub at a pinned revision, or local."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import hf_hub_download

from experiments.rl.config import TaskConfig
from experiments.rl.tasks import Split
from experiments.runs.provenance import digest_file
from experiments.study.schema import ROOT
from experiments.support.hub_errors import explain_download_errors


class HubFile(NamedTuple):
    """One version of a file of a data set on the Hugging Face Hub; `name` is verl's data_source."""

    name: str
    repo: str
    revision: str
    path: str
    sha256: str


DAPO_MATH = HubFile(
    "math_dapo",  # the name by which verl's own reward knows it
    "BytedTsinghua-SIA/DAPO-Math-17k",
    "65877096c24ffa7abc4e4fa5edb95cf3413a5674",
    "data/dapo-math-17k.parquet",
    "534375d6bb8630d22ab46a56e11f2ffec1d288d8f7d04099bc82d68948705941",
)
AIME_2024 = HubFile(
    "aime-2024",
    "BytedTsinghua-SIA/AIME-2024",
    "aa49075e24ad594b79fdf0bdcefa735c2181be67",
    "data/aime-2024.parquet",
    "12154e38a716d12db5731f9a022ae69a610c4f7d0e0dcc04e902887a686877e7",
)
AIME_2025_I = HubFile(
    "aime-2025",
    "opencompass/AIME2025",
    "a6ad95f611d72cf628a80b58bd0432ef6638f958",
    "aime2025-I.jsonl",
    "b91b3c96f05d9635d2a0692b124ebe023c1ff59cb19c074275e6c4b349d0659e",
)
AIME_2025_II = AIME_2025_I._replace(
    path="aime2025-II.jsonl",
    sha256="16a2dcfbbf9db1b11f8a69a3ba5e4cac73e3641b19a37e2307e9c12240bbed5e",
)
HUB_FILES: dict[Split, list[HubFile]] = {
    "train": [DAPO_MATH],
    "test": [AIME_2024, AIME_2025_I, AIME_2025_II],
}


@dataclass(frozen=True)
class Source:
    """A file on this machine whose checksum is right."""

    name: str  # verl's data_source of its rows
    path: Path
    origin: dict[str, Any]  # for data.json


def locate_sources(task: TaskConfig, split: Split) -> list[Source]:
    """The files of a split: the study's local ones, else the hub's."""
    local: Mapping[Path, str] = task.train_files if split == "train" else task.test_files
    if local:
        return [_local_source(path, sha256, split) for path, sha256 in local.items()]
    return [_hub_source(file, split) for file in HUB_FILES[split]]


def _local_source(path: Path, sha256: str, split: Split) -> Source:
    found, key = ROOT / path, f"task.{split}_files"
    if not found.is_file():
        raise ValueError(f"{path}: no such file; {key} are relative to the repository root")
    _require_sha256(found, sha256, f"take the right file or correct {key}")
    return Source(f"dapo-math/{path.stem}", found, {"file": str(path), "sha256": sha256})


def _hub_source(file: HubFile, split: Split) -> Source:
    hint = f"try again or name a local copy in task.{split}_files, {{path: {file.sha256}}}"
    with explain_download_errors(f"{file.repo}: {file.path}", hint):
        found = Path(
            hf_hub_download(file.repo, file.path, repo_type="dataset", revision=file.revision)
        )
    # the file in the cache is a link, which the client would only make again
    _require_sha256(found, file.sha256, f"remove {found.resolve()} to fetch it again")
    return Source(file.name, found, file._asdict())


def _require_sha256(path: Path, expected: str, hint: str) -> None:
    found = digest_file(path)
    if found != expected:
        raise ValueError(f"{path}: SHA-256 is {found}, not {expected}; {hint}")
