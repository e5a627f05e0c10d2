"""Is vLLM, after 100 weight syncs, bit for bit the engine that loads the same weights afresh?

    python -m experiments.benchmarks bitwise experiments/records/benchmarks/bitwise_h200.json

Two engines are synced 100 times with the same changing weights, one through vLLM's reload, one in
place, and each once more after sleep (level 2) and wake-up. They are compared with new engines that
load the last weights from disk, stored in compressed-tensors' and in ModelOpt's form: sampled
tokens and their log-probs, CUDA graphs on, and the parameters and buffers of the served model.

`--kernels humming` multiplies by Humming instead of Marlin, `humming-experts` only experts;
`vllm-humming` by vLLM's own, through the reload alone. The
default tiles of Humming's linear layers do not repeat their bits (`matmul_bits`), so that no two
samples need be equal there, which `synced, again` shows: then the tensors alone decide. Experts by
Humming do repeat: `humming-experts` compares samples too. ModelOpt's form is compared by samples
alone, as it names its tensors otherwise, and not with `humming`, which leaves its linear layers to
Marlin.
`--compile` is vLLM with torch.compile, its default.

vLLM's own noise has to stay out: its MoE kernels are not deterministic where a step has 1024 or
more (token, expert) pairs, because `moe_align_block_size` then orders the tokens of an expert by
atomic additions and Marlin splits its sums by that order. So a step here has at most 128 tokens.
`--device cpu` rehearses: there both ways are the reload, and no kernel can be chosen.
"""

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoTokenizer

from experiments.base.random_model import write_random_checkpoint
from experiments.benchmarks.architectures import ARCHITECTURES, TINY, engine_settings
from experiments.benchmarks.engines import set_kernels
from experiments.benchmarks.records import ENGINE_PACKAGES, Column, Row, flat, shape_of
from experiments.runs.provenance import origin
from experiments.support.device import require_device
from experiments.support.json_files import write_json
from experiments.support.subprocess_call import call_in_subprocess
from qat_core import export
from qat_core.checkpoint.load import load_model
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.engine import Rollouts
from qat_core.rollout.vllm.compat import vllm_version
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.rollout.vllm.switches import IN_PLACE_VARIABLE
from qat_core.weights.stream import weight_stream

RECIPE = Recipe.full()
NARROW = 128  # tokens of a step
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"syncs": 100, "tokens": 64, "shrink": {"num_hidden_layers": 4}},
    "cpu": {"syncs": 3, "tokens": 8, "shrink": TINY},
}
PROMPT_TOKENS = 8
# Scales of an FP8 KV cache, and of activations, which W4A16 does not round: nothing reads them, no
# checkpoint of ours has them, and an engine that begins without weights fills them at random.
OF_ATTENTION = {"_q_scale", "_k_scale", "_v_scale", "_prob_scale", "q_scale", "k_scale", "v_scale"}
OF_ACTIVATIONS = "input_"
# what the states of an engine that is synced in this way are called
WAYS = {"reload": "synced", "in place": "in place"}
COLUMNS = {
    "model": Column(heading="Model"),
    "came_by": Column(heading="Weights came by"),
    "syncs": Column(heading="Syncs", format=","),
    "tokens": Column(heading="Sampled tokens compared", format=","),
    "samples": Column(heading="Tokens and log-probs equal in all bits"),
    "weights": Column(heading="Served tensors equal in all bits"),
    "unequal": Column(heading="Not equal"),
}
NOTE = (
    "Is vLLM after many weight syncs the engine that loads the same weights from disk? Kernels: "
    "nvfp4 is Marlin, humming-experts Marlin with experts by Humming, repeatable likewise with "
    "many rows unpacked. Synced, and slept and synced: through vLLM's reload. In place: past it, "
    "as by default. Again: the same engine, with nothing in between. Fresh: a new engine that "
    "loads the weights from disk, in that form. Other weights, of the first sync, must differ. "
    "Served tensors: parameters and buffers of vLLM's model, without scales that W4A16 does not "
    "read; ModelOpt's form, which names them otherwise, is compared by samples alone."
)


