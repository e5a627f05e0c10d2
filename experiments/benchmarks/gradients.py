"""How far are gradients of the exact mode from FP32's, beside those of transformers in BF16?

    python -m experiments.benchmarks gradients RECORD.json [--worlds 2] [--device cpu]

Of each parameter the distance to the reference, over the reference's norm. Reference: the same
model in FP32, with rounded weights where training is quantization-aware. With `--worlds` ranks of
FSDP2 have a sequence each; their gradients are compared with those of one device, of which the
sequences' mean is taken in FP32, and these with themselves, computed once more: FlashAttention's
backward pass adds in an order of its own each time.
"""

import argparse
import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.benchmarks.architectures import read_architecture
from experiments.benchmarks.qat_layers import shard
from experiments.benchmarks.ranks import join_ranks, require_gpus_for
from experiments.benchmarks.records import Column, Row, complete, shape_of
from experiments.benchmarks.timing import allow_split_sums, quartiles
from experiments.runs.provenance import origin
from experiments.support.device import require_device
from experiments.support.json_files import write_json
from qat_core.exact import log_probs, make_exact
from qat_core.exact.model import model_runner
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare

LAYERS = {"cuda": {"qwen3-8b": 4, "qwen3-30b-a3b": 2}, "cpu": {"nano-dense": 2, "nano-moe": 2}}
TOKENS = {"cuda": 1024, "cpu": 32}  # of each sequence
VOCABULARY = 8192
SEQUENCES = 2  # of one device
COLUMNS = {
    "shape": Column(heading="Shape"),
    "layers": Column(heading="Layers"),
    "weights": Column(heading="Weights"),
    "gradients": Column(heading="Gradients"),
    "reference": Column(heading="Reference"),
    "parameters": Column(heading="Parameters", format=","),
    "error": Column(heading="Error", format=".1e"),
    "largest_error": Column(heading="Largest error", format=".1e"),
    "of_transformers": Column(heading="Over transformers' error", format=".3f"),
    "largest_of_transformers": Column(heading="Largest ratio", format=".3f"),
}
NOTE = (
    "Error: of a parameter, the norm of the difference over the norm of the reference. Medians "
    "over parameters, in brackets quartiles."
)
Gradients = dict[str, Tensor]
Compute = Callable[[Tensor, Tensor], Tensor]  # log-probs (sequences, tokens) of logits and ids


class Setup(NamedTuple):
    """A model and where it is computed."""

    shape: str
    layers: int
    is_rounded: bool
    device: str


def build(setup: Setup, dtype: torch.dtype) -> Any:
    """A random model whose weights are exact in BF16, the same for every dtype."""
    more = {"num_hidden_layers": setup.layers, "vocab_size": VOCABULARY}
    torch.manual_seed(0)
    with torch.device(setup.device):
        config = AutoConfig.for_model(**read_architecture(setup.shape) | more)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # `.to(bfloat16)` would round the frequencies of the rotary embedding, too
    return (model if dtype == torch.bfloat16 else model.to(dtype)).train()


