"""The script of a worker process, where the trainer cannot even be imported."""

import json
import sys

import pytest

import gptddp
from gptddp.launch import worker_script


def test_a_trainer_that_cannot_be_imported_ends_the_job_in_its_third_life(
    tmp_path, monkeypatch, capsys
):
    """Exit code 5 with the error, as for any other of own code; torchrun would try it for ever."""
    monkeypatch.setenv("GPTDDP_VERDICT", str(tmp_path / "verdict.json"))
    monkeypatch.setenv("POD_NAME", "demo-worker-0")
    monkeypatch.delattr(gptddp, "train", raising=False)
    monkeypatch.setitem(sys.modules, "gptddp.train", None)
    for life in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(life))
        with pytest.raises(ImportError):  # which `run` prints
            worker_script.main()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert worker_script.main() == 5
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["code"] == 5 and verdict["rank"] == 0
    assert "failed in 3 lives" in verdict["message"] and "gptddp.train" in verdict["message"]
    assert "Traceback" in capsys.readouterr().err
