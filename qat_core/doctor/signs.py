"""What the metrics of a recorded run say of its mismatch.

With d = log p - log q over tokens drawn from q, E[exp(d)] is 1 whatever the weights are, so that
`k3_kl - kl`, which is E[exp(d)] - 1, tells the sampler's faults from the model's: it is the
probability that p gives to the tokens that q can draw, less 1. Top-p and top-k make it negative.
"""

import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from qat_core.doctor.verl_run import BANDS, K1, K3, Judgement, Sign, Verdict, VerlRun

NUM_RESAMPLES = 2000
# of the last steps, for the level, against the first, for the growth
QUARTER = 4
GROWTH, JUMP, LASTING = 3.0, 10.0, 3
# chi-squared over k3 is 2 where d is Gaussian and small
TAIL = 20.0
# text of that many bytes to one compressed byte only repeats itself: prose has 2 to 4
COMPRESSED, SHORTEST = 8.0, 200
NEUTRAL = {"top_p": (1, 1.0), "top_k": (-1, 0), "repetition_penalty": (1, 1.0)}
VLLM_QUANTIZATION = ("engine_kwargs", "vllm", "quantization")
CHI2 = "rollout_corr/chi2_token"
STALENESS = "training/off_policy/trajectory_staleness/mean"
RUN_THE_DOCTOR = "For the cause run python -m qat_core.doctor on a checkpoint of this run."


class Found(NamedTuple):
    """What a sign is; the advice is for a fault or a warning."""

    evidence: str
    verdict: Verdict
    advice: str = ""


def judge(run: VerlRun, kind: str = "dense") -> Judgement:
    """All signs of a run, against the band of BF16 for its kind of model, `dense` or `moe`."""
    band, signs = BANDS[kind], []
    for name, title, look in SIGNS:
        text, verdict, advice = look(run, band)
        is_named = verdict in ("fault", "warning")
        signs.append(Sign(name, title, text, verdict, advice if is_named else ""))
    return Judgement(len(run.steps), band, tuple(signs))


def _level(run: VerlRun, band: tuple[float, float]) -> Found:
    k3 = run.series(K3)
    if len(k3) == 0:
        return Found("no step has a finite k3", "fault", RUN_THE_DOCTOR)
    low, high = _interval(k3, np.median)
    text = f"median k3 {np.median(k3):.1e} [{low:.1e}, {high:.1e}], "
    text += f"BF16 {band[0]:.0e} to {band[1]:.0e}"
    lost = len(run.steps) - len(k3)
    text += f"; {lost} steps without a finite value" if lost else ""
    above = low > band[1] or lost > 0
    return Found(text, "fault" if above else "none", RUN_THE_DOCTOR)


def _growth(run: VerlRun, band: tuple[float, float]) -> Found:
    k3 = run.series(K3)
    size = len(k3) // QUARTER
    if size < 2:
        return Found(f"{len(k3)} steps are too few", "not recorded")
    first, last = np.log(np.maximum(k3[:size], 1e-12)), np.log(np.maximum(k3[-size:], 1e-12))
    growth = _resampled(last).mean(1) - _resampled(first, seed=1).mean(1)
    low, high = np.exp(np.quantile(growth, [0.025, 0.975]))
    ratio = np.exp(last.mean() - first.mean())
    text = f"last quarter over first {ratio:.1f}x [{low:.1f}, {high:.1f}]"
    grows = low > GROWTH and float(np.median(k3[-size:])) > band[1]
    advice = (
        "Look at the learning rate, at the staleness, and at which layers drift (qat_core.drift); "
        "a mismatch that grows with training precedes collapses."
    )
    return Found(text, "fault" if grows else "none", advice)


def _jump(run: VerlRun, band: tuple[float, float]) -> Found:
    k3 = run.series(K3)
    if len(k3) < 2 * LASTING:
        return Found(f"{len(k3)} steps are too few", "not recorded")
    # a burst ends, as of a few rerouted tokens; what stays up has a cause at that step
    starts = range(LASTING, len(k3) - LASTING + 1)
    before = np.array([np.median(k3[:n]) for n in starts])
    after = np.array([k3[n : n + LASTING].min() for n in starts])
    ratio = after / np.maximum(before, 1e-12)
    where = int(np.argmax(ratio))
    if ratio[where] < JUMP or after[where] < band[1]:
        return Found(f"no {LASTING} steps stay {JUMP:g} times above", "none")
    step = np.array(run.steps)[np.isfinite(run.metrics[K3])][where + LASTING]
    text = f"from step {step} on {ratio[where]:.0f} times the median of the steps before"
    advice = "Look at what happened there: a failed or partial weight sync, a resumed engine."
    return Found(text, "fault", advice)


def _support(run: VerlRun, band: tuple[float, float]) -> Found:
    k3, k1 = run.metrics[K3], run.metrics.get(K1)
    if k1 is None:
        return Found(f"{K1} is not logged", "not recorded")
    excess = (k3 - k1)[np.isfinite(k3 - k1)]
    if len(excess) < 3:
        return Found(f"{len(excess)} steps are too few", "not recorded")
    low, high = _interval(excess, np.mean, level=0.999)
    text = f"E[p/q] {1 + excess.mean():.4f} [{1 + low:.4f}, {1 + high:.4f}], 1 if sound"
    if max(abs(low), abs(high)) < band[1] or low < 0 < high or abs(excess.mean()) < band[1]:
        return Found(text, "none")
    advice = (
        "Below 1: the sampler excludes tokens (top-p, top-k). Above 1: log-probs are reported "
        "before temperature or penalties (rollout.logprobs_mode). Sample neutrally."
    )
    return Found(text, "fault", advice)


