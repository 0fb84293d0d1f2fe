"""What sender and receivers of one sync say to each other. The weights themselves go another way: in lanes.

    receiver                         sender
    Join          ->
                  <-                 Welcome
                  <-                 Hello; by shared memory then its descriptor, and one for each lane
    Ready         ->
    ...                              the windows
                  <-                 End
    Proof         ->
                  <-                 Accepted    once every receiver has proved

Either side may say Failure at any point, and then hangs up. In a lane of shared memory only numbers are said: that of a
window, by the sender when it lies in its slot, by a receiver when it has taken it. In a lane over TCP, the bytes go.
"""

import msgspec

from offbeat_types import WeightProof
from offbeat_weightsync._cuda_ipc import CudaHandle


class Join(msgspec.Struct, tag="join", frozen=True):
    """A receiver asks for the weights of a version. `held`: a checksum of each tensor it has, for changes alone.

    Over TCP it opens its lanes too, under a ticket of its own making.
    """

    name: str
    version: int
    held: dict[str, str] | None = None
    ticket: str = ""
    num_lanes: int = 0


class JoinLane(msgspec.Struct, tag="lane", frozen=True):
    """What it comes over is a lane of the receiver with this ticket."""

    ticket: str
    index: int


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The sender has noted the request, and says who it is; what it sends follows when all receivers are there."""

    name: str


class Hello(msgspec.Struct, tag="hello"):
    """The sender says what will come. The receiver builds the plan itself, and the digests must be equal.

    No window is longer than a slot. `kept` is the digest of what will not come because the receiver holds it; "" when
    all will come. `cuda` is where the slots lie, if not in the memory whose descriptor follows. `lanes` are the cores
    that lanes run on, -1 for any.
    """

    specs: list[tuple[str, str, tuple[int, ...]]]
    bucket_bytes: int
    slot_bytes: int
    num_slots: int
    digest: str
    kept: str = ""
    cuda: CudaHandle | None = None
    lanes: list[int] = []


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The receiver has mapped the memory and built the plan of this digest."""

    digest: str


class End(msgspec.Struct, tag="end", frozen=True):
    """All windows were sent, and these are the checksums of the buckets."""

    sent: WeightProof


class Proof(msgspec.Struct, tag="proof", frozen=True):
    """What the receiver's engine holds."""

    held: WeightProof


class Accepted(msgspec.Struct, tag="accepted", frozen=True):
    """Every receiver holds what was sent."""


class Failure(msgspec.Struct, tag="failure", frozen=True):
    """Whoever says it gives up, for this reason."""

    text: str


Message = Join | JoinLane | Welcome | Hello | Ready | End | Proof | Accepted | Failure
