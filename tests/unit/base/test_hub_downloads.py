"""Models and data sets fetched by the real client of the Hugging Face Hub, from a local Hub."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from threading import Thread

import pytest

from experiments.study.schema import ROOT, STUDIES
from experiments.verl.sources import AIME_2024, HubFile
from tests.hub_server import COMMIT, TOKEN, Hub, Repo

CONFIG = ROOT / "experiments" / "models" / "nano-dense.json"
STUDY = """
study: hub
trainer: verl
rollout: vllm
models:
  m: {{kind: hub, config: {config}, repo: {repo}, revision: {revision}, recipe: nano}}
arms: [bf16]
seeds: [0]
task: {{name: chain-sum}}
rl: {{steps: 1}}
"""
DATA_STUDY = STUDIES / "qwen3.yaml"
# the client writes to disk, and continues after a cut, by pieces of 10 MiB
CLIENT_PIECE_BYTES, WEIGHT_BYTES = 10 * 2**20, 11 * 2**20
HEADER = json.dumps(
    {"w": {"dtype": "BF16", "shape": [WEIGHT_BYTES // 2], "data_offsets": [0, WEIGHT_BYTES]}}
).encode()
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(WEIGHT_BYTES)
WANTED = {
    "config.json": CONFIG.read_bytes(),
    "tokenizer_config.json": b"{}",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
}
UNWANTED = {"README.md": b"#", "pytorch_model.bin": b"0", "original/params.json": b"{}"}
PROBLEMS = b'{"question": "1+1?", "answer": "2"}\n'

# `experiments.base.make` without the seconds that its import of torch takes
LINK = """
import sys
from pathlib import Path
from experiments.support.cli import run_cli
from experiments.base.hub_checkpoint import link_checkpoint
from experiments.study.load import load_study
study, out = map(Path, sys.argv[1:])
run_cli(lambda: print(link_checkpoint("m", load_study(study).models["m"], out)))
"""
# `experiments.verl.data` with other pins, as the published files are not here
DATA = """
import json, sys
from pathlib import Path
from experiments.verl import data, sources
from qat_core.rl.config import TaskConfig
for split, file in json.loads(sys.argv[1]).items():
    sources.HUB_FILES[split] = [sources.HubFile(*file)]
data.write_data(TaskConfig(name="dapo-math"), Path(sys.argv[2]))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.stop()


