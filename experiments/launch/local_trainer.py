"""A run of a study trained in this process by `experiments.rl`."""

from pathlib import Path

from experiments.rl.resume import find_steps
from experiments.rl.trainer import GrpoTrainer, TrainerConfig
from experiments.runs.attempts import HINT, Attempt, OnStep, merge_rows
from experiments.runs.manifest import TrainingResult
from experiments.runs.metrics import METRICS, require_every_step
from experiments.study.arms import make_recipes
from experiments.study.schema import Run, Study
from qat_core.bf16_on_cpu import multiply_bf16_in_fp32
from qat_core.units import BYTES_PER_GIB
from qat_core.weights.stream import weight_stream


def train_here(
    study: Study, run: Run, results: Path, attempts: list[Attempt], on_step: OnStep
) -> TrainingResult:
    """Trains a run to its last step, from its last checkpoint if there is one."""
    multiply_bf16_in_fp32()
    recipes = make_recipes(run.arm, study.scale_policy, study.block_scale_method)
    config = TrainerConfig(
        base_dir=results / "base" / study.base_of(run),
        checkpoint_dir=results / run.id / "checkpoints",
        train_recipe=recipes.train,
        rollout_recipe=recipes.rollout,
        task=study.task,
        grpo=study.rl_of(run.cell),
        seed=run.seed,
        device=study.device,
        engine=study.rollout,
        exact=study.is_exact(run.arm),
        gpu_memory_gib=study.gpu_memory_gib,
    )
    newest = max(find_steps(config.checkpoint_dir), default=0)
    recorded = merge_rows(attempts)
    where = f"{attempts[-1].folder.parent}/*/{METRICS}"
    require_every_step(recorded, where, HINT, last=newest or None)
    trainer = GrpoTrainer(config)
    trainer.train(on_step)
    bf16_bytes = sum(p.nbytes for p in trainer.policy.model.parameters())
    # packed here only to measure its size: a run resumed after its last step never synced
    stream = weight_stream(trainer.policy.model, trainer.plan, recipes.rollout)
    packed_bytes = sum(weight.nbytes for _, weight in stream) if recipes.rollout else None
    return TrainingResult(
        measured_bf16_gib=bf16_bytes / BYTES_PER_GIB,
        measured_packed_gib=packed_bytes and packed_bytes / BYTES_PER_GIB,
        coverage=trainer.coverage(),
    )
