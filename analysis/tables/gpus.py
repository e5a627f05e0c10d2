"""Qwen3 through verl by number of GPUs: what was measured, and the rest computed from its parts."""

from collections.abc import Sequence
from pathlib import Path
from statistics import linear_regression, mean
from typing import Any, NamedTuple

from analysis.markdown import Row, markdown_table
from analysis.tables.memory import GPUS, MODELS, REPORTED
from analysis.tables.rows import number, read_records, read_synced
from experiments.benchmarks import records
from experiments.study.schema import ROOT
from experiments.support.json_files import read_json
from qat_core.planning.predicted_memory import (
    predict_offloaded_memory_gib,
    predict_training_memory_gib,
)

BYTES_PER_VALUE = 2  # `model_dtype: bfloat16`, as in all these runs
GPU_GIB = 140.4  # an H200's 143,771 MiB
KERNELS = ("QAT_CORE_LINEAR_KERNEL", "QAT_CORE_EXPERTS_KERNEL")
ARMS = {"bf16": "bf16", "nvfp4-qat": "nvfp4"}  # and the precision of their engines
SPLIT_PARTS = ("log_prob_s", "training_s")  # of a step, shared by the GPUs
NOTE = (
    "In *italics*: computed, all else measured. 64 responses of 512 tokens a step, no tensor "
    "parallelism; model, gradients and moments in BF16, sharded by FSDP2, on the host while vLLM "
    "is awake, in pinned memory, where PyTorch rounds blocks up to powers of two. Actor and host "
    "are computed from shapes. Where a run of that model and arm was measured, its excess over the "
    "shapes is added (host: for each GPU); else packed weights and processes are missing. A "
    "sleeping vLLM and CUDA's contexts come on top of the actor: what is not too much may still "
    "not fit. Of a step, log-probs and training are fitted as a + b / GPUs to two measured numbers "
    "of GPUs. All else is the mean of the measured ones, as each GPU does it for itself. "
    "Qwen3-8B's runs on one and on two GPUs shared a host, which makes their times uncertain; its "
    "memory on the host is of older runs."
)


class Value(NamedTuple):
    """A figure, and whether a run has it."""

    amount: float
    is_measured: bool = False

    def __str__(self) -> str:
        """Computed ones in italics."""
        return f"{self.amount:.1f}" if self.is_measured else f"*{self.amount:.1f}*"


class Setting(NamedTuple):
    """A model in an arm: its runs through verl, and what its engine's weights take.

    Where several runs have as many GPUs, the first that has a figure counts; none has another
    kernel than vLLM's own.
    """

    model: str
    arm: str
    config: dict[str, Any]
    runs: Sequence[records.Row]
    weights_gib: float

    def actor_gib(self, gpus: int) -> Value:
        """The actor's peak on a GPU."""
        peaks = self._by_gpus("memory.actor_peak_gib")
        if gpus in peaks:
            return Value(peaks[gpus], True)
        beyond = [peak - self._state_gib(n) for n, peak in peaks.items()]
        return Value(self._state_gib(gpus) + mean(beyond or [0.0]))

    def _state_gib(self, gpus: int) -> float:
        return predict_training_memory_gib(self.config, gpus, BYTES_PER_VALUE)

    def host_gib(self, gpus: int) -> Value:
        """The host's peak."""
        peaks = self._by_gpus("memory.host_peak_gib")
        if gpus in peaks:
            return Value(peaks[gpus], True)
        beyond = [(peak - self._offloaded_gib(n)) / n for n, peak in peaks.items()]
        return Value(self._offloaded_gib(gpus) + gpus * mean(beyond or [0.0]))

    def _offloaded_gib(self, gpus: int) -> float:
        return predict_offloaded_memory_gib(self.config, gpus, BYTES_PER_VALUE)

    def sync_s(self, gpus: int) -> Value | None:
        """A weight sync; None where no number of GPUs was measured."""
        seconds = self._by_gpus("weight_sync_s")
        if gpus in seconds:
            return Value(seconds[gpus], True)
        return Value(mean(seconds.values())) if seconds else None

    def step_s(self, gpus: int) -> Value | None:
        """A step; None where fewer than two numbers of GPUs were measured."""
        steps_s = self._by_gpus("step_s")
        if gpus in steps_s:
            return Value(steps_s[gpus], True)
        if len(steps_s) < 2:
            return None
        parts = [self._by_gpus(part) for part in SPLIT_PARTS]
        # what is left takes as long on any number
        seconds = mean(steps_s.values()) - sum(mean(it.values()) for it in parts)
        for of_part in parts:
            slope, start = linear_regression([1 / n for n in of_part], list(of_part.values()))
            seconds += start + slope / gpus
        return Value(seconds)

    def commit(self, gpus: int) -> str:
        """Of the run on so many GPUs whose step is shown; empty where there is none."""
        return next((str(run["commit"]) for run in self.runs if run["gpus"] == gpus), "")

    def _by_gpus(self, key: str) -> dict[int, float]:
        known = (run for run in reversed(self.runs) if run.get(key) is not None)
        return {int(number(run, "gpus")): number(run, key) for run in known}


def _row(setting: Setting, gpus: int) -> Row:
    """A setting on a number of GPUs."""
    actor_gib = setting.actor_gib(gpus)
    fits = actor_gib.amount < GPU_GIB
    return {
        "Model": setting.model,
        "Arm": setting.arm,
        "GPUs": str(gpus),
        "Actor on a GPU, GiB": f"{actor_gib}{'' if fits else ', too much'}",
        "vLLM's weights on a GPU, GiB": f"{setting.weights_gib:.2f}",
        "Host, GiB": str(setting.host_gib(gpus)) if fits else "",
        "Weight sync, s": str(setting.sync_s(gpus) or "") if fits else "",
        "Step, s": str(setting.step_s(gpus) or "") if fits else "",
        "Commit": setting.commit(gpus),
    }


def gpus_sections(folder: Path, machine: str) -> list[str]:
    """A row for each model, arm and number of GPUs."""
    runs = [row for record in read_records(folder, machine, "verl") for row in record.rows]
    engines = read_synced(folder, machine)
    settings = [
        Setting(
            model,
            arm,
            read_json(ROOT / "experiments" / "models" / f"{model}.json"),
            [run for run in runs if _is_of(run, model, arm)],
            number(engines[f"{model}:{precision}"], REPORTED),
        )
        for model in MODELS
        for arm, precision in ARMS.items()
    ]
    return [markdown_table(_row(it, gpus) for it in settings for gpus in GPUS), NOTE]


def _is_of(run: records.Row, model: str, arm: str) -> bool:
    """Whether vLLM's own kernels served that model and arm in it."""
    kernels = any(run.get(f"environment.{variable}") for variable in KERNELS)
    return (run["model"], run["arm"]) == (f"{model}-random", arm) and not kernels
