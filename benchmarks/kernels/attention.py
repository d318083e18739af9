"""Attention: e s / (s + s0), with factors for head size, mask, backward and determinism.

Prefill of serving engines also writes the KV cache: those rows make kernels of their own, called
"prefill". Their shapes are kept where they are like training: 8,192 tokens and 16 heads at least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.kernels.fitting import Form, Mask, Numbers, Prior, Values
from benchmarks.kernels.study import (
    LEAST_ROWS,
    Key,
    Problem,
    Result,
    Skipped,
    grouped,
    solve,
    too_few,
)
from benchmarks.kernels.tables import SERVING, Row, read
from shardwise.spec.kernels import attention_s

NAMES = {
    "AITER-asm": "AITER",
    "AITER-asm a16": "AITER a16",
    "AITER-asm a32": "AITER a32",
    # On an A100 vLLM has no other; what SGLang chose is not stated.
    "FA (vllm)": "FA2",
    "FA (sglang)": "FA (version not stated)",
    "Triton (sglang)": "Triton",
    "torch-SDPA-flash": "SDPA flash",
    "TRT-LLM fmha": "TRT-LLM",
    "flex_attention": "flex",
    "xformers": "xFormers",
}
PASSES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "together"}
HEADS = (64, 192, 256)
BLACKWELL = ("B200", "GB200", "B300", "GB300")
# Medians over all kernels, where a kernel's own rows say nothing.
PRIORS = {
    "full_efficiency": Prior(1.02, 0.1),
    "full_half_span": Prior(0.35, 0.4),
    "backward": Prior(0.85, 0.2),
    "backward_half_span": Prior(1.1, 0.3),
    "deterministic": Prior(0.93, 0.1),
    "head_192": Prior(0.97, 0.15),
    "head_256": Prior(1.03, 0.15),
}


def studies() -> Iterator[Result]:
    """Every kernel and device of the table."""
    for key, rows in _grouped().items():
        usual = _usual_head(rows)
        shapes = _Shapes(rows, usual)
        reason = too_few(shapes.span)
        if reason:
            yield Skipped(key, len(rows), reason)
            continue
        yield solve(
            key,
            Problem(
                rows=rows,
                seconds=shapes.seconds,
                form=shapes.form,
                priors=shapes.priors(key),
                sizes=shapes.span,
                peak=rows[0].peak,
                constants=shapes.constants(),
                concerns=shapes.concerns(),
            ),
        )


def _grouped() -> dict[Key, list[Row]]:
    found = grouped(read("attention"), _key)
    for key in [key for key in found if key.kernel in ("AITER a16", "AITER a32")]:
        # The forward is one kernel, the backward accumulates in 16 or in 32 bits.
        found[key] += found.get(key._replace(kernel="AITER"), [])
    return {key: rows for key, rows in found.items() if key.kernel != "AITER"}


def _key(row: Row) -> Key | None:
    cells = row.cells
    name = NAMES.get(cells["kernel"], cells["kernel"])
    if row.source.startswith(SERVING):
        if row.number("batch") * row.number("seqlen") < 8192 or row.number("seqlen") < 1024:
            return None
        name += " prefill"
    dtype = cells["dtype"].replace("fp16", "bf16")
    return Key(row.device, "attention", name, dtype)


def _usual_head(rows: Sequence[Row]) -> int:
    """The head size that the efficiency is of: 128 where it was measured."""
    sizes = {int(row.number("head_dim")) for row in rows}
    return 128 if 128 in sizes else min(sizes)


class _Shapes:
    """Rows as columns, and the form on them."""

    def __init__(self, rows: Sequence[Row], usual: int) -> None:
        self.usual = usual
        self.span = np.asarray([row.number("seqlen") for row in rows])
        self.head = np.asarray([int(row.number("head_dim")) for row in rows])
        self.full = np.asarray([row.cells["causal"] == "0" for row in rows])
        self.exact = np.asarray([row.cells["deterministic"] == "1" for row in rows])
        self.passes = [PASSES[row.cells["pass"]] for row in rows]
        self.peak = np.asarray([row.peak for row in rows])
        self.flops = np.asarray([row.flops for row in rows])
        # A chart without times says how fast, not how much: then a call's time is in its s0.
        self.timed = self.flops > 0
        self.flops = np.where(self.timed, self.flops, 1e12)
        share = np.asarray([row.number("efficiency") for row in rows])
        self.seconds = self.flops / (share * self.peak)
        inner, outer = self.head, np.asarray([row.number("head_dim_v") for row in rows])
        forward, backward = 2 * (inner + outer), 2 * (3 * inner + 2 * outer)
        # Part of a row's FLOPs that is the backward's.
        self.back = np.asarray(
            [
                {"forward": 0.0, "backward": 1.0, "together": float(b / (f + b))}[one]
                for one, f, b in zip(self.passes, forward, backward, strict=True)
            ]
        )

    def priors(self, key: Key) -> dict[str, Prior]:
        """The coefficients that rows of these shapes identify."""
        found = {"efficiency": Prior(0.5, 1.0, high=1.0), "half_span": Prior(800.0, 1.0)}
        if self._work_varies():
            found["call_s"] = Prior(1e-5, 0.7)
        if 0 < self.full.sum() < len(self.full):
            found |= {name: PRIORS[name] for name in ("full_efficiency", "full_half_span")}
        if self._apart():
            found |= {name: PRIORS[name] for name in ("backward", "backward_half_span")}
        if 0 < (self.exact & (self.back > 0)).sum() < (self.back > 0).sum():
            found["deterministic"] = PRIORS["deterministic"]
        small = Prior(0.62 if key.device in BLACKWELL else 0.87, 0.15)
        for size in set(HEADS) & set(self.head.tolist()) - {self.usual}:
            found[f"head_{size}"] = small if size == 64 else PRIORS[f"head_{size}"]
        return found

    def constants(self) -> dict[str, str | int]:
        """What is written beside the coefficients."""
        apart, forward = self._apart(), not self.back.any()
        passes = "apart" if apart else "forward" if forward else "together"
        # Entries say of which heads they are, unless of 128.
        return {"passes": passes} | ({} if self.usual == 128 else {"head_dim": self.usual})

    def concerns(self) -> dict[str, Mask]:
        """Rows by what a factor is of: whoever measured no such row cannot say."""
        found = {f"heads of {size}": self.head == size for size in set(self.head.tolist())}
        found |= {"no mask": self.full, "causal": ~self.full, "deterministic": self.exact}
        return found | {"forward": self.back < 1, "backward": self.back > 0}

    def _apart(self) -> bool:
        kinds = set(self.passes)
        return len(kinds) > 1 and kinds != {"together"}

    def _work_varies(self) -> bool:
        """Whether calls of one span differ in their FLOPs, so that a call's time shows."""
        at = self.span[self.timed & ~self.full]
        flops = self.flops[self.timed & ~self.full]
        return any(
            len(set(flops[at == span].tolist())) >= LEAST_ROWS
            and flops[at == span].max() > 4 * flops[at == span].min()
            for span in set(at.tolist())
        )

    @property
    def form(self) -> Form:
        """Seconds of every row."""

        def seconds(v: Values) -> Numbers:
            efficiency = v["efficiency"] * np.where(self.full, v.get("full_efficiency", 1.0), 1.0)
            half = v["half_span"] * np.where(self.full, v.get("full_half_span", 1.0), 1.0)
            for size in HEADS:
                efficiency = efficiency * np.where(
                    self.head == size, v.get(f"head_{size}", 1.0), 1.0
                )
            slower = v.get("backward", 1.0) * np.where(self.exact, v.get("deterministic", 1.0), 1.0)
            longer = half * v.get("backward_half_span", 1.0)
            call = np.where(self.timed, v.get("call_s", 0.0), 0.0)
            forward = attention_s(self.flops, self.span, self.peak, efficiency, half, call)
            backward = attention_s(
                self.flops, self.span, self.peak, efficiency * slower, longer, call
            )
            both = (1.0 - self.back) * (forward - call) + self.back * (backward - call)
            return both + call * np.where((self.back > 0) & (self.back < 1), 2.0, 1.0)

        return seconds
