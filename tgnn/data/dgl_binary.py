"""DGL's binary files byte by byte, without DGL: tensor files and graph files, read from a memory map and
written as a stream.

All numbers are little-endian. A string is its length (u64) and bytes, a vector its count (u64) and items, a
dictionary of tensors a vector of (string, array). Truth values are stored as uint8.

    array        magic, u64 0, i32 device type 1, i32 device id 0, i32 dimensions, u8 code (0 int, 1 uint,
                 2 float), u8 bits, u16 lanes, i64 shape[dimensions], i64 bytes, data
    tensor file  magic, u64 count, dictionary
    graph file   magic, u64 version 2, u64 type 2, u64 graphs, anything up to byte 4096, u64 place of the
                 first graph, dictionary (labels), the graphs, then their places (a vector) and its size
    graph        magic, metagraph, vector of edge sets, vector of vertex counts, a vector of dictionaries for
                 the vertex types and one for the edge types, names of the vertex types, of the edge types
    edge set     magic, i64 saved layouts, i64 allowed layouts (bits 1 coo, 2 csr, 4 csc, each with 1 << 32),
                 then metagraph and matrix for each saved layout, in that order
    csr          magic, i64 columns, i64 rows, indptr, indices, edge ids (may be empty), u8 sorted
    coo          magic, i64 columns, i64 rows, row, column, edge ids (may be empty), u8 sorted, u8 sorted

A csc is the csr of the reversed graph: row v lists the sources of v. Edge ids that are empty are 0 .. E - 1.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tgnn.data.graph import stable_order
from tgnn.errors import UserError, wrong

ARRAY_MAGIC = 0xDD5E40F096B4A13F
TENSORS_MAGIC = 0xDD5A9FBE3FA2443F
FILE_MAGIC = 0xDD2E4FF046B4A13F
GRAPH_MAGIC = 0xDD589FBE35224ABF
META_MAGIC = 0xDD3C5FFE20046ABF
EDGES_MAGIC = 0xDD2E60F0F6B4A127
CSR_MAGIC = 0xDD6CD31205DFF127
COO_MAGIC = 0xDD61FFD305DFF127

_HEADER_BYTES = 4096
_FILE_VERSION, _HETERO_TYPE = 2, 2
_LAYOUT_BITS = {"coo": 1, "csr": 2, "csc": 4}
_LAYOUT_FLAG = 1 << 32
_CODES = {"i": 0, "u": 1, "f": 2}
_KINDS = {code: kind for kind, code in _CODES.items()}
_MAX_NAME, _MAX_DIMENSIONS = 1 << 16, 16


@dataclass(frozen=True)
class Rows:
    """An array that is written piece by piece: `chunks`, cut along the first axis, add up to `shape`."""

    dtype: Any
    shape: tuple[int, ...]
    chunks: Iterable[np.ndarray]


@dataclass(frozen=True)
class Edges:
    """The edges of one type. Stored as `layout`: "coo" (first: sources, second: destinations), "csr" (first:
    indptr over sources, second: destinations) or "csc" (first: indptr over destinations, second: sources).

    `ids` are the edge ids in stored order; None stands for 0 .. E - 1. `shape` is (sources, destinations).
    """

    layout: str
    shape: tuple[int, int]
    first: np.ndarray | Rows
    second: np.ndarray | Rows
    ids: np.ndarray | None = None

    def in_id_order(self) -> tuple[np.ndarray, np.ndarray]:
        """(sources, destinations) of edges 0 .. E - 1, int [E] each; of edges as `read_graphs` gives them."""
        one, two = self.first, self.second
        if self.layout != "coo":
            one = np.repeat(np.arange(len(one) - 1, dtype=two.dtype), np.diff(one))
        source, destination = (two, one) if self.layout == "csc" else (one, two)
        if self.ids is None:
            return source, destination
        _, order = stable_order(self.ids, len(self.ids))
        return source[order], destination[order]


@dataclass(frozen=True)
class StoredGraph:
    """One graph of a graph file: names, sizes and data of its vertex types, and of its edge types.

    `num_nodes`, `ntypes` and `ndata` are parallel lists, and so are `edges`, `etypes` and `edata`.
    """

    num_nodes: list[int]
    edges: list[Edges]
    ndata: list[Mapping[str, Any]]
    edata: list[Mapping[str, Any]]
    ntypes: list[str] = field(default_factory=lambda: ["_N"])
    etypes: list[str] = field(default_factory=lambda: ["_E"])


class _Sink:
    """Writes the parts that the formats are made of."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def pack(self, kinds: str, *values: int) -> None:
        self.file.write(struct.pack("<" + kinds, *values))

    def string(self, text: str) -> None:
        raw = text.encode("utf-8")
        self.pack("Q", len(raw))
        self.file.write(raw)

    def array(self, value: np.ndarray | Rows) -> None:
        """An array, in pieces where it comes in pieces."""
        rows = value if isinstance(value, Rows) else Rows(value.dtype, value.shape, [value])
        dtype = np.dtype(np.uint8 if np.dtype(rows.dtype) == bool else rows.dtype).newbyteorder("<")
        num_bytes = dtype.itemsize * int(np.prod(rows.shape, dtype=np.int64))
        self.pack("QQiii", ARRAY_MAGIC, 0, 1, 0, len(rows.shape))
        self.pack("BBH", _CODES[dtype.kind], dtype.itemsize * 8, 1)
        self.pack(f"{len(rows.shape)}qq", *rows.shape, num_bytes)
        written = 0
        for chunk in rows.chunks:
            chunk = np.ascontiguousarray(chunk, dtype=dtype)
            written += chunk.nbytes
            if chunk.size:
                self.file.write(chunk.reshape(-1).view(np.uint8).data)
        assert written == num_bytes, "an array got another number of rows than its header says"

    def tensors(self, tensors: Mapping[str, np.ndarray | Rows]) -> None:
        self.pack("Q", len(tensors))
        for name, value in tensors.items():
            self.string(name)
            self.array(value)

    def metagraph(self) -> None:
        """Of one vertex type and one edge type."""
        self.pack("Q", META_MAGIC)
        self.csr((1, 1), np.array([0, 1]), np.array([0]), np.array([0]))

    def csr(self, shape: tuple[int, int], indptr: Any, indices: Any, ids: np.ndarray) -> None:
        self.pack("Qqq", CSR_MAGIC, shape[1], shape[0])
        for value in (indptr, indices, ids):
            self.array(value)
        self.pack("B", 0)

    def edges(self, edges: Edges) -> None:
        """One edge set, in the one layout it comes in; any other may be made from it."""
        self.pack("Qqq", EDGES_MAGIC, _LAYOUT_BITS[edges.layout] | _LAYOUT_FLAG, 7 | _LAYOUT_FLAG)
        self.metagraph()
        ids = np.zeros(0, np.int64) if edges.ids is None else edges.ids
        if edges.layout == "coo":
            self.pack("Qqq", COO_MAGIC, edges.shape[1], edges.shape[0])
            for value in (edges.first, edges.second, ids):
                self.array(value)
            self.pack("BB", 0, 0)
        else:
            shape = edges.shape if edges.layout == "csr" else edges.shape[::-1]
            self.csr(shape, edges.first, edges.second, ids)


