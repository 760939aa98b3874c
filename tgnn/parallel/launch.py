"""Start ranks on this machine, or join torchrun's; a fault in one ends them all, its error shown last.

Locally started ranks are fresh processes ("spawn") that meet through a file in a temporary directory and talk
over loopback: no port is chosen, so several jobs run side by side. The parent only watches. It ends when its
ranks have ended, and they end when it does, also when it is killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from tgnn.errors import ReportedError, UserError, wrong
from tgnn.parallel.allocator import keep_freed_memory
from tgnn.parallel.comm import (
    current,
    initialise,
    initialise_from_env,
    rank_device,
    shutdown,
    torchrun_int,
    under_torchrun,
)
from tgnn.parallel.worker import Job, Report, run_job

DEFAULT_CPU_RANKS = 2
_POLL_S = 0.5
# A failed collective is most often the echo of another rank's fault: wait this long for the fault itself.
_ECHO_S = 2.0
# Between SIGTERM and SIGKILL.
_GRACE_S = 3.0


class RankError(ReportedError):
    """A rank raised or died. Its text ends with that rank's own traceback; `rank` says which one it was."""

    def __init__(self, rank: int, message: str):
        super().__init__(message)
        self.rank = rank


def launch(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int | None = None,
    device: str = "auto",
    timeout: float = 600.0,
    threads: int | None = None,
) -> Any:
    """Run `fn(*args)` on every rank and return rank 0's return value.

    Inside `fn`, `tgnn.parallel.current()` is the rank's `Comm`. One rank runs in this process. Under torchrun
    this process is a rank already: it joins the others, and gets its own return value.

    SIGINT and SIGTERM are passed on to the ranks once, as SIGTERM, and `fn` may handle it and return early; a
    second SIGINT kills them. Only rank 0's return value comes back; it is pickled. A rank's process keeps memory that
    was freed (`allocator.py`).

    Args:
        fn, args: picklable, so `fn` is defined at the top of a module. A script guards its call of `launch`
            with `if __name__ == "__main__":`, because each rank imports the script.
        ranks: how many; by default torchrun's number, else one per GPU, else 2 on the CPU.
        device: "auto" (GPUs if there is one per rank, else the CPU), "cpu" or "cuda"; rank r uses cuda:r.
        timeout: seconds after which a collective that some rank does not join fails.
        threads: torch threads per rank; by default OMP_NUM_THREADS if set, else an even share of the cores.

    Raises:
        UserError: a bad argument, or one that a rank raised.
        RankError: a rank raised something else, or died.
        KeyboardInterrupt, SystemExit: after SIGINT, SIGTERM, if a rank was ended by it.
    """
    if timeout <= 0:
        raise wrong("timeout", timeout, "a positive number of seconds", "600 is the default")
    if threads is not None and threads < 1:
        raise wrong("threads", threads, "at least 1", "leave it out to share the cores evenly")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise wrong(
            "launch",
            "a call while a started rank was importing the script",
            "one that runs in the parent only",
            'put the call under `if __name__ == "__main__":`',
        )
    ranks = _resolve_ranks(ranks, device)
    if under_torchrun():
        return _join_torchrun(fn, args, device, timeout, threads)
    rank_device(device, 0, ranks)  # refuses what cannot run before anything has been started
    if ranks == 1:
        return _run_here(fn, args, device, threads)
    return _run_ranks(fn, args, ranks, device, timeout, threads)


def default_ranks(device: str = "auto") -> int:
    """The number of ranks where none is given: torchrun's, else one per GPU, else 2 on the CPU."""
    if under_torchrun():
        return torchrun_int("WORLD_SIZE")
    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    return gpus or DEFAULT_CPU_RANKS


def _resolve_ranks(ranks: int | None, device: str) -> int:
    if ranks is None:
        return default_ranks(device)
    if ranks < 1:
        raise wrong("ranks", ranks, "at least 1", "give a positive number of ranks")
    if under_torchrun() and ranks != torchrun_int("WORLD_SIZE"):
        raise wrong(
            "ranks",
            ranks,
            f"torchrun's {torchrun_int('WORLD_SIZE')}",
            "leave ranks out, or start as many processes with torchrun --nproc-per-node",
        )
    return ranks


