"""Whether every tensor that vLLM's loader of a model is given gets to a parameter.

Loaders pass some names over without a word: an output head where config.json says tied, biases,
whatever a model's own list has. That all parameters got values does not tell of it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from typing import Any

from torch import Tensor, nn


class Landing:
    """Knows which of the tensors given to a loader have got to no parameter yet."""

    def __init__(self) -> None:
        # by storage, as loaders may pass on views; kept, so that no other tensor gets its address
        self._pending: dict[int, list[tuple[str, Tensor]]] = {}
        self._current = 0

    def noted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same tensors, for a loader."""
        for name, tensor in tensors:
            self._current = _storage(tensor)
            self._pending.setdefault(self._current, []).append((name, tensor))
            yield name, tensor
        self._current = 0

    def counting(self, loader: Callable[..., Any]) -> Callable[..., Any]:
        """A parameter's loader that tells what it gets: the tensor given last, or a part of any."""

        @wraps(loader)  # by its name vLLM knows a loader that it has wrapped itself
        def count(*arguments: Any, **named: Any) -> Any:
            for value in chain(arguments, named.values()):
                if isinstance(value, Tensor):
                    self._pending.pop(_storage(value), None)
            self._pending.pop(self._current, None)
            return loader(*arguments, **named)

        return count

    def require_all(self, model: nn.Module) -> None:
        """ValueError naming tensors that got to no parameter."""
        lost = [name for some in self._pending.values() for name, _ in some]
        if lost:
            raise ValueError(
                f"weight sync: {', '.join(lost[:3])}: sent, but vLLM's {type(model).__name__} puts "
                "it into no parameter: its loader passes it over (an output head where config.json "
                "has tie_word_embeddings: true; a bias); train without it, or with the eager engine"
            )


@contextmanager
def landing(model: nn.Module) -> Iterator[Landing]:
    """Inside, the loaders of all of a model's tensors tell what they get."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    found = Landing()
    tensors: list[Any] = list(chain(model.parameters(), model.buffers()))
    loaders = [getattr(tensor, "weight_loader", None) for tensor in tensors]
    for tensor, loader in zip(tensors, loaders, strict=True):
        tensor.weight_loader = found.counting(loader or default_weight_loader)
    try:
        yield found
    finally:
        for tensor, loader in zip(tensors, loaders, strict=True):
            if loader is None:
                del tensor.weight_loader
            else:
                tensor.weight_loader = loader


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
