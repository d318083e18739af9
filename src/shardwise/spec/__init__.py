"""Specs of the model, cluster, job and strategy that every command takes."""

from shardwise.spec.cluster import ClusterSpec, DeviceSpec
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy

__all__ = ["ClusterSpec", "DeviceSpec", "Job", "ModelSpec", "SpecError", "Strategy"]
