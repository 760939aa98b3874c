"""Law 2 with presampled stores, caches, replicas and narrower exchange: the same loss and gradients, less traffic.

As in test_laws.py every rank runs the same list of cases in one start; one plain rank is the reference.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.dist.ranks import run_ranks
from tests.dist.test_laws import (
    BATCH_SIZE,
    FANOUTS,
    NUM_FEATURES,
    STEPS,
    Case,
    make_dataset,
    make_loader,
    near,
    once_per_ranks,
    part_of,
    rows,
    train,
)  # fmt: skip
from tgnn.errors import UserError
from tgnn.nn import GNN
from tgnn.parallel import Comm, current
from tgnn.partition.store import Store, write_store
from tgnn.sampling.loader import Loader
from tgnn.training.loss import loss_sum
from tgnn.training.partitioning import PresampleOptions, partitioned

ROW = 4 * NUM_FEATURES
MODELS = ("sage-mean", "sage-max", "gcn", "gat", "transformer")
PLAIN = [Case(model, "weighted", "split", 0) for model in MODELS]
OPTIONS = {
    "presampled": {},
    "halo cache of 9 rows": {"halo_cache": 9 * ROW, "prefetch": 1},
    "halo cache of everything": {"halo_cache": 10**6},
    "feature cache of 7 rows": {"feature_cache": 7 * ROW, "prefetch": 2},
    "feature cache of everything": {"feature_cache": None},
    "two groups": {"replicas": 2, "prefetch": 1},
    "all together": {"replicas": 2, "halo_cache": 9 * ROW, "feature_cache": 7 * ROW, "prefetch": 2},
    "through sockets": {"prefetch": 1},
    "rows in bfloat16": {"exchange_dtype": torch.bfloat16},
}
EXACT = [name for name in OPTIONS if name != "rows in bfloat16"]
RANKS = (2, 3, 4)


@contextmanager
def through_sockets(comm: Comm) -> Iterator[None]:
    """As between machines: rows travel, where ranks of one machine would read them out of shared memory."""
    shared, comm._shared = comm._shared, None
    assert comm.ranks == 1 or shared is not None or sys.platform != "linux"
    yield
    comm._shared = shared


def run_cases(folder: Path) -> None:
    comm, seen = current(), {}
    for plain in PLAIN:
        for name, options in {"plain": {}, **OPTIONS}.items():
            if comm.ranks % options.get("replicas", 1):
                continue
            case = replace(plain, **options)
            store = "plain" if name == "plain" else "presampled"
            opened = Store.open(folder / f"{store}-{comm.ranks // case.replicas}")
            with through_sockets(comm) if name == "through sockets" else nullcontext():
                seen[plain.model, name] = train(case, opened)
    torch.save(seen, folder / f"seen-{comm.ranks}-{comm.rank}.pt")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`seen(P)`: for each rank of P, (model, option) -> what it saw."""
    folder = tmp_path_factory.mktemp("options")
    dataset = make_dataset("weighted")
    sampling = PresampleOptions(fanouts=FANOUTS, batch_size=BATCH_SIZE)
    for parts in (1, *RANKS):
        assigned = part_of("random", dataset.train, parts)
        write_store(dataset, assigned, folder / f"plain-{parts}", num_parts=parts)
        made = partitioned(dataset, parts, options=sampling)
        hot = {"num_parts": parts, "presampled": made.hotness}
        write_store(dataset, made.part_of, folder / f"presampled-{parts}", **hot)

    @once_per_ranks
    def load(ranks: int) -> list[dict[Any, Any]]:
        run_ranks(run_cases, ranks, folder, timeout=240.0)
        return [torch.load(folder / f"seen-{ranks}-{rank}.pt") for rank in range(ranks)]

    return load


def skip_uneven(ranks: int, option: str) -> None:
    if ranks % OPTIONS[option].get("replicas", 1):
        pytest.skip(f"{ranks} ranks do not form two equal groups")


def work(seen: Any, ranks: int, model: str, option: str, name: str) -> int:
    """One counter, summed over ranks and steps."""
    return sum(step["work"][name] for one in seen(ranks) for step in one[model, option]["steps"])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("option", EXACT)
@pytest.mark.parametrize("model", MODELS)
def test_same_sample_loss_gradients_and_weights(seen: Any, ranks: int, option: str, model: str):
    skip_uneven(ranks, option)
    expected = seen(1)[0][model, "plain"]
    edges = [[step["edges"] for step in one[model, option]["steps"]] for one in seen(ranks)]
    for step in range(STEPS):
        whole = expected["steps"][step]["edges"].unique(dim=0)
        torch.testing.assert_close(
            torch.cat([one[step] for one in edges]).unique(dim=0), whole, rtol=0, atol=0
        )
    for rank, one in enumerate(seen(ranks)):
        for number, (step, right) in enumerate(
            zip(one[model, option]["steps"], expected["steps"], strict=True)
        ):
            what = f"rank {rank}, step {number}"
            near(step["loss"], right["loss"], 1e-9, f"{what}, loss")
            for name, gradient in right["gradients"].items():
                near(step["gradients"][name], gradient, 1e-9, f"{what}, gradient of {name}")
            assert step["asks_once"], what
        for name, weight in expected["weights"].items():
            near(one[model, option]["weights"][name], weight, 1e-6, f"rank {rank}, {name}")


