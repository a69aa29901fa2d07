"""What a pod knows of the lives that it has been in, for as long as its launcher lives."""

import json

import pytest

from gptddp.distributed import lives
from gptddp.distributed.connect import connect


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The launcher's own folder."""
    monkeypatch.setenv("GPTDDP_VERDICT", str(tmp_path / "verdict.json"))
    return tmp_path


def test_the_newest_lives_are_kept(folder):
    """Several workers of a pod note a life once; the newest eight stay."""
    assert lives.noted() == []
    for i in range(20):
        lives.note(str(i))
        lives.note(str(i))
    assert lives.noted() == [str(i) for i in range(12, 20)]


@pytest.mark.parametrize("text", ["", "{", "7", "null", "\0"])
def test_a_damaged_note_is_no_note(folder, text):
    """The next life may have to wait for the lease, and that is all."""
    (folder / "lives.json").write_text(text)
    assert lives.noted() == []
    lives.note("a")
    assert lives.noted() == ["a"]


def test_a_folder_that_cannot_be_written_is_told(folder, caplog):
    """A full disk is no reason not to train."""
    (folder / "lives.json").mkdir()
    lives.note("a")
    assert "not noted" in caplog.text and lives.noted() == []


def test_each_life_follows_those_that_its_pod_was_in(folder, train_here):
    """Each has an id of its own; without a launcher nothing is known of the lives before."""
    with connect("cpu") as first:
        pass
    with connect("cpu") as second:
        assert second.follows == {first.life, second.life}
    assert json.loads((folder / "lives.json").read_text()) == [first.life, second.life]


def test_without_a_launcher_a_life_follows_none(train_here, tmp_path, monkeypatch):
    """Plain torchrun, or one process: what is over is known by the death of the process."""
    monkeypatch.delenv("GPTDDP_VERDICT", raising=False)
    with connect("cpu") as world:
        assert world.follows == {world.life} and world.job is None
