"""`python -m tests.integration.verl_replay MODEL_DIR OUT`: routes fed to verl's FSDP2 engine.

One rank on the CPU. Writes what came of them, as JSON. Sequences have the form in which verl's
workers get them; the engine is driven as verl's TrainingWorker drives it.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.verl_engine import CASES, configuration, make  # sets the environment

# isort: split
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding

from qat_core.routing import capture

CASES["r3"] = ["+routing_replay=r3"]
CASES["r3 bf16"] = [*CASES["r3"], *CASES["bf16"]]
CASES["r3 packed"] = [*CASES["r3"], "+attention=sdpa"]
CASES["dense"] = ["+routing_replay=r3"]
# what `complete` would have refused, where it was not called
_REPLAY = "actor_rollout_ref.actor.fsdp_config.router_replay"
CASES["mode"] = ["+routing_replay=r3", f"{_REPLAY}.mode=R2"]
CASES["ulysses"] = [
    "+routing_replay=r3",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
]
PROMPTS, RESPONSES, WIDTH = (3, 2), (4, 6), 6


def batch(routes: Tensor | None, packed: bool, loss: tuple[int, int] = (1, 1)) -> TensorDict:
    """Two sequences, prompts padded left and responses right; routes (2, 9, layers, k)."""
    ids = torch.arange(1, 2 * (3 + WIDTH) + 1).view(2, 3 + WIDTH) % 16
    mask = torch.tensor(
        [
            [int(3 - p <= column < 3 + r) for column in range(3 + WIDTH)]
            for p, r in zip(PROMPTS, RESPONSES, strict=True)
        ]
    )
    tensors = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "prompts": ids[:, :3],
        "responses": ids[:, 3:],
        "response_mask": mask[:, 3:] * torch.tensor(loss)[:, None],
    }
    if routes is not None:
        tensors["routed_experts"] = routes.to(torch.int16)
    data = left_right_2_no_padding(TensorDict(tensors, batch_size=2))
    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "temperature": 1.0}
    tu.assign_non_tensor(data, use_remove_padding=packed, calculate_entropy=False, **settings)
    return data


def scores(engine: Any, data: TensorDict) -> Tensor:
    """Log-probs of all tokens, one sequence after the other."""
    with engine.eval_mode():
        found: Tensor = engine.infer_batch(data)["model_output"]["log_probs"].values()
    return found


def gradients(engine: Any, data: TensorDict) -> dict[str, Tensor]:
    """Of the sum of log-probs."""

    def loss(model_output: Any, data: TensorDict, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
        return model_output["log_probs"].values().sum(), {}

    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(data, loss)
        return {n: p.grad.to_local().clone() for n, p in engine.module.named_parameters()}


def own_routes(engine: Any, packed: bool) -> Tensor:
    """What the model chooses by itself, in verl's form: (2, 9, layers, k), zeros at the end."""
    engine._replays = False
    with capture(engine.module) as captured:
        scores(engine, batch(None, packed))
    engine._replays = True
    routes = torch.zeros(2, 3 + WIDTH, 2, 2, dtype=torch.int16)
    rows, taken = captured.routes(1 if packed else 2), 0
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        length, first = prompt + response, 3 - prompt
        found = rows[0, taken : taken + length] if packed else rows[row, :length]
        routes[row, first : first + length - 1] = found[:-1]
        taken += length
    return routes


def used_routes(engine: Any, routes: Tensor, packed: bool) -> list[list[int]]:
    """The choices of the first layer, one sequence after the other, padding left out."""
    with capture(engine.module) as captured:
        scores(engine, batch(routes, packed))
    rows = captured.routes(1 if packed else 2)[:, :, 0].sort(-1).values
    if packed:
        return rows[0].tolist()
    return [ids for row, n in zip(rows, (7, 8), strict=True) for ids in row[:n].tolist()]


def facts(model_dir: str, case: str, packed: bool) -> dict[str, Any]:
    """What holds of an engine."""
    engine = make(configuration(model_dir, case))
    engine.initialize()
    routes = own_routes(engine, packed)
    engine._replays = False
    plain = scores(engine, batch(None, packed))
    plain_gradients = gradients(engine, batch(None, packed))
    engine._replays = True
    given = batch(routes, packed)
    found_gradients = gradients(engine, given)
    others = ((routes.sort(-1).values + 1) % 8) * (routes.sum(-1, keepdim=True) > 0)
    other_gradients = gradients(engine, batch(others, packed))
    engine.module.gradient_checkpointing_enable({"use_reentrant": False})
    again = gradients(engine, batch(others, packed))
    router = "model.layers.0.mlp.gate.weight"
    return {
        "engine": type(engine).__name__,
        "own routes, same log-probs": torch.equal(scores(engine, batch(routes, packed)), plain),
        "own routes, same gradients": _equal(found_gradients, plain_gradients),
        "others, other log-probs": not torch.equal(scores(engine, batch(others, packed)), plain),
        "others, the router learns": bool(other_gradients[router].any()),
        "others, checkpointed": _equal(again, other_gradients),
        "given": [
            ids for row in others[:, :, 0].sort(-1).values.tolist() for ids in row if any(ids)
        ],
        "used": used_routes(engine, others, packed),
        "refused": _refusals(engine, routes, packed),
    }


def _shorter(data: TensorDict) -> TensorDict:
    """The routes of a token less."""
    routes = [rows[:-1] for rows in data["routed_experts"].unbind()]
    data["routed_experts"] = torch.nested.nested_tensor(routes, layout=torch.jagged)
    return data


def _equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in second)


def _refusals(engine: Any, routes: Tensor, packed: bool) -> dict[str, str]:
    hole, prompt_only = routes.clone(), routes.clone()
    hole[1, 4, 1] = 0
    prompt_only[0] = 0
    cases: dict[str, Callable[[], TensorDict]] = {
        "missing": lambda: batch(None, packed),
        "hole": lambda: batch(hole, packed),
        "whole sequence": lambda: batch(prompt_only, packed),
        "trains nothing": lambda: batch(prompt_only, packed, loss=(0, 1)),
        "lengths": lambda: _shorter(batch(routes, packed)),
        "layers": lambda: batch(routes[:, :, :1], packed),
        "top-1": lambda: batch(routes[..., :1], packed),
        "top-3": lambda: batch(torch.cat([routes, routes[..., :1] + 3], -1), packed),
        "expert 8": lambda: batch(routes + 8 * (routes > 0), packed),
    }
    found = {}
    for name, make_batch in cases.items():
        try:
            scores(engine, make_batch())
            found[name] = "accepted"
        except ValueError as error:
            found[name] = str(error)
    return found


def main(model_dir: str, dense_dir: str, out: str) -> None:
    """All engines."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found: dict[str, Any] = {
        case: facts(model_dir, case, packed=case == "r3 packed")
        for case in ("r3", "r3 bf16", "r3 packed")
    }
    for case, folder in (("dense", dense_dir), ("mode", model_dir), ("ulysses", model_dir)):
        try:
            make(configuration(folder, case)).initialize()
        except ValueError as error:
            found[case] = str(error)
    Path(out).write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
