"""Write a run as Kubernetes manifests: an Indexed Job with one pod per node, and its resources."""

from __future__ import annotations

from shardwise.spec.foreign_text import one_line
from shardwise.spec.lookup import ModuleRef
from shardwise.spec.run import RunSpec, write_run
from shardwise.spec.train import SECRET_VARIABLE
from shardwise.stacks.outcomes import ABSENT, Difference, Differences
from shardwise.stacks.write.cluster_job import (
    LAUNCH,
    check_target,
    gpu_variables,
    is_done_command,
    job_name,
    local_files,
    runs_folder,
    saves_checkpoints,
    saves_remotely,
    seconds_of,
)
from shardwise.stacks.write.exported import DEFAULT_TARGET, Exported, Target
from shardwise.stacks.write.quoting import yaml_block, yaml_text

NAME = "run.yaml"
PORT = 29400
VOLUME = "/work"
# Seconds from SIGTERM to SIGKILL; a step and a save must fit into them.
GRACE_S = 600
_AMD = ("MI2", "MI3")


def export(run: RunSpec, target: Target = DEFAULT_TARGET) -> Exported:
    """All manifests in one file; the run.toml is in its ConfigMap."""
    check_target(run, target)
    name = job_name(run)
    parts = [_config(run), _VOLUME_CLAIM.format(name=name)]
    command = f"kubectl apply -f {target.name(NAME)}"
    if run.cluster.nodes > 1:
        secret = _SECRET.format(variable=SECRET_VARIABLE, name=name)
        parts.append(_RENDEZVOUS.format(name=name, port=PORT, image=_image(target), secret=secret))
        parts.append(_NETWORK.format(name=name, metrics=_metrics_port(run)))
        command = f"{_MAKE_SECRET.format(name=name)} && {command}"
    parts.append(_job(run, target))
    title = f"# {one_line(f'{run.model.name} on {run.cluster}: {run.strategy}')}\n"
    text = title + "---\n".join(parts)
    return Exported(NAME, text, _differences(run), command, run.strategy)


def _config(run: RunSpec) -> str:
    """The ConfigMap with the run.toml."""
    return f"""\
apiVersion: v1
kind: ConfigMap
metadata:
  name: {job_name(run)}
data:
  run.toml: {yaml_block(write_run(run), 4)}
"""


_VOLUME_CLAIM = """\
# Checkpoints, logs and the token cache; pods that replace others resume from here.
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {name}
spec:
  # All pods write to it. With train.checkpoint.to in an object store, only the first one does.
  accessModes: [ReadWriteMany]
  resources:
    requests:
      storage: 1Ti  # change it: train.checkpoint.keep saves of the whole state, and one more
"""

# The command that creates the secret by which pods authenticate each other; it is in no file.
_MAKE_SECRET = (
    "head -c 32 /dev/urandom | base64 | "
    "kubectl create secret generic {name}-rendezvous --from-file=secret=/dev/stdin"
)
_SECRET = """\
            - name: {variable}
              valueFrom:
                secretKeyRef:
                  name: {name}-rendezvous
                  key: secret
"""

# The rendezvous has a pod of its own, so that losing any training pod has the same effect. The
# launchers reconnect when Kubernetes has replaced the pod.
_RENDEZVOUS = """\
# Pods meet here. Training goes on while this pod is replaced.
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {name}-rendezvous
spec:
  selector:
    matchLabels:
      app: {name}-rendezvous
  template:
    metadata:
      labels:
        app: {name}-rendezvous
        app.kubernetes.io/part-of: {name}
    spec:
      containers:
        - name: rendezvous
{image}\
          command: [shardwise, rendezvous, "0.0.0.0:{port}"]
          env:
{secret}\
          resources:
            requests:
              cpu: 100m
              memory: 512Mi
---
apiVersion: v1
kind: Service
metadata:
  name: {name}-rendezvous
spec:
  selector:
    app: {name}-rendezvous
  ports:
    - port: {port}
"""

# NCCL, Gloo and torch's store accept any connection, so the policy restricts it to pods of the run.
# The network plugin must enforce policies.
_NETWORK = """\
# Only the pods of this run connect to them.
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {name}
spec:
  podSelector:
    matchLabels:
      app.kubernetes.io/part-of: {name}
  policyTypes: [Ingress]
  ingress:
    - from:
        - podSelector:
            matchLabels:
              app.kubernetes.io/part-of: {name}
{metrics}\
"""


def _metrics_port(run: RunSpec) -> str:
    """The rule that lets Prometheus reach the metrics port; empty without one."""
    metrics = run.train.metrics if run.train is not None else None
    if metrics is None or metrics.port is None:
        return ""
    return f"    # For Prometheus.\n    - ports:\n        - port: {metrics.port}\n"


def _script(run: RunSpec, target: Target) -> str:
    """The shell script of a container: it starts the launcher. Kubernetes replaces failed pods."""
    name = job_name(run)
    words = f"run.toml --nproc {run.cluster.devices_per_node} --name {name}"
    command = f"shardwise train {words}{' --resume' if saves_checkpoints(run) else ''}\n"
    if target.spares:
        return f"{LAUNCH}launch {command}" + _DONE.format(is_done=is_done_command(run, name))
    return f"# exec replaces the shell, so that the launcher gets SIGTERM.\nexec {command}"


