"""What can be imported without torch: a study file, a recipe, a memory prediction, the facade, and
all that looks at a study or a command of verl before it starts."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

import qat_core

LIGHT = [
    "import qat_core",
    "from qat_core import Recipe; Recipe.ffn()",
    "import qat_core.planning.recipe",
    "import qat_core.planning.predicted_memory",
    "import qat_core.options",
    "import experiments.launch.preflight",
    "import qat_core.cli",
    "import qat_core.verl.configuration",
    "import experiments.verl.preflight",
]


def test_imports_no_torch() -> None:
    """One after the other in one process: what is named is the first that loads it."""
    has_verl = find_spec("verl") is not None
    lines = [code for code in LIGHT if has_verl or "verl" not in code]
    check = "".join(f"{it}\nassert 'torch' not in sys.modules, {it!r}\n" for it in lines)
    done = subprocess.run([sys.executable, "-c", f"import sys\n{check}"], stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("name", qat_core.__all__)
def test_the_facade_gives_the_documented_names(name: str) -> None:
    assert getattr(qat_core, name).__name__ == name
    assert name in dir(qat_core)


def test_the_facade_gives_functions_also_after_their_modules_were_imported() -> None:
    modules = "qat_core.training.preparation, qat_core.planning.explanation"
    code = f"import {modules}; from qat_core import explain, prepare"
    check = f"{code}; assert callable(prepare) and callable(explain)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_the_facade_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        qat_core.no_such_name  # noqa: B018
