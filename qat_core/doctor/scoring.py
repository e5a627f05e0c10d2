"""Log-probs of sampled tokens by one forward pass of a transformers model, some rows at a time."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qat_core.doctor.routing import Routes, replayed
from qat_core.rollout.eager import positions_from_mask
from qat_core.rollout.engine import Rollouts


@torch.no_grad()
def one_pass(
    model: PreTrainedModel,
    rollouts: Rollouts,
    vocabulary: int,
    *,
    rows_at_once: int,
    routes: Routes | None = None,
    with_weights: bool = True,
    whole: bool = False,
) -> Tensor:
    """Log-probs of the response tokens, FP32 (B, T), over the first tokens of the vocabulary.

    Args:
        rows_at_once: sequences of one forward pass.
        routes: experts to replay, of every position but the last; `with_weights` their weights too.
        whole: bring the last token too, of which nothing is asked, as a trainer does.
    """
    num_rows, num_tokens = rollouts.response_mask.shape
    end = None if whole else -1
    parts = []
    for first in range(0, num_rows, rows_at_once):
        rows = slice(first, first + rows_at_once)
        part, chosen = rollouts.select(rows), routes.select(rows) if routes else None
        with replayed(model, chosen, weights=with_weights):
            logits = model(
                input_ids=part.input_ids[:, :end],
                attention_mask=part.attention_mask[:, :end],
                position_ids=positions_from_mask(part.attention_mask)[:, :end],
                use_cache=False,
                logits_to_keep=num_tokens + int(whole),
            ).logits
        log_probs = logits[:, :num_tokens, :vocabulary].float().log_softmax(-1)
        parts.append(log_probs.gather(-1, part.response_ids[..., None]).squeeze(-1))
    return torch.cat(parts)
