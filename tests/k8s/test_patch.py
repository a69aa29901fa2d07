"""`--patch`: a part of the PyTorchJob, merged by name."""

import pytest
from support.manifests import container, pod_spec, render_job, worker

from gptddp.errors import ConfigError

POD = "spec: {pytorchReplicaSpecs: {Worker: {template: {spec: %s}}}}"


def patched(tmp_path, text, **flags):
    file = tmp_path / "patch.yaml"
    file.write_text(text)
    return render_job({**flags, "patch": file})


def in_pod(tmp_path, text, **flags):
    return patched(tmp_path, POD % text, **flags)


def names(items):
    return [item["name"] for item in items]


def test_lists_are_merged_by_name(tmp_path):
    """Containers, volumes, variables, mounts: an item of the same name is changed, others stay."""
    job = in_pod(
        tmp_path,
        """{
      containers: [
        {name: pytorch, env: [{name: LANG, value: C}, {name: NEW, value: '1'}],
         volumeMounts: [{name: models, mountPath: /models}, {name: data, mountPath: /more}]},
        {name: sidecar, image: 'r.io/s:1'}],
      volumes: [{name: models, persistentVolumeClaim: {claimName: models}}]}""",
        env=(("LANG", "de"), ("KEPT", "1")),
    )
    before = render_job({"env": (("LANG", "de"), ("KEPT", "1"))})
    assert names(pod_spec(job)["containers"]) == ["pytorch", "sidecar"]
    assert names(pod_spec(job)["volumes"]) == ["data", "runs", "scratch", "shm", "models"]
    env = {item["name"]: item.get("value") for item in container(job)["env"]}
    assert (env["LANG"], env["KEPT"], env["NEW"]) == ("C", "1", "1")
    assert names(container(job)["env"]) == [*names(container(before)["env"]), "NEW"]
    mounts = [mount["mountPath"] for mount in container(job)["volumeMounts"]]
    assert mounts == ["/data", "/runs", "/tmp", "/dev/shm", "/models", "/more"]
    assert container(job)["args"] == container(before)["args"]


def test_tolerations_are_merged_by_key_where_all_have_one(tmp_path):
    """Ours stay beside the patch's; two of one key both stay; one without a key replaces all."""
    given = ("a:NoSchedule", "a:NoExecute")
    job = in_pod(tmp_path, "{tolerations: [{key: b}, {key: b, value: c}]}", toleration=given)
    keys = [it["key"].rpartition("/")[2] for it in pod_spec(job)["tolerations"]]
    assert keys == ["not-ready", "unreachable", "a", "a", "b", "b"]
    job = in_pod(tmp_path, "{tolerations: [{operator: Exists}]}")
    assert pod_spec(job)["tolerations"] == [{"operator": "Exists"}]
    assert pod_spec(in_pod(tmp_path, "{tolerations: []}"))["tolerations"] == []


def test_null_removes_a_key_and_others_are_added(tmp_path):
    """A null removes a key anywhere, also in new parts, and a volume's old source; a missing key is
    no error."""
    job = patched(
        tmp_path,
        """
metadata: {annotations: {example.com/a: b}}
spec:
  runPolicy: {schedulingPolicy: {minAvailable: 2, queue: null}}
  pytorchReplicaSpecs: {Worker: {restartPolicy: OnFailure}}
""",
    )
    assert job["metadata"]["annotations"]["example.com/a"] == "b"
    policy = {"cleanPodPolicy": "Running", "schedulingPolicy": {"minAvailable": 2}}
    assert job["spec"]["runPolicy"] == policy and worker(job)["restartPolicy"] == "OnFailure"
    job = in_pod(
        tmp_path,
        """{
      enableServiceLinks: null, hostname: null,
      securityContext: {fsGroup: null},
      containers: [{name: pytorch, livenessProbe: null}],
      volumes: [{name: scratch, emptyDir: null, ephemeral: {}},
                {name: shm, emptyDir: {sizeLimit: 2Gi}}]}""",
    )
    assert not {"enableServiceLinks", "hostname"} & pod_spec(job).keys()
    assert "fsGroup" not in pod_spec(job)["securityContext"]
    assert "livenessProbe" not in container(job)
    volumes = {volume["name"]: volume for volume in pod_spec(job)["volumes"]}
    assert volumes["scratch"] == {"name": "scratch", "ephemeral": {}}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: Job", "kind: a patch cannot change it; leave it out"),
        ("metadata: {name: other}", "metadata.name: a patch cannot change it; use --name"),
        ("metadata: {namespace: other}", "use --namespace"),
        ("metadata: {labels: {app.kubernetes.io/name: x}}", "finds its jobs by it"),
        ("spec: {nprocPerNode: '2'}", "use --nproc-per-node"),
        ("spec: {elasticPolicy: null}", "use --min"),
        ("spec: {elasticPolicy: {maxReplicas: 9}}", "use --max"),
        ("spec: null", "use --nproc-per-node"),
        ("spec: {pytorchReplicaSpecs: {Worker: {replicas: 9}}}", "use --replicas"),
        (POD % "{containers: [{name: pytorch, image: other}]}", "use --image"),
        (POD % "{containers: [{name: pytorch, args: []}]}", "use the options after --"),
        (POD % "{containers: [{image: x}]}", "containers: {'image': 'x'} has no name to merge"),
        (POD % "{containers: [x]}", "containers: 'x' has no name to merge it by; add"),
        (POD % "{volumes: [{emptyDir: {}}]}", "volumes: {'emptyDir': {}} has no name"),
        (POD % "{containers: [{name: pytorch, env: [A]}]}", "pytorch.env: 'A' has no name"),
        (POD % "{containers: [{name: pytorch, ports: [{containerPort: 8}]}]}", "has no name"),
        (POD % "{containers: [{name: pytorch, volumeMounts: [{mountPath: /x}]}]}", "has no name"),
        (POD % "{terminationGracePeriodSeconds: [1]}", r"it is one value, and the patch has \[1\]"),
        (POD % "{serviceAccountName: {name: x}}", "it is one value"),
        (POD % "{volumes: none}", "it is a list, and the patch has 'none'; use a list"),
        (POD % "{securityContext: [a]}", "it is a table"),
        ("metadata: {annotations: none}", "metadata.annotations: it is not a table"),
        (POD % "{securityContext: {$patch: delete}}", "no directives; use null to remove a key"),
        (POD % "{containers: [{name: i, $patch: delete}]}", r"containers.i.\$patch: a patch has"),
    ],
)
def test_an_impossible_patch_is_refused(tmp_path, text, message):
    """The message has the field, and the right option or value."""
    with pytest.raises(ConfigError, match=message) as error:
        patched(tmp_path, text)
    assert str(error.value).startswith("--patch ") and str(error.value).endswith("[patch]")
