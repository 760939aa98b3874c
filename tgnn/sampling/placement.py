"""How much memory caches may take: sizes in bytes, or `auto` as a share of what is free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

# Of the memory that is free when a run starts, over all ranks of this machine: on the CPU for a rank's own feature
# rows (they are in the page cache as well) and for copies of other ranks'; on a GPU machine for pinned rows.
FEATURE_SHARE, HALO_SHARE, PINNED_SHARE = 0.10, 0.10, 0.50
# Of a GPU's free memory, at a run's start, for the in-edges; above it they are pinned in host memory.
EDGE_SHARE = 0.40
# Of a GPU's memory that is left after a measured step; the rest is for steps that are larger than that one.
DEVICE_SHARE = 0.80


@dataclass(frozen=True)
class Budget:
    """Bytes that a rank may use for copies: in its device's memory (RAM on the CPU), and in pinned host memory."""

    device_bytes: int
    pinned_bytes: int = 0
    whole: bool = False
    """Copy everything or nothing: two reads instead of one cost more than the file's page cache."""


def feature_budget(size: int | None, device: torch.device, ranks: int) -> Budget:
    """What a rank's own feature rows may take; `size` in bytes, None for auto.

    `ranks` share this machine. On a GPU auto gives the pinned part only: `device_memory_left` says the rest once a
    step has been measured.
    """
    free = free_bytes() // max(1, ranks)
    if device.type == "cpu":
        return Budget(int(FEATURE_SHARE * free), whole=True) if size is None else Budget(size)
    return Budget(size or 0, int(PINNED_SHARE * free))


def halo_budget(size: int | None, device: torch.device, ranks: int) -> int:
    """Bytes for copies of other ranks' rows; `size` in bytes, None for auto (on a GPU 0 until a step is measured)."""
    if size is not None:
        return size
    return int(HALO_SHARE * free_bytes() / max(1, ranks)) if device.type == "cpu" else 0


def device_memory_left(device: torch.device) -> int:
    """Bytes of a GPU's memory that caches may take after a step: what is free beside the step's own peak."""
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return int(DEVICE_SHARE * max(0, free + held))


def placement_of_edges(placement: str, num_bytes: int, device: torch.device | str) -> str:
    """`device` or `pinned`, for edges of so many bytes; `auto` leaves most of a GPU's memory to the training."""
    if placement != "auto":
        return placement
    if torch.device(device).type == "cpu":
        return "device"
    free, _ = torch.cuda.mem_get_info(device)
    return "device" if num_bytes <= EDGE_SHARE * free else "pinned"


def free_bytes() -> int:
    """Memory of this machine that a process can still get, in bytes; within the limit of a container's group."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(0, free)
