"""A missing path that may be a name of the Hub comes with the line that fetches it."""

import pytest

from offbeat_types import download_advice


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
