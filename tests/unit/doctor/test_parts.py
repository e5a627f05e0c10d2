"""Parts of the doctor: sampling stages, routes, variants, comparison of weights, intervals."""

import io

import pytest
import torch
from rich.console import Console

from qat_core.doctor.diagnosis import BANDS, Diagnosis, Finding, Verdict
from qat_core.doctor.numerics import norms, variant
from qat_core.doctor.report import show
from qat_core.doctor.routing import Recorder, disagreement, replayed
from qat_core.doctor.sampling import ORDER, Sampling
from qat_core.doctor.statistics import Bootstrap, Estimate, k3_per_sequence
from qat_core.doctor.weights import compare, numbers, packed
from qat_core.mismatch import mismatch_metrics
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare
from tests.tiny_models import tiny_model, tokens

FAMILIES = pytest.mark.parametrize("family", ["qwen3", "qwen3-tied", "qwen2", "llama", "qwen3-moe"])
UP = "model.layers.0.mlp.up_proj.weight"


def test_log_probs_by_the_definition_of_each_setting() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    history = torch.tensor([[0]])
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=3, repetition_penalty=2.0)
    penalized = torch.tensor([[1.0, 1.0, 0.0, -1.0]])
    divided = penalized / 0.5
    stages = {
        (): logits,
        ORDER[:1]: penalized,
        ORDER[:2]: divided,
        ORDER[:3]: divided.masked_fill(torch.tensor([[False, False, False, True]]), -torch.inf),
        # 0.468, 0.468 and 0.063: the first two reach 0.9
        ORDER: divided.masked_fill(torch.tensor([[False, False, True, True]]), -torch.inf),
    }
    for applied, expected in stages.items():
        found = sampling.log_probs(applied, history, logits)
        torch.testing.assert_close(found, expected.log_softmax(-1))


@FAMILIES
@pytest.mark.parametrize(
    ("norm", "rope"),
    [("fp32", "trainer"), ("bf16", "trainer"), ("trainer", "fp32"), ("trainer", "bf16")],
)
@torch.no_grad()
def test_a_variant_changes_a_little_and_goes_away(family: str, norm: str, rope: str) -> None:
    model = tiny_model(family).eval()
    for module in norms(model):  # a weight of 1 leaves nothing to round
        module.weight.uniform_(0.5, 1.5)
    exact = model(input_ids=tokens()).logits
    with variant(model, norm, rope):
        changed = model(input_ids=tokens()).logits
    assert torch.equal(model(input_ids=tokens()).logits, exact)
    assert not torch.equal(changed, exact)
    assert (changed - exact).abs().max() < 0.1 * exact.abs().max()  # seen: 0.03 at most


@torch.no_grad()
def test_replayed_routes_are_those_recorded() -> None:
    model, other = tiny_model("qwen3-moe").eval(), tiny_model("qwen3-moe", seed=1).eval()
    recorder = Recorder(2)
    with recorder.watch(model):
        exact = model(input_ids=tokens()).logits
    routes = recorder.routes()
    with replayed(model, routes, weights=True):
        assert torch.equal(model(input_ids=tokens()).logits, exact)
    again = Recorder(2)
    with replayed(other, routes, weights=False), again.watch(other):
        other(input_ids=tokens())
    found = again.routes()
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(found.layers, routes.layers, strict=True))


@torch.no_grad()
def test_routers_are_compared_on_the_recorded_inputs() -> None:
    model = tiny_model("qwen3-moe").eval()
    recorder = Recorder(2)
    with recorder.watch(model):
        model(input_ids=tokens())
    routes, mask = recorder.routes(), torch.ones(2, 16)
    share, difference = disagreement(model, routes, mask)
    assert share == 0 and difference < 0.005  # one BF16 rounding of a weight
    for module in model.modules():
        if hasattr(module, "norm_topk_prob"):
            module.norm_topk_prob = not module.norm_topk_prob
    share, difference = disagreement(model, routes, mask)
    assert share == 0 and difference > 0.1
    assert disagreement(tiny_model("qwen3-moe", seed=1), routes, mask)[0] > 0.5


def served_by(recipe: Recipe | None, seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: numbers(w) for name, w in packed(tiny_model("qwen3", seed), recipe).items()}


@FAMILIES
def test_equal_weights_have_no_blame_and_are_the_trained_numbers(family: str) -> None:
    model, recipe = tiny_model(family), Recipe()
    served = {name: numbers(w) for name, w in packed(model, recipe).items()}
    found = compare(model, served, recipe, recipe, None)
    assert not found.blame_served and not found.blame_sent
    prepare(model, recipe)
    for name, value in found.mixed(frozenset()):
        held = model.get_parameter(name).data
        assert torch.equal(value, held.rounded() if hasattr(held, "rounded") else held), name


