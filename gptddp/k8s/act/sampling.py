"""`gptddp-k8s sample`: a short Job that reads a run's newest checkpoint, and is deleted then."""

from collections.abc import Mapping, Sequence

from gptddp.errors import ClusterError, ConfigError, JobFailed, NotFoundError
from gptddp.k8s.act import needs, short_job
from gptddp.k8s.cluster import JOB, Cluster
from gptddp.k8s.objects import Object, argument, claim_at, worker_pod_spec, worker_spec
from gptddp.k8s.observe.watcher import Say
from gptddp.k8s.render.manifest import DATA, RUNS
from gptddp.k8s.render.short_job import ClaimPath, sample_job
from gptddp.k8s.render.spec import JobSpec


def job(
    cluster: Cluster,
    name: str,
    options: Sequence[str],
    stated: JobSpec,
    given: Mapping[str, str | None],
) -> Object:
    """The Job of a sample: `given`, its image, memory, runs and data.

    What is not given is that of the PyTorchJob `name`, or `stated` where that is gone.
    """
    live = cluster.get(JOB, name)
    pod_spec = worker_pod_spec(live) if live else {}
    claim, own_runs = claim_at(pod_spec, DATA), claim_at(pod_spec, RUNS)
    if live and not (claim and own_runs):
        raise ConfigError(f"the PyTorchJob {name} has no volumes data and runs: is it of gptddp?")
    runs, run = own_runs, argument(pod_spec, "--run-dir").removeprefix(f"{RUNS}/") or name
    if given["runs"] or not own_runs:
        place = ClaimPath.parse("--runs", given["runs"] or stated.runs)
        runs, run = place.claim, f"{place.path}/{name}".strip("/")
    container = pod_spec["containers"][0] if pod_spec else {}
    limits = container.get("resources", {}).get("limits", {})
    return sample_job(
        name,
        options,
        image=given["image"] or container.get("image") or stated.image,
        memory=given["memory"] or limits.get("memory") or "4Gi",
        data=(given["data"] or claim or stated.claim).partition("/")[0],
        runs=runs,
        run=run,
        template=worker_spec(live)["template"] if live else {},
        asked=stated.pod,
    )


def run(cluster: Cluster, name: str, job: Object, say: Say, timeout_s: float) -> str:
    """Create the Job, wait for its text and delete it, whatever happens.

    Raises JobFailed with the program's last words, TimedOut, ConfigError for a missing claim.
    """
    needs.check(cluster, job["spec"]["template"]["spec"], 1, say)
    created = cluster.create(job)["metadata"]["name"]
    try:
        ended = short_job.watch(cluster, created, say, timeout_s=timeout_s)
        words = short_job.last_words(cluster, created)
        if ended == short_job.FAILED:
            words = words or short_job.reason(cluster, created)
            raise JobFailed(f"{words}; {_hint(cluster, name)}")
        pod = short_job.pods(cluster, created)[-1]["metadata"]["name"]
        text = "".join(line.partition(" ")[2] + "\n" for line in cluster.log(pod))
        say(words)  # the step and the seed
        return text
    finally:
        try:
            cluster.delete("Job", created)
        except ClusterError as error:  # neither the text nor why there is none must be lost
            command = f"kubectl delete job {created} -n {cluster.namespace}"
            say(f"warning: the Job {created} is left, and `{command}` removes it: {error}")


def _hint(cluster: Cluster, name: str) -> str:
    """What to look at where there is no sample."""
    try:
        cluster.job(name)
    except NotFoundError as error:  # the name of a run may stay when the job is gone
        return f"and {error}"
    except ClusterError:
        pass
    return f"`gptddp-k8s status {name}{cluster.flags}` shows how far the job is"
