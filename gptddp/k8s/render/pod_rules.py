"""The rules of what a cluster asks of its pods: see `pod.PodOptions`.

Only what the API would refuse, or take and never run; whether a name exists is the cluster's to
say.
"""

import re
from collections.abc import Iterable, Iterator

from gptddp.k8s.render import names, pod, quantity
from gptddp.k8s.render.problem import Found, label_problems
from gptddp.k8s.render.spec import JobSpec, flag
from gptddp.k8s.render.spec_rule import spec_rule

_SLICE = r"nvidia\.com/mig-.+"
_GPU = r".+/gpu|nvidia\.com/mig-.+"
_HUGEPAGES = r"hugepages-(.+)"
_OURS = (
    r"app\.kubernetes\.io/(name|instance|component|part-of|managed-by)"
    r"|training\.kubeflow\.org/.*|gptddp/.*"
)
_LEAST_DISK = 2**20  # less is a unit forgotten
_MOST_DISK = 2**60
# Where the pod has volumes and devices of its own, and where its program lies.
_TAKEN = ("/data", "/runs", "/dev", "/tmp", "/proc", "/sys", "/opt/gptddp", "/code")


@spec_rule
def _object_name(spec: JobSpec) -> Iterator[Found]:
    """Objects that pods name have DNS-1123 names."""
    for field, found in _named(spec):
        for name in found:
            if not names.is_subdomain(name):
                yield (
                    flag(field),
                    f"{name!r} is not the name of an object",
                    "use lower case letters, digits, '-' and '.'",
                )


def _named(spec: JobSpec) -> Iterator[tuple[str, Iterable[str]]]:
    options = spec.pod
    for field in ("service_account", "runtime_class", "priority_class"):
        if (name := getattr(options, field)) is not None:
            yield field, [name]
    yield "image_pull_secret", options.image_pull_secret
    for field in ("mount_secret", "mount_configmap"):
        yield field, (name for name, _ in getattr(options, field))
    for field in ("env_from_secret", "env_from_configmap"):
        found = (re.fullmatch(pod.ENV_FROM, text) for text in getattr(options, field))
        yield field, (match[2] or match[4] for match in found if match)


@spec_rule
def _key_value(spec: JobSpec) -> Iterator[Found]:
    """Labels, annotations and node labels have keys that the API takes, and labels such values."""
    for field in ("label", "annotation", "node_selector"):
        for key, value in getattr(spec.pod, field):
            for rule, fix in label_problems(key, None if field == "annotation" else value):
                yield f"{flag(field)} {key}", rule, fix
            if field != "node_selector" and re.fullmatch(_OURS, key):
                rule = "gptddp-k8s or the operator sets it"
                yield f"{flag(field)} {key}", rule, "use a key of your own"


@spec_rule
def _placement(spec: JobSpec) -> Iterator[Found]:
    """Tolerations and spreads can be read, and their keys are keys."""
    for field, pattern, form in (
        ("toleration", pod.TOLERATION, "nvidia.com/gpu:NoSchedule or dedicated=training"),
        ("spread", pod.SPREAD, "topology.kubernetes.io/zone or KEY:DoNotSchedule"),
    ):
        for text in getattr(spec.pod, field):
            match = re.fullmatch(pattern, text)
            if not match:
                yield flag(field), f"{text!r} cannot be read", f"write it as in {form}"
            elif not names.is_key(match[1]):
                yield flag(field), f"{match[1]!r} is not a key", f"write it as in {form}"
            elif field == "toleration" and not names.is_value(match[2] or ""):
                yield flag(field), f"{match[2]!r} is not a value", f"write it as in {form}"


@spec_rule
def _resource(spec: JobSpec) -> Iterator[Found]:
    """Devices are counted in whole ones, huge pages in whole pages; the rest has its own option."""
    for name, amount in spec.pod.resource:
        where, size = f"--resource {name}", quantity.parse(amount)
        page = re.fullmatch(_HUGEPAGES, name)
        own = {"cpu": "--cpu", "memory": "--memory", "ephemeral-storage": "--ephemeral-storage"}
        if name in own or name == spec.gpu_resource or re.fullmatch(_GPU, name):
            fix = f"use {own.get(name, f'--gpus N --gpu-resource {name}')}"
            yield where, "has an option of its own", fix
        elif page and not quantity.parse(page[1]):
            yield where, f"{page[1]!r} is no size of a page", "use one as in hugepages-2Mi"
        elif not page and not names.is_resource(name):
            rule = f"{name!r} is not a resource of a pod"
            yield where, rule, "use one as in vpc.amazonaws.com/efa or hugepages-2Mi"
        elif not size or (page and size % (quantity.parse(page[1]) or 1)):
            unit = f"a multiple of {page[1]}, as in 1Gi" if page else "a whole number"
            yield where, f"{amount!r} is not an amount of it", f"use {unit}"
        elif not page and size % 1:
            yield where, f"{amount} is not a whole number", "use 1 or more"


