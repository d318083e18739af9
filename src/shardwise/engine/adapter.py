"""Initialise adapters, and store and identify the frozen weights of adapted models."""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.engine.mesh import world
from shardwise.engine.stored_experts import StoredExperts
from shardwise.pytorch.adapted import NAME, without_adapters
from shardwise.pytorch.parts import Parts
from shardwise.pytorch.private import plain_tensors
from shardwise.pytorch.quiet_libraries import quiet_imports
from shardwise.pytorch.stacked import stacked_matrices
from shardwise.spec.adapter import Adapter
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.units.module import TORCH_DTYPES

log = logging.getLogger("shardwise")
_MARK = "_shardwise_base"
# Elements of an NF4 block × blocks that share quantised scales. A shard must be a multiple.
_NF4_BLOCK = 64 * 256
# Elements per step of a checksum, and a factor that makes it depend on the order of elements.
_CHUNK, _MIX = 2**22, 0x1E3779B97F4A7C15
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_adapter(adapter: Adapter | None, strategy: Strategy) -> None:
    """Raise SpecError if the engine cannot store or use the frozen weights with this strategy."""
    if adapter is None:
        return
    if adapter.base in ("int8", "fp8"):
        instead = "nf4" if adapter.quantised else "bf16"
        raise SpecError(
            f'adapter.base: {adapter.base} can be planned but not trained; set base = "{instead}"'
        )
    stored, computes = adapter.float_dtype, strategy.param_dtype
    if not strategy.sharded and not strategy.autocast and stored != computes:
        raise SpecError(
            f"adapter.base: {strategy.kind} computes in {computes} without a cast, so frozen "
            f'weights must be {computes} too; set base = "{computes}", or param_dtype = "{stored}"'
        )
    if adapter.quantised and type(strategy.reshard_after_forward) is int:
        raise SpecError(
            "strategy.reshard_after_forward: NF4 weights cannot be resharded to part of the ranks; "
            "use true or false"
        )


def initialise_adapter(layer: Any) -> None:
    """Initialise a layer's adapter as peft does; call it after its base weight is set."""
    layer.reset_lora_parameters(NAME, True)
    if NAME not in layer.lora_magnitude_vector:
        return
    # DoRA starts with the norms of the base weight, as lora_B is zero.
    magnitude = layer.lora_magnitude_vector[NAME]
    weight, fan_in_fan_out = layer.get_base_layer().weight, magnitude.fan_in_fan_out
    rows = weight.T if fan_in_fan_out else weight
    magnitude.weight.copy_(torch.linalg.norm(rows, dim=1))


