"""From problems to token ids and back, with the chat template where the tokenizer has one."""

from transformers import PreTrainedTokenizerBase

from qat_core.rl.tasks import Problem
from qat_core.rollout.engine import Rollouts


def encode_prompt(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> list[int]:
    """Token ids of a problem's prompt, ending where the response starts."""
    ids: list[int]
    if tokenizer.chat_template is None:
        ids = tokenizer.encode(problem.prompt)
    else:
        messages = [{"role": "user", "content": problem.prompt}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    return ids


def decode_responses(tokenizer: PreTrainedTokenizerBase, rollouts: Rollouts) -> list[str]:
    """Text of each response, without padding and special tokens."""
    texts: list[str] = tokenizer.batch_decode(rollouts.response_ids, skip_special_tokens=True)
    return texts
