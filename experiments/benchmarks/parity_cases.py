"""The models of the parity benchmark, and what they are asked."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from experiments.benchmarks.architectures import ARCHITECTURES, TINY
from experiments.benchmarks.random_model import write_random_checkpoint
from experiments.rl.prompts import encode_prompt
from experiments.rl.tasks import make_problems
from experiments.study.load import load_study

NUM_SEEDS = 3
SEQUENCES = {"cuda": 256, "cpu": 8}
MIN_TOKENS = {"cuda": 70_000, "cpu": 100}  # a seed


@dataclass(frozen=True)
class Case:
    """A model: `checkpoints` has one a seed, `questions` the prompts that are drawn from."""

    name: str
    checkpoints: tuple[Path, ...]
    questions: tuple[tuple[int, ...], ...]
    sequences: int
    new_tokens: int
    max_model_len: int
    min_tokens: int

    def prompts(self, seed: int, batch: int) -> list[list[int]]:
        """The prompts of one batch."""
        drawn = random.Random(f"{seed} {batch}").choices(self.questions, k=self.sequences)
        return [list(prompt) for prompt in drawn]


def random_case(name: str, folder: Path, device: str) -> Case:
    """Random weights of an architecture in `folder`, others for each seed; random prompts."""
    config = ARCHITECTURES[name] | (TINY if device == "cpu" else {})
    checkpoints = tuple(folder / str(seed) for seed in range(NUM_SEEDS))
    for seed, checkpoint in enumerate(checkpoints):
        write_random_checkpoint(config, checkpoint, seed, device)
    generator = torch.Generator().manual_seed(0)
    questions = torch.randint(5, config["vocab_size"], (1024, 8), generator=generator).tolist()
    return Case(
        name,
        checkpoints,
        tuple(map(tuple, questions)),
        SEQUENCES[device],
        new_tokens=288 if device == "cuda" else 16,
        max_model_len=320,
        min_tokens=MIN_TOKENS[device],
    )


def trained_case(name: str, _folder: Path, device: str) -> Case:
    """`STUDY:CHECKPOINT`: a trained model and the prompts of the study's task."""
    study_file, _, checkpoint = name.partition(":")
    study, tokenizer = load_study(Path(study_file)), AutoTokenizer.from_pretrained(checkpoint)
    problems = make_problems(study.task, "train")
    rollout = study.rl.rollout
    return Case(
        Path(checkpoint).name,
        NUM_SEEDS * (Path(checkpoint),),
        tuple(tuple(encode_prompt(tokenizer, problem)) for problem in problems),
        SEQUENCES[device],
        rollout.max_response_tokens,
        rollout.max_prompt_tokens + rollout.max_response_tokens,
        MIN_TOKENS[device],
    )