@pytest.mark.parametrize("ranks", (2, 4))
def test_groups_share_a_batch_and_sample_alone(seen: Any, ranks: int):
    """Each seed is in one group; inside a group no edge is sampled twice."""
    size = ranks // 2
    for step in range(STEPS):
        found = [one["gcn", "two groups"]["steps"][step] for one in seen(ranks)]
        right = seen(1)[0]["gcn", "plain"]["steps"][step]
        seeds = torch.cat([one["seeds"] for one in found]).sort().values
        torch.testing.assert_close(seeds, right["seeds"].sort().values, rtol=0, atol=0)
        halves = [torch.cat([one["seeds"] for one in found[first : first + size]]) for first in (0, size)]
        assert abs(len(halves[0]) - len(halves[1])) <= 1
        for first in (0, size):
            edges = rows(torch.cat([one["edges"] for one in found[first : first + size]]))
            whole = rows(right["edges"])
            of_group = {tuple(row) for row in edges[:, :2].tolist()}
            kept = torch.tensor([tuple(row) in of_group for row in whole[:, :2].tolist()], dtype=torch.bool)
            torch.testing.assert_close(edges, whole[kept], rtol=0, atol=0)


@pytest.mark.parametrize("ranks", RANKS)
def test_halo_cache_saves_the_rows_it_holds(seen: Any, ranks: int):
    """What is cached is neither asked for nor read by its owner; with everything cached only hidden rows travel."""
    plain = {
        name: work(seen, ranks, "sage-mean", "presampled", name) for name in ("halo_rows", "exchange_bytes")
    }
    some, everything = "halo cache of 9 rows", "halo cache of everything"
    for option in (some, everything):
        cached = work(seen, ranks, "sage-mean", option, "halo_cache_rows")
        assert cached > 0
        assert work(seen, ranks, "sage-mean", option, "halo_rows") + cached == plain["halo_rows"]
        assert work(seen, ranks, "sage-mean", option, "exchange_bytes") < plain["exchange_bytes"]
    for one in seen(ranks):
        for step in one["sage-mean", everything]["steps"]:
            assert step["work"]["halo_cache_rows"] + step["work"]["feature_rows_loaded"] <= len(
                step["input"][0]
            )
    loaded = [
        work(seen, ranks, "sage-mean", name, "feature_rows_loaded") for name in ("plain", some, everything)
    ]
    assert loaded[0] > loaded[1] > loaded[2]


@pytest.mark.parametrize("ranks", RANKS)
def test_feature_cache_counts_its_hits(seen: Any, ranks: int):
    loaded = work(seen, ranks, "gcn", "presampled", "feature_rows_loaded")
    assert work(seen, ranks, "gcn", "presampled", "feature_cache_rows") == 0
    assert 0 < work(seen, ranks, "gcn", "feature cache of 7 rows", "feature_cache_rows") < loaded
    assert work(seen, ranks, "gcn", "feature cache of everything", "feature_cache_rows") == loaded


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", MODELS)
def test_rows_in_bfloat16_change_the_first_loss_by_their_rounding_only(seen: Any, ranks: int, model: str):
    """Eight bits of mantissa: half an ulp is 2^-9 of a row's element, and two layers exchange."""
    right = seen(1)[0][model, "plain"]["steps"][0]
    for one in seen(ranks):
        step = one[model, "rows in bfloat16"]["steps"][0]
        near(step["loss"], right["loss"], 2**-6, "loss")
        assert not torch.equal(step["loss"], right["loss"]), "no row was rounded"
        for name, gradient in right["gradients"].items():
            near(step["gradients"][name], gradient, 2**-4, f"gradient of {name}")


def bytes_of_a_step(folder: Path) -> None:
    """Exchanged bytes of forward and backward, with and without bfloat16: rank 0 saves them."""
    store, found = Store.open(folder / f"store-{current().ranks}"), {}
    for name, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
        loader = Loader(store, FANOUTS, BATCH_SIZE, exchange_dtype=dtype, seed=3)
        torch.manual_seed(7)
        model = GNN.build("sage", NUM_FEATURES, 8, store.num_classes, len(FANOUTS))
        batch = next(iter(loader))
        before = current().bytes_sent
        loss_sum(model(batch), batch.y, store.task).backward()
        found[name] = current().bytes_sent - before
    np.save(folder / f"bytes-{current().rank}.npy", [found["float32"], found["bfloat16"]])


def test_rows_in_bfloat16_take_half_the_bytes(tmp_path: Path):
    dataset = make_dataset("weighted")
    write_store(dataset, part_of("random", dataset.train, 2), tmp_path / "store-2", num_parts=2)
    run_ranks(bytes_of_a_step, 2, tmp_path)
    for rank in range(2):
        wide, narrow = np.load(tmp_path / f"bytes-{rank}.npy")
        assert wide > 0 and narrow * 2 == wide


def test_uneven_groups_are_refused():
    with pytest.raises(UserError, match="^replicas: got 2 for 1 ranks, expected groups of equal size"):
        make_loader(Case("gcn", "weighted", "split", 0, replicas=2), None)


def test_a_presampled_store_is_in_another_order(seen: Any):
    """Else the cases above would not tell anything of it."""
    rows_of = [
        torch.cat([one["gcn", name]["steps"][0]["input"][0] for one in seen(2)])
        for name in ("plain", "presampled")
    ]
    torch.testing.assert_close(rows_of[0].sort().values, rows_of[1].sort().values, rtol=0, atol=0)
    assert not torch.equal(*rows_of)
