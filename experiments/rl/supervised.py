"""Supervised training of a base model on worked and direct answers, to partial competence.

First all examples derive the answer step by step; in the last steps most of them state it at once,
which this model can only guess. Reinforcement learning then finds that showing the work pays.
"""

import random
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from experiments.rl.config import PretrainConfig
from experiments.rl.optimizer import MasterAdamW
from experiments.rl.prompts import encode_prompt
from experiments.rl.tasks import Problem

IGNORED = -100


def pretrain(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    config: PretrainConfig,
    seed: int,
    on_step: Callable[[int, float], object],
) -> None:
    """Trains a BF16 model in place; calls `on_step(step, loss)` after each step, which may end it.

    On a CPU it is FP32 meanwhile, whose products of experts and attention take two thirds as long.
    """
    dtype = model.dtype
    if model.device.type == "cpu":
        model.float()
    optimizer = MasterAdamW(model.parameters(), config.lr, weight_decay=0.01)
    model.train()
    for step, (input_ids, labels) in enumerate(_batches(tokenizer, problems, config, seed), 1):
        _set_lr(optimizer, config, step)
        labels = labels.to(model.device)
        logits = model(input_ids=input_ids.to(model.device), use_cache=False).logits
        loss = cross_entropy(
            logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        torch.autograd.backward(loss)
        optimizer.accumulate()
        optimizer.step(max_grad_norm=1.0)
        if on_step(step, loss.item()):
            break
    model.to(dtype)


def _set_lr(optimizer: MasterAdamW, config: PretrainConfig, step: int) -> None:
    """Linear warm-up over the first tenth, then linear decay to zero."""
    progress = step / config.steps
    scale = min(progress / 0.1, (1 - progress) / 0.9 + 1e-3)
    for group in optimizer.adamw.param_groups:
        group["lr"] = config.lr * scale


def _batches(
    tokenizer: PreTrainedTokenizerBase, problems: list[Problem], config: PretrainConfig, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    rng = random.Random(seed)
    encode = cache(partial(tokenizer.encode, add_special_tokens=False))
    encoded_prompt = cache(partial(encode_prompt, tokenizer))
    for step in range(config.steps):
        mixed = step >= config.steps - config.mixed_steps
        worked_fraction = config.worked_fraction if mixed else 1.0
        rows = []
        for problem in rng.choices(problems, k=config.batch_size):
            worked = rng.random() < worked_fraction
            response = problem.worked if worked else problem.direct
            prompt_ids = encoded_prompt(problem)
            response_ids = [*encode(response), tokenizer.eos_token_id]
            rows.append((prompt_ids + response_ids, [IGNORED] * len(prompt_ids) + response_ids))
        yield _pad_right([ids for ids, _ in rows], 0), _pad_right([x for _, x in rows], IGNORED)


def _pad_right(rows: list[list[int]], value: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])
