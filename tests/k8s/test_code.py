"""Own code of a job: what of a folder counts, what is refused, and what is rendered of it."""

import base64
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.manifests import container, pod_spec, render

from gptddp.errors import ConfigError
from gptddp.k8s.cli.main import cli
from gptddp.k8s.render import code, code_volume, manifest, spec
from gptddp.k8s.render.ignore import DEFAULT, Ignore
from gptddp.launch import bundle


def write(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


OWN = {"gptddp/model/gpt.py": "A = 1\n", "mine/__init__.py": "", "mine/table.bin": b"\xff\x00"}


@pytest.fixture
def own(tmp_path):
    """A folder with a module of ours and a package of its own."""
    return write(tmp_path / "own", OWN)


def read(folder):
    return code.Code("--code", folder)


# -- what counts ---------------------------------------------------------------------------------


def test_the_hash_is_of_what_the_files_are_and_of_nothing_else(own, tmp_path):
    """Not of times, modes for others and caches; of contents, names and what can be executed."""
    first = read(own)
    assert sorted(first.files) == sorted(OWN) and len(first.sha256) == 64
    for path in own.rglob("*.py"):
        os.utime(path, (0, 0))
        path.chmod(0o600)
    write(own, {".git/config": "x", "mine/__pycache__/a.pyc": b"", ".env": "TOKEN=1"})
    again = read(own)
    assert (again.sha256, again.archive) == (first.sha256, first.archive)
    hashes = {first.sha256}
    for change in (
        lambda: write(own, {"mine/__init__.py": "x = 1"}),
        lambda: (own / "mine/table.bin").rename(own / "mine/elbat.bin"),
        lambda: (own / "mine/__init__.py").chmod(0o755),
    ):
        change()
        hashes.add(read(own).sha256)
    assert len(hashes) == 4


def test_an_archive_holds_every_file_whatever_its_name(tmp_path):
    """Long paths, spaces, umlauts, empty and binary files come out as they went in."""
    names = ["a b/ü.txt", "x" * 120 + "/" + "y" * 120 + ".py", "empty.py", "bin"]
    files = {name: bundle.File(name.encode() * n, n == 2) for n, name in enumerate(names)}
    assert bundle.unpack(bundle.pack(files)) == files
    assert bundle.pack(dict(reversed(files.items()))) == bundle.pack(files)
    assert bundle.sha256(dict(reversed(files.items()))) == bundle.sha256(files)


def test_links_inside_the_folder_are_files_there(own):
    """A second name for a file is a file in the pod."""
    (own / "mine/second.py").symlink_to("../gptddp/model/gpt.py")
    assert read(own).files["mine/second.py"].data == b"A = 1\n"


PATTERNS = [
    ["*.txt", "!keep.txt"],
    ["/*", "!/gptddp/"],
    ["docs/", "a/b", "/top.py"],
    ["**/deep", "a/**", "!a/x.py"],
    ["a/**/z.py", "[!a]?.py", "\\#odd.py", "# none", "", "x[0-9].py  "],
    ["*", "!*/", "!*.py"],
    ["[[:alpha:]][[:digit:]].py", "[![:lower:]-]odd.py", "docs/\t", "n.txt \r"],
    ["!.*", "a", ".gptddpignore"],
]
TREE = [
    *(
        "top.py",
        "a/top.py",
        "a/x.py",
        "a/b/z.py",
        "a/b/c/z.py",
        "docs/a.txt",
        "x/docs",
        "deep/q.py",
    ),
    *("m/deep/q.py", "keep.txt", "b/keep.txt", "n.txt", "gptddp/a.py", "x/gptddp/a.py", "#odd.py"),
    *("ab.py", "bb.py", "x1.py", "xx.py", "a/z.py"),
]


@pytest.mark.parametrize("lines", PATTERNS)
def test_patterns_mean_what_they_mean_to_git(tmp_path, lines):
    """Of a tree of files, exactly those are left out that git leaves out."""
    write(tmp_path, dict.fromkeys(TREE, ""))
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".git/info/exclude").write_text("\n".join(lines) + "\n")
    command = ["git", "-C", tmp_path, "ls-files", "--others", "--exclude-standard", "-z"]
    kept = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    (tmp_path / ".gptddpignore").write_text("\n".join(lines))
    assert list(code._paths(tmp_path, Ignore.of(tmp_path))) == sorted(filter(None, kept))


def test_what_is_left_out_by_default_can_be_taken_back(own):
    """Hidden files, caches and environments are out; a line with `!` has one in again."""
    write(own, {".hidden.py": "", "venv/a.py": "", "mine.egg-info/x": "", "a.pyc": ""})
    assert sorted(read(own).files) == sorted(OWN) and "__pycache__/" in DEFAULT
    write(own, {".gptddpignore": "!.hidden.py\nmine/*.bin\n"})
    assert sorted(read(own).files) == [".hidden.py", "gptddp/model/gpt.py", "mine/__init__.py"]


# -- what is refused -----------------------------------------------------------------------------


def link(path, target):
    return lambda folder: (folder / path).symlink_to(target)


