"""`gptddp report --watch`: a page that is made anew while its runs go on."""

import json

import pytest
from click.testing import CliRunner
from support.report_pages import write

from gptddp.cli import cli
from gptddp.report import page
from gptddp.run.lease_file import lease_of

LOADS = "<body data-every="


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A run that goes on; the watch, with what is to happen instead of each pause."""
    run, out = write(tmp_path / "run", 20), tmp_path / "report.html"
    ledger = (run / "ledger.jsonl").read_text()
    (run / "ledger.jsonl").write_text(ledger.splitlines(keepends=True)[0])
    lease = json.dumps(lease_of("a", "life") | {"space": "other"})
    (run / "lease.json").write_text(lease)

    def watch(*pauses):
        left, seen = list(pauses), []

        def sleep(seconds):
            assert 1 < seconds < 60
            seen.append(out.read_text())
            left.pop(0)()

        monkeypatch.setattr(page.time, "sleep", sleep)
        result = CliRunner().invoke(cli, ["report", str(run), "--watch", "--out", str(out)])
        assert result.exit_code == 0, result.output
        assert result.stdout == f"{out}\n" and not left
        return [*seen, out.read_text()]

    watch.stop = lambda: (run / "ledger.jsonl").write_text(ledger)
    watch.lose = lambda: (run / "lease.json").unlink()
    watch.go_on = lambda: (run / "lease.json").write_text(lease)
    return watch


def test_a_page_is_made_anew_until_the_run_has_ended(watched):
    """Between two lives of a run the watch goes on; the last page does not load itself."""
    pages = watched(watched.lose, watched.go_on, watched.stop)
    states = [
        next(it for it in ("running", "lost", "finished") if f">{it}<" in text) for text in pages
    ]
    assert states == ["running", "lost", "running", "finished"]
    assert [LOADS in it for it in pages] == [True, True, True, False]


def test_a_run_that_stays_lost_ends_the_watch(watched, monkeypatch):
    """After as long as a run may take to start again."""
    monkeypatch.setattr(page, "PATIENCE_S", 0.0)
    assert LOADS not in watched(watched.lose)[-1]


def test_ctrl_c_leaves_a_page_that_stays_as_it_is(watched):
    """With exit code 0."""

    def interrupt():
        raise KeyboardInterrupt

    assert [LOADS in it for it in watched(interrupt)] == [True, False]
