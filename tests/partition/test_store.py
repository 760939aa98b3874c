"""The store on disk: what it holds, what it checks, and that a failure leaves the last good one."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tgnn.data.graph import Dataset, Graph
from tgnn.data.synthetic import hand_drawn
from tgnn.errors import UserError
from tgnn.partition import Store, assign, report, store_writer, write_store
from tgnn.partition import store as store_module


def written(dataset: Dataset, path: Path, num_parts: int, seed: int = 0, **more: Any) -> Store:
    """A store of `dataset` in random parts."""
    part_of = np.random.default_rng(seed).integers(0, num_parts, dataset.num_vertices)
    return write_store(dataset, part_of, path, {"partitioner": "random"}, num_parts=num_parts, **more)


def fingerprint(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 15])
def test_parts_hold_the_rows_of_the_dataset(tmp_path: Path, num_parts: int, with_weights: bool) -> None:
    dataset = hand_drawn(with_weights)
    graph = dataset.graph
    store = written(dataset, tmp_path / "store", num_parts)
    original = store.original_ids()
    new_of_original = store.new_of_original()
    np.testing.assert_array_equal(np.sort(original), np.arange(12))
    np.testing.assert_array_equal(new_of_original[original], np.arange(12))
    assert store.num_parts == num_parts and store.has_edge_weight == with_weights
    degree_out = np.bincount(graph.indices, minlength=12)
    num_edges = 0
    for p in range(num_parts):
        part = store.part(p)
        assert part.num_vertices == store.ownership.size(p)
        assert part.indices.dtype == np.int32 and part.indptr.dtype == part.original_id.dtype == np.int64
        np.testing.assert_array_equal(
            part.original_id, original[np.array(store.ownership.range(p), dtype=int)]
        )
        assert (np.diff(part.original_id) > 0).all()
        for row, vertex in enumerate(part.original_id):
            stored = slice(part.indptr[row], part.indptr[row + 1])
            given = slice(graph.indptr[vertex], graph.indptr[vertex + 1])
            # Equal place by place: an in-edge's position does not depend on the partition.
            np.testing.assert_array_equal(original[part.indices[stored]], graph.indices[given])
            if with_weights:
                np.testing.assert_array_equal(part.edge_weight[stored], graph.edge_weight[given])
        assert with_weights or part.edge_weight is None
        np.testing.assert_array_equal(part.degree_out, degree_out[part.original_id])
        np.testing.assert_array_equal(part.features, dataset.x[part.original_id])
        np.testing.assert_array_equal(part.labels, dataset.y[part.original_id])
        assert part.features.dtype == np.float32 and part.labels.dtype == np.int64
        num_edges += part.num_edges
    assert num_edges == store.num_edges == graph.num_edges


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_splits_are_local_rows_and_come_back_in_original_ids(tmp_path: Path, num_parts: int) -> None:
    dataset = hand_drawn()
    store = written(dataset, tmp_path / "store", num_parts)
    for split in ("train", "val", "test"):
        found = []
        for p in range(num_parts):
            rows = getattr(store.part(p), split)
            assert rows.dtype == np.int64 and (np.diff(rows) > 0).all()
            found.extend(store.part(p).original_id[rows])
        np.testing.assert_array_equal(np.sort(found), getattr(dataset, split))
        np.testing.assert_array_equal(store.split_ids(split), getattr(dataset, split))
    with pytest.raises(UserError, match="train or val or test"):
        store.split_ids("valid")


def test_a19_features_follow_their_vertex_for_every_number_of_parts(tmp_path: Path) -> None:
    edges = np.array([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])
    dataset = Dataset("ids", Graph.from_edge_index(edges, 6), x=np.arange(6)[:, None], y=np.arange(6) % 2)
    for num_parts in (1, 2, 3):
        store = written(dataset, tmp_path / f"{num_parts}", num_parts, seed=7)
        by_new_id = np.concatenate([store.part(p).features for p in range(num_parts)])
        np.testing.assert_array_equal(by_new_id[store.new_of_original()][:, 0], np.arange(6))
        np.testing.assert_array_equal(by_new_id[:, 0], store.original_ids())


@pytest.mark.parametrize("method", ["lp", "random"])
def test_a02_the_last_isolated_vertex_keeps_its_row(tmp_path: Path, method: str) -> None:
    edges = np.array([[0, 1, 2, 3], [1, 2, 3, 4]])
    dataset = Dataset("last isolated", Graph.from_edge_index(edges, 6), x=np.arange(6.0)[:, None])
    store = write_store(dataset, assign(dataset, 2, method), tmp_path / "store")
    assert store.num_vertices == sum(store.part(p).num_vertices for p in range(2)) == 6
    owner = int(store.ownership.owner(store.new_of_original()[5]))
    row = int(store.ownership.local(store.new_of_original()[5], owner))
    part = store.part(owner)
    assert part.features[row, 0] == 5.0 and part.indptr[row] == part.indptr[row + 1]


def test_a06_parts_without_training_vertices_or_vertices_are_ordinary(tmp_path: Path) -> None:
    dataset = hand_drawn()
    store = write_store(dataset, np.full(12, 2), tmp_path / "store", num_parts=4)
    for p in (0, 1, 3):
        part = store.part(p)
        assert part.num_vertices == part.num_edges == len(part.train) == 0
        assert part.features.shape == (0, 5) and part.indptr.tolist() == [0]
    assert len(store.part(2).train) == len(dataset.train)


def test_multi_label_data_without_features(tmp_path: Path) -> None:
    y = np.array([[0, 1, 1], [1, 0, 0], [np.nan, 0, 1]], dtype=np.float32)
    graph = Graph.from_edge_index(np.array([[0, 1], [1, 2]]), 3)
    store = written(Dataset("multi", graph, y=y, train=[0, 1]), tmp_path / "store", 2)
    assert (store.task, store.num_features, store.num_classes) == ("multi-label", 0, 3)
    assert all(store.part(p).features is None for p in range(2))
    labels = np.concatenate([store.part(p).labels for p in range(2)])
    np.testing.assert_array_equal(labels[store.new_of_original()], y)


def test_data_without_labels_and_names_of_the_source(tmp_path: Path) -> None:
    graph = Graph.from_edge_index(np.array([[0, 1], [1, 2]]), 3)
    for name, names in (
        ("numbers", np.array([7, 10, 500])),
        ("text", np.array(["a", "bc", "d"], dtype=object)),
    ):
        store = written(Dataset("named", graph, original_names=names), tmp_path / name, 2)
        assert store.part(0).labels is None and store.num_classes == 0
        assert store.original_names().tolist() == names.tolist()
    assert written(Dataset("plain", graph), tmp_path / "plain", 2).original_names() is None


def test_the_description_records_how_the_store_was_made(tmp_path: Path) -> None:
    dataset = hand_drawn()
    part_of = assign(dataset, 2)
    found = report(dataset, part_of, 2)
    store = write_store(dataset, part_of, tmp_path / "store", {"partitioner": "lp", "seed": 3}, found)
    meta = json.loads((tmp_path / "store" / "store.json").read_text())
    assert meta == store.meta and meta["format_version"] == store_module.FORMAT_VERSION
    assert meta["options"] == {"dataset": dataset.options, "partition": {"partitioner": "lp", "seed": 3}}
    assert meta["report"] == found and meta["name"] == "hand-drawn"
    on_disk = {name for name in fingerprint(store.path) if name != "store.json"}
    assert set(meta["files"]) == on_disk
    assert all((store.path / name).stat().st_size == meta["files"][name]["bytes"] for name in on_disk)
    Store.open(store.path, verify=True)


def test_long_arrays_are_written_in_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = hand_drawn(with_weights=True)
    whole = fingerprint(written(dataset, tmp_path / "whole", 3).path)
    monkeypatch.setattr(store_writer, "CHUNK_BYTES", 8)
    monkeypatch.setattr("tgnn.partition.rows.CHUNK_EDGES", 2)
    assert fingerprint(written(dataset, tmp_path / "pieces", 3).path) == whole


def test_pickles_to_its_path_and_never_writes_through(tmp_path: Path) -> None:
    store = written(hand_drawn(), tmp_path / "store", 2)
    data = pickle.dumps(store)
    assert len(data) < 500
    again = pickle.loads(data)
    assert again.path == store.path and again.meta == store.meta
    again.part(0).features[:] = 7.0
    Store.open(store.path, verify=True)


def fail_at(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Make writing fail late: while the last part is written, in the check afterwards, or at the rename."""

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    if step == "array":
        genuine = store_writer._ArrayFile.close

        def close(self: Any) -> Any:
            return broken() if self._file.name.endswith("part-0002/labels.npy") else genuine(self)

        monkeypatch.setattr(store_writer._ArrayFile, "close", close)
    elif step == "check":
        monkeypatch.setattr(store_module, "_sha256", broken)
    else:
        monkeypatch.setattr(store_module, "_move_into_place", broken)


