"""Log-probs of the sampled tokens under any setting between the engine's and the trainer's."""

from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qat_core.doctor.numerics import VARIANTS, in_fp32, variant
from qat_core.doctor.routing import disagreement, routers
from qat_core.doctor.sampling import ORDER, Sampling
from qat_core.doctor.scoring import one_pass
from qat_core.doctor.statistics import Bootstrap, k3_per_sequence
from qat_core.doctor.subject import Samples, Subject
from qat_core.doctor.weights import Versions

WEIGHT_CAUSES = frozenset({"weights", "staleness", "scale", "quantization"})
# Of the k3 of the trainer's variant: what the whole interval of another one's lies below if it is
# taken for the engine's. vLLM on a CPU, which rotates in FP32, has 0.5; planted variants have 0.
IDENTIFIED_BELOW = 0.8


@dataclass(frozen=True)
class Setting:
    """How log-probs are computed; the defaults are how the engine reports them."""

    sampling: tuple[str, ...] = ORDER  # what of the sampler applies, from the first of it on
    padded: bool = True  # normalized over the engine's vocabulary, not the trainer's
    decoded: bool = True  # a token at a time with a KV cache, else in one pass
    engine_kernels: bool = True  # by the engine, else by a transformers model (the reference)
    norm: str = "trainer"  # of `numerics.VARIANTS`, as `rope`
    rope: str = "trainer"
    replayed: tuple[str, ...] = ("ids", "weights")  # of the engine's routes, by the reference
    broken: frozenset[str] = WEIGHT_CAUSES  # causes whose weights are not the trainer's yet
    whole_batch: bool = True  # in one pass, as sampled; else in the trainer's micro-batches
    trainer: bool = False  # by the trainer itself; all else is then the trainer's


@dataclass(eq=False)
class Laboratory:
    """Everything that log-probs of one batch of samples are computed from."""

    subject: Subject
    reference: PreTrainedModel  # of its own: its weights are overwritten
    versions: Versions
    samples: Samples
    sampling: Sampling
    trained_BT: Tensor
    micro_batch: int

    def __post_init__(self) -> None:
        self.vocabulary = int(self.reference.config.vocab_size)
        self.mask_BT = self.samples.rollouts.response_mask
        self._loaded: frozenset[str] | None = None

    @property
    def has_routers(self) -> bool:
        """Whether the model is a mixture of experts whose routers are known."""
        return bool(routers(self.reference))

    def log_probs(self, setting: Setting) -> Tensor:
        """Log-probs FP32 (B, T) of the sampled tokens."""
        if setting.trainer:
            return self.trained_BT
        if setting.decoded:
            applied = setting.sampling
            if not self.subject.tells_stages:  # all at once, with the last that is in use
                applied = ORDER if set(applied) & set(self.sampling.in_use) else ()
            return self.samples.stages[applied, setting.padded]
        if setting.engine_kernels:
            return self._prefilled_BT
        return self._by_reference(setting)

    @cached_property
    def engine_variants(self) -> tuple[str, str]:
        """The norm and the rotary embedding with which the reference comes closest to the engine.

        Both are the trainer's unless another one leaves clearly less k3.
        """
        start = Setting(decoded=False, engine_kernels=False)
        norm = self._closest([replace(start, norm=kind) for kind in VARIANTS]).norm
        rope = self._closest([replace(start, norm=norm, rope=kind) for kind in VARIANTS]).rope
        return norm, rope

    @cached_property
    def rounding_noise(self) -> Tensor:
        """k3 of each sequence between BF16 and FP32, of the trainer's weights and micro-batches."""
        self._load(frozenset())
        score = partial(
            one_pass,
            self.reference,
            self.samples.rollouts,
            self.vocabulary,
            rows_at_once=self.micro_batch,
            routes=self.samples.routes,
        )
        narrow_BT = score()
        with in_fp32(self.reference):
            wide_BT = score()
        return k3_per_sequence(wide_BT, narrow_BT, self.mask_BT)

    @cached_property
    def router_disagreement(self) -> tuple[float, float]:
        """Of the engine's routers and the reference's, on the engine's inputs and weights."""
        routes = self.samples.routes
        if routes is None:
            return 0.0, 0.0
        self._load(WEIGHT_CAUSES)
        return disagreement(self.reference, routes, self.samples.rollouts.attention_mask[:, :-1])

    @cached_property
    def _prefilled_BT(self) -> Tensor:
        return self.subject.one_pass(self.samples, self.vocabulary)

    def _closest(self, candidates: list[Setting]) -> Setting:
        log_probs = map(self._by_reference, candidates)
        k3 = [k3_per_sequence(it, self._prefilled_BT, self.mask_BT) for it in log_probs]
        best = min(range(len(k3)), key=lambda index: float(k3[index].sum()))
        ratio = Bootstrap(self.mask_BT).ratio(k3[best], k3[0])
        is_closer = bool(k3[0].any()) and ratio.high < IDENTIFIED_BELOW
        return candidates[best if is_closer else 0]

    def _by_reference(self, setting: Setting) -> Tensor:
        self._load(setting.broken)
        rollouts = self.samples.rollouts
        with variant(self.reference, setting.norm, setting.rope):
            return one_pass(
                self.reference,
                rollouts,
                self.vocabulary,
                rows_at_once=len(rollouts.input_ids) if setting.whole_batch else self.micro_batch,
                routes=self.samples.routes if setting.replayed else None,
                with_weights="weights" in setting.replayed,
                whole=not setting.whole_batch,
            )

    @torch.no_grad()
    def _load(self, broken: frozenset[str]) -> None:
        """Writes the weights in which these causes are not repaired."""
        if broken == self._loaded:
            return
        for name, value in self.versions.mixed(broken):
            self.reference.get_parameter(name).copy_(value)
        self._loaded = broken
