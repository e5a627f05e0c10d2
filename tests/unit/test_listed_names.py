"""Every private name of vLLM, verl and Hydra that the code uses or replaces is in a list."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.study.schema import ROOT
from tests.used_names import USED_NAMES

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
