"""examples/digits.py: after kills, on separate disks, and at other world sizes."""

import csv
import re
import shutil

import pytest
import torch
from support.example_runs import (
    AT_CALL,
    BEHIND_EPOCH,
    EXAMPLES,
    WHILE_WRITING,
    bits,
    run,
    state,
    succeed,
)

FLAGS = ("--epochs", "3", "--batch-size", "90", "--save-every", "3")  # 8 steps an epoch
SHORT = ("--epochs", "1", *FLAGS[2:])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(folder, the output of each rank) of an undisturbed run of two ranks."""
    folder = tmp_path_factory.mktemp("digits")
    return folder, succeed(2, "digits", *FLAGS, "--folder", str(folder))


@pytest.mark.parametrize(
    ("harm", "goes_on"),
    [
        (BEHIND_EPOCH.format(n=1), "in epoch 1, after 0 samples"),
        (AT_CALL.format(method="torch.optim.SGD.step", n=13), "in epoch 1, after 720 samples"),
        (WHILE_WRITING.format(n=4), "in epoch 0, after 1080 samples"),
    ],
    ids=["between epochs", "within an epoch", "while the snapshot is written"],
)
def test_a_killed_run_continues_at_the_same_step(undisturbed, tmp_path, harm, goes_on):
    """After a SIGKILL and a second start, the last snapshot has the bits of an undisturbed run."""
    flags = (*FLAGS, "--folder", str(tmp_path))
    codes, _ = run(2, "digits", *flags, harm=harm)
    assert -9 in codes and 0 not in codes  # the other rank has noticed the kill, and ended
    said = succeed(2, "digits", *flags)
    assert f"continues {goes_on}" in said[0]
    assert bits(state(tmp_path)) == bits(state(undisturbed[0]))
    with (tmp_path / "results.csv").open() as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1", "2"]


@pytest.mark.parametrize(("rank", "torn"), [(0, False), (1, True)])
def test_a_snapshot_that_one_rank_lacks_is_sent_by_the_other(undisturbed, tmp_path, rank, torn):
    """With separate disks, all ranks continue in the same epoch, whichever rank has the file."""
    whole = undisturbed[0] / "snapshot.pt"
    for number in (0, 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        if number != rank:
            shutil.copy(whole, folder)
        elif torn:
            (folder / "snapshot.pt").write_bytes(whole.read_bytes()[:5000])
    own = "sys.argv += ['--folder', os.environ['RANK']]\n"
    harm = f"os.chdir({str(tmp_path)!r})\n" + own
    codes, (said, _) = run(2, "digits", *FLAGS, harm=harm)
    assert codes == [0, 0]
    assert "continues in epoch 3, after 0 samples" in said and "epoch 0 " not in said
    assert ("is damaged" in said) == torn
    # rank 0 also writes the results of the run to its disk
    assert (tmp_path / "0/best.pt").read_bytes() == (undisturbed[0] / "best.pt").read_bytes()
    assert len((tmp_path / "0/results.csv").read_text().splitlines()) == 4


@pytest.mark.parametrize("torn", [True, False])
def test_a_file_that_is_no_snapshot_is_refused_by_all_ranks(undisturbed, tmp_path, torn):
    """A torn snapshot, or a model that was saved under its name, is not overwritten; the message
    names the file and the fix."""
    content = b"PK\3\4 torn" if torn else (undisturbed[0] / "best.pt").read_bytes()
    (tmp_path / "snapshot.pt").write_bytes(content)
    codes, said = run(2, "digits", *SHORT, "--folder", str(tmp_path))
    what = "snapshot.pt is damaged" if torn else "or no snapshot (KeyError)"
    assert codes == [1, 1] and all(what in text and "remove it" in text for text in said)


def test_nodes_with_different_flags_are_refused_at_the_start(tmp_path):
    """Both ranks end with the name of the flag: with fewer epochs, one would leave the other."""
    own = "sys.argv += ['--epochs', str(2 + int(os.environ['RANK']))]\n"
    codes, said = run(2, "digits", "--folder", str(tmp_path), harm=own)
    assert codes == [1, 1] and not list(tmp_path.iterdir())
    assert all("--epochs is 2 for rank 0, but 3 for rank 1" in text for text in said)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--lr", "0"), 2, "--lr is 0.0: it must be > 0 and finite"),
        (("--lr", "nan"), 2, "--lr is nan"),
        (("--seed", "-1"), 2, "--seed is -1: it must be >= 0"),
        (("--save-every", "0"), 2, "--save-every is 0: it must be >= 1"),
        (("--lr", "1e30"), 1, "the gradients are not finite; lower --lr"),
        (("--folder", "/dev/null/run", "--save-every", "1"), 1, "cannot be written"),
    ],
)
def test_impossible_flags_give_one_line_error(tmp_path, flags, code, message):
    """The line has the value and the rule, without a traceback; all saved weights are finite."""
    where = () if "--folder" in flags else ("--folder", str(tmp_path))
    codes, said = run(1, "digits", *where, *flags)
    assert codes == [code] and message in said[0] and "Traceback" not in said[0]
    for name, tensor in state(tmp_path)["model"].items() if list(tmp_path.iterdir()) else ():
        assert tensor.isfinite().all(), name


def test_ctrl_c_is_no_error_and_the_run_continues(tmp_path):
    """Ctrl-C gives one line and exit code 130, without a traceback; the same command continues."""
    stop = AT_CALL.format(method="torch.optim.SGD.step", n=5)
    stop = stop.replace("SIGKILL", "SIGINT").replace('os.environ["RANK"] == "1"', "True")
    own = "signal.signal(signal.SIGINT, signal.default_int_handler)\n" + stop
    codes, said = run(1, "digits", *SHORT, "--folder", str(tmp_path), harm=own)
    assert codes == [130] and "the same command continues" in said[0] and "Traceback" not in said[0]
    assert (
        "continues in epoch 0, after 270 samples"
        in succeed(1, "digits", *SHORT, "--folder", str(tmp_path))[0]
    )


def test_a_run_with_another_seed_is_refused(undisturbed, tmp_path):
    """Another seed means another split: the model would be tested on its own training images."""
    shutil.copytree(undisturbed[0], tmp_path / "run")
    codes, said = run(1, "digits", "--folder", str(tmp_path / "run"), "--seed", "9")
    assert codes == [1] and "seed is 9" in said[0] and "has 1" in said[0]


def test_any_number_of_ranks_tests_each_image_once(undisturbed, tmp_path):
    """Worlds of 1, 2 and 3 ranks test 359 images each, and get the same loss but for rounding."""
    texts, found = [undisturbed[1][0]], []
    for world in (1, 3):
        folder = tmp_path / str(world)
        shutil.copytree(undisturbed[0], folder)
        texts.append(succeed(world, "digits", *FLAGS, "--folder", str(folder))[0])
    for said in texts:
        loss, accuracy, tested = re.search(
            r"in the end  test loss (\S+)  accuracy (\S+) of (\d+)", said
        ).groups()
        found.append((float(loss), accuracy, tested))
    assert {(accuracy, tested) for _, accuracy, tested in found} == {(found[0][1], "359")}
    assert max(loss for loss, *_ in found) - min(loss for loss, *_ in found) < 2e-4


def test_the_best_checkpoint_is_the_best_over_all_ranks(undisturbed, monkeypatch):
    """It loads without `module.` in its names, and one process measures what results.csv has."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from digit_images import build, datasets

    model = build()
    model.load_state_dict(torch.load(undisturbed[0] / "best.pt", weights_only=True))
    images, labels = map(torch.stack, zip(*((i, y) for i, y in datasets(1)[1]), strict=True))
    logits = model.eval()(images)
    accuracy = (logits.argmax(1) == labels).double().mean()
    loss = torch.nn.functional.cross_entropy(logits, labels)
    with (undisturbed[0] / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    best = max(rows, key=lambda row: float(row["test_accuracy"]))
    assert float(accuracy) == float(best["test_accuracy"]) > 0.9
    assert float(loss.detach()) == pytest.approx(float(best["test_loss"]), rel=1e-5)
    assert [row["lr"] for row in rows] == ["0.05"] * 3


def test_a_run_continues_at_another_world_size(tmp_path):
    """Three ranks are killed within an epoch; one continues after the samples of all three."""
    flags = (*SHORT, "--folder", str(tmp_path))
    run(3, "digits", *flags, harm=AT_CALL.format(method="torch.optim.SGD.step", n=5))
    said = succeed(1, "digits", *flags)
    assert "world size 3 before, now 1" in said[0] and "after 810 samples" in said[0]
    rows = state(tmp_path)["rows"]
    assert len(rows) == 1 and rows[0]["tested"] == 359


@pytest.fixture
def ddp(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import ddp

    return ddp


def test_an_epoch_has_each_sample_once_in_its_own_order(ddp):
    """Three ranks get 99 of 100 samples once; an epoch that is resumed has the remaining ones."""
    import samplers

    def epoch(number, done=0):
        found = []
        for rank in range(3):
            world = ddp.World(rank, rank, 3, torch.device("cpu"))
            sampler = samplers.TrainSampler(range(100), world, seed=1)
            sampler.begin(number, done)
            found.append(list(sampler))
            assert len(sampler) == len(found[-1])
        return found

    first, second = epoch(0), epoch(1)
    assert len(set(sum(first, []))) == len(sum(first, [])) == 99
    assert first != second
    assert epoch(0, done=30) == [share[10:] for share in first]
    # 31 samples were done at another world size: the 31st is not repeated
    assert epoch(0, done=31) == [share[11:] for share in first]


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, (0, 0, 1)),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, (3, 1, 4)),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}, (3, 1, 4)),
    ],
    ids=["alone", "torchrun", "srun"],
)
def test_ranks_come_from_torchrun_or_srun(ddp, env, found):
    """A command in a shell of Slurm is one process; incomplete variables are refused."""
    meet = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert ddp.ranks(env | meet) == found
    if "SLURM_PROCID" in env:
        assert ddp.ranks(env) == (0, 0, 1)
        with pytest.raises(SystemExit, match="4 tasks of srun, but no MASTER_ADDR"):
            ddp.ranks(env | {"SLURM_STEP_NUM_TASKS": "4"})
    elif env:
        with pytest.raises(SystemExit, match="LOCAL_RANK"):
            ddp.ranks({"RANK": "3"})
