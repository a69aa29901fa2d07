"""What a pod knows of the lives that it has been in, for as long as its launcher lives."""

import json

import pytest

from gptddp.distributed import known_lives
from gptddp.distributed.connect import connect
from gptddp.distributed.known_lives import Came


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The launcher's own folder."""
    monkeypatch.setenv("GPTDDP_VERDICT", str(tmp_path / "verdict.json"))
    return tmp_path


def test_the_newest_lives_are_kept(folder):
    """Several workers of a pod note a life once; the newest eight stay."""
    assert known_lives.noted() == []
    for i in range(20):
        known_lives.note(str(i))
        known_lives.note(str(i))
    assert known_lives.noted() == [str(i) for i in range(12, 20)]


@pytest.mark.parametrize("text", ["", "{", "7", "null", "\0", "[1]", "[[1]]", '[["a", "0"]]'])
def test_a_damaged_note_is_no_note(folder, text):
    """The next life may have to wait for the lease, a death is not told, and that is all."""
    if not text.startswith("["):
        (folder / "lives.json").write_text(text)
    (folder / "deaths.json").write_text(text)
    assert known_lives.noted() == []
    known_lives.note("a")
    assert known_lives.noted() == ["a"]
    assert known_lives.lost("a", ["x"], [Came("x", ["a"], known_lives.deaths())]) == ""
    known_lives.note_death(0, "died of SIGSEGV")
    assert known_lives.deaths()[-1] == ["a", "0", "died of SIGSEGV"]


def test_a_folder_that_cannot_be_written_is_told(folder, caplog):
    """A full disk is no reason not to train."""
    (folder / "lives.json").mkdir()
    known_lives.note("a")
    assert "not noted" in caplog.text and known_lives.noted() == []


def test_each_life_follows_those_that_its_pod_was_in(folder, train_here, monkeypatch):
    """Each has an id of its own. Without a launcher, as under plain torchrun, nothing is known of
    the lives before: what is over is known by the death of the process."""
    with connect("cpu") as first:
        pass
    with connect("cpu") as second:
        assert second.follows == {first.life, second.life}
    assert json.loads((folder / "lives.json").read_text()) == [first.life, second.life]
    monkeypatch.delenv("GPTDDP_VERDICT")
    with connect("cpu") as alone:
        assert alone.follows == {alone.life} and alone.job is None


def test_who_was_lost_is_known_from_what_all_pods_have_noted(folder):
    """A worker by its launcher, a pod by another with its name, or by its absence: others not."""
    known_lives.note("old")
    known_lives.note_death(1, "died of SIGKILL")
    known_lives.note("newest")
    known_lives.note_death(3, "died of SIGBUS")
    stays = Came("a", known_lives.noted(), known_lives.deaths())
    came = [
        stays,
        Came("b", [], []),
        Came("e", [], []),
        Came("", [], []),
    ]
    pods = ["a", "a", "b", "a", "c", ""]
    assert known_lives.lost("newest", pods, came) == (
        "rank 2 (b), whose pod was started anew; rank 3 (a), whose process died of SIGBUS; "
        "rank 4 (c), whose pod is not there now"
    )
    assert known_lives.lost("old", ["a", "a"], came) == "rank 1 (a), whose process died of SIGKILL"
    assert known_lives.lost("newest", ["a"], came) == ""
    assert known_lives.lost("newest", ["x"] * 9, came).endswith(
        "rank 3 (x), whose process died of SIGBUS; 5 more"
    )
