"""verl's own program with the completed configuration, up to the start of Ray."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES
from experiments.verl.command import build_command, build_configuration, run_paths, to_yaml
from tests.verl_configurations import COMMAND, ROLLOUT


@pytest.fixture(scope="module")
def run_main(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """verl's own program with Ray replaced by a print, so that what it would start with is seen."""
    folder = tmp_path_factory.mktemp("main")
    (folder / "main.py").write_text(
        "import verl.trainer.main_ppo as m\n"
        "m.run_ppo = lambda c, **_: print('RAY', c.actor_rollout_ref.rollout.engine_kwargs)\n"
        "m.validate_config = lambda **_: None\n"
        "m.main()\n"
    )

    def run(*overrides: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(folder / "main.py"), "trainer.device=cpu", *overrides]
        environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)

    yield run


@pytest.mark.slow
def test_verls_program_reads_the_file_of_a_run(run_main: Any, tmp_path: Path) -> None:
    """As the harness starts it: all settings, and the groups, in a primary configuration."""
    study = load_study(STUDIES / "verl_nano.yaml")
    run = study.find_run("nano-moe-verl_nvfp4-qat_seed0")
    paths = run_paths(study, run, ROOT, tmp_path, tmp_path)
    (tmp_path / "verl.yaml").write_text(to_yaml(build_configuration(study, run, paths)))
    done = run_main(*build_command(study, run, paths).arguments[3:])
    assert done.returncode == 0, done.stderr
    assert "nvfp4-pack-quantized" in done.stdout and "268435456" in done.stdout


@pytest.mark.slow
def test_verls_program_starts_with_the_completed_configuration(run_main: Any) -> None:
    done = run_main(*COMMAND)
    assert done.returncode == 0, done.stderr
    assert "RAY" in done.stdout and "nvfp4-pack-quantized" in done.stdout


@pytest.mark.slow
def test_a_multirun_is_refused(run_main: Any) -> None:
    done = run_main(*COMMAND, "--multirun")
    assert done.returncode == 1 and "RAY" not in done.stdout
    assert "error: --multirun: not supported with +nvfp4" in done.stderr


@pytest.mark.slow
def test_verls_program_ends_with_one_line_before_ray_starts(run_main: Any) -> None:
    done = run_main("+nvfp4=w4a16", f"{ROLLOUT}.name=sglang")
    assert done.returncode == 1 and "RAY" not in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert line == f"error: {ROLLOUT}.name: sglang: only vLLM's workers take these syncs; use vllm"
    assert "Traceback" not in done.stderr
