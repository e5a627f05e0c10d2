"""The protocol that claims are judged by, and what a study's runs lack of it.

docs/protocols/kl-claim.md is its text. It was written after the first records had been seen, so it
applies to runs that started after it; rows about older ones say so.
"""

from datetime import UTC, datetime

from analysis.claim_rows import ONE_CHECKPOINT, is_pretrained
from analysis.parity.accuracy import BF16, accuracy_of_bf16
from analysis.results import Results
from experiments.study.schema import Study

PROTOCOL = "2026-11-21"
SINCE = datetime(2026, 11, 22, tzinfo=UTC)
SEEDS = 5
SAMPLES = 4  # a prompt
LOWEST, HIGHEST = 0.5, 0.8  # where BF16 is to end
EVALUATED_STEPS = 3  # so that at least one lies within training


def marks(study: Study, results: Results, model: str) -> tuple[str, ...]:
    """What a reader must know of a model's runs before any verdict about them."""
    runs = [run for run in results.manifests.values() if run.model == model]
    seeds, arms = {run.seed for run in runs}, {run.arm for run in runs}
    samples = results.samples_per_prompt(model)
    accuracy = accuracy_of_bf16(results, model) if BF16.arm in arms else None
    evals = results.evals[results.evals["model"] == model]
    is_elsewhere = evals["device"].notna() & (evals["device"] != study.device)
    on_cpu = evals["run"][is_elsewhere].nunique()
    found = {
        f"recorded before protocol {PROTOCOL}": any(
            datetime.fromisoformat(run.started_at) < SINCE for run in runs
        ),
        f"{len(seeds)} of the protocol's {SEEDS} seeds": len(seeds) < SEEDS,
        "seeds share one base checkpoint": len(seeds) > 1
        and len({run.digests.get("base") for run in runs}) < len(seeds),
        f"{samples} of the protocol's {SAMPLES} samples a prompt": samples < SAMPLES,
        "not evaluated within training": evals["step"].nunique() < EVALUATED_STEPS,
        ONE_CHECKPOINT: is_pretrained(study, model),
        "no bf16 arm, so mismatch and accuracy are not judged": accuracy is None,
        f"{on_cpu} of its {len(runs)} runs were evaluated on a CPU": on_cpu > 0,
        "code had uncommitted changes": any(run.git is None or run.git.dirty for run in runs),
    }
    if accuracy is not None and not LOWEST <= accuracy <= HIGHEST:
        found[f"BF16 ended at {accuracy:.3f}, outside {LOWEST} to {HIGHEST}"] = True
    return tuple(mark for mark, holds in found.items() if holds)
