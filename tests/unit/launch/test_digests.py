"""Digests: what makes two runs one experiment."""

import sys
from pathlib import Path

import pytest

from experiments.launch import digests
from experiments.runs import code
from experiments.runs.provenance import digest_json
from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES, Study
from experiments.support.json_files import write_json
from tests.workflow.programs import run

LIBRARY = "def double(x):\n    return 2 * x\n"
VLLM = "qat_core/rollout/vllm"


def study_of(name: str, **changes: object) -> Study:
    return load_study(STUDIES / f"{name}.yaml").model_copy(update=changes)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose program.py imports a library in a function, and names another module."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "library.py").write_text(LIBRARY)
    for name in ("named", "unrelated"):
        (folder / f"{name}.py").write_text("x = 1\n")
    (folder / "program.py").write_text(
        "def main():\n    from package.library import double\n"
        "    load('package.named.x')\n    print(double(1))\n"
    )
    monkeypatch.setattr(code, "ROOT", tmp_path)
    return folder


@pytest.mark.parametrize(
    ("file", "text", "counts"),
    [
        ("library.py", LIBRARY.replace("2", "3"), True),
        ("named.py", "x = 2\n", True),
        ("library.py", "# twice as much\n" + LIBRARY.replace("2 * x", "(2  *  x)"), False),
        ("library.py", '"""Sums."""\n' + LIBRARY.replace("    r", '    """2 x."""\n    r'), False),
        ("unrelated.py", "x = 2\n", False),
    ],
    ids=["imported late", "named in a text", "layout", "docstrings", "not imported"],
)
def test_code_counts_that_is_imported_or_named(
    package: Path, file: str, text: str, counts: bool
) -> None:
    found = []
    for without in ((), (f"package.{file.removesuffix('.py')}",)):
        before = code.digest_code("package.program", without=without)
        old = (package / file).read_text()
        (package / file).write_text(text)
        code.digest_code.cache_clear()
        found.append(code.digest_code("package.program", without=without) != before)
        (package / file).write_text(old)
    assert found == [counts, False], "what is left out never counts"


@pytest.mark.parametrize(
    ("study", "file", "counts"),
    [
        (study_of("default"), "experiments/rl/loss.py", True),
        (study_of("default"), "experiments/launch/local_trainer.py", True),
        (study_of("default"), "experiments/study/arms.py", True),
        (study_of("default"), "experiments/runs/manifest.py", False),
        (study_of("default"), "qat_core/nvfp4/kernels.py", False),
        (study_of("default"), f"{VLLM}/worker.py", False),
        (study_of("default"), "qat_core/exact/model.py", False),
        (study_of("default"), "qat_core/drift/monitor.py", False),
        (study_of("collapse_cpu"), "qat_core/drift/monitor.py", True),
        (study_of("collapse_vllm"), f"{VLLM}/first_difference.py", False),
        (study_of("collapse_vllm"), "qat_core/nvfp4/kernels.py", True),
        (study_of("collapse_vllm"), f"{VLLM}/worker.py", True),
        (study_of("collapse_vllm"), f"{VLLM}/humming/linear.py", False),
        (study_of("collapse_vllm"), f"{VLLM}/cpu/modelopt.py", False),
        (study_of("verl_nano"), f"{VLLM}/cpu/modelopt.py", True),
        (study_of("verl_nano"), "experiments/verl/reward.py", True),
        (study_of("verl_nano"), "qat_core/verl/cpu.py", True),
        (study_of("verl_nano"), "qat_core/verl/adapter.py", True),
        (study_of("verl_nano"), "qat_core/verl/advantage.py", False),
        (study_of("collapse_verl"), "qat_core/verl/advantage.py", True),
        (study_of("collapse_verl"), "qat_core/verl/cpu_engine.py", False),
        (study_of("collapse_verl"), "qat_core/verl/exact.py", False),
        (study_of("collapse_verl", exact=True), "qat_core/verl/exact.py", True),
        (study_of("collapse_verl", exact=True), f"{VLLM}/humming/linear.py", True),
        (study_of("qwen3_moe_smoke"), "experiments/verl/seeded_engine.py", True),
        (study_of("qwen3"), "experiments/verl/seeded_engine.py", False),
    ],
)
def test_the_code_of_a_run_is_what_it_executes(study: Study, file: str, counts: bool) -> None:
    without = digests.not_executed(study) + digests.BOOKKEEPING
    modules = digests.first_modules(study, study.runs[0])
    files = code.executed_files(*modules, without=without)
    assert (ROOT / file in files) == counts and (ROOT / file).is_file()


@pytest.mark.parametrize("name", ["default", "collapse_vllm"])
def test_code_that_is_executed_loads_none_that_is_left_out(name: str) -> None:
    studies = [study_of(name, device=device) for device in ("cpu", "cuda")]
    left_out = {part for study in studies for part in digests.not_executed(study)}
    files = code.executed_files(digests.LOCAL_TRAINER, without=tuple(left_out))
    modules = [".".join(it.relative_to(ROOT).with_suffix("").parts) for it in files]
    program = f"import sys, {', '.join(modules)}\nprint(*sys.modules)"
    done = run([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
    assert "experiments.rl.loss" in modules
    assert not left_out & set(done.stdout.split())


@pytest.mark.parametrize("section", ["weights", "files"])
def test_a_run_depends_on_every_file_of_its_base(tmp_path: Path, section: str) -> None:
    study = study_of("default")
    folder = tmp_path / "base" / study.base_of(study.runs[0])
    folder.mkdir(parents=True)
    manifest = {"weights": {"model.safetensors": "a"}, "files": {"config.json": "b"}}
    found = []
    for changed in ({}, {section: dict.fromkeys(manifest[section], "c")}):
        write_json(folder / "manifest.json", manifest | changed | {"weight_bytes": 1})
        found.append(digests.training_digests(study, study.runs[0], tmp_path))
    before, after = found
    assert {key for key in before if before[key] != after[key]} == {"base"}


@pytest.mark.parametrize(("name", "has_vllm"), [("default", False), ("collapse_vllm", True)])
def test_kernels_are_part_of_the_runs_of_vllm(
    name: str, has_vllm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = study_of(name)

    def digest() -> list[str]:
        run = study.runs[0]
        return [digests.config_digest(study, run), digests.code_digest(study, run)]

    before = digest()
    monkeypatch.setenv("VLLM_CACHE_ROOT", "cache")
    assert digest() == before
    monkeypatch.setenv("QAT_CORE_LINEAR_KERNEL", "humming")
    assert [new != old for new, old in zip(digest(), before, strict=True)] == [has_vllm] * 2
    humming = digest()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # which draws from seeds otherwise
    assert (digest()[0] != humming[0]) == has_vllm


@pytest.mark.parametrize("name", ["default", "verl_nano"])
def test_the_name_of_a_study_is_no_setting_of_its_runs(name: str) -> None:
    studies = (study_of(name), study_of(name, study="another"))
    assert len({digests.config_digest(study, study.runs[0]) for study in studies}) == 1


def test_json_digest_ignores_the_order_of_keys() -> None:
    assert digest_json({"a": 1, "b": 2}) == digest_json({"b": 2, "a": 1})
    assert digest_json([1, 2]) != digest_json([2, 1])
