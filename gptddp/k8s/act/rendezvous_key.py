"""The Secret with the key of a job's rendezvous: created before the job, and owned by it.

A Secret created by the user is used unchanged, and not owned. An existing job gets no new key: its
next pod to start could not join the others.
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
    """Raise ConfigError for a Secret that pods cannot use. True if there is none yet."""
    name = job["metadata"]["name"]
    live = if_allowed(lambda: cluster.get("Secret", name), {})
    if live and (wrong := _what_is_wrong(live)):
        fix = (
            f"`kubectl delete secret {name}{cluster.kubectl}`, and submit creates another"
            if is_ours(live, name)
            else f"write a key of {LEAST_KEY} characters or more into it, as `openssl rand -hex 32`"
            " prints it, or use another --name"
        )
        raise ConfigError(f"the Secret {name} {wrong}: {fix}")
    return live is None


def make(cluster: Cluster, job: Object) -> None:
    """Create the key if there is none and this user may; `own` warns if the user may not."""
    try:
        if cluster.get("Secret", job["metadata"]["name"]) is None:
            key = {"stringData": {SECRET_FIELD: secrets.token_hex()}}
            cluster.create({**secret(job), **key})
    except ClusterError as error:
        if error.status not in (*REFUSED, 409):  # 409: another submit has just created it
            raise


def own(cluster: Cluster, job: Object, say: Say) -> None:
    """Make the job the owner of its Secret, or say why its pods may have no key."""
    name, owners = job["metadata"]["name"], [companion.reference(job)]
    try:
        live = cluster.get("Secret", name)
        wrong = "does not exist" if live is None else _what_is_wrong(live)
        mine = live is not None and is_ours(live, name)
        if mine and live and live["metadata"].get("ownerReferences") != owners:
            cluster.patch("Secret", name, {"metadata": {"ownerReferences": owners}})
    except ClusterError as error:
        if error.status not in REFUSED:
            raise
        wrong = f"cannot be read, or cannot get the job as its owner: {error}"
    if wrong:
        command = key_command(name, cluster.kubectl)
        say(
            f"warning: the Secret {name} with the key of the pods' rendezvous {wrong}. Pods that"
            " find no key in it run without a key. To add or change the key, delete the job and"
            f" submit it again; without the right to create Secrets, ask for `{command}` in between"
        )


def _what_is_wrong(live: Object) -> str:
    """Why the pods cannot use the key of this Secret; "" if they can."""
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
