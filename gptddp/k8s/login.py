"""A client of the package `kubernetes`, by kubectl's configuration or a pod's service account.

The package reads both. Ours is only what it was measured to do otherwise than kubectl, where that
would ask another cluster, or as somebody else.
"""

import logging
import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from gptddp import __version__
from gptddp.errors import ClusterError, GptddpError

_AT_ONCE = 256  # connections that are kept: a log of each pod
_ACTS_AS = ("as", "as-uid", "as-groups", "as-user-extra")
_FIX = (
    "name a kubeconfig with --kubeconfig or KUBECONFIG, or run the job on this machine with --local"
)


def log_in(kubeconfig: Path | None, context: str | None) -> tuple[Any, str]:
    """A client, and the namespace of its context. Raises ClusterError; nothing is sent yet."""
    try:
        from kubernetes import client, config
        from kubernetes.config import incluster_config
    except ModuleNotFoundError as error:
        raise GptddpError(
            f"talking to a cluster needs the package {error.name}: pip install 'gptddp[k8s]'"
        ) from None
    settings, files = client.Configuration(), _files(kubeconfig)
    try:
        if any(os.path.exists(os.path.expanduser(it)) for it in files.split(os.pathsep) if it):
            namespace = _by_kubeconfig(settings, files, context)
        elif kubeconfig or context or "KUBERNETES_SERVICE_HOST" not in os.environ:
            raise ClusterError(f"no cluster to talk to: there is no file {files}; {_FIX}")
        else:
            config.load_incluster_config(settings)
            token = Path(incluster_config.SERVICE_TOKEN_FILENAME)
            namespace = token.with_name("namespace").read_text("utf-8").strip()
        return _client(settings), namespace
    except GptddpError:
        raise
    except Exception as error:  # the package's own, or what a malformed file makes of its code
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ClusterError(
            f"the kubeconfig {files} cannot be used ({words:.500}): does `kubectl config view` "
            f"read it? Else {_FIX}"
        ) from None


def _files(kubeconfig: Path | None) -> str:
    """As KUBECONFIG names them. The package would read the variable once, when it is imported."""
    return str(kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config")


def _by_kubeconfig(settings: Any, files: str, context: str | None) -> str:
    """Fill in the settings of a context; returns its namespace."""
    from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

    merged = KubeConfigMerger(files)
    # The first that is set counts, as in kubectl; the package takes the last:
    # https://github.com/kubernetes-client/python/issues/2180
    current = (it.get("current-context") for it in merged.config_files.values())
    name = context or next(filter(None, current), "")
    names = [it.value["name"] for it in merged.config.value["contexts"]]
    if name not in names:
        raise ClusterError(
            f"there is no context {name or '(none is current)'} in the kubeconfig {files}: name "
            f"one with --context; there are {', '.join(names) or 'none'}"
        )
    loader = KubeConfigLoader(
        merged.config, name, config_base_path=None, config_persister=merged.save_changes
    )
    said = _LastError(logging.ERROR)
    logging.getLogger().addHandler(said)
    try:
        loader.load_and_set(settings)
    finally:
        logging.getLogger().removeHandler(said)
    chosen = loader.current_context["context"]
    cluster = merged.config["clusters"].get_with_name(chosen["cluster"])["cluster"]
    cluster["server"]  # the package raises here, where it would ask http://localhost
    _check_user(merged.config["users"], chosen.get("user"), settings, said.words)
    # Go sends nothing of this machine's own to a proxy of the environment, and all to `proxy-url`.
    local = f"{settings.no_proxy or ''},localhost,127.0.0.0/8,::1"
    settings.no_proxy = "" if "proxy-url" in cluster else local
    return str(chosen.get("namespace") or "default")


class _LastError(logging.Handler):
    """Keeps what the package logs as an error and goes on after."""

    words = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.words = " ".join(record.getMessage().split())


def _check_user(users: Any, name: str | None, settings: Any, said: str) -> None:
    """Raises ClusterError where the package would ask as nobody, or as another than kubectl."""
    if not name:
        return
    user = users.get_with_name(name).value.get("user") or {}
    # https://github.com/kubernetes-client/python/issues/362
    for key in filter(user.get, _ACTS_AS):
        raise ClusterError(
            f"the user {name} of the kubeconfig acts for another (`{key}`), which the package "
            "kubernetes cannot: use a context without, by --context"
        )
    # https://github.com/kubernetes-client/python/issues/1409
    if user and not (settings.api_key or settings.cert_file):
        fix = "log in again with the tool that the kubeconfig is of, or use another --context"
        if "[Errno 2]" in said:  # the program is not there
            fix = " ".join(str(user["exec"].get("installHint") or "install it").split())
        raise ClusterError(
            f"the user {name} of the kubeconfig has no login: {said or 'no credentials'}; {fix}"
        )


def _client(settings: Any) -> Any:
    import ssl

    import urllib3
    from kubernetes import client, dynamic

    settings.retries = False  # what creates is not asked twice, and a message comes at once
    settings.connection_pool_maxsize, settings.keep_alive = _AT_ONCE, True
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
    api.rest_client.pool_manager.connection_pool_kw["ssl_context"] = context
    return dynamic.DynamicClient(api, discoverer=lambda *_: None)  # paths are known: no discovery
