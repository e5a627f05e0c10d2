"""verl's own trainers with `+nvfp4=w4a16` on two CPU workers, and what they leave in the table.

python -m tests.workflow.verl_runs OUT [CASE...]

Each case is a run of a nano model with random weights over a few steps. It counts as shown if verl
ends well, every step has its metrics, the weights change, and every sync brings each vLLM worker
the very bytes that the trainer sent. OUT/CASE holds log, metrics and digests; what was found is
noted in experiments/records/benchmarks/verl_runs.json, from which `docs/verl.md` takes its table.
"""

import argparse
import json
import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from experiments.runs.provenance import origin
from experiments.study.schema import ROOT
from experiments.support.json_files import write_json
from experiments.verl.command import Command
from experiments.verl.data import write_data
from experiments.verl.process import running_verl
from tests.nano_models import TASK, write_nano

RECORD = ROOT / "experiments" / "records" / "benchmarks" / "verl_runs.json"
LIMIT_S = 900.0
POLL_S = 0.5
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


class Case(NamedTuple):
    """A run.

    Attributes:
        title: what it shows, for the table.
        module: verl's program.
        overrides: what its command has beside `COMMON`, and in its place.
        steps: how many steps there have to be.
        metrics: of which every step has to have one with a value other than 0.
    """

    title: str
    module: str
    overrides: dict[str, Any]
    steps: int = 2
    metrics: tuple[str, ...] = ("actor/grad_norm",)


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
CASES = {
    "one-step-off": Case(
        "one-step-off (`one_step_off_policy`)",
        "verl.experimental.one_step_off_policy.main_ppo",
        _APART | _OWN_POOL,
    ),
    "fully-async": Case(
        "fully asynchronous (`fully_async_policy`)",
        "verl.experimental.fully_async_policy.fully_async_main",
        _APART
        | _OWN_POOL
        | {
            "data.train_batch_size": 0,
            "rollout.total_rollout_steps": 12,
            "async_training.trigger_parameter_sync_step": 1,
            "async_training.staleness_threshold": 0.5,
        },
    ),
    "separate-async": Case(
        "v1, `trainer_mode=separate_async`, `hybrid_engine=false`",
        "verl.trainer.main_ppo",
        _APART
        | {
            "trainer.v1.trainer_mode": "separate_async",
            "trainer.v1.separate_async.parameter_sync_step": 1,
            "actor_rollout_ref.hybrid_engine": "false",
            f"{ROLLOUT}.nnodes": 1,
            f"{ROLLOUT}.n_gpus_per_node": 1,
            "algorithm.rollout_correction.bypass_mode": "true",
        },
    ),
    "kl-loss": Case(
        "reference policy with KL loss, dynamic batch sizes, remove-padding",
        "verl.trainer.main_ppo",
        {
            f"{ACTOR}.use_kl_loss": "true",
            f"{ACTOR}.use_dynamic_bsz": "true",
            f"{ACTOR}.ppo_max_token_len_per_gpu": 128,
            "actor_rollout_ref.model.use_remove_padding": "true",
        },
        metrics=("actor/grad_norm", "actor/kl_loss"),
    ),
}


