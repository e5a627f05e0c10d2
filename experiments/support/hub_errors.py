"""What goes wrong with a download from the Hugging Face Hub, as one line with a hint."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from experiments.support.cli import is_mistake

# httpx.HTTPError: refusals of the hub and broken connections; OSError: no network and nothing in
# the cache, or no room for it; RuntimeError: any trouble of hf_xet, which fetches large files
DOWNLOAD_ERRORS = (httpx.HTTPError, OSError, RuntimeError, HFValidationError)
# another try ends alike; a gated repository counts as not found
REFUSALS = (
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)


@contextmanager
def explain_download_errors(wanted: str, hint: str) -> Iterator[None]:
    """Any error of the hub's client becomes one that names what was wanted, with a hint.

    ValueError where the hub refuses or there is no room; OSError otherwise: another try may do.
    """
    try:
        yield
    except DOWNLOAD_ERRORS as error:
        # the client hides why it had to look into its cache behind what it found there
        hidden = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
        cause = hidden or error
        kind = ValueError if isinstance(cause, REFUSALS) or is_mistake(cause) else OSError
        reason = " ".join(str(cause).split())
        raise kind(f"{wanted}: not fetched from the hub ({reason}); {hint}") from None
