"""Make docs/faults.md of what the tests have measured: `python tests/faults/table.py FILE...`.

A section of which the files have nothing stays as it is on the page.
"""

import json
import math
import re
import statistics
import sys
from pathlib import Path

import torch

from gptddp.distributed.hardware import machine
from gptddp.run.recovery import PARTS

DOCS = Path(__file__).parents[2] / "docs/faults.md"
HEAD = """# Faults

What happens to a job when something breaks, how long it takes to the next *new* step, and how many
finished steps are done again. In short:

| what breaks | what happens | seconds to the next step | steps done again |
|---|---|--:|--:|
"""
EVERY = """
A network that is slow or loses packets makes steps slower, and nothing else. Clocks that differ or
jump change nothing. While the disk of the run is full, read-only or hangs, training goes on
([internals.md](internals.md#when-the-disk-fails)). How many steps are done again after the loss of
all pods depends on `--checkpoint-every`.

The rest of this page is every fault that is tested. It is made by `make test-faults` from its own
measurements, on one machine of two cores ({machine}): four pods as
`gptddp-k8s submit --local` starts them, a model of 30 k parameters, steps of 0.1 to 0.3 s. Every
job must end as the run that nobody disturbs: each step once, the same bits in every number of its
log and in its last state, its checkpoints verified. Seconds are medians where a fault was tried
more than once.

- step in flight: the step that was being computed when the fault came. It was not finished, so it
  does not count as done again
- memory: the shared memory of a pod, where a surviving rank leaves a snapshot of its state for the
  next life of the run
- host of the rendezvous: the pod of worker 0, where the launchers of all pods find each other
- fenced: no longer allowed to write to the run

| # | fault | what happens | seconds to the next step | steps done again |
|--:|---|---|--:|--:|
"""
SECONDS = """
## Where the seconds go

Of the kills above, from the ledger of the run: medians, counted from the last finished step. Where
a fault has cost more than one life of the run, the figures are those of the last one.

- detect: until a collective of a surviving rank failed, the step in flight included. Blank where no
  rank survived, or where the old life was stopped in good order: re-form includes it then
- re-form: until the new ranks were connected: the end of the old workers, the start of another pod,
  the rendezvous, the start of new workers
- reload: until all ranks had the state
- first step: until a new step was done

| # | fault | detect | re-form | reload | first step |
|--:|---|--:|--:|--:|--:|
"""
CLUSTER = """
## On a cluster

Made by `make test-cluster` from its own measurements; `make test-faults` leaves this section as it
is. Four pods train the model `tiny` on a kind cluster of two worker nodes, all on one machine of
two cores ({machine}). Medians where a fault was tried more than once; the
parts are those of the table above.

| fault | seconds to the next step | detect | re-form | reload | first step | steps done again |
|---|--:|--:|--:|--:|--:|--:|
"""
OWNED = """
## Who had the rank-seconds

Of all runs of the files of tests, the undisturbed ones with them: each rank-second of a run [has an
owner](internals.md#who-owns-a-second). In percent; `other`, which is nobody's, in the run that has
the most of it, and so `books`. The rest is evaluation, checkpoint, data and stopped.

| file | rank-s | train | wait | redo | detect | re-form | reload | start | books | other |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
"""
OTHERS = """
## Tested in parts

These faults are tested without a whole job, or with a job of their own, in `make test`,
`make test-faults` or `make test-cluster`.

| # | fault | tests |
|--:|---|---|
"""
STATE = "the others leave their state in memory; all go on from the step in flight"
# The rows of the summary: what breaks, what happens ("": the last part of what was measured), the
# numbers of the faults that it sums up, and words that are in all of them.
SUMMARY = [
    ("A worker process is killed", STATE, (1, 19, 38), ""),
    ("A pod is killed and replaced at once", STATE, (3, 4), "replaced at once"),
    ("A pod is killed and not replaced", "the others go on without it", (2,), ""),
    ("Several pods are killed, one shortly after the other", STATE, (8,), ""),
    ("All pods are killed at once", "the newest checkpoint goes on", (4, 6), "all pods"),
    ("A process, a pod or a network link falls silent",
     "the others wait for a minute, then go on without it", (13, 15, 17), "times out"),
    ("Pods are added or taken away",
     "all finish the step, and go on with the new number of ranks", (30,), ""),
    ("A random pod or worker is killed every ten seconds", "", (7,), ""),
]  # fmt: skip
T = "tests/"
# Faults with tests of their own: what they are, file::test.
ELSEWHERE = {
    9: ("a kill at every system call of a save", [
        "checkpoint/test_writer_crashes.py::test_killed_at_every_system_call",
        "checkpoint/test_writer_crashes.py::test_killed_at_random_moments"]),
    10: ("SIGTERM of one pod", [
        "faults/test_stop.py::test_pods_and_workers_that_are_stopped_one_by_one_cost_no_step"]),
    11: ("SIGTERM of all pods, and too short a grace period", [
        "elastic/test_job.py::test_ctrl_c_commits_and_the_same_command_continues",
        "distributed/test_watchdog.py::test_it_leaves_although_the_main_thread_is_in_c"]),
    12: ("SIGTERM in import, rendezvous, load, evaluation and save", [
        "faults/test_stop.py::test_the_end_comes_once_with_everything_done"]),
    14: ("a loop that holds the GIL", [
        "faults/test_silent.py::test_a_rank_that_hangs_is_named_with_its_stack_and_replaced"]),
    18: ("a rank raises an exception at the same step again and again", [
        "faults/test_crash_loop.py"]),
    20: ("NaN on one rank, in one step or in every step", [
        "faults/test_divergence.py::"
        "test_a_nan_on_one_rank_is_skipped_by_all_and_for_ever_is_exit_code_3"]),
    21: ("a flipped bit in one rank's parameters", [
        "faults/test_divergence.py::"
        "test_a_flipped_bit_takes_the_run_back_and_leaves_no_trace"]),
    22: ("ENOSPC, EDQUOT anywhere in a save", [
        "checkpoint/test_writer.py::test_every_call_may_fail",
        "checkpoint/test_writer.py::test_full_disk",
        "faults/test_disk.py::test_a_full_file_system"]),
    23: ("EROFS, EIO, ESTALE, a slow and a hanging volume", [
        "faults/test_disk.py::test_training_goes_on_through_errors",
        "faults/test_disk.py::test_training_goes_on_while_the_disk_hangs_or_is_slow"]),
    24: ("truncated and deleted shards and manifests", [
        "checkpoint/test_load.py::test_damage_is_found_set_aside_and_the_one_before_is_loaded"]),
    25: ("flipped bits, holes, swapped shards", [
        "checkpoint/test_load.py::test_a_thousand_damages_are_found"]),
    26: ("something that only has the name of a newer checkpoint", [
        "checkpoint/test_load.py::test_forged_newest_is_passed_over"]),
    27: ("all checkpoints bad", ["checkpoint/test_load.py::test_never_from_zero_when_all_are_bad"]),
    28: ("two jobs on one run directory, and a writer that wakes up late", [
        "elastic/test_storage.py::test_two_jobs_of_one_manifest_on_one_run_directory",
        "faults/test_same_job.py::"
        "test_a_worker_0_that_is_cut_off_trains_on_and_its_replacement_waits",
        "faults/test_same_job.py::test_a_worker_0_that_comes_back_beside_its_replacement_waits",
        "training/test_fence.py::test_a_writer_stopped_before_its_rename_ends_by_itself"]),
    29: ("a reader beside the pruner", [
        "checkpoint/test_retention.py::test_pruners_readers_and_a_writer_at_once"]),
    33: ("a pod's name resolves to another address", [
        "cluster/test_drills.py::test_worker_0_may_go_six_times_within_five_minutes"]),
    34: ("the host of the rendezvous lost for good: the operator creates it again; until it runs "
         "the others wait, say so every minute, and keep the state in memory, which a stop "
         "saves", [
        "faults/test_kills.py::test_a_replacement_may_come_later",
        "faults/test_stop_between.py::test_a_stop_between_two_worlds_saves_what_is_in_memory",
        "cluster/test_drills.py::test_worker_0_may_go_six_times_within_five_minutes"]),
    37: ("a network file system that lists new names late, or repeats a rename", [
        "checkpoint/test_load.py::test_a_name_not_yet_listed_is_found_by_the_hint",
        "checkpoint/test_writer.py::test_a_rename_that_nfs_repeats"]),
}  # fmt: skip
OWNED_BY = ("training", "waiting", "redone", "detection", "reforming", "reload", "start")
KILLS = (1, 2, 3, 4, 6, 8, 35, 38)


