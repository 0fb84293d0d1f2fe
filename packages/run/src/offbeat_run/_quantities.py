"""Counts and sizes as people read them."""


def count_text(number: int) -> str:
    """Write a count: "135 M", "8.03 B"."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def size_text(num_bytes: float) -> str:
    """Write a size: "64 MiB", "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"
