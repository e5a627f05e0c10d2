"""Where verl's weight sync spends its time, from a profile of the process that trains.

    py-spy record --nonblocking --idle --rate 40 --format chrometrace --output TRACE --pid PID
    python -m experiments.benchmarks.sync_profile RECORD.json TRACE RUN

PID is that of Ray's `WorkerDict` process, RUN the folder of the run of `experiments.launch.run`. A
sample every 25 ms: of a part of 0.5 s each sync shows some 20. The first sync, which compiles and
allocates, is left out.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.benchmarks.verl_steps import spread
from experiments.runs.attempts import read_history
from experiments.support.cli import run_cli
from experiments.support.json_files import write_json

SYNC = "ActorRolloutRefWorker.update_weights"
# by the innermost of these functions or what is defined in them; the sender waits for vLLM itself
PARTS = {
    "empty_cache": "CUDA frees what training held",
    "weight_stream": "weights to the GPU",
    "measured_scales": "global scales",
    "group_scales": "global scales",
    "pack": "packing",
    "BucketedWeightSender.async_send_weights": "waiting for vLLM",
}
OTHER = "everything else"
Segment = tuple[float, float, tuple[str, ...]]  # begin and end in seconds, functions on the stack


def segments(events: list[dict[str, Any]]) -> Iterator[Segment]:
    """What a thread's stack was from when to when."""
    stack: list[str] = []
    last_us = 0.0
    for event in sorted(events, key=lambda event: event["ts"]):
        if stack and event["ts"] > last_us:
            yield last_us / 1e6, event["ts"] / 1e6, tuple(stack)
        last_us = event["ts"]
        if event["ph"] == "B":
            stack.append(event["name"])
        else:
            stack.pop()


def syncs(trace: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Seconds of each part of each sync, `total` among them."""
    by_thread: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in trace:
        by_thread[event["tid"]].append(event)
    found: list[dict[str, float]] = []
    for events in by_thread.values():
        end = float("-inf")
        for start, stop, stack in segments(events):
            if SYNC not in stack:
                continue
            if start - end > 1.0:  # of a call that was not sampled for a moment
                found.append(dict.fromkeys(["total", *PARTS.values(), OTHER], 0.0))
            end = stop
            names = (name.partition(".<locals>")[0] for name in reversed(stack))
            part = next((PARTS[name] for name in names if name in PARTS), OTHER)
            found[-1][part] += stop - start
            found[-1]["total"] += stop - start
    return found


def main() -> None:
    """Reads one profile and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("trace", type=Path, help="py-spy's")
    parser.add_argument("run", type=Path, help="folder of the run")
    arguments = parser.parse_args()
    manifest, _ = read_history(arguments.run)
    found = syncs(json.loads(arguments.trace.read_text()))[1:]
    if not found:
        raise ValueError(f"{arguments.trace}: no second weight sync in it; profile a longer run")
    parts = {part: spread(sync[part] for sync in found) for part in found[0]}
    record = {
        "benchmark": "sync_profile",
        "model": manifest.model,
        "arm": manifest.arm,
        "versions": manifest.versions,
        "hardware": manifest.hardware.model_dump(),
        "environment": manifest.environment,
        "git": manifest.git and manifest.git.model_dump(),
        "syncs": len(found),
        "parts_s": parts,
    }
    Console().print_json(data=parts)
    write_json(arguments.record, record)


if __name__ == "__main__":
    run_cli(main)
