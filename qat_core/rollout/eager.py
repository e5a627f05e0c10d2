"""Rollouts in this process: a Hugging Face model decoding with a KV cache, one token a step.

Quantized weights arrive packed and are unpacked here, as a real engine would, so that what is
sampled from is what the bytes say. Decoding rounds differently from the trainer's single pass: that
is the noise floor of the mismatch metrics. On a GPU steps are a CUDA graph (`static_decode`).
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from qat_core.checkpoint.load import load_model
from qat_core.nvfp4 import PackedTensor, dequantize
from qat_core.planning.plan import QuantPlan, state_tensors
from qat_core.rollout.engine import (
    Rollouts,
    WeightStream,
    ends_response,
    require_known,
    special_ids,
)
from qat_core.rollout.static_cache import has_static_form
from qat_core.rollout.static_decode import StaticDecoder
from qat_core.routing import capture

MAX_DECODERS = 4


class EagerEngine:
    """A `RolloutEngine` with a BF16 copy of the model on the given device.

    Args:
        model_dir: BF16 checkpoint with tokenizer.
        device: "cpu" or "cuda".
        max_tokens: of prompt and response together, which the static memory is made for at once;
            by default that of the batches that come.
        keeps_distributions: rollouts hold the log-probs of all tokens, for small vocabularies.
        returns_routes: rollouts hold the experts of all positions; decoding is then never static,
            as a graph would not note them.
    """

    def __init__(
        self,
        model_dir: str | Path,
        device: str = "cpu",
        *,
        max_tokens: int = 0,
        keeps_distributions: bool = False,
        returns_routes: bool = False,
    ) -> None:
        model_dir = Path(model_dir)
        self.end_ids, self.pad_id = special_ids(model_dir)
        self.device = torch.device(device)
        self.model: PreTrainedModel = load_model(model_dir).to(device)
        self._ends_E = torch.tensor(self.end_ids, device=device)
        self.model.eval().requires_grad_(False)
        self.weight_bytes = sum(p.nbytes for p in self.model.parameters())
        self.served: Collection[str] = ()
        self.max_tokens, self.keeps_distributions = max_tokens, keeps_distributions
        self.returns_routes = returns_routes
        can_be_static = self.device.type == "cuda" and not returns_routes
        self.is_static = can_be_static and has_static_form(self.model)
        self._decoders: dict[tuple[int, int, bool], StaticDecoder] = {}

    def sync(self, stream: WeightStream, expected: QuantPlan | None = None) -> None:
        """Replaces all weights; ValueError, nothing replaced, if names, shapes or plan differ."""
        received = dict[str, Tensor | PackedTensor]()
        for name, weight in stream:
            if name in received:
                raise ValueError(f"weight sync: {name}: comes twice")
            received[name] = weight
        packed = [name for name, weight in received.items() if isinstance(weight, PackedTensor)]
        own = dict(state_tensors(self.model))
        if received.keys() != own.keys():
            differing = sorted(received.keys() ^ own.keys())
            raise ValueError(f"weight sync: names missing or unknown: {differing[:5]}")
        for name, weight in received.items():
            if weight.shape != own[name].shape:
                raise ValueError(f"weight sync: {name}: {weight.shape} for {own[name].shape}")
        if expected is not None and {*packed} != {*expected.quantized}:
            differing = sorted({*packed} ^ {*expected.quantized})
            raise ValueError(
                f"weight sync: stream and plan differ in what is NVFP4: {differing[:5]}"
            )
        with torch.no_grad():
            for name, weight in received.items():
                unpacked = dequantize(weight) if isinstance(weight, PackedTensor) else weight
                own[name].copy_(unpacked)
        self.weight_bytes = sum(weight.nbytes for weight in received.values())
        self.served = packed

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float, seed: int
    ) -> Rollouts:
        """Samples one response a prompt; temperature 0 is greedy."""
        if not self.returns_routes:
            return self._generate(prompts, max_new_tokens, temperature, seed)
        with capture(self.model) as captured:
            rollouts = self._generate(prompts, max_new_tokens, temperature, seed)
        return replace(rollouts, routes=captured.routes(len(prompts)))

    def _generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float, seed: int
    ) -> Rollouts:
        require_known(prompts, int(self.model.config.vocab_size))
        input_ids, attention_mask = pad_left(prompts, self.pad_id, self.device)
        cache = DynamicCache(config=self.model.config)
        if self.is_static:
            logits_BV = self.last_logits(input_ids, attention_mask, cache)
            decoder = self._decoder(cache, input_ids.shape, max_new_tokens, temperature == 0)
            return decoder.generate(input_ids, attention_mask, cache, logits_BV, temperature, seed)
        generator = torch.Generator(self.device).manual_seed(seed)
        finished_B = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        step_ids, tokens, log_probs, masks, distributions = input_ids, [], [], [], []
        for _ in range(max_new_tokens):
            logits_BV = self.last_logits(step_ids, attention_mask, cache)
            log_probs_BV = (logits_BV / (temperature or 1.0)).log_softmax(-1)
            token_B, log_prob_B = _sample(log_probs_BV, temperature, generator)
            tokens.append(token_B.where(~finished_B, self.pad_id))
            log_probs.append(log_prob_B.where(~finished_B, 0.0))
            masks.append(~finished_B)
            if self.keeps_distributions:
                distributions.append(log_probs_BV)
            attention_mask = torch.cat([attention_mask, masks[-1][:, None].long()], dim=1)
            finished_B = finished_B | ends_response(token_B, self._ends_E)
            step_ids = tokens[-1][:, None]
            if bool(finished_B.all()):
                break
        return Rollouts(
            input_ids=torch.cat([input_ids, torch.stack(tokens, dim=1)], dim=1),
            attention_mask=attention_mask,
            response_mask=torch.stack(masks, dim=1).float(),
            log_probs=torch.stack(log_probs, dim=1),
            truncated=~finished_B,
            distributions=torch.stack(distributions, dim=1) if distributions else None,
        )

    def _decoder(
        self, prefilled: DynamicCache, prompts: torch.Size, max_new_tokens: int, is_greedy: bool
    ) -> StaticDecoder:
        """The decoder of such batches; a few are kept, so that their memory is used again."""
        batch_size, width = prompts
        key, num_tokens = (batch_size, max_new_tokens, is_greedy), width + max_new_tokens
        decoder = self._decoders.pop(key, None)
        if decoder is None or decoder.capacity < num_tokens:
            if len(self._decoders) >= MAX_DECODERS:
                self._decoders.pop(next(iter(self._decoders)))
            decoder = StaticDecoder(
                self.model,
                prefilled,
                max(num_tokens, self.max_tokens),
                max_new_tokens,
                self._ends_E,
                self.pad_id,
                is_greedy,
                self.keeps_distributions,
            )
        self._decoders[key] = decoder
        return decoder

    def last_logits(self, step_ids: Tensor, attention_mask: Tensor, cache: DynamicCache) -> Tensor:
        """Logits FP32 (B, V) after the last of the tokens that follow those of the cache."""
        positions = positions_from_mask(attention_mask)[:, -step_ids.shape[1] :]
        logits_B1V: Tensor = self.model(
            input_ids=step_ids,
            attention_mask=attention_mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits_B1V[:, -1].float()


def positions_from_mask(attention_mask: Tensor) -> Tensor:
    """Position ids (B, L) that count real tokens only, so that left padding shifts nothing."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def pad_left(
    prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Token ids and mask, int64 (B, P) each."""
    width = max(len(prompt) for prompt in prompts)
    ids = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _sample(
    log_probs_BV: Tensor, temperature: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Tokens (B,) and their log-probs (B,) under the distribution that they are drawn from."""
    if temperature == 0:
        token_B = log_probs_BV.argmax(-1)
    else:
        token_B = torch.multinomial(log_probs_BV.exp(), 1, generator=generator).squeeze(-1)
    return token_B, log_probs_BV.gather(-1, token_B[:, None]).squeeze(-1)
