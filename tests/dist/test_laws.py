"""Law 1 and law 2: any number of ranks, mode and prefetch give one rank's sample, loss and gradients.

Every rank of every P runs the same list of cases in one start and leaves what it saw in a file; the tests
compare the files with what one rank (P = 1, split, no prefetch) gives. Tolerances are relative to
max(1, largest |reference|).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.dist.ranks import run_ranks
from tgnn.data.graph import Dataset, Graph
from tgnn.errors import UserError
from tgnn.kernels.block import Block
from tgnn.nn import GNN
from tgnn.parallel import ExchangePlan, all_reduce_gradients, current
from tgnn.partition.store import Store, write_store
from tgnn.sampling.loader import Loader
from tgnn.sampling.minibatch import MiniBatch
from tgnn.training.loss import loss_sum

RANKS = (1, 2, 3, 4)
MODES = ("split", "data")
MODELS = ("sage-mean", "sage-max", "sage-pool", "sage-gcn", "gcn", "gat", "gatv2", "gin", "transformer")
PARTITIONS = ("random", "contiguous", "seedless", "empty")
GRAPHS = ("weighted", "plain", "ties")
NUM_VERTICES, NUM_FEATURES, NUM_CLASSES = 60, 6, 3
BATCH_SIZE, FANOUTS, STEPS = 12, (3, 2), 5


@dataclass(frozen=True)
class Variant:
    """What a case trains on and with; one per prefetch, so that the product stays small."""

    graph: str
    sampler: str = "uniform"
    replace: bool = False
    norm: str = "none"
    residual: bool = False
    activation: str = "relu"
    dtype: torch.dtype = torch.float64
    dropout: float = 0.3
    steps: int = STEPS


VARIANTS = {
    "weighted": Variant("weighted"),
    "labor": Variant("weighted", sampler="labor"),
    "labor-dependent": Variant("plain", sampler="labor-dependent"),
    "by-weight": Variant("weighted", sampler="weighted"),
    "by-weight-replace": Variant("weighted", sampler="weighted", replace=True),
    "replace": Variant("plain", replace=True, activation="elu"),
    "layer-norm": Variant("plain", norm="layer", residual=True),
    "batch-norm": Variant("weighted", norm="batch", residual=True),
    "ties": Variant("ties", activation="none", dropout=0.5, steps=2),
    "float32": Variant("weighted", dtype=torch.float32, steps=2),
}
VARIANT_OF_PREFETCH = ("weighted", "replace", "layer-norm")


@dataclass(frozen=True)
class Case:
    model: str
    variant: str
    mode: str
    prefetch: int
    replicas: int = 1
    feature_cache: int | None = 0
    """In bytes, as the loader takes it; so is the next."""
    halo_cache: int = 0
    exchange_dtype: torch.dtype | None = None

    @property
    def partition(self) -> str:
        """Every model meets every kind of partition, none of which may matter."""
        return PARTITIONS[
            (MODELS.index(self.model) + self.prefetch + MODES.index(self.mode)) % len(PARTITIONS)
        ]

    @property
    def reference(self) -> Case:
        return Case(self.model, self.variant, "split", 0)


LAW_CASES = [
    Case(model, VARIANT_OF_PREFETCH[prefetch], mode, prefetch)
    for model in MODELS for mode in MODES for prefetch in range(3)
]  # fmt: skip
FLOAT32_CASES = [Case(model, "float32", mode, 1) for model in MODELS for mode in MODES]
NORM_CASES = [Case(model, "batch-norm", "split", 1) for model in ("sage-mean", "gcn", "gat")]
TIE_CASES = [Case("sage-max", "ties", mode, prefetch) for mode in MODES for prefetch in (0, 2)]
SAMPLER_CASES = [
    Case(model, variant, mode, prefetch)
    for model, variant in (
        ("gat", "labor"), ("gcn", "labor-dependent"), ("sage-mean", "by-weight"), ("gcn", "by-weight-replace"),
    )
    for mode in MODES for prefetch in (0, 2)
]  # fmt: skip
CASES = LAW_CASES + FLOAT32_CASES + NORM_CASES + TIE_CASES + SAMPLER_CASES


# ---- the data


def make_dataset(kind: str) -> Dataset:
    """A directed multigraph: a third of the edges twice or more, self-loops, a vertex without in-edges (58)
    and an isolated last one (59), both of them seeds. Features of `ties` are 0 or 1."""
    rng = np.random.default_rng(11)
    source, destination = rng.integers(0, 59, 420), rng.integers(0, 58, 420)
    loops = np.arange(0, 50, 9)
    edges = np.stack([np.r_[source, source[:140], loops], np.r_[destination, destination[:140], loops]])
    weight = rng.uniform(0.2, 1.8, edges.shape[1]) if kind == "weighted" else None
    x = rng.standard_normal((NUM_VERTICES, NUM_FEATURES))
    if kind == "ties":
        x = (x > 0).astype(np.float32)
    train = np.r_[0:55:2, 51, 53, 55, 58, 59]
    rest = np.setdiff1d(np.arange(NUM_VERTICES), train)
    y = rng.integers(0, NUM_CLASSES, NUM_VERTICES)
    graph = Graph.from_edge_index(edges, NUM_VERTICES, weight)
    return Dataset(f"laws-{kind}", graph, x, y, train, rest[::2], rest[1::2], num_classes=NUM_CLASSES)


def part_of(partition: str, train: np.ndarray, parts: int) -> np.ndarray:
    """An assignment of its own for every kind of partition."""
    rng = np.random.default_rng(parts)
    if partition == "contiguous":
        return np.arange(NUM_VERTICES) * parts // NUM_VERTICES
    if partition == "empty":  # the last part, where there is more than one
        return rng.integers(0, max(1, parts - 1), NUM_VERTICES)
    assigned = rng.permutation(np.arange(NUM_VERTICES) % parts)
    if partition == "seedless":  # every rank but the first
        assigned[train] = 0
    return assigned


def write_stores(folder: Path, parts: int) -> None:
    for kind in GRAPHS:
        dataset = make_dataset(kind)
        for partition in PARTITIONS:
            assigned = part_of(partition, dataset.train, parts)
            write_store(dataset, assigned, folder / f"{kind}-{partition}-{parts}", num_parts=parts)


# ---- what every rank does


def run_cases(folder: Path) -> None:
    """Run every case as one of the current ranks, and save what this rank saw."""
    comm = current()

    @functools.cache
    def store(kind: str, partition: str) -> Store:
        opened = Store.open(folder / f"{kind}-{partition}-{comm.ranks}")
        opened.part = functools.cache(
            opened.part
        )  # mapping the files anew for every case takes longer than training
        return opened

    seen = {}
    for case in CASES:
        opened = store(VARIANTS[case.variant].graph, case.partition)
        seen[_name(case)] = train(case, opened)
    seen["batch norm in data mode"] = refusal(
        Case("gcn", "batch-norm", "data", 1), store("weighted", "random")
    )
    torch.save(seen, folder / f"seen-{comm.ranks}-{comm.rank}.pt")


def _name(case: Case) -> str:
    return f"{case.model} {case.variant} {case.mode} {case.prefetch}"


def make_model(case: Case) -> GNN:
    variant, (kind, _, aggregator) = VARIANTS[case.variant], case.model.partition("-")
    torch.manual_seed(7)
    model = GNN.build(
        kind, NUM_FEATURES, 8, NUM_CLASSES, len(FANOUTS), heads=2, output_heads=2,
        aggregator=aggregator or "mean", dropout=variant.dropout, attention_dropout=0.4,
        activation=variant.activation, norm=variant.norm, residual=variant.residual,
    ).to(variant.dtype)  # fmt: skip
    if case.variant == "ties":
        # Whole numbers below 2^53 are exact in any order of summation, so that equal vertices stay equal.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_((parameter * 3).round())
    return model


def make_loader(case: Case, store: Store) -> Loader:
    return Loader(
        store, FANOUTS, BATCH_SIZE, parallel=case.mode, replace=VARIANTS[case.variant].replace, seed=3,
        prefetch=case.prefetch, sampler=VARIANTS[case.variant].sampler, replicas=case.replicas,
        feature_cache=case.feature_cache, halo_cache=case.halo_cache, exchange_dtype=case.exchange_dtype,
    )  # fmt: skip


def batches_of(loader: Loader, count: int) -> Iterator[MiniBatch]:
    while count > 0:
        for batch in loader:
            yield batch
            count -= 1
            if count == 0:
                break


class Adam:
    """Kingma, Ba 2015, algorithm 1. (torch's own imports its compiler first, seconds in every rank.)"""

    def __init__(self, model: GNN) -> None:
        self.parameters, self.steps = list(model.parameters()), 0
        self.means = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.squares = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for parameter, mean, square in zip(self.parameters, self.means, self.squares, strict=True):
            mean.lerp_(parameter.grad, 0.1)
            square.lerp_(parameter.grad**2, 0.001)
            scale = (square / (1 - 0.999**self.steps)).sqrt() + 1e-8
            parameter -= 0.01 * mean / (1 - 0.9**self.steps) / scale


def train(case: Case, store: Store) -> dict[str, Any]:
    """Adam steps over two epochs (in float32 without the update, which would amplify rounding)."""
    variant, model = VARIANTS[case.variant], make_model(case)
    adam, steps = Adam(model), []
    for batch in batches_of(make_loader(case, store), variant.steps):
        batch.x = batch.x.to(variant.dtype).requires_grad_(case.variant == "ties")
        model.zero_grad(set_to_none=True)
        loss = loss_sum(model(batch), batch.y, store.task) / batch.global_seeds
        loss.backward()
        total = all_reduce_gradients(model, extra=loss.detach().double().view(1))
        steps.append(what_was_seen(batch, total, model))
        if variant.dtype == torch.float64 and case.variant != "ties":
            adam.step()
    return {"steps": steps, "weights": {name: value.clone() for name, value in model.state_dict().items()}}


def what_was_seen(batch: MiniBatch, loss: Tensor, model: GNN) -> dict[str, Any]:
    edges, samples = [], True
    for hop, block in enumerate(reversed(batch.blocks)):
        ends = block.dst_id[block.dst_rows]
        edges.append(torch.stack([torch.full_like(ends, hop), ends, block.position], 1))
        samples &= bool((block.degree_in > block.degrees).any()) or block.n_dst == 0
    return {
        "loss": loss,
        "gradients": {name: parameter.grad.clone() for name, parameter in model.named_parameters()},
        "edges": torch.cat(edges),
        "seeds": batch.seeds,
        "input": (batch.ids[0], batch.x.grad),
        "work": dict(batch.work),
        "global_seeds": batch.global_seeds,
        "samples": samples,
        "asks_once": all(
            asks_once(*layer) for layer in zip(batch.plans, batch.blocks, batch.ids, strict=False)
        ),
    }


def asks_once(plan: ExchangePlan, block: Block, ids: Tensor) -> bool:
    """Whether no rank asks for a row twice, and every row that arrives is some edge's source.

    ids [n] are the rows that are here before any arrives.
    """
    groups = plan.send_rows.split(plan.send_counts)
    used = block.indices[block.indices >= len(ids)].unique()
    return all(len(group) == len(group.unique()) for group in groups) and len(used) == plan.n_halo


def refusal(case: Case, store: Store) -> str | None:
    """The sentence that refuses to train a case; None where it is not refused."""
    model = make_model(case)
    try:
        for batch in batches_of(make_loader(case, store), 1):
            batch.x = batch.x.double()
            model(batch)
    except UserError as error:
        return str(error)
    return None


# ---- the tests


def once_per_ranks(run: Callable[[int], Any]) -> Callable[[int], Any]:
    """`run(P)` once for each P; where it raised it raises the same again, without starting ranks anew."""
    outcomes: dict[int, tuple[Any, BaseException | None]] = {}

    def outcome(ranks: int) -> Any:
        if ranks not in outcomes:
            try:
                outcomes[ranks] = run(ranks), None
            except Exception as error:
                outcomes[ranks] = None, error
        found, error = outcomes[ranks]
        if error is not None:
            raise error
        return found

    return outcome


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`seen(P)`: for each rank of P, case name -> what it saw. Ranks are started when first asked for."""
    folder = tmp_path_factory.mktemp("laws")

    @once_per_ranks
    def load(ranks: int) -> list[dict[str, Any]]:
        write_stores(folder, ranks)
        run_ranks(run_cases, ranks, folder, timeout=240.0)
        return [torch.load(folder / f"seen-{ranks}-{rank}.pt") for rank in range(ranks)]

    return load


def of_case(seen: Any, ranks: int, case: Case) -> list[dict[str, Any]]:
    return [one[_name(case)] for one in seen(ranks)]


def reference_of(seen: Any, case: Case) -> dict[str, Any]:
    """One rank's run of the case's own variant; those that only run with prefetch are their own reference."""
    one = seen(1)[0]
    return (
        one.get(_name(case.reference)) or one[_name(Case(case.model, case.variant, "split", case.prefetch))]
    )


def near(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    largest = max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
    # A hundred thousand comparisons: the raising one, which takes longer, only has to word the difference.
    if found.shape == expected.shape and bool(((found - expected).abs() <= tolerance * largest).all()):
        return
    torch.testing.assert_close(
        found, expected, rtol=0, atol=tolerance * largest, msg=lambda text: f"{what}: {text}"
    )


def rows(edges: Tensor) -> Tensor:
    """The rows in one order, copies kept."""
    edges = edges.numpy()
    return torch.from_numpy(edges[np.lexsort(edges.T[::-1])])


def cases(some: list[Case]) -> Any:
    return pytest.mark.parametrize("case", some, ids=_name)


ON_ALL_RANKS = pytest.mark.parametrize("ranks", RANKS)


@ON_ALL_RANKS
@cases(LAW_CASES + NORM_CASES + SAMPLER_CASES)
def test_same_sampled_edges(seen: Any, ranks: int, case: Case):
    """In split mode every edge exactly once; in data mode each rank has all the edges of what it visits."""
    found, expected = of_case(seen, ranks, case), reference_of(seen, case)
    for step in range(STEPS):
        mine, whole = [one["steps"][step]["edges"] for one in found], rows(expected["steps"][step]["edges"])
        if case.mode == "split":
            torch.testing.assert_close(rows(torch.cat(mine)), whole, rtol=0, atol=0)
            continue
        torch.testing.assert_close(torch.cat(mine).unique(dim=0), whole.unique(dim=0), rtol=0, atol=0)
        for edges in mine:
            visited = {tuple(row) for row in edges[:, :2].tolist()}
            kept = torch.tensor([tuple(row) in visited for row in whole[:, :2].tolist()], dtype=torch.bool)
            torch.testing.assert_close(rows(edges), whole[kept], rtol=0, atol=0)


@ON_ALL_RANKS
@cases(LAW_CASES + NORM_CASES + SAMPLER_CASES)
def test_same_loss_gradients_and_weights(seen: Any, ranks: int, case: Case):
    expected = reference_of(seen, case)
    for rank, found in enumerate(of_case(seen, ranks, case)):
        for number, (step, right) in enumerate(zip(found["steps"], expected["steps"], strict=True)):
            what = f"rank {rank}, step {number}"
            near(step["loss"], right["loss"], 1e-9, f"{what}, loss")
            for name, gradient in right["gradients"].items():
                near(step["gradients"][name], gradient, 1e-9, f"{what}, gradient of {name}")
        for name, weight in expected["weights"].items():
            near(found["weights"][name], weight, 1e-6, f"rank {rank}, {name} after {STEPS} steps")


@ON_ALL_RANKS
@cases(FLOAT32_CASES)
def test_same_loss_in_float32(seen: Any, ranks: int, case: Case):
    expected = reference_of(seen, case)
    for found in of_case(seen, ranks, case):
        for step, right in zip(found["steps"], expected["steps"], strict=True):
            near(step["loss"], right["loss"], 1e-5, "loss")


@ON_ALL_RANKS
@cases(TIE_CASES)
def test_ties_of_max_go_to_the_same_vertex(seen: Any, ranks: int, case: Case):
    """Whole-numbered rows tie by the dozen; the gradient of each *input row* tells which vertex won."""
    found, expected = of_case(seen, ranks, case), reference_of(seen, case)
    for step in range(len(expected["steps"])):
        near(found[0]["steps"][step]["loss"], expected["steps"][step]["loss"], 1e-9, "loss")
        for name, gradient in expected["steps"][step]["gradients"].items():
            near(found[-1]["steps"][step]["gradients"][name], gradient, 1e-9, name)
        near(input_gradient(found, step), input_gradient([expected], step), 1e-9, "gradient of the features")


def input_gradient(of_ranks: list[dict[str, Any]], step: int) -> Tensor:
    """[N, F]: sum over ranks of the features' gradient, by original id."""
    total = torch.zeros(NUM_VERTICES, NUM_FEATURES, dtype=torch.float64)
    for one in of_ranks:
        ids, gradient = one["steps"][step]["input"]
        total.index_add_(0, ids, gradient)
    return total


@ON_ALL_RANKS
@cases(LAW_CASES)
def test_work_counters(seen: Any, ranks: int, case: Case):
    """Nothing is sampled or loaded twice in split mode; data mode pays for what its ranks share."""
    found, expected = of_case(seen, ranks, case), reference_of(seen, case)
    sums = {name: 0 for name in ("seeds", "edges", "feature_rows_loaded")}
    right = dict(sums)
    for step in range(STEPS):
        for name in sums:
            sums[name] += sum(one["steps"][step]["work"][name] for one in found)
            right[name] += expected["steps"][step]["work"][name]
    assert all(one["steps"][step]["asks_once"] for one in found for step in range(STEPS))
    assert sums["seeds"] == right["seeds"] == sum(step["global_seeds"] for step in expected["steps"])
    if case.mode == "split" or ranks == 1:
        assert sums == right
    else:
        assert sums["edges"] > right["edges"]
        assert sums["feature_rows_loaded"] > right["feature_rows_loaded"]


@ON_ALL_RANKS
@cases(LAW_CASES)
def test_batches_and_their_owners(seen: Any, ranks: int, case: Case):
    """The same global batches of 12, 12 and 9; owners take their own seeds, data mode deals evenly."""
    found, expected = of_case(seen, ranks, case), reference_of(seen, case)
    for step in range(STEPS):
        mine = [one["steps"][step]["seeds"] for one in found]
        everyone = expected["steps"][step]["seeds"]
        assert [one["steps"][step]["global_seeds"] for one in found] == [len(everyone)] * ranks
        torch.testing.assert_close(torch.cat(mine).sort().values, everyone.sort().values, rtol=0, atol=0)
        if case.mode == "data":
            assert max(map(len, mine)) - min(map(len, mine)) <= 1
        elif case.partition == "seedless":
            assert [len(seeds) for seeds in mine[1:]] == [0] * (ranks - 1)
    assert [step["global_seeds"] for step in expected["steps"]] == [12, 12, 9, 12, 12]


def test_cases_are_not_trivial(seen: Any):
    """Fanouts really sample, steps differ, every parameter learns, and there are parallel edges."""
    for case in LAW_CASES:
        steps = reference_of(seen, case)["steps"]
        assert all(step["samples"] for step in steps)
        assert len({step["loss"].item() for step in steps}) == STEPS
        first = steps[0]["gradients"]
        # A bias of the keys moves all scores of a destination alike: the softmax does not see it.
        seen_by_loss = {name: gradient for name, gradient in first.items() if not name.endswith("lin_key.bias")}
        assert all(gradient.abs().max() > 1e-4 for gradient in seen_by_loss.values()), case
    graph = make_dataset("weighted").graph
    pairs = np.unique(graph.edge_index(), axis=1)
    assert pairs.shape[1] < graph.num_edges - 100
    ties = reference_of(seen, TIE_CASES[0])
    assert (input_gradient([ties], 0) != 0).any()


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_batch_norm_is_refused_in_data_mode(seen: Any, ranks: int):
    for one in seen(ranks):
        sentence = one["batch norm in data mode"]
        assert sentence is not None
        assert "data" in sentence and sentence.count(". ") == 0 and sentence.endswith(".")


def test_batch_norm_counts_every_row_once(seen: Any):
    """Running statistics move, and the number of batches is the steps'."""
    for ranks in RANKS:
        for found in of_case(seen, ranks, NORM_CASES[0]):
            assert found["weights"]["norms.0.num_batches_tracked"] == STEPS
            assert (found["weights"]["norms.0.running_mean"] != 0).all()
