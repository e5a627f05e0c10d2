"""Whether a file of the user's says what `+nvfp4=...` or another group of ours then sets otherwise.

Hydra appends a group of the command line to the defaults list, after the file's `_self_`: it would
override the file in silence. Only Hydra's loader knows which file set a key; a value alone does not
tell, as a file may repeat a default of verl's.
"""

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from hydra._internal.defaults_list import create_defaults_list
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

# of this project, each with the names of its files
GROUPS = {
    folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
    for folder in (Path(__file__).parent / "config").iterdir()
    if not folder.name.startswith("__") and folder.is_dir()
}


class _File(NamedTuple):
    path: str
    package: str  # the section of the configuration that its keys are in
    settings: dict[str, Any]  # by dotted key of the configuration


def require_last_word(hydra: DictConfig) -> None:
    """ValueError if a group would override a file, or two choices of one are given.

    `hydra` is its own section of a job that is running.
    """
    parsed = OverridesParser.create().parse_overrides(list(hydra.overrides.task))
    commanded = [override.key_or_group for override in parsed]
    files = _files_in_order(hydra)
    for group in GROUPS:
        _require_last_word(group, files, commanded)


def _files_in_order(hydra: DictConfig) -> list[_File]:
    """The files that Hydra merges, the later over the earlier."""
    loader: Any = GlobalHydra.instance().config_loader()
    repository, entries = entries_in_order(hydra)
    return [
        _File(
            str(entry.config_path),
            str(entry.package),
            _settings(loader._load_single_config(entry, repository).config),
        )
        for entry in entries
    ]


def entries_in_order(hydra: DictConfig) -> tuple[Any, list[Any]]:
    """Hydra's own list of these files, each with its path and package, and where it found them."""
    loader: Any = GlobalHydra.instance().config_loader()
    name = hydra.job.config_name
    overrides, repository = loader._parse_overrides_and_create_caching_repo(
        name, [*hydra.overrides.hydra, *hydra.overrides.task]
    )
    found = create_defaults_list(
        repo=repository,
        config_name=name,
        overrides_list=overrides,
        prepend_hydra=True,
        skip_missing=False,
    )
    return repository, found.defaults


def _require_last_word(group: str, files: list[_File], commanded: list[str]) -> None:
    positions = [i for i, file in enumerate(files) if file.path.startswith(f"{group}/")]
    choices = [files[i].path.removeprefix(f"{group}/") for i in positions]
    if len(positions) > 1:
        raise ValueError(f"+{group}: {', '.join(choices)}: choose one")
    refused = [
        f"{key}: {_text(earlier.settings[key])} in {earlier.path}.yaml, "
        f"but +{group}={choices[0]} comes after it; {_fix(earlier, key, group, choices[0])}"
        for i in positions
        for earlier in files[:i]
        for key in _overridden(earlier, files[i].settings, commanded)
    ]
    if refused:
        raise ValueError("\n".join(refused))


def _overridden(earlier: _File, later: dict[str, Any], commanded: list[str]) -> Iterator[str]:
    """Keys that are the user's, and that the command does not set itself, which comes last."""
    for key in sorted(earlier.settings.keys() & later.keys()):
        is_commanded = any(f"{key}.".startswith(f"{given}.") for given in commanded)
        if earlier.settings[key] != later[key] and not is_commanded and not _is_verls(earlier, key):
            yield key


def _fix(file: _File, key: str, group: str, choice: str) -> str:
    """A file of a group can list only what is in its own section, and others come after it."""
    if "/" in file.path:
        return f"add {key}={_text(file.settings[key])} to the command"
    return f"put {{{as_default(group, choice)}}} before _self_ in its defaults instead"


def as_default(group: str, choice: str) -> str:
    """A line of a file's defaults; YAML takes `on` and `off` without quotes for booleans."""
    return f'{group}: "{choice}"' if choice in ("on", "off") else f"{group}: {choice}"


def _settings(config: Any) -> dict[str, Any]:
    """What a file says, by dotted key."""
    content = OmegaConf.to_container(config, resolve=False)
    assert isinstance(content, dict)
    leaves = dict(_leaves(content, ""))
    # what is built, and by which class, is not the user's to say
    return {
        key: value
        for key, value in leaves.items()
        if value not in (None, "???")
        and not key.startswith("hydra.")
        and not key.endswith("._target_")
    }


def _leaves(section: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _is_verls(file: _File, key: str) -> bool:
    """Whether verl's file of this path says it too: a default, which a group may override."""
    name = key.removeprefix(f"{file.package}.")
    return bool(said_by_verl(file.path).get(name) == file.settings[key])


@cache
def said_by_verl(path: str) -> dict[str, Any]:
    """Settings of verl's file of this path below its folders of configurations, if there is one."""
    spec = find_spec("verl")
    assert spec is not None and spec.submodule_search_locations
    verl = Path(spec.submodule_search_locations[0])
    files = [*verl.glob(f"*/config/{path}.yaml"), *verl.glob(f"*/*/config/{path}.yaml")]
    return {key: value for file in files for key, value in _settings(OmegaConf.load(file)).items()}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
