"""`qat-core verl-check`: what a verl command would run, or all that is refused in it."""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from qat_core.verl.check import main
from tests.verl_configurations import COMMAND, MICRO_BATCH, ROLLOUT

PPO = ["python3", "-m", "verl.trainer.main_ppo"]
BF16 = [f"{ROLLOUT}.name=vllm", MICRO_BATCH]


@pytest.fixture(autouse=True)
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


RIGHT = {
    "a whole command": ([*PPO, *COMMAND], "qat_core: rollouts in NVFP4 (w4a16), trained in NVFP4"),
    "arguments alone": (COMMAND, "qat_core: rollouts in NVFP4 (w4a16), trained in NVFP4"),
    "BF16 through this project": (
        [*PPO, "+nvfp4=off", *BF16],
        "qat_core: BF16 in training and rollouts",
    ),
    "BF16 without it": ([*PPO, *BF16], "qat_core: takes no part"),
    "another program of verl's": (
        [
            *("python", "-m", "verl.experimental.one_step_off_policy.main_ppo", *COMMAND),
            "hydra.searchpath=[pkg://verl.trainer.config]",
        ],
        "qat_core: rollouts in NVFP4 (w4a16), trained in NVFP4",
    ),
}


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
    "many runs": ([*PPO, *COMMAND, "--multirun"], ["--multirun"]),
    "no program": (["python", "-m", "verl.trainer.none"], ["verl.trainer.none"]),
    "no program of Hydra's": (["python", "-m", "verl.protocol"], ["verl/protocol.py"]),
}


@pytest.mark.parametrize(("words", "subjects"), REFUSED.values(), ids=REFUSED)
def test_all_that_is_refused_is_listed_with_code_2(
    words: list[str], subjects: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert code(*words) == 2
    said = capsys.readouterr()
    found = sorted(line.removeprefix("error: ").split(": ")[0] for line in said.err.splitlines())
    assert len(found) == len(subjects)
    assert all(it.endswith(subject) for it, subject in zip(found, subjects, strict=True))
