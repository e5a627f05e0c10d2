"""verl's data files: what they hold, what verl reads from them, which sources are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.rl.config import TaskConfig
from experiments.rl.prompts import encode_prompt
from experiments.rl.tasks import Question, Split, make_problems
from experiments.rl.tokenizer import character_tokenizer
from experiments.runs.inputs import check_data, data_digest
from experiments.runs.provenance import digest_file
from experiments.study.schema import STUDIES
from experiments.verl import sources
from experiments.verl.data import SCHEMA, write_data
from experiments.verl.questions import drop_repeated, read_questions
from experiments.verl.sources import AIME_2024, HubFile, locate_sources
from tests.files import truncate
from tests.workflow.programs import Done, module

CHAIN = TaskConfig(name="chain-sum", terms=(3, 6), largest=9, train_prompts=40, test_prompts=8)
QUESTIONS = [Question("2+2?", "4"), Question("1+1?", "2"), Question("2+2?", "4")]


def row(prompt: str, answer: str) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "MATH",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": 0},
    }


def write_rows(path: Path, rows: list[dict[str, Any]], schema: pa.Schema | None = None) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


def write_questions(path: Path, questions: list[Question]) -> Path:
    return write_rows(path, [row(q.prompt, q.answer) for q in questions])


def mathematics(train: Path, test: Path) -> TaskConfig:
    """The task with local files, which a study names by their checksums."""
    return TaskConfig(
        name="dapo-math",
        train_files={train: digest_file(train)},
        test_files={test: digest_file(test)},
    )


def test_generated_problems_are_the_local_trainers(tmp_path: Path) -> None:
    write_data(CHAIN, tmp_path / "data")
    for split in ("train", "test"):
        written = list(read_questions(tmp_path / "data" / f"{split}.parquet"))
        problems = make_problems(CHAIN, split)
        assert written == [Question(p.prompt, p.answer) for p in problems]
    described = json.loads((tmp_path / "data" / "data.json").read_text())
    assert described["settings"] == data_digest(CHAIN)
    assert described["train"]["rows"] == 40
    assert described["train"]["sha256"] == digest_file(tmp_path / "data" / "train.parquet")


def test_damaged_data_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write_data(CHAIN, folder)
    check_data(folder)
    train = folder / "train.parquet"
    pq.write_table(pq.read_table(train).slice(0, 7), train)
    with pytest.raises(
        ValueError, match=r"train\.parquet: damaged or changed, its SHA-256 differs"
    ):
        check_data(folder)
    train.unlink()
    with pytest.raises(ValueError, match=r"train\.parquet: missing; delete .*data and run"):
        check_data(folder)


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "results" / "run").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"--out: .*results: would be deleted"):
        write_data(CHAIN, tmp_path / "results")
    assert (tmp_path / "results" / "run").is_dir()


def test_verl_reads_the_prompts_that_the_local_trainer_encodes(tmp_path: Path) -> None:
    dataset = pytest.importorskip("verl.utils.dataset.rl_dataset", reason="needs verl")
    from omegaconf import OmegaConf
    from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder

    write_data(CHAIN, tmp_path / "data")
    character_tokenizer().save_pretrained(tmp_path / "tokenizer")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    settings = OmegaConf.create({"max_prompt_length": 32, "cache_dir": str(tmp_path / "cache")})
    rows = dataset.RLHFDataset(str(tmp_path / "data" / "test.parquet"), tokenizer, settings)
    builder = ContinuousTokenBuilder(tokenizer)
    problems = make_problems(CHAIN, "test")
    assert len(rows) == len(problems)
    for i, problem in enumerate(problems):
        sent = builder.build_initial_tokens(rows[i]["raw_prompt"])
        assert sent == encode_prompt(tokenizer, problem) == tokenizer.encode(problem.prompt)
        assert rows[i]["reward_model"]["ground_truth"] == problem.answer
        assert (rows[i]["data_source"], rows[i]["index"]) == ("chain-sum", i)


def test_repeated_contradictory_and_held_out_prompts_are_left_out(tmp_path: Path) -> None:
    train = [*QUESTIONS, Question("3+3?", "6"), Question("3+3?", "7"), Question("5+5?", "10")]
    write_questions(tmp_path / "maths.parquet", train)
    write_questions(tmp_path / "held_out.parquet", [Question("5+5?", "10")] * 3)
    task = mathematics(tmp_path / "maths.parquet", tmp_path / "held_out.parquet")
    write_data(task, tmp_path / "data")
    assert pq.read_schema(tmp_path / "data" / "train.parquet") == SCHEMA
    rows = pq.read_table(tmp_path / "data" / "train.parquet").to_pylist()
    assert [r["prompt"][0]["content"] for r in rows] == ["2+2?", "1+1?"]
    assert [r["extra_info"]["index"] for r in rows] == [0, 1]
    assert {r["data_source"] for r in rows} == {"dapo-math/maths"}
    described = json.loads((tmp_path / "data" / "data.json").read_text())
    assert described["train"]["sources"] == [
        {
            "data_source": "dapo-math/maths",
            "rows": 2,
            "file": str(tmp_path / "maths.parquet"),
            "sha256": digest_file(tmp_path / "maths.parquet"),
            "repeated_rows": 1,
            "contradictory_prompts": 1,
            "held_out_prompts": 1,
        }
    ]
    assert described["test"]["rows"] == 1


def test_published_rows_are_all_kept_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated, contradictory and held-out ones; the held-out file has each prompt once still."""
    monkeypatch.setattr("experiments.verl.data.ROWS_AT_ONCE", 2)  # the last part has one row
    train = [*QUESTIONS, Question("3+3?", "6"), Question("3+3?", "7")]
    write_questions(tmp_path / "maths.parquet", train)
    write_questions(tmp_path / "held_out.parquet", [Question("3+3?", "6")] * 3)
    once = mathematics(tmp_path / "maths.parquet", tmp_path / "held_out.parquet")
    task = once.model_copy(update={"train_rows": "published"})
    write_data(task, tmp_path / "data")
    assert list(read_questions(tmp_path / "data" / "train.parquet")) == train
    rows = pq.read_table(tmp_path / "data" / "train.parquet").to_pylist()
    assert [r["extra_info"]["index"] for r in rows] == [0, 1, 2, 3, 4]
    described = json.loads((tmp_path / "data" / "data.json").read_text())
    assert described["train"]["rows"] == 5 and described["test"]["rows"] == 1
    assert described["settings"] == data_digest(task) != data_digest(once)


