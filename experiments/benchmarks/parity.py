"""Do trainer and vLLM agree on the probability of sampled tokens? k3 KL of four arms.

A `.csv.gz` beside the record has every batch of sequences. Per model, one BF16 engine and one NVFP4
engine serve all arms and seeds, each with heavy-tailed random weights of its own, through syncs.
A model that was not trained rounded is less sure of itself once it is, and the same noise moves its
log-probs further: `rounded` is the floor of that model, its rounded weights served in BF16.
"""

import argparse
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from rich.console import Console
from torch import Tensor, nn

from experiments.base.random_model import write_random_checkpoint
from experiments.benchmarks.architectures import ARCHITECTURES, TINY, engine_settings
from experiments.benchmarks.engines import set_kernels
from experiments.benchmarks.records import ENGINE_PACKAGES, Column, shape_of
from experiments.rl.metric_names import K3_KL
from experiments.rl.policy import Policy
from experiments.runs.provenance import origin
from experiments.support.gpu_locks import require_device
from experiments.support.json_files import write_json
from experiments.support.subprocess_call import call_in_subprocess
from qat_core.checkpoint.architecture import meta_model
from qat_core.mismatch import mismatch_metrics
from qat_core.nvfp4 import PackedTensor, dequantize
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.engine import Rollouts
from qat_core.rollout.vllm.compat import vllm_version
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.weights.stream import weight_stream

POW2, AMAX = Recipe.full(), Recipe.full(scale_policy="amax")
# arm: what training rounds, what is packed
ARMS = {
    "bf16": (None, None),
    "rounded": (POW2, None),
    "qat-pow2": (POW2, POW2),
    "qat-amax": (AMAX, AMAX),
    "no-qat": (None, POW2),
}
ENGINES = (("bf16", "rounded"), ("qat-pow2", "qat-amax", "no-qat"))
COLUMNS = {"model": Column(heading="Model"), "arm": Column(heading="Arm")}
COLUMNS["tokens"] = Column(heading="Tokens", format=",")
NUM_SEEDS = 3
SEQUENCES = {"cuda": 256, "cpu": 8}
MIN_TOKENS = {"cuda": 70_000, "cpu": 100}  # a seed
NEW_TOKENS = {"cuda": 288, "cpu": 16}
MAX_NUM_SEQS = 256
MAX_MODEL_LEN = 320
Batch = dict[str, Any]  # some sampled sequences: arm, seed, means over their tokens, and these
ROWS = 32  # sequences of one forward pass of the trainer: a batch of the statistics


class Case(NamedTuple):
    """A model with random weights: a checkpoint a seed, and the prompts that are drawn from."""

    checkpoints: tuple[Path, ...]
    questions: list[list[int]]


def make_case(name: str, folder: Path, device: str) -> Case:
    """Writes the checkpoints of an architecture into `folder`."""
    config = ARCHITECTURES[name] | (TINY if device == "cpu" else {})
    checkpoints = tuple(folder / str(seed) for seed in range(NUM_SEEDS))
    for seed, checkpoint in enumerate(checkpoints):
        write_random_checkpoint(config, checkpoint, seed, device)
    generator = torch.Generator().manual_seed(0)
    questions = torch.randint(5, config["vocab_size"], (1024, 8), generator=generator)
    return Case(checkpoints, questions.tolist())


def measure_arms(case: Case, arms: tuple[str, ...], device: str, compiled: bool) -> list[Batch]:
    """All batches of the arms that one engine can serve."""
    _, packed = ARMS[arms[0]]
    served = plan(meta_model(case.checkpoints[0]), packed) if packed else None
    settings = engine_settings(device, MAX_NUM_SEQS, compiled=compiled)
    settings["max_model_len"] = MAX_MODEL_LEN
    engine = VllmEngine(case.checkpoints[0], served, **settings)
    return [
        {"arm": arm, "seed": seed, **batch}
        for arm in arms
        for seed in range(len(case.checkpoints))
        for batch in measure_seed(engine, case, arm, seed, device)
    ]


@torch.no_grad()
def measure_seed(engine: VllmEngine, case: Case, arm: str, seed: int, device: str) -> list[Batch]:
    """Syncs the weights of a seed and samples until there are enough tokens."""
    trained, packed = ARMS[arm]
    policy = Policy(case.checkpoints[seed], trained, device)
    planned = plan(policy.model, packed) if packed else None
    if trained and not packed:
        engine.sync(_rounded(policy.model, trained))
    else:
        engine.sync(weight_stream(policy.model, planned, packed), planned)
    batches: list[Batch] = []
    step = 0
    while sum(batch["tokens"] for batch in batches) < MIN_TOKENS[device]:
        prompts = random.Random(f"{seed} {step}").choices(case.questions, k=SEQUENCES[device])
        sampled = engine.generate(prompts, NEW_TOKENS[device], 1.0, seed * 1000 + step)
        starts = range(0, len(sampled.input_ids), ROWS)
        batches += [
            _compare(policy, sampled.select(slice(start, start + ROWS)), device) for start in starts
        ]
        step += 1
    return batches


def _rounded(model: nn.Module, recipe: Recipe) -> Iterator[tuple[str, Tensor]]:
    """The values behind the packed bytes; with scales that are powers of two exact in BF16."""
    for name, weight in weight_stream(model, plan(model, recipe), recipe):
        yield name, dequantize(weight) if isinstance(weight, PackedTensor) else weight


def _compare(policy: Policy, sampled: Rollouts, device: str) -> Batch:
    trained_BT = policy.log_probs(sampled.to(device))[0].cpu()
    metrics = mismatch_metrics(trained_BT, sampled.log_probs, sampled.response_mask, 2.0)
    return {
        "k3_kl": float(metrics[K3_KL]),
        "kl": float(metrics["rollout_corr/kl"]),
        "tokens": int(sampled.response_mask.sum()),
    }


def main(arguments: argparse.Namespace) -> None:
    """Measures all models and writes the record after each."""
    device = arguments.device
    require_device(device)
    set_kernels(arguments.kernels)
    settings = {
        "weights": "random",
        "kernels": arguments.kernels,
        "torch compile": arguments.compile,
    }
    where = origin(device, vllm=vllm_version())
    record = {"benchmark": "parity", **where, **shape_of(settings, COLUMNS, "", ENGINE_PACKAGES)}
    batches: list[Batch] = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            case = make_case(name, Path(folder), device)
            for arms in ENGINES:
                found = call_in_subprocess(measure_arms, case, arms, device, arguments.compile)
                batches += [{"model": name, **batch} for batch in found]
        frame = pd.DataFrame(batches)
        tokens: Any = frame.groupby(["model", "arm"], sort=False, as_index=False)["tokens"].sum()
        rows = tokens.to_dict("records")
        write_json(arguments.record, {**record, "rows": rows})
        # without a time of writing, so that equal batches make equal files
        compression: Any = {"method": "gzip", "mtime": 0}
        frame.to_csv(arguments.record.with_suffix(".csv.gz"), index=False, compression=compression)
        Console().print(rows)
