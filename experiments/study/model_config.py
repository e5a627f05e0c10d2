"""A model's config.json, checked before anything is made of it. Needs no torch."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from experiments.support.json_files import read_json, read_model
from qat_core.planning.predicted_memory import SUPPORTED

# larger than any published model's, and small enough to list all shapes of
LARGEST = 2**24
Size = Annotated[int, Field(ge=1, le=LARGEST)]
Layers = Annotated[int, Field(ge=0, le=1000)]
Experts = Annotated[int, Field(ge=1, le=10_000)]


class ModelConfig(BaseModel):
    """The keys of a config.json that decide shapes or that all models read; others it may have."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)

    model_type: str
    architectures: list[str] | None = None
    hidden_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    vocab_size: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size | None = None
    moe_intermediate_size: Size | None = None
    num_experts: Experts | None = None
    num_local_experts: Experts | None = None
    num_experts_per_tok: Experts | None = None
    decoder_sparse_step: int | None = None
    mlp_only_layers: list[int] | None = None
    max_position_embeddings: PositiveInt | None = None
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] | None = None
    rope_theta: PositiveFloat | None = None
    initializer_range: Annotated[float, Field(ge=0, le=10)] | None = None
    attention_dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    hidden_act: Literal["silu"] | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    norm_topk_prob: bool | None = None
    tie_word_embeddings: bool | None = None

    @field_validator("model_type")
    @classmethod
    def _is_supported(cls, name: str) -> str:
        if name not in SUPPORTED:
            raise ValueError(f"{name!r} is not one of {', '.join(SUPPORTED)}")
        return name

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        is_moe = self.model_type == "qwen3_moe"
        self._require_set("moe_intermediate_size" if is_moe else "intermediate_size")
        if is_moe:
            experts = self.num_experts or self.num_local_experts
            if experts is None:
                raise ValueError("num_experts: missing")
            self._require_set("num_experts_per_tok")
            if (self.num_experts_per_tok or 0) > experts:
                raise ValueError(
                    f"num_experts_per_tok: {self.num_experts_per_tok} is more than the {experts} "
                    "experts"
                )
        if self.model_type.startswith("qwen3"):
            self._require_set("head_dim")
        heads, key_heads = self.num_attention_heads, self.num_key_value_heads
        if key_heads and heads % key_heads:
            raise ValueError(
                f"num_key_value_heads: {key_heads} does not divide num_attention_heads, {heads}"
            )
        if self.head_dim is None and self.hidden_size % heads:
            raise ValueError(
                f"num_attention_heads: {heads} does not divide hidden_size, {self.hidden_size}"
            )
        if self.head_dim and heads * self.head_dim > LARGEST:
            raise ValueError(f"num_attention_heads: {heads} of size {self.head_dim} are too many")
        if (self.head_dim or self.hidden_size // heads) % 2:
            raise ValueError("head_dim: odd; rotary embeddings turn pairs")
        return self

    def _require_set(self, name: str) -> None:
        if getattr(self, name) is None:
            raise ValueError(f"{name}: missing")


def read_model_config(path: Path, hint: str) -> dict[str, Any]:
    """The content of a config.json whose sizes and types are valid."""
    content = read_json(path, hint)
    read_model(path, ModelConfig, hint)
    return content
