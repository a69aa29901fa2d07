"""`doctor`: each thing that a cluster can lack is found, with its fix, and nothing is changed."""

import json

import pytest
import yaml
from support.doctored import (
    NODES,
    OPERATOR,
    POLICIES,
    QUEUES,
    QUOTAS,
    SET,
    daemon_set,
    doctor,
    healthy,
    items,
    named,
    node,
    operator,
    quota,
    refuses_wrong_names,
)
from support.paths import ROOT
from support.queue_cases import local_queue
from support.writable_api_server import submit


@pytest.fixture
def server_in():
    """A cluster that lacks nothing."""
    return healthy


CHECKS = (
    "api", "namespace", "crd", "operator", "rights", "webhook", "pod", "volumes", "quota",
    "nodes", "image", "network",
)  # fmt: skip


def test_nothing_is_found_where_nothing_is_wrong(api):
    """Exit code 0, a line each, and `all is well` on stderr."""
    code, found = doctor(api)
    assert code == 0 and {it["status"] for it in found.values()} == {"ok"}
    assert set(found) == {*CHECKS}
    text = api.command_line("doctor", "--replicas", "4")
    assert text.stdout.splitlines()[0] == "ok    api        Kubernetes v1.34.4, namespace default"
    assert text.stderr == "all is well\n"


DIGEST = "r.io/x@sha256:" + "0" * 64
LOST = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}  # tolerated for 10 s
GPU_TAINT = {"key": "dedicated", "value": "team", "effect": "NoSchedule"}
AWS = daemon_set("aws-node", "aws-node")
OPEN = yaml.safe_load((ROOT / "k8s/overlays/openshift/egress.yaml").read_text())
SHUT = named("deny", spec={"podSelector": {}, "policyTypes": ["Ingress", "Egress"]})
NO_DNS = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "runs"}}
ENDING = {"metadata": {"name": "default", "deletionTimestamp": "2026-01-01T00:00:00Z"}}
NONE = (404, "the server could not find the requested resource")


def claim(modes=("ReadWriteMany",), phase="Bound", **meta):
    spec = {"accessModes": list(modes), "volumeName": "pv"}
    return {
        **NO_DNS,
        "metadata": {"name": "runs", **meta},
        "spec": spec,
        "status": {"phase": phase},
    }


