import json

import numpy as np
import pytest

from offbeat_core import DataError, ModelError
from offbeat_data import load_tokenizer
from offbeat_data._chat.template import ChatTemplate
from offbeat_data._tokenizer import _BLOCK

MESSAGES = [
    {"role": "system", "content": "You are terse <&>."},
    {"role": "user", "content": "  What is the sum?\n\n Grüße 日本語 🙂"},
    {"role": "assistant", "content": "Twelve."},
    {"role": "user", "content": "And now?"},
]


@pytest.mark.parametrize("template", ["chatml", "chatml_tagged", "llama3", "llama3_tagged", "forgetful"])
def test_ids_and_chats_equal_those_of_transformers(template, tokenizer_folder):
    from transformers import AutoTokenizer

    folder = tokenizer_folder(template)
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in ("Hello there,  how are\n\nyou?", "<|im_start|>user", "", "日本語 🙂"):
        assert ours.encode([text], add_special_tokens=True)[0].tolist() == theirs(text)["input_ids"]
        bare = theirs.encode(text, add_special_tokens=False)
        assert ours.encode([text], add_special_tokens=False)[0].tolist() == bare
    for prompt in (True, False):
        chat = ours.require_template().render(
            MESSAGES, add_generation_prompt=prompt, options={"enable_thinking": False}
        )
        expected = theirs.apply_chat_template(
            MESSAGES, add_generation_prompt=prompt, enable_thinking=False, return_dict=False
        )
        assert ours.encode([chat.text], add_special_tokens=False)[0].tolist() == expected
    assert ours.eos_id == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)


