from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.quantity import (
    LEAST_RATE,
    QuantityError,
    parse_bytes,
    parse_count,
    parse_flops,
    parse_rate,
    show_count,
    show_gb,
    show_gib,
    write_byte_rate,
    write_bytes,
    write_flops,
    write_rate,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 80 * 2**30),
        ("80 GiB", 80 * 2**30),
        ("80gib", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5TiB", 3 * 2**39),
        ("512", 512),
        (1024, 1024),
        ("1_000MB", 10**9),
    ],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


def test_gigabit_and_gigabyte_rates_differ_by_eight() -> None:
    assert parse_rate("400Gbps") == 50e9
    assert parse_rate("400Gbps") == parse_rate("50GB/s")
    assert parse_rate("3.35TB/s") == 3.35e12


def test_counts_are_decimal_unless_they_say_binary() -> None:
    assert parse_count("4M") == 4_000_000
    assert parse_count("4Mi") == 4 * 2**20
    assert parse_count("7B") == 7_000_000_000


def test_flops() -> None:
    assert parse_flops("989.5TFLOPS") == 989.5e12


@pytest.mark.parametrize(
    ("parse", "text", "hint"),
    [
        (parse_bytes, "80Gb", None),
        (parse_bytes, "80QiB", "unknown unit 'QiB'"),
        (parse_bytes, "-5GiB", "is negative"),
        (parse_bytes, "", "cannot read"),
        (parse_bytes, True, "expected a quantity"),
        (parse_rate, "400", "has no unit"),
        (parse_rate, "1Mbps", "slower than 8Mbps"),
        (parse_rate, "1e-300Gbps", "slower than 8Mbps"),
        (parse_rate, "fast", "400Gbps or 50GB/s"),
        (parse_count, "1.5", "not a whole number"),
        (parse_count, "1e99", "larger than anything"),
        (parse_count, "nan", "cannot read"),
        (parse_count, "\u0663", "cannot read"),
    ],
)
def test_what_cannot_be_read_says_what_can(parse, text, hint) -> None:  # type: ignore[no-untyped-def]
    if hint is None:
        assert parse(text) > 0
        return
    with pytest.raises(QuantityError, match=hint):
        parse(text)


PARSERS = [parse_bytes, parse_rate, parse_flops, parse_count]


@pytest.mark.parametrize("parse", PARSERS)
@given(text=st.text(max_size=40))
def test_parsers_never_crash(parse, text: str) -> None:  # type: ignore[no-untyped-def]
    try:
        assert parse(text) >= 0
    except QuantityError as error:
        assert str(error)


@pytest.mark.parametrize("parse", PARSERS)
@given(
    text=st.from_regex(r"[0-9]{1,30}(\.[0-9]{1,30})?(e[0-9]{1,3})?[A-Za-z/]{0,6}", fullmatch=True)
)
def test_parsers_never_crash_on_what_looks_right(parse, text: str) -> None:  # type: ignore[no-untyped-def]
    try:
        assert parse(text) >= 0
    except QuantityError as error:
        assert str(error)


@given(st.integers(min_value=0, max_value=10**18))
def test_bytes_round_trip(value: int) -> None:
    assert parse_bytes(write_bytes(value)) == value


@given(st.floats(min_value=LEAST_RATE, max_value=1e18))
def test_rates_round_trip(value: float) -> None:
    assert parse_rate(write_rate(value)) == value
    assert parse_rate(write_byte_rate(value)) == value


@given(st.floats(min_value=1e-3, max_value=1e21))
def test_flops_round_trip(value: float) -> None:
    assert parse_flops(write_flops(value)) == value


def test_memory_is_shown_in_binary_and_traffic_in_decimal_units() -> None:
    assert show_gib(80 * 2**30) == "80.00 GiB"
    assert show_gib(2**20) == "1.00 MiB"
    assert show_gb(80e9) == "80.00 GB"
    assert show_count(774_030_080) == "774.03M"
