"""The small API server of `api_server` with writing: create, merge-patch, delete, and failures."""

import base64
import copy
import io
import json
import uuid
from urllib.parse import parse_qs, urlsplit

from click.testing import CliRunner
from support import api_server

from gptddp.k8s.cli.main import cli

KINDS = {
    "Job": "jobs",
    "Service": "services",
    "Secret": "secrets",
    "ConfigMap": "configmaps",
    "ServiceAccount": "serviceaccounts",
    "NetworkPolicy": "networkpolicies",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "PersistentVolumeClaim": "persistentvolumeclaims",
}
api_server.PLURALS.update(KINDS)
api_server.SHAPES.update({plural: kind for kind, plural in KINDS.items()})


NO_ANSWER, LOST_ANSWER = "no answer", "lost answer"  # not done; done, but not answered


class _Handler(api_server._Handler):
    def parse_request(self):
        parsed = super().parse_request()
        if parsed:
            self.fault = self.api.next_fault(self.command, self.path)
            if self.fault == LOST_ANSWER:
                self.wfile, self.close_connection = io.BytesIO(), True
            elif self.fault is not None:
                self.command = "FAULT"
        return parsed

    def do_FAULT(self):
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.fault == NO_ANSWER:
            self.close_connection = True
        else:
            what = "resource is forbidden: U cannot do this" if self.fault == 403 else "not found"
            self._status(self.fault, what if self.fault in (403, 404) else "it is broken")

    def do_GET(self):
        if "/secrets" in self.path and self.api.secrets_are_hidden:
            return self._status(403, "secrets is forbidden: U cannot get secrets")
        super().do_GET()

    def do_POST(self):
        body, plural = self._body(), self.path.split("?")[0].split("/")[-1]
        self._create(body, plural)

    def _create(self, body, plural):
        meta, query = body["metadata"], self._query()
        if not body.get("apiVersion"):
            return self._status(400, "Object 'apiVersion' is missing")
        if wrong := self.api.webhook(body):
            return self._status(422, wrong)
        meta.setdefault("name", meta.pop("generateName", "") + "x1y2z")
        if refusal := self.api.refuse.get(body["kind"]):
            return self._status(*refusal)
        if (plural, meta["name"]) in self.api.objects:
            return self._status(409, f'{plural} "{meta["name"]}" already exists')
        if "dryRun" in query:
            self.api.dry_runs.append(body)
            return self._json(201, body)
        if self._allowed(f"create {body['kind']}"):
            meta["uid"] = str(uuid.uuid4())
            _encode(body)
            self.api.put(body)
            self.api.created.get(body["kind"], lambda body: None)(body)
            self._json(201, body)

    def do_PATCH(self):
        body, (plural, name) = self._body(), self.path.split("?")[0].split("/")[-2:]
        live = self.api.objects.get((plural, name))
        if self.headers["Content-Type"] == "application/apply-patch+yaml":
            return self._apply(live, body, plural)
        if live is None:
            return self._status(404, f'{plural} "{name}" not found')
        if "dryRun" in self._query():
            live = copy.deepcopy(live)
            _merge(live, body)
            return self._json(200, live)
        if self._allowed(f"patch {live['kind']}"):
            _merge(live, body)
            _encode(live, body)
            self._json(200, live)

    def _apply(self, live, body, plural):
        """Fields that an earlier call has set, and this one leaves out, are removed."""
        key = plural, body["metadata"]["name"]
        if live is None:
            if f"POST {plural}" in self.api.forbidden:
                return self._status(403, f"{plural} is forbidden: U cannot create it")
            self.api.applied[key] = copy.deepcopy(body)
            return self._create(body, plural)
        if live.get("immutable") and live["binaryData"] != body["binaryData"]:
            return self._status(422, "binaryData: field is immutable when `immutable` is set")
        after = copy.deepcopy(live)
        _remove(after, self.api.applied.get(key, {}), body)
        _merge(after, body)
        if "dryRun" not in self._query() and after != live:
            if not self._allowed(f"patch {live['kind']}"):
                return None
            self.api.objects[key], self.api.applied[key] = after, body
        return self._json(200, after)

    def do_DELETE(self):
        plural, name = self.path.split("?")[0].split("/")[-2:]
        meant = self._body().get("preconditions", {}).get("uid")
        if (plural, name) not in self.api.objects:
            return self._status(404, f'{plural} "{name}" not found')
        if meant not in (None, self.api.objects[plural, name]["metadata"].get("uid")):
            return self._status(409, "the UID in the precondition is another")
        if self._allowed(f"delete {self.api.objects[plural, name]['kind']}"):
            del self.api.objects[plural, name]
            self.api.collect(name)
            self.api.collect_garbage()
            self._json(200, {"kind": "Status", "status": "Success"})

    def _allowed(self, what):
        """Count a write. The write at which the client is cut off is not done."""
        if len(self.api.writes) == self.api.cut_at:
            self._status(503, "cut off")
            return False
        self.api.writes.append(what)
        return True

    def _body(self):
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def _query(self):
        return parse_qs(urlsplit(self.path).query)


