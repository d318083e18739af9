"""Read settings of FSDP1 as settings of FSDP2."""

from __future__ import annotations

from typing import Any

from shardwise.stacks.outcomes import Kind, Outcome
from shardwise.stacks.read.imported import Reading, list_unknown
from shardwise.stacks.read.source import (
    DIFFERS,
    Call,
    Symbol,
    Unknown,
    script_value_text,
    unused_reason,
)
from shardwise.stacks.read.torch_values import read_mesh, read_mixed_precision

# For each sharding strategy: the fields of a Strategy, and the setting of FSDP2 as text.
SHARDING: dict[str, tuple[dict[str, object], str]] = {
    "FULL_SHARD": ({"kind": "zero3"}, "reshard_after_forward = true"),
    "SHARD_GRAD_OP": ({"kind": "zero2"}, "reshard_after_forward = false"),
    "NO_SHARD": ({"kind": "ddp"}, "DistributedDataParallel"),
    "HYBRID_SHARD": (
        {"kind": "zero3", "within_node": True},
        "reshard_after_forward = true, sharded within a node",
    ),
    "_HYBRID_SHARD_ZERO2": (
        {"kind": "zero2", "within_node": True},
        "reshard_after_forward = false, sharded within a node",
    ),
}
# For each prefetch: FSDP units gathered ahead in the backward, and the note about it.
PREFETCH: dict[str, tuple[int, str]] = {
    "BACKWARD_PRE": (1, "what FSDP2 does by itself"),
    "BACKWARD_POST": (1, "FSDP2 knows no BACKWARD_POST and gathers before the reduction"),
    "None": (0, "a unit is gathered when it is needed"),
}
# Settings that FSDP2 does not need, and why.
OBSOLETE: dict[str, str] = {
    "use_orig_params": "always so in FSDP2, whose parameters are the model's own",
    "limit_all_gathers": "FSDP2 needs no such limit, because it frees memory without waiting",
    "sync_module_states": "in Shardwise every rank starts from one seed or one checkpoint",
    "device_id": "in Shardwise each process takes its own device",
    "param_init_fn": "train.meta_init builds on the meta device and fills unit by unit",
}
# Settings without a counterpart, and what happens instead.
LOST: dict[str, str] = {
    "ignored_modules": "Shardwise shards every parameter",
    "ignored_states": "Shardwise shards every parameter",
    "ignored_parameters": "Shardwise shards every parameter",
    "process_group": "in Shardwise groups follow from shard and replicate",
}
_PREFETCH_DEFAULT = Symbol("BackwardPrefetch.BACKWARD_PRE")
# In the order of FullyShardedDataParallel's own arguments.
_POSITIONS = ("module", "process_group", "sharding_strategy", "cpu_offload", "auto_wrap_policy",
              "backward_prefetch", "mixed_precision")  # fmt: skip
_READ = (*_POSITIONS, "forward_prefetch", "device_mesh", "wrapper_cls")
# Settings that a dictionary built at run time may contain.
_MAY_BE_GIVEN = (*_POSITIONS[2:], "forward_prefetch", "device_mesh")


def table() -> list[tuple[str, str]]:
    """Rows (FSDP1 setting, counterpart in Shardwise) of the page "Move from FSDP1"."""
    sharding = [
        (f"ShardingStrategy.{name}", f"{_fields(fields)} ({words})")
        for name, (fields, words) in SHARDING.items()
    ]
    prefetch = [
        (f"backward_prefetch={name}", f"prefetch = {ahead} ({words})")
        for name, (ahead, words) in PREFETCH.items()
    ]
    return [
        *sharding,
        ("MixedPrecision(param_dtype)", "param_dtype"),
        ("MixedPrecision(reduce_dtype)", "reduce_dtype (unset, it is param_dtype in FSDP1)"),
        ("auto_wrap_policy", "none needed: every block is a unit, blocks_per_unit groups them"),
        *prefetch,
        ("forward_prefetch=True", "forward_prefetch = 1"),
        ("CPUOffload(offload_params=True)", "offload = true"),
        ("device_mesh", "replicate and shard, its two sizes"),
        ("no_sync()", "grad_sync = last (without it: every)"),
        *((name, f"none needed: {why}") for name, why in OBSOLETE.items()),
        *((name, f"not carried over: {why}") for name, why in LOST.items()),
    ]


def _fields(fields: dict[str, object]) -> str:
    """Fields and values as text, such as "kind = zero3"."""
    return ", ".join(f"{key} = {script_value_text(value)}" for key, value in fields.items())


def set_sharding(reading: Reading, name: str, absent: str = "") -> None:
    """Set kind (zero3, zero2 or ddp) and `within_node` from `name`, a key of SHARDING.

    Also record where they come from: `absent` is the missing key that `name` is the default of;
    empty if the file gives `name`.
    """
    fields, words = SHARDING[name]
    reading.strategy |= fields
    kind = {"kind": fields["kind"]}
    if absent:
        reading.default(absent, kind, name, f" ({words})")
    else:
        reading.given("sharding_strategy", kind, name, f" ({words})", naming="value")


def set_prefetch(reading: Reading, name: str, absent: str = "") -> None:
    """Set how many units are gathered ahead in the backward, from the name of a BackwardPrefetch.

    `absent` is the key that is missing, if `name` is the default.
    """
    ahead, words = PREFETCH[name]
    fields = {"prefetch": ahead}
    if absent:
        reading.default(absent, fields, why=f": {words}")
        return
    kind: Kind = "lost" if name == "BACKWARD_POST" else "given"
    reading.record(Outcome(kind, "backward_prefetch", name, fields, f": {words}", "pair"))


