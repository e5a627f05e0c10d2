"""The character tokenizer of the nano models."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from experiments.rl.tasks import ALPHABET

# verl asks for a template; this one adds nothing to the prompt
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def character_tokenizer(size: int = 0) -> PreTrainedTokenizerFast:
    """One token a character of the chain-sum task, after `<pad>` (0) and `<eos>` (1).

    Up to `size` tokens, others that no text has follow. As a tokenizer's "added tokens" 150,000 of
    them would take every process that loads it 9 s instead of 1.
    """
    tokens = ["<pad>", "<eos>", *ALPHABET]
    tokens += [f"<unused{i}>" for i in range(size - len(tokens))]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
        chat_template=PLAIN_TEMPLATE,
    )
