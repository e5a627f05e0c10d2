"""What was planned before a study's runs: its page, known by a digest that manifests keep."""

import hashlib
from pathlib import Path

from experiments.study.schema import ROOT, Study

LATER = "\n## Changes\n"  # what follows was added afterwards, with date and reason


def protocol_digest(study: Study) -> str | None:
    """SHA-256 of the protocol's page without its later changes; None for a study without one."""
    if study.protocol is None:
        return None
    text = Path(ROOT / study.protocol).read_text()
    return hashlib.sha256(text.partition(LATER)[0].encode()).hexdigest()
