"""Drift: each measure against its definition, and its rows on disk, in a run and in a record."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn

from experiments.rl.drift_log import KL_EVERY, DriftLog
from experiments.rl.metric_names import DRIFT_FILE
from experiments.runs.drift import KL, read_drift
from experiments.runs.record import DRIFT, has_file
from qat_core.drift import MEASURES
from qat_core.drift.blocks import measure
from qat_core.drift.layer_kl import layer_kl
from qat_core.drift.monitor import DriftMonitor
from qat_core.nvfp4 import fake_quantize, global_scale, group_amax, quantize
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare
from tests.files import read_rows
from tests.records import MANIFEST, make_manifest, pack
from tests.tiny_models import tiny_model, tokens

RECIPE = Recipe()
DOWN = "model.layers.1.mlp.down_proj.weight"
MASK = torch.ones(2, 16, dtype=torch.long)


def row_of(rows, name: str):
    return next(row for row in rows if name.endswith(f"{row.layer}.{row.kind}.weight"))


def measured(w: torch.Tensor, scale: float) -> torch.Tensor:
    packed = quantize(w, torch.tensor(scale))
    return measure(w, packed.codes, packed.block_scale, torch.full((len(w), 1), scale))


def log_in(folder: Path, every: int) -> DriftLog:
    return DriftLog(tiny_model("qwen3"), RECIPE, folder / DRIFT_FILE, every=every)


def monitor_of(model, **settings) -> DriftMonitor:
    """One that looks at every block."""
    return DriftMonitor(model, RECIPE, blocks_per_weight=10**6, **settings)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "prepared"])
def test_the_error_is_that_of_the_whole_weight(family: str, prepared: bool) -> None:
    model = tiny_model(family)
    expected = {}
    for name in DriftMonitor(model, RECIPE)._plan.quantized:
        w = model.get_parameter(name).detach()
        if "_proj.weight" not in name or "down" in name or "o_proj" in name:  # groups of one
            rounded = fake_quantize(w, global_scale(group_amax([[w]])[0]))
            expected[name] = ((w - rounded).float().norm() / w.float().norm()).item()
    if prepared:
        prepare(model, RECIPE)
    rows = monitor_of(model).observe()
    assert len(expected) >= 2
    for name, error in expected.items():
        leaf = name.removesuffix(".weight").partition("layers.")[2]
        row = next(row for row in rows if f"{row.layer}.{row.kind}" == leaf)
        # FP32 sums over the same numbers in another order
        assert row.relative_error == pytest.approx(error, rel=1e-5)


def test_nothing_flips_until_a_weight_moves() -> None:
    model = tiny_model("qwen3")
    monitor = monitor_of(model)
    assert all(row.flipped_codes is None for row in monitor.observe())
    assert all(row.flipped_codes == row.scale_changes == 0 for row in monitor.observe())


def test_flips_are_counted_where_they_happen() -> None:
    model = tiny_model("qwen3")
    monitor = monitor_of(model)
    monitor.observe()
    with torch.no_grad():
        model.get_parameter(DOWN)[:16].neg_()
    rows = monitor.observe()
    weight = model.get_parameter(DOWN)
    codes = quantize(weight.detach(), global_scale(group_amax([[weight.detach()]])[0])).codes
    nonzero = torch.stack([codes & 7, (codes >> 4) & 7]) != 0
    expected = nonzero[:, :16].sum() / nonzero.numel()  # a zero has no sign
    assert row_of(rows, DOWN).flipped_codes == pytest.approx(expected.item(), abs=1e-6)
    assert sum(row.flipped_codes > 0 for row in rows) == 1


def test_a_change_of_the_global_scale_is_seen_in_its_group() -> None:
    model = tiny_model("qwen3")
    monitor = monitor_of(model)
    monitor.observe()
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.q_proj.weight")[0, 0] = 8.0
    changed = {(row.layer, row.kind) for row in monitor.observe() if row.scale_changes}
    assert changed == {(0, f"self_attn.{leaf}_proj") for leaf in "qkv"}


def test_zeroed_and_saturated_blocks_are_counted() -> None:
    w = torch.full((4, 16), 1e-6)
    w[0] = 1.0
    _, _, saturated, zeroed, _ = measured(w, 2688.0).unbind(-1)
    assert saturated.tolist() == [0, 0, 0, 0] and zeroed.tolist() == [0, 1, 1, 1]
    # as a scale that is stale: 1 needs a block scale of 683
    assert measured(w, 4096.0)[:, 2].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(("policy", "stale"), [("amax", 1.01), ("pow2", 2.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_block_is_saturated_under_the_scale_of_its_own_weights(policy, stale, dtype) -> None:
    """448 / global scale is a last place off for some amax, and FP32 weights lie beside BF16's."""
    amax = torch.arange(128, 256).div(128)[:, None]  # all BF16 numbers of an octave
    w_T16 = (amax * torch.linspace(-1, 1, 16)).to(dtype) * (1 if dtype.itemsize == 2 else 1 + 2**-9)
    for w in w_T16:
        scale = global_scale(group_amax([[w[None]]])[0], policy).item()
        assert measured(w[None], scale)[0, 2] == 0
        assert measured(w[None], stale * scale)[0, 2] == 1


