"""Runs a PyTorchJob on this machine, a process per pod, as the operator and the kubelets would.

LOCAL_DIR/volumes/<claim>/           a PersistentVolumeClaim
LOCAL_DIR/jobs/<name>/manifest.yaml  what runs; another manifest of the same name is refused
LOCAL_DIR/jobs/<name>/status.json    conditions, pods with their pids and addresses
LOCAL_DIR/jobs/<name>/rendezvous.key  in the place of the job's Secret
LOCAL_DIR/jobs/<name>/code/            its own code, as its ConfigMaps have it, a file a key
LOCAL_DIR/jobs/<name>/logs/<pod>.log
LOCAL_DIR/jobs/<name>/pods/<pod>/    emptyDirs, gone with the pod
"""

import base64
import contextlib
import difflib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gptddp import flags
from gptddp.errors import ConfigError, DataError
from gptddp.k8s.exit_codes import SUCCEEDED
from gptddp.k8s.local import conditions, container, locks, pods, reaper
from gptddp.k8s.local.replica import Network
from gptddp.k8s.local.runner import Interrupts, Runner
from gptddp.k8s.local.screen import Screen, relative_path
from gptddp.k8s.objects import Object, replica_specs, volume_claims, wanted_pods
from gptddp.k8s.render import manifest

_KEY_LENGTH = 64
_LONGEST = 48  # characters of a job's folder, see `_scratch`


def run(
    objects: Sequence[Mapping[str, Any]],
    *,
    local_dir: Path = Path("gptddp-local"),
    volumes: Mapping[str, Path] | None = None,
    verbose: bool = False,
) -> int:
    """Run the PyTorchJob among the objects to its end; returns the exit code.

    `volumes` maps claims to folders outside of `local_dir`. Raises ConfigError or DataError, with
    nothing started and nothing written, for what cannot be run. A job that was stopped, killed or
    has failed goes on; one that has succeeded or is running is left alone.
    """
    job, local_dir, volumes = _pytorchjob(objects), local_dir.absolute(), volumes or {}
    folder, default = local_dir / "jobs" / job["metadata"]["name"], local_dir / "volumes"
    _check_claims(job, volumes)
    volumes = {**volumes, **dict.fromkeys(_config_maps(objects), folder / "code")}
    trial = pods.plan(job, Network("127.0.0", 1), folder / "pods", volumes, default)[0]
    _check_dataset(trial)
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts().installed())
        with _os_errors_refused(local_dir):
            lock = locks.lock(folder)
            _check_same(folder, job)
            if lock is not None:
                stack.callback(os.close, lock)
            if left_alone := _left_alone(folder, lock, trial):
                Screen(folder.name).event(left_alone)
                return SUCCEEDED
            assert lock is not None
            reaper.sweep(f"{folder}#")  # of a runner that was killed together with its reaper
            network, addresses = locks.network(str(folder))
            stack.enter_context(addresses)
            scratch, temporary = _scratch(folder)
            _write(_config_maps(objects), folder / "code")
            plans = pods.plan(job, network, scratch, volumes, default, _key(folder))
            tag = f"{folder}#{uuid.uuid4().hex}/"
            sessions = stack.enter_context(_reaper(tag, (lock, addresses.fileno()), temporary))
            runner = Runner(job, folder, plans, tag, verbose)
        return runner.run(sessions, interrupts)


@contextlib.contextmanager
def _os_errors_refused(local_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot run in {relative_path(local_dir)}: {error}; choose another --local-dir"
        ) from error


def _left_alone(folder: Path, lock: int | None, trial: pods.Plan) -> str:
    """Why there is nothing to do: it runs already, or it has succeeded and its run is there."""
    if lock is None:
        where = relative_path(folder / "status.json")
        return f"is already running, as process {locks.holder(folder)}; see {where}"
    run = trial.option(flags.flag("run_dir"))
    kept = run is None or Path(run).exists()
    if kept and conditions.has_succeeded(folder / "status.json"):
        return "has already succeeded, nothing to do; for another run use another --name"
    return ""


