"""Rollouts of what vLLM generated: tokens, log-probs and routes, padded as a trainer reads them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qat_core.rollout.engine import Rollouts
from qat_core.routing import NO_ROUTE


def to_rollouts(prompts: Sequence[Sequence[int]], outputs: list[Any], pad_id: int) -> Rollouts:
    """Prompts padded left, responses right."""
    prompt_width = max(map(len, prompts))
    response_width = max(len(output.token_ids) for output in outputs)
    shape = (len(prompts), prompt_width + response_width)
    input_ids = torch.full(shape, pad_id)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    log_probs_BT = torch.zeros(len(prompts), response_width)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        first, end = prompt_width - len(prompt), prompt_width + len(output.token_ids)
        input_ids[row, first:end] = torch.tensor([*prompt, *output.token_ids])
        attention_mask[row, first:end] = 1
        sampled = zip(output.token_ids, output.logprobs, strict=True)
        log_probs = [position[token].logprob for token, position in sampled]
        log_probs_BT[row, : len(log_probs)] = torch.tensor(log_probs)
    return Rollouts(
        input_ids=input_ids,
        attention_mask=attention_mask,
        response_mask=attention_mask[:, prompt_width:].float(),
        log_probs=log_probs_BT,
        truncated=torch.tensor([output.finish_reason == "length" for output in outputs]),
    )


def to_routes(rollouts: Rollouts, outputs: list[Any], layers: Sequence[int]) -> Tensor:
    """`Rollouts.routes` of vLLM's ids (tokens but the last, all layers, k), without padding's."""
    top_k = outputs[0].routed_experts.shape[-1]
    sequences, positions = rollouts.input_ids.shape
    routes = torch.full((sequences, positions - 1, len(layers), top_k), NO_ROUTE, dtype=torch.int16)
    for row, (mask, output) in enumerate(zip(rollouts.attention_mask, outputs, strict=True)):
        ids, real = output.routed_experts[:, layers], mask.nonzero().flatten()
        if len(ids) != len(real) - 1:
            raise ValueError(
                f"vLLM: {len(ids)} routes for {len(real)} tokens; one less is expected"
            )
        routes[row, real[:-1]] = torch.from_numpy(ids.astype("int16"))
    return routes
