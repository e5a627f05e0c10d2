"""The table of engines after many weight syncs, of records with samples alone and with tensors."""

import json
from pathlib import Path
from typing import Any

from analysis.tables import benchmark_text

SETUP = {"hardware": {"gpus": ["GPU X"]}, "versions": {"vllm": "1.2", "torch": "3.4"}}
EQUAL = {"synced": True, "synced, again": True, "other weights": False}


def _row(folder: Path, kernels: dict[str, Any], run: dict[str, Any], name: str = "") -> str:
    """The line of a record's only model, beside the first record."""
    (folder / "bitwise_x.json").write_text(json.dumps(SETUP | {"models": {}}))
    models = {"m": {"syncs": 100, "tokens": 8000} | run}
    record = SETUP | kernels | {"models": models}
    (folder / f"bitwise{name}_x.json").write_text(json.dumps(record))
    lines = benchmark_text("repeated_syncs", folder, "x").splitlines()
    return next(line for line in lines if line.startswith("| m |"))


def test_a_record_without_tensors_shows_samples(tmp_path: Path) -> None:
    assert _row(tmp_path, {}, {"equal": EQUAL}) == (
        "| m | Marlin | off | reload | not recorded | 100 | 8,000 | synced; synced, again "
        "| not recorded | other weights |"
    )


def test_samples_of_an_engine_that_does_not_repeat_itself_are_not_held_against_it(
    tmp_path: Path,
) -> None:
    samples = EQUAL | {"synced, again": False, "in place": False, "fresh modelopt": False}
    run: dict[str, Any] = {
        "equal": samples,
        "equal_weights": {"in place": True, "other weights": False},
    }
    run["ways"] = {"reload": {"in_place": False}, "in place": {"in_place": True}}
    assert _row(tmp_path, {"kernels": "humming"}, run, "_humming") == (
        "| m | Humming | off | reload and in place | not recorded | 100 | 8,000 "
        "| no: one engine's own differ | in place | other weights |"
    )


def test_what_differs_in_tensors_alone_is_named(tmp_path: Path) -> None:
    run = {"equal": EQUAL, "equal_weights": {"synced": True, "slept and synced": False}}
    kernels = {"kernels": "humming-experts", "torch_compile": True}
    row = _row(tmp_path, kernels, run, "_humming_experts")
    assert row.endswith("| synced; synced, again | synced | other weights; slept and synced |")
    assert "| Marlin, experts by Humming | on |" in row
