"""What is judged: studies that could be trained and not judged are refused before, another protocol
than that of the runs is refused, and few data decide nothing."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis import claims
from analysis.collapse.judge import judge_study as judge_grid_study
from analysis.judgeable import require_judgeable
from analysis.parity.judge import judge_study
from analysis.results import Results
from experiments.study import protocol
from experiments.study.load import load_study
from experiments.study.protocol import judging_digest, protocol_digest
from experiments.study.schema import STUDIES, Run, Study
from experiments.support.json_files import write_json, write_jsonl
from tests.files import read_rows, set_keys
from tests.records import set_manifests
from tests.study_files import changed_study
from tests.unit.analysis.synthetic_results import judge, rewrite_metrics, shortened, write_results

# random weights, without a checkpoint
UNJUDGED = {"qwen3_moe_smoke", "qwen3_moe_half_smoke", "qwen3_moe_replay"}
UNJUDGED |= {"qwen3_8b_exact", "qwen3_moe_half_exact"}


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_studies_of_the_repository_can_be_judged(path: Path) -> None:
    study = load_study(path)
    if path.stem not in UNJUDGED:
        require_judgeable(study)
        return
    with pytest.raises(ValueError, match=r"rl\.save_every: 5 is more than rl\.steps, 4, so that"):
        require_judgeable(study)


def test_verl_saves_a_checkpoint_in_every_cell(tmp_path: Path) -> None:
    models = ["nano-dense-verl"], ["nano-moe-verl"]
    cells = {"long": {"models": models[0]}, "short": {"models": models[1], "steps": 1}}
    fault = r"^study verl-nano: rl\.save_every: 2 is more than cells\.short\.steps, 1, so that verl"
    with pytest.raises(ValueError, match=fault):
        require_judgeable(changed_study(tmp_path, {"cells": cells}, "verl_nano"))
    cells = {name: cell | {"steps": 2} for name, cell in cells.items()}
    require_judgeable(changed_study(tmp_path, {"cells": cells, "rl/steps": 1}, "verl_nano"))


TIS = {"correction": "token_tis"}
OF_TWO_LENGTHS = {"short": {"arms": ["nvfp4-qat"], "steps": 10}, "long": {"arms": ["bf16"]}}
NO_BF16 = "cells: none has model nano-dense"
LONG = r"cells\.long: steps: judged_by: collapse compares runs"
LENGTHS = "cells: arms of nano-dense have 20 and 10 rl.steps; judged_by: parity"


@pytest.mark.parametrize(
    ("source", "changes", "fault"),
    [
        ("collapse_cpu", {"arms": ["nvfp4-noqat", "nvfp4-qat"]}, NO_BF16),
        ("collapse_cpu", {"cells": {"tis": TIS}}, NO_BF16),
        ("collapse_cpu", {"cells": {"plain": {}, "long": TIS | {"steps": 120}}}, LONG),
        ("default_long", {"cells": OF_TWO_LENGTHS, "arms": ["bf16", "nvfp4-qat"]}, LENGTHS),
    ],
    ids=["no BF16", "BF16 with a correction alone", "runs of two lengths", "arms of two lengths"],
)
def test_runs_that_do_not_compare_are_refused(
    tmp_path: Path, source: str, changes: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ValueError, match=rf"^study {source.replace('_', '-')}: {fault}"):
        require_judgeable(changed_study(tmp_path, changes, source))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"rollout_is_threshold": 2.0}, {"rollout_is_threshold": 5.0}),
        ({}, {"arms": ["nvfp4-noqat"]}),
    ],
    ids=["threshold", "overlap"],
)
def test_runs_of_two_cells_are_never_one_sample(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    cells = {"plain": {}, "one": TIS | first, "two": TIS | second}
    study = changed_study(tmp_path, {"cells": cells}, "collapse_cpu")
    both = "nano-dense-collapse, nvfp4-noqat at 6e-4, token_tis, as cells.one has"
    with pytest.raises(ValueError, match=rf"study collapse-cpu: cells\.two: has {both}"):
        require_judgeable(study)
    with pytest.raises(ValueError, match=r"cells\.two"):
        judge_grid_study(study, tmp_path)
    del cells["two"]
    require_judgeable(changed_study(tmp_path, {"cells": cells}, "collapse_cpu"))


@pytest.mark.parametrize(
    "changes", [{"rl/steps": 1}, {"cells": {"short": {"steps": 1}}}], ids=["rl", "cell"]
)
def test_one_step_has_no_reward_gain(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"rl\.steps: one step has no reward gain; use 2 or more"):
        require_judgeable(changed_study(tmp_path, changes))
    require_judgeable(changed_study(tmp_path, changes | {"arms": ["nvfp4-qat"]}))


@pytest.mark.parametrize(
    ("of_high", "message"),
    [
        ({}, "cells: nano-moe has arm nvfp4-noqat in low and high; judged_by: parity needs it in"),
        ({"arms": ["nvfp4-qat"]}, "cells: nano-moe has arm nvfp4-noqat in none; judged_by"),
    ],
    ids=["two", "none"],
)
def test_with_parity_an_arm_of_a_model_is_in_one_cell(
    tmp_path: Path, of_high: dict[str, Any], message: str
) -> None:
    """Without BF16 too, where of two cells the last one would have been taken."""
    low = {"models": ["nano-dense"]} if of_high else {}
    cells = {"low": low, "high": {"models": ["nano-moe"]} | of_high}
    study = changed_study(tmp_path, {"cells": cells, "arms": ["nvfp4-noqat", "nvfp4-qat"]})
    with pytest.raises(ValueError, match=f"study default-long: {message}"):
        require_judgeable(study)
    with pytest.raises(ValueError, match=message):
        judge_study(study, Results(pd.DataFrame(), pd.DataFrame(), {}, {}))


def test_with_parity_models_may_be_in_cells_of_their_own(tmp_path: Path) -> None:
    cells = {"low": {"models": ["nano-dense"], "lr": 1e-5}, "high": {"models": ["nano-moe"]}}
    require_judgeable(changed_study(tmp_path, {"cells": cells}))


def test_floor_of_few_tokens_gives_no_ratio(study: Study, results_dir: Path) -> None:
    others = study.model_copy(update={"seeds": study.seeds[1:]})
    rewrite_metrics(results_dir, others, "bf16", **{"rollout_corr/k3_kl": 0.0})
    claims = judge(study, results_dir)
    for name, verdict in (("qat_kl_ratio", "INCONCLUSIVE"), ("ffn_kl_ratio", "REPORTED")):
        claim = claims["nano-dense", name]
        assert claim.verdict == verdict and claim.detail.endswith("too few tokens for a ratio")
        assert claim.cells()[3:] == ("-", "-")
        assert "NaN" not in claim.model_dump_json()


@pytest.mark.parametrize(("num_steps", "verdict"), [(11, "INCONCLUSIVE"), (12, "PASS")])
def test_fewer_than_sixty_steps_in_all_are_shown_but_not_judged(
    study: Study, tmp_path: Path, num_steps: int, verdict: str
) -> None:
    short = shortened(study, num_steps, num_prompts=8)
    write_results(short, tmp_path)
    claim = judge(short, tmp_path)["nano-dense", "noqat_kl_ratio"]
    assert claim.verdict == verdict
    assert claim.detail.endswith("55 steps in all, fewer than 60") == (num_steps == 11)
    assert " to " in claim.cells()[-1]


def test_one_seed_is_reported_and_not_judged(study: Study, tmp_path: Path) -> None:
    longer = shortened(study, num_steps=100, num_prompts=256)
    single = longer.model_copy(update={"seeds": (0,)})
    write_results(single, tmp_path)
    for claim in judge(single, tmp_path).values():
        assert claim.verdict == "REPORTED"
        assert claim.estimate is not None and (claim.exact or claim.cells()[-1] == "-")


def test_an_arm_that_is_far_worse_in_a_few_steps_does_not_pass(
    study: Study, results_dir: Path
) -> None:
    for run in (run for run in study.runs if run.arm == "nvfp4-qat"):
        path = results_dir / run.id / "metrics.jsonl"
        rows = read_rows(path)
        for row in rows[run.seed :: 20]:
            row["rollout_corr/k3_kl"] *= 100
        write_jsonl(path, rows)
    claim = judge(study, results_dir)["nano-dense", "qat_kl_ratio"]
    assert claim.verdict == "FAIL"
    assert "steps above 10 medians: 10 of 150 (up to" in claim.detail


def test_served_accuracy_tells_qat_from_no_qat(study: Study, results_dir: Path) -> None:
    # the synthetic arm without QAT loses a tenth of its answers in NVFP4
    claims = judge(study, results_dir)
    assert claims["nano-dense", "served_gain"].verdict == "PASS"
    noqat = claims["nano-dense", "noqat_served"]
    assert noqat.verdict == "REPORTED" and noqat.high is not None and noqat.high < -0.3
    assert claims["nano-dense", "noqat_accuracy"].high is not None


def test_accuracy_is_compared_after_the_same_step(study: Study, results_dir: Path) -> None:
    for run in study.runs:
        path = results_dir / run.id / "eval.json"
        rows = json.loads(path.read_text())
        rows += [
            it | {"step": 10, "accuracy": 0.0, "correct": [0] * 256}
            for it in rows
            if it["step"] == 0
        ]
        stopped = run == Run("nano-dense", "nvfp4-noqat", 1)
        write_json(path, [it for it in rows if it["step"] <= (10 if stopped else 30)])
    claims = judge(study, results_dir)
    claim = claims["nano-dense", "noqat_accuracy"]
    assert claim.detail.endswith("sampled, both after step 10 of 30")
    assert claim.detail.startswith("nvfp4-noqat in BF16 0.000, bf16 in BF16 0.000")
    assert "after step" not in claims["nano-moe", "noqat_accuracy"].detail


def test_seeds_that_all_lie_on_the_bound_give_no_verdict(study: Study, results_dir: Path) -> None:
    for run in (run for run in study.runs if run.arm == "nvfp4-noqat"):
        path = results_dir / f"{run.model}_nvfp4-qat_seed{run.seed}" / "eval.json"
        same = json.loads(path.read_text())
        longer = [it | {"response_tokens_mean": it["response_tokens_mean"] + 1} for it in same]
        write_json(results_dir / run.id / "eval.json", longer)
    claim = judge(study, results_dir)["nano-dense", "served_gain"]
    assert (claim.low, claim.high, claim.verdict) == (0.0, 0.0, "INCONCLUSIVE")
    assert claim.detail.endswith("no spread between seeds, all on the bound")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "protocol.md"
    path.write_text("# Protocol\n\nPrimary: C12\n")
    return path


def test_another_protocol_than_that_of_the_runs_is_refused(
    study: Study, results_dir: Path, page: Path
) -> None:
    planned = study.model_copy(update={"protocol": page})
    set_manifests(results_dir, protocol_sha256=protocol_digest(planned))
    assert claims.judge(planned, results_dir).claims
    page.write_text(page.read_text() + "\n## Changes\n\nLater: a typo.\n")
    assert claims.judge(planned, results_dir).claims
    page.write_text(page.read_text().replace("C12", "C14"))
    with pytest.raises(ValueError, match=r"manifest.json: protocol_sha256: not that of"):
        claims.judge(planned, results_dir)


@pytest.fixture
def bound_dir(study: Study, results_dir: Path) -> Path:
    """Results whose manifests know how the study was to be judged."""
    set_manifests(results_dir, judging_sha256=judging_digest(study))
    return results_dir


ANOTHER_WAY = r"_seed\d+/manifest.json: judging_sha256: study default was to be judged in another"


@pytest.mark.parametrize(
    "changes",
    [
        {"claims/qat_kl_ratio": 3.0},
        {"seeds": [0, 1, 2]},
        {"arms": ["bf16", "nvfp4-qat"]},
        {"evaluation/temperature": 1.0},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_way_of_judging_than_that_of_the_runs_is_refused(
    study_file: Path, bound_dir: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=ANOTHER_WAY):
        claims.judge(changed_study(tmp_path, changes, study_file), bound_dir)


def test_one_run_of_another_way_of_judging_is_enough(study: Study, bound_dir: Path) -> None:
    path = bound_dir / study.runs[-1].id / "manifest.json"
    set_keys(path, judging_sha256="0" * 64)
    with pytest.raises(ValueError, match=study.runs[-1].id):
        claims.judge(study, bound_dir)
    set_keys(path, judging_sha256=None)  # as older runs have it
    assert claims.judge(study, bound_dir).claims


def test_margins_of_collapses_are_part_of_how_they_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = changed_study(tmp_path, {}, "collapse_cpu")
    before = judging_digest(study)
    wider = protocol.COLLAPSE._replace(reward_margin=0.1)
    monkeypatch.setattr(protocol, "COLLAPSE", wider)
    assert judging_digest(study) != before


def two_kinds_of_advantages(folder: Path, advantage: str, **said: Any) -> Study:
    cells = {kind: {"advantage": kind, **said} for kind in ("group", "reward")}
    return changed_study(folder, {"cells": cells, "rl/advantage": advantage}, "collapse_cpu")


def test_the_advantages_by_which_arms_are_compared_are_part_of_how_they_are_judged(
    tmp_path: Path,
) -> None:
    """No setting of a run tells them, where cells have their own."""
    studies = [two_kinds_of_advantages(tmp_path, it) for it in ("group", "reward")]
    first, second = ([it.training_config(run) for run in it.runs] for it in studies)
    assert first == second
    assert len({judging_digest(it) for it in studies}) == 2


def test_a_cell_may_name_what_it_has_anyway(tmp_path: Path) -> None:
    plain = two_kinds_of_advantages(tmp_path, "reward")
    all_arms = [*reversed(plain.arms)]
    written_out = two_kinds_of_advantages(tmp_path, "reward", arms=all_arms, models=[*plain.models])
    assert judging_digest(written_out) == judging_digest(plain)
