"""From problems to token ids and back, with the chat template where the tokenizer has one."""

from transformers import PreTrainedTokenizerBase

from experiments.rl.tasks import Question
from qat_core.rollout.engine import Rollouts


def encode_prompt(tokenizer: PreTrainedTokenizerBase, question: Question) -> list[int]:
    """Token ids of a question's prompt, ending where the response starts."""
    ids: list[int]
    if tokenizer.chat_template is None:
        ids = tokenizer.encode(question.prompt)
    else:
        messages = [{"role": "user", "content": question.prompt}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    return ids


def decode_responses(tokenizer: PreTrainedTokenizerBase, rollouts: Rollouts) -> list[str]:
    """Text of each response, without padding, special tokens and the one that ended it.

    That one need not be special to the tokenizer: generation_config.json may name others.
    """
    lengths = (rollouts.response_mask.sum(-1).long() - (~rollouts.truncated).long()).tolist()
    rows = zip(rollouts.response_ids.tolist(), lengths, strict=True)
    said = [ids[:length] for ids, length in rows]
    texts: list[str] = tokenizer.batch_decode(said, skip_special_tokens=True)
    return texts
