"""Progress shows the same facts in a terminal and in a log."""

import io

import pytest
from rich.console import Console

from offbeat_run import Progress, duration_text, print_before_after
from offbeat_run._progress import _SHOWN
from offbeat_types import Metric


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


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
