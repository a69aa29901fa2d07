"""The Secret with the key of a job's rendezvous: made before the job, kept, and owned by it.

One that the user has made is used as it is, and stays the user's. A job that exists gets no new
key: the next of its pods to start could not join the others.
"""

import base64
import secrets

from gptddp.errors import ConfigError
from gptddp.k8s.act import companion
from gptddp.k8s.act.failure import REFUSED
from gptddp.k8s.cluster import Cluster, if_allowed
from gptddp.k8s.exit_codes import ClusterError
from gptddp.k8s.objects import Object, is_ours
from gptddp.k8s.observe.watcher import Say
from gptddp.k8s.render.companions import SECRET_FIELD, key_command, secret
from gptddp.launch.pod_facts import LEAST_KEY


def check(cluster: Cluster, job: Object) -> bool:
    """Raise ConfigError for a Secret that pods could not use. True where there is none yet."""
    name = job["metadata"]["name"]
    live = if_allowed(lambda: cluster.get("Secret", name), {})
    if live and (wrong := _what_is_wrong(live)):
        fix = (
            f"`kubectl delete secret {name}{cluster.kubectl}`, and submit makes another"
            if is_ours(live, name)
            else f"write a key of {LEAST_KEY} characters or more into it, as `openssl rand -hex 32`"
            " makes it, or use another --name"
        )
        raise ConfigError(f"the Secret {name} {wrong}: {fix}")
    return live is None


def make(cluster: Cluster, job: Object) -> None:
    """See to it that there is a key before the job is, where this user may: `own` tells of it."""
    try:
        if cluster.get("Secret", job["metadata"]["name"]) is None:
            key = {"stringData": {SECRET_FIELD: secrets.token_hex()}}
            cluster.create({**secret(job), **key})
    except ClusterError as error:
        if error.status not in (*REFUSED, 409):  # 409: made by another submit, a moment ago
            raise


def own(cluster: Cluster, job: Object, say: Say) -> None:
    """Make the job that exists the owner of its Secret, or say why its pods may have no key."""
    name, owners = job["metadata"]["name"], [companion.reference(job)]
    try:
        live = cluster.get("Secret", name)
        wrong = "is not there" if live is None else _what_is_wrong(live)
        mine = live is not None and is_ours(live, name)
        if mine and live and live["metadata"].get("ownerReferences") != owners:
            cluster.patch("Secret", name, {"metadata": {"ownerReferences": owners}})
    except ClusterError as error:
        if error.status not in REFUSED:
            raise
        wrong = f"cannot be seen, or be made to go with the job: {error}"
    if wrong:
        command = key_command(name, cluster.kubectl)
        say(
            f"warning: the Secret {name} with the key of the pods' rendezvous {wrong}. They use it"
            " if it is there, and run without a key otherwise. Delete the job and submit it again "
            f"for another key; who may not make Secrets has somebody run `{command}` in between"
        )


def _what_is_wrong(live: Object) -> str:
    """Why the pods could not use the key of this Secret; empty where they can."""
    data = live.get("data") or {}
    if SECRET_FIELD not in data:
        return f"has no field {SECRET_FIELD}"
    try:
        key = base64.b64decode(data[SECRET_FIELD] or "", validate=True).decode().strip()
    except ValueError:  # bad base64, or UTF-8
        return f"has a field {SECRET_FIELD} that is no text"
    if len(key) < LEAST_KEY:
        return f"has a field {SECRET_FIELD} of {len(key)} characters"
    return ""
