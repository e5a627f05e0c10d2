"""The base checkpoint that all runs of a model share."""

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from experiments.base.gguf import load_gguf
from experiments.base.hub_checkpoint import link_checkpoint
from experiments.base.sampled_accuracy import ASKED, ASKED_EVERY, sampled_accuracy
from experiments.rl.config import PretrainConfig
from experiments.rl.prompts import encode_prompt
from experiments.rl.supervised import pretrain
from experiments.rl.tasks import GENERATED_TASKS, Problem, make_problems
from experiments.rl.tokenizer import character_tokenizer
from experiments.runs.inputs import base_digest, require_prompts_fit
from experiments.runs.manifest import MANIFEST
from experiments.runs.provenance import digest_file
from experiments.study.load import load_study
from experiments.study.model_config import read_model_config
from experiments.study.models import HubModel, ScratchModel
from experiments.study.schema import ROOT, Base, Study
from experiments.support.folders import require_replaceable, sole_process
from experiments.support.gpu_locks import reserved_devices
from experiments.support.json_files import write_json
from qat_core.rollout.engine import require_known

PROGRESS_LINES = 6


def make_base(study: Study, name: str, out: Path) -> None:
    """Writes the base checkpoint of a model and its manifest."""
    if name not in study.bases:
        raise ValueError(f"--model: {name} is not in the study; it has {', '.join(study.bases)}")
    require_replaceable(out)
    with sole_process(out.with_name(out.name + ".lock"), out, "makes"):
        partial = out.with_name(out.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            _write_base(study, name, partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(out, ignore_errors=True)
        partial.rename(out)


def _write_base(study: Study, name: str, folder: Path) -> None:
    started, base = time.perf_counter(), study.bases[name]
    source = study.models[base.model]
    if isinstance(source, HubModel):
        details = link_checkpoint(base.model, source, folder)
        if study.task.name in GENERATED_TASKS:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            config = read_config(folder / "config.json")
            _, details["longest_prompt_tokens"] = fitting_problems(study, tokenizer, config)
    else:
        with reserved_devices(study.device, 1, study.gpu_memory_gib):
            details = _make(study, base, folder)
    weights = sorted(folder.glob("*.safetensors"))
    details |= {"weight_bytes": sum(map(_tensor_bytes, weights))}
    details |= {"wall_s": time.perf_counter() - started}
    write_manifest(study, name, folder, weights, details)


def write_manifest(
    study: Study, name: str, folder: Path, weights: list[Path], details: dict[str, Any]
) -> None:
    """Describes a base; `weights` are all files of the folder that decide them."""
    model, others = study.bases[name].model, sorted(set(folder.iterdir()) - set(weights))
    described = {
        "model": model,
        "source": study.models[model].model_dump(mode="json"),
        "settings": base_digest(study, name),
        "weights": {path.name: digest_file(path) for path in weights},
        "files": {path.name: digest_file(path) for path in others},
    }
    write_json(folder / MANIFEST, described | details)


def _tensor_bytes(file: Path) -> int:
    """All of a safetensors file but its header, whose length is in its first 8 bytes."""
    with file.open("rb") as content:
        header_bytes = int.from_bytes(content.read(8), "little")
    return file.stat().st_size - 8 - header_bytes


def _make(study: Study, base: Base, folder: Path) -> dict[str, Any]:
    """Writes model and tokenizer; returns what the manifest should know of them."""
    source = study.models[base.model]
    assert not isinstance(source, HubModel)
    if isinstance(source, ScratchModel):
        model, tokenizer = _from_config(source, study.device, base.seed)
    else:
        model, tokenizer = load_gguf(base.model, source)
    problems, longest = fitting_problems(study, tokenizer, model.config)
    details: dict[str, Any] = {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "longest_prompt_tokens": longest,
    }
    if source.pretrain is not None:
        details |= _pretrain(study, base, source.pretrain, model, tokenizer, problems)
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{folder}: not written ({error}); free disk space, or allow writing there"
        ) from error
    return details


def fitting_problems(
    study: Study, tokenizer: Tokenizer, config: PretrainedConfig
) -> tuple[list[Problem], int]:
    """The problems to train on, if the task makes them, and the tokens of the longest prompt."""
    problems = make_problems(study.task, "train") if study.task.name in GENERATED_TASKS else []
    prompts = [encode_prompt(tokenizer, problem) for problem in problems]
    longest = max(map(len, prompts), default=0)
    require_prompts_fit(longest, study)
    if prompts:
        require_known(prompts, config.get_text_config().vocab_size)
    return problems, longest


def _pretrain(
    study: Study,
    base: Base,
    config: PretrainConfig,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    problems: list[Problem],
) -> dict[str, Any]:
    losses: list[float] = []
    details: dict[str, Any] = {"seed": base.seed}
    wanted, limit = config.stop_accuracy, study.rl.rollout.max_response_tokens

    def on_step(step: int, loss: float) -> bool:
        losses.append(loss)
        if step % max(1, config.steps // PROGRESS_LINES) == 0 or step == config.steps:
            print(f"base {base.model}  step {step}/{config.steps}  loss {loss:.3f}", flush=True)
        if wanted is None or (step % ASKED_EVERY and step < config.steps):
            return False
        accuracy = sampled_accuracy(model, tokenizer, study.task, problems[:ASKED], limit)
        print(f"base {base.model}  step {step}  accuracy {accuracy:.3f}", flush=True)
        details.update(steps=step, accuracy=accuracy)
        return accuracy >= wanted

    pretrain(model.to(study.device), tokenizer, problems, config, base.seed, on_step)
    if wanted is not None and details["accuracy"] < wanted:
        raise ValueError(
            f"models.{base.model}.pretrain.stop_accuracy: {wanted} not reached in {config.steps} "
            f"steps, but {details['accuracy']:.3f}; raise steps or change lr"
        )
    return details | {"final_loss": losses[-1]}


def _from_config(source: ScratchModel, device: str, seed: int) -> tuple[PreTrainedModel, Tokenizer]:
    torch.manual_seed(seed)
    config, tokenizer = shape_of(source)
    with torch.device(device):  # billions of random weights take minutes on a CPU
        return build_model(ROOT / source.config, config), tokenizer


def shape_of(source: ScratchModel) -> tuple[PretrainedConfig, Tokenizer]:
    """A model's configuration, and the tokenizer that goes with it."""
    path = ROOT / source.config
    read_model_config(path, "correct it, or name another file")
    config = read_config(path)
    # the engine samples from the tokenizer's tokens alone: ids without one would show as a false KL
    tokenizer = character_tokenizer(config.vocab_size)
    if config.vocab_size < len(tokenizer):
        raise ValueError(
            f"{source.config}: vocab_size: {config.vocab_size} is less than the tokenizer's "
            f"{len(tokenizer)}; raise it to that"
        )
    config.bos_token_id, config.eos_token_id = None, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    return config, tokenizer


def read_config(path: Path) -> PretrainedConfig:
    """A config.json as transformers reads it; ValueError if it refuses."""
    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:  # of keys that only transformers knows
        raise _refused(path, error) from None


def build_model(path: Path, config: PretrainedConfig) -> PreTrainedModel:
    """A BF16 model with random weights; ValueError that names the config.json if it is refused."""
    try:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:
        raise _refused(path, error) from None


def _refused(path: Path, error: Exception) -> ValueError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return ValueError(f"{path}: transformers refuses it ({reason}); correct it")


def main(args: argparse.Namespace) -> None:
    """Makes one base checkpoint."""
    make_base(load_study(args.study), args.model, args.out)
