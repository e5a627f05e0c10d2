"""What a GPU does in a decoding step of vLLM: time by kernel, and time between kernels.

    python -m experiments.benchmarks.decode_profile \\
        experiments/records/benchmarks/decode_profile_8b_h200.json \\
        qwen3-8b:bf16 qwen3-8b:humming qwen3-8b:nvfp4

Engines and prompts are those of `serving`. A step is the difference between 129 new tokens a
sequence and one, over 128: the prompts' prefill cancels. Its time is measured without a profiler,
whose own work lies between kernels; then the time of each kernel with one, over 32 steps. What no
kernel accounts for, the GPU waited. `--compile` is vLLM with torch.compile, its default.
`--device cpu` rehearses: there PyTorch's operations stand for kernels.
"""

from collections import defaultdict
from functools import partial
from time import perf_counter
from typing import Any

from torch.profiler import ProfilerActivity, profile

from experiments.benchmarks.engines import add_compile_option, argument_parser, record_engines
from experiments.benchmarks.serving import BATCHES, PROMPT_TOKENS, random_prompts, start
from experiments.benchmarks.timing import quartiles, synchronize
from experiments.support.cli import run_cli
from qat_core.rollout.vllm.engine import VllmEngine

STEPS = {"cuda": 128, "cpu": 4}  # timed
PROFILED_STEPS = {"cuda": 32, "cpu": 4}
REPEATS = 3
Kernels = dict[str, tuple[float, int]]  # microseconds and calls by name


class Sampler:
    """Samples fresh prompts of random tokens: vLLM remembers those that it has seen."""

    def __init__(self, engine: VllmEngine, batch: int, vocab_size: int, device: str) -> None:
        self.engine, self.batch, self.vocab_size, self.device = engine, batch, vocab_size, device
        self.calls = 0

    def __call__(self, new_tokens: int) -> None:
        """So many new tokens of each prompt."""
        self.calls += 1
        prompts = random_prompts(self.batch, PROMPT_TOKENS, self.vocab_size, self.calls)
        self.engine.sample(prompts, new_tokens, seed=None, temperature=1.0)
        synchronize(self.device)


def run(name: str, device: str, *, compiled: bool = False) -> dict[str, Any]:
    """Steps of one `model:precision` by sequences at once."""
    engine, config = start(name, device, compiled=compiled)
    return {
        str(batch): _step(Sampler(engine, batch, config["vocab_size"], device)) for batch in BATCHES
    }


def _step(sample: Sampler) -> dict[str, Any]:
    """Quartiles of a step's milliseconds, and microseconds and calls of each kernel in it."""
    timed, profiled = STEPS[sample.device], PROFILED_STEPS[sample.device]
    long, short = 1 + timed, 1
    sample(long)  # warms up
    steps_ms = [
        1e3 * (_seconds(sample, long) - _seconds(sample, short)) / timed for _ in range(REPEATS)
    ]
    many, one = _kernels(sample, 1 + profiled), _kernels(sample, 1)
    in_a_step = {}
    for name, (us, calls) in many.items():
        us_before, calls_before = one.get(name, (0.0, 0))
        if calls != calls_before:  # else it is of the prefill alone
            in_a_step[name] = [(us - us_before) / profiled, (calls - calls_before) / profiled]
    by_time = sorted(in_a_step.items(), key=lambda item: -item[1][0])
    return {
        "step_ms": quartiles(steps_ms),
        "sequences_in_kv_cache": sample.engine.kv_cache_tokens // (PROMPT_TOKENS + long),
        "kernels_us_calls": dict(by_time),
    }


def _seconds(sample: Sampler, new_tokens: int) -> float:
    begin = perf_counter()
    sample(new_tokens)
    return perf_counter() - begin


def _kernels(sample: Sampler, new_tokens: int) -> Kernels:
    is_cpu = sample.device == "cpu"
    activity = ProfilerActivity.CPU if is_cpu else ProfilerActivity.CUDA
    with profile(activities=[activity]) as profiled:
        sample(new_tokens)
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for event in profiled.key_averages():
        us = event.self_cpu_time_total if is_cpu else event.self_device_time_total
        if us > 0:
            total_us, calls = found[event.key]
            found[event.key] = total_us + us, calls + event.count
    return dict(found)


def main() -> None:
    """Profiles each `model:precision` and writes the record after each."""
    parser = argument_parser(__doc__)
    add_compile_option(parser)
    arguments = parser.parse_args()
    settings = {
        "torch_compile": arguments.compile,
        "prompt_tokens": PROMPT_TOKENS,
        "seeds": "none",
    }
    record_engines(arguments, "decode_profile", settings, partial(run, compiled=arguments.compile))


if __name__ == "__main__":
    run_cli(main)
