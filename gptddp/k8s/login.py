"""Creates a client of the package `kubernetes`, from a kubeconfig or a pod's service account.

The package reads both. This module corrects only the tested differences from kubectl that would
reach another cluster, or log in as another user.
"""

import base64
import os
import re
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from gptddp import __version__
from gptddp.errors import GptddpError
from gptddp.k8s.exit_codes import ClusterError

_ANEW = "log in again with the tool that wrote the kubeconfig, or use another --context"
_AT_ONCE = 256  # connections kept open: one log per pod
_ACTS_AS = ("as", "as-uid", "as-groups", "as-user-extra")
_FIX = (
    "name a kubeconfig with --kubeconfig or KUBECONFIG, or run the job on this machine with --local"
)


def log_in(kubeconfig: Path | None, context: str | None) -> tuple[Any, str]:
    """A client, and the namespace of its context. Raises ClusterError. Sends nothing yet."""
    # The package would read KUBECONFIG only once, when it is imported.
    files = str(kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config")
    paths = [it for it in map(os.path.expanduser, files.split(os.pathsep)) if os.path.exists(it)]
    what = f"the kubeconfig {files}"
    try:
        from kubernetes import client, config
        from kubernetes.config import incluster_config

        settings = client.Configuration()
        if paths:
            with tempfile.TemporaryDirectory() as folder:  # its keys are removed before any request
                namespace = _by_kubeconfig(settings, files, paths, context, folder)
                return _client(settings), namespace
        if kubeconfig or context or "KUBERNETES_SERVICE_HOST" not in os.environ:
            raise ClusterError(f"no cluster to talk to: there is no file {files}; {_FIX}")
        what = f"there is no file {files}, and the service account of this pod"
        config.load_incluster_config(settings)
        token = Path(incluster_config.SERVICE_TOKEN_FILENAME)
        namespace = token.with_name("namespace").read_text("utf-8").strip()
        return _client(settings), namespace
    except GptddpError:
        raise
    except ModuleNotFoundError as error:
        extra = "urllib3[socks]" if error.name == "socks" else "gptddp[k8s]"
        raise GptddpError(
            f"talking to the cluster needs the package {error.name}: pip install '{extra}'"
        ) from None
    except Exception as error:  # the package's own error, or any other after a malformed file
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, KeyError):
            words = f"the entry {error} is missing"
        elif isinstance(error, TypeError | AttributeError):
            words = "it does not have the form of a kubeconfig"
        view = ": does `kubectl config view` read it? Else" if paths else ";"
        raise ClusterError(f"{what} cannot be used ({words:.500}){view} {_FIX}") from None


def _by_kubeconfig(
    settings: Any, files: str, paths: list[str], context: str | None, folder: str
) -> str:
    """Fill in the settings of a context, with its keys in `folder`; returns its namespace."""
    from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

    # an empty file is an error for the package; kubectl accepts it
    full = [it for it in paths if not os.path.isfile(it) or os.path.getsize(it)]
    merged = KubeConfigMerger(os.pathsep.join(full))
    if merged.config is None:
        raise ClusterError(f"the kubeconfig {files} is empty; {_FIX}")
    for part in ("contexts", "clusters", "users"):
        for it in merged.config.value[part]:  # else errors of the package would contain secrets
            it.name = f"{it.path}/{part}/{it.value['name']}"
    name = _context(merged, files, context)
    chosen = merged.config["contexts"].get_with_name(name)["context"]
    cluster = merged.config["clusters"].get_with_name(chosen["cluster"])["cluster"]
    _check_cluster(cluster.value, chosen["cluster"])
    if user := chosen.safe_get("user"):
        entry = merged.config["users"].get_with_name(user)
        asked = entry.value.get("user") or {}
        found = _credentials(entry, cluster)
        entry.value = entry.value | {"user": found}  # a copy: the original may be saved to the file
    save = merged.save_changes
    KubeConfigLoader(
        merged.config, name, config_base_path=None, config_persister=save, temp_file_path=folder
    ).load_and_set(settings)
    # https://github.com/kubernetes-client/python/issues/1409
    if user and asked and not (settings.api_key or settings.cert_file):
        raise ClusterError(
            f"the user {user} of the kubeconfig has no login: no credentials; {_ANEW}"
        )
    # Like Go: local addresses bypass a proxy of the environment, but not `proxy-url`.
    local = f"{settings.no_proxy or ''},localhost,127.0.0.0/8,::1"
    settings.no_proxy = "" if "proxy-url" in cluster else local
    return str(chosen.safe_get("namespace") or "default")


def _context(merged: Any, files: str, name: str | None) -> str:
    # The first current-context counts, as in kubectl; the package uses the last:
    # https://github.com/kubernetes-client/python/issues/2180
    current = (it.get("current-context") for it in merged.config_files.values())
    name = name or next(filter(None, current), "")
    names = [it.value["name"] for it in merged.config.value["contexts"]]
    if name not in names:
        which = f"no context {name}" if name else "no current context"
        raise ClusterError(
            f"there is {which} in the kubeconfig {files}: name one with --context; there are "
            f"{', '.join(map(str, names)) or 'none'}"
        )
    return name


