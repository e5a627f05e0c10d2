"""Is vLLM, after 100 weight syncs, bit for bit the engine that loads the same weights afresh?

    python -m experiments.benchmarks.bitwise experiments/records/benchmarks/bitwise_h200.json

Compares sampled tokens and their log-probs, CUDA graphs on, of: an engine synced 100 times with
changing weights; the same after sleep (level 2), wake-up and one sync; new engines that load the
last weights from disk, stored in compressed-tensors' and in ModelOpt's form.

vLLM's own noise has to stay out: its MoE kernels are not deterministic where a step has 1024 or
more (token, expert) pairs, because `moe_align_block_size` then orders the tokens of an expert by
atomic additions and Marlin splits its sums by that order. So a step here has at most 128 tokens;
`wide` shows the noise of steps of 256 tokens without any sync. `--device cpu` rehearses.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.benchmarks.architectures import ARCHITECTURES, TINY, engine_settings
from experiments.benchmarks.device import require_device
from experiments.benchmarks.random_model import write_random_checkpoint
from experiments.runs.provenance import origin
from experiments.support.cli import run_cli
from experiments.support.subprocess_call import call_in_subprocess
from qat_core.checkpoint import export
from qat_core.plan import plan
from qat_core.recipe import Recipe
from qat_core.rollout.engine import Rollouts
from qat_core.rollout.vllm.engine import VllmEngine, vllm_version
from qat_core.weights.stream import weight_stream

RECIPE = Recipe.full()
NARROW, WIDE = 128, 256
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"syncs": 100, "tokens": 64, "shrink": {"num_hidden_layers": 4}},
    "cpu": {"syncs": 3, "tokens": 8, "shrink": TINY},
}
PROMPT_TOKENS = 8


def run_architecture(config: dict[str, Any], device: str, folder: Path) -> dict[str, Any]:
    """Whether each way to the last weights gives the same sample."""
    write_random_checkpoint(config, folder / "base", seed=0, device=device)
    figures, samples = call_in_subprocess(sync_repeatedly, folder, device)
    for kind in ("compressed-tensors", "modelopt"):
        samples[f"fresh {kind}"] = call_in_subprocess(load_and_sample, folder / kind, device)
    expected = samples["synced"]
    equal = {name: _is_equal(sample, expected) for name, sample in samples.items()}
    equal["other weights"] = _is_equal(figures.pop("first"), expected)  # has to be false
    wide = call_in_subprocess(repeat_wide, folder / "compressed-tensors", device)
    return {**figures, "tokens": int(expected.response_mask.sum()), "equal": equal, "wide": wide}


@torch.no_grad()
def sync_repeatedly(folder: Path, device: str) -> tuple[dict[str, Any], dict[str, Rollouts]]:
    """Samples of one engine on its way; leaves its last weights in both forms in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16).to(device)
    planned = plan(model, RECIPE)
    can_sleep = {"enable_sleep_mode": True} if device == "cuda" else {}
    engine = VllmEngine(folder / "base", planned, **_narrow(device), **can_sleep)

    def sync() -> float:
        start = perf_counter()
        engine.sync(weight_stream(model, planned, RECIPE), planned)
        return perf_counter() - start

    sync()
    first = _sample(engine, device)
    times_s = []
    for seed in range(SIZES[device]["syncs"]):
        _change(model, seed)
        times_s.append(sync())
    samples = {"synced": _sample(engine, device), "synced, again": _sample(engine, device)}
    if can_sleep:
        engine.sleep()
        engine.wake_up()
        sync()
        samples["slept and synced"] = _sample(engine, device)
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    export(model, RECIPE, folder / "compressed-tensors", tokenizer)
    export(model, RECIPE, folder / "modelopt", tokenizer, "modelopt")
    figures = {"syncs": len(times_s), "median_sync_s": median(times_s), "first": first}
    return figures, samples


def _change(model: nn.Module, seed: int) -> None:
    """Moves all weights by 5 % of their size: more than any optimizer step."""
    generator = torch.Generator(model.device).manual_seed(seed)  # type: ignore[arg-type]
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
        parameter.mul_(1 + 0.05 * noise.to(parameter.dtype))


def load_and_sample(checkpoint: Path, device: str) -> Rollouts:
    """What a new engine samples."""
    return _sample(VllmEngine(checkpoint, **_narrow(device)), device)


def repeat_wide(checkpoint: Path, device: str) -> dict[str, Any]:
    """Whether an engine repeats itself, with nothing in between, at more tokens a step."""
    engine = VllmEngine(checkpoint, **engine_settings(device, WIDE))
    samples = [_sample(engine, device, WIDE) for _ in range(3)]
    return {"sequences": WIDE, "repeats": [_is_equal(other, samples[0]) for other in samples[1:]]}


def _narrow(device: str) -> dict[str, Any]:
    return engine_settings(device, NARROW) | {
        "max_model_len": NARROW,
        "max_num_batched_tokens": NARROW,
        "enable_prefix_caching": False,
    }


def _sample(engine: VllmEngine, device: str, sequences: int = NARROW) -> Rollouts:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, 60, (sequences, PROMPT_TOKENS), generator=generator).tolist()
    return engine.generate(prompts, SIZES[device]["tokens"], 1.0, seed=0)


def _is_equal(first: Rollouts, second: Rollouts) -> bool:
    same_tokens = torch.equal(first.input_ids, second.input_ids)
    return same_tokens and torch.equal(first.log_probs, second.log_probs)


def main() -> None:
    """Compares for both architectures and writes the record after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--models", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    arguments = parser.parse_args()
    require_device(arguments.device)
    size = SIZES[arguments.device]
    record: dict[str, Any] = {
        "benchmark": "bitwise",
        **origin(arguments.device, vllm=vllm_version()),
        "engine": _narrow(arguments.device),
        "models": {},
    }
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            config = ARCHITECTURES[name] | size["shrink"]
            record["models"][name] = run_architecture(config, arguments.device, Path(folder))
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")
        Console().print(name, record["models"][name])


if __name__ == "__main__":
    run_cli(main)