def seconds(values: list[float | None], digits: int = 1) -> str:
    real = [value for value in values if value is not None and not math.isnan(value)]
    return f"{statistics.median(real):.{digits}f}" if real else ""


def parts(its: list[dict]) -> str:
    """The cells of where the seconds of a fault went; "" where no life was recovered."""
    events = [event for it in its if (event := it.get("recovered"))]
    return " | ".join(seconds([event[part] for event in events], 2) for part in PARTS if events)


def grouped(measured: list[dict], where: str | None) -> dict[tuple, list[dict]]:
    """What was measured there, by the fault's number and name: a row each."""
    rows: dict[tuple, list[dict]] = {}
    for it in sorted(measured, key=lambda it: it.get("fault", 0)):
        if it.get("where") == where:
            rows.setdefault((it.get("fault"), it["what"]), []).append(it)
    return rows


def owned(measured: list[dict]) -> list[str]:
    """A line for each file of tests: the parts of its rank-seconds."""
    files: dict[str, list[dict[str, float]]] = {}
    for it in measured:
        if it.get("where") == "owners" and sum(it["owners"].values()):
            files.setdefault(it["test"], []).append(it["owners"])
    lines = []
    for file, runs in sorted(files.items()):
        total = sum(sum(run.values()) for run in runs)
        shares = [100 * sum(run[it] for run in runs) / total for it in OWNED_BY]
        most = [max(100 * run[it] / sum(run.values()) for run in runs) for it in ("books", "other")]
        cells = [f"{it:.1f}" for it in shares] + [f"{it:.2f}" for it in most]
        lines.append(f"| `{file}` | {total:.0f} | {' | '.join(cells)} |\n")
    return lines


