"""Every rule by its id, as `gptddp-k8s rules` lists them: what it is about, and what helps.

The rule itself is the docstring of its function. A message says more: which value, and how far off.
"""

from dataclasses import dataclass

from gptddp.k8s.render import admission as _registered_too  # noqa: F401
from gptddp.k8s.render import problem, spec_rule
from gptddp.k8s.render import rules as _registered  # noqa: F401

OPTIONS, MANIFEST = "options", "manifest"


@dataclass(frozen=True)
class Rule:
    """`of`: what it judges, the options of `render` and `submit` or any PyTorchJob."""

    id: str
    of: str
    field: str
    rule: str
    fix: str


# id: (fields, divided by commas; the fix)
FIXES = {
    "object-name": (
        "--service-account, --image-pull-secret, --runtime-class, --priority-class,"
        " --mount-secret, --mount-configmap, --env-from-secret, --env-from-configmap",
        "use lower case letters, digits, '-' and '.'",
    ),
    "key-value": ("--label, --annotation, --node-selector", "use a key and a value of your own"),
    "placement": ("--toleration, --spread", "write KEY=VALUE:EFFECT, or KEY:DoNotSchedule"),
    "resource": ("--resource", "use one as in vpc.amazonaws.com/efa=4 or hugepages-2Mi=1Gi"),
    "slices": ("--gpus", "use --gpus 1 and more --replicas"),
    "disk": ("--ephemeral-storage, --scratch", "use one such as 20Gi; scratch is the smaller"),
    "env-from": (
        "--env-from-secret, --env-from-configmap",
        "use NAME=SECRET/KEY, each name once",
    ),
    "mount": ("--mount-secret, --mount-configmap", "use a folder of its own, as /etc/my-app"),
    "fs-group": ("--fs-group", "use a number, or none where the cluster chooses it"),
    "read-only-data": ("--read-only-data", "leave it out, or use two claims"),
    "egress": ("--egress", "use one as in 10.0.0.0/8:443, or own for none"),
    "without": ("--without", "name serviceaccount, networkpolicy or poddisruptionbudget"),
    "queue-options": (
        "--priority, --topology, --label",
        "add --queue NAME; use required=LABEL, preferred=LABEL or unconstrained",
    ),
    "pods": ("--replicas, --min, --max", "let min <= replicas <= max, all of them 1 or more"),
    "processes-per-pod": ("--nproc-per-node", "use 1 or more, or leave it out"),
    "world-size": (
        "--replicas, --max, --nproc-per-node, --gpus",
        "use fewer pods or processes, or -- --lanes with more",
    ),
    "metrics-port": ("--metrics-port after --", "use another, such as 9464, or 0 for none"),
    "places": ("--data after --, --run-dir after --", "use --data and --runs before the --"),
    "init-from": ("--init-from", "put the folder into a claim, and name it as in /data/gpt2"),
    "device": ("--device", "add --gpus 1"),
    "gpus": ("--gpus, --nproc-per-node, --gpu-resource", "use as many processes as GPUs"),
    "quantity": ("--cpu, --memory, --shm", "use one such as 500m or 4Gi; memory is above shm"),
    "grace": ("--grace-s", "use 10 to 86400"),
    "volumes": ("--data, --runs", "name a claim, and a path in it without '..'"),
    "namespace": ("--namespace", "use up to 63 lower case letters, digits and '-'"),
    "image": ("--image", "use one such as registry.example/gptddp:0.1.0"),
    "env-name": (
        "--env, --env-from-secret, --env-from-configmap",
        "use letters, digits and '_'",
    ),
    "env-reserved": ("--env, --env-from-secret, --env-from-configmap", "leave it out"),
    "env-secret": ("--env", "put it into a Secret and use --env-from-secret NAME=SECRET/KEY"),
    "name": ("metadata.name", "use lower case letters, digits and '-', 52 at most"),
    "replica-types": (
        "spec.pytorchReplicaSpecs, spec.elasticPolicy",
        "use Master and Worker; Worker alone with elasticPolicy",
    ),
    "replica-count": (
        "spec.pytorchReplicaSpecs.Worker.replicas, spec.elasticPolicy.minReplicas",
        "let min <= replicas <= max, all of them 1 or more",
    ),
    "processes": (
        "spec.nprocPerNode, spec.elasticPolicy.nProcPerNode",
        'use nprocPerNode alone, with a number in quotes, as "4"',
    ),
    "choices": (
        "spec.pytorchReplicaSpecs, spec.runPolicy, spec.elasticPolicy.rdzvBackend",
        "use one of the words that the message lists",
    ),
    "rendezvous": (
        "spec.elasticPolicy.rdzvConf, spec.elasticPolicy.standalone",
        "leave it out",
    ),
    "numbers": ("spec.runPolicy, spec.elasticPolicy.maxRestarts", "use 0 or more"),
    "claims": ("spec.pytorchReplicaSpecs", "leave one volume out, and mount the other twice"),
    "containers": (
        "spec.pytorchReplicaSpecs",
        "name a container pytorch, give each an image, and each port a name",
    ),
    "pod-names": (
        "spec.pytorchReplicaSpecs",
        "use lower case letters, digits and '-', each name once",
    ),
    "pod-volumes": (
        "spec.pytorchReplicaSpecs",
        "give each volume one source, and mount what is there",
    ),
    "pod-resources": (
        "spec.pytorchReplicaSpecs",
        "ask for no more than the limit; devices whole, and as many as the limit",
    ),
    "pod-env": ("spec.pytorchReplicaSpecs", "give a name, and value or one source"),
    "pod-labels": (
        "metadata, spec.pytorchReplicaSpecs",
        "use keys as in example.com/team, and values of up to 63 letters and digits",
    ),
    "pod-choices": (
        "spec.pytorchReplicaSpecs",
        "use one of the words that the message lists; an image's name in lower case",
    ),
    "pod-words": (
        "spec.pytorchReplicaSpecs",
        "use one of the words that the message lists, and names in lower case",
    ),
    "pod-handlers": (
        "spec.pytorchReplicaSpecs",
        "let a probe or a hook have one of exec, httpGet, tcpSocket and grpc",
    ),
    "pod-paths": (
        "spec.pytorchReplicaSpecs",
        "write subPath from the root of its volume; tolerationSeconds with NoExecute",
    ),
    "queue": (
        "metadata.labels, spec.pytorchReplicaSpecs",
        "label the job itself, with the name of a LocalQueue",
    ),
    "queue-size": (
        "metadata.annotations, spec.elasticPolicy.metrics",
        "leave it out: Kueue stops a PyTorchJob whose size changes",
    ),
    "queue-time": ("metadata.labels", "use a number of seconds, 1 or more"),
    "queue-topology": (
        "spec.pytorchReplicaSpecs",
        "use one topology annotation, with the key of a label of nodes",
    ),
}
# Of the structure, which is no function's: see `crd`, `documents` and `validate`.
STRUCTURE = {
    "yaml": ("document", "A file is YAML or JSON that can be read.", "correct the line"),
    "duplicate-key": ("any", "A field stands once in an object.", "remove one of them"),
    "kind": ("kind, apiVersion", "An object says what it is.", "write what the message names"),
    "unknown-field": (
        "any",
        "The API server knows every field.",
        "use the spelling or the place that the message names, or remove it",
    ),
    "missing-field": ("any", "What the API server asks for is there.", "add it"),
    "type": (
        "any",
        "A value has its field's type.",
        "add quotes, or remove them; write a list, or an object",
    ),
    "duplicate": ("any list", "No two items of a list have one name.", "remove or rename one"),
    "shape": ("manifest", "The rules can read it.", "compare it with `gptddp-k8s render`"),
}  # fmt: skip


def rules() -> list[Rule]:
    """All rules, those of options first, in the order in which they judge."""
    found = [
        Rule(id, of, FIXES[id][0], " ".join(str(function.__doc__).split()), FIXES[id][1])
        for of, table in ((OPTIONS, spec_rule.SPEC_RULES), (MANIFEST, problem.JOB_RULES))
        for id, function in table.items()
    ]
    return found + [Rule(id, MANIFEST, *row) for id, row in STRUCTURE.items()]
