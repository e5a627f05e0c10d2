"""The table of docs/math_answers.md: which answers count as equal, `python -m tests.math_table`.

Each answer is a test in tests/unit/verl/test_reward.py.
"""

import argparse
import re
from collections.abc import Iterable
from typing import NamedTuple

from analysis.markdown import Row, markdown_table
from experiments.study.schema import ROOT
from experiments.support.cli import run_cli

PAGE = ROOT / "docs" / "math_answers.md"
BLOCK = re.compile(r"(?<=<!-- math_table -->\n\n).*?(?=\n\n<!-- end math_table -->)", re.DOTALL)


class Form(NamedTuple):
    """Answers to one question, and the right one.

    Attributes:
        what: for the reader.
        right: the data set's answer.
        equal: what counts as equal to it, as it stands in `\boxed{}`.
        other: what does not.
    """

    what: str
    right: str
    equal: tuple[str, ...] = ()
    other: tuple[str, ...] = ()


FORMS = (
    Form(
        "whole number",
        "34",
        ("+34", "034", "34.0", "34.", r"\frac{68}{2}", "68/2", "$34$", r"\(34\)"),
        ("35", "34 or 35", r"\text{thirty-four}", r"\approx 34"),
    ),
    Form("decimal", "0.5", (".5", r"\frac12", r"\dfrac{1}{2}", "1/2", r"50\%"), ("0,5",)),
    Form(
        "repeating decimal",
        r"\frac13",
        (r"0.\overline{3}", r".\bar 3", r"0.\dot{3}", r"33.\overline{3}\%", "0.333333"),
        (r"0.\overline{2}", r"0.\dot{3}0\dot{3}", r"0.333\ldots", "0.3333"),
    ),
    Form(
        "right answer that repeats",
        r"1.2\overline{36}",
        (r"\frac{68}{55}", r"1.2\overline{36}", r"1.23\overline{63}"),
        ("1.236", r"1.\overline{236}"),
    ),
    Form(
        "repeating decimals in a list",
        r"(\frac13,1)",
        (r"(0.\overline{3},0.\overline{9})", r"(33.\overline{3}\%, 100\%)"),
    ),
    Form("mixed number", "3.5", (r"3\frac{1}{2}", r"\frac72"), ("3 1/2",)),
    Form(
        "thousands",
        "10000",
        (
            "10,000",
            r"10\,000",
            r"10{,}000",
            r"10{\,}000",
            r"10\;000",
            "10~000",
            "10 000",
            r"10\!000",
        ),
        ("10.000", "10", "0"),
    ),
    Form(
        "power of ten",
        "1000",
        ("1e3", "1E3", "10^3", r"1\times10^{3}", r"1 \cdot 10^3", r"0.1e+4"),
        ("3e", "1e2"),
    ),
    Form("small power of ten", "0.0015", ("1.5e-3", r"1.5\times10^{-3}"), ("1.5e3",)),
    Form(
        "percentage of a number of percent",
        "50",
        (r"50\%", "50%", r"50 \%", r"50\,\%", r"50\text{ percent}", "50 percent", r"50\text{%}"),
        ("0.5",),
    ),
    Form(
        "right answer with a percent sign",
        r"12.5\%",
        ("12.5", "0.125", r"12.5\%", r"\frac18"),
        (r"1250\%", "1250"),
    ),
    Form("mixed percentage", r"\frac13", (r"33\frac{1}{3}\%",), (r"33\%",)),
    Form("percentages in a list", "(0.5, 0.25)", (r"(50\%, 25\%)",), (r"(25\%, 50\%)",)),
    Form(
        "unit, which is not looked at",
        "42",
        (
            r"42\text{ cm}",
            "42 cm",
            r"42\,\mathrm{cm}",
            r"42\text{ cm}^2",
            r"42^\circ",
            r"42\degree",
            r"42^{\degree}",
            "42°",
            r"\$42",
            r"42\text{ dollars}",
            r"42\text{ km}",
        ),
    ),
    Form("value of a variable", "5", ("x=5", "x = 5"), ("x=6", "x>5")),
    Form("right answer that names its variable", "x=5", ("5",), ("y=5", "6")),
    Form("set", r"\{1,2\}", ("1,2", "2,1", r"\{2,1\}", r"1 \text{ and } 2"), ("1", "1,2,3")),
    Form("pair", "(1,2)", (r"\left(1,2\right)",), ("(2,1)", "1<x<2")),
    Form("interval as inequality", "1<x<2", ("(1,2)",), ("[1,2]", "2>x>1")),
    Form("choice", "A", (r"\text{A}", r"\mathrm{A}"), ("B",)),
)
FLAWED = {  # responses whole: what ends them, and how their boxes are written
    r"So \boxed{42}": True,
    r"So \fbox{42}": True,
    r"So \boxed{\fbox{42}}.": True,
    r"So \boxed {42}<|im_end|>": True,
    "Answer: 42<|im_end|>": True,
    "Answer: $42$</s>": True,
    r"Answer: \boxed{42}<end_of_turn>": True,
    r"So \boxed{42": False,
    r"\boxed{42} or \boxed{43}": False,
    r"Answer: \boxed{42} or \boxed{43}": False,
    "So 42": False,
}


def _listed(answers: Iterable[str]) -> str:
    return ", ".join(f"`{answer}`".replace("|", r"\|") for answer in answers)


def row(it: Form) -> Row:
    return {
        "": it.what,
        "right answer": _listed([it.right]),
        "counts as equal": _listed(it.equal),
        "does not": _listed(it.other),
    }


def tables() -> str:
    """Both of the page."""
    responses = Form(
        "whole response",
        "42",
        tuple(text for text, is_right in FLAWED.items() if is_right),
        tuple(text for text, is_right in FLAWED.items() if not is_right),
    )
    return markdown_table(map(row, [*FORMS, responses]))


def main() -> None:
    """Writes the table into the page."""
    argparse.ArgumentParser(description="Fill the table of docs/math_answers.md.").parse_args()
    PAGE.write_text(BLOCK.sub(lambda _: tables(), PAGE.read_text()))


if __name__ == "__main__":
    run_cli(main)
