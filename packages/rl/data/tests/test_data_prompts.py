import json

import numpy as np
import pytest

from offbeat_core import ConfigError, DataError, ModelError
from offbeat_data import DataConfig, RowCounts, load_prompts, load_tokenizer

ROWS: list[dict[str, object]] = [
    {"prompt": "What is the sum?", "answer": "12", "level": 1},
    {"prompt": "And the product, then?", "answer": 35, "level": 2},
]


def _load(tokenizer, path, **settings):
    return load_prompts(DataConfig(path=path, **settings), tokenizer)


def test_a_text_becomes_a_chat_when_there_is_a_template(make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer("chatml")
    prompts = _load(tokenizer, write_jsonl(ROWS), system_prompt="You are terse.")
    first = prompts.train[0]
    assert first.text == (
        "<|im_start|>system\nYou are terse.<|im_end|>\n"
        "<|im_start|>user\nWhat is the sum?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert first.ids.dtype == np.int32
    assert tokenizer.decode(first.ids, skip_special_tokens=False) == first.text
    assert [prompt.index for prompt in prompts.train] == [0, 1]
    assert [prompt.answer for prompt in prompts.train] == ["12", "35"]
    assert first.fields == ROWS[0]
    assert prompts.eval == ()
    assert prompts.template == tokenizer.template_file != ""
    assert _load(tokenizer, write_jsonl(ROWS), chat_template="off").template == ""


@pytest.mark.parametrize(
    ("column", "row", "shown"),
    [
        ("solution", {"solution": "12", "answer": "a draft"}, {"answer": "a draft"}),
        ("judge.truth", {"judge": {"truth": "12", "style": "rule"}}, {"judge": {"style": "rule"}}),
        ("judge.truth", {"judge.truth": "12", "judge": {"truth": "another"}}, {"judge": {"truth": "another"}}),
    ],
)
def test_whoever_answers_gets_the_row_without_the_answer_of_its_source(column, row, shown, make_tokenizer, write_jsonl):
    asked = {"prompt": "What?"}
    [prompt] = _load(make_tokenizer(None), write_jsonl([{**asked, **row}]), answer_column=column).train
    assert prompt.answer == "12"
    assert prompt.fields_to_answer == {**asked, **shown}
    assert prompt.fields == {**asked, **row}, "rewards read all of it"


def test_bos_comes_once_whoever_writes_it(make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer("llama3")
    for template in ("on", "off"):
        ids = _load(tokenizer, write_jsonl(ROWS), chat_template=template).train[0].ids
        assert tokenizer.decode(ids[:1], skip_special_tokens=False) == tokenizer.special_tokens["bos_token"]
        assert np.count_nonzero(ids == ids[0]) == 1


@pytest.mark.parametrize(("template", "setting"), [(None, "auto"), ("chatml", "off")])
def test_without_a_template_the_text_stays_as_it_is(template, setting, make_tokenizer, write_jsonl):
    prompts = _load(make_tokenizer(template), write_jsonl(ROWS), chat_template=setting)
    assert prompts.train[0].text == "What is the sum?"


def test_a_prompt_may_be_chat_messages_beside_plain_ones(make_tokenizer, write_jsonl):
    chat = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hello", "name": None}]
    rows = [ROWS[0], {"prompt": chat, "answer": "x"}]
    prompts = _load(make_tokenizer("chatml"), write_jsonl(rows), system_prompt="You are terse.")
    assert "Be kind" in prompts.train[1].text
    assert "terse" not in prompts.train[1].text
    with pytest.raises(DataError, match=r"row 2: the prompt is a list of chat messages"):
        _load(make_tokenizer("chatml"), write_jsonl(rows), chat_template="off")


def test_template_options_reach_the_template(make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer("forgetful")
    plain = _load(tokenizer, write_jsonl(ROWS)).train[0].text
    quiet = _load(tokenizer, write_jsonl(ROWS), template_options={"enable_thinking": False}).train[0].text
    assert quiet == plain + "<think>\n\n</think>\n\n"


def test_long_prompts_are_left_out_and_counted(make_tokenizer, write_jsonl):
    rows = [ROWS[0], {"prompt": "the sum " * 90, "answer": "1"}, ROWS[1]]
    prompts = _load(make_tokenizer(None), write_jsonl(rows), max_prompt_tokens=30)
    assert [prompt.answer for prompt in prompts.train] == ["12", "35"]
    assert [prompt.index for prompt in prompts.train] == [0, 1]
    counts = prompts.train_counts
    assert (counts.read, counts.too_long, counts.kept) == (3, 1, 2)
    assert counts.longest > 30
    assert prompts.eval_counts == RowCounts()


def test_a_prompt_of_exactly_the_longest_length_is_kept(make_tokenizer, write_jsonl):
    tokenizer, path = make_tokenizer(None), write_jsonl(ROWS)
    longest = max(len(prompt.ids) for prompt in _load(tokenizer, path).train)
    assert [len(_load(tokenizer, path, max_prompt_tokens=longest - short).train) for short in (0, 1)] == [2, 1]


def test_when_every_prompt_is_too_long_lengths_and_limit_are_named(make_tokenizer, write_jsonl):
    tokenizer, path = make_tokenizer(None), write_jsonl(ROWS)
    lengths = [len(prompt.ids) for prompt in _load(tokenizer, path).train]
    message = f"they have {min(lengths)} to {max(lengths)} tokens and data.max_prompt_tokens is 2"
    with pytest.raises(DataError, match=message):
        _load(tokenizer, path, max_prompt_tokens=2)


def test_a_missing_column_names_the_nearest(make_tokenizer, write_jsonl):
    path = write_jsonl([{"promt": "x", "level": 2, "solution": "y"}])
    with pytest.raises(DataError, match=r"row 1: no column 'prompt', it has promt.*data.prompt_column.*perhaps promt"):
        _load(make_tokenizer(None), path)
    with pytest.raises(DataError, match=r"no column 'answer', it has .*data.answer_column"):
        _load(make_tokenizer(None), path, prompt_column="promt")
    mapped = _load(make_tokenizer(None), path, prompt_column="promt", answer_column="solution")
    assert mapped.train[0].answer == "y"


def test_answers_may_be_missing_when_no_reward_needs_them(make_tokenizer, write_jsonl):
    config = DataConfig(path=write_jsonl([{"prompt": "x"}]))
    assert load_prompts(config, make_tokenizer(None), needs_answer=False).train[0].answer is None


def test_fields_are_plain_json(make_tokenizer, tmp_path):
    import datetime

    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {"prompt": "x", "answer": 1.5, "when": datetime.date(2026, 11, 21), "raw": b"abc", "tags": [{"a": None}]}
    row["score"] = float("nan")
    path = f"{tmp_path}/d.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    [prompt] = _load(make_tokenizer(None), path).train
    assert json.loads(json.dumps(prompt.fields)) == prompt.fields
    assert prompt.fields["when"] == "2026-11-21"
    assert prompt.fields["tags"] == [{"a": None}]
    assert prompt.fields["score"] is None
    assert prompt.answer == "1.5"


@pytest.mark.parametrize(("given", "answer"), [("[1, 2]", "[1, 2]"), ("18", "18"), ('{"a": NaN}', '{"a": NaN}')])
def test_an_answer_that_is_no_text_is_its_json(given, answer, make_tokenizer, tmp_path):
    (tmp_path / "d.jsonl").write_text(f'{{"prompt": "x", "answer": {given}}}\n')
    [prompt] = _load(make_tokenizer(None), str(tmp_path / "d.jsonl")).train
    assert prompt.answer == answer
    (tmp_path / "d.jsonl").write_text('{"prompt": "x", "answer": NaN}\n')
    with pytest.raises(DataError, match=r"'answer' .* is null; fill it in or drop the row"):
        _load(make_tokenizer(None), str(tmp_path / "d.jsonl"))


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only users here') }}",
        "{{ messages | length / 0 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_conversation_the_template_refuses_is_named_by_row(template, copied_folder, write_jsonl):
    refuses = f"{{% if 'product' in messages[0].content %}}{template}{{% endif %}}x"
    folder = copied_folder(None, {"chat_template.jinja": refuses})
    with pytest.raises(DataError, match=r"rows.jsonl, row 2: the chat template refuses a conversation"):
        _load(load_tokenizer(folder), write_jsonl(ROWS))


def _asked(role, content):
    return {"prompt": [{"role": role, "content": content}], "answer": "1"}


def test_roles_and_answers_that_do_not_belong_into_prompts_are_noticed(make_tokenizer, write_jsonl):
    answered = {"prompt": [*_asked("user", "Sum?")["prompt"], {"role": "assistant", "content": "12"}], "answer": "12"}
    [roles, ends] = load_prompts(
        DataConfig(path=write_jsonl([_asked("human", "Sum?"), answered])), make_tokenizer("chatml")
    ).notices
    assert roles.startswith("messages of unusual roles: 1 of 'human'; most chat templates know")
    assert ends.startswith("1 of 2 prompts end with a message of the assistant (first: ")
    assert "rows.jsonl, row 2" in ends


def test_a_template_that_leaves_out_the_question_is_noticed(copied_folder, write_jsonl):
    folder = copied_folder(None, {"chat_template.jinja": "{% for m in messages %}{{ m.role }}{% endfor %}"})
    [notice] = load_prompts(DataConfig(path=write_jsonl(ROWS)), load_tokenizer(folder)).notices
    assert notice.startswith(f"all {len(ROWS)} prompts are the same text once the chat template has rendered them, and")
    assert load_prompts(DataConfig(path=write_jsonl(2 * ROWS[:1])), load_tokenizer(folder)).notices == ()


NO_PROMPT = r"row 1: column 'prompt' .data.prompt_column. must be text or chat messages, a list of at least one, got "
HELD_OUT = {"eval_size": 1}  # what is broken is said, and not that all rows ask the same
NULL = r"row 3: column 'answer' .data.answer_column. is null"
NO_EFFECT = "no effect without a chat template"
REFUSED = [
    ("chatml", 2 * [{"prompt": 5, "answer": "1"}], HELD_OUT, DataError, NO_PROMPT + "the number 5"),
    ("chatml", 2 * [{"prompt": [], "answer": "1"}], HELD_OUT, DataError, NO_PROMPT + "an empty list"),
    ("chatml", 2 * [{"prompt": True, "answer": "1"}], HELD_OUT, DataError, NO_PROMPT + "true"),
    (
        "chatml",
        2 * [{"prompt": _asked("user", "x")["prompt"][0], "answer": "1"}],
        HELD_OUT,
        DataError,
        NO_PROMPT + "the object .*; put the message into a list",
    ),
    ("chatml", 2 * [_asked("user", None)], HELD_OUT, DataError, "row 1: the content of a message of 'user' is null"),
    ("chatml", 2 * [_asked("user", 5)], HELD_OUT, DataError, "row 1: the content of a chat message must be text"),
    (None, [ROWS[0], {"prompt": "", "answer": "1"}], {}, DataError, "row 2: the prompt is empty"),
    (
        None,
        [*ROWS, {"prompt": "x", "answer": None}],
        {},
        DataError,
        NULL,
    ),
    (None, ROWS, {"chat_template": "on"}, ModelError, "has no chat template"),
    ("chatml", ROWS, {"chat_template": "off", "system_prompt": "x"}, ConfigError, NO_EFFECT),
    ("chatml", ROWS, {"chat_template": "off", "template_options": {"a": False}}, ConfigError, NO_EFFECT),
]


@pytest.mark.parametrize(("template", "rows", "settings", "error", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_prompt_or_has_no_effect_is_named(
    template, rows, settings, error, message, make_tokenizer, write_jsonl
):
    with pytest.raises(error, match=message):
        _load(make_tokenizer(template), write_jsonl(rows), **settings)
