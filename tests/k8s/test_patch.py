"""`--patch`: a strategic merge into the PyTorchJob."""

import pytest
import yaml
from support.manifests import container, pod_spec, render_job, worker

from gptddp.errors import ConfigError
from gptddp.k8s.render import admission, manifest, rules, spec

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
    """Containers, volumes, variables and mounts: what has the name is changed, the rest stays."""
    job = in_pod(
        tmp_path,
        """{
      containers: [
        {name: pytorch, env: [{name: LANG, value: C}, {name: NEW, value: '1'}],
         volumeMounts: [{name: models, mountPath: /models}]},
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
    assert mounts == ["/data", "/runs", "/tmp", "/dev/shm", "/models"]
    assert container(job)["args"] == container(before)["args"]
    assert admission.check_job(job) == []


def test_null_and_the_directives_remove(tmp_path):
    """null takes out a key, `$patch: delete` an item, `$patch: replace` all that was there."""
    job = in_pod(
        tmp_path,
        """{
      enableServiceLinks: null,
      securityContext: {$patch: replace, runAsNonRoot: true},
      containers: [{name: pytorch, livenessProbe: null,
                    env: [{name: TMPDIR, $patch: delete}]}]}""",
    )
    assert "enableServiceLinks" not in pod_spec(job)
    assert pod_spec(job)["securityContext"] == {"runAsNonRoot": True}
    assert "livenessProbe" not in container(job)
    assert "TMPDIR" not in names(container(job)["env"])


def test_another_source_takes_the_place_of_the_old(tmp_path):
    """A volume or a variable has one source: the patch's, with no rest of ours."""
    job = in_pod(
        tmp_path,
        """{
      containers: [{name: pytorch,
                    env: [{name: LANG, valueFrom: {configMapKeyRef: {name: m, key: k}}}]}],
      volumes: [{name: scratch, ephemeral: {}}, {name: shm, emptyDir: {sizeLimit: 2Gi}}]}""",
        env=(("LANG", "de"),),
    )
    volumes = {volume["name"]: volume for volume in pod_spec(job)["volumes"]}
    assert volumes["scratch"] == {"name": "scratch", "ephemeral": {}}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    (lang,) = (item for item in container(job)["env"] if item["name"] == "LANG")
    assert lang == {"name": "LANG", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}}


def test_the_old_source_may_be_removed_by_name_or_by_what_is_retained(tmp_path):
    """null and `$retainKeys` give one source to a variable and a volume, as they do for kubectl;
    the order that its own patches have with them is no field of the job."""
    field_of = {"fieldRef": {"fieldPath": "metadata.name"}}
    job = in_pod(
        tmp_path,
        """{
      $setElementOrder/containers: [{name: pytorch}],
      securityContext: {$retainKeys: [runAsUser, runAsNonRoot], runAsNonRoot: true},
      containers: [{name: pytorch, $setElementOrder/env: [{name: LANG}], env: [
        {name: LANG, value: null, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]}],
      volumes: [{name: scratch, emptyDir: null, ephemeral: {}},
                {name: shm, $retainKeys: [name, hostPath], hostPath: {path: /x}}]}""",
        env=(("LANG", "de"),),
    )
    volumes = {volume["name"]: volume for volume in pod_spec(job)["volumes"]}
    assert volumes["scratch"] == {"name": "scratch", "ephemeral": {}}
    assert volumes["shm"] == {"name": "shm", "hostPath": {"path": "/x"}}
    (lang,) = (item for item in container(job)["env"] if item["name"] == "LANG")
    assert lang == {"name": "LANG", "valueFrom": field_of}
    assert set(pod_spec(job)["securityContext"]) <= {"runAsUser", "runAsNonRoot"}
    assert not any(word in yaml.safe_dump(job) for word in ("$patch", "$retain", "$set"))


def test_a_list_is_replaced_by_an_item_that_says_so(tmp_path):
    """`$patch: replace` among the items of a list: the others are all that is left."""
    text = "{imagePullSecrets: [{$patch: replace}, {name: mine}]}"
    job = in_pod(tmp_path, text, image_pull_secret=("a",))
    assert pod_spec(job)["imagePullSecrets"] == [{"name": "mine"}]
    job = in_pod(tmp_path, text)  # laid over nothing
    assert pod_spec(job)["imagePullSecrets"] == [{"name": "mine"}]


def test_lists_without_names_are_replaced(tmp_path):
    """Tolerations, as kubectl does it."""
    job = in_pod(tmp_path, "{tolerations: [{operator: Exists}]}", gpus=1)
    assert pod_spec(job)["tolerations"] == [{"operator": "Exists"}]


def test_fields_that_no_option_has_are_added(tmp_path):
    """Anywhere in the job; what the patch has of its own loses its directives and nulls."""
    job = patched(
        tmp_path,
        """
metadata: {annotations: {example.com/a: b}}
spec:
  runPolicy: {schedulingPolicy: {$patch: replace, minAvailable: 2, queue: null}}
  pytorchReplicaSpecs: {Worker: {restartPolicy: OnFailure}}
""",
    )
    assert job["metadata"]["annotations"]["example.com/a"] == "b"
    policy = {"cleanPodPolicy": "Running", "schedulingPolicy": {"minAvailable": 2}}
    assert job["spec"]["runPolicy"] == policy and worker(job)["restartPolicy"] == "OnFailure"


