"""Loss masks, token by token, against segments encoded one by one."""

import json

import numpy as np
import pytest

from offbeat_core import ConfigError, DataError, ModelError
from offbeat_data import ConversationConfig, load_conversations

TURNS = [
    {"role": "user", "content": "What is the sum?"},
    {"role": "assistant", "content": "Twelve, 日本 🙂"},
    {"role": "user", "content": "And the product?"},
    {"role": "assistant", "content": "It is  thirteen."},
]
SYSTEM = {"role": "system", "content": "You are terse."}


def _expected(tokenizer, segments):
    """The slow reference: every segment encoded on its own, with what it means for the loss."""
    ids, mask = [], []
    for text, learn in segments:
        piece = tokenizer.encode([text], add_special_tokens=False)[0].tolist()
        ids += piece
        mask += [learn] * len(piece)
    return ids, mask


def _chatml(turns):
    turns = turns if turns[0]["role"] == "system" else [{"role": "system", "content": "Be brief"}, *turns]
    segments = []
    for turn in turns:
        learn = turn["role"] == "assistant"
        segments += [(f"<|im_start|>{turn['role']}\n", False), (turn["content"] + "<|im_end|>", learn), ("\n", False)]
    return segments


def _llama3(turns):
    segments = [("<|bos|>", False)]
    for turn in turns:
        learn = turn["role"] == "assistant"
        segments += [(f"<|start_header_id|>{turn['role']}<|end_header_id|>\n\n", False)]
        segments += [(turn["content"] + "<|eot_id|>", learn)]
    return segments


def _load(tokenizer, path, **settings):
    return load_conversations(ConversationConfig(path=path, **settings), tokenizer).train


@pytest.mark.parametrize("turns", [TURNS[:2], TURNS, [SYSTEM, *TURNS], [SYSTEM, *TURNS[:3]], TURNS[1:], TURNS[1:2]])
@pytest.mark.parametrize(
    ("template", "segments"),
    [("chatml", _chatml), ("chatml_tagged", _chatml), ("llama3", _llama3), ("llama3_tagged", _llama3)],
)
def test_only_assistant_turns_and_their_end_token_enter_the_loss(
    template, segments, turns, make_tokenizer, write_jsonl
):
    tokenizer = make_tokenizer(template)
    [sequence] = _load(tokenizer, write_jsonl([{"messages": turns}]))
    ids, mask = _expected(tokenizer, segments(turns))
    assert sequence.ids.tolist() == ids
    assert sequence.loss_mask.tolist() == mask
    assert sequence.ids.dtype == np.int32
    assert any(mask)


def test_a_turn_that_begins_the_text_is_learned_from_its_second_token_on(word_tokenizer, write_jsonl):
    """Nothing comes before the first token to predict it from."""
    template = "{% for m in messages %}{{ m.content }} [END] {% endfor %}"
    tokenizer = word_tokenizer(template, ["[END]"], ["one", "two"], eos="[END]")
    turns = [{"role": role, "content": "one two"} for role in ("assistant", "user", "assistant")]
    [sequence] = _load(tokenizer, write_jsonl([{"messages": turns}]))
    assert sequence.loss_mask.tolist() == [False, True, True] + [False] * 3 + [True] * 3


