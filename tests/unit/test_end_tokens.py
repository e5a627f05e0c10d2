"""Where responses end: at every token that tokenizer or settings name, in all engines."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from experiments.rl.optimizer import MasterAdamW
from experiments.rl.policy import Policy
from experiments.rl.prompts import decode_responses
from experiments.rl.resume import save
from qat_core.doctor.sampling import Sampling
from qat_core.doctor.subject import EagerSubject
from qat_core.rollout.eager import EagerEngine
from qat_core.rollout.engine import Rollouts, special_ids
from tests.files import set_keys
from tests.nano_models import without_token

PROMPTS = [[3, 14, 4, 17]] * 60
EOS, SECOND = 1, 7  # `<eos>` and the digit 5
SETTINGS = "generation_config.json"


def set_ends(folder: Path, ends: object, file: str = SETTINGS) -> None:
    set_keys(folder / file, eos_token_id=ends)


@pytest.fixture
def two_ends(nano_dir: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(nano_dir, tmp_path / "two ends")
    set_ends(folder, [EOS, SECOND])
    return folder


def sampled_by_loop(folder: Path) -> Rollouts:
    return EagerEngine(folder).generate(PROMPTS, 40, 1.0, 0)


def sampled_in_static_memory(folder: Path) -> Rollouts:
    engine = EagerEngine(folder)
    engine.is_static = True
    return engine.generate(PROMPTS, 40, 1.0, 0)


def sampled_by_doctor(folder: Path) -> Rollouts:
    subject = EagerSubject(EagerEngine(folder), 18)
    return subject.sample(PROMPTS, 40, Sampling(), 0).rollouts


def sampled_by_graph(folder: Path) -> Rollouts:
    return EagerEngine(folder, "cuda").generate(PROMPTS, 40, 1.0, 0).to("cpu")


@pytest.mark.parametrize(
    "sample",
    [
        sampled_by_loop,
        sampled_in_static_memory,
        sampled_by_doctor,
        pytest.param(sampled_by_graph, marks=pytest.mark.gpu),
    ],
)
def test_a_response_ends_at_the_first_of_them(
    two_ends: Path, sample: Callable[[Path], Rollouts]
) -> None:
    rollouts = sample(two_ends)
    lasts = set()
    assert (rollouts.response_mask > 0).any(0).all(), "no column without a token"
    for ids, mask, cut in zip(
        rollouts.response_ids, rollouts.response_mask, rollouts.truncated, strict=True
    ):
        *before, last = ids[mask > 0].tolist()
        assert mask[: len(before) + 1].all(), "no gap"
        assert not ids[len(before) + 1 :].any(), "padding"
        assert not {EOS, SECOND} & set(before)
        assert cut or last in (EOS, SECOND)
        lasts.add(last)
    assert {EOS, SECOND} <= lasts


def test_the_end_is_not_in_the_text_that_is_scored(two_ends: Path) -> None:
    tokenizer, rollouts = AutoTokenizer.from_pretrained(two_ends), sampled_by_loop(two_ends)
    for text, ids, mask, cut in zip(
        decode_responses(tokenizer, rollouts),
        rollouts.response_ids,
        rollouts.response_mask,
        rollouts.truncated,
        strict=True,
    ):
        said = ids[mask > 0] if cut else ids[mask > 0][:-1]
        assert text == tokenizer.decode(said, skip_special_tokens=True)
        assert "5" not in text


@pytest.mark.parametrize(("ends", "expected"), [(7, (1, 7)), ([7, 1], (1, 7)), (None, (1,))])
@pytest.mark.parametrize("file", [SETTINGS, "config.json"])
def test_they_are_the_tokenizers_and_those_of_the_settings(
    nano_dir: Path, tmp_path: Path, file: str, ends: object, expected: tuple[int, ...]
) -> None:
    folder = shutil.copytree(nano_dir, tmp_path / "model")
    if file == "config.json":
        (folder / SETTINGS).unlink()
    set_ends(folder, ends, file)
    assert special_ids(folder) == (expected, 0)


def test_an_end_that_is_no_number_is_refused(two_ends: Path) -> None:
    set_ends(two_ends, ["<eos>"])
    with pytest.raises(
        ValueError, match=rf"{SETTINGS}: eos_token_id: \['<eos>'\]: needs a token's"
    ):
        EagerEngine(two_ends)


def test_a_tokenizer_must_name_one(nano_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"/model/tokenizer_config\.json: eos_token: missing; add"):
        EagerEngine(without_token(nano_dir, tmp_path, "eos_token"))


def test_a_checkpoint_of_training_keeps_them(two_ends: Path, tmp_path: Path) -> None:
    model, tokenizer = Policy(two_ends, None, "cpu").model, AutoTokenizer.from_pretrained(two_ends)
    model.generation_config.temperature = (
        0.6  # which transformers would refuse to save: no sampling
    )
    save(tmp_path / "run", 1, model, tokenizer, MasterAdamW(model.parameters(), 1e-4, 0.0))
    assert special_ids(tmp_path / "run" / "step_1") == ((EOS, SECOND), 0)


def test_a_token_beyond_the_embedding_is_refused(nano_dir: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^token 18 of a prompt: .* 18 rows, fewer than its token"
    ):
        EagerEngine(nano_dir).generate([[3], [4, 18]], 4, 1.0, 0)
