"""What is ours of vLLM as far as none is needed: versions, kernels, layouts, memory, refusals."""

import gc
import re
import shutil
import weakref
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from experiments.support.subprocess_call import call_in_subprocess
from qat_core.nvfp4 import dequantize, global_scale, group_amax, quantize
from qat_core.nvfp4.format import PackedTensor
from qat_core.rollout.engine import Rollouts
from qat_core.rollout.start import memory_settings, start_engine
from qat_core.rollout.vllm.compat import _hold, keep_process_groups, require_supported
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.rollout.vllm.outputs import to_routes
from qat_core.rollout.vllm.tile_layout import (
    from_layout,
    lay_out_for_marlin,
    to_layout,
    unpack,
    unpack_marlin,
)
from qat_core.units import BYTES_PER_GIB
from tests.nano_models import write_nano


def test_routes_of_another_number_of_tokens_are_refused() -> None:
    mask = torch.tensor([[0, 1, 1, 1]])
    rollouts = Rollouts(
        input_ids=mask,
        attention_mask=mask,
        response_mask=mask[:, 2:].float(),
        log_probs=torch.zeros(1, 2),
        truncated=torch.tensor([False]),
    )
    ids = np.zeros((3, 2, 2), dtype=np.int16)
    assert to_routes(rollouts, [SimpleNamespace(routed_experts=ids[:2])], [0, 1]).shape[1] == 3
    with pytest.raises(ValueError, match="vLLM: 3 routes for 3 tokens; one less is expected"):
        to_routes(rollouts, [SimpleNamespace(routed_experts=ids)], [0, 1])


def test_an_engine_that_serves_other_weights_in_nvfp4_is_refused() -> None:
    engine = object.__new__(VllmEngine)
    engine.served, engine.plan = ["a", "b"], SimpleNamespace(quantized=("a", "c"))
    with pytest.raises(ValueError, match=r"differ in what is NVFP4: \['b', 'c'\]"):
        engine._require_coverage()


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.7), ("top_p", 0.9), ("top_k", 5)])
def test_exact_rollouts_refuse_what_changes_log_probs(name: str, value: float) -> None:
    engine = object.__new__(VllmEngine)
    engine._is_exact = True
    with pytest.raises(ValueError, match=f"{name}: {value}: exact rollouts need"):
        engine.sample([[1]], 4, 0, **{"temperature": 1.0, name: value})


def test_overrides_of_a_model_whose_weights_are_to_come_are_refused(tmp_path: Path) -> None:
    packed = SimpleNamespace(quantized=("a",))
    with pytest.raises(ValueError, match=r"hf_overrides: .*; change .*config\.json instead"):
        VllmEngine(tmp_path, packed, hf_overrides={"rope_theta": 1e6})


@pytest.mark.parametrize(("name", "value"), [("dtype", "float32"), ("logprobs_mode", "raw_logits")])
def test_settings_that_the_engine_has_itself_are_refused(
    name: str, value: str, nano_dir: Path
) -> None:
    with pytest.raises(ValueError, match=f"^{name}: {value}: this engine needs .*; remove it"):
        VllmEngine(nano_dir, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [("compilation_config", 0, "set mode, "), ("model_impl", "transformers", "need vLLM's own")],
)
def test_settings_without_exact_rollouts_are_refused(
    name: str, value: object, needed: str, nano_dir: Path
) -> None:
    with pytest.raises(ValueError, match=f"^{name}: {value}: exact rollouts {needed}"):
        VllmEngine(nano_dir, exact=True, **{name: value})


