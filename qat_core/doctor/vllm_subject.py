"""vLLM under examination: what it reports, and what its prefill says of the same tokens.

It holds its weights in a layout of its own, so that what it was sent stands for what it serves, and
it undoes all sampling settings at once. Which experts it chose it does not tell here.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qat_core.doctor.sampling import ORDER, Sampling
from qat_core.doctor.subject import Samples, Stage
from qat_core.doctor.weights import numbers
from qat_core.planning.plan import QuantPlan
from qat_core.rollout.engine import WeightStream
from qat_core.rollout.start import start_engine
from qat_core.rollout.vllm.engine import VllmEngine


class VllmSubject:
    """A `Subject` of vLLM 0.24 (CUDA) or 0.28 (CPU) in this process."""

    tells_routes = tells_stages = False

    def __init__(
        self, checkpoint: Path, device: str, packed: QuantPlan | None, max_tokens: int
    ) -> None:
        """Starts vLLM beside a trainer; arguments as for `start_engine`."""
        engine = start_engine("vllm", checkpoint, device, packed, max_tokens + 1)
        assert isinstance(engine, VllmEngine)
        self.engine, self._packed = engine, packed
        self._device = device
        self._served: dict[str, Tensor] = {}
        self.vocabulary: int = engine.on_worker(_vocabulary)

    def sync(self, stream: WeightStream) -> None:
        """Replaces all weights."""
        sent = dict(stream)
        self.engine.sync(sent.items(), self._packed)
        self._served = {name: numbers(weight) for name, weight in sent.items()}

    def weights(self) -> dict[str, Tensor]:
        """What the last sync sent."""
        return self._served

    def sample(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, seed: int
    ) -> Samples:
        """Samples; again with the same seeds and raw log-probs if a setting is in use.

        Raises:
            ValueError: the second time brought other tokens.
        """
        settings = asdict(sampling)  # named as vLLM's
        reported = self.engine.sample(prompts, max_new_tokens, seed, **settings)
        raw = reported
        if sampling.in_use:
            self.engine.on_worker(_report, "raw_logprobs")
            self.engine.forget_prefixes()  # else other batch shapes, which may change a token
            raw = self.engine.sample(prompts, max_new_tokens, seed, **settings)
            self.engine.on_worker(_report, "processed_logprobs")
            if not torch.equal(raw.input_ids, reported.input_ids):
                raise ValueError(
                    "vLLM: the same seeds gave other tokens, so the sampler's share cannot be "
                    "told: sample with temperature 1, top_p 1, top_k 0 and no penalties"
                )
        reported, raw = reported.to(self._device), raw.to(self._device)
        stages: dict[Stage, Tensor] = {
            (ORDER, True): reported.log_probs,
            ((), True): raw.log_probs,
            ((), False): raw.log_probs,  # vLLM leaves its padding out by itself
        }
        return Samples(reported, stages, None)

    def one_pass(self, samples: Samples, vocabulary: int) -> Tensor:
        """The log-probs that vLLM's prefill gives to prompts and responses."""
        rollouts = samples.rollouts
        found_BT = torch.zeros(rollouts.log_probs.shape)
        sequences = [
            ids[mask > 0].tolist()
            for ids, mask in zip(rollouts.input_ids, rollouts.attention_mask, strict=True)
        ]
        for row, log_probs in enumerate(self.engine.prompt_log_probs(sequences)):
            length = int(rollouts.response_mask[row].sum())
            found_BT[row, :length] = log_probs[-length:]
        return found_BT.to(self._device)


def _vocabulary(worker: Any) -> int:
    return int(worker.model_runner.model_config.get_vocab_size())


def _report(worker: Any, mode: str) -> None:
    """Log-probs before or after the sampler's settings."""
    sampler = worker.model_runner.sampler
    sampler.logprobs_mode = mode
    if hasattr(sampler, "topk_topp_sampler"):  # not in vLLM's second model runner
        sampler.topk_topp_sampler.logprobs_mode = mode
