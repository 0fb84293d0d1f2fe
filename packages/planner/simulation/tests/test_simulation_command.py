"""The command line, in a process of its own where that is the point."""

import html.parser
import json
import subprocess
import sys

import pytest

from offbeat_simulation._command import _COMMANDS, main

SMALL = ["--async.mini_batch_size", "8", "--work.num_syncs", "6", "--machines.rollout=2", "--machines.trainer", "2"]


def test_the_table_has_a_row_for_each_threshold(capsys):
    assert main(["simulate", *SMALL, "--sigmas", "0,0.5,1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 accelerators train, 2 generate (2 engines of 1)")
    assert lines[1].split()[:3] == ["sigma", "mode", "s/sync"]
    assert [line.split()[0] for line in lines[2:6]] == ["0", "0.5", "1", "colocated"]
    assert len({len(line) for line in lines[1:6]}) == 1
    assert "where the time goes, sigma 1:" in lines
    assert lines[-1].startswith("- ")


def test_json_holds_the_same_runs(capsys):
    assert main(["simulate", *SMALL, "--async.partial_rollout", "true", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (run,) = printed["runs"]
    assert run["mode"] == "partial"
    assert run["trained"] == printed["colocated"]["trained"] == 48
    assert run["speedup"] == pytest.approx(run["groups_per_s"] / printed["colocated"]["groups_per_s"])
    assert run["advice"]


def test_the_chart_is_one_page_that_loads_nothing(tmp_path, capsys):
    page = tmp_path / "chart.html"
    assert main(["simulate", *SMALL, "--sigmas", "0,0.5", "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    tags = []
    reader = html.parser.HTMLParser()
    reader.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))
    reader.feed(text)
    assert sum(tag == "svg" for tag, _ in tags) == 3
    assert not [tag for tag, attributes in tags if {"src", "href"} & attributes.keys()]
    assert "http" not in text
    widths = [float(attributes["width"]) for tag, attributes in tags if tag == "rect"]
    assert all(0 < width <= 560.1 for width in widths)


def test_propose_prints_what_to_change(capsys):
    assert main(["propose", *SMALL, "--trainer.group_s", "60", "--machines.rollout", "6"]) == 0
    out = capsys.readouterr().out
    assert "--machines.trainer" in out
    assert main(["propose", *SMALL, "--json", "--max-groups-behind", "8"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["groups_behind"] <= 8


def test_keys_explains_every_key(capsys):
    assert main(["keys"]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("[machines]", "per_engine = 1", "[[colocated]]"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--sigmas", "0,x"], "--sigmas: numbers required"),
        (["--sigmas", "0.01"], "has no effect"),
        (["--async.on_exceed", "drop"], "set max_version_lag"),
        (["--engines.decode_curve", "5:x"], "decode curve"),
        (["--lengths.file", "absent.txt"], "absent.txt: No such file"),
        (["--machines.rolout", "4"], "--machines.rolout, [machines] has no option 'rolout'; did you mean rollout?"),
        (["--machinery.rollout", "4"], "no section of a scenario; did you mean machines?"),
        (["--machines.rollout", "0"], "option rollout must be a number >= 1, got 0"),
        (["--trainer.step_s", "nan"], "option step_s must be a finite number"),
        (["--work.filtered_share", "1.5"], "option filtered_share must be a number >= 0 and <= 1"),
        (["--work.filtered_share", "1"], "leaves nothing to train"),
        (["--work.seed"], "--work.seed: needs a value"),
        (["absent.toml"], "absent.toml: No such file"),
        (["--recipe", "absent.toml"], "absent.toml: No such file"),
        (["--html", "absent/chart.html"], "--html absent/chart.html: No such file"),
    ],
)
def test_bad_input_gives_one_line_and_a_nonzero_exit_code(arguments, text, capsys):
    assert main(["simulate", *SMALL, *arguments]) > 0
    errors = capsys.readouterr().err
    assert errors.startswith("offbeat-simulation: ")
    assert text in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("arguments", [["simulate", "--stale", "1"], ["measure", "run", "--work.seed", "1"], []])
def test_an_unknown_option_exits_2(arguments):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2


def test_a_reader_that_leaves_early_is_no_error():
    line = [sys.executable, "-m", "offbeat_simulation._command", "keys"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_ctrl_c_ends_it_without_a_traceback(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setitem(_COMMANDS, "keys", interrupt)
    assert main(["keys"]) == 130
    assert capsys.readouterr().err == ""


def test_the_package_loads_nothing_heavy():
    code = "import sys, offbeat_simulation; print(sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
