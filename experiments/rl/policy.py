"""The trained policy: one full forward pass gives the log-probs of all response tokens."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from transformers import PreTrainedModel

from qat_core.checkpoint.load import load_model
from qat_core.planning.plan import QuantPlan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.eager import positions_from_mask
from qat_core.rollout.engine import Rollouts
from qat_core.routing import NO_ROUTE, by_block, replay
from qat_core.training.preparation import prepare

# All but cuDNN's, whose backward pass gives NaN on Hopper where a mask is given and the length is
# an odd multiple of 64 (github.com/pytorch/pytorch/issues/196678; torch 2.11 to 2.13).
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Scores(NamedTuple):
    """What the policy says of rollouts, FP32 (B, T) each."""

    log_probs_BT: Tensor  # of the sampled tokens
    entropy_BT: Tensor  # of the distribution at each of them, without gradient
    # sum over the vocabulary of the sampler's probabilities times the policy's log-probs: its
    # gradient is the mean score. None unless the rollouts have distributions
    expected_BT: Tensor | None
    score_means_BT: Tensor | None  # squared norm of that gradient in the logits. Likewise

    def detached(self) -> "Scores":
        """The same without gradient."""
        return Scores(
            self.log_probs_BT.detach(),
            self.entropy_BT,
            None if self.expected_BT is None else self.expected_BT.detach(),
            self.score_means_BT,
        )

    @staticmethod
    def joined(parts: "Sequence[Scores]") -> "Scores":
        """Those of several micro-batches, as of one batch."""

        def cat(column: Iterable[Tensor | None]) -> Tensor | None:
            present = [part for part in column if part is not None]
            return torch.cat(present) if present else None

        return Scores(
            torch.cat([part.log_probs_BT for part in parts]),
            torch.cat([part.entropy_BT for part in parts]),
            cat(part.expected_BT for part in parts),
            cat(part.score_means_BT for part in parts),
        )


class Policy:
    """A BF16 model, fake-quantized where a recipe says so.

    With `exact` it computes the bits of vLLM's exact engine. With `replays_routes` tokens go to the
    experts that the rollouts name, at every scoring alike: old and new log-probs of a response are
    of the same experts.
    """

    def __init__(
        self,
        model_dir: Path,
        recipe: Recipe | None,
        device: str,
        *,
        exact: bool = False,
        replays_routes: bool = False,
    ) -> None:
        self.model: PreTrainedModel = load_model(model_dir).to(device)
        self.model.train()
        # models small enough to be trained on one device have memory to spare, and wait for the CPU
        self.plan: QuantPlan | None = (
            prepare(self.model, recipe, keep="rounded") if recipe else None
        )
        self.replays_routes = replays_routes
        self._runner = None
        if exact:  # here alone, as below: other runs do not depend on this code
            from qat_core.exact import make_exact
            from qat_core.exact.model import model_runner

            make_exact(self.model)
            self._runner = model_runner(self.model.config)

    def log_probs(self, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """Log-probs of the response tokens and the entropies at them, FP32 (B, T) each."""
        scores = self.scores(rollouts)
        return scores.log_probs_BT, scores.entropy_BT

    def scores(self, rollouts: Rollouts) -> Scores:
        """All that a step needs of one forward pass over the rollouts."""
        num_response_tokens = rollouts.response_mask.shape[1]
        with self._routed(rollouts), sdpa_kernel(ATTENTION):
            logits = self.model(
                input_ids=rollouts.input_ids,
                attention_mask=rollouts.attention_mask,
                position_ids=positions_from_mask(rollouts.attention_mask),
                use_cache=False,
                logits_to_keep=num_response_tokens + 1,
            ).logits
        logits = logits[:, :-1]
        if self._runner is not None:
            return _exact_scores(logits, rollouts.response_ids, self._runner)
        log_probs_BTV = logits.float().log_softmax(-1)
        entropy_BT = -(log_probs_BTV.detach().exp() * log_probs_BTV.detach()).sum(-1)
        chosen_BT1 = log_probs_BTV.gather(-1, rollouts.response_ids[..., None])
        expected_BT, means_BT = None, None
        if rollouts.distributions is not None:
            sampler_BTV = rollouts.distributions.exp()
            expected_BT = (sampler_BTV * log_probs_BTV).sum(-1)
            means_BT = (sampler_BTV - log_probs_BTV.detach().exp()).square().sum(-1)
        return Scores(chosen_BT1.squeeze(-1), entropy_BT, expected_BT, means_BT)

    def _routed(self, rollouts: Rollouts) -> AbstractContextManager[None]:
        if not self.replays_routes:
            return nullcontext()
        if rollouts.routes is None:
            raise ValueError("routing replay: the rollouts name no experts; let the engine do so")
        # the engine never saw the last token, and nothing is asked of what follows it
        routes = pad(rollouts.routes, (0, 0, 0, 0, 0, 1), value=NO_ROUTE)
        return replay(self.model, by_block(self.model, routes))


def _exact_scores(logits_BTV: Tensor, ids_BT: Tensor, runner: int) -> Scores:
    from qat_core.exact import log_probs

    with torch.no_grad():
        log_probs_BTV = logits_BTV.float().log_softmax(-1)
        entropy_BT = -(log_probs_BTV.exp() * log_probs_BTV).sum(-1)
    return Scores(log_probs(logits_BTV, ids_BT, runner), entropy_BT, None, None)
