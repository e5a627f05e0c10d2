"""Packed checkpoints: written, converted and read back bit for bit."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from qat_core import convert, export
from qat_core.checkpoint.manifest import MANIFEST, verify_manifest, write_manifest
from qat_core.checkpoint.read import read_checkpoint
from qat_core.nvfp4 import quantize
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare
from qat_core.weights.hub_names import HubNames, Weight
from qat_core.weights.layouts import LAYOUTS, Layout, stored_tensors
from qat_core.weights.stream import weight_stream
from tests.families import tiny_family
from tests.files import edit_json, set_keys
from tests.nano_models import said_to_be_tied

HEAD = "lm_head.weight"


@pytest.mark.parametrize(
    "recipe",
    [Recipe.ffn(), Recipe.full(ignore=("layers.0.mlp",)), Recipe.full(scale_policy="amax")],
    ids=["ffn", "without-an-mlp", "amax"],
)
def test_converting_stores_the_bytes_that_a_sync_sends(
    nano_dir: Path, tmp_path: Path, recipe: Recipe
) -> None:
    convert(nano_dir, tmp_path / "packed", recipe)
    expected = _synced(nano_dir, recipe)
    _require_equal(read_checkpoint(tmp_path / "packed"), expected)


@pytest.mark.parametrize("kind", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "plain"])
def test_exporting_a_model_equals_converting_its_folder(
    nano_dir: Path, tmp_path: Path, kind, prepared: bool
) -> None:
    model = AutoModelForCausalLM.from_pretrained(nano_dir, dtype=torch.bfloat16)
    if prepared:
        prepare(model, Recipe.full())
    tokenizer = AutoTokenizer.from_pretrained(nano_dir)
    export(model, Recipe.full(), tmp_path / "exported", tokenizer, kind)
    convert(nano_dir, tmp_path / "converted", Recipe.full(), kind)
    for path in (tmp_path / "converted").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "exported" / path.name).read_bytes(), path.name
    for folder in ("exported", "converted"):
        _require_equal(read_checkpoint(tmp_path / folder), _synced(nano_dir, Recipe.full()))
        copied = AutoTokenizer.from_pretrained(tmp_path / folder)
        assert copied.get_vocab() == tokenizer.get_vocab()
        assert copied.special_tokens_map == tokenizer.special_tokens_map


def test_the_older_name_of_the_dtype_is_not_kept(nano_dir: Path, tmp_path: Path) -> None:
    source = shutil.copytree(nano_dir, tmp_path / "source")
    edit_json(source / "config.json", lambda it: it.pop("dtype"))
    set_keys(source / "config.json", torch_dtype="float32")
    convert(source, tmp_path / "packed", Recipe.full())
    written = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert written["dtype"] == "bfloat16" and "torch_dtype" not in written


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_copy_of_a_tied_output_head_is_left_out(
    nano_dir: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    tied = said_to_be_tied(nano_dir, tmp_path / "tied")
    tensors = load_file(tied / "model.safetensors")
    tensors[HEAD] = tensors["model.embed_tokens.weight"].to(dtype, copy=True)
    save_file(tensors, tied / "model.safetensors")
    convert(tied, tmp_path / "packed", Recipe.full())
    names = [name for name, _ in read_checkpoint(tmp_path / "packed")]
    assert HEAD not in names and "model.embed_tokens.weight" in names


def test_an_output_head_of_its_own_is_kept_or_refused(nano_dir: Path, tmp_path: Path) -> None:
    tied = said_to_be_tied(nano_dir, tmp_path / "tied")
    model = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.bfloat16)
    own_values = rf"{HEAD}: has values of its own, .* set tie_word_embeddings: false"
    with pytest.raises(ValueError, match=own_values):
        export(model, Recipe.full(), tmp_path / "packed")
    with pytest.raises(ValueError, match=own_values):
        convert(tied, tmp_path / "packed", Recipe.full())
    convert(nano_dir, tmp_path / "packed", Recipe.full())
    stored = dict(read_checkpoint(tmp_path / "packed"))[HEAD]
    assert isinstance(stored, torch.Tensor) and torch.equal(stored, model.lm_head.weight)
    edited = said_to_be_tied(tmp_path / "packed", tmp_path / "edited")
    (edited / MANIFEST).unlink()
    write_manifest(edited)
    with pytest.raises(ValueError, match=own_values):
        read_checkpoint(edited)


def test_transformers_computes_what_the_trainer_computes(packed_dir: Path, nano_dir: Path) -> None:
    """transformers 5.10 fuses packed experts under names that its model does not have."""
    trained = AutoModelForCausalLM.from_pretrained(nano_dir, dtype=torch.bfloat16)
    if trained.config.model_type == "qwen3_moe":
        pytest.skip("transformers 5.10 leaves packed experts at random values; vLLM loads them")
    prepare(trained, Recipe.full())
    loaded = AutoModelForCausalLM.from_pretrained(packed_dir, dtype=torch.bfloat16)
    ids = torch.tensor([[3, 14, 4, 17, 5, 9]])
    with torch.no_grad():
        assert torch.equal(trained(input_ids=ids).logits, loaded(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"model\.norm\.weight is"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(128).half()}),
            r"model\.norm\.weight: needs bfloat16 or float32",
        ),
        (lambda t: t["model.layers.0.self_attn.k_proj.weight"].fill_(torch.nan), "k_proj.*NaN"),
        (lambda t: t["model.norm.weight"].fill_(torch.nan), r"model\.norm\.weight: holds NaN"),
        (lambda t: t["model.embed_tokens.weight"].fill_(torch.inf), "embed_tokens.*infinity"),
    ],
    ids=["shape", "dtype", "nan", "nan-unpacked", "infinity"],
)
def test_a_refused_conversion_leaves_nothing(
    nano_dir: Path, tmp_path: Path, change, message: str
) -> None:
    source = tmp_path / "source"
    shutil.copytree(nano_dir, source)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "packed", Recipe.full())
    assert os.listdir(tmp_path) == ["source"]


def test_a_kind_that_there_is_not_is_answered_with_those_that_are(
    nano_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"^kind: needs one of compressed-tensors, modelopt, got"):
        convert(nano_dir, tmp_path / "packed", Recipe.full(), "modelopts")


def test_a_link_to_nowhere_is_refused_before_packing(nano_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "packed").symlink_to("nowhere")
    with pytest.raises(ValueError, match="/packed: exists; choose another name or remove it"):
        convert(nano_dir, tmp_path / "packed", Recipe.ffn())


def test_chat_templates_with_a_name_come_along(nano_dir: Path, tmp_path: Path) -> None:
    source, packed = tmp_path / "source", tmp_path / "packed"
    shutil.copytree(nano_dir, source)
    (source / "additional_chat_templates").mkdir()
    template = Path("additional_chat_templates", "tool_use.jinja")
    (source / template).write_text("{{ messages }}")
    convert(source, packed, Recipe.full())
    assert (packed / template).read_text() == "{{ messages }}"
    verify_manifest(packed)
    (packed / template).write_text("")
    with pytest.raises(ValueError, match=f"{packed / template}: SHA-256 differs"):
        verify_manifest(packed)


def test_a_packed_checkpoint_is_not_packed_again(packed_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="already quantized"):
        convert(packed_dir, tmp_path / "twice", Recipe.full())


def test_what_cannot_be_written_is_said_and_leaves_nothing(
    nano_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr("qat_core.checkpoint.write.save_file", full)
    with pytest.raises(ValueError, match=r"packed: not written: .*No space left on device"):
        convert(nano_dir, tmp_path / "packed", Recipe.full())
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_place_of_a_folder_is_named(nano_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/packed: not written: .*/file'; nothing was left"):
        convert(nano_dir, tmp_path / "file" / "packed", Recipe.full())


def test_an_export_has_the_files_that_save_pretrained_writes(
    nano_dir: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(nano_dir, dtype=torch.bfloat16)
    model.generation_config.update(eos_token_id=[1, 5], temperature=0.6, do_sample=True)
    export(model, Recipe.full(), tmp_path / "packed")
    model.save_pretrained(tmp_path / "plain")
    stored, expected = (
        json.loads((tmp_path / folder / "generation_config.json").read_text())
        for folder in ("packed", "plain")
    )
    assert stored == expected and stored["eos_token_id"] == [1, 5]
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]


def _normalised(model: torch.nn.Module) -> torch.nn.Module:
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].self_attn.o_proj)
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_normalised, r"missing: model\.layers\.0\.self_attn\.o_proj\.weight"),
        (lambda m: torch.nn.Sequential(m), "Sequential: not a model of transformers"),
        (lambda m: m.register_buffer("extra", torch.ones(1)) or m, "unknown: extra"),
        (
            lambda m: m.generation_config.update(temperature=0.6, do_sample=False) or m,
            r"^generation_config: .*temperature[^\n]*$",
        ),
    ],
    ids=["weight-norm", "wrapped", "buffer", "contradicting settings"],
)
def test_what_no_engine_would_load_is_not_exported(
    nano_dir: Path, tmp_path: Path, change, message: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(nano_dir, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        export(change(model), Recipe.full(), tmp_path / "packed")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["Sequence", "Token"])
def test_classifiers_are_exported_with_their_heads(
    nano_dir: Path, tmp_path: Path, kind: str
) -> None:
    config = AutoConfig.from_pretrained(nano_dir)
    config.num_labels = 16
    family = type(AutoModelForCausalLM.from_config(config)).__name__.removesuffix("ForCausalLM")
    model = getattr(transformers, f"{family}For{kind}Classification")(config).bfloat16()
    export(model, Recipe.full(), tmp_path / "packed")
    weights = dict(read_checkpoint(tmp_path / "packed"))
    assert torch.equal(weights["score.weight"], model.score.weight)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_experts_that_the_hub_has_as_one_tensor_are_refused_by_name(layout: Layout) -> None:
    """As transformers 5.16 has those of Granite MoE."""
    packed = quantize(torch.ones(2, 4, 32), torch.ones(2))
    with pytest.raises(ValueError, match=r"input_linear\.weight: .* one tensor, .* to ignore$"):
        layout.to_tensors("model.layers.0.block_sparse_moe.input_linear.weight", packed)


def test_fp32_masters_are_stored_in_the_dtypes_that_transformers_loads(tmp_path: Path) -> None:
    model = tiny_family("deepseek_v3").float()
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(name).copy_(torch.linspace(0, 1, 8) + 2**-20)
    export(model, Recipe.full(), tmp_path / "packed")
    weights = dict(read_checkpoint(tmp_path / "packed"))
    assert torch.equal(weights[name], model.get_buffer(name))
    assert weights["model.norm.weight"].dtype == torch.bfloat16


def _synced(folder: Path, recipe: Recipe) -> dict[str, Weight]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return dict(HubNames(model).split(weight_stream(model, plan(model, recipe), recipe)))


def _require_equal(found: Iterator[tuple[str, Weight]], expected: dict[str, Weight]) -> None:
    layout = LAYOUTS["compressed-tensors"]
    tensors, wanted = (dict(stored_tensors(it, layout)) for it in (found, expected.items()))
    assert tensors.keys() == wanted.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), wanted[name].view(torch.uint8)), name
