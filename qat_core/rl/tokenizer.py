"""The character tokenizer of the nano models."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qat_core.rl.tasks import ALPHABET


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character of the chain-sum task, after `<pad>` (0) and `<eos>` (1)."""
    vocabulary = {token: i for i, token in enumerate(("<pad>", "<eos>", *ALPHABET))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
