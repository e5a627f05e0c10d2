"""Which tile of humming-kernels 0.1.19 multiplies how many rows, where vLLM serves.

Humming's own choice splits many sums between thread blocks, which add their parts in BF16, three or
more of them in any order. A search on an H200 found better ones (docs/history.md,
`humming_tiles`), for few sizes; where it found none, Humming's own choice stays.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

ANY_MORE = 1 << 30  # Humming's word for a tile that serves any number of rows
# On an H100 this way took at most 8 % more time than the better of both, at every number of rows,
# for the linear layers of Qwen3-8B and 30B-A3B (docs/history.md: products).
UNPACK_FROM = 2048
# Of the exact mode, whose products are ours below: timed on an H200, 8B and 30B-A3B together.
EXACT_UNPACK_FROM = 1025
EXACT_ROWS = 16  # of an expert; Humming's batch-invariant tiles serve more
# Of Humming's table, with some 30 kernels a layer shape, these rows' tiles serve all up to them.
TILED_ROWS = (8, 32, 64, 128, 256, 512, 1024, UNPACK_FROM)
# Likewise for pairs of a token and an expert; the last one's tile serves any more.
TILED_PAIRS = (8, 16, 800, 1280, 2048, 3072, 4096, 8192, 16384, 65536)
NUM_MULTIPROCESSORS = 132  # of H100 and H200
# So many blocks of threads keep them busy, and the second number does so several times over.
BUSY_FROM, BUSY_OFTEN_FROM = 96, 264
SHORT_SUM = 4096  # up to here a linear layer's sums need not be split to be fast
# Experts' sums up to here are better served by wide tiles; of 768 and 2,048 both were timed.
SHORT_EXPERT_SUM = 1024

EXACT = {"use_batch_invariant": True}  # Humming's word for it

Tile = dict[str, Any]


def tiles_for(config: Any, compute: dict[str, Any], rows: Sequence[int]) -> list[Any]:
    """Of Humming's table (rows above, rows up to, tile) the entries that `rows` need."""
    from humming.tune import get_heuristics_config

    return for_rows(get_heuristics_config(config, **compute), rows)


def for_rows(table: Sequence[Any], rows: Sequence[int]) -> list[Any]:
    """The entries (rows above, rows up to, tile) of a table that some numbers of rows need."""
    return [entry for entry in table if any(entry[0] < m <= entry[1] for m in rows)]


def linear_tiles(config: Any) -> list[Any]:
    """(rows above, rows up to, tile) of a linear layer, by Humming's configuration of it."""
    own = tiles_for(config, {"gemm_type": "dense"}, TILED_ROWS)
    table: list[Any] = []
    for above, up_to in pairwise((0, *TILED_ROWS)):
        tile = linear_tile(config.shape_n, config.shape_k, up_to)
        table.append([above, up_to, tile or faster(for_rows(own, [up_to])[0][2], up_to)])
    return table


def faster(tile: Tile, rows: int) -> Tile:
    """Humming's own tile, at 256 rows with the order of instructions that was 1 to 2 % faster."""
    is_timed = rows == 256 and tile["mma_type"] == "wgmma"
    return tile | {"wgmma_split_issue_wait": True} if is_timed else tile


