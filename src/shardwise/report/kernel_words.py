"""Which kernels a prediction assumes, as sentences."""

from __future__ import annotations

from shardwise.predict.kernels import measured_attention, measured_products
from shardwise.predict.level import correction_factor
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.level import Level
from shardwise.spec.software import find_software


def kernel_words(cluster: ClusterSpec) -> str:
    """Sentence: the software, attention kernel and devices that a prediction assumes.

    Empty for CPUs and for clusters that were calibrated.
    """
    if cluster.calibration is not None or cluster.device.is_cpu:
        return ""
    software = find_software(cluster.software)
    attention = measured_attention(cluster.device, software)
    kernel, products = attention.kernel, measured_products(cluster.device).kernel
    away = sorted({one.device for one in (kernel, products)} - {cluster.device.name})
    on = f", measured on {' and '.join(away)}" if away else ""
    assumed = f"{software.title} ({software.date}), {attention.name} attention{on}"
    return f"Kernels assumed: {assumed}.{_corrected_words(cluster)}"


def _corrected_words(cluster: ClusterSpec) -> str:
    """Sentence on how measured steps correct the prediction; empty without any."""
    if cluster.level is None:
        return ""
    steps, times = cluster.level.steps, cluster.level.factor
    counted = "one measured step" if steps == 1 else f"{steps} measured steps"
    return (
        f" Times are corrected by {counted}, which took {times:.2f} times as long as predicted "
        f"(× {correction_factor(cluster.level):.2f})."
    )


def narrower_words(interval: tuple[float, float], level: Level | None) -> str:
    """Line: the command that narrows the interval of tokens/s most, and to what.

    `interval` are relative errors; `level` is the correction by steps measured so far.
    """
    low, high = interval
    one = "one more" if level else "a"
    return f"plan run.toml --measured 3.2s: {one} measured step makes it {low:+.0%} to {high:+.0%}"
