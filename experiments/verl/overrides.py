"""Settings in the grammar of Hydra's command line."""

import re
from typing import Any

# where Hydra finds this project's files for verl besides verl's own
SEARCH_PATH = "hydra.searchpath=[pkg://qat_core.verl.config]"
# what Hydra takes for a string without quotes, whatever stands there
PLAIN_TEXT = re.compile(r"[A-Za-z/][A-Za-z0-9_./@-]*")
LITERALS = ("true", "false", "null", "nan", "inf")


def to_override(key: str, value: Any) -> str:
    """`key=value` with the "+" of a new key in front, as Hydra wants it."""
    return f"{'+' * ('+' in key)}{key.replace('+', '')}={_to_text(value)}"


def _to_text(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{','.join(map(_to_text, value))}]"
    assert isinstance(value, str), value
    if PLAIN_TEXT.fullmatch(value) and value.lower() not in LITERALS:
        return value
    # a backslash counts as one but before a quote
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + "\\'" * bool(m[2]), value) + "'"
