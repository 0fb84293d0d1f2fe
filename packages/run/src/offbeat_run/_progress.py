"""Live progress: a panel in a terminal, plain lines everywhere else."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offbeat_run._config.secrets import hide_secrets
from offbeat_run._quantities import duration_text, number_text
from offbeat_types import Metric

if TYPE_CHECKING:  # rich is imported where it draws: processes that only log need none of it
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

_SHOWN = {
    "train/reward": ("reward", "{:.3f}"),
    "train/loss": ("loss", "{:.4f}"),
    "eval/accuracy": ("held-out accuracy", "{:.3f}"),
    "eval/reward": ("held-out reward", "{:.3f}"),
    "eval/loss": ("held-out loss", "{:.4f}"),
    "train/lag_mean": ("lag", "{:.2f}"),
    "mismatch/abs_p99_nats": ("mismatch p99 nats", "{:.2g}"),
    "async/trainer_idle_share": ("trainer idle", "{:.0%}"),
    "async/rollout_idle_share": ("rollout idle", "{:.0%}"),
    "perf/tokens_per_s": ("tokens/s", "{:,.0f}"),
    "train/response_tokens": ("response tokens", "{:.0f}"),
    "engines/restarts": ("engine restarts", "{:.0f}"),
}
_FIRST = ("left", "reward", "loss", "held-out accuracy", "held-out loss")
"""What a narrow terminal shows; the others as far as there is room."""
_RATE_WINDOW = 50


class Progress:
    """Shows how far a run is: updates done, reward, lag, idle shares, tokens/s, time left.

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

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(self._panel(), console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.update(self._panel())
            self._live.stop()
            self._live = None

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show the numbers of `step`; those not given keep their last value, those not known are left out."""
        for name, value in metrics.items():
            if name in _SHOWN and isinstance(value, Metric | int | float):
                self._values[name] = float(value.value if isinstance(value, Metric) else value)
        if step > self._step:  # a validation that went on beside training tells of an earlier one
            self._step = step
            self._marks.append((self._clock(), step))
        if self._live:
            self._live.update(self._panel())
        elif self._clock() - self._printed_s >= self._every_s or step >= self.total:
            self._printed_s = self._clock()
            self._print(self._line())

    def message(self, text: str) -> None:
        """Print a line above the progress."""
        self._print(text)

    def _print(self, text: str) -> None:
        from rich.text import Text

        # A plain line stays one line: a log must not be folded at 80 columns.
        self._console.print(Text(hide_secrets(text)), soft_wrap=True)

    def left_s(self) -> float | None:
        """Seconds to the end at the pace of the last updates, or None while that is not known."""
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        if last <= first or last_s <= first_s:
            return None
        return (self.total - self._step) * (last_s - first_s) / (last - first)

    def _facts(self) -> list[tuple[str, str]]:
        facts = [(name, form.format(self._values[key])) for key, (name, form) in _SHOWN.items() if key in self._values]
        left_s = self.left_s()
        return [*facts, ("left", duration_text(left_s))] if left_s is not None and self._step < self.total else facts

    def _fitting_facts(self) -> list[tuple[str, str]]:
        """Those that one line of the terminal has room for, the first of `_FIRST` first."""
        room, facts, chosen = self._console.width, self._facts(), set()
        for fact in sorted(facts, key=lambda each: _FIRST.index(each[0]) if each[0] in _FIRST else len(_FIRST)):
            width = len(" ".join(fact)) + 3
            if width <= room:
                chosen.add(fact)
                room -= width
        return [fact for fact in facts if fact in chosen]

    def _line(self) -> str:
        facts = "  ".join(f"{name} {value}" for name, value in self._facts())
        return f"updates {self._step}/{self.total}  {facts}".rstrip()

    def _panel(self) -> "Table":
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        head = Table.grid(padding=(0, 2), expand=False)
        head.add_row(
            Text(f"updates {self._step}/{self.total}", style="bold"),
            ProgressBar(total=max(self.total, 1), completed=min(self._step, self.total), width=40),
        )
        facts = Text()
        for name, value in self._fitting_facts():
            facts.append(f"{name} ", style="dim")
            facts.append(f"{value}   ")
        panel = Table.grid()
        panel.add_row(head)
        panel.add_row(facts)
        return panel


def print_before_after(
    rows: Sequence[tuple[str, float, float]], *, title: str = "", console: "Console | None" = None
) -> None:
    """Print a table of what changed.

    Args:
        rows: (name, before, after).
        title: over the table.
        console: where; standard output when None.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left")
    for name in ("", "before", "after", "change"):
        table.add_column(name, justify="left" if not name else "right")
    for name, before, after in rows:
        table.add_row(Text(name), number_text(before), number_text(after), f"{after - before:+.3f}")
    (console or _new_console()).print(table)


def _new_console() -> "Console":
    from rich.console import Console

    return Console()
