"""Every cause that `why` knows, from what a cluster says: its sentence and its command."""

import re
from pathlib import Path

import pytest
from support import queue_cases
from support.cause_cases import (
    CASES,
    HELD,
    NOW,
    PULL,
    held,
    made_again,
    placed,
    quiet,
    refused,
    unready,
)
from support.odd_cause_cases import ODD_CASES, WELL
from support.queue_cases import QUEUE_CASES

from gptddp.k8s.observe import why
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.known_causes import KNOWN

CASES = [*CASES, *ODD_CASES, *QUEUE_CASES]
ROOT = Path(__file__).parents[2]
COMMANDS = {  # of those that name more than the job
    "quota": "kubectl describe resourcequota small",
    "quota-unstated": "kubectl describe resourcequota small",
    "service-account-missing": "kubectl create serviceaccount me",
    "suspended": "gptddp-k8s resume demo",
    "failed": "gptddp-k8s logs demo",
    "in-vain": "gptddp-k8s suspend demo",
    "no-step": "gptddp-k8s logs demo --tail 20",
    "image-never": "kubectl get node gptddp-worker -o 'jsonpath={.status.images[*].names}'",
    "key-missing": "kubectl describe secret hub",
    "init": "kubectl logs demo-worker-0 -c init-pytorch",
    "sidecar": "kubectl logs demo-worker-0 -c istio-proxy --tail 20",
    "rejected": "kubectl describe node gptddp-worker",
    "node-shutdown": "kubectl get nodes gptddp-worker",
    "evicted": "kubectl describe node gptddp-worker",
    "node-lost": "kubectl describe node gptddp-worker",
    "claim-unbound": "kubectl describe pvc runs",
    "claim-elsewhere": "kubectl describe pvc runs",
    "no-room": "kubectl describe nodes",
    "starting": "",
    "local-queue-stopped": "kubectl patch localqueue team --type merge -p "
    """'{"spec": {"stopPolicy": "None"}}'""",
    "quota-too-small": "kubectl describe clusterqueue gpus",
    "held": "gptddp-k8s resume demo",
}


@pytest.mark.parametrize(
    ("id", "facts", "words"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)]
)
def test_what_a_cluster_says_is_a_cause_with_its_command(id, facts, words):
    """The first cause is this one; its sentence has the words and ends with the command."""
    found = why.causes(facts)[0]
    assert found.id == id and words in found.sentence, found.sentence
    assert found.command == COMMANDS.get(id, found.command)
    assert re.match(r"(kubectl|gptddp-k8s) [^$]+$|$", found.command)
    verb = "run" if KNOWN[id].mends else "see"
    end = f"; {verb} `{found.command}`" if found.command else found.text
    assert found.sentence.endswith(end)


def test_every_known_cause_has_such_a_case():
    """A cause without one would be a claim that nothing holds."""
    assert {case[0] for case in CASES} == set(KNOWN)
    assert len(KNOWN) >= 30


def test_a_command_names_the_cluster_that_was_asked():
    """By the flags of the command that found the cause; on this machine there is none."""
    made = placed("3 Insufficient cpu.")
    flags = " -n team --kubeconfig '/a b/c'"
    found = why.causes(Facts(made.job, made.pods, (), NOW, flags))[0]
    assert found.command == f"kubectl describe nodes{flags}"
    made.job["status"]["local"] = True
    assert why.causes(made)[0].command == ""


def test_a_name_that_a_shell_would_read_is_quoted():
    """Names come from messages: a command is to be pasted without harm."""
    found = why.causes(refused('serviceaccount "a; rm -rf x" not found'))[0]
    assert found.command == "kubectl create serviceaccount 'a; rm -rf x'"


@pytest.mark.parametrize(
    "facts",
    [
        quiet(690),  # a step ten seconds ago
        quiet(None, now_s=200),  # it has just begun
        quiet(None, label="theirs"),  # another trainer, whose lines are unknown
        made_again(2),
        held(HELD, "", PULL, second=55),  # a pull that has only begun
        queue_cases.facts(made_job=queue_cases.queued_job(suspend=False), now=queue_cases.LATE),
        unready(ready=True),  # by now
        *WELL,
    ],
)
def test_what_is_still_well_is_no_cause(facts):
    """Each of them a little later, or once more, would be one."""
    assert all(it.id in ("starting", "no-operator") for it in why.causes(facts))


def test_the_page_has_every_cause():
    """docs/why.md has the table of all causes, as the code has it."""
    rows = [
        f"| `{id}` | {it.meaning} | {f'`{command}`' if (command := _plain(it.command)) else ''} |"
        for id, it in KNOWN.items()
    ]
    page = (ROOT / "docs/why.md").read_text()
    table = [line for line in page.splitlines() if re.match(r"\| `[a-z-]+` \|", line)]
    assert table == rows, "make the table anew:\n" + "\n".join(rows)


def _plain(command):
    return re.sub(r"\$(\w+)", lambda name: name[1].upper(), command)
