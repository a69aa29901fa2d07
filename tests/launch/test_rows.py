"""Launchers that have the key and say what this version does not understand."""

import contextlib
import copy
import json
import random

import pytest

from gptddp.launch.rows import check_posts, check_row
from gptddp.launch.views import Views

JUNK = [None, -1, 1 << 60, True, 0.5, "x", [], [1], [None], {}, {"a": 1}, {"number": 1}]


def agree():
    """Three that are one world."""
    all_ = [Views(it * 16, f"pod-{it}:1", 2, 3) for it in "abc"]
    for it in all_:
        it.attach({"id": it.row["agent"], "pod": "", "status": "fresh"}, "")
    for _ in range(30):
        for one in all_:
            for other in all_:
                one.hear(json.loads(json.dumps(other.row)))
            one.tick(0.2)
            one.step()
            if one.is_in:
                one.row["member"]["status"] = "going"
    assert len(all_[0].row["view"]["members"]) == 3
    return all_[0], all_[1].row


def spoil(value, rng):
    """Something within it becomes another thing, or is not there."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    name = rng.choice(keys)
    if value[name] and isinstance(value[name], dict | list) and rng.random() < 0.6:
        spoil(value[name], rng)
    elif rng.random() < 0.3:
        del value[name]
    else:
        value[name] = rng.choice(JUNK)


@pytest.mark.parametrize("seed", range(3))
def test_a_row_of_another_version_ends_nobody(seed):
    """It is refused, or one can live with it."""
    rng, (views, theirs) = random.Random(seed), agree()
    check_row({"row": views.row, "peers": ["pod-b:1"]})
    for _ in range(200):
        one, row = copy.deepcopy(views), json.loads(json.dumps(theirs))
        row["proposal"] = rng.choice([None, {**row["view"], "number": 9}])
        spoil(row, rng)
        with contextlib.suppress(ValueError):
            check_row({"row": row, "peers": []})
            one.hear(row)
        for _ in range(30):
            one.tick(0.2)
            one.step()
            assert isinstance(one.lost, dict) and json.dumps(one.row)


def test_posts_that_workers_could_not_read_are_refused():
    """A worker looks at the view at which a member has arrived."""
    check_posts({"id": "a", "values": {"at": [1, {"key": "value"}], "more": None}})
    for bad in (None, {"id": "a"}, {"id": [], "values": {}}, {"id": "a", "values": {"at": 5}}):
        with pytest.raises(ValueError, match="no posts"):
            check_posts(bad)
