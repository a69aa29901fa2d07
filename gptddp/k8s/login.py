"""A client of the package `kubernetes`, by kubectl's configuration or a pod's service account.

The package reads both. Ours is only what it was measured to do otherwise than kubectl, where that
would ask another cluster, or as somebody else.
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

_ANEW = "log in again with the tool that the kubeconfig is of, or use another --context"
_AT_ONCE = 256  # connections that are kept: a log of each pod
_ACTS_AS = ("as", "as-uid", "as-groups", "as-user-extra")
_FIX = (
    "name a kubeconfig with --kubeconfig or KUBECONFIG, or run the job on this machine with --local"
)


def log_in(kubeconfig: Path | None, context: str | None) -> tuple[Any, str]:
    """A client, and the namespace of its context. Raises ClusterError; nothing is sent yet."""
    # As KUBECONFIG names them. The package would read the variable once, when it is imported.
    files = str(kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config")
    paths = [it for it in map(os.path.expanduser, files.split(os.pathsep)) if os.path.exists(it)]
    what = f"the kubeconfig {files}"
    try:
        from kubernetes import client, config
        from kubernetes.config import incluster_config

        settings = client.Configuration()
        if paths:
            with (
                tempfile.TemporaryDirectory() as folder
            ):  # the keys are gone before anything is sent
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
    except Exception as error:  # the package's own, or what a malformed file makes of its code
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, KeyError):
            words = f"the entry {error} is missing"
        elif isinstance(error, TypeError | AttributeError):
            words = "it has not the form of one"
        view = ": does `kubectl config view` read it? Else" if paths else ";"
        raise ClusterError(f"{what} cannot be used ({words:.500}){view} {_FIX}") from None


def _by_kubeconfig(
    settings: Any, files: str, paths: list[str], context: str | None, folder: str
) -> str:
    """Fill in the settings of a context, its keys in a folder; returns its namespace."""
    from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

    # kubectl takes an empty file for one without entries, and the package for an error
    full = [it for it in paths if not os.path.isfile(it) or os.path.getsize(it)]
    merged = KubeConfigMerger(os.pathsep.join(full))
    if merged.config is None:
        raise ClusterError(f"the kubeconfig {files} is empty; {_FIX}")
    for part in ("contexts", "clusters", "users"):
        for it in merged.config.value[part]:  # else an error of the package has its secrets too
            it.name = f"{it.path}/{part}/{it.value['name']}"
    name = _context(merged, files, context)
    chosen = merged.config["contexts"].get_with_name(name)["context"]
    cluster = merged.config["clusters"].get_with_name(chosen["cluster"])["cluster"]
    _check_cluster(cluster.value, chosen["cluster"])
    if user := chosen.safe_get("user"):
        entry = merged.config["users"].get_with_name(user)
        asked = entry.value.get("user") or {}
        found = _credentials(entry, cluster)
        entry.value = entry.value | {"user": found}  # anew: what is in the file may be saved
    save = merged.save_changes
    KubeConfigLoader(
        merged.config, name, config_base_path=None, config_persister=save, temp_file_path=folder
    ).load_and_set(settings)
    # https://github.com/kubernetes-client/python/issues/1409
    if user and asked and not (settings.api_key or settings.cert_file):
        raise ClusterError(
            f"the user {user} of the kubeconfig has no login: no credentials; {_ANEW}"
        )
    # Go sends nothing of this machine's own to a proxy of the environment, and all to `proxy-url`.
    local = f"{settings.no_proxy or ''},localhost,127.0.0.0/8,::1"
    settings.no_proxy = "" if "proxy-url" in cluster else local
    return str(chosen.safe_get("namespace") or "default")


def _context(merged: Any, files: str, name: str | None) -> str:
    # The first current one counts, as in kubectl; the package takes the last:
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
    """Raises ClusterError where the package would ask another server, or trust any."""
    server, insecure = cluster.get("server"), cluster.get("insecure-skip-tls-verify")
    where = f"the cluster {name} of the kubeconfig"
    if not re.match(r"https?://[^/]", str(server)):
        raise ClusterError(f"{where} has `server: {server}`: write https://HOST:PORT")
    if not isinstance(insecure, bool | None):
        raise ClusterError(
            f"{where} has `insecure-skip-tls-verify: {insecure!r}`: write true or false"
        )


def _credentials(entry: Any, cluster: Any) -> dict[str, Any]:
    """The entries of a user, with what its login program or its token file gives, by whole paths.

    Raises ClusterError where the package would ask as nobody, or as another than kubectl.
    """
    name, folder = entry.value["name"], os.path.dirname(os.path.abspath(entry.path))
    user = {key: it for key, it in (entry.value.get("user") or {}).items() if it is not None}
    # https://github.com/kubernetes-client/python/issues/362
    for key in filter(user.get, _ACTS_AS):
        raise ClusterError(
            f"the user {name} of the kubeconfig acts for another (`{key}`), which the package "
            "kubernetes cannot: use a context without, by --context"
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
        # as the server would say it: who waits does not ask a person to log in again and again
        raise ClusterError(
            f"the user {name} of the kubeconfig has no login: {error}", 401
        ) from None
    return user


def _by_program(program: Any, folder: str, cluster: Any) -> dict[str, str]:
    """What the login program of a user gives, as entries of the user. Raises ValueError.

    Left to itself the package logs what is wrong here, and goes on as nobody or as another:
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
    except AttributeError:  # on a terminal the program has said itself what is wrong
        raise ValueError(f"{command} has failed; {_ANEW}") from None
    except Exception as error:
        words = " ".join(str(error).split())
        raise ValueError(f"{command}: {words:.500}; {_ANEW}") from None
    found = {"token": token} if token else {}
    if certificate and key:
        found["client-certificate-data"] = base64.b64encode(certificate.encode()).decode()
        found["client-key-data"] = base64.b64encode(key.encode()).decode()
    if not found:
        raise ValueError(f"{command} has given neither a token nor a certificate; {_ANEW}")
    return found


def _client(settings: Any) -> Any:
    import ssl

    import urllib3
    from kubernetes import client, dynamic

    settings.retries = False  # what creates is not asked twice, and a message comes at once
    settings.connection_pool_maxsize, settings.keep_alive = _AT_ONCE, True
    if settings.proxy and "://" not in settings.proxy:
        settings.proxy = f"http://{settings.proxy}"  # as Go takes it
    proxy = urllib3.util.parse_url(settings.proxy or "").auth
    if proxy:  # https://github.com/kubernetes-client/python/issues/1696
        settings.proxy_headers = urllib3.make_headers(proxy_basic_auth=unquote(proxy))
    api = client.ApiClient(settings)
    api.user_agent = f"gptddp-k8s/{__version__}"
    # Python 3.13 asks of certificates what those of EKS have not, and kubectl does not ask:
    # https://github.com/kubernetes-client/python/issues/2394
    context = ssl.create_default_context(cafile=settings.ssl_ca_cert)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not settings.verify_ssl:
        context.check_hostname = False
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    if settings.cert_file:
        context.load_cert_chain(settings.cert_file, settings.key_file)
    pool = api.rest_client.pool_manager.connection_pool_kw
    pool["ssl_context"] = context  # what else it has are files, to be read for each connection
    for key in ("ca_certs", "cert_file", "key_file"):
        pool.pop(key, None)
    return dynamic.DynamicClient(api, discoverer=lambda *_: None)  # paths are known: no discovery
