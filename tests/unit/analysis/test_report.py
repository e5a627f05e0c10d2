"""The page of a study: complete, self-contained and valid."""

import re
import shutil
from base64 import b64decode
from functools import partial
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from analysis.figure_files import CAPTIONS, figure_names
from analysis.figures import FIGURES
from analysis.load import load_results
from analysis.parity.judge import judge_study
from analysis.report.content import read_content
from analysis.report.page import memory_rows, render, sentence
from analysis.style import figure_bytes
from experiments.runs.provenance import digest_file
from experiments.runs.summary import REWARD_MEAN, ArmSummary, Estimate
from experiments.study.load import load_study
from experiments.study.schema import ROOT, Study
from tests.files import set_keys
from tests.unit.analysis.synthetic_results import write_results

RECORD = ROOT / "experiments" / "records" / "default-long"
MARKUP = "<script>alert(1)</script>"  # as a run's manifest may say
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Elements of a page; fails where one is not closed, or closed that was not open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[tuple[str, str]] = []
        self.images: list[dict[str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        of_tag = dict(attributes)
        assert len(of_tag) == len(attributes), f"{tag} has an attribute twice"
        assert tag not in ("script", "link", "iframe", "object", "base"), (
            "nothing is fetched or run"
        )
        if tag not in VOID:
            self.open.append(tag)
        if identifier := of_tag.get("id"):
            self.ids.append(identifier)
        for key in ("src", "href", "srcset", "data", "action", "poster"):
            if (value := of_tag.get(key)) is not None:
                self.targets.append((tag, value))
        if tag == "img":
            self.images.append(of_tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


@pytest.fixture(scope="module")
def finished(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results with claims, not to be changed."""
    folder: Path = tmp_path_factory.mktemp("results")
    write_results(study, folder)
    set_keys(folder / study.runs[0].id / "manifest.json", reason=MARKUP)
    judged = folder / "studies" / study.study
    judge_study(study, load_results(study, folder)).write(judged)
    return folder


@pytest.fixture(scope="module")
def page(study_file: Path, finished: Path) -> str:
    return render(read_content(study_file, finished))


@pytest.mark.parametrize("source", ["results", "record"])
def test_the_page_is_valid_and_fetches_nothing(source: str, page: str) -> None:
    text = page if source == "results" else render(read_content(RECORD / "study.yaml", RECORD))
    assert text.startswith("<!DOCTYPE html>\n")
    found = Page(text)
    assert len(set(found.ids)) == len(found.ids)
    for tag, target in found.targets:
        if tag == "img":
            assert target.startswith("data:image/svg+xml;base64,")
        else:
            is_inside = target.startswith("#") and target[1:] in found.ids
            assert tag == "a" and (is_inside or target.startswith("https://")), target
    assert source == "record" or escape(MARKUP) in text
    assert "@import" not in text and "url(" not in text.partition("<main>")[0]


def test_every_figure_is_drawn_as_its_program_draws_it(
    page: str, study: Study, finished: Path
) -> None:
    images = Page(page).images
    assert [it["alt"] for it in images] == [CAPTIONS[name] for name in figure_names(study)]
    drawn = figure_bytes(partial(FIGURES["kl"], study, load_results(study, finished)), "svg")
    assert b64decode(str(images[0]["src"]).partition(",")[2]) == drawn


def test_the_sentence_names_a_correction_that_an_arm_alone_has() -> None:
    study = load_study(ROOT / "experiments" / "records" / "collapse-safety" / "study.yaml")
    values = {REWARD_MEAN: Estimate(estimate=0.5)}
    arms = [
        ArmSummary(model=it.model, arm=it.arm, cell=it.cell, runs=(it.id,), estimates=values)
        for it in study.runs
        if it.seed == study.seeds[0]
    ]
    said = sentence(study, arms)
    assert "NVFP4, no QAT, token TIS 0.50" in said and "NVFP4 QAT 0.50" in said


def test_claims_drift_memory_and_provenance_are_there(
    page: str, study: Study, study_file: Path, finished: Path
) -> None:
    table = judge_study(study, load_results(study, finished))
    cells = re.findall(r'<td data-label="Verdict" class="(\w+)">', page)
    assert cells == [claim.verdict.lower() for claim in table.claims]
    assert all(claim.interval in page for claim in table.claims)
    assert page.count('data-label="NVFP4 QAT">20 (15%)') == 2, "layer 0 of either model"
    assert ("nano-moe", "NVFP4 QAT", "0.61 MiB", "0.62 MiB", "40.0%") in memory_rows(
        read_content(study_file, finished)
    )
    assert "<dt>commit</dt>\n<dd>abc</dd>" in page
    assert "nano-moe 4 (4)" in page, "the digest of the base that four runs share"
    for run in (run.id for run in study.runs):
        for name in ("manifest.json", "metrics.jsonl", "eval.json"):
            assert f"{run}/{name}" in page and digest_file(finished / run / name) in page
    assert "Protocol for claims about mismatch" in page


def test_what_is_missing_is_named(study_file: Path, finished: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(finished, tmp_path / "results")
    (copied / "studies" / "default" / "claims.json").unlink()
    with pytest.raises(ValueError, match=r"claims.json: missing; run the study to its end"):
        read_content(study_file, copied)


@pytest.mark.parametrize(
    ("lost", "hint"),
    [
        ("claims.json", "make it with make figures"),
        ("metrics.parquet", "restore it, or record the study again"),
    ],
)
def test_of_a_record_the_command_is_named_that_makes_what_is_missing(
    lost: str, hint: str, tmp_path: Path
) -> None:
    record = Path(shutil.copytree(RECORD, tmp_path / "record"))
    (record / lost).unlink()
    with pytest.raises(ValueError, match=rf"{lost}: .*; {hint}$"):
        read_content(record / "study.yaml", record)


def test_a_study_without_runs_is_refused(study_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run of study default; run the study to its end"):
        read_content(study_file, tmp_path)
