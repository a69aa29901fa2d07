"""NetworkPolicies of a namespace that keep the pods of a job apart."""

import pytest
import yaml
from support.manifests import render
from support.paths import ROOT
from support.writable_api_server import WriteAPI, put_claims, submit

from gptddp.k8s.act import networks

OUT, IN = ["Egress"], ["Ingress"]
OWN = {"training.kubeflow.org/job-name": "gptddp"}
ELSEWHERE = {
    "namespaceSelector": {"matchLabels": {"team": "a"}},
    "podSelector": {"matchLabels": {}},
}
EGRESS = yaml.safe_load((ROOT / "k8s/overlays/openshift/egress.yaml").read_text())
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
    """The policy is named; one beside it that opens the way is enough, as policies add up."""
    *helpers, job = render()
    text, fix = networks.closed(job, helpers, policies)
    assert "NetworkPolicy deny keeps" in text and "openshift/egress.yaml" in fix, why
    assert networks.closed(job, helpers, [*policies, EGRESS]) is None


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
    *helpers, job = render()
    assert networks.closed(job, helpers, policies) is None


def test_who_leaves_out_the_jobs_policy_needs_another(tmp_path):
    """A namespace that lets nobody in, and --without networkpolicy."""
    deny = [policy(podSelector={}, policyTypes=IN)]
    *helpers, job = render({"without": ("networkpolicy",)})
    _, fix = networks.closed(job, helpers, deny)
    assert "without --without networkpolicy" in fix


def test_submit_warns_of_it(tmp_path):
    """Before the pods wait for each other; not of one pod, nor without the right to see it."""
    api = WriteAPI(tmp_path)
    try:
        put_claims(api)
        api.put(policy(podSelector={}, policyTypes=OUT))
        result = submit(api.command_line, "--dry-run=server")
        assert "warning: the NetworkPolicy deny keeps" in result.stderr, result.output
        api.put(EGRESS)
        assert "NetworkPolicy" not in submit(api.command_line).stderr
        assert "NetworkPolicy deny" not in submit(api.command_line).stderr  # it is there
        alone = ("submit", "--name", "alone", "--replicas", "1")
        assert "NetworkPolicy" not in api.command_line(*alone).stderr
    finally:
        api.close()
