"""An arm in a few numbers agrees with the claims about it."""

import pytest

from analysis.claims_table import read_table
from experiments.runs.summary import KL, KL_RATIO
from experiments.study.schema import ROOT

RECORDS = ROOT / "experiments" / "records"


@pytest.mark.parametrize("study", ["default-long", "smollm2"])
def test_k3_kl_and_its_interval_are_those_of_the_claim(study: str) -> None:
    table = read_table(RECORDS / study / "claims.json")
    arms = {(it.model, it.arm): it.estimates for it in table.arms}
    for claim in (it for it in table.claims if it.name == "qat_kl_ratio"):
        ratio = arms[claim.model, "nvfp4-qat"][KL_RATIO]
        assert (ratio.estimate, ratio.low, ratio.high) == pytest.approx(
            (claim.estimate, claim.low, claim.high), rel=1e-5
        )
        assert arms[claim.model, "bf16"][KL].estimate == pytest.approx(claim.noise_floor, rel=1e-5)
