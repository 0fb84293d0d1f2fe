"""The token that ends a turn is learned, or a notice says that it is not."""

import pytest

from offbeat_data import ConversationConfig, load_conversations, load_pairs, load_ratings
from offbeat_data._datasets.turn_ends import find_end

CHAT = [("user", "hi"), ("assistant", "yes"), ("user", "you"), ("assistant", "no")]
WORDS = ["hi", "you", "yes", "no", "call", "3"]
MARKERS = ["<|user|>", "<|assistant|>", "<|observation|>", "<|end|>", "<|endoftext|>"]
# As GLM-4's: a turn ends where the marker of the next role begins.
BY_NEXT_ROLE = (
    "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}CLOSE{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CHATML = TAGGED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# As Phi-3's: the end token closes each turn, and another one the conversation.
TWICE_ENDED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
TWICE_ENDED_TAGGED = TWICE_ENDED.replace(
    "{{ m.content }}<|end|>\n",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}\n"
    "{% if loop.last %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}"
    "{% else %}{{ m.content }}<|end|>\n{% endif %}",
).replace("{% else %}{{ eos_token }}{% endif %}", "{% endif %}")
# As some that are made for training: the block holds the role too.
TAGGED_FROM_THE_ROLE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|assistant|>\n{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}<|{{ m.role }}|>\n{{ m.content }}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As GLM-4.5's: thoughts of earlier turns are dropped, here all words but the last one.
FORGETS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n"
    "{{ m.content if m.role != 'assistant' or loop.index0 > ns.last else m.content.split()[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture
def chat_tokenizer(word_tokenizer):
    def make(template, eos="<|endoftext|>", words=WORDS, **settings):
        return word_tokenizer(template, MARKERS, words, eos=eos, **settings)

    return make


def messages(turns):
    return [{"role": role, "content": content} for role, content in turns]


def words(tokenizer, sequence):
    """The tokens of a sequence, those to learn with a star."""
    pairs = zip(sequence.ids, sequence.loss_mask, strict=True)
    return " ".join(("*" if learned else "") + tokenizer.token_text(int(token)) for token, learned in pairs)


def load(tokenizer, path):
    loaded = load_conversations(ConversationConfig(path=path), tokenizer)
    return [words(tokenizer, sequence) for sequence in loaded.train], loaded.notices


def test_a_turn_that_the_next_role_ends_learns_that_marker_where_engines_stop_at_it(chat_tokenizer, write_jsonl):
    tokenizer = chat_tokenizer(BY_NEXT_ROLE, end_ids=["<|endoftext|>", "<|user|>", "<|observation|>"])
    turns = [("user", "hi"), ("assistant", "call"), ("tool", "3"), *CHAT[1:]]
    [found], notices = load(tokenizer, write_jsonl([{"messages": messages(turns)}]))
    assert found == (
        "<|user|> hi <|assistant|> *call *<|observation|> 3 <|assistant|> *yes *<|user|> you "
        "<|assistant|> *no *<|endoftext|>"
    )
    assert notices == ()


def test_a_marker_that_engines_do_not_stop_at_is_said_and_the_last_turn_ends_by_eos(chat_tokenizer, write_jsonl):
    tokenizer = chat_tokenizer(BY_NEXT_ROLE)
    path = write_jsonl([{"messages": messages(CHAT[:2])}, {"messages": messages(CHAT)}])
    found, [notice] = load(tokenizer, path)
    assert found == [
        "<|user|> hi <|assistant|> *yes *<|endoftext|>",
        "<|user|> hi <|assistant|> *yes <|user|> you <|assistant|> *no *<|endoftext|>",
    ]
    assert notice.startswith("1 of 3 assistant turns end without a token that the model stops at")
    assert f"{path}, row 2" in notice
    assert "'<|user|>'" in notice
    assert "eos_token_id" in notice


@pytest.mark.parametrize("close", ["<|end|>\n", "\n<|end|>\n", "<|end|>"])
def test_an_end_token_behind_a_generation_block_is_learned(close, chat_tokenizer, write_jsonl):
    tokenizer = chat_tokenizer(TAGGED.replace("CLOSE", close), eos="<|end|>")
    [found], notices = load(tokenizer, write_jsonl([{"messages": messages(CHAT)}]))
    assert found == ("<|user|> hi <|end|> <|assistant|> *yes *<|end|> <|user|> you <|end|> <|assistant|> *no *<|end|>")
    assert notices == ()


