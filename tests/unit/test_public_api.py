"""`qat_core`'s names: documented, shown on the reference pages, and installed by the wheel."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import qat_core
from experiments.study.schema import ROOT
from tests.unit.test_locks import BASE, EXTRAS, PROJECT, canonical, read_pins

EXAMPLE = """
import sys
import qat_core
from qat_core import EagerEngine, Recipe, explain, export, prepare, verify, weight_stream
from transformers import AutoModelForCausalLM
folder, packed = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16")
print(explain(model, Recipe.full()))
plan = prepare(model, Recipe.full())
engine = EagerEngine(folder)
engine.sync(weight_stream(model), plan)
assert engine.generate([[3, 14, 4]], 4, 1.0, 0).log_probs.shape[0] == 1
export(model, Recipe.full(), packed)
print(verify(packed), qat_core.__file__)
"""


@pytest.mark.parametrize("name", qat_core.__all__)
def test_every_argument_is_described(name: str) -> None:
    found = getattr(qat_core, name)
    text = f"{inspect.getdoc(found)} {inspect.isclass(found) and inspect.getdoc(found.__init__)}"
    asked = getattr(found, "model_fields", None) or inspect.signature(found).parameters
    assert [it for it in asked if len(asked) > 1 and f"{it}: " not in text] == []


def test_the_reference_shows_every_name_and_field(tmp_path: Path) -> None:
    pytest.importorskip("pdoc", reason="needs requirements/dev.txt")
    from analysis.reference import write_reference

    write_reference(tmp_path)
    page = (tmp_path / "qat_core.html").read_text()
    assert [name for name in qat_core.__all__ if f'id="{name}"' not in page] == []
    assert "rule of the global scale of a matrix" in page and "VllmEngine.sync" in page


@pytest.mark.long
@pytest.mark.parametrize("nano_dir", ["nano-dense"], indirect=True)
def test_the_wheel_has_all_that_an_example_and_the_command_need(
    nano_dir: Path, tmp_path: Path
) -> None:
    """Built from the tracked files, installed away from them, run elsewhere."""
    source, installed = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    files = subprocess.run(
        [
            "git",
            "ls-files",
            "-z",
            "qat_core",
            "hydra_plugins",
            "pyproject.toml",
            "README.md",
            "LICENSE",
        ],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    for name in filter(None, files.decode().split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--no-index", "--target", str(installed), str(source)], check=True)
    where = {**os.environ, "PYTHONPATH": str(installed)}
    packed = tmp_path / "packed"
    command = [sys.executable, "-c", EXAMPLE, str(nano_dir), str(packed)]
    ran = subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert str(installed / "qat_core") in ran.stdout
    program = [str(installed / "bin" / "qat-core"), "verify", str(packed)]
    said = subprocess.run(program, cwd=tmp_path, env=where, capture_output=True, text=True)
    assert said.stdout.endswith("weights, all as recorded\n"), said.stderr
    for config in (ROOT / "qat_core" / "verl" / "config").glob("*/*.yaml"):
        assert (installed / config.relative_to(ROOT)).read_bytes() == config.read_bytes()


def test_the_extra_for_verl_changes_nothing_that_verl_runs_with() -> None:
    """Its requirements, and the library's own, are met by what the locks install."""
    pins = BASE | read_pins("engines")
    for each in map(Requirement, [*PROJECT["dependencies"], *EXTRAS["verl"]]):
        assert each.specifier.contains(pins[canonical(each.name)])
