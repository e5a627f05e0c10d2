"""Offline evaluation of a verl run: sharded checkpoints, merged, served by vLLM on a CPU."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("vllm", reason="needs requirements/engines.txt")
pytest.importorskip("verl", reason="needs requirements/engines.txt")

from experiments.evaluate.checkpoints import find_checkpoints, model_folder
from experiments.evaluate.run import evaluate_run
from experiments.rl.config import PretrainConfig
from experiments.rl.supervised import pretrain
from experiments.rl.tasks import make_problems
from experiments.runs.manifest import MANIFEST
from experiments.study.load import load_study
from experiments.study.schema import Study
from experiments.support.json_files import write_json
from experiments.verl.checkpoints import TRACKER
from experiments.verl.data import write_data
from tests.integration import verl_ranks
from tests.nano_models import write_nano
from tests.ranks import run_ranks
from tests.records import make_manifest

pytestmark = pytest.mark.long

STEP = 4
# Accuracies of the random base and of the trained checkpoint, nano-dense and nano-moe, both
# precisions: 0.00 each, and 0.94 to 1.00.
KNOWS_NOTHING, KNOWS_THE_ANSWERS = 0.2, 0.8
STUDY = """
study: exam
trainer: verl
rollout: vllm
models:
  nano: {kind: scratch, config: experiments/models/nano-moe.json, recipe: nano}
arms: [nvfp4-qat]
seeds: [0]
task: {name: chain-sum, terms: [2, 2], largest: 9, train_prompts: 8, test_prompts: 16}
rl: {steps: 4, prompts_per_step: 8, mini_batch_prompts: 8, rollout: {max_response_tokens: 12}}
evaluation: {prompts: 16, samples_per_prompt: 2, temperature: 0.1}
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    file = tmp_path_factory.mktemp("study") / "study.yaml"
    file.write_text(STUDY)
    return load_study(file)


@pytest.fixture(scope="module")
def results(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with random weights; a checkpoint on two ranks that knows the held-out answers."""
    tmp_path = tmp_path_factory.mktemp("results")
    base, trained = tmp_path / "base" / "nano", tmp_path / "trained"
    write_nano("nano-moe", base, num_layers=1)
    write_json(base / "manifest.json", {"weights": {}, "weight_bytes": 0})
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(base)
    learning = PretrainConfig(steps=120, batch_size=16, lr=3e-3, mixed_steps=0)
    answers = make_problems(study.task, "test")
    pretrain(model, tokenizer, answers, learning, 0, lambda step, loss: None)
    model.save_pretrained(trained)
    tokenizer.save_pretrained(trained)
    checkpoints = tmp_path / study.runs[0].id / "checkpoints"
    saved = str(checkpoints / f"global_step_{STEP}")
    run_ranks(verl_ranks.save, (2, str(trained), saved), 2)
    (checkpoints / TRACKER).write_text(str(STEP))
    write_data(study.task, tmp_path / "data" / study.study)
    return tmp_path


def test_verl_checkpoints_are_merged_and_evaluated_in_both_precisions(
    study: Study, results: Path
) -> None:
    (checkpoint,) = find_checkpoints(results / study.runs[0].id / "checkpoints").values()
    trained = AutoModelForCausalLM.from_pretrained(results / "trained", dtype=torch.bfloat16)
    with model_folder(checkpoint) as folder:
        merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        stored = trained.state_dict()
        assert merged.state_dict().keys() == stored.keys()
        assert all(torch.equal(w, stored[name]) for name, w in merged.state_dict().items())
    assert not folder.exists()

    trained_elsewhere = study.model_copy(update={"device": "cuda"})
    records = evaluate_run(trained_elsewhere, study.runs[0], results, on_cpu=True)
    assert {record.device for record in records} == {"cpu"}
    settings = [(r.step, r.precision, r.decoding) for r in records]
    assert settings == [
        (step, precision, "sampled") for step in (0, STEP) for precision in ("bf16", "nvfp4")
    ]
    for record in records:
        assert len(record.correct) == record.prompts == 16
        total = 16 * record.samples_per_prompt
        assert record.accuracy == sum(record.correct) / total
        if record.step == 0:
            assert record.accuracy < KNOWS_NOTHING
        else:
            assert record.accuracy > KNOWS_THE_ANSWERS


def test_a_finished_run_without_its_last_checkpoint_is_refused(study: Study, results: Path) -> None:
    run = study.runs[0]
    config = {"rl": {"steps": STEP + 1}}
    named = {"run": run.id, **run._asdict(), "seeds": {"run": run.seed}}
    manifest = make_manifest(**named, status="finished", config=config)
    manifest.write(results / run.id)
    with pytest.raises(ValueError, match=rf"no checkpoint of step {STEP + 1}, the run's last"):
        evaluate_run(study, run, results)
    (results / run.id / MANIFEST).unlink()
