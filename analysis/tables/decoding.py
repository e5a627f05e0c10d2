"""Table of where the time of a decoding step of vLLM goes, by what its kernels do."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from analysis.markdown import MarkdownTable
from analysis.tables.engines import engine_name
from analysis.tables.record import Record, read_record, setups
from experiments.benchmarks.engines import read_engine

TITLE = "**A decoding step by what the GPU does, milliseconds**"
NOTE = (
    "Step: without a profiler, median and quartiles of three. Kernels: their sum under a profiler, "
    "and then what they do. In brackets: BF16's over it. BF16 products: linear layers where they "
    "are not packed, the router and the output layer. Experts: their products in either precision. "
    "Small: norms, activations, rotary embedding, routing and sums over experts. Sampling: the "
    "next token, its log-prob, and the rest. Prefill cancels. Weights and prompts are random."
)
SHAPE = re.compile(r"^void humming<MmaOpClass, Shape<0u, (\d+)u, (\d+)u>")  # of the weight, [N, K]
# the first that is found in a kernel's name; Humming's are told apart by the weight's shape
PARTS = {
    r"fused_moe_kernel|moe_wna16": "Experts",
    r"marlin::Marlin|^void humming<": "Packed linear layers",
    r"flash": "Attention",
    r"nvjet|cublas|gemm": "BF16 products",
    r"rms_norm|act_and_mul|rotary|vllm::moe|moe_fused_mul_sum|reduce_kernel(?!.*ArgMax)": "Small",
    r"": "Sampling",
}


class Step(BaseModel):
    """A step: quartiles of its time, and of each kernel microseconds and calls in it.

    `sequences_in_kv_cache`: how many the KV cache holds at once; records of older code lack it.
    """

    step_ms: tuple[float, float, float]
    sequences_in_kv_cache: int | None = None
    kernels_us_calls: dict[str, tuple[float, float]]

    @property
    def in_step_ms(self) -> Mapping[str, float]:
        """By kernel; records of older code also name kernels of the prefill, with no calls."""
        return {name: us / 1e3 for name, (us, calls) in self.kernels_us_calls.items() if calls}

    @property
    def kernels_ms(self) -> float:
        """The sum of all kernels."""
        return sum(self.in_step_ms.values())


class DecodeRecord(Record):
    """Of experiments/benchmarks/decode_profile.py: steps by engine and sequences at once."""

    engines: dict[str, dict[str, Step]]


class Row(NamedTuple):
    """An engine's step, its kernels' time by part, and BF16's step of the same run, if another."""

    engine: str
    commit: str
    sequences: str
    step: Step
    parts_ms: Mapping[str, float]
    floor: Step | None

    @property
    def time(self) -> str:
        """Median and quartiles, BF16's median over it, and if not all sequences ran at once."""
        low, median, high = self.step.step_ms
        ratio = "" if self.floor is None else f" ({self.floor.step_ms[1] / median:.2f}x)"
        held = self.step.sequences_in_kv_cache
        waits = "" if held is None or held >= int(self.sequences) else f"; {held} at once"
        return f"{median:.2f}{ratio}<br><sub>{low:.2f} to {high:.2f}{waits}</sub>"

    @property
    def kernels(self) -> str:
        """Their sum, and BF16's over it."""
        own_ms = self.step.kernels_ms
        ratio = "" if self.floor is None else f" ({self.floor.kernels_ms / own_ms:.2f}x)"
        return f"{own_ms:.2f}{ratio}"


TABLE: MarkdownTable[Row] = MarkdownTable(
    {
        "Engine": lambda row: engine_name(row.engine),
        "Commit": lambda row: row.commit,
        "Sequences": lambda row: row.sequences,
        "Step": lambda row: row.time,
        "Kernels": lambda row: row.kernels,
    }
    | {
        part: lambda row, part=part: f"{row.parts_ms[part]:.2f}" if part in row.parts_ms else ""
        for part in PARTS.values()
    }
)


def decoding_sections(folder: Path, machine: str) -> list[str]:
    """What was measured on, title, table of all profiled engines and note.

    Raises:
        ValueError: a record is damaged.
    """
    paths = sorted(folder.glob(f"decode_profile_*_{machine}.json"))
    records = [read_record(path, DecodeRecord) for path in paths]
    rows = [row for record in records for row in _rows(record)]
    return [setups(records), TITLE, TABLE.markdown(rows), NOTE]


def _rows(record: DecodeRecord) -> Iterator[Row]:
    for engine, steps in record.engines.items():
        floors = record.engines.get(f"{engine.partition(':')[0]}:bf16", {})
        experts = _expert_shapes(engine)
        for sequences, step in steps.items():
            parts_ms = defaultdict[str, float](float)
            for kernel, ms in step.in_step_ms.items():
                parts_ms[_part(kernel, experts)] += ms
            floor = None if floors is steps else floors.get(sequences)
            yield Row(engine, record.commit, sequences, step, parts_ms, floor)


def _expert_shapes(engine: str) -> set[tuple[int, int]]:
    """Of an expert's weights, gate and up as one; none in a dense model."""
    config, _ = read_engine(engine)
    if "moe_intermediate_size" not in config:
        return set()
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    return {(2 * inner, hidden), (hidden, inner)}


def _part(kernel: str, experts: set[tuple[int, int]]) -> str:
    if (found := SHAPE.match(kernel)) and (int(found[1]), int(found[2])) in experts:
        return "Experts"
    return next(part for pattern, part in PARTS.items() if re.search(pattern, kernel))
