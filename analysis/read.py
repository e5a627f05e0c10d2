"""Files of results and records: read, or refused in one line that names file, key and mend."""

from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

Parsed = TypeVar("Parsed")


def read_text(path: Path, mend: str) -> str:
    """The file's text.

    Args:
        path: the file.
        mend: what makes it, e.g. "run the study".

    Raises:
        ValueError: it is missing.
    """
    if not path.is_file():
        raise ValueError(f"{path}: missing; {mend} first")
    return path.read_text()


def read_json(path: Path, kind: type[Parsed], mend: str) -> Parsed:
    """The file's JSON as a `kind`; arguments as for `read_text`.

    Raises:
        ValueError: it is missing or garbled.
    """
    try:
        return TypeAdapter(kind).validate_json(read_text(path, mend))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "file"
        raise ValueError(f"{path}: {key}: {first['msg']}; {mend} again") from None
