"""Run a model without training it, and leave no trace in what training depends on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.pytorch.device import random_states, set_random_states


@contextmanager
def evaluating(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Context for forwards without gradients and dropout, between two steps of training.

    Afterwards modules are in their modes, random numbers continue where they were, and parameters
    are sharded as after a step.
    """
    modes = {module: module.training for module in model.modules()}
    own, numpy, states = random.getstate(), np.random.get_state(), random_states(device)
    model.eval()
    with torch.no_grad():
        yield
    for module, mode in modes.items():
        module.training = mode
    if isinstance(model, FSDPModule):
        # A forward without a backward leaves parameters gathered, and an order of units that the
        # next backward would gather by.
        model.reset_iter_state()
    random.setstate(own)
    np.random.set_state(numpy)
    set_random_states(states, device)