@pytest.mark.parametrize(
    ("template", "plain"),
    [
        (TAGGED.replace("{% endgeneration %}", "<|end|>\n{% endgeneration %}").replace("CLOSE", ""), []),
        (CHATML.replace("CLOSE", "{% if m.role == 'assistant' %}<|end|>\n{% endif %}"), ["<|end|>"]),
    ],
    ids=["a block that holds both", "an end token that is not marked as special"],
)
def test_a_line_break_behind_the_end_token_is_not_learned(template, plain, chat_tokenizer, write_jsonl):
    tokenizer = chat_tokenizer(template, eos="<|end|>", words=[*WORDS, "\n"], plain=plain, end_ids=["<|end|>"])
    [found], notices = load(tokenizer, write_jsonl([{"messages": messages(CHAT)}]))
    assert found.replace("\n", "/") == (
        "<|user|> / hi <|assistant|> / *yes *<|end|> / <|user|> / you <|assistant|> / *no *<|end|> /"
    )
    assert notices == ()


def test_a_template_with_end_tokens_is_left_as_it_is(chat_tokenizer, write_jsonl):
    tokenizer = chat_tokenizer(CHATML.replace("CLOSE", "<|end|>\n"), eos="<|end|>")
    [found], notices = load(tokenizer, write_jsonl([{"messages": messages(CHAT)}]))
    assert found == ("<|user|> hi <|end|> <|assistant|> *yes *<|end|> <|user|> you <|end|> <|assistant|> *no *<|end|>")
    assert notices == ()


@pytest.mark.parametrize("template", [TWICE_ENDED, TWICE_ENDED_TAGGED], ids=["found", "tagged"])
def test_what_comes_after_the_first_end_token_of_a_turn_is_not_learned(template, chat_tokenizer, write_jsonl):
    tokenizer = chat_tokenizer(template, end_ids=["<|endoftext|>", "<|end|>"])
    [found], notices = load(tokenizer, write_jsonl([{"messages": messages(CHAT)}]))
    assert found == (
        "<|user|> hi <|end|> <|assistant|> *yes *<|end|> <|user|> you <|end|> <|assistant|> *no *<|end|> <|endoftext|>"
    )
    assert notices == ()


def test_an_end_token_at_which_engines_do_not_stop_is_learned_with_the_one_after_it(chat_tokenizer, write_jsonl):
    tokenizer = chat_tokenizer(TWICE_ENDED)
    [found], notices = load(tokenizer, write_jsonl([{"messages": messages(CHAT[:2])}]))
    assert found == "<|user|> hi <|end|> <|assistant|> *yes *<|end|> *<|endoftext|>"
    assert notices == ()


def test_what_the_generation_prompt_writes_is_not_learned_where_a_generation_block_holds_it(
    chat_tokenizer, write_jsonl
):
    tokenizer = chat_tokenizer(TAGGED_FROM_THE_ROLE, eos="<|end|>")
    chat = messages(CHAT)
    learned = "<|user|> hi <|end|> <|assistant|> *yes *<|end|> <|user|> you <|end|> <|assistant|> *no *<|end|>"
    assert load(tokenizer, write_jsonl([{"messages": chat}])) == ([learned], ())
    completed = learned.replace("*yes *<|end|>", "yes <|end|>")
    assert load(tokenizer, write_jsonl([{"prompt": chat[:3], "completion": chat[3:]}])) == ([completed], ())


def test_an_end_token_of_the_template_alone_is_said(chat_tokenizer, write_jsonl):
    """A base model: its template closes turns by a token that is not among its end tokens."""
    tokenizer = chat_tokenizer(CHATML.replace("CLOSE", "<|end|>\n"))
    [found], [notice] = load(tokenizer, write_jsonl([{"messages": messages(CHAT[:2])}]))
    assert found == "<|user|> hi <|end|> <|assistant|> *yes *<|end|>"
    assert notice.startswith("1 of 1 assistant turns")
    assert "'<|end|>'" in notice
    assert "'<|endoftext|>'" in notice


