"""The text of the batch script: what runs on the first node of the job, and in each task.

What Slurm (22.05 and later) does, and the script has to deal with:

- `srun` takes SIGTERM for the end of the job, without time to save. So the signals before the time
  limit come to the script, which has the tasks signalled by `scancel --signal`.
- `srun` ends with the highest code of all tasks. When one fails, the others are stopped by SIGTERM,
  and end with 143. So every other code passes through `srun` as one above 240, in the order in
  which it counts: 241 for what may pass, 242 to 245 for the trainer's final errors 2 to 5, 246 and
  247 for a program that cannot be run (126, 127). (253 would come out as 1.)
- A job that ends within its grace period is not requeued by Slurm: the script does it. It does not
  where the job is cancelled, which `squeue` shows as COMPLETING.
- A step does not take `--cpus-per-task` over from its job.
- Of a job that is submitted with `--export=NONE`, as some sites have it by default, the steps see
  none of the script's variables either, unless `srun` is told to export all.
"""

import shlex
from collections.abc import Mapping, Sequence

_HEAD = """\
#!/usr/bin/env bash
# Printed by `gptddp-k8s render --api slurm`; to submit it: sbatch FILE
"""

_MEET = """
# Where the ranks meet: on the first host, at a port by the job's number, or the next free one.
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
[ -n "$host" ] || exit 1
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
port=$({python} - "$SLURM_JOB_ID" <<'END'
import importlib.util, socket, sys
if not importlib.util.find_spec("gptddp"):
    print("gptddp is not installed for", sys.executable, file=sys.stderr)
    sys.exit(127)
for n in range(20000):
    port = 10000 + (int(sys.argv[1]) + n) % 20000
    try:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("", port))
    except OSError:
        continue
    sys.exit(print(port))
END
) || {{ code=$?; [ $code -lt 126 ] || code=$((code - 120)); exit $code; }}
"""

_RANKS = """\
export MASTER_ADDR=$host MASTER_PORT=$port
"""

_LAUNCHERS = """\
export PET_RDZV_ENDPOINT=$host:$port PET_RDZV_ID=slurm-$SLURM_JOB_ID
export PET_NNODES=$SLURM_JOB_NUM_NODES PET_NPROC_PER_NODE={workers}
# Who has no key cannot change who is in the job; each start of the job has another.
GPTDDP_RENDEZVOUS_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export GPTDDP_RENDEZVOUS_KEY
"""

# In a folder that another user has made there might be anything.
_MEMORY = """\
memory=/dev/shm/gptddp-$SLURM_JOB_ID
mkdir -p -m 700 "$memory" && [ -O "$memory" ] && export GPTDDP_MEMORY=$memory
"""

_TASK = """
# A task. It outlives SIGTERM, which Slurm sends to each of its processes. srun ends with the
# highest code, and ranks that it stops end with 143: what else there is has to be above that.
task='
trap : TERM
export POD_NAME=$SLURMD_NODENAME
{memory}"$@"
code=$?
{clean}case $code in
  0 | 129 | 130 | 143) exit $code ;;  # done, or stopped by a signal
  [2-5]) exit $((code + 240)) ;;
  126 | 127) exit $((code + 120)) ;;
  *) exit 241 ;;
esac'

# Before the time limit Slurm tells this script alone; a cancelled job has been told already.
asked=
stop() {{ asked=yes; scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null; }}
trap stop TERM
srun --kill-on-bad-exit=1 --export=ALL --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node={tasks} \\
  --ntasks="$((SLURM_JOB_NUM_NODES * {tasks}))" --cpus-per-task={cpus} \\
  bash -c "$task" task \\
  {program} &
step=$!
wait "$step"; code=$?
while [ -n "$asked" ]; do asked=; wait "$step"; code=$?; done
[ "$code" -le 240 ] || code=$((code - 240))
"""

_END = """
# 2 to 5 are final, see docs/train.md of the sources; so are 6 and 7: no such program. All else goes
# on: 143 is stopped and saved, 1 a lost rank, 137 a killed task; but not again and again.
case $code in 0 | [2-7]) exit "$code" ;; esac
state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
[ "${state:-RUNNING}" = RUNNING ] || exit "$code"
if [ "$code" -ne 143 ] && [ "$SECONDS" -lt 120 ] && [ "${SLURM_RESTART_COUNT:-0}" -ge 3 ]; then
  echo "gptddp: failed within two minutes, after $SLURM_RESTART_COUNT requeues" >&2
  exit "$code"
fi
echo "gptddp: ended with $code; requeued, to go on from the newest state" >&2
scontrol requeue "$SLURM_JOB_ID"
exit "$code"
"""


def text(
    directives: Sequence[str],
    variables: Mapping[str, str],
    words: Mapping[str, str],
    tasks: int,
    cpus: int,
    workers: int | None,
) -> str:
    """The script. words: PYTHON and PROGRAM, quoted for the shell; tasks: of a node; cpus: of a
    task; workers: those of a task, where it is our launcher, else None."""
    launcher = workers is not None
    exports = "".join(f"export {name}={shlex.quote(v)}\n" for name, v in variables.items())
    task = _TASK.format(
        memory=_MEMORY if launcher else "",
        clean='rm -rf "$memory"\n' if launcher else "",
        tasks=tasks,
        cpus=cpus,
        program=words["PROGRAM"],
    )
    return "".join(
        [
            _HEAD,
            *(f"#SBATCH {line}\n" for line in directives),
            f"\nset -u\n{exports}",
            _MEET.format(python=words["PYTHON"]),
            _LAUNCHERS.format(workers=workers) if launcher else _RANKS,
            task,
            _END,
        ]
    )
