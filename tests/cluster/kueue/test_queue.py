"""Jobs in queues of a real Kueue: those that wait, those that run, and what each command does."""

import json

from support.toy import SMALL


def active(team, name):
    """`spec.active` of a job's Workload; None while there is none."""
    uid = team.get("pytorchjob", name)["metadata"]["uid"]
    found = team.get("workloads", "-l", f"kueue.x-k8s.io/job-uid={uid}")
    return found[0]["spec"]["active"] if found else None


def test_jobs_take_turns(team):
    """One runs, the other waits: nothing ends the wait, and all commands go by Kueue."""
    team.submit("one")
    team.says("one", "Running", "2 of 2 ready")
    team.submit("two")
    shown = team.says("two", "Queued", "queue team", "insufficient unused quota for cpu")
    assert "kubectl describe workloads -l kueue.x-k8s.io/job-uid=" in shown
    ended = team.cli("wait", "two", "--timeout", "4", code=124)
    assert "two: Queued: it waits in the queue team" in ended.stderr
    assert "it is in the queue team" in team.cli("resume", "two").stderr
    refused = team.cli("scale", "one", "--replicas", "1", code=2).stderr
    assert "Kueue stops a job" in refused
    assert "->" not in team.cli("submit", "--dry-run", *_same("one")).stdout

    assert "commit a checkpoint" in team.cli("suspend", "one").stderr
    team.says("one", "Suspended", "taken out of the queue team", "gptddp-k8s resume one")
    assert "Suspended" in team.cli("list").stdout and active(team, "one") is False
    team.says("two", "Running", "2 of 2 ready")
    team.cli("resume", "one")
    team.says("one", "Queued")
    assert "for room for its pods" in team.cli("scale", "one", "--replicas", "1").stderr
    team.cli("delete", "two")
    team.says("one", "Running", "1 of 1 ready")
    ledger = team.namespace.shared / "runs/one/ledger.jsonl"

    def began():
        events = map(json.loads, ledger.read_text().splitlines())
        return [event["step"] for event in events if event["event"] == "start"]

    team.until(lambda: len(began()) > 1 and began()[-1] > 0, "it goes on from its checkpoint")
    owner = [w["metadata"]["ownerReferences"][0]["name"] for w in team.get("workloads")]
    assert owner == ["one"]


def _same(name):
    """The options of a job as `submit` has them."""
    job = ("--name", name, "--replicas", "2", "--cpu", "500m", "--memory", "2Gi", "--queue", "team")
    return [*job, "--data", "data/corpus", "--", *SMALL, "--steps", "1000000"]


def test_what_is_wrong_with_a_queue_is_said(team):
    """Before a job is made where it can be, else in the words of its Workload."""
    refused = team.submit("one", "--queue", "tema", code=2).stderr
    assert "--queue tema: there is no LocalQueue" in refused and "there are team" in refused
    refused = team.submit("one", "--priority", "none", code=2).stderr
    assert "--priority none: there is no WorkloadPriorityClass" in refused
    assert "nothing was created" in refused

    team.apply("LocalQueue", "team", spec={"clusterQueue": team.own, "stopPolicy": "Hold"})
    doctor = ("doctor", "--queue", "team", "--data", "data/corpus")
    stopped = lambda: "LocalQueue team: Stopped: " in team.cli(*doctor, code=None).stdout  # noqa: E731
    team.until(stopped, "doctor tells what the queue says")
    team.submit("one")
    team.says("one", "Queued", "it waits in the queue team", "LocalQueue")
    team.set_quota(stopPolicy="Hold")
    team.apply("LocalQueue", "team", spec={"clusterQueue": team.own, "stopPolicy": "None"})
    team.says("one", "Queued", f"ClusterQueue {team.own}")
    team.set_quota(namespaceSelector={"matchLabels": {"team": "other"}})
    team.says("one", "Queued", "match ClusterQueue selector")
    team.set_quota()
    team.says("one", "Running")

    team.submit("two", "--cpu", "3")
    team.says("two", "Queued", "current podset request (6) > maximum capacity (1)")
    team.submit("three", "--topology", "required=kubernetes.io/hostname")
    team.says("three", "Queued", "TopologyAwareScheduling")
    team.apply("LocalQueue", "lost", spec={"clusterQueue": "nowhere"})
    team.submit("four", "--queue", "lost")
    team.says("four", "Queued", "it waits in the queue lost", "nowhere")
    team.kubectl("delete", "localqueue", "lost")
    team.says("four", "Queued", "LocalQueue lost")
