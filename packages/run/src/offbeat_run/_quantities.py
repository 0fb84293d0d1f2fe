"""Counts, sizes, times and numbers as people read them."""


def count_text(number: int) -> str:
    """Write a count: "135 M", "8.03 B"."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def size_text(num_bytes: float) -> str:
    """Write a size: "64 MiB", "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} PiB"


def duration_text(seconds: float) -> str:
    """Write a time for people: "42 s", "3 min 05 s", "2 h 10 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def number_text(value: float) -> str:
    """Write a number with as many digits as a person reads."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"
