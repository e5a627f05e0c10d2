"""The report as one HTML page without a script, and with nothing to fetch: figures are data."""

from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import get_args

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from analysis.claims_table import ClaimVerdict, show_ratio
from analysis.collapse.grid import CORRECTIONS
from analysis.markdown import Row, markdown_table, without_empty
from analysis.report.content import Content
from analysis.results import memory_source
from analysis.style import arm_style
from experiments.runs.manifest import RunManifest
from experiments.runs.summary import ACCURACIES, KL, KL_RATIO, MIB, REWARD_MEAN, ArmSummary
from experiments.study.arms import ARMS, ArmName
from experiments.study.schema import Study
from qat_core.units import MIB_PER_GIB, show_memory

HERE = Path(__file__).parent
DIGEST_LETTERS = 12


def render(content: Content) -> str:
    """The page; equal content gives equal text."""
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("template.html").render(
        it=content,
        style=Markup((HERE / "style.css").read_text()),
        claims=to_html(content.claims),
        protocol=to_html(content.protocol),
        figures=[(it, b64encode(it.svg).decode()) for it in content.figures],
        drift={model: to_html(table) for model, table in content.drift.items()},
        sentence=sentence(content.study, content.arms),
        summary=to_html(markdown_table(without_empty(summary_rows(content.arms)))),
        arms=[(arm, *trained_and_sampled(arm)) for arm in content.study.arms],
        memory=memory_rows(content),
        memory_source=memory_source(
            content.study, (it.memory for it in content.manifests.values())
        ),
        facts=facts(content.manifests.values()),
        runs=content.manifests.values(),
        files={name: list(its) for name, its in groupby(content.files, lambda it: it.folder)},
        digest_letters=DIGEST_LETTERS,
    )


def to_html(markdown: str) -> Markup:
    """Markdown of this repository as HTML, as part of a page.

    Headings go two levels down. Links to other files lose their target, which a single page does
    not have. A cell knows its column's name, for narrow screens, and is marked if it is a verdict.
    """
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = parser.parse(markdown)
    columns: list[str] = []
    for token, inside in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(int(token.tag[1]) + 2, 6)}"
        elif token.type == "tr_open":
            position = 0
        elif token.type == "thead_open":
            columns = []
        elif token.type == "th_open" and inside is not None:
            columns.append(inside.content)
            token.attrs = {"data-label": inside.content}
        elif token.type == "td_open" and inside is not None:
            token.attrs = {"data-label": columns[position]}
            position += 1
            if (verdict := inside.content.strip("*")) in get_args(ClaimVerdict):
                token.attrSet("class", verdict.lower().replace(" ", "-"))
        elif token.type == "inline":
            token.children = list(_without_local_links(token.children or []))
    return Markup(parser.renderer.render(tokens, parser.options, {}))


def _without_local_links(tokens: Iterable[Token]) -> Iterable[Token]:
    is_local = False
    for token in tokens:
        if token.type == "link_open":
            is_local = "://" not in str(token.attrs["href"])
        if not (is_local and token.type in ("link_open", "link_close")):
            yield token


def sentence(study: Study, arms: Sequence[ArmSummary]) -> str:
    """What the first model's arms come to, each in its first cell."""

    def label(arm: ArmSummary) -> str:
        correction = study.rl_of(arm.cell).correction
        own = (
            ""
            if correction == study.rl.correction
            else f", {CORRECTIONS.get(correction, correction)}"
        )
        return arm_style(arm.arm).label + own

    firsts: dict[str, ArmSummary] = {}
    for it in arms:
        if it.model == arms[0].model:
            firsts.setdefault(it.arm, it)

    def values(key: str, show: Callable[[float], str], but: str = "") -> str:
        known = {arm: it for arm, it in firsts.items() if key in it.estimates and arm != but}
        shown = (f"{label(it)} {show(it.estimates[key].estimate)}" for it in known.values())
        return "; ".join(shown) or "not known"

    kl = values(KL_RATIO, show_ratio, but="bf16")
    reward = values(REWARD_MEAN, "{:.2f}".format)
    return f"{arms[0].model}: k3 KL over BF16's: {kl}. Mean reward: {reward}."


