"""Ledger, checkpoints, audit and report name the code that computed each step."""

import logging
from types import SimpleNamespace

import pytest
from support.audits import audit, trained

from gptddp.checkpoint import store
from gptddp.report import happenings
from gptddp.run import summary
from gptddp.run.code_of_steps import made_by
from gptddp.run.history import read_ledger

A, B = "a" * 64, "b" * 64


@pytest.mark.usefixtures("train_here")
def test_the_code_of_each_step_is_recorded(corpus, tmp_path, monkeypatch, caplog):
    """After two own codes and then none, each start, checkpoint and change has its code."""
    caplog.set_level(logging.INFO)
    run = tmp_path / "run"
    for steps, code in (("2", A), ("3", A), ("5", B), ("7", None)):
        monkeypatch.delenv("GPTDDP_CODE", raising=False)
        if code:
            monkeypatch.setenv("GPTDDP_CODE", code)
        trained(corpus, run, "--steps", steps)
    events = read_ledger(run)
    starts = [event for event in events if event["event"] == "start"]
    assert [event.get("code") for event in starts] == [A, A, B, None]
    assert all(event["version"] for event in starts)
    changed = [e for e in events if e["event"] == "changed" and e["field"] == "code"]
    assert [(e["step"], e["old"], e["new"]) for e in changed] == [(3, A, B), (5, B, None)]
    assert (
        "changed after step 3: code: own code aaaaaaaaaaaa -> own code bbbbbbbbbbbb" in caplog.text
    )
    assert "changed after step 5: code: own code bbbbbbbbbbbb -> the installed code" in caplog.text
    made = {store.order(it)[1]: store.unsealed(run / "checkpoints" / it) for it in store.names(run)}
    assert {3, 5, 7} <= made.keys()
    for step, manifest in made.items():
        assert manifest.get("code") == (A if step <= 3 else B if step <= 5 else None)
    assert summary.read(run).code is None

    code, text = audit(run, "--whole")
    assert code == 0  # all codes are the same program under other names
    for line in ("own code aaaaaaaaaaaa: steps 1 to 3", "own code bbbbbbbbbbbb: steps 4 to 5"):
        assert f"made by: {line}" in text
    assert "made by: the installed code: steps 6 to 7" in text
    notes = happenings.others(SimpleNamespace(skipped=[], events=events))
    assert (3, "code: own code aaaaaaaaaaaa -> own code bbbbbbbbbbbb") in notes


def test_a_run_without_own_code_lists_no_code():
    """A ledger that lacks a start lists no code either."""
    assert made_by({1: 1, 2: 2}, {1: None}) == []
    assert made_by({1: 1, 2: 1, 3: 2}, {2: A}) == [
        "the installed code: steps 1 to 2",
        "own code aaaaaaaaaaaa: steps 3 to 3",
    ]
