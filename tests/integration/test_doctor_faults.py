"""Each planted fault is named, and nothing else is; the documentation's table says the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from analysis.markdown import read_rows
from tests.doctor.faults import BEGIN, END, FAULTS, MODELS, PAGE, diagnosis_of, named, write_models

PAIRS = [(name, model) for name, fault in FAULTS.items() for model in fault.models]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small take longer on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("faults")
    for model in MODELS:
        write_models(root / model, model)
    return root


@pytest.mark.long
@pytest.mark.parametrize(("name", "model"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_the_planted_fault_is_named_and_no_other(name: str, model: str, folder: Path) -> None:
    fault = FAULTS[name]
    found = diagnosis_of(fault, folder / model)
    assert [finding.cause for finding in found.named] == ([fault.cause] if fault.cause else [])
    assert found.is_healthy == (fault.cause is None)
    assert _table()[fault.what][model] == named(found)


def test_the_table_has_a_row_for_each_fault_and_no_other() -> None:
    filled = {what: tuple(m for m in MODELS if row[m]) for what, row in _table().items()}
    assert filled == {fault.what: fault.models for fault in FAULTS.values()}


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_shares_add_up_to_the_whole(model: str, folder: Path) -> None:
    found = diagnosis_of(FAULTS["quantization"], folder / model)
    # each share is a difference of neighbours in one sequence, which ends at the trainer itself
    assert sum(finding.share.value for finding in found.findings) == pytest.approx(1, abs=1e-9)


@pytest.mark.long
@pytest.mark.parametrize(("name", "causes"), [("healthy-bf16", []), ("decoding", ["decoding"])])
def test_a_model_that_bf16_rounds_coarsely_is_judged_by_its_own_rounding(
    name: str, causes: list[str], tmp_path: Path
) -> None:
    write_models(tmp_path, "nano-dense")
    weights = load_file(tmp_path / "now" / "model.safetensors")
    weights["lm_head.weight"] *= 96  # large logits, of which BF16 keeps few bits
    save_file(weights, tmp_path / "now" / "model.safetensors", {"format": "pt"})
    # some tokens carry the mean: of 24 sequences its interval reaches into the band on a processor
    found = diagnosis_of(FAULTS[name], tmp_path, num_prompts=192)
    assert found.total.low > found.band[1]
    assert found.noise is not None and found.noise.value > found.band[1]
    assert [finding.cause for finding in found.named] == causes
    assert found.is_healthy == (not causes)


def _table() -> dict[str, dict[str, str]]:
    """The causes named, by fault and model."""
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    return {row["Planted"]: row for row in read_rows(text)}
