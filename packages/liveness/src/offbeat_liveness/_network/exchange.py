"""One authenticated exchange between two monitors, as bytes: who may speak is settled before anything is read.

    server: MAGIC, nonce                                    HELLO_BYTES
    client: nonce, length, digest of the body, HMAC         HEADER_BYTES, then the body
    server: length, digest of the body, HMAC                REPLY_BYTES, then the body

Each HMAC is SHA-256 under the secret of the run over a label, both nonces, the length and the digest. So the secret is
never sent over it (it lies in the job's store, which torch does not protect); a message cannot be said twice, since its
nonce is the server's; an answer cannot be made by a stranger, nor kept for another question. Bodies travel in clear:
names, file paths, line numbers, shapes, and what a rank waits for, such as a host, a command line or the text of an
exception.
"""

import hashlib
import hmac
import json
import secrets
import struct
from typing import Any, Final

Message = dict[str, Any]

MAGIC: Final = b"offbeat2"
NONCE_BYTES: Final = 16
DIGEST_BYTES: Final = 32
LENGTH: Final = struct.Struct(">I")
HELLO_BYTES: Final = len(MAGIC) + NONCE_BYTES
HEADER_BYTES: Final = NONCE_BYTES + LENGTH.size + 2 * DIGEST_BYTES
REPLY_BYTES: Final = LENGTH.size + 2 * DIGEST_BYTES
MAX_BODY_BYTES: Final = 16 << 20
ASKS: Final = b"asks"
ANSWERS: Final = b"answers"


class RefusedError(Exception):
    """What came is not of this run, or not whole."""


def encode(message: Message) -> bytes:
    """A message as the body of an exchange."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode(body: bytes) -> Message:
    """The other way round.

    Raises:
        RefusedError: it is no message.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise RefusedError("not an object")
    return message


def hello() -> tuple[bytes, bytes]:
    """What a server says first, and the nonce in it."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return MAGIC + nonce, nonce


def read_hello(data: bytes) -> bytes:
    """The nonce of the server.

    Raises:
        RefusedError: something else listens there.
    """
    if len(data) != HELLO_BYTES or not data.startswith(MAGIC):
        raise RefusedError("no monitor of this version listens there")
    return data[len(MAGIC) :]


class Question:
    """The client's side.

    Args:
        body: encoded message; shared by many exchanges.
        secret: of the run.
    """

    def __init__(self, body: bytes, secret: str) -> None:
        self._body, self._secret, self._nonce = body, secret, secrets.token_bytes(NONCE_BYTES)
        self._nonces = b""

    def to_send(self, server_nonce: bytes) -> bytes:
        """Header and body."""
        self._nonces = server_nonce + self._nonce
        return self._nonce + _seal(ASKS, self._nonces, self._body, self._secret) + self._body

    def open_header(self, header: bytes) -> tuple[int, bytes]:
        """Length and digest of the answer, from its header.

        Raises:
            RefusedError: it was not made by a process of the run.
        """
        return _open(ANSWERS, self._nonces, header, self._secret)


def open_question(header: bytes, server_nonce: bytes, secret: str) -> tuple[int, bytes, bytes]:
    """Length and digest of the question's body, and both nonces.

    Raises:
        RefusedError: it was not made by a process of the run, or is too long.
    """
    nonces = server_nonce + header[:NONCE_BYTES]
    length, digest = _open(ASKS, nonces, header[NONCE_BYTES:], secret)
    return length, digest, nonces


def seal_answer(body: bytes, nonces: bytes, secret: str) -> bytes:
    """Header and body of an answer."""
    return _seal(ANSWERS, nonces, body, secret) + body


def check_body(body: bytes, digest: bytes) -> bytes:
    """The body itself.

    Raises:
        RefusedError: it is not the one that its header speaks of.
    """
    if not hmac.compare_digest(hashlib.sha256(body).digest(), digest):
        raise RefusedError("the body is not the one that was announced")
    return body


def _seal(label: bytes, nonces: bytes, body: bytes, secret: str) -> bytes:
    said = LENGTH.pack(len(body)) + hashlib.sha256(body).digest()
    return said + _mac(label, nonces, said, secret)


def _open(label: bytes, nonces: bytes, header: bytes, secret: str) -> tuple[int, bytes]:
    said, mac = header[:-DIGEST_BYTES], header[-DIGEST_BYTES:]
    if not secret or not hmac.compare_digest(mac, _mac(label, nonces, said, secret)):
        raise RefusedError("not of this run")
    (length,) = LENGTH.unpack(said[: LENGTH.size])
    if length > MAX_BODY_BYTES:
        raise RefusedError(f"{length} bytes are too many")
    return length, said[LENGTH.size :]


def _mac(label: bytes, nonces: bytes, said: bytes, secret: str) -> bytes:
    return hmac.digest(secret.encode(), label + nonces + said, "sha256")
