"""vLLM's own arguments go around no rule for verl's keys."""

import re
import sys

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from qat_core.verl.engine_arguments import _fixes, require_arguments
from qat_core.verl.rules import VLLM
from tests.verl_configurations import ROLLOUT
from tests.workflow.programs import run

# in a process of its own, as vLLM's import changes what other tests see
LIST_NAMES = """
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
print(*(o[2:] for a in parser._actions for o in a.option_strings if o.startswith("--")))
"""
VERLS = {
    "dtype=float16": f"{ROLLOUT}.dtype",
    "load_format=auto": f"{ROLLOUT}.load_format",
    "pipeline_parallel_size=2": f"{ROLLOUT}.pipeline_model_parallel_size",
    "tensor_parallel_size=2": f"{ROLLOUT}.tensor_model_parallel_size",
    "tensor-parallel-size=2": f"{ROLLOUT}.tensor_model_parallel_size",
    "data_parallel_size=2": f"{ROLLOUT}.data_parallel_size",
    "logprobs_mode=raw_logits": f"{ROLLOUT}.logprobs_mode",
    "enable_expert_parallel=true": f"{ROLLOUT}.expert_parallel_size",
    "no_enable_prefix_caching=true": f"{ROLLOUT}.enable_prefix_caching",
    "model=/x": "actor_rollout_ref.model.path",
    "override_generation_config=x": f"{ROLLOUT}.temperature, top_p and top_k",
}
REFUSED = {
    "enable_lora=true": "LoRA adapters are not synced; remove the key",
    "speculative-config={method: eagle3}": "write speculative_config",
    "quantization_config={linear: fp8}": "verl's keys say what is quantized; remove the key",
    "kv_cache_dtype=fp8": "never tried with these syncs; remove the key",
    "calculate_kv_scales=true": "never tried with these syncs; remove the key",
    "linear-backend=marlin": "write linear_backend",
    "enable_eplb=true": "never tried with these syncs; remove the key",
    "cpu_offload_gb=4": "never tried with these syncs; remove the key",
    "model_impl=transformers": "never tried with these syncs; remove the key",
    "offload_group_size=2": "never tried with these syncs; remove the key",
    "kernel_config={moe_backend: triton}": "never tried with these syncs; remove the key",
    "config=more.yaml": "a file's keys are not checked, write them here; remove the key",
    "spec_method=ngram": "draft models are not synced; remove the key",
    "spec-model=/x": "draft models are not synced; remove the key",
    "pipeline_parallel=2": "short for pipeline_parallel_size to vLLM; write its name in full",
    "no-enable-prefix=true": "short for enable_prefix_caching to vLLM; write its name in full",
    **dict.fromkeys(
        (
            "language_model_only=--quantization=fp8",
            "served_model_name=[a, --quantization, fp8]",
            "served_model_name=[a, -q, fp8]",
        ),
        "a text with a hyphen first is another argument to vLLM; write that as a key",
    ),
    "kernel-config.moe_backend=triton": "no name; write a key of a section into the section",
}


def with_argument(argument: str) -> DictConfig:
    key, _, value = argument.partition("=")
    return OmegaConf.create(
        {
            "actor_rollout_ref": {
                "rollout": {"engine_kwargs": {"vllm": {key: yaml.safe_load(value)}}}
            }
        }
    )


@pytest.mark.verl_table(
    "arguments of vLLM's in `engine_kwargs.vllm` that verl has keys for",
    "refused, with `+nvfp4=off` too",
)
@pytest.mark.parametrize(("argument", "key"), VERLS.items())
def test_an_argument_that_verl_has_a_key_for_is_refused(argument: str, key: str) -> None:
    name = re.escape(f"{VLLM}.{argument.partition('=')[0]}: ")
    fix = re.escape(f": verl has a key for it; remove it, and set {key}")
    with pytest.raises(ValueError, match=f"{name}.*{fix}$"):
        require_arguments(with_argument(argument))


@pytest.mark.verl_table(
    "`enable_eplb`, `cpu_offload_gb`, `kv_cache_dtype` in `engine_kwargs.vllm`",
    "refused, with `+nvfp4=off` too",
    cases=["enable_eplb=true", "cpu_offload_gb=4", "kv_cache_dtype=fp8"],
)
@pytest.mark.verl_table(
    "`config`, `kernel_config`, shortened names in `engine_kwargs.vllm`",
    "refused, with `+nvfp4=off` too",
    cases=["config=more.yaml", "kernel_config={moe_backend: triton}", "pipeline_parallel=2"],
)
@pytest.mark.parametrize(("argument", "fix"), REFUSED.items())
def test_an_argument_that_syncs_do_not_stand_is_refused(argument: str, fix: str) -> None:
    name = re.escape(f"{VLLM}.{argument.partition('=')[0]}: ")
    with pytest.raises(ValueError, match=f"{name}.*: {re.escape(fix)}$"):
        require_arguments(with_argument(argument))


@pytest.mark.long
def test_no_full_name_of_vllms_counts_as_short_for_another() -> None:
    """Of all arguments of an engine and of `vllm serve`, which verl calls."""
    pytest.importorskip("vllm", reason="needs requirements/engines.txt")
    done = run([sys.executable, "-W", "ignore", "-c", LIST_NAMES])
    assert done.returncode == 0, done.stderr
    names = done.stdout.splitlines()[-1].split()
    assert {"pipeline-parallel-size", "config", "spec-method"} <= set(names)
    short = [name for name in names if any("short for" in fix for fix in _fixes(name, "x"))]
    assert short == []


@pytest.mark.parametrize(
    "argument",
    [
        *("kv_cache_memory_bytes=268435456", "distributed_executor_backend=uni"),
        *("compilation_config={mode: 0}", "kv_cache_dtype=auto", "enable_lora=false", "dtype=null"),
        *("enable_eplb=false", "cpu_offload_gb=0", "offload_backend=auto"),
        *("kv_cache_metrics_sample=-1", "served_model_name=[a-b, c]"),
        *("disable-log-requests=true", "hf_overrides={max_position_embeddings: 64}"),
    ],
)
def test_other_arguments_are_vllms(argument: str) -> None:
    require_arguments(with_argument(argument))
