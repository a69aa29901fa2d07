"""Every rank-second of a run has a category, and an injected delay is found in its own."""

import json
import math

import pytest
from support.forked import ranks
from support.toy import SMALL

from gptddp.run import summary
from gptddp.run.history import history, read_ledger
from gptddp.run.owners import Owners, goodput
from gptddp.run.recovery import UNKNOWN, unsaid_end

# In one step rank 1 of two reads its rows 2 s late, and rank 0 computes 2 s longer; rank 0 takes
# 2 s longer for a copy of its state, and for its records; both evaluate for 2 s more.
DELAYED = """
import os, sys, time
from gptddp import train
from gptddp.training import life, quarantine
from gptddp.training.recorder import Recorder
from gptddp.training.saves import Saves
def late(work, calls, *ranks):
    def called(*args):
        calls.append(1)
        if len(calls) == 4 and os.environ["RANK"] in ranks:
            time.sleep(2.0)
        return work(*args)
    return called
quarantine.next_batch = late(quarantine.next_batch, [], "1")
train.forward_backward = late(train.forward_backward, [], "0")
life.evaluate = late(life.evaluate, [1, 1, 1], "0", "1")
Saves.save = late(Saves.save, [1, 1, 1], "0")
Recorder.step = late(Recorder.step, [], "0")
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def delayed(corpus, tmp_path_factory):
    """The folder of a run with these delays, and its rank-seconds by category."""
    run = tmp_path_factory.mktemp("delayed") / "run"
    flags = [*SMALL, "--data", str(corpus), "--run-dir", str(run), "--steps", "8"]
    flags += ["--checkpoint-every", "0.01"]
    for process in ranks(2, *flags, code=DELAYED):
        assert process.wait(120) == 0, process.stderr.read()
    return run, summary.read(run).owners.so_far()


@pytest.mark.alone
def test_a_delay_counts_in_its_category_and_as_waiting(delayed):
    """The delays of 2 s are in one rank's rows, in the other's step, save and records, and in all
    ranks' evaluation.

    The wait of the other rank counts as waiting, not as the exchange of sums.
    """
    owned = delayed[1]
    assert owned["data"] == pytest.approx(2.0, abs=0.2)
    assert owned["training"] >= 2.0
    assert owned["checkpoint"] >= 2.0
    assert owned["logging"] == pytest.approx(2.0, abs=0.2)
    assert owned["waiting"] == pytest.approx(8.0, abs=0.8)
    assert owned["evaluation"] == pytest.approx(4.0, abs=0.8)
    assert owned["other"] <= 0.01 * sum(owned.values())


@pytest.mark.alone
def test_the_categories_add_up_to_the_ranks_times_the_elapsed_time(delayed):
    """The sums agree within a percent, from the start of the trainers to the recorded end."""
    run, owned = delayed
    start, *_, stop = read_ledger(run)
    elapsed = stop["time"] - (start["time"] - start["seconds"])
    assert sum(owned.values()) == pytest.approx(2 * elapsed, rel=0.01)
    told = sum(row[0] for row in stop["phases"].values())
    assert stop["since_s"] == pytest.approx(elapsed - told, abs=0.05)


def test_the_first_line_of_a_life_has_the_phases(delayed):
    """The first line of a life has the phases, with one number for each rank."""
    first = next(history(delayed[0]))
    assert [len(row) for row in first["phases"].values()] == [2] * len(first["phases"])
    assert first["since_s"] > 0


def life(generation: int, began: float, world: int, **phases: float) -> dict:
    """A start, and an event with the phases of that life, equal on all ranks."""
    return {
        "start": {"event": "start", "generation": generation, "world_size": world}
        | {"time": began + phases["init"], "seconds": phases["init"]},
        "phases": {name: [seconds] * world for name, seconds in phases.items()},
    }


def owned_by(*events: dict) -> dict[str, float]:
    """The rank-seconds that are not 0, by category."""
    owners = Owners()
    for event in events:
        owners.add(event)
        owners.add(event)  # a second time changes nothing
    return {owner: it for owner, it in owners.so_far().items() if it}


def test_a_fault_and_a_stop_between_lives_have_categories():
    """One of three ranks is lost; two continue and are stopped; three begin on another day."""
    one = life(1, 1000.0, 3, init=2.0, step=50.0, wait=8.0)
    two = life(2, 1065.0, 2, init=1.0, redo=4.0, step=15.0)
    three = life(3, 2000.0, 3, init=2.0, step=10.0)
    events = [
        one["start"],
        {"event": "end", "generation": 1, "time": 1066.0, "at": 1061.0, "phases": one["phases"]},
        two["start"],
        {"event": "stop", "generation": 2, "time": 1086.0, "phases": two["phases"]},
        three["start"],
        {"event": "stop", "generation": 3, "time": 2012.0, "phases": three["phases"]},
    ]
    assert owned_by(*events) == {
        "training": 3 * 50 + 2 * 15 + 3 * 10,
        "waiting": 3 * 8,
        "redone": 2 * 4,
        "detection": 3 * 1,
        "recovery": 2 * 4,
        "reload": 2 * 1,
        "start": 3 * 2 + 3 * 2,
        "checkpoint": 2 * 1,
        "stopped": 3 * 914,
    }


def test_goodput_begins_with_the_first_fault():
    """Goodput does not begin with a stop: before a fault it would only show the age of the run."""
    one = life(1, 1000.0, 2, init=2.0, step=8.0)
    two = life(2, 2000.0, 2, init=1.0, step=9.0)
    stop = {"event": "stop", "generation": 1, "time": 1010.0, "phases": one["phases"]}
    end = {"event": "end", "generation": 1, "time": 1066.0, "at": 1010.0, "phases": one["phases"]}
    over = {"event": "stop", "generation": 2, "time": 2010.0, "phases": two["phases"]}
    lives = one["start"], two["start"], over
    assert goodput(owned_by()) is None and goodput(owned_by(one["start"], stop)) is None
    assert goodput(owned_by(lives[0], stop, *lives[1:])) is None
    assert goodput(owned_by(lives[0], end, *lives[1:])) == pytest.approx(17 / 1010)


def test_ranks_that_begin_later_do_not_change_the_sum():
    """The seconds before such a rank begins count as start."""
    start = {"event": "start", "generation": 1, "world_size": 2, "time": 1002.0, "seconds": 2.0}
    phases = {"init": [2.0, 1.5], "step": [10.0, 10.0]}
    stop = {"event": "stop", "generation": 1, "time": 1012.0, "phases": phases}
    assert owned_by(start, stop) == {"training": 20.0, "start": 4.0}


@pytest.mark.parametrize(
    "phases",
    [
        *("x", {"step": 3}, {"step": ["a", "b"]}, {"step": []}, None, {"step": [99.0]}),
        *({"step": [99.0] * 3}, {"step": [math.inf, 1.0]}, {"step": [99.0, -1.0]}),
        {"step": [21.0, 21.0]},  # older ones, by a late writer
    ],
)
def test_impossible_phases_are_ignored(phases):
    """Phases that are written by hand, or by a world of another size, change no sum."""
    one = life(1, 1000.0, 2, init=2.0, step=20.0)
    good = {"event": "checkpoint", "generation": 1, "time": 1022.0, "phases": one["phases"]}
    assert owned_by(one["start"], good, good | {"phases": phases}) == owned_by(one["start"], good)
    assert owned_by({"event": "start", "generation": 1}, good) == {}


ONE = life(1, 1000.0, 2, init=2.0, step=20.0)  # its phases cover the time until 1022
LOST = {"event": "end", "generation": 1, "time": 1041.0, "at": 1030.0, "step": 9}
SURVIVED = LOST | {"phases": ONE["phases"], "since_s": 8.0, "survived": True}
AFTER_A_SURVIVOR = {"training": 40, "detection": 16, "start": 4, "recovery": 20}
DONE = {"training": 56, "start": 4, "recovery": 20}


@pytest.mark.parametrize(
    ("end", "owned"),
    [
        (SURVIVED, AFTER_A_SURVIVOR),
        # lost in its first step: no phases were recorded
        (SURVIVED | {"phases": {}, "since_s": 30}, {"detection": 60, "recovery": 20}),
        (SURVIVED | {"survived": False}, DONE),
        # its clock was an hour ahead, or behind
        (SURVIVED | {"at": 4630.0}, AFTER_A_SURVIVOR),
        (SURVIVED | {"at": -2570.0}, AFTER_A_SURVIVOR),
        # nobody survived: up to its last step in the log
        (LOST | {"phases": ONE["phases"]} | {"survived": False}, DONE),
    ],
)
def test_the_time_before_the_next_life_has_categories(end, owned):
    """A survivor's wait is detection, time without survivors is training; the rest is recovery."""
    assert owned_by(ONE["start"], end, life(2, 1040.0, 2, init=1.0)["start"]) == owned


