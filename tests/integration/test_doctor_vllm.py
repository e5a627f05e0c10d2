"""The doctor with vLLM on a CPU: a healthy case has no fault, and faults outside vLLM are named."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from vllm.distributed import cleanup_dist_env_and_memory

from qat_core.doctor.examine import Case, examine, random_prompts
from qat_core.doctor.sampling import Sampling
from qat_core.planning.recipe import Recipe
from tests.doctor.faults import write_models

pytestmark = pytest.mark.long


@pytest.fixture(params=["nano-dense", "nano-moe"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    before = torch.get_num_threads()
    write_models(tmp_path / "models", request.param)
    yield Case(
        checkpoint=tmp_path / "models" / "now",
        prompts=random_prompts(range(2, 18), 24, seed=0),
        rolled_out=Recipe(),
        trained=Recipe(),
        engine="vllm",
        max_new_tokens=16,
    )
    torch.set_num_threads(before)
    cleanup_dist_env_and_memory()


def test_a_healthy_case_has_no_fault(case: Case) -> None:
    found = examine(case)
    assert found.named == [] and found.is_healthy
    routing = {f.verdict for f in found.findings if f.cause.startswith("routing")}
    assert routing == ({"not measured"} if found.kind == "moe" else {"none"})


def test_training_without_qat_and_stale_weights_are_both_named(case: Case) -> None:
    other = case.checkpoint.parent / "other"
    found = examine(replace(case, trained=None, served=other, previous=other))
    assert {finding.cause for finding in found.named} == {"quantization", "staleness"}


def test_top_p_is_told_from_the_model(case: Case) -> None:
    found = examine(replace(case, sampling=Sampling(top_p=0.7)))
    assert [finding.cause for finding in found.named] == ["top_p"]
    (top_p,) = found.named
    assert top_p.share.low > 0.9  # seen: 0.99; what is left is BF16 noise and rerouted tokens
