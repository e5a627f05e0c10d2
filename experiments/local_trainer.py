"""A run of a study trained in this process by `qat_core.rl`."""

import json
from pathlib import Path

from experiments.arms import make_arm
from experiments.attempts import Json
from experiments.schema import Run, Study
from qat_core.rl.trainer import GrpoTrainer, OnStep
from qat_core.rollout.packed import weight_stream

BYTES_PER_GIB = 2**30


def train(study: Study, run: Run, base_dir: Path, checkpoints: Path, on_step: OnStep) -> Json:
    """Trains a run to its last step; returns what the manifest learns from it."""
    arm = make_arm(run.arm, study.scale, study.block_scale)
    trainer = GrpoTrainer(
        base_dir,
        arm.trained,
        arm.rolled_out,
        study.task,
        study.rl,
        run.seed,
        study.device,
        checkpoints,
    )
    trainer.train(on_step)
    bf16_bytes = sum(p.nbytes for p in trainer.policy.model.parameters())
    # of the last weights, also where a crash left no step to do and so the engine no packed ones
    stream = weight_stream(trainer.policy.model, trainer.plan, arm.rolled_out)
    packed_bytes = sum(weight.nbytes for _, weight in stream) if arm.rolled_out else None
    return {
        "measured": {
            "measured_bf16_gib": bf16_bytes / BYTES_PER_GIB,
            "measured_packed_gib": packed_bytes and packed_bytes / BYTES_PER_GIB,
        },
        "ledger": json.loads(trainer.plan.to_json()) if trainer.plan else None,
    }
