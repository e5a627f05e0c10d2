"""What other runs of a recorded study found: replications, and records that it has replaced."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from analysis.claims_table import ClaimsTable
from experiments.runs.manifest import RunManifest
from experiments.study.schema import Study
from experiments.support.json_files import read_model

REPLICATIONS = "replications"  # folder in a record


class Origin(BaseModel, frozen=True, extra="forbid"):
    """What a reader needs to repeat one of its runs."""

    run: str
    started_at: str
    wall_s: float | None
    commit: str | None
    dirty: bool
    cpu: str
    gpus: list[str]
    base: str | None


class Replication(BaseModel, frozen=True, extra="forbid", ser_json_inf_nan="strings"):
    """The claims of one execution of a study, and where its runs come from."""

    study: str
    seeds: tuple[int, ...]
    claims: ClaimsTable
    runs: tuple[Origin, ...]


def replication_of(
    study: Study, claims: ClaimsTable, manifests: Sequence[RunManifest]
) -> Replication:
    """The claims of a study's runs, and where these come from."""
    runs = tuple(map(_origin, manifests))
    return Replication(study=study.study, seeds=study.seeds, claims=claims, runs=runs)


def _origin(manifest: RunManifest) -> Origin:
    git, hardware = manifest.git, manifest.hardware
    return Origin(
        run=manifest.run,
        started_at=manifest.started_at,
        wall_s=manifest.wall_s,
        commit=git and git.commit,
        dirty=git is None or git.dirty,
        cpu=hardware.cpu,
        gpus=hardware.gpus,
        base=manifest.digests.get("base"),
    )


def read_replications(record: Path) -> list[Replication]:
    """Those of a record, by their seeds, the older first."""
    found = [read_model(path, Replication) for path in (record / REPLICATIONS).glob("*.json")]
    return sorted(found, key=lambda it: (it.seeds, it.runs[0].started_at))
