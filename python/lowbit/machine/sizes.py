"""Formats byte counts."""

from __future__ import annotations


def size(count: float) -> str:
    """A byte count with three digits and a unit in powers of 1000: "16.1 GB", "803 MB", "0 B"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * scale:  # "1.00 GB" rather than "1000 MB"
            value = count / scale
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{count:.0f} B"
