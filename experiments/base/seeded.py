"""A base without a file of weights: each rank draws them from a seed (`verl.seeded_engine`).

Takes the place of `experiments.base make`, as results/base/MODEL, for models with random weights,
where writing and reading billions of them would take longer than the run. Their folder has
config.json and tokenizer alone, so that they can be trained, and not be evaluated.
"""

import argparse
import shutil
from pathlib import Path

from accelerate import init_empty_weights

from experiments.base.make import build_model, fitting_problems, shape_of, write_manifest
from experiments.study.load import load_study
from experiments.study.models import ScratchModel
from experiments.study.schema import ROOT, Study
from experiments.support.folders import require_replaceable
from experiments.verl.seeded_weights import SEED

BYTES_PER_WEIGHT = 2


def write_seeded_base(study: Study, name: str, out: Path, seed: int = 0) -> None:
    """Writes config.json, tokenizer and manifest into a folder, which is replaced."""
    source = study.models.get(name) if name in study.bases else None  # not one a seed
    if not isinstance(source, ScratchModel) or source.pretrain is not None:
        raise ValueError(f"--model: {name}: no model of the study with random weights")
    config, tokenizer = shape_of(source)
    require_replaceable(out)
    if config.tie_word_embeddings:
        raise ValueError(f"{source.config}: tie_word_embeddings: not supported here; use false")
    _, longest = fitting_problems(study, tokenizer, config)
    with init_empty_weights():
        model = build_model(ROOT / source.config, config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    setattr(config, SEED, seed)
    shutil.rmtree(out, ignore_errors=True)
    config.save_pretrained(out)
    tokenizer.save_pretrained(out)
    details = {
        "num_parameters": num_parameters,
        "longest_prompt_tokens": longest,
        "weight_bytes": BYTES_PER_WEIGHT * num_parameters,
    }
    write_manifest(study, name, out, [out / "config.json"], details)


def main(arguments: argparse.Namespace) -> None:
    """Writes one base."""
    write_seeded_base(load_study(arguments.study), arguments.model, arguments.out)
