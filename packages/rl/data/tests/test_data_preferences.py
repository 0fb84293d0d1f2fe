"""Rows of preferences become sequences that differ in their answers alone; malformed rows are named."""

import numpy as np
import pytest

from offbeat_core import DataError
from offbeat_data import ConversationConfig, load_pairs, load_ratings

ASKED = {"role": "user", "content": "What is the sum?"}
GOOD, BAD = {"role": "assistant", "content": "Twelve"}, {"role": "assistant", "content": "It is thirteen."}


def split(tokenizer, sequence):
    """(prompt, answer) as texts."""
    start = int(np.flatnonzero(sequence.loss_mask)[0])
    learned = sequence.ids[sequence.loss_mask]
    return tokenizer.decode(sequence.ids[:start], skip_special_tokens=False), tokenizer.decode(
        learned, skip_special_tokens=False
    )


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "What is the sum?", "chosen": "Twelve", "rejected": "It is thirteen."},
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [ASKED], "chosen": "Twelve", "rejected": "It is thirteen."},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"prompt": "What is the sum?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},  # as UltraFeedback has it
    ],
    ids=["texts", "messages", "messages and texts", "conversations", "conversations beside a prompt"],
)
def test_a_pair_is_one_prompt_and_two_answers_in_every_form(row, make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer("chatml")
    [pair] = load_pairs(ConversationConfig(path=write_jsonl([row])), tokenizer).train
    opening = (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nWhat is the sum?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert split(tokenizer, pair.chosen) == (opening, "Twelve<|im_end|>")
    assert split(tokenizer, pair.rejected) == (opening, "It is thirteen.<|im_end|>")


def test_without_a_template_prompt_and_answers_are_encoded_apart(make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer("chatml")
    config = ConversationConfig(
        path=write_jsonl([{"prompt": "a sum", "chosen": " twelve", "rejected": " two"}]), chat_template="off"
    )
    [pair] = load_pairs(config, tokenizer).train
    prompt = tokenizer.encode(["a sum"], add_special_tokens=True)[0]
    for sequence in (pair.chosen, pair.rejected):
        assert sequence.ids[: len(prompt)].tolist() == prompt.tolist()
        assert sequence.loss_mask.tolist() == [False] * len(prompt) + [True] * (len(sequence.ids) - len(prompt))
        assert sequence.ids[-1] == tokenizer.eos_id


def test_turns_before_the_answers_are_context(make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer("forgetful")
    before = [ASKED, GOOD, {"role": "user", "content": "And the product?"}]
    row = {"chosen": [*before, GOOD], "rejected": [*before, BAD]}
    [pair] = load_pairs(ConversationConfig(path=write_jsonl([row])), tokenizer).train
    prompt, answer = split(tokenizer, pair.rejected)
    assert "Twelve" in prompt
    assert answer.endswith("It is thirteen.<|im_end|>")


def test_a_pair_with_one_answer_too_long_is_left_out_whole(make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer("chatml")
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "d", "chosen": "b", "rejected": "c" * 300},
        {"prompt": "e", "chosen": "same", "rejected": "same"},
    ]
    found = load_pairs(ConversationConfig(path=write_jsonl(rows), max_sequence_tokens=100), tokenizer)
    counts = found.train_counts
    assert (counts.read, counts.too_long, counts.kept, len(found.train)) == (3, 1, 1, 1)
    assert any("1 pairs left out, of two equal answers" in notice for notice in found.notices)
    cut = load_pairs(
        ConversationConfig(path=write_jsonl(rows), max_sequence_tokens=100, too_long="truncate"), tokenizer
    )
    assert [len(pair.rejected.ids) for pair in cut.train][1] == 100
    assert cut.train_counts.truncated == 1


def test_what_is_held_out_is_asked_nowhere_else(make_tokenizer, write_jsonl):
    rows = [{"prompt": f"question {n // 2}", "chosen": "yes", "rejected": f"no {n}"} for n in range(12)]
    found = load_pairs(ConversationConfig(path=write_jsonl(rows), eval_size=3), make_tokenizer("chatml"))

    def prompts(pairs):
        return {pair.chosen.ids[~pair.chosen.loss_mask].tobytes() for pair in pairs}

    assert len(found.eval) == 3
    assert not prompts(found.train) & prompts(found.eval)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, "no column 'rejected', it has prompt, chosen"),
        (
            {"messages": [ASKED, GOOD]},
            "no column 'chosen', it has messages; the loss compares two answers to one prompt",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "column 'rejected' .* is null"),
        ({"chosen": "b", "rejected": "c"}, "no column 'prompt'"),
        ({"prompt": "a", "chosen": [GOOD], "rejected": "c"}, "two texts or two lists"),
        ({"chosen": [ASKED, GOOD], "rejected": [{**ASKED, "content": "x"}, BAD]}, "the same up to an answer"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED]}, "the same up to an answer"),
        ({"prompt": [ASKED], "chosen": [], "rejected": []}, "list of at least one"),
        ({"prompt": [ASKED], "chosen": [{"role": "assistant"}], "rejected": [BAD]}, "needs role and content"),
    ],
)
def test_a_malformed_pair_is_named_by_its_row(row, said, make_tokenizer, write_jsonl):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}, row]
    with pytest.raises(DataError, match=f"row 2: .*{said}"):
        load_pairs(ConversationConfig(path=write_jsonl(rows)), make_tokenizer("chatml"))


