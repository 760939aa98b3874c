"""Named data sets from a server on this machine that also breaks off, lies, and ignores what it is asked."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import multiprocessing
import re
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from tgnn.data import DataOptions, data_fingerprint, download, load
from tgnn.data.catalogue import CATALOGUE, Entry, Remote
from tgnn.data.download import data_folder, fetch, unzip
from tgnn.errors import UserError

CONTENT = bytes(range(256)) * 40


class Server(ThreadingHTTPServer):
    """Serves `files` {path: bytes}; `break_at` cuts answers after so many bytes, as often as `breaks`."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.requests = {}, []
        self.breaks, self.break_at, self.ranges, self.status, self.etag = 0, 0, True, 200, '"1"'

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server, asked = self.server, self.headers.get("Range")
        server.requests.append((self.path, asked))
        content = server.files.get(self.path.lstrip("/"))
        if content is None or server.status != 200:
            self.send_error(404 if server.status == 200 else server.status)
            return
        start, total = 0, len(content)
        same = self.headers.get("If-Range", server.etag) == server.etag
        if asked and server.ranges and same:
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])
            if start >= total:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{total}")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        else:
            self.send_response(200)
        if server.etag:
            self.send_header("ETag", server.etag)
        self.send_header("Content-Length", str(total - start))
        self.end_headers()
        end = total
        if server.breaks:
            server.breaks -= 1
            end = start + server.break_at
        self.wfile.write(content[start:end])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch, tmp_path):
    """The server, as the mirror, and an empty data folder."""
    running = Server()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    monkeypatch.setenv("TGNN_DATA_URL", running.url)
    monkeypatch.setenv("TGNN_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "_WAIT_S", 0.01)
    yield running
    running.shutdown()
    running.server_close()
    thread.join()


@pytest.fixture
def thing(server, monkeypatch):
    """A data set of one file with a known checksum, on the server."""
    checksum = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
    remote = Remote("http://127.0.0.1:9/none", "some/thing.npz", checksum)
    monkeypatch.setitem(CATALOGUE, "thing", Entry("some/thing.npz", (remote,)))
    server.files["some/thing.npz"] = CONTENT
    return server


def leftovers():
    return sorted(path.name for path in data_folder().rglob("*") if path.name.endswith((".part", "-of")))


def test_fetched_once(thing):
    path = fetch("thing")
    assert path.read_bytes() == CONTENT and path == data_folder() / "some/thing.npz"
    assert fetch("thing") == path and len(thing.requests) == 1
    assert leftovers() == []


def test_goes_on_where_it_broke_off(thing):
    thing.breaks, thing.break_at = 3, 3000
    assert fetch("thing").read_bytes() == CONTENT
    assert [asked for _, asked in thing.requests] == [None, "bytes=3000-", "bytes=6000-", "bytes=9000-"]
    assert leftovers() == []


def test_a_later_call_goes_on(thing):
    thing.breaks, thing.break_at = 1, 5000
    path = data_folder() / "some/.thing.npz.part"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:4000])
    assert fetch("thing").read_bytes() == CONTENT
    assert [asked for _, asked in thing.requests] == ["bytes=4000-", "bytes=9000-"]
    assert leftovers() == []


def test_a_whole_part_is_taken(thing):
    path = data_folder() / "some/.thing.npz.part"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert fetch("thing").read_bytes() == CONTENT and len(thing.requests) == 1


def test_a_server_that_ignores_ranges(thing):
    thing.ranges, thing.breaks, thing.break_at = False, 2, 4000
    assert fetch("thing").read_bytes() == CONTENT


def test_gives_up_after_some_tries_and_says_what_to_do(thing):
    thing.breaks, thing.break_at = 100, 0
    with pytest.raises(UserError, match=r"/some/thing.npz: got .*at .*thing.npz by hand") as caught:
        fetch("thing")
    assert "\n" not in str(caught.value) and len(thing.requests) == 4
    assert not (data_folder() / "some/thing.npz").exists()
    thing.breaks = 0
    assert fetch("thing").read_bytes() == CONTENT


