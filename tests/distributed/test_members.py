"""A worker's knowledge from its launcher: views, posts, and the end of a world."""

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from support.fake_mesh import FakeMesh
from support.waiting import until

from gptddp.distributed.connect import World
from gptddp.distributed.members import AT, LeaseAsked, Member, Members, Out, View
from gptddp.errors import LostPeer


@pytest.fixture
def mesh(tmp_path, monkeypatch):
    """A fake launcher; this process, unlike a worker, does not end with it."""
    monkeypatch.setattr("os._exit", lambda code: None)
    made = FakeMesh(tmp_path, least=2, most=3)
    yield made
    made.close()
    for it in threading.enumerate():
        if it.name == "members":
            it.join(10.0)


@pytest.fixture
def three(mesh):
    """Three members in a view, and the view as each received it."""
    members = [Members(mesh.path, pod) for pod in ("a", "b", "")]
    for it in members:
        it.status("fresh")
    mesh.wait(lambda: all(mesh.heard[it.me] for it in members))
    mesh.commit([it.me for it in members], "first")
    return members, [it.next_view(0, 10.0) for it in members]


def seen(members, true):
    assert members.wait_for(true, 10.0)


def test_a_view_names_its_members_by_rank(mesh, three):
    """A view also names lost members and causes; an older view is not returned again."""
    members, views = three
    assert views[0] == views[1] == views[2]
    assert views[0][:2] == (1, "first") and [it.pod for it in views[0].members] == ["a", "b", ""]
    assert (members[0].least, members[0].most) == (2, 3)
    assert members[0].next_view(1, 0.05) is None
    mesh.commit([members[1].me, members[0].me], "lease", how="it was silent")
    view = members[0].next_view(1, 10.0)
    assert isinstance(view, View) and (view.number, view.by) == (2, "lease")
    assert view.ids == [members[1].me, members[0].me]
    assert [it[:] for it in view.gone] == [(members[2].me, "", "it was silent")]


def test_posts_reach_all_members_until_their_author_is_lost(mesh, three):
    """A post reaches all members, also late ones, until its author is lost."""
    (a, b, c), _ = three
    a.post("key", {"x": 1})
    assert a.posts("key") == {a.me: {"x": 1}}
    c.post("key", 2)
    seen(b, lambda: b.posts("key") == {a.me: {"x": 1}, c.me: 2})
    late = Members(mesh.path, "d")
    seen(late, lambda: len(late.posts("key")) == 2)
    mesh.commit([a.me, b.me])
    seen(b, lambda: b.posts("key") == {a.me: {"x": 1}})


def test_a_worker_forgets_the_posts_of_the_dead(mesh, three):
    """Those of its own view only with the next view: the others may still have to read them."""
    (a, b, c), _ = three
    late = Members(mesh.path, "d")
    for it in (b, late):
        it.post("key", 1)
        seen(a, lambda it=it: it.me in a.posts("key"))
    seen(late, lambda: b.me in late.posts("key"))
    mesh.tell_all({"ended": b.me})
    mesh.tell_all({"ended": late.me})
    seen(late, lambda: not late.posts("key"))
    seen(a, lambda: [*a.posts("key")] == [b.me])


@pytest.mark.parametrize("why", ["lost", "left out", "left", "arrived", "out", "lease"])
def test_a_world_is_over_when_its_collectives_cannot_end(mesh, three, why):
    """A view with one more member does not end it; the reading thread calls `on_news`."""
    (a, b, c), (view, *_) = three
    heard = []
    a.on_news = lambda: heard.append(a.is_over(view))
    d = Members(mesh.path, "d")
    d.status("warm")
    mesh.wait(lambda: mesh.heard[d.me])
    number = mesh.commit([a.me, b.me, c.me, d.me])
    seen(a, lambda: a.has_news(view))
    assert not a.is_over(view) and not any(heard)
    if why == "lost":
        mesh.tell(a.me, {"lost": [c.me]})
    elif why == "left out":
        mesh.commit([a.me, b.me, d.me])
    elif why == "left":  # a member that leaves in order does not end the world at once
        gone = [{"id": c.me, "pod": "c", "how": "told to stop"}]
        left = {"number": number + 1, "by": "quorum", "gone": gone}
        mesh.tell(
            a.me, {"view": left | {"members": [{"id": it.me, "pod": ""} for it in (a, b, d)]}}
        )
        seen(a, lambda: a.view.number > number)
        assert a.has_news(view) and not a.is_over(view) and a.ended_of(view) == {c.me}
    elif why == "arrived":
        b.post(AT, [number, {}])
    elif why == "out":
        mesh.tell(a.me, {"out": number})
    else:
        mesh.tell(a.me, {"lease": {"number": 7, "how": "tie"}})
    until(lambda: heard and heard[-1])  # after a second, if a thread has to look again
    assert a.is_over(view)
    assert [it.pod for it in a.lost_of(view)] == ([""] if why == "lost" else [])


def test_the_request_for_the_lease_lasts_until_the_answer(mesh, three):
    """Meanwhile the world is over: the main thread must be free for the lease."""
    (a, *_), (view, *_) = three
    mesh.tell(a.me, {"lease": {"number": 7, "how": "tie"}})
    asked = a.next_view(1, 10.0)
    assert asked == LeaseAsked(7, "tie") == a.next_view(1, 0.0)
    assert a.is_over(view)
    a.answer(asked)
    assert a.next_view(1, 0.0) is None and not a.is_over(view)
    mesh.wait(lambda: {"lease": 7} in mesh.heard[a.me])


def test_a_dropped_member_rejoins_as_another(mesh, three):
    """The process has no view or posts of before, and ignores messages for its old member."""
    (a, b, _), _ = three
    a.post("key", 1)
    mesh.tell(a.me, {"out": 5})
    assert a.next_view(1, 10.0) == Out(5)
    before = a.me
    a.rejoin()
    assert a.me != before and a.view is None and before not in a.posts("key")
    a.broken(b.view)
    a.leave("told to stop")
    mesh.wait(lambda: mesh.heard[a.me] == [{"broken": 1}, {"leave": "told to stop"}])


def test_a_worker_ends_with_its_launcher(mesh):
    """A worker ends even if its main thread is in C; without an answering launcher none begins."""
    code = (
        "import ctypes, sys; from pathlib import Path; from gptddp.distributed import members\n"
        "it = members.Members(Path(sys.argv[1]), 'a'); it.status('warm')\n"
        "ctypes.CDLL(None).sleep(60)"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(mesh.path)], stderr=subprocess.PIPE, text=True
    )
    mesh.by_pod("a")
    began = time.monotonic()
    mesh.close()
    assert "launcher" in run.communicate(timeout=20)[1] and run.returncode == 1
    assert time.monotonic() - began < 5.0
    with pytest.raises(LostPeer, match="does not answer"):
        Members(mesh.path.with_name("none"), "a")


def test_no_member_waits_for_a_member_that_left():
    """A member's leave counts like its last post; a post of another world does not count."""
    view = View(3, "quorum", tuple(Member(it, "") for it in "abc"), ())
    ended = {"b"}
    members = SimpleNamespace(me="a", ended_of=lambda of: ended)
    members.posts = lambda key: {"a": "3", "c": "2"}
    world = object.__new__(World)
    world.world_size, world._formed = 3, "3"
    world.group = SimpleNamespace(members=members, view=view)
    assert not world._all_parted()
    ended.add("c")
    assert world._all_parted()
