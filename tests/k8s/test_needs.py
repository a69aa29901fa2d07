"""A submit checks objects that pods name and would wait for, and policies that keep pods apart."""

import pytest
from support.manifests import render
from support.writable_api_server import submit

from gptddp.k8s.act import networks

ASKED = (
    *("--service-account", "trainer", "--env-from-secret", "HF_TOKEN=hf/token"),
    *("--image-pull-secret", "registry", "--env-from-secret", "keys"),
)
PATCH = """
spec:
  pytorchReplicaSpecs:
    Worker:
      template:
        spec:
          containers:
          - name: pytorch
            env:
            - {name: SITE, valueFrom: {configMapKeyRef: {name: site, key: token}}}
            - {name: OTHER, valueFrom: {configMapKeyRef: {name: absent, key: a, optional: true}}}
          volumes:
          - {name: certs, secret: {secretName: certs}}
          - {name: rc, configMap: {name: rc}}
          - name: all
            projected: {sources: [{secret: {name: part, items: [{key: token, path: t}]}}]}
"""
READ_ONLY = """
spec: {pytorchReplicaSpecs: {Worker: {template: {spec: {
  volumes: [{name: data, persistentVolumeClaim: {readOnly: true}}]}}}}}
"""
NAMED = {
    "trainer": "ServiceAccount",
    "hf": "Secret",
    "site": "ConfigMap",
    "certs": "Secret",
    "keys": "Secret",
    "rc": "ConfigMap",
    "part": "Secret",
    "registry": "Secret",
}


@pytest.fixture
def asked(api, tmp_path):
    """Options that name an existing object of each kind."""
    for name, kind in NAMED.items():
        data = {} if name == "trainer" else {"data": {"token": "eA=="}}
        api.put({"kind": kind, "metadata": {"name": name}, **data})
    (tmp_path / "patch.yaml").write_text(PATCH)
    return [*ASKED, "--patch", str(tmp_path / "patch.yaml")]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("trainer", "there is no ServiceAccount trainer in the namespace default: `kubectl create"),
        (
            "hf",
            "`kubectl create secret generic hf --from-literal=token=... -n default --kubeconfig",
        ),
        ("site", "there is no ConfigMap site"),
        ("certs", "there is no Secret certs"),
        ("keys", "there is no Secret keys"),
        ("rc", "there is no ConfigMap rc"),
        ("part", "`kubectl create secret generic part --from-literal=token=... -n default --kube"),
    ],
)
def test_a_missing_object_is_reported_before_anything_is_created(api, k8s, asked, name, words):
    """A missing account, Secret or ConfigMap: exit code 2, and the command that creates it."""
    gone = api.objects.pop(next(key for key in api.objects if key[1] == name))
    result = submit(k8s, *asked)
    assert result.exit_code == 2 and words in result.stderr, result.stderr
    assert api.writes == []
    api.put(gone)
    result = submit(k8s, *asked)
    assert result.exit_code == 0 and "warning" not in result.stderr


def test_a_secret_without_the_key_is_reported_with_its_keys(api, k8s, asked):
    """A missing key also keeps a pod from starting: nothing is created."""
    result = submit(k8s, "--env-from-secret", "HF_TOKEN=hf/toke")
    assert result.exit_code == 2 and "Secret hf has no key toke: it has token" in result.stderr
    assert api.writes == []


def test_objects_that_the_user_may_not_read_are_not_checked(api, k8s, asked):
    """A 403 is no reason to refuse: the pods may use objects that their user may not read."""
    api.remove("Secret", "hf")
    api.secrets_are_hidden, api.forbidden = True, {"GET persistentvolumeclaims"}
    result = submit(k8s, *asked)
    assert result.exit_code == 0 and "Secret hf" not in result.stderr


# -- claims --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "modes", "read_only", "words"),
    [
        ("runs", "ReadWriteOnce", False, "(--runs) is ReadWriteOnce: pods on other nodes"),
        ("runs", "ReadWriteOncePod", False, "is ReadWriteOncePod: other pods than the first"),
        ("runs", "ReadOnlyMany", False, "the pods write to it: use ReadWriteMany"),
        ("data", "ReadOnlyMany", False, "add --patch with readOnly: true in the persistentVol"),
        ("data", "ReadOnlyMany", True, ""),
        ("data", "ReadWriteOnce", True, "(--data) is ReadWriteOnce: pods on other"),
    ],
)
def test_an_unsuitable_access_mode_is_a_warning(api, k8s, tmp_path, claim, modes, read_only, words):
    """The job is created, as ReadWriteOnce may work on one node, and a warning has the problem."""
    api.objects["persistentvolumeclaims", claim]["spec"]["accessModes"] = [modes]
    (tmp_path / "read.yaml").write_text(READ_ONLY)
    result = submit(k8s, *(["--patch", str(tmp_path / "read.yaml")] if read_only else []))
    assert result.exit_code == 0 and words in result.stderr
    assert ("warning" in result.stderr) is bool(words)


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
def test_a_policy_that_keeps_pods_apart_is_named_with_the_fix(policies, why):
    """The fix has the direction and the label for a policy; a single pod has no problem."""
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
        [policy(podSelector={}, policyTypes=IN)],  # the job's own policy opens it
        [policy(podSelector={}, policyTypes=OUT, egress=[{}])],
        [policy(podSelector={}, policyTypes=OUT, egress=[to({"podSelector": {}})])],
        [policy(podSelector={}, policyTypes=OUT), policy("more", podSelector={}, egress=[{}])],
        [policy(podSelector={"matchLabels": {"app": "web"}}, policyTypes=OUT)],
        [policy(podSelector={"matchExpressions": [{"key": "app"}]}, policyTypes=OUT)],
        [policy(podSelector={}, policyTypes=OUT, egress=[to(ELSEWHERE)])],
        [policy(podSelector={}, policyTypes=OUT, egress=[to({"ipBlock": {"cidr": "10.0.0.0/8"}})])],
    ],
)
def test_policies_that_let_pods_connect_give_no_message(policies):
    """Policies add up, may select other pods, or may allow it in a part that is not evaluated."""
    *helpers, job = render({"replicas": 2})
    assert networks.closed(job, helpers, policies) is None


def test_a_job_without_its_own_policy_needs_another():
    """A job without its own policy is reported in a namespace that denies all ingress."""
    *helpers, job = render({"replicas": 2, "without": ("networkpolicy",)})
    lack = networks.closed(job, helpers, [policy(podSelector={}, policyTypes=IN)])
    assert "whose ingress allows" in lack.fix


def test_submit_warns_of_a_policy_that_keeps_pods_apart(api, k8s):
    """The pods would wait for each other. Without the right to read policies: no warning."""
    api.put(policy(podSelector={}, policyTypes=OUT))
    assert "warning: the NetworkPolicy deny keeps" in submit(k8s).stderr
    assert "NetworkPolicy" not in submit(k8s).stderr  # the job exists, so nothing is checked
    api.paths["/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"] = (403, "cannot")
    result = k8s("submit", "--name", "next", "--replicas", "2")
    assert result.exit_code == 0 and "NetworkPolicy" not in result.stderr
