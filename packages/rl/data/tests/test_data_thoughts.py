"""Answers with thoughts, under chat templates whose generation prompt opens the thought."""

import pytest

from offbeat_core import DataError
from offbeat_data import ConversationConfig, DataConfig, load_conversations, load_pairs, load_prompts

CONTROL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "[THINK]", "[/THINK]"]
WORDS = ["a", "b", "x", "y", "yes", "no", "assistant", "user"]
# As Qwen3.5's: a thought is found by both of its tags, and the last turn always has one.
OPENS = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}{%- set c = m.content %}"
    "{%- if m.role == 'assistant' %}{%- set r = '' %}{%- if '<think>' in c and '</think>' in c %}"
    "{%- set r = c.split('</think>')[0].split('<think>')[-1].strip() %}{%- set c = c.split('</think>')[-1].strip() %}"
    "{%- endif %}{{ '<|im_start|> assistant\n' }}{%- if loop.index0 > ns.last %}"
    "{{ '<think>\n' + r + '\n</think>\n\n' }}{%- endif %}{{ c + ' <|im_end|>\n' }}{%- else %}"
    "{{ '<|im_start|> ' + m.role + '\n' + c + ' <|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|> assistant\n<think>\n' }}{%- endif %}"
)
# Writes the answer down as it is.
VERBATIM = (
    "{% for m in messages %}{{ '<|im_start|> ' + m.role + '\n' + m.content + ' <|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant\n<think>\n' }}{% endif %}"
)
TAGGED = OPENS.replace(
    "{{ '<think>\n' + r + '\n</think>\n\n' }}{%- endif %}{{ c + ' <|im_end|>\n' }}",
    "{{ '<think>\n' }}{% generation %}{{ r + '\n</think>\n\n' + c + ' <|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{ c + ' <|im_end|>' }}{%- endif %}{{ '\n' }}",
)
# As those that are made for training: the block holds what the generation prompt has written.
TAGGED_FROM_THE_TAG = TAGGED.replace(
    "{{ '<think>\n' }}{% generation %}{{ r + ", "{% generation %}{{ '<think>\n' + r + "
)
ANSWER = "x\n</think>\n\nyes"
ASKED = "<|im_start|> user a <|im_end|> <|im_start|> assistant"
LEARNED = f"{ASKED} <think> *x *</think> *yes *<|im_end|>"


@pytest.fixture
def thinker(word_tokenizer):
    return lambda template: word_tokenizer(template, CONTROL, WORDS, eos="<|im_end|>")


def words(tokenizer, sequence):
    pairs = zip(sequence.ids, sequence.loss_mask, strict=True)
    return " ".join(("*" if learned else "") + tokenizer.token_text(int(token)) for token, learned in pairs)


