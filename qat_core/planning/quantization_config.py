"""What config.json says of packed weights: their format, and which modules stay in BF16.

compressed-tensors and ModelOpt each have a form of their own; both are written and read here.
"""

import re
from collections.abc import Sequence
from typing import Any

from qat_core.options import BLOCK_SIZE, CheckpointFormat
from qat_core.planning.recipe import REGEX_PREFIX

# Keys that are looked at, or say nothing that engines compute with. Others have to be empty:
# rotations (`transform_config`), an FP8 KV cache (`kv_cache_scheme`), a second list of modules.
_KNOWN = {"quant_method", "quant_algo", "group_size", "format", "config_groups", "ignore"}
_KNOWN |= {"quantization_status", "version", "global_compression_ratio", "producer"}


def quantization_config(kind: CheckpointFormat, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of config.json; `ignored` are the linear modules left in BF16."""
    if kind == "modelopt":
        return {
            "quant_method": "modelopt",
            "quant_algo": "W4A16_NVFP4",
            "group_size": BLOCK_SIZE,
            "ignore": list(ignored),
        }
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": BLOCK_SIZE,
        "symmetric": True,
        "dynamic": False,
        "observer": "minmax",
    }
    group = {
        "format": "nvfp4-pack-quantized",
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
    }


def format_of(declared: Any, where: str) -> tuple[CheckpointFormat, list[str]]:
    """Format and ignored modules of a `quantization_config`; ValueError if it is not NVFP4."""
    if not isinstance(declared, dict):
        raise ValueError(f"{where}: {declared!r}: needs to be a mapping")
    ignored = declared.get("ignore", [])
    if not (isinstance(ignored, list) and all(isinstance(each, str) for each in ignored)):
        raise ValueError(f"{where}.ignore: {ignored!r}: needs to be a list of module names")
    for each in filter(is_regex, ignored):
        try:
            re.compile(each.removeprefix(REGEX_PREFIX))
        except re.error as error:
            raise ValueError(f"{where}.ignore: {each!r}: not a regex: {error}") from None
    for key in declared.keys() - _KNOWN:
        if declared[key]:
            raise ValueError(f"{where}.{key}: {declared[key]!r}: not read here: it has to be empty")
    if declared.get("quant_method") == "modelopt" and declared.get("quant_algo") == "W4A16_NVFP4":
        _require(declared, {"group_size": BLOCK_SIZE}, where)
        return "modelopt", ignored
    if declared.get("format") == "nvfp4-pack-quantized":
        _require(declared, {"quant_method": "compressed-tensors"}, where)
        _require_weight_only(declared.get("config_groups"), f"{where}.config_groups")
        return "compressed-tensors", ignored
    raise ValueError(f"{where}: not NVFP4 of compressed-tensors or ModelOpt")


def hf_quant_config(ignored: Sequence[str]) -> dict[str, Any]:
    """Content of ModelOpt's hf_quant_config.json."""
    algorithm = {
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": BLOCK_SIZE,
        "exclude_modules": list(ignored),
    }
    return {"producer": {"name": "qat_core"}, "quantization": algorithm}


def is_regex(pattern: str) -> bool:
    """Whether an ignored name is a pattern."""
    return pattern.startswith(REGEX_PREFIX)


def _require_weight_only(groups: Any, where: str) -> None:
    """ValueError unless all linears have 4-bit weights in blocks of 16 and 16-bit activations."""
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ValueError(f"{where}: needs to be one group, for all linears")
    ((name, group),) = groups.items()
    where = f"{where}.{name}"
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise ValueError(f"{where}.weights: missing")
    own = {"targets": ["Linear"], "input_activations": None, "output_activations": None}
    _require(group, own, where)
    needed = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": BLOCK_SIZE}
    _require(group["weights"], needed | {"symmetric": True, "dynamic": False}, f"{where}.weights")


def _require(found: dict[str, Any], needed: dict[str, Any], where: str) -> None:
    for key, value in needed.items():
        if found.get(key) != value:
            raise ValueError(f"{where}.{key}: {found.get(key)!r}: only {value!r} is read here")
