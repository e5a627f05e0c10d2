"""A kind of input, one random change of its bytes or values, and what becomes of a damaged one."""

import contextlib
import io
import json
import math
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import yaml

from experiments.support.cli import describe_error

Outcome = Literal["accepted", "one line", "a line per error", "unclear", "traceback"]
MAX_LINES = 6


@dataclass(frozen=True)
class Kind:
    """One kind of input.

    Attributes:
        make: writes a valid original into a new folder.
        damage: changes a copy of it.
        read: reads the copy, as the programs do.
    """

    make: Callable[[Path], None]
    damage: Callable[[Path, Random], None]
    read: Callable[[Path], object]


def try_once(kind: Kind, original: Path, copy: Path, random: Random) -> tuple[Outcome, str]:
    """Damages a copy of a kind's original; what becomes of it, and what is said."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(original, copy)
    kind.damage(copy, random)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            kind.read(copy)
    except (ValueError, OSError) as error:  # what the command line turns into lines
        text = describe_error(error)
        lines = text.splitlines()
        if not all(str(copy) in line for line in lines) or not 1 <= len(lines) <= MAX_LINES:
            return "unclear", text
        return ("one line" if len(lines) == 1 else "a line per error"), text
    except Exception as error:
        return "traceback", f"{type(error).__name__}: {error}"
    return "accepted", ""


def damage(
    pattern: str, mutate: Callable[[bytes, Random], bytes]
) -> Callable[[Path, Random], None]:
    """Changes one of a folder's files of a pattern, or removes it."""

    def change(folder: Path, random: Random) -> None:
        path = random.choice(sorted(path for path in folder.glob(pattern) if path.is_file()))
        if random.random() < 0.05:
            path.unlink()
        else:
            path.write_bytes(mutate(path.read_bytes(), random))

    return change


VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 15, 63, 10**7, 10**18, 2**63, -(2**64)),
    *(0.5, 1.5, -0.1, 1e-300, 1e308, math.nan, math.inf, -math.inf),
    *("", " ", "x", "0", "1e-6", "../..", "/", "\u0000", "a\nb", "\u00e9" * 100, "{x}", "$(x)"),
    *([], [0], [1, 1], [None], [[]], {}, {"a": 1}, {"kind": "scratch"}, {"": {}}),
]


def mutate_tree(tree: Any, random: Random) -> Any:
    """A copy with a value replaced or removed, a key added or renamed, or an item repeated."""
    changed = deepcopy(tree)
    parent, key = random.choice(list(_places(changed)))
    change = random.choice(("replace", "replace", "replace", "remove", "rename", "add"))
    if change == "replace":
        parent[key] = deepcopy(random.choice(VALUES))
    elif change == "remove":
        del parent[key]
    elif isinstance(parent, list):
        parent.insert(key, deepcopy(parent[key]))
    elif change == "rename":
        parent[random.choice((f"{key}s", f"{key}"[:-1], f"{key}".upper()))] = parent.pop(key)
    else:
        parent[random.choice(("zzz", "step", "kind", ""))] = deepcopy(random.choice(VALUES))
    return changed


def mutate_bytes(content: bytes, random: Random) -> bytes:
    """A copy cut, with a byte changed, inserted or removed, in another encoding, or replaced."""
    position = random.randrange(len(content))
    noise = bytes(random.randrange(256) for _ in range(random.choice((1, 8, 64))))
    return random.choice(
        (
            b"",
            noise,
            content[:position],
            content[position:],
            content[:position]
            + bytes([content[position] ^ (1 << random.randrange(8))])
            + content[position + 1 :],
            content[:position] + noise + content[position:],
            content[:position] + content[position + len(noise) :],
            content[:position]
            + random.choice((b"\t", b"[", b"{", b'"', b"*x", b"!y ", b"\xe9"))
            + content[position:],
            content.decode("utf-8", "replace").encode("utf-16"),
        )
    )


def mutate_json(content: bytes, random: Random) -> bytes:
    """JSON with one value changed, or damaged as bytes."""
    if random.random() < 0.3:
        return mutate_bytes(content, random)
    return json.dumps(mutate_tree(json.loads(content), random)).encode()


def mutate_yaml(content: bytes, random: Random) -> bytes:
    """YAML with one value changed."""
    tree = mutate_tree(yaml.safe_load(content), random)
    return yaml.safe_dump(tree, allow_unicode=True).encode()


def mutate_lines(content: bytes, random: Random) -> bytes:
    """Lines of JSON, one of them with a value changed, or damaged as bytes."""
    if random.random() < 0.3:
        return mutate_bytes(content, random)
    lines = content.splitlines(keepends=True)
    number = random.randrange(len(lines))
    lines[number] = mutate_json(lines[number], random) + b"\n"
    return b"".join(lines)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(tree) if isinstance(tree, dict) else range(len(tree))
    for key in keys:
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])
