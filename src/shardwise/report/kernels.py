"""Measured kernels as tables: one row per device and family, or per kernel of one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwise.report.screen import heading, paragraph, screen, terminal_table
from shardwise.report.table import Cell, Column, Table
from shardwise.spec.kernels import FAMILIES, Kernel, all_kernels, kernels_of

TITLES = {
    "attention": "Attention",
    "matmul": "Matrix products",
    "grouped": "Grouped products",
    "head": "Head and loss",
    "elementwise": "Element-wise operations",
    "cast": "Casts",
    "loss": "Losses",
    "collective": "Collectives of one node",
    "dispatch": "Dispatch to experts",
}


# ---- words ----------------------------------------------------------------------------------


def _share(value: float) -> str:
    """A share from 0 to 1 as a percentage."""
    return f"{100 * value:.0f} %" if value >= 0.0995 else f"{100 * value:.1f} %"


def _micro(seconds: float) -> str:
    """Seconds as microseconds or milliseconds."""
    micro = 1e6 * seconds
    if micro >= 1000:
        return f"{micro / 1000:.1f} ms"
    return f"{micro:.1f} µs" if micro < 100 else f"{micro:.0f} µs"


def _factor(value: float | None) -> str:
    """A factor such as "× 1.25"; empty for None."""
    return "" if value is None else f"× {value:.2f}"


def _integer_text(value: float) -> str:
    """A number without decimals."""
    return f"{value:,.0f}"


def _tokens(value: float) -> str:
    """A number of tokens; from 10,000 on in multiples of 1,024, such as "16k"."""
    return _integer_text(value) if value < 10_000 else f"{value / 1024:,.0f}k"


def _flops(value: float) -> str:
    """FLOPs with G or T."""
    scale, unit = (1e12, "T") if value >= 1e12 else (1e9, "G")
    return f"{value / scale:.0f}{unit}"


def _bytes(value: float) -> str:
    """Bytes as GiB, MiB, KiB or B without decimals."""
    # Sizes are recorded with three digits: 2**30 as 1.07e9.
    scales = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    scale, unit = next((one for one in scales if value >= 0.99 * one[0]), (1, "B"))
    return f"{value / scale:.0f} {unit}"


def _range(show: Callable[[float], str]) -> Callable[[tuple[float, float]], str]:
    """A function that writes a pair of numbers as a range, each end with `show`."""
    return lambda ends: f"{show(ends[0])}–{show(ends[1])}"


def _ranks(groups: Sequence[int]) -> str:
    """Group sizes, in ascending order, as a range such as "2–8"."""
    return str(groups[0]) if groups[0] == groups[-1] else f"{groups[0]}–{groups[-1]}"


# ---- columns --------------------------------------------------------------------------------

_KERNEL = Column("kernel", "kernel", left=True, wrap=True)
_SPREAD = Column("spread", "spread", _share)
_OF_PEAK = Column("efficiency", "of peak", _share)
_CALL = Column("call_s", "a call", _micro)


def _fitted(title: str, show: Callable[[float], str]) -> Column:
    """The column of the range of sizes that a kernel was fitted on."""
    return Column("fitted", title, _range(show), left=True)


_PRODUCT = (
    _KERNEL,
    _OF_PEAK,
    _CALL,
    Column("cast_width", "cast at", lambda n: f"{n:,.0f} columns"),
    _SPREAD,
    _fitted("FLOPs", _flops),
)
_MOVED = (
    _KERNEL,
    Column("share", "of bandwidth", _share),
    _CALL,
    _SPREAD,
    _fitted("bytes", _bytes),
)
_PASSES = {"forward": "fwd", "apart": "fwd", "together": "both"}
# Columns on the screen by family of kernels; keys are the fields of `Kernel` and its subclasses.
_COLUMNS: dict[str, tuple[Column, ...]] = {
    "attention": (
        _KERNEL,
        Column("passes", "pass", _PASSES.__getitem__),
        _OF_PEAK,
        Column("half_span", "half at", _integer_text),
        _CALL,
        Column("backward", "bwd", _factor),
        Column("full_half_span", "no mask", _factor),
        _SPREAD,
        _fitted("tokens", _tokens),
    ),
    "matmul": _PRODUCT,
    "head": _PRODUCT,
    "grouped": (
        _KERNEL,
        _OF_PEAK,
        Column("half_tokens", "half at", _integer_text),
        _CALL,
        Column("routed_width", "routing at", lambda n: f"{n:,.0f} wide"),
        _SPREAD,
        _fitted("tokens", _tokens),
    ),
    "elementwise": _MOVED,
    "cast": _MOVED,
    "loss": _MOVED,
    "collective": (
        _KERNEL,
        Column("ranks", "ranks", _ranks),
        Column("share", "of link", _share),
        Column("setup_s", "+", _micro),
        Column("small_share", "small", _share),
        _CALL,
        Column("hop_s", "a hop", _micro),
        _SPREAD,
        _fitted("bytes", _bytes),
    ),
    "dispatch": (
        _KERNEL,
        Column("ranks", "ranks", _ranks),
        Column("share", "of link", _share),
        _CALL,
        Column("token_s", "a token", lambda seconds: f"{1e9 * seconds:.0f} ns"),
        _SPREAD,
        _fitted("bytes", _bytes),
    ),
}
_NOTES = {
    "attention": "Of peak: causal, heads of 128, of the pass named; half of it at so many tokens. "
    "bwd: efficiency of the backward over the forward's. no mask: what half is at, over causal.",
    "matmul": "library: cuBLAS, or what engines call for it. cast at: columns at which the cast "
    "of the inputs takes as long as the product.",
    "grouped": "Half at: tokens an expert gets. routing at: width of an expert at which routing "
    "and combining take as long as the products.",
    "collective": "The faster of two: large messages take a share of the link and a set-up (+), "
    "small ones a smaller share. Both take a call and hops.",
    "dispatch": "A token goes once to each rank with one of its experts, and between nodes once to "
    "each other node; there the share is of the network.",
}
# Families whose kernels differ by dtype.
_BY_DTYPE = ("attention", "matmul", "grouped", "dispatch")
_ENDS = ("fitted_from", "fitted_to")
_SUMMARY_COLUMNS = (
    Column("device", "device", left=True),
    Column("family", "family", TITLES.__getitem__, left=True),
    Column("kernels", "kernels"),
    Column("rows", "measured", _integer_text),
    Column("sources", "sources"),
    _SPREAD,
)


# ---- tables ---------------------------------------------------------------------------------


def kernel_entries(device: str | None) -> list[dict[str, Any]]:
    """All kernels as JSON, or those of one device; SpecError for a device without kernels."""
    return [kernel.model_dump(mode="json", exclude_none=True) for kernel in _kernels(device)]


def kernel_table(device: str | None) -> Table:
    """Table for CSV and Markdown: one row per kernel, one column per field of any family.

    Fields that a kernel does not have are empty.
    """
    kernels = _kernels(device)
    fields = dict.fromkeys(key for kernel in kernels for key in type(kernel).model_fields)
    keys = [key for key in fields if key != "fitted"]
    text = ("device", "family", "kernel", "dtype", "passes", "ranks", "sources")
    table = Table([Column(key, key.replace("_", " "), left=key in text) for key in (*keys, *_ENDS)])
    for kernel in kernels:
        figures = (_plain(getattr(kernel, key, None)) for key in keys)
        table.add(*figures, *(kernel.fitted or ()))
    return table


def _plain(value: Any) -> Any:
    """The value as a table cell can hold it: a tuple becomes one text."""
    return "; ".join(map(str, value)) if isinstance(value, tuple) else value


def print_kernels(device: str | None) -> None:
    """Print the kernels of one device by family; for None, a summary of all devices."""
    if device is None:
        _print_summary()
        return
    kernels = _kernels(device)
    out = screen()
    out.print(f"Measured kernels of {kernels[0].device}", style="bold")
    for family in FAMILIES:
        mine = [kernel for kernel in kernels if kernel.family == family]
        if mine:
            heading(out, TITLES[family])
            out.print(terminal_table(_family_table(family, mine), gap=1))
            if family in _NOTES:
                paragraph(out, _NOTES[family], style="dim")
    out.print()
    paragraph(
        out,
        "Shares are of the dense peak, the memory bandwidth or the link. Spread: standard "
        "deviation of measured over form. --json has every coefficient and its sources. "
        "Predictions do not use these yet.",
        style="dim",
    )


def _family_table(family: str, kernels: Sequence[Kernel]) -> Table:
    """Table of the kernels of one family on one device; columns empty in all rows are left out."""
    values = [[getattr(kernel, column.key) for column in _COLUMNS[family]] for kernel in kernels]
    # A column that is empty for all is left out: most devices lack some factor.
    shown = [
        place
        for place, column in enumerate(_COLUMNS[family])
        if any(row[place] not in (None, 0.0) for row in values)
    ]
    table = Table([_COLUMNS[family][place] for place in shown])
    for kernel, row in zip(kernels, values, strict=True):
        cells = [_cell(_COLUMNS[family][place], row[place]) for place in shown]
        # Most kernels run in bf16; any other dtype is shown with the name.
        if kernel.dtype not in ("bf16", "any") and family in _BY_DTYPE:
            cells[0] = Cell(kernel.kernel, f"{kernel.kernel} ({kernel.dtype})")
        table.add(*cells)
    return table


def _cell(column: Column, value: Any) -> Cell:
    """A coefficient as a table cell: empty text for None and 0."""
    return Cell(_plain(value), "" if value in (None, 0.0) else column.show(value))


def _print_summary() -> None:
    """Print a row per device and family: kernels, measured rows, sources, RMS spread."""
    table = Table(_SUMMARY_COLUMNS)
    kernels = all_kernels()
    for device in dict.fromkeys(kernel.device for kernel in kernels):
        for family in FAMILIES:
            mine = [k for k in kernels if k.device == device and k.family == family]
            if mine:
                rows = sum(kernel.rows for kernel in mine)
                sources = {source for kernel in mine for source in kernel.sources}
                spread = sum(kernel.rows * kernel.spread**2 for kernel in mine) / rows
                table.add(device, family, len(mine), rows, len(sources), spread**0.5)
    out = screen()
    out.print(terminal_table(table))
    out.print("\nKernels of one device: shardwise catalog kernels --device H100-SXM", style="dim")


def _kernels(device: str | None) -> Sequence[Kernel]:
    """All measured kernels, or those of one device."""
    return all_kernels() if device is None else kernels_of(device)
