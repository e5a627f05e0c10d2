"""`python -m experiments.base`: makes the base checkpoint that all runs of a model start from."""

import argparse
import importlib.util
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from experiments.cli import run_cli
from experiments.schema import ROOT, GgufModel, HubModel, ScratchModel, Study, load_study
from qat_core.rl.supervised import pretrain
from qat_core.rl.tasks import make_problems
from qat_core.rl.tokenizer import character_tokenizer

BASE_SEED = 0
PROGRESS_LINES = 6


def make_base(study: Study, name: str, out: Path) -> None:
    """Writes the base checkpoint of a model and its manifest.

    Raises:
        ValueError: the study has no such model, or the model is not one to be made here.
    """
    if name not in study.models:
        raise ValueError(f"--model: {name} is not in the study; it has {', '.join(study.models)}")
    started = time.perf_counter()
    model, tokenizer, details = _build(study, name)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    details |= {
        "model": name,
        "source": study.models[name].model_dump(mode="json"),
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "wall_s": time.perf_counter() - started,
    }
    (partial / "manifest.json").write_text(json.dumps(details, indent=2) + "\n")
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


def _build(study: Study, name: str) -> tuple[PreTrainedModel, Tokenizer, dict[str, Any]]:
    """The model, its tokenizer, and what the manifest should know of the training."""
    source = study.models[name]
    if isinstance(source, HubModel):
        raise ValueError(f"models.{name}.kind: {source.kind} checkpoints are not made here")
    model, tokenizer = (
        _from_config(source) if isinstance(source, ScratchModel) else _from_gguf(name, source)
    )
    if source.pretrain is None:
        return model, tokenizer, {}
    num_steps = source.pretrain.steps
    losses: list[float] = []

    def on_step(step: int, loss: float) -> None:
        losses.append(loss)
        if step % max(1, num_steps // PROGRESS_LINES) == 0 or step == num_steps:
            print(f"base {name}  step {step}/{num_steps}  loss {loss:.3f}", flush=True)

    problems = make_problems(study.task, "train")
    pretrain(model.to(study.device), tokenizer, problems, source.pretrain, BASE_SEED, on_step)
    return model, tokenizer, {"final_loss": losses[-1], "seed": BASE_SEED}


def _from_config(source: ScratchModel) -> tuple[PreTrainedModel, Tokenizer]:
    torch.manual_seed(BASE_SEED)
    config = AutoConfig.from_pretrained(ROOT / source.config)
    tokenizer = character_tokenizer()
    if config.vocab_size != len(tokenizer):
        raise ValueError(
            f"{source.config}: vocab_size: {config.vocab_size} differs from the tokenizer's "
            f"{len(tokenizer)}; unused tokens would show as a false KL, so set it to that"
        )
    config.bos_token_id, config.eos_token_id = None, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), tokenizer


def _from_gguf(name: str, source: GgufModel) -> tuple[PreTrainedModel, Tokenizer]:
    spec = importlib.util.find_spec(source.package)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"models.{name}.package: {source.package} is not installed; `make run STUDY=...` "
            "installs it, or see requirements/"
        )
    folder = Path(spec.origin).parent
    if not (folder / source.file).is_file():
        raise ValueError(f"models.{name}.file: no {source.file} in package {source.package}")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=source.file)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=source.file, dtype=torch.bfloat16
    )
    # transformers reads SmolLM2's special tokens off by one and finds no padding token
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    return model, tokenizer


def main() -> None:
    """Parses the command line and makes one base checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", type=Path, required=True, help="study file")
    parser.add_argument("--model", required=True, help="name of a model of the study")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    args = parser.parse_args()
    make_base(load_study(args.study), args.model, args.out)


if __name__ == "__main__":
    run_cli(main)
