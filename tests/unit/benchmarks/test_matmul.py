import json
import sys

import pytest
import torch

from experiments.benchmarks import matmul, matmul_bits, matmul_summary
from experiments.benchmarks.products.cases import case, different, equal_groups, prefix, prepare
from experiments.benchmarks.products.experts import Routing, in_token_order, random_routing
from experiments.benchmarks.products.humming_layer import humming_tensors
from experiments.benchmarks.products.layers import Layer, floors_us, layers_of, random_weight
from experiments.study.schema import ROOT

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


@pytest.mark.parametrize("layer", matmul.CPU_LAYERS, ids=lambda layer: layer.name)
def test_prefix_multiplies_the_same_rows(layer):
    arm = "grouped bf16" if layer.experts else "bf16"
    whole = case(prepare(layer, [arm], [8], "cpu", cold=False), 8)
    part = prefix(whole, 3)
    rows, reference = part.reference()
    assert len(part.output(arm)) == 3 * layer.experts_per_token
    assert torch.equal(reference, whole.reference()[1][rows])


def test_equal_groups_compare_bits():
    zero = torch.zeros(2, dtype=torch.bfloat16)
    groups = equal_groups({"a": zero, "b": -zero, "c": zero.clone()})
    assert groups == [["a", "c"], ["b"]]
    assert different(zero, -zero) == 2


@pytest.mark.parametrize("program", [matmul, matmul_bits], ids=["times", "bits"])
def test_program_runs_without_a_gpu(program, tmp_path, monkeypatch):
    record = tmp_path / "record.json"
    options = ["--device", "cpu", "--tokens", "1", "4"]
    monkeypatch.setattr(sys, "argv", ["program", str(record), *options])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "")
    program.main()
    cases = json.loads(record.read_text())["cases"]
    errors = [arm["error"] for row in cases for arm in row["arms"].values()]
    assert errors and max(errors) <= matmul.MAX_ERROR


def test_repeats_are_counted_that_differ_from_the_first():
    weights = prepare(matmul.CPU_LAYERS[0], ["bf16"], [2], "cpu", cold=False)
    (product,) = weights.products["bf16"]
    calls = iter(range(1 + matmul_bits.REPEATS))
    weights.products["odd"] = [lambda x: product(x) + (next(calls) in (3, 5, 20))]
    this = case(weights, 2)
    outputs, _ = this.outputs()
    arms = matmul_bits.describe(this, outputs, outputs)
    assert {arm: it["differing_repeats"] for arm, it in arms.items()} == {"bf16": 0, "odd": 3}


def test_measured_cases_are_kept(tmp_path, monkeypatch):
    record, first = tmp_path / "record.json", None
    for tokens in (["1"], ["1", "2"]):
        options = ["--device", "cpu", "--rounds", "1", "--layers", "tiny.qkv", "--tokens", *tokens]
        monkeypatch.setattr(sys, "argv", ["program", str(record), *options])
        matmul.main()
        cases = json.loads(record.read_text())["cases"]
        assert [row["tokens"] for row in cases] == [int(count) for count in tokens]
        first = first or cases[0]
        assert cases[0] == first, "measured again"


@pytest.mark.parametrize(
    ("key", "value"),
    [("git", {"commit": "another"}), ("hardware", {"gpus": ["another"]}), ("rounds", 9)],
)
def test_a_record_of_another_origin_is_not_gone_on_with(tmp_path, monkeypatch, key, value):
    record = tmp_path / "record.json"
    options = ["--device", "cpu", "--rounds", "1", "--layers", "tiny.qkv", "--tokens", "1"]
    monkeypatch.setattr(sys, "argv", ["program", str(record), *options])
    matmul.main()
    text = json.dumps(json.loads(record.read_text()) | {key: value})
    record.write_text(text)
    with pytest.raises(ValueError, match=rf"record\.json: {key} differs: name a new file"):
        matmul.main()
    assert record.read_text() == text


def test_wrong_results_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(matmul, "MAX_ERROR", 1e-6)
    options = ["--device", "cpu", "--rounds", "1", "--layers", "tiny.qkv", "--tokens", "1"]
    monkeypatch.setattr(sys, "argv", ["program", str(tmp_path / "record.json"), *options])
    with pytest.raises(SystemExit, match=r"tiny\.qkv at 1: bf16 is off by"):
        matmul.main()


def test_a_refusal_is_recorded_and_the_others_measured():
    def refuse(x):
        raise ValueError("no such shape")

    weights = prepare(matmul.CPU_LAYERS[0], ["bf16"], [2], "cpu", cold=False)
    weights.products["odd"] = [refuse]
    peak = {"bytes_per_s": 1e9, "flops_per_s": 1e9}
    figures = matmul.measure(weights, 2, "cpu", 1, peak)
    assert figures["refusals"] == {"odd": "ValueError: no such shape"}
    assert list(figures["arms"]) == ["bf16"]


def test_our_triton_kernel_compiles_to_hoppers_matrix_instructions():
    pytest.importorskip("triton")
    from experiments.benchmarks.products.triton_kernel import TILES, compile_for

    for _, tile in TILES:
        compiled = compile_for(tile, capability=90)
        assert f"wgmma.mma_async.sync.aligned.m64n{tile.m}k16.f32.bf16.bf16" in compiled.asm["ptx"]
        assert compiled.metadata.shared <= 227 * 1024  # what a thread block may have there


def test_totals_add_up_what_every_product_has():
    def row(name, tokens, **us):
        arms = {arm: {"us": [0.0, value, 9.0]} for arm, value in us.items()}
        floors = {"nvfp4": 1.0, "bf16": 2.0}
        return {"layer": f"m.{name}", "tokens": tokens, "experts_hit": 0} | {
            "arms": arms,
            "floor_us": floors,
        }

    cases = [row("qkv", 1, bf16=3.0, marlin=1.0), row("o", 1, bf16=4.0), row("o", 8, bf16=5.0)]
    floors = {"floor nvfp4": 2.0, "floor bf16": 4.0}
    assert matmul_summary.totals(cases, "m", "dense") == {1: floors | {"bf16": 7.0}}
    assert matmul_summary.totals(cases, "m", "experts") == {}


@pytest.mark.parametrize("benchmark", ["matmul_bits", None])
def test_totals_of_another_record_are_refused(benchmark, tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"benchmark": benchmark, "cases": ["a"]}))
    monkeypatch.setattr(sys, "argv", ["matmul_summary", str(path)])
    with pytest.raises(ValueError, match=f"benchmark: {benchmark}; name a record of `matmul`"):
        matmul_summary.main()


def test_totals_of_a_record_are_printed(monkeypatch, capsys):
    path = ROOT / "experiments" / "records" / "benchmarks" / "matmul_h200.json"
    monkeypatch.setattr(sys, "argv", ["matmul_summary", str(path)])
    matmul_summary.main()
    assert "qwen3-30b-a3b, experts, us a layer" in capsys.readouterr().out
