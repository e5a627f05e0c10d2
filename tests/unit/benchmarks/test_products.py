import pytest
import torch

from experiments.benchmarks.humming_tiles import COLUMNS, FOUND, row_of
from experiments.benchmarks.products.experts import Routing, in_token_order, random_routing
from experiments.benchmarks.products.humming_layer import humming_tensors
from experiments.benchmarks.products.layers import Layer, floors_us, layers_of, random_weight

EXPERTS = Layer("tiny", "gate_up", 64, 64, experts=8, experts_per_token=2)


def test_layers_hold_all_weights_of_a_qwen3_8b():
    weights = sum(layer.n * layer.k for layer in layers_of("qwen3-8b"))
    # 8.19e9 parameters, of which embedding and output head have 151,936 x 4,096 each
    assert 36 * weights == pytest.approx(8.19e9 - 2 * 151_936 * 4096, rel=1e-3)


def test_floor_of_one_token_is_bytes_and_of_many_is_math():
    layer = layers_of("qwen3-8b")[0]
    peak = {"bytes_per_s": 4e12, "flops_per_s": 8e14}
    few, many = (floors_us(layer, tokens, 0, peak) for tokens in (1, 8192))
    assert few["bf16"] / few["nvfp4"] == pytest.approx(2 / (9 / 16), rel=0.01)
    assert many["bf16"] == many["nvfp4"] == pytest.approx(1e6 * layer.flops(8192) / 8e14)


def test_floor_of_experts_counts_those_visited():
    layer = layers_of("qwen3-30b-a3b")[2]
    peak = {"bytes_per_s": 4e12, "flops_per_s": 8e14}
    assert floors_us(layer, 1, 128, peak)["bf16"] > 15 * floors_us(layer, 1, 8, peak)["bf16"]


def test_humming_gets_the_codes_in_the_order_of_k():
    packed, weight = random_weight(Layer("tiny", "qkv", 16, 64), "cpu")
    tensors = humming_tensors(packed)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    codes = (tensors["weight"][..., None] >> shifts & 0xF).flatten(-2)
    magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[(codes & 7).long()]
    value = torch.where(codes > 7, -magnitude, magnitude)
    scale = tensors["weight_scale"].float().repeat_interleave(16, dim=-1)
    assert torch.equal((value * scale * tensors["weight_scale_2"]).bfloat16(), weight)


def test_single_tokens_visit_other_experts_in_every_batch():
    batches = random_routing(EXPERTS, 1, "cpu", copies=4)
    visited = torch.cat([routing.experts.flatten() for routing in batches])
    assert sorted(visited.tolist()) == list(range(8))


def test_sorted_output_returns_to_token_order():
    routing = Routing(torch.tensor([[3, 0], [1, 3]], dtype=torch.int32), 4, rows_per_token=1)
    pairs = torch.arange(4.0)[:, None]
    assert torch.equal(in_token_order("grouped bf16", pairs[routing.order], routing), pairs)
    assert routing.source_rows.tolist() == [0, 1, 0, 1]  # experts 0, 1, 3, 3
    assert routing.ends.tolist() == [1, 2, 2, 4]


def test_a_search_is_recorded_as_a_row_that_its_table_draws() -> None:
    arm = {"us": [1.0, 12.0, 99.0], "error": 0.003, "differing_repeats": 20, "tile": None}
    found = arm | {"us": [1.0, 10.0, 99.0], "tile": {"block_shape": [8, 64, 256]}}
    case = {"layer": "m.qkv", "tokens": 1, "floor_us": {"nvfp4": 3.6}, "tiles_timed": 98}
    row = row_of(case | {"tiles_crashing": [], "arms": {"humming": arm, FOUND: found}})
    assert (row["of_humming"], row["tile"], row["arms.bf16.us"]) == (1.2, "8 x 64 x 256", None)
    assert row.keys() >= COLUMNS.keys() and row[f"arms.{FOUND}.us"] == [1.0, 10.0, 99.0]
