"""What was planned before a study's runs, known by digests that manifests keep.

A protocol is a page, where the study names one, and how the study is judged: what its file says of
that and the margins of the rules. Settings of training are compared for themselves; of evaluation
too, but a run can be evaluated again, so that they are bound where claims are about answers.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from experiments.study.schema import ROOT, Study

LATER = "\n## Changes\n"  # what follows was added afterwards, with date and reason
JUDGING = ("judged_by", "primary", "claims", "own_base", "protocol")


class CollapseRules(NamedTuple):
    """Definitions and margins of `judged_by: collapse`, as docs/protocols/collapse.md has them."""

    window_steps: int = 20  # whose mean reward is looked at
    lost_share: float = 0.5  # of the best window so far, which is a collapse
    reward_margin: float = 0.05
    share_margin: float = 0.1  # of runs that collapse
    interval_level: float = 0.90
    error_rate: float = 0.05  # of tests


COLLAPSE = CollapseRules()


def protocol_digest(study: Study) -> str | None:
    """SHA-256 of the protocol's page without its later changes; None for a study without one."""
    if study.protocol is None:
        return None
    text = Path(ROOT / study.protocol).read_text()
    return _sha256(text.partition(LATER)[0])


def judging_digest(study: Study) -> str:
    """SHA-256 of how a study is judged: which runs, by which rules, what decides."""
    # keys that a file does not have may be younger than the run
    said = study.model_dump(mode="json", include={*JUDGING}, exclude_none=True)
    # the first model is the one that most claims are about; else order says nothing
    said |= {"models": [*study.models], "arms": sorted(study.arms), "seeds": sorted(study.seeds)}
    said["cells"] = {
        name: {
            **cell.replaced(),
            "models": sorted(cell.models or study.models),
            "arms": sorted(cell.arms or study.arms),
        }
        for name, cell in study.cells.items()
    }
    if study.judged_by == "collapse":  # arms are compared in the cells that have its advantages
        said |= {"rules": COLLAPSE._asdict(), "advantage": study.rl.advantage}
    else:
        said["evaluation"] = study.evaluation.model_dump()
    return _sha256(json.dumps(said, sort_keys=True))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
