"""Parts of a weight sync, from a small trace of py-spy's kind."""

import ast
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmarks.sync_profile import OTHER, PARTS, SYNC, syncs
from qat_core.weights import packing, stream

SENDER = "BucketedWeightSender.async_send_weights"


def _call(stack: list[str], start_ms: int, end_ms: int, thread: int = 1) -> list[dict[str, Any]]:
    """A stack that stands from its start to its end."""
    events = [{"ph": "B", "name": name, "ts": 1e3 * start_ms, "tid": thread} for name in stack]
    return events + [
        {"ph": "E", "name": name, "ts": 1e3 * end_ms, "tid": thread} for name in reversed(stack)
    ]


def test_the_innermost_known_function_names_the_part() -> None:
    stream = [SYNC, SENDER, "packed_weights", "_packed_group"]
    trace = [
        *_call([SYNC, "empty_cache"], 0, 500),
        *_call([SYNC, SENDER], 500, 700),
        *_call([SYNC, SENDER, "packed_weights", "weight_stream.<locals>.read"], 700, 1000),
        *_call([*stream, "measured_scales"], 1000, 1100),
        *_call([*stream, "pack", "quantize"], 1100, 1150),
        *_call([SYNC, "to"], 1150, 1170),
        *_call(["train"], 1170, 9000),
    ]
    (found,) = syncs(trace)
    assert found == pytest.approx(
        {
            "CUDA frees what training held": 0.5,
            "waiting for vLLM": 0.2,
            "weights to the GPU": 0.3,
            "global scales": 0.1,
            "packing": 0.05,
            OTHER: 0.02,
            "total": 1.17,
        }
    )


def test_a_pause_of_more_than_a_second_ends_a_sync() -> None:
    trace = [*_call([SYNC], 0, 100), *_call([SYNC], 600, 700), *_call([SYNC], 5000, 5300)]
    assert [sync["total"] for sync in syncs(trace)] == pytest.approx([0.2, 0.3])


def test_functions_that_name_parts_exist() -> None:
    """A profile has them by name: one that was renamed would count as everything else."""
    ours = PARTS.keys() - {SENDER, "empty_cache"}
    assert ours == {name for name in ours if hasattr(stream, name) or hasattr(packing, name)}


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("workers/rollout/vllm_rollout/bucketed_weight_transfer.py", SENDER),
        ("workers/engine_workers.py", SYNC),
    ],
)
def test_verls_functions_exist(file: str, name: str) -> None:
    verl = pytest.importorskip("verl", reason="needs requirements/engines.txt")
    tree = ast.parse((Path(verl.__file__).parent / file).read_text())
    functions = {
        f"{owner.name}.{it.name}"
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for it in owner.body
        if isinstance(it, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert name in functions
