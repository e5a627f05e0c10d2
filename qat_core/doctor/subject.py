"""What the doctor asks of a rollout engine, and how the eager engine answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from qat_core.doctor.routing import Recorder, Routes
from qat_core.doctor.sampling import ORDER, Sampling, draw
from qat_core.doctor.scoring import one_pass
from qat_core.rollout.eager import EagerEngine, positions_from_mask
from qat_core.rollout.engine import Rollouts, WeightStream, ends_response

# settings of the sampler that a log-prob was computed with, and whether over the engine's whole
# vocabulary or over the trainer's
Stage = tuple[tuple[str, ...], bool]


@dataclass(frozen=True)
class Samples:
    """A batch of sampled responses.

    Attributes:
        rollouts: tokens, and log-probs as the engine reports them.
        stages: log-probs FP32 (B, T) by stage, from all of `ORDER` to none.
        routes: experts of every position but the last; None if dense or not told.
    """

    rollouts: Rollouts
    stages: Mapping[Stage, Tensor]
    routes: Routes | None


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
        self.engine = engine
        self._trained_vocabulary = vocabulary

    @property
    def model(self) -> PreTrainedModel:
        """The engine's model."""
        model = self.engine.model
        assert isinstance(model, PreTrainedModel)
        return model

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
        engine, decoding = self.engine, _Decoding(self.model, prompts, self.engine.pad_id)
        generator = torch.Generator(engine.device).manual_seed(seed)
        ends_E = torch.tensor(engine.end_ids, device=engine.device)
        steps: dict[Stage, list[Tensor]] = {}
        finished_B = torch.zeros(len(prompts), dtype=torch.bool, device=engine.device)
        for _ in range(max_new_tokens):
            logits_BV = decoding.next_logits()
            all_log_probs = self._stages(logits_BV, decoding.history(), sampling)
            token_B = draw(all_log_probs[ORDER, True][:, : self._trained_vocabulary], generator)
            token_B = token_B.where(~finished_B, engine.pad_id)
            for stage, log_probs_BV in all_log_probs.items():
                chosen_B = log_probs_BV.gather(-1, token_B[:, None]).squeeze(-1)
                steps.setdefault(stage, []).append(chosen_B.where(~finished_B, 0.0))
            decoding.append(token_B, ~finished_B)
            finished_B = finished_B | ends_response(token_B, ends_E)
            if bool(finished_B.all()):
                break
        stages = {stage: torch.stack(parts, dim=1) for stage, parts in steps.items()}
        return Samples(
            decoding.rollouts(stages[ORDER, True], ~finished_B), stages, decoding.routes()
        )

    def _stages(
        self, logits_BV: Tensor, history_BL: Tensor, sampling: Sampling
    ) -> dict[Stage, Tensor]:
        """Log-probs (B, V) from all settings to none, then over the trainer's vocabulary."""
        stages: dict[Stage, Tensor] = {}
        for count in range(len(ORDER), -1, -1):
            applied = ORDER[:count]
            stages[applied, True] = sampling.log_probs(applied, history_BL, logits_BV)
        known = logits_BV[:, : self._trained_vocabulary]
        stages[(), False] = known.log_softmax(-1)
        return stages


class _Decoding:
    """A batch that grows by a token a sequence and step; prompts padded left."""

    def __init__(
        self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], pad_id: int
    ) -> None:
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        ids = [[pad_id] * pad + list(p) for pad, p in zip(padding, prompts, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        self.model, self.width = model, width
        self.ids = torch.tensor(ids, device=model.device)
        self.mask = torch.tensor(mask, device=model.device)
        self._cache = DynamicCache(config=model.config)
        self._recorder = Recorder(len(prompts))
        self._num_cached = 0

    def next_logits(self) -> Tensor:
        """Logits FP32 (B, V) of the next token."""
        with self._recorder.watch(self.model):
            logits_B1V: Tensor = self.model(
                input_ids=self.ids[:, self._num_cached :],
                attention_mask=self.mask,
                position_ids=positions_from_mask(self.mask)[:, self._num_cached :],
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
        self._num_cached = self.ids.shape[1]
        return logits_B1V[:, -1].float()

    def history(self) -> Tensor:
        """Tokens so far, padding replaced by the last token of the prompt, for penalties."""
        return self.ids.where(self.mask > 0, self.ids[:, self.width - 1 : self.width])

    def append(self, token_B: Tensor, is_real_B: Tensor) -> None:
        """Adds a column."""
        self.ids = torch.cat([self.ids, token_B[:, None]], dim=1)
        self.mask = torch.cat([self.mask, is_real_B[:, None].long()], dim=1)

    def rollouts(self, log_probs_BT: Tensor, truncated_B: Tensor) -> Rollouts:
        """The batch in the form that trainers take."""
        response_mask = self.mask[:, self.width :].float()
        return Rollouts(self.ids, self.mask, response_mask, log_probs_BT, truncated_B)

    def routes(self) -> Routes | None:
        """Experts of all positions but the last."""
        return self._recorder.routes()
