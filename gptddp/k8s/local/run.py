"""Runs a PyTorchJob on this machine, one process per pod, as the operator and the kubelets would.

LOCAL_DIR/volumes/<claim>/           a PersistentVolumeClaim
LOCAL_DIR/jobs/<name>/manifest.yaml  the job; another manifest of the same name is refused
LOCAL_DIR/jobs/<name>/status.json    conditions, pods with their pids and addresses
LOCAL_DIR/jobs/<name>/code/          its own code, one file per key of its ConfigMaps
LOCAL_DIR/jobs/<name>/logs/<pod>.log
LOCAL_DIR/jobs/<name>/pods/<pod>/    emptyDirs, removed with the pod
"""

import base64
import contextlib
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import yaml

from gptddp import flags
from gptddp.errors import ConfigError, DataError
from gptddp.k8s.exit_codes import SUCCEEDED
from gptddp.k8s.local import locks, pods, reaper
from gptddp.k8s.local.container import Network, container_of
from gptddp.k8s.local.paths import LOCAL_DIR, options_for, relative_path
from gptddp.k8s.local.runner import Interrupts, Runner
from gptddp.k8s.local.screen import Screen
from gptddp.k8s.objects import (
    Object,
    holds,
    replica_count,
    volume_claims,
    worker_pod_spec,
    worker_spec,
)
from gptddp.k8s.observe.pod_log import CONTAINER
from gptddp.k8s.render.code_volume import VOLUME as CODE
from gptddp.k8s.render.difference import compare

_LONGEST = 48  # maximum characters of a job's folder, see `_scratch`


def run(
    objects: Sequence[Object],
    *,
    local_dir: Path = LOCAL_DIR,
    volumes: Mapping[str, Path] | None = None,
    verbose: bool = False,
) -> int:
    """Run a job to its end; `objects`: the output of `render`, the PyTorchJob last.

    Returns the exit code. `volumes` maps claims to folders outside of `local_dir`. Raises
    ConfigError or DataError, before anything is started or written, if the job cannot run. A job
    that was stopped or killed or has failed continues; a job that has succeeded or is running
    is not touched.
    """
    job, local_dir, volumes = objects[-1], local_dir.absolute(), volumes or {}
    folder = local_dir / "jobs" / job["metadata"]["name"]
    _check(job, volumes)
    claims = {
        volume: volumes.get(claim, local_dir / "volumes" / claim)
        for volume, claim in volume_claims(worker_pod_spec(job))
    }
    folders = {CODE: folder / "code", **claims}  # of volumes that outlive a pod
    trial = pods.plan(job, Network("127.0.0", 1), folder / "pods", folders)[0]
    _check_dataset(trial)
    screen = Screen(folder.name)
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts().installed())
        with _os_errors_refused(local_dir):
            lock = locks.lock(folder)
            _check_same(folder, job)
            if lock is not None:
                stack.callback(os.close, lock)
            if left_alone := _left_alone(folder, lock, trial):
                screen.event(left_alone)
                return SUCCEEDED
            assert lock is not None
            for path in claims.values():
                path.mkdir(parents=True, exist_ok=True)
            reaper.sweep(f"{folder}#")  # pods of a runner that was killed together with its reaper
            network, addresses = locks.network(str(folder))
            stack.enter_context(addresses)
            scratch, temporary = _scratch(folder)
            _write_code(objects, folder / "code")
            if unused := _without_meaning(job):
                screen.event(f"warning: no effect with --local: {', '.join(unused)}")
            plans = pods.plan(job, network, scratch, folders, key=secrets.token_hex(32))
            tag = f"{folder}#{uuid.uuid4().hex}/"
            sessions = stack.enter_context(_reaper(tag, (lock, addresses.fileno()), temporary))
            runner = Runner(job, folder, plans, tag, verbose)
            stack.callback(runner.screen.close)
        return runner.run(sessions, interrupts)


# -- checks ------------------------------------------------------------------------------------


def _check(job: Object, volumes: Mapping[str, Path]) -> None:
    if sys.platform != "linux":
        raise ConfigError(
            f"--local needs Linux, and this is {sys.platform}: a pod gets its own loopback address"
            " (127.A.B.x) and its share of the CPUs, and ends with its job, none of which works"
            " here; run it in a Linux container or machine, or one process with `gptddp train`"
        )
    count = replica_count(worker_spec(job))
    if count > locks.MAX_PODS:
        raise ConfigError(f"{count} pods on one machine: use at most {locks.MAX_PODS} --replicas")
    known = {claim for _, claim in volume_claims(worker_pod_spec(job))}
    for claim in volumes:
        if claim not in known:
            near = flags.did_you_mean(claim, sorted(known))
            raise ConfigError(f"--volume {claim}=...: the job has no such claim{near}")


