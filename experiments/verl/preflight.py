"""Settings that verl does not know are refused before Ray starts, by verl's own configuration."""

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.study.schema import Run, Study
from experiments.study.verl_settings import Setting
from experiments.study.yaml_file import suggest
from experiments.verl.command import is_group, run_paths, run_settings, to_tree
from qat_core.verl import config as verl_config
from qat_core.verl.configuration import complete


def require_known_settings(study: Study, runs: Iterable[Run]) -> None:
    """Checks what the runs set against what verl knows, an arm of a model once."""
    one_seed = {(run.model, run.arm): run for run in runs}
    nowhere = Path("/nowhere")  # absolute: a relative path could be a name of the hub
    for run in one_seed.values():
        require_known(run_settings(study, run, run_paths(study, run, nowhere, nowhere, nowhere)))


CONFIG_NAME = "ppo_trainer"


def require_known(settings: Mapping[str, Setting]) -> None:
    """Refuses settings that verl would not read, a line a key: <file>: <key>: <what>; <fix>."""
    groups = {key: setting for key, setting in settings.items() if is_group(key)}
    _require_groups(groups)
    composed = _compose(tuple(f"{key}={setting.value}" for key, setting in groups.items()))
    listed = OmegaConf.to_container(composed)
    assert isinstance(listed, dict)
    problems = [
        f"{setting.source}: {key}: {problem}"
        for key, setting in settings.items()
        if key not in groups and (problem := _find_problem(key, listed))
    ]
    if problems:
        raise ValueError("\n".join(problems))
    values = {key: setting.value for key, setting in settings.items() if key not in groups}
    OmegaConf.set_struct(composed, False)
    try:
        merged = OmegaConf.merge(composed, to_tree(values))
        assert isinstance(merged, DictConfig)
        if groups:
            complete(merged)
    except OmegaConfBaseException as error:
        message = " ".join(str(error).split())
        raise ValueError(f"verl's configuration: {message}; correct the recipe") from None
    except ValueError as error:
        raise ValueError(f"verl's configuration, by the recipe: {error}") from None


def _require_groups(groups: Mapping[str, Setting]) -> None:
    folder = Path(next(iter(verl_config.__path__)))
    for key, (value, source) in groups.items():
        if not (folder / key.removeprefix("+") / f"{value}.yaml").is_file():
            known = sorted(f"+{f.parent.name}: {f.stem}" for f in folder.glob("*/*.yaml"))
            raise ValueError(f"{source}: {key}: {value}: no such choice; use {', '.join(known)}")


@cache
def _compose(overrides: tuple[str, ...]) -> DictConfig:
    """verl's configuration with these groups, interpolations as they stand.

    The runs of a study share a few of them, and each takes a third of a second.
    """
    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("trainer: verl: the package verl is missing; see requirements/engines.txt")
    folder = Path(spec.submodule_search_locations[0]) / "trainer" / "config"
    try:
        with initialize_config_dir(str(folder), version_base=None):
            return compose(CONFIG_NAME, overrides=list(overrides))
    except HydraException as error:
        raise ValueError(f"verl's configuration: {error}; correct the recipe") from None


def _find_problem(key: str, listed: dict[str, Any]) -> str | None:
    """What is wrong with a key in view of those that verl lists."""
    section: Any = listed
    for name in key.split("."):
        known = section if isinstance(section, dict) else {}
        is_new, name = name.startswith("+"), name.removeprefix("+")
        if is_new:
            return f"verl lists {name}; remove the +" if name in known else None
        if name not in known:
            fix = suggest(name, known, f"it has {', '.join(known) or 'nothing'} here")
            return f"unknown to verl; {fix} (+{name} sets what verl reads without listing)"
        section = known[name]
    return None
