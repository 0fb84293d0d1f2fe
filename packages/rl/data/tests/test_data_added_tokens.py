"""Tokens that a tokenizer puts around a text by itself: bos before it, and nothing between a prompt and its answer."""

import pytest

from offbeat_data import ConversationConfig, DataConfig, load_conversations, load_pairs, load_prompts

AROUND = ["<s> $A </s>", "<s> $A </s> </s>", "<s> $A", "$A </s>", None]
ROW = {"prompt": "hello world", "completion": "again", "answer": "again"}


@pytest.fixture
def plain_tokenizer(word_tokenizer):
    return lambda around: word_tokenizer(None, ["<s>", "</s>"], ["hello", "world", "again"], eos="</s>", around=around)


def words(tokenizer, ids):
    return [tokenizer.token_text(int(token)) for token in ids]


@pytest.mark.parametrize("around", AROUND)
def test_a_prompt_for_rollouts_does_not_end_in_eos(around, plain_tokenizer, write_jsonl):
    tokenizer = plain_tokenizer(around)
    [prompt] = load_prompts(DataConfig(path=write_jsonl([ROW])), tokenizer).train
    bos = ["<s>"] if around and "<s>" in around else []
    assert words(tokenizer, prompt.ids) == [*bos, "hello", "world"]


@pytest.mark.parametrize("around", AROUND)
def test_eos_comes_once_and_after_the_answer(around, plain_tokenizer, write_jsonl):
    tokenizer = plain_tokenizer(around)
    bos = ["<s>"] if around and "<s>" in around else []
    [sequence] = load_conversations(ConversationConfig(path=write_jsonl([ROW])), tokenizer).train
    assert words(tokenizer, sequence.ids) == [*bos, "hello", "world", "again", "</s>"]
    assert words(tokenizer, sequence.ids[sequence.loss_mask]) == ["again", "</s>"]
    rows = [{"prompt": "hello", "chosen": "again", "rejected": "world </s>"}]
    [pair] = load_pairs(ConversationConfig(path=write_jsonl(rows)), tokenizer).train
    assert words(tokenizer, pair.chosen.ids) == [*bos, "hello", "again", "</s>"]
    assert words(tokenizer, pair.rejected.ids) == [*bos, "hello", "world", "</s>"]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("text", ["hello world", "<s> hello world </s>"])
def test_a_plain_text_has_one_bos_and_one_eos(text, around, plain_tokenizer, write_jsonl):
    tokenizer = plain_tokenizer(around)
    [sequence] = load_conversations(ConversationConfig(path=write_jsonl([{"text": text}])), tokenizer).train
    bos = ["<s>"] if "<s>" in f"{around} {text}" else []
    assert words(tokenizer, sequence.ids) == [*bos, "hello", "world", "</s>"]


def test_a_prompt_that_was_rendered_already_has_one_bos(plain_tokenizer, write_jsonl):
    tokenizer = plain_tokenizer("<s> $A")
    [prompt] = load_prompts(DataConfig(path=write_jsonl([{**ROW, "prompt": "<s> hello"}])), tokenizer).train
    assert words(tokenizer, prompt.ids) == ["<s>", "hello"]