def write_tensors(file: BinaryIO, tensors: Mapping[str, np.ndarray | Rows]) -> None:
    """Write a tensor file, such as a partition's `node_feat.dgl`."""
    sink = _Sink(file)
    sink.pack("QQ", TENSORS_MAGIC, len(tensors))
    sink.tensors(tensors)


def write_graph(file: BinaryIO, graph: StoredGraph, labels: Mapping[str, np.ndarray] | None = None) -> None:
    """Write a graph file of one graph, with one vertex type and one edge type, as `dgl.save_graphs` does.

    `file` must be at its start. What comes as `Rows` is never in memory as a whole.
    """
    assert len(graph.num_nodes) == len(graph.edges) == 1, "only graphs of one type are written"
    sink = _Sink(file)
    sink.pack("QQQQ", FILE_MAGIC, _FILE_VERSION, _HETERO_TYPE, 1)
    file.write(bytes(_HEADER_BYTES - file.tell()))
    # The place of the first graph is known once the labels are written.
    sink.pack("Q", 0)
    sink.tensors(labels or {})
    start = file.tell()
    file.seek(_HEADER_BYTES)
    sink.pack("Q", start)
    file.seek(start)
    sink.pack("Q", GRAPH_MAGIC)
    sink.metagraph()
    sink.pack("Q", 1)
    sink.edges(graph.edges[0])
    sink.pack("Qq", 1, graph.num_nodes[0])
    for data, names in ((graph.ndata, None), (graph.edata, None), (None, graph.ntypes), (None, graph.etypes)):
        sink.pack("Q", 1)
        if names is None:
            sink.tensors(data[0])
        else:
            sink.string(names[0])
    sink.pack("QQQQ", 16, 1, start, 16)


