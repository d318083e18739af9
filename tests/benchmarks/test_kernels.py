"""Fits of published kernels: the file re-made, the errors promised, and the parts of a fit."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from benchmarks.kernels import tables
from benchmarks.kernels.__main__ import results
from benchmarks.kernels.file import PAGE, PATH, differences, page_of, text_of
from benchmarks.kernels.fitting import Numbers, Prior, Values, fit, left_out, weights
from benchmarks.kernels.report import by_family, left_out_errors, markdown
from benchmarks.kernels.study import Skipped, Study, too_few
from shardwise.spec.kernels import attention_s

beside = pytest.mark.skipif(
    not tables.FOLDER.is_dir(),
    reason="published kernels lie beside the project, in ../shared/validation/kernels",
)


# ---- the tables -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted() -> tuple[list[Study], list[Skipped]]:
    return results()


@beside
def test_the_file_and_the_page_are_what_the_tables_give(
    fitted: tuple[list[Study], list[Skipped]],
) -> None:
    studies, _ = fitted
    assert differences(PATH.read_text(encoding="utf-8"), text_of(studies)) == []
    assert PAGE.read_text(encoding="utf-8") == page_of(markdown(studies))


# Median and 90th percentile that a family should stay within, each source left out in turn.
GOAL = (0.10, 0.25)
WITHIN = [
    ("A100-80GB", "matmul"),
    ("H100-SXM", "attention"),
    ("H100-SXM", "matmul"),
    ("H100-SXM", "collective"),
    ("H200-SXM", "matmul"),
    ("H200-SXM", "collective"),
    ("B200", "matmul"),
    ("B200", "collective"),
    ("GB200", "attention"),
    ("GB200", "matmul"),
    ("GB300", "attention"),
    ("GB300", "matmul"),
]


@beside
@pytest.mark.parametrize("named", WITHIN, ids=" ".join)
def test_errors_with_a_source_left_out(
    named: tuple[str, str], fitted: tuple[list[Study], list[Skipped]]
) -> None:
    found = left_out_errors(by_family(fitted[0])[named])
    assert found.rows > 30
    assert not found.beyond(GOAL), found


@beside
def test_rows_that_say_nothing_of_a_form_are_named(
    fitted: tuple[list[Study], list[Skipped]],
) -> None:
    reasons = {one.key[:3]: one.reason for one in fitted[1]}
    assert reasons["H20", "attention", "FA3"] == "one size"
    assert reasons["GH200", "matmul", "best shape"] == "1 row"
    assert not {study.key for study in fitted[0]} & {one.key for one in fitted[1]}


# ---- reading --------------------------------------------------------------------------------

CELLS = {
    "device": "A100-SXM",
    "source": "ai-dynamo/aiconfigurator@0123",
    "where": "a100_sxm/gemm/sglang/0.5.10/gemm_perf.parquet",
    "library": "sglang",
    "version": "0.5.10",
    "inputs": "randn",
    "ms": "2",
    "tflops": "150",
    "peak_tflops": "312.0",
    "note": "",
}


def test_rows_that_are_doubted_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[dict[str, str]] = [
        {},
        {"note": "SUSPICIOUS: above the peak"},
        {"inputs": "uninitialised weights"},
        {"source": "meta-pytorch/tritonbench issue 141"},
        {"source": "NVIDIA/cudnn-frontend@ab", "version": "cudnn 91901.0 fe 1.19.0"},
        {"device": "H800", "source": "deepseek-ai/DeepGEMM pull 168"},
    ]
    with (tmp_path / "made_up.csv").open("w", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(CELLS))
        writer.writeheader()
        writer.writerows({**CELLS, **change} for change in changes)
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    first, *others = tables.read("made_up")
    assert first.device == "A100-80GB"
    assert first.source == "ai-dynamo/aiconfigurator, sglang"
    assert first.flops == pytest.approx(0.3e12)
    assert first.peak == 312e12
    assert [row.source for row in others] == [
        "NVIDIA/cudnn-frontend, cuDNN 9.19.1",
        "deepseek-ai/DeepGEMM pull 168",
    ]
    assert others[1].device == "H100-SXM"


# ---- fits -----------------------------------------------------------------------------------

SPAN = np.tile([512.0, 2048.0, 8192.0, 32768.0], 4)
FLOPS = np.repeat([1e9, 1e10, 1e11, 1e12], 4)
PEAK = 1e15
PRIORS = {
    "efficiency": Prior(0.5, 1.0, high=1.0),
    "half_span": Prior(800.0, 1.0),
    "call_s": Prior(1e-5, 0.7),
}


def form(v: Values) -> Numbers:
    found: Numbers = attention_s(FLOPS, SPAN, PEAK, v["efficiency"], v["half_span"], v["call_s"])
    return found


def test_a_fit_finds_the_coefficients_of_its_rows() -> None:
    truth = {"efficiency": 0.62, "half_span": 1300.0, "call_s": 2e-5}
    found = fit(form, PRIORS, form(truth), np.ones(len(SPAN)))
    for name, value in truth.items():
        assert found.values[name] == pytest.approx(value, rel=0.02)
    assert np.abs(found.off).max() < 0.02


def test_one_row_that_is_far_off_does_not_move_the_others() -> None:
    truth = {"efficiency": 0.62, "half_span": 1300.0, "call_s": 2e-5}
    seconds = form(truth)
    seconds[7] *= 10
    found = fit(form, PRIORS, seconds, np.ones(len(SPAN)))
    assert found.values["efficiency"] == pytest.approx(0.62, rel=0.1)
    assert np.median(np.abs(found.off)) < 0.05


def test_a_source_that_is_left_out_is_predicted_by_the_others() -> None:
    """The second source takes a third longer: each is off by that where the other is fitted."""
    slower = np.tile([True, False], 8)
    seconds = form({"efficiency": 0.6, "half_span": 1000.0, "call_s": 1e-5})
    seconds[slower] *= 4 / 3
    sources = ["b" if slow else "a" for slow in slower]
    off = left_out(form, PRIORS, seconds, sources, lambda stays: ~stays)
    assert np.median(off[slower]) == pytest.approx(np.log(4 / 3), abs=0.05)
    assert np.median(off[~slower]) == pytest.approx(np.log(3 / 4), abs=0.05)
    # Nobody else measured the first eight: they are not judged.
    some = left_out(form, PRIORS, seconds, sources, lambda stays: ~stays & (np.arange(16) >= 8))
    assert np.isnan(some[:8]).all()
    assert np.isfinite(some[8:]).all()


def test_a_source_of_many_rows_counts_as_twenty() -> None:
    weight = weights(["small"] * 3 + ["large"] * 400)
    assert weight[:3].sum() == pytest.approx(3)
    assert weight[3:].sum() == pytest.approx(20)


def test_what_does_not_identify_a_form_says_why() -> None:
    assert too_few(np.asarray([1.0, 2.0, 4.0])) == "3 rows"
    assert too_few(np.asarray([8.0] * 5)) == "one size"
    assert too_few(np.asarray([8.0, 8.0, 16.0, 16.0])) == "2 sizes"
    assert "factor of 2.0" in too_few(np.asarray([8.0, 10.0, 12.0, 16.0]))
    assert too_few(np.asarray([8.0, 16.0, 32.0, 64.0])) == ""


# ---- the check ------------------------------------------------------------------------------


def test_the_check_names_what_moved() -> None:
    text = PATH.read_text(encoding="utf-8")
    assert differences(text, text) == []
    header, entry, *rest = text.split("\n\n")
    (moved,) = (line for line in entry.splitlines() if line.startswith("efficiency"))
    (difference,) = differences(text, text.replace(moved, "efficiency = 0.123", 1))
    assert "efficiency" in difference
    assert "0.123" in difference
    (missing,) = differences(text, "\n\n".join([header, *rest]))
    assert missing.startswith("only in the file: ")
    # The last digit of a fit may differ on another machine.
    value = float(moved.partition(" = ")[2])
    assert differences(text, text.replace(moved, f"efficiency = {value * 1.01}", 1)) == []
