"""Sizes, rates and counts as people write them: `80GiB`, `400Gbps`, `989.5TFLOPS`, `4M`.

A parsed quantity is a bare number in base units (bytes, bytes per second, FLOP/s, pieces), and
every parser has a formatter whose output it reads back to the same number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

GIB = 2**30

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}

BYTE_UNITS: dict[str, int | Decimal] = {
    prefix + "B": factor for prefix, factor in (_DECIMAL | _BINARY).items()
}
# Networks are given in bits per second and memory in bytes per second; values are bytes per second.
RATE_UNITS: dict[str, int | Decimal] = {
    **{prefix + "bps": Decimal(factor) / 8 for prefix, factor in _DECIMAL.items()},
    **{prefix + "bit/s": Decimal(factor) / 8 for prefix, factor in _DECIMAL.items()},
    **{prefix + "B/s": factor for prefix, factor in (_DECIMAL | _BINARY).items()},
}
FLOPS_UNITS: dict[str, int | Decimal] = {
    prefix + "FLOPS": factor for prefix, factor in _DECIMAL.items()
}
FLOPS_UNITS |= {prefix + "FLOP/s": factor for prefix, factor in _DECIMAL.items()}
COUNT_UNITS: Mapping[str, int | Decimal] = {**_DECIMAL, "K": 10**3, "B": 10**9, **_BINARY}

# The smallest accepted rate, in bytes per second.
LEAST_RATE = 1e6
# Python refuses to convert thousands of digits to an int; no real quantity is near either bound.
_LARGEST = Decimal(10) ** 30
_NUMBER = re.compile(
    r"\s*([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z/]*)\s*"
)


class QuantityError(ValueError):
    """A text is not a quantity of the expected kind; the message shows valid forms."""


def _parse(text: object, units: Mapping[str, int | Decimal], examples: str) -> Decimal:
    """The value of a quantity in base units; QuantityError if it cannot be read."""
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise QuantityError(f"expected a quantity such as {examples}, not {text!r}")
    match = _NUMBER.fullmatch(str(text)) if str(text).isascii() else None
    if match is None:
        if str(text).lstrip().startswith("-") and _NUMBER.fullmatch(str(text).lstrip()[1:]):
            raise QuantityError(f"{_shown(text)} is negative; write it like {examples}")
        raise QuantityError(f"cannot read {_shown(text)} as a quantity; write it like {examples}")
    number, unit = match.groups()
    factor = units.get(unit)
    if factor is None and unit:
        folded = {name.lower(): value for name, value in units.items()}
        # 'MiB' and 'mib' mean the same. 'm' and 'M' would not, but 'm' is in no table.
        factor = folded.get(unit.lower())
    if factor is None and not unit:
        factor = 1
    if factor is None:
        raise QuantityError(f"unknown unit '{unit}' in {_shown(text)}; write it like {examples}")
    try:
        value = Decimal(number.replace("_", "")) * factor
    except InvalidOperation as error:
        raise QuantityError(f"{_shown(text)} is not a number") from error
    if value > _LARGEST:
        raise QuantityError(f"{_shown(text)} is larger than anything this tool can mean")
    return value


def _shown(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= 40 else shown[:37] + "..."


def parse_bytes(text: str | int | float) -> int:
    """Bytes from `80GiB`, `80GB`, `1.5TiB` or a plain number. GB is 10^9, GiB is 2^30."""
    return int(_parse(text, BYTE_UNITS, "80GiB or 80GB"))


def parse_rate(text: str | int | float) -> float:
    """Bytes per second from `400Gbps` (bits) or `50GB/s` (bytes).

    A number without a unit is bytes per second; a small one is refused, since most likely the unit
    was forgotten.
    """
    value = float(_parse(text, RATE_UNITS, "400Gbps or 50GB/s"))
    if value < LEAST_RATE and str(text).strip().replace(".", "").isdigit():
        raise QuantityError(f"{_shown(text)} has no unit; write it like 400Gbps or 50GB/s")
    if 0 < value < LEAST_RATE:
        raise QuantityError(f"{_shown(text)} is slower than 8Mbps, the least that can be planned")
    return value


def parse_flops(text: str | int | float) -> float:
    """FLOPs per second from a text such as `989.5TFLOPS`."""
    return float(_parse(text, FLOPS_UNITS, "989.5TFLOPS"))


def parse_count(text: str | int | float) -> int:
    """A whole number from `4M` (decimal), `4Mi` (binary), `7B` or a plain number."""
    value = _parse(text, COUNT_UNITS, "4M, 4Mi or 4194304")
    if value != value.to_integral_value():
        raise QuantityError(f"{_shown(text)} is not a whole number")
    return int(value)


def _in_largest_unit(
    value: Decimal, units: list[tuple[str, Decimal]], digits: int | None = None
) -> str:
    """`value` as text in the largest unit that gives at least 1, else in the last unit.

    Exact, as in 1.5GB; with `digits` decimals, as in 1.50 GB.
    """
    name, factor = next(((n, f) for n, f in units if value >= f), units[-1])
    scaled = value / factor
    if digits is None:
        text = f"{scaled.normalize():f}"
        return text + name
    return f"{scaled:.{digits}f} {name}"


def _table(units: Mapping[str, int | Decimal], names: list[str]) -> list[tuple[str, Decimal]]:
    return [(name, Decimal(units[name])) for name in names]


_GIB = _table(BYTE_UNITS, ["TiB", "GiB", "MiB", "KiB", "B"])
_GB = _table(BYTE_UNITS, ["PB", "TB", "GB", "MB", "kB", "B"])


def write_bytes(value: int) -> str:
    """A short text that `parse_bytes` reads back to exactly `value` bytes."""
    rounded = f"{value / 2**30:.2f}".rstrip("0").rstrip(".") + "GiB"
    if parse_bytes(rounded) == value:
        return rounded
    exact = [(n, f) for n, f in (*_GIB[:-1], *_GB[:-1]) if value and value % int(f) == 0]
    name, factor = max(exact, key=lambda unit: unit[1]) if exact else _GB[-1]
    return f"{value // int(factor)}{name}"


def write_rate(value: float) -> str:
    """A text in bits per second, such as `400Gbps`, that `parse_rate` reads back to `value`."""
    exact = Decimal(repr(float(value)))
    return _in_largest_unit(exact * 8, _table(_DECIMAL_BITS, list(_DECIMAL_BITS)))


def write_byte_rate(value: float) -> str:
    """A text in bytes per second that `parse_rate` reads back to `value`."""
    names = ["TB/s", "GB/s", "MB/s", "B/s"]
    return _in_largest_unit(Decimal(repr(float(value))), _table(RATE_UNITS, names))


_DECIMAL_BITS: Mapping[str, int | Decimal] = {
    prefix + "bps": Decimal(factor) for prefix, factor in reversed(_DECIMAL.items())
}


def write_flops(value: float) -> str:
    """A text that `parse_flops` reads back to `value`."""
    return _in_largest_unit(
        Decimal(repr(float(value))), _table(FLOPS_UNITS, ["TFLOPS", "GFLOPS", "FLOPS"])
    )


def show_gib(value: float) -> str:
    """Bytes as text with two decimals and a binary unit, such as `80.00 GiB`."""
    return _in_largest_unit(Decimal(float(value)), _GIB, digits=2)


def in_gib(value: float) -> str:
    """Bytes as a number of GiB for a column: `62.4`, without a decimal from 1,000 on."""
    size = value / GIB
    return f"{size:,.0f}" if size >= 1e3 else f"{size:,.1f}"


def show_gb(value: float) -> str:
    """Bytes as text with two decimals and a decimal unit, such as `1.50 GB`."""
    return _in_largest_unit(Decimal(float(value)), _GB, digits=2)


def show_count(value: float) -> str:
    """A number of parameters or tokens as text: `774.03M`, `70.55B`."""
    for name, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.2f}{name}"
    return f"{value:.0f}"


def show_whole(value: float) -> str:
    """A number as text without decimals: `55,241`."""
    return f"{value:,.0f}"


def show_seconds(value: float) -> str:
    """Seconds as text, in milliseconds below one second: `1.25 s`, `375.0 ms`."""
    return f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:,.1f} ms"


Bytes = Annotated[int, BeforeValidator(parse_bytes), PlainSerializer(write_bytes, when_used="json")]
Rate = Annotated[float, BeforeValidator(parse_rate), PlainSerializer(write_rate, when_used="json")]
ByteRate = Annotated[
    float, BeforeValidator(parse_rate), PlainSerializer(write_byte_rate, when_used="json")
]
Flops = Annotated[
    float, BeforeValidator(parse_flops), PlainSerializer(write_flops, when_used="json")
]
Count = Annotated[int, BeforeValidator(parse_count)]
