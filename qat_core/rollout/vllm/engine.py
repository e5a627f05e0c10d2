"""vLLM in this process as a rollout engine; weights arrive in place or through its reload."""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qat_core.checkpoint.architecture import meta_model, without_tied_copies
from qat_core.checkpoint.ignored_modules import ignored_modules
from qat_core.checkpoint.shards import MISTRAL_FILES, Shards
from qat_core.exact.contract import require_kept
from qat_core.planning.plan import QuantPlan
from qat_core.planning.quantization_config import quantization_config
from qat_core.rollout.engine import Rollouts, WeightStream, require_known, special_ids
from qat_core.rollout.vllm import compat
from qat_core.rollout.vllm.kernel_choice import require_asked, settings_by_name
from qat_core.rollout.vllm.outputs import to_rollouts, to_routes
from qat_core.rollout.vllm.served_layers import quantized_parameters, require_biases
from qat_core.rollout.vllm.start import (
    FIXED_SETTINGS,
    OF_SYNCS,
    exact_settings,
    patched_vllm,
    planned,
    require_fixed,
    require_no_overrides,
    require_one_process,
)
from qat_core.rollout.vllm.weight_memory import tensor_bytes, weight_bytes
from qat_core.rollout.vllm.worker import LAYOUT, reload
from qat_core.routing import decoder_layers
from qat_core.weights.comparison import require_same
from qat_core.weights.hub_names import HubNames, Weight, meta_weights
from qat_core.weights.layouts import stored_tensors

# Of sampling, what leaves the log-probs of tokens as the model has them.
UNCHANGED = {
    **{"temperature": (1, 0), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)},
    **{"repetition_penalty": (1,), "presence_penalty": (0,), "frequency_penalty": (0,)},
}
ONE_WORKER = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


