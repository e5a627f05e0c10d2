"""verl's own trainers with `+nvfp4=w4a16`, and what they leave in the table of docs/verl.md.

Each case is a run of a model with random weights over a few steps: a nano model on CPU workers or,
where a case is named that needs them, one of true shape on GPUs. It counts as shown if verl ends
well, every step has its metrics, the weights change, and every sync brings each vLLM worker the
very bytes that the trainer sent. OUT/CASE holds log, metrics and digests; what was found is noted
in experiments/records/benchmarks/verl_runs.json, from which `docs/verl.md` takes its table.
"""

import argparse
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from analysis.markdown import markdown_table
from experiments.runs.provenance import origin
from experiments.study.schema import ROOT
from experiments.support.cli import run_cli
from experiments.support.json_files import write_json
from experiments.verl.data import write_data
from experiments.verl.process import running_verl
from tests.nano_models import TASK, write_nano
from tests.workflow import verl_cases
from tests.workflow.verl_cases import Case, command
from tests.workflow.verl_gpu_cases import GPU_CASES, gpu_command, write_base

CASES = verl_cases.CASES | GPU_CASES

RECORD = ROOT / "experiments" / "records" / "benchmarks" / "verl_runs.json"
LIMIT_S = 900.0
POLL_S = 0.5


def prepare(folder: Path, cases: Iterable[Case]) -> None:
    """Models and data of these cases, where they are missing."""
    for case in cases:
        if (folder / case.model).exists():
            continue
        if case.gpus:
            write_base(case, folder / case.model)
        else:
            write_nano(case.model, folder / case.model, num_layers=2)
    if not (folder / "data").exists():
        write_data(TASK, folder / "data")


def run(case: Case, folder: Path, out: Path) -> dict[str, Any]:
    """Runs a case to its end, after the run that it resumes.

    Raises:
        ValueError: it does not show what it is to show; the message says what is missing.
    """
    shutil.rmtree(out, ignore_errors=True)
    if not case.resumes_after:
        return _train(case, folder, out)
    saving = case._replace(steps=case.resumes_after, resumes_after=0)
    saved = _train(saving, folder, out / "saving")
    resumed = _train(case, folder, out / "resuming")
    before, after = _sent(out / "saving"), _sent(out / "resuming")
    if after[0] != before[-1]:
        raise ValueError(f"{out}: not the weights that were saved are sent after loading")
    if before[0] == before[-1] or after[0] == after[-1]:
        raise ValueError(f"{out}: weights did not change between syncs")
    metrics = {name: saved["metrics"][name] + resumed["metrics"][name] for name in case.metrics}
    sums = {name: saved[name] + resumed[name] for name in ("steps", "syncs")}
    return resumed | sums | {"metrics": metrics}


def _train(case: Case, folder: Path, out: Path) -> dict[str, Any]:
    out.mkdir(parents=True)
    log = out / "verl.log"
    start = time.monotonic()
    compose = gpu_command if case.gpus else command
    with running_verl(compose(case, folder, out), log) as verl:
        while verl.exit_code() is None and time.monotonic() - start < LIMIT_S:
            time.sleep(POLL_S)
        code = verl.exit_code()
    if code != 0:
        raise ValueError(f"{log}: verl ended with {code} after {time.monotonic() - start:.0f} s")
    return _steps(case, out) | (_syncs(out) if case.pools == 1 else _syncs_of_pools(out))


def _steps(case: Case, out: Path) -> dict[str, Any]:
    lines = map(json.loads, (out / "verl.jsonl").read_text().splitlines())
    rows = [line["data"] | {"step": line["step"]} for line in lines]
    rows = [row for row in rows if "actor/grad_norm" in row]
    if len(rows) < case.steps - case.resumes_after:
        raise ValueError(f"{out}: {len(rows)} steps up to {case.steps}")
    if case.resumes_after and rows[0]["step"] != case.resumes_after + 1:
        raise ValueError(f"{out}: goes on with step {rows[0]['step']}")
    for name in case.metrics:
        if not all(row.get(name) for row in rows):
            raise ValueError(f"{out}: {name}: {[row.get(name) for row in rows]}")
    for name in case.zeros:
        if not all(row.get(name) == 0 for row in rows):
            raise ValueError(f"{out}: {name}: {[row.get(name) for row in rows]}, not 0")
    names = case.metrics + case.zeros
    return {"steps": len(rows), "metrics": {name: [row[name] for row in rows] for name in names}}


