"""What the doctor asks of a rollout engine, and how the eager engine answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from qat_core.doctor.routing import Recorder, Routes
from qat_core.doctor.sampling import ORDER, Sampling
from qat_core.doctor.scoring import one_pass
from qat_core.rollout.eager import EagerEngine, pad_left
from qat_core.rollout.engine import Rollouts, WeightStream, ends_response

# settings of the sampler that a log-prob was computed with, and whether over the engine's whole
# vocabulary or over the trainer's
Stage = tuple[tuple[str, ...], bool]


@dataclass(frozen=True)
class Samples:
    """A batch of sampled responses."""

    rollouts: Rollouts  # tokens, and log-probs as the engine reports them
    stages: Mapping[Stage, Tensor]  # log-probs FP32 (B, T) by stage, from all of `ORDER` to none
    routes: Routes | None  # experts of every position but the last; None if dense or not told


class Subject(Protocol):
    """A rollout engine under examination."""

    @property
    def vocabulary(self) -> int:
        """Tokens that the engine normalizes over."""

    tells_routes: bool
    tells_stages: bool
    """Whether sampling settings can be undone one by one, else all at once."""

    def sync(self, stream: WeightStream) -> None:
        """Replaces all weights."""

    def weights(self) -> dict[str, Tensor]:
        """The BF16 numbers that the engine computes with, by transformers' names."""

    def sample(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, seed: int
    ) -> Samples:
        """One response a prompt, all in one batch."""

    def one_pass(self, samples: Samples, vocabulary: int) -> Tensor:
        """Log-probs (B, T) of the samples by the engine's own prefill, all in one batch."""


class EagerSubject:
    """The eager engine: a transformers model that decodes with a KV cache."""

    tells_routes = tells_stages = True

    def __init__(self, engine: EagerEngine, vocabulary: int) -> None:
        """Examines `engine`; `vocabulary` is the trainer's."""
        self.engine, self.model = engine, engine.model
        self._trained_vocabulary = vocabulary

    @property
    def vocabulary(self) -> int:
        """Rows of the engine's output head."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def sync(self, stream: WeightStream) -> None:
        """Replaces all weights."""
        self.engine.sync(stream)

    def weights(self) -> dict[str, Tensor]:
        """The engine's parameters; what was packed is unpacked."""
        return dict(self.model.named_parameters())

    def one_pass(self, samples: Samples, vocabulary: int) -> Tensor:
        """The whole batch in one forward pass, with the experts that decoding chose."""
        rows = len(samples.rollouts.input_ids)
        return one_pass(
            self.model, samples.rollouts, vocabulary, rows_at_once=rows, routes=samples.routes
        )

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, seed: int
    ) -> Samples:
        """As `EagerEngine.generate`, with every stage's log-probs and the routes.

        Tokens come from the trainer's vocabulary, whatever the engine normalizes over.
        """
        engine = self.engine
        ids, mask = pad_left(prompts, engine.pad_id, engine.device)
        width, step_ids = ids.shape[1], ids
        cache, recorder = DynamicCache(config=self.model.config), Recorder(len(prompts))
        generator = torch.Generator(engine.device).manual_seed(seed)
        ends_E = torch.tensor(engine.end_ids, device=engine.device)
        steps: dict[Stage, list[Tensor]] = {}
        finished_B = torch.zeros(len(prompts), dtype=torch.bool, device=engine.device)
        for _ in range(max_new_tokens):
            with recorder.watch(self.model):
                logits_BV = engine.last_logits(step_ids, mask, cache)
            # for penalties, the last token of the prompt is in the place of padding
            history_BL = ids.where(mask > 0, ids[:, width - 1 : width])
            all_log_probs = self._stages(logits_BV, history_BL, sampling)
            likely_BV = all_log_probs[ORDER, True][:, : self._trained_vocabulary].exp()
            token_B = torch.multinomial(likely_BV, 1, generator=generator).squeeze(-1)
            token_B = token_B.where(~finished_B, engine.pad_id)
            for stage, log_probs_BV in all_log_probs.items():
                chosen_B = log_probs_BV.gather(-1, token_B[:, None]).squeeze(-1)
                steps.setdefault(stage, []).append(chosen_B.where(~finished_B, 0.0))
            step_ids = token_B[:, None]
            ids = torch.cat([ids, step_ids], dim=1)
            mask = torch.cat([mask, (~finished_B)[:, None].long()], dim=1)
            finished_B = finished_B | ends_response(token_B, ends_E)
            if bool(finished_B.all()):
                break
        stages = {stage: torch.stack(parts, dim=1) for stage, parts in steps.items()}
        log_probs_BT, response_mask = stages[ORDER, True], mask[:, width:].float()
        rollouts = Rollouts(ids, mask, response_mask, log_probs_BT, ~finished_B)
        return Samples(rollouts, stages, recorder.routes())

    def _stages(
        self, logits_BV: Tensor, history_BL: Tensor, sampling: Sampling
    ) -> dict[Stage, Tensor]:
        """Log-probs (B, V) from all settings to none, then over the trainer's vocabulary."""
        applied = [ORDER[:count] for count in range(len(ORDER), -1, -1)]
        stages: dict[Stage, Tensor] = {
            (names, True): sampling.log_probs(names, history_BL, logits_BV) for names in applied
        }
        known = logits_BV[:, : self._trained_vocabulary]
        stages[(), False] = known.log_softmax(-1)
        return stages
