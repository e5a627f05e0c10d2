"""Synthetic results in the format of real runs, with known ratios between the arms."""

from collections.abc import Container
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from analysis.claims_table import Claim
from analysis.load import load_results
from analysis.parity.judge import judge_study
from experiments.study.schema import Run, Study
from experiments.support.json_files import write_json, write_jsonl
from tests.files import read_rows, set_keys
from tests.records import MANIFEST

KL_RATIOS = {"bf16": 1.0, "nvfp4-noqat": 100.0, "nvfp4-qat": 1.05, "nvfp4-qat-ffn": 1.0}
KL_RATIOS |= {"bf16-exact": 0.0, "nvfp4-qat-exact": 0.0}
NOISE_FLOOR = 2e-4
PACKED_SHARE = {"nvfp4-noqat": 0.4, "nvfp4-qat": 0.4, "nvfp4-qat-ffn": 0.55}
BF16_GIB = 1.5e-3
OTHER_METRICS = {
    "response_length/mean": 20.0,
    "actor/entropy": 0.1,
    "actor/grad_norm": 0.5,
    "rollout_corr/kl": -1e-5,
    "timing_s/gen": 2.0,
    "timing_s/old_log_prob": 0.5,
    "timing_s/update_actor": 1.0,
    "timing_s/update_weights": 0.25,
    "timing_s/step": 4.0,
}


def metrics_of(run: Run, num_steps: int) -> list[dict[str, float]]:
    generator = np.random.default_rng([run.seed, len(run.arm), len(run.model)])
    reward = np.linspace(0.3, 0.75, num_steps) + generator.normal(0, 0.02, num_steps)
    kl = NOISE_FLOOR * KL_RATIOS[run.arm] * generator.lognormal(0, 0.2, num_steps)
    rows = zip(range(1, num_steps + 1), kl, reward, strict=True)
    return [
        {"step": step, "rollout_corr/k3_kl": k3, "critic/score/mean": score, **OTHER_METRICS}
        for step, k3, score in rows
    ]


def evaluations_of(study: Study, run: Run) -> list[dict[str, Any]]:
    num_steps, num_prompts = study.rl.steps, study.evaluation.prompts
    generator = np.random.default_rng([run.seed, 7, len(run.arm), len(run.model)])
    evaluations: list[dict[str, Any]] = []
    accuracies = {0: 0.35, num_steps: 0.7}
    accuracies.setdefault(num_steps // 2, 0.5)
    for step, accuracy in accuracies.items():
        for precision, decoding in product(("bf16", "nvfp4"), ("greedy", "sampled")):
            samples = 4 if decoding == "sampled" else 1
            lost = 0.1 if precision == "nvfp4" and run.arm in ("bf16", "nvfp4-noqat") else 0.0
            correct = generator.binomial(samples, accuracy - lost, num_prompts)
            evaluations.append(
                {
                    "step": step,
                    "precision": precision,
                    "decoding": decoding,
                    "prompts": num_prompts,
                    "samples_per_prompt": samples,
                    "accuracy": float(correct.mean() / samples),
                    "correct": correct.tolist(),
                    "response_tokens_mean": 20.0,
                    "settings": study.evaluation.model_dump(),
                }
            )
    return sorted(evaluations, key=itemgetter("step"))


def manifest_of(study: Study, run: Run) -> dict[str, object]:
    packed = PACKED_SHARE[run.arm] * BF16_GIB if run.arm in PACKED_SHARE else None
    memory = {
        "predicted_bf16_gib": BF16_GIB,
        "measured_bf16_gib": BF16_GIB,
        "predicted_packed_gib": packed,
        "measured_packed_gib": packed and packed * 1.001,
    }
    names = {"run": run.id, "study": study.study, **run._asdict(), "seeds": {"run": run.seed}}
    digests = {"base": f"{run.model} {run.seed}"}
    recorded = {"status": "finished", "memory": memory, "started_at": "2027-01-01T00:00:00+00:00"}
    config = study.training_config(run)
    return MANIFEST | names | recorded | {"digests": digests, "config": config}


def drift_of(num_steps: int) -> list[dict[str, object]]:
    """Two kinds in two layers; layer 1 moves twice as fast, and k_proj not at all."""
    return [
        {"step": step, "layer": layer, "kind": kind, "relative_error": 0.1, "flipped_codes": flips}
        for step in range(10, num_steps + 1, 10)
        for layer in (0, 1)
        for kind, flips in (("self_attn.k_proj", 0.0), ("mlp.up_proj", 0.1 * (1 + layer)))
    ] + [{"step": num_steps, "layer": n, "kind": "kl", "kl": 0.01**n} for n in (0, 1)]


def shortened(study: Study, num_steps: int, num_prompts: int) -> Study:
    """The study with other steps and prompts."""
    changes: dict[str, Any] = {
        "rl": study.rl.model_copy(update={"steps": num_steps}),
        "evaluation": study.evaluation.model_copy(update={"prompts": num_prompts}),
    }
    return study.model_copy(update=changes)


def write_results(study: Study, folder: Path) -> None:
    """All runs of a study, as the launcher and the evaluation write them."""
    num_steps = study.rl.steps
    for run in study.runs:
        run_dir = folder / run.id
        run_dir.mkdir(parents=True)
        write_jsonl(run_dir / "metrics.jsonl", metrics_of(run, num_steps))
        write_json(run_dir / "eval.json", evaluations_of(study, run))
        write_json(run_dir / "manifest.json", manifest_of(study, run))
        if run.arm in PACKED_SHARE:
            write_jsonl(run_dir / "drift.jsonl", drift_of(num_steps))


def rewrite_metrics(
    results_dir: Path, study: Study, arm: str, steps: Container[int] | None = None, **values: Any
) -> None:
    """Sets metrics of an arm's runs, at these steps or at all."""
    for run in (run for run in study.runs if run.arm == arm):
        path = results_dir / run.id / "metrics.jsonl"
        rows = read_rows(path)
        for row in (row for row in rows if steps is None or row["step"] in steps):
            row.update(values)
        write_jsonl(path, rows)


def stop(results_dir: Path, run: Run, num_steps: int) -> None:
    """Cuts a run as its KL gate would have."""
    metrics = results_dir / run.id / "metrics.jsonl"
    write_jsonl(metrics, read_rows(metrics)[:num_steps])
    reason = "stopped: rollout_corr/k3_kl beyond 1"
    set_keys(metrics.with_name("manifest.json"), reason=reason)


def judge(study: Study, folder: Path, trained: Study | None = None) -> dict[tuple[str, str], Claim]:
    """The claims about the results of a study, or of another one, by model and name."""
    table = judge_study(study, load_results(trained or study, folder))
    return {(claim.model, claim.name): claim for claim in table.claims}
