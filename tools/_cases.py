"""What is measured and tuned: every op in every direction, on inputs made here, with an independent
reference.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tgnn import kernels
from tgnn.kernels import traffic, tuning
from tgnn.kernels.backend import use_backend
from tgnn.kernels.block import Block
from tgnn.kernels.traffic import Traffic

Call = Callable[[], Sequence[Tensor]]
HEADS = 4  # of attention and sddmm
FANOUT = 10  # of sampling
KEY = 0x1234567
# Largest difference from the float64 reference, relative to max(1, largest element).
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Workload:
    """A block, the width of its rows, their type, and where they lie."""

    block: Block
    width: int
    dtype: torch.dtype
    device: torch.device

    def rows(self, n: int, *shape: int, seed: int) -> Tensor:
        """[n, *shape] random rows; the same numbers on every call."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(n, *shape, generator=generator).to(self.dtype).to(self.device)


Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """An op in one direction.

    inputs: the tensors it is given. apply: the public op on them. traffic: of the direction.
    grads: inputs whose gradients are taken; none for the forward. has_rows: whether width and dtype matter.
    peers: name -> the same result by other means, made for a workload and its inputs; only for forwards.
    """

    name: str
    op: str
    inputs: Callable[[Workload], Inputs]
    apply: Callable[[Block, Inputs], Tensor]
    traffic: Callable[[Workload], Traffic]
    grads: tuple[str, ...] = ()
    peers: dict[str, Callable[[Workload, Inputs], Call]] = field(default_factory=dict)
    has_rows: bool = True

    def prepare(self, work: Workload, backend: str, dtype: torch.dtype | None = None) -> Call:
        """A call that runs the case on `backend`, into fresh outputs; inputs are cast to `dtype` first."""
        inputs = {name: _cast(x, dtype) for name, x in self.inputs(work).items()}
        if not self.grads:
            return lambda: _forward(self, work, inputs, backend)
        leaves = {name: x.requires_grad_(name in self.grads) for name, x in inputs.items()}
        with use_backend(backend):
            out = self.apply(work.block, leaves)
        grad = work.rows(*out.shape, seed=9).to(out.dtype)
        wanted = [leaves[name] for name in self.grads]

        def run() -> Sequence[Tensor]:
            with use_backend(backend):
                return torch.autograd.grad(out, wanted, grad, retain_graph=True)

        return run

    def reference(self, work: Workload) -> Sequence[Tensor]:
        """The results in float64, by the torch path with its default strategies."""
        with tuning.trial({}):
            return [x.detach() for x in self.prepare(work, "torch", torch.float64)()]


def _cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x.detach().clone() if dtype is None or not x.is_floating_point() else x.detach().to(dtype)


def _forward(case: Case, work: Workload, inputs: Inputs, backend: str) -> Sequence[Tensor]:
    with torch.no_grad(), use_backend(backend):
        return (case.apply(work.block, inputs),)


def difference(results: Sequence[Tensor], reference: Sequence[Tensor], dtype: torch.dtype) -> str | None:
    """How results differ from the reference beyond rounding, in words; None if they agree."""
    for number, (got, expected) in enumerate(zip(results, reference, strict=True)):
        if got.shape != expected.shape:
            return f"result {number} has shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
        if not got.numel():
            continue
        scale = max(1.0, float(expected.abs().max()))
        worst = float((got.double() - expected.double()).abs().max()) / scale
        if not worst <= TOLERANCE.get(dtype, 0.0):
            return f"result {number} is off by {worst:.1e} of the largest element"
    return None


def _source_rows(work: Workload) -> Inputs:
    return {"x": work.rows(work.block.n_src, work.width, seed=1)}


def _weighted_rows(work: Workload) -> Inputs:
    return _source_rows(work) | {"weight": work.rows(work.block.n_edges, seed=2).abs()}


def _table(work: Workload) -> Inputs:
    """A feature table of which the block's sources are every other row, from the end."""
    n = work.block.n_src
    rows = torch.arange(2 * n - 1, -1, -2, device=work.device)
    return {"x": work.rows(2 * n, work.width, seed=1), "rows": rows}


def _scores(work: Workload) -> Inputs:
    return {"x": work.rows(work.block.n_edges, HEADS, seed=1)}


