"""Collect the settings of another stack's file as fields of a run, with what became of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from shardwise.spec.record import SpecError, did_you_mean
from shardwise.spec.train import TrainSettings
from shardwise.stacks.outcomes import ABSENT, Naming, Outcome, plain_text, repr_text


class Imported(NamedTuple):
    """The settings of one file; fields that the file does not determine are absent."""

    # What the file is, such as "an accelerate configuration".
    what: str
    strategy: dict[str, object]
    job: dict[str, object]
    train: dict[str, object]
    # The number of processes, None if not in the file, and of machines.
    processes: int | None
    machines: int
    cpu: bool
    # What became of each setting, in the order in which they were read.
    outcomes: tuple[Outcome, ...]
    # Empty if every parameter is trained.
    adapter: dict[str, object]
    data: dict[str, object]
    # Such as "DPO"; None if training seems to be supervised.
    objective: str | None = None
    # The name on a hub or the folder of the model; None if the file does not name it.
    model: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each setting that was read, with the field it sets."""
        return tuple(one.words for one in self.outcomes if not one.is_lost)

    @property
    def unsupported(self) -> tuple[str, ...]:
        """One sentence for each setting that has no counterpart, or is known only at run time."""
        return tuple(one.words for one in self.outcomes if one.is_lost)

    def to_dict(self) -> dict[str, Any]:
        """All fields, with the sentences; outcomes become dictionaries."""
        said = {"notes": self.notes, "unsupported": self.unsupported}
        outcomes = [one.to_dict() for one in self.outcomes]
        return {**self._asdict(), **said, "outcomes": outcomes}


class Reading:
    """Collects fields of a run while a file is read.

    A strategy field is named alone, any other with its section, such as `job.seq_len`; the name of
    the model is `model`.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.strategy: dict[str, object] = {}
        self.job: dict[str, object] = {}
        self.train: dict[str, object] = {}
        self.adapter: dict[str, object] = {}
        self.data: dict[str, object] = {}
        self.model: str | None = None
        self.processes: int | None = None
        self.machines = 1
        self.cpu = False
        # Keys whose values are known only at run time: they count neither as given nor as absent.
        self.undecided: frozenset[str] = frozenset()
        self.outcomes: list[Outcome] = []

    def set(self, name: str, value: object) -> None:
        """Set a field without a note."""
        if name == "model":
            self.model = str(value)
            return
        section, _, field = name.rpartition(".")
        getattr(self, section or "strategy")[field] = value

    def has(self, name: str) -> bool:
        """Whether a field is set."""
        section, _, field = name.rpartition(".")
        return field in getattr(self, section or "strategy")

    def record(self, outcome: Outcome) -> None:
        """Append an outcome and set its fields."""
        self.outcomes.append(outcome)
        for name, value in outcome.fields.items():
            if value is not ABSENT:
                self.set(name, value)

    def given(
        self,
        key: str,
        fields: Mapping[str, Any],
        theirs: Any = ABSENT,
        why: str = "",
        naming: Naming = "key",
    ) -> None:
        """Note that a setting of the file sets `fields`.

        Args:
            key: The setting's name in the file.
            fields: Fields of the run and their values; ABSENT names a field without setting it.
            theirs: The value in the file.
            why: The end of the sentence.
            naming: How the sentence names the setting.
        """
        self.record(Outcome("given", key, theirs, fields, why, naming))

    def default(
        self, key: str, fields: Mapping[str, Any], theirs: Any = ABSENT, why: str = ""
    ) -> None:
        """Note that a setting is absent, so that the stack's default `theirs` sets `fields`."""
        self.record(Outcome("default", key, theirs, fields, why))

    def lose(self, key: str, why: str, theirs: Any = ABSENT) -> None:
        """Note that a setting is lost: it has no counterpart, or is known only at run time."""
        naming: Naming = "key" if theirs is ABSENT else "pair"
        self.record(Outcome("lost", key, theirs, why=why, naming=naming))

    def remark(self, sentence: str, fields: Mapping[str, Any] = {}) -> None:
        """Note a full sentence about what the stack does, and set `fields`."""
        self.record(Outcome("remark", fields=fields, why=sentence))

    def explain(self, key: str, why: str) -> None:
        """Note what a setting means for a run, if it sets no field."""
        self.record(Outcome("remark", key, why=why))

    def warn(self, sentence: str) -> None:
        """Note a loss that belongs to no single setting, as a full sentence."""
        self.record(Outcome("lost", why=sentence))

    def add_nested(self, inside: Imported, without: Collection[str] = ()) -> None:
        """Add the settings of a nested configuration, but no losses of the keys in `without`."""
        self.strategy |= inside.strategy
        self.job |= inside.job
        self.train |= inside.train
        self.adapter |= inside.adapter
        self.data |= inside.data
        self.outcomes += [
            one for one in inside.outcomes if not (one.is_lost and one.key in without)
        ]

    def finish(self) -> Imported:
        """The collected settings; repeated sentences are removed."""
        # Two parts of a file can lead to the same sentence.
        first: dict[str, Outcome] = {}
        for one in self.outcomes:
            first.setdefault(one.words, one)
        return Imported(
            what=self.what,
            strategy=self.strategy,
            job=self.job,
            train=self.train,
            processes=self.processes,
            machines=self.machines,
            cpu=self.cpu,
            outcomes=tuple(first.values()),
            adapter=self.adapter,
            data=self.data,
            model=self.model,
        )


