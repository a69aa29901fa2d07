"""Rank 0's log lines are parsed: every number is read, and outdated numbers are dropped."""

from support.rank_0_lines import ORIGIN, done, heard

from gptddp.k8s.observe.rank_0_log import progress, rows
from gptddp.training.console import Console


def test_rank_0s_lines_are_read_back(logged):
    """`progress` finds every number in rank 0's log lines, and drops outdated ones."""
    found = progress(logged)
    assert found["progress"] == {
        "step": 120,
        "steps": 400,
        "loss": 2.0,
        "tok_s": 44000.0,
        "left_s": 280,
        "ranks": 4,
        "goodput": 0.974,
        "slow": [{"name": "rank 3 (demo-worker-3)", "ratio": 2.1}],
    }
    about = {"step": 121, "seconds": 12, "text": "rank 3 (demo-worker-3) gives no sign of life"}
    assert found["stall"] == about
    assert (found["fault"]["life"], found["fault"]["step"]) == (1, 99)
    assert found["fault"]["cause"].startswith("rank 2 (demo-worker-2) has not answered")
    assert progress([*logged, "step 121 has moved, after 30 s"])["stall"] is None
    assert progress([*logged, logged[-2]])["stall"] is None
    launcher = ["gptddp.launch: step 7 has not moved for 15 s: rank 0 (a) is stopped (SIGSTOP)"]
    assert progress(launcher)["stall"]["text"] == "rank 0 (a) is stopped (SIGSTOP)"
    shown = rows(found)
    assert shown["slow"] == "rank 3 (demo-worker-3) 2.1 times the median"
    assert shown["goodput"] == "97.4 %"
    assert shown["last fault"].startswith("life 1, after step 99: ")


def test_a_line_of_version_0_1_0_gives_step_loss_and_speed():
    """An older image writes ETA and goodput in another form, which is ignored."""
    line = "step 110/400  loss 2.0000  lr 1.00e-03  44.0k tok/s  4 ranks  4:40 left  goodput 97%"
    found = progress([line])["progress"]
    assert (found["step"], found["loss"], found["tok_s"]) == (110, 2.0, 44000.0)
    assert found["left_s"] is None and found["goodput"] is None


def test_a_fault_names_one_step():
    """`last fault` names the step after which the life ended, and no other step."""
    with heard() as lines:
        cause = "after step 100: rank 2 (demo-worker-2) is lost"
        Console(ORIGIN)({"event": "end", "generation": 1, "step": 136, "cause": cause})
    shown = rows(progress(lines))["last fault"]
    assert shown == "life 1, after step 136: rank 2 (demo-worker-2) is lost"


def test_a_slow_rank_is_named_at_once_and_only_while_it_is_slow(logged):
    """It is named before the next step line, until it is fast again or a new life begins."""

    def slow(lines):
        return {it["name"]: it["ratio"] for it in progress(lines)["progress"]["slow"]}

    logged = logged[:3]  # up to step 100; no rank is slow
    console = Console(ORIGIN)
    with heard() as lines:
        console({"event": "slow", "step": 105, "name": "rank 3 (demo-worker-3)", "ratio": 2.13})
        console({"event": "slow", "step": 106, "name": "rank 1", "ratio": 1.5})
        console({"event": "slow_end", "step": 171, "name": "rank 3 (demo-worker-3)"})
    assert slow(logged) == {}
    assert slow([*logged, *lines[:2]]) == {"rank 3 (demo-worker-3)": 2.1, "rank 1": 1.5}
    assert slow([*logged, *lines]) == {"rank 1": 1.5}
    assert slow([*logged, *lines, "life 3: from memory, step 171 of 400"]) == {}
    assert slow([*logged, *lines, logged[-1]]) == {}  # the next line of a step names the slow ranks


def test_a_checkpoint_is_shown_until_the_run_continues():
    """Later checkpoints have no log line, so the named one is not the newest any more."""
    begun = "life 2: from step-000000000100.1, step 100 of 400"
    step = "step 110/400  loss 2.0000  lr 1.00e-03  44.0 k tok/s  4 ranks  ETA 4 min 40 s"
    assert progress([begun])["checkpoint"] == "step-000000000100.1"
    assert progress([begun, step])["checkpoint"] is None
    saved = "stopped after step 113: checkpoint step-000000000113.2 is saved"
    assert progress([begun, step, saved])["checkpoint"] == "step-000000000113.2"


def test_the_last_step_of_a_life_is_always_logged():
    """The last step is logged once, also if it is no multiple of `log_every`."""
    for last in (110, 113):
        console = Console(ORIGIN)
        with heard() as lines:
            for step in range(108, last + 1):
                console(done(step))
            ended = {"event": "ended", "step": last, "cause": "stopped", "results": None}
            console({**ended, "where": "checkpoint step-x is saved"})
        assert progress(lines)["progress"]["step"] == last
        assert sum(f"step {last}/400" in line for line in lines) == 1


def test_the_first_step_of_a_life_has_a_line_and_no_eta():
    """`status` shows the first step at once; its time includes compilation, so it gives no ETA."""
    console = Console(ORIGIN)
    with heard() as lines:
        console(done(3, step_s=90.0))
        found = progress(["[2.1 s] the first step", *lines])
        console(done(4))
        console(done(10))
    assert len(lines) == 2
    assert found["phase"] is None and found["progress"]["step"] == 3
    assert found["progress"]["left_s"] is None
    assert progress(lines)["progress"]["left_s"] == 390


def test_a_storage_failure_is_shown_until_storage_works_again():
    """A storage failure is shown also if the log line with the reason is too old to be read."""
    console, text = Console(ORIGIN), "[Errno 28] No space left on device: 'log.1.jsonl'"
    with heard() as lines:
        console({"event": "storage", "fails": True, "trouble": text})
        console(done(100, slow={"rank 1": 1.5}, owned={"training": 9.0}))
        console({"event": "storage", "fails": False, "trouble": None})
    text += "; training continues, and retries"
    found = progress(lines[:2])
    assert found["storage"] == rows(found)["storage"] == text
    assert found["progress"]["slow"] == [{"name": "rank 1", "ratio": 1.5}]
    assert progress(lines[1:2])["storage"] == "it fails: the pod's log says how"
    assert progress(lines)["storage"] is None
    assert progress([*lines[:2], "life 3: from memory, step 100 of 400"])["storage"] is None


def test_values_of_the_previous_world_are_not_shown():
    """After a loss, neither the phase of forming a world nor the old speed and ETA are shown."""
    step = "step 130/400  loss 3.1002  lr 9.90e-04  44.0 k tok/s  4 ranks  ETA 1 min 20 s"
    lost = "step 134: lost rank 2 (demo-worker-2): it hangs; 3 ranks go on after 0.4 s"
    found = progress([step, "[9.5 s] forming another world"])
    assert found["phase"] == "forming another world" and found["progress"]["left_s"] == 80
    found = progress([step, "[9.5 s] forming another world", lost])
    assert found["phase"] is found["progress"]["left_s"] is found["progress"]["tok_s"] is None