@pytest.mark.parametrize(
    ("path", "answer", "args", "id", "status", "words"),
    [
        ("/version", {"gitVersion": "v1.24.3"}, [], "api", "warn", "Kubernetes v1.24.3 is old"),
        ("/api/v1/namespaces/default", (404, "not found"), [], "namespace", "fail", "create names"),
        ("/api/v1/namespaces/default", ENDING, [], "namespace", "fail", "is being deleted; name"),
        ("/api/v1/namespaces/default", (403, "U cannot get resource"), [], "namespace", "warn",
         "cannot be seen"),
        ("/apis/kubeflow.org/v1", NONE, [], "crd", "fail", "install the Kubeflow training op"),
        ("/apis/kubeflow.org/v1", {"resources": []}, [], "crd", "fail", "knows no PyTorchJobs"),
        (OPERATOR, items(), [], "operator", "warn", "no Deployment has the label"),
        (OPERATOR, items(operator(0)), [], "operator", "fail", "no pod that is ready"),
        (NODES, items(node(cpu="1")), ["--cpu", "2"], "nodes", "fail", "cpu 1, not 2 (1 of 1)"),
        (NODES, items(node()), ["--gpus", "9"], "nodes", "fail", "nvidia.com/gpu 8, not 9"),
        (NODES, items(node()), ["--gpus", "1", "--gpu-resource", "amd.com/gpu"], "nodes", "fail",
         "no amd.com/gpu (1 of 1)"),
        (NODES, items(node(cpu="3")), [], "nodes", "warn", "room for 3 of 4 even when they are"),
        (NODES, items(node(taints=[GPU_TAINT])), [], "nodes", "fail",
         "add --toleration dedicated=team:NoSchedule"),
        (NODES, items(node(taints=[GPU_TAINT])), ["--toleration", "dedicated=team:NoExecute"],
         "nodes", "fail", "taints keep its pods from every node"),
        (NODES, items(node(taints=[GPU_TAINT])), ["--toleration", "dedicated=other"],
         "nodes", "fail", "taints keep its pods from every node"),
        (NODES, items(node(taints=[LOST])), [], "nodes", "fail", "unreachable:NoExecute"),
        (NODES, items(node()), ["--node-selector", "zone=a"], "nodes", "fail", "no label zone=a"),
        (NODES, (403, "nodes is forbidden: U cannot list resource nodes"), [], "nodes", "warn",
         "cannot be seen"),
        (NODES, items(node(images=[])), [], "image", "fail", "would pull docker.io/library/gptddp"),
        (NODES, items(node(), node(images=[])), [], "image", "warn", "is on 1 of 2 nodes"),
        (QUOTAS, items(quota({"requests.cpu": "5"}, {"requests.cpu": "2"})), [], "quota", "fail",
         "requests.cpu: 2 of 5 used, the job needs 4 (q)"),
        (QUOTAS, items(quota({"count/services": "3"}, {})), [], "quota", "fail", "the job needs 4"),
        (QUOTAS, items(quota({"pods": "3"}, {})), [], "quota", "fail", "pods: 0 of 3 used"),
        (QUOTAS, items(quota({"limits.memory": "1Gi"}, {})), ["--memory", "4Gi"], "quota", "fail",
         "limits.memory: 0 of 1Gi used, the job needs 16Gi"),
        (QUOTAS, items(quota({"count/networkpolicies.networking.k8s.io": "0"}, {})), [], "quota",
         "fail", "--without networkpolicy"),
        (QUOTAS, items(quota({"secrets": "1"}, {"secrets": "1"})), [], "quota", "warn",
         "runs without a key"),
        (SET, items(daemon_set("kube-flannel-ds")), [], "network", "warn", "reaches the job's p"),
        (SET, items(AWS), [], "network", "warn", "no network plug-in is known here"),
        (POLICIES, items(SHUT), [], "network", "fail", "whose egress allows"),
        (QUEUES, NONE, ["--queue", "team"], "queue", "fail", "the cluster has no Kueue"),
        (QUEUES, items(named("other")), ["--queue", "team"], "queue", "fail", "one of other"),
        (QUEUES, items(named("team")), [], "queue", "warn", "add --queue"),
        ("claim", None, [], "volumes", "fail", "there is no claim runs"),
        ("claim", claim(["ReadWriteOnce"]), [], "volumes", "fail", "use ReadWriteMany"),
        ("claim", claim(["ReadOnlyMany"]), ["--replicas", "1"], "volumes", "fail",
         "the pods write to it"),
        ("/version", {"gitVersion": "v1.34.0"}, ["--env-from-secret", "A=hf/token"], "named",
         "fail", "kubectl create secret generic hf --from-literal=token=... -n default"),
        ("/version", {"gitVersion": "v1.34.0"}, ["--service-account", "me"], "named", "fail",
         "there is no ServiceAccount me"),
        ("claim", claim(phase="Lost"), [], "volumes", "fail", "is Lost: its volume"),
        ("claim", claim(phase="Pending"), [], "volumes", "warn", "kubectl describe pvc runs"),
        ("claim", claim(deletionTimestamp="2026-01-01T00:00:00Z"), [], "volumes", "fail",
         "is being deleted"),
        ("/api/v1/persistentvolumes/pv", {"spec": {"hostPath": {"path": "/x"}}}, [], "volumes",
         "warn", "a folder of each node (hostPath)"),
        ("/api/v1/persistentvolumes/pv", {"spec": {"local": {"path": "/x"}}}, [], "volumes",
         "warn", "a disk of one node"),
    ],
)  # fmt: skip
def test_what_a_cluster_lacks_is_found_with_its_fix(api, path, answer, args, id, status, words):
    """One thing is wrong: its check says so, and what fails is the exit code."""
    api.put(claim())
    if path != "claim":
        api.paths[path] = answer
    elif answer is None:
        api.remove("PersistentVolumeClaim", "runs")
    else:
        api.put(answer)
    code, found = doctor(api, *args)
    assert found[id]["status"] == status
    assert words in f"{found[id]['text']}; {found[id]['fix']}"
    assert code == (1 if status == "fail" else 0)