@pytest.mark.parametrize("step", ["array", "check", "rename"])
def test_a_failure_leaves_the_older_store_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "store"
    before = fingerprint(written(hand_drawn(), path, 2).path)
    with monkeypatch.context() as patched:
        fail_at(patched, step)
        with pytest.raises(OSError, match="no space left"):
            written(hand_drawn(), path, 3, overwrite=True)
        with pytest.raises(OSError, match="no space left"):
            written(hand_drawn(), tmp_path / "new", 3)
    assert fingerprint(path) == before
    assert [child.name for child in tmp_path.iterdir()] == ["store"]
    Store.open(path, verify=True)


@pytest.mark.parametrize("exchange", [True, False])
def test_overwriting_replaces_a_whole_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(store_module, "_swap_names", lambda *_: False)
    path = tmp_path / "store"
    written(hand_drawn(), path, 3)
    assert written(hand_drawn(), path, 2, overwrite=True).num_parts == 2
    assert not (path / "part-0002").exists()
    assert [child.name for child in tmp_path.iterdir()] == ["store"]


def test_what_is_in_the_way_is_never_touched(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("precious")
    file = tmp_path / "file"
    file.write_text("precious")
    for path in (folder, file):
        with pytest.raises(UserError, match="no store"):
            written(hand_drawn(), path, 2, overwrite=True)
    assert (folder / "notes.txt").read_text() == file.read_text() == "precious"
    store = written(hand_drawn(), tmp_path / "store", 2)
    with pytest.raises(UserError, match="overwrite"):
        written(hand_drawn(), store.path, 3)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert written(hand_drawn(), empty, 2).num_parts == 2


def test_a_store_that_appears_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = fingerprint(written(hand_drawn(), tmp_path / "other", 2).path)
    genuine = store_module.write_files

    def slowly(*arguments: Any) -> None:
        genuine(*arguments)
        shutil.copytree(tmp_path / "other", tmp_path / "store")

    monkeypatch.setattr(store_module, "write_files", slowly)
    with pytest.raises(OSError):
        written(hand_drawn(), tmp_path / "store", 3)
    assert fingerprint(tmp_path / "store") == other


def test_no_store_is_said_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "absent", tmp_path / "file", tmp_path):
        with pytest.raises(UserError, match="python -m tgnn.partition DATA") as caught:
            Store.open(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format_version": 1}'])
def test_a_description_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    store = written(hand_drawn(), tmp_path / "store", 2)
    (store.path / "store.json").write_text(content)
    with pytest.raises(UserError, match="store.json"):
        Store.open(store.path)


@pytest.mark.parametrize("missing", ["offsets", "files", "dtypes", "num_parts"])
def test_a_description_that_lacks_an_entry_is_refused(tmp_path: Path, missing: str) -> None:
    store = written(hand_drawn(), tmp_path / "store", 2)
    meta = {key: value for key, value in store.meta.items() if key != missing}
    (store.path / "store.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match=missing):
        Store.open(store.path)


def test_another_format_version_names_the_command_that_remakes_it(tmp_path: Path) -> None:
    store = written(hand_drawn(), tmp_path / "store", 3)
    (store.path / "store.json").write_text(json.dumps(store.meta | {"format_version": 99}))
    with pytest.raises(
        UserError, match=r"format version 99.*python -m tgnn\.partition DATA --parts 3 --out STORE"
    ):
        Store.open(store.path)
    assert written(hand_drawn(), store.path, 2, overwrite=True).num_parts == 2


def test_another_number_of_parts_names_the_command_that_makes_it(tmp_path: Path) -> None:
    store = written(hand_drawn(), tmp_path / "store", 3)
    assert store.require_parts(3) is store
    with pytest.raises(UserError, match=r"3 parts.*python -m tgnn\.partition DATA --parts 4 --out STORE"):
        store.require_parts(4)
    with pytest.raises(UserError, match="0 to 2"):
        store.part(3)


def test_truncated_missing_and_changed_files_are_named(tmp_path: Path) -> None:
    store = written(hand_drawn(), tmp_path / "store", 2)
    for name in store.meta["files"]:
        file = store.path / name
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        with pytest.raises(UserError, match=name):
            Store.open(store.path)
        file.unlink()
        with pytest.raises(UserError, match=name):
            Store.open(store.path)
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        Store.open(store.path)
        with pytest.raises(UserError, match=f"{name}.*checksum"):
            Store.open(store.path, verify=True)
        file.write_bytes(whole)
    Store.open(store.path, verify=True)


def test_an_array_of_another_shape_is_named_when_it_is_read(tmp_path: Path) -> None:
    store = written(hand_drawn(), tmp_path / "store", 1)
    np.save(store.path / "part-0000" / "features.npy", np.zeros((12, 4), np.float32))
    with pytest.raises(UserError, match="features.npy"):
        store.part(0)


def test_an_assignment_that_does_not_fit_is_refused_before_writing(tmp_path: Path) -> None:
    for part_of, num_parts in ((np.zeros(11, int), 2), (np.full(12, 2), 2), (np.full(12, -1), 2)):
        with pytest.raises(UserError, match="assignment"):
            write_store(hand_drawn(), part_of, tmp_path / "store", num_parts=num_parts)
    assert list(tmp_path.iterdir()) == []