def set_optimizer(reading: Reading, number: Callable[[str], float | None], betas: object) -> None:
    """Set learning rate, weight decay, epsilon and betas by the names that torch gives them.

    `number` returns the value of a name, None if it is absent.
    """
    names = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "epsilon"}
    for name, field in names.items():
        value = number(name)
        if value is not None:
            reading.train[field] = value
    if isinstance(betas, (list, tuple)) and len(betas) == 2:
        reading.train |= {"beta1": betas[0], "beta2": betas[1]}
    elif betas not in (None, "auto"):
        raise SpecError(f"betas: must be two numbers, not {repr_text(betas)}")


def set_warmup(reading: Reading, warmup: int) -> None:
    """Set `train.warmup_steps`, or report it as lost if the run has fewer steps."""
    given = reading.train.get("steps")
    steps = given if isinstance(given, int) else TrainSettings.model_fields["steps"].default
    if warmup <= steps:
        reading.train["warmup_steps"] = warmup
    elif "steps" in reading.train:
        reading.lose("warmup_steps", f"{warmup} are more than the {steps} steps of the run")
    else:
        reading.lose(
            "warmup_steps",
            f"{warmup}, but how many steps there are is not in the file; set train.steps and "
            "train.warmup_steps",
        )


def list_unknown(
    reading: Reading, table: Iterable[str], known: Iterable[str], where: str = ""
) -> None:
    """Report every key of `table` that is not in `known`, as it may be a misspelled setting.

    `where` is put before the key in the sentence.
    """
    choices = tuple(known)
    for key in table:
        if key not in choices:
            hint = did_you_mean(key, choices)
            reading.record(Outcome("unknown", f"{where}{key[:60]}", why=hint))


def subtable(table: Mapping[str, object], key: str) -> Mapping[str, object]:
    """The table under a key; empty if it is absent."""
    found = table.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise SpecError(f"{key}: must be a table, not {repr_text(found)}")
    return found


def positive_integer(table: Mapping[str, object], key: str, where: str = "") -> int | None:
    """An integer from 1 to 2**20; None if it is absent or "auto". Raises SpecError otherwise."""
    found = table.get(key)
    if found is None or found == "auto":
        return None
    digits = isinstance(found, str) and found.isascii() and found.isdigit() and len(found) < 20
    exact = isinstance(found, float) and found.is_integer()
    number = int(found) if digits or exact else found  # type: ignore[call-overload]
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 2**20:
        raise SpecError(
            f"{where}{key}: must be a whole number of at least 1, not {repr_text(found)}"
        )
    return number


def finite_number(table: Mapping[str, object], key: str, where: str = "") -> float | None:
    """A finite number; None if it is absent or "auto". Raises SpecError otherwise."""
    found = table.get(key)
    if found is None or found == "auto":
        return None
    try:
        # YAML reads 1e-4 as a text.
        number = math.nan if isinstance(found, bool) else float(found)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise SpecError(f"{where}{key}: must be a finite number, not {repr_text(found)}")
    return number


def boolean(table: Mapping[str, object], key: str, otherwise: bool, where: str = "") -> bool:
    """A boolean, also from "yes", "no" or "1"; `otherwise` if it is absent."""
    found = table.get(key)
    if found is None:
        return otherwise
    if isinstance(found, bool):
        return found
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    given = plain_text(found).lower()
    if given in words:
        return words[given]
    raise SpecError(f"{where}{key}: must be true or false, not {repr_text(found)}")


def upper_case_text(table: Mapping[str, object], key: str, otherwise: str) -> str:
    """The value as text in capitals; `otherwise` if it is absent."""
    found = table.get(key)
    return otherwise if found is None else plain_text(found).upper()
