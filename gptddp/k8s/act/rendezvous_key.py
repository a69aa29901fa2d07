"""The Secret with the key of a job's rendezvous: made before the job, kept, and owned by it.

One that the user has made is used as it is, and stays the user's. A job that exists gets no new
key: the next of its pods to start could not join the others.
"""

import base64
import secrets

from gptddp.errors import ClusterError, ConfigError
from gptddp.k8s.act import companion, lifecycle
from gptddp.k8s.act.failure import REFUSED
from gptddp.k8s.cluster import Cluster
from gptddp.k8s.objects import Object
from gptddp.k8s.observe.watcher import Say
from gptddp.k8s.render.companions import SECRET_FIELD, key_command, secret
from gptddp.launch.pod import LEAST_KEY

_MORE = "docs/security.md of the sources says more"


def make(cluster: Cluster, job: Object, say: Say) -> bool:
    """See to it that there is a key before the job is; is its Secret ours, for the job to own?

    Where secrets are not this user's to see or to make, the job runs without one, or with one that
    others have made: `say` is told. Raises ConfigError for a Secret without a usable key, unless
    it is ours: that one gets a new key.
    """
    name = job["metadata"]["name"]
    try:
        live = cluster.get("Secret", name)
    except ClusterError as error:
        _say_unseen(cluster, name, error, say)
        return False
    if live is not None and not lifecycle.is_ours(live, name):
        if wrong := _what_is_wrong(live):
            raise ConfigError(
                f"the Secret {name} exists, and not from gptddp-k8s, {wrong}: write a key of "
                f"{LEAST_KEY} characters or more into it, as `openssl rand -hex 32` makes it, or "
                "use another --name"
            )
        return False
    try:
        if live is not None and (wrong := _what_is_wrong(live)):
            # Only as it was read: another submit may have renewed it, and have its job run.
            seen = {"resourceVersion": live["metadata"].get("resourceVersion")}
            cluster.patch("Secret", name, {"metadata": seen, **_new_key()})
            say(f"the Secret {name} of an earlier submit was {wrong}: it has a new key")
            live = None
        companion.ensure(cluster, secret(job), None, _new_key())
    except ClusterError as error:
        if error.status not in REFUSED:
            raise
        return _refused(cluster, name, live, error, say)
    return True


def own(cluster: Cluster, job: Object, owner: Object, say: Say) -> None:
    """Make the job the owner of its Secret, which then goes with it."""
    try:
        companion.ensure(cluster, secret(job), owner, _new_key())
    except ClusterError as error:
        if error.status not in REFUSED:
            raise
        name = job["metadata"]["name"]
        say(
            f"warning: the Secret {name} has the key of the job's rendezvous, and does not go with"
            f" the job: {error}. After a delete, {lifecycle.by_hand(cluster, [('Secret', job)])}"
        )


def check(cluster: Cluster, job: Object, live_job: Object, say: Say) -> None:
    """Of a job that exists: own its Secret, or say why its pods have no key."""
    name, at = job["metadata"]["name"], cluster.flags
    mend = f"`gptddp-k8s delete {name}{at}` and a new submit make one; {_MORE}"
    try:
        live = cluster.get("Secret", name)
    except ClusterError as error:
        return _say_unseen(cluster, name, error, say)
    if live is None:
        say(
            f"warning: there is no Secret {name}, so the job's pods have no key for their "
            f"rendezvous: {mend}"
        )
    elif wrong := _what_is_wrong(live):
        say(f"warning: the Secret {name} is {wrong}: pods that start now cannot use it: {mend}")
    elif lifecycle.is_ours(live, name):
        own(cluster, job, live_job, say)


def _new_key() -> Object:
    return {"stringData": {SECRET_FIELD: secrets.token_hex()}}


def _what_is_wrong(live: Object) -> str:
    """Why the pods could not use the key of this Secret; empty where they can."""
    data = live.get("data") or {}
    if SECRET_FIELD not in data:
        return f"without the field {SECRET_FIELD}"
    try:
        key = base64.b64decode(data[SECRET_FIELD] or "", validate=True).decode().strip()
    except ValueError:  # bad base64, or UTF-8
        return f"with a field {SECRET_FIELD} that is no text"
    if len(key) < LEAST_KEY:
        return f"with a field {SECRET_FIELD} of {len(key)} characters"
    return ""


def _say_unseen(cluster: Cluster, name: str, error: ClusterError, say: Say) -> None:
    """Raises the error unless it is one of rights."""
    if error.status != 403:
        raise error
    say(
        f"warning: whether the pods have a key for their rendezvous cannot be seen: {error}. They "
        f"use the field {SECRET_FIELD} of the Secret {name} if there is one, and run without a key "
        f"otherwise. `kubectl get secret {name} -n {cluster.namespace}` tells somebody who may see "
        f"it; the log of a pod without a key has a warning; {_MORE}"
    )


def _refused(
    cluster: Cluster, name: str, live: Object | None, error: ClusterError, say: Say
) -> bool:
    """The Secret may be seen, and not be made or changed."""
    if live is None:
        say(
            f"warning: there is no Secret {name}, so the pods have no key for their rendezvous: "
            f"{error}. For one, delete the job, have somebody who may run `"
            f"{key_command(name, f' -n {cluster.namespace}')}`, and submit again; {_MORE}"
        )
        return False
    if wrong := _what_is_wrong(live):
        raise ConfigError(
            f"the Secret {name} of an earlier submit is {wrong}, and this user may not give it "
            f"another key: {error}. {lifecycle.by_hand(cluster, [('Secret', live)])}; then submit "
            "again"
        ) from None
    return True  # with a key, and labels or an owner of an earlier job: `own` says what that means
