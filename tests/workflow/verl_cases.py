"""The runs of verl's own trainers that `tests/workflow/verl_runs.py` starts on a CPU."""

from pathlib import Path
from typing import Any, NamedTuple

from experiments.study.schema import ROOT
from experiments.verl.command import Command

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REWARD = ROOT / "tests" / "workflow" / "verl_reward.py"
DIGESTS = "tests.workflow.verl_digests"


class Case(NamedTuple):
    """A run."""

    title: str  # what it shows, for the table
    module: str  # verl's program
    overrides: dict[str, Any]  # what its command has beside `common`, and in its place
    steps: int = 2
    metrics: tuple[str, ...] = ("actor/grad_norm",)  # that every step has with another value than 0
    zeros: tuple[str, ...] = ()  # that every step has as 0
    model: str = "nano-dense"
    nodes: int = 1  # of Ray, all on this machine
    gpus: int = 0  # that it needs; 0: CPU workers
    pools: int = 1  # of rollout workers, which are synced apart from each other
    resumes_after: int = 0  # steps of a run before it, whose checkpoint it resumes; 0: none
    modules: tuple[str, ...] = (DIGESTS,)  # that verl's processes import


PPO = "verl.trainer.main_ppo"
# one worker trains, one rolls out
_APART = {
    f"{ROLLOUT}.checkpoint_engine.backend": "cpu",
    "ray_kwargs.ray_init.num_gpus": 2,
    "trainer.n_gpus_per_node": 1,
}
_OWN_POOL = {
    "hydra.searchpath": "[pkg://verl.trainer.config]",  # verl's own needs a checkout of verl
    "actor_rollout_ref.hybrid_engine": "false",
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 1,
}
_FULLY_ASYNC = {
    **_APART,
    **_OWN_POOL,
    "data.train_batch_size": 0,
    "rollout.total_rollout_steps": 12,
    "async_training.trigger_parameter_sync_step": 1,
    "async_training.staleness_threshold": 0.5,
}
_SEPARATE = {
    **_APART,
    "trainer.v1.trainer_mode": "separate_async",
    "trainer.v1.separate_async.parameter_sync_step": 1,
    f"{ROLLOUT}.nnodes": 1,
    f"{ROLLOUT}.n_gpus_per_node": 1,
    "algorithm.rollout_correction.bypass_mode": "true",
}
_ON_TWO = {"trainer.n_gpus_per_node": 2, f"{ROLLOUT}.tensor_model_parallel_size": 2}
_TEACHER = "distillation.teacher_models.teacher_model"
CASES = {
    "one-step-off": Case(
        "one-step-off (`one_step_off_policy`)",
        "verl.experimental.one_step_off_policy.main_ppo",
        _APART | _OWN_POOL,
    ),
    "fully-async": Case(
        "fully asynchronous (`fully_async_policy`)",
        "verl.experimental.fully_async_policy.fully_async_main",
        _FULLY_ASYNC,
    ),
    "colocate-async": Case(
        "v1, `trainer_mode=colocate_async`", PPO, {"trainer.v1.trainer_mode": "colocate_async"}
    ),
    "legacy": Case(
        "verl's former trainer, `trainer.use_v1=false`", PPO, {"trainer.use_v1": "false"}
    ),
    "separate-async": Case(
        "v1, `trainer_mode=separate_async`, `hybrid_engine=false`",
        PPO,
        _SEPARATE | {"actor_rollout_ref.hybrid_engine": "false"},
    ),
    "separate-async-hybrid": Case(
        "v1, `trainer_mode=separate_async`, whose trainer's workers sample too "
        "(`hybrid_engine=true`, verl's default)",
        PPO,
        _SEPARATE,
        pools=2,
    ),
    "separate-async-every-2": Case(
        "v1, `trainer_mode=separate_async`, `hybrid_engine=false`, `parameter_sync_step=2`, old "
        "log-probs of the weights last synced (`bypass_mode=false`)",
        PPO,
        _SEPARATE
        | {
            "trainer.v1.separate_async.parameter_sync_step": 2,
            "actor_rollout_ref.hybrid_engine": "false",
            "algorithm.rollout_correction.bypass_mode": "false",
            f"{ACTOR}.ppo_mini_batch_size": 2,
        },
    ),
    "fully-async-every-2": Case(
        "fully asynchronous, `trigger_parameter_sync_step=2`",
        "verl.experimental.fully_async_policy.fully_async_main",
        _FULLY_ASYNC
        | {"async_training.trigger_parameter_sync_step": 2, "rollout.total_rollout_steps": 24},
    ),
    "kl-loss": Case(
        "reference policy with KL loss, dynamic batch sizes, remove-padding",
        PPO,
        {
            f"{ACTOR}.use_kl_loss": "true",
            f"{ACTOR}.use_dynamic_bsz": "true",
            f"{ACTOR}.ppo_max_token_len_per_gpu": 128,
            "actor_rollout_ref.model.use_remove_padding": "true",
        },
        metrics=("actor/grad_norm", "actor/kl_loss"),
    ),
    "tensor-parallel": Case("`rollout.tensor_model_parallel_size=2`, verl's default", PPO, _ON_TWO),
    "moe-tensor-parallel": Case(
        "MoE with `rollout.tensor_model_parallel_size=2`", PPO, _ON_TWO, model="nano-moe"
    ),
    "distillation": Case(
        "distillation of a BF16 teacher's top-k (`forward_kl_topk`)",
        PPO,
        {
            "distillation.enabled": "true",
            "distillation.nnodes": 1,
            "distillation.n_gpus_per_node": 1,
            "distillation.distillation_loss.loss_mode": "forward_kl_topk",
            "distillation.distillation_loss.topk": 4,
            f"{_TEACHER}.model_path": "${actor_rollout_ref.model.path}",
            f"{_TEACHER}.inference.tensor_model_parallel_size": 1,
            f"{_TEACHER}.inference.free_cache_engine": "false",
            f"+{_TEACHER}.inference.enable_sleep_mode": "false",
            f"{_TEACHER}.inference.max_num_batched_tokens": 1024,
            f"+{_TEACHER}.inference.engine_kwargs.vllm.kv_cache_memory_bytes": 2**28,
            "ray_kwargs.ray_init.num_gpus": 2,
        },
        metrics=("actor/grad_norm", "actor/distillation/loss"),
    ),
    "routing-replay": Case(
        "MoE with `+routing_replay=r3`",
        PPO,
        {"+routing_replay": "r3"},
        metrics=("actor/grad_norm", "rollout_corr/k3_kl"),
        model="nano-moe",
    ),
    "two-nodes": Case(
        "`trainer.nnodes=2`, two nodes of Ray on one machine",
        PPO,
        {
            "trainer.nnodes": 2,
            "ray_kwargs.ray_init.num_cpus": "null",  # of a cluster that is there already
            "ray_kwargs.ray_init.num_gpus": "null",
        },
        nodes=2,
    ),
    "resumed": Case(
        "resumed from verl's checkpoint (`trainer.resume_mode=auto`)",
        PPO,
        {"trainer.save_freq": 1, "trainer.resume_mode": "auto"},
        resumes_after=1,
    ),
}