def test_wrong_bytes_never_take_the_place(thing):
    thing.files["some/thing.npz"] = CONTENT[::-1]
    with pytest.raises(UserError, match="10240 bytes with sha256 .* instead of"):
        fetch("thing")
    assert not (data_folder() / "some/thing.npz").exists() and leftovers() == []


def test_parts_of_two_versions_are_fetched_again(thing):
    path = data_folder() / "some/.thing.npz.part"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 4000)
    assert fetch("thing").read_bytes() == CONTENT
    assert [asked for _, asked in thing.requests] == ["bytes=4000-", None]


def test_a_file_that_changed_meanwhile_starts_anew(thing, monkeypatch):
    (remote,) = CATALOGUE["thing"].files
    unknown = Remote(remote.url, remote.place)
    monkeypatch.setitem(CATALOGUE, "thing", Entry("some/thing.npz", (unknown,)))
    path = data_folder() / "some/.thing.npz.part"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 4000)
    path.with_name(path.name + "-of").write_text('"0"')
    assert fetch("thing").read_bytes() == CONTENT
    path.write_bytes(b"x" * 4000)
    (data_folder() / "some/thing.npz").unlink()
    # Nothing says which version this part is of.
    assert fetch("thing").read_bytes() == CONTENT and thing.requests[-1][1] is None


def test_no_such_file_and_no_network(thing, monkeypatch):
    del thing.files["some/thing.npz"]
    with pytest.raises(UserError, match=r"status 404.*by hand, or set TGNN_DATA_URL"):
        fetch("thing")
    assert len(thing.requests) == 1
    thing.status = 503
    with pytest.raises(UserError, match="Service Unavailable"):
        fetch("thing")
    monkeypatch.setenv("TGNN_DATA_URL", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="http://127.0.0.1:9/some/thing.npz: got .*refused") as caught:
        fetch("thing")
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("TGNN_DATA_URL", "ftp://elsewhere")
    with pytest.raises(UserError, match="TGNN_DATA_URL: got 'ftp://elsewhere'"):
        fetch("thing")


def test_a_mirror_may_be_a_folder(thing, tmp_path, monkeypatch):
    mirror = tmp_path / "mirror"
    (mirror / "some").mkdir(parents=True)
    monkeypatch.setenv("TGNN_DATA_URL", mirror.as_uri())
    with pytest.raises(UserError, match="thing.npz"):
        fetch("thing")
    (mirror / "some/thing.npz").write_bytes(CONTENT)
    assert fetch("thing").read_bytes() == CONTENT and thing.requests == []


def test_a_folder_that_cannot_be_written(thing, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TGNN_DATA", str(tmp_path / "file"))
    with pytest.raises(UserError, match="the data folder: got .*file.*set TGNN_DATA"):
        fetch("thing")


def _fetch_quietly(_):
    return fetch("thing").read_bytes() == CONTENT


def test_several_processes_at_once(thing):
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert all(pool.map(_fetch_quietly, range(3)))
    assert len(thing.requests) == 1


def zip_of(entries):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return packed.getvalue()


def test_ogb_by_name(server):
    edges = {"arxiv/raw/edge.csv.gz": "0,1\n1,2\n", "arxiv/raw/num-node-list.csv.gz": "3\n"}
    edges["arxiv/raw/num-edge-list.csv.gz"] = "2\n"
    packed = {name: gzip.compress(text.encode()) for name, text in edges.items()}
    server.files["ogb/nodeproppred/arxiv.zip"] = zip_of(packed)
    data = load("ogbn-arxiv")
    assert (data.name, data.num_vertices, data.num_edges) == ("ogbn-arxiv", 3, 2)
    source = json.loads((data_folder() / "ogb/ogbn_arxiv.source.json").read_text())
    assert source["sha256"] == hashlib.sha256(server.files["ogb/nodeproppred/arxiv.zip"]).hexdigest()
    assert source["url"].endswith("/ogb/nodeproppred/arxiv.zip")
    assert load("ogbn-arxiv").num_edges == 2 and len(server.requests) == 1
    assert sorted(path.name for path in (data_folder() / "ogb").iterdir() if path.name[0] != ".") == [
        "ogbn_arxiv", "ogbn_arxiv.source.json",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "C:/evil", "..\\evil"])
