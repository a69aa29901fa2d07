"""The place of a process in the world, and the abilities of its machine."""

import dataclasses
import json
import os

import pytest
import torch

from gptddp.config import Config
from gptddp.distributed import hardware, lost
from gptddp.distributed.connect import connect
from gptddp.distributed.environment import cpu_sharers, ranks, slurm_cpus, slurm_life, slurm_step
from gptddp.distributed.hardware import cpu_quota
from gptddp.distributed.report import report
from gptddp.errors import ConfigError


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_threads_follow_the_cgroup_quota(tmp_path, monkeypatch, files, cpus):
    """The quota of cgroup v2 or v1, rounded up, cuts the affinity; without a quota it stays."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == (cpus or 64)


def test_the_ranks_come_from_torchrun_or_slurm_or_a_single_process(monkeypatch):
    """torchrun's variables win, Slurm's are mapped, and without any the process is alone."""
    for name in list(os.environ):
        if name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR") or name.startswith("SLURM"):
            monkeypatch.delenv(name)
    assert ranks() == (0, 0, 1, 1)
    slurm = dict(SLURM_PROCID="5", SLURM_LOCALID="1", SLURM_NTASKS="8", MASTER_ADDR="node0")
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    assert ranks() == (5, 1, 8, 2)  # two tasks at least
    torchrun = dict(RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    assert ranks() == (3, 1, 4, 2)
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ConfigError, match="start through torchrun or srun"):
        ranks()


@pytest.fixture
def slurm(monkeypatch):
    """slurm(**variables): the third of three srun tasks on its node."""

    def task(**more: str) -> None:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        own = dict(PROCID="6", LOCALID="2", NTASKS="7", NODEID="2")
        for name, value in [*own.items(), *more.items()]:
            monkeypatch.setenv(f"SLURM_{name}", value)
        monkeypatch.setenv("MASTER_ADDR", "node0")

    return task


@pytest.mark.parametrize(
    ("variables", "here"),
    [
        ({"STEP_TASKS_PER_NODE": "2(x2),5"}, 5),
        ({"STEP_TASKS_PER_NODE": "4,2,3", "TASKS_PER_NODE": "8(x3)", "NTASKS_PER_NODE": "8"}, 3),
        ({"TASKS_PER_NODE": "2,2,3"}, 3),
        ({"TASKS_PER_NODE": "4(x3)"}, 4),
        ({"NTASKS_PER_NODE": "3"}, 3),
        ({"TASKS_PER_NODE": "nonsense"}, 3),
        ({"TASKS_PER_NODE": "2(x2)"}, 3),  # a list without this node
        ({}, 3),
    ],
)
def test_slurm_gives_the_tasks_of_this_node_without_a_flag(slurm, variables, here):
    """The number is in the step's list, else in the job's; it is larger than the local rank."""
    slurm(**variables)
    assert ranks() == (6, 2, 7, here)


def test_tasks_that_slurm_binds_do_not_share_their_cpus(slurm, monkeypatch):
    """A task that is bound to its own CPUs has them alone; without such a list all tasks share."""
    assert cpu_sharers(4) == 4
    slurm()
    assert cpu_sharers(4) == 4
    monkeypatch.setenv("SLURM_CPU_BIND_LIST", "0x3,0xC,0x30,0xC0")
    assert cpu_sharers(4) == 1
    monkeypatch.setenv("SLURM_CPU_BIND_LIST", "0xF,0xF,0xF0,0xF0")
    assert cpu_sharers(4) == 2


def test_the_cpus_of_a_task_count_where_slurm_binds_nothing(slurm, monkeypatch):
    """--cpus-per-task gives CPUs to one rank; workers of a launcher share their task's CPUs."""
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    assert slurm_cpus(4) is None
    slurm()
    assert slurm_cpus(4) is None
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    assert slurm_cpus(4) == 6
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert [slurm_cpus(workers) for workers in (1, 2, 4, 9)] == [6, 3, 1, 1]


def test_a_requeued_step_is_another_life_of_the_same_job(slurm, monkeypatch):
    """A requeued step keeps its name but is another life: a lost node may still run the old one."""
    slurm(JOB_ID="7", STEP_ID="0")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    first, name = slurm_life(), slurm_step()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert first and slurm_life() not in (None, first) and slurm_step() == name
    monkeypatch.setenv("RANK", "0")
    assert slurm_life() is None


