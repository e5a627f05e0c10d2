"""Models as they are published: the hub's names, other dtypes beside BF16, keys of no model."""

import sys
import tempfile
from pathlib import Path
from typing import get_args

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from qat_core import convert, export
from qat_core.checkpoint.__main__ import main
from qat_core.checkpoint.architecture import require_loadable
from qat_core.checkpoint.read import read_checkpoint
from qat_core.doctor.weights import served_stream
from qat_core.nvfp4 import PackedTensor
from qat_core.options import CheckpointFormat
from qat_core.planning.explanation import explain
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare
from qat_core.weights.hub_names import HubNames, Weight
from qat_core.weights.stream import weight_stream
from tests.families import tiny_family

UNREAD = {
    "qwen3_next": {"mtp.fc.weight": torch.ones(64, 128).bfloat16()},
    "glm4_moe": {
        "model.layers.46.eh_proj.weight": torch.ones(64, 128).half(),
        "model.layers.46.mlp.experts.0.gate_proj.weight": torch.ones(32, 64).bfloat16(),
    },
    "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
    "gpt_neox": {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 4, 4).bool(),
        "gpt_neox.layers.1.attention.masked_bias": torch.tensor(-1e9),
    },
    "roberta": {"roberta.embeddings.position_ids": torch.arange(256)[None]},
}


def saved(family: str, folder: Path) -> dict[str, Tensor]:
    """Writes a tiny model, as `save_pretrained` does, and gives its tensors."""
    tiny_family(family).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def store(tensors: dict[str, Tensor], folder: Path) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def converted(
    folder: Path, kind: CheckpointFormat = "compressed-tensors", **recipe: object
) -> dict[str, Weight]:
    """What `convert` makes of a folder."""
    with tempfile.TemporaryDirectory() as made:
        convert(folder, Path(made) / "packed", Recipe(**recipe), kind)
        return dict(read_checkpoint(Path(made) / "packed"))


@pytest.mark.parametrize("kind", get_args(CheckpointFormat))
@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
def test_what_stands_in_fp32_beside_weights_of_bf16_is_not_rounded(
    tmp_path: Path, family: str, kind: CheckpointFormat
) -> None:
    tensors = saved(family, tmp_path)
    packed = {n for n, w in converted(tmp_path).items() if isinstance(w, PackedTensor)}
    exact = {n: t.float() + 2**-12 for n, t in tensors.items() if n not in packed}
    store(tensors | exact, tmp_path)
    found = converted(tmp_path, kind)
    assert exact and all(torch.equal(found[name], exact[name]) for name in exact)
    assert packed == {n for n, w in found.items() if isinstance(w, PackedTensor)}


def test_the_doctor_reads_such_a_checkpoint_in_the_dtypes_of_a_sync(tmp_path: Path) -> None:
    tensors = saved("qwen3_next", tmp_path / "source")
    name = "model.layers.0.linear_attn.A_log"
    store(tensors | {name: tensors[name].float()}, tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "packed", Recipe())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.bfloat16)
    sent = dict(weight_stream(model, plan(model, Recipe()), Recipe()))
    for served_name, weight in served_stream(tmp_path / "packed", None):
        expected = sent.pop(served_name)
        if isinstance(weight, Tensor):
            assert torch.equal(weight, expected) and weight.dtype == expected.dtype, served_name
    assert not sent


def test_experts_that_stay_unpacked_are_exact_if_one_of_them_is_in_fp32(tmp_path: Path) -> None:
    tensors = saved("qwen3_moe", tmp_path)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[name] = tensors[name].float() + 2**-12
    store(tensors, tmp_path)
    found = converted(tmp_path, ignore=("experts",))
    experts = {n: t for n, t in tensors.items() if ".experts." in n}
    assert experts and all(torch.equal(found[n].double(), t.double()) for n, t in experts.items())


@pytest.mark.parametrize("prepared", [False, True])
def test_an_export_keeps_what_a_model_holds_in_fp32_beside_bf16(
    tmp_path: Path, prepared: bool
) -> None:
    model = tiny_family("qwen3_next")
    exact = model.model.layers[0].linear_attn.A_log
    exact.data = exact.data.float() + 2**-12
    if prepared:
        prepare(model, Recipe())
    export(model, Recipe(), tmp_path / "packed")
    found = dict(read_checkpoint(tmp_path / "packed"))
    assert torch.equal(found["model.layers.0.linear_attn.A_log"], exact)


def test_files_of_fp32_throughout_are_stored_as_transformers_loads_them(tmp_path: Path) -> None:
    tensors = saved("deepseek_v3", tmp_path / "source")
    draft = {"model.layers.61.eh_proj.weight": torch.ones(64, 128).bfloat16()}
    store({n: t.float() + 2**-12 for n, t in tensors.items()} | draft, tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.bfloat16)
    export(model, Recipe(), tmp_path / "exported")
    convert(tmp_path / "source", tmp_path / "packed", Recipe())
    for path in (tmp_path / "exported").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "packed" / path.name).read_bytes()


@pytest.mark.parametrize("family", UNREAD)
def test_keys_that_transformers_leaves_out_are_left_out_and_named(
    tmp_path: Path, family: str
) -> None:
    source = tmp_path / "source"
    tensors = saved(family, source)
    convert(source, tmp_path / "expected", Recipe())
    store(tensors | UNREAD[family], source)
    done = convert(source, tmp_path / "packed", Recipe())
    assert done.left_out == tuple(sorted(UNREAD[family]))
    assert f"left out: {', '.join(done.left_out)}: transformers leaves them out" in str(done)
    for path in (tmp_path / "expected").iterdir():
        assert path.read_bytes() == (tmp_path / "packed" / path.name).read_bytes(), path.name


