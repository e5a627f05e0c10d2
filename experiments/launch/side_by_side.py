"""`python -m experiments.launch.side_by_side`: runs of a study next to each other on one machine.

Snakemake is the scheduler; this is for machines that have neither it nor a network to get it by,
such as a GPU rented by the minute. How runs share a GPU by memory is no scheduling of its own:
`experiments.support.gpu_locks` decides it under both.

Base checkpoints, and data of verl, are made as runs come to need them; then each run is trained and
evaluated. What is complete, and of the present settings and code, is skipped and what was cut off
is resumed, so that the same command continues a study; its exit code is 1 as long as something is
not complete. On a GPU a program waits until so much memory is free as the study says that a run
takes (`gpu_memory_gib`); more jobs than fit do no harm.

`--random-weights` is for large models whose weights are random: ranks draw them from a seed
(`experiments.base seeded`), and nothing is evaluated.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from experiments.launch.digests import training_digests
from experiments.launch.programs import Programs
from experiments.runs.attempts import is_finished, list_attempts
from experiments.runs.evaluation import EVALUATIONS, read_evaluations
from experiments.runs.inputs import base_digest, data_digest, read_base_manifest, read_data_manifest
from experiments.runs.manifest import MANIFEST, read_manifest
from experiments.study.load import load_study
from experiments.study.schema import Run, Study
from experiments.support.cli import (
    INTERRUPTED,
    RESULTS,
    STUDY,
    USER_MISTAKE,
    describe_error,
    run_cli,
)
from experiments.support.json_files import REMAKE
from qat_core.arguments import positive_float, positive_int, study_seed

Program = tuple[str, Sequence[str]]  # module, with its command if it has several, and arguments
FINAL = (0, USER_MISTAKE, INTERRUPTED, -signal.SIGINT)  # exit codes that no other try changes


def chosen_runs(study: Study, cells: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[Run]:
    """Those of the named cells and seeds, in the study's order; nothing named means all."""
    _check_named("--cells", "cell", study, cells, study.cells)
    _check_named("--seeds", "seed", study, seeds, study.seeds)
    return [
        run
        for run in study.runs
        if (not cells or run.cell in cells) and (not seeds or run.seed in seeds)
    ]


def _check_named(
    option: str, what: str, study: Study, named: Sequence[object], known: Collection[object]
) -> None:
    if unknown := [str(name) for name in named if name not in known]:
        raise ValueError(
            f"{option}: study {study.study} has no {what} {', '.join(unknown)}; it has "
            f"{', '.join(map(str, known)) or 'none'}"
        )


