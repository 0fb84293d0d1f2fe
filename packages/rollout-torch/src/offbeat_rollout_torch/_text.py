"""Decodes tokens, and finds stop strings that no single token holds."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from offbeat_types import ModelError


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load `tokenizer.json`.

    Raises:
        ModelError: missing or unreadable.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json; save the tokenizer into the model folder")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for a file it cannot parse
        raise ModelError(f"{path} cannot be read ({error}); save the tokenizer again") from error


class StopStrings:
    """Watches the text of one sample grow for any of several strings.

    Special tokens count as text here, so that a string such as "<|im_end|>" can stop a sample.
    """

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._stream = DecodeStream(skip_special_tokens=False)
        self._keep = max(map(len, stops)) - 1
        self._tail = ""

    def push(self, token: int) -> bool:
        """Add one token; say whether a stop string is complete. Bytes of an unfinished character are held back."""
        piece = self._stream.step(self._tokenizer, token)
        if not piece:
            return False
        text = self._tail + piece
        self._tail = text[-self._keep :] if self._keep else ""
        return any(stop in text for stop in self._stops)
