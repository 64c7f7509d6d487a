"""The process that holds one untrusted program: `python -I -S jail.py`, standard library only.

It reads a specification from stdin (8 bytes length, JSON), builds the box, runs the program in it, watches what all its
processes use together, ends all of them, and tells what happened as one line of JSON on the descriptor it was given.
The end of stdin means that nobody waits any more: then everything is ended at once.

With namespaces the program is process 1's child in process, user, network, mount and IPC namespaces of its own: it sees
read-only system folders and a private folder in memory, no network, no other process; when process 1 ends the kernel kills
the rest. Without them it runs in the private folder with the limits alone, and this process, to which all orphans fall,
kills whatever is left.
"""

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import select
import signal
import sys
import time

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_USER, CLONE_PID, CLONE_REST = 0x10000000, 0x20000000, 0x40000000 | 0x00020000 | 0x08000000  # net, mount, ipc
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MS_RELATIME, MNT_DETACH = 1 << 21, 2
PR_SET_PDEATHSIG, PR_SET_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(platform.machine())
PR_SET_SECCOMP, SECCOMP_FILTER, SECCOMP_ALLOW, SECCOMP_ERROR = 22, 2, 0x7FFF0000, 0x00050000
REFUSED = {
    "x86_64": (0xC000003E, 56, {"shmget": 29, "unshare": 272, "setns": 308, "memfd_create": 319}),
    "aarch64": (0xC00000B7, 220, {"shmget": 194, "unshare": 97, "setns": 268, "memfd_create": 279}),
}.get(platform.machine())
"""Architecture, number of `clone`, and the calls by which a program would get namespaces, or memory that nobody counts."""
REFUSED_EVERYWHERE = {"io_uring_setup": 425, "clone3": 435, "memfd_secret": 447}
FIRST_STRANGER, NUM_STRANGERS = 1 << 20, 1 << 24
PAUSE_SECONDS = 0.02
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")


def check(result: int, what: str) -> None:
    """Raise an OSError for a C function that failed."""
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Put something into the tree of files."""
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    check(LIBC.mount(*texts, flags, None if data is None else data.encode()), f"mount {target}")


def stranger() -> tuple[int, int]:
    """The user that the program runs as: ourselves, or for root somebody new, since root's processes are not counted."""
    if os.getuid() != 0:
        return os.getuid(), os.getgid()
    number = FIRST_STRANGER + int.from_bytes(os.urandom(4), "little") % NUM_STRANGERS
    return number, number


def become(user: int, group: int) -> None:
    """Give up being root for good."""
    if os.getuid() != user:
        os.setgroups([])
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)


def enter_namespaces() -> None:
    """Children leave the machine's processes; who is not root needs users of his own to be allowed to do that."""
    user, group = os.getuid(), os.getgid()
    check(LIBC.unshare(CLONE_PID | (CLONE_USER if user else 0)), "unshare")
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def bind(source: str, root: str) -> None:
    """Show a folder or file of the machine, read-only, in the new root."""
    target = root + source
    if os.path.islink(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(source), target)
        return
    if not os.path.exists(source):
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w"):
            pass
    mount(source, target, None, MS_BIND | MS_REC)
    kept = os.statvfs(target).f_flag
    flags = (kept & 0xE) | (kept & 0xC00) | (MS_RELATIME if kept & 0x1000 else 0)  # what was locked stays
    if not source.startswith("/dev/"):
        mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | flags)


