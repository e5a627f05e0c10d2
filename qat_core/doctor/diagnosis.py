"""What the doctor found: a finding a cause, the total, and whether anything is at fault."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from qat_core.doctor.laboratory import Laboratory, Setting
from qat_core.doctor.probes import PROBES, Evidence, Probe
from qat_core.doctor.statistics import Bootstrap, Estimate, k3_per_sequence
from qat_core.doctor.verl_run import BANDS

Verdict = Literal["fault", "consequence", "noise", "none", "not measured"]
# Of the k3 of one model in BF16 and in FP32: two computations in BF16 that round independently are
# twice as far apart, and as much again is left for the spread of both estimates.
NOISE_FACTOR = 4.0


@dataclass(frozen=True)
class Finding:
    """One cause."""

    cause: str
    title: str
    k3: Estimate  # between the log-probs before and after this cause was repaired, nats a token
    share: Estimate  # by how much its repair lowers the k3 of trainer and engine, over the total
    evidence: str  # what was found apart from log-probs, "" if nothing
    verdict: Verdict  # `consequence` is rerouted by differences elsewhere, `noise` within the band
    advice: str  # what to do about a fault or a consequence


@dataclass(frozen=True)
class Diagnosis:
    """All findings of one model, engine and setting."""

    kind: str
    num_sequences: int
    num_tokens: int
    total: Estimate  # k3 of trainer and engine, nats a token
    band: tuple[float, float]  # what BF16 on both sides usually has
    findings: tuple[Finding, ...]  # in the order in which the causes were repaired
    # k3 of this model in BF16 and in FP32; None if nothing lies above the band
    noise: Estimate | None = None

    @property
    def limit(self) -> float:
        """What a healthy total does not clearly exceed."""
        return max(self.band[1], NOISE_FACTOR * self.noise.value if self.noise else 0.0)

    @property
    def named(self) -> list[Finding]:
        """The faults, the largest first."""
        faults = [finding for finding in self.findings if finding.verdict == "fault"]
        return sorted(faults, key=lambda finding: -finding.k3.value)

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is at fault and the total is not above the band."""
        return not self.named and self.total.low <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        named = [finding.cause for finding in self.named]
        return asdict(self) | {"named": named, "healthy": self.is_healthy}


def diagnose(lab: Laboratory) -> Diagnosis:
    """Repairs one cause after the other and compares log-probs after each."""
    kind = "moe" if lab.has_routers else "dense"
    bootstrap = Bootstrap(lab.mask_BT)
    noise = _Noise(lab, bootstrap, BANDS[kind][1])
    trained_BT = lab.log_probs(Setting(trainer=True))
    total_B = k3_per_sequence(trained_BT, lab.log_probs(Setting()), lab.mask_BT)
    total, findings = bootstrap.mean(total_B), tuple(_findings(lab, bootstrap, noise))
    noise.is_exceeded_by(total)
    return Diagnosis(
        kind=kind,
        num_sequences=len(lab.mask_BT),
        num_tokens=int(lab.mask_BT.sum()),
        total=total,
        band=BANDS[kind],
        findings=findings,
        noise=noise.measured,
    )


class _Noise:
    """What BF16 alone may cost: the band, and above it what this very model loses to rounding."""

    def __init__(self, lab: Laboratory, bootstrap: Bootstrap, band: float) -> None:
        self._lab, self._bootstrap, self._band = lab, bootstrap, band
        self.measured: Estimate | None = None

    def is_exceeded_by(self, k3: Estimate) -> bool:
        """Whether the whole interval lies above; measures the model only if it has to."""
        if k3.low <= self._band:
            return False
        if self.measured is None:
            self.measured = self._bootstrap.mean(self._lab.rounding_noise)
        return k3.low > NOISE_FACTOR * self.measured.value


def _findings(lab: Laboratory, bootstrap: Bootstrap, noise: _Noise) -> Iterator[Finding]:
    setting = Setting()
    trained_BT, before_BT = lab.log_probs(Setting(trainer=True)), lab.log_probs(setting)
    left_B = total_B = k3_per_sequence(trained_BT, before_BT, lab.mask_BT)
    for probe in PROBES:
        setting, evidence = probe.switch(lab, setting)
        after_BT = lab.log_probs(setting)
        remaining_B = k3_per_sequence(trained_BT, after_BT, lab.mask_BT)
        k3 = bootstrap.mean(k3_per_sequence(after_BT, before_BT, lab.mask_BT))
        share = bootstrap.ratio(left_B - remaining_B, total_B)
        verdict, text = _verdict(lab, probe, k3, evidence, noise)
        advice = probe.advice if verdict in ("fault", "consequence") else ""
        yield Finding(probe.cause, probe.title, k3, share, text, verdict, advice)
        before_BT, left_B = after_BT, remaining_B


def _verdict(
    lab: Laboratory, probe: Probe, k3: Estimate, evidence: Evidence, noise: _Noise
) -> tuple[Verdict, str]:
    if probe.needs_routes and not lab.has_routers:
        return "none", "a dense model"
    if probe.needs_routes and not lab.subject.tells_routes:
        return "not measured", "the engine does not tell its experts: part of the rows above"
    if evidence.proof and k3.value > 0:
        return "fault", evidence.text
    if noise.is_exceeded_by(k3):
        return "consequence" if probe.needs_routes else "fault", evidence.text
    return ("noise" if k3.value > 0 else "none"), evidence.text
