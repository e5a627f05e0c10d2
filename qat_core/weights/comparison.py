"""Whether tensors are what a model needs: names, shapes and dtypes compared, nothing loaded."""

from collections.abc import Mapping

from torch import Tensor


def require_same(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], source: str) -> None:
    """ValueError that names what is missing, unknown, of another shape or another dtype."""
    found_problems = [
        _some("missing", [name for name in expected if name not in found]),
        _some("unknown", [name for name in found if name not in expected]),
        _some(
            "wrong",
            [
                _wrong(name, expected[name], t)
                for name, t in found.items()
                if name in expected and _kind(t) != _kind(expected[name])
            ],
        ),
    ]
    message = "; ".join(problem for problem in found_problems if problem)
    if message:
        raise ValueError(f"{source}: does not match the model: {message}")


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape)


def _wrong(name: str, expected: Tensor, found: Tensor) -> str:
    return (
        f"{name} is {found.dtype} {tuple(found.shape)}, "
        f"needs {expected.dtype} {tuple(expected.shape)}"
    )


def _some(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what}: {', '.join(names[:3])}{more}"
