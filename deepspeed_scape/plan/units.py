"""Numbers with units, as a command line gives them: 200Gbit, 5us, 1.8e9."""

from __future__ import annotations

import math
import re

_NUMBER = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_BANDWIDTH = (  # bytes/s
    {unit: bits / 8 for unit, bits in _BITS.items()}
    | {f"{unit}/s": bits / 8 for unit, bits in _BITS.items()}
    | {unit: bits / 8 for unit, bits in (("kbps", 1e3), ("mbps", 1e6), ("gbps", 1e9), ("tbps", 1e12))}
    | {"kb/s": 1e3, "mb/s": 1e6, "gb/s": 1e9, "tb/s": 1e12}
)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_COUNT = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def _parse(text: str, units: dict[str, float], what: str, examples: str) -> float:
    match = _NUMBER.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    try:
        value = float(match.group(1)) if match else math.nan
    except ValueError:  # 1.2.3
        value = math.nan
    if not math.isfinite(value) or unit not in units:
        raise ValueError(f"{text!r} is not {what}: write it as {examples}")
    return value * units[unit]


def bandwidth(text: str) -> float:
    """Bytes a second of ``200Gbit``, ``100Mbit/s`` or ``25GB/s``.

    Raises:
        ValueError: no number, no such unit (a unit must be there), or not positive.
    """
    value = _parse(text, _BANDWIDTH, "a bandwidth", "200Gbit, 100Mbit or 25GB/s")
    if value <= 0:
        raise ValueError(f"{text!r} is not a bandwidth: it must be positive")
    return value


def seconds(text: str) -> float:
    """Seconds of ``5us``, ``0.3ms`` or ``1s``.

    Raises:
        ValueError: no number or no such unit (a unit must be there).
    """
    return _parse(text, _SECONDS, "a time", "5us, 0.3ms or 1s")


def milliseconds(text: str) -> float:
    """Milliseconds of ``223``, ``223ms`` or ``0.2s``.

    Raises:
        ValueError: no number or no such unit.
    """
    return _parse(text, _SECONDS | {"": 1e-3}, "a time", "223, 223ms or 0.2s") * 1e3


def count(text: str) -> int:
    """A whole number: ``1.8e9``, ``1.8B``, ``500M``.

    Raises:
        ValueError: no number, no such suffix, or less than 1.
    """
    value = _parse(text, _COUNT, "a number of elements", "1.8e9, 1.8B or 500M")
    if value < 1:
        raise ValueError(f"{text!r} is not a number of elements: it must be at least 1")
    return round(value)


def show_bandwidth(value: float) -> str:
    """Bytes a second in bits, with the unit that keeps it short."""
    for unit, bits in (("Tbit", 1e12), ("Gbit", 1e9), ("Mbit", 1e6)):
        if value * 8 >= bits:
            return f"{value * 8 / bits:.3g} {unit}"
    return f"{value * 8 / 1e3:.3g} kbit"


def show_bytes(value: float) -> str:
    """Bytes with a decimal unit."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"