@spec_rule
def _slices(spec: JobSpec) -> Iterator[Found]:
    """A process sees one MIG slice, and NCCL refuses two ranks of a host on one GPU."""
    if spec.gpus > 1 and re.fullmatch(_SLICE, spec.gpu_resource):
        yield (
            "--gpus",
            f"a pod cannot train on {spec.gpus} slices: CUDA shows a process one of them, and NCCL"
            " takes no two processes of a host on one GPU",
            f"use --gpus 1 --replicas {spec.gpus * max(1, spec.replicas)}: a slice a pod",
        )


@spec_rule
def _disk(spec: JobSpec) -> Iterator[Found]:
    """Sizes on the node's disk are positive quantities, and one holds the other."""
    sizes = []
    for field in ("ephemeral_storage", "scratch"):
        text = getattr(spec.pod, field)
        if text is not None and not quantity.parse(text):
            rule = f"{text!r} is not a positive Kubernetes quantity"
            yield flag(field), rule, "use one such as 20Gi"
        elif text is not None and quantity.number(text) < _LEAST_DISK:
            rule = f"{text} bytes are less than a pod's log" if text.isdigit() else "is below 1Mi"
            yield flag(field), rule, "add the unit, as in 20Gi"
        elif text is not None and quantity.number(text) > _MOST_DISK:
            yield flag(field), f"{text} is more than any node has", "use one such as 20Gi"
        sizes.append(quantity.parse(text or ""))
    if sizes[0] and sizes[1] and sizes[1] > sizes[0]:
        yield (
            "--scratch",
            f"{spec.pod.scratch} is more than --ephemeral-storage {spec.pod.ephemeral_storage}",
            "lower it: what lies in /tmp counts against the pod's ephemeral storage",
        )


@spec_rule
def _env_from(spec: JobSpec) -> Iterator[Found]:
    """A variable from a Secret or ConfigMap can be read, and is set once."""
    seen = {name for name, _ in spec.env}
    for field in ("env_from_secret", "env_from_configmap"):
        kind = field.removeprefix("env_from_").upper()
        for text in getattr(spec.pod, field):
            match = re.fullmatch(pod.ENV_FROM, text)
            if not match:
                fix = f"use NAME={kind}/KEY, or {kind} for all its keys"
                yield f"{flag(field)} {text}", "cannot be read", fix
            elif name := match[1]:
                where = f"{flag(field)} {name}"
                if name in seen:
                    yield where, "the variable is set twice", "leave one out"
                if not re.fullmatch(r"[-._A-Za-z0-9]{1,253}", match[3]):
                    rule = f"{match[3]!r} is not a key of a {kind.capitalize()}"
                    yield where, rule, "use letters, digits, '-', '_' and '.'"
                seen.add(name)


@spec_rule
def _mount(spec: JobSpec) -> Iterator[Found]:
    """Folders of Secrets and ConfigMaps are absolute, apart, and none that the pod needs."""
    seen: list[str] = []
    for field in ("mount_secret", "mount_configmap"):
        for name, path in getattr(spec.pod, field):
            where, clean = f"{flag(field)} {name}", path.rstrip("/")
            if not path.startswith("/") or ".." in path.split("/") or ":" in path or not clean:
                yield where, f"{path!r} is not a folder of the pod", "use one as in /etc/my-app"
            elif taken := next((it for it in (*_TAKEN, *seen) if _overlap(it, clean)), None):
                rule = f"{path} overlaps with {taken}, which the pod has for something else"
                yield where, rule, "use another folder, as /etc/my-app"
            seen.append(clean)


def _overlap(one: str, two: str) -> bool:
    return f"{one}/".startswith(f"{two}/") or f"{two}/".startswith(f"{one}/")


@spec_rule
def _fs_group(spec: JobSpec) -> Iterator[Found]:
    """A group is a number."""
    text = spec.pod.fs_group
    if text != pod.NONE and not (text.isascii() and text.isdigit() and int(text) < 2**31):
        fix = f"use a number, or {pod.NONE} where the cluster chooses it"
        yield "--fs-group", f"{text!r} is not the id of a group", fix


@spec_rule
def _read_only_data(spec: JobSpec) -> Iterator[Found]:
    """What is mounted read-only cannot have the run."""
    if spec.pod.read_only_data and spec.claim == spec.runs_claim:
        rule = f"the claim {spec.claim} is that of --runs as well, which is written to"
        yield "--read-only-data", rule, "leave it out, or use two claims"


@spec_rule
def _egress(spec: JobSpec) -> Iterator[Found]:
    """Networks can be read, and there is a policy to put them into."""
    for text in spec.pod.egress:
        if text == pod.OWN:
            continue
        try:
            pod.network_and_port(text)
        except ValueError as error:
            fix = f"use one as in 10.0.0.0/8:443 or [2001:db8::/32]:443, or {pod.OWN} for none"
            yield f"--egress {text}", str(error), fix
    if spec.pod.egress and "networkpolicy" in spec.pod.without:
        rule = "the rules are in the NetworkPolicy, which --without leaves out"
        yield "--egress", rule, "leave one of them out"


@spec_rule
def _without(spec: JobSpec) -> Iterator[Found]:
    """Only companions can be left out."""
    for name in spec.pod.without:
        if name not in pod.COMPANIONS:
            rule = f"{name!r} is no companion of a job"
            yield "--without", rule, f"use {', '.join(pod.COMPANIONS)}"
