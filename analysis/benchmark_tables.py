"""The README's tables of vLLM benchmarks, from experiments/records/benchmarks."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

from pydantic import BaseModel

from analysis.claims_table import show_ratio
from analysis.read import read_json

PRECISIONS = {"nvfp4": "NVFP4", "bf16": "BF16"}
QAT_RATIOS = {"qat-pow2": "QAT", "qat-amax": "QAT, amax scale", "no-qat": "No QAT"}
SYNC_NOTE = (
    "Prediction error: of the prediction from shapes against what vLLM reports, which has the "
    "gaps that PyTorch's allocator leaves (none with `expandable_segments`). Extra memory: peak "
    "during a sync. vLLM's own load: the same BF16 tensors through `load_weights`, as verl syncs "
    "them."
)
PARITY_NOTE = (
    "QAT: power-of-two scale. Intervals: bootstrap over batches of sequences, where there is no "
    "last column over three seeds. A model that was not trained rounded is less certain once it is "
    "rounded, which raises the KL of equal bits: the last column is against its rounded weights "
    "served in BF16. In an MoE a few rerouted tokens carry much of the KL, in BF16 too."
)


class Hardware(BaseModel):
    """What a record was measured on."""

    gpus: list[str]


class Record(BaseModel):
    """What all records say."""

    hardware: Hardware
    versions: dict[str, str | None]


class Memory(BaseModel):
    """Weights of an engine: what vLLM reports, and how far the prediction from shapes is off."""

    reported_gib: float
    layer_gib: float
    predicted_over_reported: float


class Sync(BaseModel):
    """One weight sync; the extra memory is its peak."""

    seconds: float
    extra_gib: float


class SyncedEngine(BaseModel):
    """An engine of experiments/benchmarks/rollout.py."""

    memory: Memory
    syncs: list[Sync]
    stock_syncs: list[Sync] = []


class RolloutRecord(Record):
    """Of experiments/benchmarks/rollout.py; engines are named `model:precision`."""

    allocator: str
    engines: dict[str, SyncedEngine]


class ServingEngine(BaseModel):
    """Tokens a second: quartiles, by sequences at once."""

    kv_cache_tokens: int
    tokens_per_s: dict[str, tuple[float, float, float]]


class ServingRecord(Record):
    """Of experiments/benchmarks/serving.py."""

    gpu_memory_utilization: float
    engines: dict[str, ServingEngine]


class Ratio(BaseModel):
    """Mean k3 KL of an arm over a floor's, with its 95 % interval."""

    mean_k3_kl: float
    ratio: float
    low: float
    high: float
    tokens: int


class ParityModel(BaseModel):
    """Arms of one model, over the BF16 model's floor and over that of its rounded weights."""

    of_noise_floor: dict[str, Ratio]
    of_rounded_floor: dict[str, Ratio] = {}


class ParityRecord(Record):
    """Of experiments/benchmarks/parity.py."""

    weights: str
    models: dict[str, ParityModel]


RecordType = TypeVar("RecordType", bound=BaseModel)


def benchmark_tables(folder: Path, machine: str) -> str:
    """Markdown of weight syncs, serving and parity.

    Args:
        folder: holds the records.
        machine: how their names end, e.g. `h200` for rollout_h200.json.

    Raises:
        ValueError: naming the record that is missing or garbled.
    """
    rollouts = [
        read_record(folder / f"{name}_{machine}.json", RolloutRecord)
        for name in ("rollout", "rollout_30b", "rollout_expandable")
    ]
    serving = read_record(folder / f"serving_{machine}.json", ServingRecord)
    parity_files = sorted(folder.glob(f"parity*_{machine}.json"))
    parity = [read_record(path, ParityRecord) for path in parity_files]
    sections = (
        _origin([*rollouts, serving, *parity]),
        *_sync(rollouts),
        *_serving(serving),
        *_parity(parity),
    )
    return "\n\n".join(sections) + "\n"


