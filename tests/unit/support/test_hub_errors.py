"""Errors of the Hugging Face Hub's client become one line that says what to do.

That the client downloads, resumes and caches is its own affair.
"""

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

from experiments.support.cli import is_mistake
from experiments.support.hub_errors import explain_download_errors

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
