"""`submit` and `delete` of jobs with own code, against a small API server on a real socket."""

import base64
import gzip
import os
import re
from pathlib import Path

import pytest
from support.writable_api_server import job, submit

from gptddp.k8s.render import code_volume
from gptddp.launch import bundle


@pytest.fixture
def own(tmp_path):
    """own(**texts): a folder with these modules in gptddp/, as an argument of `submit`."""

    def write(**texts):
        folder = tmp_path / "own/gptddp"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / f"{name}.py").write_text(text)
        return "--code", str(folder.parent)

    return write


def config_maps(api):
    return {it["metadata"]["name"]: it for it in api.objects.values() if it["kind"] == "ConfigMap"}


def test_submitting_the_same_code_again_changes_nothing(api, k8s, own):
    """Nothing is written, even if another zlib has compressed the archive."""
    code = own(a="x = 1\n")
    submit(k8s, *code)
    del api.writes[:]
    assert submit(k8s, *code).stdout == "pytorchjob.kubeflow.org/demo unchanged\n"
    (config_map,) = config_maps(api).values()
    ((key, data),) = config_map["binaryData"].items()
    raw = gzip.decompress(base64.b64decode(data))
    config_map["binaryData"][key] = base64.b64encode(gzip.compress(raw, 1)).decode()
    assert submit(k8s, *code).exit_code == 0 and api.writes == []


def test_changed_code_is_refused_with_the_changed_files(api, k8s, own):
    """It is refused before anything is created; the error has the files and the ways out."""
    option, folder = own(a="x = 1\n", b="", c="")
    Path(folder, "table.py").write_text("#" + os.urandom(1_000_000).hex())  # two ConfigMaps
    submit(k8s, option, folder)
    del api.writes[:]
    own(a="x = 2\n", d="")
    Path(folder, "gptddp/c.py").unlink()
    result = submit(k8s, option, folder, "--cpu", "3")
    assert result.exit_code == 2 and api.writes == []
    _, head, *lines = result.stderr.splitlines()  # the first line describes the code
    assert "gptddp-k8s delete demo" in head and "continues its run" in head
    wanted = {
        "code": "X -> X",
        "code[gptddp/a.py]": "X -> X",
        "code[gptddp/c.py]": "X -> (none)",
        "code[gptddp/d.py]": "(none) -> X",
    }
    for line, (path, sides) in zip(lines, wanted.items(), strict=False):
        assert re.sub(r"\b[0-9a-f]{12}\b", "X", line) == f"  {path}: {sides}"
    assert [line.rpartition(".")[2] for line in lines[4:]] == ["cpu: 1 -> 3"] * 2
    result = submit(k8s)
    assert re.search(r"^  code: [0-9a-f]{12} -> \(none\)$", result.stderr, re.M)
    assert "volumes" not in result.stderr and "args" not in result.stderr


def test_code_of_an_interrupted_submit_is_no_obstacle(api, k8s, own):
    """After an edit, the next submit uses the new code, and a delete removes old and new."""
    api.cut_at = 1
    assert submit(k8s, *own(a="x = 1\n")).exit_code == 1
    api.cut_at = None
    assert submit(k8s, *own(a="x = 2\n")).exit_code == 0
    (name,) = code_volume.config_maps_of(job(api))
    assert code_volume.files_in([config_maps(api)[name]]) == {
        "gptddp/a.py": bundle.File(b"x = 2\n")
    }
    k8s("delete", "demo")
    assert api.all() == []


def test_code_that_cannot_be_compared_still_differs(api, k8s, own):
    """If the ConfigMaps cannot be read, or are gone, the hashes are compared."""
    submit(k8s, *own(a="x = 1\n"))
    code = own(a="x = 2\n")
    api.forbidden = {"GET configmaps"}
    for _ in range(2):
        result = submit(k8s, *code)
        assert result.exit_code == 2 and "code: " in result.stderr, result.stderr
        assert "code[gptddp/a.py]" not in result.stderr
        api.forbidden = set()
        for name in config_maps(api):
            api.objects["configmaps", name]["binaryData"] = {"code": "eA=="}
