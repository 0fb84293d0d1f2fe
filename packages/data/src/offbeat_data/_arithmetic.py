"""Addition problems drawn on the spot, and a tokenizer with one token per character to read them.

They let a run show a model that learns, with nothing downloaded.
"""

import json
from pathlib import Path
from typing import Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from offbeat_data._order import permutation
from offbeat_data._tokenizer import Tokenizer, load_tokenizer
from offbeat_types import DataError

ARITHMETIC_ALPHABET: Final = "0123456789+="

# The prompt is the message as it stands: "47+85=", then what the model writes, then the end token; a tool that returns
# 132 is read as "132=", so that it ends like a prompt.
_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% elif message['role'] == 'tool' %}{{ message['content'] + '=' }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)


Pair = tuple[int, int]
Rows = list[dict[str, str]]


def draw_additions(num_train: int, num_held_out: int, *, seed: int = 0, digits: int = 2) -> tuple[Rows, Rows]:
    """Draw addition problems such as {"prompt": "47+85=", "answer": "132"}.

    No pair of numbers is in both sets, in either order. Within a set no problem comes twice.

    Args:
        num_train: training problems at most; 0 for all that are left (about 8000 for two digits).
        num_held_out: held-out problems.
        seed: equal seeds draw equal problems, on every machine.
        digits: of each number, 1 to 3.

    Returns:
        Training rows and held-out rows.

    Raises:
        DataError: digits out of range, or more held-out problems than there are pairs.
    """
    train, held_out = _draw_pairs(num_train, num_held_out, seed, digits)
    return [_problem(*pair, "+") for pair in train], [_problem(*pair, "+") for pair in held_out]


def draw_products(num_train: int, num_held_out: int, *, seed: int = 0, digits: int = 2) -> tuple[Rows, Rows]:
    """Draw products such as {"prompt": "47*85=", "answer": "3995"}; otherwise as `draw_additions`."""
    train, held_out = _draw_pairs(num_train, num_held_out, seed, digits)
    return [_problem(*pair, "*") for pair in train], [_problem(*pair, "*") for pair in held_out]


def _draw_pairs(num_train: int, num_held_out: int, seed: int, digits: int) -> tuple[list[Pair], list[Pair]]:
    if not 1 <= digits <= 3:
        raise DataError(f"arithmetic problems have 1 to 3 digits: got {digits}")
    low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits
    pairs = [(first, second) for first in range(low, high) for second in range(first, high)]
    if num_held_out >= len(pairs):
        raise DataError(f"there are {len(pairs)} pairs of {digits}-digit numbers: hold out fewer, got {num_held_out}")
    order = permutation(len(pairs), seed, 0)
    swap = permutation(len(pairs), seed, 1) % 2
    held_out = [pairs[at][::-1] if swap[at] else pairs[at] for at in order[:num_held_out]]
    rest = sorted({ordered for at in order[num_held_out:] for ordered in (pairs[at], pairs[at][::-1])})
    return [rest[at] for at in permutation(len(rest), seed, 2)[: num_train or None]], held_out


def _problem(first: int, second: int, sign: str) -> dict[str, str]:
    return {"prompt": f"{first}{sign}{second}=", "answer": str(first + second if sign == "+" else first * second)}


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
