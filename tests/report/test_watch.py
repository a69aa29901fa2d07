"""`gptddp report --watch` writes the page again and again while its runs are running."""

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
    """The watch of a live run; each argument is called in place of one pause."""
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


def test_a_page_is_written_until_the_run_has_ended(watched):
    """The watch continues between two lives; the last page does not reload itself."""
    pages = watched(watched.lose, watched.go_on, watched.stop)
    states = [
        next(it for it in ("running", "lost", "finished") if f">{it}<" in text) for text in pages
    ]
    assert states == ["running", "lost", "running", "finished"]
    assert [LOADS in it for it in pages] == [True, True, True, False]


def test_a_run_that_stays_lost_ends_the_watch(watched, monkeypatch):
    """The watch ends after the time that a restart may take."""
    monkeypatch.setattr(page, "PATIENCE_S", 0.0)
    assert LOADS not in watched(watched.lose)[-1]


def test_ctrl_c_leaves_a_page_that_does_not_reload(watched):
    """Ctrl-C ends the watch with exit code 0; the page that remains does not reload itself."""

    def interrupt():
        raise KeyboardInterrupt

    assert [LOADS in it for it in watched(interrupt)] == [True, False]
