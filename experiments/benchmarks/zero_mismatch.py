"""How many log-probs of sampled tokens differ in any bit between vLLM and a training forward pass?

Each case is a model, an engine and a trainer in a process of their own. The trainer takes optimizer
steps; after some of them its weights are synced, and sequences are sampled in batches of several
sizes, with prompts in chunks and from the prefix cache, and computed again in the trainer, packed.
Controls leave one ingredient out: they have to differ. Several processes can fill one record: each
leaves what another has written. `--device cpu` rehearses.
"""

import argparse
import random
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.console import Console

from experiments.base.random_model import write_random_checkpoint
from experiments.benchmarks.architectures import TINY
from experiments.benchmarks.exact_cases import Case, cases
from experiments.benchmarks.exact_engines import start_engine
from experiments.benchmarks.exact_trainers import RankedTrainer, Trainer, recipe_of
from experiments.benchmarks.ranks import require_gpus_for
from experiments.benchmarks.records import ENGINE_PACKAGES, Column, read_continued, shape_of
from experiments.runs.provenance import origin
from experiments.support.gpu_locks import require_device
from experiments.support.json_files import write_json
from experiments.support.subprocess_call import call_in_subprocess
from qat_core.checkpoint.architecture import meta_model
from qat_core.planning.plan import plan
from qat_core.rollout.engine import Rollouts
from qat_core.rollout.vllm.compat import vllm_version
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.units import BYTES_PER_GIB

PROMPT, ANSWER = (3, 300), 140  # tokens: fewest and most, most
LONG_PROMPT = (600, 700)  # in chunks of a batch that decodes
COLUMNS = {
    "case": Column(heading="Case"),
    "model": Column(heading="Model"),
    "engine": Column(heading="Engine"),
    "trainer": Column(heading="Trainer"),
    "after": Column(heading="After steps"),
    "tokens": Column(heading="Tokens", format=","),
    "unequal": Column(heading="Unequal", format=","),
    "largest_difference": Column(heading="Largest difference, nats", format=".1e"),
    "k3_kl": Column(heading="k3 KL, nats a token", format=".1e"),
    "expected_zero": Column(heading="Expected"),
}
NOTE = (
    "Log-probs of sampled tokens that differ in any bit, over all states of the weights and all "
    "ways of batching; each rank of FSDP2 compares all tokens, and counts them. After: optimizer "
    "steps and a sync. Moved by signs: a step moves weights by the signs of their gradients, as "
    "AdamW's first does; its moments do not fit. A control leaves one ingredient out, and has to "
    "differ."
)


def compare_case(name: str, case: Case, device: str) -> list[dict[str, Any]]:
    """Rows of the record: one for each state of the weights and way of batching."""
    if not case.is_norm_repaired:
        _leave_norm_as_it_is()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model"
        write_random_checkpoint(case.config, checkpoint, 0, device)
        recipe = recipe_of(case)
        served = plan(meta_model(checkpoint), recipe) if recipe else None
        engine = start_engine(case, checkpoint, served, _settings(case, device))
        trainer = (RankedTrainer if case.ranks > 1 else Trainer)(case, checkpoint, device)
    rows: list[dict[str, Any]] = []
    sampled: Rollouts | None = None
    steps = 0
    for state in case.states:
        for _ in range(state - steps):
            trainer.train()
        if sampled and not trainer.compare(sampled)["unequal"]:
            raise ValueError(f"{name}: steps {steps} to {state} moved no log-prob")
        steps = state
        if case.expected_zero:
            engine.require_contract(trainer.needed())
        engine.sync(trainer.weights(), served)
        for way, sampled in _samples(engine, case, state):
            found = trainer.compare(sampled)
            rows.append(
                {
                    "case": name,
                    "model": _shape(case.config),
                    "engine": _engine_name(case),
                    "trainer": _trainer_name(case),
                    "after": state,
                    "batch": way,
                    **found,
                    "expected_zero": case.expected_zero,
                }
            )
            Console().print(rows[-1])
    return rows


def _settings(case: Case, device: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_seqs": 320,
        "max_num_batched_tokens": 2048,  # long prompts come in chunks
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 8 * BYTES_PER_GIB if device == "cuda" else 2**27,
        "gpu_memory_utilization": 0.01,
        "enforce_eager": not case.graphs or device == "cpu",
    }
    if case.graphs and device == "cuda":
        sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]  # more tokens have no graph
        settings["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sizes,
        }
    return settings


