"""The bytes of a broadcast over TCP streams of our own: straight from the sender's tensors into each receiver's.

gloo moves bytes as fast as a plain connection, but only from and into one stretch of memory, so that each side would
copy them once more, and one at a time. The group itself says where to connect, with a token, and what became of it all.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from offbeat_mesh import current_world
from offbeat_types import DeadlineError, WeightProof, WeightSyncError
from offbeat_weightsync._addresses import new_address
from offbeat_weightsync._connections import was_heard
from offbeat_weightsync._courier import GRACE_S
from offbeat_weightsync._group_talk import GroupTalk, Terms, apart, one_line
from offbeat_weightsync._peer_stream import PeerStream
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._receiver import receive
from offbeat_weightsync._tcp_sender import TcpSender


class GroupStreams:
    """The sender.

    Args:
        talk: of the group.
        plan: of the tensors.
    """

    def __init__(self, talk: GroupTalk, plan: BucketPlan) -> None:
        self._talk, self._plan = talk, plan
        self._name = f"rank {talk.group.ranks[talk.group.rank]}"

    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> list[WeightProof]:
        """Send to all receivers, and return what each has proved, by group rank; raises as `broadcast_weights`."""
        talk, failure = self._talk, None
        proofs: list[WeightProof] = []
        with self._listen() as sender:
            apart(lambda: talk.offer(Terms(self._plan, address=sender.address)))
            try:
                if talk.group.size > 1:
                    proofs = sender.send(tensors, talk.version, talk.group.size - 1, deadline_s=talk.left_s())
            except BaseException as error:  # noqa: BLE001 - raised on all ranks
                failure = error
        _agree_on_end(talk, failure)
        return proofs  # all are equal

    def _listen(self) -> TcpSender:
        """Where the receivers are to connect; if that cannot be, they hear so."""
        try:
            return TcpSender(new_address(own_host()), self._plan, name=self._name)
        except BaseException as error:
            failure = error
            apart(lambda: self._talk.decline(failure))
            raise


@contextmanager
def receive_by_streams(talk: GroupTalk, terms: Terms) -> Iterator[PeerStream]:
    """A receiver; raises as `receive_broadcast`."""
    failure: BaseException | None = None
    name = f"rank {talk.group.ranks[talk.group.rank]}"
    try:
        with receive(terms.address, talk.version, talk.left_s(), name=name) as stream:
            yield stream
    except BaseException as error:  # noqa: BLE001 - raised on all ranks
        failure = error
    _agree_on_end(talk, failure)


def own_host() -> str:
    """The address under which other ranks reach this one."""
    world = current_world()
    return "127.0.0.1" if world is None else world.host


def _agree_on_end(talk: GroupTalk, failure: BaseException | None) -> None:
    """Raise on all ranks unless all have come to a good end. Who has only heard of a failure names nobody itself.

    A sync that missed its deadline has no time left to say so, and needs some: else this would fail too, name nobody
    who was waited for, and end the group.
    """
    text = None if failure is None or was_heard(failure) else one_line(failure)
    try:
        ends = apart(lambda: talk.gather(text, grace_s=GRACE_S))
    except DeadlineError as error:
        if failure is None:
            raise
        raise failure from error
    for rank, said in zip(talk.group.ranks, ends, strict=True):
        if said is not None:
            raise failure if failure and text else WeightSyncError(f"rank {rank} gave up: {said}")
    if failure is not None:
        raise failure
