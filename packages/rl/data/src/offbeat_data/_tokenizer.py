"""Tokenizers of Hugging Face model folders, read without torch.

`transformers.AutoTokenizer` imports torch wherever torch is installed: 4 to 10 s and 300 MB in a process that only
wants token ids. The `tokenizers` library underneath it reads the same `tokenizer.json` in 0.1 s.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tokenizers

from offbeat_core import BackendError, Ids, ModelError, path_advice, read_eos_ids, read_model_json, user_path
from offbeat_data._chat.template import MARKS, ChatTemplate
from offbeat_data._chat.turn_markers import find_markers

_BLOCK = 256
"""Texts encoded at a time: an encoding holds some hundred bytes a token, and four of them are kept."""
_BREAK: Final = "\ufdd3"
"""Breaks a control token that is written in text; a Unicode noncharacter, which no text holds."""
_ANY_MARK: Final = re.compile(f"[{MARKS}]")
_HALF: Final = re.compile("[\ud800-\udfff]")
_OTHER_FORMATS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


class Tokenizer:
    """Text to token ids and back, with the folder's special tokens and chat template.

    Args:
        backend: the tokenizer proper.
        special_tokens: by role, such as {"eos_token": "<|im_end|>"}.
        chat_template: Jinja text, or None.
        source: folder it came from, for messages.
        template_file: of that folder, which has the chat template; "" without one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        chat_template: str | None,
        source: str,
        template_file: str = "",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend, self.special_tokens, self.source = backend, special_tokens, source
        self.template_file = template_file
        self.chat_template = None if chat_template is None else ChatTemplate(chat_template, special_tokens)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        # Not their number: ids may have gaps, where tokens were taken out or added beyond a padded table.
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def longest_token_bytes(self) -> int:
        """Bytes of UTF-8 that one token stands for, at most: n tokens are no longer text than n times that."""
        return max((len(text.encode()) for text in self._backend.get_vocab(with_added_tokens=True)), default=1)

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a text or a turn, if there is one."""
        return self._special_id("eos_token")

    @property
    def pad_id(self) -> int | None:
        """Id of the padding token, if there is one."""
        return self._special_id("pad_token")

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """Texts of all control tokens, such as "<|im_end|>"."""
        return frozenset(self._control_tokens.values())

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Ids of all control tokens."""
        return frozenset(self._control_tokens)

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids at which engines end a turn: those of the model's configuration, else eos; empty without either."""
        folder = Path(self.source)
        named = read_eos_ids(folder) if (folder / "config.json").is_file() else frozenset()
        return named or frozenset(() if self.eos_id is None else (self.eos_id,))

    @property
    def closing_id(self) -> int | None:
        """Id to end a text or a turn with: eos where engines stop at it, else the first id at which they do."""
        return self.eos_id if self.eos_id in self.end_ids else min(self.end_ids, default=self.eos_id)

    def first_difference(self, other: "Tokenizer") -> str:
        """Return a text that the two know under different ids; "" where every id means the same to both."""
        own, theirs = (each._backend.get_vocab(with_added_tokens=True) for each in (self, other))
        for text in sorted(own.keys() | theirs.keys(), key=lambda text: own.get(text, -1)):
            if own.get(text) != theirs.get(text):
                here, there = (f"id {held[text]}" if text in held else "no id" for held in (own, theirs))
                return f"{text!r} has {here} here and {there} there"
        return ""

    def token_text(self, token_id: int) -> str | None:
        """Return the text of one token, such as "<|image_pad|>"; None when there is no such token."""
        text: str | None = self._backend.id_to_token(token_id)
        return text

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Ids]:
        """Token ids of each text, [T] int32; with or without the bos or eos that the tokenizer puts around a text."""
        return [ids for ids, _ in self._encode(texts, add_special_tokens=add_special_tokens)]

    def encode_prompts(self, texts: Sequence[str]) -> list[Ids]:
        """Return the token ids of texts that are continued, each [T] int32.

        What the tokenizer puts before a text (bos) comes once, also where the text begins with it. What it puts after
        a text (eos) is left out: a model that reads it has nothing to continue.
        """
        return [self._without_ending(*encoded) for encoded in self._encode(texts, add_special_tokens=True)]

    def encode_with_offsets(self, text: str) -> tuple[Ids, npt.NDArray[np.int64]]:
        """Token ids [T] int32 and the character range [T, 2] int64 of each; nothing is put around the text."""
        encoding = self._untrimmed.encode(whole_text(text), add_special_tokens=False)
        offsets_T2 = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        ids = np.array(encoding.ids, dtype=np.int32)
        is_kept = ids != self._untrimmed.token_to_id(_BREAK)
        return ids[is_kept], offsets_T2[is_kept]

    def escape(self, text: str) -> str:
        """Mark a text as words, so that `encode` makes no control token of it, nor a marker of the chat template.

        Every such token written in it is broken by a mark behind its first character, which no token crosses.
        The marks are in the text until it is encoded; `unescape` takes them out for people.
        """
        text = _ANY_MARK.sub("", text)
        return self._control_start.sub(rf"\g<0>{_BREAK}", text) if self.find_control(text) else text

    @staticmethod
    def unescape(text: str) -> str:
        """Return a text without the marks of `escape`."""
        return text.replace(_BREAK, "")

    def find_control(self, text: str) -> str:
        """Return the first token that `escape` would break; "" without any."""
        found = self._control.search(text)
        return found.group() if found else ""

    def decode(self, ids: Sequence[int] | Ids, *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return str(self._backend.decode([int(token) for token in ids], skip_special_tokens=skip_special_tokens))

    def require_template(self) -> ChatTemplate:
        """Return the chat template.

        Raises:
            ModelError: the folder has none.
        """
        if self.chat_template is None:
            raise ModelError(
                f"{self.source} has no chat template, and chat messages need one: set data.chat_template to off and "
                f"give plain texts, or put a chat_template.jinja into that folder"
            )
        return self.chat_template

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> Iterator[tuple[Ids, npt.NDArray[np.bool_]]]:
        """The ids of each text, and which of them the tokenizer has put around it."""
        for first in range(0, len(texts), _BLOCK):
            block = list(texts[first : first + _BLOCK])
            escaped = any(_BREAK in text for text in block)
            backend = self._breaking if escaped else self._backend
            for encoding in backend.encode_batch(list(map(whole_text, block)), add_special_tokens=add_special_tokens):
                ids, added = np.array(encoding.ids, np.int32), np.array(encoding.special_tokens_mask, np.bool_)
                is_kept = ids != self._breaking.token_to_id(_BREAK) if escaped else slice(None)
                yield ids[is_kept], added[is_kept]

    def _without_ending(self, ids: Ids, added: npt.NDArray[np.bool_]) -> Ids:
        own = np.flatnonzero(~added)
        if not len(own):  # an empty text: nothing says where the text would be
            return np.array([token for token in ids if token != self.eos_id], np.int32)
        before, text = ids[: own[0]], ids[own[0] : own[-1] + 1]
        return text if np.array_equal(text[: len(before)], before) else np.concatenate([before, text])

    @cached_property
    def _control_tokens(self) -> dict[int, str]:
        return {at: token.content for at, token in self._backend.get_added_tokens_decoder().items() if token.special}

    @cached_property
    def _markers(self) -> frozenset[str]:
        """Texts of added tokens that are not declared as special and control all the same; see `find_markers`."""
        if self.chat_template is None:
            return frozenset()
        added = (token.content for token in self._backend.get_added_tokens_decoder().values() if not token.special)
        return find_markers(self.chat_template, added)

    @cached_property
    def _control(self) -> re.Pattern[str]:
        texts = self.special_texts | self._markers
        return re.compile("|".join(re.escape(text) for text in sorted(texts) if text) or "(?!)")

    @cached_property
    def _control_start(self) -> re.Pattern[str]:
        return re.compile(rf"(?={self._control.pattern})[\s\S]")

    @cached_property
    def _breaking(self) -> tokenizers.Tokenizer:
        """A copy that knows the mark of `escape` as a token."""
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.add_special_tokens([tokenizers.AddedToken(_BREAK, normalized=False)])
        return copy

    @cached_property
    def _untrimmed(self) -> tokenizers.Tokenizer:
        # A ByteLevel post-processor with trim_offsets (Llama 3 has one) leaves a token of spaces without any
        # characters, so that a mask by characters would miss it. Without a post-processor offsets are whole.
        copy = tokenizers.Tokenizer.from_str(self._breaking.to_str())
        copy.post_processor = None
        return copy

    def _special_id(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self._backend.token_to_id(text)


def whole_text(text: str) -> str:
    """Return a text with a replacement character for each half of a surrogate pair, which nothing encodes.

    Python's JSON reads one from an escape such as "\\ud800", which a model or a client may write.
    """
    return text if text.isascii() else _HALF.sub("\ufffd", text)


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> Tokenizer:
    """Read the tokenizer of a Hugging Face model folder.

    A folder with `tokenizer.json` is read with the `tokenizers` library and runs no code of the folder. Older
    formats (`tokenizer.model`, `vocab.json` with `merges.txt`) are converted in memory by transformers, which
    imports torch where torch is installed; only there does `trust_remote_code` matter.

    Raises:
        ModelError: no such folder, no tokenizer in it, or a corrupt one; a chat template that is no text or no Jinja.
        BackendError: an older format, and transformers is not installed.
    """
    folder = user_path(folder)
    if not folder.is_dir():
        advice = path_advice(str(folder)) or "give the path of a Hugging Face model folder"
        raise ModelError(f"model folder {folder} does not exist: {advice}")
    settings = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    special_tokens = {
        role: text for role in settings if role.endswith("_token") and (text := _token_text(settings[role]))
    }
    backend, (template, template_file) = _read_backend(folder, trust_remote_code), _read_chat_template(folder, settings)
    return Tokenizer(backend, special_tokens, template, str(folder), template_file)


def _read_backend(folder: Path, trust_remote_code: bool) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        if any((folder / name).is_file() for name in _OTHER_FORMATS):
            return _convert(folder, trust_remote_code)
        names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise ModelError(
            f"{folder} has no tokenizer: it needs tokenizer.json and holds {names}; copy it from the model"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(f"{path} is corrupt: {error}; copy it again from the model it belongs to") from error


def _convert(folder: Path, trust_remote_code: bool) -> tokenizers.Tokenizer:
    """Have transformers read a format older than tokenizer.json."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise BackendError(
            f"{folder} has no tokenizer.json but an older format, which transformers reads; "
            'install it with: pip install "offbeat-data[transformers]"'
        ) from error
    try:
        loaded: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        return tokenizers.Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    except Exception as error:
        raise ModelError(
            f"{folder} has no tokenizer.json, and transformers cannot make one: {error}; load it where it works, "
            f"call save_pretrained, and copy tokenizer.json here"
        ) from error


def _read_chat_template(folder: Path, settings: dict[str, Any]) -> tuple[str | None, str]:
    """Return the default template and its file: its own, or tokenizer_config.json (a text, or several by name)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path), path.name
    found, file = settings.get("chat_template"), "tokenizer_config.json"
    if not found:
        file = "chat_template.json"
        found = read_json(folder / file).get("chat_template")
    template = _default_template(found) if isinstance(found, list) else found
    if template is None or isinstance(template, str):
        return template, file if template is not None else ""
    raise ModelError(
        f"{folder}: chat_template must be a text, or a list of objects with name and template; got {found!r:.80}"
    )


def _default_template(entries: list[Any]) -> Any:
    """Return the template named default; None without one, and the entries themselves when they are of another form."""
    try:
        return {entry["name"]: entry["template"] for entry in entries}.get("default")
    except (KeyError, TypeError):
        return entries


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file of a model folder; empty where there is none."""
    return read_model_json(path) if path.is_file() else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}; copy it again from the model it belongs to") from error


def _token_text(value: Any) -> str | None:
    """Return the text of a special token, which is written as it is or as an object that holds it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
