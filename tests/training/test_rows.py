"""A worker that joins has the rows of its next step before the others let it in."""

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.loaders import LANES, SEED, SEQ_LEN, Dataset, corpus, file_waited_for, open_loader

from gptddp.config import Config, with_preset
from gptddp.data import blocks
from gptddp.data.lanes import owners
from gptddp.data.loader import Loader
from gptddp.errors import BadRowGroup, ConfigError, DataError, LifeLost
from gptddp.training.begin import JOINS, ROWS, pack_first_rows, post_rows
from gptddp.training.rows import Rows

C = with_preset(
    Config(lanes=LANES, batch=2 * LANES, seq_len=SEQ_LEN, seed=SEED, cache_dir="none"),
    accelerator=False,
)


class Members:
    """The launcher's knowledge: the posts of living members, and of others that `join`."""

    is_going, most = True, 2 * LANES

    def __init__(self, me: str = "e", join: Sequence[str] = ()) -> None:
        self.told: dict[str, Any] = {}
        self.me, self.join = me, join

    def post(self, key: str, value: Any) -> None:
        assert key == JOINS

    def posts(self, key: str) -> dict[str, Any]:
        return self.told if key == ROWS else dict.fromkeys([self.me, *self.join], True)

    def wait_for(self, found: Callable[[], Any], limit_s: float) -> Any:
        return found()


def state_after(steps: int) -> dict[str, Any]:
    with open_loader(corpus()) as loader:
        return loader.state([loader.next() for _ in range(steps)][-1].cursors)


def told(
    step: int, ids: list[str], before: list[str], steps: int, step_s: float = 0.0
) -> tuple[Any, list[str]]:
    """The post of a member of this world, and the owners of its lanes."""
    posts: list[Any] = []
    members = SimpleNamespace(post=lambda key, value: posts.append(value))
    now = owners(LANES, ids, before)
    post_rows(
        SimpleNamespace(  # type: ignore[arg-type]
            world=SimpleNamespace(members=members, ids=ids),
            step=step,
            progress=SimpleNamespace(data=state_after(steps)),
            stalls=SimpleNamespace(usual_s=step_s),
            rows=SimpleNamespace(owners=now),
        )
    )
    return posts[0], now


def joiner(dataset: Dataset, members: Members) -> Any:
    world: Any = SimpleNamespace(members=members, ids=["0"], rank=0)
    return SimpleNamespace(config=C, world=world, rows=Rows(dataset, C, world, None))  # type: ignore


@pytest.fixture
def four() -> tuple[Any, list[str]]:
    return told(9, ["a", "b", "c", "d"], [], 2)


@pytest.mark.parametrize("is_stale", [False, True], ids=["after the loss", "before it"])
def test_a_joiner_reads_nothing_more_once_it_is_in(four, is_stale):
    """Also if member "a" was lost a moment ago, and no other rank has reported that yet."""
    dataset, members = corpus(), Members()
    three, after = told(9, ["b", "c", "d"], four[1], 2)
    old = told(1, ["b", "x"], [], 1)[0]
    members.told = dict.fromkeys("cd", old) | {"b": four[0] if is_stale else three}
    life = joiner(dataset, members)
    pack_first_rows(life)
    dataset.fail = lambda group, attempt: pytest.fail(f"{group} is read")
    life.rows.owners = after
    life.rows.move(state_after(3), ["b", "c", "d", "e"], "e")
    batch = life.rows.loader.next()
    assert len(batch.lanes) == LANES // 4
    assert list(batch.lanes) == [n for n, it in enumerate(life.rows.owners) if it == "e"]
    life.rows.close()


def test_a_joiner_follows_steps_that_are_done_while_it_packs(four, monkeypatch):
    """The others have begun other blocks by the time it has packed its first ones."""
    dataset, members = corpus(), Members()
    members.told = dict.fromkeys("abcd", four[0])
    life, ready, far = joiner(dataset, members), Loader.is_ready, 200
    later = told(9 + far, list("abcd"), [], far)[0]

    def packed(loader: Loader) -> bool:
        if is_packed := ready(loader):
            members.told = dict.fromkeys("abcd", later)
        return is_packed

    monkeypatch.setattr(Loader, "is_ready", packed)
    pack_first_rows(life)
    dataset.fail = lambda group, attempt: pytest.fail(f"{group} is read")
    life.rows.move(state_after(far), list("abcde"), "e")
    assert len(life.rows.loader.next().lanes) > 0
    life.rows.close()