def test_files_that_vllm_alone_would_read_are_refused(nano_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs requirements/engines.txt")
    folder = shutil.copytree(nano_dir, tmp_path / "model")
    (folder / "consolidated.safetensors").symlink_to(nano_dir / "model.safetensors")
    with pytest.raises(ValueError, match=r"model/consolidated\.safetensors: vLLM would read it"):
        VllmEngine(folder)


OF_CPU = ["0.28.0", "0.28.1", "0.30.0", "0.31.0", "0.32.1"]
OF_CUDA = ["0.24.0", "0.33.0", "0.33.0.post1", "0.33.0+cu13.0"]


@pytest.mark.parametrize(
    ("version", "on_cpu", "refused"),
    [
        *((it, True, r"CUDA: .*0\.24, 0\.29, 0\.33;") for it in OF_CPU),
        *((it, False, r"CPU: .* 0\.28, 0\.29") for it in OF_CUDA),
    ],
)
def test_versions_pass_on_their_device_alone(version: str, on_cpu: bool, refused: str) -> None:
    require_supported(version, on_cpu=on_cpu)
    said = rf"vllm {re.escape(version)} is not supported on {refused}"
    with pytest.raises(ValueError, match=said):
        require_supported(version, on_cpu=not on_cpu)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("version", ["0.23.9", "0.25.0", "0.34.0", "0.2.4", "0.240.0", "1.0"])
def test_another_version_is_named(version: str, on_cpu: bool) -> None:
    with pytest.raises(ValueError, match=rf"vllm {version} is not supported on"):
        require_supported(version, on_cpu=on_cpu)


def test_0_29_passes_on_both() -> None:
    for on_cpu in (True, False):
        require_supported("0.29.0", on_cpu=on_cpu)


@pytest.mark.parametrize("version", ["0.29.0", "0.33.0"])
def test_through_verl_a_gpu_has_the_version_that_verl_pins(version: str) -> None:
    pytest.importorskip("verl", reason="needs requirements/engines.txt")
    from qat_core.verl.compat import require_vllm

    require_vllm("0.24.0", on_cpu=False)
    with pytest.raises(
        ValueError, match=rf"vllm {version} is not .*through verl on CUDA: install 0\.24,"
    ):
        require_vllm(version, on_cpu=False)


class Method:
    """Makes its layer's attributes again, as vLLM 0.24 does after every reload."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.workspace = torch.zeros(4)
        layer.scale = torch.tensor([layer.weight_scale])


def test_held_attributes_take_new_values_in_their_old_memory() -> None:
    _hold(Method, ("workspace", "scale"))
    _hold(Method, ("workspace", "scale"))  # a second engine in the process changes nothing
    layer, method = torch.nn.Module(), Method()
    layer.weight_scale = 2.0
    method.process_weights_after_loading(layer)
    held = layer.workspace, layer.scale
    layer.workspace.fill_(7.0)  # locks left behind
    layer.weight_scale = 3.0
    method.process_weights_after_loading(layer)
    assert layer.workspace is held[0] and layer.scale is held[1]
    assert layer.workspace.eq(0).all() and layer.scale.item() == 3.0


class Client:
    """vLLM's `InprocClient`."""

    _finalizer: Any


def test_an_engine_leaves_the_process_groups_to_the_others() -> None:
    """vLLM from 0.31 ends them with any engine that Python frees; before, there is no finalizer."""
    ended: list[str] = []
    client = Client()
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client))
    keep_process_groups(llm)
    client._finalizer = weakref.finalize(client, ended.append, "groups")
    keep_process_groups(llm)
    del llm, client
    gc.collect()
    assert not ended


@pytest.mark.parametrize(
    ("device", "beside_trainer", "gpu_memory_gib", "cache_gib"),
    [
        pytest.param("cpu", True, None, None, id="on a CPU its own setting"),
        pytest.param("cuda", False, None, None, id="alone its default of 90 %"),
        pytest.param("cuda", True, None, 16, id="beside a trainer"),
        pytest.param("cuda", True, 8.0, 2, id="beside a trainer, on a shared GPU"),
        pytest.param("cuda", False, 8.0, 2, id="evaluating, on a shared GPU"),
    ],
)
def test_size_of_the_cache(
    device: str, beside_trainer: bool, gpu_memory_gib: float | None, cache_gib: int | None
) -> None:
    settings = memory_settings(device, beside_trainer, gpu_memory_gib)
    if cache_gib is None:
        assert settings == {}
    else:
        assert settings["kv_cache_memory_bytes"] == cache_gib * BYTES_PER_GIB
        assert settings["gpu_memory_utilization"] == 0.01  # what has to be free when it starts


