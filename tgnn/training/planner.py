"""The planner: how long a step of split, data or replicated training would take, without training.

Steps are sampled as a run would sample them and counted per rank (`sampling/replay.py`); a hardware profile turns the
counts into seconds and bytes (`cost.py`). Counts are exact, seconds are an estimate from the profile's rates: nothing
is fitted to the run that is planned. What limits a layout is its largest stage.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tgnn.errors import UserError, wrong
from tgnn.kernels.tuning import device_name
from tgnn.partition.store import Store
from tgnn.sampling.features import hottest_remote
from tgnn.sampling.placement import DEVICE_SHARE, FEATURE_SHARE, HALO_SHARE
from tgnn.sampling.replay import Steps, count_split
from tgnn.sampling.topology import Topology
from tgnn.training.config import TrainConfig, size_in_bytes
from tgnn.training.cost import (
    STAGES,
    ModelSpec,
    StepCost,
    Work,
    activation_bytes,
    exchange_bytes,
    mean_work,
    model_spec,
)
from tgnn.training.profile import Profile, load_profile

DEFAULT_STEPS = 8
CHOOSE_STEPS = 2
STEADY = 1.05
"""A layout is recommended over a simpler one only if it is faster by more than this."""
# What a stage is called where it is the largest.
_LIMITS = {
    "sample": "sampling", "split": "telling owners apart", "load": "loading features", "wait": "exchange over {link}",
    "forward": "forward", "backward": "backward", "update": "update and all-reduce",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One layout on one number of ranks, as predicted."""

    gpus: int
    layout: str
    """single, split, data, or "2 x split 4": two groups of four."""
    parallel: str
    replicas: int
    step_s: float
    epoch_s: float
    stages: dict[str, float]
    """Seconds of a step by stage; they add up to `step_s`."""
    memory: dict[str, float]
    """Bytes of the fullest rank: graph, features, activations, model."""
    fits: bool
    limit: str
    work: dict[str, float]
    """Per step, over all ranks: seeds, edges, feature_rows_loaded, halo_rows, halo_cache_rows, exchange_bytes."""
    balance: float

    @property
    def memory_bytes(self) -> float:
        """All of `memory`."""
        return sum(self.memory.values())

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self) | {"memory_bytes": self.memory_bytes}


