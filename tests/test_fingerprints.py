"""`gptddp fingerprints`: two runs' logs, compared step by step."""

import json

import pytest
from click.testing import CliRunner
from support import ledgers

from gptddp.cli import cli
from gptddp.run.progress import fold

CHAIN = [0]  # chain_fp after each step
for number in range(1, 100):
    CHAIN.append(fold(CHAIN[-1], number * 2**40))


def write(run, generation, steps, *, world_size=1, changed=(), chain_changed=()):
    """Write a log of these steps; the steps in `changed` have other rows."""
    run.mkdir(exist_ok=True)
    with open(run / f"log.{generation}.jsonl", "a") as file:
        for step in steps:
            batch, chain = step * 2**40 + (step in changed), CHAIN[step] + (step in chain_changed)
            line = dict(step=step, batch_fp=f"{batch:016x}", chain_fp=f"{chain:016x}")
            file.write(json.dumps(line | {"world_size": world_size}) + "\n")


def fingerprints(*runs):
    result = CliRunner().invoke(cli, ["fingerprints", *map(str, runs)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def test_runs_of_the_same_rows(tmp_path):
    """Equal rows give exit code 0 and the number of steps, whatever the world sizes and lives."""
    write(tmp_path / "a", 1, range(1, 41))
    write(tmp_path / "b", 1, range(1, 21), world_size=4)
    write(tmp_path / "b", 2, range(15, 41), world_size=3)
    result = fingerprints(tmp_path / "a", tmp_path / "b")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        f"same: 40 steps (steps 1 to 40), chain_fp {CHAIN[40]:016x}\n"
        "  only their rows were compared: not both runs used exact sums (see --reduce)\n"
    )


def test_missing_steps_are_named(tmp_path):
    """Only steps in both runs are compared, and the steps that one of them lacks are named."""
    write(tmp_path / "a", 1, range(1, 11))
    write(tmp_path / "b", 1, [*range(1, 5), *range(7, 16)])
    result = fingerprints(tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"same: 8 steps (steps 1 to 4, 7 to 10), chain_fp {CHAIN[10]:016x}",
        "  only their rows were compared: not both runs used exact sums (see --reduce)",
        f"not compared: {tmp_path / 'a'} has not logged steps 11 to 15",
        f"not compared: {tmp_path / 'b'} has not logged steps 5 to 6",
    ]


def test_the_first_difference_is_shown(tmp_path):
    """Different rows give exit code 1, the step, both values, and the life that logged each."""
    write(tmp_path / "a", 1, range(1, 31))
    write(tmp_path / "b", 1, range(1, 21), world_size=4)
    write(tmp_path / "b", 3, range(17, 31), world_size=5, changed=[17, 18, 25])
    result = fingerprints(tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "different: step 17 (16 steps before it are the same)",
        f"  batch_fp {17 * 2**40:016x}  {tmp_path / 'a'}, life 1, world size 1",
        f"  batch_fp {17 * 2**40 + 1:016x}  {tmp_path / 'b'}, life 3, world size 5",
    ]


def test_a_different_chain_alone_points_to_an_earlier_step(tmp_path):
    """If chain_fp differs and batch_fp does not, the rows of a step before the logs differ."""
    write(tmp_path / "a", 1, range(5, 9))
    write(tmp_path / "b", 1, range(5, 9), chain_changed=range(5, 9))
    result = fingerprints(tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 1
    assert f"  chain_fp {CHAIN[5] + 1:016x}  {tmp_path / 'b'}, life 1" in result.stdout
    assert "the rows of an earlier step differ" in result.stdout


def exact(run, *, reduce="exact", **changes):
    """Write a run of eight steps with losses and two states; `changes` apply from step 5 on."""
    write(run, 1, range(1, 9))
    ledgers.begun(run, {"reduce": reduce})
    log = run / "log.1.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        line |= {"loss": 1 / line["step"], "grad_norm": 0.5}
        if line["step"] % 4 == 0:
            line |= {"state_fp": f"{line['step']:016x}", "val_loss": 2 / line["step"]}
        line |= {k: v for k, v in changes.items() if line["step"] >= 5 and k in line}
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_runs_of_the_same_bits(tmp_path):
    """For two runs with exact sums, losses and states are compared, and the states are counted."""
    exact(tmp_path / "a")
    exact(tmp_path / "b")
    result = fingerprints(tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 0 and result.stdout.splitlines()[1] == (
        "  and their losses, and their states after 2 of the steps, state_fp 0000000000000008 at "
        "step 8"
    )


@pytest.mark.parametrize(
    ("field", "value", "step"),
    [
        ("loss", 0.2000001, 5),
        ("loss", None, 5),  # a skipped step
        ("grad_norm", 0.5000001, 5),
        ("val_loss", 0.2500001, 8),
        ("state_fp", "f" * 16, 8),
        ("state_fp", None, None),
    ],
)
def test_the_first_number_or_state_that_differs_is_shown(tmp_path, field, value, step):
    """With equal rows, the first different value is shown. A value that one run lacks is no
    difference. If the sums of one run are not exact, only rows are compared."""
    exact(tmp_path / "a")
    exact(tmp_path / "b", **{field: value})
    result = fingerprints(tmp_path / "a", tmp_path / "b")
    assert result.exit_code == (1 if step else 0)
    if not step:
        return
    first, one, other, last = result.stdout.splitlines()
    assert first == f"different: step {step} ({step - 1} steps before it are the same)"
    assert one.startswith(f"  {field} ") and other.startswith(f"  {field} {value}")
    assert last == "  the rows are the same"
    for run, rate in (("a", 1e-3), ("b", 2e-3)):
        ledgers.begun(tmp_path / run, {"reduce": "exact", "seed": 1, "lr": rate})
    lines = fingerprints(tmp_path / "a", tmp_path / "b").stdout.splitlines()
    assert lines[4:] == ["  the runs differ in lr: 0.001 -> 0.002"]
    exact(tmp_path / "fast", reduce="fast", **{field: value})
    result = fingerprints(tmp_path / "a", tmp_path / "fast")
    assert result.exit_code == 0 and "only their rows were compared" in result.stdout


@pytest.mark.parametrize(
    ("steps", "line", "message"),
    [
        (None, "", "is not a run directory"),
        ([], "", "has no logged step yet"),
        ([3], '{"step": 4, "chain_fp": "0000000000000000"}', "step 4: batch_fp is None instead of"),
        ([3], '{"step": 4, "batch_fp": 7}', "log.1.jsonl, step 4: batch_fp is 7 instead of"),
        ([77], "", "no step is in both logs: "),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(tmp_path, steps, line, message):
    """The exit code is 2, with the reason: without a compared step, `same` would be wrong."""
    write(tmp_path / "a", 1, range(1, 9))
    if steps is not None:
        write(tmp_path / "b", 1, steps)
        with open(tmp_path / "b/log.1.jsonl", "a") as file:
            file.write(line + "\n")
    for runs in (("a", "b"), ("b", "a")):
        result = fingerprints(*(tmp_path / name for name in runs))
        assert result.exit_code == 2 and message in result.stderr and result.stdout == ""