def test_each_weight_gets_the_cause_of_its_difference() -> None:
    served = served_by(Recipe())
    served[UP] = served[UP] + 1
    found = compare(tiny_model("qwen3"), served, Recipe(), Recipe.ffn(), None)
    assert found.blame_served == {UP: "weights"}
    assert set(found.blame_sent.values()) == {"quantization"}
    assert all("self_attn" in name for name in found.blame_sent)
    for other in (Recipe(scale_policy="amax"), Recipe(block_scale_method="mse")):
        found = compare(tiny_model("qwen3"), served_by(other), Recipe(), Recipe(), None)
        assert set(found.blame_served.values()) == {"scale"}


def test_a_partial_sync_is_stale_where_the_previous_weights_are_known() -> None:
    served, old = served_by(Recipe()), served_by(Recipe(), seed=1)
    served[UP] = old[UP]
    served["model.norm.weight"] = served["model.norm.weight"] * 3
    model, previous = tiny_model("qwen3"), tiny_model("qwen3", 1)
    known = compare(model, served, Recipe(), Recipe(), lambda: previous)
    assert known.blame_served == {UP: "staleness", "model.norm.weight": "weights"}
    unknown = compare(model, served, Recipe(), Recipe(), None)
    assert set(unknown.blame_served.values()) == {"weights"}


def test_another_architecture_is_refused() -> None:
    served = served_by(None)
    del served[UP]
    with pytest.raises(ValueError, match=r"up_proj.weight: the engine holds nothing, the trainer"):
        compare(tiny_model("qwen3"), served, None, None, None)


def test_k3_is_that_of_training() -> None:
    generator = torch.Generator().manual_seed(0)
    train, rollout = (torch.randn(4, 5, generator=generator) for _ in range(2))
    mask = (torch.rand(4, 5, generator=generator) > 0.3).float()
    mask[:, 0] = 1
    found = Bootstrap(mask).mean(k3_per_sequence(train, rollout, mask))
    expected = mismatch_metrics(train, rollout, mask, 2.0)["rollout_corr/k3_kl"]
    assert found.value == pytest.approx(expected, rel=1e-6)  # FP32 against FP64 differences
    assert found.low < found.value < found.high


def test_an_interval_of_level_95_covers_the_mean() -> None:
    """Of 300 batches of 64 sequences: seen 0.93; a binomial of 0.95 leaves [0.91, 0.98]."""
    generator = torch.Generator().manual_seed(0)
    mask, covered = torch.ones(64, 8), 0
    for _ in range(300):
        sums = torch.randn(64, generator=generator).double().square() * 8
        estimate = Bootstrap(mask).mean(sums)
        covered += estimate.low <= 1.0 <= estimate.high
    assert 0.90 <= covered / 300 <= 0.98


def finding(title: str, verdict: Verdict, size: float, evidence: str = "") -> Finding:
    k3, share = Estimate(size, size / 2, size * 2), Estimate(0.5, 0.25, 0.75)
    return Finding(title, title, k3, share, evidence, verdict, f"repair {title}")


def test_the_report_fits_a_terminal_and_gathers_what_makes_no_difference() -> None:
    findings = (
        finding("sampling: top-p", "none", 0),
        finding("decoding against one pass", "noise", 3e-5),
        finding("routing: weights of the experts", "not measured", 0, "vLLM does not tell"),
        finding("quantization without QAT", "fault", 4e-3, "q_proj.weight and 20 more"),
        finding("batch shape", "none", 0),
    )
    total = Estimate(4e-3, 3e-3, 5e-3)
    diagnosis = Diagnosis("dense", 64, 385, total, BANDS["dense"], findings)
    shown = io.StringIO()
    show(diagnosis, Console(file=shown, width=80))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "No difference: sampling: top-p, batch shape." in lines
    (row,) = [line for line in lines if line.startswith("quantization without") and "[2" in line]
    assert row.split("  ")[0] and "4.0e-03 [2.0e-03, 8.0e-03] 50% [25%, 75%]" in row
    assert "quantization without QAT: q_proj.weight and 20 more" in lines
    assert "quantization without QAT: repair quantization without QAT" in lines
    assert "routing: weights of the experts: vLLM does not tell" in lines
    assert not any(line.startswith("sampling: top-p") for line in lines)


@pytest.mark.parametrize(
    ("rounding", "place"),
    [(None, "Above the band."), (2e-3, "Above the band, as"), (1e-4, "Above the band, and more")],
)
def test_the_report_says_what_rounding_explains(rounding: float | None, place: str) -> None:
    noise = None if rounding is None else Estimate(rounding, rounding, rounding)
    total = Estimate(4e-3, 3e-3, 5e-3)
    diagnosis = Diagnosis("dense", 64, 385, total, BANDS["dense"], (), noise)
    shown = io.StringIO()
    show(diagnosis, Console(file=shown, width=80))
    assert place in " ".join(shown.getvalue().split())
    assert diagnosis.is_healthy == place.endswith("as")
