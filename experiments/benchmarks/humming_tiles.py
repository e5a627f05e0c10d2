"""Do products by humming-kernels 0.1.19 have to split sums to be fast?

    python -m experiments.benchmarks.humming_tiles RECORD.json [--layers KEY ...] [--tokens M ...]

Its own choice of tiles splits sums between thread blocks, which then add in BF16 and in any order,
so that bits vary. For each product of a decoder layer and each number of tokens this searches the
tiles that do not, with `--split-sums` also those that do: its own choice and some drawn from all
that Humming can compile, with `--exact` those of which one warp adds all of K, whose bits have to
be those of Humming's batch-invariant mode, then the neighbours of the best, then the best of all
against its own choice, Marlin and BF16, all in turns. How often bits repeat is counted. CUDA graphs
are timed, with weights that are not in the L2 cache. What the record has already is kept. Some
tiles access memory that is not theirs, which ends a process's use of the GPU: the search begins
again without them.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from rich.console import Console

from experiments.benchmarks.device import require_device
from experiments.benchmarks.matmul import batches, layers, measure_peak, missing_tokens
from experiments.benchmarks.products.cases import (
    Call,
    case,
    different,
    differing_repeats,
    prepare,
    relative_error,
)
from experiments.benchmarks.products.experts import multiply_routed
from experiments.benchmarks.products.humming_layer import HummingLayer
from experiments.benchmarks.products.layers import Layer, floors_us
from experiments.benchmarks.products.tiles import Point, Tiles
from experiments.benchmarks.records import read_continued
from experiments.benchmarks.timing import quartiles, time_calls
from experiments.runs.provenance import origin
from experiments.support.cli import run_cli
from experiments.support.json_files import write_json
from experiments.support.subprocess_call import call_in_subprocess
from qat_core.arguments import positive_int

TOKENS = [1, 32, 256]
SEARCH_ROUNDS, FINAL_ROUNDS = 5, 20
WALKS, WALKED_FROM = 3, 2  # how often the neighbours of so many best tiles are tried
FINALISTS = 3
IN_TURNS = 12  # tiles of one search that are timed together
# Twice the error of sums that are split and rounded to BF16 (docs/performance.md): a wrong kernel
# is off by far more.
MAX_ERROR = 8e-3

Found = dict[Point, tuple[dict[str, Any], float]]  # tile and microseconds


class CrashedError(Exception):
    """A tile, `args[0]`, that has ended this process's use of the GPU."""


class Search:
    """The search for one product's tiles at one number of tokens.

    Args:
        layer, tokens: the product.
        samples: how many tiles to draw.
        split_sums: whether a tile may split sums.
        exact: only tiles with the bits of Humming's batch-invariant mode.
        crashing: tiles to leave out.
    """

    def __init__(
        self,
        layer: Layer,
        tokens: int,
        samples: int,
        split_sums: bool,
        exact: bool,
        crashing: Sequence[Mapping[str, Any]],
    ) -> None:
        bf16 = "triton bf16" if layer.experts else "bf16"
        ours = "humming invariant" if exact else "humming served"
        self._arms = [bf16, "marlin", "humming", "humming unsplit", ours]
        weights = prepare(layer, self._arms, [tokens], "cuda")
        self.case = case(weights, tokens, copies=batches(tokens))
        self._rows, self._reference = self.case.reference()
        self._layers = [_humming_layer(product) for product in weights.products["humming"]]
        gemm_type = "indexed" if layer.experts else "dense"
        pairs = tokens * layer.experts_per_token
        config = self._layers[0].config
        block_rows = _block_rows(layer, tokens)
        self.tiles = Tiles(config, gemm_type, pairs, block_rows, split_sums=split_sums, exact=exact)
        own = weights.products["humming invariant"] if exact else weights.products["humming"]
        self._own = self.tiles.near(_humming_layer(own[0]).tile(pairs))
        self._expected = self.case.calls("humming invariant")[0]() if exact else None
        self._samples, self._random = samples, Random(0)
        self.refused, self._crashing = 0, crashing

    def run(self) -> dict[str, Any]:
        """The best tiles found, and the others' times beside them."""
        found = self._best()
        fastest = _fastest(found, FINALISTS).values()
        tiles = {f"found {index}": tile for index, (tile, _) in enumerate(fastest)}
        calls = {arm: self.case.calls(arm) for arm in self._arms} | {
            name: self._calls(tile) for name, tile in tiles.items()
        }
        times = time_calls(calls, "cuda", FINAL_ROUNDS)
        outputs = {name: of_arm[0]() for name, of_arm in calls.items()}
        return {
            "tiles_timed": len(found),
            "tiles_refused": self.refused,
            "tiles_crashing": self._crashing,
            "arms": {
                name: {
                    "us": quartiles(times[name]),
                    "error": relative_error(out, self._rows, self._reference),
                    "differing_repeats": differing_repeats(calls[name][0], out),
                    "tile": tiles.get(name),
                }
                for name, out in outputs.items()
            },
        }

    def _best(self) -> Found:
        drawn = self.tiles.sample(self._samples, self._random)
        found = self._time(self._own | drawn)
        for _ in range(WALKS):
            beside = {
                point: tile
                for start in _fastest(found, WALKED_FROM)
                for point, tile in self.tiles.beside(start)
            }
            found |= self._time({it: tile for it, tile in beside.items() if it not in found})
        return found

    def _time(self, tiles: Mapping[Point, dict[str, Any]]) -> Found:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = list(pool.map(self._compiles, tiles.values()))
        good = [
            it for it, ok in zip(tiles.items(), compiled, strict=True) if ok and self._right(it[1])
        ]
        self.refused += len(tiles) - len(good)
        found: Found = {}
        for start in range(0, len(good), IN_TURNS):
            some = dict(good[start : start + IN_TURNS])
            calls = {str(it): self._calls(tile) for it, tile in some.items()}
            times = time_calls(calls, "cuda", SEARCH_ROUNDS)
            found |= {it: (tile, median(times[str(it)])) for it, tile in some.items()}
        return found

    def _compiles(self, tile: dict[str, Any]) -> bool:
        try:
            self._layers[0].with_tile(tile).compile()
        except (AssertionError, RuntimeError, ValueError):
            return False
        return True

    def _right(self, tile: dict[str, Any]) -> bool:
        if tile in self._crashing:
            return False
        try:
            out = self._calls(tile)[0]()
            if self._expected is not None:
                return not different(out, self._expected)
            return relative_error(out, self._rows, self._reference) <= MAX_ERROR
        except torch.AcceleratorError as error:
            raise CrashedError(tile) from error
        except (RuntimeError, ValueError, AssertionError):
            return False

    def _calls(self, tile: dict[str, Any]) -> list[Call]:
        tiled = [layer.with_tile(tile) for layer in self._layers]
        x = self.case.x
        if self.case.routings:
            return [partial(multiply_routed, tiled[0], x, it) for it in self.case.routings]
        return [partial(layer.multiply, x) for layer in tiled]


