"""verl's own program with the completed configuration, up to the start of Ray."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES
from experiments.verl.command import build_command, build_configuration, run_paths, to_yaml
from tests.verl_configurations import ROLLOUT

# Each line of stdin, a JSON list of arguments, is a call of verl's program; its exit code is shown.
# Importing verl takes seconds: calls are forked from a process that has done so.
MAIN = """
import json, os, sys
import verl.trainer.main_ppo as m
m.run_ppo = lambda c, **_: print('RAY', c.actor_rollout_ref.rollout.engine_kwargs)
m.validate_config = lambda **_: None
for line in sys.stdin:
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv[1:] = json.loads(line)
    sys.exit(m.main())
"""


@pytest.fixture(scope="module")
def run_main(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """verl's own program with Ray replaced by a print, so that what it would start with is seen."""
    folder = tmp_path_factory.mktemp("main")
    (folder / "main.py").write_text(MAIN)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, str(folder / "main.py")]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin is not None and program.stdout is not None

        def run(*overrides: str) -> subprocess.CompletedProcess[str]:
            arguments = ["trainer.device=cpu", *overrides]
            print(json.dumps(arguments), file=program.stdin, flush=True)
            code = int(program.stdout.readline())
            said = [(folder / name).read_text() for name in ("stdout", "stderr")]
            return subprocess.CompletedProcess(arguments, code, *said)

        yield run


def test_verls_program_reads_the_file_of_a_run(run_main: Any, tmp_path: Path) -> None:
    """As the harness starts it: all settings, and the groups, in a primary configuration."""
    study = load_study(STUDIES / "verl_nano.yaml")
    run = study.find_run("nano-moe-verl_nvfp4-qat_seed0")
    paths = run_paths(study, run, ROOT, tmp_path, tmp_path)
    (tmp_path / "verl.yaml").write_text(to_yaml(build_configuration(study, run, paths)))
    done = run_main(*build_command(study, run, paths).arguments[3:])
    assert done.returncode == 0, done.stderr
    assert "nvfp4-pack-quantized" in done.stdout and "268435456" in done.stdout


def test_verls_program_ends_with_one_line_before_ray_starts(run_main: Any) -> None:
    done = run_main("+nvfp4=w4a16", f"{ROLLOUT}.name=sglang")
    assert done.returncode == 1 and "RAY" not in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert line == f"error: {ROLLOUT}.name: sglang: only vLLM's workers take these syncs; use vllm"
    assert "Traceback" not in done.stderr