@pytest.mark.parametrize(
    ("variables", "visible", "gpu"),
    [
        ({"GPUS_PER_TASK": "1"}, 1, 0),
        ({"NTASKS_PER_GPU": "1"}, 1, 0),
        ({"TRES_PER_TASK": "cpu=4,gres/gpu=1"}, 1, 0),
        ({"GPU_BIND": "verbose,per_task:1"}, 1, 0),
        ({"GPU_BIND": "single:1"}, 1, 0),
        ({"GPUS_PER_TASK": "2"}, 2, 0),
        ({"GPUS_PER_TASK": "1", "GPU_BIND": "none"}, 4, 2),  # every task sees all of them
        ({}, 4, 2),
        ({}, 1, None),  # three tasks would share one
        ({"GPU_BIND": "single:2"}, 1, None),
        ({"NTASKS_PER_GPU": "3"}, 1, None),
        ({"GPUS_PER_TASK": "1"}, 0, None),
    ],
)
def test_a_task_uses_the_gpu_that_slurm_gives_only_to_it(
    slurm, monkeypatch, variables, visible, gpu
):
    """A task's own GPU is number 0; local ranks choose among GPUs that all see; none is shared."""
    slurm(**variables)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    if gpu is None:
        with pytest.raises(ConfigError, match=f"local rank 2 finds {visible} GPUs.*gpus-per-task"):
            hardware.gpu_of(2)
    else:
        assert hardware.gpu_of(2) == gpu


@pytest.fixture
def numerics():
    """Restore torch's settings for numerics after a test."""
    before, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    yield
    torch.set_float32_matmul_precision(before)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("matmul", ["mkl", "onednn"])
def test_fp32_stays_fp32_on_any_processor(numerics, matmul):
    """Both back-ends have fp32 accuracy; a back-end without it is refused with the fix. A run uses
    its own number of threads, not this machine's default."""
    c = Config(matmul=matmul, threads=3)
    try:
        hardware.use(c, torch.device("cpu"))
    except ConfigError as error:
        assert matmul == "onednn" and "--matmul mkl" in str(error)
        return
    assert torch.get_num_threads() == 3
    a, b = torch.randn(128, 128), torch.randn(128, 128)
    exact = a.double() @ b.double()
    assert ((a @ b).double() - exact).norm() / exact.norm() < 1e-5


def test_a_bf16_run_is_never_refused(numerics, monkeypatch):
    """A bf16 run accepts a processor on which oneDNN rounds fp32 to bf16; an fp32 run does not."""
    monkeypatch.setattr(torch.Tensor, "norm", lambda *_: torch.tensor(1.0))  # all are wrong
    c = Config(matmul="onednn", threads=1, precision="bf16")
    hardware.use(c, torch.device("cpu"))
    with pytest.raises(ConfigError, match="--matmul mkl"):
        hardware.use(dataclasses.replace(c, precision="fp32"), torch.device("cpu"))


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OMP_DYNAMIC", "TRUE"), ("OMP_THREAD_LIMIT", "2"), ("OMP_MAX_ACTIVE_LEVELS", "0")],
)
def test_an_environment_with_fewer_threads_than_the_run_is_refused(
    numerics, monkeypatch, variable, value
):
    """torch cannot override the variable; a run with fast sums or one thread is accepted."""
    c = Config(matmul="mkl", threads=3, reduce="exact")
    monkeypatch.setenv(variable, value)
    told = f"{variable}={value.lower()} is set.*the 3 of the run.*unset it"
    with pytest.raises(ConfigError, match=told):
        hardware.use(c, torch.device("cpu"))
    for other in ({"threads": 1}, {"reduce": "fast"}):
        hardware.use(dataclasses.replace(c, **other), torch.device("cpu"))
    monkeypatch.setenv(variable, {"OMP_THREAD_LIMIT": "3"}.get(variable, "x"))
    hardware.use(c, torch.device("cpu"))


