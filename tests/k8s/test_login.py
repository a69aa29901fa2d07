"""Kubeconfigs and logins, where the package `kubernetes` differs from kubectl."""

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import certifi
import pytest
from support.api_server import HeaderAPI, kubeconfig, named

from gptddp.k8s.cluster import connect
from gptddp.k8s.exit_codes import ClusterError
from gptddp.k8s.observe.watcher import Watcher

V1 = "client.authentication.k8s.io/v1"


@pytest.fixture
def server_in():
    return HeaderAPI


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"current_context": None}, "there is no current context in the kubeconfig"),
        ({"current_context": "no"}, "no context no in the kubeconfig {path}: .* there are x"),
        ({"contexts": []}, "there are none"),
        ({"contexts": {"x": {}}}, "{path} cannot be used .*kubectl config view"),
        ({"clusters": []}, "Expected object with name c in {path}/clusters list"),
        ({"users": []}, "Expected object with name u in {path}/users list"),
        ({"server": {}}, "cluster c .*`server: None`: write https"),
        ({"server": {"server": 3}}, "`server: 3`: write https"),
        ({"server": "localhost:6443"}, "`server: localhost:6443`: write https"),
        (
            {"server": {"server": "https://a", "insecure-skip-tls-verify": "false"}},
            "`insecure-skip-tls-verify: 'false'`: write true or false",
        ),
        ({"contexts": [{}]}, "the entry 'name' is missing"),
        (": [yaml", "{path} cannot be used .*line 1"),
        ("just text", "{path} cannot be used .it does not have the form of"),
        ("", "{path} is empty"),
    ],
)
def test_a_wrong_kubeconfig_is_an_error_that_names_it(tmp_path, entries, words):
    """The message has the file and the problem; no other server is contacted."""
    path = tmp_path / "config"
    if isinstance(entries, str):
        path.write_text(entries)
    else:
        kubeconfig(path, **entries)
    with pytest.raises(ClusterError, match=words.format(path=path)):
        connect(None, path)