def linear_tile(n: int, k: int, rows: int) -> Tile | None:
    """The tile found for up to 8 or 32 rows of a layer (N, K), or None: Humming's own choice.

    Each block of threads has 64 columns. Where they are enough to keep the GPU busy, or sums of up
    to 8 rows are short, a block has all rows and all of K: bits repeat and a sum is rounded once.

    With fewer columns and up to 32 rows, blocks of 16 rows are twice as many, if sums are short.
    If the blocks are then still at most half of what the GPU runs at once, sums are split. In the
    layers that were timed that makes two parts, whose order does not matter: bits repeat. With 9 to
    16 rows, a single block of 16, there are more parts.
    """
    blocks, is_short = n // 64, k <= SHORT_SUM
    is_busy, is_small = blocks >= BUSY_FROM, rows <= 8
    if rows > 32 or n % 64 or k % 256:
        return None
    if blocks >= BUSY_OFTEN_FROM:
        warp, stages = ((rows, 32, 64), 5) if is_small else ((rows, 64, 32), 4)
        return _mma((rows, 64, 128), warp, stages, blocks_at_once=3)
    if is_busy:
        return _mma((rows, 64, 256), (rows, 32, 64), stages=5, blocks_at_once=1)
    if is_small:
        return _mma((rows, 64, 256), (rows, 32, 64), 5, blocks_at_once=2) if is_short else None
    if 2 * blocks > NUM_MULTIPROCESSORS:
        found = _mma((32, 64, 128), (32, 32, 32), stages=5, blocks_at_once=3)
        return found | {"use_warp_spec": True} if is_short else None
    block_rows = 16 if is_short else 32
    is_split = 2 * blocks * (32 // block_rows) <= NUM_MULTIPROCESSORS
    found = _mma((block_rows, 64, 256), (block_rows, 32, 64), stages=4, blocks_at_once=1)
    return found | {"use_stream_k": is_split}


def expert_tiles(config: Any, device: Any = None) -> list[Any]:
    """(pairs above, pairs up to, tile) of experts, by Humming's configuration; none splits a sum.

    For experts splitting is no faster and has larger errors at some numbers of tokens
    (experiments/records/benchmarks/README.md).
    """
    from humming.tune import get_heuristics_config

    sizes = (config.num_experts, config.shape_n, config.shape_k)
    table: list[Any] = []
    for above, pairs in pairwise((0, *TILED_PAIRS)):
        up_to = ANY_MORE if pairs == TILED_PAIRS[-1] else pairs
        tile = expert_tile(*sizes, pairs)
        if tile is None:
            own = get_heuristics_config(config, pairs, gemm_type="indexed", device=device)
            tile = own | {"use_stream_k": False}
        table.append([above, up_to, tile])
    return table


def exact_expert_tiles(config: Any, device: Any = None) -> list[Any]:
    """As `expert_tiles`, of Humming's batch-invariant tiles."""
    from humming.tune import get_heuristics_config

    tiles = [
        get_heuristics_config(config, pairs, gemm_type="indexed", device=device, **EXACT)
        for pairs in TILED_PAIRS
    ]
    ends = (*TILED_PAIRS[:-1], ANY_MORE)
    return [list(row) for row in zip((0, *TILED_PAIRS[:-1]), ends, tiles, strict=True)]


def expert_tile(experts: int, n: int, k: int, pairs: int) -> Tile | None:
    """The tile found for up to so many pairs of E experts (N, K), or None: Humming's own choice."""
    is_short, rows = k <= SHORT_EXPERT_SUM, pairs / experts  # of an expert
    if pairs <= 16:  # timed: 8
        tile = (
            _mma((8, 64, 64), (8, 32, 32), stages=5, blocks_at_once=2)
            if is_short
            else _mma((8, 64, 128), (8, 64, 32), stages=4, blocks_at_once=2)
        )
    elif rows <= 6.25:  # timed: 2
        tile = (
            _mma((8, 512, 32), (8, 64, 32), stages=5, blocks_at_once=3)
            if is_short
            else _mma((8, 128, 128), (8, 64, 64), stages=4, blocks_at_once=3)
        )
    elif is_short and 10 < rows <= 16:  # timed: 16
        tile = _mma((24, 512, 64), (24, 64, 64), stages=4, blocks_at_once=2)
        tile |= {"mma_type": "wgmma", "wgmma_split_issue_wait": True}
    else:
        return None
    _, block_n, block_k = tile["block_shape"]
    return None if n % block_n or k % block_k else tile


def _mma(
    block: tuple[int, int, int], warp: tuple[int, int, int], stages: int, blocks_at_once: int
) -> Tile:
    return {
        "mma_type": "mma",
        "block_shape": block,
        "warp_shape": warp,
        "num_stages": stages,
        "num_ctas_per_sm": blocks_at_once,
        "use_stream_k": False,
        "use_tma": False,
        "use_warp_spec": False,
    }
