"""What each of two ranks does with engines that verl's registry makes; notes what it saw."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Weights = dict[str, torch.Tensor]


def run(rank: int, world: int, model_dir: str, folder: str) -> None:
    """The rotary embedding of BF16 masters, and streams after a forward pass that trains nothing.

    With `trainer.critic_warmup` the actor computes log-probs, and is then synced as it is.
    """
    from tests.integration.verl_engine import CASES, configuration, make  # sets the environment

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    CASES["not resharded bf16"] = [*CASES["not resharded"], *CASES["bf16"]]
    found: dict[str, Any] = {}
    engine = make(configuration(model_dir, "bf16 masters"))
    engine.initialize()
    frequencies = engine.module.model.rotary_emb.inv_freq
    found["rotary"] = {
        "weights made on": engine._build_module().lm_head.weight.device.type,
        "dtype": str(frequencies.dtype),
        "frequencies": frequencies.tolist(),
    }
    for case in ("not resharded", "not resharded bf16"):
        engine = make(configuration(model_dir, case))
        engine.initialize()
        found[case] = _changes(engine)
    Path(f"{folder}/rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _changes(engine: Any) -> dict[str, Any]:
    """Of the stream, by a forward pass alone: names of weights; and whether it left them whole."""

    def stream() -> Weights:
        return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}

    @torch.no_grad()
    def forward() -> None:
        engine.module(input_ids=torch.tensor([[3, 14, 4, 17]]))

    before = stream()
    forward()
    whole = [type(weight).__name__ for weight in engine.module.parameters()]
    after = stream()
    forward()
    engine.to("cpu", model=True, optimizer=False, grad=False)  # whole weights are let go, too
    return {
        "whole": "DTensor" not in whole,
        "same names": list(before) == list(after),
        "changed": [name for name in before if not torch.equal(before[name], after[name])],
    }
