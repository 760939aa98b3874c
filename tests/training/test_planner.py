"""The planner's cost model: what it counts, what it must never do, what it recommends."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist.training_runs import small_dataset, store_of
from tgnn.errors import UserError
from tgnn.partition.store import Store, write_store
from tgnn.training.config import TrainConfig
from tgnn.training.cost import STAGES, Work, exchange_bytes, model_spec
from tgnn.training.planner import Layout, Row, choose, measured_path, plan, profile_of, recommend
from tgnn.training.profile import NAMES, Profile, load_profile

SMALL = {"hidden": 16, "fanouts": (3, 3), "batch_size": 64}
MODELS = ("sage", "gcn", "gat", "gatv2", "gin", "transformer")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Store]:
    """The small graph in 1, 2 and 4 parts."""
    folder = tmp_path_factory.mktemp("stores")
    return {parts: store_of(small_dataset(), parts, folder) for parts in (1, 2, 4)}


def row(
    stores: dict[int, Store], ranks: int, profile: Profile, parallel: str = "split", **options: Any
) -> Row:
    """One layout of the small graph."""
    config = TrainConfig(**{**SMALL, **options})
    store = stores[ranks // config.replicas]
    return Layout(store, config, profile, 3, ranks, parallel=parallel, replicas=config.replicas).row()


def faster(profile: Profile, name: str) -> Profile:
    """The profile with one number twice as good."""

    def better(rates):
        return dataclasses.replace(
            rates, **{name: getattr(rates, name) * (0.5 if name.endswith("_s") else 2)}
        )

    return dataclasses.replace(profile, alone=better(profile.alone), crowded=better(profile.crowded))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["cpu", "pcie-only"])
def test_better_hardware_is_never_slower(model: str, kind: str, stores: dict[int, Store]):
    profile, matter = load_profile(kind), set()
    config = TrainConfig(**SMALL, model=model, aggregator="mean", halo_cache="2kB")
    for parallel in ("split", "data"):
        layout = Layout(stores[2], config, profile, 3, 2, parallel=parallel)
        before = layout.row()
        for name in NAMES:
            layout.profile = faster(profile, name)
            after = layout.row()
            assert after.step_s <= before.step_s * (1 + 1e-12), name
            if after.step_s < before.step_s * (1 - 1e-9):
                matter.add(name)
    if kind == "cpu":  # on a GPU a step this small is all launches
        used = {"copy", "matmul_float32", "gather", "dropout", "transpose", "sample_rows", "sample_edges",
                "split_edges", "split_remote", "all_to_all", "all_to_all_s", "all_reduce", "all_reduce_s"}  # fmt: skip
        used |= (
            {"attention", "attention_backward"} if model in ("gat", "gatv2", "transformer") else {"aggregate"}
        )
        assert used <= matter


def test_one_rank_is_one_rank_in_every_mode(stores: dict[int, Store]):
    profile = load_profile("cpu")
    split, data = row(stores, 1, profile), row(stores, 1, profile, "data")
    assert dataclasses.replace(data, parallel="split") == split
    (single,) = plan(stores.__getitem__, TrainConfig(**SMALL), [1], profile, 3)
    assert single == split and single.layout == "single"
    assert split.stages["wait"] == split.stages["split"] == split.work["exchange_bytes"] == 0


def test_stages_add_up_and_the_limit_is_the_largest(stores: dict[int, Store]):
    slow = load_profile("cpu")
    link = dataclasses.replace(slow.crowded, all_to_all=1e3)
    for profile, limit in ((slow, None), (dataclasses.replace(slow, crowded=link), "exchange over loopback")):
        found = row(stores, 2, profile)
        assert tuple(found.stages) == STAGES
        assert sum(found.stages.values()) == pytest.approx(found.step_s)
        assert limit is None or found.limit == limit
    # 150 seeds in steps of 64, 64 and 22 are three steps of 50 on average.
    assert found.epoch_s == pytest.approx(3 * found.step_s)


def test_layouts_of_four_ranks(stores: dict[int, Store]):
    rows = plan(stores.__getitem__, TrainConfig(**SMALL), [1, 4], load_profile("a100-nvlink"), 3)
    assert [(r.gpus, r.layout) for r in rows] == [
        (1, "single"),
        (4, "data"),
        (4, "split"),
        (4, "2 x split 2"),
    ]
    single, data, split, groups = rows
    # Split does each piece of work once; groups repeat what data parallel ranks repeat, and less of it.
    for key in ("edges", "feature_rows_loaded"):
        assert split.work[key] == pytest.approx(single.work[key], rel=1e-12)
        assert single.work[key] < groups.work[key] < data.work[key]
    assert data.work["halo_rows"] == 0 < groups.work["halo_rows"]
    only = plan(stores.__getitem__, TrainConfig(**SMALL, replicas=2), [4], load_profile("a100-nvlink"), 3)
    assert [r.layout for r in only] == ["data", "2 x split 2"]


def test_exchange_bytes_by_hand():
    config = TrainConfig(model="sage", hidden=4, fanouts=(3, 3), exchange_dtype="bfloat16")
    spec = model_spec(config, num_features=10, num_classes=7, id_bytes=4)
    # Layer 0 projects 10 to 4 columns first; layer 1 has nothing narrower than its 4.
    assert [(layer.travel, layer.returns) for layer in spec.layers] == [(4, True), (4, True)]
    received, none = np.array([[5.0, 0.0], [2.0, 1.0]]), np.zeros((2, 2))
    work = Work(seeds=none[0], edges=none, dst=none, rows=none, received=received, sent=none, held=none[0],
                loaded=none[0], remote_edges=none)  # fmt: skip
    assert exchange_bytes(work, spec) == 8 * 4 + (5 + 3) * 4 * 2 * 2
    raw = model_spec(dataclasses.replace(config, hidden=16, exchange_dtype="float32"), 10, 7, 4)
    # Raw features travel one way: nobody wants their gradient.
    assert [(layer.travel, layer.returns) for layer in raw.layers] == [(10, False), (7, True)]
    assert exchange_bytes(work, raw) == 8 * 4 + 5 * 10 * 4 + 3 * 7 * 4 * 2


def test_a_halo_cache_saves_exchange_and_takes_memory(stores: dict[int, Store]):
    profile = load_profile("pcie-only")
    plain, some, all_ = (row(stores, 2, profile, halo_cache=size) for size in ("0", "640", "1MB"))
    sent = [r.work["exchange_bytes"] for r in (plain, some, all_)]
    assert sent[0] > sent[1] > sent[2] > 0
    assert plain.work["halo_rows"] == some.work["halo_rows"] + some.work["halo_cache_rows"]
    assert plain.memory["features"] < some.memory["features"] < all_.memory["features"]
    assert plain.stages["wait"] >= all_.stages["wait"]


def test_memory_grows_with_the_batch_and_is_judged(stores: dict[int, Store]):
    profile = load_profile("h200-nvlink")
    few, many = row(stores, 2, profile, batch_size=8), row(stores, 2, profile, batch_size=128)
    assert few.memory["activations"] < many.memory["activations"] and many.fits
    data = row(stores, 2, profile, "data", batch_size=128)
    assert data.memory["graph"] > many.memory["graph"]
    tiny = dataclasses.replace(profile, memory_bytes=1000.0)
    none = row(stores, 2, tiny)
    # The graph moves to the host, no feature is cached, and still the step does not fit.
    assert not none.fits and none.memory["graph"] == 0 and none.memory["features"] == 0
    assert "Nothing fits" in recommend([none])


def test_the_device_cache_is_used_before_the_host(stores: dict[int, Store]):
    profile = load_profile("pcie-only")
    all_, none = row(stores, 2, profile), row(stores, 2, profile, feature_cache="0")
    assert all_.stages["load"] < none.stages["load"]
    layout = Layout(stores[2], TrainConfig(**SMALL), profile, 3, 2)
    sizes = stores[2].ownership.sizes()
    np.testing.assert_allclose(layout._hits(10), np.minimum(1, 10 / sizes))


def test_choose_gives_every_rank_the_same_answer(stores: dict[int, Store]):
    config = TrainConfig(**SMALL, parallel="auto")
    cpu = load_profile("cpu")
    answers = {choose(Store.open(stores[2].path), config, 2, "cpu", cpu) for _ in range(3)}
    assert len(answers) == 1
    mode, reason = answers.pop()
    rows = {m: Layout(stores[2], config, cpu, 2, 2, parallel=m).row().step_s for m in ("split", "data")}
    assert mode == min(rows, key=rows.get) and reason.endswith(".") and mode in reason
    no_link = dataclasses.replace(cpu, crowded=dataclasses.replace(cpu.crowded, all_to_all=1.0))
    assert choose(stores[2], config, 2, "cpu", no_link)[0] == "data"
    slow_rows = dataclasses.replace(cpu.crowded, sample_rows=1.0, all_to_all=1e15, all_to_all_s=1e-9)
    assert choose(stores[2], config, 2, "cpu", dataclasses.replace(cpu, crowded=slow_rows))[0] == "split"
    assert choose(stores[1], config, 1, "cpu", cpu)[0] == "split"
    batch_norm = dataclasses.replace(config, norm="batch")
    assert choose(stores[2], batch_norm, 2, "cpu", no_link)[0] == "split"


def test_a_measured_profile_in_the_cache_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TGNN_CACHE", str(tmp_path))
    assert profile_of("cpu").name == "cpu"
    dataclasses.replace(load_profile("cpu"), name="mine").save(measured_path("cpu"))
    assert profile_of("cpu").name == "mine"
    measured_path("cpu").write_text("{")
    assert profile_of("cpu").name == "cpu"


def test_no_training_vertices_is_said(tmp_path: Path):
    dataset = dataclasses.replace(small_dataset(), train=[])
    store = write_store(dataset, np.zeros(300, np.int32), tmp_path / "store", num_parts=1)
    with pytest.raises(UserError, match="no training vertices"):
        Layout(store, TrainConfig(**SMALL), load_profile("cpu"), 3, 1)


def test_recommendation_takes_the_fewest_ranks_near_the_best(stores: dict[int, Store]):
    base = row(stores, 2, load_profile("cpu"))
    rows = [dataclasses.replace(base, gpus=g, epoch_s=s) for g, s in ((2, 1.04), (4, 1.0), (8, 1.02))]
    assert recommend(rows).startswith("Train split on 2 ranks")
    rows[0] = dataclasses.replace(rows[0], epoch_s=2.0)
    assert recommend(rows).startswith("Train split on 4 ranks")
