"""Another package that takes `hydra_plugins` for itself does not hide this project's groups."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from experiments.study.schema import ROOT
from tests.verl_configurations import CONFIGS, ROLLOUT

pytestmark = pytest.mark.long

COMPOSE = f"""
import verl
from hydra import compose, initialize_config_dir
with initialize_config_dir({str(CONFIGS["ppo"].parent)!r}, version_base=None):
    content = compose("ppo_trainer", ["+nvfp4@_global_=w4a16", "{ROLLOUT}.name=vllm"])
print("composed", content.actor_rollout_ref.actor.fsdp_config.qat.scale_policy)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Packages that are found first: the other one, and this project's entry points."""
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "__init__.py").touch()
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    metadata = tmp_path / "nvfp4_entries-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nvfp4-entries\nVersion: 0\n")
    ((name, module),) = entries["verl.plugins"].items()
    (metadata / "entry_points.txt").write_text(f"[verl.plugins]\n{name} = {module}\n")
    return tmp_path


def composed(site: Path, plugins: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(site), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths, "VERL_USE_EXTERNAL_PLUGINS": plugins}
    command = [sys.executable, "-c", COMPOSE]
    return subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True)


@pytest.mark.parametrize(("plugins", "is_found"), [("auto", True), ("none", False)])
def test_verls_entry_point_brings_the_groups_back(site: Path, plugins: str, is_found: bool) -> None:
    done = composed(site, plugins)
    assert (done.stdout.strip().endswith("composed pow2")) == is_found, done.stderr
    assert is_found or "config group 'nvfp4' does not exist" in done.stderr
