"""What torch has freed, given back to the system."""

import ctypes
from typing import Final

LIBC: Final = ctypes.CDLL(None)


def trim_heap() -> None:
    """Give back what is free in the C library's heap, which it keeps for the next allocation.

    glibc maps large blocks one by one and unmaps them when they are freed, but what it calls large grows up to 32 MiB
    with the blocks that are freed, so that weights and bands of later updates lie in its heap. Elsewhere nothing is
    done.

    Source: mallopt(3), M_MMAP_THRESHOLD; malloc_trim(3).
    """
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)
