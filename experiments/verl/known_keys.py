"""Whether verl knows what a run sets, asked of verl's own configuration before Ray starts."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.study.verl_settings import Setting
from experiments.study.yaml_file import suggest
from experiments.verl.overrides import SEARCH_PATH, to_override
from qat_core.verl import config as verl_config

CONFIG_NAME = "ppo_trainer"


def require_known(settings: Mapping[str, Setting]) -> None:
    """Refuses settings that verl would not read.

    Raises:
        ValueError: a line a key, "<file>: <key>: <what>; <mend>", or verl is not installed.
    """
    groups = {key: setting for key, setting in settings.items() if is_group(key)}
    _require_groups(groups)
    listed = _compose(groups)
    mistakes = [
        f"{setting.source}: {key}: {mistake}"
        for key, setting in settings.items()
        if key not in groups and (mistake := _find_mistake(key, listed))
    ]
    if mistakes:
        raise ValueError("\n".join(mistakes))
    _compose(settings)  # Hydra's own checks of all of them together


def is_group(key: str) -> bool:
    """Whether a key chooses one of this project's files for verl, as `+nvfp4=w4a16` does."""
    return key.startswith("+") and "." not in key


def _require_groups(groups: Mapping[str, Setting]) -> None:
    folder = Path(next(iter(verl_config.__path__)))
    for key, (value, source) in groups.items():
        if not (folder / key.removeprefix("+") / f"{value}.yaml").is_file():
            known = sorted(f"+{f.parent.name}: {f.stem}" for f in folder.glob("*/*.yaml"))
            raise ValueError(f"{source}: {key}: {value}: no such choice; use {', '.join(known)}")


def _compose(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """verl's configuration with the settings, interpolations as they stand."""
    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("trainer: verl: the package verl is missing; see requirements/engines.txt")
    folder = Path(spec.submodule_search_locations[0]) / "trainer" / "config"
    overrides = [to_override(key, setting.value) for key, setting in settings.items()]
    try:
        with initialize_config_dir(str(folder), version_base=None):
            config = compose(CONFIG_NAME, overrides=[SEARCH_PATH, *overrides])
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"verl's configuration: {error}; mend the recipe") from None
    content = OmegaConf.to_container(config)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def _find_mistake(key: str, listed: dict[str, Any]) -> str | None:
    """What is wrong with a key in view of those that verl lists."""
    section: Any = listed
    for name in key.split("."):
        known = section if isinstance(section, dict) else {}
        is_new, name = name.startswith("+"), name.removeprefix("+")
        if is_new:
            return f"verl lists {name}; remove the +" if name in known else None
        if name not in known:
            mend = suggest(name, known, f"it has {', '.join(known) or 'nothing'} here")
            return f"unknown to verl; {mend} (+{name} sets what verl reads without listing)"
        section = known[name]
    return None