@contextlib.contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    """Torch's thread count for a while; None leaves it."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads is not None:
            torch.set_num_threads(before)


def _run_here(fn: Callable[..., Any], args: tuple, device: str, threads: int | None) -> Any:
    """One rank, in this process."""
    keep_freed_memory()
    initialise(device=rank_device(device, 0, 1))
    try:
        with _threads(threads):
            return fn(*args)
    finally:
        shutdown()


def _join_torchrun(
    fn: Callable[..., Any], args: tuple, device: str, timeout: float, threads: int | None
) -> Any:
    """This process is one of torchrun's ranks. After a fault torchrun ends all of them."""
    keep_freed_memory()
    initialise_from_env(device, timeout)
    with _threads(threads):
        value = fn(*args)
    current().barrier()  # leaving while another rank still reads from this one can reset its connection
    shutdown()
    return value


def _share_of_cores(ranks: int) -> int | None:
    """Threads for each of `ranks` ranks, or None where the user's OMP_NUM_THREADS has told torch already."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


def _run_ranks(
    fn: Callable[..., Any], args: tuple, ranks: int, device: str, timeout: float, threads: int | None
) -> Any:
    """Start the ranks, watch them, end them."""
    threads = threads or _share_of_cores(ranks)
    work = _pickled(fn, args)
    with tempfile.TemporaryDirectory(prefix="tgnn-") as folder, _Signals() as signals:
        meeting = (Path(folder) / "rendezvous").as_uri()
        jobs = [
            Job(rank, ranks, str(rank_device(device, rank, ranks)), meeting, timeout, threads)
            for rank in range(ranks)
        ]
        family = _Family(signals)
        try:
            family.start(jobs, work)
            return family.watch()
        finally:
            family.end()


def _pickled(fn: Callable[..., Any], args: tuple) -> bytes:
    # Plain pickle copies tensors; torch's own sharing wants room in /dev/shm, which containers often lack.
    try:
        return pickle.dumps((fn, args), protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise wrong(
            "launch",
            f"a function or argument that cannot be pickled ({error})",
            "a function from the top of a module and plain arguments",
            "move the function out of other functions, and open files and the like inside it",
        ) from error


class _Signals:
    """SIGINT and SIGTERM while ranks run: remembered, and the waiting parent woken (main thread only)."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.wake, self._waker = multiprocessing.Pipe(duplex=False)
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(signum) != signal.SIG_IGN:
                    self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self.wake.close()
        self._waker.close()

    def _note(self, signum: int, frame: object) -> None:
        self.seen.append(signum)
        self._waker.send_bytes(b"!")

    @contextlib.contextmanager
    def ignored_by_children(self) -> Iterator[None]:
        """A process started in here ignores SIGINT from its first moment, also while it still imports."""
        if signal.SIGINT in self._previous:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            yield
        finally:
            if signal.SIGINT in self._previous:
                signal.signal(signal.SIGINT, self._note)


