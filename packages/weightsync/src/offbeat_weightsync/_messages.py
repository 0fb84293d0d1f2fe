"""What sender and receivers of one sync say to each other. The weights themselves lie in shared memory.

    receiver                         sender
    Join          ->
                  <-                 Welcome
                  <-                 Hello, then one byte that carries the memory's file descriptor
    Ready         ->
                  <-                 Filled(0, 8 MiB), Filled(0, 16 MiB) ... Filled(1, all)
    Loaded(0)     ->
                  <-                 Filled(2, ...)   slot 0 again, once every receiver has loaded bucket 0
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

    `kept` is the digest of what will not come because the receiver holds it; "" when all will come. `cuda` is where the
    slots lie, if not in the memory whose descriptor follows.
    """

    specs: list[tuple[str, str, tuple[int, ...]]]
    bucket_bytes: int
    slot_bytes: int
    digest: str
    kept: str = ""
    cuda: CudaHandle | None = None


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The receiver has mapped the memory and built the plan of this digest."""

    digest: str


class Filled(msgspec.Struct, tag="filled", frozen=True):
    """So many bytes of a bucket, from its start, lie in its slot."""

    bucket: int
    num_bytes: int


class Loaded(msgspec.Struct, tag="loaded", frozen=True):
    """The receiver has taken a bucket; its slot may be filled again."""

    bucket: int


class End(msgspec.Struct, tag="end", frozen=True):
    """All buckets were sent, and these are their checksums."""

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
