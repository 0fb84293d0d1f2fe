"""A missing path that may be a name of the Hub comes with the line that fetches it."""

import pytest

from offbeat_core import ConfigError, download_advice, user_path


def test_a_name_of_a_model_or_of_a_data_set_gives_the_command():
    assert "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B` and give the folder" in download_advice(
        "Qwen/Qwen3-0.6B"
    )
    line = "`hf download openai/gsm8k --repo-type dataset --local-dir gsm8k`"
    assert line in download_advice("openai/gsm8k", is_dataset=True)


@pytest.mark.parametrize("path", ["", "smollm2", "/models/a", "~/models/a", "./a", "../a", "a/b/c", "a/", "a b/c"])
def test_other_paths_give_nothing(path):
    assert download_advice(path) == ""


def test_a_path_in_a_folder_that_is_there_is_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert download_advice("runs/lora")
    (tmp_path / "runs").mkdir()
    assert download_advice("runs/lora") == ""


@pytest.mark.parametrize(
    "path", ["hf://datasets/openai/gsm8k", "https:/huggingface.co/datasets/openai/gsm8k/tree/main"]
)
def test_an_address_of_the_hub_gives_the_command_too(path):
    assert "`hf download openai/gsm8k --repo-type dataset --local-dir gsm8k`" in download_advice(path, is_dataset=True)
    assert "`hf download Qwen/Qwen3 --local-dir Qwen3`" in download_advice("https://huggingface.co/Qwen/Qwen3")


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
    assert download_advice(path, is_dataset=True).startswith(said)


def test_the_home_of_an_unknown_user_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/models/a") == tmp_path / "models" / "a"
    with pytest.raises(ConfigError, match=r"~no-such-user/a: there is no home folder of ~no-such-user here; write the"):
        user_path("~no-such-user/a")
