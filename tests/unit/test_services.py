"""Services that a study or `make ui` starts listen on this machine alone."""

import inspect

import pytest
import yaml

from experiments.study.schema import ROOT
from experiments.tracking.ui import server_command


def test_make_ui_binds_to_loopback() -> None:
    command = server_command(5000)
    assert command[command.index("--host") + 1] == "127.0.0.1"


def test_rays_dashboard_binds_to_loopback_and_no_recipe_changes_that() -> None:
    ray = pytest.importorskip("ray", reason="needs requirements/engines.txt")
    assert inspect.signature(ray.init).parameters["dashboard_host"].default == "127.0.0.1"
    for file in (ROOT / "experiments" / "recipes").rglob("*.yaml"):
        assert "dashboard_host" not in str(yaml.safe_load(file.read_text())), file
