"""`shardwise catalog`: screens, and CSV and Markdown that agree with the JSON."""

from __future__ import annotations

import json

import pytest

from shardwise.spec.quantity import parse_bytes, parse_flops, parse_rate
from tests.command import refusal, shardwise
from tests.screens import assert_screen
from tests.tables import csv_rows, markdown_rows


def printed(*words: str) -> str:
    done = shardwise("catalog", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["models"],
        ["devices"],
        ["devices", "h100-sxm"],
        ["instances"],
        ["instances", "p5.48xlarge"],
        ["accuracy"],
        ["accuracy", "l4"],
        ["kernels"],
        ["kernels", "--device", "h100-sxm"],
    ],
)
def test_screens_fit_80_columns(words: list[str]) -> None:
    text = printed(*words)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text  # nothing is cut
    assert_screen("-".join(["catalog", *(word for word in words if word[0] != "-")]), text)


def test_devices_as_csv_and_markdown_are_those_of_the_json() -> None:
    known = json.loads(printed("devices", "--json"))
    table = csv_rows(printed("devices", "--csv"))
    shown = markdown_rows(printed("devices", "--markdown"))
    assert [row["name"] for row in table] == [entry["name"] for entry in known]
    assert [row["name"] for row in shown] == [entry["name"] for entry in known]
    for row, text, entry in zip(table, shown, known, strict=True):
        assert int(row["memory_bytes"]) == parse_bytes(entry["memory"])
        assert float(row["memory_bytes_per_s"]) == parse_rate(entry["memory_bandwidth"])
        assert float(row["link_bytes_per_s"]) == parse_rate(entry["link_bandwidth"])
        peak = entry["peak"].get("bf16")
        assert row["bf16_flops"] == ("" if peak is None else str(parse_flops(peak)))
        assert text["memory"] == f"{parse_bytes(entry['memory']) / 2**30:.2f} GiB"
        assert text["per node"] == row["node_size"] == str(entry["node_size"])


def test_instances_as_csv_are_those_of_the_json() -> None:
    known = json.loads(printed("instances", "--json"))
    for row, entry in zip(csv_rows(printed("instances", "--csv")), known, strict=True):
        assert (row["name"], row["device"]) == (entry["name"], entry["device"])
        gpus = int(row["gpus"])
        assert gpus == entry["gpus"]
        network = parse_rate(entry["network"]) * 8e-9 / gpus if "network" in entry else None
        assert row["network_gbps_per_gpu"] == ("" if network is None else str(network))
        price = entry.get("usd_per_hour")
        assert row["usd_per_gpu_hour"] == ("" if price is None else str(price / gpus))
        assert row["priced"] == entry.get("priced", "")
    (sentence,) = refusal("catalog", "instances", "p5.48xlrge")
    assert "did you mean 'p5.48xlarge'" in sentence


def test_models_as_csv_are_those_of_the_json() -> None:
    known = json.loads(printed("models", "--json"))
    for row, entry in zip(csv_rows(printed("--csv")), known, strict=True):
        # Not every model has heads or experts, or says how long its sequences may be.
        shown = {key: entry.get(key) for key in row}
        assert row == {key: "" if value is None else str(value) for key, value in shown.items()}


def test_every_figure_of_a_device_has_a_source() -> None:
    known = json.loads(printed("devices", "--json"))
    assert all(entry["source"] for entry in known)
    (one,) = json.loads(printed("devices", "h100-sxm", "--json"))
    rows = {row["field"]: row for row in csv_rows(printed("devices", "h100-sxm", "--csv"))}
    assert rows["memory"]["value"] == one["memory"]
    for dtype, peak in one["peak"].items():
        assert rows[f"peak {dtype}"]["value"] == peak
        assert rows[f"peak {dtype}"]["source"] == one["source"]["peak"]


def test_accuracy_as_csv_and_markdown_is_that_of_the_json() -> None:
    known = json.loads(printed("accuracy", "--json"))
    quantities = {"time": "tokens/s", "memory": "peak memory"}
    expected = [
        {"device": entry["device"], "evidence": entry["evidence"], "predicted": quantity,
         **{key: str(value) for key, value in entry[part].items()}}
        for entry in known
        for part, quantity in quantities.items()
        if part in entry
    ]  # fmt: skip
    assert csv_rows(printed("accuracy", "--csv")) == expected
    shown = markdown_rows(printed("accuracy", "--markdown"))
    assert [row["median error"] for row in shown] == [
        f"{100 * float(row['median_error']):.1f} %" for row in expected
    ]
    one = json.loads(printed("accuracy", "h100-sxm", "--json"))
    assert one == [entry for entry in known if entry["device"] == "H100-SXM"]


def test_kernels_as_csv_and_markdown_are_those_of_the_json() -> None:
    known = json.loads(printed("kernels", "--json"))
    (attention, *_), (collective, *_) = (
        [entry for entry in known if entry["family"] == family]
        for family in ("attention", "collective")
    )
    assert {"efficiency", "half_span", "peak", "rows", "sources", "spread"} <= attention.keys()
    assert {"share", "hop_s", "call_s", "ranks", "fitted"} <= collective.keys()
    rows = csv_rows(printed("kernels", "--csv"))
    assert len(rows) == len(known)
    for row, entry in zip(rows, known, strict=True):
        ends = dict(zip(("fitted_from", "fitted_to"), entry.get("fitted", ()), strict=False))
        for key, value in {**entry, **ends}.items():
            if isinstance(value, float):
                assert float(row[key]) == value
            elif isinstance(value, str):
                assert row[key] == value
    one = json.loads(printed("kernels", "--device", "h100-sxm", "--json"))
    assert one == [entry for entry in known if entry["device"] == "H100-SXM"]
    assert one == json.loads(printed("kernels", "H100-SXM", "--json"))
    shown = markdown_rows(printed("kernels", "--device", "h100-sxm", "--markdown"))
    assert [row["kernel"] for row in shown] == [entry["kernel"] for entry in one]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["models", "lama-3-8b"], "llama-3-8b"),
        (["devices", ""], "device"),
        (["accuracy", "H100-SXN"], "H100-SXM"),
        (["H100-SXM"], "catalog devices H100-SXM"),
        (["kernels", "--device", "H100-SXN"], "H100-SXM"),
        (["kernels", "B200", "--device", "H100-SXM"], "--device"),
        (["devices", "--device", "H100-SXM"], "--device"),
        (["devices", "--json", "--csv"], "--json and --csv"),
        (["--csv", "--markdown", "--json"], "--json and --csv and --markdown"),
    ],
)
def test_wrong_input_is_one_sentence_that_names_what_to_change(
    words: list[str], named: str
) -> None:
    (sentence,) = refusal("catalog", *words)
    assert named in sentence