def test_answers_of_several_turns_that_are_no_one_sequence_are_refused(make_tokenizer, write_jsonl):
    several = [GOOD, {"role": "user", "content": "And the product?"}, BAD]
    row = {"prompt": [ASKED], "chosen": several, "rejected": [BAD]}
    with pytest.raises(DataError, match="rewrites earlier turns"):
        load_pairs(ConversationConfig(path=write_jsonl([row])), make_tokenizer("forgetful"))


def test_ratings_carry_their_label_and_the_answer_of_another_prompt(make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer("chatml")
    rows = [
        {"prompt": "first", "completion": "one", "label": True},
        {"prompt": "first", "completion": "two", "label": 0},
        {"prompt": "second", "completion": "three", "label": False},
        {"prompt": "third", "completion": "four", "label": 1},
    ]
    ratings = load_ratings(ConversationConfig(path=write_jsonl(rows)), tokenizer).train
    assert [rating.is_good for rating in ratings] == [True, False, False, True]
    splits = [(split(tokenizer, rating.answer), split(tokenizer, rating.mismatched)) for rating in ratings]
    assert all(own[0] == other[0] for own, other in splits)
    # Of two rows with one prompt neither is compared with the other's answer.
    assert [other[1].removesuffix("<|im_end|>") for _, other in splits] == ["four", "four", "two", "three"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"label": "yes"}, "must be true or false, or 1 or 0: got 'yes'"),
        ({"label": 0.5}, "must be true or false"),
        ({"label": None}, "column 'label' .* is null"),
        ({"completion": None}, "column 'completion' .* is null"),
    ],
)
def test_a_malformed_rating_is_named_by_its_row(changes, said, make_tokenizer, write_jsonl):
    row = {"prompt": "a", "completion": "b", "label": True}
    with pytest.raises(DataError, match=f"row 2: .*{said}"):
        load_ratings(ConversationConfig(path=write_jsonl([row, {**row, **changes}])), make_tokenizer("chatml"))


def test_ratings_of_one_prompt_alone_are_refused(make_tokenizer, write_jsonl):
    rows = [{"prompt": "a", "completion": f"b {n}", "label": True} for n in range(3)]
    with pytest.raises(DataError, match="all prompts are the same"):
        load_ratings(ConversationConfig(path=write_jsonl(rows)), make_tokenizer("chatml"))


def test_a_prompt_with_the_answer_of_another_is_cut_off_at_the_limit(make_tokenizer, write_jsonl):
    """Each row fits, and a long prompt with a long answer would not."""
    rows = [
        {"prompt": "a", "completion": "b" * 40, "label": True},
        {"prompt": "c" * 40, "completion": "d", "label": False},
    ]
    config = ConversationConfig(path=write_jsonl(rows), max_sequence_tokens=70, chat_template="off")
    first, second = load_ratings(config, make_tokenizer("chatml")).train
    assert len(second.mismatched.ids) == 70 < len(first.answer.ids) + len(second.answer.ids) - 4
    assert second.mismatched.loss_mask.sum() == 30
    assert len(first.mismatched.ids) < 70
