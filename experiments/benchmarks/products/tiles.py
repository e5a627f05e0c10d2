"""The space of tiles that humming-kernels 0.1.19 has on Hopper, and how to walk in it.

A point has a value for each of AXES. Humming's own analysis says which of them a kernel can be
compiled for.
"""

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

AXES: dict[str, Sequence[Any]] = {
    "mma_type": ("mma", "wgmma"),
    "warp_m": (8, 16, 24, 32, 48, 64, 96, 128, 192),
    "m_warps": (1, 2, 4),
    "warp_n": (32, 64),
    "n_warps": (1, 2, 4, 8, 16),
    "warp_k": (32, 64, 128),
    "k_warps": (1, 2, 4),
    "num_stages": (3, 4, 5, 6),
    "num_ctas_per_sm": (1, 2, 3),
    "use_tma": (False, True),
    "use_warp_spec": (False, True),
    "multi_cast_size_a": (1, 2),
    "multi_cast_size_b": (1, 2),
    "wgmma_split_issue_wait": (False, True),
    "producer_stage_unroll": (None, 1, 2),
    "smem_reuse_mode": ("all_stages", "none"),
    "raster_group_m": (1, 2, 8),
    "use_stream_k": (False, True),  # splits some sums between thread blocks
}
GEOMETRY = ("warp_m", "m_warps", "warp_n", "n_warps", "warp_k", "k_warps")
PLAIN = tuple(name for name in AXES if name not in GEOMETRY)  # Humming's names
NOT_ANALYZED = "multi_cast_size_b"
DEFAULTS = {  # of Humming, for what its choice does not name
    "num_ctas_per_sm": 1,
    "use_tma": False,
    "use_warp_spec": False,
    "multi_cast_size_a": 1,
    "multi_cast_size_b": 1,
    "wgmma_split_issue_wait": False,
    "smem_reuse_mode": "all_stages",
    "raster_group_m": 1,
    "use_stream_k": True,
}
Point = tuple[Any, ...]


class Tiles:
    """The tiles of one product at one number of rows.

    Args:
        config: Humming's, of the layer.
        gemm_type: "dense", or "indexed" for experts.
        rows: of all experts together.
        block_rows: how many rows a tile may have.
        split_sums: whether a tile may split sums between thread blocks.
        exact: only tiles whose one warp adds all of K, in its order.
    """

    def __init__(
        self,
        config: Any,
        gemm_type: str,
        rows: int,
        block_rows: Sequence[int],
        *,
        split_sums: bool,
        exact: bool = False,
    ) -> None:
        from humming.config import GemmType
        from humming.tune.candidate import TuningProblem
        from humming.tune.sm90 import Sm90Heuristics

        device = Sm90Heuristics.get_device_profile(include_grid_size=True)
        self._problem = TuningProblem(config, rows, GemmType(gemm_type), device)
        self._block_rows, self._split_sums, self._exact = set(block_rows), split_sums, exact
        # TMA cannot gather the rows of experts
        is_routed = gemm_type == "indexed"
        self._fixed = {"use_tma_a": False, "use_tma_c": False} if is_routed else {}

    def tile(self, point: Point) -> dict[str, Any] | None:
        """Humming's words for a point, or None where there is no such kernel."""
        from humming.tune.candidate import ScheduleCandidate, analyze_candidate

        value = dict(zip(AXES, point, strict=True))
        warp = (value["warp_m"], value["warp_n"], value["warp_k"])
        warps = (value["m_warps"], value["n_warps"], value["k_warps"])
        block = tuple(size * count for size, count in zip(warp, warps, strict=True))
        is_wgmma = value["mma_type"] == "wgmma"
        if block[0] not in self._block_rows or (value["wgmma_split_issue_wait"] and not is_wgmma):
            return None
        if value["use_stream_k"] and not self._split_sums:
            return None
        if value["k_warps"] > 1 and self._exact:
            return None
        # Humming's rule (testing/tuning.py), which its analysis lacks
        has_feeder = value["use_tma"] and value["use_warp_spec"] and value["multi_cast_size_a"] == 1
        if value["multi_cast_size_b"] > 1 and (self._fixed or not has_feeder):
            return None
        plain = {name: value[name] for name in PLAIN}
        tile = {"block_shape": block, "warp_shape": warp, **plain}
        known = {name: it for name, it in tile.items() if name != NOT_ANALYZED}
        try:
            analysis = analyze_candidate(
                self._problem, ScheduleCandidate.from_config("walked", known)
            )
        except (ArithmeticError, ValueError):
            return None
        return tile | self._fixed if analysis.legal else None

    def near(self, tile: Mapping[str, Any]) -> dict[Point, dict[str, Any]]:
        """The point of Humming's own choice, or the one with whole sums; {} if not in the space."""
        block, warp = tile["block_shape"], tile["warp_shape"]
        value = dict.fromkeys(AXES) | DEFAULTS | {n: tile[n] for n in PLAIN if n in tile}
        for letter, of_block, of_warp in zip("mnk", block, warp, strict=True):
            value |= {f"warp_{letter}": of_warp, f"{letter}_warps": of_block // of_warp}
        value["use_stream_k"] = value["use_stream_k"] and self._split_sums
        value["raster_group_m"] = min(value["raster_group_m"], AXES["raster_group_m"][-1])
        is_known = all(value[name] in values for name, values in AXES.items())
        point = tuple(value[name] for name in AXES)
        found = self.tile(point) if is_known else None
        return {point: found} if found else {}

    def sample(self, count: int, random: Random) -> dict[Point, dict[str, Any]]:
        """Different points, each as likely as any other."""
        found: dict[Point, dict[str, Any]] = {}
        for _ in range(2000 * count):
            point = tuple(random.choice(values) for values in AXES.values())
            if point not in found and (tile := self.tile(point)):
                found[point] = tile
            if len(found) == count:
                break
        return found

    def beside(self, point: Point) -> Iterator[tuple[Point, dict[str, Any]]]:
        """The points that differ on one axis, by one step."""
        for index, values in enumerate(AXES.values()):
            at = values.index(point[index])
            for value in values[max(0, at - 1) : at + 2]:
                other = (*point[:index], value, *point[index + 1 :])
                if other != point and (tile := self.tile(other)):
                    yield other, tile