def test_each_turn_of_a_template_that_forgets_ends_as_engines_stop(chat_tokenizer, write_jsonl):
    tokenizer = chat_tokenizer(FORGETS, end_ids=["<|endoftext|>", "<|user|>", "<|observation|>"])
    turns = [("user", "hi"), ("assistant", "no call"), ("tool", "3"), ("assistant", "hi yes"), *CHAT[2:]]
    found, notices = load(tokenizer, write_jsonl([{"messages": messages(turns)}]))
    assert found == [
        "<|user|> hi <|assistant|> *no *call *<|observation|>",
        "<|user|> hi <|assistant|> no call <|observation|> 3 <|assistant|> *hi *yes *<|endoftext|>",
        "<|user|> hi <|assistant|> call <|observation|> 3 <|assistant|> yes <|user|> you "
        "<|assistant|> *no *<|endoftext|>",
    ]
    assert notices == ()


def test_preferences_and_ratings_end_their_answers_too(chat_tokenizer, write_jsonl):
    tokenizer = chat_tokenizer(BY_NEXT_ROLE)
    pairs = [{"prompt": "hi", "chosen": "yes", "rejected": "no"}]
    [pair] = load_pairs(ConversationConfig(path=write_jsonl(pairs)), tokenizer).train
    assert words(tokenizer, pair.chosen) == "<|user|> hi <|assistant|> *yes *<|endoftext|>"
    assert words(tokenizer, pair.rejected) == "<|user|> hi <|assistant|> *no *<|endoftext|>"
    rows = [{"prompt": asked, "completion": "yes", "label": True} for asked in ("hi", "you")]
    rating = load_ratings(ConversationConfig(path=write_jsonl(rows)), tokenizer).train[0]
    assert words(tokenizer, rating.answer) == "<|user|> hi <|assistant|> *yes *<|endoftext|>"
    assert words(tokenizer, rating.mismatched) == "<|user|> hi <|assistant|> *yes *<|endoftext|>"


def test_pairs_for_a_score_are_as_the_template_alone_renders_them(chat_tokenizer, write_jsonl):
    tokenizer = chat_tokenizer(BY_NEXT_ROLE)
    config = ConversationConfig(path=write_jsonl([{"prompt": "hi", "chosen": "yes", "rejected": "no"}]))
    loaded = load_pairs(config, tokenizer, ends_turns=False)
    assert words(tokenizer, loaded.train[0].chosen) == "<|user|> hi <|assistant|> *yes"
    assert loaded.notices == ()


def test_texts_for_a_score_are_as_they_stand(make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer(None)
    config = ConversationConfig(path=write_jsonl([{"prompt": "the sum ", "chosen": "is 2", "rejected": "is 3"}]))
    [pair] = load_pairs(config, tokenizer, ends_turns=False).train
    assert tokenizer.decode(pair.chosen.ids, skip_special_tokens=False) == "the sum is 2"
    [ended] = load_pairs(config, tokenizer).train
    assert ended.chosen.ids.tolist() == [*pair.chosen.ids.tolist(), tokenizer.eos_id]


def test_a_model_without_any_end_token_is_said(chat_tokenizer, write_jsonl):
    tokenizer = chat_tokenizer(BY_NEXT_ROLE, eos=None)
    [found], [notice] = load(tokenizer, write_jsonl([{"messages": messages(CHAT[:2])}]))
    assert found == "<|user|> hi <|assistant|> *yes"
    assert "no end token" in notice


@pytest.mark.parametrize(("before", "after"), [("no:", ""), (" ", "!"), ("no:", "!")])
def test_a_token_across_the_edge_of_a_span_is_learned(before, after, word_tokenizer, write_jsonl):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}BEFORE{% generation %}{{ m.content }}{% endgeneration %}"
        "AFTER<|end|>{% else %}{{ m.content }} {% endif %}{% endfor %}"
    )
    template = template.replace("BEFORE", before).replace("AFTER", after)
    crossing = f"{before}yes{after}".strip()
    tokenizer = word_tokenizer(template, ["<|end|>"], ["hi", crossing], eos="<|end|>")
    [found], notices = load(tokenizer, write_jsonl([{"messages": messages(CHAT[:2])}]))
    assert found == f"hi *{crossing} *<|end|>"
    assert notices == ()


def test_line_breaks_that_end_a_turn_are_looked_through_once(word_tokenizer):
    """A model may end its turns with a line break: white space and an end token at once."""
    template = "{% for m in messages %}{{ m.content }}[END]{% endfor %}"
    tokenizer = word_tokenizer(template, ["[END]"], ["one", "\n"], eos="[END]", end_ids=["[END]", "\n"])
    text = "one" + "\n" * 50_000 + "one[END]\n[END]"
    assert find_end(tokenizer, text, 0, len(text)) == len(text) - len("\n[END]")
