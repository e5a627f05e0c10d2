"""A pretrained model in a GGUF file that an installed package ships."""

import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from experiments.study.models import GgufModel
from qat_core.checkpoint.architecture import require_nothing_left


def load_gguf(name: str, source: GgufModel) -> tuple[PreTrainedModel, Tokenizer]:
    """Model `name` in BF16, and its tokenizer."""
    spec = importlib.util.find_spec(source.package)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"models.{name}.package: {source.package} is not installed; `make run STUDY=...` "
            "installs it, or see requirements/"
        )
    file = Path(spec.origin).parent / source.file
    if not file.is_file():
        raise ValueError(f"models.{name}.file: no {source.file} in package {source.package}")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model, found = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, output_loading_info=True
    )
    require_nothing_left(found, str(file))
    # transformers reads SmolLM2's special tokens off by one and finds no padding token
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    return model, tokenizer
