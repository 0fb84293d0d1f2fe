"""A tokenizer with one token per character, for tests, quickstarts and arithmetic."""

import json
from pathlib import Path
from typing import Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from offbeat_data._tokenizer import Tokenizer, load_tokenizer

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
