"""Errors of the Hugging Face Hub's client become one line that says what to do.

That the client downloads, resumes and caches is its own affair.
"""

import httpx
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from experiments.support.hub_errors import explain_download_errors

REQUEST = httpx.Request("GET", "https://hub")


def answered(kind: type[Exception], status: int, text: str) -> Exception:
    """As the client raises it for an answer of the hub."""
    return kind(text, response=httpx.Response(status, request=REQUEST))


def only_in_cache() -> Exception:
    """As the client raises it where it could not connect: with the reason as its cause."""
    error = LocalEntryNotFoundError("not in the cache; check your connection")
    error.__cause__ = httpx.ConnectError("[Errno 111] Connection refused")
    return error


ERRORS = {
    "no repository": (
        answered(RepositoryNotFoundError, 401, "401:\n  not found"),
        "401: not found",
    ),
    "gated": (answered(GatedRepoError, 401, "gated repo"), "gated repo"),
    "no revision": (answered(RevisionNotFoundError, 404, "no v9"), "no v9"),
    "no such name": (HFValidationError("Repo id must be"), "Repo id must be"),
    "connection dropped": (httpx.RemoteProtocolError("disconnected"), "disconnected"),
    "disk full": (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
    "large file's storage": (RuntimeError("reconstruction error"), "reconstruction error"),
    "offline": (only_in_cache(), "[Errno 111] Connection refused"),
}


@pytest.mark.parametrize(("error", "reason"), ERRORS.values(), ids=ERRORS)
def test_the_clients_errors_become_one_line(error: Exception, reason: str) -> None:
    with (
        pytest.raises(ValueError) as caught,
        explain_download_errors("o/d: a.txt", "try again"),
    ):
        raise error
    line = f"o/d: a.txt: not fetched from the hub ({reason}); try again"
    assert str(caught.value) == line


def test_an_error_of_this_projects_own_stays_what_it_is() -> None:
    with pytest.raises(KeyError), explain_download_errors("o/d", "try again"):
        raise KeyError("x")
