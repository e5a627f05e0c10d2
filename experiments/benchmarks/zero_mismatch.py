"""How many log-probs of sampled tokens differ in any bit between vLLM and a training forward pass?

    python -m experiments.benchmarks zero_mismatch RECORD.json --cases dense-128-nvfp4 ...

Each case is a model, an engine and a trainer in a process of their own. The trainer takes optimizer
steps; after 0, 1 and 20 of them its weights are synced, and sequences are sampled in batches of
several sizes, with prompts in chunks and from the prefix cache, and computed again in the trainer,
packed and padded. Controls leave one ingredient out: they have to differ. Several processes can
fill one record: each leaves what another has written. `--device cpu` rehearses.
"""

import argparse
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from rich.console import Console
from torch import Tensor

from experiments.base.random_model import write_random_checkpoint
from experiments.benchmarks.architectures import TINY
from experiments.benchmarks.exact_cases import Case, cases
from experiments.benchmarks.records import read_continued
from experiments.runs.provenance import origin
from experiments.support.device import require_device
from experiments.support.json_files import write_json
from experiments.support.subprocess_call import call_in_subprocess
from qat_core.checkpoint.architecture import meta_model
from qat_core.checkpoint.load import load_model
from qat_core.exact import log_probs, make_exact
from qat_core.exact.contract import needed
from qat_core.exact.model import model_runner
from qat_core.mismatch import k3
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.engine import Rollouts
from qat_core.rollout.vllm.compat import vllm_version
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.training.preparation import prepare
from qat_core.units import BYTES_PER_GIB
from qat_core.weights.stream import weight_stream

PROMPT, ANSWER = (3, 300), 140  # tokens: fewest and most, most
LONG_PROMPT = (600, 700)  # in chunks of a batch that decodes
TOKENS_AT_ONCE = 16_384  # of one forward pass of the trainer
LEARNING_RATE = 1e-3


def compare_case(name: str, case: Case, device: str) -> list[dict[str, Any]]:
    """Rows of the record: one for each state of the weights and way of batching."""
    if not case.is_norm_repaired:
        _leave_norm_as_it_is()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model"
        write_random_checkpoint(case.config, checkpoint, 0, device)
        recipe = Recipe.full(scale_policy=case.scale_policy) if case.packed else None
        served = plan(meta_model(checkpoint), recipe) if recipe else None
        engine = VllmEngine(checkpoint, served, exact=case.exact_engine, **_settings(case, device))
        model = load_model(checkpoint).to(device)
    if case.exact_trainer:
        make_exact(model)
    if recipe:
        prepare(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    rows, steps = [], 0
    for state in case.states:
        for _ in range(state - steps):
            _train(model, optimizer, case, device)
        steps = state
        if case.expected_zero:
            engine.require_contract(needed(model.config))
        engine.sync(weight_stream(model, served, recipe), served)
        for way, sampled in _samples(engine, case, state):
            found = _compare(model, sampled.to(device), case)
            rows.append(
                {
                    "case": name,
                    "model": _shape(case.config),
                    "engine": _engine_name(case),
                    "trainer": "exact" if case.exact_trainer else "transformers",
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
        sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
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
    return f"{weights}, {mode}{norm}, {'graphs' if case.graphs else 'eager'}"


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


def _train(model: Any, optimizer: torch.optim.Optimizer, case: Case, device: str) -> None:
    """A step that moves weights about as far as a step of RL with a high learning rate."""
    ids = torch.randint(case.config["vocab_size"], (8, 256), device=device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    advantages = torch.randn(8, 1, device=device)
    found = log_probs(logits, ids[:, 1:], model_runner(model.config))
    loss = -(advantages * found).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def _compare(model: Any, sampled: Rollouts, case: Case) -> dict[str, Any]:
    """Tokens whose log-probs differ in any bit, packed; and how far."""
    theirs = sampled.log_probs[sampled.response_mask.bool()]
    ours = torch.cat([_packed_log_probs(model, sampled.select(rows)) for rows in _groups(sampled)])
    difference = ours.double() - theirs.double()
    return {
        "tokens": len(ours),
        "unequal": int((ours != theirs).sum()),
        "largest_difference": float(difference.abs().max()),
        "k3_kl": float(k3(difference).mean()),
    }


def _groups(sampled: Rollouts) -> Iterator[slice]:
    """Rows of at most TOKENS_AT_ONCE tokens."""
    lengths = sampled.attention_mask.sum(-1).tolist()
    first, tokens = 0, 0
    for row, length in enumerate(lengths):
        if tokens + length > TOKENS_AT_ONCE:
            yield slice(first, row)
            first, tokens = row, 0
        tokens += length
    yield slice(first, len(lengths))


def _packed_log_probs(model: Any, sampled: Rollouts) -> Tensor:
    """Of all response tokens, from one pass over the sequences laid one after the other."""
    mask_BT = sampled.attention_mask.bool()
    positions_BT = sampled.attention_mask.cumsum(-1) - 1
    is_response_BT = torch.zeros_like(mask_BT)
    is_response_BT[:, -sampled.response_mask.shape[1] :] = sampled.response_mask.bool()
    ids_T, is_response_T = sampled.input_ids[mask_BT], is_response_BT[mask_BT]
    before = is_response_T.nonzero()[:, 0] - 1
    logits = model(
        input_ids=ids_T[None],
        position_ids=positions_BT[mask_BT][None],
        use_cache=False,
        logits_to_keep=before,
    ).logits[0]
    return log_probs(logits, ids_T[before + 1], model_runner(model.config))


def main(arguments: argparse.Namespace) -> None:
    """Compares the cases and writes the record after each."""
    device = arguments.device
    require_device(device)
    setup = {"benchmark": "zero_mismatch", **origin(device, vllm=vllm_version())}
    for name in arguments.cases:
        case = cases()[name]
        if device == "cpu":
            case = replace(
                case,
                config=case.config | TINY | {"num_attention_heads": 2, "num_key_value_heads": 2},
                exact_engine=False,
                batches=(3,),
                passes=1,
                expected_zero=False,
            )
        rows = call_in_subprocess(compare_case, name, case, device)
        with FileLock(Path(tempfile.gettempdir()) / f"{arguments.record.name}.lock"):
            record = read_continued(arguments.record, setup) or {**setup, "comparisons": []}
            record["comparisons"] += rows
            write_json(arguments.record, record)
