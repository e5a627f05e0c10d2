"""Runs of verl on GPUs at Qwen3's shapes, for `tests/workflow/verl_runs.py`.

Settings are those of a study's run. Its weights are random, drawn by each rank from a seed.
"""

from pathlib import Path

from experiments.base.seeded import write_seeded_base
from experiments.study.load import load_study
from experiments.study.schema import ROOT, Study
from experiments.verl.command import (
    CONFIGURATION,
    Command,
    RunPaths,
    build_command,
    build_configuration,
    to_yaml,
)
from qat_core.exact.count import COUNT
from tests.workflow.verl_cases import ACTOR, DIGESTS, PPO, REWARD, ROLLOUT, Case

MODEL, HALF_MOE = "qwen3-8b-random", "qwen3-30b-a3b-half-random"
STUDIES = {MODEL: "qwen3_smoke", HALF_MOE: "qwen3_moe_half_smoke"}
_COMMON = {
    "trainer.n_gpus_per_node": 2,
    "trainer.save_freq": -1,
    f"{ACTOR}.optim.lr": 1e-5,  # moves 15 % of BF16 weights a step, the study's 2 %
    "reward.custom_reward_function.path": REWARD,
}
_TIMES = ("actor/grad_norm", "timing_s/gen", "timing_s/update_actor", "timing_s/step")
_EXACT_ON_TWO = Case(
    "Qwen3-8B's shape on two GPUs, `rollout.tensor_model_parallel_size=2`, `+exact=on`: no "
    "log-prob of any step differs in any bit",
    PPO,
    _COMMON
    | {
        "+exact": "on",
        f"{ROLLOUT}.tensor_model_parallel_size": 2,
        f"{ROLLOUT}.engine_kwargs.vllm.distributed_executor_backend": "mp",
        # 3 GB are needed; without a size of its own vLLM would measure what others leave
        f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes": 2**33,
    },
    steps=4,
    metrics=_TIMES,
    zeros=(COUNT, "rollout_corr/k3_kl"),
    model=MODEL,
    gpus=2,
)
_HALF_MOE_ON_TWO = _EXACT_ON_TWO._replace(
    title=_EXACT_ON_TWO.title.replace("Qwen3-8B's shape", "half of Qwen3-30B-A3B"), model=HALF_MOE
)
GPU_CASES = {
    "exact-tensor-parallel-8b": _EXACT_ON_TWO,
    "exact-tensor-parallel-half-30b": _HALF_MOE_ON_TWO,
    "published-8b": Case(
        "Qwen3-8B's shape on one GPU with published settings: FP32 master weights, 0.9 of the "
        "memory for rollouts with sleep, dynamic batch sizes, `scale_policy=amax`; offloaded to "
        "memory that is not pinned",
        PPO,
        _COMMON
        | {
            "trainer.n_gpus_per_node": 1,
            f"{ACTOR}.fsdp_config.model_dtype": "fp32",
            # by default Adam's step takes another 30 GiB, which this GPU does not have
            f"{ACTOR}.optim.override_optimizer_config": "{fused: true}",
            f"{ACTOR}.fsdp_config.qat.scale_policy": "amax",
            f"{ACTOR}.use_dynamic_bsz": "true",
            f"{ACTOR}.ppo_max_token_len_per_gpu": 2048,
            f"{ROLLOUT}.gpu_memory_utilization": 0.9,
            f"{ROLLOUT}.max_num_batched_tokens": 32768,
        },
        metrics=(*_TIMES, "rollout_corr/k3_kl"),
        model=MODEL,
        gpus=1,
        modules=(DIGESTS, "tests.workflow.verl_unpinned"),
    ),
}


def write_base(case: Case, folder: Path) -> None:
    """The case's model, in a new folder."""
    write_seeded_base(_study(case), case.model, folder)


def _study(case: Case) -> Study:
    return load_study(ROOT / "experiments" / "studies" / f"{STUDIES[case.model]}.yaml")


def gpu_command(case: Case, folder: Path, out: Path) -> Command:
    """A case's, whose model and data lie in a folder; its files go to `out`."""
    study = _study(case)
    paths = RunPaths(
        repository=ROOT,
        model=folder / case.model,
        data=folder / "data",
        checkpoints=out / "checkpoints",
        attempt=out,
    )
    run = study.find_run(f"{case.model}_nvfp4-qat_seed0")
    configuration = build_configuration(study, run, paths)
    configuration["trainer"]["total_training_steps"] = case.steps
    (out / CONFIGURATION).write_text(to_yaml(configuration))
    own = build_command(study, run, paths)
    digests = {"VERL_DIGESTS": str(out), "VERL_USE_EXTERNAL_MODULES": ",".join(case.modules)}
    overrides = [f"{key}={value}" for key, value in case.overrides.items()]
    return Command([*own.arguments, *overrides], own.environment | digests)