class VllmEngine:
    """A `RolloutEngine` of vLLM, dense or MoE, BF16 or NVFP4 W4A16.

    Attributes:
        plan: every weight, and what is to be in NVFP4.
        served: what vLLM holds in NVFP4, by its own account.
        weight_bytes: what vLLM's weights take, after its own repacking.
    """

    one_worker: Collection[str] = ONE_WORKER  # settings that have to be 1

    def __init__(
        self,
        model_dir: str | Path,
        packed: QuantPlan | None = None,
        *,
        exact: bool = False,
        **settings: Any,
    ) -> None:
        """Starts vLLM.

        Args:
            model_dir: BF16 or packed checkpoint, with tokenizer.
            packed: serve a BF16 checkpoint's architecture with these weights in NVFP4. Weights come
                with the first `sync`; none are read.
            exact: serve bits that a model of `qat_core.exact` computes too; one process has either
                exact engines or others.
            settings: for `vllm.LLM`, e.g. `max_model_len`; with `enable_return_routed_experts`
                rollouts have their routes. On a CPU the defaults are no compilation
                (`enforce_eager`) and a KV cache of 256 MiB (`kv_cache_memory_bytes`).

        Raises:
            ValueError: `packed` comes with `hf_overrides`, this version of vLLM is not supported,
                it runs in another process or in several, a setting is another than
                `FIXED_SETTINGS` has or than exact rollouts need, it does not quantize exactly what
                is planned, a weight has values of its own that vLLM would not read, or weights are
                to come and its loader of this model cannot replace all of them.
        """
        model_dir = Path(model_dir)
        if packed is not None:
            require_no_overrides(settings, model_dir)
        require_one_process(settings, self.one_worker)
        require_fixed(settings)
        model = meta_model(model_dir)
        self._is_exact = exact
        if exact:
            settings |= exact_settings(model, settings)
        self.end_ids, self.pad_id = special_ids(model_dir)
        self._vllm = patched_vllm(exact=exact)
        self._names, self._architecture = HubNames(model), type(model).__name__
        self._vocabulary: int = model.config.vocab_size  # type: ignore[assignment, union-attr]
        returns_routes = settings.get("enable_return_routed_experts", False)
        self._expert_layers = decoder_layers(model) if returns_routes else []
        self.plan, self._kind = planned(packed, model_dir, model, self._names)
        if packed is not None:
            settings |= self._settings_of(packed, model_dir)
        if not self._vllm.platforms.current_platform.is_cpu():
            settings = self._kernels_by_name() | settings
        self._expected = dict(stored_tensors(self._names.split(meta_weights(self.plan)), LAYOUT))
        self._accepted: tuple[QuantPlan, Mapping[str, Weight]] | None = None
        self._start(model_dir, compat.with_platform_settings(settings, model.config))

    def _start(self, model_dir: Path, settings: dict[str, Any]) -> None:
        """Starts vLLM, and refuses it where it does not serve what is planned."""
        self._has_weights = settings.get("load_format") != "dummy"
        if self._has_weights:
            # names a damaged file, two sets of weights, or a tied one that vLLM would drop
            without_tied_copies(self._names, Shards(model_dir), str(model_dir))
            for file in sorted(model_dir.glob(MISTRAL_FILES)):
                raise ValueError(f"{file}: vLLM would read it, and nothing else does; remove it")
        self._llm: Any = self._vllm.LLM(str(model_dir), **settings | FIXED_SETTINGS)
        compat.keep_process_groups(self._llm)
        self.served: Collection[str] = self.on_worker(quantized_parameters, self._names)
        self._require_coverage()
        self.on_worker(_require_kernels)
        if self._has_weights:
            self.on_worker(_require_biases, self._names, str(model_dir))
        self.weight_bytes: int = self.on_worker(weight_bytes)

    def _settings_of(self, packed: QuantPlan, model_dir: Path) -> dict[str, Any]:
        """What makes vLLM serve a BF16 checkpoint's architecture with these weights in NVFP4."""
        compat.require_reloadable(self._architecture)
        self._names.refuse_own_values([e.name for e in packed.entries], str(model_dir))
        declared = quantization_config(self._kind, ignored_modules(packed, self._names))
        return {"hf_overrides": {"quantization_config": declared}, "load_format": "dummy"}

    def _kernels_by_name(self) -> dict[str, str]:
        """Of vLLM's settings."""
        names = [entry.name for entry in self.plan.entries]
        experts = [name for name in names if self._names.expert_prefix(name) is not None]
        takes_mixed = compat.is_one_of(self._vllm.__version__, compat.WITH_OWN_HUMMING)
        return settings_by_name(experts, self.plan.quantized, takes_mixed=takes_mixed)

    @property
    def tensor_bytes(self) -> int:
        """What vLLM's weights take without the gaps between allocations."""
        return int(self.on_worker(tensor_bytes))

    @property
    def kv_cache_tokens(self) -> int:
        """How many tokens the KV cache holds."""
        cache = self._llm.llm_engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)

    def sync(self, stream: WeightStream, expected: QuantPlan | None = None) -> None:
        """Replaces all weights.

        Args:
            stream: every parameter of the trained model.
            expected: the plan behind the stream. With it, weights are loaded one by one as they
                come; without it they are all held until the last has come.

        Raises:
            ValueError: a name, shape or dtype of the plan, or of the collected stream, is not what
                the engine needs: nothing is replaced. Or a stream does not bring each weight of
                its plan once: then, as after any other error of the stream, the engine refuses to
                generate until a sync has succeeded.
        """
        compat.require_reloadable(self._architecture)
        if self._kind != OF_SYNCS:
            raise ValueError("weight sync: start the engine with a plan, not with ModelOpt's form")
        if expected is None:
            stream = list(stream)
            coming: Mapping[str, Weight] = dict(stream)
            self._require_fit(coming)
        else:
            coming = self._coming(expected)
        self._has_weights = False
        self.on_worker(reload, self._names, stream, coming)
        self.forget_prefixes()
        self._has_weights = True

    def require_contract(self, needed: Mapping[str, str]) -> None:
        """ValueError that names where an exact engine differs from what a trainer needs.

        Args:
            needed: `qat_core.exact.contract.needed` of the trainer's model.
        """
        from qat_core.rollout.vllm.exact.install import contract

        require_kept(needed, self.on_worker(contract))

    def forget_prefixes(self) -> None:
        """Computes prompts again, not from what the KV cache holds of earlier ones.

        Raises:
            ValueError: a generation that was interrupted still holds some.
        """
        if not self._llm.reset_prefix_cache():
            raise ValueError(
                "weight sync: vLLM keeps what an interrupted generation has computed with older "
                "weights; start the engine again"
            )

    def _coming(self, expected: QuantPlan) -> Mapping[str, Weight]:
        """What a plan's weights look like; checked once, as a Qwen3-30B-A3B has 56,000 tensors."""
        if self._accepted is None or self._accepted[0] != expected:
            coming = dict(meta_weights(expected))
            self._require_fit(coming)
            self._accepted = expected, coming
        return self._accepted[1]

    def _require_fit(self, coming: Mapping[str, Weight]) -> None:
        self._names.refuse_own_values(coming, "weight sync")
        found = dict(stored_tensors(self._names.split(coming.items()), LAYOUT))
        require_same(self._expected, found, "weight sync")

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float, seed: int
    ) -> Rollouts:
        """Samples one response a prompt; temperature 0 is greedy.

        Raises:
            ValueError: no weights have come yet, or the last sync failed.
        """
        return self.sample(prompts, max_new_tokens, seed, temperature=temperature)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        seed: int | None,
        **settings: float,
    ) -> Rollouts:
        """As `generate`, with any settings of vLLM's SamplingParams, e.g. `top_p`.

        Without a seed no prompt has one, as in verl: other tokens each time. vLLM 0.24 draws for
        prompts with seeds one after the other where its first model runner serves: Qwen3's MoE.

        Raises:
            ValueError: as `generate`, and for settings that change log-probs of exact rollouts.
        """
        if self._is_exact:
            _require_unchanged(settings)
        seeds = random.Random(seed)
        sampling = [
            self._vllm.SamplingParams(
                max_tokens=max_new_tokens,
                seed=None if seed is None else seeds.getrandbits(63),
                logprobs=0,
                stop_token_ids=[*self.end_ids],
                detokenize=False,
                **settings,
            )
            for _ in prompts
        ]
        outputs = [output.outputs[0] for output in self._run(prompts, sampling)]
        rollouts = to_rollouts(prompts, outputs, self.pad_id)
        if not self._expert_layers:
            return rollouts
        return replace(rollouts, routes=to_routes(rollouts, outputs, self._expert_layers))

    def prompt_log_probs(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Log-probs of each sequence's tokens but the first, FP32 (length - 1,), from one prefill.

        They are of the model alone: temperature and the like do not change them.
        """
        once = self._vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._run(sequences, [once] * len(sequences))
        return [
            torch.tensor(
                [
                    position[token].logprob
                    for token, position in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
                ]
            )
            for tokens, output in zip(sequences, outputs, strict=True)
        ]

    def _run(self, prompts: Sequence[Sequence[int]], sampling: list[Any]) -> list[Any]:
        if not self._has_weights:
            raise ValueError("the engine has no weights: sync() them first")
        require_known(prompts, self._vocabulary)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs: list[Any] = self._llm.generate(inputs, sampling, use_tqdm=False)
        return outputs

    def sleep(self) -> None:
        """Frees weights and KV cache; needs CUDA and the setting `enable_sleep_mode=True`."""
        if self._vllm.platforms.current_platform.is_cpu():
            raise ValueError("sleep: vLLM frees no memory on a CPU")
        self._llm.sleep(level=2)
        self._has_weights = False

    def wake_up(self) -> None:
        """Takes the memory back; `sync` must follow."""
        self._llm.wake_up()

    def _require_coverage(self) -> None:
        differing = sorted(set(self.served) ^ set(self.plan.quantized))
        if differing:
            raise ValueError(f"vLLM and the plan differ in what is NVFP4: {differing[:3]}")

    def on_worker(self, function: Any, *arguments: Any) -> Any:
        """`function(worker, *arguments)`, called with vLLM's worker; for measurements."""
        return self._llm.collective_rpc(function, args=arguments)[0]


def _require_kernels(worker: Any) -> None:
    require_asked(worker.model_runner.get_model())


def _require_biases(worker: Any, names: HubNames, source: str) -> None:
    require_biases(worker.model_runner.get_model(), names, source)


def _require_unchanged(settings: Mapping[str, float]) -> None:
    for name, value in settings.items():
        if value not in UNCHANGED.get(name, (value,)):
            raise ValueError(f"{name}: {value}: exact rollouts need {UNCHANGED[name][0]}")