class _Cursor:
    """Reads the parts that the formats are made of, from a memory map; every fault names file and byte."""

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, 0
        try:
            self.bytes = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
        except OSError as error:
            raise wrong(
                str(path), error.strerror or str(error), "a file to read", "check the path"
            ) from error

    def fault(self, got: str, expected: str, place: int | None = None) -> UserError:
        place = self.place if place is None else place
        return wrong(f"{self.path}, byte {place}", got, expected, "write or fetch the file again")

    def take(self, count: int, what: str) -> np.ndarray:
        """The next `count` bytes."""
        if not 0 <= count <= len(self.bytes) - self.place:
            raise self.fault(
                f"{len(self.bytes) - self.place} bytes before the end of the file",
                f"{count} bytes of {what}",
            )
        self.place += count
        return self.bytes[self.place - count : self.place]

    def unpack(self, kinds: str, what: str) -> tuple[int, ...]:
        return struct.unpack("<" + kinds, self.take(struct.calcsize("<" + kinds), what).tobytes())

    def magic(self, number: int, what: str) -> None:
        place = self.place
        if (found := self.unpack("Q", what)[0]) != number:
            raise self.fault(f"the number {found:#x}", f"{number:#x}, the start of {what}", place)

    def count(self, what: str, item_bytes: int = 8) -> int:
        """The length of a vector, whose items take at least `item_bytes` each."""
        place = self.place
        (count,) = self.unpack("Q", f"the number of {what}")
        if count * item_bytes > len(self.bytes) - self.place:
            raise self.fault(f"{count} {what}", "as many as the file has room for", place)
        return count

    def string(self) -> str:
        place = self.place
        length = self.count("letters", 1)
        raw = self.take(length, "a name").tobytes()
        try:
            if length > _MAX_NAME:
                raise ValueError
            return raw.decode("utf-8")
        except ValueError:
            raise self.fault("no text", "a name", place) from None

    def array(self) -> np.ndarray:
        """An array, read-only and still on disk."""
        self.magic(ARRAY_MAGIC, "an array")
        place = self.place
        _, _, _, dimensions = self.unpack("Qiii", "an array's head")
        code, bits, lanes = self.unpack("BBH", "an array's type")
        if code not in _KINDS or bits not in ((16, 32, 64) if code == 2 else (8, 16, 32, 64)) or lanes != 1:
            got = f"a type of code {code}, {bits} bits and {lanes} lanes"
            raise self.fault(got, "integers or floats of 8 to 64 bits", place)
        if not 0 <= dimensions <= _MAX_DIMENSIONS:
            raise self.fault(f"{dimensions} dimensions", f"at most {_MAX_DIMENSIONS}", place)
        *shape, num_bytes = self.unpack(f"{dimensions}qq", "an array's shape")
        expected = bits // 8
        for size in shape:
            expected *= size
        if min(shape, default=0) < 0 or num_bytes != expected:
            raise self.fault(f"{num_bytes} bytes for shape {tuple(shape)}", f"{expected} bytes", place)
        raw = self.take(num_bytes, f"an array of shape {tuple(shape)}")
        return raw.view(np.ndarray).view(np.dtype(f"<{_KINDS[code]}{bits // 8}")).reshape(shape)

    def tensors(self) -> dict[str, np.ndarray]:
        return {self.string(): self.array() for _ in range(self.count("named arrays", 16))}

    def csr(self) -> tuple[tuple[int, int], np.ndarray, np.ndarray, np.ndarray]:
        """((rows, columns), indptr, indices, ids)."""
        self.magic(CSR_MAGIC, "a CSR matrix")
        place = self.place
        columns, rows = self.unpack("qq", "the size of a matrix")
        indptr, indices, ids = self.array(), self.array(), self.array()
        self.unpack("B", "a matrix's end")
        bad = rows < 0 or indptr.shape != (rows + 1,) or indptr.dtype.kind != "i" or len(indices.shape) != 1
        if bad or indptr[0] != 0 or indptr[-1] != len(indices) or (np.diff(indptr) < 0).any():
            raise self.fault(f"offsets of shape {indptr.shape}", f"{rows + 1} of a CSR matrix", place)
        self._check_matrix([(indices, columns)], ids, place)
        return (rows, columns), indptr, indices, ids

    def coo(self) -> tuple[tuple[int, int], np.ndarray, np.ndarray, np.ndarray]:
        """((rows, columns), row, column, ids)."""
        self.magic(COO_MAGIC, "a COO matrix")
        place = self.place
        columns, rows = self.unpack("qq", "the size of a matrix")
        row, column, ids = self.array(), self.array(), self.array()
        self.unpack("BB", "a matrix's end")
        if row.shape != column.shape:
            raise self.fault(f"{row.shape} and {column.shape} ends of edges", "equally many", place)
        self._check_matrix([(row, rows), (column, columns)], ids, place)
        return (rows, columns), row, column, ids

    def _check_matrix(self, ends: list[tuple[np.ndarray, int]], ids: np.ndarray, place: int) -> None:
        """Vertex ids inside the matrix, and edge ids that are a permutation or absent."""
        for values, limit in ends:
            if values.ndim != 1 or values.dtype.kind != "i":
                raise self.fault(f"vertex ids of {values.dtype} {values.shape}", "integers [E]", place)
            if len(values) and not (values.min() >= 0 and values.max() < limit):
                raise self.fault(
                    f"vertex ids {values.min()} to {values.max()}", f"ids in [0, {limit})", place
                )
        if ids.size:
            count = len(ends[0][0])
            used = np.zeros(count, bool)
            whole = ids.shape == (count,) and ids.dtype.kind == "i" and ids.min() >= 0 and ids.max() < count
            if whole:
                used[ids] = True
            if not used.all():
                raise self.fault("other edge ids", f"each of 0 to {count - 1} once", place)

    def edges(self) -> Edges:
        """One edge set: the first of its saved layouts, the others being the same edges."""
        self.magic(EDGES_MAGIC, "the edges of a type")
        place = self.place
        saved, _ = self.unpack("qq", "the layouts of the edges")
        if saved & ~(_LAYOUT_FLAG | 7) or not saved & 7:
            raise self.fault(f"layouts {saved:#x}", "coo, csr or csc", place)
        found = []
        for layout, bit in _LAYOUT_BITS.items():
            if saved & bit:
                self.metagraph()
                shape, first, second, ids = self.coo() if layout == "coo" else self.csr()
                shape = shape[::-1] if layout == "csc" else shape
                found.append(Edges(layout, shape, first, second, ids if ids.size else None))
        return found[0]

    def metagraph(self) -> None:
        self.magic(META_MAGIC, "a metagraph")
        self.csr()

    def graph(self) -> StoredGraph:
        self.magic(GRAPH_MAGIC, "a graph")
        self.metagraph()
        place = self.place
        edges = [self.edges() for _ in range(self.count("edge types"))]
        num_nodes = [self.unpack("q", "a vertex count")[0] for _ in range(self.count("vertex types"))]
        ndata = [self.tensors() for _ in range(self.count("vertex types"))]
        edata = [self.tensors() for _ in range(self.count("edge types"))]
        ntypes = [self.string() for _ in range(self.count("vertex types"))]
        etypes = [self.string() for _ in range(self.count("edge types"))]
        if not len(num_nodes) == len(ndata) == len(ntypes) or not len(edges) == len(edata) == len(etypes):
            raise self.fault("lists of different lengths", "one entry per type", place)
        return StoredGraph(num_nodes, edges, ndata, edata, ntypes, etypes)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a tensor file, read-only and still on disk.

    Raises:
        UserError: the file is missing, cut short, damaged or of another kind; names the byte.
    """
    cursor = _Cursor(path)
    cursor.magic(TENSORS_MAGIC, "a DGL tensor file")
    cursor.unpack("Q", "the number of arrays")
    return cursor.tensors()


def read_graphs(path: Path) -> tuple[list[StoredGraph], dict[str, np.ndarray]]:
    """(graphs, labels) of a graph file, their arrays read-only and still on disk.

    Raises:
        UserError: the file is missing, cut short, damaged or of another kind or version; names the byte.
    """
    cursor = _Cursor(path)
    cursor.magic(FILE_MAGIC, "a DGL graph file")
    version, kind, num_graphs = cursor.unpack("QQQ", "the head of a graph file")
    if (version, kind) != (_FILE_VERSION, _HETERO_TYPE):
        raise cursor.fault(
            f"version {version}, type {kind}", f"version {_FILE_VERSION}, type {_HETERO_TYPE}", 8
        )
    cursor.take(_HEADER_BYTES - cursor.place, "the head of a graph file")
    (start,) = cursor.unpack("Q", "the place of the first graph")
    labels = cursor.tensors()
    if num_graphs and cursor.place != start:
        raise cursor.fault("the first graph", f"it at byte {start}, as the head says")
    if num_graphs * 8 > len(cursor.bytes):
        raise cursor.fault(f"{num_graphs} graphs", "as many as the file has room for", 24)
    graphs = [cursor.graph() for _ in range(num_graphs)]
    cursor.take(cursor.count("bytes of the index", 1) + 8, "the index of graphs")
    if cursor.place != len(cursor.bytes):
        raise cursor.fault(f"{len(cursor.bytes) - cursor.place} more bytes", "the end of the file")
    return graphs, labels


def starts_like_dgl(path: Path) -> int | None:
    """FILE_MAGIC or TENSORS_MAGIC where `path` is a file that starts so, else None."""
    try:
        with open(path, "rb") as file:
            head = file.read(8)
    except OSError:
        return None
    number = int.from_bytes(head, "little")
    return number if len(head) == 8 and number in (FILE_MAGIC, TENSORS_MAGIC) else None