def build_root(spec: dict) -> None:
    """A root of memory: system folders, the interpreter, a few devices, and the private folder /box."""
    root = spec["folder"]
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    shown = [*SYSTEM_FOLDERS, *spec["readable"]]
    shown = [path for path in shown if not any(path != other and path.startswith(other + "/") for other in shown)]
    for path in (*dict.fromkeys(shown), *DEVICES):
        bind(path, root)
    for name in ("box", "proc", "old"):
        os.mkdir(f"{root}/{name}")
    user, group = spec["user"]
    settings = f"size={spec['disk_bytes']},mode=700,uid={user},gid={group}"
    mount("tmpfs", f"{root}/box", "tmpfs", MS_NOSUID | MS_NODEV, settings)
    if not os.path.lexists(f"{root}/tmp"):  # it is there if the interpreter lies in the machine's own
        os.symlink("box", f"{root}/tmp")
    with contextlib.suppress(OSError):  # not every container allows it; programs rarely need it
        mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV)
    check(LIBC.syscall(PIVOT_ROOT, root.encode(), f"{root}/old".encode()), "pivot_root")
    os.chdir("/")
    check(LIBC.umount2(b"/old", MNT_DETACH), "umount")
    os.rmdir("/old")
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def write_files(folder: str, spec: dict) -> None:
    """Put the given files into the private folder, the program's own; their names were checked."""
    for name, text in spec["files"].items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
    for parent, folders, files in os.walk(folder):
        for name in (".", *folders, *files):
            os.chown(os.path.join(parent, name), *spec["user"])


def limit(spec: dict) -> None:
    """What the kernel enforces for each process."""
    for kind, value in (
        (resource.RLIMIT_CPU, int(spec["cpu_seconds"] + 2)),  # the watch is finer, this holds even if it comes late
        (resource.RLIMIT_AS, spec["memory_bytes"]),
        (resource.RLIMIT_FSIZE, spec["file_bytes"]),
        (resource.RLIMIT_NPROC, spec["processes"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


class Instruction(ctypes.Structure):
    """Of the kernel's packet filter: operation, jumps if true and if false, operand."""

    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("operand", ctypes.c_uint32))


class Filter(ctypes.Structure):
    """A whole one."""

    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(Instruction)))


def refuse_calls() -> None:
    """The kernel answers some calls with ENOSYS from here on, for this process and all that it starts.

    Programs know what to do then: `clone3` is tried before `clone`, whose flags can be looked at.
    """
    if REFUSED is None:
        return
    load, equal, at_least, has_bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    architecture, clone, numbers = REFUSED
    refused = sorted({*numbers.values(), *REFUSED_EVERYWHERE.values()})
    last = len(refused) + 8  # where the call is refused; one before, it is allowed
    program = [
        (load, 0, 0, 4),
        (equal, 0, last - 2, architecture),
        (load, 0, 0, 0),
        (at_least, last - 4, 0, 0x40000000),  # the other numbers of x86-64
        *((equal, last - 5 - place, 0, number) for place, number in enumerate(refused)),
        (equal, 0, 2, clone),
        (load, 0, 0, 16),
        (has_bits, 1, 0, CLONE_USER),
        (give, 0, 0, SECCOMP_ALLOW),
        (give, 0, 0, SECCOMP_ERROR | errno.ENOSYS),
    ]
    instructions = (Instruction * len(program))(*(Instruction(*fields) for fields in program))
    check(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_FILTER, ctypes.byref(Filter(len(program), instructions)), 0, 0), "seccomp")


def start_program(spec: dict, folder: str) -> int:
    """Fork, and become the program; returns its process id."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        os.chdir(folder)
        with open(spec["stdin"], "rb") as file:
            os.dup2(file.fileno(), 0)
        os.closerange(3, 4096)
        become(*spec["user"])
        limit(spec)
        LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        with contextlib.nullcontext() if spec["isolate"] else contextlib.suppress(OSError):
            refuse_calls()
        for number in range(1, signal.NSIG):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
        os.execve(spec["arguments"][0], spec["arguments"], {**environment, **spec["environment"]})
    except OSError as error:
        os.write(2, f"the program could not be started: {error}\n".encode())
    finally:
        os._exit(126)


def reap(program: int) -> int | None:
    """Wait for whatever ends; the program's status once it has."""
    status = None
    while True:
        try:
            ended, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if ended == 0:
            return status
        if ended == program:
            status = code