def read_wrapped(calls: list[Call], reading: Reading) -> None:
    """Read the settings of all calls of FullyShardedDataParallel.

    A setting that differs between calls is unknown.
    """
    settings = _settings(calls, reading)
    _sharding(settings, reading)
    # Without sharding there is no all-gather, so no prefetch, units or offload.
    if reading.strategy.get("kind") != "ddp":
        _prefetch(settings, reading)
        _units(settings.get("auto_wrap_policy"), len(calls), reading)
        _offload(settings.get("cpu_offload"), reading)
    read_mixed_precision(settings.get("mixed_precision"), reading)
    read_mesh(settings.get("device_mesh"), reading)
    for name, why in OBSOLETE.items():
        if name in settings:
            reading.explain(name, why)
    list_unknown(reading, settings, (*_READ, *OBSOLETE, *LOST), "FSDP.")
    for name, why in LOST.items():
        if name in settings and settings[name] is not None:
            reading.lose(name, why)


def _settings(calls: list[Call], reading: Reading) -> dict[str, Any]:
    """The arguments of all calls by name; DIFFERS for an argument that is not the same in all."""
    found: dict[str, Any] = {}
    for call in calls:
        given = {**dict(zip(_POSITIONS, call.args, strict=False)), **call.keywords}
        if call.more:
            reading.warn("Some settings of FSDP come from a dictionary made when the script runs.")
            given = {**dict.fromkeys(_MAY_BE_GIVEN, Unknown("what that dictionary holds")), **given}
        for name, value in given.items():
            differs = name in found and name != "module" and found[name] != value
            found[name] = DIFFERS if differs else value
    return found


def _sharding(settings: dict[str, Any], reading: Reading) -> None:
    """Read `sharding_strategy`."""
    value = settings.get("sharding_strategy")
    if value is None:
        set_sharding(reading, "FULL_SHARD", absent="sharding_strategy")
    elif isinstance(value, Symbol) and value.last in SHARDING:
        set_sharding(reading, value.last)
    else:
        reading.lose(
            "sharding_strategy", f"{unused_reason(value)}; read as its default, FULL_SHARD"
        )
        reading.strategy |= SHARDING["FULL_SHARD"][0]


def _prefetch(settings: dict[str, Any], reading: Reading) -> None:
    """Read `backward_prefetch` and `forward_prefetch`."""
    value = settings.get("backward_prefetch", _PREFETCH_DEFAULT)
    name = script_value_text(value)
    if name not in PREFETCH:
        reading.lose("backward_prefetch", unused_reason(value))
    elif "backward_prefetch" in settings:
        set_prefetch(reading, name)
    forward = settings.get("forward_prefetch", False)
    if isinstance(forward, bool):
        reading.strategy["forward_prefetch"] = int(forward)
        if forward:
            reading.given("forward_prefetch", {"forward_prefetch": 1}, why=": one unit ahead")
    else:
        reading.lose("forward_prefetch", unused_reason(forward))


def _units(policy: Any, calls: int, reading: Reading) -> None:
    """Compare the FSDP units of `auto_wrap_policy` with one unit per block."""
    name, layers = _policy(policy)
    if name in ("transformer_auto_wrap_policy", "ModuleWrapPolicy") and layers:
        reading.explain(
            "auto_wrap_policy", f"every {layers} is one FSDP unit, as every block is in Shardwise"
        )
    elif policy is None and calls > 1:
        reading.remark("Modules are wrapped one by one; in Shardwise every block is one FSDP unit.")
    elif policy is None:
        reading.warn(
            "Without an auto_wrap_policy the whole model is one unit there; here every block is "
            "one, which needs less memory."
        )
    else:
        reading.lose(
            "auto_wrap_policy",
            f"{name or script_value_text(policy)} chooses units of its own; "
            "here every block is one",
        )


def _policy(policy: Any) -> tuple[str, str]:
    """The kind of a wrapping policy, and its layer classes as text; "" for what is unknown."""
    if isinstance(policy, Symbol):
        return policy.last, ""
    if not isinstance(policy, Call):
        return "", ""
    name, classes = policy.name, policy.get("module_classes", 0)
    if policy.name == "partial" and policy.args and isinstance(policy.args[0], Symbol):
        name, classes = policy.args[0].last, policy.keywords.get("transformer_layer_cls")
    if isinstance(classes, Call) and classes.name == "set" and classes.args:
        classes = classes.args[0]
    if not isinstance(classes, tuple):
        return name, ""
    return name, " and ".join(
        script_value_text(layer) for layer in classes if isinstance(layer, Symbol)
    )


def _offload(value: Any, reading: Reading) -> None:
    """Read `cpu_offload`."""
    if value is None:
        return
    ours = isinstance(value, Call) and value.name == "CPUOffload" and not value.more
    offloaded = value.get("offload_params", 0) if ours else value
    if isinstance(offloaded, bool) or offloaded is None:
        reading.strategy["offload"] = bool(offloaded)
        if offloaded:
            reading.given("CPUOffload", {"offload": True})
    else:
        reading.lose("cpu_offload", unused_reason(offloaded))
