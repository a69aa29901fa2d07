"""The demo: its model can be exported, and the samples and commands that it prints are right."""

import json
import re
import shlex

import pytest
from click.testing import CliRunner
from support.paths import ROOT
from support.toy import SMALL, training_here

from gptddp import demo, train
from gptddp.cli import cli
from gptddp.config import with_preset
from gptddp.flags import from_args
from gptddp.pretrained.kinds import kind_for
from gptddp.run.directory import SAMPLES


@pytest.fixture(scope="module")
def shown(corpus, tmp_path_factory):
    """The folder that a demo leaves, but with a toy model, and its run directory."""
    folder = tmp_path_factory.mktemp("demo")
    run = folder / "volumes/runs/demo"
    (folder / "volumes").mkdir()
    (folder / "volumes/data").symlink_to(corpus)
    flags = ["--steps", "6", "--eval-every", "1", "--run-dir", str(run)]
    with training_here():
        data = ["--data", str(folder / "volumes/data")]
        assert train.main([*demo.RECIPE, *SMALL, *flags, *data]) == 0
    return folder, run


def test_transformers_has_the_demos_model():
    """The demo's model has a layout for export; else the printed export command would fail."""
    kind_for(with_preset(from_args(demo.RECIPE), accelerator=False))


def test_the_first_a_middle_and_the_last_sample_are_shown(shown, capsys):
    """A few rows of each sample are shown, without control characters."""
    run = shown[1]
    texts = [json.loads(line)["text"] for line in (run / SAMPLES).read_text().splitlines()]
    assert len(texts) == 6
    demo.samples(run)
    out = capsys.readouterr().out
    assert re.findall(r"^step (\d), \d\.\d{3} bits/byte$", out, re.M) == ["1", "4", "6"]
    assert len(out.splitlines()) <= 2 + 3 * (1 + demo.SAMPLE_ROWS)
    with (run / SAMPLES).open("a") as file:
        file.write(json.dumps({"step": 6, "generation": 1, "text": "a\x1b[2Jb\n\n\tc"}) + "\n")
    demo.samples(run)
    assert capsys.readouterr().out.endswith("bits/byte\n  a [2Jb\n   c\n")


def test_the_printed_commands_work(shown, capsys):
    """Sample, report and export run as printed; the flags of the long training are accepted."""
    folder, run = shown
    demo.next_steps(folder, run, folder / "report.html")
    lines = [it for it in capsys.readouterr().out.splitlines() if it.startswith("gptddp ")]
    commands = [shlex.split(line, comments=True)[1:] for line in lines]
    assert [it[0] for it in commands] == ["sample", "report", "checkpoints", "train"]
    for command in commands[:3]:
        result = CliRunner().invoke(cli, command)
        assert result.exit_code == 0, result.output
    about = json.loads((folder / "model/config.json").read_text())
    assert about["architectures"] and (folder / "report.html").stat().st_size > 1000
    assert from_args(commands[3][1:]).depth == 2


def test_the_readme_shows_what_the_demo_prints():
    """The README's headings, words before figures, and training flags are the demo's."""
    shown = (ROOT / "README.md").read_text().split("## The demo")[1].split("```")[1]
    code = (ROOT / "gptddp/demo.py").read_text()
    headings = re.findall(r"^== ([A-Z][^,:\n]*)", shown, re.M)
    results = re.findall(r"^([a-z ]+?)  +", shown, re.M)
    assert len(headings) >= 4 and len(results) >= 4
    for words in (*headings, *results):
        assert re.sub(r"\d+", "{args.replicas}", words) in code, words
    (flags,) = re.findall(r" -- (.*) \.\.\.$", shown, re.M)
    assert shlex.join(demo.RECIPE).startswith(flags)
