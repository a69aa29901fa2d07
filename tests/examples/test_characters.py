"""examples/characters.py: dropout and scaled gradients over a kill, clipping, sampling."""

import shutil

import pytest
import torch
from support.example_runs import AT_CALL, EXAMPLES, bits, run, state
from support.paths import ROOT

FLAGS = ("--epochs", "2", "--save-every", "2", "--batch-size", "3", "--precision", "fp16")
TO_STDERR = "sys.stdout = sys.stderr\n"
SCALE = """
import functools
torch.amp.GradScaler = functools.partial(torch.amp.GradScaler, init_scale=1024.0, growth_interval=3)
"""


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Flags with a text of 15 rows for each of two ranks, which is 5 steps an epoch."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text((ROOT / "LICENSE").read_text()[:2200])
    return (*FLAGS, "--text", str(text))


@pytest.fixture(scope="module")
def undisturbed(flags, tmp_path_factory):
    """The folder of an undisturbed run of two ranks in fp16."""
    folder = tmp_path_factory.mktemp("characters")
    codes, said = run(2, "characters", *flags, "--folder", str(folder), harm=SCALE)
    assert codes == [0, 0], said
    return folder


def test_dropout_and_scale_continue_after_a_kill(undisturbed, flags, tmp_path):
    """After a SIGKILL within an epoch, parameters, moments, the scale of fp16 and each rank's own
    random numbers have the bits of an undisturbed run."""
    flags = (*flags, "--folder", str(tmp_path))
    dying = AT_CALL.format(method="torch.amp.GradScaler.update", n=8) + SCALE
    codes, _ = run(2, "characters", *flags, harm=dying)
    assert codes[1] == -9 and codes[0] not in (0, -9)
    codes, said = run(2, "characters", *flags, harm=SCALE)
    assert codes == [0, 0] and "continues in epoch 1, after 6 rows" in said[0]
    found, expected = bits(state(tmp_path)), bits(state(undisturbed))
    assert found == expected
    assert expected["scaler"]["scale"] == 1024 * 2**3  # it has grown
    first, second = (own["random"]["cpu"] for own in expected["owns"])
    assert first != second


def test_gradients_are_unscaled_before_they_are_clipped(flags, tmp_path, monkeypatch):
    """The optimizer gets fp16 gradients whose norm is the limit, to a thousandth."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    import characters
    import ddp

    monkeypatch.setattr(characters, "CLIP", 0.01)
    seen = []
    with ddp.connected("cpu") as world:
        args = characters.parse([*flags, "--folder", str(tmp_path)])
        job = characters.Training(args, world)
        parameters = list(job.model.parameters())
        job.optimizer.register_step_pre_hook(
            lambda *_: seen.append(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
        )
        job.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        ids, targets = zip(*(job.train[n] for n in range(4)), strict=True)
        norm = job.train_step(torch.stack(ids), torch.stack(targets))
    assert norm > 0.1
    assert [float(norm) for norm in seen] == [pytest.approx(0.01, rel=1e-3)]


def test_one_process_samples_from_a_snapshot_of_two_ranks(undisturbed, flags, tmp_path):
    """One process reads the snapshot of two; an unknown character or no snapshot is refused."""
    shutil.copytree(undisturbed, tmp_path / "run")
    there = (*flags, "--folder", str(tmp_path / "run"))
    codes, said = run(1, "characters", *there, "--sample", "License", harm=TO_STDERR)
    assert codes == [0] and len(said[0].partition("\nLicense")[2]) > 200
    codes, said = run(1, "characters", *there, "--sample", "é")
    assert codes == [1] and "has no 'é'" in said[0]
    codes, said = run(1, "characters", *flags, "--folder", str(tmp_path), "--sample", "L")
    assert codes == [1] and "has no snapshot" in said[0]
