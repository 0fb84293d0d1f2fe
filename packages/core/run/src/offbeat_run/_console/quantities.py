"""Counts, sizes, times and numbers as people read them."""

import time


def count_text(number: int) -> str:
    """Write a count: "135 M", "8.03 B"."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{_digits(number / size)} {unit}"
    return str(number)


def size_text(num_bytes: float) -> str:
    """Write a size: "64 MiB", "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024:
            return f"{_digits(num_bytes)} {unit}"
        num_bytes /= 1024
    return f"{_digits(num_bytes)} PiB"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"  # of 1,020 the latter makes 1.02e+03


def duration_text(seconds: float) -> str:
    """Write a time for people: "42 s", "3 min 05 s", "2 h 10 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def number_text(value: float) -> str:
    """Write a number with as many digits as a person reads: 1,234, 16.7, 0.058, 1e-06."""
    size = abs(value)
    if size >= 100 or value == 0:
        return f"{value:,.0f}" if size >= 100 else "0"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.3f}" if size >= 0.001 else f"{value:.2g}"


def share_text(share: float) -> str:
    """Write a share in percent: "62%", "0.4%"."""
    return f"{share:.0%}" if not 0 < abs(share) < 0.01 else f"{share:.1%}"


def moment_text(time_s: float) -> str:
    """Write a moment with its zone: "2026-11-28 17:02 UTC"."""
    return time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(time_s))


def times_text(count: int) -> str:
    """Write how often: "once", "3 times"."""
    return "once" if count == 1 else f"{count} times"
