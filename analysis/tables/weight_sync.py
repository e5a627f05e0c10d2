"""Tables of a weight sync's parts: what a profile of verl shows, and packing from the host."""

from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from analysis.markdown import MarkdownTable
from analysis.tables.record import Record, read_record
from analysis.tables.verl import Spread, goes_through_reload

# in the order of their columns
PROFILES = ("sync_profile", "sync_profile_in_place", "sync_profile_30b")
PROFILE_TITLE = "**Parts of verl's weight sync, seconds in the process that trains**"
PROFILE_NOTE = (
    "Medians over the syncs of one run, in brackets from least to most. While memory is freed, "
    "vLLM's workers wait; after a step that saved a checkpoint or compiled, there is less to free. "
    "Global scales: measuring them, and waiting for weights that are still being copied. "
    "In place: past vLLM's reload, as by default. Qwen3-30B-A3B ran on four GPUs, of which the "
    "first rank was profiled: it packs its shards, gathers those of the others packed, and sends "
    "all of them to its own engine."
)
STREAM_TITLE = "**Weights on the host, packed on the GPU**"
STREAM_NOTE = (
    "Median of five, pinned memory, FSDP2 on one rank. Copy: the weights to the GPU and nothing "
    "else. Equal bits: with the stream of the same weights that lie on the GPU."
)


class Profile(Record):
    """Of experiments/benchmarks/sync_profile.py."""

    model: str
    arm: str
    syncs: int
    parts_s: dict[str, Spread]
    environment: dict[str, str]

    @property
    def name(self) -> str:
        """What was profiled, for the head of a column."""
        commit = self.git.commit if self.git else None
        way = "reload" if goes_through_reload(commit, self.environment) else "in place"
        return f"{self.model}, {self.arm}, {way}, {self.syncs} syncs, commit {self.commit}"


class Stack(BaseModel):
    """Layers of a shape whose weights lie on the host; quartiles of seconds."""

    shape: str
    layers: int
    weights_gib: float
    tensors: int
    equal_bits: bool
    copy_s: tuple[float, float, float]
    stream_s: tuple[float, float, float]


class StreamRecord(Record):
    """Of experiments/benchmarks/offloaded_stream.py."""

    stacks: list[Stack]


class Part(NamedTuple):
    """A part of the sync, in each profile."""

    name: str
    seconds: tuple[Spread, ...]


STREAM_TABLE: MarkdownTable[Stack] = MarkdownTable(
    {
        "Shape": lambda stack: stack.shape,
        "Layers": lambda stack: str(stack.layers),
        "Weights, GiB": lambda stack: f"{stack.weights_gib:.1f}",
        "Copy, s": lambda stack: f"{stack.copy_s[1]:.3f}",
        "Packed stream, s": lambda stack: f"{stack.stream_s[1]:.3f}",
        "of the copy's time": lambda stack: f"{stack.stream_s[1] / stack.copy_s[1]:.2f}x",
        "Tensors of equal bits": lambda stack: (
            f"{'all' if stack.equal_bits else 'not all'} of {stack.tensors}"
        ),
    }
)


def weight_sync_sections(folder: Path, machine: str) -> list[str]:
    """Both tables.

    Raises:
        ValueError: a record is missing or damaged.
    """
    profiles = [read_record(folder / f"{name}_{machine}.json", Profile) for name in PROFILES]
    streams = read_record(folder / f"offloaded_stream_{machine}.json", StreamRecord)
    packages = (("torch", "torch"), ("verl", "verl"))
    return [
        PROFILE_TITLE,
        _profile_table(profiles).markdown(
            Part(name, tuple(profile.parts_s[name] for profile in profiles))
            for name in profiles[0].parts_s
        ),
        f"{PROFILE_NOTE} Measured on: {profiles[-1].setup(*packages)}.",
        STREAM_TITLE,
        STREAM_TABLE.markdown(streams.stacks),
        f"{STREAM_NOTE} Measured on: {streams.setup(packages[0])}.",
    ]


def _profile_table(profiles: list[Profile]) -> MarkdownTable[Part]:
    columns = {
        profile.name: lambda part, i=i: _show(part.seconds[i]) for i, profile in enumerate(profiles)
    }
    return MarkdownTable({"Part": lambda part: part.name} | columns)


def _show(seconds: Spread) -> str:
    return f"{seconds.median:.2f} ({seconds.low:.2f} to {seconds.high:.2f})"
