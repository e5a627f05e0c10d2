"""One random change of a tree of JSON values or of bytes."""

import json
import math
from collections.abc import Iterator
from copy import deepcopy
from random import Random
from typing import Any

import yaml

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