def read_record(path: Path, kind: type[RecordType]) -> RecordType:
    """A benchmark's record; ValueError names a missing or garbled file."""
    return read_json(path, kind, "run the benchmark of that name")


def _origin(records: Sequence[Record]) -> str:
    setups = {
        f"{' and '.join(record.hardware.gpus)}, vLLM {record.versions['vllm']}, "
        f"torch {record.versions['torch']}"
        for record in records
    }
    return f"Measured on: {'; '.join(sorted(setups))}."


def _sync(records: Sequence[RolloutRecord]) -> tuple[str, str, str]:
    headings = (
        "Engine",
        "Weights, GiB",
        "Prediction error",
        "Sync, s",
        "Extra memory, GiB",
        "One BF16 layer, GiB",
        "vLLM's own load, s",
    )
    newest = {  # an engine that was measured again is the last of its name
        _engine_name(name, record.allocator): engine
        for record in records
        for name, engine in record.engines.items()
    }
    rows = [(name, *_sync_cells(engine)) for name, engine in sorted(newest.items())]
    title = "**Weight memory and weight sync from a BF16 model on the same GPU**"
    return title, markdown_table(headings, rows), SYNC_NOTE


def _sync_cells(engine: SyncedEngine) -> tuple[str, ...]:
    stock = [sync.seconds for sync in engine.stock_syncs]
    return (
        f"{engine.memory.reported_gib:.2f}",
        f"{engine.memory.predicted_over_reported:.3%}",
        f"{median(sync.seconds for sync in engine.syncs):.2f}",
        f"{max(sync.extra_gib for sync in engine.syncs):.2f}",
        f"{engine.memory.layer_gib:.2f}",
        f"{median(stock):.2f}" if stock else "",
    )


def _serving(record: ServingRecord) -> tuple[str, str]:
    batches = list(next(iter(record.engines.values())).tokens_per_s)
    headings = ("Engine", "KV cache, tokens", *(f"tokens/s at {batch}" for batch in batches))
    rows = [
        (
            _engine_name(name),
            f"{engine.kv_cache_tokens:,}",
            *(f"{engine.tokens_per_s[batch][1]:,.0f}" for batch in batches),
        )
        for name, engine in sorted(record.engines.items())
    ]
    share = f"{record.gpu_memory_utilization:.0%}"
    title = f"**KV cache and decoding on {share} of the GPU, by sequences at once**"
    return title, markdown_table(headings, rows)


def _parity(records: Sequence[ParityRecord]) -> tuple[str, str, str]:
    headings = (
        "Model",
        "Tokens an arm",
        "BF16, nats a token",
        *(f"{label} / BF16" for label in QAT_RATIOS.values()),
        "QAT / rounded weights in BF16",
    )
    rows = [
        (f"{name}, {record.weights} weights", *_parity_cells(model))
        for record in records
        for name, model in record.models.items()
    ]
    title = "**k3 KL between trainer and vLLM on sampled tokens, 95 % intervals**"
    return title, markdown_table(headings, rows), PARITY_NOTE


def _parity_cells(model: ParityModel) -> tuple[str, ...]:
    arms = model.of_noise_floor
    rounded = model.of_rounded_floor.get("qat-pow2")
    return (
        f"{min(arm.tokens for arm in arms.values()):,}",
        f"{arms['bf16'].mean_k3_kl:.2e}",
        *(_interval(arms[arm]) for arm in QAT_RATIOS),
        _interval(rounded) if rounded else "",
    )


def _interval(ratio: Ratio) -> str:
    return f"{show_ratio(ratio.ratio)} ({show_ratio(ratio.low)} to {show_ratio(ratio.high)})"


def _engine_name(name: str, allocator: str = "") -> str:
    model, _, precision = name.partition(":")
    return f"{model} {PRECISIONS[precision]}{allocator and f', `{allocator}`'}"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells below their headings."""
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
