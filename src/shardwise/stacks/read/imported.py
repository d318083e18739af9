"""Settings read from another stack's file, as fields of a run, and those that have no field."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from shardwise.spec.record import SpecError, did_you_mean
from shardwise.spec.train import TrainSettings


class Imported(NamedTuple):
    """The settings of one file. Fields that it does not settle are absent."""

    # In words, such as "an accelerate configuration".
    what: str
    strategy: dict[str, object]
    job: dict[str, object]
    train: dict[str, object]
    # How many processes it starts, where it says so, and on how many machines.
    processes: int | None
    machines: int
    cpu: bool
    # One sentence for each setting that was read, and the field it becomes.
    notes: tuple[str, ...]
    # One sentence for each setting that has no counterpart, or is only decided at run time.
    unsupported: tuple[str, ...]
    # Empty where every parameter is trained.
    adapter: dict[str, object]
    data: dict[str, object]
    # Such as "DPO"; None where training is supervised, as far as the file says.
    objective: str | None = None


class Reading:
    """Collects the settings that a reader finds."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.strategy: dict[str, object] = {}
        self.job: dict[str, object] = {}
        self.train: dict[str, object] = {}
        self.adapter: dict[str, object] = {}
        self.data: dict[str, object] = {}
        self.processes: int | None = None
        self.machines = 1
        self.cpu = False
        self.notes: list[str] = []
        self.unsupported: list[str] = []

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)

    def drop(self, sentence: str) -> None:
        self.unsupported.append(sentence)

    def take(self, inside: Imported, but: tuple[str, ...]) -> None:
        """Add the settings of a part of the file; leave out sentences that begin with `but`."""
        self.strategy |= inside.strategy
        self.job |= inside.job
        self.train |= inside.train
        self.adapter |= inside.adapter
        self.data |= inside.data
        self.notes += inside.notes
        self.unsupported += [text for text in inside.unsupported if not text.startswith(but)]

    def done(self) -> Imported:
        return Imported(
            what=self.what,
            strategy=self.strategy,
            job=self.job,
            train=self.train,
            processes=self.processes,
            machines=self.machines,
            cpu=self.cpu,
            notes=tuple(dict.fromkeys(self.notes)),
            unsupported=tuple(dict.fromkeys(self.unsupported)),
            adapter=self.adapter,
            data=self.data,
        )


def set_optimizer(reading: Reading, number: Callable[[str], float | None], betas: object) -> None:
    """The settings of an optimizer by the names that torch and others give them."""
    names = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "epsilon"}
    for name, field in names.items():
        value = number(name)
        if value is not None:
            reading.train[field] = value
    if isinstance(betas, (list, tuple)) and len(betas) == 2:
        reading.train |= {"beta1": betas[0], "beta2": betas[1]}
    elif betas not in (None, "auto"):
        raise SpecError(f"betas: must be two numbers, not {quoted(betas)}")


def set_warmup(reading: Reading, warmup: int) -> None:
    """The steps of a warm-up, which a run must be long enough for."""
    given = reading.train.get("steps")
    steps = given if isinstance(given, int) else TrainSettings.model_fields["steps"].default
    if warmup <= steps:
        reading.train["warmup_steps"] = warmup
    elif "steps" in reading.train:
        reading.drop(f"warmup_steps: {warmup} are more than the {steps} steps of the run.")
    else:
        reading.drop(
            f"warmup_steps: {warmup}, but how many steps there are is not in the file; set "
            "train.steps and train.warmup_steps."
        )


def list_unknown(
    reading: Reading, table: Iterable[str], known: Iterable[str], where: str = ""
) -> None:
    """List every key that no reader knows as unsupported: it may be a misspelled setting."""
    choices = tuple(known)
    for key in table:
        if key not in choices:
            reading.drop(
                f"{where}{key[:60]}: unknown to Shardwise{did_you_mean(key, choices) or '.'}"
            )


def section(table: Mapping[str, object], key: str) -> Mapping[str, object]:
    """A table inside a table; absent and empty are the same."""
    found = table.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise SpecError(f"{key}: must be a table, not {quoted(found)}")
    return found


def whole(table: Mapping[str, object], key: str, where: str = "") -> int | None:
    """A whole number of at least 1; None where it is absent or left to the script ("auto")."""
    found = table.get(key)
    if found is None or found == "auto":
        return None
    digits = isinstance(found, str) and found.isascii() and found.isdigit() and len(found) < 20
    exact = isinstance(found, float) and found.is_integer()
    number = int(found) if digits or exact else found  # type: ignore[call-overload]
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 2**20:
        raise SpecError(f"{where}{key}: must be a whole number of at least 1, not {quoted(found)}")
    return number


def real(table: Mapping[str, object], key: str, where: str = "") -> float | None:
    """A number; None where it is absent or left to the script ("auto")."""
    found = table.get(key)
    if found is None or found == "auto":
        return None
    try:
        # YAML reads 1e-4 as a text.
        number = math.nan if isinstance(found, bool) else float(found)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise SpecError(f"{where}{key}: must be a finite number, not {quoted(found)}")
    return number


def flag(table: Mapping[str, object], key: str, otherwise: bool, where: str = "") -> bool:
    """A yes or no, as a truth value or as a text."""
    found = table.get(key)
    if found is None:
        return otherwise
    if isinstance(found, bool):
        return found
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    given = plain(found).lower()
    if given in words:
        return words[given]
    raise SpecError(f"{where}{key}: must be true or false, not {quoted(found)}")


def word(table: Mapping[str, object], key: str, otherwise: str) -> str:
    """A text, in capitals."""
    found = table.get(key)
    return otherwise if found is None else plain(found).upper()


def plain(value: object) -> str:
    """A value as a text; Python refuses to write out numbers of thousands of digits."""
    try:
        return str(value)
    except ValueError:
        return "a number of thousands of digits"


def quoted(value: object) -> str:
    """A value in a sentence, cut where it is long."""
    try:
        return repr(value)[:60]
    except ValueError:
        return plain(value)
