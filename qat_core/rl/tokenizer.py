"""The character tokenizer of the nano models."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qat_core.rl.tasks import ALPHABET

# verl asks for a template; this one adds nothing to the prompt
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character of the chain-sum task, after `<pad>` (0) and `<eos>` (1)."""
    vocabulary = {token: i for i, token in enumerate(("<pad>", "<eos>", *ALPHABET))}
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
