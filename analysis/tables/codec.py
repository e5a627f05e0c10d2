"""Tables of the NVFP4 codec: times of its kernels, errors of its block scales."""

from pathlib import Path

from pydantic import BaseModel, Field

from analysis.markdown import MarkdownTable
from analysis.tables.goals import verdict
from analysis.tables.record import Dated, Record, read_record

ERROR_TITLE = (
    "**Relative RMS error of all quantized weights of SmolLM2-135M** (its file holds most of "
    "them in 4 bits already; normal deviates beside them; commit {commit})"
)


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


class BlockScaleError(BaseModel):
    """Relative RMS errors of one combination of policies."""

    scale: str
    block_scale: str
    of_weights: float = Field(alias="all weights")
    of_normal: float = Field(alias="normal deviates")


class ErrorRecord(Dated):
    """Of experiments/benchmarks/block_scale_error.py; a row a combination of policies."""

    relative_rms_error: list[BlockScaleError]


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
ERROR_TABLE: MarkdownTable[BlockScaleError] = MarkdownTable(
    {
        "Global scale": lambda row: row.scale,
        "Block scale": lambda row: row.block_scale,
        "SmolLM2-135M": lambda row: f"{row.of_weights:.2%}",
        "Normal deviates": lambda row: f"{row.of_normal:.2%}",
    }
)


def codec_sections(folder: Path, machine: str) -> list[str]:
    """Times of the kernels and errors of the block-scale searches.

    Raises:
        ValueError: a record is missing or damaged.
    """
    codec = read_record(folder / f"codec_{machine}.json", CodecRecord)
    rows, columns = codec.shape
    errors = read_record(folder / "block_scale_error.json", ErrorRecord)
    origin = (
        f"Measured on: {codec.setup()}; a copy runs at {codec.copy_tb_per_s:.2f} TB/s; BF16 "
        f"matrices of {rows} x {columns}."
    )
    kernels, errors_text = (
        KERNEL_TABLE.markdown(codec.kernels),
        ERROR_TABLE.markdown(errors.relative_rms_error),
    )
    return [origin, kernels, ERROR_TITLE.format(commit=errors.commit), errors_text]
