"""Names of this project where nothing reads them are refused; all other commands are left alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.study.schema import ROOT
from tests.unit.verl.test_precedence import written
from tests.verl_configurations import COMMAND, CONFIGS, MICRO_BATCH, QAT, started

RIGHT = r"nothing reads it; write \+nvfp4@_global_="
NEAR_MISSES = {
    "package": (
        "+nvfp4@_global=w4a16",
        r"nvfp4@_global: w4a16: would be composed below _global, where " + RIGHT + "w4a16",
    ),
    "package of verl's": ("+nvfp4@actor_rollout_ref=off", r"nvfp4@actor_rollout_ref: off: would"),
    "package of another group": ("+platform@_global=cpu", r"write \+platform@_global_=cpu"),
    "letters": ("+nvpf4=w4a16", f"nvpf4: w4a16: {RIGHT}w4a16"),
    "a group of any name": ("+fp4=w4a16", f"fp4: w4a16: {RIGHT}w4a16"),
    "capitals": ("+NVFP4=W4A16", f"NVFP4: w4a16: {RIGHT}w4a16"),
    "letters of another group": ("+routing_reply=r3", r"write \+routing_replay@_global_=r3"),
    "below a section": ("+actor_rollout_ref.nvfp4=w4a16", rf"actor_rollout_ref\.nvfp4: .*{RIGHT}"),
    "path": ("+actor_rollout_ref/nvfp4=w4a16", rf"actor_rollout_ref/nvfp4: w4a16: {RIGHT}w4a16"),
    "section": ("+nvfp4.ignore_patterns=[lm_head]", f"nvfp4: {RIGHT}off or w4a16"),
    "nothing chosen": ("+nvfp4=[]", r"\+nvfp4=\[\]: chooses nothing; give off or w4a16"),
    "key without a group": (f"+{QAT}.scale_policy=amax", r"scale_policy: only \+nvfp4=w4a16 reads"),
    "key elsewhere": (
        "+critic.scale_policy=amax",
        rf"critic\.scale_policy: amax: nothing reads it there; set {QAT}\.scale_policy",
    ),
}


@pytest.mark.verl_table(
    "this project's names in a wrong package, group, section or spelling (`+nvfp4@_global=w4a16`)",
    "refused, with `+nvfp4=off` too; else the run would be in BF16",
    cases=["package", "letters", "below a section", "key elsewhere"],
)
@pytest.mark.parametrize("case", NEAR_MISSES)
def test_a_near_miss_is_refused(case: str) -> None:
    override, line = NEAR_MISSES[case]
    with pytest.raises(SystemExit, match=rf"\Aerror: .*{line}[^\n]*\Z"):
        started(override, MICRO_BATCH)


@pytest.mark.parametrize(
    ("key", "value", "defaults", "line"),
    [
        ("trainer.device", "cpu", [{"nvfp4@_global": "w4a16"}], "nvfp4@_global: w4a16: would be"),
        ("nvfp4", "w4a16", [], f"nvfp4: w4a16: {RIGHT}w4a16, in a file a line of its defaults"),
        ("nvfp4", False, [], f"nvfp4: off: {RIGHT}off"),  # YAML's off
    ],
)
def test_a_near_miss_of_a_file_is_refused(
    tmp_path: Path, key: str, value: object, defaults: list[object], line: str
) -> None:
    with pytest.raises(SystemExit, match=rf"\Aerror: {line}[^\n]*\Z"):
        started(MICRO_BATCH, config=written(tmp_path, key, value, *defaults))


def test_a_near_miss_beside_the_right_line_is_refused_with_all_else() -> None:
    with pytest.raises(SystemExit) as ended:
        started(
            *COMMAND,
            "+routing_replay@_global=r3",
            "+nvfp4.train=false",
            f"+{QAT}.scale=amax",
            f"{QAT}.mode=w4a4",
            f"{QAT}.group_size=32",
            "actor_rollout_ref.actor.qat.ignore_patterns=[mlp]",
            "actor_rollout_ref.rollout.dtype=float16",
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.enable_eplb=true",
        )
    refused = [line.removeprefix("error: ").split(": ")[0] for line in ended.value.code.split("\n")]
    assert refused == [
        "routing_replay@_global",
        "nvfp4",
        "actor_rollout_ref.rollout.dtype",
        f"{QAT}.scale",
        "actor_rollout_ref.actor.qat.ignore_patterns",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.enable_eplb",
        f"{QAT}.group_size",
        f"{QAT}.mode",
    ]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_command_without_our_names_is_left_alone(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ["trainer.experiment_name=nvfp4-w4a16", f"{QAT}.mode=w4a16", MICRO_BATCH]
    content = started(*given, config=config)
    assert "qat_core" not in str({k: v for k, v in content.items() if k != "hydra"})
    assert capfd.readouterr() == ("", "")


def test_programs_that_are_not_verls_are_left_alone() -> None:
    program = """
import sys
from hydra import compose, initialize
with initialize(version_base=None):
    found = compose(overrides=["+nvpf4=w4a16"], return_hydra_config=True)
print(found.nvpf4, found.hydra.callbacks, "qat_core.verl.near_misses" in sys.modules)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "w4a16 {} False\n"
