"""Is a train/rollout mismatch normal or a fault, and where does it come from?

    python -m qat_core.doctor CHECKPOINT --recipe full --prompts prompts.txt
    python -m qat_core.doctor CHECKPOINT --exact --recipe full --device cuda
    python -m qat_core.doctor --verl FOLDER

Exit code 0: nothing at fault; 1: a fault was named, or the mismatch is above the band of BF16 and
more than the model's rounding explains; 2: a mistake in the command, in one line.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

from qat_core.arguments import positive_int, study_seed
from qat_core.options import EngineKind

OF_RUNS = {"verl", "band", "json"}  # what a recorded run is judged by; of a checkpoint no band
# of an exact comparison; the engine is vLLM, and all settings of the sampler are off
OF_EXACT = {"checkpoint", "exact", "recipe", "device", "prompts", "sequences", "max_new_tokens"}
OF_EXACT |= {"seed", "json"}


def main(words: Sequence[str] | None = None, program: str = "python -m qat_core.doctor") -> None:
    """Prints the diagnosis; see the module for the exit codes."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    parser = _parser(program)
    arguments = parser.parse_args(words)
    try:
        _require_effect(parser, arguments, words)
        from qat_core.doctor.program import only_result_on_stdout, run  # torch: not for help

        with only_result_on_stdout() if arguments.json else nullcontext():
            is_healthy, result = run(arguments)
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    if arguments.json:
        print(json.dumps(result, indent=1))
    sys.exit(0 if is_healthy else 1)


def _require_effect(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, words: Sequence[str] | None
) -> None:
    """ValueError for a command with nothing to look at, or with options that change nothing."""
    if (arguments.checkpoint is None) == (arguments.verl is None):
        raise ValueError("name a CHECKPOINT, or a recorded run with --verl FOLDER")
    # argparse leaves what is not on the command line as it is
    unset = argparse.Namespace(**dict.fromkeys(vars(arguments)))
    given = {name for name, it in vars(parser.parse_args(words, unset)).items() if it is not None}
    if arguments.verl is not None:
        what, idle = "a recorded run (--verl)", given - OF_RUNS
    elif arguments.exact:
        what, idle = "an exact comparison (--exact)", given - OF_EXACT
    else:
        what, idle = "a checkpoint", given & (OF_RUNS - {"json"})
    if idle:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(idle))
        raise ValueError(f"{options}: changes nothing for {what}; leave it out")


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", type=Path, nargs="?", help="the trainer's BF16 checkpoint, with tokenizer")
    add("--verl", type=Path, metavar="FOLDER", help="judge a recorded verl run instead")
    add("--exact", action="store_true", help="are vLLM's log-probs equal in every bit? on a GPU")
    add("--band", choices=("dense", "moe"), default="dense", help="of --verl: kind of model")
    add("--recipe", default="full", help="what rollouts hold in NVFP4: none, full, ffn or a file")
    add("--trained", help="what training rounds, likewise; by default the same")
    add("--served", type=Path, help="checkpoint that the engine serves, if not the trainer's")
    add("--previous", type=Path, help="checkpoint of the sync before, to tell what is stale")
    add("--engine", choices=get_args(EngineKind), default="eager", help="what samples")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of engine and trainer")
    add("--prompts", type=Path, help="one a line, or .jsonl; by default random tokens")
    add("--sequences", type=positive_int, default=64, help="prompts at most, a response each")
    add("--max-new-tokens", type=positive_int, default=64, help="of a response, at most")
    add("--micro-batch", type=positive_int, default=8, help="sequences of a pass of the trainer")
    add("--temperature", type=float, default=1.0, help="of rollouts")
    add("--top-p", type=float, default=1.0, help="of rollouts; 1 is off")
    add("--top-k", type=int, default=0, help="of rollouts; 0 or -1 is off")
    add("--repetition-penalty", type=float, default=1.0, help="of rollouts; 1 is off")
    add("--seed", type=study_seed, default=0, help="of rollouts and random prompts")
    add("--json", action="store_true", help="JSON on stdout, the table on stderr")
    return parser


if __name__ == "__main__":
    main()