def _ends(shape: Callable[[Workload], tuple[int, ...]]) -> Callable[[Workload], Inputs]:
    def inputs(work: Workload) -> Inputs:
        tail = shape(work)
        return {
            "dst": work.rows(work.block.n_dst, *tail, seed=1),
            "src": work.rows(work.block.n_src, *tail, seed=2),
        }

    return inputs


def _attention_inputs(kind: str) -> Callable[[Workload], Inputs]:
    def inputs(work: Workload) -> Inputs:
        n_dst, n_src = work.block.n_dst, work.block.n_src
        tail = (HEADS,) if kind == "gat" else (HEADS, work.width)
        found = {"value": work.rows(n_src, HEADS, work.width, seed=1), "dst": work.rows(n_dst, *tail, seed=2)}
        if kind != "gatv2":
            found["src"] = work.rows(n_src, *tail, seed=3)
        else:
            found["att"] = work.rows(HEADS, work.width, seed=3)
        return found

    return inputs


def _attend(kind: str) -> Callable[[Block, Inputs], Tensor]:
    def apply(block: Block, given: Inputs) -> Tensor:
        src = given.get("src", given["value"])
        return kernels.attention(block, given["value"], kind, src, given["dst"], given.get("att"))

    return apply


def _csr_product(reduce: str) -> Callable[[Workload, Inputs], Call]:
    """torch.sparse: a CSR matrix, built once, times the rows."""

    def make(work: Workload, given: Inputs) -> Call:
        warnings.filterwarnings(
            "ignore", message="Sparse CSR tensor support is in beta", category=UserWarning
        )
        block = work.block
        values = given["x"].new_ones(block.n_edges)
        if reduce == "mean":
            values /= block.degrees.clamp(min=1)[block.dst_rows]
        shape = (block.n_dst, block.n_src)
        matrix = torch.sparse_csr_tensor(block.indptr, block.indices, values, shape, check_invariants=False)
        return lambda: (matrix @ given["x"],)

    return make


def _pyg(reduce: str) -> Callable[[Workload, Inputs], Call]:
    """PyG's message passing over an edge list, as its layers do it."""

    def make(work: Workload, given: Inputs) -> Call:
        from torch_geometric.nn import SimpleConv

        block, conv = work.block, SimpleConv(aggr=reduce)
        edges = torch.stack([block.indices.to(torch.int64), block.dst_rows])

        def run() -> Sequence[Tensor]:
            with torch.no_grad():
                return (conv((given["x"], given["x"][: block.n_dst]), edges),)

        return run

    return make


def _spmm_cases() -> list[Case]:
    found = []
    for reduce in ("sum", "mean", "max"):
        peers = {"pyg": _pyg(reduce)} | ({} if reduce == "max" else {"torch.sparse": _csr_product(reduce)})
        back = (
            (lambda w: traffic.spmm_extreme_backward(w.block, w.width, w.dtype))
            if reduce == "max"
            else (
                lambda w, mean=reduce == "mean": traffic.spmm_backward(w.block, w.width, w.dtype, mean=mean)
            )
        )
        found += _both(
            f"spmm {reduce}", "spmm", _source_rows,
            lambda block, given, reduce=reduce: kernels.spmm(block, given["x"], reduce=reduce),
            lambda w: traffic.spmm(w.block, w.width, w.dtype), back, ("x",), peers,
        )  # fmt: skip
    found += _both(
        "spmm weighted", "spmm", _weighted_rows,
        lambda block, given: kernels.spmm(block, given["x"], given["weight"]),
        lambda w: traffic.spmm(w.block, w.width, w.dtype, weighted=True),
        lambda w: traffic.spmm_backward(w.block, w.width, w.dtype, weighted=True)
        + traffic.sddmm(w.block, w.width, w.dtype),
        ("x", "weight"),
    )  # fmt: skip
    return found


def _both(name, op, inputs, apply, forward, backward, grads, peers=None) -> list[Case]:
    """A case forward and one backward."""
    there = Case(name, op, inputs, apply, forward, peers=peers or {})
    return [there, Case(f"{name} backward", op, inputs, apply, backward, grads)]


def _attention_cases() -> list[Case]:
    found = []
    for kind, grads in (("gat", ("value", "src", "dst")), ("gatv2", ("value", "dst", "att")),
                        ("dot", ("value", "src", "dst"))):  # fmt: skip
        found += _both(
            f"attention {kind}", "attention", _attention_inputs(kind), _attend(kind),
            lambda w, kind=kind: traffic.attention(w.block, kind, HEADS, w.width, w.dtype),
            lambda w, kind=kind: traffic.attention_backward(w.block, kind, HEADS, w.width, w.dtype), grads,
        )  # fmt: skip
    return found


