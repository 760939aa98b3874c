"""One started rank, from inside: what it sets up, what it runs, and the one report it sends to its parent."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from tgnn.errors import UserError
from tgnn.parallel.allocator import keep_freed_memory
from tgnn.parallel.comm import CommError, initialise, shutdown

_PR_SET_PDEATHSIG = 1
_FAREWELL_S = 3.0


@dataclass(frozen=True)
class Job:
    """Which rank a process is, and where it meets the others.

    `threads` is torch's thread count, None to leave it; `timeout` is in seconds.
    """

    rank: int
    ranks: int
    device: str
    init_method: str
    timeout: float
    threads: int | None


@dataclass(frozen=True)
class Report:
    """How a rank ended.

    kind is "done" (content: the return value, of rank 0 only), "user" (a `UserError`'s sentence), "error" (a
    traceback), "comm" (a traceback too, but of a failed collective: most often the echo of another rank's
    end) or "died" (content: the exit status; sent by nobody, the parent fills it in).
    """

    rank: int
    kind: str
    content: Any = None


def run_job(job: Job, pipe: Connection) -> None:
    """The body of a rank's process: receive (fn, args), run it, send one `Report`.

    A rank that failed leaves at once.
    """
    _die_with_parent()
    # A terminal sends Ctrl-C to everybody; the parent alone takes it and passes it on as SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if job.threads is not None:
            torch.set_num_threads(job.threads)
        keep_freed_memory()
        fn, args = pipe.recv()
        use_loopback()
        initialise(job.rank, job.ranks, job.device, job.init_method, job.timeout)
        value = _call(fn, args)
        # Plain pickle: torch's own way to send tensors needs this process to live on until they are read.
        message = pickle.dumps(Report(job.rank, "done", value if job.rank == 0 else None))
    except BaseException as error:
        pipe.send(_fault(job.rank, error))
        # The usual way out would first wait for a process group that no longer works.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)
    pipe.send_bytes(message)
    # Leaving while another rank still reads from this one can reset its connection. The parent closes the
    # pipe once every rank has reported; a limit makes a rank that returned too early an error, not a hang.
    pipe.poll(_FAREWELL_S)
    shutdown()


def _call(fn: Callable[..., Any], args: tuple) -> Any:
    """The function's return value; sys.exit() with no status or 0 is an ordinary return."""
    try:
        return fn(*args)
    except SystemExit as error:
        if error.code in (None, 0):
            return None
        raise


def _fault(rank: int, error: BaseException) -> Report:
    if isinstance(error, UserError):
        return Report(rank, "user", str(error))
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Report(rank, "comm" if _is_echo(error) else "error", text)


def _is_echo(error: BaseException | None) -> bool:
    """Whether a failed collective is behind this error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, CommError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def use_loopback() -> None:
    """Ranks on one machine talk over its loopback device; the user's own setting wins."""
    if sys.platform == "linux" and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _die_with_parent() -> None:
    """See to it that this process does not outlive its parent, however that one ends."""
    # The thread works everywhere, and covers a parent that is already gone; the kernel's signal on Linux
    # works even while some call here holds the interpreter.
    threading.Thread(target=_watch_parent, name="tgnn-parent-watch", daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)
