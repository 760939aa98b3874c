"""Edge lists in text and the files beside them: what is read, and that every fault names file and line."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
import scipy.sparse as sp

from tgnn.data import DataOptions, load
from tgnn.data.readers import text
from tgnn.errors import UserError


@pytest.fixture
def write(tmp_path):
    """write(name, text) -> path, as text; gzipped where the name says so."""

    def write(name, content):
        data = content.encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return str(path)

    return write


def read(path, **options):
    return load(path, DataOptions(**options))


def pairs_of(data):
    return sorted(zip(*data.graph.edge_index().tolist(), strict=True))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("g.txt", "0 1\n2 3\n1 1\n"),
        ("g.txt", "# a comment\r\n# another\r\n0\t1\r\n2\t3\r\n1\t1"),
        ("g.txt", "\ufeff0 1\n\n2   3 # why\n\n1 1\n\n"),
        ("g.txt.gz", "0 1\n2 3\n1 1"),
        ("g.csv", "source,target\n0,1\n2, 3\n1,1\n"),
        ("g.csv.gz", "0,1\n2,3\n1,1\n"),
        ("g.tsv", "0\t1\n2\t3\n1\t1\n"),
        ("g.csv", "from;to\n0;1\n2;3\n1;1\n"),
        ("g.csv", '"0","1"\n"2","3"\n1,1\n'),
        ("g.csv", '"source","target"\n"0","1"\n2, "3"\n1,1\n'),
    ],
)
def test_forms_of_an_edge_list(write, name, content):
    data = read(write(name, content), num_vertices=5)
    assert pairs_of(data) == [(0, 1), (1, 1), (2, 3)]
    assert data.num_vertices == 5 and data.name == "g"
    assert data.graph.edge_weight is None


@pytest.mark.parametrize("block_chars", [1, 7, 1 << 24])
def test_blocks_of_any_size_give_the_same_graph(write, monkeypatch, block_chars):
    monkeypatch.setattr(text, "_BLOCK_CHARS", block_chars)
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 30, (200, 2))
    path = write("g.txt", "# top\n\n" + "\n# mid\n".join(f"{u} {v}" for u, v in edges))
    np.testing.assert_array_equal(
        read(path, num_vertices=30).graph.edge_index(), edges.T[:, np.lexsort((edges[:, 0], edges[:, 1]))]
    )
    with pytest.raises(UserError, match="line 402: got '9 99'"):
        read(
            write(
                "bad.txt",
                "# top\n\n" + "\n# mid\n".join(f"{u} {v}" for u, v in edges[:199]) + "\n# x\n\n9 99\n",
            ),
            num_vertices=30,
        )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0 1\n2 9\n", r"line 2: got '2 9', expected ids in \[0, 5\)"),
        ("# c\n\n0 1\n-1 0\n", r"line 4: got '-1 0', expected ids in \[0, 5\)"),
        ("0 1\n1.0 2\n", r"line 2: got '1.0' in column 1, expected a vertex id"),
        ("source target\n0 1\n", "line 1: got 'source' in column 1"),
        ("0 1\n2\n", r"line 2: got '2' \(1 columns\), expected 2 columns"),
        ("0 1\n2 3 4\n", r"line 2: got '2 3 4' \(3 columns\), expected 2 columns"),
        ("0 1\n99999999999999999999 3\n", "line 2: got '99999999999999999999' in column 1"),
        ("", "no line of data"),
        ("# nothing\n\n", "no line of data"),
        ("7\n8\n", "one column"),
        ("0 1 2.5\n1 2 nan\n", "line 2: got '1 2 nan', expected a finite weight in column 3"),
        ("0 1 x\n", "line 1: got 'x' in column 3, expected a number"),
    ],
)
def test_a03_faults_name_file_and_line(write, content, message):
    with pytest.raises(UserError, match=r"g\.txt.*" + message):
        read(write("g.txt", content), num_vertices=5)


def test_a03_header_only_where_a_csv_starts(write):
    with pytest.raises(UserError, match="line 2: got 'a' in column 1"):
        read(write("g.csv", "0,1\na,b\n"), num_vertices=5)
    with pytest.raises(UserError, match="line 2: got 'c' in column 1"):
        read(write("g.csv", "a,b\nc,d\n0,1\n"), num_vertices=5)
    with pytest.raises(UserError, match="line 1: got '1.0' in column 1"):
        read(write("g.csv", "1.0,b\n0,1\n"), num_vertices=5)
    with pytest.raises(UserError, match="no line of data"):
        read(write("g.csv", "a,b\n"), num_vertices=5)


def test_a_row_of_quoted_numbers_is_no_header(write):
    assert pairs_of(read(write("g.csv", '"0","1"\n'), num_vertices=2)) == [(0, 1)]
    assert pairs_of(read(write("w.csv", '"0","1","2.5"\n'), num_vertices=2)) == [(0, 1)]
    with pytest.raises(UserError, match=r"g\.csv, line 1: got .*'0'.* in column 1"):
        read(write("g.csv", "'0','1'\n0,1\n"), num_vertices=2)


@pytest.mark.parametrize("row", ["３,４", "٣,١", "−1,−2", "0,1_0", "²,³"])
def test_digits_are_ascii(write, row):
    for content, line in ((f"{row}\n0,1\n", 1), (f"0,1\n{row}\n", 2)):
        with pytest.raises(UserError, match=rf"g\.csv, line {line}: got .* expected a vertex id"):
            read(write("g.csv", content), num_vertices=50)
    with pytest.raises(UserError, match=r"g\.csv, line 1: got '３' in column 3, expected a number"):
        read(write("g.csv", "0,1,３\n"), num_vertices=5)


def test_a_binary_file_is_shown_short_and_escaped(tmp_path):
    path = tmp_path / "g.csv"
    path.write_bytes(bytes(range(128, 256)) * 20 + b"\n0,1\n\x00\xff" * 3 + bytes(range(128, 256)) * 20)
    with pytest.raises(UserError) as error:
        read(str(path), num_vertices=5)
    assert len(str(error.value).replace(str(path), "")) < 250 and str(error.value).isascii()


def test_a_weight_beyond_float32_is_refused(write):
    with pytest.raises(UserError, match=r"g\.txt, line 1: got '0 1 1e300', expected a finite weight"):
        read(write("g.txt", "0 1 1e300\n"), num_vertices=2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"train": [[0], 1], "val": null}', r"s\.json: got \[0\] in train, expected a flat list"),
        ('{"train": [0], "val": null}', "got null for val"),
        ('{"train": {"0": 1}}', "for train"),
    ],
)
def test_a_json_split_is_flat_lists(write, content, message):
    with pytest.raises(UserError, match=message):
        read(write("g.txt", "0 1\n"), num_vertices=2, split_file=write("s.json", content))


def test_a_number_of_vertices_beyond_memory(write):
    with pytest.raises(UserError, match="number of vertices: got .*memory"):
        read(write("g.txt", "0 1\n"), num_vertices=2**62)


def test_a03_gaps_need_relabel_which_keeps_the_mapping(write):
    path = write("g.txt", "500 7\n7 10\n10 500\n")
    with pytest.raises(UserError, match="--num-vertices .at least 501.*--relabel"):
        read(path)
    data = read(path, relabel=True)
    np.testing.assert_array_equal(data.original_names, [7, 10, 500])
    assert pairs_of(data) == [(0, 1), (1, 2), (2, 0)]
    assert data.options["relabel"] is True
    with pytest.raises(UserError, match="at least 0"):
        read(write("n.txt", "-3 7\n"), relabel=True)


def test_a02_the_number_of_vertices_is_declared_never_guessed(write, tmp_path):
    path = write("g.txt", "0 1\n3 4\n")
    with pytest.raises(UserError, match="no number of vertices.*--num-vertices"):
        read(path)
    np.save(tmp_path / "x.npy", np.zeros((6, 2)))
    labels = write("y.txt", "0\n1\n0\n1\n0\n-1\n")
    by_id = write("ids.csv", "id,target\n5,1\n4,0\n3,0\n2,0\n1,0\n0,0\n")
    for options in (
        {"num_vertices": 6},
        {"feature_file": str(tmp_path / "x.npy")},
        {"label_file": labels},
        {"label_file": by_id},
    ):
        assert read(path, **options).num_vertices == 6
    with pytest.raises(UserError, match="7 vertices by --num-vertices, 6 vertices by .*x.npy"):
        read(path, num_vertices=7, feature_file=str(tmp_path / "x.npy"))
    with pytest.raises(UserError, match="no number of vertices"):
        read(path, label_file=write("some.csv", "id,target\n5,1\n0,0\n"))
    assert list(read(path, num_vertices=6, label_file=write("some.csv", "5,1\n4,0\n")).y) == [
        -1,
        -1,
        -1,
        -1,
        0,
        1,
    ]


def test_weights_are_the_third_of_three_columns_and_otherwise_named(write):
    three = write("g.txt", "1 0 2.5\n0 1 -4\n")
    np.testing.assert_array_equal(read(three, num_vertices=2).graph.edge_weight, np.float32([2.5, -4]))
    assert read(three, num_vertices=2, weight_column=0).graph.edge_weight is None
    four = write("f.csv", "0,1,x,3\n1,0,y,5\n")
    with pytest.raises(UserError, match="4 columns.*--weight-column"):
        read(four, num_vertices=2)
    np.testing.assert_array_equal(
        read(four, num_vertices=2, weight_column=4).graph.edge_weight, np.float32([5, 3])
    )
    for column in (1, 2, 5):
        with pytest.raises(UserError, match=f"--weight-column: got {column}, expected 0, or 3 to 4"):
            read(four, num_vertices=2, weight_column=column)


def test_delimiter_may_be_said(write):
    assert pairs_of(read(write("g.txt", "0,1\n"), num_vertices=2, delimiter="comma")) == [(0, 1)]
    with pytest.raises(UserError, match="one column"):
        read(write("g.txt", "0,1\n"), num_vertices=2, delimiter="tab")


def test_label_files(write, tmp_path):
    path = write("g.txt", "0 1\n")
    np.save(tmp_path / "y.npy", np.array([[0, 1], [1, np.nan], [1, 1]]))
    multi = read(path, num_vertices=3, label_file=str(tmp_path / "y.npy"))
    assert multi.task == "multi-label" and np.isnan(multi.y[1, 1])
    assert list(read(path, label_file=write("y.txt", "2\r\nnan\r\n-1\r\n0")).y) == [2, -1, -1, 0]
    assert list(read(path, label_file=write("y.csv", "id,label\n1,0\n0,\n2,3\n")).y) == [-1, 0, 3]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("y.txt", "0\n1.5\n1\n", r"y.txt, line 2: got '1.5', expected a class number"),
        ("y.txt", "0\nx\n1\n", r"y.txt, line 2: got 'x' in column 1"),
        ("y.txt", "0\n-2\n1\n", r"y.txt, line 2: got '-2'"),
        ("y.txt", "0\n\n1\n2\n", "y.txt, line 2: got a blank line"),
        ("y.txt", "0\n1\n", "got 3 vertices by --num-vertices, 2 vertices by .*y.txt"),
        ("y.csv", "0,1\n0,1\n", "id 0 on 2 lines"),
        ("y.csv", "0,1\n3,1\n", r"a label of vertex 3, expected ids in \[0, 3\)"),
        ("y.csv", "0,1\n-1,1\n", "y.csv, line 2: got '-1,1'"),
        ("y.csv", "0,1,0\n", "3 columns.*npy"),
        ("y.npz", "", "--label-file"),
        ("y.npy", "no array", "y.npy"),
    ],
)
def test_a04_bad_label_files(write, name, content, message):
    with pytest.raises(UserError, match=message):
        read(write("g.txt", "0 1\n"), num_vertices=3, label_file=write(name, content))


def test_feature_files(write, tmp_path):
    path, x = write("g.txt", "0 1\n"), np.array([[1.5, 0], [0, 2], [0, 0]])
    np.save(tmp_path / "x.npy", x)
    sp.save_npz(tmp_path / "x.npz", sp.csr_matrix(x))
    write("x.csv", "a,b\n1.5,0\n0,2\n0,0\n")
    write("x.csv.gz", "1.5,0\n0,2\n0,0\n")
    for name in ("x.npy", "x.npz", "x.csv", "x.csv.gz"):
        data = read(path, feature_file=str(tmp_path / name))
        np.testing.assert_array_equal(data.x, np.float32(x))
    np.save(tmp_path / "objects.npy", np.array([{}, 1], dtype=object), allow_pickle=True)
    faults = {
        str(tmp_path / "objects.npy"): "objects.npy",
        str(tmp_path / "absent.npy"): "absent.npy.*No such file",
        write("x.parquet", ""): "--feature-file",
        write("bad.csv", "1,2\n3,x\n"): "bad.csv, line 2: got 'x' in column 2",
        write("bad.npz", "zip?"): "bad.npz",
    }
    for file, message in faults.items():
        with pytest.raises(UserError, match=message):
            read(path, feature_file=file)


def test_split_files(write, tmp_path):
    path, n = write("g.txt", "0 1\n"), 5
    mask = np.arange(n) < 2
    np.savez(tmp_path / "s.npz", train=mask, val=[2], test=[4, 3])
    (tmp_path / "s.json").write_text(json.dumps({"train": [1, 0], "valid": [2], "test": [3, 4]}))
    write("s.csv", "id,split\n0,train\n1,train\n2,validation\n4,test\n3,test\n")
    for name in ("s.npz", "s.json", "s.csv"):
        data = read(path, num_vertices=n, split_file=str(tmp_path / name))
        assert [list(data.train), list(data.val), list(data.test)] == [[0, 1], [2], [3, 4]]
        assert data.options["split"] == "file"
    np.savez(tmp_path / "keys.npz", training=mask)
    faults = {
        str(tmp_path / "keys.npz"): "keys training",
        write("bad.csv", "0,train\n1,tests\n"): "bad.csv, line 2: got '1,tests'",
        write("twice.csv", "0,train\n0,test\n"): "id 0 on 2 lines",
        write("far.csv", "0,train\n5,test\n"): r"far.csv: test: got id 5.*\[0, 5\)",
        write("s.toml", ""): "--split-file",
        write("bad.json", "[1]"): "JSON list",
        write("broken.json", "{"): "broken.json",
    }
    for file, message in faults.items():
        with pytest.raises(UserError, match=message):
            read(path, num_vertices=n, split_file=file)


def test_relabel_carries_labels_splits_and_features(write, tmp_path):
    path = write("g.txt", "30 10\n")
    labels = write("y.csv", "id,y\n30,2\n20,1\n10,0\n")
    split = write("s.csv", "20,train\n30,val\n")
    np.save(tmp_path / "x.npy", np.array([[1.0], [2.0], [3.0]]))
    data = read(path, relabel=True, label_file=labels, split_file=split, feature_file=str(tmp_path / "x.npy"))
    np.testing.assert_array_equal(data.original_names, [10, 20, 30])
    assert (list(data.y), list(data.train), list(data.val)) == ([0, 1, 2], [1], [2])
    assert pairs_of(data) == [(2, 0)]
    with pytest.raises(UserError, match="3 vertices, expected the 2 that occur"):
        read(path, relabel=True, feature_file=str(tmp_path / "x.npy"))
    with pytest.raises(UserError, match="id 11"):
        read(path, relabel=True, split_file=write("t.csv", "11,train\n"))


def test_damaged_gzip_is_named(write, tmp_path):
    path = write("g.txt.gz", "0 1\n" * 1000)
    whole = (tmp_path / "g.txt.gz").read_bytes()
    (tmp_path / "g.txt.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="g.txt.gz.*unpacked"):
        read(path, num_vertices=2)
    (tmp_path / "g.txt.gz").write_bytes(b"0 1\n")
    with pytest.raises(UserError, match="g.txt.gz.*unpacked"):
        read(path, num_vertices=2)


@pytest.mark.parametrize(
    ("name", "options", "edges"),
    [
        ("email-Eu-core/email-Eu-core.txt", {"num_vertices": 1005}, 25571),
        ("ego-Facebook/facebook_combined.txt", {"num_vertices": 4039}, 88234),
        ("p2p-Gnutella/p2p-Gnutella08.txt", {"num_vertices": 6301}, 20777),
        ("p2p-Gnutella/p2p-Gnutella31.txt", {"num_vertices": 62586}, 147892),
        ("ca-GrQc/ca-GrQc.txt.gz", {"relabel": True, "add_reverse": True, "self_loops": "remove"}, 2 * 14484),
        ("bitcoin-otc/soc-sign-bitcoinotc.csv.gz", {"relabel": True, "weight_column": 3}, 35592),
    ],
)
def test_snap_counts(shared_data, name, options, edges):
    data = read(shared_data / "snap" / name, **options)
    assert data.graph.num_edges == edges
    if "relabel" in options:
        assert data.num_vertices == {"ca-GrQc": 5242, "soc-sign-bitcoinotc": 5881}[data.name]
        assert (
            data.original_names[[0, -1]].tolist()
            == {"ca-GrQc": [13, 26196], "soc-sign-bitcoinotc": [1, 6005]}[data.name]
        )


def test_snap_email_labels_with_crlf(shared_data):
    folder = shared_data / "snap" / "email-Eu-core"
    data = read(folder / "email-Eu-core.txt", label_file=str(folder / "email-Eu-core-department-labels.txt"))
    assert (data.num_vertices, data.num_classes) == (1005, 42)
    assert (np.bincount(data.y).min(), np.bincount(data.y).max()) == (1, 109)
    source, destination = data.graph.edge_index()
    assert (source == destination).sum() == 642


def test_lastfm_csv_with_headers(shared_data):
    folder = shared_data / "lastfm_asia"
    data = read(
        folder / "lastfm_asia_edges.csv", label_file=str(folder / "lastfm_asia_target.csv"), add_reverse=True
    )
    assert (data.num_vertices, data.graph.num_edges, data.num_classes) == (7624, 2 * 27806, 18)
    assert np.bincount(data.y).min() == 16
