"""The sentences of a page are true, even if files are lost or damaged."""

import json

from support.report_pages import Text, draw, figures, points, table, write


def change(file, fields, **match):
    """Set `fields` in the lines of a log or ledger that match other fields."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if all(line.get(name) == it for name, it in match.items()):
            line |= fields
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def said(page):
    return " ".join(Text(page).text.split())


def test_a_run_without_its_ledger_is_drawn_from_its_log(tmp_path, written):
    """All losses are drawn. A message with the fix says that lives and seconds are unknown."""
    (written / "ledger.jsonl").unlink()
    page = draw(written, out=tmp_path / "report.html")
    assert len(points(figures(page)["loss"], "training")) == 60
    assert "ledger.jsonl has no life" in said(page) and "from a backup" in said(page)


def test_a_lost_log_does_not_undo_steps(tmp_path, written):
    """The page takes the last step from the ledger."""
    for log in written.glob("log.*"):
        log.unlink()
    assert "Finished after step 60, 60.0 k tokens" in said(draw(written, out=tmp_path / "a.html"))
    change(written / "ledger.jsonl", {"cause": "stopped"}, event="stop")
    assert "Stopped after step 60/60" in said(draw(written, out=tmp_path / "b.html"))


def test_invalid_numbers_affect_only_their_own_place(tmp_path, written):
    """An integer of 400 digits, NaN seconds, a billion ranks and a far future time are tried."""
    change(written / "log.1.jsonl", {"grad_norm": 10**400, "loss": float("inf")}, step=4)
    change(written / "log.3.jsonl", {"tokens": 10**400, "train_s": float("nan")}, step=60)
    ledger = written / "ledger.jsonl"
    change(ledger, {"at": float("nan")}, event="end", generation=1)
    change(ledger, {"at": 10**400}, event="end", generation=2)
    change(ledger, {"time": 1e300}, event="stop")
    for lives in ({"generation": 3}, {}):
        change(ledger, {"world_size": 10**9}, event="start", **lives)
        page = draw(written, out=tmp_path / "report.html")
    assert points(figures(page)["grad_norm"])[4] is None and "Finished after step 60" in said(page)
    assert max(map(len, said(page).split())) < 100


def test_pods_that_join_and_leave_are_no_fault(tmp_path, written):
    """A life that its launcher stopped is no fault; one that ended with an error of Gloo is."""
    raw = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:6029"
    change(written / "ledger.jsonl", {"cause": raw}, event="end", generation=2)
    change(written / "ledger.jsonl", {"event": "stop", "cause": "stopped"}, event="end",
           generation=1)  # fmt: skip
    page = draw(written, out=tmp_path / "report.html")
    assert "Faults interrupted it once, which took 8.5 s; no step was lost" in said(page)
    assert "pods joined or left once, which took 5.0 s" in said(page)
    ends = [row[5] for row in table(page, "Lives and restarts")[1:]]
    assert ends[0] == "stopped by its launcher: pods joined or left"
    assert ends[1] == f"another rank was lost: {raw}"


def test_a_stop_is_not_called_recovery(tmp_path):
    """The time in which no pod was wanted is `stopped`, and the rest of the gap `recovery`."""
    run = write(tmp_path / "run", 60, lives=3, stop_s=600.0)
    page = draw(run, out=tmp_path / "report.html")
    splits = [row[7] for row in table(page, "Lives and restarts")[2:]]
    assert "stopped 10 min" in splits[0] and "recovery 3.5 s" in splits[1]


def test_losses_of_two_datasets_are_compared_with_a_warning(tmp_path, written):
    """A loss depends on the tokens; runs of one dataset give no warning. The ledger names the
    dataset; the copy of dataset.json does not count."""
    other = write(tmp_path / "other", 20)
    change(written / "ledger.jsonl", {"dataset": "a"}, event="start")
    for of_other, told in (("a", False), ("b", True)):
        change(other / "ledger.jsonl", {"dataset": of_other}, event="start")
        (other / "dataset.json").write_text('{"sha256": "another"}')
        page = draw(written, other, out=tmp_path / "report.html")
        assert ("losses (nats a token) cannot be compared" in said(page)) == told


def test_the_page_has_at_most_a_dozen_samples(tmp_path, written):
    """Each is from the newest life of its step, up to the last step; invalid lines are skipped."""
    draw(written, out=tmp_path / "report.html")
    rows = [{"step": 3 * i, "generation": 1, "text": f"text {i}\n<b>"} for i in range(1, 31)]
    rows += [{"step": 90, "generation": 2, "text": "the newest"}, {"step": "x"}, {"text": "y"}]
    lines = "".join(json.dumps(it) + "\n" for it in rows)
    (written / "samples.jsonl").write_text(lines + '{"step": 93, "gen')
    page = draw(written, out=tmp_path / "report.html")
    head, *found = table(page, "Samples")
    assert head == ["step", "text"] and 5 < len(found) <= 12
    assert found[0] == ["9", "text 3\n<b>"] and found[-1] == ["90", "the newest"]
    steps = [int(row[0]) for row in found]
    assert steps == sorted(set(steps))
    (written / "samples.jsonl").unlink()
    assert "Samples" not in said(draw(written, out=tmp_path / "report.html"))
