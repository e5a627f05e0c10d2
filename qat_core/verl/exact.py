"""verl's FSDP2 engines compute exactly; imported in their processes, where `+exact=on` names it.

Models are made exact before they are sharded, log-probs of sampled tokens are vLLM's, and each sync
begins with the contract, which vLLM's worker compares with what it has.
"""

import os
from collections.abc import Iterator
from functools import wraps
from itertools import chain
from typing import Any

from torch import Tensor, nn
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from qat_core.exact import log_probs, make_exact
from qat_core.exact.contract import CONTRACT_NAME, needed, to_tensor
from qat_core.exact.model import Ranks, model_runner
from qat_core.rollout.vllm.switches import EXACT_EXPERT_PARALLEL_VARIABLE, EXACT_RANKS_VARIABLE
from qat_core.verl.engine import NvFp4Engine

_build_module = FSDPEngine._build_module


@wraps(_build_module)
def _build_exact_module(engine: Any) -> Any:
    module: nn.Module = _build_module(engine)
    if engine.model_config.model_type == "language_model":  # critics have nothing to agree with
        make_exact(module, _rollouts_ranks())
        runner, vocabulary = model_runner(module.config), _vocabulary(engine)

        def exact_log_probs(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
            return log_probs(logits, labels, runner, vocabulary)

        transformer_impl.logprobs_from_logits = exact_log_probs
    return module


def _vocabulary(engine: Any) -> int:
    """How many ids verl's vLLM samples from (`vllm_async_server.py`): those of the tokenizer."""
    return len(engine.model_config.tokenizer)


def _rollouts_ranks() -> Ranks:
    shares_out_experts = os.environ[EXACT_EXPERT_PARALLEL_VARIABLE] == "1"
    return Ranks(int(os.environ[EXACT_RANKS_VARIABLE]), shares_out_experts)


def _begin_with_contract(engine_class: Any) -> None:
    get_per_tensor_param = engine_class.get_per_tensor_param

    @wraps(get_per_tensor_param)
    def with_contract(engine: Any, *args: Any, **kwargs: Any) -> Any:
        stream, adapters = get_per_tensor_param(engine, *args, **kwargs)
        first = (CONTRACT_NAME, to_tensor(needed(engine.module, _vocabulary(engine))))
        tensors: Iterator[tuple[str, Tensor]] = chain([first], stream)
        return tensors, adapters

    engine_class.get_per_tensor_param = with_contract


FSDPEngine._build_module = _build_exact_module
_begin_with_contract(FSDPEngine)
_begin_with_contract(NvFp4Engine)
