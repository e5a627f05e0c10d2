"""MLflow as a view of the runs: `python -m experiments.tracking COMMAND ...`."""

from functools import partial
from pathlib import Path

from experiments.support.cli import RESULTS, STUDY, argument, run_cli, run_command

COMMANDS = {
    "publish": (
        *(STUDY, RESULTS),
        argument("--out", type=Path, required=True, help="file for the ids of the runs"),
    ),
    "rebuild": (argument("folder", type=Path, nargs="?", default=Path("results")),),
    "ui": (
        STUDY,
        argument("--port", default="5000"),
        argument(
            "--read", metavar="ADDRESSES", help="only read what the store lacks, then print these"
        ),
    ),
}
main = partial(run_command, __package__, "Show runs in MLflow.", COMMANDS)

if __name__ == "__main__":
    run_cli(main)
