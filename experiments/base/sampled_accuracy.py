"""The reward that reinforcement learning begins with: how many answers, sampled so, are right."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from experiments.rl.config import TaskConfig
from experiments.rl.prompts import encode_prompt
from experiments.rl.tasks import Problem, score
from qat_core.rollout.eager import pad_left

ASKED = 512  # problems: the standard error of a third is 0.02
ASKED_EVERY = 25  # steps: asking takes as long as some of them


@torch.no_grad()
def sampled_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: TaskConfig,
    problems: list[Problem],
    max_new_tokens: int,
) -> float:
    """Of one response to each problem; the model is in training mode afterwards."""
    prompts = [encode_prompt(tokenizer, problem) for problem in problems]
    assert isinstance(tokenizer.pad_token_id, int)
    input_ids, attention_mask = pad_left(prompts, tokenizer.pad_token_id, model.device)
    torch.manual_seed(0)
    model.eval()
    sequences = model.generate(
        input_ids,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    model.train()
    texts = tokenizer.batch_decode(sequences[:, input_ids.shape[1] :], skip_special_tokens=True)
    answers = zip(texts, problems, strict=True)
    return sum(score(task, text, it.answer) for text, it in answers) / len(problems)
