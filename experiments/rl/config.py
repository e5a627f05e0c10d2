"""Settings of a GRPO run and of the task it trains on, with verl's published values as defaults."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

Correction = Literal["token_tis", "none", "sequence_mask", "geometric_mask", "score_centering"]
# verl's presets decoupled_seq_is_rs and decoupled_geo_rs
MASK_BANDS: dict[str, tuple[float, float]] = {
    "sequence_mask": (0.5, 2.0),
    "geometric_mask": (0.999, 1.001),
}
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# far beyond any study, and within what a machine can hold of problems, steps or tokens
MANY = 1_000_000
MOST_TERMS = 100


class Settings(BaseModel):
    """Base of all configuration sections: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class GrownSettings(Settings):
    """Those that older digests know fewer of: later ones are left out at their defaults."""

    LATER: ClassVar[tuple[str, ...]]

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = serialize(self)
        for name in self.LATER:
            if getattr(self, name) == type(self).model_fields[name].default:
                content.pop(name, None)
        return content


class TaskConfig(GrownSettings):
    """Which verifiable task, and how hard."""

    LATER = ("train_rows", "held_out")

    name: Literal["chain-sum", "word-problem", "dapo-math"] = Field(
        description="chain-sum: character-level running sums; word-problem: arithmetic in words; "
        "dapo-math: DAPO-Math-17k, tested on AIME 2024 and 2025, verl only"
    )
    terms: tuple[int, int] = Field((3, 5), description="fewest and most numbers of a problem")
    largest: int = Field(19, ge=1, le=10_000, description="largest number of a problem")
    train_prompts: int = Field(4096, ge=1, le=MANY, description="size of the training split")
    test_prompts: int = Field(256, ge=1, le=MANY, description="size of the held-out split")
    train_files: dict[Path, Sha256] = Field(
        {}, description="dapo-math: local files, with their SHA-256, instead of the hub's"
    )
    test_files: dict[Path, Sha256] = Field({}, description="the same for the held-out split")
    train_rows: Literal["once", "published"] = Field(
        "once",
        description="dapo-math: each prompt once, or all rows as they are, with repeated, "
        "contradictory and held-out ones",
    )
    held_out: Literal["prompt", "sum"] = Field(
        "prompt",
        description="word-problem: what of a test problem is in no other problem; by prompt alone, "
        "its sum is asked again of other people and things",
    )

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # its dicts have none

    @field_validator("terms")
    @classmethod
    def _fewest_then_most(cls, terms: tuple[int, int]) -> tuple[int, int]:
        fewest, most = terms
        if not 1 <= fewest <= most <= MOST_TERMS:
            raise ValueError(
                f"[{fewest}, {most}] is not a range; use 1 <= fewest <= most <= {MOST_TERMS}"
            )
        return terms

    @model_validator(mode="after")
    def _only_mathematics_has_files(self) -> Self:
        if self.name != "dapo-math" and (self.train_files or self.test_files):
            raise ValueError(f"{self.name} makes its own problems; remove train_files, test_files")
        if self.name != "dapo-math" and self.train_rows != "once":
            raise ValueError(f"{self.name} makes its own problems; remove train_rows")
        if self.name != "word-problem" and self.held_out != "prompt":
            raise ValueError(f"held_out: {self.held_out} is for word-problem, not {self.name}")
        return self


class RolloutConfig(Settings):
    """How training samples are drawn: from the whole distribution, at temperature 1."""

    max_prompt_tokens: int = Field(64, ge=1, le=MANY)
    max_response_tokens: int = Field(64, ge=1, le=MANY)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(-1, description="-1 is off")

    @field_validator("temperature", "top_p", "top_k")
    @classmethod
    def _neutral(cls, value: float, info: ValidationInfo) -> float:
        neutral = -1 if info.field_name == "top_k" else 1.0
        if value != neutral:
            raise ValueError(
                f"{value} would bias the ratio between trainer and rollout; use {neutral}"
            )
        return value


