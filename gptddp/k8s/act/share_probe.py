"""`doctor --probe`: do two pods on two nodes see each other's files in the volume of the runs?

Access modes only promise it. Two pods of a short Job, with the image and the placement of the job's
pods, write a file each and wait for the other's. That the image is pulled and the volume mounted
comes with it. The Job is deleted, and its files by its pods.
"""

import copy
import secrets
from collections.abc import Iterator

from gptddp.errors import ClusterError, GptddpError
from gptddp.k8s.act import short_job
from gptddp.k8s.act.patient import FAIL, OK, WARN, Check, Patient
from gptddp.k8s.objects import Object, claim_at
from gptddp.k8s.observe.watcher import Say
from gptddp.k8s.render import manifest, restricted
from gptddp.k8s.render.manifest import RUNS
from gptddp.k8s.render.short_job import PLACEMENT

_LIMIT_S = 180.0  # for the image, the volume and two pods
_SEEN_S = 90  # a client of NFS may believe for so long that a file is not there
_NOT_SEEN = 3  # exit code
# The folder is the first argument; in it each pod tells that it is there, then that it has seen.
_SCRIPT = f"""
me=$JOB_COMPLETION_INDEX other=$((1 - JOB_COMPLETION_INDEX)) count=0
mkdir -p "$1" && touch "$1/here.$me" || exit 1
sees() {{ ls "$1" | grep -q "^$2.$other$"; }}
while ! sees "$1" here; do
  count=$((count + 1))
  if [ $count -gt {2 * _SEEN_S} ]; then rm -rf "$1"; exit {_NOT_SEEN}; fi
  sleep 0.5
done
touch "$1/seen.$me"
while [ $me = 0 ] && [ $count -lt {2 * _SEEN_S} ] && ! sees "$1" seen; do
  count=$((count + 1)); sleep 0.5
done
[ $me = 1 ] || rm -rf "$1"
"""


def probe(patient: Patient, say: Say) -> Iterator[Check]:
    """Run the Job, and judge how it ended. Raises ClusterError."""
    claim = claim_at(patient.pod_spec, RUNS)
    job = _job(patient)
    name = job["metadata"]["name"]
    say(f"the Job {name} tries the claim {claim} with two pods")
    patient.cluster.create(job)
    try:
        ended = short_job.watch(patient.cluster, name, say, timeout_s=_LIMIT_S)
        pods = short_job.pods(patient.cluster, name)
        yield _verdict(ended, pods, claim, short_job.last_words(patient.cluster, name))
    except ClusterError:
        raise
    except GptddpError as error:  # it did not start, or its image is missing
        text, _, fix = str(error).partition("; ")
        fix = fix or "mend what keeps its pods from running, as of a job"
        yield Check("probe", FAIL, text, fix)
    finally:
        patient.cluster.delete("Job", name)


def _verdict(ended: str, pods: list[Object], claim: str, words: str) -> Check:
    nodes = sorted({str(pod["spec"].get("nodeName")) for pod in pods})
    if ended == short_job.COMPLETE:
        if len(nodes) == 1:
            text = f"two pods share the claim {claim}, but both were on {nodes[0]}"
            return Check("probe", WARN, text, "make room on a second node, and try again")
        return Check("probe", OK, f"pods on {' and '.join(nodes)} share the claim {claim}")
    codes = {
        (status["state"].get("terminated") or {}).get("exitCode")
        for pod in pods
        for status in (pod.get("status") or {}).get("containerStatuses") or []
    }
    if _NOT_SEEN in codes:
        text = f"pods on {' and '.join(nodes)} do not see each other's files in the claim {claim}"
        return Check("probe", FAIL, text, "use a shared file system, or name another with --runs")
    words = words or f"exit codes {', '.join(sorted(map(str, codes)))}"
    text = f"a pod cannot write to the claim {claim}: {words}"
    return Check("probe", FAIL, text, "let group 1000 write to it, or change --fs-group")


def _job(patient: Patient) -> Object:
    """Two pods like those of the job, that want to be on two nodes."""
    theirs, of = patient.pod_spec, patient.job["metadata"]["name"]
    name = f"{of[:40]}-probe-{secrets.token_hex(3)}"
    labels = manifest.labels(of, "probe")
    own = {key: copy.deepcopy(theirs[key]) for key in PLACEMENT if key in theirs}
    fields = restricted.pod_fields()
    fields["securityContext"] = copy.deepcopy(theirs["securityContext"])
    apart = {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 100,
                    "podAffinityTerm": {
                        "topologyKey": "kubernetes.io/hostname",
                        "labelSelector": {"matchLabels": {"batch.kubernetes.io/job-name": name}},
                    },
                }
            ]
        }
    }
    own["affinity"] = {**apart, **own.get("affinity", {})}
    container = _container(patient, name)
    mounted = [mount["name"] for mount in container["volumeMounts"]]
    volumes = [it for it in theirs["volumes"] if it["name"] in mounted and "emptyDir" not in it]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": 2,
            "parallelism": 2,
            "backoffLimit": 0,
            "activeDeadlineSeconds": int(2 * _LIMIT_S),
            "ttlSecondsAfterFinished": 60,
            "template": {
                "metadata": {"labels": dict(labels)},
                "spec": {
                    **fields,
                    **own,
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": 1,
                    "containers": [container],
                    "volumes": [*copy.deepcopy(volumes), restricted.scratch_volume()],
                },
            },
        },
    }


def _container(patient: Patient, name: str) -> Object:
    theirs = patient.pod_spec["containers"][0]
    mounts = [copy.deepcopy(m) for m in theirs["volumeMounts"] if m["mountPath"] == RUNS]
    amounts = {"cpu": "50m", "memory": "64Mi"}
    return {
        "name": "probe",
        "image": theirs["image"],
        "command": ["sh", "-c", _SCRIPT, "sh", f"{RUNS}/.{name}"],
        "env": [{"name": k, "value": v} for k, v in restricted.scratch_env().items()],
        "resources": {"requests": amounts, "limits": dict(amounts)},
        **restricted.container_fields(),
        "volumeMounts": [*mounts, restricted.scratch_mount()],
    }