def test_a_default_that_came_later_changes_no_digest() -> None:
    assert "train_rows" not in TaskConfig(name="dapo-math").model_dump()
    assert "train_rows" in TaskConfig(name="dapo-math", train_rows="published").model_dump()


@given(st.lists(st.builds(Question, st.sampled_from("abcd"), st.sampled_from("12"))))
def test_each_prompt_is_kept_once_or_contradicts_itself(questions: list[Question]) -> None:
    kept, repeated, contradictory = drop_repeated(questions)
    prompts = [question.prompt for question in kept]
    assert len(set(prompts)) == len(prompts)
    assert len(prompts) + contradictory == len({question.prompt for question in questions})
    assert set(kept) <= set(questions)
    assert repeated == len(questions) - len(set(questions))


def test_json_lines_are_wrapped_as_dapo_wraps_problems(tmp_path: Path) -> None:
    path = tmp_path / "aime2025-I.jsonl"
    path.write_text(json.dumps({"question": "Find $x$ in {1}.", "answer": "70"}) + "\n")
    (question,) = read_questions(path)
    first, problem, last = question.prompt.split("\n\n")
    assert first.startswith("Solve the following math problem") and "Answer: $Answer" in first
    assert (problem, question.answer) == ("Find $x$ in {1}.", "70")
    assert last.startswith("Remember")


BAD_PARQUET: dict[str, tuple[Callable[[Path], object], str]] = {
    "damaged": (truncate, "not a parquet file: .*; fetch it again"),
    "empty": (lambda p: write_rows(p, [], SCHEMA), "no rows; take a file that has some"),
    "other-columns": (
        lambda p: write_rows(p, [{"question": "1+1?", "answer": "2"}]),
        "column prompt: missing; take a file in verl's format",
    ),
    "prompt-is-text": (
        lambda p: write_rows(p, [row("1+1?", "2") | {"prompt": "1+1?"}]),
        "row 1: column prompt: Input should be a valid list; take",
    ),
    "number-as-answer": (
        lambda p: write_rows(p, [row("1+1?", "2") | {"reward_model": {"ground_truth": 2}}]),
        r"row 1: column reward_model\.ground_truth: Input should be a valid string; take",
    ),
    "empty-answer": (
        lambda p: write_rows(p, [row("1+1?", "2"), row("2+2?", "")]),
        r"row 2: column reward_model\.ground_truth: String should have at least 1 character",
    ),
    "two-messages": (
        lambda p: write_rows(p, [row("", "2") | {"prompt": row("1+1?", "2")["prompt"] * 2}]),
        "row 1: column prompt: List should have at most 1 item",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), BAD_PARQUET.values(), ids=BAD_PARQUET)
