"""Mixed precision of a run: which number format rows and products have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_PRODUCTS = frozenset(
    (F.linear, torch.matmul, torch.mm, torch.addmm, Tensor.matmul, Tensor.mm, Tensor.addmm, Tensor.__matmul__)
)


def mixed_precision(dtype: torch.dtype, device: torch.device | str) -> AbstractContextManager:
    """The context of a forward pass over feature rows of `dtype`; weights are float32, or float64 for float64 rows.

    bfloat16 computes in bfloat16, as torch.autocast does. On a CPU without instructions for it, where such products
    take several times as long as in float32, only rows that are read and aggregated are in bfloat16: products
    are made in float32 and what they give stays so. Other types compute as they are.
    """
    device = torch.device(device)
    if dtype != torch.bfloat16:
        return nullcontext()
    if device.type == "cpu" and not cpu_has_bfloat16():
        return _Float32Products()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@functools.cache
def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies matrices in bfloat16 faster than through emulation, as far as torch tells."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


class _Float32Products(TorchFunctionMode):
    """Matrix products take bfloat16 operands as float32."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            args = tuple(_wide(arg) for arg in args)
            kwargs = {name: _wide(arg) for name, arg in kwargs.items()}
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