def _check_cluster(cluster: Any, name: str) -> None:
    """Raise ClusterError if the package would reach another server, or trust any server."""
    server, insecure = cluster.get("server"), cluster.get("insecure-skip-tls-verify")
    where = f"the cluster {name} of the kubeconfig"
    if not re.match(r"https?://[^/]", str(server)):
        raise ClusterError(f"{where} has `server: {server}`: write https://HOST:PORT")
    if not isinstance(insecure, bool | None):
        raise ClusterError(
            f"{where} has `insecure-skip-tls-verify: {insecure!r}`: write true or false"
        )


def _credentials(entry: Any, cluster: Any) -> dict[str, Any]:
    """The entries of a user, with absolute paths, and the token of its login program or file.

    Raises ClusterError if the package would log in as nobody, or as another user than kubectl.
    """
    name, folder = entry.value["name"], os.path.dirname(os.path.abspath(entry.path))
    user = {key: it for key, it in (entry.value.get("user") or {}).items() if it is not None}
    # https://github.com/kubernetes-client/python/issues/362
    for key in filter(user.get, _ACTS_AS):
        raise ClusterError(
            f"the user {name} of the kubeconfig acts for another (`{key}`), which the package "
            "kubernetes does not support: use --context with a user without it"
        )
    for key in filter(user.get, ("tokenFile", "client-certificate", "client-key")):
        user[key] = os.path.join(folder, user[key])
    try:
        if user.get("tokenFile"):
            user["token"] = Path(user["tokenFile"]).read_bytes().decode("utf-8", "replace")
        elif user.get("exec"):
            user = _by_program(entry["user"]["exec"], folder, cluster)
        if "token" in user:
            user["token"] = str(user["token"] or "").strip()
            if not (user["token"].isascii() and user["token"].isprintable()):
                raise ValueError(f"its token has characters that no token has; {_ANEW}")
    except ValueError as error:
        # 401, not transient: a waiting command must not ask a person to log in again and again
        raise ClusterError(
            f"the user {name} of the kubeconfig has no login: {error}", 401
        ) from None
    return user


def _by_program(program: Any, folder: str, cluster: Any) -> dict[str, str]:
    """The output of a user's login program, as entries of the user. Raises ValueError.

    The package itself only logs errors here, and continues as nobody or as another user:
    https://github.com/kubernetes-client/python/issues/1409
    """
    from kubernetes.config.exec_provider import ExecProvider

    command = program.value.get("command")
    try:
        status = ExecProvider(program, folder, cluster).run()
        token, certificate = status.get("token"), status.get("clientCertificateData")
        key = status.get("clientKeyData")
    except FileNotFoundError:
        hint = " ".join(str(program.value.get("installHint") or "install it").split())
        raise ValueError(f"there is no program {command}; {hint}") from None
    except AttributeError:  # on a terminal the program has printed its error itself
        raise ValueError(f"{command} has failed; {_ANEW}") from None
    except Exception as error:
        words = " ".join(str(error).split())
        raise ValueError(f"{command}: {words:.500}; {_ANEW}") from None
    found = {"token": token} if token else {}
    if certificate and key:
        found["client-certificate-data"] = base64.b64encode(certificate.encode()).decode()
        found["client-key-data"] = base64.b64encode(key.encode()).decode()
    if not found:
        raise ValueError(f"{command} has returned neither a token nor a certificate; {_ANEW}")
    return found


def _client(settings: Any) -> Any:
    import ssl

    import urllib3
    from kubernetes import client, dynamic

    settings.retries = False  # so that no object is created twice, and errors come at once
    settings.connection_pool_maxsize, settings.keep_alive = _AT_ONCE, True
    if settings.proxy and "://" not in settings.proxy:
        settings.proxy = f"http://{settings.proxy}"  # as in Go
    proxy = urllib3.util.parse_url(settings.proxy or "").auth
    if proxy:  # https://github.com/kubernetes-client/python/issues/1696
        settings.proxy_headers = urllib3.make_headers(proxy_basic_auth=unquote(proxy))
    api = client.ApiClient(settings)
    api.user_agent = f"gptddp-k8s/{__version__}"
    # Python 3.13 requires fields that certificates of EKS lack; kubectl does not require them:
    # https://github.com/kubernetes-client/python/issues/2394
    context = ssl.create_default_context(cafile=settings.ssl_ca_cert)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not settings.verify_ssl:
        context.check_hostname = False
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    if settings.cert_file:
        context.load_cert_chain(settings.cert_file, settings.key_file)
    pool = api.rest_client.pool_manager.connection_pool_kw
    pool["ssl_context"] = context  # in place of files that are read for each connection
    for key in ("ca_certs", "cert_file", "key_file"):
        pool.pop(key, None)
    return dynamic.DynamicClient(api, discoverer=lambda *_: None)  # paths are known: no discovery
