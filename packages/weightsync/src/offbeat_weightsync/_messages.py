"""What sender and receivers of one sync say to each other. The weights themselves lie in shared memory.

    receiver                         sender
    Join          ->
                  <-                 Welcome
                  <-                 Hello, then one byte that carries the memory's file descriptor
    Ready         ->
                  <-                 Filled(0), Filled(1)
    Loaded(0)     ->
                  <-                 Filled(2)   slot 0 again, once every receiver has loaded window 0
    ...
                  <-                 End
    Proof         ->
                  <-                 Accepted    once every receiver has proved
Either side may say Failure at any point, and then hangs up.
"""

import msgspec

from offbeat_types import WeightProof
from offbeat_weightsync._cuda_ipc import CudaHandle


class Join(msgspec.Struct, tag="join", frozen=True):
    """A receiver asks for the weights of a version. `held`: a checksum of each tensor it has, for changes alone."""

    name: str
    version: int
    held: dict[str, str] | None = None


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The sender has noted the request, and says who it is; what it sends follows when all receivers are there."""

    name: str


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """The sender says what will come. The receiver builds the plan itself, and the digests must be equal.

    No window is longer than a slot. `kept` is the digest of what will not come because the receiver holds it; "" when
    all will come. `cuda` is where the slots lie, if not in the memory whose descriptor follows. `lanes` are the cores
    that lanes run on; a byte with the descriptor of a socket follows for each; none: all goes over this connection.
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


class Filled(msgspec.Struct, tag="filled", frozen=True):
    """A window lies in its slot."""

    window: int


class Loaded(msgspec.Struct, tag="loaded", frozen=True):
    """The receiver has taken a window; its slot may be filled again."""

    window: int


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


Message = Join | Welcome | Hello | Ready | Filled | Loaded | End | Proof | Accepted | Failure
