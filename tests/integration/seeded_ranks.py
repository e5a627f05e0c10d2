"""What every rank of the test of drawn weights does; rank 0 writes down what all of them drew."""

import copy
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.study.schema import ROOT
from experiments.verl.seeded_weights import draw_weights
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare

CONFIG = AutoConfig.from_pretrained(ROOT / "experiments" / "models" / "nano-moe.json")
DTYPES = (torch.bfloat16, torch.float32)
SEED = 7


def drawn(dtype: torch.dtype, prepared: bool) -> nn.Module:
    """A model whose weights the ranks have drawn, for BF16 rollouts or with QAT."""
    with init_empty_weights():
        model: nn.Module = AutoModelForCausalLM.from_config(copy.copy(CONFIG), dtype=dtype)
    if prepared:
        prepare(model, Recipe.full(), allow_meta=True)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer)
    fully_shard(model)
    draw_weights(model, SEED, CONFIG.initializer_range, torch.device("cpu"))
    return model


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every weight, gathered, in BF16."""
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return {name: value.bfloat16().contiguous() for name, value in state.items()}


def run(rank: int, world: int, folder: str) -> None:
    """Weights and logits of all kinds of model on one rank; those of rank 0 go to a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous{world}", rank=rank, world_size=world
    )
    found = []
    for dtype, prepared in product(DTYPES, (False, True)):
        model = drawn(dtype, prepared)
        logits = model(input_ids=torch.arange(16)[None], use_cache=False).logits.detach()
        found.append({"weights": whole(model), "logits": logits.float()})
    if rank == 0:
        torch.save(found, Path(folder, f"world{world}.pt"))
    dist.destroy_process_group()
