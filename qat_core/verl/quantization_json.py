"""verl's quantization JSON for vLLM: all but its `ignore` has to be what is served anyway."""

import json
from pathlib import Path
from typing import Any

from qat_core.planning.quantization_config import format_of
from qat_core.verl.rules import QAT


def patterns_of(path: Any) -> list[str]:
    """What the file leaves in BF16; ValueError if it is not readable, or not NVFP4 W4A16."""
    where = f"{QAT}.quantization_config_path: {path}"
    if not isinstance(path, str):
        raise ValueError(f"{where}: give a path, or null")
    try:
        declared = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:  # a ValueError of JSON or of the path
        raise ValueError(f"{where}: {error}; give verl's quantization JSON, or null") from None
    kind, ignored = format_of(declared, where)
    if kind != "compressed-tensors":
        raise ValueError(f"{where}: quant_method: {kind}: give compressed-tensors")
    return ignored
