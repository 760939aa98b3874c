"""Loader: the epoch's permutation, the steps and their seeds, prefetch, and what it refuses.

A loader in data mode talks to nobody, so the shares of several ranks are looked at in this one process.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tgnn.data.graph import Dataset, Graph
from tgnn.errors import UserError
from tgnn.kernels import rng
from tgnn.parallel import Comm
from tgnn.partition.store import Store, write_store
from tgnn.sampling.loader import Loader, seeds_of
from tgnn.sampling.minibatch import MiniBatch
from tgnn.sampling.neighbor import NeighborSampler
from tgnn.sampling.topology import Topology

NUM_VERTICES = 50
TRAIN = np.arange(0, 50, 2)


def make_dataset(with_features: bool = True) -> Dataset:
    """Random in-edges, some twice; vertex 49 is isolated. A vertex's only feature is its id."""
    generator = np.random.default_rng(3)
    edges = generator.integers(0, 49, (2, 300))
    graph = Graph.from_edge_index(np.concatenate([edges, edges[:, :40]], axis=1), NUM_VERTICES)
    x = np.arange(NUM_VERTICES, dtype=np.float32)[:, None] if with_features else None
    y = np.arange(NUM_VERTICES) % 3
    return Dataset("loader", graph, x, y, TRAIN, [1, 3, 5], [7, 9], num_classes=3)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Store]:
    """The same graph in 1, 2, 3 and 4 parts; part 2 of 4 is empty."""
    folder, written = tmp_path_factory.mktemp("loader"), {}
    for parts in (1, 2, 3, 4):
        part_of = np.random.default_rng(parts).integers(0, parts, NUM_VERTICES)
        part_of[part_of == 2] = 0 if parts == 4 else 2
        written[parts] = write_store(make_dataset(), part_of, folder / str(parts), num_parts=parts)
    return written


def loaders(stores: dict[int, Store], parts: int, **options) -> list[Loader]:
    """The loaders of all ranks, in data mode."""
    options = {"fanouts": [3, 2], "batch_size": 7, "parallel": "data", "seed": 5, **options}
    return [Loader(stores[parts], comm=Comm(rank, parts), **options) for rank in range(parts)]


def seeds(batch: MiniBatch) -> list[int]:
    return batch.seeds.tolist()


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_each_training_vertex_once_per_epoch(stores: dict[int, Store], parts: int):
    """The shares of all ranks side by side are one rank's batches, in order; epochs differ."""
    ranks = loaders(stores, parts)
    alone = loaders(stores, 1)[0]
    orders = []
    for epoch in range(3):
        steps = list(zip(*(list(loader) for loader in ranks), strict=True))
        reference = list(alone)
        assert len(steps) == len(reference) == len(alone) == len(ranks[0]) == 4
        joined = [[seed for share in step for seed in seeds(share)] for step in steps]
        assert joined == [seeds(batch) for batch in reference]
        assert [len(step) for step in joined] == [7, 7, 7, 4]
        for step, batch in zip(steps, reference, strict=True):
            assert {share.global_seeds for share in step} == {batch.global_seeds}
            assert {(share.epoch, share.step) for share in step} == {(epoch, batch.step)}
        orders.append([seed for step in joined for seed in step])
        assert sorted(orders[-1]) == TRAIN.tolist()
    assert orders[0] != orders[1] != orders[2] and orders[0] != TRAIN.tolist()
    assert alone.num_seeds == len(TRAIN)


def test_permutation_is_a_function_of_seed_and_epoch(stores: dict[int, Store]):
    """Every order turns up: the first seed of 300 epochs meets nearly all 25 vertices about equally often."""
    loader = loaders(stores, 1)[0]
    ids, _ = seeds_of(stores[1], "train")
    orders = [loader._order(epoch).tolist() for epoch in range(300)]
    firsts = np.bincount([order[0] for order in orders], minlength=25)
    assert (firsts > 0).all() and firsts.max() < 30  # 12 expected
    other = loaders(stores, 1, seed=6)[0]
    assert other._order(0).tolist() != orders[0]
    by_number = sorted(
        range(25), key=lambda i: int(rng.keyed(rng.stream(5, rng.PERMUTATION, 4), ids[i : i + 1]))
    )
    assert orders[4] == by_number


