"""What to edit where a script loads and adapts its model: the dtype, quantisation and LoRA."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.spec.adapter import Adapter
from shardwise.spec.dtype import TORCH_NAMES
from shardwise.spec.run import RunSpec
from shardwise.stacks.outcomes import ABSENT
from shardwise.stacks.read.imported import Imported
from shardwise.stacks.read.source import Script
from shardwise.stacks.write.edit import Edit

_LORA = {"rank": "r", "scale": "lora_alpha", "dropout": "lora_dropout",
         "targets": "target_modules", "rslora": "use_rslora", "dora": "use_dora",
         "train": "modules_to_save"}  # fmt: skip
_QUANTISED: dict[str, dict[str, object]] = {
    "nf4": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": "bfloat16",
    },
    "int8": {"load_in_8bit": True},
}


def model_edits(found: Imported, script: Script, run: RunSpec) -> Iterator[Edit]:
    """The edits of a script's model; `found` is what the script says now."""
    wanted = run.adapter
    mine = Adapter.read(found.adapter) if found.adapter else None
    if wanted is not None and wanted.rank is not None:
        for field, name in _LORA.items():
            old = getattr(mine, field) if mine is not None else ABSENT
            new = getattr(wanted, field)
            if old != new and (mine is not None or new):
                yield Edit(("LoraConfig", name), _listed(old), _listed(new))
    before = mine.base if mine is not None else found.strategy.get("master_dtype", "fp32")
    after = wanted.base if wanted is not None else run.strategy.master_dtype
    if before == after:
        return
    for name, value in _QUANTISED.get(str(before), {}).items():
        yield Edit(("BitsAndBytesConfig", name), value, ABSENT)
    if after in _QUANTISED:
        for name, value in _QUANTISED[after].items():
            yield Edit(("BitsAndBytesConfig", name), ABSENT, value)
    else:
        # A trainer that loads the model by its name takes these arguments.
        loads = "from_pretrained" if script.uses("from_pretrained") else "model_init_kwargs"
        dtype = wanted.float_dtype if wanted is not None else run.strategy.master_dtype
        yield Edit((loads, "dtype"), ABSENT, TORCH_NAMES[dtype])


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
