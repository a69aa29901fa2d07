"""Kubeconfigs, and a server that keeps as whom it was asked."""

import json

from support.api_server import FakeAPI, _Handler

from gptddp.k8s.cluster import connect


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
