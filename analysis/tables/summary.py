"""One row a study and model: what its claims came to. Collapses have a table of their own."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from analysis.claims_table import MARK, Claim, read_table
from analysis.load import recorded_study
from analysis.markdown import MarkdownTable

RATIO = "qat_kl_ratio"
NOTE = (
    "Correction of the mismatch in every arm of a study, without QAT too: token_tis caps "
    "importance weights of tokens at 2.0. Ratios of mean k3 KL, with a 95 % interval over seeds "
    "where there are several. Served: accuracy, QAT's and that without QAT in NVFP4, BF16's in "
    "BF16, in log-odds. Verdicts: of the claims that require something; of a single seed weight "
    "memory alone is judged."
)
DEPARTS = f"{MARK} Departs from the protocol: the claims in experiments/records/STUDY say how."


class Summary(NamedTuple):
    """The claims about one model of a study, by name."""

    study: str
    model: str
    correction: str
    claims: dict[str, Claim]
    marks: tuple[str, ...]

    def show(self, name: str) -> str:
        """Estimate and interval of a claim, empty where the study does not make it."""
        if name not in self.claims:
            return ""
        claim = self.claims[name]
        return claim.shown_estimate + (f" ({claim.interval})" if claim.interval != "-" else "")

    @property
    def verdicts(self) -> str:
        """How many of each."""
        counts = Counter(claim.verdict for claim in self.claims.values())
        words = (f"{counts[it]} {it}" for it in ("PASS", "FAIL", "INCONCLUSIVE") if counts[it])
        one_seed = all(claim.num_seeds == 1 for claim in self.claims.values())
        return ", ".join(words) or ("none: one seed" if one_seed else "none")


TABLE: MarkdownTable[Summary] = MarkdownTable(
    {
        "Study": lambda row: f"`{row.study}`",
        "Model": lambda row: f"{row.model} {MARK}" if row.marks else row.model,
        "Correction": lambda row: f"`{row.correction}`",
        "Seeds": lambda row: str(next(iter(row.claims.values())).num_seeds),
        "k3 KL, QAT / BF16": lambda row: row.show(RATIO),
        "no QAT / BF16": lambda row: row.show("noqat_kl_ratio"),
        "Served, QAT - BF16": lambda row: row.show("served_log_odds"),
        "QAT - no QAT": lambda row: row.show("served_gain"),
        "Verdicts": lambda row: row.verdicts,
    }
)


def summary_text(records: Path) -> str:
    """Markdown of all recorded studies.

    Raises:
        ValueError: a record's claims are damaged.
    """
    files = sorted(records.glob("*/claims.json"))
    rows = [row for path in files for row in _rows(path.parent)]
    departures = DEPARTS if any(row.marks for row in rows) else ""
    return "\n\n".join(filter(None, [TABLE.markdown(rows), departures, NOTE])) + "\n"


def _rows(record: Path) -> Iterator[Summary]:
    table = read_table(record / "claims.json")
    correction = recorded_study(record).rl.correction
    for model in dict.fromkeys(claim.model for claim in table.claims):
        claims = {claim.name: claim for claim in table.claims if claim.model == model}
        if RATIO in claims:
            yield Summary(table.study, model, correction, claims, table.marks.get(model, ()))
