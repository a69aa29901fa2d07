"""Helpers for tests of manifests and of their rules: specs, and what they render to."""

import dataclasses

from gptddp.k8s.render import manifest, spec

SPECS = {
    "cpu": ({"replicas": 4}, ["--steps", "400"]),
    "gpu": (
        {"name": "big", "replicas": 4, "min": 4, "gpus": 8, "image": "r.io/g@sha256:" + "0" * 64},
        [],
    ),
    "full": (
        {
            "name": "full",
            "namespace": "team-a",
            "replicas": 3,
            "min": 1,
            "max": 6,
            "cpu": "500m",
            "nproc_per_node": 2,
            "memory": "8Gi",
            "shm": "1Gi",
            "data": "corpus/books/v2",
            "runs": "shared",
            "grace_s": 120,
            "image": "gptddp:dev",
            "env": (("NCCL_DEBUG", "INFO"), ("LANG", "C.UTF-8")),
        },
        ["--preset=gpt2", "--batch", "96", "--lanes", "96", "--metrics-port", "9100"],
    ),
}


def built(flags=None, args=(), patch=None):
    """A spec from flags, arguments of the trainer, and a parsed patch."""
    given = spec.given(None, flags or {}, args)
    pod = dataclasses.replace(given.pod, patch=patch)
    return spec.resolve(dataclasses.replace(given, pod=pod))


def render(flags=None, args=()):
    return manifest.objects(spec.load(None, flags or {}, args))


def render_job(flags=None, args=()):
    return render(flags, args)[-1]


def worker(job):
    """The entry of the job's workers."""
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]


def pod_spec(job):
    return worker(job)["template"]["spec"]


def container(job):
    return pod_spec(job)["containers"][0]
