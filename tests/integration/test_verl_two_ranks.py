"""Engines that verl's registry makes, on two ranks."""

import json
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from tests.integration import verl_two_ranks
from tests.nano_models import write_nano
from tests.ranks import run_ranks

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw, in one pair of processes: importing verl takes seconds."""
    folder = tmp_path_factory.mktemp("ranks")
    write_nano("nano-moe", folder / "model", num_layers=1)
    run_ranks(verl_two_ranks.run, (2, str(folder / "model"), str(folder)), 2)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.verl_table(
    "`fsdp_config.model_dtype=bfloat16`, of actors and reference policies",
    "verl's cast to BF16 leaves the rotary embedding in FP32, as vLLM has it",
)
def test_rotary_embeddings_are_equal_in_fp32_where_one_rank_starts_without_weights(
    ranks: list[dict[str, Any]],
) -> None:
    first, second = (rank["rotary"] for rank in ranks)
    assert (first["weights made on"], second["weights made on"]) == ("cpu", "meta")
    assert first["dtype"] == second["dtype"] == "torch.float32"
    assert first["frequencies"] == second["frequencies"]
    assert first["frequencies"][0] == 1.0 and len(set(first["frequencies"])) > 1


@pytest.mark.verl_table(
    "`fsdp_config.reshard_after_forward=false`, steps that train the critic alone "
    "(`trainer.critic_warmup`)",
    "the sync brings the weights as they were",
)
@pytest.mark.parametrize("case", ["not resharded", "not resharded bf16"])
def test_a_forward_pass_alone_changes_nothing_in_the_stream(
    ranks: list[dict[str, Any]], case: str
) -> None:
    """It leaves whole weights where the shards were, which a stream must not take for them."""
    for rank in ranks:
        assert rank[case] == {"whole": True, "same names": True, "changed": []}
