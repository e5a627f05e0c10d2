"""Tables of the search for tiles of Humming, most of them for tiles that split no sum."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from analysis.markdown import MarkdownTable
from analysis.tables.matmul import measured_on
from analysis.tables.record import Record, read_parts

TITLE = "**Products by Humming's own tiles and by those that were found, microseconds**"
NOTE = (
    "Humming: its own choice of tiles, which splits sums. Unsplit: the same tiles with each sum in "
    "one thread block. Served: the tiles of this project's switches at that commit. Found: the "
    "fastest of those that were tried, of all that split no sum where nothing else is said; in "
    "brackets its speed over Humming's own, below its rows, columns and depth. Differing: of 20 "
    "repeats with the same inputs, how many have other bits: Humming's, and of what was found. "
    "Error: the same two, in the root mean square against FP64. Floor: NVFP4 weights at the "
    "bandwidth and the peak measured in the same run."
)
FOUND = "found 0"


class Arm(BaseModel):
    """One kernel's product; quartiles of microseconds."""

    us: tuple[float, float, float]
    error: float
    differing_repeats: int
    tile: dict[str, Any] | None


class Case(BaseModel):
    """A layer's product at a number of tokens."""

    layer: str
    tokens: int
    tiles_timed: int
    floor_us: dict[str, float]
    arms: dict[str, Arm]

    def us(self, arm: str) -> str:
        """Median time of an arm, empty where it was not measured."""
        return f"{self.arms[arm].us[1]:.1f}" if arm in self.arms else ""

    @property
    def found(self) -> str:
        """Time of the fastest tile, beside Humming's own, and its shape."""
        arm, own = self.arms[FOUND], self.arms["humming"]
        assert arm.tile is not None
        shape = " x ".join(map(str, arm.tile["block_shape"]))
        return f"{self.us(FOUND)} ({own.us[1] / arm.us[1]:.2f}x)<br><sub>{shape}</sub>"

    @property
    def repeats(self) -> str:
        """How many repeats have other bits: Humming's own and of the fastest tile."""
        return f"{self.arms['humming'].differing_repeats}, {self.arms[FOUND].differing_repeats}"

    @property
    def errors(self) -> str:
        """Likewise their errors."""
        return f"{self.arms['humming'].error:.1e}, {self.arms[FOUND].error:.1e}"


class TilesRecord(Record):
    """Of experiments/benchmarks/humming_tiles.py."""

    cases: list[Case]
    split_sums: bool = False  # whether tiles that split sums were tried too

    @property
    def heading(self) -> str:
        """What it was measured on, and which tiles were tried."""
        return measured_on(self) + (" Tiles that split sums too." if self.split_sums else "")


TABLE: MarkdownTable[Case] = MarkdownTable(
    {
        "Layer": lambda case: case.layer,
        "Tokens": lambda case: f"{case.tokens:,}",
        "Floor": lambda case: f"{case.floor_us['nvfp4']:.1f}",
        "BF16": lambda case: case.us("bf16") or case.us("triton bf16"),
        "Marlin": lambda case: case.us("marlin"),
        "Humming": lambda case: case.us("humming"),
        "Unsplit": lambda case: case.us("humming unsplit"),
        "Served": lambda case: case.us("humming served"),
        "Found": lambda case: case.found,
        "Tried": lambda case: str(case.tiles_timed),
        "Differing": lambda case: case.repeats,
        "Error": lambda case: case.errors,
    }
)


def tiles_sections(folder: Path, machine: str) -> list[str]:
    """A table for each record; a row for each product and number of tokens that was searched.

    Raises:
        ValueError: a record is damaged, or there is none.
    """
    sections = [TITLE]
    for record in read_parts(folder, "humming_tiles", machine, TilesRecord):
        cases = sorted(record.cases, key=lambda case: (case.tokens, case.layer))
        sections += [record.heading, TABLE.markdown(cases)]
    return [*sections, NOTE]
