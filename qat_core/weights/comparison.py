"""Whether tensors are what a model needs: names, shapes and dtypes compared, nothing loaded."""

from collections.abc import Mapping

from torch import Tensor


def require_same(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], source: str) -> None:
    """ValueError that names what is missing, unknown, of another shape or another dtype."""
    wrong = [
        f"{name} is {_show(tensor)}, needs {_show(expected[name])}"
        for name, tensor in found.items()
        if name in expected and _show(tensor) != _show(expected[name])
    ]
    problems = [
        _some("missing", [name for name in expected if name not in found]),
        _some("unknown", [name for name in found if name not in expected]),
        _some("wrong", wrong),
    ]
    if message := "; ".join(filter(None, problems)):
        raise ValueError(f"{source}: does not match the model: {message}")


def _show(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _some(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what}: {', '.join(names[:3])}{more}"
