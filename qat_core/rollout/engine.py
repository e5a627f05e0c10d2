"""What a trainer needs of a rollout engine, whichever one it is."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from qat_core.checkpoint.shards import read_json
from qat_core.nvfp4 import PackedTensor
from qat_core.planning.plan import QuantPlan

WeightStream = Iterable[tuple[str, Tensor | PackedTensor]]


@dataclass(frozen=True)
class Rollouts:
    """A batch of sampled responses; P prompt columns padded left, T response columns right.

    Attributes:
        input_ids: prompt and response, int64 (B, P + T).
        attention_mask: 1 on real tokens, int64 (B, P + T).
        response_mask: 1.0 on sampled tokens, end of sequence included, FP32 (B, T).
        log_probs: of the sampled tokens under the sampling distribution, FP32 (B, T), 0 off mask.
        truncated: responses that ended by length, bool (B,).
        distributions: log-probs of all V tokens at every sampled one, FP32 (B, T, V), if kept.
        routes: experts that every position but the last went to in each layer that has experts,
            int16 (B, P + T - 1, layers, k), if returned; of padding perhaps `routing.NO_ROUTE`.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    log_probs: Tensor
    truncated: Tensor
    distributions: Tensor | None = None
    routes: Tensor | None = None

    @property
    def response_ids(self) -> Tensor:
        """Sampled tokens, int64 (B, T)."""
        return self.input_ids[:, -self.response_mask.shape[1] :]

    def select(self, rows: slice | Tensor) -> "Rollouts":
        """The same columns for some of the rows."""
        return self._each(lambda tensor: tensor[rows])

    def to(self, device: str) -> "Rollouts":
        """The same on another device."""
        return self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Rollouts":
        kept = {name: tensor for name, tensor in vars(self).items() if tensor is not None}
        return Rollouts(**{name: change(tensor) for name, tensor in kept.items()})


class RolloutEngine(Protocol):
    """Holds weights of its own, replaced by `sync`, and samples from them."""

    weight_bytes: int
    """Bytes of the weights last received, packed where they came packed."""

    served: Collection[str]
    """Names of the weights that the engine holds in NVFP4, once they were synced."""

    def sync(self, stream: WeightStream, expected: QuantPlan | None = None) -> None:
        """Replaces all weights.

        With the plan behind the stream, an engine can take the weights one by one as they come.

        Raises:
            ValueError: names or shapes differ from the engine's: nothing is replaced. Or the stream
                differs from its plan: the engine then generates no more until a sync succeeds.
        """

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float, seed: int
    ) -> Rollouts:
        """Samples one response a prompt; temperature 0 is greedy."""


def special_ids(model_dir: Path) -> tuple[tuple[int, ...], int]:
    """The tokens that end a response, and the one that fills batches, which is masked.

    The tokenizer's own comes first. Others are those at which transformers' `generate` and vLLM
    stop, as generation_config.json names them, or config.json where there is no such file.

    Raises:
        ValueError: the tokenizer ends no response, or a token is not a whole number.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    eos_id: int | None = tokenizer.eos_token_id
    if eos_id is None:
        raise ValueError(
            f"{model_dir}/tokenizer_config.json: eos_token: missing; add the token that ends a "
            "response"
        )
    pad_id: int | None = tokenizer.pad_token_id
    ends = dict.fromkeys([eos_id, *_ends_of_model(model_dir)])
    return tuple(ends), eos_id if pad_id is None else pad_id


def _ends_of_model(model_dir: Path) -> list[int]:
    file = model_dir / "generation_config.json"
    if file.is_file():
        named = read_json(file).get("eos_token_id")
    else:
        file = model_dir / "config.json"  # with the defaults of its class
        named = AutoConfig.from_pretrained(model_dir).get_text_config().eos_token_id
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(token) is int for token in ids):
        raise ValueError(
            f"{file}: eos_token_id: {named}: needs a token's number, or a list of them"
        )
    return ids


def ends_response(token_B: Tensor, ends_E: Tensor) -> Tensor:
    """Which tokens end a response, bool (B,); without a look at the GPU, as a CUDA graph needs."""
    return (token_B[:, None] == ends_E).any(-1)


def require_known(prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
    """ValueError for a prompt without tokens, or with one beyond the embedding."""
    if not len(prompts) or not all(len(prompt) and min(prompt) >= 0 for prompt in prompts):
        raise ValueError("prompts: each needs tokens, and each token a number from 0")
    largest = max(max(prompt) for prompt in prompts)
    if largest >= vocabulary:
        raise ValueError(
            f"token {largest} of a prompt: the model's embedding has {vocabulary} rows, fewer than "
            "its tokenizer has tokens; take the tokenizer that the model was trained with"
        )
