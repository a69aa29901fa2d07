"""The login program of a kubeconfig (`exec`), run as kubectl runs it.

The package `kubernetes` runs it too, but hides what it asks and why it fails, has no limit, and
goes on as nobody, or as another, without what it was to give.
"""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

ANEW = "log in again with the tool that the kubeconfig is of, or use another --context"
_LIMIT_S = 300.0  # somebody may have to type a password, or to log in with a browser


def credentials(
    program: Mapping[str, Any], folder: str, cluster: Mapping[str, Any]
) -> dict[str, str]:
    """The token, the certificate or both that the program gives, as entries of a user.

    folder: where the kubeconfig is. Raises ValueError with the cause and the fix.
    """
    command, version = str(program["command"]), program["apiVersion"]
    asks = sys.stdin.isatty() and program.get("interactiveMode") != "Never"
    spec: dict[str, Any] = {"interactive": asks}
    if program.get("provideClusterInfo"):
        extensions = cluster.get("extensions") or []
        config = {it["name"]: it["extension"] for it in extensions}
        spec["cluster"] = {k: v for k, v in cluster.items() if k != "extensions"} | {
            "config": config.get("client.authentication.k8s.io/exec")
        }
    info = json.dumps({"apiVersion": version, "kind": "ExecCredential", "spec": spec})
    given = {it["name"]: str(it["value"]) for it in program.get("env") or []}
    path = os.path.join(folder, command) if os.path.dirname(command) else command
    try:
        ended = subprocess.run(
            [path, *map(str, program.get("args") or [])],
            env={**os.environ, **given, "KUBERNETES_EXEC_INFO": info},
            stdin=None if asks else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if asks else subprocess.PIPE,
            timeout=_LIMIT_S,
        )
    except FileNotFoundError:
        hint = " ".join(str(program.get("installHint") or "install it").split())
        raise ValueError(f"there is no program {command}; {hint}") from None
    except subprocess.TimeoutExpired:
        raise ValueError(f"{command} has not ended within {_LIMIT_S:.0f} s; {ANEW}") from None
    except OSError as error:
        raise ValueError(f"{command} cannot be run: {error.strerror}; {ANEW}") from None
    if ended.returncode:
        words = " ".join((ended.stderr or b"").decode("utf-8", "replace").split())
        said = f": {words:.500}" if words else ""
        raise ValueError(f"{command} ended with code {ended.returncode}{said}; {ANEW}")
    try:
        answer = json.loads(ended.stdout)
        status, written = answer["status"], answer["apiVersion"]
        token, certificate = status.get("token"), status.get("clientCertificateData")
        key = status.get("clientKeyData")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{command} has printed no ExecCredential; {ANEW}") from None
    if written != version:
        raise ValueError(f"{command} speaks {written}: write it as `apiVersion` of `exec`")
    found = {"token": token} if token else {}
    if certificate and key:
        found["client-certificate-data"] = base64.b64encode(certificate.encode()).decode()
        found["client-key-data"] = base64.b64encode(key.encode()).decode()
    if not found:
        raise ValueError(f"{command} has printed neither a token nor a certificate; {ANEW}")
    return found
