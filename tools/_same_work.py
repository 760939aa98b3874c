"""Whether another system does the same work as tgnn: checked before anything is timed.

Outputs and input gradients must be equal on the same sampled blocks. Samples are random, so theirs are compared by
what cannot differ (how many in-edges each destination gets, that they are in-edges of it) and by what may differ by
chance only (numbers of edges and distinct rows in each layer).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from _bench_common import Mismatch
from _peers import Layer, Peer
from torch import Tensor

from tgnn.data.graph import Dataset
from tgnn.nn.model import GNN
from tgnn.sampling.minibatch import MiniBatch
from tgnn.sampling.neighbor import NeighborSampler
from tgnn.sampling.topology import Topology

OUTPUT_TOLERANCE = 1e-4
"""Of the largest value of ours: float32 sums in another order."""
COUNT_TOLERANCE = 0.01
"""Of our count, and more where chance alone moves it further: DEVIATIONS standard deviations of ours."""
DEVIATIONS, REPEATS = 6, 8


def same_outputs(peer: Peer, model: GNN, batch: MiniBatch) -> None:
    """Mismatch where logits, or the gradient of their sum of squares to the input rows, differ on our blocks.

    The gradients are those of float64: in float32 a hidden value of nearly 0 may pass a ReLU in one system only.
    """
    blocks = peer.degrees_for(batch.blocks)
    theirs, whole = peer.from_blocks(blocks, batch.ids), copy.deepcopy(model)
    rows = batch.x.float()
    compare(
        f"logits of {peer.name}",
        peer.forward(theirs, rows),
        whole(dataclasses.replace(batch, blocks=blocks, x=rows)),
    )
    own, other = (batch.x.double().clone().requires_grad_() for _ in range(2))
    peer.model.double()
    whole.double()(dataclasses.replace(batch, blocks=blocks, x=own)).square().sum().backward()
    peer.forward(theirs, other).square().sum().backward()
    # Every float32 has its float64, so the weights come back as they were.
    peer.model.float().zero_grad(set_to_none=True)
    compare(f"input gradients of {peer.name}", other.grad, own.grad)


def compare(what: str, theirs: Tensor, ours: Tensor, tolerance: float = OUTPUT_TOLERANCE) -> None:
    """Mismatch where two tensors differ by more than `tolerance` of our largest value."""
    if theirs.shape != ours.shape:
        raise Mismatch(f"{what} have shape {list(theirs.shape)}, ours {list(ours.shape)}")
    difference = float((theirs.detach().float() - ours.detach().float()).abs().max()) if ours.numel() else 0.0
    allowed = tolerance * max(1.0, float(ours.detach().abs().max()) if ours.numel() else 0.0)
    if not difference <= allowed:
        raise Mismatch(f"{what} differ from ours by {difference:.3g}, more than {allowed:.3g}")


def same_samples(peer: Peer, dataset: Dataset, fanouts: Sequence[int], batches: Sequence[MiniBatch]) -> None:
    """Mismatch where the peer's samples for the batches' seeds are not such as ours could have been."""
    if not peer.draws_alike:
        for batch in batches:
            _subgraph_drawn_right(peer, batch.seeds, fanouts, dataset)
        return
    theirs = [peer.layers_of(peer.sample(batch.seeds)) for batch in batches]
    for batch, layers in zip(batches, theirs, strict=True):
        if len(layers) != len(fanouts) or not torch.equal(layers[-1].rows[: layers[-1].n_dst], batch.seeds):
            raise Mismatch(f"{peer.name} sampled other seeds or another number of layers")
    for layers in theirs[:1]:
        for number, (layer, fanout) in enumerate(zip(layers, reversed(list(fanouts)), strict=True)):
            _drawn_right(f"layer {number} of {peer.name}", layer, fanout, dataset)
    counts = _counts_of_ours(dataset, fanouts, batches)
    means, deviations = counts.mean(0), counts.std(0, ddof=1)
    found = sum(np.array([[len(layer.source), len(layer.rows)] for layer in layers]) for layers in theirs)
    for (number, kind), other in np.ndenumerate(found):
        own, deviation = means[number, kind], deviations[number, kind]
        if abs(other - own) > max(COUNT_TOLERANCE * own, DEVIATIONS * deviation):
            what, ours = ("edges", "distinct rows")[kind], f"{own:.0f} +- {deviation:.0f}"
            raise Mismatch(f"{peer.name} sampled {other} {what} in layer {number} where we sample {ours}")


def _counts_of_ours(dataset: Dataset, fanouts: Sequence[int], batches: Sequence[MiniBatch]) -> np.ndarray:
    """Edges and distinct rows of each layer for the batches' seeds, all together, drawn REPEATS times:
    [REPEATS, layers, 2]. Which hubs are drawn moves them further than their number tells.
    """
    sampler = NeighborSampler(Topology.of_graph(dataset.graph))
    counts = np.zeros((REPEATS, len(fanouts), 2), np.int64)
    for repeat in range(REPEATS):
        for step, batch in enumerate(batches):
            for number, hop in enumerate(sampler.sample(batch.seeds, fanouts, repeat, step)):
                counts[repeat, number] += hop.block.n_edges, hop.block.n_src
    return counts


def _subgraph_drawn_right(peer: Peer, seeds: Tensor, fanouts: Sequence[int], dataset: Dataset) -> None:
    """Seeds come first and have as many edges as is asked for them, other rows no more than for any hop."""
    (layer,) = peer.layers_of(peer.sample(seeds))
    if not torch.equal(layer.rows[: len(seeds)], seeds):
        raise Mismatch(f"{peer.name} sampled other seeds")
    degree = torch.from_numpy(dataset.graph.indptr).diff()[layer.rows]
    drawn = torch.bincount(layer.destination, minlength=len(layer.rows))
    most, first = (
        degree if -1 in fanouts[:hops] else degree.clamp(max=max(fanouts[:hops])) for hops in (None, 1)
    )
    if (drawn > most).any() or not torch.equal(drawn[: len(seeds)], first[: len(seeds)]):
        raise Mismatch(f"{peer.name} drew another number of in-edges")
    _are_in_edges(f"the subgraph of {peer.name}", layer, dataset)


def _drawn_right(where: str, layer: Layer, fanout: int, dataset: Dataset) -> None:
    """Every destination has min(in-degree, fanout) edges, all different and all in-edges of its own."""
    graph = dataset.graph
    rows = layer.rows.numpy()
    destinations = rows[: layer.n_dst]
    degree = graph.indptr[destinations + 1] - graph.indptr[destinations]
    expected = degree if fanout == -1 else np.minimum(degree, fanout)
    drawn = np.bincount(layer.destination.numpy(), minlength=layer.n_dst)
    if not np.array_equal(drawn, expected):
        raise Mismatch(
            f"{where}: {int((drawn != expected).sum())} destinations have another number of in-edges"
        )
    _are_in_edges(where, layer, dataset)


def _are_in_edges(where: str, layer: Layer, dataset: Dataset) -> None:
    """No row appears twice, and every edge is one of the graph's, drawn once."""
    graph, rows = dataset.graph, layer.rows.numpy()
    destinations = rows[: layer.n_dst]
    degree = graph.indptr[destinations + 1] - graph.indptr[destinations]
    if len(np.unique(rows)) != len(rows):
        raise Mismatch(f"{where}: a source appears twice")
    pairs = (
        destinations[layer.destination.numpy()] * np.int64(graph.num_vertices) + rows[layer.source.numpy()]
    )
    # In-edges lie by destination, then source: their keys ascend, and a drawn one is found by bisection.
    starts = np.repeat(destinations, degree)
    within = np.arange(len(starts)) - np.repeat(np.cumsum(degree) - degree, degree)
    known = (
        starts * np.int64(graph.num_vertices)
        + graph.indices[np.repeat(graph.indptr[destinations], degree) + within]
    )
    found, times = np.unique(pairs, return_counts=True)
    have, most = np.unique(known, return_counts=True)
    place = np.searchsorted(have, found)
    is_edge = (place < len(have)) & (have[np.minimum(place, len(have) - 1)] == found)
    if not is_edge.all() or (times > most[place]).any():
        raise Mismatch(f"{where}: an edge that the graph does not have, or one drawn twice")
