"""The command line, in a process of its own where that is the point."""

import json
import subprocess
import sys

import pytest

from offbeat_async_policy._cli import main

SMALL = ["simulate", "--num-groups", "64", "--mini-batch-size", "8", "--num-engines", "2", "--update-s", "20"]


def test_the_table_has_a_row_for_each_threshold(capsys):
    assert main([*SMALL, "--staleness-threshold", "0,0.5,1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[0].split()[:3] == ["sigma", "mode", "hours"]
    assert [line.split()[0] for line in lines[1:4]] == ["0", "0.5", "1"]
    assert lines[1].split()[6] == "1.00", "sigma 0 and K 1 is the baseline itself"
    assert len({len(line) for line in lines[:4]}) == 1


def test_json_holds_the_same_runs(capsys):
    assert main([*SMALL, "--staleness-threshold", "0.5", "--partial-rollout", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (run,) = printed["runs"]
    assert run["mode"] == "partial"
    assert run["trained"] == printed["synchronous"]["trained"] == 64
    assert run["speedup"] == pytest.approx(run["groups_per_s"] / printed["synchronous"]["groups_per_s"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--staleness-threshold", "0,x"], "--staleness-threshold: numbers required"),
        (["--staleness-threshold", "0.01"], "has no effect"),
        (["--on-exceed", "drop"], "set max_version_lag"),
        (["--decode-curve", "5"], "decode curve"),
        (["--lengths-file", "absent.txt"], "absent.txt: No such file"),
        (["--num-engines", "0"], "num_engines: required at least 1, got 0"),
        (["--update-s", "nan"], "update_s: required a finite number"),
        (["--filtered-share", "1.5"], "filtered_share: required a share"),
        (["--num-groups", "0"], "num_groups: required at least 1"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(arguments, text, capsys):
    assert main([*SMALL, *arguments]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("offbeat-async-policy: ")
    assert text in errors
    assert errors.count("\n") == 1


def test_an_unknown_option_exits_2():
    with pytest.raises(SystemExit) as left:
        main(["simulate", "--stale", "1", "--nonsense"])
    assert left.value.code == 2


def test_the_package_loads_nothing_heavy():
    code = (
        "import sys, offbeat_async_policy; print(sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
