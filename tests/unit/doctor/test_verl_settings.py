"""The doctor reads the settings that verl's commands leave, as Hydra composes and saves them."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from qat_core.doctor.signs import judge
from qat_core.doctor.verl_run import read_run
from qat_core.verl.configuration import complete
from tests.unit.doctor.test_verl_run import healthy_rows, write_log
from tests.verl_configurations import COMMAND, QAT, composed


@pytest.mark.parametrize(
    ("overrides", "verdict", "evidence"),
    [
        (["+nvfp4=off", *COMMAND[1:]], "none", "BF16 rollouts"),
        (COMMAND, "none", "QAT is on"),
        ([*COMMAND, f"{QAT}.enable=false"], "none", "BF16 rollouts"),
        (
            [*COMMAND, f"{QAT}.train=false"],
            "fault",
            "rollouts in .*, qat.enable=True, qat.train=False",
        ),
    ],
    ids=["off", "w4a16", "w4a16 not enabled", "rollouts alone"],
)
def test_quantization_without_qat_is_named(
    overrides: list[str], verdict: str, evidence: str, tmp_path: Path
) -> None:
    config = composed(*overrides)
    complete(config)
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(config, tmp_path / ".hydra" / "config.yaml")
    write_log(tmp_path / "run.jsonl", healthy_rows())
    (sign,) = (it for it in judge(read_run(tmp_path)).signs if it.name == "quantization")
    assert sign.verdict == verdict
    assert re.match(evidence, sign.evidence)
