"""The built-in hardware profiles, every number with its source.

What is neither in a datasheet nor measured is called assumed: `python -m tgnn.plan --measure` replaces all of it. Rates
are in the units of `profile.Rates`; G stands for 1e9. A vendor's bandwidth counts bytes at the memory, as ours do.
"""

from __future__ import annotations

from typing import Any

G = 1e9
Number = tuple[float, str]

# What an H200 (torch, CUDA 13) was measured to reach of its datasheet: 4.3 of 4.8 TB/s, 788 of 989 bf16 TFLOP/s.
COPY_SHARE, MATMUL_SHARE = 0.9, 0.8
_SAMPLED_ON_V100 = 34.29e6 * 1.35


def _gpu(
    *, bandwidth: float, float32: float, bfloat16: float, float64: float, sort: float, host: Number,
    exchange: Number, reduce: Number, memory: float, link: str, sheet: str, crowded_host: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A GPU's profile from its datasheet (bytes/s, flop/s), its links, and one set of assumed shares."""
    copy = COPY_SHARE * bandwidth
    copied = f"{sheet}: {bandwidth / G:g} GB/s, of which a copy on an H200 was measured to reach 0.9"
    products = f"{sheet}, of which a bf16 product on an H200 was measured to reach 0.8"

    def share(part: float, why: str = "assumed: the goal of these kernels") -> Number:
        return part * copy, f"{part:g} of copy, {why}"

    sampled = "Quiver, Introduction_en: 34.29M edges/s from host memory, 1.35 of that from a V100's own"
    sorted_ = "assumed: a radix sort of ids and what follows it"
    rates: dict[str, Number] = {
        "launch_s": (7e-6, "assumed: an operation of eager torch"),
        "copy": (copy, copied),
        "matmul_float32": (MATMUL_SHARE * float32, products),
        "matmul_bfloat16": (MATMUL_SHARE * bfloat16, products),
        "matmul_float64": (MATMUL_SHARE * float64, products),
        "gather": share(0.9, "assumed: rows of 512 bytes are read in whole sectors"),
        "gather_host": (2 * host[0], host[1]),
        "scatter": share(0.6, "assumed"),
        "aggregate": share(0.8),
        "aggregate_backward": share(0.8),
        "extreme": share(0.8),
        "extreme_backward": share(0.6, "assumed"),
        "attention": share(0.8),
        "attention_backward": share(0.6, "assumed"),
        "transpose": (sort, sorted_),
        "dropout": (0.5 * copy / 8, "assumed: half of what moving the elements alone would give"),
        "sample_rows": (1e12, "contained in sample_edges"),
        "sample_edges": (_SAMPLED_ON_V100 * bandwidth / 900e9, f"{sampled}; in proportion to memory bandwidth"),
        "split_edges": (copy / 60, "assumed: 60 bytes of flags, ids and numbers per edge"),
        "split_remote": (sort, sorted_),
        "all_to_all_s": (50e-6, "assumed: launch, host synchronisation and NCCL's own latency"),
        "all_to_all": exchange,
        "all_reduce_s": (30e-6, "assumed: launch and NCCL's own latency"),
        "all_reduce": reduce,
    }  # fmt: skip
    crowded = {} if crowded_host is None else {"gather_host": 2 * crowded_host}
    return {"device": "cuda", "link": link, "memory_bytes": memory, "rates": rates, "crowded": crowded}


_NVLINK_4 = "nccl-tests issue 212: NVLink 4 carries 370 GB/s of its 450 after NCCL's protocol"
_PCIE_5 = (50 * G, "PCIe 5.0 x16: 64 GB/s, of which some 50 arrive (assumed)")
_MEASURED = (
    "measured: 2-core x86-64 virtual machine, torch 2.13, one thread a rank, processor time, median of 5"
)


def _cpu() -> dict[str, Any]:
    """Two ranks of one thread each on a small machine, talking over gloo's loopback."""
    values = {
        "launch_s": 4.5e-6, "copy": 16 * G, "matmul_float32": 58 * G, "matmul_bfloat16": 4.5 * G,
        "matmul_float64": 22 * G, "gather": 10.7 * G, "gather_host": 10.7 * G, "scatter": 12 * G,
        "aggregate": 9.4 * G, "aggregate_backward": 14.5 * G, "extreme": 0.68 * G, "extreme_backward": 1.35 * G,
        "attention": 2.5 * G, "attention_backward": 12 * G, "transpose": 49e6, "dropout": 210e6,
        "sample_rows": 3.8e6, "sample_edges": 13.5e6, "split_edges": 1.8 * G, "split_remote": 1.1 * G,
        "all_to_all_s": 0.9e-3, "all_to_all": 1.7 * G, "all_reduce_s": 0.6e-3, "all_reduce": 1.6 * G,
    }  # fmt: skip
    rates = {name: (value, _MEASURED) for name, value in values.items()}
    return {"device": "cpu", "link": "loopback", "memory_bytes": 24 * G, "rates": rates, "crowded_ranks": 2}


TABLE: dict[str, dict[str, Any]] = {
    # Amazon's p3.8xlarge: four V100-SXM2-16GB; each pair has one or two NVLinks of 25 GB/s a direction.
    "v100-nvlink": _gpu(
        bandwidth=900 * G, float32=15.7e12, bfloat16=15.7e12, float64=7.8e12, sort=0.5 * G, memory=16 * G,
        link="NVLink", sheet="V100 SXM2 datasheet (no bf16 units: float32's rate)",
        host=(12 * G, "PCIe 3.0 x16: 12 GB/s arrive, half of that where two GPUs share a switch (assumed)"),
        crowded_host=6 * G,
        exchange=(60 * G, "NVLink 2: three peers at 25 GB/s each, 0.8 of it (assumed)"),
        reduce=(40 * G, "the same 60 GB/s over 2 (P - 1) / P of the array at P = 4"),
    ),
    "a100-nvlink": _gpu(
        bandwidth=2039 * G, float32=19.5e12, bfloat16=312e12, float64=9.7e12, sort=1.0 * G, memory=80 * G,
        link="NVLink", sheet="A100 80GB SXM datasheet",
        host=(24 * G, "PCIe 4.0 x16: 32 GB/s, of which some 24 arrive (assumed)"),
        exchange=(200 * G, "nccl-tests issue 149: busbw of some 200 GB/s on 8 A100"),
        reduce=(114 * G, "nccl-tests issue 149: busbw of 200 GB/s over 2 (P - 1) / P at P = 8"),
    ),
    "h100-nvlink": _gpu(
        bandwidth=3350 * G, float32=67e12, bfloat16=989e12, float64=34e12, sort=2.0 * G, memory=80 * G,
        link="NVLink", sheet="H100 SXM datasheet", host=_PCIE_5, exchange=(370 * G, _NVLINK_4),
        reduce=(275 * G, "nccl-tests issue 212: algbw of 275 GB/s on 8 H100 with NVLink SHARP"),
    ),
    "h200-nvlink": _gpu(
        bandwidth=4800 * G, float32=67e12, bfloat16=989e12, float64=34e12, sort=2.0 * G, memory=141 * G,
        link="NVLink", sheet="H200 SXM datasheet", host=_PCIE_5, exchange=(370 * G, _NVLINK_4),
        reduce=(272 * G, "nccl-tests issue 272: busbw of 475 GB/s on 8 H200 over 2 (P - 1) / P"),
    ),
    "pcie-only": _gpu(
        bandwidth=600 * G, float32=31.2e12, bfloat16=125e12, float64=0.49e12, sort=0.5 * G, memory=24 * G,
        link="PCIe", sheet="A10 datasheet",
        host=(24 * G, "PCIe 4.0 x16: 32 GB/s, of which some 24 arrive (assumed)"), crowded_host=12 * G,
        exchange=(13 * G, "nccl-tests issue 178: busbw falls to 20 GB/s across PCIe; rows both ways share it"),
        reduce=(13 * G, "nccl-tests issue 178: busbw of 20 GB/s over 2 (P - 1) / P at P = 4"),
    ),
    "cpu": _cpu(),
}  # fmt: skip
