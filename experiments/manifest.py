"""The manifest of a run: everything that a reader needs to trust or repeat its numbers."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from experiments.attempts import Attempt, Json
from experiments.provenance import (
    digest_code,
    digest_file,
    digest_json,
    git_state,
    hardware,
    versions,
)
from experiments.schema import PACKED_PRECISION, ROOT, Run, Study
from qat_core.memory import predict_weight_memory_gib
from qat_core.rl.config import TaskConfig
from qat_core.rl.tasks import make_problems

# what decides a run's numbers; how they are written down and tracked does not
TRAINING_CODE = ("experiments.arms", "qat_core.rl.trainer")
LOCK = ROOT / "requirements" / "base.txt"


def training_digests(study: Study, run: Run, base_dir: Path) -> Json:
    """What a run's numbers depend on; attempts with equal digests are one experiment.

    Raises:
        ValueError: the base checkpoint is missing.
    """
    weights = base_dir / "model.safetensors"
    if not weights.is_file():
        raise ValueError(f"{weights}: no base checkpoint; make it with `snakemake {base_dir}`")
    return {
        "config": digest_json(study.training_config(run)),
        "code": digest_code(*TRAINING_CODE),
        "data": _digest_data(study.task),
        "lock": digest_file(LOCK),
        "base": digest_file(weights),
    }


def _digest_data(task: TaskConfig) -> str:
    splits = (make_problems(task, "train"), make_problems(task, "test"))
    return digest_json([[asdict(problem) for problem in split] for split in splits])


def new_manifest(
    study: Study, run: Run, base_dir: Path, attempt: Attempt, digests: Json, command: str
) -> Json:
    """The manifest of an attempt that starts now; its results are still None."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    config = json.loads((base_dir / "config.json").read_text())
    packed = PACKED_PRECISION[run.arm]
    return {
        "run": run.id,
        "study": study.study,
        "model": run.model,
        "arm": run.arm,
        "seed": run.seed,
        "status": "running",
        "reason": None,
        "started_at": now,
        "attempt_started_at": now,
        "wall_s": None,
        "attempt": attempt.number,
        "command": command,
        "config": study.training_config(run),
        "git": git_state(),
        "digests": digests,
        "versions": versions(),
        "hardware": hardware(study.device),
        "seeds": {"run": run.seed},
        "memory": {
            "predicted_bf16_gib": predict_weight_memory_gib(config, "bf16"),
            "predicted_packed_gib": packed and predict_weight_memory_gib(config, packed),
            "measured_bf16_gib": None,
            "measured_packed_gib": None,
        },
        "ledger": None,
    }