class WriteAPI(api_server.FakeAPI):
    """`writes` has what was written; `refuse` maps a kind to (status, message), `created` to what a
    controller would do; `cut_at` is the number of writes after which the client is cut off.
    `fault` is (number of the request, status or NO_ANSWER or LOST_ANSWER); `forbidden` has requests
    such as "DELETE secrets" to refuse; `requests` are all since `fault` was set."""

    handler = _Handler

    def __init__(self, folder):
        self.writes, self.refuse, self.created, self.cut_at = [], {}, {}, None
        self.applied = {}  # the newest body of each applied object
        self.dry_runs = []  # the bodies of dry runs
        self.secrets_are_hidden = False
        self.webhook = lambda body: ""  # returns why an object is refused
        self.fault, self.forbidden, self.requests = None, set(), []
        super().__init__(folder)

    def next_fault(self, method, path):
        """The fault of this request; None if it is answered."""
        parts = path.split("?")[0].split("/")
        kinds = [part for part in parts if part in api_server.SHAPES]
        self.requests.append(f"{method} {[*parts[-1:], *kinds][-1]}")
        if self.requests[-1] in self.forbidden:
            return 403
        number, what = self.fault or (None, None)
        return what if len(self.requests) - 1 == number else None

    def command_line(self, command, *args, stdin=None):
        """Run `gptddp-k8s` against this server."""
        args = [command, "--kubeconfig", str(self.kubeconfig), *args]
        return CliRunner().invoke(cli, args, prog_name="gptddp-k8s", input=stdin)

    def collect(self, name):
        """Delete the pods of a Job that is deleted."""
        for key, obj in list(self.objects.items()):
            labels = obj["metadata"].get("labels") or {}
            if labels.get("batch.kubernetes.io/job-name") == name:
                del self.objects[key]

    def collect_garbage(self):
        """Delete the objects whose owner is gone."""
        uids = {obj["metadata"].get("uid") for obj in self.objects.values()}
        for key, obj in list(self.objects.items()):
            owners = obj["metadata"].get("ownerReferences") or []
            if owners and not any(owner["uid"] in uids for owner in owners):
                del self.objects[key]

    def all(self):
        """(kind, name) of all objects except claims."""
        found = [(o["kind"], o["metadata"]["name"]) for o in self.objects.values()]
        return [it for it in found if it[0] != "PersistentVolumeClaim"]


def submit(k8s, *args):
    """Submit the job `demo`, which `job` finds."""
    return k8s("submit", "--name", "demo", "--replicas", "4", *args)


def job(api):
    return api.objects["pytorchjobs", "demo"]


def end(api, kind):
    """Give the job `demo` only this condition, as when it has ended."""
    job(api)["status"] = {"conditions": [{"type": kind, "status": "True"}]}


def put_claims(api, *more):
    """Create the claims that a job needs, and more."""
    for claim in ("data", "runs", *more):
        spec = {"accessModes": ["ReadWriteMany"]}
        api.put({"kind": "PersistentVolumeClaim", "metadata": {"name": claim}, "spec": spec})


def _encode(obj, patch=None):
    """Copy stringData of a Secret into its data, as a server does."""
    for name, text in ((patch or obj).get("stringData") or {}).items():
        obj.setdefault("data", {})[name] = base64.b64encode(text.encode()).decode()


def _remove(live, before, now):
    """Remove the fields that were applied before and are not now."""
    for key, value in before.items():
        if key not in now:
            live.pop(key, None)
        elif isinstance(value, dict) and isinstance(live.get(key), dict):
            _remove(live[key], value, now[key])


def _merge(live, patch):
    for key, value in patch.items():
        if value is None:
            live.pop(key, None)
        elif isinstance(value, dict) and isinstance(live.get(key), dict):
            _merge(live[key], value)
        else:
            live[key] = value
