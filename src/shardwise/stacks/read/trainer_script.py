"""Read a script that creates TrainingArguments or a config of TRL. Nothing of it is executed."""

from __future__ import annotations

import ast
from typing import Any

from shardwise.spec.record import SpecError
from shardwise.stacks.outcomes import ABSENT, Outcome
from shardwise.stacks.read import known_keys, trainer
from shardwise.stacks.read.adapters import (
    LoraKeys,
    Quantisation,
    loaded_dtype,
    set_base,
    set_lora,
    set_master,
)
from shardwise.stacks.read.imported import Imported, Reading, list_unknown
from shardwise.stacks.read.model_name import set_model_of_script
from shardwise.stacks.read.objective import CONFIGS
from shardwise.stacks.read.packed import set_packing
from shardwise.stacks.read.source import (
    Call,
    Script,
    Symbol,
    Unknown,
    script_value_text,
    unused_reason,
)
from shardwise.stacks.table import with_changed_rows
from shardwise.stacks.training_arguments import DPO, OTHER_OBJECTIVES, SFT, TRAIN

_DPO = "DPOConfig"
# Defaults of TRL's configs.
_TRL: dict[str, object] = {"gradient_checkpointing": True, "bf16": True}
_PEFT = LoraKeys()
# Known arguments of peft's LoraConfig: read, or without effect on a plan.
_LORA_CONFIG = ("r", "lora_alpha", "target_modules", "lora_dropout", "use_rslora", "use_dora",
                "modules_to_save", "task_type", "inference_mode", "base_model_name_or_path",
                "fan_in_fan_out", "init_lora_weights", "revision", "peft_type")  # fmt: skip
_SEQ_LEN = ("seq_len", "SEQ_LEN", "max_seq_length", "MAX_SEQ_LENGTH", "max_length", "MAX_LENGTH")
ARGUMENTS: dict[str, dict[str, object]] = {
    "TrainingArguments": {},
    "Seq2SeqTrainingArguments": {},
    "SFTConfig": {**_TRL, "max_length": 1024},
    **dict.fromkeys(CONFIGS, _TRL),
    _DPO: {**_TRL, "max_length": 1024},
}
# The constant in exported scripts that lists parts of the names of trained parameters.
TRAIN_ONLY = "TRAIN_ONLY"
_MISSING = object()
_KNOWN_ARGUMENTS = (*known_keys.TRAINER, *known_keys.TRL)


def has_arguments(script: Script) -> bool:
    """Whether a script creates TrainingArguments or a config of TRL."""
    return script.uses(*ARGUMENTS)


def table_of(script: Script) -> dict[str, object]:
    """The arguments that a script gives to TrainingArguments or a config of TRL.

    Raises:
        SpecError: It creates none.
    """
    call = next(iter(script.calls(*ARGUMENTS)), None)
    if call is None:
        raise SpecError("import: the script creates neither TrainingArguments nor a config of TRL")
    given = {key: _value(key, value, []) for key, value in call.keywords.items()}
    table = {key: value for key, value in given.items() if value is not _MISSING}
    if call.name == _DPO:
        # It says which trainer the arguments are for, as the key does in a file.
        table.setdefault("precompute_ref_log_probs", False)
    return table


def read(script: Script) -> Imported:
    """The settings of the first call that creates TrainingArguments or a config of TRL."""
    call = next(script.calls(*ARGUMENTS))
    dropped: list[Outcome] = []
    given = {key: _value(key, value, dropped) for key, value in call.keywords.items()}
    table = {key: value for key, value in given.items() if value is not _MISSING}
    defaults = {
        key: value
        for key, value in ARGUMENTS[call.name].items()
        if key not in call.keywords and not (key == "bf16" and table.get("fp16"))
    }
    if call.more:
        runs = f"Some arguments of {call.name} come from a dictionary made when the script runs."
        dropped.append(Outcome("lost", why=runs))
    if len(list(script.calls(*ARGUMENTS))) > 1:
        more = f"The script creates arguments more than once; the first {call.name} is read."
        dropped.append(Outcome("lost", why=more))
    others = {name: OTHER_OBJECTIVES for name in CONFIGS if name != _DPO}
    rows = {"SFTConfig": SFT, _DPO: DPO, **others}.get(call.name, {})
    # If keywords come from a dictionary built at run time, any argument may be among them.
    undecided = _KNOWN_ARGUMENTS if call.more else given
    reading = trainer.read_arguments(
        {**defaults, **table},
        f"a script with {call.name}",
        _KNOWN_ARGUMENTS,
        with_changed_rows(TRAIN, rows),
        frozenset(key for key in undecided if key not in table),
    )
    read_model(script, reading)
    set_packing(reading, table, "packing", False if call.name == "SFTConfig" else None)
    set_model_of_script(script, reading)
    for key in ("use_peft", "load_in_4bit", "load_in_8bit"):
        if table.get(key) and not reading.adapter:
            reading.lose(key, "no LoraConfig is in this script; set adapter")
    found = reading.finish()
    if call.name == _DPO:
        found = trainer.as_trl_dpo(found, _DPO, table)
    found = _with_loss(found, call.name, table)
    absent = trainer.defaults_of_trl(defaults)
    # Arguments whose values are unknown are listed once, by the reason.
    unsettled = {one.key for one in dropped if one.key}
    known = [one for one in found.outcomes if one.is_lost or one.key not in unsettled]
    return found._replace(outcomes=(*absent, *dropped, *known))


