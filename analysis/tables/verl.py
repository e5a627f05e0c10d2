"""Table of verl runs: mismatch, weight memory and the parts of a step."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, PositiveFloat

from analysis.claims_table import show_ratio
from analysis.collapse.grid import BF16
from analysis.markdown import MarkdownTable
from analysis.tables.record import Record, read_record
from experiments.runs.attempts import list_run_dirs
from qat_core.units import show_memory

IN_PLACE = "QAT_CORE_IN_PLACE_SYNC"
KERNELS = {  # what they choose the kernels of
    "QAT_CORE_LINEAR_KERNEL": "linear layers",
    "QAT_CORE_EXPERTS_KERNEL": "experts",
}
# Here syncs went through vLLM's reload if this variable did not ask for another way.
RELOADED = (
    "82f3f04c72eec124558870526fac6f473578f640",
    "398a5772a7fd4346512a9051a880fd3734db59f1",
)
# Of two runs at once: REPRODUCING.md.
SHARED_HOSTS = (
    "d3f39551facd806ae68d1340f87384821cf91143",
    "8e180032e1f8b8be408d1afb1bad389c1ce0d5dc",
)
NOTE = (
    "One run an arm. Ratios are to BF16's run of the same code on as many GPUs. `mean`: over all "
    "tokens of all steps, the estimator of the claims. Medians: over all steps but the first. "
    "Random weights: mismatch, memory and times mean something, rewards do not. Tensors: what "
    "vLLM's weights take; its report has caches, workspaces and gaps, too. Both are known at a "
    f"run's end. Reload: packed weights through vLLM's, now with `{IN_PLACE}=0`; else in place. "
    "Linear layers by, experts by: the value of "
    f"{' or '.join(f'`{variable}`' for variable in KERNELS)}; else Marlin. "
    "Runs of recorded studies are in their tables."
)


def goes_through_reload(commit: str | None, environment: Mapping[str, str]) -> bool:
    """Whether packed weights went through vLLM's reload: by choice, or as was the default."""
    return environment.get(IN_PLACE, "0" if commit in RELOADED else "1") == "0"


class Spread(BaseModel):
    """Median and range over steps."""

    median: PositiveFloat
    low: float
    high: float


class Memory(BaseModel):
    """Weights as vLLM holds them, packed ones where the arm packs; known at a run's end.

    Attributes:
        reported_gib: vLLM's own report.
        actor_peak_gib: what the actor allocated on its GPU.
        gpu_peak_gib: in use on the fullest GPU, by actor and vLLM.
        host_peak_gib: in use on the whole host.
    """

    measured_bf16_gib: float | None = None
    measured_packed_gib: float | None = None
    reported_gib: float | None = None
    actor_peak_gib: float | None = None
    gpu_peak_gib: float | None = None
    host_peak_gib: float | None = None

    @property
    def tensors(self) -> str:
        """What the arm's weights take."""
        weights_gib = self.measured_packed_gib or self.measured_bf16_gib
        return show_memory(weights_gib) if weights_gib else ""

    @property
    def report(self) -> str:
        """The same as vLLM tells it."""
        return show_memory(self.reported_gib) if self.reported_gib else ""


class Git(BaseModel):
    """The code of a run."""

    commit: str


class VerlRun(BaseModel):
    """A run of experiments/benchmarks/verl_steps.py."""

    model: str
    arm: str
    gpus: int
    steps: int
    planned_steps: int
    k3_kl: Spread
    mean_k3_kl: PositiveFloat
    rollout_s: Spread
    log_prob_s: Spread
    training_s: Spread
    weight_sync_s: Spread
    step_s: Spread
    memory: Memory
    git: Git
    outside_steps_s: float | None = None
    environment: dict[str, str] = {}

    @property
    def host_peak_gib(self) -> float | None:
        """In use on the whole host; None where another run shared it."""
        return None if self.git.commit in SHARED_HOSTS else self.memory.host_peak_gib

    @property
    def setting(self) -> str:
        """The arm, by what its packed weights are multiplied, if they went through the reload."""
        if self.arm == BF16:
            return self.arm
        reloads = goes_through_reload(self.git.commit, self.environment)
        kernels = [f"{what} by {kernel}" for what, kernel in self.kernels.items()]
        return ", ".join([self.arm, *kernels, *(["reload"] if reloads else [])])

    @property
    def kernels(self) -> dict[str, str]:
        """Those asked for instead of vLLM's own, by what they multiply."""
        chosen = {what: self.environment.get(variable) for variable, what in KERNELS.items()}
        return {what: kernel for what, kernel in chosen.items() if kernel}

    @property
    def progress(self) -> str:
        """Steps, of how many where it ended early."""
        ended_early = self.steps != self.planned_steps
        return f"{self.steps} of {self.planned_steps}" if ended_early else str(self.steps)


