"""What a config.json says about a model's weights, from a copy of the model without memory."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from qat_core.checkpoint.shards import Shards, read_json
from qat_core.weights.hub_names import HubNames, require_copy

NAMED_CLASSES = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification")


def meta_model(folder: Path) -> nn.Module:
    """The folder's model on the meta device, in BF16, not quantized.

    Raises:
        ValueError: config.json is missing, invalid, or of an architecture that is not known.
    """
    model_type = read_json(folder / "config.json").get("model_type")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        return meta_copy(config)
    except Exception as error:  # whatever a value that transformers does not check leads to
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{folder / 'config.json'}: model_type {model_type}: {reason}") from error


def meta_copy(config: Any) -> nn.Module:
    """A model of this configuration on the meta device, in BF16: a language model, or a classifier.

    Raises:
        ValueError: transformers has no such model.
    """
    name = (getattr(config, "architectures", None) or [""])[0]
    named = getattr(transformers, name, None) if name.endswith(NAMED_CLASSES) else None
    with torch.device("meta"):
        if named is not None and isinstance(config, named.config_class):
            model: nn.Module = named._from_config(config, dtype=torch.bfloat16)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def require_loadable(model: nn.Module, stored: Mapping[str, Tensor], source: str) -> None:
    """ValueError unless transformers' own loader finds in these tensors just what the model needs.

    They are unpacked, under the hub's names, on the meta device, without tied copies.
    """
    assert isinstance(model, PreTrainedModel)
    with quiet():
        try:
            _, found = type(model).from_pretrained(
                None,
                config=model.config,
                state_dict=dict(stored),
                dtype=torch.bfloat16,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{source}: transformers cannot load it: {reason}") from error
    require_nothing_left(found, source)


def require_nothing_left(found: Mapping[str, Any], source: str) -> None:
    """ValueError if `from_pretrained` fills weights at random, or reads tensors into none."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, found[kind])):
            what = kind.replace("_", " ")
            raise ValueError(f"{source}: transformers finds {what}: {', '.join(names[:3])}")


def without_tied_copies(names: HubNames, shards: Shards, source: str) -> dict[str, Tensor]:
    """Stored tensors, tied weights under the first of their names, whichever files have.

    Raises:
        ValueError: another of these has other values than the first, as a merged fine-tune may.
    """
    stored = shards.described
    for second, first in names.tied.items():
        if second in stored and first in stored:
            require_copy(shards.read(second), shards.read(first), second, first, source)
        elif second in stored:  # as XLM-RoBERTa's, whose head comes first
            shards.rename(second, first)
    return {name: tensor for name, tensor in stored.items() if name not in names.tied}


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, transformers shows no progress and does not report what it loads."""
    verbosity, bar = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bar:
            transformers_logging.enable_progress_bar()