def common(folder: Path) -> dict[str, Any]:
    """What every command has."""
    return {
        "+nvfp4": "w4a16",
        "+attention": "sdpa",
        "+platform": "cpu",
        "actor_rollout_ref.model.path": folder / "model",
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
        "reward.custom_reward_function.path": ROOT / "tests" / "workflow" / "verl_reward.py",
        "reward.custom_reward_function.name": "compute_score",
        "reward.num_workers": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.total_training_steps": 2,
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
    """A case's, whose model and data lie in a folder."""
    settings = common(folder) | case.overrides | {"hydra.run.dir": out / "hydra"}
    arguments = [f"{key}={value}" for key, value in settings.items()]
    return Command(
        ["python", "-m", case.module, *arguments],
        {
            "VERL_FILE_LOGGER_PATH": str(out / "verl.jsonl"),
            "VERL_DIGESTS": str(out),
            "VERL_PLATFORM": "cpu",
            "VERL_USE_EXTERNAL_MODULES": "qat_core.verl.cpu,tests.workflow.verl_digests",
            # else verl 0.9.1's separate_async dies of `logger.info(..., flush=True)`
            "VERL_LOGGING_LEVEL": "WARN",
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        },
    )


def prepare(folder: Path) -> None:
    """Model and data of all cases."""
    write_nano("nano-dense", folder / "model", num_layers=2)
    write_data(TASK, folder / "data")


def run(case: Case, folder: Path, out: Path) -> dict[str, Any]:
    """Runs a case to its end.

    Raises:
        ValueError: it does not show what it is to show; the message says what is missing.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    log = out / "verl.log"
    start = time.monotonic()
    with running_verl(command(case, folder, out), log) as verl:
        while verl.exit_code() is None and time.monotonic() - start < LIMIT_S:
            time.sleep(POLL_S)
        code = verl.exit_code()
    if code != 0:
        raise ValueError(f"{log}: verl ended with {code} after {time.monotonic() - start:.0f} s")
    return _steps(case, out) | _syncs(out)


def _steps(case: Case, out: Path) -> dict[str, Any]:
    lines = (out / "verl.jsonl").read_text().splitlines()
    rows = [row for line in lines if "actor/grad_norm" in (row := json.loads(line)["data"])]
    if len(rows) < case.steps:
        raise ValueError(f"{out}: {len(rows)} steps of {case.steps}")
    for name in case.metrics:
        if not all(row.get(name) for row in rows):
            raise ValueError(f"{out}: {name}: {[row.get(name) for row in rows]}")
    return {"steps": len(rows), "metrics": {n: [row[n] for row in rows] for n in case.metrics}}


def _syncs(out: Path) -> dict[str, Any]:
    """Compares the digests of all senders and receivers, sync by sync."""
    by_sync: dict[int, dict[str, list[Any]]] = defaultdict(lambda: {"sent": [], "received": []})
    for file in out.glob("*-*-*.json"):
        side, _, sync = file.stem.split("-")
        by_sync[int(sync)][side].append(json.loads(file.read_text()))
    for number, sides in by_sync.items():
        (first, *others) = sides["sent"] + sides["received"]
        if not sides["sent"] or not sides["received"] or any(other != first for other in others):
            raise ValueError(f"{out}: sync {number}: not the bytes that were sent")
    contents = {json.dumps(sides["sent"][0], sort_keys=True) for sides in by_sync.values()}
    if len(contents) < len(by_sync) - 1:  # the first two are of the untrained model
        raise ValueError(f"{out}: weights did not change between syncs")
    tensors = by_sync[0]["sent"][0]
    return {
        "syncs": len(by_sync),
        "receivers": len(by_sync[0]["received"]),
        "tensors": len(tensors),
        "packed": sum(name.endswith(":codes") for name in tensors),
    }


def table(record: dict[str, Any]) -> str:
    """Markdown rows of the cases in a record."""
    rows = [
        f"| {CASES[name].title} | {found['steps']} | {found['syncs']} to {found['receivers']} | "
        f"{found['packed']} packed of {found['tensors']}, all equal |"
        for name, found in record["cases"].items()
    ]
    header = [
        "| in a verl command | steps | syncs to vLLM workers | tensors |",
        "|---|---|---|---|",
    ]
    return "\n".join(header + rows)


def main() -> None:
    """Runs cases, and notes each in the record when it has ended well."""
    parser = argparse.ArgumentParser(description="Run verl's own trainers with NVFP4 on a CPU.")
    parser.add_argument("out", type=Path, help="folder of logs, metrics and digests")
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; all")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    out = arguments.out.resolve()
    folder = out / "base"
    if not folder.exists():
        prepare(folder)
    for name in arguments.cases or CASES:
        found = run(CASES[name], folder, out / name)
        known = json.loads(RECORD.read_text())["cases"] if RECORD.exists() else {}
        known = {n: (known | {name: found})[n] for n in CASES if n in known or n == name}
        write_json(RECORD, {"benchmark": "verl_runs", **origin("cpu"), "cases": known})
        print(name, found, flush=True)


if __name__ == "__main__":
    main()
