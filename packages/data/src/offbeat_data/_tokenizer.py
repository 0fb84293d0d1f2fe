"""Tokenizers of Hugging Face model folders and their chat templates, read without torch.

`transformers.AutoTokenizer` imports torch wherever torch is installed: 4 to 10 s and 300 MB in a process that only
wants token ids. The `tokenizers` library underneath it reads the same `tokenizer.json` in 0.1 s.

Source: https://huggingface.co/docs/transformers/chat_templating (template language, `{% generation %}`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.ext
import numpy as np
import numpy.typing as npt
import tokenizers
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import decoders, models, pre_tokenizers

from offbeat_types import BackendError, DataError, Ids, ModelError, read_model_json

Message = Mapping[str, Any]
Span = tuple[int, int]


# Unicode noncharacters, which no text holds: they enclose generation blocks while rendering and are then removed.
_START, _END = "\ufdd0", "\ufdd1"


# A template is a program: what it computes from messages of another shape raises what Python raises.
_RAISED_BY_TEMPLATES: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class _GenerationTag(jinja2.ext.Extension):
    """Encloses the output of `{% generation %}...{% endgeneration %}` in markers."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

    def _enclose(self, caller: Callable[[], str]) -> str:
        return f"{_START}{caller()}{_END}"


@dataclass(frozen=True, kw_only=True)
class RenderedChat:
    """A conversation as text.

    Args:
        text: what the model reads.
        spans: character ranges [start, end) inside `{% generation %}` blocks, in order; none without such blocks.
    """

    text: str
    spans: tuple[Span, ...]


class ChatTemplate:
    """One compiled template.

    Args:
        source: Jinja text.
        special_tokens: such as {"eos_token": "<|im_end|>"}, visible to the template.

    Raises:
        ModelError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source, self._special_tokens = source, dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(
                f"the chat template is not valid Jinja: {error}; correct it in the model folder"
            ) from error

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, options: Mapping[str, Any]
    ) -> RenderedChat:
        """Render messages.

        Args:
            messages: dicts with `role` and `content`.
            add_generation_prompt: end with what opens the assistant's turn.
            options: further variables of the template, such as `enable_thinking`.

        Raises:
            DataError: the template refuses the messages.
        """
        variables = {**self._special_tokens, "tools": None, "documents": None, **options}
        variables |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            marked = self._template.render(variables)
        except _RAISED_BY_TEMPLATES as error:
            roles = [message.get("role") for message in messages]
            raise DataError(f"the chat template refuses a conversation with the roles {roles}: {error}") from error
        return _split_markers(marked)


def _environment() -> ImmutableSandboxedEnvironment:
    """What every chat template expects to find: the filters and functions transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which a model should not read.
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent, **options})


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _split_markers(marked: str) -> RenderedChat:
    """Remove the markers and remember where they were."""
    pieces, spans, length, start = [], [], 0, 0
    for piece in re.split(f"([{_START}{_END}])", marked):
        if piece == _START:
            start = length
        elif piece == _END:
            spans.append((start, length))
        else:
            pieces.append(piece)
            length += len(piece)
    return RenderedChat(text="".join(pieces), spans=tuple(span for span in spans if span[0] < span[1]))


_BLOCK = 256
"""Texts encoded at a time: an encoding holds some hundred bytes a token, of which four are kept."""
_OTHER_FORMATS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