def test_other_keys_that_no_model_reads_are_refused_beside_those(tmp_path: Path) -> None:
    tensors = saved("glm4_moe", tmp_path / "source") | UNREAD["glm4_moe"]
    store(tensors | {"model.layers.7.norm.weight": torch.ones(64)}, tmp_path / "source")
    with pytest.raises(ValueError, match=r"model: unknown: model\.layers\.7\.norm\.weight$"):
        convert(tmp_path / "source", tmp_path / "packed", Recipe())


def test_tied_weights_are_found_under_whichever_of_their_names_a_file_has(tmp_path: Path) -> None:
    """XLM-RoBERTa's head comes before its embedding, and files have the embedding."""
    tensors = saved("xlm-roberta", tmp_path)
    stored = tensors["roberta.embeddings.word_embeddings.weight"]
    assert torch.equal(converted(tmp_path)["lm_head.decoder.weight"], stored)


def test_integers_in_the_place_of_weights_are_refused(tmp_path: Path) -> None:
    tensors = saved("llama", tmp_path / "source")
    name = "model.layers.0.mlp.up_proj.weight"
    store(tensors | {name: tensors[name].to(torch.int8)}, tmp_path / "source")
    with pytest.raises(ValueError, match=rf"{name} is torch\.int8 .* needs torch\.bfloat16"):
        convert(tmp_path / "source", tmp_path / "packed", Recipe())


def test_a_conversion_says_which_experts_stay_in_bf16_and_ends_with_totals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, packed = tmp_path / "source", tmp_path / "packed"
    tensors = saved("gpt_oss", source)
    monkeypatch.setattr(sys, "argv", ["checkpoint", "convert", str(source), str(packed)])
    main()
    lines = capsys.readouterr().out.splitlines()
    experts = next(line for line in lines if "mlp.experts.gate_up_proj " in line)
    assert experts.split()[0] == "2x" and experts.split()[2:4] == ["8x64x192", "BF16"]
    assert experts.endswith("experts stored (input, output): blocks run along the last dimension")
    before, after = (sum(t.nbytes for t in _stored(each).values()) for each in (source, packed))
    num_packed = sum(2 * t.numel() for n, t in _stored(packed).items() if n.endswith("_packed"))
    total = sum(tensor.numel() for tensor in tensors.values())
    assert lines[-1] == (
        f"total: {num_packed / total:.1%} of {total:,} weights in NVFP4; "
        f"{before / 2**20:,.2f} MiB before, {after / 2**20:,.2f} MiB after"
    )


def _stored(folder: Path) -> dict[str, Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_an_explanation_ends_with_the_totals_of_a_conversion(tmp_path: Path, family: str) -> None:
    saved(family, tmp_path / "source")
    done = convert(tmp_path / "source", tmp_path / "packed", Recipe())
    assert explain(tiny_family(family), Recipe()).splitlines()[-1] == str(done).splitlines()[-1]


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_who_packs_or_verifies_experts_reads_that_transformers_would_not_load_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    saved(family, tmp_path / "source")
    folders = [str(tmp_path / "source"), str(tmp_path / "packed")]
    for arguments in (["convert", *folders], ["verify", folders[1]]):
        monkeypatch.setattr(sys, "argv", ["checkpoint", *arguments])
        main()
        said = "transformers 5.10 gives packed experts random values" in capsys.readouterr().out
        assert said == (family == "qwen3_moe")


@pytest.mark.skipif(not transformers.__version__.startswith("5.10."), reason="said of 5.10")
def test_transformers_reports_packed_experts_as_missing(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "packed", Recipe())
    _, found = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert {name.rpartition(".")[2] for name in found["missing_keys"]} == {
        "gate_up_proj",
        "down_proj",
    }


FAMILIES = ["mixtral", "olmoe", "deepseek_v3", "glm4_moe", "qwen3_moe", "gpt_oss", "llama4_text"]


@pytest.mark.parametrize("family", [*FAMILIES, "granitemoe", "nemotron_h", "lfm2", "llama"])
def test_pieces_are_what_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    model = tiny_family(family)
    names = HubNames(model)
    state = model.state_dict()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    pieces = dict(names.split(state.items()))
    for name, tensor in stored.items():
        assert torch.equal(tensor, pieces[name]), name
    assert stored.keys() <= pieces.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(names.join(name, tuple(tensor.shape), pieces.__getitem__), tensor), name


def test_the_owner_of_a_name_of_the_hub_is_found() -> None:
    name = "model.layers.1.block_sparse_moe.gate.weight"
    assert HubNames(tiny_family("mixtral")).owner(name) == "model.layers.1.mlp.gate.weight"


def test_a_form_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hub's names.*neither a whole tensor"):
        HubNames(tiny_family("hrm_text"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.popitem(), "missing keys"),
        (lambda t: t.update(extra=torch.empty(1, device="meta")), "unexpected keys: extra"),
        (lambda t: t.update({_FUSED: t[_FUSED].transpose(1, 2)}), "mismatched keys"),
    ],
    ids=["missing", "unknown", "transposed"],
)
def test_transformers_loader_is_asked(spoil, message: str) -> None:
    with torch.device("meta"):
        model = tiny_family("gpt_oss")
    stored = dict(HubNames(model).split(model.state_dict().items()))
    require_loadable(model, stored, "here")
    spoil(stored)
    with pytest.raises(ValueError, match=f"here: transformers finds {message}"):
        require_loadable(model, stored, "here")


_FUSED = "model.layers.0.mlp.experts.gate_up_proj"