@pytest.mark.parametrize("most", [2 * LANES, 6])
def test_workers_that_join_together_pack_their_own_lanes(four, most):
    """As those of one pod do; here "f" comes first, in the order of the ranks. With `most`, a
    seventh must wait."""
    dataset, now, has = corpus(), list("abcdfe"), set[int]()
    for me, other in ("ef", "fe"):
        members = Members(me, [other, "z"] if most == 6 else [other])
        members.most, members.told = most, dict.fromkeys("abcd", four[0])
        life = joiner(dataset, members)
        pack_first_rows(life)
        dataset.fail = lambda group, attempt: pytest.fail(f"{group} is read")
        life.rows.owners = four[1]
        life.rows.move(state_after(3), now, me)
        lanes = set(life.rows.loader.next().lanes)
        assert lanes and not lanes & has
        has |= lanes
        dataset.fail = lambda group, attempt: None
        life.rows.close()


@pytest.mark.parametrize(("step_s", "steps"), [(30.0, 2), (0.5, 7), (0.01, 101), (0.0, 4)])
def test_a_joiner_has_rows_for_the_steps_of_three_seconds(step_s, steps, monkeypatch):
    """So many may be done after the post, before it is in."""
    members, asked = Members(), list[int]()
    members.told = {"a": told(10, ["a"], [], 1, step_s=step_s)[0]}
    monkeypatch.setattr(Loader, "hurry", lambda loader, steps: asked.append(steps))
    monkeypatch.setattr(Loader, "is_ready", lambda loader: True)
    life = joiner(corpus(), members)
    pack_first_rows(life)
    assert asked == [steps, steps]
    life.rows.close()


def test_a_hanging_read_of_a_joiner_is_a_wait_for_the_storage(four):
    """It is logged with the file, and ended after an hour, as any other one."""
    dataset, members, goes_on = corpus(), Members(), threading.Event()
    members.told = dict.fromkeys("abcd", four[0])
    dataset.fail = lambda group, attempt: goes_on.wait(30)
    life = joiner(dataset, members)
    file = file_waited_for(lambda: pack_first_rows(life), goes_on)
    life.rows.close()
    assert "row group" in file


def test_an_error_before_the_join_is_tried_again(four, monkeypatch):
    """A row group that cannot be read for a moment must not be left out of the run for good."""
    monkeypatch.setattr(blocks, "RETRY_S", ())
    dataset, members = corpus(), Members()
    members.told = dict.fromkeys("abcd", four[0])
    life = joiner(dataset, members)

    def fail(group, attempt):
        raise DataError("the volume is away")

    dataset.fail = fail
    pack_first_rows(life)
    with pytest.raises(BadRowGroup):
        life.rows.loader.next()
    dataset.fail = lambda group, attempt: None
    life.rows.move(state_after(2), ["a", "b", "c", "d", "e"], "e")
    assert len(life.rows.loader.next().lanes) > 0
    life.rows.close()


def test_a_joiner_gives_up_if_the_world_has_ended(four, monkeypatch):
    members = Members()
    members.told, members.is_going = dict.fromkeys("abcd", four[0]), False
    life = joiner(corpus(), members)
    monkeypatch.setattr(Loader, "is_ready", lambda loader: False)
    with pytest.raises(LifeLost):
        pack_first_rows(life)
    life.rows.close()


def test_a_joiner_is_patient_while_its_launcher_hears_of_no_world_yet(four, monkeypatch):
    """The launcher of a worker that rejoins may connect with the others anew."""
    members, looks = Members(), list[bool]()
    members.told, members.is_going = dict.fromkeys("abcd", four[0]), False
    monkeypatch.setattr(Loader, "is_ready", lambda loader: looks.append(True) or len(looks) > 4)
    life = joiner(corpus(), members)
    pack_first_rows(life)
    assert len(looks) > 4
    life.rows.close()


@pytest.mark.parametrize("size", [0, LANES])
def test_a_spare_worker_packs_nothing(size):
    """Each lane has a rank already; or no rank is known, and the wait for a view ends it."""
    members, ids = Members(), [f"m{n}" for n in range(size)]
    members.told = dict.fromkeys(ids, told(1, ids, [], 1)[0]) if ids else {}
    life = joiner(corpus(), members)
    pack_first_rows(life)
    assert not hasattr(life.rows, "loader")


def test_more_ranks_than_lanes_are_refused():
    life = joiner(corpus(), Members())
    with pytest.raises(ConfigError, match="9 workers but only 8 lanes"):
        life.rows.move({}, [f"m{n}" for n in range(LANES + 1)], "m0")