class State(NamedTuple):
    """What an engine samples, and a digest of each tensor that it serves."""

    sample: Rollouts
    tensors: dict[str, str]


def run_architecture(
    config: dict[str, Any], kernels: str, device: str, compiled: bool, folder: Path
) -> Any:
    """Whether each way to the last weights gives the same sample and the same tensors."""
    write_random_checkpoint(config, folder / "base", seed=0, device=device)
    ways: dict[str, Any] = {}
    states: dict[str, State] = {}
    for way in [it for it in WAYS if (it, kernels) != ("in place", "vllm-humming")]:
        ways[way], found = call_in_subprocess(sync_repeatedly, folder, way, device, compiled)
        states |= found
    of_linear = ("humming", "vllm-humming")
    fresh = ["compressed-tensors"] + (["modelopt"] if kernels not in of_linear else [])
    for kind in fresh:
        states[f"fresh {kind}"] = call_in_subprocess(load, folder / kind, device, compiled)
    tokens = int(states["synced"].sample.response_mask.sum())
    syncs = SIZES[device]["syncs"]
    return {"syncs": syncs, "ways": ways, "tokens": tokens, **compare(states)}


def summary(model: str, found: dict[str, Any]) -> Row:
    """A row: what is equal, in words, and all that was found."""
    repeats_itself = found["equal"].get("synced, again", True)
    asked = [found["equal"]] if repeats_itself else []
    in_place = any(way["in_place"] for way in found["ways"].values())
    return {
        "model": model,
        "came_by": "reload and in place" if in_place else "reload",
        "samples": _named([found["equal"]], True) if repeats_itself else "no: its own differ",
        "weights": _named([found["equal_weights"]], True),
        "unequal": _named([*asked, found["equal_weights"]], False),
        **flat(found),
    }


def _named(compared: Sequence[dict[str, bool]], equal: bool) -> str:
    names = (name for of in compared for name, it in of.items() if it == equal)
    return "; ".join(dict.fromkeys(names))


def compare(states: dict[str, State]) -> dict[str, Any]:
    """Which states have the sample and the tensors of `synced`; `other weights` must not."""
    expected = states["synced"]
    named_alike = {name: state for name, state in states.items() if name != "fresh modelopt"}
    unequal = {name: differing(it.tensors, expected.tensors) for name, it in named_alike.items()}
    return {
        "equal": {name: _is_equal(it.sample, expected.sample) for name, it in states.items()},
        "equal_weights": {name: not tensors for name, tensors in unequal.items()},
        "tensors": len(expected.tensors),
        "differing_tensors": {n: ", ".join(them[:8]) for n, them in unequal.items() if them},
    }


@torch.no_grad()
def sync_repeatedly(
    folder: Path, way: str, device: str, compiled: bool
) -> tuple[dict[str, Any], dict[str, State]]:
    """States of one engine on its way; the reload leaves its last weights in both forms.

    Raises:
        ValueError: on a GPU, the engine is not synced in the way that was asked for.
    """
    os.environ[IN_PLACE_VARIABLE] = str(int(way == "in place"))
    model = load_model(folder / "base").to(device)
    planned = plan(model, RECIPE)
    can_sleep = {"enable_sleep_mode": True} if device == "cuda" else {}
    engine = VllmEngine(folder / "base", planned, **_narrow(device, compiled), **can_sleep)

    def sync() -> None:
        engine.sync(weight_stream(model, planned, RECIPE), planned)

    sync()
    is_in_place = engine.on_worker(writes_in_place)
    if device == "cuda" and is_in_place != (way == "in place"):
        raise ValueError(f"{way}: vLLM's engine was synced otherwise; name other --models")
    other = {} if way == "in place" else {"other weights": _state(engine, device)}
    for seed in range(SIZES[device]["syncs"]):
        _change(model, seed)
        sync()
    name = WAYS[way]
    states = {name: _state(engine, device), f"{name}, again": _state(engine, device)}
    if can_sleep:
        engine.sleep()
        engine.wake_up()
        sync()
        states[f"slept and {name}"] = _state(engine, device)
    if way == "reload":
        tokenizer = AutoTokenizer.from_pretrained(folder / "base")
        export(model, RECIPE, folder / "compressed-tensors", tokenizer)
        export(model, RECIPE, folder / "modelopt", tokenizer, "modelopt")
    return {"in_place": is_in_place}, states | other


