"""Calls that a type checker must refuse: one error in every line that says so."""

from __future__ import annotations

import shardwise

shardwise.estimate("llama-3-8b", "8xH100-SXM", seqlen=8192)  # wrong: seq_len
shardwise.estimate("llama-3-8b", "8xH100-SXM", recompute="some")  # wrong: no such policy
shardwise.plan("llama-3-8b", "8xH100-SXM", micro_batch=2)  # wrong: a plan chooses it
shardwise.plan("llama-3-8b", "8xH100-SXM", objective="speed")  # wrong: no such objective
shardwise.compare("llama-3-8b", "8xH100-SXM")  # wrong: no profiles
shardwise.nothing  # wrong: no such name  # noqa: B018
