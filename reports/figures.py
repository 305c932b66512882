"""How numbers are written: three significant digits, units, a change with its sign and share, unknown said."""

from __future__ import annotations

import math
from collections.abc import Callable

UNKNOWN = "not known"
MINUS = "−"  # a real minus sign lines up with digits


def number(value: float | int | None, digits: int = 3) -> str:
    """Three significant digits, thousands separated; whole numbers from 1,000 on."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    sign = MINUS if value < 0 else ""
    size = abs(float(value))
    places = max(0, digits - 1 - math.floor(math.log10(size)))
    rounded = round(size, digits - 1 - math.floor(math.log10(size)))
    return f"{sign}{rounded:,.{places}f}"


def count(value: float | int | None) -> str:
    """A whole number in full."""
    return UNKNOWN if value is None else f"{round(value):,}"


def percent(share: float | None, digits: int = 3) -> str:
    """A share of 1 as per cent."""
    return UNKNOWN if share is None else f"{number(100 * share, digits)} %"


def milliseconds(value: float | None) -> str:
    """A time in ms, from 10,000 on in seconds."""
    if value is None:
        return UNKNOWN
    return f"{number(value / 1000)} s" if abs(value) >= 10_000 else f"{number(value)} ms"


def change(value: float | None, base: float | None, unit: str = "ms") -> str:
    """`−183 ms (−22 %)`: the difference to a base, signed, and its share of the base."""
    if value is None or base is None:
        return UNKNOWN
    difference = value - base
    text = milliseconds(difference) if unit == "ms" else f"{number(difference)} {unit}".strip()
    sign = "+" if difference > 0 else ""
    if difference == 0:
        return f"no change ({unit})" if unit else "no change"
    share = f" ({sign}{percent(difference / base, 2)})" if base else ""
    return f"{sign}{text}{share}"


def spread(values: list[float | None], write: str = "ms") -> str:
    """`7.4 s to 7.6 s over 3 seeds`; says so where one seed gives no interval."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return UNKNOWN
    if len(known) == 1:
        return "1 seed: no interval"
    writers: dict[str, Callable[[float | None], str]] = {"ms": milliseconds, "percent": percent, "number": number}
    render = writers[write]
    return f"{render(min(known))} to {render(max(known))} over {len(known)} seeds"
