"""Make docs/faults.md of what the tests have measured: `python tests/faults/table.py FOLDER`."""

import json
import math
import statistics
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs/faults.md"
HEAD = """# Faults

What happens to a job when something breaks, how long it takes to the next *new* step, and how many
finished steps are done again. Made by `make test-faults` from its own measurements, on one machine
of two cores that was not always quiet: four pods as `gptddp-k8s submit --local` starts them, a
model of 30 k parameters, steps of 0.1 s. Every job in it must end as the run that nobody disturbs:
each step once, of the same rows, its newest checkpoint verified; to the bit where the number of
ranks has never changed. Seconds are medians where a fault was tried more than once.

| # | fault | what happens | seconds to the next step | steps done again |
|--:|---|---|--:|--:|
"""
OTHERS = """
## Tested in parts

These need no whole job, or one of their own, in `make test` or `make test-faults`.

| # | fault | tests |
|--:|---|---|
"""
MISSING = """
## Not tested

| # | fault | reason |
|--:|---|---|
"""
T = "tests/"
# Faults with tests of their own: what they are, file::test.
ELSEWHERE = {
    9: ("a kill at every system call of a save", [
        "test_writer_crashes.py::test_killed_at_every_system_call",
        "test_writer_crashes.py::test_killed_at_random_moments"]),
    10: ("SIGTERM of one pod", [
        "faults/test_stop.py::test_pods_and_workers_that_are_stopped_one_by_one_cost_no_step"]),
    11: ("SIGTERM of all pods, and too short a grace period", [
        "elastic/test_job.py::test_ctrl_c_commits_and_the_same_command_continues",
        "test_watchdog.py::test_it_leaves_although_the_main_thread_is_in_c"]),
    12: ("SIGTERM in import, rendezvous, load, evaluation and save", [
        "faults/test_stop.py::test_the_end_comes_once_with_everything_done"]),
    14: ("a loop that holds the GIL", [
        "faults/test_silent.py::test_a_rank_that_hangs_is_named_with_its_stack_and_replaced"]),
    18: ("a rank raises, at one step again and again", ["faults/test_crash_loop.py"]),
    20: ("NaN on one rank, once and for ever", [
        "faults/test_divergence.py::"
        "test_a_nan_on_one_rank_is_skipped_by_all_and_for_ever_is_exit_code_3"]),
    21: ("a flipped bit in one rank's parameters", [
        "faults/test_divergence.py::"
        "test_a_flipped_bit_takes_the_run_back_and_leaves_no_trace"]),
    22: ("ENOSPC, EDQUOT anywhere in a save", [
        "test_writer.py::test_every_call_may_fail", "test_writer.py::test_full_disk",
        "faults/test_disk.py::test_a_full_file_system"]),
    23: ("EROFS, EIO, ESTALE, a slow and a hanging volume", [
        "faults/test_disk.py::test_training_goes_on_through_errors",
        "faults/test_disk.py::test_training_goes_on_while_the_disk_hangs_or_is_slow"]),
    24: ("truncated and deleted shards and manifests", [
        "test_checkpoint.py::test_damage_is_found_set_aside_and_the_one_before_is_loaded"]),
    25: ("flipped bits, holes, swapped shards", [
        "test_checkpoint.py::test_a_thousand_damages_are_found"]),
    26: ("forged newest checkpoints", ["test_checkpoint.py::test_forged_newest_is_passed_over"]),
    27: ("all checkpoints bad", ["test_checkpoint.py::test_never_from_zero_when_all_are_bad"]),
    28: ("two jobs on one directory, a late writer", [
        "elastic/test_storage.py::test_two_jobs_of_one_manifest_on_one_run_directory",
        "test_fence.py::test_a_writer_stopped_before_its_rename_ends_by_itself"]),
    29: ("a reader beside the pruner", [
        "test_retention.py::test_pruners_readers_and_a_writer_at_once"]),
    37: ("a network file system's late names and repeated renames", [
        "test_checkpoint.py::test_a_name_not_yet_listed_is_found_by_the_hint",
        "test_writer.py::test_a_rename_that_nfs_repeats"]),
}  # fmt: skip
NOT_TESTED = {
    33: ("a pod's name resolves to another address", "needs a name server; another address is"),
}


def seconds(values: list[float]) -> str:
    real = [value for value in values if not math.isnan(value)]
    return f"{statistics.median(real):.1f}" if real else ""


def page(measured: list[dict]) -> str:
    """The whole page, one row for each fault that was done."""
    rows: dict[tuple, list[dict]] = {}
    for it in sorted(measured, key=lambda it: it["fault"]):
        rows.setdefault((it["fault"], it["what"]), []).append(it)
    lines = [
        f"| {number} | {what} | {its[-1]['happens']} | {seconds([it['seconds'] for it in its])} "
        f"| {max(it['redone'] for it in its)} |\n"
        for (number, what), its in rows.items()
    ]
    others = [
        f"| {number} | {what} | {', '.join(f'`{T}{test}`' for test in tests)} |\n"
        for number, (what, tests) in ELSEWHERE.items()
    ]
    missing = [f"| {n} | {what} | {why} |\n" for n, (what, why) in NOT_TESTED.items()]
    return "".join([HEAD, *lines, OTHERS, *others, MISSING, *missing])


def main() -> None:
    files = Path(sys.argv[1]).glob("*.jsonl")
    DOCS.write_text(page([json.loads(line) for f in files for line in f.read_text().splitlines()]))


if __name__ == "__main__":
    main()