class GrpoConfig(Settings):
    """GRPO with DAPO's asymmetric clip and token-level truncated importance sampling."""

    steps: int = Field(description="optimization steps, one batch of rollouts each", ge=1, le=MANY)
    prompts_per_step: int = Field(32, ge=1, le=MANY)
    responses_per_prompt: int = Field(
        16, ge=2, le=10_000, description="size of the advantage group"
    )
    mini_batch_prompts: int = Field(32, ge=1, description="prompts of one optimizer step")
    micro_batch_responses: int = Field(64, ge=1, description="responses of one forward pass")
    lr: float = Field(1e-6, gt=0, le=1)
    weight_decay: float = Field(0.1, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    clip_ratio_low: float = Field(0.2, gt=0)
    clip_ratio_high: float = Field(0.28, gt=0)
    clip_ratio_c: float = Field(10.0, gt=1, description="dual clip of negative advantages")
    advantage: Literal["group", "reward"] = Field(
        "group", description="group: centred and scaled within a group; reward: +1 or -1 as it is"
    )
    correction: Correction = Field(
        "token_tis", description="of the rollout mismatch, see experiments.rl.loss"
    )
    rollout_is_threshold: float = Field(2.0, gt=1, description="cap of the importance weights")
    rollout_rs_band: tuple[float, float] | None = Field(
        None, description="ratios that a mask keeps; by default verl's for that mask"
    )
    routing_replay: bool = Field(
        False, description="the trainer's tokens go to the experts that the rollout engine chose"
    )
    measure_drift_term: bool = Field(
        False, description="drift term and weight drift every step, small vocabularies only"
    )
    save_every: int = Field(
        5, ge=1, description="steps between resumable checkpoints; verl: none at all if > steps"
    )
    drift_every: int = Field(
        0,
        ge=0,
        description="steps between two looks at the drift of weights (drift.jsonl), a divisor of "
        "save_every; 0: off",
    )
    rollout: RolloutConfig = RolloutConfig()

    @property
    def is_on_policy(self) -> bool:
        """Whether a batch of rollouts gives one update, so that no policy is older than it."""
        return self.mini_batch_prompts == self.prompts_per_step

    @property
    def masks_responses(self) -> bool:
        """Whether the correction drops responses."""
        return self.correction in MASK_BANDS

    @property
    def band(self) -> tuple[float, float]:
        """Ratios that the mask keeps."""
        return self.rollout_rs_band or MASK_BANDS[self.correction]

    @property
    def keeps_distributions(self) -> bool:
        """Whether rollouts need the log-probs of all tokens."""
        return self.measure_drift_term or self.correction == "score_centering"

    @model_validator(mode="after")
    def _drift_is_seen_at_checkpoints(self) -> Self:
        if self.drift_every and self.save_every % self.drift_every:
            raise ValueError(
                f"drift_every: {self.drift_every} does not divide save_every, {self.save_every}: a "
                "run that is resumed would not know what changed before; use one of its divisors"
            )
        return self

    @model_validator(mode="after")
    def _correction_is_whole(self) -> Self:
        if self.rollout_rs_band is not None:
            lowest, highest = self.rollout_rs_band
            if not self.masks_responses:
                raise ValueError(
                    f"rollout_rs_band: correction {self.correction} has no mask; remove it, or use "
                    f"one of {', '.join(MASK_BANDS)}"
                )
            if not 0 < lowest <= 1 <= highest:
                raise ValueError(
                    f"rollout_rs_band: [{lowest}, {highest}] drops responses without a mismatch; "
                    "use 0 < lowest <= 1 <= highest"
                )
        if self.correction == "score_centering" and not self.is_on_policy:
            raise ValueError(
                "correction: score_centering is defined for one update a batch; set "
                f"mini_batch_prompts to prompts_per_step, {self.prompts_per_step}"
            )
        return self


class PretrainConfig(GrownSettings):
    """Supervised training of a nano base model from random weights."""

    LATER = ("stop_accuracy",)

    steps: int = Field(ge=1, le=MANY)
    batch_size: int = Field(64, ge=1, le=MANY)
    lr: float = Field(1e-3, gt=0, le=1)
    mixed_steps: int = Field(
        60, ge=0, le=MANY, description="last steps, in which direct answers come in"
    )
    worked_fraction: float = Field(
        0.3, ge=0, le=1, description="share of worked answers in the mixed steps"
    )
    stop_accuracy: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="ends it at this share of right answers, sampled as in training; `steps` is "
        "then how many are tried, and bases of all sizes are alike",
    )

    @model_validator(mode="after")
    def _stops_in_mixed_steps(self) -> Self:
        if self.stop_accuracy is not None and self.mixed_steps < self.steps:
            raise ValueError(
                f"mixed_steps: {self.mixed_steps} of {self.steps}: with stop_accuracy training may "
                "end before them, without direct answers; set it to steps"
            )
        return self


class EvaluationConfig(Settings):
    """Offline evaluation of every checkpoint, in BF16 and in NVFP4."""

    prompts: int = Field(256, ge=1, le=MANY)
    samples_per_prompt: int = Field(1, ge=1, le=10_000, description="answers to each prompt")
    temperature: float = Field(0.6, gt=0, description="of these answers")
