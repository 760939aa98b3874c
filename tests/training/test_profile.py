"""Hardware profiles: the built-in table is whole, a file is read back as written, anything else is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tgnn.errors import UserError
from tgnn.training.profile import NAMES, Profile, built_in, load_profile


def test_every_built_in_number_has_its_source():
    assert built_in() == ("v100-nvlink", "a100-nvlink", "h100-nvlink", "h200-nvlink", "pcie-only", "cpu")
    for name in built_in():
        profile = load_profile(name)
        assert profile.name == name and profile.memory_bytes > 0
        for rates in (profile.alone, profile.crowded):
            assert min(dataclasses.astuple(rates)) > 0
        assert set(profile.sources) == set(NAMES)
        assert all(len(source) > 10 for source in profile.sources.values())


def test_newer_gpus_are_not_slower():
    ordered = [
        load_profile(name).crowded for name in ("v100-nvlink", "a100-nvlink", "h100-nvlink", "h200-nvlink")
    ]
    for older, newer in zip(ordered, ordered[1:], strict=False):
        for name in ("copy", "matmul_float32", "gather_host", "sample_edges", "all_to_all"):
            assert getattr(newer, name) >= getattr(older, name), name


def test_a_file_is_read_back_as_written(tmp_path: Path):
    profile = dataclasses.replace(load_profile("cpu"), name="mine", provenance={"commit": "abc"})
    path = tmp_path / "mine.json"
    profile.save(path)
    assert load_profile(str(path)) == profile
    record = json.loads(path.read_text())
    assert record["alone"]["copy"] == {"value": profile.alone.copy, "source": profile.sources["copy"]}
    assert [p.name for p in tmp_path.iterdir()] == ["mine.json"]


def test_crowded_ranks_share_a_cpu_and_nothing_on_gpus():
    cpu, gpu = load_profile("cpu"), load_profile("h200-nvlink")
    assert cpu.rates(1) is cpu.alone and cpu.rates(2) == cpu.crowded
    assert cpu.rates(4).copy == cpu.crowded.copy / 2
    assert cpu.rates(4).all_to_all_s == cpu.crowded.all_to_all_s * 2
    assert gpu.rates(8) == gpu.rates(2)
    assert cpu.memory_of_rank(4) == cpu.memory_bytes / 4 and gpu.memory_of_rank(4) == gpu.memory_bytes


def written(tmp_path: Path, change: Any) -> str:
    """The path of a profile's file with one thing changed."""
    profile: Profile = load_profile("cpu")
    record = profile.as_dict()
    change(record)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(record))
    return str(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.update(kind="a recipe"), "a file of another kind"),
        (lambda r: r.update(format=99), "format 99"),
        (lambda r: r["alone"].pop("copy"), "copy"),
        (lambda r: r["alone"].update(speed={"value": 1, "source": "x"}), "speed"),
        (lambda r: r["crowded"]["gather"].update(value=0), "gather 0"),
        (lambda r: r["crowded"]["gather"].update(value="fast"), "'fast'"),
        (lambda r: r["alone"]["copy"].pop("source"), "source"),
        (lambda r: r.update(device="tpu"), "'tpu'"),
        (lambda r: r.update(memory_bytes=-1), "memory_bytes"),
        (lambda r: r.pop("crowded"), "crowded"),
    ],
)
def test_a_damaged_profile_is_refused(change: Any, said: str, tmp_path: Path):
    with pytest.raises(UserError, match="--profile") as refused:
        load_profile(written(tmp_path, change))
    assert said in str(refused.value)


def test_what_is_no_profile_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="perhaps you meant h200-nvlink"):
        load_profile("h200-nvlin")
    (tmp_path / "x.json").write_text("{ not JSON")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for name in ("x.json", "list.json", "binary.json"):
        with pytest.raises(UserError, match="--profile"):
            load_profile(str(tmp_path / name))


def test_a_place_that_takes_no_file_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out"):
        load_profile("cpu").save(tmp_path / "file" / "profile.json")