class VerlRecord(Record):
    """Of experiments/benchmarks/verl_steps.py."""

    runs: list[VerlRun]


class VerlRow(NamedTuple):
    """A run and the BF16 arm's, of as many GPUs and the same code; None without one."""

    run: VerlRun
    floor: VerlRun | None

    @property
    def mean_ratio(self) -> str:
        """Mean k3 KL over that of BF16."""
        return show_ratio(self.run.mean_k3_kl / self.floor.mean_k3_kl) if self.floor else ""

    @property
    def median_ratio(self) -> str:
        """Median step's k3 KL over that of BF16."""
        return show_ratio(self.run.k3_kl.median / self.floor.k3_kl.median) if self.floor else ""


PARTS = {
    "Rollout, s": "rollout_s",
    "Log-probs, s": "log_prob_s",
    "Training, s": "training_s",
    "Weight sync, s": "weight_sync_s",
    "Step, s": "step_s",
}
VERL_TABLE: MarkdownTable[VerlRow] = MarkdownTable(
    {
        "Model": lambda row: row.run.model,
        "Arm": lambda row: row.run.setting,
        "GPUs": lambda row: str(row.run.gpus),
        "Steps": lambda row: row.run.progress,
        "Weights in vLLM, tensors": lambda row: row.run.memory.tensors,
        "vLLM's report": lambda row: row.run.memory.report,
        "k3 KL, mean": lambda row: f"{row.run.mean_k3_kl:.2e}",
        "mean / BF16's": lambda row: row.mean_ratio,
        "k3 KL, median step": lambda row: f"{row.run.k3_kl.median:.2e}",
        "median / BF16's": lambda row: row.median_ratio,
    }
    | {"Commit": lambda row: row.run.git.commit[:7]}
    | {
        heading: lambda row, part=part: f"{getattr(row.run, part).median:.1f}"
        for heading, part in PARTS.items()
    }
)
PEAK_TITLE = "**Memory of these runs, largest over all steps**"
PEAK_TABLE: MarkdownTable[VerlRun] = MarkdownTable(
    {
        "Model": lambda run: run.model,
        "Arm": lambda run: run.setting,
        "GPUs": lambda run: str(run.gpus),
        "Actor on its GPU, GiB": lambda run: _gib(run.memory.actor_peak_gib),
        "Actor and vLLM on a GPU, GiB": lambda run: _gib(run.memory.gpu_peak_gib),
        "Host, GiB": lambda run: _gib(run.host_peak_gib),
        "Start and end, s": lambda run: f"{run.outside_steps_s:.0f}" if run.outside_steps_s else "",
    }
)
PEAK_NOTE = (
    "vLLM sleeps while the actor trains, and the actor is on the host while vLLM is awake; then "
    "its weights and KV cache are on the GPU. GPU and host: looked at every 2 s from outside; the "
    "host's peak is left out where two runs shared it (commits "
    f"{' and '.join(commit[:7] for commit in SHARED_HOSTS)}), which makes their times uncertain "
    "too. Start and end: of the whole run, what is in no step."
)


def _gib(gib: float | None) -> str:
    return f"{gib:.1f}" if gib else ""


def read_verl_records(folder: Path, machine: str) -> list[VerlRecord]:
    """`verl_MACHINE.json`, and those that add runs, `verl_MACHINE_*.json`.

    Raises:
        ValueError: the first is missing, or one is damaged.
    """
    others = sorted(folder.glob(f"verl_{machine}_*.json"))
    return [read_record(path, VerlRecord) for path in (folder / f"verl_{machine}.json", *others)]


def verl_sections(folder: Path, machine: str) -> list[str]:
    """Where it was measured, and a row a run.

    Raises:
        ValueError: a record is missing or damaged.
    """
    records = read_verl_records(folder, machine)
    runs_of = map(list_run_dirs, folder.parent.iterdir())
    in_studies = {run.name.rpartition("_seed")[0] for runs in runs_of for run in runs}
    runs = [run for it in records for run in it.runs if f"{run.model}_{run.arm}" not in in_studies]
    floors = {(run.model, run.gpus, run.git.commit): run for run in runs if run.arm == BF16}
    rows = [VerlRow(run, floors.get((run.model, run.gpus, run.git.commit))) for run in runs]
    sections = [
        f"Measured on: {'; '.join(sorted({origin_of(it) for it in records}))}.",
        VERL_TABLE.markdown(rows),
        NOTE,
    ]
    measured = [run for run in runs if run.memory.actor_peak_gib]
    if measured:
        sections += [PEAK_TITLE, PEAK_TABLE.markdown(measured), PEAK_NOTE]
    return sections


def origin_of(record: VerlRecord) -> str:
    """Its GPUs and versions."""
    versions = ", ".join(f"{name} {record.versions[name]}" for name in ("verl", "vllm", "torch"))
    return f"{record.hardware.name}; {versions}"
