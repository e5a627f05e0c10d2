"""Reads a YAML file into a pydantic model; one line with a hint for each error."""

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from qat_core.yaml_damage import YAML_DAMAGE

Kinds = Mapping[str, type[BaseModel]]
Location = tuple[int | str, ...]
MAX_LINES = 5
ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_yaml_file(path: Path, model: type[ModelT], kinds: Kinds) -> ModelT:
    """Reads `path` as a `model`; `kinds` are the sections that `models.<name>` may hold, by `kind`.

    Each error is a line of a ValueError: "<file>: <dotted key>: <what>; <hint>".
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such study file; see experiments/studies")
    content = read_yaml(path)
    try:
        parsed = model.model_validate(content)
    except ValidationError as error:
        errors = error.errors()
        lines = [f"{path}: {_describe(it, model, kinds)}" for it in errors[:MAX_LINES]]
        if len(errors) > MAX_LINES:
            lines.append(f"{path}: and {len(errors) - MAX_LINES} more errors")
        raise ValueError("\n".join(lines)) from None
    for key, given in _truth_values_as_numbers(content, parsed.model_dump()):
        raise ValueError(f"{path}: {key}: {str(given).lower()} is not a number; write a number")
    return parsed


def _truth_values_as_numbers(
    given: Any, parsed: Any, parents: tuple[str, ...] = ()
) -> Iterator[tuple[str, bool]]:
    """Pydantic takes true for 1; each such place as dotted key and value."""
    if isinstance(given, bool) and not isinstance(parsed, bool):
        yield ".".join(parents), given
    elif isinstance(given, dict) and isinstance(parsed, dict):
        for key in given.keys() & parsed.keys():
            yield from _truth_values_as_numbers(given[key], parsed[key], (*parents, str(key)))
    elif isinstance(given, list) and isinstance(parsed, tuple):
        for i, (item, its) in enumerate(zip(given, parsed, strict=True)):
            yield from _truth_values_as_numbers(item, its, (*parents, str(i)))


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe loader, which also refuses a key that is there twice, and `010`, which is 8."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        # as written: once `<<` is resolved, a key that overrides is rightly there twice
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(
                    None, None, f"key {key.value!r} is there twice", key.start_mark
                )
            seen.add((key.tag, key.value))
        return node

    def compose_scalar_node(self, anchor: dict[Any, yaml.Node]) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if is_number and re.search(r"^[-+]?0[0-7_]+$|:", node.value):
            raise yaml.composer.ComposerError(
                None, None, f"{node.value} counts in eights or sixties in YAML", node.start_mark
            )
        return node


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML file that holds a mapping; an error names the file and, if known, the line."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ValueError(f"{path}: line {line}: {error.problem}; fix the YAML there") from None
    except YAML_DAMAGE as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path}: not YAML text: {reason}; write it as UTF-8 YAML") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a mapping of keys; see experiments/studies/default.yaml")
    return content


def _describe(details: ErrorDetails, model: type[BaseModel], kinds: Kinds) -> str:
    """One pydantic error as "<dotted key>: <what>; <hint>"."""
    kind, given, context = details["type"], details["input"], details.get("ctx", {})
    key = ".".join(map(str, _keys_in_file(details["loc"])))
    if kind == "value_error":  # by a validator of ours; that of the whole study names the key
        return f"{key}: {context['error']}" if key else str(context["error"])
    if kind == "extra_forbidden":
        return f"{key}: unknown key; {_suggest_key(details['loc'], model, kinds)}"
    if kind == "missing":
        return f"{key}: missing; add it"
    if kind == "literal_error":
        return f"{key}: {given!r} is not allowed; use {context['expected']}"
    if kind == "union_tag_not_found":
        return f"{key}.kind: missing; use one of {', '.join(kinds)}"
    if kind == "union_tag_invalid":
        return f"{key}.kind: {context['tag']!r} is not known; use one of {', '.join(kinds)}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{key}: {given!r} is not a section; write its keys below it, indented"
    rule = details["msg"].removeprefix("Input ").removeprefix("String ").replace("tuple", "list")
    return f"{key}: {given!r} does not fit, it {rule}; change the value"


def _keys_in_file(location: Location) -> Location:
    """Pydantic's location less what it adds below models.<name>: the kind, or "[key]"."""
    return location[:2] + location[3:] if location[:1] == ("models",) else location


def _suggest_key(location: Location, model: type[BaseModel], kinds: Kinds) -> str:
    known = sorted(_section_at(location[:-1], model, kinds).model_fields)
    return suggest(str(location[-1]), known, f"known keys: {', '.join(known)}")


def suggest(name: str, known: Iterable[str], otherwise: str) -> str:
    """The hint for an unknown name: a known one with a similar spelling, or `otherwise`."""
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else otherwise


def _section_at(location: Location, section: type[BaseModel], kinds: Kinds) -> type[BaseModel]:
    if location[:1] == ("models",):  # models.<name>.<kind as pydantic adds it>
        section, location = kinds[str(location[2])], location[3:]
    is_named = False
    for part in location:
        if is_named:  # the name of a section, as below `cells`
            is_named = False
            continue
        annotation = section.model_fields[str(part)].annotation
        is_named = get_origin(annotation) is dict
        # of `Section | None`, and of sections by name, the section
        kinds_of = [a for a in get_args(annotation) or (annotation,) if a is not type(None)]
        section = kinds_of[-1]
    return section