def _with_loss(found: Imported, name: str, table: dict[str, Any]) -> Imported:
    """The settings with the chunked loss of TRL's trainers for SFTConfig and DPOConfig."""
    return trainer.with_trl_loss(found, {}, table) if name in ("SFTConfig", _DPO) else found


def read_model(script: Script, reading: Reading) -> None:
    """Read the dtype and quantisation of the model, its LoRA, and the sequence length."""
    loaded = _loaded(script)
    configs = list(script.calls("LoraConfig"))
    if configs:
        _lora(configs[0], reading)
        if len(configs) > 1:
            reading.warn("The script creates LoraConfig more than once; the first is read.")
    elif script.uses("get_peft_model", "PeftModel"):
        reading.lose("get_peft_model", "no LoraConfig is in this script; set adapter")
    trained = script.value(ast.Name(id=TRAIN_ONLY))
    if not reading.adapter and type(trained) is tuple and all(map(_is_text, trained)):
        trained_only = f"{TRAIN_ONLY} becomes adapter.train: {', '.join(trained)}."
        reading.remark(trained_only, {"adapter.train": trained})
    set_base(reading, loaded or "float32", _quantised(script, reading))
    if loaded is not None:
        set_master(reading, loaded_dtype(reading, loaded))
    if "seq_len" not in reading.job and (found := script.number(*_SEQ_LEN)):
        reading.job["seq_len"] = found[1]
        reading.given(found[0], {"job.seq_len": ABSENT}, found[1], naming="assignment")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _loaded(script: Script) -> str | None:
    """The dtype that the model is loaded in; None if the script does not give it."""
    for call in script.calls("from_pretrained", "from_config"):
        given = call.get("dtype") or call.get("torch_dtype")
        if isinstance(given, (str, Symbol)):
            return script_value_text(given)
    for call in script.calls(*ARGUMENTS):
        # What TRL loads a model with that is given by its name.
        kept = call.get("model_init_kwargs")
        given = kept.get("dtype") or kept.get("torch_dtype") if isinstance(kept, dict) else None
        if isinstance(given, (str, Symbol)):
            return script_value_text(given)
    return None


def _lora(call: Call, reading: Reading) -> None:
    """Read a call of LoraConfig."""
    # The task type has no effect on a plan.
    given = {key: value for key, value in call.keywords.items() if key != "task_type"}
    values = {key: _value(key, value, reading.outcomes) for key, value in given.items()}
    table = {key: value for key, value in values.items() if value is not _MISSING}
    if call.more:
        reading.warn("Some settings of LoraConfig come from a dictionary made at run time.")
    if table.get("bias") not in (None, "none"):
        reading.lose("bias", "Shardwise trains no biases beside adapters")
    list_unknown(reading, values, (*_LORA_CONFIG, "bias"), "LoraConfig.")
    try:
        set_lora(reading, table, _PEFT)
    except SpecError as error:
        raise SpecError(f"LoraConfig: {error}") from None


def _quantised(script: Script, reading: Reading) -> Quantisation | None:
    """The format in a BitsAndBytesConfig; None without quantisation."""
    for call in script.calls("BitsAndBytesConfig"):
        if call.more:
            reading.warn("Some settings of BitsAndBytesConfig are made when the script runs.")
        if call.get("load_in_8bit") is True:
            return Quantisation(8)
        if call.get("load_in_4bit") is True:
            kind = call.get("bnb_4bit_quant_type")
            double = call.get("bnb_4bit_use_double_quant") is True
            return Quantisation(4, kind if isinstance(kind, str) else "fp4", double)
    return None


def _value(key: str, value: Any, dropped: list[Outcome]) -> Any:
    """A value of the script as JSON has it.

    _MISSING if it is known only at run time; it is then appended to `dropped`.
    """
    if isinstance(value, tuple) and not isinstance(value, (Unknown, Call)):
        parts = [_value(key, part, dropped) for part in value] if type(value) is tuple else None
        if parts is not None and _MISSING not in parts:
            return parts
    elif isinstance(value, dict):
        table = {name: _value(f"{key}.{name}", part, dropped) for name, part in value.items()}
        return {name: part for name, part in table.items() if part is not _MISSING}
    elif (
        isinstance(value, Call)
        and value.name in ("dict", "ParallelismConfig")
        and not value.args
        and not value.more
    ):
        return _value(key, value.keywords, dropped)
    elif value is None or isinstance(value, (bool, int, float, str)):
        return value
    dropped.append(Outcome("lost", key, why=unused_reason(value)))
    return _MISSING