def test_threshold_distance_by_its_definition() -> None:
    step = 2.0**-4
    ratios = torch.tensor([0.0, 0.25, 0.5, 1.0, 1.25, 3.0, 5.0, 6.0])
    expected = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    w = (ratios * step).repeat(2)[None]
    assert quantize(w, torch.tensor(2.0**10)).block_scale.float().item() == 64, "the test's step"
    assert measured(w, 2.0**10)[0, 4].item() == pytest.approx(expected.mean().item())


def test_a_sample_estimates_the_whole() -> None:
    model = tiny_model("qwen3", hidden_size=256, intermediate_size=512)
    whole = {(r.layer, r.kind): r.relative_error for r in monitor_of(model).observe()}
    for row in DriftMonitor(model, RECIPE, blocks_per_weight=256).observe():
        # of 4096 weights: seen 3 % at most over 20 seeds
        assert row.relative_error == pytest.approx(whole[row.layer, row.kind], rel=0.1)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_every_layer_has_its_kl_and_a_prepared_model_the_same(family: str) -> None:
    model = tiny_model(family)
    found = layer_kl(model, RECIPE, tokens(), MASK)
    assert set(found.by_layer) == {0, 1} and min(found.by_layer.values()) > 0
    prepared = tiny_model(family)
    prepared.load_state_dict(model.state_dict())
    prepare(prepared, RECIPE)
    again = layer_kl(prepared, RECIPE, tokens(), MASK)
    assert again == found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_layers_together_are_what_a_prepared_model_computes(dtype: torch.dtype) -> None:
    model = tiny_model("qwen3").to(dtype)
    together = layer_kl(model, RECIPE, tokens(), MASK).together
    with torch.no_grad():
        exact = model(input_ids=tokens()).logits.float().log_softmax(-1)
        prepare(model, RECIPE)
        rounded = model(input_ids=tokens()).logits.float().log_softmax(-1)
    expected = (rounded.exp() * (rounded - exact)).sum(-1).mean().item()
    assert together == pytest.approx(expected, rel=1e-3)  # FP32 sums


def test_a_recipe_that_quantizes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="quantizes nothing"):
        DriftMonitor(tiny_model("qwen3"), Recipe(ignore=("re:.*",)))


def test_a_row_a_weight_and_step_that_is_due(tmp_path: Path) -> None:
    log = log_in(tmp_path, every=2)
    log.start(0)
    found = {step: log.record(step, tokens(), MASK) for step in range(1, 5)}
    assert found[1] == found[3] == {}
    assert set(found[2]) == set(found[4]) == {f"drift/{name}" for name in MEASURES}
    rows = read_rows(tmp_path / DRIFT_FILE)
    assert [row["step"] for row in rows] == [2] * 14 + [4] * 14, "7 matrices in each of 2 layers"
    assert found[4]["drift/relative_error"] == pytest.approx(
        sum(row["relative_error"] for row in rows[14:]) / 14
    )


def test_the_layers_kl_comes_less_often(tmp_path: Path) -> None:
    log = log_in(tmp_path, every=1)
    for step in (1, KL_EVERY):
        log.record(step, tokens(), MASK)
    kl = [row for row in read_rows(tmp_path / DRIFT_FILE) if row["kind"] == "kl"]
    assert [(row["step"], row["layer"]) for row in kl] == [(KL_EVERY, 0), (KL_EVERY, 1)]
    assert all(row["kl"] > 0 for row in kl) and len({row["kl_together"] for row in kl}) == 1