def test_zip_entries_outside_are_refused(tmp_path, name):
    (tmp_path / "z.zip").write_bytes(zip_of({"arxiv/fine": "1", name: "2"}))
    with pytest.raises(UserError, match="leads outside"):
        unzip(tmp_path / "z.zip", tmp_path / "inside" / "deep")
    assert not [path for path in tmp_path.rglob("*evil*")]


def test_zip_links_and_damage_are_refused(tmp_path):
    path = tmp_path / "z.zip"
    with zipfile.ZipFile(path, "w") as archive:
        link = zipfile.ZipInfo("link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(UserError, match="no plain file"):
        unzip(path, tmp_path / "inside")
    whole = zip_of({"a/b": "content" * 50})
    for content in (whole[: len(whole) // 2], whole.replace(b"content", b"changed", 1)):
        path.write_bytes(content)
        with pytest.raises(UserError, match="damaged file"):
            unzip(path, tmp_path / "inside")


def test_a_zip_of_several_folders_is_refused(server):
    server.files["ogb/nodeproppred/arxiv.zip"] = zip_of({"a/x": "1", "b/x": "2"})
    with pytest.raises(UserError, match="2 entries at its top, expected one folder"):
        load("ogbn-arxiv")
    assert not (data_folder() / "ogb/ogbn_arxiv").exists()


def test_what_is_on_disk_is_used(shared_data, server, monkeypatch):
    monkeypatch.setenv("TGNN_DATA", str(shared_data))
    assert load("cora").num_edges == 10556
    assert load("amazon-computers").num_vertices == 13752
    assert load("minesweeper", DataOptions(split="3")).num_vertices == 10000
    assert data_fingerprint("minesweeper") == data_fingerprint("minesweeper")
    assert server.requests == []


def test_cora_by_name_equals_its_files(shared_data, server):
    for path in (shared_data / "planetoid/cora").iterdir():
        server.files[f"planetoid/cora/{path.name}"] = path.read_bytes()
    data, files = load("cora"), load(shared_data / "planetoid/cora")
    np.testing.assert_array_equal(data.x, files.x)
    np.testing.assert_array_equal(data.graph.indices, files.graph.indices)
    assert len(server.requests) == 8
    (data_folder() / "planetoid/cora/ind.cora.ty").unlink()
    server.files["planetoid/cora/ind.cora.ty"] = b"something else"
    with pytest.raises(UserError, match="ind.cora.ty: got 14 bytes with sha256"):
        load("cora")


def test_pubmed_has_a_checksum_for_what_is_missing_here():
    kinds = {remote.name: remote.checksum.partition(":")[0] for remote in CATALOGUE["pubmed"].files}
    assert kinds["ind.pubmed.allx"] == "git" and sum(kind == "sha256" for kind in kinds.values()) == 7


def test_git_names_are_checked(thing, monkeypatch):
    git = hashlib.sha1(b"blob %d\0" % len(CONTENT) + CONTENT).hexdigest()
    remote = Remote("", "some/thing.npz", f"git:{git}")
    monkeypatch.setitem(CATALOGUE, "thing", Entry("some/thing.npz", (remote,)))
    assert fetch("thing").read_bytes() == CONTENT


def test_paths_come_before_published_names(shared_data, server, tmp_path, monkeypatch):
    (tmp_path / "cora").symlink_to(shared_data / "planetoid" / "citeseer")
    monkeypatch.chdir(tmp_path)
    assert load("cora").name == "citeseer" and server.requests == []
