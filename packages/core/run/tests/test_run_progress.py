"""Progress shows the same facts in a terminal and in a log."""

import io
import re

import pytest
from rich.console import Console

from offbeat_core import Metric
from offbeat_run import Estimate, Progress, duration_text
from offbeat_run._log.progress import _SHOWN, print_before_after, print_facts


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def seen(out):
    """Lines of a terminal's output, without what moves its cursor."""
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", line).strip() for line in out.getvalue().split("\n")]


def test_without_a_terminal_plain_lines_come_every_few_seconds_and_at_the_end():
    out, clock = io.StringIO(), Clock()
    with Progress(10, console=Console(file=out, width=40), every_s=5, clock=clock) as progress:
        for step in range(1, 11):
            clock.now_s += 2.0
            numbers = {"train/reward": Metric(value=step / 10), "async/trainer_idle_share": 0.25, "unknown": 1.0}
            progress.update(step, numbers)
        progress.message("[bold]done[/bold]")
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == [f"updates {n}/10" for n in (1, 4, 7, 10)]
    assert lines[1] == "updates 4/10  reward 0.400  trainer idle 25%  left 12 s"
    assert "left" not in lines[-2]
    assert lines[-1] == "[bold]done[/bold]"
    assert "unknown" not in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_in_a_terminal_a_panel_shows_bar_numbers_and_time_left():
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    numbers = {
        "train/reward": 0.5, "train/lag_mean": 1.25, "async/trainer_idle_share": 0.2,
        "async/rollout_idle_share": 0.1, "perf/tokens_per_s": 12345.6,
    }  # fmt: skip
    with Progress(100, start=10, console=console, clock=clock) as progress:
        clock.now_s = 30.0
        progress.update(20, numbers)
    text = out.getvalue()
    facts = ("reward 0.500", "lag 1.25", "trainer idle 20%", "rollout idle 10%", "tokens/s 12,346", "left 4 min 00 s")
    for fact in ("updates 20/100", "━", *facts):
        assert fact in text


@pytest.mark.parametrize("width", [80, 130])
def test_a_narrow_terminal_shows_what_matters_and_cuts_nothing(width):
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=width, color_system=None)
    with Progress(200, console=console, clock=clock) as progress:
        clock.now_s = 30.0
        progress.update(20, dict.fromkeys(_SHOWN, 0.25))
    assert "…" not in out.getvalue()
    *_, facts, _ = out.getvalue().splitlines()
    assert len(facts) <= width
    assert all(fact in facts for fact in ("reward 0.250", "held-out accuracy 0.250", "left 4 min 30 s"))


def test_a_terminal_keeps_a_history_of_updates_and_every_validation_above_the_bar():
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    with Progress(200, console=console, clock=clock) as progress:
        for step in range(1, 201):
            clock.now_s += 3.0
            progress.update(step, {"train/reward": step / 200, "train/loss": 0.1, "perf/tokens_per_s": 1234.0})
            if step == 15:
                progress.update(12, {"eval/accuracy": 0.5, "eval/reward": 0.5, "train/reward": 0.1})
    kept = [line for line in seen(out) if line.startswith("update ")]
    assert [int(line.split()[1]) for line in kept] == [10, 12, *range(20, 201, 10)]
    assert kept[0] == "update  10   reward 0.050   loss 0.1000   tokens/s 1,234"
    assert kept[1] == "update  12   reward 0.100   held-out accuracy 0.500   held-out reward 0.500"
    assert all(len(line) <= 80 for line in seen(out))


def test_no_line_of_a_terminal_breaks_within_a_word():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    words = [f"word{n}" * 2 for n in range(40)]
    with Progress(10, console=console) as progress:
        progress.message(" ".join(words))
    said = " ".join(seen(out)).split()
    assert all(word in said for word in words)


def test_what_a_shell_says_of_a_killed_run_does_not_stand_in_its_numbers():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    progress = Progress(10, console=console)
    progress.__enter__()
    progress.update(1, {"train/reward": 0.5})
    last = seen(out)[-1]
    progress.__exit__()
    assert last == "", "the cursor waits on an empty line"


