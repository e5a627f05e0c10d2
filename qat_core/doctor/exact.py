"""Does an exact trainer compute the log-probs that vLLM told, in every bit, and if not, from where?

Both are in this process, on one GPU; the sequences are sampled here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qat_core.checkpoint.architecture import meta_model
from qat_core.checkpoint.load import load_model
from qat_core.exact import log_probs, make_exact
from qat_core.exact.contract import needed
from qat_core.exact.model import model_runner
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.eager import positions_from_mask
from qat_core.rollout.engine import Rollouts
from qat_core.rollout.start import start_engine
from qat_core.training.preparation import prepare
from qat_core.weights.stream import weight_stream


@dataclass(frozen=True)
class Comparison:
    """What of the sampled tokens differs."""

    tokens: int
    unequal: int
    response: int | None = None  # of the first that differs, as `token`; None where none does
    token: int | None = None
    # the first module whose outputs differ in vLLM's prefill of it, and in how many numbers
    begins_at: str | None = None

    def __str__(self) -> str:
        if not self.unequal:
            return f"exact: all log-probs of {self.tokens} sampled tokens are equal in every bit"
        begins = self.begins_at or "no module in prefill: decoding, or the log-probs themselves"
        return (
            f"not exact: {self.unequal} of {self.tokens} log-probs differ, first of response "
            f"{self.response} at token {self.token}; begins at {begins}"
        )


def compare_exact(
    checkpoint: Path,
    recipe: Recipe | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    seed: int,
) -> Comparison:
    """Samples from a BF16 checkpoint at temperature 1 and computes the same tokens again.

    Raises:
        ValueError: a model, or a version or GPU, that was not proven to be exact.
    """
    from qat_core.rollout.vllm.engine import VllmEngine
    from qat_core.rollout.vllm.first_difference import first_difference

    served = plan(meta_model(checkpoint), recipe) if recipe else None
    longest = max(map(len, prompts)) + max_new_tokens
    engine = start_engine("vllm", checkpoint, "cuda", served, longest, exact=True)
    assert isinstance(engine, VllmEngine)
    model = load_model(checkpoint).to("cuda")
    make_exact(model)
    if recipe:
        prepare(model, recipe)
    engine.require_contract(needed(model))
    engine.sync(weight_stream(model, served, recipe), served)
    sampled = engine.sample(prompts, max_new_tokens, seed, temperature=1.0).to("cuda")
    mask_BT = sampled.response_mask.bool()
    differs_BT = (_log_probs(model, sampled) != sampled.log_probs) & mask_BT
    counts = int(mask_BT.sum()), int(differs_BT.sum())
    if not counts[1]:
        return Comparison(*counts)
    response, token = differs_BT.nonzero()[0].tolist()
    ids = sampled.input_ids[response][sampled.attention_mask[response].bool()]
    return Comparison(*counts, response, token, first_difference(engine, model, ids.tolist()))


@torch.no_grad()
def _log_probs(model: Any, sampled: Rollouts) -> Tensor:
    """FP32 (B, T), a sequence at a time."""
    num_tokens, runner = sampled.response_mask.shape[1], model_runner(model.config)
    rows = []
    for row in range(len(sampled.input_ids)):
        one = sampled.select(slice(row, row + 1))
        logits = model(
            input_ids=one.input_ids,
            attention_mask=one.attention_mask,
            position_ids=positions_from_mask(one.attention_mask),
            use_cache=False,
            logits_to_keep=num_tokens + 1,
        ).logits
        rows.append(log_probs(logits[:, :-1], one.response_ids, runner))
    return torch.cat(rows)
