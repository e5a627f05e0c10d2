"""From problems to token ids and back, with the chat template where the tokenizer has one."""

from transformers import PreTrainedTokenizerBase

from qat_core.rl.tasks import Problem
from qat_core.rollout.engine import Rollouts


def encode_prompt(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> list[int]:
    """Token ids of a problem's prompt, ending where the response starts."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(problem.prompt)
    message = {"role": "user", "content": problem.prompt}
    return tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, tokenize=True, return_dict=False
    )


def decode_responses(tokenizer: PreTrainedTokenizerBase, rollouts: Rollouts) -> list[str]:
    """Text of each response, without padding and special tokens."""
    return tokenizer.batch_decode(rollouts.response_ids, skip_special_tokens=True)