def row(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize(
    "template", [OPENS, VERBATIM, TAGGED, TAGGED_FROM_THE_TAG], ids=["opens", "verbatim", "tagged", "tag in the block"]
)
@pytest.mark.parametrize("answer", [ANSWER, f"<think>\n{ANSWER}"])
def test_an_answer_with_or_without_the_opening_tag_is_learned_as_it_is_sampled(answer, template, thinker, write_jsonl):
    tokenizer = thinker(template)
    path = write_jsonl([row(("user", "a"), ("assistant", answer))])
    [sequence] = load_conversations(ConversationConfig(path=path), tokenizer).train
    assert words(tokenizer, sequence) == LEARNED


def test_other_tags_are_known_by_the_generation_prompt(thinker, write_jsonl):
    tokenizer = thinker(VERBATIM.replace("<think>", "[THINK]"))
    path = write_jsonl([row(("user", "a"), ("assistant", "x\n[/THINK]\nyes"))])
    [sequence] = load_conversations(ConversationConfig(path=path), tokenizer).train
    assert words(tokenizer, sequence) == LEARNED.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")


def test_every_answer_of_a_conversation_and_of_a_preference_is_mended(thinker, write_jsonl):
    tokenizer = thinker(OPENS)
    turns = [("user", "a"), ("assistant", ANSWER), ("user", "b"), ("assistant", "y\n</think>\n\nno")]
    first, second = load_conversations(ConversationConfig(path=write_jsonl([row(*turns)])), tokenizer).train
    assert words(tokenizer, first) == LEARNED
    assert words(tokenizer, second) == (
        f"{ASKED} yes <|im_end|> <|im_start|> user b <|im_end|> <|im_start|> assistant <think> *y *</think> *no "
        "*<|im_end|>"
    )
    path = write_jsonl([{"prompt": "a", "chosen": ANSWER, "rejected": "y\n</think>\n\nno"}])
    [pair] = load_pairs(ConversationConfig(path=path), tokenizer).train
    assert words(tokenizer, pair.chosen) == LEARNED


def test_the_history_of_a_prompt_is_mended_too(thinker, write_jsonl):
    tokenizer = thinker(OPENS)
    turns = row(("user", "a"), ("assistant", ANSWER), ("user", "b"))["messages"]
    [prompt] = load_prompts(DataConfig(path=write_jsonl([{"prompt": turns, "answer": "y"}])), tokenizer).train
    assert tokenizer.decode(prompt.ids, skip_special_tokens=False).split() == (
        f"{ASKED} yes <|im_end|> <|im_start|> user b <|im_end|> <|im_start|> assistant <think>".split()
    )


def test_an_answer_without_thoughts_is_left_to_the_template(thinker, write_jsonl):
    tokenizer = thinker(OPENS)
    path = write_jsonl([row(("user", "a"), ("assistant", "yes"))])
    [sequence] = load_conversations(ConversationConfig(path=path), tokenizer).train
    assert words(tokenizer, sequence) == f"{ASKED} <think> *</think> *yes *<|im_end|>"


def test_a_template_that_puts_an_empty_thought_first_is_refused(thinker, write_jsonl):
    tokenizer = thinker(OPENS.replace("{%- if '<think>' in c and '</think>' in c %}", "{%- if false %}"))
    path = write_jsonl([row(("user", "a"), ("assistant", ANSWER))])
    with pytest.raises(DataError, match=r"row 1: message 2: the chat template adds a thought of its own .*</think>"):
        load_conversations(ConversationConfig(path=path), tokenizer)


@pytest.mark.parametrize("template", ["qwen3", "qwen3_tagged"])
def test_thoughts_of_earlier_turns_are_learned_though_later_turns_do_not_show_them(
    template, make_tokenizer, write_jsonl
):
    """Each turn as the model saw it, whether or not the template says what the assistant wrote."""
    tokenizer = make_tokenizer(template)
    conversation = [
        {"role": "user", "content": "the sum"},
        {"role": "assistant", "content": "<think>\nfive and seven\n</think>\n\ntwelve"},
        {"role": "user", "content": "the product"},
        {"role": "assistant", "content": "<think>\nfive times seven\n</think>\n\nthirty-five"},
    ]
    [first, second] = load_conversations(
        ConversationConfig(path=write_jsonl([{"messages": conversation}])), tokenizer
    ).train
    learned = [tokenizer.decode(each.ids[each.loss_mask], skip_special_tokens=False) for each in (first, second)]
    assert learned == [f"{conversation[at]['content']}<|im_end|>" for at in (1, 3)]
    assert "five and seven" not in tokenizer.decode(second.ids)


@pytest.mark.parametrize("template", ["qwen3", "qwen3_tagged"])
def test_turns_of_one_question_stay_one_sequence(template, make_tokenizer, write_jsonl):
    """Thoughts are kept until the next question: a tool's answer is none."""
    tokenizer = make_tokenizer(template)
    conversation = [
        {"role": "user", "content": "the sum"},
        {"role": "assistant", "content": "<think>\nask\n</think>\n\nadd"},
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": "<think>\nfound\n</think>\n\ntwelve"},
    ]
    [found] = load_conversations(ConversationConfig(path=write_jsonl([{"messages": conversation}])), tokenizer).train
    said = [f"{conversation[at]['content']}<|im_end|>" for at in (1, 3)]
    assert tokenizer.decode(found.ids[found.loss_mask], skip_special_tokens=False) == "".join(said)