@pytest.mark.parametrize(
    ("path", "answer", "args"),
    [
        (NODES, items(node(taints=[GPU_TAINT])), ["--toleration", "dedicated=team:NoSchedule"]),
        (NODES, items(node(taints=[{"key": "a", "effect": "PreferNoSchedule"}])), []),
        (NODES, items(node(), node("b", taints=[GPU_TAINT])), []),
        (NODES, items(node(labels={"zone": "a"})), ["--node-selector", "zone=a"]),
        (NODES, items(node(images=[DIGEST])), ["--image", DIGEST]),
        (NODES, items(*(node(cpu="2") for _ in range(4))), ["--cpu", "2"]),  # just enough
        (NODES, items(node()), ["--image", "r.io/mine:1"]),  # which nodes can pull
        (QUOTAS, items(quota({"pods": "0"}, {}, scopes=["BestEffort"])), []),
        (QUOTAS, items(quota({"requests.storage": "1", "configmaps": "1"},
                             {"requests.storage": "2", "configmaps": "2"})), []),
        (SET, items(daemon_set("aws-node", "aws-node", "aws-eks-nodeagent")), []),
        (POLICIES, items(SHUT, OPEN), []),
    ],
)  # fmt: skip
def test_what_will_do_is_no_complaint(api, path, answer, args):
    """A tolerated taint, a soft one, one of other nodes; a quota of other pods; egress opened."""
    api.paths[path] = answer
    code, found = doctor(api, *args)
    assert code == 0 and {it["status"] for it in found.values()} == {"ok"}
    assert {*CHECKS} <= {*found}


@pytest.mark.parametrize(
    ("queue", "args", "held", "status", "words"),
    [
        (local_queue(), [], True, "ok", "the LocalQueue team admits jobs"),
        (local_queue("Hold"), [], True, "fail", "is stopped (spec.stopPolicy: Hold)"),
        (local_queue(active="False"), [], True, "fail", "the ClusterQueue gpus of the queue team"),
        (local_queue(), ["--priority", "high"], True, "fail", "no WorkloadPriorityClass high"),
        (local_queue(), [], False, "fail", "Kueue does not hold PyTorchJobs here"),
    ],
)
def test_a_queue_is_looked_at_as_submit_does(api, queue, args, held, status, words):
    """What submit would refuse or warn of fails here; so does a queue that starts no job."""
    api.unserved = ()
    api.put(queue)

    def webhook(body):
        if body["kind"] == "PyTorchJob" and held:
            body["spec"]["runPolicy"]["suspend"] = True
        return refuses_wrong_names(body)

    api.webhook = webhook
    _, found = doctor(api, "--queue", "team", *args)
    assert found["queue"]["status"] == status
    assert words in f"{found['queue']['text']}; {found['queue']['fix']}"


def test_a_job_in_a_queue_needs_rights_to_its_workload(api):
    """Only who may patch it can suspend the job; a job of no queue needs none."""
    api.unserved = ()
    api.put(local_queue())
    api.no_right = {"patch workloads", "list workloads"}
    _, found = doctor(api, "--queue", "team")
    assert "patch workloads.kueue.x-k8s.io" in found["rights"]["text"]
    assert doctor(api)[1]["rights"]["status"] == "ok"


@pytest.mark.parametrize(
    ("right", "command", "status"),
    [
        ("create pytorchjobs", "submit", "fail"),
        ("get networkpolicies", "submit", "fail"),
        ("patch networkpolicies", "submit", "fail"),
        ("list events", "why a job does not run", "warn"),
        ("list pods", "status, wait, top", "fail"),
        ("create secrets", "a signed rendezvous", "warn"),
        ("get pods/log", "logs", "warn"),
        ("patch pytorchjobs", "scale, suspend, resume", "warn"),
        ("delete poddisruptionbudgets", "delete", "warn"),
        ("list jobs", "delete", "warn"),
        ("create jobs", "prepare, sample", "warn"),
    ],
)
def test_a_right_that_is_missing_is_named_with_the_command(api, right, command, status):
    """By the command that needs it; without those of submit and status a job cannot be run."""
    api.no_right = {right}
    done = api.command_line("doctor", "-o", "json")
    found = [it for it in json.loads(done.stdout) if it["id"] == "rights"]
    told = [it for it in found if it["text"].startswith(f"{command}: ")]
    assert told and told[0]["status"] == status and right in told[0]["text"]
    assert "ask for a Role in default" in told[0]["fix"]
    assert done.exit_code == (1 if status == "fail" else 0)


