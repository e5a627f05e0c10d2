"""Which rows of a batch are one sequence."""

import torch

from qat_core.exact.layout import Layouts, find_layout

PADDED = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])


def test_padding_belongs_to_no_sequence() -> None:
    layout = find_layout(PADDED, torch.arange(4)[None], torch.Size((2, 4)))
    assert layout.rows is not None
    assert layout.rows.tolist() == [2, 3, 4, 5, 6]
    assert layout.starts.tolist() == [0, 2, 5]
    assert layout.longest == 3


def test_packed_sequences_begin_where_positions_do_not_go_on() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1]])
    layout = find_layout(None, positions, torch.Size((1, 6)))
    assert layout.rows is None
    assert layout.starts.tolist() == [0, 3, 4, 6]
    assert layout.longest == 3


def test_rows_of_a_batch_are_sequences_of_their_own() -> None:
    layout = find_layout(None, torch.arange(3)[None], torch.Size((2, 3)))
    assert layout.starts.tolist() == [0, 3, 6]


def test_layers_of_one_pass_share_a_layout_and_another_pass_has_its_own() -> None:
    layouts, shape, positions = Layouts(), torch.Size((2, 4)), torch.arange(4)[None]
    first = layouts.of(PADDED, positions, shape)
    assert layouts.of(PADDED, positions, shape) is first
    assert layouts.of(PADDED.clone(), positions, shape) is not first


def test_a_buffer_that_is_filled_again_has_another_layout() -> None:
    layouts, shape, positions = Layouts(), torch.Size((2, 4)), torch.arange(4)[None]
    buffer = PADDED.clone()
    assert layouts.of(buffer, positions, shape).longest == 3
    buffer.fill_(1)
    assert layouts.of(buffer, positions, shape).longest == 4
