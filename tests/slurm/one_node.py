"""Debian's Slurm on this machine: one node of four CPUs, in a folder of its own, on free ports.

It needs no cgroups and no configuration of the machine: munged, slurmctld and slurmd run as the
present user and are stopped by their process ids.
"""

import getpass
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.processes import free_port
from support.waiting import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
SBIN = "/usr/sbin"  # not on the PATH of every user
CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
SlurmdParameters=config_overrides
KillWait=20
MinJobAge=600
ReturnToService=2
NodeName=localhost NodeAddr=127.0.0.1 CPUs=4 RealMemory=16000 State=UNKNOWN
PartitionName=low Nodes=localhost Default=YES PriorityTier=1 GraceTime=20 MaxTime=INFINITE State=UP
PartitionName=high Nodes=localhost PriorityTier=2 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


class OneNode:
    """Three daemons; `environment` is for the programs that talk to them."""

    def __init__(self, folder: Path) -> None:
        """Start them, and wait until the node is idle."""
        self.folder = folder
        path = f"{os.environ['PATH']}:{SBIN}"
        if missing := [name for name in PROGRAMS if not shutil.which(name, path=path)]:
            raise RuntimeError(f"no {', '.join(missing)}: apt-get install slurmctld slurmd munge")
        conf = folder / "slurm.conf"
        self.environment = {**os.environ, "PATH": path, "SLURM_CONF": str(conf)}
        self.processes: list[subprocess.Popen[bytes]] = []
        for name in ("state", "spool"):
            (folder / name).mkdir()
        conf.write_text(
            CONFIG.format(ports=(free_port(), free_port()), user=getpass.getuser(), folder=folder)
        )
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        at = {f"--{name}-file": f"munge.{name}" for name in ("key", "pid", "seed", "log")}
        munge = [f"{option}={self.folder / name}" for option, name in at.items()]
        socket_file = self.folder / "munge.socket"
        self._daemon("munged", "--foreground", "--force", f"--socket={socket_file}", *munge)
        self._until(socket_file.exists)
        self._daemon("slurmctld", "-D", "-c")
        self._daemon("slurmd", "-D", "-c", "-N", "localhost")
        self._until(lambda: "idle" in self.output("sinfo", "-h", "-o", "%t"))

    def _daemon(self, *command: str) -> None:
        log = (self.folder / f"{command[0]}.out").open("wb")
        with log:
            started = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        self.processes.append(started)

    def _until(self, holds: Callable[[], Any]) -> None:
        until(holds, "Slurm", 60, poll_s=0.2, why=self._logs)

    def _logs(self) -> str:
        files = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(file.read_text()[-1500:] for file in files)

    def output(self, *command: str) -> str:
        """The output of a program, or "" if it fails."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    def stop(self) -> None:
        """End the jobs, then the daemons, each by its own id."""
        if len(self.processes) == 3:
            self.output("scancel", "--full", "--signal=KILL", "--user", getpass.getuser())
            self.output("scancel", "--user", getpass.getuser())
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