def _syncs(out: Path) -> dict[str, Any]:
    """Compares the digests of all senders and receivers, sync by sync."""
    by_sync = _digests(out)
    for number, sides in by_sync.items():
        (first, *others) = sides["sent"] + sides["received"]
        if not sides["sent"] or not sides["received"] or any(other != first for other in others):
            raise ValueError(f"{out}: sync {number}: not the bytes that were sent")
    contents = {json.dumps(sent, sort_keys=True) for sent in _sent(out)}
    if len(contents) < len(by_sync) - 1:  # the first two are of the untrained model
        raise ValueError(f"{out}: weights did not change between syncs")
    return _described(len(by_sync), len(by_sync[0]["received"]), by_sync[0]["sent"][0])


def _syncs_of_pools(out: Path) -> dict[str, Any]:
    """As `_syncs`, where each sync brings one pool of a single worker what it takes.

    All that was sent was taken, once, and by each worker in the order in which it was sent.
    """
    taken: dict[str, list[str]] = defaultdict(list)
    for number in sorted(by_sync := _digests(out)):
        for file in sorted(out.glob(f"received-*-{number}.json")):
            content = json.loads(file.read_text())
            taken[file.stem.split("-")[1]].append(json.dumps(content, sort_keys=True))
    sent = [json.dumps(content, sort_keys=True) for content in _sent(out)]
    if sorted(sent) != sorted(chain.from_iterable(taken.values())):
        raise ValueError(f"{out}: not the bytes that were sent")
    for worker, contents in taken.items():
        places = [sent.index(content) for content in contents]
        if places != sorted(places):
            raise ValueError(f"{out}: {worker}: not in the order in which they were sent")
    if len(set(sent)) < len(sent) - 1:  # the first two are of the untrained model
        raise ValueError(f"{out}: weights did not change between syncs")
    tensors = by_sync[0]["sent"][0]
    return _described(len(sent), len(taken), tensors)


def _described(syncs: int, receivers: int, tensors: dict[str, str]) -> dict[str, Any]:
    packed = sum(name.endswith(":codes") for name in tensors)
    return {"syncs": syncs, "receivers": receivers, "tensors": len(tensors), "packed": packed}


def _sent(out: Path) -> list[dict[str, str]]:
    """The digests of all tensors that were sent, sync by sync."""
    by_sync = _digests(out)
    return [by_sync[number]["sent"][0] for number in sorted(by_sync)]


def _digests(out: Path) -> dict[int, dict[str, list[dict[str, str]]]]:
    """By sync and side, those of each process."""
    by_sync: dict[int, dict[str, list[dict[str, str]]]] = defaultdict(
        lambda: {"sent": [], "received": []}
    )
    for file in out.glob("*-*-*.json"):
        side, _, sync = file.stem.split("-")
        by_sync[int(sync)][side].append(json.loads(file.read_text()))
    return by_sync


def table(cases: Mapping[str, Mapping[str, Any]]) -> str:
    return markdown_table(
        {
            "in a verl command": CASES[name].title,
            "steps": str(it["steps"]),
            "syncs to vLLM workers": f"{it['syncs']} to {it['receivers']}",
            "tensors": f"{it['packed']} packed of {it['tensors']}, all equal",
        }
        for name, it in cases.items()
    )


def main() -> None:
    """Runs cases, and notes each in the record when it has ended well."""
    parser = argparse.ArgumentParser(description="Run verl's own trainers with NVFP4.")
    parser.add_argument("out", type=Path, help="folder of logs, metrics and digests")
    listed = f"of {', '.join(CASES)}; by default all for a CPU"
    parser.add_argument("cases", nargs="*", metavar="case", help=listed)
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    for name in arguments.cases:
        if CASES[name].gpus > torch.cuda.device_count():
            parser.error(f"{name}: needs {CASES[name].gpus} CUDA GPUs")
    out = arguments.out.resolve()
    names = arguments.cases or [name for name, case in CASES.items() if not case.gpus]
    prepare(out / "base", map(CASES.__getitem__, names))
    # asked before the record changes, which would count as a change of the code
    origins = {device: origin(device) for device in ("cpu", "cuda")}
    for name in names:
        own = origins["cuda" if CASES[name].gpus else "cpu"]
        found = own | run(CASES[name], out / "base", out / name)
        known = json.loads(RECORD.read_text())["cases"] if RECORD.exists() else {}
        known = {n: (known | {name: found})[n] for n in CASES if n in known or n == name}
        write_json(RECORD, {"benchmark": "verl_runs", "cases": known})
        print(name, found, flush=True)


if __name__ == "__main__":
    run_cli(main)
