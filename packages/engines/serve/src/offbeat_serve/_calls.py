"""Trajectories of recorded calls: a call that continues where another has ended is one more turn of it.

Whatever an agent does (asks again, tries two ways from one point, has sub-agents, rewrites its context), its calls make
trees: a call continues another if its prompt begins with the prompt and completion of that one. A path of calls is one
trajectory; where a path forks, the first child continues it and each other child begins a trajectory of its own,
whose prompt holds what the path had said. So every sampled token is in the loss once, in the context that it was
sampled in, and everywhere else it is read.

Legend: P prompt tokens.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from offbeat_core import Completion, Ids, Reply, Trajectory, TrajectoryEnd


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """One sample of one call.

    Args:
        prompt_ids: [P] int32, all that the model has read.
        completion: what it said, with log-probabilities and policy versions.
        is_as_asked: it is shorter than every limit: where its length has ended it, the agent asked for no more.
    """

    prompt_ids: Ids
    completion: Completion
    is_as_asked: bool = False

    @property
    def end_ids(self) -> Ids:
        """Return the tokens that the prompt of a call that continues this one begins with."""
        return np.concatenate([self.prompt_ids, self.completion.ids])


@dataclass(frozen=True, kw_only=True)
class RefusedCall:
    """A call that was not sampled, because a limit has ended the episode.

    Args:
        prompt_ids: [P] int32, all that the model would have read.
        ended: which limit that was.
    """

    prompt_ids: Ids
    ended: TrajectoryEnd


def trajectories_of(
    calls: Sequence[RecordedCall], decode: Callable[[Ids], str], refused: RefusedCall | None = None
) -> tuple[Trajectory, ...]:
    """Return the trajectories of an episode, in the order of their first calls.

    Args:
        calls: in the order in which they ended, each with at least one sampled token.
        decode: the text of what the model was given between two turns, for people.
        refused: the agent's last call, if a limit refused it: the trajectory that it would continue is not done; if
            it continues none, the one with the last recorded call is not.
    """
    chains: list[list[RecordedCall]] = []
    chain: list[RecordedCall] | None = None
    ends = _OpenEnds()
    for call in calls:
        chain = ends.take_before(call.prompt_ids)
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(call)
        ends.add(chain)
    cut = (ends.take_before(refused.prompt_ids) or chain) if refused else None
    return tuple(_trajectory(each, decode, refused if each is cut else None) for each in chains)


class _OpenEnds:
    """Chains that no call has continued yet, by a mark of all that was read and said in them."""

    def __init__(self) -> None:
        self._chains: defaultdict[int, list[list[RecordedCall]]] = defaultdict(list)

    def add(self, chain: list[RecordedCall]) -> None:
        self._chains[_prefix_marks(chain[-1].end_ids)[-1]].append(chain)

    def take_before(self, prompt_ids: Ids) -> list[RecordedCall] | None:
        """Return the longest that a prompt begins with; the earliest of several that are alike."""
        marks = _prefix_marks(prompt_ids)
        for length in range(len(prompt_ids), 0, -1):
            waiting = self._chains.get(marks[length], [])
            for chain in waiting:
                if np.array_equal(chain[-1].end_ids, prompt_ids[:length]):
                    waiting.remove(chain)
                    return chain
        return None


_BASE: Final = np.uint64(0x9E3779B97F4A7C15)


def _prefix_marks(ids: Ids) -> list[int]:
    """Return a number for each prefix of ids, [P + 1], the same for the same prefix of others.

    Two prefixes may have one number, which is rare. With it all prefixes of a prompt are found in time that grows
    with its length, and not with the number of calls.
    """
    powers = np.cumprod(np.full(len(ids), _BASE))  # modulo 2^64
    return [0, *np.cumsum((ids.astype(np.uint64) + np.uint64(1)) * powers).tolist()]


def _trajectory(chain: Sequence[RecordedCall], decode: Callable[[Ids], str], refused: RefusedCall | None) -> Trajectory:
    last = chain[-1]
    is_whole = last.is_as_asked or last.completion.stop_reason in ("eos", "stop")
    done: TrajectoryEnd = refused.ended if refused else "done"
    # A turn's last token is computed with the next one, which says the routes of all tokens before it too.
    starts = [0, *(len(call.end_ids) - 1 for call in chain[:-1])]
    return Trajectory(
        turns=tuple(call.completion.with_routes_since(start) for call, start in zip(chain, starts, strict=True)),
        replies=tuple(_replies(chain, decode)),
        ended=done if is_whole else "cut_off",
        prompt_ids=chain[0].prompt_ids,
    )


def _replies(chain: Sequence[RecordedCall], decode: Callable[[Ids], str]) -> Iterator[Reply]:
    """Yield what was read between two calls."""
    for before, after in pairwise(chain):
        ids = after.prompt_ids[len(before.end_ids) :]
        yield Reply(ids=ids, text=decode(ids))