def test_the_log_of_a_killed_life_counts_no_second_twice():
    """The last phases in a log may be older than those of the last save, or of the world before."""
    save = {"event": "checkpoint", "generation": 1, "step": 7, "phases": ONE["phases"]}
    end = LOST | {"phases": {"step": [12.0] * 2}, "since_s": 18.0, "survived": False}
    assert owned_by(ONE["start"], save, end, life(2, 1040.0, 2, init=1.0)["start"]) == DONE
    away = {"event": "world", "generation": 1, "phases": ONE["phases"], "since_s": 1.0}
    away |= {"time": 1025.0, "at": 1023.0, "step": 9, "world_size": 1}
    end = LOST | {"phases": {"step": [12.0]}, "since_s": 8.0, "survived": False, "at": 1022.0}
    second = life(2, 1040.0, 1, init=1.0)["start"]
    found = owned_by(ONE["start"], away, end, second)
    assert found == {"start": 4, "training": 40, "detection": 2, "recovery": 2 + 15}


def test_steps_lost_twice_count_as_redone():
    """All ranks are killed a second time before the run has got any further."""
    start = ONE["start"] | {"step": 3, "redo": 6}
    end = LOST | {"survived": False, "phases": {"init": [2.0] * 2, "redo": [20.0] * 2}}
    third = life(2, 1040.0, 2, init=1.0)["start"]
    assert owned_by(start, end, third) == {"start": 4, "redone": 2 * 28, "recovery": 20}
    assert owned_by(start, end | {"step": 10}, third)["training"] == 2 * 8


