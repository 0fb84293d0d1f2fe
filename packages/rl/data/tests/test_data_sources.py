"""Problems drawn on the spot, and the order in which items are served."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from offbeat_core import ConfigError, DataError
from offbeat_data import (
    ARITHMETIC_ALPHABET,
    ConversationConfig,
    DataConfig,
    EpochOrder,
    build_character_tokenizer,
    load_conversations,
    load_prompts,
)
from offbeat_data._sources.sources import draw_problems


@given(
    num_train=st.integers(0, 400),
    num_held_out=st.integers(0, 50),
    seed=st.integers(0, 9),
    digits=st.sampled_from([1, 2]),
    sign=st.sampled_from("+*"),
)
@settings(max_examples=30)
def test_problems_are_right_distinct_and_never_in_both_sets(num_train, num_held_out, seed, digits, sign):
    train, held_out = draw_problems(sign, num_train, num_held_out, seed=seed, digits=digits)
    assert len(held_out) == num_held_out
    assert len(train) == num_train or digits == 1 or num_train == 0
    pairs = [{frozenset(problem["prompt"][:-1].split(sign)) for problem in problems} for problems in (train, held_out)]
    assert not pairs[0] & pairs[1]
    assert len({problem["prompt"] for problem in train}) == len(train)
    for problem in train + held_out:
        first, second = problem["prompt"].removesuffix("=").split(sign)
        assert (int(first) + int(second) if sign == "+" else int(first) * int(second)) == int(problem["answer"])
        assert len(first) == len(second) == digits


def test_equal_seeds_draw_equal_problems_and_all_are_drawn_when_none_is_counted():
    assert draw_problems("+", 50, 20, seed=3) == draw_problems("+", 50, 20, seed=3)
    assert draw_problems("+", 50, 20, seed=3) != draw_problems("+", 50, 20, seed=4)
    assert list(map(len, draw_problems("+", 0, 0))) == [8100, 0]


@pytest.mark.parametrize(("digits", "held_out"), [(0, 1), (4, 1), (1, 55)])
def test_what_cannot_be_drawn_is_refused(digits, held_out):
    with pytest.raises(DataError, match="digit"):
        draw_problems("+", 10, held_out, digits=digits)


@pytest.mark.nightly
def test_the_character_tokenizer_loads_in_transformers_too(tmp_path):
    from transformers import AutoTokenizer

    ours = build_character_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = ours.encode(["47+85="], add_special_tokens=True)[0].tolist()
    assert ids == theirs("47+85=")["input_ids"]
    assert len(ids) == 6
    assert ours.decode(ids) == theirs.decode(ids) == "47+85="
    assert ours.decode([*ids, 1]) == theirs.decode([*ids, 1], skip_special_tokens=True) == "47+85="
    assert (ours.pad_id, ours.eos_id) == (theirs.pad_token_id, theirs.eos_token_id) == (0, 1)
    assert ours.vocab_size == len(theirs) == 15
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    rendered = theirs.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
    assert rendered["assistant_masks"] == [0, 0, 0, 0, 1, 1]


def test_any_alphabet_survives_the_round_trip(tmp_path):
    tokenizer = build_character_tokenizer(tmp_path, "ab \n<é日🙂")
    ids = tokenizer.encode(["é b\n日a<🙂"], add_special_tokens=True)[0]
    assert tokenizer.decode(ids) == "é b\n日a<🙂"
    assert tokenizer.encode(["z"], add_special_tokens=True)[0].tolist() == [2]


def test_the_quickstart_data_needs_no_file(tmp_path):
    tokenizer = build_character_tokenizer(tmp_path)
    config = ConversationConfig(path="arithmetic:2", num_items=100, eval_size=20, completion_column="answer")
    prompts = load_prompts(DataConfig(path="arithmetic:2", num_items=100, eval_size=20), tokenizer)
    sequences = load_conversations(config, tokenizer)
    assert (len(prompts.train), len(prompts.eval), len(sequences.train), len(sequences.eval)) == (100, 20, 100, 20)
    prompt, sequence = prompts.train[0], sequences.train[0]
    assert prompt.answer is not None
    assert tokenizer.decode(sequence.ids, skip_special_tokens=False) == f"{prompt.text}{prompt.answer}<eos>"
    assert sequence.ids[: len(prompt.ids)].tolist() == prompt.ids.tolist()
    assert sequence.loss_mask.tolist() == [False] * 6 + [True] * (len(prompt.answer) + 1)
    assert len(load_prompts(DataConfig(path="arithmetic:2"), tokenizer).train) == 1000


@pytest.mark.parametrize(("scheme", "extra"), [("arithmetic", ""), ("products", "*")])
def test_problems_are_a_source_of_prompts_by_their_number_of_digits(scheme, extra, tmp_path):
    tokenizer = build_character_tokenizer(tmp_path, ARITHMETIC_ALPHABET + extra)
    prompts = load_prompts(DataConfig(path=f"{scheme}:1", num_items=20, eval_size=5), tokenizer)
    assert (len(prompts.train), len(prompts.eval)) == (20, 5)
    with pytest.raises(ConfigError, match=rf"such as {scheme}:2; got 'many'"):
        load_prompts(DataConfig(path=f"{scheme}:many"), tokenizer)


SIZES, SEEDS = st.integers(1, 60), st.integers(0, 2**40)


@given(size=SIZES, seed=SEEDS, epoch=st.integers(0, 5), shuffle=st.booleans())
def test_every_epoch_serves_every_item_once(size, seed, epoch, shuffle):
    order = EpochOrder(size, seed, shuffle)
    served = [order(position) for position in range(epoch * size, (epoch + 1) * size)]
    assert {place for place, _ in served} == {epoch}
    assert sorted(item for _, item in served) == list(range(size))


@given(size=SIZES, seed=SEEDS, positions=st.lists(st.integers(0, 500), max_size=20))
def test_a_position_alone_says_what_is_served(size, seed, positions):
    walked = EpochOrder(size, seed)
    straight = [walked(position) for position in range(max(positions, default=0) + 1)]
    assert [EpochOrder(size, seed)(position) for position in positions] == [straight[at] for at in positions]


@given(seed=SEEDS)
def test_epochs_and_seeds_have_orders_of_their_own(seed):
    def epoch(seed, number):
        return [EpochOrder(30, seed)(number * 30 + at)[1] for at in range(30)]

    assert epoch(seed, 0) != epoch(seed, 1)
    assert epoch(seed, 0) != epoch(seed + 1, 0)


def test_without_shuffling_items_come_in_their_own_order():
    order = EpochOrder(3, shuffle=False)
    assert [order(position) for position in range(5)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert order.num_positions(4) == 12


def test_the_order_never_changes_between_releases():
    pinned = [0, 4, 7, 1, 5, 6, 3, 2, 0, 6, 2, 1, 3, 7, 4, 5]
    # A run resumed by a later release must continue with the same items. numpy promises this stream (NEP 19).
    assert [EpochOrder(8, seed=3)(position)[1] for position in range(16)] == pinned


def test_empty_data_and_negative_positions_are_refused():
    with pytest.raises(DataError, match="at least one item: got 0"):
        EpochOrder(0)
    with pytest.raises(IndexError, match="got -1"):
        EpochOrder(4)(-1)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt"])
def test_variables_that_are_set_for_each_conversation_are_refused(name):
    with pytest.raises(ConfigError, match=rf"data\.template_options: {name} has no effect"):
        DataConfig(path="x", template_options={name: False})