@pytest.mark.gpu
def test_an_engine_takes_no_more_than_its_share(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    write_nano("nano-dense", tmp_path / "model", num_layers=2)
    assert call_in_subprocess(_bytes_taken, str(tmp_path / "model")) < 6 * BYTES_PER_GIB


def _bytes_taken(model_dir: str) -> int:
    engine = start_engine("vllm", Path(model_dir), "cuda", None, 64, gpu_memory_gib=4.0)
    engine.generate([[2, 3, 4]] * 8, 8, 1.0, 0)
    return torch.cuda.memory_reserved()  # of this process: others use the GPU meanwhile


def packed_weight(n: int, k: int) -> PackedTensor:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k)).bfloat16()
    weight *= torch.logspace(-4, 4, n, base=2)[:, None].bfloat16()
    return quantize(weight, global_scale(group_amax([[weight]])[0], "pow2"))


def test_each_code_lies_where_the_description_says() -> None:
    n, k = 128, 192
    packed = packed_weight(n, k)
    words, scale = to_layout(packed.codes, packed.block_scale)
    assert words.shape == (k // 16, 2 * n) and scale.shape == (k // 16, n)
    by_byte, scale_bytes = packed.codes.tolist(), packed.block_scale.view(torch.uint8).tolist()
    laid_out, laid_out_scale = words.tolist(), scale.view(torch.uint8).tolist()
    for i, j in product(range(n // 64), range(k // 16)):
        for thread, w, place in product(range(32), range(4), range(8)):
            p2, p1, p0 = place >> 2, place >> 1 & 1, place & 1
            row = 64 * i + 16 * w + 8 * p1 + thread // 4
            column = 16 * j + 8 * p0 + 2 * (thread % 4) + p2
            word = laid_out[j][128 * i + 4 * thread + w]
            code = by_byte[row][column // 2] >> 4 * (column % 2) & 15
            assert word >> 4 * place & 15 == code
        for a, b in product(range(8), range(8)):
            found = laid_out_scale[j][64 * i + 8 * b + a]
            assert found == scale_bytes[64 * i + 8 * a + b][j]


@pytest.mark.parametrize(("n", "k"), [(64, 64), (128, 320), (320, 128)])
def test_a_weight_in_the_layout_reads_back_bit_for_bit(n: int, k: int) -> None:
    packed = packed_weight(n, k)
    words, scale = to_layout(packed.codes, packed.block_scale)
    codes, block_scale = from_layout(words, scale)
    assert torch.equal(codes, packed.codes)
    assert torch.equal(block_scale.view(torch.uint8), packed.block_scale.view(torch.uint8))
    multiplier = packed.global_scale.reciprocal().reshape(1)
    assert torch.equal(unpack(words, scale, multiplier), dequantize(packed))


@pytest.mark.parametrize(("n", "k"), [(64, 64), (128, 320), (320, 128)])
def test_a_weight_as_marlin_reads_it_unpacks_bit_for_bit(n: int, k: int) -> None:
    packed = packed_weight(n, k)
    words = torch.empty(k // 16, 2 * n, dtype=torch.int32)
    scale, multiplier = torch.empty(k // 16, n, dtype=torch.uint8), torch.empty(1)
    lay_out_for_marlin(packed, words, scale, multiplier)
    assert torch.equal(unpack_marlin(words, scale, multiplier), dequantize(packed))


@pytest.mark.parametrize(("n", "k"), [(96, 64), (64, 96)])
def test_other_sizes_are_refused_with_a_fix(n: int, k: int) -> None:
    packed = packed_weight(n, k)
    with pytest.raises(ValueError, match=rf"\({n}, {k}\).*multiples of 64; use Marlin"):
        to_layout(packed.codes, packed.block_scale)
