"""Instances: machines that providers rent, with their devices, network and prices.

`catalogue/instances.toml` holds them. A cluster may name one: `4xp5.48xlarge`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated

from pydantic import Field

from shardwise.spec.quantity import Rate
from shardwise.spec.record import Record, SpecError
from shardwise.spec.tables import entry, sections

_FILE = "instances.toml"
Price = Annotated[float, Field(gt=0, le=1e6)]


class Instance(Record):
    """One kind of machine of a provider. Prices are of the whole machine, in US dollars per hour.

    A device that no plan is made for is a `chip`.
    """

    name: str
    provider: str
    # The provider's own name, where it has spaces.
    offered_as: str = ""
    # A name of `shardwise catalog devices`.
    device: str | None = None
    chip: str = ""
    gpus: Annotated[int, Field(ge=1, le=1024)]
    # Of the whole machine, one way; None if it is not known.
    network: Annotated[Rate, Field(gt=0)] | None = None
    # On demand, and the day on which the price was read.
    usd_per_hour: Price | None = None
    spot_usd_per_hour: Price | None = None
    priced: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")] | None = None
    note: str = ""
    source: Mapping[str, str] = Field(default_factory=dict, repr=False)

    @property
    def network_per_gpu(self) -> float | None:
        """Bytes per second of one device, one way; None if the network is not known."""
        return None if self.network is None else self.network / self.gpus

    @property
    def usd_per_gpu_hour(self) -> float | None:
        """On-demand price of one GPU for one hour; None if it is not known."""
        return None if self.usd_per_hour is None else self.usd_per_hour / self.gpus


@cache
def instances() -> Mapping[str, Instance]:
    """All instances with devices that can be planned, by name."""
    return {name: one for name in sections(_FILE) if not (one := _instance(name)).chip}


@cache
def _instance(name: str) -> Instance:
    fields = entry(_FILE, name)
    return Instance.read({"name": name, **fields}, where=f"{_FILE}: {name}")


def find_instance(name: str) -> Instance | None:
    """The instance called `name` (case does not matter); None if there is none.

    Raises SpecError if no plan can be made for its chips.
    """
    folded = {known.lower(): known for known in sections(_FILE)}
    known = folded.get(name.lower())
    if known is None:
        return None
    found = _instance(known)
    if found.device is None:
        raise SpecError(
            f"{known} has {found.gpus} {found.chip} chips, which are not planned: give an instance "
            "with GPUs, such as those of 'shardwise catalog instances'"
        )
    return found