def test_decode_is_the_inverse_of_encode_and_can_hide_control_tokens(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    ids = tokenizer.encode(["Grüße 日本語 🙂<|im_end|>"], add_special_tokens=False)[0]
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == "Grüße 日本語 🙂"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "Grüße 日本語 🙂<|im_end|>"
    assert tokenizer.pad_id is None


def test_truncation_and_padding_kept_in_a_tokenizer_file_are_off(tokenizer_folder, copied_folder):
    content = json.loads((tokenizer_folder("chatml") / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    folder = copied_folder("chatml", {"tokenizer.json": content})
    text = "What is the sum of two numbers? " * 4
    assert len(load_tokenizer(folder).encode([text], add_special_tokens=True)[0]) > 4


def test_a_template_is_found_wherever_a_folder_keeps_it(copied_folder):
    folder = copied_folder(None, {})
    assert (load_tokenizer(folder).chat_template, load_tokenizer(folder).template_file) == (None, "")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json file"}))
    assert load_tokenizer(folder).require_template().source == "json file"
    assert load_tokenizer(folder).template_file == "chat_template.json"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["eos_token"] = {"content": "<|im_end|>", "special": True}
    settings["chat_template"] = [{"name": "tools", "template": "t"}, {"name": "default", "template": "by name"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(folder).require_template().source == "by name"
    assert load_tokenizer(folder).template_file == "tokenizer_config.json"
    assert load_tokenizer(folder).eos_id is not None
    (folder / "chat_template.jinja").write_text("own file")
    assert load_tokenizer(folder).require_template().source == "own file"
    assert load_tokenizer(folder).template_file == "chat_template.jinja"


def test_older_formats_are_converted_by_transformers(tokenizer_folder, tmp_path):
    model = json.loads((tokenizer_folder("chatml") / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    expected = load_tokenizer(tokenizer_folder("chatml")).encode(["Hello there, 日本"], add_special_tokens=False)[0]
    assert (
        load_tokenizer(tmp_path).encode(["Hello there, 日本"], add_special_tokens=False)[0].tolist()
        == expected.tolist()
    )


def test_a_missing_template_is_named_where_it_is_needed(make_tokenizer):
    with pytest.raises(ModelError, match=r"has no chat template.*chat_template to off"):
        make_tokenizer(None).require_template()


def test_every_id_is_below_the_size_of_the_vocabulary(tokenizer_folder, copied_folder):
    content = json.loads((tokenizer_folder("chatml") / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["zz"] = max(vocabulary.values()) + 100
    assert load_tokenizer(copied_folder("chatml", {"tokenizer.json": content})).vocab_size == vocabulary["zz"] + 1


@pytest.mark.parametrize(
    "text", ["What is the sum of two numbers? " * 50, "日本語 🙂 Grüße" * 50, " " * 500, "\n\t" * 99]
)
def test_no_text_has_more_bytes_than_its_tokens_can_stand_for(text, make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    [ids] = tokenizer.encode([text], add_special_tokens=False)
    assert len(text.encode()) <= len(ids) * tokenizer.longest_token_bytes
    assert tokenizer.longest_token_bytes < 100


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        (
            "{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools %}{{ tools }}{% endif %}",
            True,
        ),
        ("{% set tools = tools or none %}{% generation %}{{ tools }}{% endgeneration %}", True),
        ("{% macro all() %}{{ tools }}{% endmacro %}{{ all() }}", True),
        ("{% for message in messages %}{{ message.tools }} tools{% endfor %}", False),
    ],
)
def test_a_template_tells_which_variables_it_reads(template, reads, copied_folder):
    tokenizer = load_tokenizer(copied_folder(None, {"chat_template.json": {"chat_template": template}}))
    assert ("tools" in tokenizer.require_template().variables) is reads


def test_two_tokenizers_are_told_apart_by_a_text_that_they_number_differently(tokenizer_folder, copied_folder):
    folder = tokenizer_folder("chatml")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.first_difference(load_tokenizer(folder)) == ""
    held = json.loads((folder / "tokenizer.json").read_text())
    last = "".join(held["model"]["merges"].pop())
    number = held["model"]["vocab"].pop(last)
    other = load_tokenizer(copied_folder("chatml", {"tokenizer.json": held}))
    assert tokenizer.first_difference(other) == f"{last!r} has id {number} here and no id there"
    assert other.first_difference(tokenizer) == f"{last!r} has no id here and id {number} there"


def test_many_texts_are_encoded_as_each_alone(tokenizer_folder):
    """They are encoded in blocks, for an encoding takes a hundred times the memory of its ids."""
    tokenizer, texts = (
        load_tokenizer(tokenizer_folder("chatml")),
        [f"text {number}" for number in range(2 * _BLOCK + 1)],
    )
    together = tokenizer.encode(texts, add_special_tokens=False)
    alone = [tokenizer.encode([text], add_special_tokens=False)[0] for text in texts]
    assert [ids.tolist() for ids in together] == [ids.tolist() for ids in alone]


def test_a_folder_without_a_tokenizer_is_named_with_what_it_holds(tmp_path):
    with pytest.raises(ModelError, match=r"model folder .*nowhere does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"needs tokenizer.json and holds config.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not sentencepiece")
    with pytest.raises(ModelError, match=r"transformers cannot make one"):
        load_tokenizer(tmp_path)


NO_TEXT = "m: chat_template must be a text, or a list of objects with name and template"
BROKEN = [
    ("tokenizer.json", b"{", "tokenizer.json is corrupt"),
    ("tokenizer.json", b"{}", "tokenizer.json is corrupt"),
    ("tokenizer_config.json", b"[1]", "tokenizer_config.json must hold a JSON object, got list"),
    ("chat_template.jinja", b"{% for message in %}", "not valid Jinja"),
    ("chat_template.jinja", b"{{ " + b"(" * 5000 + b"1" + b")" * 5000 + b" }}", "chat template is not valid Jinja"),
    ("chat_template.jinja", b"\xff{{ messages }}", "chat_template.jinja cannot be read"),
    *(
        ("chat_template.json", {"chat_template": found}, NO_TEXT)
        for found in (5, {"default": "x"}, [{"name": "default"}], [{"name": "default", "template": 5}], ["x"])
    ),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN, ids=range(len(BROKEN)))
def test_a_file_that_is_broken_is_named(name, content, message, copied_folder):
    with pytest.raises(ModelError, match=message):
        load_tokenizer(copied_folder(None, {name: content}))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only users here') }}", r"roles \['system'\]: only users here"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ],
)
def test_a_template_can_refuse_messages_and_cannot_reach_python(template, message, copied_folder):
    made = load_tokenizer(copied_folder(None, {"chat_template.jinja": template})).require_template()
    with pytest.raises(DataError, match=message):
        made.render(MESSAGES[:1], add_generation_prompt=True, options={})


def test_half_a_character_is_encoded_as_a_replacement(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    half, replaced = "a\ud800b", "a\ufffdb"
    [ids], [expected] = (tokenizer.encode([text], add_special_tokens=False) for text in (half, replaced))
    assert ids.tolist() == expected.tolist()
    ids, offsets = tokenizer.encode_with_offsets(half)
    assert ids.tolist() == expected.tolist()
    assert offsets[-1].tolist() == [2, 3]


@pytest.mark.parametrize(
    "expression",
    [
        "'a' * 10000000000",
        "[0] * 10000000000",
        "10000000000 * ('a' * 1000)",
        "9 ** 9 ** 9",
        "2 ** 10000000000",
        "range(10000000000) | list",
        "lipsum(n=1000000)",
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.__init__.__globals__",
        "cycler.__init__.__globals__.os.system('true')",
        "('' | attr('__class__')).mro()",
        "'{0.__class__.__mro__}'.format('')[30]",
        "messages.append(1)",
        "raise_exception.__globals__",
    ],
)
def test_a_template_reaches_nothing_and_fills_no_memory(expression):
    with pytest.raises(DataError, match="the chat template refuses a conversation"):
        ChatTemplate("{{ (" + expression + ").x.y }}", {}).render(MESSAGES, add_generation_prompt=True, options={})


def test_a_template_may_calculate():
    template = ChatTemplate("{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 3 * 0.5 }}{{ [1] * 2 }}{{ 7 * 8 }}", {})
    assert template.render([], add_generation_prompt=True, options={}).text == "ababab10241.5[1, 1]56"
