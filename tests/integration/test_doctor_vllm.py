"""The doctor with vLLM: a healthy case has no fault, and planted faults are named; on a GPU with
Marlin's kernels and decoding by CUDA graphs.

`pytest -m gpu tests/integration/test_doctor_vllm.py`; docs/doctor.md has the commands for Qwen3-8B.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nano_models import write_nano

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from vllm.distributed import cleanup_dist_env_and_memory

from qat_core.doctor.examine import Case, examine, random_prompts
from qat_core.doctor.sampling import Sampling
from qat_core.planning.recipe import Recipe
from tests.doctor.faults import write_models


@pytest.fixture(params=["nano-dense", "nano-moe"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    before = torch.get_num_threads()
    write_models(tmp_path / "models", request.param)
    yield Case(
        checkpoint=tmp_path / "models" / "now",
        prompts=random_prompts(range(2, 18), 24, seed=0),
        rolled_out=Recipe(),
        trained=Recipe(),
        engine="vllm",
        max_new_tokens=16,
    )
    torch.set_num_threads(before)
    cleanup_dist_env_and_memory()


@pytest.mark.long
def test_a_healthy_case_has_no_fault(case: Case) -> None:
    found = examine(case)
    assert found.named == [] and found.is_healthy
    routing = {f.verdict for f in found.findings if f.cause.startswith("routing")}
    assert routing == ({"not measured"} if found.kind == "moe" else {"none"})


@pytest.mark.long
@pytest.mark.parametrize("case", ["nano-moe"], indirect=True)
def test_training_without_qat_and_stale_weights_are_both_named(case: Case) -> None:
    other = case.checkpoint.parent / "other"
    found = examine(replace(case, trained=None, served=other, previous=other))
    assert {finding.cause for finding in found.named} == {"quantization", "staleness"}


@pytest.mark.long
@pytest.mark.parametrize("case", ["nano-dense"], indirect=True)
def test_top_p_is_told_from_the_model(case: Case) -> None:
    found = examine(replace(case, sampling=Sampling(top_p=0.7)))
    assert [finding.cause for finding in found.named] == ["top_p"]
    (top_p,) = found.named
    assert top_p.share.low > 0.9  # seen: 0.99; what is left is BF16 noise and rerouted tokens


FAULTS = {
    "quantization": ["--trained", "none"],
    "scale": ["--recipe", "amax.yaml", "--trained", "full"],
    "top_p": ["--top-p", "0.7"],
}


@pytest.fixture(scope="module", params=["nano-dense", "nano-moe"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("doctor") / "base"
    write_nano(request.param, folder, num_layers=2)
    (folder.parent / "amax.yaml").write_text("scale_policy: amax\n")
    return folder


def diagnosed(base: Path, *options: str) -> dict[str, Any]:
    """In a process of its own: vLLM gives a GPU's memory back only when its process ends."""
    command = [sys.executable, "-m", "qat_core.doctor", base.name, "--json", *options]
    command += ["--engine", "vllm", "--device", "cuda", "--sequences", "32"]
    done = subprocess.run(command, cwd=base.parent, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if found["healthy"] else 1)
    return found


@pytest.mark.gpu
def test_a_healthy_setting_has_no_fault_of_weights_or_sampler(base: Path) -> None:
    found = diagnosed(base)
    # kernels and decoding of random weights may lie above the band that trained models have
    assert set(found["named"]) <= {"decoding", "kernels", "batch"}
    assert not [f for f in found["findings"] if f["verdict"] == "fault" and f["evidence"]]


@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_first(base: Path, fault: str) -> None:
    assert diagnosed(base, *FAULTS[fault])["named"][0] == fault