def build_trained(setup: Setup, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The same, prepared where training is quantization-aware."""
    model = build(setup, dtype)
    if setup.is_rounded:
        prepare(model, Recipe.full())
    return model


def in_fp32(setup: Setup) -> Any:
    """A model in FP32 with the weights that are computed with."""
    reference = build(setup, torch.float32)
    reference.config._experts_implementation = "eager"  # PyTorch's grouped product has no FP32
    with torch.no_grad():
        for name, weight in build_trained(setup).named_parameters():
            if hasattr(weight, "rounded"):
                reference.get_parameter(name).copy_(weight.rounded())
    return reference


def sequences(count: int, device: str) -> tuple[Tensor, Tensor]:
    """Ids (sequences, tokens) and an advantage of each sequence, the same for every call."""
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(VOCABULARY, (count, TOKENS[device]), generator=generator)
    return ids_BT.to(device), torch.randn(count, 1, generator=generator).to(device)


def plain_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Of PyTorch, in FP32."""
    return logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def backward(model: Any, compute: Compute, ids_BT: Tensor, advantages_B1: Tensor) -> None:
    """Adds the gradients of a policy's loss to those of the parameters."""
    logits = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
    loss = -(advantages_B1 * compute(logits, ids_BT[:, 1:])).mean()
    loss.backward()  # type: ignore[no-untyped-call]


def plain(model: Any, count: int) -> Gradients:
    """Of transformers' own operators, in the model's dtype."""
    allow_split_sums()
    return _mean_of_sequences(model, plain_log_probs, count)


def exact(model: Any, count: int) -> Gradients:
    """Of exact operators."""
    make_exact(model)
    return _mean_of_sequences(model, _exact_log_probs(model), count)


def _exact_log_probs(model: Any) -> Compute:
    runner = model_runner(model.config)
    return lambda logits, ids: log_probs(logits, ids, runner)


def _mean_of_sequences(model: Any, compute: Compute, count: int) -> Gradients:
    """As FSDP2 takes it over ranks: of each sequence in the model's dtype, added in FP32."""
    ids_BT, advantages_B1 = sequences(count, model.device.type)
    total: Gradients = {}
    for row in range(count):
        backward(model, compute, ids_BT[row : row + 1], advantages_B1[row : row + 1])
        for name, weight in model.named_parameters():
            total[name] = total.get(name, 0) + weight.grad.float() / count
            weight.grad = None
    return total


def measure(setup: Setup, worlds: list[int]) -> Iterator[Row]:
    """Rows of the record."""

    def row(gradients: str, reference: str, errors: Tensor) -> Row:
        of_setup: Row = {
            "shape": setup.shape,
            "layers": setup.layers,
            "weights": "rounded to NVFP4" if setup.is_rounded else "BF16",
        }
        found: Row = {
            "parameters": len(errors),
            "error": quartiles(errors.tolist()),
            "largest_error": float(errors.max()),
        }
        return complete(
            COLUMNS, of_setup | {"gradients": gradients, "reference": reference} | found
        )

    reference = plain(in_fp32(setup), SEQUENCES)
    of_plain = distances(plain(build_trained(setup), SEQUENCES), reference)
    found = exact(build_trained(setup), SEQUENCES)
    of_exact = distances(found, reference)
    ratios = of_exact / of_plain
    yield row("transformers, BF16", "FP32", of_plain)
    yield row("exact", "FP32", of_exact) | {
        "of_transformers": quartiles(ratios.tolist()),
        "largest_of_transformers": float(ratios.max()),
    }
    del reference
    again = exact(build_trained(setup), SEQUENCES)
    yield row("exact, once more", "exact", distances(again, found))
    for world in worlds:
        one = found if world == SEQUENCES else exact(build_trained(setup), world)
        of_ranks = gradients_of_ranks(setup, world)
        yield row(f"exact, FSDP2 over {world} ranks", "exact", distances(of_ranks, one))


def distances(found: Gradients, reference: Gradients) -> Tensor:
    """Of each parameter, FP32."""
    each = [
        (found[name].to(grad.device) - grad).norm() / grad.norm()
        for name, grad in reference.items()
    ]
    return torch.stack(each).cpu()


def gradients_of_ranks(setup: Setup, world: int) -> Gradients:
    """Of FSDP2 with FP32 masters, a sequence a rank."""
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        spawn(_on_rank, (world, folder, setup), nprocs=world)  # type: ignore[no-untyped-call]
        path = Path(folder) / "gradients.pt"
        found: Gradients = torch.load(path, map_location=setup.device)
    return found


def _on_rank(rank: int, world: int, folder: str, setup: Setup) -> None:
    join_ranks(rank, world, folder, setup.device)
    model = build_trained(setup, torch.float32)
    make_exact(model)
    shard(model, model.model.layers)
    ids_BT, advantages_B1 = sequences(world, setup.device)
    mine = slice(rank, rank + 1)
    backward(model, _exact_log_probs(model), ids_BT[mine], advantages_B1[mine])
    found = {name: weight.grad.full_tensor() for name, weight in model.named_parameters()}
    if rank == 0:
        torch.save(found, Path(folder) / "gradients.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(args: argparse.Namespace) -> None:
    """Measures both shapes and writes the record after each row."""
    require_device(args.device)
    require_gpus_for("--worlds", args.worlds, args.device)
    settings = {"tokens a sequence": TOKENS[args.device], "vocabulary": VOCABULARY}
    record = {"benchmark": "gradients", **origin(args.device)} | shape_of(settings, COLUMNS, NOTE)
    rows: list[Row] = []
    args.record.parent.mkdir(parents=True, exist_ok=True)
    for shape, layers in LAYERS[args.device].items():
        for is_rounded in (False, True):
            for row in measure(Setup(shape, layers, is_rounded, args.device), args.worlds):
                rows.append(row)
                write_json(args.record, {**record, "rows": rows})
                Console().print(row)