REFUSED = {
    "syntax": (
        {"mine/bad.py": "def f(:\n"},
        "mine/bad.py, line 1: invalid syntax: def f(: (Python",
    ),
    "return": ({"mine/bad.py": "x = 1\nreturn 2\n"}, "mine/bad.py, line 2: 'return' outside"),
    "zero byte": ({"mine/bad.py": b"a\0b"}, "mine/bad.py: source code string cannot contain null"),
    "encoding": ({"mine/bad.py": b"a = '\xff'"}, "mine/bad.py"),
    "stdlib": ({"logging/__init__.py": ""}, "logging/__init__.py would take the place of logging"),
    "stdlib file": ({"types.py": ""}, "types.py would take the place of types in every program"),
    "stdlib library": ({"json.abi3.so": ""}, "json.abi3.so would take the place of json in every"),
    "package file": ({"gptddp.py": ""}, "gptddp.py would take the place of gptddp"),
    "package": ({"__init__.py": ""}, "is a package itself: name the folder that holds it"),
    "nothing": ({".gptddpignore": "*"}, "has no Python file, or .gptddpignore leaves all out"),
    "no text": ({".gptddpignore": b"\xff"}, ".gptddpignore is not UTF-8"),
    "pattern": ({".gptddpignore": "a\n[z-a]\n"}, ".gptddpignore, line 2: '[z-a]' is no pattern"),
    "link out": (link("mine/out.py", "/etc/hostname"), "mine/out.py is a link out of the folder"),
    "dead link": (link("mine/dead.py", "nowhere"), "mine/dead.py is a link to nothing"),
    "folder link": (link("mine/again", "."), "mine/again is a link to what is no plain file"),
    "loop": (link("mine/loop.py", "loop.py"), "mine/loop.py is a link to nothing"),
    "pipe": (lambda folder: os.mkfifo(folder / "pipe"), "pipe is no plain file"),
    "name": (lambda folder: os.fsencode(folder) + b"/\xff.py", "is not UTF-8: rename the file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_pod_could_run_is_refused_with_file_rule_and_fix(own, case):
    """Before anything is rendered; the message names the option and the file."""
    harm, words = REFUSED[case]
    made = write(own, harm) if isinstance(harm, dict) else harm(own)
    if isinstance(made, bytes):
        Path(os.fsdecode(made)).write_text("")
    result = CliRunner().invoke(cli, ["render", "--code", str(own)])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: --code: ") and words in result.stderr, result.stderr


def test_a_part_of_our_package_is_refused_without_an_init_file_too(own):
    """Its modules would stand beside the package, and train nothing."""
    for folder in (own / "gptddp", own / "gptddp/model"):
        with pytest.raises(ConfigError, match="name the folder that holds gptddp/"):
            _ = read(folder).files
    checkout = write(own / "gptddp", {"gptddp/train.py": ""})  # one may have any name
    assert "gptddp/train.py" in read(checkout).files


def test_what_is_no_folder_or_too_large_is_refused(own, tmp_path, monkeypatch):
    """An empty name, a file, nothing, and more than code."""
    for name, words in (("", "is empty"), (str(own / "mine/__init__.py"), "there is no folder")):
        result = CliRunner().invoke(cli, ["render", "--code", name])
        assert result.exit_code == 2 and words in result.stderr
    with pytest.raises(ConfigError, match=r"^job.toml: job.code: there is no folder .*/none"):
        code.read("job.toml: job.code", tmp_path / "none")
    monkeypatch.setattr(bundle, "MOST_BYTES", 7)
    with pytest.raises(ConfigError, match=r"more than 0 MiB, up to mine/table.bin"):
        _ = read(own).files
    monkeypatch.setattr(code, "MOST_FILES", 2)
    with pytest.raises(ConfigError, match=r"own has more than 2 files: leave out what is no code"):
        _ = read(own).files


def test_a_command_that_has_no_use_for_code_does_not_read_it(own, tmp_path):
    """`prepare -f job.toml` does not depend on the code that the file names; `validate` does."""
    write(own, {"mine/bad.py": "def f(:"})
    toml = tmp_path / "job.toml"
    toml.write_text('[job]\ncode = "own"\n')
    run = CliRunner().invoke
    prepare = ["prepare", "--dry-run", "--source", "a/b", "--data", "a/c", "-f", str(toml)]
    assert run(cli, prepare).exit_code == 0
    result = run(cli, ["validate", "-f", str(toml)])
    assert result.exit_code == 2 and "mine/bad.py, line 1" in result.output


def test_what_is_taken_along_is_said(own):
    """The hash, how many files and how large: a file too many is seen."""
    said = CliRunner().invoke(cli, ["render", "--code", str(own)]).stderr
    found = read(own)
    assert f"own code {found.sha256[:12]}: 3 files of {own}, {len(found.archive)} bytes" in said


# -- what is rendered ----------------------------------------------------------------------------


def test_a_job_with_code_has_it_beside_and_names_its_hash(own):
    """An immutable ConfigMap of the hash's name, before the job; its archive is the folder."""
    config_map, *_, job = render({"name": "demo", "namespace": "team", "code": str(own)})
    digest = read(own).sha256
    assert config_map["kind"] == "ConfigMap" and config_map["immutable"] is True
    meta = config_map["metadata"]
    assert meta["name"] == f"demo-code-{digest[:10]}" and meta["namespace"] == "team"
    assert meta["labels"]["app.kubernetes.io/instance"] == "demo"
    ((key, packed),) = config_map["binaryData"].items()
    assert key == f"{digest}.tar.gz" and bundle.unpack(base64.b64decode(packed)) == read(own).files
    assert container(job)["args"][:2] == ["--code", f"/code/{key}"]
    mounts = {m["name"]: m for m in container(job)["volumeMounts"]}
    assert mounts["code"] == {"name": "code", "mountPath": "/code", "readOnly": True}
    volumes = {v["name"]: v for v in pod_spec(job)["volumes"]}
    assert volumes["code"]["configMap"] == {"name": meta["name"]}
    assert code_volume.hash_of(job) == digest
    assert code_volume.config_maps_of(job) == [meta["name"]]


def test_without_code_a_job_is_as_it_was(own):
    """No object, argument, volume or mount, and the spec's hash of before."""
    objects = render({"name": "demo"})
    assert "code" not in manifest.to_yaml(objects).replace("rendezvous", "")
    assert code_volume.hash_of(objects[-1]) is None
    assert code_volume.config_maps_of(objects[-1]) == []


def test_large_code_is_in_several_config_maps_that_are_one_folder(own, tmp_path):
    """None of over 700 KiB; together they are the archive, as the launcher reads it."""
    write(own, {"mine/table.bin": os.urandom(1_500_000)})
    objects = render({"name": "demo", "code": str(own)})
    maps, job = [it for it in objects if it["kind"] == "ConfigMap"], objects[-1]
    assert objects[:3] == maps and all(it["immutable"] for it in maps)
    names = [it["metadata"]["name"] for it in maps]
    assert names == [f"demo-code-{read(own).sha256[:10]}-{part}" for part in range(3)]
    for it in maps:
        ((key, packed),) = it["binaryData"].items()
        (tmp_path / key).write_bytes(part := base64.b64decode(packed))
        assert len(part) <= 700 << 10
    archive = tmp_path / Path(container(job)["args"][1]).name
    assert bundle.unpack(bundle.read(archive)) == read(own).files
    assert code_volume.files_in(maps[::-1]) == read(own).files
    assert code_volume.config_maps_of(job) == names
    (volume,) = (v for v in pod_spec(job)["volumes"] if v["name"] == "code")
    assert [it["configMap"]["name"] for it in volume["projected"]["sources"]] == names


def test_more_than_config_maps_are_for_is_refused(own, monkeypatch):
    """With the size, and what to leave out."""
    monkeypatch.setattr(code, "MOST_CONFIG_MAPS", 1)
    write(own, {"mine/table.bin": os.urandom(900_000)})
    with pytest.raises(ConfigError, match=r"has 879 KiB, packed, and may have 700: leave out"):
        _ = read(own).archive


def test_the_same_folder_renders_the_same_bytes_and_another_another_job(own):
    """The hash of the spec follows the content of the code."""
    first = render({"code": str(own)})
    assert manifest.to_yaml(first) == manifest.to_yaml(render({"code": str(own)}))
    write(own, {"mine/__init__.py": "x = 2\n"})
    second = render({"code": str(own)})
    hashes = {o[-1]["metadata"]["annotations"][manifest.SPEC_HASH] for o in (first, second)}
    assert len(hashes) == 2
    assert first[0]["metadata"]["name"] != second[0]["metadata"]["name"]


def test_in_a_file_the_folder_is_beside_the_file(own, tmp_path):
    """`code = "own"` in job.toml, whatever the working directory; a flag wins, from there."""
    toml = tmp_path / "job.toml"
    toml.write_text('[job]\ncode = "own"\n')
    assert spec.load(toml, {}, []).code.files == read(own).files
    other = write(tmp_path / "other", {"a.py": ""})
    assert spec.load(toml, {"code": str(other)}, []).code.files == read(other).files
    toml.write_text("[job]\ncode = 3\n")
    with pytest.raises(ConfigError, match=r"job.code is 3: it must be the name of a folder"):
        spec.load(toml, {}, [])


def test_large_code_comes_with_a_word_about_kubectl(own):
    """`kubectl apply` cannot have objects of over 256 KiB: render says what can."""
    command = ["render", "--code", str(own)]
    assert "server-side" not in CliRunner().invoke(cli, command).stderr
    write(own, {"mine/table.bin": os.urandom(300_000)})
    assert "kubectl apply --server-side -f -" in CliRunner().invoke(cli, command).stderr


def test_this_checkout_can_be_given_as_it_is():
    """`--code .` here has the package alone, in a ConfigMap."""
    found = read(Path(code.__file__).parents[3])
    assert {path.split("/")[0] for path in found.files} == {"gptddp"}
    assert "gptddp/report/page.html" in found.files
    assert len(found.archive) < code.MOST_IN_A_CONFIG_MAP
