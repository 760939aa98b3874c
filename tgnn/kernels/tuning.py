"""Launch configurations of Triton kernels, looked up by what a launch looks like; nothing is timed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Config:
    """How a kernel is launched: its tile sizes (constexpr arguments by name), warps and pipeline stages."""

    tiles: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """All that is needed to compile, tune and launch one kernel.

    name: of the kernel, e.g. `spmm_sum`; op: the public op it serves, e.g. `spmm`.
    kernel: the `triton.jit` function.
    signature: (dtype, index dtype) -> {argument: Triton type, `*fp32`, `*i32`, `i64`, ... or `constexpr`}.
    constants: width -> the constexpr arguments that are no tiles.
    configs: width -> candidates; the first is the default.
    """

    name: str
    op: str
    kernel: Any
    signature: Callable[[torch.dtype, torch.dtype], dict[str, str]]
    constants: Callable[[int], dict[str, Any]]
    configs: Callable[[int], tuple[Config, ...]]


def lookup(spec: KernelSpec, device: torch.device, dtype: torch.dtype, width: int, degree: float) -> Config:
    """The configuration for a launch on rows of `width` elements and segments of `degree` edges on average."""
    return spec.configs(width)[0]
