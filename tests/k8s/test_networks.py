"""NetworkPolicies of a namespace that keep the pods of a job apart."""

import pytest
from support.manifests import render
from support.writable_api_server import submit

from gptddp.k8s.act import networks

OUT, IN = ["Egress"], ["Ingress"]
OWN = {"training.kubeflow.org/job-name": "gptddp"}
ELSEWHERE = {
    "namespaceSelector": {"matchLabels": {"team": "a"}},
    "podSelector": {"matchLabels": {}},
}
DNS = {"ports": [{"protocol": "UDP", "port": 53}]}


def policy(name="deny", **spec):
    return {"kind": "NetworkPolicy", "metadata": {"name": name}, "spec": spec}


def to(*peers, **rule):
    return {"to": list(peers), **rule}


@pytest.mark.parametrize(
    ("policies", "why"),
    [
        ([policy(podSelector={}, policyTypes=OUT)], "a total denial"),
        ([policy(podSelector={}, policyTypes=OUT, egress=[DNS])], "names, and no peers"),
        ([policy(podSelector={"matchLabels": OWN}, policyTypes=OUT)], "by the operator's label"),
        (
            [policy(podSelector={}, policyTypes=OUT, egress=[to({"podSelector": {}}, **DNS)])],
            "peers on one port",
        ),
        (
            [policy(egress=[to({"podSelector": {"matchLabels": {"a": "b"}}})])],
            "other pods, and no policyTypes",
        ),
    ],
)
def test_what_keeps_pods_apart_is_told_with_the_fix(policies, why):
    """The policy is named, and the direction and the label of one that opens; not of one pod."""
    *helpers, job = render({"replicas": 2})
    lack = networks.closed(job, helpers, policies)
    assert "NetworkPolicy deny keeps" in lack.text, why
    assert "whose egress allows" in lack.fix and "job-name=gptddp" in lack.fix
    *helpers, job = render({"replicas": 1})
    assert networks.closed(job, helpers, policies) is None


@pytest.mark.parametrize(
    "policies",
    [
        [],
        [policy(podSelector={}, policyTypes=IN)],  # which the job's own opens
        [policy(podSelector={}, policyTypes=OUT, egress=[{}])],
        [policy(podSelector={}, policyTypes=OUT, egress=[to({"podSelector": {}})])],
        [policy(podSelector={}, policyTypes=OUT), policy("more", podSelector={}, egress=[{}])],
        [policy(podSelector={"matchLabels": {"app": "web"}}, policyTypes=OUT)],
        [policy(podSelector={"matchExpressions": [{"key": "app"}]}, policyTypes=OUT)],
        [policy(podSelector={}, policyTypes=OUT, egress=[to(ELSEWHERE)])],
        [policy(podSelector={}, policyTypes=OUT, egress=[to({"ipBlock": {"cidr": "10.0.0.0/8"}})])],
    ],
)
def test_what_lets_pods_meet_is_no_matter(policies):
    """Policies add up, select other pods, or may allow it: no word about them."""
    *helpers, job = render({"replicas": 2})
    assert networks.closed(job, helpers, policies) is None


def test_a_job_without_a_policy_of_its_own_needs_another():
    """In a namespace that lets nobody in."""
    *helpers, job = render({"replicas": 2, "without": ("networkpolicy",)})
    lack = networks.closed(job, helpers, [policy(podSelector={}, policyTypes=IN)])
    assert "whose ingress allows" in lack.fix


def test_submit_warns_of_it(api, k8s):
    """Before the pods wait for each other; without the right to see policies it says nothing."""
    api.put(policy(podSelector={}, policyTypes=OUT))
    assert "warning: the NetworkPolicy deny keeps" in submit(k8s).stderr
    assert "NetworkPolicy" not in submit(k8s).stderr  # it is there
    api.paths["/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"] = (403, "cannot")
    result = k8s("submit", "--name", "next", "--replicas", "2")
    assert result.exit_code == 0 and "NetworkPolicy" not in result.stderr