def _shown(arm: ArmSummary, key: str, show: Callable[[float], str]) -> str:
    """Estimate and, smaller, its interval."""
    if (it := arm.estimates.get(key)) is None:
        return "-"
    if it.low is None or it.high is None or it.low == it.high:
        return show(it.estimate)
    return f"{show(it.estimate)}<br><sub>{show(it.low)} to {show(it.high)}</sub>"


def _share(value: float) -> str:
    """Ends of an interval of t may lie outside of what a share can be."""
    return f"{min(max(value, 0), 1):.2f}"


def summary_rows(arms: Sequence[ArmSummary]) -> list[Row]:
    """The numbers of all arms; a single model is named above the table."""
    has_models = len({it.model for it in arms}) > 1
    return [{"Model": it.model if has_models else "", **_summary_row(it)} for it in arms]


def _summary_row(it: ArmSummary) -> Row:
    return {
        "Arm": arm_style(it.arm).label,
        "Cell": it.cell or "",
        "Seeds": str(len(it.runs)),
        "k3 KL, nats a token": _shown(it, KL, "{:.1e}".format),
        "Over BF16's": _shown(it, KL_RATIO, show_ratio),
        "Right answers in NVFP4": _shown(it, ACCURACIES["nvfp4"], _share),
        "In BF16": _shown(it, ACCURACIES["bf16"], _share),
        "Weights": _shown(it, MIB, lambda mib: show_memory(mib / MIB_PER_GIB)),
        "Mean reward": _shown(it, REWARD_MEAN, "{:.2f}".format),
    }


def trained_and_sampled(arm: ArmName) -> tuple[str, str]:
    """In which precision an arm's weights are trained and its rollouts sampled."""
    rounded = {None: "BF16", "full": "NVFP4", "ffn": "NVFP4 outside attention"}
    trained, sampled = rounded[ARMS[arm].train_recipe], rounded[ARMS[arm].rollout_recipe]
    return trained if trained == "BF16" else f"BF16, rounded to {trained} (QAT)", sampled


def memory_rows(content: Content) -> list[tuple[str, ...]]:
    """Weight memory of each model and arm: predicted, measured, and the share of BF16's."""
    firsts: dict[tuple[str, str], RunManifest] = {}
    for it in content.manifests.values():
        if it.status == "finished":
            firsts.setdefault((it.model, it.arm), it)
    rows: list[tuple[str, ...]] = []
    for (model, _), it in firsts.items():
        bf16 = firsts.get((model, "bf16"))
        measured = it.memory.measured_gib
        share = f"{measured / bf16.memory.measured_gib:.1%}" if bf16 else "-"
        sizes = (show_memory(it.memory.predicted_gib), show_memory(measured))
        rows.append((model, arm_style(it.arm).label, *sizes, share))
    return rows


def facts(manifests: Iterable[RunManifest]) -> list[tuple[str, list[tuple[str, int]]]]:
    """What runs agree on, or not: of each fact its values and how many runs have each.

    A digest that every run has of its own says nothing, and is not shown.
    """
    found: dict[str, Counter[str]] = {}
    runs = list(manifests)
    for it in runs:
        git = it.git
        commit = git.commit if git and git.commit else "not recorded"
        changed = ", with uncommitted changes" if git and git.dirty else ""
        machine = it.hardware
        named = {
            "commit": commit + changed,
            "hardware": f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB"
            + "".join(f", {gpu}" for gpu in machine.gpus),
            "started": it.started_at[:10],
            **{name: version for name, version in it.versions.items() if version},
            **{f"digest of {name}": digest[:DIGEST_LETTERS] for name, digest in it.digests.items()},
        }
        for name, value in named.items():
            found.setdefault(name, Counter())[value] += 1
    return [
        (name, [("its own in every run", len(runs))])
        if name.startswith("digest") and 1 < len(values) == len(runs)
        else (name, list(values.items()))
        for name, values in found.items()
    ]
