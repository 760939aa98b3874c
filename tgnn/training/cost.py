"""What a training step costs: the work of a layer in terms that a hardware profile can divide by its rates.

A step is a chain of segments between which ranks wait for each other: in split mode every exchange ends one, so a
segment takes as long as the slowest rank's share of it; in data mode ranks meet at the gradients only. Counts are
arrays over the ranks, so every formula speaks of all ranks at once. s is the bytes of an element, D a width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tgnn.kernels import traffic
from tgnn.nn.model import GNN
from tgnn.training.config import TrainConfig
from tgnn.training.profile import Profile, Rates

STAGES = ("sample", "split", "load", "wait", "forward", "backward", "update")
# Operations that torch is asked for, as the code of a hop and of a layer has them; they matter for small batches only.
HOP_OPS, SPLIT_OPS, FORWARD_OPS, BACKWARD_OPS, EXCHANGE_OPS, UPDATE_OPS = 25, 20, 10, 20, 6, 20
# A GPU that reads the in-edges from the host fetches a sector of memory for every one it draws.
SECTOR_BYTES = 32
# An edge's way into the local or the halo half of its block: flags, their sums, numbers and indices.
HALVES_BYTES = 60
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Work:
    """What every rank does in one step on average: float64 arrays over L layers (0 at the input) and P ranks."""

    seeds: np.ndarray
    """[P] seeds."""
    edges: np.ndarray
    """[L, P] in-edges drawn and aggregated."""
    dst: np.ndarray
    """[L, P] destination rows."""
    rows: np.ndarray
    """[L, P] source rows that are the rank's own."""
    received: np.ndarray
    """[L, P] source rows that arrive from other ranks."""
    sent: np.ndarray
    """[L, P] rows sent to other ranks."""
    held: np.ndarray
    """[P] source rows of layer 0 taken from the halo cache."""
    loaded: np.ndarray
    """[P] feature rows read."""
    remote_edges: np.ndarray
    """[L, P] in-edges whose source another rank owns."""

    @property
    def balance(self) -> float:
        """Largest over mean of the ranks' in-edges."""
        edges = self.edges.sum(axis=0)
        return float(edges.max() / edges.mean()) if edges.any() else 1.0


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the stack, as far as its cost goes."""

    fan_in: int
    fan_out: int
    travel: int
    """Columns of a row on its way to another rank, which are those aggregated too."""
    returns: bool
    """Whether the exchange has a backward: the travelling rows depend on a weight or on an earlier layer."""
    own_products: tuple[tuple[int, int], ...]
    """(in, out) of the products made of every own row."""
    dst_products: tuple[tuple[int, int], ...]
    """Those of every destination."""
    reduce: str
    """aggregate, extreme or attention."""
    kind: str = ""
    """Of attention: gat, gatv2, dot."""
    heads: int = 1
    width: int = 0
    """Columns per head."""
    weighs: bool = False
    """Whether the layer makes a weight per edge (gcn)."""


@dataclass(frozen=True)
class ModelSpec:
    """The stack, and how many numbers it learns."""

    layers: tuple[LayerSpec, ...]
    parameters: int
    config: TrainConfig = field(repr=False)
    id_bytes: int = 8
    """Of a vertex id that a rank asks another for: int64, whatever the store's sources are."""

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of the activations."""
        return DTYPES[self.config.dtype].itemsize

    @property
    def wire_bytes(self) -> int:
        """Bytes of one element on its way between ranks."""
        named = getattr(self.config, "exchange_dtype", "float32")
        return min(DTYPES[named].itemsize, self.element_bytes) if named != "float32" else self.element_bytes


def model_spec(config: TrainConfig, num_features: int, num_classes: int, id_bytes: int = 8) -> ModelSpec:
    """The model of a run as its cost sees it; made of the real layers, without memory for their weights."""
    with torch.device("meta"):
        model = GNN.build(
            config.model, num_features, config.hidden, num_classes, len(config.fanouts), heads=config.heads,
            output_heads=config.output_heads, aggregator=config.aggregator, norm=config.norm,
            residual=config.residual,
        )  # fmt: skip
        specs = []
        for number, layer in enumerate(model.layers):
            x = torch.empty(1, layer.in_features, requires_grad=number > 0)
            travelling = layer.before_exchange(x)
            specs.append(_layer_spec(config, layer, travelling.shape[1], travelling.requires_grad))
    return ModelSpec(tuple(specs), sum(p.numel() for p in model.parameters()), config, id_bytes)


def _layer_spec(config: TrainConfig, layer: Any, travel: int, returns: bool) -> LayerSpec:
    a, b, model = layer.in_features, layer.out_features, config.model
    own: list[tuple[int, int]] = []
    dst: list[tuple[int, int]] = []
    reduce, kind, heads, width = "aggregate", "", 1, travel
    if model in ("sage", "gcn"):
        (own if layer.projects_first else dst).append((a, b))
        if model == "sage":
            dst += [(a, b)] * (layer.fc_self is not None)
            own += [(a, a)] * (layer.fc_pool is not None)
            reduce = "extreme" if layer.aggregator in ("max", "pool") else "aggregate"
    elif model == "gin":
        dst += [(a, b), (b, b)]
    else:
        reduce, heads, width = "attention", layer.heads, layer.head_features
        kind = {"gat": "gat", "gatv2": "gatv2", "transformer": "dot"}[model]
        own.append((a, travel))
        dst += {"gat": [], "gatv2": [(a, heads * width)], "dot": [(a, heads * width), (a, b)]}[kind]
    return LayerSpec(
        a, b, travel, returns, tuple(own), tuple(dst), reduce, kind, heads, width, weighs=model == "gcn"
    )


@dataclass
class _Shape:
    """A block as the traffic models see one, all ranks' at once."""

    n_edges: np.ndarray
    n_dst: np.ndarray
    n_src: np.ndarray
    indices: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))