def test_a_model_may_lie_on_a_volume_of_the_patch(tmp_path):
    """--init-from names any folder of a patched pod; without a patch there are two volumes."""
    text = "{volumes: [{name: models, persistentVolumeClaim: {claimName: m}}]}"
    (tmp_path / "patch.yaml").write_text(POD % text)
    args = ["--init-from", "/models/gpt2"]
    assert rules.check_spec(spec.load(None, {"patch": tmp_path / "patch.yaml"}, args)) == []
    assert [it.id for it in rules.check_spec(spec.load(None, {}, args))] == ["init-from"]


def test_the_hash_is_that_of_the_patched_job(tmp_path):
    """A changed patch is a changed job; one that changes nothing is the same job."""
    plain = render_job()
    same, other = (
        patched(tmp_path, f"spec: {{runPolicy: {{cleanPodPolicy: {policy}}}}}")
        for policy in ("Running", "All")
    )
    digest = manifest.SPEC_HASH
    assert same == plain
    assert other["metadata"]["annotations"][digest] != plain["metadata"]["annotations"][digest]


def test_the_job_that_is_patched_is_left_alone(tmp_path):
    """The same patch gives the same job again, from one that other code may hold."""
    from gptddp.k8s.render import patch

    job = render_job()
    text = yaml.safe_dump(job)
    change = yaml.safe_load(POD % "{volumes: [{name: shm, emptyDir: {sizeLimit: 1Mi}}]}")
    assert patch.apply(job, change) == patch.apply(job, change) != job
    assert yaml.safe_dump(job) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: Job", "it patches 'Job'; leave it out, or use PyTorchJob"),
        ("specs: {}", r"a PyTorchJob has no 'specs': did you mean 'spec'\?"),
        ("metadata: {name: other}", "metadata.name: it has an option of its own; use --name"),
        ("metadata: {labels: {app.kubernetes.io/name: x}}", "finds its jobs by it"),
        ("spec: {nprocPerNode: '2'}", "use --nproc-per-node"),
        ("spec: {elasticPolicy: null}", "use --min"),
        ("spec: {pytorchReplicaSpecs: {Worker: {replicas: 9}}}", "use --replicas"),
        (POD % "{containers: [{name: pytorch, image: other}]}", "use --image"),
        (POD % "{containers: [{name: pytorch, args: []}]}", "use the options after --"),
        (POD % "{containers: [{name: pytorch, $patch: delete}]}", "use --image"),
        (POD % "{containers: [{image: x}]}", "an item of it has no name"),
        (POD % "{volumes: [{name: [1]}]}", "an item of it has no name"),
        (POD % "{volumes: none}", "it is a list, and the patch has 'none'"),
        ("metadata: {annotations: none}", "metadata.annotations: it is no table"),
        (POD % "{volumes: [{name: smh, $patch: delete}]}", r"did you mean 'shm'\?"),
        (POD % "{enableServiceLink: null}", r"did you mean 'enableServiceLinks'\?"),
        (POD % "{securityContext: {$patch: delete}}", "'delete' has no meaning here"),
        (POD % "{affinity: {$patch: delete}}", "there is nothing to delete"),
        (
            POD % "{containers: [{name: pytorch, env: [{name: HF_TOKEN, value: x}]}]}",
            "use valueFrom.secretKeyRef, or --env-from-secret",
        ),
        (
            POD % "{initContainers: [{name: i, image: x, env: [{name: URL, value: 'a://b:c@d'}]}]}",
            "i.env.URL: looks like a secret",
        ),
        (
            POD % "{containers: [{name: pytorch, env: [{name: GPTDDP_MEMORY, value: x}]}]}",
            "pytorch.env.GPTDDP_MEMORY: the operator, the launcher or the manifest sets it",
        ),
        (
            POD % "{containers: [{name: pytorch, env: [{name: GPTDDP_GRACE_S, $patch: delete}]}]}",
            "pytorch.env.GPTDDP_GRACE_S: the launcher needs it, and the patch removes it; keep",
        ),
        (
            POD % "{containers: [{name: pytorch, $deleteFromPrimitiveList/args: [--data]}]}",
            r"no such directive; known are \$patch, \$retainKeys",
        ),
        (
            POD % "{volumes: [{name: shm, $retainKeys: [name], hostPath: {path: /x}}]}",
            r"volumes.shm.\$retainKeys: \['name'\] is no list of them",
        ),
    ],
)
def test_a_patch_that_cannot_be_is_refused(tmp_path, text, message):
    """With the field, and the option or the word that was meant."""
    with pytest.raises(ConfigError, match=message) as error:
        patched(tmp_path, text)
    assert str(error.value).startswith("--patch ") and str(error.value).endswith("[patch]")