def test_without_shuffle_seeds_come_by_original_id(stores: dict[int, Store]):
    loader = loaders(stores, 1, shuffle=False)[0]
    for _ in range(2):
        assert [seed for batch in loader for seed in seeds(batch)] == TRAIN.tolist()
    val = Loader(stores[1], [2], 2, split="val", shuffle=False)
    assert [seeds(batch) for batch in val] == [[1, 3], [5]]
    assert [seeds(batch) for batch in Loader(stores[1], [2], 2, split="test")][0] in ([7, 9], [9, 7])


def test_features_labels_and_work(stores: dict[int, Store]):
    """Rows are those of their ids, whatever part they lie in; the counters count them."""
    for parts in (1, 4):
        for loader in loaders(stores, parts):
            for batch in loader:
                torch.testing.assert_close(batch.x[:, 0], batch.ids[0].float(), rtol=0, atol=0)
                torch.testing.assert_close(batch.y, batch.seeds % 3, rtol=0, atol=0)
                assert batch.work["seeds"] == len(batch.seeds)
                assert batch.work["edges"] == sum(block.n_edges for block in batch.blocks)
                assert batch.work["feature_rows_loaded"] == batch.work["input_rows"] == len(batch.ids[0])
                assert batch.work["halo_rows"] == 0
                assert len(batch.ids[0].unique()) == len(batch.ids[0])
                for number, block in enumerate(batch.blocks):
                    assert (block.n_src, block.n_dst) == tuple(map(len, batch.ids[number : number + 2]))
                    torch.testing.assert_close(batch.ids[number][: block.n_dst], batch.ids[number + 1])
                    torch.testing.assert_close(block.dst_id, batch.ids[number + 1])


def test_data_without_features(tmp_path):
    store = write_store(make_dataset(with_features=False), np.zeros(NUM_VERTICES, int), tmp_path / "store")
    batch = next(iter(Loader(store, [2])))
    assert batch.x is None and batch.work["feature_rows_loaded"] == 0 and batch.work["input_rows"] > 0


def fingerprint(batches: list[MiniBatch]) -> list:
    """Everything that was sampled."""
    return [
        (batch.epoch, batch.step, [ids.tolist() for ids in batch.ids],
         [(block.indptr.tolist(), block.indices.tolist(), block.position.tolist()) for block in batch.blocks])
        for batch in batches
    ]  # fmt: skip


@pytest.mark.parametrize("replace", [False, True])
def test_prefetch_changes_nothing(stores: dict[int, Store], replace: bool):
    """0, 1, 2 and more batches ahead than there are; started again in the middle of an epoch."""
    seen = []
    for prefetch in (0, 1, 2, 9):
        loader = loaders(stores, 1, prefetch=prefetch, replace=replace)[0]
        seen.append(fingerprint([*loader, *loader]))
        assert fingerprint(list(loader.iterate(1, start=2))) == seen[0][6:]
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert [(epoch, step) for epoch, step, *_ in seen[0]] == [(e, s) for e in (0, 1) for s in range(4)]


def test_prefetch_looks_as_far_ahead_as_asked(stores: dict[int, Store]):
    for prefetch in (0, 1, 2):
        prepared = []
        loader = loaders(stores, 1, prefetch=prefetch)[0]
        prepare = loader._prepare
        loader._prepare = lambda *args, prepare=prepare, seen=prepared: seen.append(1) or prepare(*args)
        batches = iter(loader)
        next(batches)
        assert len(prepared) == 1 + prefetch


@pytest.mark.parametrize(
    "options, named",
    [
        ({"fanouts": []}, "got []"),
        ({"fanouts": [3, -2]}, "got [3, -2]"),
        ({"fanouts": [3, 2.5]}, "2.5"),
        ({"fanouts": ["3"]}, "'3'"),
        ({"fanouts": 3}, "got 3"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"batch_size": -4}, "batch_size -4"),
        ({"batch_size": 2.5}, "batch_size 2.5"),
        ({"batch_size": 10**20}, "below 2^62"),
        ({"fanouts": [3, 10**20]}, "below 2^31"),
        ({"prefetch": -1}, "prefetch -1"),
        ({"prefetch": 0.5}, "prefetch 0.5"),
        ({"parallel": "both"}, "'both'"),
        ({"split": "valid"}, "'valid'"),
    ],
)
def test_bad_arguments(stores: dict[int, Store], options: dict, named: str):
    with pytest.raises(UserError) as caught:
        Loader(stores[1], **{"fanouts": [2], **options})
    text = str(caught.value)
    assert named in text and text.endswith(".") and ". " not in text and "expected" in text


