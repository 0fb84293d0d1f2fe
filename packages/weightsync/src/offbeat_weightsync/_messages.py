"""What sender and receivers of one sync say to each other. The weights themselves lie in shared memory.

    receiver                         sender
    Join          ->
                  <-                 Hello, then one byte that carries the memory's file descriptor
    Ready         ->
                  <-                 Filled(0), Filled(1)
    Loaded(0)     ->
                  <-                 Filled(2)   slot 0 again, once every receiver has loaded bucket 0
    ...
                  <-                 End
    Proof         ->
                  <-                 Accepted    once every receiver has proved
Either side may say Failure at any point, and then hangs up.
"""

import msgspec

from offbeat_types import WeightProof


class Join(msgspec.Struct, tag="join", frozen=True):
    """A receiver asks for the weights of a version."""

    name: str
    version: int


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """The sender says what will come. The receiver builds the plan itself, and the digests must be equal."""

    name: str
    specs: list[tuple[str, str, tuple[int, ...]]]
    bucket_bytes: int
    slot_bytes: int
    digest: str


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The receiver has mapped the memory and built the plan of this digest."""

    digest: str


class Filled(msgspec.Struct, tag="filled", frozen=True):
    """A bucket lies in its slot."""

    bucket: int


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


Message = Join | Hello | Ready | Filled | Loaded | End | Proof | Accepted | Failure
