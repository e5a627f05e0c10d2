r"""Answers in mathematics, rewritten so that a parser reads what their writer meant.

latex2sympy chooses its grammar by the ANTLR runtime that is installed, and with the 4.9 that Hydra
needs `50\%` is no number; with any it reads `10\,000` as 10 times 0, `1e3` as 3 times e, and
repeating decimals not at all. What is rewritten here has no such form left. docs/math_answers.md
has the table of what is equal.
"""

import re
from collections.abc import Callable, Iterator
from itertools import product

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# of chat templates, where a tokenizer does not know them as special
END_OF_TURN = re.compile(r"(?:(?:<\|[^<>|]+\|>|<end_of_turn>|<eos>|</s>)\s*)+$")
_SPACE = r"(?:\\[,;:! ]|~|\\thinspace|\{\\,\}|\{,\})"
_REPEATED = r"\\(?:overline|bar|dot)"


def _fraction(decimal: re.Match[str]) -> str:
    r"""Of a repeating decimal: `0.1\overline{6}` is 1/10 + 6/90, so (16 - 1)/90."""
    whole, once, again = decimal["whole"], decimal["once"], decimal["again"] or decimal["digit"]
    above = int(whole + once + again) - int(whole + once or "0")
    return rf"\frac{{{above}}}{{{'9' * len(again)}{'0' * len(once)}}}"


_RULES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"(?<!\\)(?:\$|\\[()\[\]])"), ""),
    # thousands: 10\,000 and 1{,}234{,}567, and with plain spaces 10 000
    (re.compile(rf"(?<=\d)\s*{_SPACE}\s*(?=\d{{3}}(?!\d))"), ""),
    (re.compile(r"(?<![\d.,])(?<!\d )\d{1,3}(?: \d{3})+(?!\d)"), lambda it: it[0].replace(" ", "")),
    (re.compile(r"°|\^?\s*(?:\\degrees?\b|\{\s*\\degrees?\s*\})"), r"^\\circ "),
    # 1e3
    (re.compile(r"(?<![\w\\.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?![\w.])"), r"\1\\times 10^{\2}"),
    (
        # not the end of 1,000.\overline{3}
        re.compile(
            r"(?<![\d.])(?<!\d,(?=\d{3}\.))(?P<whole>\d{0,99})\.(?P<once>\d{0,99})"
            rf"{_REPEATED}\s*(?:\{{\s*(?P<again>\d{{1,99}})\s*\}}|(?P<digit>\d))(?!\d|{_REPEATED})"
        ),
        _fraction,
    ),
    (re.compile(rf"(?:{_SPACE}|[\s.])+$"), ""),
)
_WORD = r"per\s?cent(?:age)?|pct"
_PERCENT = re.compile(
    rf"(?:{_SPACE}|\s)*(?:\\?%|\\(?:text|textrm|mathrm|mbox)\s*\{{\s*(?:\\?%|{_WORD})\s*\}}"
    rf"|\b(?:{_WORD})\b)",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"(?:[\d.]+|\\frac\{\d+\}\{\d+\})$")


def boxed_content(text: str) -> str | None:
    r"""What the first `\boxed{...}` or `\fbox{...}` holds, and so on if that is a box.

    None if there is no box, or it has no end.
    """
    box = BOX.search(text)
    if box is None:
        return None
    depth = 1
    for end in range(box.end(), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            content = text[box.end() : end]
            is_box = len(BOX.findall(content)) == 1 and BOX.match(content.strip(" $"))
            return boxed_content(content) if is_box else content
    return None


def comparable(given: str, right: str) -> Iterator[tuple[str, str]]:
    """Pairs of which one must be equal for the answers to be.

    A percentage counts as its number, as questions that ask for percent mean it, and as a hundredth
    of that; of two percentages the numbers are compared.
    """
    readings = [_readings(_rewritten(text)) for text in (given, right)]
    if all(len(each) == 2 for each in readings):
        readings = [each[1:] for each in readings]
    yield from product(*readings)


def _rewritten(latex: str) -> str:
    for pattern, replacement in _RULES:
        latex = pattern.sub(replacement, latex.strip())
    return latex


def _readings(latex: str) -> list[str]:
    """As it is; of percentages first their numbers, then the hundredths."""
    *counted, rest = _PERCENT.split(latex)
    if not counted:
        return [latex]
    plain = "".join([*counted, rest])
    if len(counted) == 1 and not rest and "," not in plain:
        return [plain, rf"\frac{{{plain}}}{{100}}"]
    return [plain, "".join(_NUMBER.sub(r"\\frac{\g<0>}{100}", part) for part in counted) + rest]