def be_first(spec: dict, go: int, told: int) -> None:
    """Process 1 of the namespaces: build the box, run the program, reap orphans, and take all along at the end."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if not os.read(go, 1):
        os._exit(1)
    try:
        check(LIBC.unshare(CLONE_REST), "unshare")  # here, since the watch keeps the machine's /proc
        build_root(spec)
        write_files("/box", spec)
        program = start_program(spec, "/box")
    except OSError as error:
        os.write(told, json.dumps({"broken": str(error)}).encode())
        os._exit(1)
    while (status := reap(program)) is None:
        time.sleep(PAUSE_SECONDS / 4)
    os.write(told, json.dumps({"status": status}).encode())
    os._exit(0)


def tree(root_pid: int, first: int) -> dict[int, tuple[int, int, int]]:
    """Process ids of everything that runs below, and their (pages, own ticks, ticks of children that were waited for)."""
    found = {}
    parents = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
            parents[int(name)] = int(fields[1])
            found[int(name)] = (int(fields[21]), sum(map(int, fields[11:13])), sum(map(int, fields[13:15])))
    below, grown = {root_pid}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        grown, below = bool(more), below | more
    return {pid: found[pid] for pid in below - {root_pid, first}}


def watch(spec: dict, first: int, told: int) -> dict:
    """Until the program ends or breaks a limit; what happened."""
    begin, said = time.monotonic(), b""
    own: dict[int, int] = {}  # ticks, also of those that are gone: nobody may have waited for them
    while True:
        ready, _, _ = select.select([0, told], [], [], PAUSE_SECONDS)
        if 0 in ready and not os.read(0, 1):
            return {"killed": "abandoned"}
        if told in ready:
            part = os.read(told, 4096)
            said += part
            if not part:
                return json.loads(said) if said else {"broken": "process 1 died"}
        if time.monotonic() - begin > spec["wall_seconds"]:
            return {"killed": "wall"}
        used = tree(os.getpid(), first)
        if len(used) > spec["processes"]:
            return {"killed": "processes"}
        own.update((pid, ticks) for pid, (_, ticks, _) in used.items())
        if sum(pages for pages, _, _ in used.values()) * PAGE > spec["memory_bytes"]:
            return {"killed": "memory"}
        if max(sum(own.values()), sum(sum(ticks) for _, *ticks in used.values())) / TICKS > spec["cpu_seconds"]:
            return {"killed": "cpu"}


def kill_all(first: int) -> None:
    """End every process below this one; orphans come here, so that none gets away."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(first, signal.SIGKILL)
    while True:
        for pid in tree(os.getpid(), 0):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def run_plain(spec: dict, told: int) -> None:
    """The child that runs the program without namespaces; it only waits for the program."""
    write_files(spec["folder"], spec)
    program = start_program(spec, spec["folder"])
    _, status = os.waitpid(program, 0)
    os.write(told, json.dumps({"status": status}).encode())
    os._exit(0)


def main() -> None:
    """Run one specification."""
    size = int.from_bytes(os.read(0, 8), "little")
    text = b""
    while len(text) < size:
        part = os.read(0, size - len(text))
        if not part:
            return  # who asked has died
        text += part
    spec = json.loads(text)
    answer = int(sys.argv[1])
    LIBC.prctl(PR_SET_SUBREAPER, 1, 0, 0, 0)
    spec["user"] = stranger() if spec["isolate"] else (os.getuid(), os.getgid())
    isolated = spec["isolate"]
    if isolated:
        try:
            enter_namespaces()
        except OSError as error:
            os.write(answer, json.dumps({"broken": f"no namespaces: {error}"}).encode())
            return
    told, tell = os.pipe()
    wait, go = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(told)
        os.close(go)
        os.close(answer)
        if isolated:
            be_first(spec, wait, tell)
        run_plain(spec, tell)
    os.close(tell)
    os.close(wait)
    null = os.open("/dev/null", os.O_RDWR)
    for stream in (1, 2):
        os.dup2(null, stream)  # only the program holds the pipes: their end is its end
    os.write(go, b"g")
    outcome = watch(spec, first, told)
    kill_all(first)
    os.write(answer, json.dumps(outcome).encode())


if __name__ == "__main__":
    main()