@dataclass
class SideBySide:
    """The programs of a study, started one after the other and at most `jobs` at a time."""

    study: Study
    study_file: Path
    results: Path
    jobs: int
    runs: Sequence[Run]  # those of the study that are run
    deadline: float  # of `time.monotonic`, after which no run is begun
    tries: int = 1  # starts of a program before it has failed
    random_weights: bool = False  # ranks draw the weights of their base, and nothing is evaluated
    programs: Programs = field(default_factory=Programs, init=False)

    def run_all(self) -> list[str]:
        """Runs the study in the order of its file; returns what did not succeed.

        Ctrl-C is passed on to what runs, and ends this when that has ended.
        """
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                return [name for name, done in self._submitted(pool) if not done.result()]
            except KeyboardInterrupt:
                self.programs.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                print("stopped: begins nothing more, waits for what runs to end", flush=True)
                raise

    def _submitted(self, pool: ThreadPoolExecutor) -> list[tuple[str, Future[bool]]]:
        """What is made and run, by name.

        A run waits in its thread for what it needs, which has been given to the pool before it.
        """
        is_verl = self.study.trainer == "verl"
        data = [pool.submit(self._attempted, "data", self._make_data)] if is_verl else []
        bases: dict[str, Future[bool]] = {}
        runs: dict[str, Future[bool]] = {}
        for run in self.runs:
            base = self.study.base_of(run)
            if base not in bases:
                make = partial(self._make_base, base)
                bases[base] = pool.submit(self._attempted, base, make)
            train = partial(self._train, run, [*data, bases[base]])
            runs[run.id] = pool.submit(self._attempted, run.id, train)
        return [("data", done) for done in data] + [*bases.items(), *runs.items()]

    def _attempted(self, name: str, work: Callable[[], bool]) -> bool:
        """Whether it is done; a damaged file is said at once, and ends no work but its own."""
        try:
            return work()
        except (ValueError, OSError) as error:
            print(f"{name}: {describe_error(error)}", flush=True)
            return False

    def _make_data(self) -> bool:
        out = self.results / "data" / self.study.study
        wanted = data_digest(self.study.task)
        # as a whole or not at all
        if out.exists() and _is_current(out, read_data_manifest(out).settings, wanted):
            return True
        return self._begin("data", [("experiments.verl.data", ("--out", str(out)))])

    def _make_base(self, name: str) -> bool:
        out = self.results / "base" / name
        wanted, is_there = base_digest(self.study, name), (out / MANIFEST).exists()
        if is_there and _is_current(out, read_base_manifest(out).settings, wanted):
            return True
        maker = "seeded" if self.random_weights else "make"
        arguments = ("--model", name, "--out", str(out))
        return self._begin(name, [(f"experiments.base {maker}", arguments)])

    def _train(self, run: Run, needed: "Sequence[Future[bool]]") -> bool:
        folder, options = self.results / run.id, ("--run", run.id, "--results", str(self.results))
        copy = ("--log", str(folder / "train.log"), "--untracked")
        programs: list[Program] = [("experiments.launch.run", (*options, *copy))]
        files = [MANIFEST]
        if not self.random_weights:
            programs.append(("experiments.evaluate.run", options))
            files.append(EVALUATIONS)
        if not all(made.result() for made in needed):
            return False
        if all((folder / file).exists() for file in files):
            digests = training_digests(self.study, run, self.results)
            if not is_finished(list_attempts(folder), digests):
                print(f"{folder}: of other settings, code or inputs; trained again", flush=True)
            elif self.random_weights or self._is_evaluated(folder):
                return True
            else:
                what = "with other settings, by an older version or before its last step"
                print(f"{folder}: evaluated {what}; evaluated again", flush=True)
        return self._begin(run.id, programs)

    def _is_evaluated(self, folder: Path) -> bool:
        found = read_evaluations(folder, REMAKE)
        if read_manifest(folder, REMAKE).planned_steps not in {None, *(it.step for it in found)}:
            return False
        return all(it.settings == self.study.evaluation for it in found)

    def _begin(self, name: str, programs: Sequence[Program]) -> bool:
        if self.programs.are_stopped or time.monotonic() > self.deadline:
            return False
        log = self.results / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        for program, arguments in programs:
            words = [*program.split(), "--study", str(self.study_file), *arguments]
            if not self._succeeds([sys.executable, "-m", *words], log):
                print(f"{name}: {program} failed, see {log}", flush=True)
                return False
        print(f"{name}: complete", flush=True)
        return True

    def _succeeds(self, command: Sequence[str], log: Path) -> bool:
        """Whether one of the tries does; the later ones resume what the earlier ones left.

        A mistake of the user's is one at every try; an error of the network or of a disk is not.
        What was stopped by hand is not started again.
        """
        with log.open("a") as output:
            for _ in range(self.tries):
                code = self.programs.exit_code(command, output)
                if code in FINAL:
                    return code == 0
        return False


def _is_current(folder: Path, made_of: str | None, wanted: str) -> bool:
    """Whether a base or data are of the study's settings; prints why they are made again."""
    if made_of != wanted:
        what = "an older version made it" if made_of is None else "of other settings"
        print(f"{folder}: {what}; made again", flush=True)
    return made_of == wanted


def main() -> None:
    """Parses the command line and runs a study."""
    parser = argparse.ArgumentParser(description=__doc__, parents=[STUDY, RESULTS])
    parser.add_argument("--jobs", type=positive_int, required=True, help="programs at a time")
    parser.add_argument(
        "--begin-within-s",
        type=positive_float,
        default=float("inf"),
        help="seconds after the start; no run is begun later; by default without end",
    )
    parser.add_argument("--cells", nargs="+", default=(), help="only these cells of a grid")
    parser.add_argument("--seeds", nargs="+", type=study_seed, default=(), help="only these seeds")
    parser.add_argument(
        "--tries",
        type=int,
        choices=range(1, 10),
        default=2,
        help="starts of a program that fails, but not with exit code 2: a mistake of yours",
    )
    parser.add_argument(
        "--random-weights", action="store_true", help="draw weights on each rank, evaluate nothing"
    )
    args = parser.parse_args()
    deadline = time.monotonic() + args.begin_within_s
    study = load_study(args.study)
    programs = SideBySide(
        study,
        args.study,
        args.results,
        args.jobs,
        chosen_runs(study, args.cells, args.seeds),
        deadline,
        args.tries,
        args.random_weights,
    )
    missing = programs.run_all()
    print(f"{len(programs.runs)} runs in all, not complete: {', '.join(missing) or 'none'}")
    if missing:
        sys.exit(1)


if __name__ == "__main__":
    run_cli(main)
