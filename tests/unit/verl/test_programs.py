"""verl's programs and `qat-core verl-check`: what would run, or all that is refused, before Ray."""

import os
import sys
import tomllib
from pathlib import Path

import pytest

from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES
from experiments.verl.command import build_command, build_configuration, run_paths, to_yaml
from tests.verl_configurations import ROLLOUT
from tests.workflow.programs import Done, run

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from qat_core.verl.check import main
from tests.verl_configurations import COMMAND, CONFIGS, MICRO_BATCH

PPO = ["python3", "-m", "verl.trainer.main_ppo"]
BF16 = [f"{ROLLOUT}.name=vllm", MICRO_BATCH]


@pytest.fixture
def kept_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command's arguments and variables end with the test; what it writes is seen."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.chdir(tmp_path)


def code(*words: str) -> int:
    try:
        main(words)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


NVFP4 = "qat_core: rollouts in NVFP4 (w4a16), trained in NVFP4"
RIGHT = {
    "a whole command": ([*PPO, *COMMAND], NVFP4),
    "arguments alone": (COMMAND, NVFP4),
    "BF16 through it": ([*PPO, "+nvfp4=off", *BF16], "qat_core: BF16 in training and rollouts"),
    "BF16 without it": ([*PPO, *BF16], "qat_core: takes no part"),
    "another program of verl's": (
        [
            *("python", "-m", "verl.experimental.one_step_off_policy.main_ppo", *COMMAND),
            "hydra.searchpath=[pkg://verl.trainer.config]",
        ],
        NVFP4,
    ),
}


@pytest.mark.usefixtures("kept_process")
@pytest.mark.parametrize(("words", "start"), RIGHT.values(), ids=RIGHT)
def test_a_right_command_is_told_in_a_line_and_writes_nothing(
    words: list[str], start: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code(*words) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(start)
    assert not list(tmp_path.iterdir())


REFUSED = {
    "all in one list": (
        [
            *("QAT_CORE_NONE=1", *PPO, *COMMAND, "+nvfp4_mode=on"),
            *(f"{ROLLOUT}.name=sglang", "actor_rollout_ref.model.lora_rank=8"),
        ],
        ["QAT_CORE_NONE", "actor_rollout_ref.model.lora_rank", f"{ROLLOUT}.name", "nvfp4_mode"],
    ),
    "a name that is nearly right": ([*PPO, *BF16, "+nvpf4=w4a16"], ["nvpf4"]),
    "a program that never syncs": (
        ["python", "-m", "verl.trainer.main_generation_server", *COMMAND],
        ["main_generation_server"],
    ),
    "a key that verl does not have": ([*PPO, *COMMAND, "trainer.nodes=2"], ["Hydra"]),
    **{
        f"no choice of the exact mode: {value}": (
            [*PPO, *COMMAND, f"+exact={value}"],
            ["Hydra", "exact"],
        )
        for value in ("true", "1", "null", "yes", "off")
    },
    "the exact mode twice": ([*PPO, *COMMAND, "+exact=on", "+exact=on"], ["Hydra"]),
    "many runs": ([*PPO, *COMMAND, "--multirun"], ["--multirun"]),
    "no program": (["python", "-m", "verl.trainer.none"], ["verl.trainer.none"]),
    "no program of Hydra's": (["python", "-m", "verl.protocol"], ["verl/protocol.py"]),
}


@pytest.mark.usefixtures("kept_process")
@pytest.mark.parametrize(("words", "subjects"), REFUSED.values(), ids=REFUSED)
def test_all_that_is_refused_is_listed_with_code_2(
    words: list[str], subjects: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert code(*words) == 2
    said = capsys.readouterr()
    found = sorted(line.removeprefix("error: ").split(": ")[0] for line in said.err.splitlines())
    assert len(found) == len(subjects)
    assert all(it.endswith(subject) for it, subject in zip(found, subjects, strict=True))


# with Ray replaced by a print, so that what it would start with is seen
MAIN = """
import sys, verl.trainer.main_ppo as m
m.run_ppo = lambda c, **_: print('RAY', c.actor_rollout_ref.rollout.engine_kwargs)
m.validate_config = lambda **_: None
sys.exit(m.main())
"""


def run_main(folder: Path, *overrides: str) -> Done:
    """verl's own program."""
    return run([sys.executable, "-c", MAIN, "trainer.device=cpu", *overrides], cwd=folder)


def test_verls_program_reads_the_file_of_a_run(tmp_path: Path) -> None:
    """As the harness starts it: all settings, and the groups, in a primary configuration."""
    study = load_study(STUDIES / "verl_nano.yaml")
    run = study.find_run("nano-moe-verl_nvfp4-qat_seed0")
    paths = run_paths(study, run, ROOT, tmp_path, tmp_path)
    (tmp_path / "verl.yaml").write_text(to_yaml(build_configuration(study, run, paths)))
    done = run_main(tmp_path, *build_command(study, run, paths).arguments[3:])
    assert done.returncode == 0, done.stderr
    assert "nvfp4-pack-quantized" in done.stdout and "268435456" in done.stdout


def test_verls_program_ends_with_one_line_before_ray_starts(tmp_path: Path) -> None:
    done = run_main(tmp_path, "+nvfp4=w4a16", f"{ROLLOUT}.name=sglang")
    assert done.returncode == 1 and "RAY" not in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert line == f"error: {ROLLOUT}.name: sglang: only vLLM's workers take these syncs; use vllm"
    assert "Traceback" not in done.stderr


COMPOSE = f"""
import verl
from hydra import compose, initialize_config_dir
with initialize_config_dir({str(CONFIGS["ppo"].parent)!r}, version_base=None):
    content = compose("ppo_trainer", ["+nvfp4@_global_=w4a16", "{ROLLOUT}.name=vllm"])
print("composed", content.actor_rollout_ref.actor.fsdp_config.qat.scale_policy)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Packages that are found first: the other one, and this project's entry points."""
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "__init__.py").touch()
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    metadata = tmp_path / "nvfp4_entries-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nvfp4-entries\nVersion: 0\n")
    ((name, module),) = entries["verl.plugins"].items()
    (metadata / "entry_points.txt").write_text(f"[verl.plugins]\n{name} = {module}\n")
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize(("plugins", "is_found"), [("auto", True), ("none", False)])
def test_verls_entry_point_brings_the_groups_back(site: Path, plugins: str, is_found: bool) -> None:
    paths = os.pathsep.join([str(site), str(ROOT)])
    variables = {"PYTHONPATH": paths, "VERL_USE_EXTERNAL_PLUGINS": plugins}
    done = run([sys.executable, "-c", COMPOSE], cwd=site, **variables)
    assert (done.stdout.strip().endswith("composed pow2")) == is_found, done.stderr
    assert is_found or "config group 'nvfp4' does not exist" in done.stderr
