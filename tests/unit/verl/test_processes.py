"""What Ray's processes have of this project: the plugin that vLLM loads, and variables."""

from importlib.metadata import EntryPoint

import pytest

from qat_core.verl.processes import ENVIRONMENT, PLUGIN
from tests.verl_configurations import QAT, completed


def with_plugins(monkeypatch: pytest.MonkeyPatch, *found: EntryPoint) -> None:
    """What vLLM would find to load."""
    monkeypatch.setattr("qat_core.verl.processes.entry_points", lambda group: found)


OURS = EntryPoint("ours", PLUGIN, "vllm.general_plugins")
OTHER = EntryPoint("other", "some.module:register", "vllm.general_plugins")
CPU, PLUGINS = "trainer.device=cpu", f"+{ENVIRONMENT}.VLLM_PLUGINS"
NEEDS_PLUGIN = {
    "a kernel": ([f"+{ENVIRONMENT}.QAT_CORE_LINEAR_KERNEL=humming"], "_KERNEL=humming"),
    "a CPU": ([CPU], "NVFP4 on a CPU"),
    "exact rollouts": (["+exact=on"], "exact rollouts"),
    "routes": (["+routing_replay=r3", f"{QAT}.enable=false", CPU], "routes on a CPU"),
}


@pytest.mark.verl_table("vLLM without this package's plugin", "refused where it is needed")
@pytest.mark.parametrize(("overrides", "asked"), NEEDS_PLUGIN.values(), ids=NEEDS_PLUGIN)
def test_what_vllm_serves_by_the_plugin_is_refused_without_it(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], asked: str
) -> None:
    with_plugins(monkeypatch, OTHER)
    with pytest.raises(ValueError, match=f"{asked}: vLLM does not find this package's plugin"):
        completed(*overrides)
    with_plugins(monkeypatch, OTHER, OURS)
    completed(*overrides)
    with pytest.raises(ValueError, match=f"VLLM_PLUGINS='other, ours': leaves out ours, .*{asked}"):
        completed(*overrides, f"{PLUGINS}='other, ours'")
    completed(*overrides, f"{PLUGINS}='other,ours'")


WITHOUT_PLUGIN = {
    "Marlin": [],
    "BF16 on a CPU": [CPU, f"{QAT}.enable=false"],
    "vLLM on a cluster": [CPU, "+ray_kwargs.ray_init.address=auto"],
}


@pytest.mark.parametrize("overrides", WITHOUT_PLUGIN.values(), ids=WITHOUT_PLUGIN)
def test_what_needs_no_plugin_here_is_taken_without_it(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    with_plugins(monkeypatch)
    completed(*overrides)


def test_variables_that_ray_hands_on_go_over_those_of_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QAT_CORE_LINEAR_KERNEL", "nonsense")
    completed(f"+{ENVIRONMENT}.QAT_CORE_LINEAR_KERNEL=marlin", f"+{ENVIRONMENT}.OTHER=???")
    for given, message in (("nonsense", "=nonsense: use "), ("1", "LINEAR_KERNEL: 1: Ray takes")):
        with pytest.raises(ValueError, match=message):
            completed(f"+{ENVIRONMENT}.QAT_CORE_LINEAR_KERNEL={given}")
