"""A Hugging Face tokenizer as a codec: text is text, special tokens have ids of their own."""

from collections.abc import Sequence
from typing import Any

from services.common import errors


class FastCodec:
    """Wraps a fast tokenizer of transformers. Tool output that spells a special token stays plain text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, without any token added."""
        if not text:
            return []
        # the tokenizer's own backend: the wrapper's encode builds tables of masks and offsets for each tool's output
        fast = self._tokenizer.backend_tokenizer
        fast.encode_special_tokens = True
        return list(fast.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def special(self, token: str) -> int:
        """Id of a special token; INVALID_FIELD if the tokenizer does not have it."""
        number = self._tokenizer.convert_tokens_to_ids(token)
        if number is None or number == self._tokenizer.unk_token_id:
            raise errors.invalid_field(
                f"the model's tokenizer has no token {token!r}; the dialect needs it: add it or choose another dialect"
            )
        return int(number)


def load_codec(model: str) -> FastCodec:
    """The tokenizer in a model's folder."""
    from transformers import AutoTokenizer

    return FastCodec(AutoTokenizer.from_pretrained(model))
