"""What the doctor found: a finding a cause, the total, and whether anything is at fault."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from qat_core.doctor.laboratory import Laboratory, Setting
from qat_core.doctor.probes import PROBES, Evidence, Probe
from qat_core.doctor.statistics import Bootstrap, Estimate, k3_per_sequence

Verdict = Literal["fault", "consequence", "noise", "none", "not measured"]
BANDS = {"dense": (1e-5, 3e-4), "moe": (1e-4, 1e-3)}


@dataclass(frozen=True)
class Finding:
    """One cause.

    Attributes:
        cause: its name in `PROBES`.
        title: its name in the table.
        k3: between the log-probs before and after this cause was repaired, nats a token.
        share: by how much its repair lowers the k3 of trainer and engine, over the total.
        evidence: what was found apart from log-probs, "" if nothing.
        verdict: `fault`, `consequence` (rerouted by differences elsewhere), `noise` (a difference
            within the band), `none` or `not measured`.
        advice: what to do about a fault or a consequence.
    """

    cause: str
    title: str
    k3: Estimate
    share: Estimate
    evidence: str
    verdict: Verdict
    advice: str


@dataclass(frozen=True)
class Diagnosis:
    """All findings of one model, engine and setting.

    Attributes:
        total: k3 of trainer and engine, nats a token.
        band: what BF16 on both sides usually has.
        findings: in the order in which the causes were repaired.
    """

    kind: str
    num_sequences: int
    num_tokens: int
    total: Estimate
    band: tuple[float, float]
    findings: tuple[Finding, ...]

    @property
    def named(self) -> list[Finding]:
        """The faults, the largest first."""
        faults = [finding for finding in self.findings if finding.verdict == "fault"]
        return sorted(faults, key=lambda finding: -finding.k3.value)

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is at fault and the total is not above the band."""
        return not self.named and self.total.low <= self.band[1]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        named = [finding.cause for finding in self.named]
        return asdict(self) | {"named": named, "healthy": self.is_healthy}


def diagnose(lab: Laboratory) -> Diagnosis:
    """Repairs one cause after the other and compares log-probs after each."""
    kind = "moe" if lab.has_routers else "dense"
    bootstrap, band = Bootstrap(lab.mask_BT), BANDS[kind]
    trained_BT = lab.log_probs(Setting(trainer=True))
    total_B = k3_per_sequence(trained_BT, lab.log_probs(Setting()), lab.mask_BT)
    return Diagnosis(
        kind=kind,
        num_sequences=len(lab.mask_BT),
        num_tokens=int(lab.mask_BT.sum()),
        total=bootstrap.mean(total_B),
        band=band,
        findings=tuple(_findings(lab, bootstrap, band[1])),
    )


def _findings(lab: Laboratory, bootstrap: Bootstrap, above: float) -> Iterator[Finding]:
    setting = Setting()
    trained_BT, before_BT = lab.log_probs(Setting(trainer=True)), lab.log_probs(setting)
    left_B = total_B = k3_per_sequence(trained_BT, before_BT, lab.mask_BT)
    for probe in PROBES:
        setting, evidence = probe.switch(lab, setting)
        after_BT = lab.log_probs(setting)
        remaining_B = k3_per_sequence(trained_BT, after_BT, lab.mask_BT)
        k3 = bootstrap.mean(k3_per_sequence(after_BT, before_BT, lab.mask_BT))
        share = bootstrap.ratio(left_B - remaining_B, total_B)
        verdict, text = _verdict(lab, probe, k3, evidence, above)
        advice = probe.advice if verdict in ("fault", "consequence") else ""
        yield Finding(probe.cause, probe.title, k3, share, text, verdict, advice)
        before_BT, left_B = after_BT, remaining_B


def _verdict(
    lab: Laboratory, probe: Probe, k3: Estimate, evidence: Evidence, above: float
) -> tuple[Verdict, str]:
    if probe.needs_routes and not lab.has_routers:
        return "none", "a dense model"
    if probe.needs_routes and not lab.subject.tells_routes:
        return "not measured", "the engine does not tell its experts: part of the rows above"
    if evidence.proof and k3.value > 0:
        return "fault", evidence.text
    if k3.low > above:
        return "consequence" if probe.needs_routes else "fault", evidence.text
    return ("noise" if k3.value > 0 else "none"), evidence.text
