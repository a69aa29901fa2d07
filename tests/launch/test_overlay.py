"""Own code in a pod: laid over the image's package, checked, and started by the launcher."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gptddp.errors import ConfigError
from gptddp.launch import bundle, overlay
from gptddp.launch.bundle import File

# A launcher that prints its surroundings, in place of the real one.
TELLS = b"""
import json, os, sys
import gptddp.errors, gptddp.grace
def main():
    import mine
    seen = {"args": sys.argv[1:], "code": os.environ["GPTDDP_CODE"], "mine": mine.__file__}
    seen["ours"] = gptddp.errors.__file__
    print(json.dumps(seen | {"grace": gptddp.grace.KILL_S}))
    return 0
"""


def packed(folder, files):
    """The archive of these files, as mounted in the pod."""
    files = {path: it if isinstance(it, File) else File(it) for path, it in files.items()}
    path = folder / f"{bundle.sha256(files)}.tar.gz"
    path.write_bytes(bundle.pack(files))
    return path


@pytest.fixture
def image(tmp_path):
    """A package as in an image, compiled."""
    root = tmp_path / "image"
    for path in ("__init__", "a", "model/__init__", "model/b", "model/c", "run/__init__", "run/d"):
        file = root / "gptddp" / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"NAME = {path!r}\n")
    (root / "gptddp/run/page.html").write_text("page")
    subprocess.run([sys.executable, "-m", "compileall", "-q", root], check=True)
    return root


def value(root, module):
    """NAME of a module, its file, and whether that was compiled; in a separate interpreter."""
    code = f"import sys, {module} as m; print(m.NAME, m.__file__, m.__spec__.cached)"
    command = [sys.executable, "-P", "-B", "-v", "-c", code]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    name, file, cached = done.stdout.split()
    return name, Path(file), f"matches {file}" in done.stderr and Path(cached).exists()


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """The folder for unpacked code."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_one_changed_module_needs_no_copy_of_the_others(image, tmp_path):
    """The changed module is loaded, and all others are the image's, in compiled form."""
    archive = packed(tmp_path, {"gptddp/model/b.py": b"NAME = 'own'\n", "mine.py": b"NAME = 1\n"})
    root = overlay.lay(archive, image)
    name, file, compiled = value(root, "gptddp.model.b")
    assert (name, file.is_relative_to(root), compiled) == ("own", True, False)
    for module in ("gptddp", "gptddp.a", "gptddp.model.c", "gptddp.run.d"):
        name, file, compiled = value(root, module)
        assert name == (
            module.removeprefix("gptddp.").replace(".", "/") if module != "gptddp" else "__init__"
        )
        assert file.is_relative_to(root) and compiled, module
    assert value(root, "mine")[0] == "1"
    assert (root / "gptddp/run").is_symlink() and (root / "gptddp/run/page.html").exists()


def test_own_code_of_any_kind_replaces_the_images_code(image, tmp_path):
    """A module may replace a package, a package a module, and an `__init__` may be replaced."""
    own = {
        "gptddp/run.py": b"NAME = 'module'\n",
        "gptddp/a/__init__.py": b"NAME = 'package'\n",
        "gptddp/__init__.py": b"NAME = 'top'\n",
    }
    root = overlay.lay(packed(tmp_path, own), image)
    found = [value(root, module)[0] for module in ("gptddp.run", "gptddp.a", "gptddp")]
    assert found == ["module", "package", "top"]


def test_nothing_is_written_into_the_image(image, tmp_path):
    """An interpreter that writes compiled modules writes them into the scratch space."""
    before = {path: path.read_bytes() for path in image.rglob("*.pyc")}
    root = overlay.lay(packed(tmp_path, {"gptddp/model/b.py": b"NAME = 'own'\n"}), image)
    env = {**os.environ, "PYTHONPATH": str(root)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    code = "import gptddp.model.b, gptddp.model.c, gptddp.run.d"
    subprocess.run([sys.executable, "-P", "-c", code], env=env, check=True)
    assert {path: path.read_bytes() for path in image.rglob("*.pyc")} == before


def test_executable_files_stay_executable_in_the_pod(image, tmp_path):
    """The archive keeps the executable bit of a script, and no other bit of its mode."""
    own = {"bin/tool": File(b"#!/bin/sh\necho yes\n", True), "bin/data": File(b"")}
    root = overlay.lay(packed(tmp_path, own), image)
    assert subprocess.run([root / "bin/tool"], capture_output=True).stdout == b"yes\n"
    assert not os.access(root / "bin/data", os.X_OK)


def test_changed_damaged_and_missing_code_is_refused(image, tmp_path):
    """By the hash, write access to the archive, but not the job, cannot change the running code."""
    archive = packed(tmp_path, {"mine.py": b"x = 1\n"})
    good = archive.read_bytes()
    archive.write_bytes(bundle.pack({"mine.py": File(b"x = 2\n")}))
    with pytest.raises(ConfigError, match=r"is not what the job was submitted with: its hash is"):
        overlay.lay(archive, image)
    for damaged in (b"", b"no archive", good[:-20], good[:40] + bytes(9) + good[49:]):
        archive.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"is damaged|is not what"):
            overlay.lay(archive, image)
    archive.unlink()
    with pytest.raises(ConfigError, match=r"cannot be read: .*No such file.*submit it again"):
        overlay.lay(archive, image)


@pytest.mark.parametrize("name", ["../out.py", "/etc/out.py", "a/../../out.py", "a//b.py"])
def test_no_archive_writes_outside_of_its_folder(tmp_path, image, name):
    """A path that leads out is refused, even with a correct hash."""
    archive = packed(tmp_path, {name: b"x = 1\n"})
    with pytest.raises(ConfigError, match=r"is damaged: .* is no plain file inside a folder"):
        overlay.lay(archive, image)
    assert not list(tmp_path.rglob("out.py"))


def launch(archive, *args, **env):
    """The image's entrypoint with this archive, in a folder with another module `mine`."""
    command = [sys.executable, "-m", "gptddp.launch", "--code", str(archive), *args]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, cwd=archive.parent
    )


def test_the_entrypoint_runs_own_code_throughout(tmp_path):
    """Own code also replaces the launcher, the working directory does not count, and the trainer
    gets the arguments and the hash."""
    (tmp_path / "mine.py").write_text("raise SystemExit('the wrong one')")
    own = {"gptddp/launch/launcher.py": TELLS, "mine/__init__.py": b""}
    archive = packed(tmp_path, own)
    done = launch(archive, "--steps", "3", TMPDIR=str(tmp_path / "scratch"))
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["args"] == ["--steps", "3"]
    assert seen["code"] == archive.name.removesuffix(".tar.gz")
    assert "/scratch/gptddp-code-" in seen["mine"] and "/scratch/gptddp-code-" in seen["ours"]


def test_the_entrypoint_reports_errors_of_the_code(tmp_path, monkeypatch, capsys):
    """Exit code 2 fails the job, with one line; at a full disk 200 lets the pod be replaced."""
    done = launch(tmp_path / f"{'0' * 64}.tar.gz")
    assert done.returncode == 2 and done.stderr.startswith("gptddp.launch: the job's code cannot")
    assert len(done.stderr.splitlines()) == 1

    def full(prefix):
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/x")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(SystemExit) as ended:
        overlay.main(["--code", str(packed(tmp_path, {"mine.py": b""})), "true"])
    assert (
        ended.value.code == 200 and "gptddp.launch: [Errno 28] No space" in capsys.readouterr().err
    )
