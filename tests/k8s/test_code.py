"""A job's own code: which files are included, which code is refused, and the rendered objects."""

import base64
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.manifests import container, pod_spec, render
from support.paths import ROOT

from gptddp.errors import ConfigError
from gptddp.k8s.cli.main import cli
from gptddp.k8s.render import code, code_volume
from gptddp.launch import bundle

OWN = {"gptddp/model/gpt.py": "A = 1\n", "mine/__init__.py": "", "mine/other.py": ""}


def write(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


@pytest.fixture
def own(tmp_path):
    """A folder with a module of ours and another package."""
    return write(tmp_path / "own", OWN)


def read(folder):
    return code.Code("--code", folder)


def git(folder, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True)


# -- included files ------------------------------------------------------------------------------


def test_without_git_all_visible_python_files_are_included(own, monkeypatch):
    """This holds for a folder without a repository, and on a machine without git."""
    write(own, {".env": "TOKEN=1", ".venv/a.py": "", "mine/.b.py": "", "mine/table.bin": ""})
    assert sorted(read(own).files) == sorted(OWN)
    git(own, "init")
    monkeypatch.setenv("PATH", "/nowhere")
    assert sorted(read(own).files) == sorted(OWN)


def test_in_a_repository_the_files_that_git_lists_are_included(own, monkeypatch):
    """Tracked and untracked files are included; ignored, deleted and hidden files are not."""
    git(own, "init")
    gone = {"gone.py": "", "mine/data/a.bin": "x", "mine/data/b.txt": "", "cache/a.py": ""}
    write(own, {**gone, ".gitignore": "cache/\n*.bin\n", "mine/data/.gitignore": "!a.bin\n"})
    write(own, {".env": "TOKEN=1", "tab\u00e4le 1.txt": "", "mine/build.log": ""})
    write(own, {".git/info/exclude": "*.log\n"})
    git(own, "add", ".")
    (own / "gone.py").unlink()
    write(own, {"new.py": ""})
    there = [*OWN, "mine/data/a.bin", "mine/data/b.txt", "new.py", "tab\u00e4le 1.txt"]
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as a hook of another repository has it
    assert sorted(read(own).files) == sorted(there)


def test_submodules_and_inner_repositories_are_included(own, tmp_path):
    """A submodule that is not checked out has no files; a link to a repository is refused."""
    library = write(tmp_path / "library", {"library.py": "", "junk.txt": ""})
    git(library, "init")
    write(library, {".gitignore": "junk.txt\n"})
    git(library, "add", ".")
    git(library, "commit", "-m", "x")
    git(own, "init")
    git(own, "submodule", "add", library, "sub")
    git(own, "add", ".")
    git(own, "commit", "-m", "x")
    git(own, "clone", library, "inside")
    assert sorted(read(own).files) == sorted([*OWN, "inside/library.py", "sub/library.py"])
    git(tmp_path, "clone", own, "clone")
    assert sorted(read(tmp_path / "clone").files) == sorted(OWN)
    (own / "link").symlink_to(".")
    with pytest.raises(ConfigError, match="link is no plain file"):
        _ = read(own).files


@pytest.mark.parametrize(
    ("folder", "variable", "words"),
    [
        ("own", "GIT_TEST_ASSUME_DIFFERENT_OWNER", "git config --global --add safe.directory"),
        ("own/.git/hooks", "ANY", "fatal: this operation must be run in a work tree"),
    ],
)
def test_an_error_of_git_is_reported_in_its_words(own, monkeypatch, folder, variable, words):
    """Git refuses a folder in another user's repository, and a folder inside .git."""
    git(own, "init")
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError, match=f"git does not list the files of .*{words}"):
        _ = read(own.parent / folder).files


def test_the_hash_depends_on_the_files_alone(own):
    """It covers contents, names and executable bits, but not times, other modes or caches."""
    first = read(own)
    for path in own.rglob("*.py"):
        os.utime(path, (0, 0))
        path.chmod(0o600)
    again = read(own)
    assert (again.sha256, again.archive) == (first.sha256, first.archive)
    hashes = {first.sha256}
    for change in (
        lambda: write(own, {"mine/__init__.py": "x = 1"}),
        lambda: (own / "mine/other.py").rename(own / "mine/another.py"),
        lambda: (own / "mine/__init__.py").chmod(0o755),
    ):
        change()
        hashes.add(read(own).sha256)
    assert len(hashes) == 4


