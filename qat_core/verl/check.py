"""`qat-core verl-check`: what a verl command would run, or all that is refused in it.

    qat-core verl-check python -m verl.trainer.main_ppo +nvfp4@_global_=w4a16 ...

Hydra composes the command as the program of verl's itself would, with this project's callbacks,
which read config.json of the actor's model. Nothing is started and nothing is written. What verl
refuses by itself later, such as batches that cannot be divided, is not looked for.
"""

import argparse
import ast
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

PROGRAM = "verl.trainer.main_ppo"
NOT_EXACT = re.compile(r"\++(exact(?:@_global_)?=(?!on$).*)")  # in Hydra's words, without a fix
VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
EXAMPLE = "python -m verl.trainer.main_ppo +nvfp4@_global_=w4a16 ..."


class Command(NamedTuple):
    """A command line of verl's."""

    variables: Mapping[str, str]  # set before the program
    program: str  # a module, or a file
    arguments: Sequence[str]


class HydraConfig(NamedTuple):
    """What a program's `@hydra.main` names."""

    folder: Path
    name: str | None


def main(
    words: Sequence[str] | None = None, program: str = "python -m qat_core.verl.check"
) -> None:
    """Prints a line on what would run, or one for each refusal, with exit code 2."""
    given = list(sys.argv[1:] if words is None else words)
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} [-h] COMMAND...",
        description="Says what a verl command would run, or all that is refused in it.",
    )
    parser.add_argument(
        "command",
        nargs="+",
        metavar="COMMAND",
        help=f"as for verl: {EXAMPLE}; or its arguments alone, which are main_ppo's",
    )
    if not given or given[0] in ("-h", "--help"):
        parser.parse_args(given)
    try:
        check(parse(given))
    except ValueError as error:
        print(*(f"error: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        sys.exit(2)
    except SystemExit as error:  # of the callbacks, which end a run of verl with code 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        sys.exit(2 if error.code else 0)


def parse(words: Sequence[str]) -> Command:
    """Splits a command line, of which a shell has taken the quotes."""
    for position, word in enumerate(words):
        is_module = word == "-m" and position + 1 < len(words)
        if is_module or (word.endswith(".py") and "=" not in word):
            found = [VARIABLE.fullmatch(each) for each in words[:position]]
            end = position + 1 + is_module
            variables = {match[1]: match[2] for match in found if match}
            return Command(variables, words[end - 1], words[end:])
    return Command({}, PROGRAM, words)


def check(command: Command) -> None:
    """Composes a command, and prints what would run; SystemExit with a line for each refusal."""
    if find_spec("verl") is None:
        raise ValueError("verl is not installed here: run this where verl runs")
    import hydra
    from omegaconf import DictConfig, OmegaConf

    import qat_core.verl.hydra_namespace  # noqa: F401 - as verl's start does
    from qat_core.verl.near_misses import USE_EXACT, watch

    chosen = []

    def ran(config: DictConfig) -> None:
        chosen.append(OmegaConf.select(config, "actor_rollout_ref.rollout.engine_kwargs.vllm"))

    os.environ |= {**command.variables, "HYDRA_FULL_ERROR": "1"}  # errors come here
    file = _file(command.program)
    folder, name = _hydra_config(file)
    ran.__module__ = f"program.{file.stem}"  # names the job, by which callbacks know the program
    watch()
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [f"hydra.{mode}.dir={scratch}" for mode in ("run", "sweep")]
        sys.argv = [command.program, *_with_overrides(command.arguments, outputs)]
        try:
            hydra.main(config_path=str(folder), config_name=name, version_base=None)(ran)()
        except Exception as error:  # of any kind: it reads what a user writes
            lines = [f"Hydra: {' '.join(str(error).split())}"]
            wrong = filter(None, map(NOT_EXACT.fullmatch, command.arguments))
            lines += [f"{match[1].replace('=', ': ')}: {USE_EXACT}" for match in wrong]
            raise ValueError("\n".join(lines)) from error
    if not any("worker_extension_cls" in (vllm or {}) for vllm in chosen):
        print("qat_core: takes no part: the command has no +nvfp4@_global_=w4a16")


def _with_overrides(arguments: Sequence[str], added: Sequence[str]) -> list[str]:
    """After the last override, as argparse takes them in one piece only."""
    ends = [i for i, it in enumerate(arguments, 1) if "=" in it and not it.startswith("-")]
    end = ends[-1] if ends else len(arguments)
    return [*arguments[:end], *added, *arguments[end:]]


def _file(program: str) -> Path:
    """The file of a program, without importing its package: verl's takes seconds."""
    if program.endswith(".py"):
        file = Path(program)
    else:
        top, *rest = program.split(".")
        spec = find_spec(top)
        places = (spec and spec.submodule_search_locations) or [""]
        file = Path(places[0], *rest).with_suffix(".py")
    if not file.is_file():
        raise ValueError(f"{program}: no such program; give a command such as {EXAMPLE}")
    return file


def _hydra_config(file: Path) -> HydraConfig:
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hydra.main":
            given: dict[str, Any] = {
                it.arg: ast.literal_eval(it.value) for it in node.keywords if it.arg
            }
            folder = (file.parent / (given.get("config_path") or ".")).resolve()
            return HydraConfig(folder, given.get("config_name"))
    raise ValueError(f"{file}: has no @hydra.main; give a command such as {EXAMPLE}")


if __name__ == "__main__":
    main()
