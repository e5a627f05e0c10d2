"""Tensor and expert parallel workers are written in place what they serve, and no more."""

from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from qat_core.nvfp4 import PackedTensor
from qat_core.rollout.vllm.in_place.sync import write_packed
from qat_core.rollout.vllm.in_place.targets import find_targets
from tests.marlin_layers import (
    EXPERT_NAMES,
    HIDDEN,
    INNER,
    ON_GPU,
    QKV,
    assert_experts_written,
    assert_written,
    marlin_experts,
    marlin_linear,
    packed_experts,
    packed_group,
    prepare_for_marlin_on_a_cpu,
    stacked,
    tensors_of,
)

ROWS, COLUMNS = -2, -1


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        prepare_for_marlin_on_a_cpu(monkeypatch)


def piece(packed: PackedTensor, dim: int, num: int, at: int) -> PackedTensor:
    """One of so many pieces of the rows or columns, also of each expert's."""
    codes, scale = (
        tensor.view(torch.uint8).chunk(num, dim)[at].contiguous()
        for tensor in (packed.codes, packed.block_scale)
    )
    return PackedTensor(codes, scale.view(torch.float8_e4m3fn), packed.global_scale)


@pytest.mark.parametrize("rank", range(4))
def test_a_worker_of_four_is_written_its_heads_alone(rank: int) -> None:
    """Of two heads of keys and values each serves two workers."""
    shapes = [(256, HIDDEN), (128, HIDDEN), (128, HIDDEN)]

    def served_of(seed: int) -> list[PackedTensor]:
        q, *kv = packed_group(shapes, seed)
        return [piece(q, ROWS, 4, rank), *(piece(it, ROWS, 2, rank // 2) for it in kv)]

    layer = marlin_linear(served_of(0), rank, workers=4, replicas=2)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors_of(layer).items()}
    targets = find_targets([(layer, list(QKV))], {})
    stream = zip(QKV, packed_group(shapes, 1), strict=True)
    assert list(write_packed(stream, targets, None)) == []
    assert_written(layer, marlin_linear(served_of(1)), addresses)


def half_of_the_columns(rank: int) -> Any:
    (whole,) = packed_group([(128, HIDDEN)], 0)
    return marlin_linear([piece(whole, COLUMNS, 2, rank)], rank, workers=2, dim=1)


@pytest.mark.parametrize("rank", range(2))
def test_a_worker_of_two_is_written_its_columns_alone(rank: int) -> None:
    layer = half_of_the_columns(rank)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors_of(layer).items()}
    targets = find_targets([(layer, ["o"])], {})
    (packed,) = packed_group([(128, HIDDEN)], 1)
    targets["o"].take("o", packed)
    assert_written(layer, marlin_linear([piece(packed, COLUMNS, 2, rank)]), addresses)


@pytest.mark.parametrize("rank", range(2))
def test_a_worker_of_two_is_written_its_part_of_each_expert(rank: int) -> None:
    def served_of(seed: int) -> list[PackedTensor]:
        w13, w2 = packed_experts(seed, 2 * INNER)
        gate, up = (piece(piece(w13, ROWS, 2, at), ROWS, 2, rank) for at in range(2))
        return [stacked([gate, up]), piece(w2, COLUMNS, 2, rank)]

    w13, w2 = served_of(0)
    layer = marlin_experts(w13, w2, rank, workers=2)
    assert_experts_written(layer, marlin_experts(*served_of(1)), 2 * INNER)


@pytest.mark.parametrize("own", [[0, 1], [2, 3], [1, 3]])
def test_an_expert_parallel_worker_is_written_its_experts_alone(own: list[int]) -> None:
    def served_of(seed: int) -> list[PackedTensor]:
        return [
            PackedTensor(it.codes[own], it.block_scale[own], it.global_scale[own])
            for it in packed_experts(seed)
        ]

    w13, w2 = served_of(0)
    layer = marlin_experts(w13, w2, workers=2, own=own)
    assert_experts_written(layer, marlin_experts(*served_of(1)))


@pytest.mark.parametrize(("rows", "columns"), [(64, HIDDEN), (128, HIDDEN // 2), (256, HIDDEN)])
def test_a_weight_that_is_no_whole_of_two_shares_is_refused(rows: int, columns: int) -> None:
    """Half of it would do for keys and values that several workers serve."""
    (sent,) = packed_group([(rows, columns)], 1)
    (of_rows,) = packed_group([(64, HIDDEN)], 0)
    for layer in (marlin_linear([of_rows], workers=2), half_of_the_columns(0)):
        targets = find_targets([(layer, ["o"])], {})
        message = rf"^weight sync: o: \({rows}, {columns}\) is sent, \(128, {HIDDEN}\) served: "
        with pytest.raises(ValueError, match=message):
            targets["o"].take("o", sent)


@pytest.mark.parametrize("inner", [INNER, 4 * INNER, 2 * INNER + 16])
def test_experts_that_are_no_whole_of_two_shares_are_refused(inner: int) -> None:
    layer = marlin_experts(*packed_experts(0), workers=2)  # of 2 * INNER columns
    targets = find_targets([(layer, EXPERT_NAMES)], {})
    for name, sent in zip(EXPERT_NAMES, packed_experts(1, inner), strict=True):
        with pytest.raises(ValueError, match=f"^weight sync: {name}: .* is sent, .* served: "):
            targets[name].take(name, sent)