def _sample(replace: bool) -> Callable[[Block, Inputs], Tensor]:
    def apply(block: Block, given: Inputs) -> Tensor:
        rows = torch.arange(block.n_dst, device=block.indptr.device)
        drawn = kernels.sample_neighbors(block.indptr, block.indices, rows, rows, FANOUT, KEY, replace)
        return drawn.src

    return apply


def _sample_traffic(replace: bool) -> Callable[[Workload], Traffic]:
    def of(work: Workload) -> Traffic:
        degrees = work.block.degrees
        drawn = FANOUT * int((degrees > 0).sum()) if replace else int(degrees.clamp(max=FANOUT).sum())
        return traffic.sample_neighbors(work.block.n_dst, drawn, work.block.indices)

    return of


def _other_cases() -> list[Case]:
    found = _both(
        "sddmm dot", "sddmm", _ends(lambda w: (HEADS, w.width)),
        lambda block, given: kernels.sddmm(block, **given),
        lambda w: traffic.sddmm(w.block, w.width, w.dtype, heads=HEADS),
        lambda w: traffic.spmm(w.block, w.width, w.dtype, heads=HEADS, weighted=True)
        + traffic.spmm_backward(w.block, w.width, w.dtype, heads=HEADS, weighted=True),
        ("dst", "src"),
    )  # fmt: skip
    found.append(Case(
        "sddmm add", "sddmm", _ends(lambda w: (HEADS,)),
        lambda block, given: kernels.sddmm(block, **given, op="add"),
        lambda w: traffic.sddmm(w.block, w.width, w.dtype, heads=HEADS, op="add"),
    ))  # fmt: skip
    found.append(Case(
        "edge_softmax", "edge_softmax", _scores, lambda block, given: kernels.edge_softmax(block, given["x"]),
        lambda w: traffic.edge_softmax(w.block, HEADS, w.dtype),
    ))  # fmt: skip
    found.append(Case(
        "gather", "gather", _table, lambda block, given: kernels.gather(given["x"], given["rows"]),
        lambda w: traffic.gather(torch.empty(w.block.n_src, dtype=torch.int64), w.width, w.dtype),
    ))  # fmt: skip
    found.append(Case(
        "gather_spmm", "gather_spmm", _table,
        lambda block, given: kernels.gather_spmm(block, given["x"], given["rows"]),
        lambda w: traffic.spmm(w.block, w.width, w.dtype, indirect=True),
    ))  # fmt: skip
    found.append(Case(
        "dropout", "dropout",
        lambda w: _source_rows(w) | {"ids": torch.arange(w.block.n_src, device=w.device)},
        lambda block, given: kernels.dropout(given["x"], 0.5, KEY, given["ids"]),
        lambda w: traffic.dropout(w.block.n_src, w.width, w.dtype),
    ))  # fmt: skip
    for name, replace in (("sample_neighbors", False), ("sample_neighbors replace", True)):
        of = _sample_traffic(replace)
        found.append(Case(name, "sample_neighbors", lambda w: {}, _sample(replace), of, has_rows=False))
    found.append(Case(
        "unique", "unique", lambda w: {}, lambda block, given: kernels.unique(block.indices),
        lambda w: traffic.unique(w.block.indices, int(torch.unique(w.block.indices).numel())), has_rows=False,
    ))  # fmt: skip
    return found


CASES: tuple[Case, ...] = (*_spmm_cases(), *_attention_cases(), *_other_cases())


def jobs_of(
    blocks: Sequence[Block], dtypes: Sequence[torch.dtype], widths: Sequence[int], device: torch.device,
    ops: Sequence[str] | None = None,
) -> list[tuple[Case, Workload]]:  # fmt: skip
    """Every case of `ops` (all) on every workload; one without rows once a block."""
    found = []
    for block in blocks:
        for work in (Workload(block, width, dtype, device) for dtype in dtypes for width in widths):
            first = (work.dtype, work.width) == (dtypes[0], widths[0])
            found += [(c, work) for c in CASES if (not ops or c.op in ops) and (c.has_rows or first)]
    return found
