"""What the processes that verl starts through Ray have of this project: variables, and a plugin."""

import os
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from qat_core.rollout.vllm.switches import kernels_of_plugin

RAY = "ray_kwargs.ray_init"
ENVIRONMENT = f"{RAY}.runtime_env.env_vars"
PLUGIN = "qat_core.rollout.vllm.plugin:register"  # as pyproject.toml has it
PLUGINS_VARIABLE = "VLLM_PLUGINS"  # which ones vLLM loads; all if unset


def environment_of(config: DictConfig) -> dict[str, str]:
    """Variables of this project, and vLLM's of plugins: the command's, and over them Ray's.

    Raises:
        ValueError: one that is no text; Ray takes no other.
    """
    given = OmegaConf.select(config, ENVIRONMENT)
    given = OmegaConf.to_container(given, resolve=False) if isinstance(given, DictConfig) else {}
    assert isinstance(given, dict)
    ours = {
        str(name): value
        for name, value in {**os.environ, **given}.items()
        if str(name).startswith("QAT_CORE_") or name == PLUGINS_VARIABLE
    }
    for name, value in ours.items():
        if not isinstance(value, str):
            fix = f"""Ray takes texts alone; write '"{value}"', with both quotes"""
            raise ValueError(f"{ENVIRONMENT}.{name}: {value}: {fix}")
    return ours


def asked_of_plugin(
    environment: Mapping[str, str],
    *,
    is_exact: bool,
    is_packed_on_cpu: bool,
    returns_routes_on_cpu: bool,
) -> list[str]:
    """What vLLM serves by this package's plugin alone."""
    by_configuration = {
        "exact rollouts": is_exact,
        "NVFP4 on a CPU": is_packed_on_cpu,
        "routes on a CPU": returns_routes_on_cpu,
    }
    asked = [what for what, is_asked in by_configuration.items() if is_asked]
    return [*kernels_of_plugin(environment), *asked]


def require_plugin(
    config: DictConfig, asked: Iterable[str], environment: Mapping[str, str]
) -> None:
    """ValueError where vLLM would not load the plugin by which it serves what is asked for.

    Of another machine's vLLM nothing is known here: its worker refuses the first sync.
    """
    what = ", ".join(asked)
    is_elsewhere = find_spec("vllm") is None or OmegaConf.select(config, f"{RAY}.address")
    if not what or is_elsewhere:
        return
    names = {it.name for it in entry_points(group="vllm.general_plugins") if it.value == PLUGIN}
    if not names:
        raise ValueError(
            f"{what}: vLLM does not find this package's plugin: install the package, by `pip "
            "install -e .` in its clone (to be on PYTHONPATH is not enough)"
        )
    allowed = environment.get(PLUGINS_VARIABLE)
    if allowed is not None and names.isdisjoint(allowed.split(",")):
        raise ValueError(
            f"{PLUGINS_VARIABLE}={allowed!r}: leaves out {', '.join(names)}, by which vLLM serves "
            f"{what}: add it, after a comma and no blank, or unset the variable"
        )
