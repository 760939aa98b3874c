"""`bench.py epoch`, `redundancy`, `partition`, `scale` and `all` on tiny graphs."""

from __future__ import annotations

import importlib
import importlib.util
import json

import numpy as np
import pytest

from tgnn.errors import run_command

SMALL = ["rmat:8", "--fanouts", "3,4", "--batch-size", "8"]


def made(bench, options, tmp_path):
    out = tmp_path / "found.json"
    assert bench.main([*options, "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_epoch_runs_ranks_and_modes_with_equal_losses(bench, tmp_path, capsys):
    options = [
        "epoch",
        *SMALL,
        "--hidden",
        "8",
        "--rounds",
        "1",
        "--against",
        "torch",
        "--train-options=--halo-cache 1KiB",
    ]
    found = made(bench, options, tmp_path)
    shown, results = capsys.readouterr().out, found["results"]
    assert set(results) == {"1 rank", "2 ranks, split", "2 ranks, data", "torch"}
    assert results["1 rank"]["speed"] == 1 and "speed against 1 rank" in shown and "Seconds by stage" in shown
    work = {name: found["work"] for name, found in results.items() if "work" in found}
    assert work["2 ranks, split"]["edges"] == work["1 rank"]["edges"] < work["2 ranks, data"]["edges"]
    assert work["2 ranks, split"]["halo_cache_rows"] > 0
    assert results["2 ranks, split"]["loss"] == pytest.approx(results["1 rank"]["loss"], rel=1e-4)


def test_epoch_tells_other_losses(bench, monkeypatch, capsys):
    import _bench_epoch

    def train(args, ranks, mode):
        stages = dict.fromkeys((*_bench_epoch.SHOWN, "total"), 1.0)
        return {"seconds": stages, "loss": float(ranks)}

    monkeypatch.setattr(_bench_epoch, "train", train)
    assert bench.main(["epoch", *SMALL, "--ranks", "1,2", "--modes", "split"]) == 1
    assert "wrong: the loss of 2 ranks, split is 2.0" in capsys.readouterr().out


def test_redundancy_counts_replayed_and_real_steps(bench, tmp_path, capsys):
    options = ["redundancy", *SMALL, "--parts", "2,4", "--against", "torch", "--run"]
    found = made(bench, options, tmp_path)
    assert "| 4 | 32 | split |" in capsys.readouterr().out
    for parts in ("2", "4"):
        counts = found["results"][parts]
        assert (
            counts["data"]["rows"] > counts["split"]["rows"]
            and counts["data"]["edges"] > counts["split"]["edges"]
        )
        assert counts["split"]["exchanged"] > 0 == counts["data"]["exchanged"]
        # The same batches: another sampler's ranks repeat as much.
        assert counts["data (torch)"]["rows"] == pytest.approx(counts["data"]["rows"], rel=0.2)
    real = found["results"]["run"]
    assert real["split"]["feature_rows_loaded"] == 2 * found["results"]["2"]["split"]["rows"]
    assert real["data"]["halo_rows"] == 0 < real["split"]["halo_rows"]


def test_redundancy_tells_a_split_that_repeats(bench, monkeypatch, capsys):
    import _bench_redundancy

    whole = _bench_redundancy.replay

    def replay(*args, mode, **kwargs):
        counts = whole(*args, mode=mode, **kwargs)
        if mode == "split":
            counts.edges = counts.edges + 1
        return counts

    monkeypatch.setattr(_bench_redundancy, "replay", replay)
    assert bench.main(["redundancy", *SMALL, "--parts", "2"]) == 1
    assert "wrong: split over 2 parts" in capsys.readouterr().out


def test_partition_measures_every_method(bench, tmp_path, capsys):
    found = made(
        bench, ["partition", *SMALL, "--parts", "2", "--methods", "random,lp,presampled lp"], tmp_path
    )
    shown = capsys.readouterr().out
    for method in ("random", "lp", "presampled lp"):
        one = found["results"][method]
        assert f"| {method} |" in shown and one["seconds"] > 0 and one["peak_bytes"] > 0
        assert len(one["exchange_rows"]) == len(one["partial_rows"]) == 2 and 0 < one["cut"] < 1
    assert found["results"]["lp"]["cut"] < found["results"]["random"]["cut"]
    assert found["results"]["presampled lp"]["presampling_seconds"] > 0


def test_partition_with_metis_where_it_is(bench, tmp_path):
    pytest.importorskip("pymetis")
    found = made(bench, ["partition", *SMALL, "--parts", "2", "--methods", "metis"], tmp_path)
    assert found["results"]["metis"]["cut"] < 0.5


SCALE = ["scale", "--scales", "9,10", "--parts", "2", "--steps", "2", "--batch-size", "16", "--features", "4",
         "--hidden", "8", "--fanouts", "2,2"]  # fmt: skip


def test_scale_runs_every_stage_and_goes_on_where_it_stopped(bench, monkeypatch, tmp_path, capsys):
    import _bench_scale

    work = ["--work-dir", str(tmp_path / "work")]
    whole, stages = _bench_scale.run_stage, []

    def run_stage(function, arguments):
        stages.append(function)
        if len(stages) == 6:
            raise KeyboardInterrupt
        return whole(function, arguments)

    monkeypatch.setattr(_bench_scale, "run_stage", run_stage)
    assert run_command(bench.main, [*SCALE, *work]) == 130
    names = [function.split(":")[1] for function in stages]
    assert names == ["generate", "partition", "store", "train", "generate", "partition"]
    stages[:] = ["-"] * 6
    found = made(bench, [*SCALE, *work], tmp_path)
    assert [function.split(":")[1] for function in stages[6:]] == ["partition", "store", "train"]
    shown = capsys.readouterr().out
    assert "| 2^9 | 512 |" in shown and "| 2^10 | 1,024 |" in shown and "Bytes on disk" in shown
    for one in found["results"]:
        edges = one["generate"]["result"]["edges"]
        assert all(
            one[stage]["seconds"] > 0 and one[stage]["peak_bytes"] > 0 for stage in _bench_scale.STAGES
        )
        assert one["store"]["result"]["edges"] == pytest.approx(4 * edges, rel=0.1)
        assert one["train"]["result"]["steps"] == 2 and one["train"]["result"]["edges"] > 0
    # Data and store are gone, the records stay: a run again only reads them.
    assert not list((tmp_path / "work").rglob("*.npy")) or not (tmp_path / "work/scale-9/store").exists()
    assert made(bench, [*SCALE, *work], tmp_path)["results"] == found["results"] and len(stages) == 9


def test_scale_refuses_what_the_disk_does_not_hold(bench, tmp_path, capsys):
    assert run_command(bench.main, ["scale", "--scales", "30", "--work-dir", str(tmp_path)]) == 2
    assert "GB of free disk" in capsys.readouterr().err


@pytest.mark.parametrize("scale", [6, 12])
def test_written_rmat_is_the_generators_graph(bench, monkeypatch, tmp_path, scale):
    files = importlib.import_module("_dataset_files")
    from tgnn.data import synthetic

    # Several draws and ranges even of a small graph.
    monkeypatch.setattr(files, "DRAWN_AT_ONCE", 1 << 11)
    monkeypatch.setattr(synthetic, "_CHUNK", 1 << 11)
    sizes = files.write_rmat(tmp_path, scale, 3, seed=5)
    found, expected = files.open_dataset(tmp_path), synthetic.rmat(scale, seed=5, num_features=3)
    np.testing.assert_array_equal(found.graph.indptr, expected.graph.indptr)
    np.testing.assert_array_equal(found.graph.indices, expected.graph.indices)
    assert sizes == {"vertices": 1 << scale, "edges": expected.num_edges, "features": 3}
    assert len(found.train) == len(expected.train) and found.x.shape == expected.x.shape


def test_all_writes_a_page_of_what_ran(bench, monkeypatch, tmp_path, capsys):
    import _bench_all

    monkeypatch.setattr(_bench_all, "PICTURES", ("one",))
    monkeypatch.setattr(
        _bench_all, "LIST",
        {"one": ("no", f"sampling {' '.join(SMALL)} --rounds 1 {{all}}"), "two": ("no", "sampling nothing-such")},
    )  # fmt: skip
    page, results = tmp_path / "page.md", tmp_path / "results"
    command = ["all", "--quick", "--write", str(page), "--results", str(results)]
    assert bench.main(command) == 1
    assert "failed: two" in capsys.readouterr().err and not (results / "two.json").exists()
    text = page.read_text()
    assert "## Sampling on rmat:8" in text and "torch / tgnn" in text and "load average" in text
    assert "python tools/bench.py sampling rmat:8" in text and str(tmp_path) not in text
    is_drawn = importlib.util.find_spec("matplotlib") is not None
    assert ("![Sampling on rmat:8, ms](one.svg)" in text) == (tmp_path / "one.svg").exists() == is_drawn
    (results / "one.json").write_text((results / "one.json").read_text().replace("Sampling on", "Kept:"))
    assert bench.main([*command, "--reuse", "--only", "one"]) == 0 and "## Kept: rmat:8" in page.read_text()


def test_every_entry_of_the_list_is_a_command_line(bench):
    import argparse

    import _bench_all

    for name in _bench_all.LIST:
        for quick in (False, True):
            words = _bench_all.command_line(name, quick)
            parser = argparse.ArgumentParser()
            bench.BENCHES[words[0]][1](parser)
            assert vars(parser.parse_args(words[1:]))


@pytest.mark.parametrize(
    "options",
    [
        ["epoch", *SMALL, "--modes", "both"], ["epoch", *SMALL, "--epochs", "1"],
        ["redundancy", *SMALL, "--parts", "0"],
        ["partition", *SMALL, "--methods", "guess"], ["partition", *SMALL, "--against", "torch"],
        ["scale", "--scales", "99"], ["all", "--only", "nothing"], ["all", "--write", "/no/such/folder/x.md"],
    ],
)  # fmt: skip
def test_mistakes_end_with_one_sentence_and_status_2(bench, capsys, options):
    assert run_command(bench.main, options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
