"""Variables of the environment that tell vLLM's processes what to serve."""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

# of vLLM, by section, for exact rollouts; by name, as another version's default may have other bits
EXACT_SETTINGS: dict[str, dict[str, Any]] = {
    # No torch.compile, which would go past batch-invariant norms. Graphs of prefill too: its many
    # small kernels would wait for the CPU.
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"},
    "attention_config": {"backend": "FLASH_ATTN", "flash_attn_version": 3},
}
LINEAR_VARIABLE = "QAT_CORE_LINEAR_KERNEL"
EXPERTS_VARIABLE = "QAT_CORE_EXPERTS_KERNEL"
IN_PLACE_VARIABLE = "QAT_CORE_IN_PLACE_SYNC"  # see `in_place/sync.py`
EXACT_VARIABLE = "QAT_CORE_EXACT"  # see `exact/`; set by `VllmEngine` and by `+exact=on`
# of rollouts, for trainers: how many, and whether they share out experts; set by `+exact=on`
EXACT_RANKS_VARIABLE = "QAT_CORE_EXACT_RANKS"
EXACT_EXPERT_PARALLEL_VARIABLE = "QAT_CORE_EXACT_EXPERT_PARALLEL"
EXACT_VARIABLES = (EXACT_VARIABLE, EXACT_RANKS_VARIABLE, EXACT_EXPERT_PARALLEL_VARIABLE)
COVERAGE_VARIABLE = "QAT_CORE_COVERAGE"  # where verl's engine writes what it packs
MARLIN, MARLIN_UNPACK, HUMMING = "marlin", "marlin-unpack", "humming"
VLLM_HUMMING = "vllm-humming"  # with tiles of its own choice
VLLM_HUMMING_INVARIANT = "vllm-humming-invariant"  # each sum in one block of threads
OWN_HUMMINGS = (VLLM_HUMMING, VLLM_HUMMING_INVARIANT)
KERNELS = {  # the first is what `VllmEngine` asks for unless the variable names another
    LINEAR_VARIABLE: (MARLIN, MARLIN_UNPACK, HUMMING, *OWN_HUMMINGS),
    EXPERTS_VARIABLE: (MARLIN, HUMMING, *OWN_HUMMINGS),
}


def require_known_variables(environment: Mapping[str, str] = os.environ) -> None:
    """For all who start vLLM, also where it runs in another process, and later.

    Raises:
        ValueError: with a line for each variable `QAT_CORE_*` that nothing reads, or whose value is
            none of its own.
    """
    known = (*KERNELS, IN_PLACE_VARIABLE, *EXACT_VARIABLES, COVERAGE_VARIABLE)
    others = [it for it in environment if it.startswith("QAT_CORE_") and it not in known]
    refused = [f"{it}: nothing reads it; the variables are {', '.join(known)}" for it in others]
    checks: list[Callable[..., object]] = [partial(kernel_named_by, it) for it in KERNELS]
    for check in (*checks, is_in_place_allowed, is_exact):
        try:
            check(environment)
        except ValueError as error:
            refused.append(str(error))
    if refused:
        raise ValueError("\n".join(refused))


def require_no_kernels(environment: Mapping[str, str]) -> None:
    """ValueError where an environment names kernels beside exact rollouts."""
    require_unset(KERNELS, environment, "exact rollouts choose kernels themselves")


def require_unset(names: Iterable[str], environment: Mapping[str, str], reason: str) -> None:
    """ValueError for a variable that an environment has."""
    for name in names:
        if environment.get(name):
            raise ValueError(f"{name}: {reason}; unset it")


def kernels_of_plugin(environment: Mapping[str, str]) -> list[str]:
    """What an environment names that vLLM serves only where it has loaded this package's plugin."""
    kernels = {it: environment.get(it) or MARLIN for it in KERNELS}
    return [f"{it}={kernel}" for it, kernel in kernels.items() if kernel != MARLIN]


def is_in_place_allowed(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether weight syncs may write packed weights past vLLM's reload, as they do by default."""
    return _switch(IN_PLACE_VARIABLE, "1", environment)


def is_exact(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether rollouts are to have bits that a trainer can compute too."""
    return _switch(EXACT_VARIABLE, "0", environment)


def _switch(variable: str, default: str, environment: Mapping[str, str]) -> bool:
    """ValueError for another value than 1 or 0."""
    asked = environment.get(variable) or default
    if asked not in ("0", "1"):
        raise ValueError(f"{variable}={asked}: use 1 or 0, or unset it for {default}")
    return asked == "1"


def kernel_named_by(variable: str, environment: Mapping[str, str] = os.environ) -> str:
    """The kernel that an environment names; ValueError if there is none of that name."""
    default, *others = KERNELS[variable]
    name = environment.get(variable) or default
    if name not in KERNELS[variable]:
        named = ", ".join(reversed(others))
        raise ValueError(f"{variable}={name}: use {named}, or {default}, the default")
    return name
