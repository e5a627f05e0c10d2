import torch

from experiments.benchmarks.humming_tiles import COLUMNS, FOUND, row_of
from experiments.benchmarks.products.humming_layer import humming_tensors
from experiments.benchmarks.products.layers import Layer, random_weight


def test_humming_gets_the_codes_in_the_order_of_k():
    packed, weight = random_weight(Layer("tiny", "qkv", 16, 64), "cpu")
    tensors = humming_tensors(packed)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    codes = (tensors["weight"][..., None] >> shifts & 0xF).flatten(-2)
    magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[(codes & 7).long()]
    value = torch.where(codes > 7, -magnitude, magnitude)
    scale = tensors["weight_scale"].float().repeat_interleave(16, dim=-1)
    assert torch.equal((value * scale * tensors["weight_scale_2"]).bfloat16(), weight)


def test_a_search_is_recorded_as_a_row_that_its_table_draws() -> None:
    arm = {"us": [1.0, 12.0, 99.0], "error": 0.003, "differing_repeats": 20, "tile": None}
    found = arm | {"us": [1.0, 10.0, 99.0], "tile": {"block_shape": [8, 64, 256]}}
    case = {"layer": "m.qkv", "tokens": 1, "floor_us": {"nvfp4": 3.6}, "tiles_timed": 98}
    row = row_of(case | {"tiles_crashing": [], "arms": {"humming": arm, FOUND: found}})
    assert (row["of_humming"], row["tile"], row["arms.bf16.us"]) == (1.2, "8 x 64 x 256", None)
    assert row.keys() >= COLUMNS.keys() and row[f"arms.{FOUND}.us"] == [1.0, 10.0, 99.0]