def _humming_layer(product: Any) -> HummingLayer:
    layer: HummingLayer = product.args[0] if isinstance(product, partial) else product.__self__
    return layer


def _block_rows(layer: Layer, tokens: int) -> Sequence[int]:
    """Rows of a tile that can pay, for as many as one matrix has."""
    rows = tokens * layer.experts_per_token // layer.experts if layer.experts else tokens
    if rows <= 8:
        return (8, 16) if layer.experts and tokens > 1 else (8,)
    return [it for it in (16, 24, 32, 48, 64, 96, 128, 192, 256) if rows // 4 <= it <= rows + 8]


def _fastest(found: Found, count: int) -> Found:
    return dict(sorted(found.items(), key=lambda item: item[1][1])[:count])


def search(
    layer: Layer,
    tokens: int,
    peak: dict[str, float],
    samples: int,
    split_sums: bool,
    exact: bool,
    crashing: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """A row of the record.

    Raises:
        CrashedError: a tile has crashed.
    """
    torch.manual_seed(0)
    found = Search(layer, tokens, samples, split_sums, exact, crashing)
    floors = floors_us(layer, tokens, found.case.experts_hit, peak)
    return {"layer": layer.key, "tokens": tokens, "floor_us": floors, **found.run()}


def search_without_crashing(*arguments: Any) -> dict[str, Any]:
    """A row of the record, in a new process after each tile that crashes."""
    crashing: list[dict[str, Any]] = []
    while True:
        try:
            return call_in_subprocess(search, *arguments, crashing)
        except CrashedError as error:
            crashing.append(error.args[0])


def main() -> None:
    """Searches what the record lacks and writes it after each layer."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--layers", nargs="+", metavar="MODEL.NAME")
    parser.add_argument("--tokens", nargs="+", type=positive_int, default=TOKENS)
    parser.add_argument("--samples", type=positive_int, default=60)
    parser.add_argument("--split-sums", action="store_true", help="also tiles that split sums")
    parser.add_argument("--exact", action="store_true", help="only with the exact mode's bits")
    arguments = parser.parse_args()
    if arguments.split_sums and arguments.exact:
        raise ValueError("--exact: its tiles split no sum; leave --split-sums out")
    require_device("cuda")
    chosen = layers("cuda", arguments.layers)
    setup = {
        "benchmark": "humming_tiles",
        **origin("cuda", arguments.record),
        "samples": arguments.samples,
        "split_sums": arguments.split_sums,
        "exact": arguments.exact,
    }
    record = read_continued(arguments.record, setup) or {
        **setup,
        "peak": measure_peak("cuda"),
        "cases": [],
    }
    for layer in chosen:
        for tokens in missing_tokens(record, layer, arguments.tokens):
            options = (
                record["peak"],
                arguments.samples,
                arguments.split_sums,
                arguments.exact,
            )
            row = search_without_crashing(layer, tokens, *options)
            record["cases"].append(row)
            write_json(arguments.record, record)
            shown = {name: round(it["us"][1], 1) for name, it in row["arms"].items()}
            Console(width=160).print(row["layer"], row["tokens"], shown)


if __name__ == "__main__":
    run_cli(main)