def summary(rows: dict[tuple, list[dict]]) -> list[str]:
    """A line for each row of the summary that was measured: from the least seconds to the most."""
    lines = []
    for what, happens, numbers, words in SUMMARY:
        found = [
            its for (number, name), its in rows.items()
            if number in numbers and words in f"{name}: {its[-1]['happens']}"
        ]  # fmt: skip
        medians = (seconds([it["seconds"] for it in its]) for its in found)
        times = sorted(filter(None, medians), key=float)
        if times:
            span = times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"
            redone = max(it["redone"] for its in found for it in its)
            again = f"up to {redone}" if redone else "0"
            happens = happens or found[-1][-1]["happens"].rpartition("; ")[2]
            lines.append(f"| {what} | {happens} | {span} | {again} |\n")
    return lines


def page(measured: list[dict], old: str) -> str:
    """The whole page; sections of which nothing was measured are those of the old one."""
    here, there = grouped(measured, None), grouped(measured, "cluster")
    lines = [*summary(here), EVERY]
    lines += [
        f"| {number} | {what} | {its[-1]['happens']} | {seconds([it['seconds'] for it in its])} "
        f"| {max(it['redone'] for it in its)} |\n"
        for (number, what), its in here.items()
    ]
    went = [
        f"| {number} | {what} | {cells} |\n"
        for (number, what), its in here.items()
        if number in KILLS and (cells := parts(its))
    ]
    cluster = [
        f"| {what} | {seconds([it['seconds'] for it in its])} | {parts(its)} "
        f"| {max(it['redone'] for it in its)} |\n"
        for (_, what), its in there.items()
    ]
    others = [
        f"| {number} | {what} | {', '.join(f'`{T}{test}`' for test in tests)} |\n"
        for number, (what, tests) in ELSEWHERE.items()
    ]
    whose = owned(measured)
    this = machine(torch.device("cpu"))
    kept = {text.split("\n")[0]: text for text in re.split(r"^(?=#)", old, flags=re.M)}
    sections = [
        "".join([head, *made]).replace("{machine}", this)
        if fresh
        else kept.get(head.strip().split("\n")[0], "")
        for head, made, fresh in (
            (HEAD, lines, here), (SECONDS, went, here), (OWNED, whose, whose),
            (CLUSTER, cluster, there),
        )
    ]  # fmt: skip
    sections.append("".join([OTHERS, *others]))
    return "\n\n".join(text.strip() for text in sections if text) + "\n"


def main() -> None:
    files = [path for path in map(Path, sys.argv[1:]) if path.exists()]
    lines = [line for path in files for line in path.read_text().splitlines()]
    DOCS.write_text(page([json.loads(line) for line in lines], DOCS.read_text()))


if __name__ == "__main__":
    main()
