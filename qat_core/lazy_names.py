"""Names of a package that are loaded when they are first used, for packages that must import fast.

In a package: `__getattr__ = load_from(__name__, MODULES)`, as PEP 562 has it.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def load_from(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`.

    Args:
        package: its name, for the error.
        modules: the module of each of its names.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return load