def _sampling(run: VerlRun, band: tuple[float, float]) -> Found:
    if not run.config:
        return Found("no config.yaml of verl's in the folder", "not recorded")
    rollout = {key: run.setting("actor_rollout_ref", "rollout", key) for key in NEUTRAL}
    used = {k: v for k, v in rollout.items() if v is not None and v not in NEUTRAL[k]}
    if not used:
        return Found("neutral; verl scales both sides by the temperature", "none")
    text = ", ".join(f"{key}={value}" for key, value in used.items())
    return Found(text, "fault", "Set top_p=1, top_k=-1 and no penalty in the rollout.")


def _quantization(run: VerlRun, band: tuple[float, float]) -> Found:
    if not run.config:
        return Found("no config.yaml of verl's in the folder", "not recorded")
    qat = ("actor_rollout_ref", "actor", "fsdp_config", "qat")
    rollout = ("actor_rollout_ref", "rollout")
    # verl's own key, vLLM's, and QAT's, which quantizes both sides; verl always writes its section
    served = run.setting(*rollout, "quantization") or run.setting(*rollout, *VLLM_QUANTIZATION)
    enable, train = run.setting(*qat, "enable"), run.setting(*qat, "train")
    if not served and not enable:
        return Found("BF16 rollouts", "none")
    if enable and train is not False:
        return Found("QAT is on", "none")
    text = f"rollouts in {served or 'NVFP4'}, qat.enable={enable}, qat.train={train}"
    advice = "Train fake-quantized: fsdp_config.qat.enable=true, and not train=false."
    return Found(text, "fault", advice)


def _staleness(run: VerlRun, band: tuple[float, float]) -> Found:
    values = run.series(STALENESS)
    if len(values) == 0:
        return Found(f"{STALENESS} is not logged", "not recorded")
    text = f"mean {values.mean():.2f} steps, largest {values.max():.2f}"
    advice = "Correct the ratio (algorithm.rollout_correction) or sync more often."
    stale = values.mean() > 0
    return Found(text, "warning" if stale else "none", advice)


def _tail(run: VerlRun, band: tuple[float, float]) -> Found:
    chi2, k3 = run.metrics.get(CHI2), run.metrics[K3]
    if chi2 is None:
        return Found(f"{CHI2} is not logged", "not recorded")
    both = np.isfinite(chi2) & np.isfinite(k3)
    if not k3[both].sum() > 0:
        return Found("no step has a finite chi2 and k3 above 0", "not recorded")
    ratio = float(chi2[both].mean() / k3[both].mean())
    text = f"chi2 over k3 {ratio:.1f}; 2 where all tokens differ a little"
    # its squares overflow long before k3 does
    lost = int((np.isfinite(k3) & ~np.isfinite(chi2)).sum())
    text += f"; {lost} steps with a finite k3 alone" if lost else ""
    advice = "Few tokens carry the mismatch: rerouted experts, a kernel's fault at rare shapes."
    few = ratio > TAIL or lost > 0
    return Found(text, "warning" if few else "none", advice)


def _repetition(run: VerlRun, band: tuple[float, float]) -> Found:
    if not run.responses:
        return Found("no rollouts dumped (trainer.rollout_data_dir)", "not recorded")
    step = max(run.responses)
    texts = [text.encode() for text in run.responses[step]]
    looping = [
        text
        for text in texts
        if len(text) >= SHORTEST and len(text) > COMPRESSED * len(zlib.compress(text))
    ]
    empty = sum(not text.strip() for text in texts)
    text = f"step {step}: {len(looping)} of {len(texts)} repeat themselves, {empty} are empty"
    bad = len(looping) + empty > len(texts) / 10
    advice = "The policy has collapsed: look at the steps before, not at the mismatch of this one."
    return Found(text, "fault" if bad else "none", advice)


SIGNS: tuple[tuple[str, str, Callable[[VerlRun, tuple[float, float]], Found]], ...] = (
    ("level", "size of the mismatch", _level),
    ("growth", "growth over the run", _growth),
    ("jump", "sudden change", _jump),
    ("support", "sampler: does q report what it draws from?", _support),
    ("sampling", "sampling settings", _sampling),
    ("quantization", "quantization without QAT", _quantization),
    ("staleness", "staleness of rollouts", _staleness),
    ("tail", "few tokens or all?", _tail),
    ("repetition", "responses that repeat themselves", _repetition),
)


def _resampled(values: np.ndarray, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    drawn: np.ndarray = values[rng.integers(len(values), size=(NUM_RESAMPLES, len(values)))]
    return drawn


def _interval(
    values: np.ndarray, average: Callable[..., np.ndarray], level: float = 0.95
) -> tuple[float, float]:
    """Percentile interval over steps."""
    resampled = average(_resampled(values), axis=1)
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
