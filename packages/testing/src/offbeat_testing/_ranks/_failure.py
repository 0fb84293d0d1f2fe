"""What the ends of all ranks mean together, and the text that says so."""

import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from offbeat_testing._ranks._collectives import first_difference
from offbeat_testing._ranks._report import RankReport, RankState
from offbeat_testing._ranks._request import RanksRequest

PEER_IS_GONE: Final = ("gloo/transport/", "PeerFailedError: ")
PLACE: Final = re.compile(r"\S+:\d+: in ")


@dataclass(kw_only=True)
class RankEnd:
    """What the test's process knows of one rank."""

    rank: int
    process: int
    folder: Path
    report: RankReport | None = None
    state: RankState | None = None
    status: int | None = None
    was_killed: bool = False

    @property
    def is_there(self) -> bool:
        """Whether the process is still running, as far as we know."""
        return self.status is None

    @property
    def is_over(self) -> bool:
        """Whether the body has ended, or the process."""
        return self.report is not None or not self.is_there

    @property
    def died(self) -> bool:
        """Whether the process ended by itself and told nothing."""
        return self.report is None and self.status is not None and not self.was_killed

    @property
    def has_failed(self) -> bool:
        """Whether this end is a failure, expected or not."""
        return self.died or (self.report is not None and self.report.outcome in ("failed", "expected"))

    @property
    def last_state(self) -> RankState | None:
        """Where the rank stood last."""
        return self.report.state if self.report else self.state

    def output(self, what: str) -> str:
        """What the rank wrote to `stdout`, `stderr` or `stacks`."""
        path = self.folder / f"rank-{self.rank}.{what}"
        return path.read_text(errors="replace") if path.is_file() else ""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process."""
        with suppress(OSError):
            return Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def condition(self) -> str:
        """What can be said of a process that does not answer."""
        return "it is stopped (SIGSTOP)" if self.is_stopped else "it does not answer"


def give_verdict(request: RanksRequest, ends: list[RankEnd], *, why_ended: str) -> None:
    """Return if every rank passed; else skip, xfail or fail the test."""
    outcomes = {end.report.outcome for end in ends if end.report}
    if any(end.report is None for end in ends) or outcomes & {"failed", "expected"}:
        first = _by_time(ends)[0]
        if first.report and first.report.outcome == "expected" and not any(_failed_otherwise(end) for end in ends):
            pytest.xfail(f"rank {first.rank}: {first.report.text.strip().splitlines()[-1]}")
        pytest.fail(_failure_text(request, ends, why_ended), pytrace=False)
    if outcomes == {"skipped"}:
        pytest.skip(next(end.report.text for end in ends if end.report))
    if "skipped" in outcomes:
        skipped = [end.rank for end in ends if end.report and end.report.outcome == "skipped"]
        pytest.fail(f"ranks {skipped} skipped the test and the others ran it: skip on all ranks or on none", False)
    difference = first_difference(_states(ends)) if request.compare else None
    if difference:
        pytest.fail(f"every rank passed, but they did not call the same collectives\n{difference}", False)


def _states(ends: list[RankEnd]) -> dict[int, RankState]:
    return {end.rank: end.last_state for end in ends if end.last_state}


def _by_time(ends: list[RankEnd]) -> list[RankEnd]:
    """First causes first: a process that died tells no time, but nothing else explains it."""
    failed = [end for end in ends if end.has_failed]
    failed.sort(key=lambda end: (not end.died, end.report.at_s if end.report else 0.0))
    return failed + [end for end in ends if end.was_killed] + [end for end in ends if not end.is_over]


def _failure_text(request: RanksRequest, ends: list[RankEnd], why_ended: str) -> str:
    failed = [end for end in _by_time(ends) if end.has_failed]
    stuck = [end for end in ends if end.report is None and not end.died]
    passed = [end.rank for end in ends if end.report and end.report.outcome == "passed"]
    parts = [why_ended] if why_ended else []
    if failed:
        parts.append(f"rank {failed[0].rank} of {request.size} failed{' first' if len(failed) > 1 else ''}")
        parts.append(_end_text(failed[0]))
    if passed:
        parts.append(f"ranks {passed} came to the end of the test")
    difference = first_difference(_states(ends))
    if difference:
        parts.append(str(difference))
    parts += [_later_text(end) for end in failed[1:]]
    parts += [f"rank {end.rank} was still running and was killed; it was here:\n{_stack_text(end)}" for end in stuck]
    return "\n\n".join(part.rstrip() for part in parts)


def _end_text(end: RankEnd) -> str:
    if end.report:
        return end.report.text
    assert end.status is not None
    if end.status < 0:
        how = f"was killed by {signal.Signals(-end.status).name}"
    else:
        how = f"left with exit code {end.status} before the end of the test"
    return f"its process {how}\n{end.output('stacks')}"


def _failed_otherwise(end: RankEnd) -> bool:
    """Whether a rank failed in a way that neither the test expects nor a peer's end explains."""
    if not end.has_failed or (end.report and end.report.outcome == "expected"):
        return False
    return not _lost_a_peer(_end_text(end))


def _lost_a_peer(text: str) -> bool:
    return any(sign in text for sign in PEER_IS_GONE)


def _later_text(end: RankEnd) -> str:
    """One line where a peer's end explains it, else the whole of it."""
    text = _end_text(end)
    if not _lost_a_peer(text):
        return f"after that, rank {end.rank} failed\n{text}"
    places = [line.strip() for line in text.splitlines() if PLACE.match(line)]
    return f"after that, rank {end.rank} lost its connection to a peer, at {places[0] if places else 'start'}"


def _stack_text(end: RankEnd) -> str:
    return end.state.stacks if end.state else "(it gave no stacks)"
