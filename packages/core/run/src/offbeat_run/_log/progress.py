"""Live progress: a panel in a terminal, plain lines everywhere else."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from offbeat_core import Metric
from offbeat_run._console.printing import shown
from offbeat_run._console.quantities import duration_text
from offbeat_run._console.status import current_status
from offbeat_run._metrics.names import label_of
from offbeat_run._run_summary import change_text, estimate_text
from offbeat_run._validation.summary import Estimate

if TYPE_CHECKING:  # rich is imported where it draws: processes that only log need none of it
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

_SHOWN: Final = {
    "train/reward": "{:.3f}",
    "train/loss": "{:.4f}",
    "eval/accuracy": "{:.3f}",
    "eval/reward": "{:.3f}",
    "eval/loss": "{:.4f}",
    "train/lag_mean": "{:.2f}",
    "train/cut_off_share": "{:.0%}",
    "mismatch/abs_p99_nats": "{:.2g}",
    "async/trainer_idle_share": "{:.0%}",
    "async/rollout_idle_share": "{:.0%}",
    "perf/tokens_per_s": "{:,.0f}",
    "train/response_tokens": "{:.0f}",
    "engines/restarts": "{:.0f}",
}
"""Formats of the metrics, in the order of a line."""
_FIRST: Final = (
    "left",
    *map(label_of, ("train/reward", "train/loss", "eval/accuracy", "eval/loss", "perf/tokens_per_s")),
)
"""Columns that a narrow terminal shows; the others as far as there is room."""
_LIVE: Final = ("async/trainer_idle_share", "async/rollout_idle_share")
"""Shown only before the end of a run: in its last updates there is nothing left to sample, which is no fault."""
_HEAD: Final = ("", "before", "after", "change")
_RATE_WINDOW: Final = 50
_HISTORY_LINES: Final = 20
"""Updates of a run that stay above the bar of a terminal, besides every validation."""


class Progress:
    """Shows how far a run is: updates done, reward, lag, idle shares, tokens/s, time left.

    In a terminal a line stays above the bar for every twentieth of the run and for every validation.

    Args:
        total: updates of the whole run.
        start: updates done before, on resume.
        console: where; the terminal when None.
        every_s: time between lines where there is no terminal.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        console: "Console | None" = None,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self._step = total, start
        self._console = console or _new_console()
        self._every_s, self._clock = every_s, clock
        self._values: dict[str, float] = {}
        self._marks: deque[tuple[float, int]] = deque([(clock(), start)], maxlen=_RATE_WINDOW)
        self._printed_s = -float("inf")
        self._live: Live | None = None
        self._covering = contextlib.ExitStack()

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            from rich.live import Live

            if status := current_status():
                self._covering.enter_context(status.covered())
            self._live = Live(self._panel(), console=self._console, refresh_per_second=4)
            self._live.start(refresh=True)  # drawn by the other thread, it could be left behind above a first message
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.update(self._panel(is_over=True))
            self._live.stop()
            self._live = None
        self._covering.close()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show the numbers of `step`; those not given keep their last value, those not known are left out."""
        self._values |= {name: _number(value) for name, value in metrics.items() if name in _SHOWN}
        is_update = step > self._step
        if step > self._step:  # a validation that ran beside training is of an earlier one
            self._step = step
            self._marks.append((self._clock(), step))
        if self._live:
            if any(name.startswith("eval/") for name in metrics) or (is_update and self._stays(step)):
                self._print(self._history(step, metrics))
            self._live.update(self._panel())
        elif self._clock() - self._printed_s >= self._every_s or step >= self.total:
            self._printed_s = self._clock()
            self._print(self._line())

    def _stays(self, step: int) -> bool:
        return step % math.ceil(max(self.total, 1) / _HISTORY_LINES) == 0 or step >= self.total

    def _history(self, step: int, metrics: Mapping[str, Any]) -> str:
        """Return a line about one step, with as many of its numbers as the terminal has room for."""
        numbers = {name: _number(value) for name, value in metrics.items() if name in _SHOWN}
        head = f"update {step:{len(str(self.total))}}"
        facts = self._fitting([fact for fact in self._facts(numbers) if fact[0] != "left"], len(head) + 3)
        return "   ".join([head, *(f"{name} {value}" for name, value in facts)])

    def message(self, text: str) -> None:
        """Print a line above the progress."""
        self._print(text)

    def _print(self, text: str) -> None:
        from rich.text import Text

        # In a log a line stays one line; a terminal would break it in the middle of a word, and rich between words.
        self._console.print(Text(shown(text)), soft_wrap=not self._console.is_terminal)

    def left_s(self) -> float | None:
        """Seconds to the end at the pace of the last updates, or None while that is not known."""
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        if last <= first or last_s <= first_s:
            return None
        return (self.total - self._step) * (last_s - first_s) / (last - first)

    def _facts(self, numbers: Mapping[str, float], *, is_over: bool = False) -> list[tuple[str, str]]:
        left_out = _LIVE if is_over or self._step >= self.total else ()
        facts = [
            (label_of(name), form.format(numbers[name]))
            for name, form in _SHOWN.items()
            if name in numbers and name not in left_out
        ]
        left_s = self.left_s()
        return [*facts, ("left", duration_text(left_s))] if left_s is not None and self._step < self.total else facts

    def _fitting(self, facts: list[tuple[str, str]], taken: int = 0) -> list[tuple[str, str]]:
        """Return those that one line of the terminal has room for, the first of `_FIRST` first."""
        room, chosen = self._console.width - taken, set()
        for fact in sorted(facts, key=lambda each: _FIRST.index(each[0]) if each[0] in _FIRST else len(_FIRST)):
            width = len(" ".join(fact)) + 3
            if width <= room:
                chosen.add(fact)
                room -= width
        return [fact for fact in facts if fact in chosen]

    def _line(self) -> str:
        facts = "  ".join(f"{name} {value}" for name, value in self._facts(self._values))
        return f"updates {self._step}/{self.total}  {facts}".rstrip()

    def _panel(self, *, is_over: bool = False) -> "Table":
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        head = Table.grid(padding=(0, 2), expand=False)
        head.add_row(
            Text(f"updates {self._step}/{self.total}", style="bold"),
            ProgressBar(total=max(self.total, 1), completed=min(self._step, self.total), width=40),
        )
        facts = Text()
        for name, value in self._fitting(self._facts(self._values, is_over=is_over)):
            facts.append(f"{name} ", style="dim")
            facts.append(f"{value}   ")
        panel = Table.grid()
        panel.add_row(head)
        panel.add_row(facts)
        if not is_over:
            if current_status():
                panel.add_row(_StatusRow())
            panel.add_row("")  # where the cursor waits: what a shell says of a killed process has a line of its own
        return panel


class _StatusRow:
    """Row that says what the command is doing when the panel is drawn."""

    def __rich__(self) -> "Text":
        from rich.text import Text

        status = current_status()
        return Text(status.text if status else "", style="dim", no_wrap=True, overflow="ellipsis")


def _number(value: Any) -> float:
    return float(value.value if isinstance(value, Metric) else value)


def print_facts(facts: Sequence[tuple[str, str]], *, console: "Console | None" = None) -> None:
    """Print (name, value) pairs side by side, on as many lines as they need; no pair is broken."""
    console = console or _new_console()
    line = ""
    for name, value in facts:
        fact = f"{name} {value}"
        if line and len(line) + 3 + len(fact) > console.width:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            line = ""
        line = f"{line}   {fact}" if line else fact
    if line:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_before_after(
    rows: Sequence[tuple[str, float | Estimate, float | Estimate]],
    *,
    title: str = "",
    console: "Console | None" = None,
) -> None:
    """Print a table of what changed, with the 95 % intervals of estimates.

    Args:
        rows: (name, before, after).
        title: over the table.
        console: where; standard output when None.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in _HEAD:
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    console, cells = console or _new_console(), [_cells(shown(name), *ends) for name, *ends in rows]
    width = sum(max(map(len, column)) for column in zip(*cells, strict=True)) + 2 * len(_HEAD)
    for name, *texts in cells:  # where there is no room for the intervals beside the values, they are below them
        table.add_row(*(Text(text.replace(" (", "\n(") if width > console.width else text) for text in (name, *texts)))
    console.print(table)


def _cells(name: str, before: float | Estimate, after: float | Estimate) -> tuple[str, str, str, str]:
    ends = _estimate(before), _estimate(after)
    return name, estimate_text(ends[0]), estimate_text(ends[1]), change_text(*ends)


def _estimate(value: float | Estimate) -> Estimate:
    return value if isinstance(value, Estimate) else Estimate(value=value, low=value, high=value, num_items=0)


def _new_console() -> "Console":
    from rich.console import Console

    return Console()
