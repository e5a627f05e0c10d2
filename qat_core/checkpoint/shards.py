"""Tensors of a folder of safetensors files, found by name through the index, read one at a time."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"  # where peft is installed, transformers adds what it names
HF_QUANT_CONFIG = "hf_quant_config.json"  # of ModelOpt; vLLM goes by it, transformers does not
MISTRAL_FILES = "consolidated*.safetensors"  # the same weights once more; vLLM looks for it first
FIX = "copy the checkpoint again"


class Shards:
    """All tensors of a checkpoint folder.

    Attributes:
        files: names of the safetensors files that hold them.
        described: meta tensor of every stored tensor's shape and dtype, by name.

    Raises:
        ValueError: no weights or two sets of them, an adapter beside them, a truncated file, or an
            index that does not tell what files hold.
    """

    def __init__(self, folder: Path) -> None:
        indexed = _index(folder)
        self.files = set(indexed.values())
        self.described: dict[str, Tensor] = {}
        self._stored: dict[str, tuple[Any, str]] = {}  # in which file, under which name
        for path in sorted(folder / file for file in self.files):
            handle = _open(path)
            for name in handle.keys():  # noqa: SIM118  not a mapping
                if indexed.get(name) != path.name:
                    raise ValueError(
                        f"{folder / INDEX}: has no entry for {name} of {path.name}; {FIX}"
                    )
                self.described[name] = _describe(path, name, handle)
                self._stored[name] = handle, name
        lost = sorted(indexed.keys() - self.described.keys())
        if lost:
            raise ValueError(
                f"{folder / indexed[lost[0]]}: lacks {lost[0]}, which {INDEX} names; {FIX}"
            )

    def read(self, name: str) -> Tensor:
        """The tensor of that name, in memory of its own."""
        handle, stored_as = self._stored[name]
        tensor: Tensor = handle.get_tensor(stored_as)
        return tensor

    def rename(self, stored_as: str, name: str) -> None:
        """From now on a tensor has another name than the one it is stored under."""
        self.described[name] = self.described.pop(stored_as)
        self._stored[name] = self._stored.pop(stored_as)


def has_weights(folder: Path) -> bool:
    """Whether the folder has safetensors files, and not weights in another form."""
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


def read_json(path: Path) -> dict[str, Any]:
    """Content of a JSON object file; ValueError that names the file."""
    if not path.is_file():
        raise ValueError(f"{path}: missing; name the folder of a whole checkpoint")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # of the JSON, or of its encoding
        raise ValueError(f"{path}: not valid JSON: {error}; {FIX}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: needs a JSON object; {FIX}")
    return content


def _index(folder: Path) -> dict[str, str]:
    if (folder / ADAPTER).is_file():
        raise ValueError(
            f"{folder}: holds {ADAPTER} beside weights, and programs differ in whether they add "
            "the adapter; merge it into the weights, or move it out of the folder"
        )
    if (folder / INDEX).is_file():
        weight_map: Any = read_json(folder / INDEX).get("weight_map")
        is_map = isinstance(weight_map, dict) and weight_map
        if not is_map or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(f"{folder / INDEX}: weight_map: needs file names by tensor; {FIX}")
        if (folder / SINGLE).is_file() and set(weight_map.values()) != {SINGLE}:
            raise _two_sets(folder, INDEX)
        return dict(weight_map)
    if not (folder / SINGLE).is_file():
        raise ValueError(
            f"{folder}: holds neither {INDEX} nor {SINGLE}; name a checkpoint's folder"
        )
    read_elsewhere = {SINGLE, *(path.name for path in folder.glob(MISTRAL_FILES))}
    for file in sorted(folder.glob("*.safetensors")):
        if file.name not in read_elsewhere:
            raise _two_sets(folder, file.name)
    return dict.fromkeys(_open(folder / SINGLE).keys(), SINGLE)


def _two_sets(folder: Path, other: str) -> ValueError:
    """transformers reads the single file, vLLM the index's files, or all where there is none."""
    return ValueError(
        f"{folder}: holds two sets of weights, {SINGLE} and that of {other}, and programs differ "
        "in which one they read; remove one of them"
    )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ValueError(f"{path}: named by {INDEX} but missing; {FIX}") from error
    except (SafetensorError, OSError) as error:  # the second of a folder
        raise ValueError(f"{path}: truncated or not a safetensors file: {error}; {FIX}") from error


def _describe(path: Path, name: str, handle: Any) -> Tensor:
    piece = handle.get_slice(name)
    shape = piece.get_shape()
    try:
        read: Tensor = piece[:0] if shape else handle.get_tensor(name)
    except Exception as error:  # of any kind: a dtype that PyTorch lacks
        raise ValueError(f"{path}: {name}: dtype {piece.get_dtype()}: {error}") from error
    return torch.empty(shape, dtype=read.dtype, device="meta")
