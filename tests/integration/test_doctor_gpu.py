"""The doctor on one GPU: vLLM's Marlin kernels, decoding by CUDA graphs, planted faults named.

`pytest -m gpu tests/integration/test_doctor_gpu.py`; docs/doctor.md has the commands for Qwen3-8B.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nano_models import write_nano

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

FAULTS = {
    "quantization": ["--trained", "none"],
    "scale": ["--recipe", "amax.yaml", "--trained", "full"],
    "top_p": ["--top-p", "0.7"],
}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


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


def test_a_healthy_setting_has_no_fault_of_weights_or_sampler(base: Path) -> None:
    found = diagnosed(base)
    # kernels and decoding of random weights may lie above the band that trained models have
    assert set(found["named"]) <= {"decoding", "kernels", "batch"}
    assert not [f for f in found["findings"] if f["verdict"] == "fault" and f["evidence"]]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_first(base: Path, fault: str) -> None:
    assert diagnosed(base, *FAULTS[fault])["named"][0] == fault
