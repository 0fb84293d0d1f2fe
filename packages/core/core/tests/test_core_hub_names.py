"""A missing path that is an address, a pattern or a list is answered with what to write."""

import pytest

from offbeat_core import ConfigError, path_advice, user_path


@pytest.mark.parametrize("path", ["", "smollm2", "/models/a", "~/models/a", "./a", "../a", "a/b/c", "a/", "a b/c"])
def test_other_paths_give_nothing(path):
    assert path_advice(path) == ""


@pytest.mark.parametrize(
    "path", ["hf://datasets/openai/gsm8k", "https:/huggingface.co/datasets/openai/gsm8k/tree/main"]
)
def test_an_address_of_the_hub_gives_the_name(path):
    assert path_advice(path) == "give its name on the Hub alone: openai/gsm8k"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("s3://bucket/rows.jsonl", "addresses are not fetched: download it and give the path"),
        ("s3:/bucket/rows.jsonl", "addresses are not fetched"),
        ("https://example.org/a/b", "addresses are not fetched"),
        ("file:///data/rows.jsonl", "give the path alone: /data/rows.jsonl"),
        ("$HOME/models/a", "variables are written in braces here: ${HOME} in place of $HOME"),
        ("data/*.jsonl", "a pattern is not read: give one path, or a folder of the files"),
        ("a.jsonl,b.jsonl", "a list is not read: give one path, or a folder of the files"),
    ],
)
def test_what_is_no_path_is_answered_with_what_to_write(path, said):
    assert path_advice(path, is_dataset=True).startswith(said)


def test_the_home_of_an_unknown_user_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/models/a") == tmp_path / "models" / "a"
    with pytest.raises(ConfigError, match=r"~no-such-user/a: there is no home folder of ~no-such-user here; write the"):
        user_path("~no-such-user/a")
