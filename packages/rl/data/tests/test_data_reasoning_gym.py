import json

import pytest

from offbeat_core import ConfigError, DataError
from offbeat_data import DataConfig, Prompt, RewardConfig, build_reward, load_prompts
from offbeat_data._sources.rows import pack, unpack

REWARD = build_reward(RewardConfig(name="reasoning_gym"))


def _load(tokenizer, task, **settings):
    config = DataConfig(path=f"reasoning-gym:{task}", max_prompt_tokens=9000, **settings)
    return load_prompts(config, tokenizer).train


# arc_agi and rearc judge wrongly when tuples become lists; knights_knaves and countdown judge by metadata.
@pytest.mark.parametrize("task", ["chain_sum", "countdown", "knights_knaves", "arc_agi", "rearc", "shortest_path"])
def test_a_task_judges_its_own_answers_after_a_trip_through_json(task, make_tokenizer):
    for prompt in _load(make_tokenizer("chatml"), task, num_items=3, seed=5):
        travelled = Prompt(**{**vars(prompt), "fields": json.loads(json.dumps(prompt.fields))})
        assert prompt.answer is not None
        assert REWARD.score(travelled, prompt.answer).value == 1.0
        assert REWARD.score(travelled, "no idea at all").value < 1.0
        assert travelled.fields_to_answer.keys() == {"prompt"}, "the entry holds the answer"


def test_entries_come_back_exactly_as_they_were(make_tokenizer):
    import reasoning_gym

    for task in ("arc_agi", "graph_color", "rubiks_cube", "zebra_puzzles", "family_relationships"):
        entry = reasoning_gym.create_dataset(task, size=1, seed=2)[0]
        assert unpack(json.loads(json.dumps(pack(entry)))) == entry


def test_seed_and_task_options_choose_the_problems(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    options = {"min_terms": 2, "max_terms": 2, "max_digits": 1, "min_digits": 1}
    drawn = _load(tokenizer, "chain_sum", num_items=5, seed=3, task_options=options)
    again = _load(tokenizer, "chain_sum", num_items=5, seed=3, task_options=options)
    other = _load(tokenizer, "chain_sum", num_items=5, seed=9, task_options=options)
    assert [p.text for p in drawn] == [p.text for p in again] != [p.text for p in other]
    assert all(len(p.fields["reasoning_gym"]["entry"]["metadata"]["expression"]) == 5 for p in drawn)


def test_held_out_questions_are_not_trained_on(make_tokenizer):
    options = {"min_terms": 2, "max_terms": 2, "max_digits": 1, "min_digits": 1}  # few questions, often drawn twice
    config = DataConfig(path="reasoning-gym:chain_sum", num_items=200, eval_size=20, task_options=options)
    prompts = load_prompts(config, make_tokenizer("chatml"))
    assert len(prompts.eval) == 20
    assert 100 < len(prompts.train) < 200
    assert not {p.text for p in prompts.train} & {p.text for p in prompts.eval}


def test_an_answer_in_tags_is_judged_without_them(make_tokenizer):
    [prompt] = _load(make_tokenizer("chatml"), "chain_sum", num_items=1)
    reward = build_reward(RewardConfig(name="reasoning_gym", extract="tag"))
    assert reward.score(prompt, f"I think 7.<answer> {prompt.answer} </answer>").value == 1.0
    assert reward.score(prompt, str(prompt.answer)).value == 0.0


def test_an_unknown_task_names_the_nearest(make_tokenizer):
    with pytest.raises(ConfigError, match=r"no task 'chainsum'; nearest: chain_sum"):
        _load(make_tokenizer("chatml"), "chainsum")


@pytest.mark.parametrize("options", [{"colour": 3}, {"min_terms": 9, "max_terms": 2}])
def test_options_the_task_refuses_are_named(options, make_tokenizer):
    with pytest.raises(ConfigError, match=r"data.task_options: reasoning-gym:chain_sum refuses"):
        _load(make_tokenizer("chatml"), "chain_sum", task_options=options)


def test_other_prompts_are_refused():
    import numpy as np

    prompt = Prompt(index=0, ids=np.array([1], np.int32), text="x", answer="1")
    with pytest.raises(DataError, match=r"set data.path to reasoning-gym:TASK"):
        REWARD.score(prompt, "1")


# What the judges of these tasks raise on: int("no idea") and a JSON text where an object is expected.
@pytest.mark.parametrize(("task", "answer"), [("prime_factorization", "no idea"), ("boxnet", "[1, 2]")])
def test_an_answer_that_the_judge_stumbles_over_is_worth_nothing_and_counted(task, answer, make_tokenizer):
    [prompt] = _load(make_tokenizer("chatml"), task, num_items=1)
    score = REWARD.score(prompt, answer)
    assert (score.value, score.parts) == (0.0, {"reasoning_gym": 0.0, "unreadable": 1.0})


def test_an_answer_that_is_judged_is_not_counted_as_unreadable(make_tokenizer):
    [prompt] = _load(make_tokenizer("chatml"), "prime_factorization", num_items=1)
    assert REWARD.score(prompt, str(prompt.answer)).parts == {"reasoning_gym": 1.0, "unreadable": 0.0}
