"""The manifests, checked against Kubernetes' own schemas, and what the pods do, run here."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shardwise.launch.shared_secret import VARIABLE, take_secret
from shardwise.spec.run import RunSpec, run_from_dict
from shardwise.stacks.write.cluster_job import seconds_of
from shardwise.stacks.write.exported import DEFAULT_TARGET, Target
from shardwise.stacks.write.kubernetes import export
from tests.command import PATIENCE_S, environment
from tests.distributed.launch import free_port
from tests.stacks.runs import HOSTILE, HOSTILE_NAME, large, tiny

yaml = pytest.importorskip("yaml")

RUNS = {
    "one node of CPUs": tiny(),
    "two nodes of CPUs": tiny(cluster="2x1xCPU"),
    "two nodes of GPUs": large(),
    "AMD": large(cluster="2x8xMI300X"),
    "saves nothing": tiny(train={"checkpoint": False}),
    "hostile": tiny(
        model={"name": HOSTILE_NAME}, train={"folder": HOSTILE}, data={"text_key": HOSTILE}
    ),
}


ASKED = Target(
    environment={"NCCL_SOCKET_IFNAME": "eth0", "HOSTILE": HOSTILE_NAME},
    time="1-12:00:00",
    spares=2,
    image="registry.example/mine:1.2",
)


def manifests(run: RunSpec, target: Target = DEFAULT_TARGET) -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(export(run, target).text)}


CASES = {name: (run, DEFAULT_TARGET) for name, run in RUNS.items()}
CASES["asked for more"] = (RUNS["two nodes of GPUs"], ASKED)


@pytest.mark.parametrize(("run", "target"), CASES.values(), ids=CASES)
def test_kubernetes_knows_every_field(run: RunSpec, target: Target) -> None:
    """Strict: no field that the schemas do not have."""
    validate = pytest.importorskip("kubernetes_validate")
    for one in manifests(run, target).values():
        validate.validate(one, validate.latest_version(), strict=True)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_run_inside_is_the_run(run: RunSpec) -> None:
    text = manifests(run)["ConfigMap"]["data"]["run.toml"]
    assert run_from_dict(tomllib.loads(text)).resolved() == run


def test_names_change_nothing_else() -> None:
    plain, hostile = manifests(RUNS["one node of CPUs"]), manifests(RUNS["hostile"])
    assert set(plain) == set(hostile)
    name = hostile["Job"]["metadata"]["name"]
    renamed = json.loads(json.dumps(hostile["Job"]).replace(name, "small-zero3"))
    assert renamed == plain["Job"]


def test_one_pod_for_each_node_with_its_gpus() -> None:
    found = manifests(large())
    job = found["Job"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    amd = manifests(RUNS["AMD"])["Job"]["spec"]["template"]["spec"]["containers"][0]
    assert amd["resources"]["limits"] == {"amd.com/gpu": 8}
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]


def test_pods_meet_in_a_pod_that_does_not_train() -> None:
    found = manifests(large(), ASKED)
    [port] = found["Service"]["spec"]["ports"]
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    [server] = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    [container] = found["Job"]["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    name = found["Service"]["metadata"]["name"]
    assert environment["PET_RDZV_ENDPOINT"] == f"{name}:{port['port']}"
    assert server["command"] == ["shardwise", "rendezvous", f"0.0.0.0:{port['port']}"]
    assert server["image"] == container["image"]
    for selector in (
        found["Service"]["spec"]["selector"],
        found["Deployment"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    # Such a name has at most 63 characters, however long the model's.
    assert len(name) <= 63
    assert not {"Deployment", "Service"} & set(manifests(tiny()))


def test_pods_share_a_secret_that_is_not_in_the_file() -> None:
    exported = export(large(), ASKED)
    found = manifests(large(), ASKED)
    [asked] = {
        json.dumps(one["valueFrom"]["secretKeyRef"], sort_keys=True)
        for kind in ("Deployment", "Job")
        for container in found[kind]["spec"]["template"]["spec"]["containers"]
        for one in container["env"]
        if one["name"] == VARIABLE
    }
    assert "Secret" not in found
    made, _, applied = exported.command.partition(" && ")
    assert f"create secret generic {json.loads(asked)['name']} " in made
    assert f"--from-file={json.loads(asked)['key']}=/dev/stdin" in made
    text = subprocess.run(
        ["bash", "-c", made.partition(" | kubectl")[0]], capture_output=True, text=True, check=True
    )
    assert take_secret({VARIABLE: text.stdout}) is not None
    assert applied == "kubectl apply -f run.yaml"
    assert "secret" not in export(tiny()).text


def test_only_pods_of_the_run_reach_its_pods() -> None:
    found = manifests(large(), ASKED)
    policy = found["NetworkPolicy"]["spec"]
    selected = policy["podSelector"]["matchLabels"]
    for kind in ("Deployment", "Job"):
        labels = found[kind]["spec"]["template"]["metadata"]["labels"]
        assert selected.items() <= labels.items()
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": selected}}]}]
    measured = large(train={"metrics": {"port": 9400, "address": "0.0.0.0"}})
    [_, metrics] = manifests(measured)["NetworkPolicy"]["spec"]["ingress"]
    assert metrics == {"ports": [{"port": 9400}]}
    assert "NetworkPolicy" not in manifests(tiny())


def test_what_a_job_is_asked_for() -> None:
    job = manifests(large(), ASKED)["Job"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    assert (job["completions"], job["parallelism"], job["maxFailedIndexes"]) == (4, 4, 2)
    assert job["activeDeadlineSeconds"] == 36 * 3600
    assert container["image"] == "registry.example/mine:1.2"
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert environment["PET_NNODES"] == "2"
    assert {name: environment[name] for name in ASKED.environment} == ASKED.environment


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("5:30", 330), ("01:00:00", 3600), ("1-6", 108_000), ("2-00:30:15", 174_615)],
)
def test_times_are_read_as_slurm_reads_them(time: str, seconds: int) -> None:
    assert seconds_of(time) == seconds


def test_what_is_not_in_the_pods_is_told() -> None:
    run = tiny(data={"path": "corpus/"}, train={"folder": "/elsewhere"})
    named = [sentence.partition(" = ")[0] for sentence in export(run).unsupported]
    assert named == ["data.path", "train.folder"]
    assert export(tiny()).unsupported == ()


@pytest.mark.nightly
@pytest.mark.parametrize("spares", [0, 1])
def test_what_the_pods_do_trains_on_two_processes(tmp_path: Path, spares: int) -> None:
    """The containers' own commands and environment; only addresses are those of here.

    A spare that is not needed ends well too.
    """
    pytest.importorskip("transformers")
    found = manifests(tiny(cluster="2x1xCPU"), Target(spares=spares))
    (tmp_path / "run.toml").write_text(found["ConfigMap"]["data"]["run.toml"])
    address = f"127.0.0.1:{free_port()}"
    # What Kubernetes reads from the Secret.
    secret = secrets.token_hex(16)

    def start(kind: str) -> subprocess.Popen[str]:
        [container] = found[kind]["spec"]["template"]["spec"]["containers"]
        told = {one["name"]: one.get("value", secret) for one in container.get("env", ())}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        words = [*container["command"], *container.get("args", ())]
        return subprocess.Popen(
            [address if word.startswith("0.0.0.0:") else word for word in words],
            cwd=tmp_path,
            env=environment(**told | {"PET_RDZV_ENDPOINT": address, "PATH": path}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    # The server is there last: the others wait.
    pods = [start("Job") for _ in range(2 + spares)]
    server = start("Deployment")
    try:
        said = [pod.communicate(timeout=PATIENCE_S) for pod in pods]
    finally:
        server.terminate()
        server.communicate()
    assert {pod.returncode for pod in pods} == {0}, said
    lines = (tmp_path / "runs/small-zero3/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 41))
