"""Services that a study or `make ui` starts listen on this machine alone."""

import inspect
import subprocess

import pytest
import yaml

from experiments.study.schema import ROOT


def test_make_ui_binds_to_loopback() -> None:
    command = ["make", "--dry-run", "--always-make", "ui"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if "mlflow ui" in line]
    assert "--host 127.0.0.1 " in line


def test_rays_dashboard_binds_to_loopback_and_no_recipe_changes_that() -> None:
    ray = pytest.importorskip("ray", reason="needs requirements/engines.txt")
    assert inspect.signature(ray.init).parameters["dashboard_host"].default == "127.0.0.1"
    for file in (ROOT / "experiments" / "recipes").rglob("*.yaml"):
        assert "dashboard_host" not in str(yaml.safe_load(file.read_text())), file
