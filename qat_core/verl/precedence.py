"""Whether a file of the user's says what `+nvfp4=...` then sets otherwise.

Hydra appends a group of the command line to the defaults list, after the file's `_self_`: it would
override the file in silence. Only Hydra's loader knows which file set a key; a value alone does not
tell, as a file may repeat a default of verl's.
"""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra._internal.defaults_list import create_defaults_list
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

GROUPS = ("nvfp4", "routing_replay")
_VERLS_FOLDERS = r"verl[/.](trainer|experimental[/.]\w+)[/.]config$"


def require_last_word(hydra: DictConfig) -> None:
    """Hydra's own section of a job, while it is running.

    Raises:
        ValueError: a group would override a file, or two choices of one are given.
    """
    parsed = OverridesParser.create().parse_overrides(list(hydra.overrides.task))
    commanded = [override.key_or_group for override in parsed]
    files = _files_in_order(hydra)
    for group in GROUPS:
        _require_last_word(group, files, commanded)


def _files_in_order(hydra: DictConfig) -> list[tuple[str, dict[str, Any]]]:
    """Path and settings of each file that Hydra merges, the later over the earlier."""
    loader: Any = GlobalHydra.instance().config_loader()
    name = hydra.job.config_name
    overrides, repository = loader._parse_overrides_and_create_caching_repo(
        name, [*hydra.overrides.hydra, *hydra.overrides.task]
    )
    entries = create_defaults_list(
        repo=repository,
        config_name=name,
        overrides_list=overrides,
        prepend_hydra=True,
        skip_missing=False,
    ).defaults
    return [
        (path, _settings(path, loader._load_single_config(entry, repository)))
        for entry in entries
        for path in [str(entry.config_path)]
    ]


def _require_last_word(
    group: str, files: list[tuple[str, dict[str, Any]]], commanded: list[str]
) -> None:
    positions = [i for i, (path, _) in enumerate(files) if path.startswith(f"{group}/")]
    choices = [files[i][0].removeprefix(f"{group}/") for i in positions]
    if len(positions) > 1:
        raise ValueError(f"+{group}: {', '.join(choices)}: choose one")
    refused = [
        f"{key}: {_text(earlier[key])} in {path}.yaml, but +{group}={choices[0]} comes after it; "
        f"put {{{group}: {choices[0]}}} before _self_ in its defaults instead"
        for i in positions
        for path, earlier in files[:i]
        for key in _overridden(earlier, files[i][1], commanded)
    ]
    if refused:
        raise ValueError("\n".join(refused))


def _overridden(
    earlier: dict[str, Any], later: dict[str, Any], commanded: list[str]
) -> Iterator[str]:
    """Keys that the command does not set itself, which comes last of all."""
    for key in sorted(earlier.keys() & later.keys()):
        is_commanded = any(f"{key}.".startswith(f"{given}.") for given in commanded)
        if earlier[key] != later[key] and not is_commanded:
            yield key


def _settings(path: str, loaded: Any) -> dict[str, Any]:
    """A file's values by dotted key, but none of a file of verl's own."""
    if _is_verls(loaded.path, path):
        return {}
    content = OmegaConf.to_container(loaded.config, resolve=False)
    assert isinstance(content, dict)
    leaves = dict(_leaves(content, ""))
    # what is built, and by which class, is not the user's to say
    return {
        key: value
        for key, value in leaves.items()
        if value is not None and not key.startswith("hydra.") and not key.endswith("._target_")
    }


def _leaves(section: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _is_verls(folder: str, path: str) -> bool:
    """Whether it is verl's own file, in a checkout of verl too: its defaults may be overridden."""
    spec = find_spec("verl")
    assert spec is not None and spec.submodule_search_locations
    verl = Path(spec.submodule_search_locations[0])
    known = any(verl.glob(f"*/config/{path}.yaml")) or any(verl.glob(f"*/*/config/{path}.yaml"))
    return known and re.search(_VERLS_FOLDERS, folder) is not None


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
