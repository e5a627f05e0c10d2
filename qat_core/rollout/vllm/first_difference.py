"""The first layer in which a training forward pass and vLLM's prefill of the same tokens differ.

For the exact mode, where any difference has one place at which it begins. Both models are run
once, with hooks on modules that have the same outputs in both; needs vLLM in this process.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qat_core.rollout.vllm.engine import VllmEngine

IN_A_LAYER = ("input_layernorm", "self_attn.o_proj", "post_attention_layernorm", "mlp")


@torch.no_grad()
def first_difference(engine: VllmEngine, model: Any, tokens: Sequence[int]) -> str | None:
    """Name of the first module whose outputs differ in any bit, and in how many numbers.

    None where all are equal: the log-probs themselves or decoding differ then. The tokens are of
    one sequence, fewer than the engine takes at once.
    """
    names = _compared(model)
    engine.forget_prefixes()  # else the engine computes only what follows a cached prompt
    engine.on_worker(_start, names)
    engine.prompt_log_probs([tokens])
    theirs: dict[str, Tensor] = engine.on_worker(_stop)
    hooks, ours = _watch(model, names)
    ids = torch.tensor([list(tokens)], device=model.device)
    model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    for name in names:
        mine, other = torch.cat(ours[name]), theirs[name]
        if differing := int((mine != other.to(mine.device)).sum()):
            return f"{name}: {differing} of {mine.numel()} numbers differ"
    return None


def _compared(model: Any) -> list[str]:
    """In the order in which they are computed."""
    layers = range(model.config.num_hidden_layers)
    inner = [f"model.layers.{index}.{name}" for index in layers for name in IN_A_LAYER]
    return ["model.embed_tokens", *inner, "model.norm"]


def _watch(model: nn.Module, names: Sequence[str]) -> tuple[list[Any], dict[str, list[Tensor]]]:
    """Hooks that collect outputs as rows (tokens, features), by name."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}

    def collect(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            seen[name].append(first.detach().reshape(-1, first.shape[-1]).clone())

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(collect(name)) for name in names]
    return hooks, seen


def _start(worker: Any, names: Sequence[str]) -> None:
    worker.watched = _watch(worker.get_model(), names)


def _stop(worker: Any) -> dict[str, Tensor]:
    hooks, seen = worker.__dict__.pop("watched")
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}
