"""Files that others may have written or replaced: no path leads elsewhere, no text does harm."""

import json
from typing import ClassVar

import pytest
import torch
from click.testing import CliRunner
from support.waiting_writer import Writer

from gptddp.checkpoint import retention, store
from gptddp.checkpoint.load import load_newest
from gptddp.cli import cli
from gptddp.data.dataset import open_dataset
from gptddp.distributed.report import report
from gptddp.errors import ConfigError, DataError, Unusable, visible, visible_lines
from gptddp.files import is_inside, lock
from gptddp.launch import launcher
from gptddp.run import crash_loop, lease_file
from gptddp.run.lines import Lines

HOSTILE = "\x1b[2Jjob\r\n\x9b31m\u202edone"
SHOWN = "\\x1b[2Jjob\\r\\n\\x9b31m\\u202edone"


def test_control_characters_are_made_visible():
    """Control characters become escapes. Letters of all languages, our line ends and tabs stay."""
    assert visible(HOSTILE) == SHOWN
    assert visible("Zażółć 言語 'x' \\n ✓") == "Zażółć 言語 'x' \\n ✓"
    assert visible("a\nb\tc\udc80\0") == "a\\nb\\tc\\udc80\\x00"
    assert visible_lines("a\x1b\n\tb\r\n") == "a\\x1b\n\tb\\r\n"


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        *[("a", True), ("train/00000.parquet", True), ("./a", True), ("a..b/c", True)],
        *[("../a", False), ("a/../../b", False), ("/etc/passwd", False), ("", False)],
        *[(".", False), ("..", False), ("a\0b", False), (None, False), (3, False), (["a"], False)],
    ],
)
def test_a_path_in_a_manifest_stays_in_its_folder(name, inside):
    """Only a relative path that stays inside the folder is accepted."""
    assert is_inside(name) == inside


@pytest.mark.parametrize("name", ["../model.bin", "/etc/passwd", ".."])
def test_a_checkpoint_whose_shards_lie_elsewhere_is_not_loaded(tmp_path, caplog, name):
    """The error names the manifest's field, and the previous checkpoint is loaded."""
    writer = Writer(tmp_path, 1)
    for step in (1, 2):
        assert not writer.save(step, {"w": torch.ones(3)}, {}).error
    path = tmp_path / "checkpoints" / store.name_of(2, 1)
    manifest = store.read_manifest(path)
    manifest["shards"][0]["file"] = name
    (path / store.MANIFEST).write_bytes(store._seal(manifest))
    with pytest.raises(Unusable, match=r"manifest.json: shards\[0\].file is '.*must be shard-0"):
        store.read_manifest(path)
    assert load_newest(tmp_path).step == 1 and "shards[0].file" in caplog.text


@pytest.mark.parametrize("name", ["../../secret.parquet", "/etc/passwd", "train/../../x", None])
@pytest.mark.parametrize("field", ["splits.train.files[0].path", "tokenizer.file"])
@pytest.mark.parametrize("on_bad", ["fail", "quarantine"])
def test_a_dataset_whose_files_lie_elsewhere_is_refused(corpus, tmp_path, name, field, on_bad):
    """The error has file, field and rule, even with --on-bad quarantine."""
    manifest = json.loads((corpus / "dataset.json").read_bytes())
    if field == "tokenizer.file":
        manifest["tokenizer"]["file"] = name or 3
    else:
        manifest["splits"]["train"]["files"][0]["path"] = name
    (tmp_path / "dataset.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError) as refused:
        open_dataset(tmp_path, on_bad)
    assert f"dataset.json: {field} is " in str(refused.value)
    assert "must be a path below the dataset's folder" in str(refused.value)


@pytest.mark.parametrize("target", ["elsewhere", "missing"])
def test_log_and_ledger_are_not_written_through_a_link(tmp_path, target):
    """Nothing is written to the target of a symbolic link, and the message names the fix."""
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "log").symlink_to(tmp_path / target)
    lines = Lines(tmp_path / "log")
    lines.append({"step": 1})
    with pytest.raises(OSError, match="log"):
        lines.sync()
    assert "symbolic link" in str(lines.trouble(0.0)) and "move away" in str(lines.trouble(0.0))
    lines.close(0.1)
    assert (tmp_path / "elsewhere").read_text() == "precious"
    assert not (tmp_path / "missing").exists()


def test_a_lock_is_not_made_through_a_link(tmp_path):
    """A lock file that is a symbolic link is refused, and its target is not created."""
    (tmp_path / "lock").symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match="symbolic link"):
        lock(tmp_path / "lock")
    assert not (tmp_path / "made").exists()


def test_nothing_is_removed_through_a_link(tmp_path):
    """A folder for unfinished checkpoints that leads elsewhere is left alone."""
    kept = tmp_path / "home" / "step-000000000001.1.abc"
    kept.mkdir(parents=True)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / store.TMP).symlink_to(tmp_path / "home")
    retention.discard_unfinished(tmp_path / "run")
    assert kept.exists()


def test_the_text_of_a_lease_or_an_old_error_is_one_visible_line(tmp_path):
    """Control characters of leases and old errors are escaped, as they could forge our messages."""
    holder = {"job": HOSTILE, "host": HOSTILE, "pid": HOSTILE}
    assert lease_file.describe(holder) == f"job {SHOWN} on host {SHOWN} (process {SHOWN})"
    (tmp_path / "faults").mkdir()
    record = {"rank": 1, "pod": HOSTILE, "error": HOSTILE, "time": 1.0}
    (tmp_path / "faults" / "7.1.1.json").write_text(json.dumps(record))
    assert crash_loop.first(tmp_path, 1) == f"rank 1 ({SHOWN}): {SHOWN}"


def test_messages_are_escaped_for_a_terminal(tmp_path, capsys, monkeypatch):
    """Commands, trainer and launcher escape control characters in their messages."""
    for name in ("GPTDDP_VERDICT", "RANK"):
        monkeypatch.delenv(name, raising=False)
    run = tmp_path / "\x1b[2Jrun"
    done = CliRunner().invoke(cli, ["log", str(run)])
    assert done.exit_code == 2 and "\x1b" not in done.output and "\\x1b[2Jrun" in done.output
    report(ConfigError(f"{run} is in use"))
    launcher._say(f"{run} is finished")
    said = capsys.readouterr().err
    assert "\x1b" not in said and said.count("\\x1b[2Jrun") == 2


def test_messages_of_a_cluster_are_escaped_for_a_terminal(monkeypatch):
    """gptddp-k8s escapes control characters in its notes and errors, which quote the cluster."""
    from gptddp.k8s.cli.command import Group, note

    class Failing(Group):
        known: ClassVar = {"any": ("", "")}

        def get_command(self, ctx, name):
            note("pod \x1b]0;x\x07 is gone")
            raise ConfigError("the API says \x1b[2J\n  field: \x1b[1m")

    done = CliRunner().invoke(Failing("x"), ["any"])
    assert "\x1b" not in done.output and "\x07" not in done.output
    assert "pod \\x1b]0;x\\x07 is gone\n" in done.output
    assert "error: the API says \\x1b[2J\n  field: \\x1b[1m\n" in done.output


def test_log_lines_of_the_trainer_are_escaped(forked):
    """The trainer's logging escapes control characters, such as those of a path or a peer."""
    process = forked(
        "import logging; from gptddp import train; train.main([]); "
        "logging.getLogger('gptddp').warning('run %s: lost %s', '\x1b[2J', 'a\x07')"
    )
    assert process.wait(60) == 0
    assert process.stderr.read().endswith("\nrun \\x1b[2J: lost a\\x07\n")
