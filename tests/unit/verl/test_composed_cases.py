"""The runs that `tests/workflow/verl_runs.py` starts are accepted by their programs' checks."""

from pathlib import Path

import pytest

from tests.verl_configurations import CONFIGS, started
from tests.workflow.verl_cases import CASES, Case, command
from tests.workflow.verl_gpu_cases import GPU_CASES, gpu_command

FILES = {
    "verl.experimental.one_step_off_policy.main_ppo": CONFIGS["one-step-off"],
    "verl.experimental.fully_async_policy.fully_async_main": CONFIGS["fully-async"],
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_on_a_cpu_is_accepted(tmp_path: Path, case: Case) -> None:
    arguments = command(case, tmp_path, tmp_path).arguments
    overrides = arguments[arguments.index(case.module) + 1 :]
    started(*overrides, config=FILES.get(case.module, CONFIGS["ppo"]))


@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES)
def test_a_case_on_gpus_is_accepted(tmp_path: Path, case: Case) -> None:
    arguments = gpu_command(case, tmp_path, tmp_path).arguments
    assert arguments[5:7] == ["--config-name", "verl"]
    path = "hydra.searchpath=[pkg://verl.trainer.config]"
    content = started(*arguments[7:], path, config=tmp_path / "verl")
    assert content.trainer.n_gpus_per_node == case.gpus
    assert content.trainer.total_training_steps == case.steps
    assert "experiments.verl.seeded_engine" in content.actor_rollout_ref.model.external_lib
