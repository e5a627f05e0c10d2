"""One row a study and model: what its claims came to. Collapses have a table of their own."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from analysis.claims_table import MARK, Claim, read_table
from analysis.load import recorded_study
from analysis.markdown import Row, markdown_table

RATIO = "qat_kl_ratio"
ESTIMATES = {  # of claims, by heading
    "k3 KL, QAT / BF16": RATIO,
    "no QAT / BF16": "noqat_kl_ratio",
    "Served, QAT - BF16": "served_log_odds",
    "QAT - no QAT": "served_gain",
}
NOTE = (
    "Correction of the mismatch in every arm of a study, without QAT too: token_tis caps "
    "importance weights of tokens at 2.0. Ratios of mean k3 KL, with a 95 % interval over seeds "
    "where there are several. Served: accuracy, QAT's and that without QAT in NVFP4, BF16's in "
    "BF16, in log-odds. Verdicts: of the claims that require something; of a single seed weight "
    "memory alone is judged."
)
DEPARTS = f"{MARK} Departs from the protocol: the claims in experiments/records/STUDY say how."


def summary_text(records: Path) -> str:
    """Markdown of all recorded studies."""
    files = sorted(records.glob("*/claims.json"))
    rows = [row for path in files for row in _rows(path.parent)]
    departures = DEPARTS if any(MARK in row["Model"] for row in rows) else ""
    return "\n\n".join(filter(None, [markdown_table(rows), departures, NOTE])) + "\n"


def _rows(record: Path) -> Iterator[Row]:
    table = read_table(record / "claims.json")
    for model in dict.fromkeys(claim.model for claim in table.claims):
        claims = {claim.name: claim for claim in table.claims if claim.model == model}
        if RATIO in claims:
            yield {
                "Study": f"`{table.study}`",
                "Model": f"{model} {MARK}" if table.marks.get(model) else model,
                "Correction": f"`{recorded_study(record).rl.correction}`",
                "Seeds": str(claims[RATIO].num_seeds),
                **{
                    heading: claims[name].with_interval if name in claims else ""
                    for heading, name in ESTIMATES.items()
                },
                "Verdicts": _verdicts(claims),
            }


def _verdicts(claims: Mapping[str, Claim]) -> str:
    """How many of each."""
    counts = Counter(claim.verdict for claim in claims.values())
    words = (f"{counts[it]} {it}" for it in ("PASS", "FAIL", "INCONCLUSIVE") if counts[it])
    one_seed = all(claim.num_seeds == 1 for claim in claims.values())
    return ", ".join(words) or ("none: one seed" if one_seed else "none")