def _check_dataset(plan: pods.Plan) -> None:
    """Raise DataError if our launcher has no dataset; a command of the manifest needs none."""
    data = plan.option("--data")
    if container_of(plan.job).get("command") or not data:
        return
    if not Path(data, "dataset.json").is_file():
        where = shlex.quote(relative_path(data))
        raise DataError(
            f"there is no dataset in {where}: make one with `gptddp prepare SOURCE... --out "
            f"{where}`, or set its folder with --volume CLAIM=FOLDER"
        )


def _check_same(folder: Path, job: Object) -> None:
    """Raise ConfigError if the job's folder has another manifest."""
    try:
        old = yaml.safe_load((folder / "manifest.yaml").read_text("utf-8"))
    except (OSError, yaml.YAMLError):
        return
    name = job["metadata"]["name"]
    if found := [f"  {it}" for it in compare(old, job)]:
        head = (
            f"the job {name} exists with another manifest; use another --name, or `gptddp-k8s "
            f"delete {name}{options_for(folder.parents[1])}` to start it again (which continues "
            "its run):"
        )
        more = [f"  ... and {len(found) - 12} more"] if len(found) > 12 else []
        raise ConfigError("\n".join([head, *found[:12], *more]))


def _left_alone(folder: Path, lock: int | None, trial: pods.Plan) -> str:
    """Why there is nothing to do: the job runs already, or it has succeeded and its run exists."""
    if lock is None:
        where = relative_path(folder / "status.json")
        return f"is already running, as process {locks.holder(folder)}; see {where}"
    run = trial.option(flags.flag("run_dir"))
    succeeded = holds({"status": locks.status(folder)}, "Succeeded")
    if succeeded and (run is None or Path(run).exists()):
        return "has already succeeded, nothing to do; for another run use another --name"
    return ""


def _without_meaning(job: Object) -> list[str]:
    """Parts added by --patch that have an effect on a cluster, and none here."""
    spec, policy = worker_pod_spec(job), worker_spec(job).get("restartPolicy")
    others = [it for it in spec["containers"] if it["name"] != CONTAINER]
    found = [f"the container {it['name']}" for it in [*(spec.get("initContainers") or []), *others]]
    for volume in spec.get("volumes") or []:
        if not {"persistentVolumeClaim", "emptyDir"} & {*volume} and volume["name"] != CODE:
            found.append(f"the volume {volume['name']} (an empty folder)")
    if policy != "ExitCode":
        found.append(f"restartPolicy {policy}")
    if any(it.get("envFrom") for it in spec["containers"]):
        found.append("envFrom (the pods have what this shell exports)")
    return found


# -- files and the reaper ----------------------------------------------------------------------


@contextlib.contextmanager
def _os_errors_refused(local_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot run in {relative_path(local_dir)}: {error}; choose another --local-dir "
            "or --volume"
        ) from error


def _write_code(objects: Sequence[Object], folder: Path) -> None:
    """Write the ConfigMaps of the job's own code into one folder: their keys are hashes."""
    for it in objects:
        if it["kind"] == "ConfigMap":
            folder.mkdir(exist_ok=True)
            for key, text in it["binaryData"].items():
                (folder / key).write_bytes(base64.b64decode(text))


def _scratch(folder: Path) -> tuple[Path, list[str]]:
    """The folder of emptyDirs, and the folders to remove at the end.

    TMPDIR is an emptyDir, and a Unix socket's path has at most 107 characters: a job with a long
    path uses its folder through a link.
    """
    real = folder / "pods"
    shutil.rmtree(real, ignore_errors=True)  # left by a killed runner
    if len(str(folder)) <= _LONGEST:
        return real, []
    real.mkdir()
    temporary = tempfile.mkdtemp(prefix="gptddp-")
    os.symlink(real, Path(temporary, "pods"))
    return Path(temporary, "pods"), [temporary]


@contextlib.contextmanager
def _reaper(tag: str, locks: tuple[int, ...], temporary: list[str]) -> Iterator[IO[str]]:
    """Start the process that ends the pods' processes after this process; yields its stdin."""
    command = [sys.executable, "-I", "-S", reaper.__file__, tag, *temporary]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=locks,
        text=True,
    ) as process:
        assert process.stdin
        yield process.stdin  # Popen's exit closes it, and waits for the reaper to end