def test_a_variable_that_decides_the_bits_is_part_of_the_machine(monkeypatch):
    """An audit and the other ranks can thus notice that a machine computes in another way."""
    plain = hardware.machine(None)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert hardware.machine(None) == f"{plain}, MKL_CBWR=COMPATIBLE"


@pytest.mark.parametrize(
    ("amx", "cpu", "chosen"),
    [
        (True, {"vendor_id": "GenuineIntel", "flags": "avx512_bf16"}, ("bf16", "onednn", "blocks")),
        (False, {"vendor_id": "GenuineIntel", "flags": "avx512_bf16"}, ("fp32", "mkl", "fused")),
        (
            False,
            {"vendor_id": "AuthenticAMD", "flags": "avx512_bf16 clzero"},
            ("bf16", "mkl", "blocks"),
        ),
        (False, {"vendor_id": "AuthenticAMD", "flags": "fpu avx2"}, ("fp32", "mkl", "fused")),
        (False, {}, ("fp32", "mkl", "fused")),
    ],
)
def test_numerics_follow_the_features_of_the_processor(monkeypatch, amx, cpu, chosen):
    """A table decides, and not a measurement: the same processor gets the same choice."""
    monkeypatch.setattr(hardware, "cpu_has_amx", lambda: amx)
    monkeypatch.setattr(hardware, "cpu_info", lambda: cpu)
    found = hardware.numerics(torch.device("cpu"))
    assert (found["precision"], found["matmul"], found["attention"]) == chosen
    assert found["threads"] == torch.get_num_threads()
    # oneDNN may round fp32 to bf16 with AMX, and `use` would refuse that
    fp32 = hardware.numerics(torch.device("cpu"), "fp32")
    assert fp32["matmul"] == "mkl" and (fp32["attention"] == "fused" or not amx)


def test_a_failed_collective_names_the_silent_rank(monkeypatch):
    """The missing posts name the silent rank; an error without a time is reported as it is."""
    with connect("cpu") as world:
        world.world_size, world.pods = 3, ("pod-0", "pod-1", "")
        monkeypatch.setattr(lost, "ROLL_CALL_S", 0.1)
        for name in ("gloo: Timed out waiting 60000ms for recv", "ran for 60000 milliseconds"):
            with pytest.raises(RuntimeError, match="60000") as caught:
                raise RuntimeError(name)
            said = lost.blame(caught.value, world, 0.0)
            assert said.startswith("rank 1 (pod-1), rank 2 have not answered for 60 s in ")
        closed = RuntimeError("[/gloo/pair.cc:5] Connection closed by peer [::1]:9. This is\nmore")
        with pytest.raises(RuntimeError, match="closed") as caught:
            raise closed
        said = lost.blame(closed, world, 1.0)
        assert said.startswith("Connection closed by peer [::1]:9 in test_a_failed_")
        of_sums = RuntimeError(f"Got this error when running the callback: RuntimeError: {closed}")
        with pytest.raises(RuntimeError, match="closed") as caught:
            raise of_sums
        said = lost.blame(of_sums, world, 1.0)
        assert said.startswith("Connection closed by peer [::1]:9 in ")
        # closed by a rank whose timeout came a moment earlier
        said = lost.blame(closed, world, 59.9)
        assert said.startswith("rank 1 (pod-1), rank 2 have not answered for 59 s in ")


@pytest.mark.parametrize("verdict", ["verdict.json", "no/such/folder.json", None])
def test_a_final_error_goes_to_the_launcher_or_is_printed(tmp_path, monkeypatch, capsys, verdict):
    """An error written as a verdict is not printed; if no verdict can be written, it is printed."""
    monkeypatch.delenv("GPTDDP_VERDICT", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    if verdict:
        monkeypatch.setenv("GPTDDP_VERDICT", str(tmp_path / verdict))
    report(ConfigError("nope"))
    assert capsys.readouterr().err == ("" if verdict == "verdict.json" else "gptddp train: nope\n")
    if verdict == "verdict.json":
        left = json.loads((tmp_path / verdict).read_text())
        assert left == {"code": 2, "rank": 0, "message": "nope", "shared": False}


def test_the_device_must_exist():
    """--device cuda without a GPU is refused with the fix."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="--device cpu"), connect("cuda"):
        pass
