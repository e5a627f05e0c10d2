"""What the command-line programs share: mistakes of the user end as one line and exit code 2."""

import sys
from collections.abc import Callable


def run_cli(main: Callable[[], None]) -> None:
    """Calls `main`; a ValueError or a missing file becomes one line on stderr, exit code 2."""
    try:
        main()
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
