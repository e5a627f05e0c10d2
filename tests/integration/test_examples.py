"""examples/: each of them runs, or is composed, as it stands."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from experiments.base.random_model import write_architecture
from experiments.study.schema import ROOT
from experiments.support.json_files import read_json

EXAMPLES = ROOT / "examples"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "VLLM_CPU_KVCACHE_SPACE": "1",  # vLLM's own default asks for nearly all of a host
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}


def run(*command: object, **variables: str) -> str:
    words = [str(word) for word in command]
    where = ENVIRONMENT | variables
    done = subprocess.run(words, cwd=ROOT, env=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("nano_dir", ["nano-dense"], indirect=True)
def test_train_and_sync_shows_rewards_and_a_small_mismatch(nano_dir: Path) -> None:
    pytest.importorskip("vllm", reason="needs requirements/engines.txt")
    said = run(sys.executable, EXAMPLES / "train_and_sync.py", nano_dir)
    steps = re.findall(r"^step (\d): reward 0\.\d\d, k3 KL (\S+)$", said, re.MULTILINE)
    assert [step for step, _ in steps] == ["0", "1", "2"]
    assert all(0 <= float(k3) < 1e-3 for _, k3 in steps)


@pytest.mark.long
@pytest.mark.parametrize("nano_dir", ["nano-dense"], indirect=True)
def test_convert_and_serve_packs_verifies_and_answers(nano_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs requirements/engines.txt")
    said = run(sys.executable, EXAMPLES / "convert_and_serve.py", nano_dir, tmp_path / "packed")
    assert "in NVFP4" in said and "all as recorded" in said
    assert re.findall(r"^(3\+4=|12\+5=) '", said, re.MULTILINE) == ["3+4=", "12+5="]


@pytest.mark.long
@pytest.mark.parametrize("nano_dir", ["nano-dense"], indirect=True)
def test_a_packed_checkpoint_is_served_on_a_cpu_as_the_page_of_engines_says(
    packed_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vllm", reason="needs requirements/engines.txt")
    page = (ROOT / "docs" / "engines.md").read_text()
    (command,) = re.findall(r"^VLLM_CPU_KVCACHE_SPACE=1 (python .*) packed$", page, re.MULTILINE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [*command.split(), str(packed_dir), "--port", str(port)]
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(words, env=ENVIRONMENT, stdout=log, stderr=log)
    try:
        while server.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                    break
            time.sleep(1)
        asked = {"model": str(packed_dir), "prompt": "3+4=", "max_tokens": 8, "ignore_eos": True}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=asked, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 8, answer.text
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture(params=["qwen3_8b", "qwen3_30b_a3b"])
def script(request: pytest.FixtureRequest) -> Path:
    return EXAMPLES / "verl" / f"{request.param}.sh"


@pytest.mark.long
def test_nothing_of_the_verl_commands_is_refused(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="needs requirements/engines.txt")
    name = script.stem.replace("_", "-")
    write_architecture(read_json(ROOT / "experiments" / "models" / f"{name}.json"), tmp_path / "m")
    words = (tmp_path / "qat-core").resolve()  # as the entry point, of this tree
    words.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m qat_core.cli "$@"\n')
    words.chmod(0o755)
    path = f"{tmp_path}:{ENVIRONMENT['PATH']}"
    said = run("bash", script, "check", MODEL=str(tmp_path / "m"), PATH=path)
    assert said.startswith("qat_core: rollouts in NVFP4 (w4a16), trained in NVFP4")
    assert "known once workers" not in said


def test_the_way_to_a_served_file_is_merge_convert_verify_serve(
    script: Path, tmp_path: Path
) -> None:
    """With programs that only say how they were called."""
    for program in ("python", "qat-core", "vllm"):
        (tmp_path / program).write_text(f'#!/bin/sh\necho "{program} $*"\n')
        (tmp_path / program).chmod(0o755)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("500")
    variables = {"OUT": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    called = [run("bash", script, each, **variables) for each in ("data", "export", "serve")]
    data, merge, convert, verify, serve = "".join(called).replace(str(tmp_path), "OUT").splitlines()
    assert data == (
        "python -m experiments.verl.data --study experiments/studies/qwen3.yaml "
        "--out data/dapo-math"
    )
    assert merge == (
        "python -m verl.model_merger merge --backend fsdp "
        "--local_dir OUT/global_step_500/actor --target_dir OUT/merged"
    )
    assert (convert, verify, serve) == (
        "qat-core convert OUT/merged OUT/nvfp4 --recipe full",
        "qat-core verify OUT/nvfp4",
        "vllm serve OUT/nvfp4",
    )


def test_the_notebook_draws_curves_of_all_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(EXAMPLES)
    cells = json.loads((EXAMPLES / "read_record.ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    legend = names["axes"][1].get_legend()
    arms = {text.get_text() for text in legend.get_texts()}
    assert arms == {"bf16", "nvfp4-noqat", "nvfp4-qat"}
