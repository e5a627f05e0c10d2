"""Tables of vLLM at true model size: KV cache, decoding, prefill and the rollouts of a step."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, PositiveFloat, PositiveInt

from analysis.markdown import MarkdownTable
from analysis.tables.engines import engine_name
from analysis.tables.record import EngineRecord, read_record

SERVINGS = ("serving_8b", "serving_30b")  # of experiments/benchmarks/serving.py
NOTE = (
    "In brackets: speed over BF16's of the same run. At 1, 32 and 256: so many sequences of 32 "
    "prompt and 128 new tokens each; counted are new ones, and the time includes the prompts' "
    "prefill. Prefill: 8,192 tokens in four prompts. "
    "Rollouts of a step: so many prompts, up to 2,048 new tokens each. Weights and the prompts' "
    "tokens are random. vLLM sets memory aside for 1,024 sequences at once."
)

Rates = tuple[PositiveFloat, PositiveFloat, PositiveFloat]


class Rollout(BaseModel):
    """The rollouts of one training step."""

    tokens: PositiveInt
    seconds: PositiveFloat

    @property
    def speed(self) -> float:
        """New tokens a second."""
        return self.tokens / self.seconds


class ServingEngine(BaseModel):
    """Tokens a second: quartiles, of decoding by sequences at once; rollouts by prompts."""

    weight_gib: float
    kv_cache_tokens: int
    tokens_per_s: dict[str, Rates]
    prefill_tokens_per_s: Rates | None = None
    rollouts: dict[int, Rollout] = {}

    @property
    def prefill(self) -> float | None:
        """Median tokens a second."""
        return None if self.prefill_tokens_per_s is None else self.prefill_tokens_per_s[1]

    def rollout_speed(self, prompts: int) -> float | None:
        """New tokens a second of the rollouts of so many prompts."""
        return self.rollouts[prompts].speed if prompts in self.rollouts else None


class ServingRecord(EngineRecord):
    """Of experiments/benchmarks/serving.py; engines are named `model:precision`."""

    gpu_memory_utilization: float
    engines: dict[str, ServingEngine]


Speed = Callable[[ServingEngine], float | None]


class Served(NamedTuple):
    """An engine, its run, and that run's BF16 engine, if there is another."""

    name: str
    record: ServingRecord
    engine: ServingEngine
    floor: ServingEngine | None

    @property
    def model(self) -> str:
        """Its architecture's name."""
        return self.name.partition(":")[0]

    @property
    def precision(self) -> str:
        """A key of PRECISIONS."""
        return self.name.partition(":")[2]

    def speed_ratio(self, speed: Speed) -> float | None:
        """Its speed over BF16's, None where there is none."""
        floor = self.floor and speed(self.floor)
        own = speed(self.engine)
        return own / floor if own and floor else None

    def tokens_per_s(self, speed: Speed) -> str:
        """Tokens a second and the ratio, empty where it was not measured."""
        own = speed(self.engine)
        return f"{own:,.0f}{self._in_brackets(speed)}" if own else ""

    def rollout(self, prompts: int) -> str:
        """Seconds of a step's rollouts and the ratio of speeds, empty where not measured."""
        if prompts not in self.engine.rollouts:
            return ""
        seconds = self.engine.rollouts[prompts].seconds
        return f"{seconds:.1f}{self._in_brackets(lambda it: it.rollout_speed(prompts))}"

    def _in_brackets(self, speed: Speed) -> str:
        ratio = self.speed_ratio(speed)
        return f" ({ratio:.2f}x)" if ratio else ""


def read_servings(folder: Path, machine: str) -> list[ServingRecord]:
    """Records of engines that served, one a model."""
    return [read_record(folder / f"{name}_{machine}.json", ServingRecord) for name in SERVINGS]


def engines_by_name(records: Iterable[ServingRecord]) -> dict[str, ServingEngine]:
    """The engines of all records."""
    return {name: engine for record in records for name, engine in record.engines.items()}


def prompt_counts(engines: Iterable[ServingEngine]) -> list[int]:
    """All numbers of prompts that were rolled out."""
    return sorted({count for engine in engines for count in engine.rollouts})


def serving_sections(records: Sequence[ServingRecord]) -> list[str]:
    """Title, table and note of KV cache and speed: a model's engines, run by run."""
    rows = sorted((row for it in records for row in served(it)), key=lambda row: row.model)
    batches = list(rows[0].engine.tokens_per_s)
    prompts = prompt_counts(row.engine for row in rows)
    table: MarkdownTable[Served] = MarkdownTable(
        {
            "Engine": lambda row: engine_name(row.name),
            "Commit": lambda row: row.record.commit,
            "torch.compile": lambda row: row.record.compiled,
            "KV cache, tokens": lambda row: f"{row.engine.kv_cache_tokens:,}",
        }
        | {
            f"new tokens/s at {batch}": lambda row, batch=batch: row.tokens_per_s(
                lambda it: it.tokens_per_s[batch][1]
            )
            for batch in batches
        }
        | {"Prefill, tokens/s": lambda row: row.tokens_per_s(lambda it: it.prefill)}
        | {
            f"Rollouts of {count:,} prompts, s": lambda row, count=count: row.rollout(count)
            for count in prompts
        }
    )
    share = f"{records[0].gpu_memory_utilization:.0%}"
    title = f"**KV cache and decoding on {share} of the GPU, by sequences at once**"
    return [title, table.markdown(rows), NOTE]


def served(record: ServingRecord) -> list[Served]:
    """The engines of a run."""
    rows = []
    for name, engine in sorted(record.engines.items()):
        floor = record.engines.get(f"{name.partition(':')[0]}:bf16")
        floor = None if floor is engine else floor
        rows.append(Served(name, record, engine, floor))
    return rows
