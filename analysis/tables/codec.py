"""Table of the NVFP4 codec: times of its kernels."""

from pathlib import Path

from pydantic import BaseModel

from analysis.markdown import MarkdownTable
from analysis.tables.goals import verdict
from analysis.tables.record import Record, read_record


class Kernel(BaseModel):
    """A call of experiments/benchmarks/codec.py; times as shares of a copy's."""

    call: str
    median_us: float
    of_copy: float
    goal: float | None


class CodecRecord(Record):
    """Of experiments/benchmarks/codec.py."""

    shape: tuple[int, int]
    copy_tb_per_s: float
    kernels: list[Kernel]


KERNEL_TABLE: MarkdownTable[Kernel] = MarkdownTable(
    {
        "Kernel": lambda kernel: kernel.call,
        "us": lambda kernel: f"{kernel.median_us:.1f}",
        "Of a copy's time": lambda kernel: f"{kernel.of_copy:.2f}",
        "Goal": lambda kernel: (
            f"{kernel.goal:.2f}, {verdict(kernel.of_copy <= kernel.goal)}" if kernel.goal else ""
        ),
    }
)


def codec_sections(folder: Path, machine: str) -> list[str]:
    """Where it was measured, and a row a kernel.

    Raises:
        ValueError: a record is missing or damaged.
    """
    codec = read_record(folder / f"codec_{machine}.json", CodecRecord)
    rows, columns = codec.shape
    origin = (
        f"Measured on: {codec.setup()}; a copy runs at {codec.copy_tb_per_s:.2f} TB/s; BF16 "
        f"matrices of {rows} x {columns}."
    )
    return [origin, KERNEL_TABLE.markdown(codec.kernels)]