def test_an_archive_holds_every_file_whatever_its_name(tmp_path):
    """Long paths, spaces, umlauts, empty and binary files are unpacked unchanged."""
    names = ["a b/ü.txt", "x" * 120 + "/" + "y" * 120 + ".py", "empty.py", "bin"]
    files = {name: bundle.File(name.encode() * n, n == 2) for n, name in enumerate(names)}
    assert bundle.unpack(bundle.pack(files)) == files
    assert bundle.pack(dict(reversed(files.items()))) == bundle.pack(files)
    assert bundle.sha256(dict(reversed(files.items()))) == bundle.sha256(files)


def test_a_link_inside_the_folder_becomes_a_file(own):
    """A link to a file of the folder is a plain file in the pod."""
    (own / "mine/second.py").symlink_to("../gptddp/model/gpt.py")
    assert read(own).files["mine/second.py"].data == b"A = 1\n"


# -- refusals ------------------------------------------------------------------------------------


def link(path, target):
    return lambda folder: (folder / path).symlink_to(target)


NO_FILE = "is no plain file in the folder, so the pods would not have it"
REFUSED = {
    "syntax": ({"mine/bad.py": "\ndef f(:\n"}, "mine/bad.py: invalid syntax (bad.py, line 2)"),
    "zero byte": ({"mine/bad.py": b"a\0b"}, "mine/bad.py: source code string cannot contain null"),
    "encoding": ({"mine/bad.py": b"a = '\xff'"}, "mine/bad.py"),
    "stdlib": ({"logging/__init__.py": ""}, "logging/__init__.py would replace the module logging"),
    "stdlib file": ({"types.py": ""}, "types.py would replace the module types in every program"),
    "git library": ({"json.abi3.so": ""}, "json.abi3.so would replace the module json in every"),
    "package file": ({"gptddp.py": ""}, "gptddp.py would replace the module gptddp"),
    "package": ({"__init__.py": ""}, "is a package itself, or a part of one: name the folder"),
    "git link out": (link("mine/out.py", "/etc/hostname"), f"mine/out.py {NO_FILE}"),
    "git link to nothing": (link("mine/gone.py", "nowhere.py"), f"mine/gone.py {NO_FILE}"),
    "git link to a folder": (link("mine/again.py", "."), f"mine/again.py {NO_FILE}"),
    "git link in a circle": (link("mine/loop.py", "loop.py"), "Too many levels of symbolic links"),
    "pipe": (lambda folder: os.mkfifo(folder / "pipe.py"), f"pipe.py {NO_FILE}"),
    "name": (lambda folder: os.fsencode(folder) + b"/\xff.py", "is not UTF-8, or not printable"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_code_that_no_pod_could_run_is_refused(own, case):
    """It is refused before anything is rendered; the message names the option and the file."""
    harm, words = REFUSED[case]
    made = write(own, harm) if isinstance(harm, dict) else harm(own)
    if isinstance(made, bytes):
        Path(os.fsdecode(made)).write_text("")
    if case.startswith("git"):
        git(own, "init")  # which lists all kinds of files
    result = CliRunner().invoke(cli, ["render", "--code", str(own)])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: --code: ") and words in result.stderr, result.stderr


def test_a_part_of_our_package_is_refused_without_an_init_file_too(own):
    """Modules of such a folder would be outside of the package, and train nothing."""
    for folder in (own / "gptddp", own / "gptddp/model"):
        with pytest.raises(ConfigError, match="contains the package gptddp/"):
            _ = read(folder).files
    checkout = write(own / "gptddp", {"gptddp/train.py": ""})  # a checkout may have any name
    assert "gptddp/train.py" in read(checkout).files


def test_a_wrong_or_too_large_folder_is_refused(own, tmp_path, monkeypatch):
    """An empty name, a file, a missing folder, a folder without Python, and too much code."""
    (tmp_path / "empty").mkdir()
    a_file = str(own / "mine/__init__.py")
    for name, words in (
        ("", "is empty"),
        (a_file, f"--code: {a_file} cannot be read: Not a directory; {a_file} must be a folder"),
        ("none", "No such file or directory; none must be a folder of packages"),
        (str(tmp_path / "empty"), "has no Python file, or git ignores all of them"),
    ):
        result = CliRunner().invoke(cli, ["render", "--code", name])
        assert result.exit_code == 2 and words in result.stderr
    monkeypatch.setattr(code, "MOST_CONFIG_MAPS", 0)
    with pytest.raises(ConfigError, match=r"has 0 KiB, packed, and at most 0 are allowed: let git"):
        _ = read(own).archive
    monkeypatch.setattr(bundle, "MOST_BYTES", 5)
    with pytest.raises(ConfigError, match=r"more than 0 MiB, up to gptddp/model/gpt.py"):
        _ = read(own).files


def test_a_command_that_does_not_use_code_does_not_read_it(own, tmp_path):
    """`prepare -f job.toml` does not depend on the code that the file names; `render` does."""
    write(own, {"mine/bad.py": "def f(:"})
    toml = tmp_path / "job.toml"
    toml.write_text('[job]\ncode = "own"\n')
    prepare = ["prepare", "--dry-run", "--source", "a/b", "--data", "a/c", "-f", str(toml)]
    assert CliRunner().invoke(cli, prepare).exit_code == 0
    assert CliRunner().invoke(cli, ["render", "-f", str(toml)]).exit_code == 2


# -- rendered objects ----------------------------------------------------------------------------


@pytest.mark.parametrize(("nbytes", "suffixes"), [(0, [""]), (1_500_000, ["-0", "-1", "-2"])])
def test_a_job_with_code_has_config_maps_and_names_its_hash(own, tmp_path, nbytes, suffixes):
    """Immutable ConfigMaps named after the hash precede the job, with at most 700 KiB each;
    together they are the archive that the launcher reads."""
    write(own, {"mine/table.py": "#" + os.urandom(nbytes).hex()})
    objects = render({"name": "demo", "namespace": "team", "code": str(own)})
    assert objects == render({"name": "demo", "namespace": "team", "code": str(own)})
    maps, job, found = [it for it in objects if it["kind"] == "ConfigMap"], objects[-1], read(own)
    names = [it["metadata"]["name"] for it in maps]
    assert objects[: len(maps)] == maps and all(it["immutable"] for it in maps)
    assert names == [f"demo-code-{found.sha256[:10]}{suffix}" for suffix in suffixes]
    for it in maps:
        assert it["metadata"]["namespace"] == "team"
        assert it["metadata"]["labels"]["app.kubernetes.io/instance"] == "demo"
        ((key, packed),) = it["binaryData"].items()
        (tmp_path / key).write_bytes(part := base64.b64decode(packed))
        assert len(part) <= 700 << 10
    flag, archive = container(job)["args"][:2]
    assert (flag, Path(archive).parent) == ("--code", Path("/code"))
    assert Path(archive).name.startswith(f"{found.sha256}.tar.gz")
    assert bundle.unpack(bundle.read(tmp_path / Path(archive).name)) == found.files
    assert code_volume.files_in(maps[::-1]) == found.files
    mounts = {m["name"]: m for m in container(job)["volumeMounts"]}
    assert mounts["code"] == {"name": "code", "mountPath": "/code", "readOnly": True}
    (volume,) = (v for v in pod_spec(job)["volumes"] if v["name"] == "code")
    if nbytes:
        assert [it["configMap"]["name"] for it in volume["projected"]["sources"]] == names
    else:
        assert volume["configMap"] == {"name": names[0]}
    assert code_volume.hash_of(job) == found.sha256 and code_volume.config_maps_of(job) == names
    without = render({"name": "demo"})[-1]
    assert code_volume.hash_of(without) is None and code_volume.config_maps_of(without) == []


def test_the_code_is_summarized_in_a_note(own):
    """Hash, number of files and size are printed, so that unwanted files are noticed."""
    said, found = CliRunner().invoke(cli, ["render", "--code", str(own)]).stderr, read(own)
    assert f"own code {found.sha256[:12]}: 3 files of {own}, {len(found.archive)} bytes" in said


def test_this_checkout_can_be_the_code():
    """`--code .` in this repository includes the package, in a few ConfigMaps."""
    found = read(ROOT)
    assert "gptddp/report/page.html" in found.files
    assert len(found.parts) < code.MOST_CONFIG_MAPS / 2
