"""All causes that `why` knows, from a cluster's objects: the sentence and the command."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.api_objects import job, pod, terminated, unscheduled, waiting
from support.cause_cases import CASES, NOW, PENDING, WELL, of, placed, refused
from support.queue_cases import QUEUE_CASES, SOON, runs

from gptddp.k8s.observe import why
from gptddp.k8s.observe.cause import MENDS
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.known_causes import KNOWN
from gptddp.k8s.observe.status import next_command

CASES = [*CASES, *QUEUE_CASES]
ROOT = Path(__file__).parents[2]
COMMANDS = {  # of causes whose command names more than the job, or fixes the cause
    "pod-security": ("kubectl get namespace default --show-labels",),
    "in-vain": ("gptddp-k8s suspend demo",),
    "claim-unbound": ("kubectl describe pvc runs",),
    "evicted": ("kubectl describe node gptddp-worker",),
    "sidecar": ("kubectl logs demo-worker-0 -c istio-proxy --tail 20",),
    "crash": tuple(
        f"kubectl logs demo-worker-0 -c {container} --previous={previous}"
        for container in ("pytorch", "istio-proxy", "init-pytorch")
        for previous in ("false", "true")
    ),
    "init": ("kubectl logs demo-worker-0 -c init-pytorch --tail 20",),
    "no-step": ("gptddp-k8s logs demo --tail 20",),
    "starting": ("",),
    "failed": ("gptddp-k8s logs demo",),
    "failed-container": ("kubectl logs demo-worker-0 -c istio-proxy",),
    "held": ("gptddp-k8s resume demo",),
    "suspended": ("gptddp-k8s resume demo",),
}


@pytest.mark.parametrize(
    ("id", "facts", "words"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)]
)
def test_a_clusters_objects_give_a_cause_with_its_command(id, facts, words):
    """The first cause has the expected id; its sentence has the words and ends with the command."""
    found = why.causes(facts)[0]
    assert found.id == id and words in found.sentence, found.sentence
    assert found.command in COMMANDS.get(id, (found.command,))
    assert re.match(r"(kubectl|gptddp-k8s) [^$]+$|$", found.command)
    verb = "run" if id in MENDS else "see"
    end = f"; {verb} `{found.command}`" if found.command else found.text
    assert found.sentence.endswith(end)


def test_a_refused_command_is_not_suggested():
    """For a job that gptddp-k8s did not create, causes and `next` suggest kubectl commands."""
    made = job("Suspended", suspend=True, labels={})
    (found,) = why.causes(Facts(made, [], (), NOW))
    assert found.sentence.endswith(
        """run `kubectl patch pytorchjob demo --type merge -p '{"spec": {"runPolicy": """
        """{"suspend": false}}}'`"""
    )
    foreign = [replace(it[1], job={**it[1].job, "metadata": made["metadata"]}) for it in CASES]
    for found in (it for facts in foreign for it in why.causes(facts)):
        assert not re.match("gptddp-k8s (suspend|resume)", found.command), found.id
    for state in (why.SUSPENDED, why.SUCCEEDED):
        assert next_command({"name": "demo", "state": state}, ours=False) == ""


def test_every_known_cause_has_a_case():
    """The cases above cover all of KNOWN."""
    assert {case[0] for case in CASES} == set(KNOWN)


def test_the_most_important_cause_comes_first():
    """Causes are in the order of KNOWN; pods with the same cause are named together."""
    pods = [
        pod(0, terminated(1)),
        pod(1, waiting("ErrImagePull"), phase="Pending"),
        *[unscheduled(n, "0/3 nodes are available: 3 Insufficient cpu.") for n in (2, 3, 4, 5)],
    ]
    event = refused('pods "demo-worker-6" is forbidden: exceeded quota: small').events[0]
    found = why.causes(of(*pods, events=[event], replicas=7))
    assert [it.id for it in found] == ["quota", "no-room", "image", "crash"]
    assert found[1].sentence.startswith(
        "pods demo-worker-2, demo-worker-3, demo-worker-4 and more: no node takes it: "
    )


def test_a_command_can_be_pasted():
    """A command names the cluster by the flags of the command that found the cause; a local job has
    no command. Names are quoted for the shell."""
    made = placed("3 Insufficient cpu")
    flags = " -n team --kubeconfig '/a b/c'"
    found = why.causes(Facts(made.job, made.pods, (), NOW, flags))[0]
    assert found.command == f"kubectl describe nodes{flags}"
    made.job["status"]["local"] = True
    assert why.causes(made)[0].command == ""
    claim = {"name": "a", "persistentVolumeClaim": {"claimName": "a; rm -rf x"}}
    facts = placed("persistent", claims={"a; rm -rf x": PENDING}, volumes=[claim])
    assert why.causes(facts)[0].command == "kubectl describe pvc 'a; rm -rf x'"


@pytest.mark.parametrize("facts", [*WELL, replace(runs(), now=SOON), runs(unseen="no right")])
def test_a_healthy_job_has_no_cause(facts):
    """Each of these jobs would have a cause a little later, or after one more event."""
    assert all(it.id in ("starting", "no-operator") for it in why.causes(facts))


def test_the_page_has_every_cause():
    """docs/why.md has a table of all causes, in the order of the code, each with its meaning."""
    page = (ROOT / "docs/why.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)` \|(.*)\|$", page, re.M)
    assert [id for id, _ in rows] == list(KNOWN)
    assert all(meaning.strip() for _, meaning in rows)
