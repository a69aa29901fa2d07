"""`gptddp-k8s sample`: a short Job that reads a run's newest checkpoint, gone again afterwards."""

from collections.abc import Sequence

from gptddp import __version__
from gptddp.errors import ConfigError
from gptddp.k8s.act import short_job, submit
from gptddp.k8s.act.lifecycle import Note
from gptddp.k8s.cluster import JOB, Cluster, Object
from gptddp.k8s.render import batch_job


def job(
    cluster: Cluster, name: str, options: Sequence[str], *, image: str | None, memory: str | None,
    runs: str | None, data: str | None,
) -> Object:  # fmt: skip
    """The Job of a sample, with what is not given taken from the PyTorchJob `name`."""
    live = cluster.get(JOB, name)
    pod = live["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"] if live else {}
    claims = dict(submit.claims(pod))
    if live and not {"data", "runs"} <= {*claims}:
        raise ConfigError(f"the PyTorchJob {name} has no volumes data and runs: is it of gptddp?")
    container = pod["containers"][0] if pod else {}
    limits = container.get("resources", {}).get("limits", {})
    return batch_job.sample_job(
        name, options, image=image or container.get("image") or f"gptddp:{__version__}",
        memory=memory or limits.get("memory") or "4Gi", pod=pod,
        data=data or claims.get("data", "data"), runs=runs or claims.get("runs", "runs"),
    )  # fmt: skip


def run(cluster: Cluster, name: str, job: Object, note: Note, timeout_s: float) -> str:
    """Create the Job, wait for its text and delete it, whatever happens.

    Raises JobFailed with the program's last words, TimedOut, ConfigError for a missing claim.
    """
    submit.check_claims(cluster, job["spec"]["template"]["spec"], 1, note)
    created = cluster.create(job)["metadata"]["name"]
    try:
        ended = short_job.watch(cluster, created, note, timeout_s=timeout_s)
        said = short_job.last_words(cluster, created)
        if ended == short_job.FAILED:
            hint = f"`gptddp-k8s status {name}{cluster.flags}` shows how far the job is"
            raise short_job.JobFailed(f"{said or short_job.reason(cluster, created)}; {hint}")
        pod = short_job.pods(cluster, created)[-1]["metadata"]["name"]
        text = "".join(line.partition(" ")[2] + "\n" for line in cluster.log(pod))
        note(said)  # the step and the seed
        return text
    finally:
        cluster.delete("Job", created)