def _leave_norm_as_it_is() -> None:
    from vllm.model_executor.layers.batch_invariant import rms_norm_batch_invariant

    from qat_core.rollout.vllm.exact import install as exact

    exact.norm = rms_norm_batch_invariant


def _shape(config: dict[str, Any]) -> str:
    kind, layers = config["model_type"], config["num_hidden_layers"]
    return f"{kind}, {layers} layers, hidden {config['hidden_size']}, head {config['head_dim']}"


def _engine_name(case: Case) -> str:
    weights = f"NVFP4 {case.scale_policy}" if case.packed else "BF16"
    mode = "exact" if case.exact_engine else "vLLM's kernels"
    norm = "" if case.is_norm_repaired else ", norm not repaired"
    ranks = f", {case.engine_ranks} ranks" if case.engine_ranks > 1 else ""
    experts = ", experts shared out" if case.expert_parallel else ""
    return f"{weights}, {mode}{norm}{ranks}{experts}, {'graphs' if case.graphs else 'eager'}"


def _trainer_name(case: Case) -> str:
    name = "exact" if case.exact_trainer else "transformers"
    ranks = f", FSDP2 over {case.ranks} GPUs" if case.ranks > 1 else ""
    added = "" if case.adds_as_ranks else ", added as one rank"
    moved = "" if case.has_moments else ", moved by signs"
    return f"{name}{ranks}{', offloaded' if case.is_offloaded else ''}{moved}{added}"


def _samples(engine: VllmEngine, case: Case, state: int) -> Iterator[tuple[str, Rollouts]]:
    vocabulary = case.config["vocab_size"]

    def draw(count: int, lengths: tuple[int, int], seed: str) -> list[list[int]]:
        drawn = random.Random(seed)
        return [
            [drawn.randrange(vocabulary) for _ in range(drawn.randint(*lengths))]
            for _ in range(count)
        ]

    for size in case.batches:
        for turn in range(case.passes if size == max(case.batches) else 1):
            prompts = draw(size, PROMPT, f"{state} {size} {turn}")
            yield str(size), _sample(engine, prompts)
    if case.expected_zero:
        yield "from the prefix cache", _sample(engine, prompts)
        mixed = draw(24, LONG_PROMPT, f"{state} long") + draw(40, PROMPT, f"{state} short")
        yield "prompts in chunks", _sample(engine, mixed)


def _sample(engine: VllmEngine, prompts: list[list[int]]) -> Rollouts:
    return engine.sample(prompts, ANSWER, None, temperature=1.0)


def main(arguments: argparse.Namespace) -> None:
    """Compares the cases and writes the record after each."""
    device = arguments.device
    require_device(device)
    chosen = {name: cases()[name] for name in arguments.cases}
    require_gpus_for("--cases", [case.num_gpus for case in chosen.values()], device)
    where = origin(device, arguments.record, vllm=vllm_version())
    shape = shape_of({}, COLUMNS, NOTE, (*ENGINE_PACKAGES, "transformers"))
    setup = {"benchmark": "zero_mismatch", **where, **shape}
    _read_without(arguments.record, setup, chosen)  # a mistake is refused before an hour's work
    arguments.record.parent.mkdir(parents=True, exist_ok=True)
    for name, case in chosen.items():
        if device == "cpu":
            case = replace(
                case,
                config=case.config | TINY | {"num_attention_heads": 2, "num_key_value_heads": 2},
                exact_engine=False,
                batches=(3,),
                passes=1,
                is_offloaded=False,
                expected_zero=False,
            )
        rows = call_in_subprocess(compare_case, name, case, device)
        with FileLock(Path(tempfile.gettempdir()) / f"{arguments.record.name}.lock"):
            record = _read_without(arguments.record, setup, [name])
            record["comparisons"] += rows
            write_json(arguments.record, record)


def _read_without(path: Path, setup: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The record that these cases are added to; ValueError where it has one, or is another's."""
    record = read_continued(path, setup) or {**setup, "comparisons": []}
    known = {row["case"] for row in record["comparisons"]}
    if again := [name for name in names if name in known]:
        raise ValueError(
            f"--cases: {', '.join(again)}: {path} has them; name others, or a new file"
        )
    return record
