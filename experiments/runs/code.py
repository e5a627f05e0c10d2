"""The repository's code that a program executes, as a digest.

The rule: the modules that a program starts with, and those that a counted module imports, wherever
the import stands, or names in a text such as "qat_core.verl.engine"; without the parts that the
caller says are not executed. A module counts as a whole, but for comments, docstrings and layout.

What it cannot see: names that are put together while the program runs, files that are not Python,
and whether a function of a counted module is called. Other packages are versions, not code.
"""

import ast
import re
from functools import cache
from pathlib import Path

from experiments.runs.provenance import digest_json
from experiments.study.schema import ROOT

DOTTED = re.compile(r"[a-z]\w*(\.\w+)+")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def digest_code(*modules: str, without: tuple[str, ...] = ()) -> str:
    """SHA-256 of the code that programs execute which start with these modules."""
    files = executed_files(*modules, without=without)
    return digest_json(
        {str(file.relative_to(ROOT)): _parsed(file.read_bytes())[0] for file in files}
    )


def executed_files(*modules: str, without: tuple[str, ...] = ()) -> list[Path]:
    """The files of these modules and of those that they reach, see above."""
    names, seen, files = set(modules), set[str](), set[Path]()
    left_out = tuple(f"{part}." for part in without)
    while names:
        seen.add(name := names.pop())
        for module, file in _modules_in(ROOT, name):
            if file not in files and not f"{module}.".startswith(left_out):
                files.add(file)
                names |= _parsed(file.read_bytes())[1] - seen
    return sorted(files)


@cache  # a workflow digests many programs, which share most of their modules
def _modules_in(root: Path, name: str) -> list[tuple[str, Path]]:
    """The packages and the module of a dotted name, which may end in what the module defines."""
    parts = name.split(".")
    starts = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    paths = [(it, root / it.replace(".", "/")) for it in starts]
    files = [(it, file) for it, at in paths for file in (at / "__init__.py", at.with_suffix(".py"))]
    return [(it, file) for it, file in files if file.is_file()]


@cache  # likewise
def _parsed(source: bytes) -> tuple[str, frozenset[str]]:
    """The statements of a module, and the dotted names in them that may be modules."""
    tree, names = ast.parse(source), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom():
                assert node.module and not node.level, "imports here are absolute"
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            case ast.Constant(value=str(text)) if DOTTED.fullmatch(text):
                names.add(text)
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree), frozenset(names)