def _job(run: RunSpec, target: Target) -> str:
    """The Job with one pod per node and per spare."""
    name = job_name(run)
    pods = run.cluster.nodes + target.spares
    spares = _SPARES.format(nodes=run.cluster.nodes) if target.spares else ""
    seconds = seconds_of(target.time)
    limit = "" if seconds is None else f"  activeDeadlineSeconds: {seconds}\n"
    return f"""\
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
{spares}\
  completions: {pods}
  parallelism: {pods}
{limit}\
  # The launcher in each pod restarts processes itself; these limits count failed pods. If more
  # indexes than spares fail for good, the job fails.
  backoffLimitPerIndex: 5
  maxFailedIndexes: {target.spares}
  podFailurePolicy:
    rules:
      # Would fail again: invalid input, numbers that are not finite.
      - action: FailJob
        onExitCodes:
          containerName: train
          operator: In
          values: [2, 3]
      # Saved and stopped by SIGTERM (128 + 15); all pods stop together.
      - action: Ignore
        onExitCodes:
          containerName: train
          operator: In
          values: [143]
      # Evicted, preempted, or its node was lost.
      - action: Ignore
        onPodConditions:
          - type: DisruptionTarget
  template:
    metadata:
      labels:
        app.kubernetes.io/part-of: {name}
    spec:
      restartPolicy: Never
      # After SIGTERM the current step and a save must fit.
      terminationGracePeriodSeconds: {GRACE_S}
      containers:
        - name: train
{_image(target)}\
          workingDir: {VOLUME}
          command: [bash, -c]
          args:
            - {yaml_block(_script(run, target), 14)}
{_environment(run, target)}\
{_resources(run)}\
          volumeMounts:
            - name: work
              mountPath: {VOLUME}
            - name: run
              mountPath: {VOLUME}/run.toml
              subPath: run.toml
            - name: shm
              mountPath: /dev/shm
      volumes:
        - name: work
          persistentVolumeClaim:
            claimName: {name}
        - name: run
          configMap:
            name: {name}
        # NCCL and data loaders use shared memory; the default of 64 MiB is too small.
        - name: shm
          emptyDir:
            medium: Memory
"""


_DONE = """\
CODE=$?
# A spare that was not needed loses the others when the run is done.
if [ "$CODE" -eq 1 ] && {is_done}; then CODE=0; fi
exit "$CODE"
"""
_SPARES = """\
  # {nodes} pods train, the others are spares: if one is lost, a spare takes its place.
"""
_IMAGE = """\
          # Change it: an image with torch for these devices, bash, and "shardwise[hf]".
          image: registry.example/shardwise:change-me
"""


def _image(target: Target) -> str:
    """The line with the container image, or a placeholder to change."""
    return _IMAGE if target.image is None else f"          image: {yaml_text(target.image)}\n"


def _environment(run: RunSpec, target: Target) -> str:
    """The environment of a container; empty if there is none."""
    found: list[tuple[str, str, str]] = []
    if run.cluster.nodes > 1:
        name = job_name(run)
        found += [
            ("PET_NNODES", str(run.cluster.nodes), "Pods that train, and where they meet."),
            ("PET_RDZV_ENDPOINT", f"{name}-rendezvous:{PORT}", ""),
            ("PET_RDZV_ID", name, ""),
        ]
    found += gpu_variables(run)
    found += [(name, value, "") for name, value in target.environment.items()]
    lines = [
        f"{f'            # {why}{chr(10)}' if why else ''}"
        f"            - name: {name}\n              value: {yaml_text(value)}\n"
        for name, value, why in found
    ]
    if run.cluster.nodes > 1:
        lines.append(_SECRET.format(variable=SECRET_VARIABLE, name=job_name(run)))
    return "          env:\n" + "".join(lines) if lines else ""


def _resources(run: RunSpec) -> str:
    """The GPUs that a container requests; empty on CPUs."""
    device = run.cluster.device
    if device.is_cpu:
        return ""
    vendor = "amd.com/gpu" if device.name.upper().startswith(_AMD) else "nvidia.com/gpu"
    return f"""\
          resources:
            limits:
              {vendor}: {run.cluster.devices_per_node}
              # With InfiniBand or EFA, add the resource of its device plugin.
"""


def _differences(run: RunSpec) -> tuple[Difference, ...]:
    """What the manifests cannot express or leave to the user."""
    differences = Differences()
    for setting, path in local_files(run).items():
        differences.add(
            f"pods do not see it; copy it into the volume, mounted at {VOLUME}, and put its path "
            "there into the ConfigMap",
            {setting: path},
        )
    if isinstance(run.model, ModuleRef) or (run.data is not None and run.data.source):
        packages = {"model.factory": ABSENT, "data.source": ABSENT}
        differences.add("install their packages in the image", packages)
    if runs_folder(run).is_absolute() and not saves_remotely(run):
        differences.add(
            f"it is outside the volume {VOLUME} and is deleted with the pod; use a relative folder",
            {"train.folder": str(runs_folder(run))},
        )
    if not saves_checkpoints(run):
        differences.add("pods that replace others start from step 0", {"train.checkpoint": False})
    if run.cluster.network is not None:
        differences.add(
            "Kubernetes allocates devices, not bandwidth; add a nodeSelector or affinity for nodes "
            "that have it",
            {"cluster.network": ABSENT},
        )
    return tuple(differences)
