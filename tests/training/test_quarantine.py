"""Unreadable row groups under `on_bad=quarantine`: the same rows at any world size."""

import numpy as np
import pytest
from support.loaders import LANES, Dataset, corpus, open_loader
from support.quarantined_run import Run

from gptddp.data import blocks
from gptddp.data.loader import eval_rows
from gptddp.errors import BadRowGroup, DataError
from gptddp.run.summary import decided
from gptddp.training import quarantine

STEPS = 120  # about two epochs of most lanes
BAD = {2, 4, 9, 13}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(blocks, "RETRY_S", (0.001,))


def damaged(bad=BAD, n_groups=20) -> Dataset:
    """The corpus with row groups that can never be read."""
    dataset = corpus(n_groups)

    def fail(group, attempt):
        if group.index in bad and group.path.startswith("train"):
            raise DataError(f"{group.path}, row group {group.index}: bad page checksum")

    dataset.fail = fail
    return dataset


@pytest.fixture(scope="module")
def alone():
    """The damaged corpus in one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "RETRY_S", (0.001,))
        return Run(damaged()).go(1, STEPS)


def decisions(run):
    """{finished steps: row groups} of all lives."""
    return {step: sorted(set(groups)) for step, groups in decided(run.ledger, 0).items()}


@pytest.mark.parametrize("world_size", [3, LANES])
def test_decisions_and_rows_do_not_depend_on_the_world_size(alone, world_size):
    """The same row groups are left out at the same steps, and every fingerprint is the same."""
    assert alone.progress.data["quarantined"] == sorted(BAD)
    assert len(decisions(alone)) > 1, "all faults at one step would prove little"
    other = Run(damaged(), threads=2, prefetch=world_size).go(world_size, STEPS)
    assert other.fps == alone.fps
    assert other.progress.data == alone.progress.data
    assert decisions(other) == decisions(alone)


def test_rows_differ_only_after_the_first_decision(alone):
    """Up to the first decision the rows equal those of a healthy corpus; after it they differ."""
    healthy = Run(corpus()).go(1, STEPS)
    first = min(decisions(alone))
    assert alone.fps[:first] == healthy.fps[:first] and alone.fps[first] != healthy.fps[first]
    assert "quarantined" not in healthy.progress.data


@pytest.mark.parametrize("sizes", [(4, 3, 4), (2, 5, 7, 1)])
def test_decisions_survive_changes_of_the_world_size(alone, sizes):
    """Lives that end anywhere, also at the step of a decision, continue with the same rows."""
    for first in [*decisions(alone), 50]:
        run = Run(damaged())
        stops = np.linspace(max(first, 1), STEPS, len(sizes)).astype(int)
        for world_size, stop in zip(sizes, stops.tolist(), strict=True):
            run.go(world_size, stop)
        assert run.fps == alone.fps and run.progress.data == alone.progress.data


def test_a_repaired_file_stays_out_after_the_decision(alone):
    """A later life that can read the row groups again still skips them."""
    run = Run(damaged()).go(2, STEPS // 2)
    run.dataset = corpus()
    left_out = run.progress.data["quarantined"]
    run.go(3, STEPS)
    assert run.progress.data["quarantined"] == left_out
    assert set(left_out) == BAD and run.fps == alone.fps


def test_a_life_that_goes_back_repeats_the_decisions(alone):
    """A life from before the fault, with a repaired file, takes the decisions from the ledger."""
    run = Run(damaged()).go(2, STEPS)
    again = Run(corpus())
    again.ledger = run.ledger
    assert again.go(3, STEPS).fps == alone.fps
    assert again.progress.data == alone.progress.data


def test_a_row_group_that_becomes_unreadable_loses_only_later_rows(monkeypatch):
    """Rows before the fault are trained, and later rows are not, at each world size alike."""
    ends = []
    for world_size in (1, 2, 3):
        run = Run(corpus()).go(world_size, 40)
        run.dataset = damaged(bad=set(range(10)))  # some lanes stand within one of them
        run.go(world_size, STEPS)
        ends.append((run.fps, run.progress.data))
    assert ends[0] == ends[1] == ends[2]
    assert len(ends[0][1]["quarantined"]) > 5


@pytest.mark.parametrize(("n_groups", "bad"), [(5, {0, 1}), (LANES, {1, 2, 6})])
def test_all_lanes_of_a_row_group_lose_it_at_the_same_step(n_groups, bad):
    """At any world size all lanes of a row group lose it at the same step, at any place in it; a
    lane without another row group continues with its neighbour's documents."""
    runs = [Run(damaged(bad, n_groups)).go(w, 80) for w in (1, 3, LANES)]
    for run in runs:
        assert run.fps == runs[0].fps and run.progress.data == runs[0].progress.data
    assert set(runs[0].progress.data["quarantined"]) == bad


def test_a_lane_begins_its_neighbours_row_group_with_the_first_row():
    """A lane's place in its own row group may not exist in its neighbour's."""
    run = Run(corpus(n_groups=4 * LANES)).go(1, 1)
    before = run.progress.data["lanes"].split()
    lane = before.index("0.0.2")
    with open_loader(run.dataset, state=run.progress.data) as loader:
        groups = [block.group for block in loader.dealt[lane]]
        after = quarantine.without(loader, run.progress.data, groups)["lanes"].split()
    assert after == [*before[:lane], "0.0.0", *before[lane + 1 :]]


def test_a_corpus_without_readable_rows_is_an_error():
    """The run reports that it has nothing to train on, and does not wait."""
    run = Run(damaged({0}, n_groups=1))
    with pytest.raises(DataError, match="all row groups of the train split are in quarantine"):
        run.go(1, 5)


def test_on_bad_fail_gives_an_error_with_the_fixes():
    """With on_bad=fail the error has file, row group, reason, attempts and fixes."""
    with open_loader(damaged()) as loader, pytest.raises(BadRowGroup) as caught:
        while True:
            quarantine.next_batch(loader, "fail")
    assert caught.value.group in BAD and caught.value.exit_code == 2
    assert str(caught.value) == (
        f"train/{caught.value.group:05}.parquet, row group {caught.value.group}: bad page checksum "
        "(2 attempts within 0 s); put the file back from a copy, or prepare the data again, or "
        "train without it: --on-bad quarantine"
    )


def test_a_missing_storage_is_no_bad_row_group():
    """If the manifest cannot be read either, nothing is put into quarantine."""
    dataset = damaged()

    def away():
        raise DataError("corpus is out of reach")

    dataset.check_storage = away
    run = Run(dataset)
    with pytest.raises(DataError, match="out of reach"):
        run.go(1, STEPS)
    assert run.ledger == [] and "quarantined" not in run.progress.data


def test_validation_rows_are_never_left_out():
    """A bad row group of validation is an error: losses of other rows cannot be compared."""
    dataset = corpus()

    def fail(group, attempt):
        raise DataError(f"{group.path}: gone")

    dataset.fail = fail
    with pytest.raises(DataError, match=r"or prepare the data again$"):
        eval_rows(dataset, 16, 100)
