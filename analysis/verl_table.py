"""The README's table of verl runs, from experiments/records/benchmarks/verl_<machine>.json."""

from pathlib import Path

from pydantic import BaseModel

from analysis.benchmark_tables import Record, markdown_table, read_record
from analysis.claims_table import show_ratio
from qat_core.units import show_memory

HEADINGS = (
    "Model",
    "Arm",
    "GPUs",
    "Steps",
    "Weights in vLLM",
    "k3 KL",
    "k3 KL / BF16",
    "Rollout, s",
    "Log-probs, s",
    "Training, s",
    "Weight sync, s",
    "Step, s",
)


class Spread(BaseModel):
    """Median and range over steps."""

    median: float
    low: float
    high: float


class Memory(BaseModel):
    """Weights as vLLM holds them, packed ones where the arm packs; known at a run's end."""

    measured_bf16_gib: float | None = None
    measured_packed_gib: float | None = None


class VerlRun(BaseModel):
    """A run of experiments/benchmarks/verl_steps.py."""

    model: str
    arm: str
    gpus: int
    steps: int
    planned_steps: int
    k3_kl: Spread
    rollout_s: Spread
    log_prob_s: Spread
    training_s: Spread
    weight_sync_s: Spread
    step_s: Spread
    memory: Memory


class VerlRecord(Record):
    """Of experiments/benchmarks/verl_steps.py."""

    runs: list[VerlRun]


def verl_table(folder: Path, machine: str) -> str:
    """Markdown of the runs: mismatch, weight memory and the parts of a step.

    Raises:
        ValueError: the record is missing or garbled.
    """
    record = read_record(folder / f"verl_{machine}.json", VerlRecord)
    floors = {(run.model, run.gpus): run.k3_kl.median for run in record.runs if run.arm == "bf16"}
    rows = [_cells(run, floors.get((run.model, run.gpus))) for run in record.runs]
    versions = ", ".join(f"{name} {record.versions[name]}" for name in ("verl", "vllm", "torch"))
    origin = (
        f"Measured on: {' and '.join(record.hardware.gpus)}; {versions}. Medians over all steps "
        "but the first."
    )
    return f"{origin}\n\n{markdown_table(HEADINGS, rows)}\n"


def _cells(run: VerlRun, floor: float | None) -> tuple[str, ...]:
    parts = (run.rollout_s, run.log_prob_s, run.training_s, run.weight_sync_s, run.step_s)
    weights_gib = run.memory.measured_packed_gib or run.memory.measured_bf16_gib
    return (
        run.model,
        run.arm,
        str(run.gpus),
        str(run.steps) if run.steps == run.planned_steps else f"{run.steps} of {run.planned_steps}",
        show_memory(weights_gib) if weights_gib else "",
        f"{run.k3_kl.median:.2e}",
        show_ratio(run.k3_kl.median / floor) if floor else "",
        *(f"{part.median:.1f}" for part in parts),
    )
