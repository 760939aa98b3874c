"""`bench.py kernels` on a CPU: the table, the JSON, and that a wrong result is told and not timed."""

from __future__ import annotations

import json

import pytest
import torch

from tgnn import kernels
from tgnn.errors import run_command
from tgnn.kernels import traffic

SMALL = ["kernels", "--device", "cpu", "--edges", "300", "--widths", "4", "--rounds", "2"]


def test_every_case_is_checked_timed_and_written(bench, tmp_path, capsys):
    import _cases

    out = tmp_path / "kernels.json"
    assert bench.main([*SMALL, "--dtypes", "float32,bfloat16", "--out", str(out)]) == 0
    shown, made = capsys.readouterr().out, json.loads(out.read_text())
    assert made["provenance"]["versions"]["torch"] == torch.__version__ and "commit" in made["provenance"]
    assert made["wrong"] == [] and min(made["copy_bytes_per_second"]) > 0
    by_us = [row for row in made["rows"] if row["by"] == "tgnn torch"]
    assert {row["case"] for row in by_us} == {case.name for case in _cases.CASES}
    # Every op that is public and runs on a block has a case.
    assert {case.op for case in _cases.CASES} >= {"spmm", "gather", "gather_spmm", "sddmm", "edge_softmax", "dropout",
                                                  "attention", "sample_neighbors", "unique"}  # fmt: skip
    assert any(row["by"] == "torch.sparse" for row in made["rows"])
    for row in made["rows"]:
        assert 0 < row["seconds"]["p20"] <= row["seconds"]["p50"] <= row["seconds"]["p80"]
        assert row["bytes_per_second"] == pytest.approx(row["model_bytes"] / row["seconds"]["p50"])
        assert f"| {row['case']} |" in shown
    assert "copy bandwidth" in shown and "% of copy" in shown


def test_a_wrong_result_is_told_not_timed_and_fails(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kernels, "gather", lambda x, rows: x[rows] + (x.dtype == torch.float32))
    out = tmp_path / "kernels.json"
    assert bench.main([*SMALL, "--ops", "gather", "--out", str(out)]) == 1
    assert "wrong: gather" in capsys.readouterr().out
    made = json.loads(out.read_text())
    assert made["rows"] == [] and len(made["wrong"]) == 1


def test_a_peer_that_fails_is_left_out(bench, monkeypatch, capsys):
    import _cases

    def fails(work, given):
        raise RuntimeError("no half types")

    monkeypatch.setitem(next(c for c in _cases.CASES if c.name == "spmm sum").peers, "torch.sparse", fails)
    assert bench.main([*SMALL, "--ops", "spmm"]) == 0
    assert (
        "left out: spmm sum torch.float32 width 4 by torch.sparse: RuntimeError: no half"
        in capsys.readouterr().out
    )


def test_rates_are_the_models_bytes_over_the_median(bench, monkeypatch):
    import _bench_kernels
    import _cases

    def measure(self, calls, rounds, warmup=2):
        return {name: [0.25, 0.5, 8.0] for name in calls}

    monkeypatch.setattr(_bench_kernels.Clock, "measure", measure)
    work = _cases.Workload(made_block(), 4, torch.float32, torch.device("cpu"))
    case = next(case for case in _cases.CASES if case.name == "spmm sum")
    measured = _bench_kernels.KernelBench(work.device, 3, peers=False)
    measured.measure(case, work)
    (row,) = measured.rows
    assert row["bytes_per_second"] == 2 * traffic.spmm(work.block, 4, torch.float32).bytes
    assert row["seconds"] == {"p20": 0.25, "p50": 0.5, "p80": 8.0}


def made_block():
    import _blocks

    return _blocks.made_block(40, 5)


def test_made_blocks_are_valid_and_skewed():
    import _blocks

    block = _blocks.made_block(1000, 10)
    degrees = block.degrees
    assert block.n_edges == pytest.approx(10_000, rel=0.05) and int(degrees.max()) > 50
    assert int(degrees.min()) <= 1 and int(block.indices.max()) < block.n_src
    assert torch.equal(block.position, torch.cat([torch.arange(d) for d in degrees.tolist()]))


@pytest.mark.parametrize(
    "options", [["--ops", "spnn"], ["--out", "/no/such/folder/x.json"], ["--rounds", "0"]]
)
def test_mistakes_end_with_one_sentence_and_status_2(bench, capsys, options):
    assert run_command(bench.main, [*SMALL, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_help_names_the_benchmarks(bench, capsys):
    for options, says in ((["--help"], "kernels"), (["kernels", "--help"], "--store")):
        with pytest.raises(SystemExit) as ended:
            bench.main(options)
        assert ended.value.code == 0 and says in capsys.readouterr().out
