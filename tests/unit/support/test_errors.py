"""Errors as users see them: of programs, of the hub's client, of damaged JSON files."""

from collections.abc import Callable
from errno import EACCES, EIO, EISDIR, ENOENT, ENOSPC, ETIMEDOUT
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from pydantic import BaseModel

from experiments.support.cli import ProgramError, is_mistake, run_cli
from experiments.support.hub_errors import explain_download_errors
from experiments.support.json_files import REMAKE, read_json, read_model, write_json
from experiments.verl.trainer import VerlError

REQUEST = httpx.Request("GET", "https://hub")


def answered(kind: type[Any], status: int, text: str) -> Exception:
    """As the client raises it for an answer of the hub."""
    return kind(text, response=httpx.Response(status, request=REQUEST))


def only_in_cache(reason: Exception) -> Exception:
    """As the client raises it where it could not connect: with the reason as its cause."""
    error = LocalEntryNotFoundError("not in the cache; check your connection")
    error.__cause__ = reason
    return error


MISTAKES = {
    "no repository": (
        answered(RepositoryNotFoundError, 401, "401:\n  not found"),
        "401: not found",
    ),
    "gated": (answered(GatedRepoError, 401, "gated repo"), "gated repo"),
    "no revision": (answered(RevisionNotFoundError, 404, "no v9"), "no v9"),
    "no file": (answered(RemoteEntryNotFoundError, 404, "no a.txt"), "no a.txt"),
    "no such name": (HFValidationError("Repo id must be"), "Repo id must be"),
    "disk full": (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
    "offline by choice": (only_in_cache(OfflineModeIsEnabled("offline mode")), "offline mode"),
}
FAILURES = {
    "hub overloaded": (answered(HfHubHTTPError, 503, "503"), "503"),
    "connection dropped": (httpx.RemoteProtocolError("disconnected"), "disconnected"),
    "large file's storage": (RuntimeError("reconstruction error"), "reconstruction error"),
    "no connection": (only_in_cache(httpx.ConnectError("refused")), "refused"),
}


@pytest.mark.parametrize(
    ("kind", "error", "reason"),
    [
        *(pytest.param(ValueError, *case, id=name) for name, case in MISTAKES.items()),
        *(pytest.param(OSError, *case, id=name) for name, case in FAILURES.items()),
    ],
)
def test_the_clients_errors_become_one_line_and_say_whether_another_try_may_do(
    kind: type[Exception], error: Exception, reason: str
) -> None:
    with pytest.raises(kind) as caught, explain_download_errors("o/d: a.txt", "try again"):
        raise error
    line = f"o/d: a.txt: not fetched from the hub ({reason}); try again"
    assert str(caught.value) == line
    assert is_mistake(caught.value) is (kind is ValueError)


def test_an_error_of_this_projects_own_stays_what_it_is() -> None:
    with pytest.raises(KeyError), explain_download_errors("o/d", "try again"):
        raise KeyError("x")


class Item(BaseModel):
    a: int


def read_items(path: Path) -> list[Item]:
    return read_model(path, list[Item])


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("inf")})
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("read", "content", "line"),
    [
        (read_json, b"{", "not JSON (Expecting property name"),
        (read_json, b"\xff\xfe\xfa", "not JSON ("),
        (read_json, b"[" * 100_000, "not JSON ("),
        (read_json, b"[1]", "not a mapping of keys to values;"),
        (read_json, None, "missing; run the study again"),  # there is nothing to delete
        (read_items, b"", "not JSON (Expecting value"),
        (read_items, b"{}", "should be a valid list;"),
        (read_items, b'[{"a": 1}, 1]', "1: should be a valid dictionary"),
        (read_items, b'[{"a": 1}, {}]', "1.a: missing;"),
        (read_items, b'[{"a": "x"}]', "0.a: should be a valid integer"),
    ],
)
def test_damage_is_named_with_its_file(
    tmp_path: Path, read: Callable[[Path], Any], content: bytes | None, line: str
) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError) as refused:
        read(path)
    assert str(refused.value).startswith(f"{path}: {line}")
    assert str(refused.value).endswith(f"; {REMAKE}" if content is not None else line)


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        pytest.param(ValueError("study.yaml: lr: wrong"), "study.yaml: lr: wrong", 2, id="user"),
        pytest.param(OSError(ENOENT, "No such file", "a"), "a: No such file", 2, id="no file"),
        pytest.param(OSError(EACCES, "denied", "a"), "a: denied", 2, id="no permission"),
        pytest.param(OSError(EISDIR, "is a folder", "a"), "a: is a folder", 2, id="folder"),
        pytest.param(OSError(ENOSPC, "full", "a"), "a: full; free disk space", 2, id="no space"),
        pytest.param(OSError(EIO, "broken", "a"), "a: broken", 1, id="disk"),
        pytest.param(OSError(ETIMEDOUT, "late"), "late", 1, id="network"),
        pytest.param(OSError("not fetched"), "not fetched", 1, id="without a number"),
        pytest.param(ProgramError("it ended"), "it ended", 1, id="another program"),
        pytest.param(VerlError("verl ended"), "verl ended", 1, id="verl"),
    ],
)
def test_an_error_is_one_line_and_says_whose_it_is(
    error: Exception, line: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_cli(main)
    assert ended.value.code == code
    assert capsys.readouterr().err == f"error: {line}\n"
