"""Resumable checkpoints of a run: the model in Hugging Face form and the optimizer's state.

A `step_<n>` folder is always whole: it is renamed into place when complete and away before it is
removed, and SHA256SUMS tells later damage. All models are kept, to be evaluated, and the newest
optimizer's state alone, so a run's folder is the same however often the run was killed.
"""

import os
import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from experiments.rl.optimizer import MasterAdamW
from qat_core.checkpoint.manifest import remove_listed, verify_manifest, write_manifest
from qat_core.planning.plan import state_tensors
from qat_core.training.state_dicts import full_precision_state

OPTIMIZER = "optimizer.pt"
PARTIAL, REMOVED = "partial", "removed"
STEP = re.compile(r"step_(\d+)")


def find_steps(checkpoint_dir: Path) -> dict[int, Path]:
    """Checkpoints by step, ascending; folders of any other name do not count."""
    folders = checkpoint_dir.iterdir() if checkpoint_dir.is_dir() else ()
    found = {int(m[1]): path for path in folders if (m := STEP.fullmatch(path.name))}
    return dict(sorted(found.items()))


def check(folder: Path) -> None:
    """Compares a checkpoint's files with their digests."""
    try:
        verify_manifest(folder)
    except ValueError as error:
        what, _, _ = str(error).rpartition("; ")  # the hint is for checkpoints that were copied
        raise ValueError(what) from None


def save(
    checkpoint_dir: Path,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: MasterAdamW,
) -> None:
    """Writes the checkpoint of a step, then removes the older ones' optimizer states."""
    partial = checkpoint_dir / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        model.config.save_pretrained(partial)
        # unchecked: what its author set is kept, though transformers may call it contradictory
        model.generation_config.to_json_file(partial / "generation_config.json")
        tokenizer.save_pretrained(partial)
        state = full_precision_state(model)
        weights = {name: state[name].clone().contiguous() for name, _ in state_tensors(model)}
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        torch.save(optimizer.state_dict(), partial / OPTIMIZER)
        write_manifest(partial)
        _flush(*partial.iterdir(), partial)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{checkpoint_dir}: checkpoint of step {step} not written ({reason}); free disk space"
        ) from error
    final = checkpoint_dir / f"step_{step}"
    _remove(final)
    partial.rename(final)
    _flush(checkpoint_dir)
    _make_newest(final)


def _flush(*paths: Path) -> None:
    """Waits until files and folders are on disk: what they replace is deleted after that."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def load(checkpoint_dir: Path, optimizer: MasterAdamW) -> int:
    """Restores the newest whole checkpoint, removes newer ones and older optimizer states.

    Returns its step, 0 where there is none.
    """
    damage = []
    for step, folder in reversed(find_steps(checkpoint_dir).items()):
        try:
            check(folder)
            if not (folder / OPTIMIZER).exists():
                continue  # kept to be evaluated: a missing one that should be there is damage
            _restore(folder / OPTIMIZER, optimizer)
        except ValueError as error:
            damage.append(str(error))
            continue
        for line in damage:
            print(f"warning: {line}; resuming from step {step} instead", flush=True)
        _make_newest(folder)
        return step
    if damage:
        raise ValueError(
            f"{damage[0]}; restore it, or delete {checkpoint_dir} to train from the first step"
        )
    return 0


def _restore(path: Path, optimizer: MasterAdamW) -> None:
    try:
        state: Mapping[str, Any] = torch.load(path, weights_only=True)
        optimizer.load_state_dict(dict(state))
    except (RuntimeError, ValueError, TypeError, KeyError, EOFError, pickle.PickleError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: not the state of this run's optimizer ({reason})") from None


def _make_newest(folder: Path) -> None:
    steps = find_steps(folder.parent)
    newest = next(step for step, path in steps.items() if path == folder)
    for step, path in steps.items():
        if step > newest:
            _remove(path)
        elif step < newest:
            remove_listed(path, OPTIMIZER)
    for leftover in (PARTIAL, REMOVED):
        shutil.rmtree(folder.parent / leftover, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Removes a folder so that a kill in between leaves no half of it under its name."""
    if folder.exists():
        removed = folder.with_name(REMOVED)
        shutil.rmtree(removed, ignore_errors=True)
        folder.rename(removed)
        shutil.rmtree(removed)
