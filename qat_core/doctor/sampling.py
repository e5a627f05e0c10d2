"""Settings of a sampler, and the log-probs of a token under all of them and under some.

A rollout engine may report log-probs of the distribution that it drew from, which top-p, top-k,
temperature and penalties have changed; a trainer computes those of the model alone.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

# in the order in which transformers and vLLM apply them
ORDER = ("penalties", "temperature", "top_k", "top_p")


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the defaults change nothing."""

    temperature: float = 1.0  # divides the logits; 0.001 or more, as quotients overflow below
    top_p: float = 1.0  # keep the likeliest tokens of this total probability
    top_k: int = 0  # keep so many of the likeliest tokens; 0 is off
    repetition_penalty: float = 1.0  # of tokens that prompt or response hold (Keskar et al. 2019)

    def __post_init__(self) -> None:
        for name, wrong, needs in (
            ("temperature", not 1e-3 <= self.temperature < inf, "a number, 0.001 or more"),
            ("top_p", not 0 < self.top_p <= 1, "a number above 0, at most 1"),
            ("top_k", self.top_k < 0, "a whole number, 0 for off"),
            ("repetition_penalty", not 0 < self.repetition_penalty < inf, "a number above 0"),
        ):
            if wrong:
                raise ValueError(f"{name}: {getattr(self, name)}: needs {needs}")

    @property
    def in_use(self) -> dict[str, float]:
        """The settings of `ORDER` that change the distribution, with their values."""
        values = {
            "penalties": (self.repetition_penalty, 1.0),
            "temperature": (self.temperature, 1.0),
            "top_k": (self.top_k, 0),
            "top_p": (self.top_p, 1.0),
        }
        return {name: value for name, (value, neutral) in values.items() if value != neutral}

    def log_probs(self, applied: tuple[str, ...], history_BL: Tensor, logits_BV: Tensor) -> Tensor:
        """Log-probs FP32 (B, V) with the settings named in `applied`; -inf for excluded tokens."""
        makers: dict[str, Any] = {
            "penalties": RepetitionPenaltyLogitsProcessor,
            "temperature": TemperatureLogitsWarper,
            "top_k": TopKLogitsWarper,
            "top_p": TopPLogitsWarper,
        }
        used = [n for n in ORDER if n in applied and n in self.in_use]
        processors = LogitsProcessorList([makers[n](self.in_use[n]) for n in used])
        processed_BV: Tensor = processors(history_BL, logits_BV.clone())
        return processed_BV.log_softmax(-1)
