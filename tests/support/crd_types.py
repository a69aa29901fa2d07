"""Makes gptddp/k8s/render/pytorchjob.json, the types of a PyTorchJob, from the operator's CRD.

The CRD is 609 KB, nearly all of it descriptions, and the types of a pod twice over. What is left is
each different type once, one a line, named by its number:

    {"name!": "string", "env": 12}   an object; ! marks a field that must be there
    ["list", 11, {"name": null}]     of type 11; no two items of one name, which has no default
    ["map", "string"]                any key

After another version of the operator: `PYTHONPATH=tests python -m support.crd_types [CRD.yaml]`.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from support.paths import ROOT

TABLE = ROOT / "gptddp/k8s/render/pytorchjob.json"
MODULE = "github.com/kubeflow/training-operator"
VERSION = re.search(r"OPERATOR=(\S+)", (ROOT / "tests/cluster/lib.sh").read_text())[1]
CRD = "manifests/base/crds/kubeflow.org_pytorchjobs.yaml"

# The CRD leaves metadata to the API server: an ObjectMeta, as far as a manifest may have it.
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
META = {
    "type": "object",
    "properties": {
        **dict.fromkeys(
            ("name", "generateName", "namespace", "uid", "resourceVersion", "selfLink"),
            {"type": "string"},
        ),
        **dict.fromkeys(("labels", "annotations"), STRINGS),
        **dict.fromkeys(("generation", "deletionGracePeriodSeconds"), {"type": "integer"}),
        **dict.fromkeys(
            ("creationTimestamp", "deletionTimestamp"), {"type": "string", "format": "date-time"}
        ),
        "finalizers": {"type": "array", "items": {"type": "string"}},
        "managedFields": {
            "type": "array",
            "items": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        },
        "ownerReferences": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["apiVersion", "kind", "name", "uid"],
                "properties": {
                    **dict.fromkeys(("apiVersion", "kind", "name", "uid"), {"type": "string"}),
                    **dict.fromkeys(("controller", "blockOwnerDeletion"), {"type": "boolean"}),
                },
            },
        },
    },
}
# What the API server checks, or only writes for people: neither is a type.
KNOWN = {
    "type", "description", "properties", "required", "items", "additionalProperties", "format",
    "anyOf", "pattern", "default", "x-kubernetes-int-or-string", "x-kubernetes-map-type",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-validations",
    "x-kubernetes-preserve-unknown-fields",
}  # fmt: skip


def table(crd: dict[str, Any]) -> str:
    """The text of the table; the last type is the PyTorchJob. Raises ValueError for a keyword that
    it would lose."""
    (version,) = crd["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    schema["properties"]["metadata"] = META
    schema["properties"]["status"] = {"x-kubernetes-preserve-unknown-fields": True}
    known: dict[str, int] = {}
    _type(schema, known)
    return "[\n" + ",\n".join(known) + "\n]\n"


def _type(node: dict[str, Any], known: dict[str, int]) -> str | int:
    """The name of a simple type, or the number of another one, which is then in `known`."""
    if unknown := set(node) - KNOWN:
        raise ValueError(f"what is {unknown} of {str(node)[:200]}")
    if node.get("x-kubernetes-preserve-unknown-fields"):
        return "any"
    if node.get("x-kubernetes-int-or-string"):
        return "quantity" if "pattern" in node else "int-or-string"
    if node["type"] == "object" and "properties" in node:
        needed = node.get("required", ())
        made: Any = {
            name + "!" * (name in needed): _type(field, known)
            for name, field in sorted(node["properties"].items())
        }
    elif node["type"] == "object":
        made = ["map", _type(node["additionalProperties"], known)] if len(node) > 1 else "any"
    elif node["type"] == "array":
        made = ["list", _type(node["items"], known)]
        if keys := node.get("x-kubernetes-list-map-keys"):
            fields = node["items"]["properties"]
            made.append({key: fields[key].get("default") for key in keys})
    else:
        short = {"int32": "int32", "int64": "int64", "date-time": "time", None: node["type"]}
        return short[node.get("format")]
    if made == "any":
        return "any"
    return known.setdefault(json.dumps(made, separators=(",", ":")), len(known))


def crd_path() -> Path | None:
    """The CRD of the pinned module: built for the kind cluster, or in Go's cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "gptddp")
    cache = Path(os.environ.get("GPTDDP_CACHE", home))
    modules = Path(os.environ.get("GOMODCACHE", Path.home() / "go/pkg/mod"))
    found = [*cache.glob(f"binaries-*/{CRD}"), modules / f"{MODULE}@{VERSION}" / CRD]
    return next((path for path in found if path.exists()), None)


def download() -> Path:
    """The same by Go, which checks the module against its checksum database."""
    command = ["go", "mod", "download", "-json", f"{MODULE}@{VERSION}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Path(json.loads(done.stdout)["Dir"]) / CRD


def load(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text("utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


if __name__ == "__main__":
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else crd_path() or download()
    TABLE.write_text(table(load(given)), "utf-8")
