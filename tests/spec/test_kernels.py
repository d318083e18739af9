"""Measured kernels: published rows by the forms, what the forms promise, what a file may say."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from shardwise.spec import catalogue
from shardwise.spec.kernels import (
    AttentionKernel,
    CollectiveKernel,
    DispatchKernel,
    GroupedKernel,
    Kernel,
    MovedKernel,
    ProductKernel,
    all_kernels,
    distinct_groups,
    kernel_devices,
    kernels_of,
    read_kernels,
)
from shardwise.spec.record import SpecError


def kernel_of(device: str, family: str, name: str, dtype: str = "bf16") -> Any:
    (found,) = (
        kernel
        for kernel in kernels_of(device)
        if (kernel.family, kernel.kernel) == (family, name) and kernel.dtype in (dtype, "any")
    )
    return found


# ---- published rows -------------------------------------------------------------------------

TERA, MEGA = 1e12, 2**20
# Device, kernel, arguments of the form, and the milliseconds that a row of the tables prints.
ROWS: list[tuple[tuple[str, ...], tuple[Any, ...], dict[str, Any], float]] = [
    # Dao-AILab/flash-attention, chart of FA2 on A100: causal, 16 heads of 128, 2 x 8,192.
    (("A100-80GB", "attention", "FA2"), (182 * TERA * 10.572e-3, 8192), {}, 10.572),
    # The same of FA3 on H100, heads of 128 and of 64.
    (("H100-SXM", "attention", "FA3"), (602 * TERA * 0.9132e-3, 8192), {}, 0.9132),
    (("H100-SXM", "attention", "FA3"), (460 * TERA * 1.1951e-3, 8192), {"head_dim": 64}, 1.1951),
    # NVIDIA/cudnn-frontend, Llama 3.1 on H200 at 8,192: forward, backward, without a mask.
    (("H200-SXM", "attention", "cuDNN"), (643.74 * TERA * 1.708e-3, 8192), {}, 1.708),
    (
        ("H200-SXM", "attention", "cuDNN"),
        (540.78 * TERA * 5.083e-3, 8192),
        {"backward": True},
        5.083,
    ),
    (
        ("H200-SXM", "attention", "cuDNN"),
        (593.56 * TERA * 9.262e-3, 8192),
        {"backward": True, "causal": False},
        9.262,
    ),
    # ROCm/aiter, 32 heads of 128, 4 x 8,192.
    (
        ("MI300X", "attention", "AITER a16"),
        (468.2 * TERA * 11.742e-3, 8192),
        {"backward": True},
        11.742,
    ),
    # TensorRT-LLM and SGLang, 8,192 cubed.
    (("H100-SXM", "matmul", "library"), (2 * 8192**3, 8192), {}, 1.4048),
    (("H100-SXM", "matmul", "library"), (2 * 8192**3, 8192), {}, 1.673),
    # SimuMax: 32 experts of 1,024 tokens.
    (
        ("B200", "grouped", "TransformerEngine GroupedLinear, forward"),
        (2 * 32768 * 4096 * 7168, 1024),
        {},
        1.8708,
    ),
    # NVIDIA/cudnn-frontend, 16,384 x 4,096.
    (("H200-SXM", "elementwise", "RMSNorm backward, cuDNN"), (402653184,), {}, 0.106),
    # BabelStream on H100 has a rate of 0.89; here a cast of vLLM, 32,768 x 4,096.
    (("H100-SXM", "cast", "to fp8, scale known, vLLM", "bf16->fp8"), (402653184,), {}, 0.1328),
    # nccl-tests on 8 H100: 512 MiB, 16 MiB, 256 KiB.
    (("H100-SXM", "collective", "all-gather"), (512 * MEGA, 8), {}, 1.4015),
    (("H100-SXM", "collective", "all-gather"), (16 * MEGA, 8), {}, 0.06886),
    (("H100-SXM", "collective", "all-gather"), (MEGA / 4, 8), {}, 0.0136),
    # Azure on 8 H200: 2 GiB.
    (("H200-SXM", "collective", "all-reduce in the switch"), (2048 * MEGA, 8), {}, 7.9525),
    # aws-samples on 8 GPUs with 4,096 tokens of 7,168: 321.89 GB/s, tokens that stay included.
    (("H100-SXM", "dispatch", "DeepEP, combine"), (4096, 321.89e9 * 0.96524e-3), {}, 0.96524),
    (
        ("H100-SXM", "dispatch", "DeepEP, dispatch", "fp8"),
        (4096, 320.68e9 * 0.49958e-3),
        {},
        0.49958,
    ),
    # DeepSeek on 4 nodes: 57 GB/s, of which three of four go to another node.
    (
        ("H100-SXM", "dispatch", "DeepEP, combine between nodes"),
        (4096, 211.4e6 * 3 / 4),
        {},
        211.4e6 / 57e9 * 1e3,
    ),
]


@pytest.mark.parametrize(("named", "arguments", "options", "measured_ms"), ROWS, ids=str)
def test_a_form_gives_a_published_row_within_its_spread(
    named: tuple[str, ...], arguments: tuple[Any, ...], options: dict[str, Any], measured_ms: float
) -> None:
    kernel = kernel_of(*named)
    off = math.log(measured_ms * 1e-3 / kernel.seconds(*arguments, **options))
    assert abs(off) <= 2 * kernel.spread


def test_a_token_goes_to_as_many_ranks_as_a_count_of_all_choices_says() -> None:
    """Six experts of two ranks each: every choice of three, one by one."""
    choices = list(itertools.combinations(range(6), 3))
    hit = [len({expert // 2 for expert in choice}) for choice in choices]
    assert distinct_groups(6, 3, 3) == pytest.approx(sum(hit) / len(choices), rel=1e-12)
    # All experts on one rank; and as many ranks as experts.
    assert distinct_groups(128, 8, 1) == 1.0
    assert distinct_groups(128, 8, 128) == pytest.approx(8.0, rel=1e-12)


# ---- what the forms promise -----------------------------------------------------------------


@pytest.mark.parametrize("device", kernel_devices())
def test_nothing_is_faster_than_the_data_sheet(device: str) -> None:
    """Seconds at and beyond the ends of what was fitted, for every kernel and its factors."""
    work = np.asarray([1e6, 1e9, 1e12, 1e15])
    for kernel in kernels_of(device):
        match kernel:
            case AttentionKernel():
                seconds = [
                    kernel.seconds(work, span, backward=b, causal=c, head_dim=h)
                    for span in (128, 8192, 2**20)
                    for b in (False, True)
                    for c in (False, True)
                    for h in (64, 128, 192, 256)
                ]
            case ProductKernel():
                seconds = [kernel.seconds(work, width) for width in (512, 65536)]
            case GroupedKernel():
                seconds = [kernel.seconds(work, tokens, 1024) for tokens in (1, 4096)]
            case MovedKernel():
                seconds = [kernel.seconds(work)]
            case CollectiveKernel():
                seconds = [kernel.seconds(work, n) for n in kernel.ranks]
                work_at_least = min(kernel.wire(1.0, n) for n in kernel.ranks)
                seconds = [one / work_at_least for one in seconds]
            case DispatchKernel():
                seconds = [kernel.seconds(tokens, work) for tokens in (1, 2**20)]
        assert all((one >= work / kernel.peak * (1 - 1e-9)).all() for one in seconds), kernel


# stas00/ml-engineering: the best of thousands of shapes in bf16, in TFLOPS.
BEST = {"A100-80GB": 271.2, "H100-SXM": 794.5, "B200": 1745.0, "GB200": 1822.0, "B300": 1769.0}


@pytest.mark.parametrize("device", BEST)
def test_products_are_no_faster_than_the_best_shape_of_a_search(device: str) -> None:
    library = kernel_of(device, "matmul", "library")
    assert library.efficiency * library.peak <= 1.02 * BEST[device] * TERA


def test_longer_sequences_are_more_efficient_and_larger_messages_too() -> None:
    attention = kernel_of("H100-SXM", "attention", "FA3")
    rates = [1e12 / attention.seconds(1e12, span) for span in (1024, 4096, 16384, 65536)]
    gather = kernel_of("H100-SXM", "collective", "all-gather")
    rates_of_messages = [size / gather.seconds(size, 8) for size in 2.0 ** np.arange(16, 32)]
    for slower, faster in (*pairwise(rates), *pairwise(rates_of_messages)):
        assert slower < faster
    # What attention costs at 64k is what the kernel's efficiency says, within half_span / span.
    half = attention.half_span / 65536
    assert rates[-1] == pytest.approx(attention.efficiency * attention.peak / (1 + half), rel=0.02)


def test_columns_of_ranks_and_bytes_are_priced_at_once() -> None:
    gather = kernel_of("H100-SXM", "collective", "all-gather")
    ranks, moved = np.asarray([2, 4, 8]), np.asarray([1e5, 1e7, 1e9])
    alone = [gather.seconds(m, n) for m, n in zip(moved, ranks, strict=True)]
    assert gather.seconds(moved, ranks) == pytest.approx(np.asarray(alone))


def test_peaks_are_those_of_the_catalogue() -> None:
    """An efficiency of another peak than the one that it is multiplied with would be wrong."""
    compared = 0
    for kernel in all_kernels():
        device = catalogue.devices().get(kernel.device)
        if device is None or (kernel.family in ("attention", "matmul") and kernel.dtype != "bf16"):
            continue
        expected = {
            "attention": device.peak_flops("bf16"),
            "matmul": device.peak_flops("bf16"),
            "collective": device.link_bandwidth,
            "elementwise": device.memory_bandwidth,
            "loss": device.memory_bandwidth,
        }.get(kernel.family)
        if expected is not None:
            compared += 1
            assert kernel.peak == pytest.approx(expected, rel=1e-3), kernel
    assert compared > 100


def test_every_entry_has_rows_and_named_sources() -> None:
    names = [(k.device, k.family, k.kernel, k.dtype) for k in all_kernels()]
    assert len(set(names)) == len(names) > 200
    for kernel in all_kernels():
        assert kernel.rows >= len(kernel.sources), kernel
        assert not any("://" in source for source in kernel.sources), kernel


# ---- the file -------------------------------------------------------------------------------

GOOD = """
[[H100-SXM.matmul]]
kernel = "library"
dtype = "bf16"
peak = 9.895e14
efficiency = 0.7
call_s = 5e-06
spread = 0.1
fitted = [1e9, 1e12]
rows = 20
sources = ["a paper"]
"""


def test_a_file_is_read() -> None:
    (kernel,) = read_kernels(GOOD, "kernels.toml")
    assert isinstance(kernel, ProductKernel)
    assert kernel.seconds(9.895e14 * 0.7, 1024) == pytest.approx(1.000005)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("efficiency = 0.7", "efficiency = 1.2", "efficiency"),
        ("efficiency = 0.7", "efficiency = 0.0", "efficiency"),
        ("call_s = 5e-06", "call_s = -1e-06", "call_s"),
        ("call_s = 5e-06", "call_us = 5", "call_us"),
        ("[1e9, 1e12]", "[1e12, 1e9]", "fitted"),
        ('["a paper"]', "[]", "sources"),
        ("rows = 20", "rows = 1", "rows"),
        (".matmul]]", ".matmuls]]", "matmuls"),
    ],
)
def test_a_file_that_is_not_physical_is_refused(old: str, new: str, named: str) -> None:
    assert old in GOOD
    with pytest.raises(SpecError, match=named):
        read_kernels(GOOD.replace(old, new), "kernels.toml")


def test_one_device_is_read_without_the_others() -> None:
    everything = all_kernels()
    for device in kernel_devices():
        alone: tuple[Kernel, ...] = kernels_of(device.lower())
        assert alone == tuple(kernel for kernel in everything if kernel.device == device)


def test_a_device_without_kernels_gets_a_suggestion() -> None:
    with pytest.raises(SpecError, match="H100-SXM"):
        kernels_of("H100-SXN")
    with pytest.raises(SpecError, match="catalog kernels"):
        kernels_of("abacus")