def test_a_companion_that_is_left_out_needs_no_right(api):
    """What a namespace's user may not make can be done without."""
    api.no_right = {"create networkpolicies", "patch networkpolicies", "get networkpolicies"}
    assert doctor(api)[0] == 1
    assert doctor(api, "--without", "networkpolicy")[0] == 0


def test_an_operator_that_lets_mistakes_pass_is_seen(api):
    """Its webhook is tried with a wrong job, as a dry run."""
    api.webhook = lambda body: ""
    _, found = doctor(api)
    assert found["webhook"]["status"] == "warn"
    assert "does not look at it" in found["webhook"]["text"]
    api.refuse["PyTorchJob"] = (500, 'failed calling webhook "validator"')
    code, found = doctor(api)
    assert code == 1 and found["webhook"]["status"] == "fail"


def test_a_pod_that_would_be_refused_is_seen(api):
    """Pod Security, LimitRanges and the like, in the server's words; nothing without the right."""
    api.refuse["Pod"] = (403, 'pods "x" is forbidden: violates PodSecurity "restricted"')
    code, found = doctor(api)
    assert code == 1 and "violates PodSecurity" in found["pod"]["text"]
    api.no_right = {"create pods"}
    code, found = doctor(api)
    assert code == 0 and "no right to create pods" in found["pod"]["text"]


def test_a_job_that_is_refused_is_no_lack_of_a_right(api):
    """A quota of jobs, or a policy: the server's words fail, though they come with a 403 too."""
    api.refuse["PyTorchJob"] = (403, "pytorchjobs is forbidden: exceeded quota: q")
    code, found = doctor(api)
    assert code == 1 and found["webhook"]["status"] == "fail"
    assert "exceeded quota: q" in found["webhook"]["text"]
    assert "policy or quota" in found["webhook"]["fix"]


def test_what_is_refused_beside_a_job_is_named_with_the_way_around_it(api):
    """By a policy of the cluster, or by an object of that name of somebody else."""
    api.refuse["NetworkPolicy"] = (422, "ValidatingAdmissionPolicy 'p' denied request: no")
    code, found = doctor(api)
    assert code == 1 and "denied request: no" in found["beside"]["text"]
    assert found["beside"]["fix"] == "leave it out: --without networkpolicy"
    api.refuse.clear()
    api.put({"kind": "ServiceAccount", "metadata": {"name": "gptddp"}})
    code, found = doctor(api)
    assert code == 1 and "not from gptddp-k8s" in found["beside"]["text"]


def test_a_pull_secret_is_looked_for(api):
    """That it is there, and of the type that the kubelet takes."""
    args = ["--image-pull-secret", "reg", "--image", "r.io/gptddp:1"]
    code, found = doctor(api, *args)
    assert code == 1 and "the pull secret reg is not there" in found["image"]["text"]
    api.put({"kind": "Secret", "metadata": {"name": "reg"}, "type": "Opaque"})
    assert "is of type Opaque" in doctor(api, *args)[1]["image"]["text"]
    api.objects["secrets", "reg"]["type"] = "kubernetes.io/dockerconfigjson"
    assert doctor(api, *args)[0] == 0


def test_a_job_that_exists_is_not_counted_twice(api):
    """Its pods are in the quota already."""
    api.paths[QUOTAS] = items(quota({"pods": "4"}, {"pods": "4"}))
    assert doctor(api, "--name", "demo")[0] == 1
    submit(api.command_line)
    api.writes.clear()
    code, found = doctor(api, "--name", "demo")
    assert code == 0 and "counted already" in found["quota"]["text"]


def test_without_an_api_server_there_is_one_line(api):
    """It says that the server is away; the rest could not be looked at."""
    api.down = True
    done = api.command_line("doctor")
    assert done.exit_code == 1 and done.stdout.startswith("fail  api")
    assert len(done.stdout.splitlines()) == 2 and "fix: " in done.stdout.splitlines()[1]