class Machine:
    """Where the programs run: their Hub, and a folder for its cache and their results."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.hub, self.folder, self.out = hub, folder, folder / "out"

    def run(self, *arguments: object, token: str | None = None) -> subprocess.CompletedProcess[str]:
        environment = self.hub.environment(self.folder / "home")
        return subprocess.run(
            [sys.executable, *map(str, arguments), str(self.out)],
            env=environment | ({"HF_TOKEN": token} if token else {}),
            cwd=ROOT,
            capture_output=True,
            text=True,
        )

    def study(self, repo: str = "owner/model", revision: str = "main") -> Path:
        path = self.folder / "study.yaml"
        path.write_text(STUDY.format(config=CONFIG, repo=repo, revision=revision))
        return path

    def require_refusal(self, done: subprocess.CompletedProcess[str], message: str) -> None:
        """One line, exit code 2 and nothing left behind."""
        assert re.fullmatch(rf"error: {message}.*\n", done.stderr), done.stderr
        assert done.returncode == 2 and not list(self.folder.glob("out*"))


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Machine:
    return Machine(hub, tmp_path)


@pytest.mark.slow
def test_gated_model_becomes_a_base_for_who_may_read_it(hub: Hub, machine: Machine) -> None:
    hub.repos["owner/model"] = Repo(WANTED | UNWANTED, gated=True)
    hub.cut["model.safetensors"] = CLIENT_PIECE_BYTES + 1
    program = ("-m", "experiments.base.make", "--study", machine.study(), "--model", "m", "--out")
    refused = machine.run(*program)
    machine.require_refusal(refused, r"models\.m\.repo: owner/model, revision main: not fetched")
    assert "Cannot access gated repo" in refused.stderr and "set HF_TOKEN" in refused.stderr
    done = machine.run(*program, token=TOKEN)
    assert done.returncode == 0, done.stderr
    linked = {path.name: path for path in machine.out.iterdir() if path.name != "manifest.json"}
    assert {name: path.read_bytes() for name, path in linked.items()} == WANTED
    cache = machine.folder / "home" / "hub" / "models--owner--model"
    assert all(p.is_symlink() and p.resolve().is_relative_to(cache) for p in linked.values())
    manifest = json.loads((machine.out / "manifest.json").read_text())
    assert manifest["folder"] == str(cache / "snapshots" / COMMIT)
    assert manifest["weights"] == {"model.safetensors": sha256(WEIGHTS).hexdigest()}
    assert manifest["weight_bytes"] == WEIGHT_BYTES
    # the rest of what was cut is asked for, and of the other files nothing
    assert f"model.safetensors from {CLIENT_PIECE_BYTES}" in hub.requests
    assert not [line for line in hub.requests if line.endswith(tuple(UNWANTED))]


WHOLE = Repo(WANTED)
REPOS = {
    "owner/model": WHOLE,
    "owner/drops": Repo(WANTED, drops=True),
    "owner/lost": Repo(WANTED, chunked=True),
    "owner/half": Repo({"config.json": WANTED["config.json"], "model.safetensors": b""}),
    "owner/deep": Repo(WANTED | {"config.json": CONFIG.with_name("nano-moe.json").read_bytes()}),
}
UNFETCHED = "not fetched from the hub "
MODEL_REFUSALS = {
    "no-repo": ("owner/none", "main", rf"{UNFETCHED}\(401 .* Repository Not Found .*\); try"),
    "no-branch": ("owner/model", "v9", rf"{UNFETCHED}\(404 .* Revision Not Found .* v9\); try"),
    "no-commit": ("owner/model", "f" * 40, rf"{UNFETCHED}\(404 .* Revision Not Found"),
    "no-repo-name": ("a/b/c", "main", rf"{UNFETCHED}\(Repo id must be in the form"),
    "dropped": ("owner/drops", "main", rf"{UNFETCHED}\(Server disconnected"),
    "storage": ("owner/lost", "main", rf"{UNFETCHED}\(Task error: File reconstruction error"),
    "incomplete": ("owner/half", "main", r"has no tokenizer_config\.json; name a whole"),
    "shapes": ("owner/deep", "main", r"has other shapes than .*; name the checkpoint's own"),
}


@pytest.mark.parametrize(
    ("repo", "revision", "message"), MODEL_REFUSALS.values(), ids=MODEL_REFUSALS
)
def test_model_that_cannot_be_had_is_refused(
    hub: Hub, machine: Machine, repo: str, revision: str, message: str
) -> None:
    hub.repos = REPOS
    done = machine.run("-c", LINK, machine.study(repo, revision))
    machine.require_refusal(done, rf"models\.m.*{message}")


def test_fetched_model_needs_no_network_any_more(hub: Hub, machine: Machine) -> None:
    hub.repos = REPOS
    first = machine.run("-c", LINK, machine.study())
    hub.stop()
    machine.out.rename(machine.folder / "first")
    second = machine.run("-c", LINK, machine.study())
    assert second.returncode == 0 and second.stdout == first.stdout
    assert {path.name for path in machine.out.iterdir()} == set(WANTED)


def test_without_network_half_a_model_in_the_cache_is_refused(hub: Hub, machine: Machine) -> None:
    hub.repos = {"owner/model": REPOS["owner/lost"]}
    machine.run("-c", LINK, machine.study())
    hub.stop()
    assert list(machine.folder.glob("home/hub/*/snapshots/*/config.json"))
    done = machine.run("-c", LINK, machine.study())
    machine.require_refusal(done, rf"models\.m.*{UNFETCHED}\(\[Errno 111\] Connection refused\)")


DATA_REPO, AT = f"datasets/{AIME_2024.repo}", AIME_2024.revision
DATA_REFUSALS = {
    "no-repo": ({}, "401 .* Repository Not Found for url"),
    "no-commit": ({DATA_REPO: WHOLE}, f"404 .* Revision Not Found .* {AT}"),
    "no-file": ({DATA_REPO: Repo({}, AT)}, "404 .* Entry Not Found for url"),
    "gated": ({DATA_REPO: Repo({}, AT, gated=True)}, "401 .* Cannot access gated repo"),
    "dropped": ({DATA_REPO: Repo({}, AT, drops=True)}, "Server disconnected"),
}


@pytest.mark.parametrize(("repos", "reason"), DATA_REFUSALS.values(), ids=DATA_REFUSALS)
def test_data_that_cannot_be_had_are_refused(
    hub: Hub, machine: Machine, repos: dict[str, Repo], reason: str
) -> None:
    hub.repos = repos
    done = machine.run("-m", "experiments.verl.data", "--study", DATA_STUDY, "--out")
    wanted = re.escape(f"{AIME_2024.repo}: {AIME_2024.path}: {UNFETCHED}")
    machine.require_refusal(done, rf"{wanted}\({reason}.*\); try again or name a local copy in")


def test_hint_of_a_wrong_checksum_fetches_the_file_again(hub: Hub, machine: Machine) -> None:
    hub.repos = {DATA_REPO: Repo({AIME_2024.path: b"other"}, AT)}
    program = ("-m", "experiments.verl.data", "--study", DATA_STUDY, "--out")
    transfers = []
    for _ in range(3):
        done = machine.run(*program)
        hint = r"SHA-256 is \w+, not \w+; remove (?P<file>\S+) to fetch it again"
        machine.require_refusal(done, rf"\S*{re.escape(AIME_2024.path)}: {hint}")
        transfers.append(hub.requests.count(f"{AIME_2024.path} from 0"))
        if len(transfers) == 2:
            Path(re.search(hint, done.stderr)["file"]).unlink()
    assert transfers == [1, 1, 2]


def test_data_are_fetched_once(hub: Hub, machine: Machine) -> None:
    questions = {"train": b'{"question": "2+2?", "answer": "4"}\n', "test": PROBLEMS}
    hub.repos = {"datasets/o/d": Repo({f"{s}.jsonl": text for s, text in questions.items()})}
    files = {
        split: HubFile("exam", "o/d", COMMIT, f"{split}.jsonl", sha256(text).hexdigest())
        for split, text in questions.items()
    }
    first = machine.run("-c", DATA, json.dumps(files))
    assert first.returncode == 0, first.stderr
    described = (machine.out / "data.json").read_text()
    (source,) = json.loads(described)["test"]["sources"]
    assert files["test"]._asdict().items() <= source.items() and source["rows"] == 1
    hub.stop()
    assert machine.run("-c", DATA, json.dumps(files)).returncode == 0
    assert (machine.out / "data.json").read_text() == described
