"""Digests and manifests: what makes two runs one experiment, and how they differ."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.launch import digests
from experiments.launch.digests import TRAINING_CODE
from experiments.runs import provenance
from experiments.study.load import load_study
from experiments.study.schema import STUDIES
from experiments.support.json_files import write_json

LIBRARY = "def double(x):\n    return 2 * x\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two modules, of which program.py imports library.py inside a function."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "library.py").write_text(LIBRARY)
    (folder / "unrelated.py").write_text("x = 1\n")
    (folder / "program.py").write_text(
        "import json\n\ndef main():\n    from package.library import double\n    print(double(1))\n"
    )
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    return folder


def digest_program() -> str:
    provenance.digest_code.cache_clear()
    return provenance.digest_code("package.program")


def test_code_digest_follows_imports_wherever_they_stand(package: Path) -> None:
    before = digest_program()
    (package / "library.py").write_text(LIBRARY.replace("2", "3"))
    assert digest_program() != before


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("library.py", "# twice as much\n" + LIBRARY.replace("2 * x", "(2  *  x)")),
        (
            "library.py",
            '"""Sums."""\n\ndef double(x):\n    """Twice as much."""\n    return 2 * x\n',
        ),
        ("unrelated.py", "x = 2\n"),
    ],
    ids=["comments and layout", "docstrings", "module not imported"],
)
def test_code_digest_ignores(package: Path, file: str, text: str) -> None:
    before = digest_program()
    (package / file).write_text(text)
    assert digest_program() == before


def test_a_module_alone_does_not_count_its_imports(package: Path) -> None:
    before = provenance.digest_module("package.program")
    (package / "library.py").write_text(LIBRARY.replace("2", "3"))
    assert provenance.digest_module("package.program") == before
    program = package / "program.py"
    program.write_text(program.read_text().replace("double(1)", "double(2)"))
    assert provenance.digest_module("package.program") != before


def test_the_local_trainers_settings_are_training_code(monkeypatch: pytest.MonkeyPatch) -> None:
    study = load_study(STUDIES / "default.yaml")
    before = digests.code_digest(study)
    assert before == digests.code_digest(study)
    statements = provenance._statements

    def with_another_trainer(file: Path) -> str:
        return statements(file) + "changed" * (file.name == "local_trainer.py")

    monkeypatch.setattr(provenance, "_statements", with_another_trainer)
    assert digests.code_digest(study) != before


@pytest.mark.parametrize("section", ["weights", "files"])
def test_a_run_depends_on_every_file_of_its_base(tmp_path: Path, section: str) -> None:
    study = load_study(STUDIES / "default.yaml")
    folder = tmp_path / "base" / study.base_of(study.runs[0])
    folder.mkdir(parents=True)
    manifest = {"weights": {"model.safetensors": "a"}, "files": {"config.json": "b"}}
    found = []
    for changed in ({}, {section: dict.fromkeys(manifest[section], "c")}):
        write_json(folder / "manifest.json", manifest | changed | {"weight_bytes": 1})
        found.append(digests.training_digests(study, study.runs[0], tmp_path))
    before, after = found
    assert {key for key in before if before[key] != after[key]} == {"base"}


def test_modules_that_verl_loads_by_name_are_training_code() -> None:
    folders = (digests.VERL_CONFIG, provenance.ROOT / "experiments" / "recipes")
    texts = [path.read_text() for folder in folders for path in folder.rglob("*.yaml")]
    values = re.sub(r"(^|\s)#.*", "", "\n".join(texts), flags=re.MULTILINE)
    # a module, or a class in one
    names = re.findall(r"\b((?:qat_core|experiments)(?:\.[a-z_]+)+)", values)
    named = {provenance._file_of(name) for name in names}
    counted = {file for it in TRAINING_CODE["verl"] for file in provenance.imported_files(it)}
    assert len(named) >= 5 and named <= counted, named - counted


def test_training_code_is_format_recipe_and_trainer_but_no_bookkeeping() -> None:
    modules = TRAINING_CODE["local"]
    files = {file for module in modules for file in provenance.imported_files(module)}
    names = {str(file.relative_to(provenance.ROOT)) for file in files}
    assert {
        "qat_core/planning/recipe.py",
        "qat_core/rl/trainer.py",
        "experiments/study/arms.py",
    } <= names
    assert any(name.startswith("qat_core/nvfp4/") for name in names)
    assert not {"experiments/tracking/publish.py", "experiments/launch/run.py"} & names
    assert not any(name.startswith("analysis/") for name in names)


@pytest.mark.parametrize(("name", "has_vllm"), [("default", False), ("collapse_vllm", True)])
def test_kernels_are_part_of_the_runs_of_vllm(
    name: str, has_vllm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = load_study(STUDIES / f"{name}.yaml")
    before = digests.config_digest(study, study.runs[0])
    monkeypatch.setenv("VLLM_CACHE_ROOT", "cache")
    assert digests.config_digest(study, study.runs[0]) == before
    monkeypatch.setenv("QAT_CORE_LINEAR_KERNEL", "humming")
    assert (digests.config_digest(study, study.runs[0]) != before) == has_vllm


def test_switches_are_recorded_but_for_secrets_and_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in filter(lambda it: it.startswith(provenance.SWITCHES), list(os.environ)):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setenv("QAT_CORE_LINEAR_KERNEL", "humming")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("EDITOR", "vi")
    expected = {"QAT_CORE_LINEAR_KERNEL": "humming", "VLLM_CACHE_ROOT": "cache"}
    assert provenance.switches() == expected


def test_json_digest_ignores_the_order_of_keys() -> None:
    assert provenance.digest_json({"a": 1, "b": 2}) == provenance.digest_json({"b": 2, "a": 1})
    assert provenance.digest_json([1, 2]) != provenance.digest_json([2, 1])


def test_git_state_tells_a_clean_checkout_from_a_changed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.git_state() is None

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "a")
    clean = provenance.git_state()
    assert clean is not None and not clean.dirty and len(clean.commit or "") == 40
    (tmp_path / "a").write_text("2")
    changed = provenance.git_state()
    assert changed is not None and changed.dirty
    assert changed.diff_sha256 != clean.diff_sha256
    git("config", "core.abbrev", "20")  # as a clone with a longer history shortens hashes
    assert provenance.git_state() == changed
    for output in ("a", "new"):  # what is being written does not count, be it known to git or not
        git("checkout", "-q", "a")
        (tmp_path / output).write_text("3")
        assert provenance.git_state(tmp_path / output) == clean
    assert provenance.git_state(tmp_path.parent / "elsewhere") == provenance.git_state()


def test_diff_names_the_keys_that_differ() -> None:
    a = {"seed": 0, "git": {"commit": "1", "dirty": False}, "old": 1}
    b = {"seed": 0, "git": {"commit": "2", "dirty": False}, "new": 1}
    assert provenance.diff_manifests(a, b) == {
        "git.commit": ("1", "2"),
        "old": (1, None),
        "new": (None, 1),
    }


def run_diff(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.runs.provenance", "diff", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_diff_program(tmp_path: Path) -> None:
    for name, lr in (("a", 1e-6), ("b", 3e-4)):
        (tmp_path / name).mkdir()
        manifest = {"run": name, "config": {"rl": {"lr": lr}}}
        (tmp_path / name / "manifest.json").write_text(json.dumps(manifest))
    shown = run_diff(tmp_path / "a", tmp_path / "b" / "manifest.json")
    assert shown.returncode == 0
    assert "config.rl.lr" in shown.stdout and "0.0003" in shown.stdout


@pytest.mark.parametrize(
    ("content", "line"),
    [(None, "missing; name a run's folder"), ("{", "not JSON")],
    ids=["missing", "garbled"],
)
def test_diff_program_refuses_in_one_line(tmp_path: Path, content: str | None, line: str) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    shown = run_diff(tmp_path, tmp_path)
    assert shown.returncode == 2
    assert shown.stderr.startswith(f"error: {tmp_path}/manifest.json: {line}")
    assert len(shown.stderr.splitlines()) == 1
