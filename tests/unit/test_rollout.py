"""Rollouts in process: decoding, log-probs, and what may be synced."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from experiments.rl.policy import Policy
from qat_core.mismatch import k3
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.eager import EagerEngine
from qat_core.weights.stream import weight_stream
from tests.nano_models import without_token

PROMPTS = [[3, 14, 4, 17], [5, 17], [3, 3, 14, 9, 15, 4, 17]]


@pytest.fixture
def engine(nano_dir: Path) -> EagerEngine:
    return EagerEngine(nano_dir)


def test_log_probs_are_those_of_one_full_forward(engine: EagerEngine, nano_dir: Path) -> None:
    rollouts = engine.generate(PROMPTS, max_new_tokens=12, temperature=1.0, seed=0)
    log_probs_BT, _ = Policy(nano_dir, None, "cpu").log_probs(rollouts)
    difference = (log_probs_BT - rollouts.log_probs)[rollouts.response_mask > 0].abs()
    # BF16 noise and, in the MoE, rerouted tokens: 0.005 at most over 20 seeds; one column off: 1.2
    assert difference.mean() < 0.05


def test_greedy_takes_the_likeliest_token(engine: EagerEngine) -> None:
    rollouts = engine.generate([PROMPTS[0]], max_new_tokens=1, temperature=0.0, seed=0)
    logits = engine.model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].float()
    assert rollouts.response_ids.item() == logits.argmax()
    expected = logits.log_softmax(-1).max().item()
    assert rollouts.log_probs.item() == pytest.approx(expected, abs=0.05)  # BF16 noise, as above


def test_padding_does_not_change_a_greedy_response(engine: EagerEngine) -> None:
    together = engine.generate(PROMPTS, max_new_tokens=3, temperature=0.0, seed=0)
    alone = engine.generate([PROMPTS[1]], max_new_tokens=3, temperature=0.0, seed=0)
    assert torch.equal(together.response_ids[1], alone.response_ids[0])


@pytest.fixture
def static(nano_dir: Path) -> EagerEngine:
    """Decodes in static memory as on a GPU, less the graph."""
    engine = EagerEngine(nano_dir, max_tokens=60, keeps_distributions=True)
    engine.is_static = True
    return engine


def test_static_decoding_takes_the_likeliest_tokens(
    engine: EagerEngine, static: EagerEngine
) -> None:
    one_step = [e.generate(PROMPTS, 1, 0.0, 0).response_ids for e in (engine, static)]
    assert torch.equal(*one_step)
    # later tokens of random weights may be near ties, which BF16 noise decides
    many = [e.generate(PROMPTS * 10, 12, 0.0, 0).response_ids[:, :12] for e in (engine, static)]
    width = min(ids.shape[1] for ids in many)
    assert (many[0][:, :width] == many[1][:, :width]).float().mean() > 0.9


def test_static_decoding_reports_the_trainers_log_probs(
    static: EagerEngine, nano_dir: Path
) -> None:
    policy = Policy(nano_dir, None, "cpu")
    for seed in (0, 1):  # the second batch finds the memory as the first one left it
        rollouts = static.generate(PROMPTS * 10, 40, 1.0, seed)
        mask = rollouts.response_mask > 0
        difference = (policy.log_probs(rollouts)[0] - rollouts.log_probs)[mask].abs()
        # as of the loop above: 0.0015 at most here
        assert difference.mean() < 0.05
        chosen = rollouts.distributions.gather(-1, rollouts.response_ids[..., None]).squeeze(-1)
        assert torch.equal(chosen[mask], rollouts.log_probs[mask])
        assert torch.allclose(rollouts.distributions[mask].exp().sum(-1), torch.tensor(1.0))


def test_static_decoding_samples_the_distribution(static: EagerEngine) -> None:
    rollouts = static.generate([PROMPTS[0]] * 4000, 1, 1.0, 0)
    expected_V = rollouts.distributions[0, 0].exp()
    counts_V = torch.bincount(rollouts.response_ids[:, 0], minlength=len(expected_V))
    chi_square = ((counts_V - 4000 * expected_V).square() / (4000 * expected_V)).sum()
    # 17 degrees of freedom: above 45 in 2 of 10,000 draws
    assert chi_square < 45


def test_a_longer_batch_gets_more_memory(static: EagerEngine) -> None:
    static.generate(PROMPTS, 8, 1.0, 0)
    long = [PROMPTS[2] * 12]
    assert len(long[0]) > 60
    assert static.generate(long, 8, 1.0, 0).response_mask.sum() > 0


def test_a_tokenizer_needs_no_token_for_padding(
    engine: EagerEngine, nano_dir: Path, tmp_path: Path
) -> None:
    unpadded = EagerEngine(without_token(nano_dir, tmp_path, "pad_token"))
    assert unpadded.pad_id == unpadded.end_ids[0] == engine.end_ids[0] != engine.pad_id
    with_pad, with_eos = (e.generate(PROMPTS * 8, 12, 1.0, 0) for e in (engine, unpadded))
    assert 0 < with_eos.response_mask.mean() < 1, "some responses end early and are padded"
    assert torch.equal(with_eos.response_mask, with_pad.response_mask)
    assert torch.equal(with_eos.log_probs, with_pad.log_probs)


@pytest.mark.parametrize("is_static", [False, True], ids=["loop", "static"])
def test_a_seed_fixes_the_sample(engine: EagerEngine, is_static: bool) -> None:
    engine.is_static = is_static
    ids = [engine.generate(PROMPTS, 8, 1.0, seed).response_ids for seed in (7, 7, 8)]
    assert torch.equal(ids[0], ids[1])
    assert ids[0].shape != ids[2].shape or not torch.equal(ids[0], ids[2])


@pytest.mark.parametrize(
    "recipe",
    [Recipe.full(), Recipe.full(scale_policy="amax"), Recipe.ffn()],
    ids=["full-pow2", "full-amax", "ffn-pow2"],
)
def test_a_synced_engine_computes_what_the_trainer_computes(
    engine: EagerEngine, nano_dir: Path, recipe: Recipe
) -> None:
    policy = Policy(nano_dir, recipe, "cpu")
    engine.sync(weight_stream(policy.model, policy.plan, recipe))
    ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        trained, rolled_out = policy.model(input_ids=ids).logits, engine.model(input_ids=ids).logits
    assert torch.equal(trained, rolled_out)


def test_packed_weights_take_fewer_bytes(engine: EagerEngine, nano_dir: Path) -> None:
    bf16_bytes = engine.weight_bytes
    model = AutoModelForCausalLM.from_pretrained(nano_dir, dtype=torch.bfloat16)
    engine.sync(weight_stream(model, plan(model, Recipe.full()), Recipe.full()))
    assert engine.weight_bytes < 0.35 * bf16_bytes  # 0.28 for what is packed, embeddings besides


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda s: s.pop("model.norm.weight"), "missing", id="missing"),
        pytest.param(lambda s: s.update(extra=torch.ones(1)), "unknown", id="unknown"),
        pytest.param(
            lambda s: s.update({"model.norm.weight": torch.ones(3)}),
            "model.norm.weight",
            id="shape",
        ),
    ],
)
def test_a_wrong_stream_replaces_nothing(engine: EagerEngine, change, message: str) -> None:
    before = {name: p.clone() for name, p in engine.model.named_parameters()}
    stream = {name: torch.zeros_like(p) for name, p in before.items()}
    change(stream)
    with pytest.raises(ValueError, match=message):
        engine.sync(stream.items())
    assert all(torch.equal(p, before[name]) for name, p in engine.model.named_parameters())


def test_a_weight_that_comes_twice_is_refused(engine: EagerEngine) -> None:
    twice = [*engine.model.state_dict().items(), ("model.norm.weight", torch.zeros(1))]
    with pytest.raises(ValueError, match=r"model\.norm\.weight: comes twice"):
        engine.sync(twice)


@pytest.mark.parametrize("prompts", [[], [[]], [[3], []], [[3, -1]]])
def test_prompts_without_tokens_are_refused(engine: EagerEngine, prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"^prompts: each needs tokens"):
        engine.generate(prompts, 1, 1.0, 0)


def test_a_stream_that_packs_otherwise_than_its_plan_replaces_nothing(
    engine: EagerEngine, nano_dir: Path
) -> None:
    """As of a model that nobody prepared."""
    before = {name: p.clone() for name, p in engine.model.named_parameters()}
    model = AutoModelForCausalLM.from_pretrained(nano_dir, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.neg_()
    with pytest.raises(ValueError, match="stream and plan differ in what is NVFP4"):
        engine.sync(weight_stream(model), plan(model, Recipe.full()))
    assert all(torch.equal(p, before[name]) for name, p in engine.model.named_parameters())


@pytest.mark.gpu
def test_a_graph_reports_the_trainers_log_probs_after_every_sync(nano_dir: Path) -> None:
    """Log-probs of the graph differ from the trainer's by BF16 noise, as those of the loop do."""
    engine = EagerEngine(nano_dir, "cuda", max_tokens=60)
    policy = Policy(nano_dir, None, "cuda")
    for change in (0.0, 0.05):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.add_(change * torch.randn_like(parameter))
        engine.sync(weight_stream(policy.model, None, None))
        found = {}
        for is_static in (False, True):
            engine.is_static = is_static
            rollouts = engine.generate(PROMPTS * 80, 40, 1.0, 0)
            with torch.no_grad():
                log_ratio_BT = policy.log_probs(rollouts)[0] - rollouts.log_probs
            found[is_static] = k3(log_ratio_BT[rollouts.response_mask > 0]).mean().item()
        # other weights than the trainer's: 0.05 and more
        assert found[True] < max(10 * found[False], 1e-4)
