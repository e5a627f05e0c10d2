"""Manifests for tests."""

from typing import Any

from experiments.runs.manifest import RunManifest

HARDWARE = {"cpu": "cpu", "cores": 2, "memory_gib": 24.0, "gpus": []}
MANIFEST: dict[str, Any] = {
    "run": "nano_bf16_seed0",
    "study": "s",
    "model": "nano",
    "arm": "bf16",
    "seed": 0,
    "status": "running",
    "reason": None,
    "started_at": "2026-01-01T00:00:00+00:00",
    "attempt_started_at": "2026-01-01T00:00:00+00:00",
    "wall_s": None,
    "attempt": 1,
    "command": "python -m experiments.launch.run",
    "config": {"rl": {"lr": 1e-6, "steps": 4}, "arm": "bf16"},
    "git": {"commit": "abc", "dirty": False, "diff_sha256": "d"},
    "digests": {"config": "c", "code": "d"},
    "versions": {"python": "3.11"},
    "hardware": HARDWARE,
    "seeds": {"run": 0},
    "memory": {"predicted_bf16_gib": 0.5, "measured_bf16_gib": 0.5},
    "coverage": None,
}


def make_manifest(**changes: Any) -> RunManifest:
    """A manifest of a small BF16 run with some keys changed."""
    return RunManifest.model_validate(MANIFEST | changes)
