"""Whether a mathematical answer is right, by math-verify in a process of its own.

math-verify limits its time by a signal, which Python receives in the main thread only, while verl
scores in threads; and none interrupts one long operation such as the digits of 10^(10^10). So the
comparisons run in a child whose alarm has no handler: the kernel ends it, and another is started.
"""

import json
import logging
import resource
import signal
import subprocess
import sys
from pathlib import Path
from threading import Lock

from experiments.verl.written_forms import boxed_content, comparable
from qat_core.units import BYTES_PER_GIB

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 5
MEMORY_LIMIT_BYTES = 4 * BYTES_PER_GIB
# 1, until November 2026: as math-verify reads them; 2: rewritten by `written_forms` before; 3: with
# degrees; 4: with repeating decimals
RULE = 4
PACKAGES = ("math-verify", "latex2sympy2-extended", "antlr4-python3-runtime", "sympy")


class MathVerifier:
    """Compares answers, one at a time; to be called from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._child: subprocess.Popen[str] | None = None

    def is_right(self, given: str, right: str) -> bool:
        r"""Whether two answers are equal; not so if it takes too much time or memory to tell.

        Args:
            given: LaTeX with a `\boxed{` or `\fbox{`, well formed or not.
            right: the right answer, LaTeX without `\boxed`.

        Raises:
            RuntimeError: the comparison itself is broken, e.g. math-verify is not installed.
        """
        with self._lock:
            # one that was idle may have been killed: the system lacked memory
            if self._child is None or self._child.poll() is not None:
                self._child = _start()
            assert self._child.stdin is not None and self._child.stdout is not None
            self._child.stdin.write(json.dumps([given, right]) + "\n")
            self._child.stdin.flush()
            verdict = self._child.stdout.readline()
            if not verdict:
                code = self._child.wait()
                self._child = None
                if code >= 0:  # else a signal ended it: the alarm, or out of memory
                    raise RuntimeError(f"math verifier: ended with exit code {code}; see its error")
            return verdict == "True\n"


def _start() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.verl.math_verifier"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def main() -> None:
    """Answers each line of stdin, a JSON list as of `is_right`, by True or False."""
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that time is not limited
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    latex = [LatexExtractionConfig(boxed_match_priority=0)]

    def are_equal(given: str, right: str) -> bool:
        read = [parse(rf"\boxed{{{it}}}", latex, parsing_timeout=None) for it in (right, given)]
        return bool(verify(*read, timeout_seconds=None))

    for line in sys.stdin:
        signal.alarm(TIME_LIMIT_S)
        boxed, right = json.loads(line)
        given = boxed_content(boxed)
        verdict = given is not None and any(are_equal(*it) for it in comparable(given, right))
        signal.alarm(0)
        print(verdict, flush=True)


if __name__ == "__main__":
    main()
