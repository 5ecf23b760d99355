"""The law: a child's whole process group ends no later than grpod does, however grpod ends (kill -9 included).

    grpod ──socket──▶ reaper ──fork, setsid, exec──▶ child ──▶ its workers
                      (this)                         └────── one process group ──────┘

The reaper is the child's parent, so that the group's number cannot be given to strangers while it may still be signalled: the
dead leader stays a zombie until its group is gone. It ends the group when grpod writes seconds of grace to the socket, when
the socket closes, or when grpod is no longer its parent; and what is left of the group when the child has ended by itself.
Then it ends too, with the child's exit code (128 + n after signal n). The grace that grpod has asked for ends with grpod.

Run by path, with -I -S: it must start in milliseconds and need nothing but the standard library.

    reaper.py SOCKET_FD COMMAND...        first message on the socket: the process id of the child
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import socket
import sys
import time

GRACE_S = 2.0  # between SIGTERM and SIGKILL when grpod is gone and nobody asked for more
LOOK_S = 0.5  # a forked relative of grpod may hold the socket open: so its parent is looked at too
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(link: socket.socket, command: list[str]) -> int:
    grpod = os.getppid()
    os.set_inheritable(link.fileno(), False)
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: 0
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the child come here, also those that left its group
    bell, ringer = os.pipe()
    os.set_blocking(ringer, False)
    signal.set_wakeup_fd(ringer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # only grpod, or its end, ends the child; handlers (unlike SIG_IGN) end at exec

    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(127)

    with contextlib.suppress(OSError):  # grpod is gone already: the loop will see it
        link.sendall(str(child).encode())
    terminated, alone, kill_at = False, False, math.inf
    while not ended(child):
        now = time.monotonic()
        if now >= kill_at:
            end_group(child, signal.SIGKILL)
            kill_at = math.inf
        watched = [bell] if alone else [bell, link.fileno()]
        ready = select.select(watched, [], [], max(0.0, min(LOOK_S, kill_at - now)))[0]
        if bell in ready:
            os.read(bell, 4096)
        if not alone and (link.fileno() in ready or os.getppid() != grpod):
            grace_s = asked_grace(link)
            alone = grace_s is None
            kill_at = min(kill_at, time.monotonic() + (GRACE_S if grace_s is None else grace_s))
            if not terminated:
                end_group(child, signal.SIGTERM)
            terminated = True

    end_group(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    end_orphans()
    return os.waitstatus_to_exitcode(status)


def asked_grace(link: socket.socket) -> float | None:
    """None: grpod is gone."""
    link.setblocking(False)
    try:
        return float(link.recv(32))
    except (OSError, ValueError):
        return None


def ended(child: int) -> bool:
    """Buries adopted orphans, but leaves the child itself a zombie."""
    while True:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None or found.si_pid == child:
            return found is not None
        os.waitpid(found.si_pid, 0)


def end_group(child: int, number: int) -> None:
    try:
        os.killpg(child, number)
    except ProcessLookupError:  # between fork and setsid
        os.kill(child, number)
    except PermissionError:  # macOS says so of zombies
        pass


def end_orphans() -> None:
    """What left the group was adopted here; ends when there is none."""
    try:
        while True:
            with open(f"/proc/self/task/{os.getpid()}/children") as listed:
                for pid in listed.read().split():
                    os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)
    except (ChildProcessError, FileNotFoundError):
        return


if __name__ == "__main__":
    code = main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    sys.exit(code if code >= 0 else 128 - code)
