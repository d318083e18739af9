"""The software of a run: which kernels it calls, and who has one."""

from __future__ import annotations

import pytest

from shardwise.predict.kernels import coefficients_of, measured_attention, measured_products
from shardwise.spec import catalogue
from shardwise.spec.catalogue import find_device, step_coefficients
from shardwise.spec.record import SpecError
from shardwise.spec.software import DEFAULT, find_software, is_known, software_names
from tests.command import shardwise

NAMES = software_names()


@pytest.mark.parametrize("name", NAMES)
def test_every_device_has_kernels_with_every_software(name: str) -> None:
    software = find_software(name)
    assert software.date[:2] == "20"
    for device in catalogue.devices().values():
        if device.is_cpu:
            continue
        assert is_known(device), device.name
        found = coefficients_of(device, software, step_coefficients())
        assert 0 < found.attention_efficiency < 1
        assert 0 < found.matmul_efficiency < 1
        assert measured_attention(device, software).kernel.family == "attention"
        assert measured_products(device).kernel.family == "matmul"


def test_newer_kernels_are_faster_on_long_sequences() -> None:
    h100 = find_device("H100-SXM")
    reached = []
    for name in ("flash-attention-1", "flash-attention-2", "flash-attention-3"):
        k = coefficients_of(h100, find_software(name), step_coefficients())
        reached.append(k.attention_efficiency / (1 + k.attention_half_span / 2**16))
    assert reached == sorted(reached)
    assert reached[-1] > 1.3 * reached[0]


def test_cards_without_peer_to_peer_exchange_data_through_host_memory() -> None:
    """Measured: 18 of 32 GB/s on 4 cards (PCIe 4), 35 and 28 of 64 GB/s on 4 and 8 (PCIe 5)."""
    software, fitted = find_software(), step_coefficients()
    low, high = catalogue.coefficient("through_host")
    assert low <= min(18 / 32, 35 / 64, 28 / 64) + 0.01
    assert high >= max(18 / 32, 35 / 64, 28 / 64) - 0.01
    for device in catalogue.devices().values():
        geforce = "GeForce" in device.title
        assert device.p2p == (not geforce), device.name
        if not geforce:
            continue
        assert device.source["p2p"]
        k = coefficients_of(device, software, fitted)
        direct = coefficients_of(device.but(p2p=True), software, fitted)
        assert low <= k.link_efficiency == k.exchange_efficiency <= high
        assert k.link_efficiency < direct.link_efficiency
        # Tensor cores at half rate: priced like the GA100's, not like those of data-center cards.
        assert measured_products(device).kernel.device == "A100-80GB"


def test_a_misspelled_name_has_a_suggestion() -> None:
    assert find_software("TORCH-2.13").name == DEFAULT == find_software().name
    with pytest.raises(SpecError, match="unknown software 'prime-rll'; did you mean"):
        find_software("prime-rll")


def test_plans_name_the_kernels_and_stacks_have_their_own() -> None:
    asked = ("plan", "--model", "llama-3-8b", "--cluster", "8xH100-SXM")
    assert "PyTorch 2.13 (2026-11), cuDNN attention." in shardwise(*asked).stdout
    chosen = shardwise(*asked, "--software", "flash-attention-2").stdout
    assert "FA2 attention." in chosen
    theirs = shardwise(*asked, "--for", "megatron-bridge").stdout
    assert "Megatron-Core" in theirs


def test_the_catalogue_lists_them() -> None:
    done = shardwise("catalog", "software")
    assert done.returncode == 0
    assert all(name in done.stdout for name in NAMES)
