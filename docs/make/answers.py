"""JSON that `plan` and `whatif` print, as JSON schema.

Records of the code give the keys of their parts; keys that a `to_dict` adds itself stand here, and
a test holds real answers against the result. Keys may be added later.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args, get_type_hints

from make.fields import DRAFT, meaning, plain
from make.values import either, schema_of
from shardwise.planning.layout import Layout
from shardwise.planning.money import SizeReason
from shardwise.planning.plan import Objective
from shardwise.planning.reasons import layout, limits, settings, warnings
from shardwise.planning.reasons.reason import Reason
from shardwise.planning.rows import Candidate
from shardwise.planning.threshold import Obstacle, Target
from shardwise.planning.ways import Change
from shardwise.spec.job import Job
from shardwise.spec.mesh import Mesh
from shardwise.spec.strategy import Strategy
from shardwise.step.profile import Bottleneck, Verdict

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
WHOLE: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
PAIR: Schema = {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}
BINDING: Schema = {"enum": list(get_args(Bottleneck))}
RECORDS = (Candidate, Change, Target, Mesh)


def plan_schema() -> Schema:
    """What `shardwise plan --json` prints."""
    return _answer("plan", _plan(), ("size", "list_price", "deadline"))


def whatif_schema() -> Schema:
    """What `shardwise whatif --json` prints."""
    study = _object(
        vary=(TEXT, "The quantity that varies."),
        points=(_list(_ref("point")), "One answer for each value."),
    )
    keys = {
        "studies": (_list(study), "One for each --vary."),
        "least": (_ref("least"), "The answer of --least."),
        "deadline": (_ref("least"), "Devices that would meet --deadline; absent where it is met."),
        "list_price": (_list_price(), "The price of the instance, where no price was given."),
    }
    return _answer("whatif", keys, ("least", "deadline", "list_price"))


# ---- whole answers --------------------------------------------------------------------------


def _answer(command: str, keys: dict[str, tuple[Schema, str]], optional: tuple[str, ...]) -> Schema:
    whole = _object(
        optional,
        schema=({"const": 1}, "Version of this shape; rises when a key changes or is removed."),
        kind=({"const": "predicted"}, "How the numbers were obtained."),
        **keys,
    )
    about = {"title": command, "description": f"What shardwise {command} --json prints."}
    return {"$schema": DRAFT, **about, **whole, "definitions": _definitions()}


def _plan() -> dict[str, tuple[Schema, str]]:
    size = _object(
        reason=({"enum": list(get_args(SizeReason))}, "Why this number of devices."),
        half_the_time=(NUMBER, "What halving the time may cost more, as a share."),
        devices=(either(WHOLE, NULL), "What to train on."),
        cheapest_devices=(either(WHOLE, NULL), "The cheapest, in time or not."),
        sizes=(_list({"type": "object"}), "Layout, speed and cost of each number of devices."),
    )
    slack = _object(
        memory_bytes=(WHOLE, "Usable memory that stays free."),
        network_factor=(
            either(NUMBER, NULL),
            "How much slower the network could be before a step takes 5 % longer.",
        ),
    )
    baseline = _object(
        ("tokens_per_s",),
        name=({"enum": ["ddp", "now"]}, "What is compared with."),
        needed_bytes=(WHOLE, "Memory it needs per device."),
        verdict=({"enum": list(get_args(Verdict))}, "Whether it fits."),
        tokens_per_s=(NUMBER, "Absent where it does not fit."),
    )
    return {
        "model": (TEXT, "Its name."),
        "cluster": (TEXT, "Its shorthand."),
        "job": (_dumped(Job), "What is trained."),
        "objective": ({"enum": list(get_args(Objective))}, "What was optimised."),
        "aim": (_or_null("reason"), "What the objective decided, where it is not throughput."),
        "size": (size, "The number of devices; with objective money."),
        "cost": (_or_null("cost"), "Of the recommended configuration."),
        "list_price": (_list_price(), "The price of the instance, where no price was given."),
        "winner": (_or_null("configuration"), "The recommended one; null if none fits."),
        "layouts": (_list(_ref("configuration")), "The best of each layout, fastest first."),
        "baselines": (_list(baseline), "DDP, and what runs today."),
        "rejected": (_list(_rejected()), "Layouts that do not fit."),
        "pareto": (_list(_ref("configuration")), "Faster than all others that need less memory."),
        "why": (_list(_ref("reason")), "Why the winner is recommended."),
        "warnings": (_list(_ref("reason")), "What to know before the plan is trusted."),
        "binding": (BINDING, "What limits the speed."),
        "slack": ({"anyOf": [slack, NULL]}, "What could be taken away."),
        "tips": (_list(_ref("reason")), "What else would help."),
        "would_fit": (_list(_tuple(Change)), "Where none fits: changes after which one does."),
        "considered": (WHOLE, "Configurations that were priced."),
        "fitting": (WHOLE, "Of these, how many fit."),
        "limit_bytes": (WHOLE, "Usable memory per device."),
        "error_interval": (PAIR, "Relative error of tokens/s that nine of ten runs stay within."),
        "interval_after_a_step": (
            either(PAIR, NULL),
            "The same once one more step is measured; null where times were calibrated.",
        ),
        "comparison_interval": (
            PAIR,
            "Relative error of the ratio of two speeds, in four of five measured pairs.",
        ),
        "fitted": (FLAG, "Whether step times of this device were fitted to measured runs."),
        "for_stack": (either(TEXT, NULL), "The stack of --for, whose limits the search kept to."),
        "deadline": (_ref("least"), "Devices that would meet --deadline; absent where it is met."),
    }


# ---- parts ----------------------------------------------------------------------------------


def _definitions() -> Schema:
    return {
        "strategy": _dumped(Strategy, without=("within_node",)),
        "configuration": _configuration(),
        "layout": _layout(),
        "cost": _cost(),
        "point": _point(),
        "least": _least(),
        "reason": {"oneOf": [reason_schema(kind) for kind in reason_kinds()]},
    }


def _configuration() -> Schema:
    return _tuple(
        Candidate,
        mfu={**NUMBER, "description": "Model FLOPs utilisation, a share."},
        tokens_per_step={**WHOLE, "description": "Over all devices."},
    )


def _cost() -> Schema:
    keys = {
        "tokens": (NUMBER, "To train on."),
        "seconds": (NUMBER, "Until these are done."),
        "device_hours": (NUMBER, "For these tokens."),
        "device_hours_per_billion_tokens": (NUMBER, "Where no number of tokens was given."),
        "money": (NUMBER, "For these tokens."),
        "money_per_billion_tokens": (NUMBER, "Where no number of tokens was given."),
        "interval": (PAIR, "Relative: of nine of ten runs; failures are in the upper end."),
        "failures": (NUMBER, "The share of the time that is allowed for failures."),
    }
    return _object(tuple(keys), **keys)


def _list_price() -> Schema:
    return _object(
        instance=(TEXT, "Its name."),
        usd_per_gpu_hour=(NUMBER, "On demand, in US dollars."),
        day=(TEXT, "The day of the price, such as 2026-08-22."),
    )


def _point() -> Schema:
    keys = {
        "fits": (FLAG, "Whether a configuration fits; without one the keys below are absent."),
        "refused": (TEXT, "Why this value is not possible."),
        "cluster": (TEXT, "Its shorthand."),
        "devices": (WHOLE, "Of the cluster."),
        "mfu": (NUMBER, "Model FLOPs utilisation, a share."),
        "warnings": (_list(_ref("reason")), "What to know before the plan is trusted."),
        "binding": (BINDING, "What limits the speed."),
        "fitted": (FLAG, "Whether step times of this device were fitted to measured runs."),
        "step_s_interval": (PAIR, "Seconds that nine of ten measured steps lie between."),
        "cost": (_ref("cost"), "With --tokens or --price."),
        "in_time": (FLAG, "Whether it meets --deadline."),
    }
    known = _object(tuple(set(keys) - {"fits"}), value=(TEXT, "What was asked for."), **keys)
    found = _tuple(Candidate)["properties"]
    return {**known, "properties": {**known["properties"], **found}}


def _least() -> Schema:
    point = {"anyOf": [_ref("point"), NULL]}
    target = _tuple(Target, tokens=either(NUMBER, NULL))
    return _object(
        quantity=(TEXT, "What was varied."),
        target=(target, "What it has to meet."),
        met=(FLAG, "Whether a value meets it."),
        answer=(point, "The least value that does."),
        best=(point, "The fastest that was tried."),
        obstacle=({"anyOf": [schema_of(Obstacle, []), NULL]}, "Why the search ended early."),
    )


def _rejected() -> Schema:
    layout = _layout()
    least = {**WHOLE, "description": "The least that a configuration of this layout needs."}
    judged = {"enum": list(get_args(Verdict)), "description": "Whether that fits."}
    return {
        **layout,
        "properties": {**layout["properties"], "least_bytes": least, "verdict": judged},
        "required": [*layout["required"], "least_bytes", "verdict"],
    }


def _layout() -> Schema:
    return _tuple(Mesh, kind=_field(Strategy, "kind"), expert=_field(Strategy, "expert"))


def reason_kinds() -> list[type[Reason]]:
    return [
        one
        for module in (layout, settings, limits, warnings)
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, Reason) and one is not Reason
    ]


def reason_schema(kind: type[Reason]) -> Schema:
    hints = get_type_hints(kind)
    known = {field.name: hints[field.name] for field in fields(kind)}
    optional = [key for key, value in known.items() if type(None) in get_args(value)]
    properties = {key: _value(key, value) for key, value in known.items()}
    return {
        "type": "object",
        "description": (kind.__doc__ or "").partition("\n")[0],
        "properties": {"kind": {"const": kind.kind}, **properties},
        "required": ["kind", *(key for key in known if key not in optional)],
    }


def _tuple(record: Any, **more: Schema) -> Schema:
    """A NamedTuple as `_asdict` gives it, with further keys before its own."""
    hints = get_type_hints(record)
    own = {key: _described(record, key, _value(key, hints[key])) for key in record._fields}
    properties = {**{key: one for key, one in more.items() if key not in own}, **own}
    properties.update({key: {**own[key], **more[key]} for key in more if key in own})
    return {"type": "object", "properties": properties, "required": list(properties)}


def _dumped(record: Any, without: tuple[str, ...] = ()) -> Schema:
    """A pydantic record as `model_dump` gives it."""
    keys = [key for key in record.model_fields if key not in without]
    required = [key for key in keys if record.model_fields[key].is_required()]
    properties = {key: _field(record, key) for key in keys}
    return {"type": "object", "properties": properties, "required": required}


def _field(record: Any, key: str) -> Schema:
    field = record.model_fields[key]
    schema = schema_of(field.annotation, field.metadata)
    if schema.pop("pattern", None):
        schema["type"] = schema["type"][0]  # quantities are printed as numbers
    if type(None) in get_args(field.annotation):
        schema = either(schema, NULL) if "type" in schema else {"anyOf": [schema, NULL]}
    return _described(record, key, schema)


def _value(key: str, annotation: Any) -> Schema:
    """One value; bytes are whole numbers in JSON, whatever they are in Python."""
    kinds = (annotation, *get_args(annotation))
    if Strategy in kinds:
        return _ref("strategy")
    if Layout in kinds:
        return _ref("layout")
    return WHOLE if key.endswith("_bytes") else schema_of(annotation, [])


def _described(record: Any, key: str, schema: Schema) -> Schema:
    told = plain(meaning(record, key))
    return _saying(schema, told) if told else schema


def _object(optional: tuple[str, ...] = (), **keys: tuple[Schema, str]) -> Schema:
    properties = {key: _saying(schema, told) for key, (schema, told) in keys.items()}
    required = [key for key in keys if key not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _saying(schema: Schema, told: str) -> Schema:
    # Validators of this draft ignore what stands beside a reference.
    return {**({"allOf": [schema]} if "$ref" in schema else schema), "description": told}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


def _or_null(name: str) -> Schema:
    return {"anyOf": [_ref(name), NULL]}
