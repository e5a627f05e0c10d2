"""What goes wrong with a download from the Hugging Face Hub, as one line with a hint."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

# httpx.HTTPError: refusals of the hub and broken connections; OSError: no network and nothing in
# the cache, or no room for it; RuntimeError: any trouble of hf_xet, which fetches large files
DOWNLOAD_ERRORS = (httpx.HTTPError, OSError, RuntimeError, HFValidationError)


@contextmanager
def explain_download_errors(wanted: str, hint: str) -> Iterator[None]:
    """Any error of the hub's client becomes a ValueError that names what was wanted, with a hint.

    Raises:
        ValueError: the download inside has failed.
    """
    try:
        yield
    except DOWNLOAD_ERRORS as error:
        # the client hides why it had to look into its cache behind what it found there
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
        reason = " ".join(str(cause or error).split())
        raise ValueError(f"{wanted}: not fetched from the hub ({reason}); {hint}") from None
