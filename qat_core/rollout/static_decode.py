"""Decoding in static memory: every step runs the same kernels on the same addresses.

KV cache, masks and results have fixed places, so that on a GPU one step, sampling included, is
recorded as a CUDA graph once and replayed for each token: else launching kernels takes nearly all
of a small model's step. Synced weights are copied into the same parameters.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from qat_core.rollout.engine import Rollouts, ends_response
from qat_core.rollout.static_cache import StaticCache, static_attention

CHECK_EVERY = 16  # steps between two looks, each a wait for the GPU, at whether all have finished
_CAPACITY_STEP = 32  # prompts a little longer than those before need no new graph
# fused kernels round to BF16 wherever the trainer's, which are not fused, do
_COMPILE_OPTIONS: dict[str, Any] = {"emulate_precision_casts": True}
_WARM_UP_STEPS = 3  # as many as PyTorch's documentation of CUDA graphs takes


class StaticDecoder:
    """Decodes batches of one size; the cache of a first one, `prefilled`, gives the shapes.

    `num_tokens` are of a prompt and its response, `num_new_tokens` of a response, at most.
    """

    def __init__(
        self,
        model: Any,
        prefilled: DynamicCache,
        num_tokens: int,
        num_new_tokens: int,
        ends_E: Tensor,
        pad_id: int,
        is_greedy: bool,
        keeps_distributions: bool,
    ) -> None:
        self.model, self.ends_E, self.pad_id = model, ends_E, pad_id
        self.is_greedy = is_greedy
        self.capacity = -(-num_tokens // _CAPACITY_STEP) * _CAPACITY_STEP
        self.cache = StaticCache(prefilled, self.capacity)
        device = self.cache.slot.device
        batch_size, vocabulary = len(self.cache.keys[0]), model.config.vocab_size
        self.generator = torch.Generator(device)
        self.temperature = torch.ones((), device=device)
        self.noise_BV = torch.empty(batch_size, vocabulary, device=device)
        self.seen_BL = torch.ones(batch_size, self.capacity, dtype=torch.bool, device=device)
        self.column = torch.zeros(1, dtype=torch.int64, device=device)
        self.position_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.token_B = torch.zeros_like(self.position_B)
        self.alive_B = torch.ones(batch_size, dtype=torch.bool, device=device)
        self.finished_B = torch.zeros_like(self.alive_B)
        self.tokens_BT = self.token_B.new_zeros(batch_size, num_new_tokens)
        self.masks_BT = self.alive_B.new_zeros(batch_size, num_new_tokens)
        self.log_probs_BT = self.noise_BV.new_zeros(batch_size, num_new_tokens)
        width = num_new_tokens if keeps_distributions else 0
        self.distributions_BTV = self.noise_BV.new_zeros(batch_size, width, vocabulary)
        self._replay: Callable[[], None] | None = None
        self._forward = _logits
        if device.type == "cuda":
            self._forward = torch.compile(_logits, dynamic=False, options=_COMPILE_OPTIONS)

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        prefilled: DynamicCache,
        logits_BV: Tensor,
        temperature: float,
        seed: int,
    ) -> Rollouts:
        """Samples the responses of prompts (B, P) that were prefilled, with their last logits."""
        with static_attention(self.model):
            if self._replay is None:
                self._replay = self._recorded() if input_ids.is_cuda else self._step
            self._start(attention_mask, prefilled, temperature, seed)
            self._sample(logits_BV)
            num_new_tokens = self.tokens_BT.shape[1]
            for done in range(1, num_new_tokens, CHECK_EVERY):
                if bool(self.finished_B.all()):
                    break
                for _ in range(min(CHECK_EVERY, num_new_tokens - done)):
                    self._replay()
        return self._rollouts(input_ids, attention_mask)

    def _start(
        self, attention_mask: Tensor, prefilled: DynamicCache, temperature: float, seed: int
    ) -> None:
        self.generator.manual_seed(seed)
        self.temperature.fill_(temperature or 1.0)
        width = attention_mask.shape[1]
        self.cache.load(prefilled, width)
        self.seen_BL.zero_()[:, :width] = attention_mask
        self.position_B.copy_(attention_mask.sum(-1) - 1)
        self.column.zero_()
        self.finished_B.zero_()
        self.masks_BT.zero_()

    def _step(self) -> None:
        """Feeds the last token of every response and samples the next one."""
        self.seen_BL.index_copy_(1, self.cache.slot, self.alive_B[:, None])
        self.position_B.add_(self.alive_B)
        logits_BV = self._forward(self)
        self.cache.slot.add_(1)
        self._sample(logits_BV)

    def _sample(self, logits_BV: Tensor) -> None:
        """Draws by exponential races, which, unlike `torch.multinomial`, need no look at the GPU.

        The token with the least E / p, E exponential, is drawn with probability p.
        """
        log_probs_BV = (logits_BV / self.temperature).log_softmax(-1)
        scores_BV = log_probs_BV
        if not self.is_greedy:
            self.noise_BV.exponential_(generator=self.generator)
            scores_BV = log_probs_BV - self.noise_BV.log()
        token_B = scores_BV.argmax(-1)
        log_prob_B1 = log_probs_BV.gather(-1, token_B[:, None])
        self.alive_B.copy_(~self.finished_B)
        alive_B1 = self.alive_B[:, None]
        self.token_B.copy_(token_B.where(self.alive_B, self.pad_id))
        self.tokens_BT.index_copy_(1, self.column, self.token_B[:, None])
        self.log_probs_BT.index_copy_(1, self.column, log_prob_B1.where(alive_B1, 0.0))
        self.masks_BT.index_copy_(1, self.column, alive_B1)
        if self.distributions_BTV.shape[1]:
            self.distributions_BTV.index_copy_(1, self.column, log_probs_BV[:, None])
        self.finished_B.logical_or_(ends_response(token_B, self.ends_E))
        self.column.add_(1)

    def _recorded(self) -> Callable[[], None]:
        """`_step` as a CUDA graph; what the warm-up wrote is overwritten by `_start`."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_STEPS):
                self.cache.slot.zero_()
                self.column.zero_()
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            self._step()
        replay: Callable[[], None] = graph.replay
        return replay

    def _rollouts(self, input_ids: Tensor, attention_mask: Tensor) -> Rollouts:
        """Copies, less the columns in which every response had ended."""
        width = int(self.masks_BT.any(0).sum())
        masks_BT = self.masks_BT[:, :width]
        keeps = self.distributions_BTV.shape[1] > 0
        return Rollouts(
            input_ids=torch.cat([input_ids, self.tokens_BT[:, :width]], dim=1),
            attention_mask=torch.cat([attention_mask, masks_BT.long()], dim=1),
            response_mask=masks_BT.float(),
            log_probs=self.log_probs_BT[:, :width].where(masks_BT, 0.0),
            truncated=~self.finished_B,
            distributions=self.distributions_BTV[:, :width].clone() if keeps else None,
        )


def _logits(decoder: StaticDecoder) -> Tensor:
    """Logits (B, V) after the last token of every response."""
    logits_B1V: Tensor = decoder.model(
        input_ids=decoder.token_B[:, None],
        attention_mask=decoder.seen_BL[:, None, None],
        position_ids=decoder.position_B[:, None],
        past_key_values=decoder.cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    return logits_B1V[:, -1].float()