def test_parquet_in_another_form_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    path = write_questions(tmp_path / "bad.parquet", QUESTIONS)
    spoil(path)
    with pytest.raises(ValueError, match=rf"bad\.parquet: {message}"):
        list(read_questions(path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"question": "1+1?"}', "line 1: answer: Field required; take"),
        ("a.jsonl", "{", "line 1: not JSON: .*; fetch it again"),
        ("a.csv", "question,answer", r"neither \.parquet nor \.jsonl; convert"),
    ],
    ids=["key", "json", "suffix"],
)
def test_other_files_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        list(read_questions(tmp_path / name))


def test_local_file_with_another_checksum_is_refused(tmp_path: Path) -> None:
    path = write_questions(tmp_path / "maths.parquet", QUESTIONS)
    task = TaskConfig(name="dapo-math", train_files={path: "0" * 64})
    with pytest.raises(ValueError, match=rf"maths\.parquet: SHA-256 is {digest_file(path)}, not 0"):
        locate_sources(task, "train")


def test_missing_local_file_is_refused() -> None:
    task = TaskConfig(name="dapo-math", test_files={Path("data/held_out.parquet"): "0" * 64})
    with pytest.raises(
        ValueError, match=r"data/held_out\.parquet: no such file; task\.test_files are"
    ):
        locate_sources(task, "test")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_files": {"a.parquet": "abc"}}, "String should match pattern"),
        ({"name": "chain-sum", "test_files": {"a.parquet": "0" * 64}}, "makes its own problems"),
        ({"name": "chain-sum", "train_rows": "published"}, "makes its own problems; remove train"),
        ({"held_out": "sum"}, "held_out: sum is for word-problem, not dapo-math"),
    ],
    ids=["checksum", "task", "rows", "sums"],
)
def test_settings_of_files_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskConfig.model_validate({"name": "dapo-math", **settings})


def run_offline(tmp_path: Path) -> Done:
    """`experiments.verl.data` for the published study, with no network but with a hub cache."""
    arguments = ("--study", STUDIES / "qwen3.yaml", "--out", tmp_path / "data")
    variables = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    return module("experiments.verl.data", *arguments, **variables)


def test_without_network_the_local_files_are_asked_for(tmp_path: Path) -> None:
    done = run_offline(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {AIME_2024.repo}: {AIME_2024.path}: not fetched from")
    assert f"in task.test_files, {{path: {AIME_2024.sha256}}}" in done.stderr
    assert "offline mode is enabled" in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "data").exists()


def test_pinned_file_with_another_checksum_is_refused(tmp_path: Path) -> None:
    repo = f"datasets--{AIME_2024.repo.replace('/', '--')}"
    cached = tmp_path / "hub" / repo / "snapshots" / AIME_2024.revision / AIME_2024.path
    cached.parent.mkdir(parents=True)
    write_questions(cached, QUESTIONS)
    done = run_offline(tmp_path)
    assert done.returncode == 2
    assert f"{AIME_2024.path}: SHA-256 is {digest_file(cached)}, not" in done.stderr
    assert done.stderr.count("\n") == 1


def test_files_of_the_hub_are_asked_for_at_their_pinned_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: dict[Split, HubFile] = {}
    for split, prompt in (("train", "2+2?"), ("test", "1+1?")):
        path = write_questions(tmp_path / f"{split}.parquet", [Question(prompt, "4")])
        files[split] = HubFile("maths", "o/d", f"{split}-commit", path.name, digest_file(path))
        monkeypatch.setitem(sources.HUB_FILES, split, [files[split]])

    def hf_hub_download(repo: str, path: str, **asked: str) -> str:
        revision = f"{Path(path).stem}-commit"
        assert (repo, asked) == ("o/d", {"repo_type": "dataset", "revision": revision})
        return str(tmp_path / path)

    monkeypatch.setattr(sources, "hf_hub_download", hf_hub_download)
    write_data(TaskConfig(name="dapo-math"), tmp_path / "data")
    described = json.loads((tmp_path / "data" / "data.json").read_text())
    (source,) = described["test"]["sources"]
    assert files["test"]._asdict().items() <= source.items() and source["rows"] == 1
