"""What `+exact=on` implies, and what of a verl configuration it refuses, before Ray starts."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from qat_core.rollout.vllm.switches import (
    EXACT_EXPERT_PARALLEL_VARIABLE,
    EXACT_RANKS_VARIABLE,
    EXACT_SETTINGS,
    EXACT_VARIABLE,
    EXACT_VARIABLES,
    require_no_kernels,
    require_unset,
)
from qat_core.verl.processes import ENVIRONMENT
from qat_core.verl.rules import (
    APART,
    MODEL,
    PARAM_DTYPE,
    QAT,
    REFERENCE,
    REPLAY_MODE,
    ROLLOUT,
    VLLM,
    Rule,
    is_count,
    is_not_set,
    is_section,
    one_of,
    require,
    synchronous,
    together,
    unsplit,
)

KEY = "exact"
MODULE, COUNT_MODULE = "qat_core.verl.exact", "qat_core.verl.exact_count"
MODULES_VARIABLE = "VERL_USE_EXTERNAL_MODULES"
SETTINGS = {
    f"{VLLM}.{section}.{key}": value
    for section, keys in EXACT_SETTINGS.items()
    for key, value in keys.items()
}

TENSOR_PARALLEL = f"{ROLLOUT}.tensor_model_parallel_size"
EXPERT_PARALLEL = f"{ROLLOUT}.expert_parallel_size"
# `qat_core.exact.halves` adds as two ranks do
RANK_RULES = (
    Rule(TENSOR_PARALLEL, is_count, "use 1 or 2, as a number"),
    Rule(EXPERT_PARALLEL, lambda v: v is None or is_count(v), "use 1 or 2, as a number"),
    *(
        Rule(
            key,
            lambda v: not is_count(v) or v <= 2,
            "a sum of more than two has no one order; use 1 or 2",
        )
        for key in (TENSOR_PARALLEL, EXPERT_PARALLEL)
    ),
)
# trainers apart from their rollouts, which are refused, set it themselves
BYPASS_RULE = Rule(
    "algorithm.rollout_correction.bypass_mode", is_not_set, "nothing would be compared; use false"
)

RULES = (
    Rule("trainer.device", one_of("cuda", None), "exact kernels are those of a GPU; use cuda"),
    *synchronous("older weights have other bits"),
    Rule(f"{ROLLOUT}.calculate_log_probs", one_of(True), "nothing would be compared; use true"),
    Rule(f"{ROLLOUT}.temperature", one_of(1, 1.0), "proven at 1; use 1"),
    Rule(f"{ROLLOUT}.top_p", one_of(1, 1.0), "proven at 1; use 1"),
    Rule(f"{ROLLOUT}.top_k", one_of(-1), "proven without; use -1"),
    Rule(f"{ROLLOUT}.repetition_penalty", one_of(1, 1.0, None), "proven at 1; use 1"),
    Rule(
        f"{ROLLOUT}.logprobs_mode",
        one_of("processed_logprobs", None),
        "proven with processed_logprobs; remove the key",
    ),
    Rule(f"{ROLLOUT}.dtype", one_of("bfloat16"), "proven in bfloat16; use bfloat16"),
    Rule(f"{MODEL}.use_liger", is_not_set, "its kernels have other bits; use false"),
    Rule(f"{MODEL}.use_fused_kernels", is_not_set, "its kernels have other bits; use false"),
    Rule(f"{MODEL}.tiled_mlp.enabled", is_not_set, "not proven; use false"),
    Rule("actor_rollout_ref.actor.use_prefix_grouper", is_not_set, "not proven; use false"),
    Rule(f"{ROLLOUT}.multi_turn.enable", is_not_set, "not proven; use false"),
    Rule(
        f"{ROLLOUT}.agent.default_agent_loop",
        one_of(None, "single_turn_agent"),
        "not proven; use single_turn_agent",
    ),
    Rule(f"{VLLM}.attention_backend", is_not_set, "exact mode names its own; remove the key"),
    Rule(f"{VLLM}.decode_context_parallel_size", one_of(1, None), "not proven; use 1"),
    Rule(f"{QAT}.scale_policy", one_of("pow2", None), "not exact in BF16; use pow2"),
    Rule(f"{QAT}.train", one_of(True, None), "training would have other weights; use true"),
    Rule(REPLAY_MODE, one_of("disabled", None), "exact routes need no replay; remove the key"),
    # references compute exactly, too
    *(
        Rule(key, one_of(None, "bf16", "bfloat16"), "exact kernels compute in BF16; use bf16")
        for key in (PARAM_DTYPE, f"{REFERENCE}.mixed_precision.param_dtype")
    ),
    *unsplit("not proven", REFERENCE, "actor_rollout_ref.ref"),
    *(
        Rule(f"skip.{section}.enable", is_not_set, "older weights have other bits; use false")
        for section in ("rollout", "rollout_tq")
    ),
    *(
        Rule(key, is_not_set, "its engine would be set up as exact, too; use false")
        for key in ("reward.reward_model.enable", "distillation.enabled")
    ),
    *(
        Rule(f"{VLLM}.{section}", is_section, "a text; give a section, or remove the key")
        for section in EXACT_SETTINGS
    ),
    Rule(
        f"{VLLM}.compilation_config.custom_ops",
        is_not_set,
        "norms and SwiGLU of others have other bits; remove the key",
    ),
    Rule(
        f"{VLLM}.hf_overrides.max_position_embeddings",
        is_not_set,
        f"trainer and vLLM read one model; remove the key, and set {ROLLOUT}.max_model_len",
    ),
    *(
        Rule(key, one_of(value, None), f"proven with {value}; remove the key")
        for key, value in SETTINGS.items()
    ),
)


def complete_exact(config: DictConfig, environment: Mapping[str, str]) -> None:
    """Fills in what exact training and rollouts need; ValueError for what was never proven."""
    is_apart = any(OmegaConf.select(config, section) for section in APART)
    model = _model(config)
    together(
        lambda: require(config, RULES if is_apart else (*RULES, BYPASS_RULE)),
        lambda: require_no_kernels(environment),
        lambda: _require_model(model),
        lambda: _require_ranks(config, model),
    )
    tensor_parallel, expert_parallel = _ranks(config)
    others = OmegaConf.select(config, f"{ENVIRONMENT}.{MODULES_VARIABLE}")
    others = others or os.environ.get(MODULES_VARIABLE)
    variables = {
        EXACT_VARIABLE: "1",
        EXACT_RANKS_VARIABLE: str(tensor_parallel),
        EXACT_EXPERT_PARALLEL_VARIABLE: str(int(expert_parallel > 1)),
        MODULES_VARIABLE: ",".join(filter(None, [others, COUNT_MODULE])),
    }
    with open_dict(config):
        for name, value in variables.items():
            OmegaConf.update(config, f"{ENVIRONMENT}.{name}", value, force_add=True)
        for key, setting in SETTINGS.items():
            OmegaConf.update(config, key, setting, force_add=True)


def require_no_exact_variable(environment: Mapping[str, str]) -> None:
    """ValueError where the environment asks for what `+exact=on` alone sets up whole."""
    require_unset(EXACT_VARIABLES, environment, "+exact=on sets it")


def _model(config: DictConfig) -> Any:
    """Its configuration, None where it cannot be read here: workers refuse it then."""
    from qat_core.verl.actor_model import read_configs

    try:
        return read_configs(config)[1]
    except Exception:  # said by `describe_served`
        return None


def _require_model(model: Any) -> None:
    from qat_core.exact.model import require_exact

    if model is not None:
        with _named(f"{MODEL}.path", "train another model, or leave +exact=on out"):
            require_exact(model)


def _ranks(config: DictConfig) -> tuple[int, int]:
    """Tensor and expert parallel ones."""
    return OmegaConf.select(config, TENSOR_PARALLEL), OmegaConf.select(config, EXPERT_PARALLEL) or 1


def _require_ranks(config: DictConfig, model: Any) -> None:
    from qat_core.exact.model import Ranks, require_ranks

    require(config, RANK_RULES)
    tensor_parallel, expert_parallel = _ranks(config)
    if expert_parallel not in (1, tensor_parallel):
        raise ValueError(
            f"{EXPERT_PARALLEL}: {expert_parallel}: the ranks that share out experts are those of "
            f"{TENSOR_PARALLEL}, {tensor_parallel}; use the same for both, or 1 here"
        )
    if model is not None:
        with _named(EXPERT_PARALLEL if expert_parallel > 1 else TENSOR_PARALLEL):
            require_ranks(model, Ranks(tensor_parallel, expert_parallel > 1))


@contextmanager
def _named(key: str, fix: str | None = None) -> Iterator[None]:
    """Names the key, and the fix, in a ValueError about the model."""
    try:
        yield
    except ValueError as error:
        raise ValueError("; ".join(filter(None, (f"{key}: {error}", fix)))) from None
