"""verl's FSDP2 engine for bases without a file of weights, which `experiments.base.seeded` writes.

verl's processes import this where `actor_rollout_ref.model.external_lib` names it. A model whose
config.json has a seed is then built without memory, and its ranks draw their weights; any other one
is loaded as ever.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import verl.utils.model
from accelerate import init_empty_weights
from torch import Tensor
from transformers import PretrainedConfig
from verl.utils.device import get_device_id
from verl.workers.engine.fsdp import transformer_impl

from experiments.verl.seeded_weights import SEED, draw_weights

_auto_class = verl.utils.model.get_hf_auto_model_class
_load_full_state = transformer_impl.fsdp2_load_full_state_dict


def _class_or_builder(hf_config: PretrainedConfig) -> Any:
    """verl asks a configuration for the class of its model, and that for the model."""
    found = _auto_class(hf_config)
    if not hasattr(hf_config, SEED):
        return found
    return SimpleNamespace(from_pretrained=partial(_build_empty, found))


def _build_empty(auto_class: Any, *, config: PretrainedConfig, torch_dtype: Any, **_: Any) -> Any:
    with init_empty_weights():
        return auto_class.from_config(config, dtype=torch_dtype)


def _load_or_draw(
    model: Any, full_state: dict[str, Tensor], device_mesh: Any = None, cpu_offload: Any = None
) -> None:
    """In the place of the first rank's broadcast."""
    seed = getattr(model.config, SEED, None)
    if seed is None:
        _load_full_state(model, full_state, device_mesh, cpu_offload)
        return
    if cpu_offload is not None:
        raise ValueError(f"config.json: {SEED}: not with a reference policy; make a whole base")
    draw_weights(model, seed, model.config.initializer_range, torch.device(get_device_id()))


verl.utils.model.get_hf_auto_model_class = _class_or_builder
transformer_impl.fsdp2_load_full_state_dict = _load_or_draw
