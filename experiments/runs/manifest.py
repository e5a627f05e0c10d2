"""The manifest of a run: everything that a reader needs to trust or repeat its numbers."""

from datetime import UTC, datetime
from pathlib import Path

from experiments.runs.attempts import Attempt
from experiments.runs.provenance import git_state, hardware, versions
from experiments.study.arms import ARMS
from experiments.study.schema import Run, Study
from experiments.support.json_files import Json, read_json
from qat_core.memory import predict_weight_memory_gib


def new_manifest(
    study: Study, run: Run, base_dir: Path, attempt: Attempt, digests: Json, command: str
) -> Json:
    """The manifest of an attempt that starts now; its results are still None."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    config = read_json(base_dir / "config.json")
    packed = ARMS[run.arm].rollout_recipe
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