class StepCost:
    """Seconds of one step's stages, from counts and a profile."""

    def __init__(self, model: ModelSpec, profile: Profile, ranks: int) -> None:
        """
        Args:
            model: what is trained.
            profile: what it is trained on.
            ranks: that work at once, in all groups together.
        """
        self.model, self.profile, self.ranks = model, profile, ranks
        self.rates: Rates = profile.rates(ranks)
        # Ranks on a CPU move the bytes themselves: rows travel while the device computes on GPUs only.
        self.overlaps = profile.device != "cpu"
        self.size = model.element_bytes
        self.product_rate = getattr(self.rates, f"matmul_{model.config.dtype}")

    def stages(self, work: Work, load_s: np.ndarray, pinned_graph: bool = False) -> dict[str, float]:
        """Seconds by stage of the step; `load_s` [P] are the seconds each rank loads features."""
        parts = work.edges.shape[1]
        total: dict[str, np.ndarray | float] = dict.fromkeys(STAGES, 0.0)
        together = parts > 1 and bool(work.sent.any() or work.received.any() or work.held.any())

        def add(stage: str, seconds: np.ndarray) -> None:
            # Split ranks wait for the slowest of them after every segment.
            total[stage] = total[stage] + (np.max(seconds) if together else seconds)

        for number, spec in enumerate(self.model.layers):
            add("sample", self._sample(work, number, pinned_graph))
            if together:
                add("split", self._split(work, number))
            forward, backward, exchange, returned = self._layer(spec, work, number, together)
            hidden = forward * self._local_share(work, number) if self.overlaps else 0.0 * forward
            add("forward", forward)
            add("backward", backward)
            if together:
                add("wait", np.maximum(exchange - hidden, 0) + returned)
        add("load", load_s)
        total["update"] = total["update"] + self._update(work)
        if not together:  # the slowest rank is the step
            spent = sum(np.broadcast_to(seconds, parts) for seconds in total.values())
            slowest = int(np.argmax(spent))
            total = {n: float(np.broadcast_to(s, parts)[slowest]) for n, s in total.items()}
        return {name: float(seconds) for name, seconds in total.items()}

    def load(self, work: Work, num_features: int, hit: np.ndarray, parts: int) -> np.ndarray:
        """Seconds [P] of reading feature rows of `parts` parts, of which a share `hit` [P] lies in the device's memory.

        Rows of several parts are read part by part and then written to their places.
        """
        row_bytes = 2 * 4 * num_features * (1 if parts == 1 else 2)
        near = work.loaded * hit + work.held
        away = work.loaded * (1 - hit)
        return row_bytes * (near / self.rates.gather + away / self.rates.gather_host)

    def _sample(self, work: Work, number: int, pinned_graph: bool) -> np.ndarray:
        rates, edges, dst = self.rates, work.edges[number], work.dst[number]
        seconds = dst / rates.sample_rows + edges / rates.sample_edges
        if pinned_graph:
            seconds = seconds + (edges + dst) * SECTOR_BYTES / rates.gather_host
        return self._with_launches(seconds, HOP_OPS)

    def _split(self, work: Work, number: int) -> np.ndarray:
        rates, remote = self.rates, work.remote_edges[number]
        seconds = work.edges[number] / rates.split_edges + remote / rates.split_remote
        ids = np.maximum(work.received[number], work.sent[number]) * self.model.id_bytes
        ids = ids / rates.all_to_all
        return self._with_launches(seconds, SPLIT_OPS) + ids + 2 * rates.all_to_all_s

    def _layer(self, spec: LayerSpec, work: Work, number: int, together: bool) -> tuple[np.ndarray, ...]:
        """Seconds [P] of forward, backward, the exchange, and the exchange of gradients."""
        rates, s, config = self.rates, self.size, self.model.config
        # Copies of remote rows come after the own ones and are treated like them.
        own = work.rows[number] + (work.held if number == 0 else 0)
        dst, edges = work.dst[number], work.edges[number]
        sent, halo = work.sent[number], work.received[number]
        last, learns = number == len(self.model.layers) - 1, number > 0
        forward, backward = self._reduction(spec, edges, dst, own + halo)
        products = self._products(spec.own_products, own) + self._products(spec.dst_products, dst)
        forward = forward + products
        # A product's gradient to its weights costs as much again, and so does that to its rows if they have one.
        backward = backward + products * (2 if learns else 1)
        through = moved = 0.0 * own
        if not last:
            passes = 2 + 4 * (config.norm != "none") + 3 * config.residual
            through = through + passes * dst * spec.fan_out * s
            moved = moved + (passes + 1) * dst * spec.fan_out * s
        through = through + 3 * dst * spec.fan_out * s  # the sum of a vertex's own term and its neighbours'
        if learns:
            moved = moved + (own * 4 + dst) * spec.fan_in * s  # own rows' gradient from both terms
        if config.dropout:
            forward = forward + own * spec.fan_in / rates.dropout
            moved = moved + (4 * own * spec.fan_in * s if learns else 0)
        exchange = returned = 0.0 * own
        if together:
            if spec.reduce == "aggregate" and s > 2:  # local and halo edges apart, one sum added to the other
                through = through + HALVES_BYTES * edges + 3 * dst * spec.travel * s
            else:  # local and halo rows joined
                through = through + 2 * (own + halo) * spec.travel * s
            row = spec.travel * self.model.wire_bytes
            exchange = np.maximum(sent, halo) * row / rates.all_to_all + rates.all_to_all_s
            forward = forward + 2 * sent * spec.travel * s / rates.gather
            if spec.returns:
                returned = exchange
                moved = moved + 4 * own * spec.travel * s
                backward = backward + 3 * sent * spec.travel * s / rates.scatter
        ops = EXCHANGE_OPS if together else 0
        forward = self._with_launches(forward + through / rates.copy, FORWARD_OPS + ops)
        backward = self._with_launches(backward + moved / rates.copy, BACKWARD_OPS + ops)
        return forward, backward, exchange, returned

    def _products(self, shapes: Sequence[tuple[int, int]], rows: np.ndarray) -> np.ndarray:
        """Seconds [P] of products of `rows` with matrices: of arithmetic or, where those are small, of memory."""
        flops = 2 * sum(a * b for a, b in shapes) * rows
        bytes_ = sum(a + b for a, b in shapes) * rows * self.size
        return np.maximum(flops / self.product_rate, bytes_ / self.rates.copy)

    def _reduction(self, spec: LayerSpec, edges: np.ndarray, dst: np.ndarray, src: np.ndarray) -> tuple:
        """Seconds [P] of aggregating over in-edges, forward and backward."""
        rates, shape, dtype = self.rates, _Shape(edges, dst, src), DTYPES[self.model.config.dtype]
        mean = spec.reduce == "aggregate" and self.model.config.model == "sage"
        more = 0.0 * edges
        if spec.reduce == "attention":
            how = (shape, spec.kind, spec.heads, spec.width, dtype)
            there, back = traffic.attention(*how).bytes, traffic.attention_backward(*how).bytes
            scored = src + dst if spec.kind == "gat" else dst
            more = 4 * scored * spec.heads * spec.width * self.size
        elif spec.reduce == "extreme":
            there = traffic.spmm(shape, spec.travel, dtype).bytes
            back = traffic.spmm_extreme_backward(shape, spec.travel, dtype).bytes
        else:
            there = traffic.spmm(shape, spec.travel, dtype, weighted=spec.weighs).bytes
            back = traffic.spmm_backward(shape, spec.travel, dtype, weighted=spec.weighs, mean=mean).bytes
            more = 2 * mean * dst * spec.travel * self.size + 40 * spec.weighs * edges
        forward = there / getattr(rates, spec.reduce) + more / rates.copy
        backward = back / getattr(rates, f"{spec.reduce}_backward") + 2 * more / rates.copy
        return forward, (backward + edges / rates.transpose) * spec.returns

    def _local_share(self, work: Work, number: int) -> np.ndarray:
        """[P] share of a layer's forward that needs no halo row: it can hide the exchange."""
        if self.model.layers[number].reduce != "aggregate":
            return np.zeros(work.edges.shape[1])
        edges = work.edges[number]
        return np.divide(edges - work.remote_edges[number], edges, out=np.zeros_like(edges), where=edges > 0)

    def _update(self, work: Work) -> float:
        rates, bytes_ = self.rates, 4 * self.model.parameters
        seconds = 9 * bytes_ / rates.copy
        if self.ranks > 1:  # gradients, and the loss beside them in float64
            seconds += bytes_ / rates.all_reduce + 2 * rates.all_reduce_s
        return float(self._with_launches(np.asarray(seconds), UPDATE_OPS))

    def _with_launches(self, seconds: np.ndarray, operations: int) -> np.ndarray:
        launches = operations * self.rates.launch_s
        # A GPU computes while the next operations are launched.
        return seconds + launches if self.profile.device == "cpu" else np.maximum(seconds, launches)