class _Family:
    """The started ranks as their parent sees them: processes, pipes they report on, reports so far."""

    def __init__(self, signals: _Signals):
        self._signals = signals
        self._processes: list[SpawnProcess] = []
        self._pipes: dict[int, connection.Connection] = {}
        self._reports: dict[int, Report] = {}  # in order of arrival
        self._timeout = 0.0
        self._passed_on = False

    def start(self, jobs: list[Job], work: bytes) -> None:
        """Start one process per job, all at once (importing torch takes seconds); then send the work."""
        context = multiprocessing.get_context("spawn")
        self._timeout = jobs[0].timeout
        for job in jobs:
            self._pipes[job.rank], theirs = context.Pipe()
            process = context.Process(target=run_job, args=(job, theirs), name=f"tgnn-rank-{job.rank}")
            try:
                with self._signals.ignored_by_children():
                    process.start()
            finally:
                theirs.close()  # the rank has its own copy; its end must show as end of file here
            self._processes.append(process)
        for pipe in self._pipes.values():
            with contextlib.suppress(OSError):  # a rank that is gone already is found by `watch`
                pipe.send_bytes(work)

    def watch(self) -> Any:
        """Wait for every rank's report; rank 0's return value. Raises as `launch` does."""
        echo_until = None
        while len(self._reports) < len(self._processes):
            self._collect()
            self._pass_signals_on()
            fault = self._root_fault()
            if fault is not None:
                echo_until = echo_until or time.monotonic() + _ECHO_S
                if fault.kind != "comm" or time.monotonic() > echo_until:
                    break
        fault = self._root_fault()
        if fault is not None:
            raise self._error(fault)
        self._close_pipes()  # tells every rank that all are done
        for process in self._processes:
            process.join(self._timeout)
        return self._reports[0].content

    def end(self) -> None:
        """End whatever still runs: SIGTERM, and SIGKILL for those that do not heed it. Called once, last."""
        running = [process for process in self._processes if process.is_alive()]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in running:
            if process.is_alive():
                process.kill()
                process.join()
        self._close_pipes()
        for process in self._processes:
            process.close()

    def _close_pipes(self) -> None:
        for pipe in self._pipes.values():
            pipe.close()

    def _collect(self) -> None:
        """Wait a little for something to happen, then take in what ranks reported and which of them died."""
        waiting = [rank for rank in range(len(self._processes)) if rank not in self._reports]
        sources = [self._processes[rank].sentinel for rank in waiting]
        sources += [self._pipes[rank] for rank in waiting if not self._pipes[rank].closed]
        connection.wait([*sources, self._signals.wake], timeout=_POLL_S)
        for rank in waiting:
            # Asked before the pipe: what a process that has ended wrote is in the pipe by then.
            status = self._processes[rank].exitcode
            pipe = self._pipes[rank]
            try:
                if not pipe.closed and pipe.poll():
                    self._reports[rank] = pipe.recv()
            except (EOFError, ConnectionResetError):
                pipe.close()
            if status is not None and rank not in self._reports:
                self._reports[rank] = Report(rank, "died", status)

    def _pass_signals_on(self) -> None:
        """The first signal goes to every rank as SIGTERM; a second Ctrl-C kills them."""
        while self._signals.wake.poll():
            self._signals.wake.recv_bytes()
        seen = self._signals.seen
        if seen and not self._passed_on:
            self._passed_on = True
            for process in self._processes:
                process.terminate()
        if signal.SIGINT in seen[1:]:
            for process in self._processes:
                process.kill()
            raise KeyboardInterrupt

    def _root_fault(self) -> Report | None:
        """The first fault that is not the echo of another, else the first echo."""
        faults = [report for report in self._reports.values() if report.kind != "done"]
        return min(faults, key=lambda report: report.kind == "comm", default=None)

    def _states(self, failed: int) -> str:
        """What the ranks that did not fail were doing, for the message."""
        ranks = [rank for rank in range(len(self._processes)) if rank != failed]
        running = [str(rank) for rank in ranks if rank not in self._reports]
        returned = [
            str(rank) for rank in ranks if rank in self._reports and self._reports[rank].kind == "done"
        ]
        text = f"; still running: {', '.join(running)}" if running else ""
        return text + (f"; returned already: {', '.join(returned)}" if returned else "")

    def _error(self, fault: Report) -> BaseException:
        """What the parent raises for a fault."""
        stopped = any(r.kind == "died" and r.content == -signal.SIGTERM for r in self._reports.values())
        if self._passed_on and (stopped or fault.kind == "comm"):
            interrupted = self._signals.seen[0] == signal.SIGINT
            return KeyboardInterrupt() if interrupted else SystemExit(128 + signal.SIGTERM)
        if fault.kind == "user":
            return UserError(fault.content)
        who = f"rank {fault.rank} of {len(self._processes)}"
        states = self._states(fault.rank)
        if fault.kind == "died":
            return RankError(fault.rank, f"{who} {_ending(fault.content)}{states}; all were ended")
        if fault.kind == "comm":
            who = f"{who} waited in vain for another rank (timeout {self._timeout:g} s){states}"
        else:
            who = f"{who} failed{states}"
        return RankError(fault.rank, f"{who}; all were ended. Its traceback:\n\n{fault.content.rstrip()}")


def _ending(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"ended with status {status} without a report (what it printed is above)"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    hint = ", perhaps by the system for want of memory" if -status == signal.SIGKILL else ""
    return f"was ended by signal {-status} ({name}){hint}"
