"""The protocol that claims are judged by, and what a study's runs lack of it.

docs/protocols/kl-claim.md is its text. It was written after the first records had been seen, so it
applies to runs that started after it; rows about older ones say so.
"""

from datetime import UTC, datetime

from analysis.results import Results

PROTOCOL = "2026-11-21"
SINCE = datetime(2026, 11, 22, tzinfo=UTC)
SEEDS = 5


def marks(results: Results, model: str) -> tuple[str, ...]:
    """What a reader must know of a model's runs before any verdict about them."""
    runs = [run for run in results.manifests.values() if run.model == model]
    seeds = {run.seed for run in runs}
    found = {
        f"recorded before protocol {PROTOCOL}": any(
            datetime.fromisoformat(run.started_at) < SINCE for run in runs
        ),
        f"{len(seeds)} of the protocol's {SEEDS} seeds": len(seeds) < SEEDS,
        "seeds share one base checkpoint": len(seeds) > 1
        and len({run.digests.get("base") for run in runs}) < len(seeds),
        "no bf16 arm, so mismatch and accuracy are not judged": "bf16"
        not in {it.arm for it in runs},
        "code had uncommitted changes": any(run.git is None or run.git.dirty for run in runs),
    }
    return tuple(mark for mark, holds in found.items() if holds)