def test_a_token_of_spaces_is_learned_although_the_tokenizer_trims_offsets(make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer("llama3")
    turns = [TURNS[0], {"role": "assistant", "content": "a" + " " * 7 + "b"}]
    [sequence] = _load(tokenizer, write_jsonl([{"messages": turns}]))
    ids, mask = _expected(tokenizer, _llama3(turns))
    assert (sequence.ids.tolist(), sequence.loss_mask.tolist()) == (ids, mask)


def test_a_template_that_forgets_thoughts_gives_one_sequence_per_turn(make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer("forgetful")
    loaded = load_conversations(ConversationConfig(path=write_jsonl([{"messages": TURNS}])), tokenizer)
    user, answer, again, last = (turn["content"] for turn in TURNS)
    opening = f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    first = [(opening, False), (f"<think>\n\n</think>\n\n{answer}<|im_end|>", True), ("\n", False)]
    history = f"{opening}{answer}<|im_end|>\n<|im_start|>user\n{again}<|im_end|>\n<|im_start|>assistant\n"
    second = [(history, False), (f"<think>\n\n</think>\n\n{last}<|im_end|>", True), ("\n", False)]
    for sequence, segments in zip(loaded.train, (first, second), strict=True):
        ids, mask = _expected(tokenizer, segments)
        assert (sequence.ids.tolist(), sequence.loss_mask.tolist()) == (ids, mask)
    assert (loaded.train_counts.read, loaded.train_counts.kept) == (1, 2)


def test_template_options_reach_the_template(make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer("forgetful")
    [sequence] = _load(tokenizer, write_jsonl([{"messages": TURNS[:2]}]), template_options={"enable_thinking": False})
    learned = tokenizer.decode(sequence.ids[sequence.loss_mask], skip_special_tokens=False)
    assert learned == "Twelve, 日本 🙂<|im_end|>"


@pytest.mark.parametrize("template", ["chatml", "chatml_tagged", "llama3"])
def test_prompt_and_completion_messages_learn_the_completion_only(template, make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer(template)
    [sequence] = _load(tokenizer, write_jsonl([{"prompt": TURNS[:3], "completion": TURNS[3:]}]))
    learned = tokenizer.decode(sequence.ids[sequence.loss_mask])
    assert learned == "It is  thirteen."


def test_prompt_and_completion_texts_use_the_template_as_prompts_for_rollouts_do(make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer("chatml")
    path = write_jsonl([{"prompt": "What is the sum?", "completion": 12}])
    [sequence] = _load(tokenizer, path, system_prompt="You are terse.")
    turns = [SYSTEM, TURNS[0], {"role": "assistant", "content": "12"}]
    assert (sequence.ids.tolist(), sequence.loss_mask.tolist()) == _expected(tokenizer, _chatml(turns))


@pytest.mark.parametrize("template", [None, "chatml", "llama3"])
def test_without_a_template_prompt_and_completion_are_joined_and_ended(template, make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer(template)
    [sequence] = _load(tokenizer, write_jsonl([{"prompt": "2+2=", "completion": "4"}]), chat_template="off")
    bos = [("<|bos|>", False)] if template == "llama3" else []
    end = "<|eot_id|>" if template == "llama3" else "<|im_end|>"
    expected = _expected(tokenizer, [*bos, ("2+2=", False), ("4" + end, True)])
    assert (sequence.ids.tolist(), sequence.loss_mask.tolist()) == expected


def test_plain_text_is_learned_from_its_second_token_on(make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer("chatml")
    [sequence] = _load(tokenizer, write_jsonl([{"text": "The answer is twelve."}]))
    ids, _ = _expected(tokenizer, [("The answer is twelve.<|im_end|>", True)])
    assert sequence.ids.tolist() == ids
    assert sequence.loss_mask.tolist() == [False] + [True] * (len(ids) - 1)


def test_rows_that_are_too_long_are_left_out_or_cut_and_counted(make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer("chatml")
    long = [{"role": "user", "content": "the sum " * 50}, TURNS[1]]
    answer = [TURNS[0], {"role": "assistant", "content": "twelve " * 200}]
    path = write_jsonl([{"messages": TURNS[:2]}, {"messages": long}, {"messages": answer}])
    filtered = load_conversations(ConversationConfig(path=path, max_sequence_tokens=80), tokenizer)
    counts = filtered.train_counts
    assert (counts.read, counts.too_long, counts.truncated, counts.kept) == (3, 2, 0, 1)
    assert counts.longest > 80
    cut = load_conversations(ConversationConfig(path=path, max_sequence_tokens=80, too_long="truncate"), tokenizer)
    # The long question leaves no token of the answer: there is nothing to learn from it.
    counts = cut.train_counts
    assert (counts.read, counts.too_long, counts.truncated, counts.kept) == (3, 1, 1, 2)
    assert len(cut.train[1].ids) == 80
    assert cut.train[1].loss_mask.any()


@pytest.mark.parametrize("too_long", ["filter", "truncate"])
def test_a_sequence_of_exactly_the_longest_length_is_learned_whole(too_long, make_tokenizer, write_jsonl):
    tokenizer, path = make_tokenizer("chatml"), write_jsonl([{"messages": TURNS[:2]}])
    [whole] = _load(tokenizer, path)
    config = ConversationConfig(path=path, max_sequence_tokens=len(whole.ids), too_long=too_long)
    loaded = load_conversations(config, tokenizer)
    assert [sequence.ids.tolist() for sequence in loaded.train] == [whole.ids.tolist()]
    assert (loaded.train_counts.too_long, loaded.train_counts.truncated) == (0, 0)


def test_held_out_conversations_are_not_trained_on(make_tokenizer, write_jsonl):
    path = write_jsonl([{"text": f"The answer is {number}."} for number in range(10)])
    tokenizer = make_tokenizer("chatml")
    loaded = load_conversations(ConversationConfig(path=path, eval_size=3), tokenizer)
    train, held_out = ({tokenizer.decode(s.ids) for s in part} for part in (loaded.train, loaded.eval))
    assert (len(train), len(held_out), train & held_out) == (7, 3, set())


@pytest.mark.parametrize("as_json", [False, True])
def test_tools_reach_the_template_and_a_call_needs_no_content(as_json, make_tokenizer, write_jsonl):
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [TURNS[0], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "12"}, TURNS[1]]
    tokenizer = make_tokenizer("tools")
    path = write_jsonl([{"messages": messages, "tools": json.dumps(tools) if as_json else tools}])
    [sequence] = _load(tokenizer, path)
    segments = [(f"<|im_start|>system\n{json.dumps(tools)}<|im_end|>\n", False)]
    for turn, text in zip(messages, (TURNS[0]["content"], json.dumps(call), "12", TURNS[1]["content"]), strict=True):
        segments += [(f"<|im_start|>{turn['role']}\n", False), (f"{text}<|im_end|>", turn["role"] == "assistant")]
        segments += [("\n", False)]
    ids, mask = _expected(tokenizer, segments)
    assert sequence.ids.tolist() == ids
    assert sequence.loss_mask.tolist() == mask


def test_turns_that_cannot_be_found_say_what_to_do(make_tokenizer, write_jsonl):
    # SmolLM2's template puts its own system turn first, so an opening assistant turn has no place to begin.
    path = write_jsonl([{"messages": [TURNS[1], *TURNS[2:]]}])
    tokenizer = make_tokenizer("forgetful")
    tokenizer.chat_template = type(tokenizer.require_template())(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}GO{% endif %}", {}
    )
    with pytest.raises(DataError, match=r"row 1: message 3: .*\{% generation %\}"):
        _load(tokenizer, path)


def test_held_out_questions_are_not_trained_on_whatever_was_answered(make_tokenizer, write_jsonl):
    def asked(question, answer):
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def kept(name, train, held_out):
        paths = {"path": write_jsonl(train, f"{name}.jsonl"), "eval_path": write_jsonl(held_out, f"{name}-test.jsonl")}
        loaded = load_conversations(ConversationConfig(**paths), make_tokenizer("chatml"))
        assert loaded.train_counts.held_out == 1
        assert loaded.train_counts.read == len(train)
        return len(loaded.train)

    chats = [{"messages": asked(*each)} for each in (("Sum?", "12"), ("Product?", "35"))]
    assert kept("chats", chats, [{"messages": asked("Sum?", "Twelve.")}]) == 1
    pairs = [
        {"prompt": "Sum?", "completion": "12"},
        {"prompt": "Product?", "completion": "35"},
    ]
    assert kept("pairs", pairs, [{"prompt": "Sum?", "completion": "Twelve."}]) == 1
    assert kept("texts", [{"text": "A sum."}, {"text": "A product."}], [{"text": "A sum."}]) == 1


NO_ASSISTANT = "row 2: the conversation has no assistant message"
NO_TOOLS = "row 1: column tools must be a list of function schemas.*'a hammer'"
NULL = r"row 1: the content of a message of '{}' is null; fill it in or drop the row"
NO_TEXT = "row 1: the content of a chat message must be text or a list of parts, got the number 5; write it as text"
NO_CALLS = "row 1: the content of a message is null, and the chat template does not write tool_calls"
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
SHAREGPT = [{"from": "human", "value": "Sum?"}, {"from": "gpt", "value": "12"}]
NO_MESSAGES = "row 1: (a chat message needs|chat messages must be)"
PAIR = {"prompt": "2+2=", "completion": "4"}
REFUSED = {
    "no column": ("chatml", [{"question": "x"}], {}, "none of the columns messages, completion, text, it has question"),
    "no assistant": ("chatml", [{"messages": TURNS}, {"messages": TURNS[:1]}], {}, NO_ASSISTANT),
    "tools": ("tools", [{"messages": TURNS, "tools": "a hammer"}], {}, NO_TOOLS),
    "roles of another kind": (
        "chatml",
        [{"messages": [{"role": "human", "content": "x"}, {"role": "gpt", "content": "y"}]}],
        {},
        "row 1: the conversation has no assistant message to learn from, its roles are human, gpt: add one, or rename",
    ),
    "an answer of null": (
        "tools",
        [{"messages": [TURNS[0], {**TURNS[1], "content": None}]}],
        {},
        NULL.format("assistant"),
    ),
    "a question of null": ("tools", [{"messages": [{**TURNS[0], "content": None}, TURNS[1]]}], {}, NULL.format("user")),
    "a completion of null": (
        "tools",
        [{"prompt": [TURNS[0]], "completion": [{**TURNS[1], "content": None}]}],
        {},
        NULL.format("assistant"),
    ),
    "a number for text": ("tools", [{"messages": [TURNS[0], {**TURNS[1], "content": 5}]}], {}, NO_TEXT),
    "calls that are not written": ("chatml", [{"messages": [TURNS[0], CALL]}], {}, NO_CALLS),
    "messages of ShareGPT": (
        "chatml",
        [{"messages": SHAREGPT}, {"messages": SHAREGPT}],
        {"eval_size": 1},
        "row 1: a chat message needs role and content, got .*; rename from to role .human to user, gpt to assis",
    ),
    "messages in JSON": (
        "chatml",
        [{"messages": json.dumps(TURNS)}],
        {},
        "row 1: chat messages must be a list of at least one, got the text .*, which looks like JSON; store the list",
    ),
    "an empty text": ("chatml", [{"text": ""}], {}, "row 1: a text needs at least two tokens"),
    "too long": (
        "chatml",
        [{"messages": TURNS}],
        {"max_sequence_tokens": 4},
        r"every row is too long: the longest has \d+ tokens .*is 4",
    ),
    "no template": (None, [{"messages": TURNS}], {}, "has no chat template"),
    "no effect": (None, [PAIR], {"system_prompt": "Be brief."}, "no effect without a chat template"),
    **{
        f"messages {messages}": (
            "chatml",
            [{"messages": messages}],
            {},
            NO_MESSAGES,
        )
        for messages in ("hello", [], [{"role": "user"}], ["hello"], [{"role": 3, "content": "x"}])
    },
}


@pytest.mark.parametrize(("template", "rows", "settings", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_learned_from_is_named(template, rows, settings, message, make_tokenizer, write_jsonl):
    error = DataError if template else ConfigError if settings else ModelError
    with pytest.raises(error, match=message):
        _load(make_tokenizer(template), write_jsonl(rows), **settings)


def test_calls_and_tools_that_the_template_leaves_out_are_noticed(make_tokenizer, write_jsonl):
    calls = {**CALL, "content": "I add."}
    rows = [{"messages": TURNS}, {"messages": [TURNS[0], calls], "tools": [{"function": {"name": "add"}}]}]

    def notices(template):
        return load_conversations(ConversationConfig(path=write_jsonl(rows)), make_tokenizer(template)).notices

    left_out, hidden = notices("chatml")
    assert left_out.startswith("1 of 2 rows hold calls of tools (first: ")
    assert "rows.jsonl, row 2), which the chat template leaves out" in left_out
    assert hidden.startswith("1 of 2 rows bring tools (first: ")
    assert notices("tools") == ()


def test_a_system_prompt_before_plain_text_is_noticed(make_tokenizer, write_jsonl):
    path, tokenizer = write_jsonl([{"text": "the sum of two numbers"}]), make_tokenizer("chatml")
    assert load_conversations(ConversationConfig(path=path), tokenizer).notices == ()
    [notice] = load_conversations(ConversationConfig(path=path, system_prompt="Be brief"), tokenizer).notices
    assert "have no effect on rows of column text" in notice
