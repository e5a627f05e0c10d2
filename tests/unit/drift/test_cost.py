import json
from pathlib import Path

import pytest

from qat_core.drift.log import KL_EVERY
from qat_core.drift.monitor import BLOCKS_PER_WEIGHT

RECORD = Path(__file__).parents[3] / "experiments" / "records" / "benchmarks" / "drift_cpu.json"
MODELS = json.loads(RECORD.read_text())["models"]


@pytest.mark.parametrize("model", MODELS)
def test_the_record_is_of_the_present_settings_and_below_a_hundredth_of_a_step(model: str) -> None:
    figures = MODELS[model]
    settings = figures["blocks_per_weight"], figures["layer_kl_every"]
    assert settings == (BLOCKS_PER_WEIGHT, KL_EVERY), "measure again"
    assert figures["all_of_step"] < 0.01