def plan(
    store_of: Callable[[int], Store], config: TrainConfig, gpus: Sequence[int], profile: Profile,
    steps: int = DEFAULT_STEPS,
) -> list[Row]:  # fmt: skip
    """Predict every layout on each number of ranks.

    Args:
        store_of: parts -> a store of so many; asked only for those that a layout needs.
        config: the run. `replicas` above 1 asks for that number of groups, else all that divide are tried.
        gpus: numbers of ranks, each at least 1.
        profile: of the device and its links.
        steps: at most so many steps of an epoch are sampled.
    """
    rows = []
    for ranks in gpus:
        if ranks == 1:
            rows.append(Layout(store_of(1), config, profile, steps, 1).row())
            continue
        rows.append(Layout(store_of(ranks), config, profile, steps, ranks, parallel="data").row())
        groups = [config.replicas] if config.replicas > 1 else range(1, ranks)
        for replicas in groups:
            if ranks % replicas == 0 and ranks > replicas:
                store = store_of(ranks // replicas)
                rows.append(Layout(store, config, profile, steps, ranks, replicas=replicas).row())
    return rows


def choose(
    store: Store, config: TrainConfig, ranks: int, device: str, profile: Profile | None = None
) -> tuple[str, str]:
    """What `--parallel auto` means for a run: ("split" or "data", the reason in one sentence).

    Follows from the store, the options and the profile alone, so that every rank that asks gets the same answer.
    `profile`: by default the user's measured one of this device, else the built-in one of its kind.
    """
    if ranks == 1:
        return "split", "One rank has nothing to share."
    if config.norm == "batch":
        return "split", "Batch norm needs ranks that sample together."
    profile = profile or profile_of(device)
    rows = [
        Layout(store, config, profile, CHOOSE_STEPS, ranks, parallel=mode).row() for mode in ("split", "data")
    ]
    fits = [row for row in rows if row.fits] or rows
    best = min(fits, key=lambda row: (row.step_s, row.parallel != "split"))
    other = next(row for row in rows if row is not best)
    why = f"{best.step_s * 1e3:.3g} ms a step against {other.step_s * 1e3:.3g}"
    if best.fits and not other.fits:
        why += f", and {other.parallel} would need {_gib(other.memory_bytes)} per rank"
    return best.parallel, f"{best.parallel} on {ranks} ranks is expected to take {why} ({profile.name})."


def profile_of(device: str) -> Profile:
    """The profile of this machine's devices: what `--measure` left in the cache, else a built-in one."""
    path = measured_path(device)
    if path.is_file():
        try:
            return load_profile(str(path))
        except UserError:  # a damaged file must not end a run that never named it
            pass
    if device == "cpu":
        return load_profile("cpu")
    name = device_name(torch.device("cuda")).lower()
    kinds = ("v100", "a100", "h100", "h200")
    return load_profile(next((f"{kind}-nvlink" for kind in kinds if kind in name), "pcie-only"))


def measured_path(device: str) -> Path:
    """Where `--measure` keeps this machine's profile: in `$TGNN_CACHE`, else `~/.cache/tgnn`."""
    folder = Path(os.environ.get("TGNN_CACHE") or Path.home() / ".cache" / "tgnn")
    return folder / f"profile-{device}.json"


def recommend(rows: Sequence[Row]) -> str:
    """One sentence: the fastest layout that fits, on the fewest ranks that are near it."""
    fit = [row for row in rows if row.fits]
    if not fit:
        least = min(rows, key=lambda row: row.memory_bytes)
        needed = f"{_gib(least.memory_bytes)} per rank ({least.layout} on {_ranks(least.gpus)})"
        return f"Nothing fits: the smallest layout needs {needed}; use a smaller batch or more ranks."
    fastest = min(row.epoch_s for row in fit)
    best = min(
        (row for row in fit if row.epoch_s <= fastest * STEADY), key=lambda row: (row.gpus, row.epoch_s)
    )
    text = (
        f"Train {best.layout} on {_ranks(best.gpus)}: {best.epoch_s:.3g} s an epoch, limited by {best.limit}"
    )
    others = [row for row in fit if row.gpus == best.gpus and row is not best]
    if others:
        second = min(others, key=lambda row: row.epoch_s)
        text += f"; {second.layout} would take {second.epoch_s:.3g} s"
    return text + "."


class Layout:
    """One way to share the work among `ranks` ranks, replayed on a store."""

    def __init__(
        self, store: Store, config: TrainConfig, profile: Profile, steps: int, ranks: int, *,
        parallel: str = "split", replicas: int = 1,
    ) -> None:  # fmt: skip
        """
        Args:
            store: of as many parts as a group has ranks.
            parallel: `split`, inside `replicas` groups of equal size; or `data`.
        """
        self.store, self.config, self.profile = store, config, profile
        self.ranks, self.parallel, self.replicas = ranks, parallel, replicas
        self.size = ranks // replicas
        self.model: ModelSpec = model_spec(
            config, store.num_features, store.num_classes, np.dtype(store.meta["dtypes"]["indices"]).itemsize
        )
        self.splits = parallel == "split" and self.size > 1
        self.halo_ids = self._halo_ids()
        self.work, self.steps_per_epoch = self._replay(steps)

    def row(self) -> Row:
        """The prediction."""
        profile, work = self.profile, self.work
        memory, hit, pinned_graph, fits = self._memory()
        cost = StepCost(self.model, profile, self.ranks)
        parts = 1 if self.splits else self.store.num_parts
        stages = cost.stages(work, cost.load(work, self.store.num_features, hit, parts), pinned_graph)
        step_s = sum(stages.values())
        largest = max(STAGES, key=lambda name: stages[name])
        limit = _LIMITS[largest].format(link=profile.link)
        if largest == "load" and profile.device != "cpu" and float(hit.min()) < 0.5:
            limit += " from the host"
        names = {1: "single"}
        layout = names.get(self.ranks, self.parallel if self.replicas == 1 else self._name())
        return Row(
            gpus=self.ranks, layout=layout, parallel=self.parallel, replicas=self.replicas, step_s=step_s,
            epoch_s=step_s * self.steps_per_epoch, stages=stages, memory=memory, fits=fits, limit=limit,
            work=self._counts(), balance=work.balance,
        )  # fmt: skip

    def _name(self) -> str:
        return f"{self.replicas} x {self.parallel} {self.size}"

    def _counts(self) -> dict[str, float]:
        work, groups = self.work, self.replicas
        counts = {
            "seeds": work.seeds.sum(), "edges": work.edges.sum(), "feature_rows_loaded": work.loaded.sum(),
            "halo_rows": work.received.sum(), "halo_cache_rows": work.held.sum(),
            "exchange_bytes": exchange_bytes(work, self.model),
        }  # fmt: skip
        return {name: float(count) * groups for name, count in counts.items()}

    def _replay(self, steps: int) -> tuple[Work, float]:
        """Mean work of a group's ranks in a step, and steps of that size in an epoch."""
        config, store = self.config, self.store
        topology, ids = Topology.of_whole(store), store.split_ids("train")
        if len(ids) == 0:
            do = "give it a split, for example with --split random:20,30"
            raise wrong(f"planning for {store.name}", "no training vertices", "seeds to sample from", do)
        planned = Steps(
            topology, ids, store.new_of_original()[ids], config.fanouts, config.batch_size, sampler=config.sampler,
            replace=config.replace, seed=config.seed,
        )  # fmt: skip
        owner = np.repeat(np.arange(store.num_parts), store.ownership.sizes())
        cached = self._cached_flags(len(owner))
        pieces = []
        for epoch, step, seeds in islice(planned.batches(), min(steps, len(planned))):
            # Groups take their shares of the global batch as ranks do in data mode.
            for share in seeds.tensor_split(self.replicas):
                if self.splits:
                    hops = planned.sample(share, epoch, step)
                    pieces.append(split_work(hops, owner, store.num_parts, cached))
                else:
                    pieces.append(data_work(planned, epoch, step, share, self.size))
        work = mean_work(pieces)
        return work, len(ids) / (work.seeds.sum() * self.replicas)

    def _halo_ids(self) -> list[np.ndarray]:
        """New ids that every rank's halo cache would hold."""
        row_bytes = max(1, 4 * self.store.num_features)
        if not self.splits:
            return []
        size = size_in_bytes(self.config.halo_cache)
        if size is None:
            size = int(HALO_SHARE * self.profile.memory_of_rank(self.ranks))
        if size < row_bytes:
            return []
        return [hottest_remote(self.store, part)[: size // row_bytes] for part in range(self.size)]

    def _cached_flags(self, num_vertices: int) -> np.ndarray | None:
        if not self.halo_ids:
            return None
        flags = np.zeros((self.size, num_vertices), bool)
        for part, ids in enumerate(self.halo_ids):
            flags[part, ids] = True
        return flags

    def _memory(self) -> tuple[dict[str, float], np.ndarray, bool, bool]:
        """Bytes of the fullest rank, share [P] of loaded rows that its device holds, whether the in-edges lie in
        the host's memory, whether all fits.
        """
        store, config = self.store, self.config
        row = 4 * store.num_features
        limit = self.profile.memory_of_rank(self.ranks)
        graph, held = self._graph_bytes(), len(self.halo_ids[0]) * (row + 16) if self.halo_ids else 0
        model = 16.0 * self.model.parameters
        kept = float(activation_bytes(self.work, self.model, config.prefetch).max())
        usable = DEVICE_SHARE * limit
        on_host = self.profile.device != "cpu" and (
            config.graph_placement == "pinned"
            or (config.graph_placement == "auto" and graph > usable - kept - model - held)
        )
        left = usable - kept - model - held - (0 if on_host else graph)
        own = max(store.ownership.sizes()) if self.splits else store.num_vertices
        size = size_in_bytes(config.feature_cache)
        if self.profile.device == "cpu":  # beside the cache the page cache holds the file
            budget = int(FEATURE_SHARE * limit) if size is None else size
            cached, hit = min(own, budget // max(1, row)), np.ones(len(self.work.loaded))
        else:
            cached = int(min(own, max(0, left if size is None else size) // max(1, row)))
            hit = self._hits(cached)
        memory = {
            "graph": 0.0 if on_host else graph, "features": float(cached * row + held), "activations": kept,
            "model": model,
        }  # fmt: skip
        return memory, hit, on_host, sum(memory.values()) <= limit

    def _graph_bytes(self) -> float:
        """Bytes of the in-edges and tables of the fullest rank."""
        store = self.store
        parts = range(store.num_parts)
        sizes, edges = store.ownership.sizes(), [store.part(part).num_edges for part in parts]
        index = store.part(0).indices.itemsize
        vertices, most = (max(sizes), max(edges)) if self.splits else (store.num_vertices, sum(edges))
        weights = 4 if store.has_edge_weight else 0
        return float(most * (index + weights) + vertices * (8 + 8 + 5) + store.num_vertices * 8)

    def _hits(self, cached: int) -> np.ndarray:
        """Share [P] of rows read that are among the first `cached`: by hotness where it is known."""
        store, ranks = self.store, len(self.work.loaded)
        shares = []
        for part in range(store.num_parts):
            here = store.part(part)
            rows = cached if self.splits else cached // store.num_parts
            hotness = here.hotness
            if hotness is None or not hotness.sum():
                shares.append(min(1.0, rows / max(1, here.num_vertices)))
            else:
                shares.append(float(hotness[:rows].sum() / hotness.sum()))
        return np.array(shares) if self.splits else np.full(ranks, np.mean(shares))


def split_work(hops: Sequence[Any], owner: np.ndarray, parts: int, cached: np.ndarray | None = None) -> Work:
    """A step that ranks sample together, from its hops as one rank samples them; arguments as of `count_split`."""
    counts = count_split(hops, owner, parts, cached)
    travelling = counts.halo.copy()
    travelling[0] -= counts.cached
    rows = counts.rows.copy()
    rows[0] = counts.loaded
    remote = np.stack([_remote_edges(hop, owner, parts) for hop in hops])
    return Work(
        seeds=counts.seeds, edges=counts.edges, dst=counts.dst, rows=rows, received=travelling.sum(axis=2),
        sent=travelling.sum(axis=1), held=counts.cached.sum(axis=1), loaded=counts.loaded, remote_edges=remote,
    )  # fmt: skip


def _remote_edges(hop: Any, owner: np.ndarray, parts: int) -> np.ndarray:
    """[P] in-edges whose source another part owns, by owner of the destination."""
    of_row = owner[hop.rows.numpy()]
    source, destination = of_row[hop.block.indices.numpy()], of_row[hop.block.dst_rows.numpy()]
    return np.bincount(destination[source != destination], minlength=parts)


def data_work(planned: Steps, epoch: int, step: int, seeds: torch.Tensor, ranks: int) -> Work:
    """A step of ranks that sample their shares alone."""
    shares = seeds.tensor_split(ranks)
    blocks = [[hop.block for hop in planned.sample(share, epoch, step)] for share in shares]
    edges, dst, src = (
        np.array([[getattr(block, name) for block in rank] for rank in blocks], float).T
        for name in ("n_edges", "n_dst", "n_src")
    )
    none = np.zeros_like(edges)
    return Work(
        seeds=np.array([len(share) for share in shares], float), edges=edges, dst=dst, rows=src, received=none,
        sent=none, held=none[0], loaded=src[0], remote_edges=none,
    )  # fmt: skip


def _gib(count: float) -> str:
    return f"{count / 2**30:.3g} GiB"


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"