def _pytorchjob(objects: Sequence[Mapping[str, Any]]) -> Object:
    """The one PyTorchJob; other kinds mean nothing on one machine."""
    if sys.platform != "linux":
        raise ConfigError(
            f"--local needs Linux, and this is {sys.platform}: a pod gets a loopback address of its"
            " own (127.A.B.x), its share of the CPUs, and dies with its job, none of which works"
            " here; run it in a Linux container or machine, or one process with `gptddp train`"
        )
    jobs = [dict(o) for o in objects if o.get("kind") == "PyTorchJob"]
    if len(jobs) != 1:
        raise ConfigError(f"the manifest has {len(jobs)} objects of kind PyTorchJob: give one")
    spec = jobs[0]["spec"]
    if (spec.get("runPolicy") or {}).get("suspend"):
        raise ConfigError("spec.runPolicy.suspend is true: nothing would run; remove it")
    count = wanted_pods(jobs[0])
    if count > locks.MAX_PODS:
        raise ConfigError(f"{count} pods on one machine: use at most {locks.MAX_PODS} --replicas")
    return jobs[0]


def _check_claims(job: Object, volumes: Mapping[str, Path]) -> None:
    """A folder for a claim that the job does not have is a mistake."""
    specs = [replica["template"]["spec"] for replica in replica_specs(job).values()]
    known = {claim for spec in specs for _, claim in volume_claims(spec)}
    shown = (container.mounted_object(it) for spec in specs for it in spec.get("volumes") or [])
    known |= {found[1] for found in shown if found}
    for claim in volumes:
        if claim not in known:
            near = flags.did_you_mean(claim, sorted(known))
            raise ConfigError(f"--volume {claim}=...: the job has no such claim{near}")


def _check_dataset(plan: pods.Plan) -> None:
    """Our own launcher needs a dataset; a command of the manifest's may need anything."""
    data = plan.option("--data")
    if plan.replica.container.get("command") or not data:
        return
    if not Path(data, "dataset.json").is_file():
        where = relative_path(data)
        raise DataError(
            f"there is no dataset in {where}: make one with `gptddp prepare SOURCE... --out "
            f"{where}`, or say where it is with --volume CLAIM=FOLDER"
        )


def _check_same(folder: Path, job: Object) -> None:
    """Refuse to go on with another manifest than the job's folder has."""
    try:
        old = (folder / "manifest.yaml").read_text("utf-8").splitlines()
    except OSError:
        return
    new = manifest.to_yaml([job]).splitlines()
    lines = [
        f"  {line}"
        for line in difflib.unified_diff(old, new, lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
        and not any(word in line for word in (manifest.SPEC_HASH, "rdzvId:"))
    ]
    if old != new:
        more = [f"  ... and {len(lines) - 12} more lines"] if len(lines) > 12 else []
        fix = f"use another --name, or remove {relative_path(folder)} to begin it anew"
        first = f"the job {job['metadata']['name']} exists with another manifest; {fix}"
        head = f"{first} (its run directory is then continued):"
        raise ConfigError("\n".join([head, *lines[:12], *more]))


def _config_maps(objects: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, bytes]]:
    """What is in the ConfigMaps among the objects, by their names and keys."""
    return {
        it["metadata"]["name"]: {k: base64.b64decode(v) for k, v in it["binaryData"].items()}
        for it in objects
        if it.get("kind") == "ConfigMap"
    }


def _write(config_maps: Mapping[str, Mapping[str, bytes]], folder: Path) -> None:
    """All of them into one folder: their keys are hashes."""
    for content in config_maps.values():
        folder.mkdir(exist_ok=True)
        for key, data in content.items():
            (folder / key).write_bytes(data)


def _key(folder: Path) -> str:
    """The key of the job's rendezvous: made once, and for its user alone."""
    path = folder / "rendezvous.key"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if len(key := path.read_text("ascii")) == _KEY_LENGTH:
            return key
    key = secrets.token_hex(_KEY_LENGTH // 2)
    new = path.with_name(f"{path.name}.new")  # whoever is killed here leaves no torn key
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)
    new.replace(path)
    return key


def _scratch(folder: Path) -> tuple[Path, list[str]]:
    """Where emptyDirs lie, and a folder to remove at the end, if one was needed.

    TMPDIR is one of them, and the path of a Unix socket may have 107 characters only: a job deep
    down in the file system reaches its own folder through a link.
    """
    real = folder / "pods"
    shutil.rmtree(real, ignore_errors=True)  # of a runner that was killed
    if len(str(folder)) <= _LONGEST:
        return real, []
    real.mkdir()
    temporary = tempfile.mkdtemp(prefix="gptddp-")
    os.symlink(real, Path(temporary, "pods"))
    return Path(temporary, "pods"), [temporary]


@contextlib.contextmanager
def _reaper(tag: str, locks: tuple[int, ...], temporary: list[str]) -> Iterator[IO[str]]:
    """Start the process that ends the pods' processes when this one has ended; its stdin."""
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
        yield process.stdin  # leaving closes it, at which the reaper ends, and waits for that
