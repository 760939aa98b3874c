"""Partitioning and writing in bounded memory, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tgnn.partition.assign import estimated_bytes
from tgnn.partition.store_writer import CHUNK_BYTES

VERTICES, DEGREE, WIDTH = 200_000, 10, 16

# Prints, in bytes, the graph, and how far partitioning, and then writing, raised resident memory above what
# was there before. Half of the sources are near their destination, half anywhere; with presampling the graph is a
# symmetric one, as for graphs that are large.
MEASURE = """
import json, sys
import numpy as np
from tgnn.data.graph import Dataset, Graph
from tgnn.partition import assign, report, write_store
from tgnn.training.partitioning import PresampleOptions, partitioned

def status(name):
    with open("/proc/self/status") as source:
        return next(int(line.split()[1]) * 1024 for line in source if line.startswith(name))

vertices, degree, width = (int(word) for word in sys.argv[1:4])
method, presampled = sys.argv[4], sys.argv[4] == "presampled lp"
rng = np.random.default_rng(0)
ids = np.arange(vertices, dtype=np.int32)[:, None]
if presampled:  # symmetric: to both sides at the same distances
    steps = rng.integers(1, 9999, degree // 2, dtype=np.int32)
    sources = (ids + np.concatenate([steps, -steps])) % np.int32(vertices)
else:
    sources = rng.integers(0, vertices, (vertices, degree), dtype=np.int32)
    near = rng.integers(1, 99, (vertices, degree // 2), dtype=np.int32)
    sources[:, : degree // 2] = (near + ids) % vertices
sources.sort(axis=1)
graph = Graph(np.arange(vertices + 1) * degree, sources.ravel())
x = np.ones((vertices, width), np.float32)
dataset = Dataset("made", graph, x=x, train=np.arange(0, vertices, 10))
with open("/proc/self/clear_refs", "w") as target:
    target.write("5")  # forget the peak so far
before = status("VmRSS")
if presampled:
    options = PresampleOptions(fanouts=(5, 5), batch_size=512)
    part_of, found, hotness = partitioned(dataset, 4, "lp", options=options)
else:
    part_of, hotness = assign(dataset, 4, method), None
    found = report(dataset, part_of, 4)
partition = status("VmHWM") - before
write_store(dataset, part_of, sys.argv[5], report=found, presampled=hotness)
graph_bytes = graph.indices.nbytes + graph.indptr.nbytes
whole = status("VmHWM") - before
print(json.dumps([graph_bytes, partition, whole]))
"""


def can_reset_the_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def measured(vertices: int, degree: int, method: str, store: Path) -> list[int]:
    """Bytes of the graph, and the peaks of partitioning and of all, in a process of its own."""
    arguments = [str(vertices), str(degree), str(WIDTH), method, str(store)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        check=True,
    )
    return json.loads(done.stdout)


needs_peak = pytest.mark.skipif(
    not can_reset_the_peak(), reason="the peak of resident memory is not to be had here"
)


@needs_peak
@pytest.mark.parametrize(("method", "multiple"), [("lp", 16), ("random", 3)])
def test_a20_memory_is_a_small_multiple_of_the_graph(tmp_path: Path, method: str, multiple: int) -> None:
    """`multiple` counts the in-edge CSR (4 bytes an edge, 8 a vertex), whatever the width of the features."""
    graph, partition, whole = measured(VERTICES, DEGREE, method, tmp_path / "store")
    assert partition <= multiple * graph
    assert partition <= 1.25 * estimated_bytes(VERTICES, DEGREE * VERTICES, method)
    assert whole <= multiple * graph + 2 * CHUNK_BYTES


@needs_peak
def test_a20_presampling_and_partitioning_a_symmetric_graph_takes_a_smaller_one(tmp_path: Path) -> None:
    """Six times the in-edge CSR beside it, most of that in pieces of fixed size; 2 times for one of 65M edges."""
    vertices, degree = 150_000, 24
    graph, partition, whole = measured(vertices, degree, "presampled lp", tmp_path / "store")
    assert partition <= 6 * graph
    assert whole <= 6 * graph + 2 * CHUNK_BYTES
