"""verl's trainers with NVFP4: one run, and the documentation of all of them."""

import json
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from hydra import compose, initialize_config_dir

from experiments.study.schema import ROOT
from qat_core.verl.configuration import complete
from tests.workflow.verl_cases import Case
from tests.workflow.verl_gpu_cases import GPU_CASES, gpu_command
from tests.workflow.verl_runs import CASES, RECORD, TABLE, prepare, run

PAGE = ROOT / "docs" / "verl.md"


def test_the_page_says_what_was_recorded() -> None:
    record = json.loads(RECORD.read_text())
    assert [name for name in CASES if name in record["cases"]] == list(record["cases"])
    assert not any(case["git"]["dirty"] for case in record["cases"].values())
    _, found, _ = PAGE.read_text().replace("<!-- end -->", "<!-- runs -->").split("<!-- runs -->")
    assert found.strip() == TABLE.markdown(record["cases"].items())


@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES)
def test_a_run_on_gpus_has_a_configuration_that_is_accepted(case: Case, tmp_path: Path) -> None:
    arguments = gpu_command(case, tmp_path, tmp_path).arguments
    overrides = arguments[arguments.index("--config-name") + 2 :]
    overrides.append("hydra.searchpath=[pkg://verl.trainer.config]")  # as in verl's program
    with initialize_config_dir(str(tmp_path), version_base=None):
        content = compose("verl", overrides=overrides)
    complete(content)
    assert content.trainer.n_gpus_per_node == case.gpus
    assert content.trainer.total_training_steps == case.steps
    assert "experiments.benchmarks.seeded_engine" in content.actor_rollout_ref.model.external_lib


@pytest.mark.slow
def test_every_sync_of_a_trainer_apart_from_its_rollouts_brings_its_bytes(tmp_path: Path) -> None:
    case = CASES["one-step-off"]
    prepare(tmp_path / "base", [case])
    found = run(case, tmp_path / "base", tmp_path / "run")
    assert found["steps"] == 2 and found["syncs"] == 3 and found["packed"] == 14
