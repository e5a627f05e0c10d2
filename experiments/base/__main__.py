"""The bases of runs and benchmarks: `python -m experiments.base COMMAND ...`."""

from functools import partial
from pathlib import Path

from experiments.support.cli import STUDY, argument, run_cli, run_command
from qat_core.arguments import positive_int

MODEL = argument(
    "--model",
    required=True,
    help="name of a model, or with own_base of a model and seed: MODEL_seed0",
)
OUT = argument("--out", type=Path, required=True, help="folder, replaced as a whole")
COMMANDS = {
    "make": (STUDY, MODEL, OUT),
    "seeded": (STUDY, MODEL, OUT),
    "random_model": (
        argument("config", type=Path, help="config.json of the shape"),
        argument("folder", type=Path, help="new folder"),
        argument("--device", choices=("cpu", "cuda"), default="cpu"),
        argument("--layers", type=positive_int, help="of the model; by default as the shape has"),
        argument("--sigma", type=float, help="spread of rows; 0: even"),
    ),
}
main = partial(run_command, __package__, "Make a base checkpoint.", COMMANDS)

if __name__ == "__main__":
    run_cli(main)
