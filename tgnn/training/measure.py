"""A hardware profile of this machine: every rate of `Rates`, measured on made-up blocks of an ordinary batch's size.

One rank measures alone; then as many as the machine has GPUs (two where it has none) measure at once, links included.
Nothing here knows of the data or the model that is planned later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tgnn.kernels import traffic
from tgnn.kernels.attention import attention
from tgnn.kernels.block import Block, transpose
from tgnn.kernels.dropout import dropout
from tgnn.kernels.gather import gather
from tgnn.kernels.spmm import spmm
from tgnn.kernels.tuning import device_name
from tgnn.nn.products import linear
from tgnn.parallel.allocator import keep_freed_memory
from tgnn.parallel.comm import Comm, current
from tgnn.parallel.launch import launch
from tgnn.sampling.cooperative import CooperativeSampler
from tgnn.sampling.neighbor import NeighborSampler
from tgnn.sampling.topology import Topology
from tgnn.training.metrics import provenance
from tgnn.training.profile import NAMES, Profile, Rates

WIDTH, HEADS, DEGREE = 128, 4, 24
# Of an ordinary batch, on a CPU; a GPU gets 16 times as much to do.
ROWS, SOURCES, VERTICES = 1 << 16, 100_000, 1 << 17
GPU_SCALE = 16
ROUNDS, WARMUP = 5, 1
CROWDED_CPU_RANKS = 2
# Of remote sources among those drawn: two shares tell what an edge costs from what a remote one costs.
REMOTE_SHARES = (0.1, 0.5)

Call = tuple[Callable[[], object], float]
"""What to time, and how much it does."""


def measure(
    device: str = "auto", name: str = "measured", clock: Callable[[], float] = time.perf_counter
) -> Profile:
    """Measure this machine, in well under a minute where nothing else runs.

    `clock` tells seconds: `time.process_time` counts this process's own work alone, whoever shares the CPU with it.
    """
    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    kind, ranks = ("cuda", gpus) if gpus else ("cpu", CROWDED_CPU_RANKS)
    alone = launch(measure_rank, clock, ranks=1, device=kind)
    # One GPU has no link to measure: two ranks on the CPU would say nothing of it.
    crowded = launch(measure_rank, clock, ranks=ranks, device=kind) if ranks > 1 else dict(alone)
    for number in ("all_to_all_s", "all_to_all", "all_reduce_s", "all_reduce"):
        alone[number] = crowded.setdefault(number, 1e-5 if number.endswith("_s") else alone["copy"])
    where = device_name(torch.device(kind))
    source = f"measured on {where}, median of {ROUNDS}"
    return Profile(
        name=name, device=kind, link="loopback" if kind == "cpu" else "the GPUs' links",
        memory_bytes=_memory_bytes(kind), alone=Rates(**alone), crowded=Rates(**crowded), crowded_ranks=ranks,
        sources=dict.fromkeys(NAMES, source),
        provenance=provenance(torch.device(kind)) | {"threads": torch.get_num_threads()},
    )  # fmt: skip


def _memory_bytes(kind: str) -> float:
    if kind == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def measure_rank(clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """The rates of this rank while all current ranks measure, links too if there are several. Collective."""
    comm = current()
    keep_freed_memory()  # as runs do
    scale = GPU_SCALE if comm.device.type == "cuda" else 1
    calls = _dense(comm.device, scale) | _sparse(comm.device, scale) | _links(comm, scale)
    sampling = _Sampling(comm.device, scale, clock)
    seconds = _median_seconds({**{n: call for n, (call, _) in calls.items()}, **sampling.calls}, comm, clock)
    found = {name: amount / seconds[name] for name, (_, amount) in calls.items()}
    for number in ("launch_s", "all_to_all_s", "all_reduce_s"):
        if number in found:
            found[number] = 1 / found[number]
    for number in ("all_to_all", "all_reduce"):
        if number in found:  # a large call less a small one
            beyond = max(seconds[number] - found[f"{number}_s"], 0.1 * seconds[number])
            found[number] = calls[number][1] / beyond
    found.setdefault("gather_host", found["gather"])
    return found | sampling.rates(seconds)


LINKS = ("all_to_all_s", "all_to_all", "all_reduce_s", "all_reduce")


def _median_seconds(
    calls: dict[str, Callable[[], object]], comm: Comm, clock: Callable[[], float]
) -> dict[str, float]:
    """Seconds of every call, the calls taking turns so that no one falls into a bad minute.

    A call that returns a float tells its seconds itself. Those of `LINKS` begin on all ranks together.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    comm.barrier()
    for number in range(WARMUP + ROUNDS):
        for name, call in calls.items():
            _finish(comm.device)
            if name in LINKS:  # else the call would wait for a rank that came late out of the last one
                comm.barrier()
            start = clock()
            told = call()
            _finish(comm.device)
            if number >= WARMUP:
                times[name].append(told if isinstance(told, float) else clock() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _dense(device: torch.device, scale: int) -> dict[str, Call]:
    """Copies, products, and the least that an operation takes."""
    rows = ROWS * scale
    x = torch.randn(2 * rows, WIDTH, device=device)
    one, many = torch.ones(1, device=device), 200
    calls: dict[str, Call] = {
        "copy": (x.clone, 2 * x.nbytes),
        "launch_s": (lambda: [one.add(one) for _ in range(many)], many),
    }
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        few = rows if dtype == torch.float32 else rows // 16
        calls[f"matmul_{str(dtype).removeprefix('torch.')}"] = _products(x[:few].to(dtype))
    return calls


def _products(x: Tensor) -> Call:
    """A linear layer's three products, forward and backward."""
    weight = torch.randn(WIDTH, WIDTH, dtype=x.dtype, device=x.device, requires_grad=True)
    rows = x.detach().requires_grad_()
    return lambda: torch.autograd.grad(linear(rows, weight), (rows, weight), x), 6 * len(x) * WIDTH * WIDTH


def _sparse(device: torch.device, scale: int) -> dict[str, Call]:
    """Gathers, aggregations both ways, dropout."""
    n_src = SOURCES * scale
    block, small = _made_block(n_src, device), _made_block(n_src // 8, device)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n_src, WIDTH, device=device)
    table = torch.randn(2 * n_src, WIDTH, device=device)
    rows = torch.randperm(2 * n_src, generator=generator)[:n_src].sort().values.to(device)
    ids = torch.arange(n_src, device=device)
    calls: dict[str, Call] = {
        "gather": (lambda: gather(table, rows), 2 * x.nbytes),
        "scatter": (lambda: table.index_add_(0, rows, x), 3 * x.nbytes),
        "transpose": (lambda: transpose(block.indptr, block.indices, n_src), block.n_edges),
        "dropout": (lambda: dropout(x, 0.5, 1, ids), x.numel()),
    }
    if device.type == "cuda":
        pinned = table.cpu().pin_memory()
        calls["gather_host"] = (lambda: gather(table[:1], rows, pinned), 2 * x.nbytes)
    f32 = torch.float32
    few = x[: small.n_src]
    heads = few.view(-1, HEADS, WIDTH // HEADS)
    score = (heads[..., 0].contiguous(), heads[: small.n_dst, :, 1].contiguous())
    calls |= _both_ways(
        "aggregate", lambda x: spmm(block, x), x,
        traffic.spmm(block, WIDTH, f32).bytes, traffic.spmm_backward(block, WIDTH, f32).bytes,
    )  # fmt: skip
    calls |= _both_ways(
        "extreme", lambda x: spmm(small, x, reduce="max"), few,
        traffic.spmm(small, WIDTH, f32).bytes, traffic.spmm_extreme_backward(small, WIDTH, f32).bytes,
    )  # fmt: skip
    shape = (small, "gat", HEADS, WIDTH // HEADS, f32)
    calls |= _both_ways(
        "attention", lambda x: attention(small, x, "gat", *score), heads,
        traffic.attention(*shape).bytes, traffic.attention_backward(*shape).bytes,
    )  # fmt: skip
    return calls


def _made_block(n_src: int, device: torch.device) -> Block:
    """Ten in-edges for each of `n_src` / 4 destinations."""
    generator, n_dst = torch.Generator().manual_seed(0), n_src // 4
    indices = torch.randint(n_src, (10 * n_dst,), generator=generator, dtype=torch.int32)
    return Block(indptr=(torch.arange(n_dst + 1) * 10).to(device), indices=indices.to(device), n_src=n_src)


def _both_ways(
    name: str, op: Callable[[Tensor], Tensor], x: Tensor, forward: float, backward: float
) -> dict[str, Call]:
    """An op, and its gradient to x; the block's transposed form is made in the first, untimed round."""
    x = x.detach().requires_grad_()
    out = op(x)
    grad = torch.ones_like(out)
    return {
        name: (lambda: op(x), forward),
        f"{name}_backward": (lambda: torch.autograd.grad(out, x, grad, retain_graph=True), backward),
    }


def _links(comm: Comm, scale: int) -> dict[str, Call]:
    """Small and large collectives; none on one rank."""
    if comm.ranks == 1:
        return {}
    rows = ROWS // 8 * scale
    send = torch.randn(rows * comm.ranks, WIDTH, device=comm.device)
    flat = torch.zeros(1 << 20, device=comm.device)
    few = torch.zeros(comm.ranks, 1, device=comm.device)

    def exchange(x: Tensor) -> Callable[[], object]:
        counts = [len(x) // comm.ranks] * comm.ranks
        return lambda: comm.all_to_all_rows(x, counts, counts)

    sent = send.nbytes * (comm.ranks - 1) / comm.ranks
    return {
        "all_to_all_s": (exchange(few), 1),
        "all_to_all": (exchange(send), sent),
        "all_reduce_s": (lambda: comm.all_reduce(flat[:1]), 1),
        "all_reduce": (lambda: comm.all_reduce(flat), flat.nbytes),
    }


class _Mirror(Comm):
    """Two ranks in one process, the other one an image of this: what is sent to it comes back as its own.

    Cooperative sampling without the journey of ids: rank 0 owns new ids [0, n), its image [n, 2n).
    """

    def __init__(self, device: torch.device, n: int) -> None:
        super().__init__(0, 2, device)
        self._n = n

    def all_to_all_lists(self, send: Tensor, send_counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        """The image asks for as many rows, the same ones, which here have the ids of this rank."""
        return send - self._n, list(send_counts)[::-1]


class _SplitClock:
    """The stages of a sampler, of which it times `split`."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._device, self._clock, self.seconds = device, clock, 0.0

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """One stage."""
        if name != "split":
            yield
            return
        _finish(self._device)
        start = self._clock()
        yield
        _finish(self._device)
        self.seconds += self._clock() - start


class _Sampling:
    """Hops on a made-up graph: of few edges for many rows and the reverse, alone and split."""

    def __init__(self, device: torch.device, scale: int, clock: Callable[[], float]) -> None:
        n = VERTICES * scale
        self._rows = {"few": VERTICES // 4 * scale, "many": VERTICES // 2 * scale}
        self._fanout = {"few": 15, "many": 2}
        self._remote = dict(zip(("near", "far"), REMOTE_SHARES, strict=True))
        whole = NeighborSampler(_made_topology(2 * n, 2 * n, 0.0, device))
        self.calls = {key: self._hop(whole, key) for key in self._rows}
        for key, share in self._remote.items():
            stages = _SplitClock(device, clock)
            topology = _made_topology(n, 2 * n, share, device)
            split = CooperativeSampler(topology, _Mirror(device, n), stage=stages)
            self.calls[key] = self._split_hop(self._hop(split, "few"), stages)

    def _hop(self, sampler: NeighborSampler, key: str) -> Callable[[], object]:
        generator = torch.Generator().manual_seed(1)
        frontier = torch.randperm(sampler.topology.num_rows, generator=generator)[: self._rows[key]]
        frontier = frontier.to(sampler.topology.indptr.device)
        return lambda: sampler.hop(frontier, self._fanout[key], 7)

    @staticmethod
    def _split_hop(hop: Callable[[], object], stages: _SplitClock) -> Callable[[], float]:
        def call() -> float:
            stages.seconds = 0.0
            hop()
            return stages.seconds

        return call

    def rates(self, seconds: dict[str, float]) -> dict[str, float]:
        """Two equations each: seconds = rows / sample_rows + edges / sample_edges, and so for the split."""
        rows = [self._rows[key] for key in ("few", "many")]
        edges = [self._rows[key] * self._fanout[key] for key in ("few", "many")]
        per_row, per_edge = _solve(rows, edges, [seconds["few"], seconds["many"]])
        remote, every = [share * edges[0] for share in self._remote.values()], [edges[0]] * 2
        per_remote, per_any = _solve(remote, every, [seconds[key] for key in self._remote])
        found = {"sample_rows": per_row, "sample_edges": per_edge}
        found |= {"split_edges": per_any, "split_remote": per_remote}
        return {name: 1 / value for name, value in found.items()}


def _solve(a: Sequence[float], b: Sequence[float], c: Sequence[float]) -> tuple[float, float]:
    """x and y of a x + b y = c, each at least a thousandth of what all of c would make it."""
    determinant = a[0] * b[1] - a[1] * b[0]
    x = (c[0] * b[1] - c[1] * b[0]) / determinant
    y = (a[0] * c[1] - a[1] * c[0]) / determinant
    least = 1e-3 * max(abs(c[0]), abs(c[1]), 1e-9)
    return max(x, least / max(a)), max(y, least / max(b))


def _made_topology(n: int, total: int, remote: float, device: torch.device) -> Topology:
    """`n` rows of `DEGREE` in-edges, a `remote` share of them from the new ids [n, total)."""
    generator = torch.Generator().manual_seed(2)
    indices = torch.randint(n, (n * DEGREE,), generator=generator, dtype=torch.int32)
    if remote:
        away = torch.rand(indices.numel(), generator=generator) < remote
        indices += away.to(torch.int32) * n
    made = {
        "first": 0, "end": n, "indptr": torch.arange(n + 1, device=device) * DEGREE,
        "indices": indices.to(device), "original_id": torch.arange(n, device=device),
        "degree_out": torch.full((total,), DEGREE, device=device), "edge_weight": None,
        "offsets": (0, n, total) if total > n else (0, n),
    }  # fmt: skip
    known = {field.name for field in dataclasses.fields(Topology)}
    return Topology(**{name: value for name, value in made.items() if name in known})