def test_a_missing_kubeconfig_is_named(tmp_path, monkeypatch):
    """The error names the file of the flag, of the variable or in the home folder, and --local."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(ClusterError, match=r"no file ~/.kube/config; .*--local"):
        connect()
    with pytest.raises(ClusterError, match="no file .*/none;"):
        connect(None, tmp_path / "none")
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    with pytest.raises(ClusterError, match="no file .*/a:.*/b;"):
        connect()
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(
        ClusterError, match="no file .*, and the service account of this pod cannot"
    ):
        connect()


def test_the_first_current_context_of_several_files_counts(tmp_path, monkeypatch):
    """kubectl does the same, so both use one cluster; a file with an empty context sets none."""
    there = {"cluster": "c", "user": "u", "namespace": "ml"}
    kubeconfig(tmp_path / "none", contexts=[], clusters=[], users=[], current_context="")
    kubeconfig(tmp_path / "one", "http://one", contexts=named("x", context=there))
    kubeconfig(tmp_path / "two", "http://two", current_context="y", contexts=named("y", context={}))
    monkeypatch.setenv("KUBECONFIG", ":".join(str(tmp_path / it) for it in ("none", "one", "two")))
    assert (connect().server, connect().namespace) == ("http://one", "ml")
    assert connect("mine").namespace == "mine"


def test_a_relative_path_begins_at_its_own_kubeconfig(tmp_path, monkeypatch, api):
    """Relative paths of a user begin at the folder of its file; an empty file is ignored."""
    for folder in ("clusters", "users"):
        (tmp_path / folder).mkdir()
    cluster = kubeconfig(tmp_path / "clusters/config", api.url, users=[])
    user = kubeconfig(
        tmp_path / "users/config", clusters=[], contexts=[], users=named("u", user={})
    )
    (tmp_path / "empty").touch()
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'empty'}:{cluster}:{user}")
    (tmp_path / "users/log-in").write_text("#!/bin/sh\n" + credential('{"token": "program"}'))
    (tmp_path / "users/log-in").chmod(0o700)
    (tmp_path / "users/token").write_text("file\n")
    for entries in (plugin("", command="./log-in"), {"tokenFile": "token", "token": "other"}):
        kubeconfig(user, clusters=[], contexts=[], users=named("u", user=entries))
        connect().find("Pod")
    assert api.tokens == ["program", "file"]
    entries = {"client-certificate": "mine.pem", "client-key": "mine.key"}
    kubeconfig(user, clusters=[], contexts=[], users=named("u", user=entries))
    kubeconfig(cluster, "https://127.0.0.1:9", users=[])
    with pytest.raises(ClusterError, match="users/mine.pem"):
        connect()


def test_an_error_of_a_kubeconfig_has_no_secret(tmp_path, api):
    """A mistake beside a secret, or a token with invalid characters, does not print the secret."""
    for user in (
        {"auth-provider": {"name": "oidc", "config": {"refresh-token": "s3cret"}}},
        {"token": "s3cret\nx"},
    ):
        with pytest.raises(ClusterError) as caught:
            api.as_user(**user)
        assert "s3cret" not in str(caught.value)


def test_a_pod_uses_its_service_account(tmp_path, monkeypatch):
    """It is used without a kubeconfig, but not in place of a named kubeconfig that is missing."""
    for name, text in (("token", "secret"), ("namespace", "ml\n"), ("ca.crt", "")):
        (tmp_path / name).write_text(text)
    shutil.copy(certifi.where(), tmp_path / "ca.crt")
    for name, file in (("TOKEN", "token"), ("CERT", "ca.crt")):
        setting = f"kubernetes.config.incluster_config.SERVICE_{name}_FILENAME"
        monkeypatch.setattr(setting, str(tmp_path / file))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    cluster = connect()
    assert (cluster.namespace, cluster.server) == ("ml", "https://[fd00::1]:443")
    with pytest.raises(ClusterError, match="no file .*/none;"):
        connect(None, tmp_path / "none")


# -- logins --------------------------------------------------------------------------------------


def plugin(script, **entries):
    return {"exec": {"apiVersion": V1, "command": "sh", "args": ["-c", script], **entries}}


def credential(token):
    return f"""echo '{{"apiVersion": "{V1}", "kind": "ExecCredential", "status": {token}}}'"""


@pytest.mark.parametrize(
    ("user", "words"),
    [
        (
            plugin("echo no session >&2; exit 3"),
            "user u .* no login: sh: exec: process returned 3. no session; log",
        ),
        (plugin("", command="no-login", installHint="get\nit"), "no program no-login; get it"),
        (plugin("", command="/"), "/: .*Permission denied: '/'; log in"),
        (plugin("", command=None), "no login: None: .*; log in again"),
        (plugin("echo hello"), "user u .* no login: sh: exec: failed to decode process output"),
        (plugin("echo 5"), "no login: sh: .*; log in again"),
        (plugin(credential("null")), "no login: sh has failed; log in again"),
        (plugin(credential("{}")), "user u .* no login: sh has returned neither a token nor"),
        (plugin(credential('{"token": ""}')), "sh has returned neither a token nor"),
        (plugin(credential('{"token": " "}')), "no login: no credentials"),
        (
            plugin(credential("{}"), apiVersion="v0"),
            "sh: exec: plugin api version .*/v1 does not match v0",
        ),
        (plugin("exit 1") | {"username": "other", "password": "p"}, "sh: exec: process returned 1"),
        ({"token": "a\nb"}, "token has characters that no token has; log in again"),
        ({"auth-provider": {"name": "azure"}}, "user u .* no login: no credentials; log in again"),
        ({"token": ""}, "user u .* no login: no credentials; log in again"),
        ({"tokenFile": "none"}, "none"),
        ({"token": "t", "as": "dev"}, "user u .* acts for another .`as`"),
        ({"token": "t", "as-groups": ["dev"]}, "user u .* acts for another .`as-groups`"),
    ],
)
def test_without_a_login_no_request_is_sent(api, user, words):
    """The error has the reason; an anonymous request would fail with an error about rights."""
    with pytest.raises(ClusterError, match=words):
        api.as_user(**user).find("Pod")
    assert api.asked == []


def test_a_refused_login_is_repeated_once(api, tmp_path):
    """A token of a file or a program may have expired; a second refusal is an error."""
    (tmp_path / "token").write_text("old")
    cluster = api.as_user(tokenFile="token")
    cluster.find("Pod")
    api.refused.add("old")
    (tmp_path / "token").write_text("new")
    cluster.find("Pod")
    cluster.find("Pod")
    assert api.tokens == ["old", "old", "new", "new"]
    count = f"echo x >> {tmp_path}/runs; n=$(wc -l < {tmp_path}/runs)\n"
    cluster = api.as_user(**plugin(count + credential('{"token": "\'$n\'"}')))
    cluster.find("Pod")
    api.refused |= {"1", "2", "3"}
    with pytest.raises(ClusterError, match="does not accept your login .* log in again"):
        cluster.find("Pod")
    assert api.tokens[4:] == ["1", "1", "2"]


def test_a_login_program_may_ask_at_the_terminal(api, tmp_path):
    """Its output is shown, typed text is its input, and its failure is reported."""
    script = 'printf "Password: " >&2; read p; [ $p = ok ] || exit 4\n' + credential(
        '{"token": "t"}'
    )
    path = kubeconfig(tmp_path / "config", api.url, users=named("u", user=plugin(script)))
    main = "from gptddp.k8s.cli.main import cli; cli()"
    command = [sys.executable, "-c", main, "list", "--kubeconfig", str(path)]
    for typed, code in ((b"ok\n", 0), (b"no\n", 1)):
        ours, theirs = os.openpty()
        os.write(ours, typed)
        result = subprocess.run(
            command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=60
        )
        os.close(ours), os.close(theirs)
        assert result.returncode == code
        assert result.stderr.startswith("Password: ")
    assert "no login: sh has failed; log in again" in result.stderr


def test_a_failed_login_ends_a_wait(api, tmp_path):
    """A program that asks a person is not run again every second, and no outage is reported."""
    once = f"echo x >> {tmp_path}/runs; [ $(wc -l < {tmp_path}/runs) = 1 ] || exit 1\n"
    cluster = api.as_user(**plugin(once + credential('{"token": "t"}')))
    said = []
    watcher = Watcher(lambda: cluster.find("Pod"), said.append)
    assert watcher.poll() == []
    api.refused.add("t")
    with pytest.raises(ClusterError, match="no login: sh: exec: process returned 1"):
        watcher.poll(time.monotonic() + 10)
    assert said == []


def test_one_thread_logs_in_for_all(api, tmp_path):
    """If a login expires under many requests, it is repeated once."""
    count = f"echo x >> {tmp_path}/runs; n=$(wc -l < {tmp_path}/runs)\n"
    cluster = api.as_user(**plugin(count + credential('{"token": "\'$n\'"}')))
    api.refused.add("1")
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(cluster.find, ["Pod"] * 8)) == [[]] * 8
    assert (tmp_path / "runs").read_text() == "x\nx\n"