def _change(model: nn.Module, seed: int) -> None:
    """Moves all weights by 5 % of their size: more than any optimizer step."""
    generator = torch.Generator(model.device).manual_seed(seed)  # type: ignore[arg-type]
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
        parameter.mul_(1 + 0.05 * noise.to(parameter.dtype))


def load(checkpoint: Path, device: str, compiled: bool) -> State:
    """A new engine's state."""
    return _state(VllmEngine(checkpoint, **_narrow(device, compiled)), device)


def _narrow(device: str, compiled: bool) -> dict[str, Any]:
    return engine_settings(device, NARROW, compiled=compiled) | {
        "max_model_len": NARROW,
        "max_num_batched_tokens": NARROW,
        "enable_prefix_caching": False,
    }


def _state(engine: VllmEngine, device: str) -> State:
    return State(_sample(engine, device), engine.on_worker(digests))


def _sample(engine: VllmEngine, device: str) -> Rollouts:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, 60, (NARROW, PROMPT_TOKENS), generator=generator).tolist()
    return engine.generate(prompts, SIZES[device]["tokens"], 1.0, seed=0)


def _is_equal(first: Rollouts, second: Rollouts) -> bool:
    same_tokens = torch.equal(first.input_ids, second.input_ids)
    return same_tokens and torch.equal(first.log_probs, second.log_probs)


def digests(worker: Any) -> dict[str, str]:
    """SHA-256 of the bytes of each parameter and buffer of vLLM's model; runs in its worker."""
    model = worker.model_runner.get_model()
    held = chain(model.named_parameters(), model.named_buffers())
    return {name: _digest(tensor) for name, tensor in held if _is_read(name.rpartition(".")[2])}


def differing(some: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Names of the tensors that differ or are in one engine alone."""
    names = sorted(some.keys() | others.keys())
    return [name for name in names if some.get(name) != others.get(name)]


def writes_in_place(worker: Any) -> bool:
    """Whether the last sync went past vLLM's reload; runs in its worker."""
    return bool(getattr(worker, "qat_core_targets", {}))


def _is_read(leaf: str) -> bool:
    return leaf not in OF_ATTENTION and OF_ACTIVATIONS not in leaf


def _digest(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return sha256(values.numpy().tobytes()).hexdigest()


def main(arguments: argparse.Namespace) -> None:
    """Compares for both architectures and writes the record after each."""
    require_device(arguments.device)
    set_kernels(arguments.kernels)
    size = SIZES[arguments.device]
    settings = {"kernels": arguments.kernels, "torch compile": arguments.compile}
    record = {
        "benchmark": "bitwise",
        **origin(arguments.device, vllm=vllm_version()),
        "engine": _narrow(arguments.device, arguments.compile),
        **shape_of(settings, COLUMNS, NOTE, ENGINE_PACKAGES),
    }
    rows: list[Row] = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            config = ARCHITECTURES[name] | size["shrink"]
            found = run_architecture(
                config, arguments.kernels, arguments.device, arguments.compile, Path(folder)
            )
        rows.append(summary(name, found))
        write_json(arguments.record, {**record, "rows": rows})
        Console().print(rows[-1])
