"""The probes: each switches one possible cause from the engine's way to the trainer's.

A probe gets the setting in which all causes before it are repaired and returns that in which its
own is too, with the evidence: what it found apart from log-probs. The order is that of `PROBES`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from qat_core.doctor.laboratory import Laboratory, Setting
from qat_core.doctor.sampling import ORDER


@dataclass(frozen=True)
class Evidence:
    """What a probe found apart from log-probs: `proof` of a fault, whatever its size, or a hint."""

    text: str = ""
    proof: bool = False


# Of routers that compute alike, in other batch shapes; seen: below 0.1 % on a CPU.
ROUTER_NOISE = 0.02

Switch = Callable[[Laboratory, Setting], tuple[Setting, Evidence]]


@dataclass(frozen=True)
class Probe:
    """One possible cause, and what repairs it in a setting.

    With `needs_routes` it works only where the engine tells which experts it chose. Experts also
    change as a consequence of any other fault, so that only proof makes it one.
    """

    cause: str
    title: str
    advice: str
    switch: Switch
    needs_routes: bool = False


def _sampling(name: str) -> Switch:
    """Undoes this setting of the sampler; those applied after it are undone before."""

    def switch(lab: Laboratory, setting: Setting) -> tuple[Setting, Evidence]:
        used = lab.sampling.in_use.get(name)
        remaining = ORDER[: ORDER.index(name)]
        if used is None:
            return replace(setting, sampling=remaining), Evidence()
        rest = "" if lab.subject.tells_stages else ", measured together with the others"
        return replace(setting, sampling=remaining), Evidence(f"{name} {used:g}{rest}", True)

    return switch


def _vocabulary(lab: Laboratory, setting: Setting) -> tuple[Setting, Evidence]:
    extra = lab.subject.vocabulary - lab.vocabulary
    text = f"{lab.subject.vocabulary} tokens in the engine, {lab.vocabulary} in the trainer"
    return replace(setting, padded=False), Evidence(text, True) if extra else Evidence()


def _by(**changes: Any) -> Switch:
    """A switch that finds nothing apart from log-probs."""
    return lambda _, setting: (replace(setting, **changes), Evidence())


def _kernels(lab: Laboratory, setting: Setting) -> tuple[Setting, Evidence]:
    norm, rope = lab.engine_variants
    return replace(setting, engine_kernels=False, norm=norm, rope=rope), Evidence()


def _variant(of: str) -> Switch:
    """FP32 is as good as the trainer's rounding, BF16 throughout is a bug."""

    def switch(lab: Laboratory, setting: Setting) -> tuple[Setting, Evidence]:
        kind, repaired = getattr(setting, of), _by(**{of: "trainer"})(lab, setting)[0]
        found = "" if kind == "trainer" else f"the engine computes as variant {kind}"
        return repaired, Evidence(found, proof=kind == "bf16")

    return switch


def _routing_weights(lab: Laboratory, setting: Setting) -> tuple[Setting, Evidence]:
    _, relative = lab.router_disagreement
    text = f"{relative:.1%} off, given the router's inputs"
    return replace(setting, replayed=("ids",)), Evidence(text, relative > ROUTER_NOISE)


def _routing_ids(lab: Laboratory, setting: Setting) -> tuple[Setting, Evidence]:
    share, _ = lab.router_disagreement
    text = f"{share:.1%} of choices differ, given the router's inputs"
    return replace(setting, replayed=()), Evidence(text, share > ROUTER_NOISE)


def _weights(cause: str) -> Switch:
    def switch(lab: Laboratory, setting: Setting) -> tuple[Setting, Evidence]:
        names = lab.versions.blamed(cause)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        evidence = Evidence(", ".join(names[:3]) + more, proof=bool(names))
        return replace(setting, broken=setting.broken - {cause}), evidence

    return switch


_NEUTRAL = (
    "Sample with temperature 1, top_p 1, top_k off and no penalties, or correct the ratio: the "
    "engine reports another distribution than the one that is trained."
)

PROBES: tuple[Probe, ...] = (
    Probe("top_p", "sampling: top-p", _NEUTRAL, _sampling("top_p")),
    Probe("top_k", "sampling: top-k", _NEUTRAL, _sampling("top_k")),
    Probe(
        "temperature",
        "sampling: temperature",
        "Divide the trainer's logits by the same temperature (verl does), or sample at 1.",
        _sampling("temperature"),
    ),
    Probe("penalties", "sampling: penalties", _NEUTRAL, _sampling("penalties")),
    Probe(
        "vocabulary",
        "vocabulary padding",
        "Leave padded rows out of the engine's softmax, or give both sides the same vocabulary.",
        _vocabulary,
    ),
    Probe(
        "decoding",
        "decoding against one pass",
        "Look at what only decoding uses: the KV cache (its dtype, its scales), the decode "
        "attention kernel, CUDA graphs, chunked prefill; turn them off one by one.",
        _by(decoded=False),
    ),
    Probe(
        "kernels",
        "kernels of the engine",
        "Look at the engine's matrix products and attention: padding mask, attention backend, "
        "accumulation, batch invariance. The weights are the same.",
        _kernels,
    ),
    Probe(
        "norm",
        "RMSNorm precision",
        "Round where the other side rounds: transformers rounds to BF16 before the weight, "
        "vLLM after it; variance in BF16 is a bug.",
        _variant("norm"),
    ),
    Probe(
        "rope",
        "RoPE precision",
        "Keep inv_freq in FP32 (a cast of the whole model to BF16 rounds it) and rotate alike.",
        _variant("rope"),
    ),
    Probe(
        "routing_weights",
        "routing: weights of the experts",
        "Compute the router's softmax and its normalization (norm_topk_prob) alike, in FP32.",
        _routing_weights,
        needs_routes=True,
    ),
    Probe(
        "routing_ids",
        "routing: chosen experts",
        "Compute the router's logits alike, or replay the engine's experts in the trainer (R3).",
        _routing_ids,
        needs_routes=True,
    ),
    Probe(
        "weights",
        "weights: not the same bits",
        "Sync the named weights again and find what left or changed them on the way; if they are "
        "of an earlier step, --previous tells.",
        _weights("weights"),
    ),
    Probe(
        "staleness",
        "staleness of the last sync",
        "The engine serves another version of the model: sync before sampling, wait for the sync "
        "to end, empty the prefix cache; in asynchronous training correct the ratio.",
        _weights("staleness"),
    ),
    Probe(
        "scale",
        "scale policy",
        "Give trainer and rollout one recipe: the same scale_policy and block_scale_method.",
        _weights("scale"),
    ),
    Probe(
        "quantization",
        "quantization without QAT",
        "Train the named weights fake-quantized (prepare() with the rollout's recipe), or leave "
        "them in BF16 in the rollout.",
        _weights("quantization"),
    ),
    Probe(
        "batch",
        "batch shape",
        "The same weights and kernels give other log-probs in the trainer's micro-batches: look "
        "at the padding mask and position ids, then at batch-invariant kernels.",
        _by(whole_batch=False),
    ),
    Probe(
        "trainer",
        "the trainer's own pass",
        "The trainer computes something else than its checkpoint's model class: dropout, a mask, "
        "packed sequences, autocast, an adapter.",
        _by(trainer=True),
    ),
)
