"""Timing on a CPU or GPU: cold caches, interleaved rounds, percentiles, and what a plain copy reaches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

# More than the last-level cache: a GPU's is at most some 128 MiB.
FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}
COPY_BYTES = {"cuda": 1 << 30, "cpu": 128 << 20}


class Clock:
    """Times calls on one device, each after its caches were filled with something else."""

    def __init__(self, device: torch.device, flush_bytes: int | None = None) -> None:
        self.device = device
        size = FLUSH_BYTES[device.type] if flush_bytes is None else flush_bytes
        self._buffer = torch.empty(size, dtype=torch.int8, device=device)

    def once(self, call: Callable[[], object]) -> float:
        """Seconds of one call with cold caches."""
        self._buffer.zero_()
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def measure(
        self, calls: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2
    ) -> dict[str, list[float]]:
        """Seconds of every call in each of `rounds` rounds, the calls taking turns; `warmup` rounds come
        first.
        """
        times: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(warmup + rounds):
            for name, call in calls.items():
                seconds = self.once(call)
                if number >= warmup:
                    times[name].append(seconds)
        return times

    def copy_bandwidth(self, rounds: int = 5) -> float:
        """Bytes per second, read and written, of copying a large buffer: the median."""
        source = torch.zeros(COPY_BYTES[self.device.type], dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        times = self.measure({"copy": lambda: target.copy_(source)}, rounds)["copy"]
        return 2 * source.numel() / statistics.median(times)


def percentiles(times: Sequence[float]) -> dict[str, float]:
    """p20, p50 and p80 of `times` (nearest rank)."""
    ordered = sorted(times)
    return {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (20, 50, 80)}


def device_of(name: str) -> torch.device:
    """The device that `--device` names; `auto` takes a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