def test_idle_engines_are_no_news_once_there_is_nothing_left_to_sample():
    out = io.StringIO()
    idle = {"train/reward": 0.5, "async/rollout_idle_share": 1.0, "async/trainer_idle_share": 0.1}
    with Progress(2, console=Console(file=out, width=200), every_s=0) as progress:
        progress.update(1, idle)
        progress.update(2, idle)
    first, last = out.getvalue().splitlines()
    assert "rollout idle 100%" in first
    assert last == "updates 2/2  reward 0.500"
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    with Progress(9, console=console) as progress:  # ends early
        progress.update(2, idle)
    assert "idle" not in out.getvalue().splitlines()[-2]


def test_the_time_left_follows_the_pace_of_the_last_updates_and_of_this_session_only():
    clock = Clock()
    progress = Progress(1000, start=500, console=Console(file=io.StringIO()), clock=clock)
    assert progress.left_s() is None
    for step in range(501, 601):
        clock.now_s += 10.0 if step < 540 else 1.0
        progress.update(step, {})
    progress.update(570, {"eval/reward": 0.5})  # a validation that has run beside the updates after it
    assert progress.left_s() == pytest.approx(400.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")]
)
def test_durations_read_well(seconds, text):
    assert duration_text(seconds) == text


def test_a_table_of_before_and_after_shows_the_change():
    out = io.StringIO()
    rows = [("accuracy", 0.45, 0.93), ("tokens/s", 1200.0, 3400.0), ("[red]", 1.0, 2.0)]
    print_before_after(rows, title="quickstart", console=Console(file=out, width=80))
    text = out.getvalue()
    for part in ("quickstart", "0.450", "0.930", "+0.480", "1,200", "3,400", "[red]"):
        assert part in text


@pytest.mark.parametrize("is_terminal", [False, True])
def test_words_of_a_model_do_not_reach_the_terminal_as_commands(is_terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=200, color_system=None)
    with Progress(10, console=console) as progress:
        progress.message("agent said: \x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\rdone")
    assert r"agent said: \x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\rdone" in out.getvalue()
    assert "\x07" not in out.getvalue()
    assert "\x1b]0" not in out.getvalue()
    print_before_after([("ro\x1b[2Jw", 0.0, 1.0)], console=console)
    assert "\x1b[2J" not in out.getvalue()


def test_a_table_of_estimates_shows_their_intervals_in_a_narrow_terminal():
    out = io.StringIO()
    before, after = (
        Estimate(value=value, low=value - 0.24, high=value + 0.24, num_items=16) for value in (0.688, 0.375)
    )
    rows = [("held-out accuracy", before, after), ("held-out response tokens", 20.0, 30.5)]
    print_before_after(rows, title="held-out prompts (16 items)", console=Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert lines[2].split("  ")[0] == "held-out accuracy"
    assert lines[2].split()[2:] == ["0.688", "0.375", "-0.313", "±", "0.339"]
    assert lines[3].split() == ["(0.448", "to", "0.928)", "(0.135", "to", "0.615)"]
    assert lines[4].split() == ["held-out", "response", "tokens", "20.0", "30.5", "+10.5"]
    assert all(len(line) <= 80 for line in lines)
    out = io.StringIO()
    print_before_after(rows, console=Console(file=out, width=100))
    assert "0.688 (0.448 to 0.928)  0.375 (0.135 to 0.615)  -0.313 ± 0.339" in out.getvalue()


def test_facts_stand_side_by_side_and_none_is_broken():
    out = io.StringIO()
    facts = [(f"name {n}", f"{n} min 05 s") for n in range(12)]
    print_facts(facts, console=Console(file=out, width=60))
    lines = out.getvalue().splitlines()
    assert len(lines) > 1
    assert all(len(line) <= 60 for line in lines)
    assert [fact for line in lines for fact in line.split("   ")] == [" ".join(fact) for fact in facts]
