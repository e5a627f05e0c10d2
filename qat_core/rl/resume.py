"""Resumable checkpoints of a run: the model in Hugging Face form and the optimizer's state.

A step's folder appears under its final name only when complete; older ones are then removed.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat_core.rl.optimizer import MasterAdamW


def step_dir(checkpoint_dir: Path, step: int) -> Path:
    """Folder of one step's checkpoint."""
    return checkpoint_dir / f"step_{step}"


def save(
    checkpoint_dir: Path,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: MasterAdamW,
) -> None:
    """Writes the checkpoint of a step, then drops the older ones."""
    partial = checkpoint_dir / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.config.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    weights = {name: p.detach().clone().contiguous() for name, p in model.named_parameters()}
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    torch.save(optimizer.state_dict(), partial / "optimizer.pt")
    final = step_dir(checkpoint_dir, step)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    for older in checkpoint_dir.glob("step_*"):
        if older != final:
            shutil.rmtree(older)


def load(checkpoint_dir: Path, optimizer: MasterAdamW) -> int:
    """Restores the newest checkpoint; returns its step, 0 where there is none."""
    steps = [int(path.name.removeprefix("step_")) for path in checkpoint_dir.glob("step_*")]
    if not steps:
        return 0
    newest = step_dir(checkpoint_dir, max(steps))
    optimizer.load_state_dict(torch.load(newest / "optimizer.pt", weights_only=True))
    return max(steps)
