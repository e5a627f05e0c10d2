"""The README's tables of the codec, from experiments/records/benchmarks."""

from pathlib import Path

from pydantic import BaseModel

from analysis.benchmark_tables import Record, markdown_table, read_record


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


class ErrorRecord(BaseModel):
    """Of experiments/benchmarks/block_scale_error.py; a row a combination of policies."""

    relative_rms_error: list[dict[str, str | float]]


def codec_tables(folder: Path, machine: str) -> str:
    """Markdown of the kernels' times and of the block-scale searches' errors.

    Raises:
        ValueError: a record is missing or garbled.
    """
    codec = read_record(folder / f"codec_{machine}.json", CodecRecord)
    rows, columns = codec.shape
    errors = read_record(folder / "block_scale_error.json", ErrorRecord)
    sections = (
        f"Measured on: {' and '.join(codec.hardware.gpus)}, a copy runs at "
        f"{codec.copy_tb_per_s:.2f} TB/s; BF16 matrices of {rows} x {columns}.",
        markdown_table(("Kernel", "us", "Of a copy's time", "Goal"), _kernel_rows(codec)),
        "**Relative RMS error of all quantized weights of SmolLM2-135M** (its file holds most of "
        "them in 4 bits already; normal deviates beside them)",
        markdown_table(
            ("Global scale", "Block scale", "SmolLM2-135M", "Normal deviates"), _error_rows(errors)
        ),
    )
    return "\n\n".join(sections) + "\n"


def _kernel_rows(record: CodecRecord) -> list[tuple[str, ...]]:
    return [
        (k.call, f"{k.median_us:.1f}", f"{k.of_copy:.2f}", f"{k.goal:.2f}" if k.goal else "")
        for k in record.kernels
    ]


def _error_rows(record: ErrorRecord) -> list[tuple[str, ...]]:
    return [
        (
            str(row["scale"]),
            str(row["block_scale"]),
            f"{row['all weights']:.2%}",
            f"{row['normal deviates']:.2%}",
        )
        for row in record.relative_rms_error
    ]
