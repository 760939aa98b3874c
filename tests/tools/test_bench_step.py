"""`bench.py step`, `sampling`, `inference` on a tiny graph: tables, JSON; a difference is told and nothing timed."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys

import pytest
import torch

from tests.frameworks import imported
from tgnn.data.synthetic import sbm
from tgnn.errors import run_command
from tgnn.export.frameworks import DGL
from tgnn.nn.model import GNN

TINY = ["rmat:8", "--rounds", "2", "--warmup", "0", "--fanouts", "3,4"]
STEP = ["step", *TINY, "--batch-size", "8", "--hidden", "8"]
SAMPLING = ["sampling", *TINY, "--batch-size", "8"]
INFERENCE = ["inference", *TINY, "--hidden", "8"]


def made(bench, options, tmp_path):
    """The JSON of a run that must go well."""
    out = tmp_path / "found.json"
    assert bench.main([*options, "--out", str(out)]) == 0
    return json.loads(out.read_text())


def ordered(seconds):
    return all(0 <= found["p20"] <= found["p50"] <= found["p80"] for found in seconds.values())


@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
def test_step_prints_stages_ratios_and_the_floor(bench, tmp_path, capsys, model):
    found = made(bench, [*STEP, "--model", model, "--against", "torch"], tmp_path)
    shown, results = capsys.readouterr().out, found["results"]
    for stage in ("sample", "load", "forward", "backward", "update", "total"):
        assert f"| {stage} |" in shown and ordered(results[stage]["seconds"])
        assert set(results[stage]["seconds"]) == {"tgnn", "torch"} and set(results[stage]["ratio"]) == {
            "torch"
        }
    assert (
        results["total"]["ratio"]["torch"] > 0 and results["above_floor"] > 0 and "| tgnn / floor |" in shown
    )
    assert ordered({"total": results["floor"]["total"]}) and results["floor_work"]["flops"] > 0
    about = found["provenance"]
    assert about["versions"]["torch"] == torch.__version__ and about["allocator"] in ("kept", "default")
    assert (
        len(about["load_average"]) == len(about["load_average_after"]) == 3
        and "commit" in about
        and "load average" in shown
    )
    assert (
        found["command"].startswith("python tools/bench.py step rmat:8") and "--out" not in found["command"]
    )


def test_step_in_bfloat16_checks_itself_against_float32(bench, tmp_path, capsys, monkeypatch):
    import _bench_step

    found = made(bench, [*STEP, "--dtype", "bfloat16", "--against", "torch"], tmp_path)
    assert "stay in float32" in capsys.readouterr().out and "bfloat16" in found["title"]
    monkeypatch.setattr(_bench_step, "HALF_TOLERANCE", 0.0)
    assert bench.main([*STEP, "--dtype", "bfloat16"]) == 1
    assert "wrong: bfloat16 logits of tgnn differ" in capsys.readouterr().out


def test_step_tells_cpu_time_where_asked(bench, tmp_path, capsys):
    found = made(bench, [*STEP, "--clock", "cpu", "--against", "torch"], tmp_path)
    assert found["provenance"]["clock"] == "cpu" and "CPU time of all threads" in capsys.readouterr().out


def test_the_floor_counts_products_and_rows(bench):
    import _floor

    from tgnn.data.synthetic import rmat
    from tgnn.nn.model import GNN
    from tgnn.sampling.loader import Loader
    from tgnn.training.prepare import prepare

    dataset = rmat(8, num_features=4, num_classes=3)
    batch = next(iter(Loader(prepare(dataset, 1), [2, 3], 8)))
    work = _floor.work_of(GNN.build("sage", 4, 5, 3, 2), batch, torch.float32)
    first, last = batch.blocks
    # Layer 0: two products of its destinations, forward and for the weights. The last one narrows: it projects sources.
    products = 2 * 2 * 2 * first.n_dst * 4 * 5 + 3 * 2 * (last.n_src + last.n_dst) * 5 * 3
    assert work.flops == products
    moved = 4 * (first.n_src * 4 + (first.n_edges + first.n_dst) * 4 + 2 * (last.n_edges + last.n_dst) * 3)
    assert work.bytes == moved


def test_sampling_is_compared(bench, tmp_path, capsys):
    found = made(bench, [*SAMPLING, "--against", "torch"], tmp_path)
    assert ordered(found["results"]["sample"]["seconds"]) and "torch / tgnn" in capsys.readouterr().out
    assert min(found["results"]["edges_per_second"].values()) > 0


@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
def test_inference_is_compared(bench, tmp_path, capsys, model):
    found = made(bench, [*INFERENCE, "--model", model, "--against", "torch"], tmp_path)
    assert ordered(found["results"]["total"]["seconds"]) and "torch / tgnn" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
def test_dgl_does_the_same_work(bench, tmp_path, model):
    imported(DGL)
    for options in (STEP, INFERENCE):
        found = made(bench, [*options, "--model", model, "--against", "dgl"], tmp_path)
        assert found["results"]["total"]["ratio"]["dgl"] > 0 and "dgl" in found["provenance"]["versions"]


@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
def test_pyg_does_the_same_work(bench, tmp_path, model):
    pytest.importorskip("torch_geometric")
    pytest.importorskip("torch_sparse", exc_type=ImportError)
    for options in (STEP, INFERENCE):
        found = made(bench, [*options, "--model", model, "--against", "pyg"], tmp_path)
        assert found["results"]["total"]["ratio"]["pyg"] > 0


@pytest.mark.parametrize("model", ["sage", "gat"])
def test_pygs_loader_is_checked_and_compared(bench, tmp_path, capsys, model):
    pytest.importorskip("torch_geometric")
    pytest.importorskip("torch_sparse", exc_type=ImportError)
    for options in (STEP, INFERENCE):
        found = made(bench, [*options, "--model", model, "--against", "pyg-loader"], tmp_path)
        assert found["results"]["total"]["ratio"]["pyg-loader"] > 0
    assert run_command(bench.main, [*STEP, "--model", "gcn", "--against", "pyg-loader"]) == 2
    assert "sage or gat" in capsys.readouterr().err


class Spoilt:
    """Wrong copies of what a peer does, one at a time."""

    @staticmethod
    def forward(peers):
        whole = peers.TorchPeer.forward
        return "forward", lambda self, sampled, x: whole(self, sampled, x) + 0.01

    @staticmethod
    def gradient(peers):
        whole = peers.TorchPeer.forward
        return "forward", lambda self, sampled, x: whole(self, sampled, x.detach() + 0.9 * (x - x.detach()))

    @staticmethod
    def fanout(peers):
        whole = peers.TorchPeer._hop
        return "_hop", lambda self, frontier, fanout: whole(self, frontier, fanout - 1)

    @staticmethod
    def neighbours(peers):
        whole = peers.TorchPeer._hop

        def hop(self, frontier, fanout):
            found = whole(self, frontier, fanout)
            found.indices = found.indices.roll(1)
            return found

        return "_hop", hop


@pytest.mark.parametrize(
    "what, says",
    [
        ("forward", "logits of torch differ"),
        ("gradient", "input gradients of torch differ"),
        ("fanout", "destinations have another number of in-edges"),
        ("neighbours", "an edge that the graph does not have"),
    ],
)
def test_a_difference_is_told_and_nothing_is_timed(bench, monkeypatch, tmp_path, capsys, what, says):
    peers = importlib.import_module("_peers")
    monkeypatch.setattr(peers.TorchPeer, *getattr(Spoilt, what)(peers))
    monkeypatch.setattr("_bench_step.take_turns", lambda *given: pytest.fail("timed"))
    out = tmp_path / "none.json"
    assert bench.main([*STEP, "--against", "torch", "--out", str(out)]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("wrong: ") and says in shown and not out.exists()


def test_other_logits_of_inference_are_told(bench, monkeypatch, capsys):
    peers = importlib.import_module("_peers")
    whole = peers.TorchPeer.infer
    monkeypatch.setattr(peers.TorchPeer, "infer", lambda self: whole(self) + 1)
    assert bench.main([*INFERENCE, "--against", "torch"]) == 1
    assert "wrong: logits of torch differ" in capsys.readouterr().out


def test_fewer_sampled_edges_are_told(bench):
    same_work, peers = importlib.import_module("_same_work"), importlib.import_module("_peers")
    dataset, batches, peer = sampled_by_torch(peers)
    same_work.same_samples(peer, dataset, [3, 4], batches)
    # Seeds that are asked for again and again make up a batch that draws the same in-edges twice.
    peer.sample = lambda seeds, whole=peer.sample: [drop_sources(block) for block in whole(seeds)]
    with pytest.raises(importlib.import_module("_bench_common").Mismatch):
        same_work.same_samples(peer, dataset, [3, 4], batches)


def test_other_numbers_of_edges_are_told(bench):
    """Also of batches after the first, whose edges are only counted."""
    same_work, peers = importlib.import_module("_same_work"), importlib.import_module("_peers")
    dataset, batches, peer = sampled_by_torch(peers)
    first, narrow = peer.sample, peers.TorchPeer(dataset, [1, 1], None).sample
    peer.sample = lambda seeds: (first if torch.equal(seeds, batches[0].seeds) else narrow)(seeds)
    with pytest.raises(importlib.import_module("_bench_common").Mismatch, match="where we sample"):
        same_work.same_samples(peer, dataset, [3, 4], batches)


class Subgraph:
    """A peer that samples one subgraph: of every seed the first in-edges, as many as are asked for."""

    name, draws_alike = "subgraph", False

    def __init__(self, graph, fanout):
        self.graph, self.fanout = graph, fanout

    def sample(self, seeds):
        return seeds

    def layers_of(self, seeds):
        graph = self.graph
        edges = [
            (int(graph.indices[edge]), int(seed))
            for seed in seeds
            for edge in range(
                graph.indptr[seed], min(graph.indptr[seed + 1], graph.indptr[seed] + self.fanout)
            )
        ]
        rows = torch.tensor(list(dict.fromkeys([*seeds.tolist(), *(source for source, _ in edges)])))
        place = {row: number for number, row in enumerate(rows.tolist())}
        source, destination = torch.tensor([[place[one] for one in edge] for edge in edges]).t()
        return [importlib.import_module("_peers").Layer(rows, len(rows), source, destination)]


SPOILT_SUBGRAPHS = {
    "other seeds": lambda layer: dataclasses.replace(layer, rows=layer.rows.roll(1)),
    "another number of in-edges": lambda layer: dataclasses.replace(
        layer, source=layer.source[1:], destination=layer.destination[1:]
    ),
    "an edge that the graph does not have": lambda layer: dataclasses.replace(
        layer, source=layer.source.roll(1)
    ),
}


@pytest.mark.parametrize("says", [None, *SPOILT_SUBGRAPHS])
def test_a_subgraph_of_other_edges_is_told(bench, says):
    same_work = importlib.import_module("_same_work")
    dataset, batches, _ = sampled_by_torch(importlib.import_module("_peers"))
    peer = Subgraph(dataset.graph, 3)
    if says is None:
        same_work.same_samples(peer, dataset, [3, 4], batches)
        return
    whole = peer.layers_of
    peer.layers_of = lambda seeds: [SPOILT_SUBGRAPHS[says](whole(seeds)[0])]
    with pytest.raises(importlib.import_module("_bench_common").Mismatch, match=says):
        same_work.same_samples(peer, dataset, [3, 4], batches)


def drop_sources(block):
    """The block with every edge of a destination drawn from its first source."""
    block.indices = block.indices[block.indptr[:-1].clamp(max=len(block.indices) - 1)][block.destination]
    return block


def sampled_by_torch(peers):
    from tgnn.data.synthetic import rmat
    from tgnn.sampling.loader import Loader
    from tgnn.training.prepare import prepare

    dataset = rmat(8)
    batches = list(Loader(prepare(dataset, 1), [3, 4], 8))
    return dataset, batches, peers.TorchPeer(dataset, [3, 4], None)


@pytest.mark.parametrize("kind", ["sage", "gat"])
def test_the_plain_peer_multiplies_as_torch_does(bench, kind):
    """And its layers have the types of ours, and leave the random numbers to come as they are."""
    peers = importlib.import_module("_peers")
    model = GNN.build(kind, 6, 8, 3).double()
    state = torch.get_rng_state()
    plain = peers.TorchPeer(sbm(40), [2, 2], model).model
    assert torch.equal(torch.get_rng_state(), state)
    linear = [module for module in plain.modules() if isinstance(module, torch.nn.Linear)]
    assert linear and all(type(module) is torch.nn.Linear for module in linear)
    assert all(parameter.dtype == torch.float64 for parameter in plain.parameters())


def test_floyd_draws_different_numbers_evenly(bench):
    floyd = importlib.import_module("_peers").floyd
    torch.manual_seed(0)
    drawn = floyd(torch.full((4000,), 5), 3)
    assert int(drawn.min()) == 0 and int(drawn.max()) == 4
    assert all(len(set(row)) == 3 for row in drawn.tolist())
    torch.testing.assert_close(drawn.flatten().bincount() / 12000, torch.full((5,), 0.2), rtol=0, atol=0.02)


@pytest.mark.parametrize("peer, package", [("dgl", "dgl"), ("pyg", "torch_sparse")])
def test_a_peer_that_is_missing_is_said_in_a_sentence(bench, monkeypatch, capsys, peer, package):
    if peer == "pyg":
        pytest.importorskip("torch_geometric")
    monkeypatch.setitem(sys.modules, package, None)
    assert run_command(bench.main, [*STEP, "--against", peer]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "pip install" in error


@pytest.mark.parametrize(
    "options",
    [
        ["--against", "jax"], ["--rounds", "0"], ["--fanouts", "3,0"], ["--out", "/no/such/folder/x.json"],
        ["--model", "gat", "--hidden", "6"], ["--batch-size", "0"],
    ],
)  # fmt: skip
def test_mistakes_end_with_one_sentence_and_status_2(bench, capsys, options):
    assert run_command(bench.main, [*STEP, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_a_plot_needs_matplotlib_and_says_so(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run_command(bench.main, [*STEP, "--plot", str(tmp_path / "bars.png")]) == 2
    assert "pip install 'tgnn[plot]'" in capsys.readouterr().err


def test_a_plot_is_drawn(bench, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "bars.png"
    assert bench.main([*STEP, "--against", "torch", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_busy_machine_is_told(bench):
    common = importlib.import_module("_bench_common")
    about = common.machine("kept", {}) | {"cores": 2, "load_average_after": [0.0], "clock": "wall"}
    assert "others used" in common.machine_line(about | {"load_average": [3.5]})
    assert "others used" not in common.machine_line(about | {"load_average": [2.0]})


def test_ratios_are_of_rounds_and_turns_change(bench):
    common = importlib.import_module("_bench_common")
    ours, theirs = ([{"total": value} for value in values] for values in ((1.0, 2.0, 10.0), (2.0, 2.0, 30.0)))
    assert common.ratio(ours, theirs) == 2.0 and common.ratio([{"total": 0.0}], [{"total": 1.0}]) is None
    order = []
    systems = {name: lambda name=name: order.append(name) or {"total": 1.0} for name in "ab"}
    found = common.take_turns(systems, rounds=2, warmup=1)
    assert order == ["a", "b", "b", "a", "a", "b"] and {
        name: len(times) for name, times in found.items()
    } == {"a": 2, "b": 2}