class FrozenWeights:
    """Stores the frozen weights of an adapted model in the adapter's format, and identifies them.

    Does nothing for a model without an adapter. A weight's checksum is computed before
    quantisation, under the name that the weight has without adapters.
    """

    def __init__(self, parts: Parts, ranks: int = 1) -> None:
        """`ranks` is the number of ranks that each weight is sharded over."""
        self._adapter, self._ranks = parts.adapter, ranks
        self._checksums: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._in_blocks: set[int] = set()
        self._stored: set[int] = set()
        self.not_quantised: list[str] = []
        if self._adapter is None:
            return
        with without_adapters([parts.module]):
            self._names = {id(module): name for name, module in parts.module.named_modules()}
        blocks = parts.blocks.values()
        self._in_blocks = {id(module) for block in blocks for module in block.modules()}

    def store(self, members: Iterable[nn.Module]) -> None:
        """Convert the frozen weights of `members` that are not converted yet."""
        if self._adapter is None:
            return
        with without_adapters(members) as base:
            modules = [module for member in base for module in member.modules()]
        for module in modules:
            if id(module) not in self._stored:
                self._stored.add(id(module))
                stacked = self._stacked(module, self._adapter)
                shapes = {key: tuple(module.get_parameter(key).shape) for key in stacked}
                self._store(module, self._adapter, stacked)
                stored = {k: s for k, s in shapes.items() if is_quantised(module.get_parameter(k))}
                if stored:
                    module.forward = StoredExperts(module, stored)

    def _stacked(self, module: nn.Module, adapter: Adapter) -> list[str]:
        """Names of the module's stacked matrices that the adapter stores quantised."""
        if not adapter.quantises_experts or id(module) not in self._in_blocks:
            return []
        names = stacked_matrices(module)
        return [name for name in names if not module.get_parameter(name).requires_grad]

    def _store(self, module: nn.Module, adapter: Adapter, stacked: Sequence[str]) -> None:
        """Convert the frozen weights that belong to `module` itself, not to its children."""
        dtype = TORCH_DTYPES[adapter.float_dtype]
        for key, parameter in list(module.named_parameters(recurse=False)):
            name = f"{self._names[id(module)]}.{key}".lstrip(".")
            if parameter.requires_grad or not parameter.is_floating_point():
                continue
            if parameter.is_meta:
                raise SpecError(f"model: {name} is on the meta device and cannot be stored")
            # In place, so that tied parameters stay tied.
            parameter.data = parameter.data.to(dtype)
            self._checksums[name] = checksum(parameter)
            matrix = parameter.ndim == 2 or key in stacked
            if adapter.base == "nf4" and id(module) in self._in_blocks and matrix:
                self._quantise(name, module, key, parameter)

    def _quantise(self, name: str, module: nn.Module, key: str, weight: nn.Parameter) -> None:
        """Quantise a weight to NF4, or add its name to `not_quantised` if that is impossible."""
        # NF4 tensors have two dimensions: stacked matrices are stored one below the other.
        matrix = weight.data.reshape(-1, weight.shape[-1])
        fits = matrix.numel() % (_NF4_BLOCK * self._ranks) == 0 and len(matrix) % self._ranks == 0
        if not (isinstance(module, nn.Linear) or weight.ndim == 3) or not fits:
            self.not_quantised.append(name)
            return
        setattr(module, key, nn.Parameter(to_nf4(matrix), requires_grad=False))

    def finish(self, model: nn.Module) -> None:
        """Store the digest of all frozen weights on the model; warn about unquantised ones."""
        if self._adapter is None:
            return
        listed = "\n".join(f"{name} {value}" for name, value in sorted(self._checksums.items()))
        digest = hashlib.sha256(listed.encode()).hexdigest()
        object.__setattr__(model, _MARK, digest)
        if self.not_quantised and world()[0] == 0:
            log.warning(
                "adapter.base: %d weights stay in bf16, such as %s: NF4 needs linear layers and "
                "experts whose elements are a multiple of %d on each of %d ranks",
                len(self.not_quantised),
                self.not_quantised[0],
                _NF4_BLOCK,
                self._ranks,
            )


def base_digest(model: nn.Module) -> str | None:
    """A hash of the frozen weights of an adapted model; None without an adapter.

    It is the same on any number of ranks.
    """
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return cast("str | None", getattr(inner, _MARK, None))


def to_nf4(weight: torch.Tensor) -> torch.Tensor:
    """The weight quantised to NF4 by torchao.

    Measured with a 512 × 512 layer under fully_shard on two CPU ranks: torchao and bitsandbytes
    both give the output of the unsharded layer to the bit and are as exact (9.2 % and 9.1 % from
    bf16). torchao gathers 0.516 bytes per weight and shards its scales; bitsandbytes gathers 0.5,
    but keeps the scales of the full weight, 0.02 bytes per weight, on every rank and outside of
    the parameter, where sharding and offload do not reach them. Its weight also loses its shape.
    So torchao is used: what a rank holds falls with the number of ranks.
    """
    try:
        with quiet_imports():
            quantise = importlib.import_module("torchao.quantization").to_nf4
    except ModuleNotFoundError:
        raise SpecError(
            "adapter.base: NF4 needs torchao; install it with 'pip install \"shardwise[adapters]\"'"
        ) from None
    quantised: torch.Tensor = quantise(weight)
    return quantised


def is_quantised(weight: torch.Tensor) -> bool:
    """Whether the weight is stored as a quantised tensor of torchao."""
    return type(weight.data).__module__.startswith("torchao.")


def stored_bytes(parameter: torch.Tensor) -> int:
    """Bytes that a parameter takes on this rank.

    For a quantised one this includes its scales, its table of values and the mean of its scales.
    """
    return sum(part.nbytes for part in plain_tensors(parameter))


def checksum(tensor: torch.Tensor) -> int:
    """A checksum of the bits of a tensor that depends on their order; the same on every device."""
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        order = torch.arange(start + 1, start + 1 + part.numel(), device=tensor.device)
        # Integers wrap around.
        total += (part * (order * _MIX)).sum()
    return int(total)