def test_numpy_integers_are_whole_numbers(stores: dict[int, Store]):
    loader = Loader(stores[1], np.array([3, 2]), np.int64(7), seed=5)
    assert fingerprint(list(loader)) == fingerprint(list(loaders(stores, 1)[0]))


def test_store_of_another_number_of_parts(stores: dict[int, Store]):
    for mode in ("split", "data"):
        with pytest.raises(UserError, match="--parts 2"):
            Loader(stores[3], [2], parallel=mode, comm=Comm(0, 2))


def test_store_may_be_a_path_and_nothing_else(stores: dict[int, Store]):
    by_path = Loader(str(stores[1].path), [3, 2], 7, seed=5)
    assert fingerprint(list(by_path)) == fingerprint(list(Loader(stores[1], [3, 2], 7, seed=5)))
    with pytest.raises(UserError, match="nostore"):
        Loader("nostore", [2])
    with pytest.raises(UserError, match="store: got a int, expected a Store"):
        Loader(3, [2])
    with pytest.raises(UserError, match=r"tgnn\.launch\(fn, \.\.\., ranks=3\)"):
        Loader(stores[3], [2])


PRINT_SAMPLE = """
import hashlib, sys
import torch
from tests.sampling.test_loader import fingerprint, large_sample
from tgnn.partition.store import Store
from tgnn.sampling.loader import Loader

path, threads, prefetch = sys.argv[1:]
torch.set_num_threads(int(threads))
for replace in (False, True):
    loader = Loader(Store.open(path), [2, 2], 6, replace=replace, seed=9, prefetch=int(prefetch))
    sampled = fingerprint([*loader, *loader]), large_sample(replace)
    print(torch.get_num_threads(), hashlib.sha256(repr(sampled).encode()).hexdigest())
"""


def large_sample(replace: bool) -> list:
    """A sample large enough for torch to use its threads."""
    generator = np.random.default_rng(0)
    n = 20_000
    graph = Graph.from_edge_index(generator.integers(0, n, (2, 15 * n)), n)
    tensors = [
        torch.from_numpy(array) for array in (graph.indptr, graph.indices, np.arange(n), graph.degree_out())
    ]
    sampler = NeighborSampler(Topology(0, n, *tensors, None, (0, n)), replace=replace, seed=1)
    hops = sampler.sample(torch.arange(0, n, 4), [10, 5], 0, 0)
    return [(hop.rows.tolist(), hop.block.indices.tolist(), hop.block.position.tolist()) for hop in hops]


def test_a14_same_sample_in_other_processes_and_threads(stores: dict[int, Store]):
    """One and four threads, none and two batches ahead, in processes of their own: the same ids."""
    running = []
    for threads, prefetch in (("1", "0"), ("4", "2")):
        command = [sys.executable, "-c", PRINT_SAMPLE, str(stores[1].path), threads, prefetch]
        path = os.pathsep.join(folder for folder in sys.path if folder)
        env = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": path}
        running.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    printed = [process.communicate(timeout=240)[0].split() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert printed[0][0::2] == ["1", "1"] and printed[1][0::2] == ["4", "4"]
    assert printed[0][1::2] == printed[1][1::2]
    assert len(set(printed[0][1::2])) == 2


def test_a14_epochs_steps_and_seeds_differ(stores: dict[int, Store]):
    """The same vertex draws other in-edges in another epoch, step, hop, or under another seed."""

    def drawn(seed: int, epoch: int, step: int, hop: int) -> list[int]:
        sampler = loaders(stores, 1, seed=seed)[0].sampler
        rows = torch.arange(NUM_VERTICES)
        return sampler.hop(
            rows, 2, rng.stream(sampler.seed, rng.SAMPLING, epoch, step, hop)
        ).block.position.tolist()

    first = drawn(0, 0, 0, 0)
    assert first == drawn(0, 0, 0, 0)
    for other in [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]:
        assert drawn(*other) != first
