"""Benchmark records: what all of them say, and how they are read."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from experiments.support.json_files import read_model

# labels of packages, and their names in `versions`
VLLM = (("vLLM", "vllm"), ("torch", "torch"))
TRANSFORMERS = (("torch", "torch"), ("transformers", "transformers"))


class Hardware(BaseModel):
    """What a record was measured on."""

    gpus: list[str]

    @property
    def name(self) -> str:
        """The GPUs, in words."""
        kinds = Counter(self.gpus).items()
        return " and ".join(gpu if count == 1 else f"{count} {gpu}" for gpu, count in kinds)


class Commit(BaseModel):
    """The code of a measurement."""

    commit: str | None
    dirty: bool


class Dated(BaseModel):
    """A record that may name its commit; the first ones did not."""

    git: Commit | None = None

    @property
    def commit(self) -> str:
        """The commit, and whether it had been changed."""
        if self.git is None or self.git.commit is None:
            return "not recorded"
        changed = " with uncommitted changes" if self.git.dirty else ""
        return f"{self.git.commit[:7]}{changed}"


class Record(Dated):
    """What all records of measurements say."""

    hardware: Hardware
    versions: dict[str, str | None]

    def setup(self, *packages: tuple[str, str]) -> str:
        """Hardware if named, versions and commit; packages as labels and names in `versions`."""
        named = (f"{label} {self.versions[name]}" for label, name in packages)
        return ", ".join(filter(None, [self.hardware.name, *named, f"commit {self.commit}"]))


class EngineRecord(Record):
    """Of vLLM's engines. The first records do not say that torch.compile was off."""

    torch_compile: bool = False

    @property
    def compiled(self) -> str:
        """Whether vLLM's torch.compile was on, which is its default."""
        return "on" if self.torch_compile else "off"


RecordType = TypeVar("RecordType", bound=BaseModel)


def read_record(path: Path, kind: type[RecordType]) -> RecordType:
    """A benchmark's record; ValueError names a missing or damaged file."""
    return read_model(path, kind, "run the benchmark of that name")


def read_parts(folder: Path, name: str, machine: str, kind: type[RecordType]) -> list[RecordType]:
    """`NAME_MACHINE.json`, which must be there, and the others of its benchmark there."""
    others = sorted(folder.glob(f"{name}_*_{machine}.json"))
    return [read_record(path, kind) for path in (folder / f"{name}_{machine}.json", *others)]


def setups(records: Iterable[Record], packages: Sequence[tuple[str, str]] = VLLM) -> str:
    """What records were measured on, each setup once; packages are as `Record.setup` has them."""
    names = {record.setup(*packages) for record in records}
    return f"Measured on: {'; '.join(sorted(names))}."
