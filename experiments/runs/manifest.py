"""The manifest of a run: everything that a reader needs to trust or repeat its numbers."""

from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from experiments.runs.record import Record, file_of, record_of
from experiments.study.arms import ArmName
from experiments.study.schema import STUDY_NAME_PATTERN, Run
from experiments.support.json_files import Json, check_model, read_json, write_json

MANIFEST = "manifest.json"


def _check_time(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("has no time zone")
    return text


Digests = dict[str, str]
IsoTime = Annotated[str, AfterValidator(_check_time)]


class Section(BaseModel):
    """Part of a manifest: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class WeightMemory(Section):
    """Weights of one run in GiB; packed is None where the arm packs nothing."""

    predicted_bf16_gib: PositiveFloat
    predicted_packed_gib: PositiveFloat | None = None
    measured_bf16_gib: PositiveFloat | None = Field(None, description="None until the run's end")
    measured_packed_gib: PositiveFloat | None = None
    reported_gib: PositiveFloat | None = Field(
        None, description="vLLM's own figure, with its caches, workspaces and allocator's gaps"
    )

    @property
    def measured_gib(self) -> float:
        """What the rollout weights of a finished run take: packed, or BF16 if nothing is."""
        assert self.measured_bf16_gib is not None, "of a finished run alone"
        packed = self.measured_packed_gib
        return self.measured_bf16_gib if packed is None else packed

    @property
    def predicted_gib(self) -> float:
        """The prediction of `measured_gib`."""
        if self.measured_packed_gib is None:
            return self.predicted_bf16_gib
        assert self.predicted_packed_gib is not None, "what is packed has a prediction"
        return self.predicted_packed_gib


class GitState(Section):
    """The code's commit and what was changed since."""

    commit: str | None
    dirty: bool
    diff_sha256: str


class Hardware(Section):
    """The machine, and its GPUs where the run used them."""

    cpu: str
    cores: PositiveInt
    memory_gib: PositiveFloat
    gpus: list[str]


class TrainingResult(Section):
    """What a trainer reports at the end of a run."""

    measured_bf16_gib: PositiveFloat  # BF16 weights
    # weights as the rollout engine holds them; None if none is packed
    measured_packed_gib: PositiveFloat | None
    # of every weight, whether it is trained, sent and served in NVFP4
    coverage: list[dict[str, Any]] | None
    # weights as vLLM itself reports them, which is more than it holds
    reported_gib: PositiveFloat | None = None
    reason: str | None = None  # why the run stopped before its last step, or None


class RunManifest(Section):
    """The manifest of one attempt at a run; the last attempt's is the run's own."""

    run: str
    study: Annotated[str, Field(pattern=STUDY_NAME_PATTERN)]
    model: str
    arm: ArmName
    seed: NonNegativeInt
    cell: str | None = Field(None, description="of a study that is a grid")
    status: Literal["running", "finished", "failed"]
    reason: str | None = Field(description="why it failed, or stopped before its last step")
    started_at: IsoTime = Field(description="of the first attempt that this one continues")
    attempt_started_at: IsoTime
    wall_s: NonNegativeFloat | None = Field(description="of this attempt")
    attempt: PositiveInt
    command: str
    config: dict[str, Any] = Field(description="Study.training_config of the run")
    git: GitState | None
    digests: Digests
    versions: dict[str, str | None]
    hardware: Hardware
    environment: dict[str, str] = Field({}, description="switches of trainer and engine in it")
    protocol_sha256: str | None = Field(None, description="of the study's protocol, if it has one")
    judging_sha256: str | None = Field(
        None, description="of how the study was to be judged when it started; older runs lack it"
    )
    seeds: dict[str, int]
    memory: WeightMemory
    coverage: list[dict[str, Any]] | None

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        expected = Run(self.model, self.arm, self.seed, self.cell).id
        if self.run != expected:
            raise ValueError(f"run is {self.run!r}, model, arm, cell and seed make {expected!r}")
        if self.seeds.get("run", self.seed) != self.seed:
            raise ValueError(f"seeds.run: {self.seeds['run']}, but seed is {self.seed}")
        rl = self.config.get("rl")
        if not isinstance(rl, dict) or type(rl.get("steps")) is not int or rl["steps"] < 1:
            raise ValueError("config.rl.steps: not a whole number of 1 or more")
        if self.status == "finished" and self.memory.measured_bf16_gib is None:
            raise ValueError("memory.measured_bf16_gib: missing in a finished run")
        if (self.memory.measured_packed_gib is None) < (self.memory.predicted_packed_gib is None):
            raise ValueError("memory.predicted_packed_gib: missing, but there is a measured one")
        return self

    @property
    def was_stopped(self) -> bool:
        """Whether a finished run did fewer steps than planned, for the reason it gives."""
        return self.status == "finished" and self.reason is not None

    @property
    def planned_steps(self) -> int | None:
        """How many steps a finished run must have; None if it was stopped before."""
        return None if self.was_stopped else int(self.config["rl"]["steps"])

    def finished(self, result: TrainingResult) -> Self:
        """This manifest after the run has reached its end."""
        measured = result.model_dump(
            include={"measured_bf16_gib", "measured_packed_gib", "reported_gib"}
        )
        return self.model_copy(
            update={
                "status": "finished",
                "reason": result.reason,
                "coverage": result.coverage,
                "memory": self.memory.model_copy(update=measured),
            }
        )

    def failed(self, reason: str) -> Self:
        """This manifest after the attempt has failed."""
        return self.model_copy(update={"status": "failed", "reason": reason})

    def write(self, folder: Path) -> None:
        """Replaces the manifest in a folder."""
        write_json(folder / MANIFEST, self.model_dump(mode="json"))


def read_manifest_json(folder: Path, hint: str) -> Json:
    """As `read_manifest`, but what it says is not checked."""
    record = record_of(folder)
    return record.manifest(folder.name) if record else read_json(folder / MANIFEST, hint)


def read_manifest(folder: Path, hint: str) -> RunManifest:
    """The manifest of a run, of results or of a record, or of an attempt."""
    record = record_of(folder)
    if record:
        return _recorded_manifest(record, folder, hint)
    return check_model(
        read_manifest_json(folder, hint), file_of(folder, MANIFEST), RunManifest, hint
    )


@lru_cache(maxsize=1000)  # every claim, table and figure asks for it
def _recorded_manifest(record: Record, folder: Path, hint: str) -> RunManifest:
    where = file_of(folder, MANIFEST)
    return check_model(record.manifest(folder.name), where, RunManifest, hint)
