"""verl's quantization JSON for vLLM: all but its `ignore` has to be what is served anyway."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from qat_core.planning.quantization_config import quantization_config
from qat_core.verl.rules import QAT


class _Group(BaseModel):
    targets: Any = None
    input_activations: Any = None
    weights: dict[str, Any]


class _Declared(BaseModel):
    """verl's JSON for vLLM, as far as it is read."""

    quant_method: Any = None
    format: Any = None
    config_groups: dict[str, _Group] = {}
    ignore: list[str] | None = None


def patterns_of(path: Any) -> list[str]:
    """What the file leaves in BF16.

    Raises:
        ValueError: it cannot be read, or describes another quantization.
    """
    where = f"{QAT}.quantization_config_path: {path}"
    if not isinstance(path, str):
        raise ValueError(f"{where}: give a path, or null")
    try:
        declared = _Declared.model_validate_json(Path(path).read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        found = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        raise ValueError(f"{where}: {found}; give verl's quantization JSON, or null") from None
    except (OSError, ValueError) as error:  # a ValueError of the path
        raise ValueError(f"{where}: {error}; give verl's quantization JSON, or null") from None
    groups = list(declared.config_groups.values())
    served = quantization_config("compressed-tensors", [])
    weights = served["config_groups"]["group_0"]["weights"]
    _require_equal(f"{where}: quant_method", declared.quant_method, served["quant_method"])
    _require_equal(f"{where}: format", declared.format, served["format"])
    if len(groups) != 1:
        raise ValueError(f"{where}: config_groups: has {len(groups)} groups; give one")
    _require_equal(f"{where}: targets", groups[0].targets, ["Linear"])
    if groups[0].input_activations is not None:
        raise ValueError(f"{where}: input_activations: only W4A16 is supported; give null")
    for key in ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic"):
        _require_equal(f"{where}: weights.{key}", groups[0].weights.get(key), weights[key])
    return declared.ignore or []


def _require_equal(where: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise ValueError(f"{where}: {found} is not NVFP4 W4A16; give {expected}")
