"""A Python that starts at once, to put in the place of `sys.executable`: a start is a fork of a process that is warm.

What is started so has arguments, environment, folder, open files and exit code as a fresh process would. Whoever kills
or signals the process that was started, which only waits, kills or signals the fork.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from sandbox import forked

STARTED = """#!{python} -IS
import json, os, signal, socket, sys

if sys.argv[1] != "-m":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
hub = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
hub.connect({address!r})
files = []
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        files += [number] if os.get_inheritable(number) else []
    except OSError:  # of the listing itself
        pass
told = dict(words=sys.argv, environment=dict(os.environ), folder=os.getcwd(), files=files)
socket.send_fds(hub, [json.dumps(told).encode()], files)
fork = int(hub.recv(100))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(fork, number))
code = int(hub.recv(100) or -signal.SIGKILL)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextlib.contextmanager
def python() -> Iterator[str]:
    """Yield its path; where the system lacks what it needs, that of the real one."""
    if not hasattr(os, "pidfd_open"):
        yield sys.executable
        return
    with tempfile.TemporaryDirectory(prefix="quick-", dir="/tmp") as folder:  # a socket's path must be short
        address, path = f"{folder}/hub", Path(folder, "python")
        path.write_text(STARTED.format(python=sys.executable, address=address))
        path.chmod(0o755)
        hub = forked(serve, address)
        try:
            while not Path(address).exists():
                assert hub.exitcode is None
                hub.join(0.01)
            yield str(path)
        finally:
            hub.kill()
            hub.join()


def serve(address: str) -> None:
    """Fork for whoever connects, until the tests end."""
    tests = multiprocessing.parent_process()
    assert tests is not None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{address}.new")
    listener.listen(16)
    Path(f"{address}.new").rename(address)  # now it can be connected to
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks what became of supervisors
    while listener in select.select([listener, tests.sentinel], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _supervise(connection)
        connection.close()


def _supervise(connection: socket.socket) -> NoReturn:
    """Fork what was asked for; end it with whoever asked, and tell that one how it ended."""
    message, files, _, _ = socket.recv_fds(connection, 2**20, 64)
    fork = os.fork()
    if fork == 0:
        connection.close()
        _become(json.loads(message), files)
    with contextlib.suppress(OSError):  # whoever asked may be gone
        connection.send(str(fork).encode())
    for file in files:
        os.close(file)
    if connection in select.select([os.pidfd_open(fork), connection], [], [])[0]:
        os.kill(fork, signal.SIGKILL)
    _, status = os.waitpid(fork, 0)
    with contextlib.suppress(OSError):
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(told: dict[str, Any], files: list[int]) -> NoReturn:
    """Be a Python that was started as `python -m MODULE WORDS`."""
    away = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]
    for file, number in zip(away, told["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environment"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    sys.executable, _, module, *words = told["words"]
    sys.argv = ["", *words]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
            code = 1
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
