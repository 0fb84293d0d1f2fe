"""The command `offbeat-serve`: what it is given and how it leaves; and the README's example."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat_serve import TOKEN_VARIABLE
from offbeat_serve.__main__ import main
from offbeat_testing import HubServer, read_terminal

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "model folder nowhere does not exist"),
        (["{model}", "--backend", "tourch"], "offbeat.rollout backend 'tourch' is not installed (installed adapters: "),
        (["{model}", "--host", "0.0.0.0"], "a server that can be reached from elsewhere needs a token"),
        (["{model}", "--port", "70000"], "--port must be a number >= 0 and <= 65535, got 70000"),
        (["{model}", "--max-in-flight", "10"], "must be at most max_in_flight: got 16 times 64, and 10"),
        (["{model}", "--dtype", "int3"], "--dtype must be one of float32"),
        (["{model}", "--options", '{"kv_cash": 1}', "--device", "cpu"], "rollout-torch has no option 'kv_cash'"),
        (["{model}", "--token-file", "nowhere"], "token file nowhere cannot be read"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(model, words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert main([word.format(model=model) if word.startswith("{m") else word for word in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("offbeat-serve: ")
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("text", ["{compile", "5", '["a"]'])
def test_options_that_are_no_object_are_refused_with_what_is_required(model, text, capsys):
    with pytest.raises(SystemExit) as left:
        main([str(model), "--options", text])
    assert left.value.code == 2
    assert f'argument --options: must be JSON, an object, such as {{"a": 1}}: got {text!r}' in capsys.readouterr().err


def test_a_name_that_the_hub_has_not_is_answered_in_one_line(capsys, monkeypatch, tmp_path):
    with HubServer() as hub:
        hub.use_in_this_process(monkeypatch, tmp_path)
        assert main(["Qwen/Qwen3-0.6B"]) == 2
    assert "offbeat-serve: Qwen/Qwen3-0.6B: there is no such model on the Hub" in capsys.readouterr().err


def test_an_engine_that_takes_too_long_to_load_is_exit_code_4(model, capsys):
    assert main([str(model), "--start-deadline-s", "1e-6", "--device", "cpu", "--port", "0"]) == 4
    assert "waited 1e-06 s for the torch engine to load" in capsys.readouterr().err


def test_a_token_cannot_be_given_on_the_command_line(model, capsys):
    with pytest.raises(SystemExit) as left:
        main([str(model), "--token", "secret"])
    assert left.value.code == 2


def test_help_tells_every_setting_with_its_unit(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    output = capsys.readouterr().out
    for option in ("--max-in-flight SAMPLES", "--body-deadline-s S", "--max-model-len TOKENS", "--token-file"):
        assert option in output
    assert "exit codes: 0 ended by Ctrl-C or SIGTERM" in re.sub(r"\s+", " ", output)


def readme_sources() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_s_example_runs(model, capsys):
    source, _ = readme_sources()
    exec(compile(source.replace("SmolLM2-135M-Instruct", str(model)), "README.md", "exec"), {"__name__": "readme"})
    output = capsys.readouterr().out
    assert re.search(r"policy 0 .* never tokenised again: True", output)


def test_in_a_terminal_the_command_says_that_it_is_loading(tmp_path):
    ours, theirs = pty.openpty()
    line = [sys.executable, "-m", "offbeat_serve", str(tmp_path / "nowhere")]
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=theirs, timeout=110)
    os.close(theirs)
    said = read_terminal(ours).splitlines()
    assert (done.returncode, done.stdout) == (2, b"")
    assert said[0] == f"offbeat-serve: loading {tmp_path}/nowhere ..."
    assert len(said) == 2
