"""A small API server on a real socket, with objects of a test, and logs that can break off."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from gptddp.k8s.cluster import connect

PLURALS = {
    "PyTorchJob": "pytorchjobs",
    "Pod": "pods",
    "Event": "events",
    "Workload": "workloads",
    "LocalQueue": "localqueues",
    "ClusterQueue": "clusterqueues",
    "WorkloadPriorityClass": "workloadpriorityclasses",
}
SHAPES = {plural: kind for kind, plural in PLURALS.items()}


def named(name, **entry):
    return [{"name": name, **entry}]


def kubeconfig(path, server="http://127.0.0.1:9", **entries):
    """Write a kubeconfig of one context; `entries` replace whole parts, None leaves one out."""
    cluster = server if isinstance(server, dict) else {"server": server}
    config = {
        "current-context": "x",
        "clusters": named("c", cluster=cluster),
        "users": named("u", user={}),
        "contexts": named("x", context={"cluster": "c", "user": "u"}),
    }
    config |= {key.replace("_", "-"): value for key, value in entries.items()}
    path.write_text(json.dumps({key: it for key, it in config.items() if it is not None}))
    return path


class Log:
    """What one container has written: (time, text) in order, and how its connections end."""

    def __init__(self, lines=(), done=True):
        self.lines, self.done = list(lines), done
        self.break_after = []  # bytes after which the next connections break, one entry each
        self.end_after = []  # bytes after which the next connections end properly

    def text(self, since=""):
        """The log from a whole second on, as the kubelet gives it."""
        return "".join(f"{t} {line}\n" for t, line in self.lines if t[:19] >= since[:19])


class FakeAPI:
    """Serves lists, objects and logs, all set by a test; `down` makes it answer 503."""

    handler = None  # the handler of a subclass that also writes

    def __init__(self, folder: Path):
        self.objects = {}  # (plural, name) -> object
        self.logs, self.previous = {}, {}
        self.down = False
        self.asked = []  # every path with its query
        self.paths = {}  # path -> answer, or (status, message); looked up before objects
        self.unserved = ()  # parts of paths that are not served, such as API versions
        handler = type("Handler", (self.handler or _Handler,), {"api": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.handle_error = lambda *_: None  # a client that goes away in mid-answer
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.kubeconfig = folder / "kubeconfig"
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        kubeconfig(self.kubeconfig, self.url)

    def put(self, *objects):
        for obj in objects:
            key = PLURALS[obj["kind"]], obj["metadata"]["name"]
            obj["metadata"].setdefault("namespace", "default")
            self.objects[key] = obj

    def remove(self, kind, name):
        del self.objects[PLURALS[kind], name]

    def close(self):
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    api: FakeAPI
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two packets: the second must not wait

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        url = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(url.query).items()}
        self.api.asked.append(self.path)
        if self.api.down:
            return self._status(503, "the server is currently unable to handle the request")
        if url.path in self.api.paths:
            found = self.api.paths[url.path]
            if isinstance(found, tuple):
                return self._status(*found)
            return self._json(200, {"kind": "Any"} | found)
        if any(part in url.path for part in self.api.unserved):
            return self._status(404, "the server could not find the requested resource")
        if url.path == "/version":
            return self._json(200, {"gitVersion": "v1.34.1"})
        parts = url.path.strip("/").split("/")
        if parts[-1] == "log":
            return self._log(parts[-2], query)
        if parts[-1] in SHAPES:
            return self._list(parts[-1], query)
        found = self.api.objects.get((parts[-2], parts[-1]))
        if found is None:
            return self._status(404, f'{parts[-2]}.kubeflow.org "{parts[-1]}" not found')
        return self._json(200, found)

    def _list(self, plural, query):
        items = [o for (p, _), o in self.api.objects.items() if p == plural]
        for term in filter(None, query.get("labelSelector", "").split(",")):
            key, equals, value = term.partition("=")
            labels = [(o, o["metadata"].get("labels", {})) for o in items]
            items = [o for o, has in labels if key in has and (not equals or has[key] == value)]
        if name := query.get("fieldSelector", "").removeprefix("involvedObject.name="):
            items = [o for o in items if o["involvedObject"]["name"] == name]
        self._json(200, {"kind": "List", "items": items})

    def _log(self, pod, query):
        logs = self.api.previous if query.get("previous") else self.api.logs
        log = logs.get(pod)
        if ("pods", pod) not in self.api.objects:
            return self._status(404, f'pods "{pod}" not found')
        if log is None:
            return self._status(400, f'container "pytorch" in pod "{pod}" is waiting to start')
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        limit = log.break_after.pop(0) if log.break_after else None
        self._stream(log, query, limit, log.end_after.pop(0) if log.end_after else None)

    def _stream(self, log, query, limit, end):
        sent = 0
        while True:
            done = log.done or "follow" not in query
            data = log.text(query.get("sinceTime", "")).encode()
            if "sinceSeconds" in query:
                oldest = time.time() - int(query["sinceSeconds"])
                data = log.text(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(oldest))).encode()
            if tail := query.get("tailLines"):
                data = b"".join(data.splitlines(keepends=True)[-int(tail) :])
            piece = data[sent : limit or end]
            if piece:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                sent += len(piece)
            if limit is not None and sent >= limit:
                self.close_connection = True  # without the last chunk: broken
                return
            if done or (end is not None and sent >= end):
                self.wfile.write(b"0\r\n\r\n")
                return
            time.sleep(0.01)

    def _status(self, code, message):
        status = {"kind": "Status", "status": "Failure", "message": message, "code": code}
        if code == 404 and "not found" in message:  # a missing object, not a missing kind
            status["details"] = {"name": "its name"}
        self._json(code, status)

    def _json(self, code, value):
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class HeaderAPI(FakeAPI):
    """Keeps the token of every request, and refuses those that a test names."""

    def __init__(self, folder):
        self.tokens, self.refused = [], set()

        class Handler(_Handler):
            def do_GET(handler):
                self.tokens.append(handler.headers.get("Authorization", "").removeprefix("Bearer "))
                if self.tokens[-1] in self.refused:
                    return handler._status(401, "Unauthorized")
                super().do_GET()

        self.handler = Handler
        super().__init__(folder)

    def as_user(self, **user):
        """A cluster for a user with these entries."""
        return connect(None, kubeconfig(self.kubeconfig, self.url, users=named("u", user=user)))
