"""Time of the main job, by stage, of several commits one after the other on one machine.

Each commit is cloned into a folder of its own, installed and run there by `make run`. Seconds of a
stage are those of its jobs together, by what Snakemake notes of them; CPU minutes are of `make run`
with all that it starts. Nothing else should run on the machine.
"""

import argparse
import resource
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from experiments.benchmarks.records import Column, Row, shape_of
from experiments.runs.provenance import origin
from experiments.study.schema import ROOT
from experiments.support.json_files import read_json, write_json

STAGES = {
    "base_s": ("base",),
    "train_s": ("train",),
    "evaluate_s": ("evaluate",),
    "judge_s": ("compare", "figures", "report", "publish"),
}
COLUMNS = {
    "commit": Column(heading="Commit"),
    "install_s": Column(heading="Installation, s", format=",.0f"),
    "run_min": Column(heading="`make run`, minutes", format=".1f"),
    "cpu_min": Column(heading="CPU, minutes", format=".1f"),
    "base_s": Column(heading="Base models, s", format=",.0f"),
    "train_s": Column(heading="Training, s", format=",.0f"),
    "evaluate_s": Column(heading="Evaluation, s", format=",.0f"),
    "judge_s": Column(heading="Judging and drawing, s", format=",.0f"),
}


def stages(metadata: Path) -> dict[str, float]:
    """Seconds of all jobs of each stage.

    Snakemake notes a job with each of its files: a start that is a little later for each, and as
    end the file's own time. A job's command is what they share.
    """
    times: dict[tuple[str, str], list[float]] = {}
    for file in metadata.rglob("*"):
        if file.is_file() and (it := read_json(file))["starttime"]:
            times.setdefault((it["rule"], it["shellcmd"]), []).extend(
                (it["starttime"], it["endtime"])
            )
    return {
        stage: sum(max(of) - min(of) for (rule, _), of in times.items() if rule in rules)
        for stage, rules in STAGES.items()
    }


def measure(commit: str) -> Row:
    """Clones, installs and runs a commit."""
    with TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", "--no-checkout", ROOT, folder], check=True)
        subprocess.run(["git", "-C", folder, "checkout", "--quiet", commit], check=True)
        started = time.monotonic()
        subprocess.run(["make", "-C", folder, ".venv/.installed-base"], check=True)
        installed, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(["make", "-C", folder, "run"], check=True)
        ended, after = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {
            "commit": commit,
            "install_s": installed - started,
            "run_min": (ended - installed) / 60,
            "cpu_min": cpu_s / 60,
            **stages(Path(folder) / ".snakemake" / "metadata"),
        }


def main(arguments: argparse.Namespace) -> None:
    """Measures, and writes the record to the path given."""
    rows = [measure(commit) for commit in arguments.commits]
    settings = {"job": "make run, after installation"}
    record = {"benchmark": "main_job", **origin("cpu"), **shape_of(settings, COLUMNS), "rows": rows}
    Console().print_json(data=record)
    write_json(arguments.record, record)