def common(folder: Path) -> dict[str, Any]:
    """What every command has."""
    return {
        "+nvfp4": "w4a16",
        "+attention": "sdpa",
        "+platform": "cpu",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 8,
        f"{ACTOR}.ppo_mini_batch_size": 4,
        f"{ACTOR}.optim.lr": 1e-3,
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.n": 4,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 8,
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.calculate_log_probs": "true",
        f"{ROLLOUT}.gpu_memory_utilization": 0.1,
        f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes": 2**28,
        f"{ROLLOUT}.max_num_batched_tokens": 1024,
        f"{ROLLOUT}.max_num_seqs": 64,
        f"{ROLLOUT}.agent.num_workers": 1,
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 1,  # several buckets
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "data" / "train.parquet",
        "data.val_files": folder / "data" / "test.parquet",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 16,
        "data.max_response_length": 16,
        "data.return_raw_chat": "true",
        "data.dataloader_num_workers": 0,
        "reward.custom_reward_function.path": REWARD,
        "reward.custom_reward_function.name": "compute_score",
        "reward.num_workers": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.val_before_train": "false",
        "trainer.resume_mode": "disable",
        "trainer.logger": "[file]",
        "ray_kwargs.ray_init.num_cpus": 32,  # slots, not cores: fully_async takes 21 by itself
        "+ray_kwargs.ray_init.include_dashboard": "false",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }


def command(case: Case, folder: Path, out: Path) -> Command:
    """A case's, whose model and data lie in a folder; its files go to `out`."""
    settings = common(folder) | case.overrides
    settings |= {
        "actor_rollout_ref.model.path": folder / case.model,
        "hydra.run.dir": out / "hydra",
        "trainer.total_training_steps": case.steps,
        "trainer.default_local_dir": out.parent / "checkpoints",  # for a run that resumes this one
    }
    arguments = [f"{key}={value}" for key, value in settings.items()]
    starter = ["tests.workflow.ray_nodes"] if case.nodes > 1 else []
    return Command(
        ["python", "-m", *starter, case.module, *arguments],
        {
            "VERL_FILE_LOGGER_PATH": str(out / "verl.jsonl"),
            "VERL_DIGESTS": str(out),
            "VERL_PLATFORM": "cpu",
            "VERL_USE_EXTERNAL_MODULES": ",".join(("qat_core.verl.cpu", *case.modules)),
            # else verl 0.9.1's separate_async dies of `logger.info(..., flush=True)`
            "VERL_LOGGING_LEVEL": "WARN",
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        },
    )