def test_each_world_of_a_life_has_its_own_phases():
    """One of two ranks is lost and comes back; a save from before ends after that."""
    moved = {"event": "world", "generation": 1, "phases": ONE["phases"], "since_s": 1.0}
    away = moved | {"time": 1025.0, "at": 1023.0, "step": 9, "world_size": 1}
    back = away | {"time": 1030.0, "at": 1029.0, "world_size": 2}
    back |= {"phases": {"step": [3.0]}}
    late = {"event": "checkpoint", "generation": 1, "time": 1032.0, "step": 9}
    late |= {"phases": ONE["phases"]}
    soon = back | {"time": 1036.0, "at": 1035.0, "phases": {}, "since_s": 5.0}
    wanted = {"start": 4, "training": 43, "detection": 3, "recovery": 4}
    assert owned_by(ONE["start"], away, back) == wanted
    wanted |= {"detection": 13, "recovery": 6}  # the last world did no step
    assert owned_by(ONE["start"], away, back, late, soon) == wanted


def test_a_job_that_waits_for_another_takes_no_time_of_the_run():
    """Only the 5 s of waiting after the other job's end count, not the 12 s beside that job."""
    killed = LOST | {"phases": ONE["phases"], "since_s": 8.0, "survived": False}
    other = life(2, 1018.0, 2, init=17.0, step=5.0)
    stop = {"event": "stop", "generation": 2, "time": 1040.0, "phases": other["phases"]}
    found = owned_by(ONE["start"], killed, other["start"], stop)
    assert found == {"training": 56 + 10, "start": 4, "reload": 2 * 5}


@pytest.mark.parametrize(
    ("marks", "owner"),
    [({}, "stopped"), ({"source": "memory"}, "recovery"), ({"restarts": 1}, "recovery")],
)
def test_a_stop_of_some_pods_is_no_stop_of_the_job(marks, owner):
    """If the launchers of the earlier life still run, the time is recovery, and not a stop."""
    stop = {"event": "stop", "generation": 1, "time": 1022.0, "phases": ONE["phases"]}
    second = life(2, 1040.0, 2, init=1.0)["start"] | marks
    assert owned_by(ONE["start"], stop, second)[owner] == 2 * 18


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
def test_a_clock_that_jumps_in_a_life_adds_no_second(ahead_s):
    """The last save takes its time by the rank's monotonic clock, not by the time of day."""
    stop = {"event": "stop", "generation": 1, "time": 1023.0 + ahead_s, "since_s": 1.0}
    second = life(2, 1040.0 + ahead_s, 2, init=1.0)["start"]
    owned = owned_by(ONE["start"], stop | {"phases": ONE["phases"]}, second)
    assert owned == {"training": 40, "start": 4, "checkpoint": 2, "stopped": 2 * 17}


def test_a_life_without_an_end_has_the_phases_of_its_own_log(tmp_path):
    """The end has the last phases of its own log, and none if its log has none."""

    def lost(generation: int) -> dict:
        line = {"step": 3, "time": 30.0}
        end = unsaid_end(summary.Summary(life=generation), line, tmp_path)
        assert (end.pop("generation"), end.pop("step"), end.pop("at")) == (generation, 3, 30.0)
        assert end.pop("cause") == UNKNOWN
        return end

    table = {"step": 2, "time": 28.0, "phases": {"step": [9.0]}, "since_s": 0.5}
    lines = [table, {"step": 3, "time": 30.0}]
    (tmp_path / "log.1.jsonl").write_text("".join(json.dumps(it) + "\n" for it in lines))
    assert lost(1) == {"phases": {"step": [9.0]}, "since_s": 2.5, "survived": False}
    assert lost(2) == {"survived": False}
