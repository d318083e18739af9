"""Which model types of the installed transformers can be planned, and how.

    python -m benchmarks.model_types [KIND ...] [--only NAME ...] [--write FILE]

Each type is tried at the size of its configuration class, on the meta device: in bf16, and
in fp32 where its class computes in fp32 alone. `--write` writes the tables as Markdown.
"""

from __future__ import annotations

import argparse
import re
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto import modeling_auto

from shardwise.pytorch.from_config import model_from_config
from shardwise.spec.dtype import DType
from shardwise.spec.families import FAMILIES
from shardwise.spec.huggingface import longest_sequence
from shardwise.spec.record import SpecError
from shardwise.units.module import module_units

KINDS = {
    "causal language models": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "vision-language models": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "encoder-decoders of text": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "encoder-decoders of speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "encoders": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "image classifiers": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
LIMIT_S = 240
# Sizes that configuration classes leave open, by key.
OPEN = {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1}


# Ways in which a model type is planned.
WAYS = ("formulas", "trace", "trace in fp32")
DTYPES: dict[str, DType] = {"trace": "bf16", "trace in fp32": "fp32"}


class Tried(NamedTuple):
    """How a model type is planned: one of WAYS, or the reason why it is refused."""

    kind: str
    name: str
    how: str

    @property
    def planned(self) -> bool:
        return self.how in WAYS


def types_of(kind: str) -> Iterator[tuple[str, str]]:
    """(model type, class) of the installed transformers for a kind of model."""
    for name, made in getattr(modeling_auto, KINDS[kind]).items():
        yield name, made[0] if isinstance(made, tuple) else made


def how_planned(name: str, architecture: str) -> str:
    """How a model type is planned at the size of its configuration class."""
    if name in FAMILIES:
        return "formulas"
    reasons = []
    for way, dtype in DTYPES.items():
        try:
            trace(name, architecture, dtype)
        except SpecError as error:
            reasons.append(one_line(str(error)))
        except Exception as error:
            reasons.append(one_line(f"{type(error).__name__}: {error}"))
        else:
            return way
    return reasons[0]


def trace(name: str, architecture: str, dtype: DType) -> None:
    """Build a model type without weights and trace it; an exception says why that fails."""
    config: Any = transformers.CONFIG_MAPPING[name]()
    table = {**completed(config.to_dict()), "model_type": name, "architectures": [architecture]}
    with time_limit():
        with torch.device("meta"):
            module: Any = model_from_config(table, name)
        # Outside: a trace has devices of its own.
        longest = longest_sequence(table)
        fixed = module.main_input_name == "pixel_values"
        module_units(module, longest if fixed and longest else min(128, longest or 128), dtype)


def completed(table: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the sizes that some classes leave open for published files to say."""
    made = dict(table)
    hidden, heads = table.get("hidden_size"), table.get("num_attention_heads")
    layers = table.get("num_hidden_layers")
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        if made.get("head_dim", 0) is None:
            made["head_dim"] = hidden // heads
        if made.get("num_key_value_heads", 0) is None:
            made["num_key_value_heads"] = heads
    if isinstance(layers, int) and made.get("layer_types", 0) is None:
        made["layer_types"] = ["full_attention"] * layers
    for key, size in OPEN.items():
        if made.get(key, 0) is None:
            made[key] = size
    # Grouped products take rows of whole 16 bytes: DeepSeek-V2's class says 1407, its files 1408.
    if isinstance(width := made.get("moe_intermediate_size"), int):
        made["moe_intermediate_size"] = -(-width // 8) * 8
    if isinstance(attention := made.get("attn_config"), dict):
        stated = {key: value for key, value in attention.items() if value is not None}
        made["attn_config"] = {"rope_theta": 10_000.0, "clip_qkv": 8.0, **stated}
    return made


def one_line(text: str) -> str:
    """The reason in an error, on one short line without paths."""
    line = re.sub(r"\s+", " ", text.removeprefix("model: ").partition("; give it")[0])
    return shorten(re.sub(r"/\S+/", "…/", line).replace("|", "/"), 140, placeholder=" …")


@contextmanager
def time_limit() -> Iterator[None]:
    """Raise TimeoutError inside after LIMIT_S."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not traced in {LIMIT_S} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)


def page(tried: list[Tried]) -> str:
    """The page of all types that were tried."""
    lines = [
        "# Model types of transformers",
        "",
        f"What `estimate` and `plan` know of each model type of transformers "
        f"{transformers.__version__}: formulas, a [trace](../how-to/own-model.md), or neither.",
        "Each was tried at the size of its configuration class, without weights. Some classes "
        "leave sizes open that published files state, and some need more than text: "
        "a folder of yours may be read where the type is refused here.",
        "",
        "`python -m benchmarks.model_types` tries them again.",
        "",
        "| kind | types | by formulas | by a trace | by a trace in fp32 | refused |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for kind in KINDS:
        count = Counter(one.how if one.planned else "refused" for one in tried if one.kind == kind)
        cells = (sum(count.values()), *(count[way] for way in WAYS), count["refused"])
        lines.append(f"| {kind} | {' | '.join(map(str, cells))} |")
    for kind in KINDS:
        of_kind = [one for one in tried if one.kind == kind]
        lines += ["", f"## {kind[0].upper()}{kind[1:]}", ""]
        lines += ["| planned by | types |", "|---|---|"]
        for how in WAYS:
            names = ", ".join(f"`{one.name}`" for one in of_kind if one.how == how)
            if names:
                lines.append(f"| {how.replace('trace', 'a trace')} | {names} |")
        refused = [one for one in of_kind if not one.planned]
        if refused:
            lines += ["", "| refused | why |", "|---|---|"]
            lines += [f"| `{one.name}` | {one.how} |" for one in refused]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--only", nargs="*", help="names of model types to try")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    tried = []
    for kind in given.kinds:
        for name, architecture in types_of(kind):
            if given.only and name not in given.only:
                continue
            tried.append(Tried(kind, name, how_planned(name, architecture)))
            print(*tried[-1], sep=" | ", flush=True)
    print(page(tried).partition("\n## ")[0])
    if given.write:
        given.write.write_text(page(tried))


if __name__ == "__main__":
    main()
