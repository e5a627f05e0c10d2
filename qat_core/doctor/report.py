"""A diagnosis as a table for people."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from qat_core.doctor.diagnosis import Diagnosis, Finding
from qat_core.doctor.statistics import Estimate

STYLES = {
    "fault": "bold red",
    "consequence": "yellow",
    "noise": "",
    "none": "dim",
    "not measured": "yellow",
}
KINDS = {"dense": "BF16 dense", "moe": "BF16 MoE"}


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Prints all causes with their sizes, then what is at fault and what to do."""
    table = Table("cause", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("k3 of the switch", "share of the total", "verdict"):
        table.add_column(heading, no_wrap=True)
    for finding in diagnosis.findings:
        if finding.verdict != "none":
            table.add_row(*map(Text, _cells(finding)), style=STYLES[finding.verdict])
    console.print(table)
    for finding in diagnosis.findings:
        if finding.verdict != "none" and finding.evidence:
            console.print(Text(f"{finding.title}: {finding.evidence}"))
    absent = [finding.title for finding in diagnosis.findings if finding.verdict == "none"]
    console.print(Text(f"No difference: {', '.join(absent)}.", style=STYLES["none"]))
    low, high = diagnosis.band
    console.print(
        f"k3 KL(rollout || train): {_number(diagnosis.total)} nats a token, "
        f"{diagnosis.num_sequences} sequences, {diagnosis.num_tokens} tokens. "
        f"{KINDS[diagnosis.kind]}: {low:.0e} to {high:.0e}. {_place(diagnosis)}"
    )
    for finding in diagnosis.named:
        console.print(Text(f"{finding.title}: {finding.advice}", style=STYLES["fault"]))
    for finding in diagnosis.findings:
        if finding.verdict == "consequence":
            console.print(Text(f"{finding.title}, a consequence: {finding.advice}"))
    if not diagnosis.named:
        console.print("No fault found.")


def _cells(finding: Finding) -> list[str]:
    if finding.verdict == "not measured":
        return [finding.title, "", "", finding.verdict]
    if finding.k3.value == 0:
        return [finding.title, "0", "", finding.verdict]
    share = finding.share
    shares = f"{share.value:.0%} [{share.low:.0%}, {share.high:.0%}]"
    return [finding.title, _number(finding.k3), shares, finding.verdict]


def _number(estimate: Estimate) -> str:
    return f"{estimate.value:.1e} [{estimate.low:.1e}, {estimate.high:.1e}]"


def _place(diagnosis: Diagnosis) -> str:
    low, high = diagnosis.band
    if diagnosis.total.low <= high:
        return "Below the band." if diagnosis.total.high < low else "Within the band."
    if diagnosis.noise is None:
        return "Above the band."
    is_own = diagnosis.total.low <= diagnosis.limit
    return (
        f"Above the band, {'as' if is_own else 'and more than'} this model's rounding to BF16 "
        f"explains: BF16 to FP32 {_number(diagnosis.noise)}."
    )