def exchange_bytes(work: Work, model: ModelSpec) -> float:
    """Payload bytes of one step between ranks: ids asked for, rows there, their gradients back."""
    rows = work.received.sum(axis=1)
    ids = float(rows.sum()) * model.id_bytes
    both_ways = (row * spec.travel * (1 + spec.returns) for row, spec in zip(rows, model.layers, strict=True))
    return ids + float(sum(both_ways)) * model.wire_bytes


def activation_bytes(work: Work, model: ModelSpec, prefetch: int) -> np.ndarray:
    """Bytes [P] that a step keeps for its backward, and the prefetched batches' rows and blocks."""
    s, kept, batch = model.element_bytes, 0.0, 0.0
    for number, spec in enumerate(model.layers):
        own, edges, dst = work.rows[number], work.edges[number], work.dst[number]
        src = own + work.received[number] + (work.held if number == 0 else 0)
        kept = kept + own * spec.fan_in * s * (2 if model.config.dropout else 1)
        kept = kept + src * spec.travel * s + dst * (spec.travel + 3 * spec.fan_out) * s
        batch = batch + edges * 12 + (src + dst) * 24
        kept = kept + edges * 24
    first = work.rows[0] * model.layers[0].fan_in * 4
    return kept + (1 + prefetch) * (batch + first)


def mean_work(pieces: Sequence[Work]) -> Work:
    """The mean of several steps' work."""
    names = Work.__dataclass_fields__
    return Work(**{name: np.mean([getattr(piece, name) for piece in pieces], axis=0) for name in names})