def test_a_resumed_run_has_the_rows_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    def train(folder: Path, model: nn.Module, first: int, last: int) -> None:
        log = DriftLog(model, Recipe(), folder / DRIFT_FILE, every=1)
        log.start(first - 1)
        for step in range(first, last + 1):
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1 + 0.02 * torch.sin(torch.arange(weight.shape[-1]) + step))
            log.record(step)

    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
    train(tmp_path / "whole", tiny_model("qwen3"), 1, 4)
    train(tmp_path / "killed", tiny_model("qwen3"), 1, 2)
    resumed = tiny_model("qwen3")
    train(tmp_path, resumed, 1, 1)
    with (tmp_path / "killed" / DRIFT_FILE).open("a") as file:
        file.write('{"step": 3, "lay')  # what a kill leaves
    train(tmp_path / "killed", resumed, 2, 4)
    whole, killed = (tmp_path / folder / DRIFT_FILE for folder in ("whole", "killed"))
    assert killed.read_bytes() == whole.read_bytes()
    assert all(row["flipped_codes"] > 0 for row in read_rows(whole))
    assert {path.name for path in whole.parent.iterdir()} == {DRIFT_FILE}


@pytest.mark.parametrize("line", ["x", "[]", '{"layer": 0}', '{"step": "1"}'])
def test_a_damaged_row_is_named_before_training_goes_on(line: str, tmp_path: Path) -> None:
    (tmp_path / DRIFT_FILE).write_text('{"step": 1}\n' + line + "\n")
    log = log_in(tmp_path, every=1)
    with pytest.raises(ValueError, match=r"drift\.jsonl: line 2: not a row of drift; remove it$"):
        log.start(1)


def test_after_an_observation_in_between_changes_are_unknown(tmp_path: Path) -> None:
    log = log_in(tmp_path, every=2)
    log.start(3)
    assert "drift/flipped_codes" not in log.record(4, tokens(), MASK)


LINES = (
    '{"step": 1, "layer": 0, "kind": "mlp.up_proj", "flipped_codes": null, "relative_error": 0.1}',
    '{"step": 2, "layer": 0, "kind": "mlp.up_proj", "flipped_codes": 0.123456789012345678}',
    '{"step": 2, "layer": 0, "kind": "kl", "kl": 2e-05, "kl_together": 1e-04}',
)


def test_a_record_reads_as_the_run_that_it_was_made_from(tmp_path: Path) -> None:
    run, record = tmp_path / "results" / MANIFEST["run"], tmp_path / "record"
    run.mkdir(parents=True)
    make_manifest().write(run)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert not has_file(run, DRIFT_FILE)
    (run / DRIFT_FILE).write_text("".join(line + "\n" for line in LINES))
    pack(run.parent, record)
    rows, first = read_drift(run), (record / DRIFT).read_bytes()
    assert has_file(run, DRIFT_FILE) and has_file(record / run.name, DRIFT_FILE)
    pd.testing.assert_frame_equal(read_drift(record / run.name), rows, check_like=True)
    assert rows[KL].dropna().tolist() == [2e-5]
    pack(record, record)
    assert (record / DRIFT).read_bytes() == first, "no time stamp"
    (record / DRIFT).write_bytes(first[:-9])
    with pytest.raises(ValueError, match=r"drift\.parquet: .*; restore it, or record the study"):
        read_drift(record / run.name)


def test_of_a_repeated_step_the_last_row_counts_and_a_cut_line_does_not(tmp_path: Path) -> None:
    again = LINES[1].replace("0.123456789012345678", "0.5")
    (tmp_path / DRIFT_FILE).write_text(
        "".join(line + "\n" for line in (*LINES, again)) + LINES[0][:20]
    )
    rows = read_drift(tmp_path)
    assert rows[rows["step"] == 2]["flipped_codes"].dropna().tolist() == [0.5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"drift\.jsonl: missing; train the run with rl\.drift_every: 1"),
        ("", r"drift\.jsonl: empty"),
        ('{"step": 1\n', r"drift\.jsonl: line 1: not JSON"),
        ('{"layer": 1}\n', r"drift\.jsonl: line 1: not a row of drift"),
        ("[1]\n", r"drift\.jsonl: line 1: not a mapping"),
        (
            '{"step": 1, "layer": -Infinity, "kind": "q_proj"}\n',
            r"drift\.jsonl: line 1: not a row of drift",
        ),
    ],
    ids=["missing", "empty", "not-json", "no-step", "no-row", "no-layer"],
)
def test_a_damaged_file_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / DRIFT_FILE).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_drift(tmp_path)
