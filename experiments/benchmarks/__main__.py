"""The benchmarks: `python -m experiments.benchmarks COMMAND RECORD.json ...`."""

from functools import partial
from pathlib import Path

from experiments.benchmarks.architectures import ARCHITECTURES, MODELS
from experiments.benchmarks.engines import PRECISIONS
from experiments.benchmarks.exact_cases import cases
from experiments.support.cli import argument, run_cli, run_command
from qat_core.arguments import positive_int

ENGINE_NAMES = [f"{file.stem}:{it}" for file in sorted(MODELS.glob("*.json")) for it in PRECISIONS]
OF_KERNELS = [name for name in PRECISIONS if "bf16" not in name and "exact" not in name]

RECORD = argument("record", type=Path, help="JSON file to write")
DEVICE = argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses")
WORLDS = argument("--worlds", type=positive_int, nargs="+", default=[], help="ranks of FSDP2")
ALL_MODELS = list(ARCHITECTURES)
MODELS_COMPARED = argument("--models", nargs="+", choices=ALL_MODELS, default=ALL_MODELS)
KERNELS = argument(
    "--kernels", choices=OF_KERNELS, default="nvfp4", help="what multiplies packed weights"
)
COMPILE = argument("--compile", action="store_true", help="with torch.compile, vLLM's default")
ENGINES = (
    argument("engines", nargs="+", choices=ENGINE_NAMES, metavar="MODEL:PRECISION"),
    DEVICE,
    argument("--resume", action="store_true", help="keep the engines of the record"),
)
CASES = cases()
COMMANDS = {
    "codec": (RECORD,),
    "main_job": (RECORD, argument("commits", nargs="+", help="measured one after the other")),
    "parameter": (
        RECORD,
        DEVICE,
        WORLDS,
        argument("--rounds", type=positive_int, default=10),
        argument("--tokens", type=positive_int, help="by default 2,048, on a CPU 16"),
    ),
    "parity": (RECORD, DEVICE, MODELS_COMPARED, KERNELS, COMPILE),
    "rollout": (RECORD, *ENGINES),
    "serving": (
        *(RECORD, *ENGINES, COMPILE),
        argument("--starts", type=positive_int, default=1, help="of each engine, in turns"),
    ),
    "verl_steps": (RECORD, argument("results", type=Path, nargs="+", help="folders of runs")),
    "zero_mismatch": (
        *(RECORD, DEVICE),
        argument(
            "--cases",
            nargs="+",
            choices=CASES,
            metavar="CASE",
            default=[it for it in CASES if CASES[it].num_gpus == 1],
            help=f"of {', '.join(CASES)}; by default all for one GPU",
        ),
    ),
}
main = partial(run_command, __package__, "Measure something, and write a record.", COMMANDS)

if __name__ == "__main__":
    run_cli(main)
