"""A real Slurm of N virtual nodes on this one machine, for tests: root, Debian's packages, no systemd, no cgroups.

Every node has its own host name, address, network and /dev/shm by namespaces, so ranks on it see different hosts and a
node dies when its link is taken down. All daemons are children of the test process and are ended by pid; state lies
in one folder, and names, addresses and ports are its own, so that two clusters can run at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

NAME, OWNER = "headrace-slurm-", "owner"
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "ip", "nsenter", "unshare")
CPUS = 16
READY_LIMIT_S = 60
MEND_LIMIT_S = 60
FOREIGN = ("SLURM_", "SBATCH_", "PMI", "OMPI_", "PRTE_", "MPI4PY_", "HEADRACE_")

CONF = """\
ClusterName=test
SlurmctldHost={host}({net}.254)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=1
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
JobRequeue=1
KillWait=5
MinJobAge=300
MessageTimeout=20
SlurmctldTimeout=30
SlurmdTimeout=10
InactiveLimit=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
TmpFS={folder}/tmp/%n
GresTypes=npu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=high Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=10
"""


def missing() -> list[str]:
    """What this machine lacks for a cluster."""
    programs = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    return programs + ([] if os.geteuid() == 0 else ["root"])


class Cluster:
    """Nodes node1 … nodeN; `start` and `stop` it."""

    def __init__(self, nodes: int) -> None:
        self.nodes = [f"node{number}" for number in range(1, nodes + 1)]
        self.folder = Path(tempfile.mkdtemp(prefix=NAME))
        self._tag = f"hr{uuid.uuid4().hex[:6]}"
        self._net = ""
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._slurmds: dict[str, subprocess.Popen[bytes]] = {}

    def environ(self, **extra: str) -> dict[str, str]:
        """For a user of this cluster."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        return {**kept, "SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1", **extra}

    # The daemons

    def start(self) -> None:
        with (self.folder.parent / f"{NAME}lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _sweep(self.folder.parent)
            (self.folder / OWNER).write_text(f"{os.getpid()} {self._tag}")
        self.folder.chmod(0o755)  # munge insists that others may look into it
        for name in ("munge", "state", "spool", "log", "tmp"):
            (self.folder / name).mkdir()
        _link_pmix()
        self._make_bridge()
        self._write_conf()
        self._munge()
        self._spawn("slurmctld", "-D", "-c")
        for node in self.nodes:
            self._start_node(node)
        self._until_ready()

    def stop(self) -> None:
        """End all jobs and daemons, and whatever is left in the nodes' namespaces, by pid."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.ask("scancel", "--user=root", limit_s=10)
            self.wait(lambda: not self.ask("squeue", "--noheader", limit_s=10), 20)
        daemons = [*self._daemons, *self._slurmds.values()]
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
            daemon.kill()
            daemon.wait()
        _remove(self._tag, self.folder)

    def _make_bridge(self) -> None:
        """A network 10.214.X.0/24 that nobody else uses."""
        _ip("link", "add", self._tag, "type", "bridge")
        for number in random.sample(range(1, 250), 249):
            net = f"10.214.{number}"
            used = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True).stdout
            if f" {net}." not in used:
                _ip("addr", "add", f"{net}.254/24", "dev", self._tag)
                self._net = net
                break
        _ip("link", "set", self._tag, "up")
        names = [f"{self._net}.{number} {node}" for number, node in enumerate(self.nodes, 1)]
        hosts = ["127.0.0.1 localhost", f"{self._net}.254 {socket.gethostname()}", *names]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")

    def _write_conf(self) -> None:
        conf = CONF.format(host=socket.gethostname(), net=self._net, port=_free_port(), folder=self.folder)
        for number, node in enumerate(self.nodes, 1):
            conf += f"NodeName={node} NodeAddr={self._net}.{number} Port=6818 CPUs={CPUS} RealMemory=16000 Gres=npu:8\n"
        (self.folder / "slurm.conf").write_text(conf)
        devices = [self.folder / f"npu{number}" for number in range(8)]
        for device in devices:
            os.mknod(device, 0o600 | 0o020000, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(f"Name=npu File={self.folder}/npu[0-7]\n")

    def _munge(self) -> None:
        folder = self.folder / "munge"
        folder.chmod(0o755)
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o600)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._spawn("munged", "--foreground", *(f"--{option}={folder / name}" for option, name in files.items()))
        self.wait((folder / "socket").exists, 10)

    def _start_node(self, node: str) -> None:
        space, link = self._space(node), self._link(node)
        (self.folder / "spool" / node).mkdir()
        (self.folder / "tmp" / node).mkdir()
        _ip("netns", "add", space)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", link, "master", self._tag, "up")
        _ip("-n", space, "addr", "add", f"{self._net}.{node.removeprefix('node')}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")
        self._boot(node)

    def _boot(self, node: str) -> None:
        inside = (
            f"hostname {node}; mount --bind {self.folder}/hosts /etc/hosts; mount -t tmpfs tmpfs /dev/shm; "
            f"exec slurmd -D -N {node}"
        )
        own = ["unshare", "--uts", "--mount", "--propagation", "private", "sh", "-c", inside]
        self._slurmds[node] = self._popen("nsenter", f"--net=/run/netns/{self._space(node)}", *own)

    def _spawn(self, *command: str) -> None:
        self._daemons.append(self._popen(*command))

    def _popen(self, *command: str) -> subprocess.Popen[bytes]:
        path = f"/usr/sbin:/sbin:{os.environ['PATH']}"
        environ, null = self.environ(PATH=path), subprocess.DEVNULL
        with open(self.folder / "log" / "daemons.log", "ab") as log:
            return subprocess.Popen(
                command, env=environ, stdin=null, stdout=log, stderr=log, cwd="/", preexec_fn=_end_with_tests
            )

    def _until_ready(self) -> None:
        def idle() -> bool:
            shown = subprocess.run(
                ["sinfo", "-h", "-N", "-p", "debug", "-t", "idle", "-o", "%N"],
                env=self.environ(),
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
            return len(shown.stdout.split()) == len(self.nodes)

        assert self.wait(idle, READY_LIMIT_S), (self.folder / "log" / "daemons.log").read_text()

    def _space(self, node: str) -> str:
        return f"{self._tag}-{node}"

    def _link(self, node: str) -> str:
        return f"{self._tag}v{node.removeprefix('node')}"

    # What tests do with it

    def ask(self, *command: str, limit_s: float = 60, check: bool = True) -> str:
        """What a command of Slurm prints."""
        run = subprocess.run(command, env=self.environ(), capture_output=True, text=True, timeout=limit_s, check=False)
        assert run.returncode == 0 or not check, f"{command}: {run.stdout}{run.stderr}"
        return run.stdout.strip()

    def cut(self, node: str) -> None:
        """Take the node's link down: it and all that runs on it are gone for the others."""
        _ip("link", "set", self._link(node), "down")

    def power_off(self, node: str) -> None:
        """End all that runs on a node that is cut off, Slurm's daemons, too."""
        self._slurmds[node].kill()
        self._slurmds[node].wait()
        _end_all([self._space(node)])

    def mend(self, node: str) -> None:
        """Bring the link back, boot the node, and wait until it is in use again."""
        self.power_off(node)
        _ip("link", "set", self._link(node), "up")
        self._boot(node)

        def idle() -> bool:
            self.ask("scontrol", "update", f"nodename={node}", "state=resume", check=False)
            return self.ask("sinfo", "-h", "-p", "debug", "-n", node, "-o", "%T") == "idle"

        assert self.wait(idle, MEND_LIMIT_S), self.ask("sinfo", "-N", "-l")

    def processes(self, *nodes: str) -> list[int]:
        """Pids of what runs on some nodes, or all, besides Slurm's daemons."""
        return [pid for pid in _inside([self._space(node) for node in nodes or self.nodes]) if not _is_daemon(pid)]

    def state(self, job: str) -> str:
        """For instance RUNNING, or COMPLETED."""
        shown = self.ask("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    def until_state(self, job: str, *states: str, limit_s: float = 200) -> str:
        assert self.wait(lambda: self.state(job) in states, limit_s), self.ask("scontrol", "show", "job", job)
        return self.state(job)

    @staticmethod
    def wait(done: Callable[[], object], limit_s: float, poll_s: float = 0.1) -> bool:
        """Whether it comes true in time."""
        end = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > end:
                return False
            time.sleep(poll_s)
        return True


def _sweep(folder: Path) -> None:
    """Remove what is left of clusters whose tests were killed."""
    for owner in folder.glob(f"{NAME}*/{OWNER}"):
        pid, tag = owner.read_text().split()
        if not Path(f"/proc/{pid}").exists():
            _remove(tag, owner.parent)


def _remove(tag: str, folder: Path) -> None:
    """End what is left on the nodes of a cluster, and remove its networks and its folder."""
    spaces = [space.name for space in Path("/run/netns").glob(f"{tag}-*")]
    _end_all(spaces)
    for space in spaces:
        subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
    subprocess.run(["ip", "link", "del", tag], check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def _end_all(spaces: Sequence[str]) -> None:
    """Kill until nothing is left: what is killed may have started more."""

    def gone() -> bool:
        pids = _inside(spaces)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    assert Cluster.wait(gone, 10), _inside(spaces)


def _inside(spaces: Sequence[str]) -> list[int]:
    """Pids of all that runs in some network namespaces."""
    numbers = {os.stat(f"/run/netns/{space}").st_ino for space in spaces}
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _space_of(int(entry)) in numbers]


def _end_with_tests() -> None:
    """Have the kernel end the daemon if the tests are killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _link_pmix() -> None:
    """Slurm's plugin opens the unversioned name, which only the development package ships."""
    for folder in Path("/usr/lib").glob("*/pmix2/lib"):
        if (folder / "libpmix.so.2").exists() and not (folder / "libpmix.so").exists():
            with contextlib.suppress(FileExistsError):
                (folder / "libpmix.so").symlink_to("libpmix.so.2")


def _space_of(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def _is_daemon(pid: int) -> bool:
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return True
    return name in ("slurmd", "slurmstepd") or name.startswith("slurmstepd")


__all__: Sequence[str] = ("Cluster", "missing")