class Tokenizer:
    """Text to token ids and back, with the folder's special tokens and chat template.

    Args:
        backend: the tokenizer proper.
        special_tokens: by role, such as {"eos_token": "<|im_end|>"}.
        chat_template: Jinja text, or None.
        source: folder it came from, for messages.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: dict[str, str], chat_template: str | None, source: str
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend, self.special_tokens, self.source = backend, special_tokens, source
        self.chat_template = None if chat_template is None else ChatTemplate(chat_template, special_tokens)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        # Not their number: ids may have gaps, where tokens were taken out or added beyond a padded table.
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

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
        added = self._backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def first_difference(self, other: "Tokenizer") -> str:
        """A text that the two know under different ids, in words; "" where every id means the same to both."""
        own, theirs = (each._backend.get_vocab(with_added_tokens=True) for each in (self, other))
        for text in sorted(own.keys() | theirs.keys(), key=lambda text: own.get(text, -1)):
            if own.get(text) != theirs.get(text):
                here, there = (f"id {held[text]}" if text in held else "no id" for held in (own, theirs))
                return f"{text!r} has {here} here and {there} there"
        return ""

    def token_text(self, token_id: int) -> str | None:
        """The text of one token, such as "<|image_pad|>"; None when there is no such token."""
        text: str | None = self._backend.id_to_token(token_id)
        return text

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Ids]:
        """Token ids of each text, [T] int32; with or without the bos or eos that the tokenizer puts around a text."""
        found: list[Ids] = []
        for first in range(0, len(texts), _BLOCK):
            block = list(texts[first : first + _BLOCK])
            encodings = self._backend.encode_batch(block, add_special_tokens=add_special_tokens)
            found += [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
        return found

    def encode_with_offsets(self, text: str) -> tuple[Ids, npt.NDArray[np.int64]]:
        """Token ids [T] int32 and the character range [T, 2] int64 of each; nothing is put around the text."""
        encoding = self._untrimmed.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return np.array(encoding.ids, dtype=np.int32), offsets

    def decode(self, ids: Sequence[int] | Ids, *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return str(self._backend.decode([int(token) for token in ids], skip_special_tokens=skip_special_tokens))

    def require_template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            ModelError: the folder has none.
        """
        if self.chat_template is None:
            raise ModelError(
                f"{self.source} has no chat template, and chat messages need one: set data.chat_template to off and "
                f"give plain texts, or put a chat_template.jinja into that folder"
            )
        return self.chat_template

    @cached_property
    def _untrimmed(self) -> tokenizers.Tokenizer:
        # A ByteLevel post-processor with trim_offsets (Llama 3 has one) leaves a token of spaces without any
        # characters, so that a mask by characters would miss it. Without a post-processor offsets are whole.
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.post_processor = None
        return copy

    def _special_id(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self._backend.token_to_id(text)


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> Tokenizer:
    """Read the tokenizer of a Hugging Face model folder.

    A folder with `tokenizer.json` is read with the `tokenizers` library and runs no code of the folder. Older
    formats (`tokenizer.model`, `vocab.json` with `merges.txt`) are converted in memory by transformers, which
    imports torch where torch is installed; only there does `trust_remote_code` matter.

    Raises:
        ModelError: no such folder, no tokenizer in it, or a corrupt one; a chat template that is no text or no Jinja.
        BackendError: an older format, and transformers is not installed.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist: give the path of a Hugging Face model folder")
    settings = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    special_tokens = {
        role: text for role in settings if role.endswith("_token") and (text := _token_text(settings[role]))
    }
    return Tokenizer(
        _read_backend(folder, trust_remote_code), special_tokens, _read_chat_template(folder, settings), str(folder)
    )


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


def _read_chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The default template: a file of its own, or an entry of tokenizer_config.json (a text, or several by name)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    found = settings.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    template = _default_template(found) if isinstance(found, list) else found
    if template is None or isinstance(template, str):
        return template
    raise ModelError(
        f"{folder}: chat_template must be a text, or a list of objects with name and template; got {found!r:.80}"
    )


def _default_template(entries: list[Any]) -> Any:
    """The template named default; None without one, and the entries themselves when they are of another form."""
    try:
        return {entry["name"]: entry["template"] for entry in entries}.get("default")
    except (KeyError, TypeError):
        return entries


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a model folder; empty where there is none."""
    return read_model_json(path) if path.is_file() else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}; copy it again from the model it belongs to") from error


def _token_text(value: Any) -> str | None:
    """A special token is written as its text, or as an object that holds it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


ARITHMETIC_ALPHABET: Final = "0123456789+="


# The prompt is the message as it stands: "47+85=", then what the model writes, then the end token; a tool that returns
# 132 is read as "132=", so that it ends like a prompt.
_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% elif message['role'] == 'tool' %}{{ message['content'] + '=' }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)


def build_character_tokenizer(folder: str | Path, alphabet: str = ARITHMETIC_ALPHABET) -> Tokenizer:
    """Write a tokenizer with one token per character, in Hugging Face format, and read it back.

    Ids: 0 `<pad>`, 1 `<eos>`, 2 `<unk>`, then the alphabet in its order. Its chat template puts contents one after
    the other and ends the assistant's with `<eos>`. `transformers.AutoTokenizer` reads the folder too.

    Args:
        folder: made when missing; `tokenizer.json` and `tokenizer_config.json` in it are replaced.
        alphabet: characters, each once.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = ["<pad>", "<eos>", "<unk>", *dict.fromkeys(alphabet)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(tokens[:3])
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return load_tokenizer(folder)
