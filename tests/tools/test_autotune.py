"""The tuning tool on a CPU: what it measures, checks, writes and leaves alone; and what it refuses."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch

from tgnn.errors import run_command
from tgnn.kernels import segment, tuning
from tgnn.kernels.tuning import Config

SMALL = ["--device", "cpu", "--edges", "300", "--degrees", "4", "--widths", "8", "--rounds", "2"]
KEY = "bag_sum float32 width<=8 degree<=8"
CPU = torch.device("cpu")


def table() -> dict:
    return json.loads(tuning.user_table(CPU).read_text())


def test_a12_a_second_run_does_no_work(autotune, monkeypatch, capsys):
    assert autotune.main([*SMALL, "--ops", "spmm"]) == 0
    assert "0 of them measured already" in capsys.readouterr().out
    first = tuning.user_table(CPU).read_bytes()
    times = {c["choice"]: c["us"] for c in table()["entries"][KEY]["candidates"]}
    assert set(times) == set(segment.SUM_STRATEGIES) and min(times.values()) > 0
    for worker in ("_measure", "_tune_case"):
        monkeypatch.setattr(autotune.Tuner, worker, lambda *_: pytest.fail("worked again"))
    assert autotune.main([*SMALL, "--ops", "spmm"]) == 0
    assert "8 workloads, 8 of them measured already" in capsys.readouterr().out
    assert tuning.user_table(CPU).read_bytes() == first


def test_the_table_is_what_tgnn_looks_up(autotune):
    assert autotune.main([*SMALL, "--ops", "spmm"]) == 0
    made, path = table(), tuning.user_table(CPU)
    assert made["provenance"]["versions"]["torch"] == torch.__version__
    assert tuning.describe() == {str(path): tuning.read_table(path, tuning.machine(CPU)).sha256}
    made["entries"][KEY]["choice"] = "segment_reduce"
    path.write_text(json.dumps(made))
    tuning.forget_tables()
    assert (
        tuning.strategy("bag_sum", CPU, torch.float32, 8, 4, tuple(segment.SUM_STRATEGIES))
        == "segment_reduce"
    )


def test_a_run_that_was_stopped_goes_on(autotune, monkeypatch, capsys):
    work = autotune.Tuner._tune_case

    def stop(self, label, case, workload):
        if case.name == "spmm mean":
            raise KeyboardInterrupt
        work(self, label, case, workload)

    with monkeypatch.context() as patch:
        patch.setattr(autotune.Tuner, "_tune_case", stop)
        assert run_command(autotune.main, [*SMALL, "--ops", "spmm"]) == 130
    done = list(table()["done"])
    assert len(done) == 2
    capsys.readouterr()
    assert autotune.main([*SMALL, "--ops", "spmm"]) == 0
    assert "8 workloads, 2 of them measured already" in capsys.readouterr().out


def test_a_wrong_or_broken_candidate_is_never_chosen(autotune, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such library")

    monkeypatch.setitem(segment.SUM_STRATEGIES, "sparse_csr", lambda table, rows, indptr, weight: (
        segment.by_embedding_bag(table, rows, indptr, weight) + 1))  # fmt: skip
    monkeypatch.setitem(segment.SUM_STRATEGIES, "segment_reduce", broken)
    assert autotune.main([*SMALL, "--ops", "gather_spmm"]) == 0
    entry = table()["entries"][KEY]
    assert entry["choice"] == "embedding_bag"
    failed = {c["choice"]: c.get("failed") for c in entry["candidates"]}
    assert "off by" in failed["sparse_csr"] and "no such library" in failed["segment_reduce"]


def test_a_faster_candidate_is_chosen_and_noise_is_not(autotune, monkeypatch):
    names = list(segment.SUM_STRATEGIES)
    for last, winner in ((0.5, names[2]), (0.99, names[0])):
        times = {0: [1.0], 1: [1.5], 2: [last]}
        monkeypatch.setattr(autotune.Clock, "measure", lambda *_, times=times: times)
        tuning.user_table(CPU).unlink(missing_ok=True)
        assert autotune.main([*SMALL, "--ops", "gather_spmm"]) == 0
        assert table()["entries"][KEY]["choice"] == winner


def test_a11_user_data_is_not_touched_and_calls_agree(autotune, random_rows):
    rows, indptr, x = random_rows
    copies = [t.clone() for t in random_rows]
    untuned = segment.bag_sum(x, rows, indptr)
    assert autotune.main([*SMALL, "--ops", "spmm"]) == 0
    first, second = segment.bag_sum(x, rows, indptr), segment.bag_sum(x, rows, indptr)
    assert all(torch.equal(a, b) for a, b in zip(copies, random_rows, strict=True))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, untuned)


@pytest.fixture
def random_rows():
    generator = torch.Generator().manual_seed(0)
    indptr = torch.arange(0, 121, 4)
    return torch.randint(0, 9, (120,), generator=generator), indptr, torch.randn(9, 8, generator=generator)


def test_an_unusable_table_at_the_default_place_is_begun_anew(autotune, capsys):
    path = tuning.user_table(CPU)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert autotune.main([*SMALL, "--ops", "gather_spmm"]) == 0
    assert "begun anew" in capsys.readouterr().err
    assert KEY in table()["entries"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--ops", "spnn"], "--ops: got spnn"),
        (["--dtypes", "fp8"], "--dtypes: got fp8"),
        (["--widths", "0"], "--widths"),
        (["--degrees", "-1"], "--degrees"),
        (["--rounds", "0"], "--rounds"),
        (["--store", "nowhere"], "nowhere"),
        (["--arch", "sm_90"], "--compile-only"),
        (["--defaults"], "--compile-only"),
        (["--candidates", "nowhere.json"], "--compile-only"),
    ],
)
def test_mistakes_end_with_one_sentence_and_status_2(autotune, capsys, options, says):
    assert run_command(autotune.main, [*SMALL[:-2], *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1


def test_a_foreign_table_given_by_name_is_not_overwritten(autotune, tmp_path, capsys):
    out = tmp_path / "other.json"
    foreign = json.dumps({"format": tuning.FORMAT, **tuning.machine(CPU), "device": "Other", "entries": {}})
    out.write_text(foreign)
    assert run_command(autotune.main, [*SMALL, "--out", str(out)]) == 2
    assert "another machine" in capsys.readouterr().err
    assert out.read_text() == foreign


def test_blocks_and_widths_come_from_a_store(autotune, tmp_path):
    from tgnn.data.synthetic import karate
    from tgnn.partition.store import write_store

    path = tmp_path / "karate.store"
    write_store(karate(), np.arange(34) % 2, path)
    options = [
        "--device",
        "cpu",
        "--rounds",
        "1",
        "--store",
        str(path),
        "--fanouts",
        "3,2",
        "--ops",
        "gather_spmm",
    ]
    assert autotune.main(options) == 0
    assert any("width<=64" in label for label in table()["done"])


@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="Triton interprets here")
def test_compile_only_drops_what_spills(autotune, capsys, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    import _compile_only

    from tgnn.kernels import aot

    def verdicts(spec, arch, dtype, index, width, config):
        if config.num_warps == 1:
            raise ValueError("out of resources")
        made = dict.fromkeys(aot.Compiled.__dataclass_fields__, 0)
        return aot.Compiled(**made | {"spill_bytes": 64 * (config.tiles["ROWS"] > 16), "loads": {128: 1}})

    monkeypatch.setattr(aot, "compile_spec", verdicts)
    out = tmp_path / "candidates.json"
    options = ["--compile-only", "--arch", "sm_90", "--ops", "gather", "--widths", "128", "--out", str(out)]
    assert autotune.main(options) == 0
    said = capsys.readouterr().out
    assert "spills 64 bytes a thread" in said and "does not compile" in said
    dropped = _compile_only.dropped_choices(str(out))
    assert ("gather", str(Config({"ROWS": 32, "BLOCK_D": 128}, 4, 1))) in dropped
    kept = [
        c for c in json.loads(out.read_text())["entries"]["gather float32 width<=128"] if not c["dropped"]
    ]
    assert [c["choice"]["num_warps"] for c in kept] == [4, 4]
    assert run_command(autotune.main, ["--compile-only", "--arch", "sm_70"]) == 2
    # Of gather's configurations the default does not spill at width 128, and does at width 8.
    options = ["--compile-only", "--defaults", "--arch", "sm_80,sm_90", "--ops", "gather", "--widths"]
    assert autotune.main([*options, "128"]) == 0
    assert "8 of 8 default configurations are fit" in capsys.readouterr().out
    assert autotune.main([*options, "8"]) == 1
    assert "sm_80 gather torch.float32 torch.int64 width 8: ROWS=256" in capsys.readouterr().out


def test_help_explains_itself(autotune, capsys):
    with pytest.raises(SystemExit) as ended:
        autotune.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--compile-only" in text and "python tools/autotune.py --store" in text
