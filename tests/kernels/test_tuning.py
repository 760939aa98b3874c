"""Looking up of tuned choices: order of tables, bad tables, and one table for all ranks."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from tests.dist.ranks import run_ranks
from tgnn import errors
from tgnn.kernels import tuning
from tgnn.kernels.tuning import Config, KernelSpec
from tgnn.parallel.comm import current

CPU = torch.device("cpu")
DEFAULT, OTHER = Config({"ROWS": 4}, 4, 1), Config({"ROWS": 8}, 8, 1)
SPEC = KernelSpec("made_up", "spmm", None, None, None, lambda width: (DEFAULT, OTHER))
KEY = "made_up float32 width<=128 degree<=32"


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """No tables but the test's own, which are read anew; every warning is told."""
    monkeypatch.setenv("TGNN_CACHE", str(tmp_path))
    monkeypatch.delenv(tuning.TABLE_VARIABLE, raising=False)
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(errors, "_warned", set())
    tuning.forget_tables()
    yield
    tuning.forget_tables()


def write(path, choice=OTHER, key=KEY, **header):
    path.parent.mkdir(parents=True, exist_ok=True)
    choice = choice.as_dict() if isinstance(choice, Config) else choice
    content = {"format": tuning.FORMAT, **tuning.machine(CPU), "entries": {key: {"choice": choice}}}
    path.write_text(json.dumps(content | header))
    tuning.forget_tables()


def found(width=100, degree=9.5):
    return tuning.lookup(SPEC, CPU, torch.float32, width, degree)


def test_without_tables_the_default_is_taken_in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found() == DEFAULT
    assert tuning.describe() == {}


def test_the_users_table_answers_for_its_classes_only():
    write(tuning.user_table(CPU))
    assert found() == found(width=65, degree=32) == OTHER
    assert found(width=64) == found(degree=8) == found(degree=33) == DEFAULT
    assert tuning.lookup(SPEC, CPU, torch.bfloat16, 100, 9.5) == DEFAULT


def test_a_shipped_table_comes_first_and_a_named_one_alone(monkeypatch, tmp_path):
    write(tuning.user_table(CPU), OTHER)
    write(tuning.SHIPPED / tuning.table_name(CPU), DEFAULT)
    assert found() == DEFAULT
    named = tmp_path / "named.json"
    monkeypatch.setenv(tuning.TABLE_VARIABLE, str(named))
    write(named, OTHER)
    assert found() == OTHER
    assert list(tuning.describe()) == [str(named)]


def test_a_table_is_read_once_per_process():
    write(tuning.user_table(CPU), OTHER)
    assert found() == OTHER
    before = tuning.describe()
    tuning.user_table(CPU).unlink()
    assert found() == OTHER and found(width=128) == OTHER
    assert tuning.describe() == before


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), "damaged"),
        (lambda path: path.write_bytes(b""), "damaged"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "damaged"),
        (lambda path: path.write_text("[]"), "format"),
        (lambda path: write(path, format=tuning.FORMAT + 1), "format"),
        (lambda path: write(path, entries={KEY: 3}), "damaged"),
        (lambda path: write(path, entries=[KEY]), "damaged"),
        (lambda path: write(path, device="Another GPU"), "another machine .device Another GPU where here is"),
        (lambda path: write(path, torch="1.0"), "another machine .torch 1.0"),
        (lambda path: write(path, triton="1.0"), "another machine .triton 1.0"),
        (lambda path: write(path, choice=Config({"ROWS": 5})), "no choice any more"),
        (lambda path: write(path, choice="nonsense"), "no choice any more"),
    ],
)
def test_a12_a_damaged_or_foreign_table_gives_one_warning_and_the_default(damage, why):
    path = tuning.user_table(CPU)
    write(path)
    damage(path)
    tuning.forget_tables()
    with pytest.warns(UserWarning, match=why) as warned:
        assert found() == found(width=128) == tuning.lookup(SPEC, CPU, torch.float32, 100, 9.4) == DEFAULT
    assert len(warned) == 1
    assert str(path) in str(warned[0].message)


def test_a_named_table_that_is_not_there_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv(tuning.TABLE_VARIABLE, str(tmp_path / "none.json"))
    with pytest.warns(UserWarning, match="names no file"):
        assert found() == DEFAULT


def test_strategies_are_looked_up_alike():
    choices = ("first", "second")
    assert tuning.strategy("bag_sum", CPU, torch.float32, 100, 9.5, choices) == "first"
    write(tuning.user_table(CPU), "second", "bag_sum float32 width<=128 degree<=32")
    assert tuning.strategy("bag_sum", CPU, torch.float32, 100, 9.5, choices) == "second"


def test_a_trial_forces_and_notes_what_is_asked():
    write(tuning.user_table(CPU), OTHER)
    with tuning.trial({}) as asked:
        assert found() == DEFAULT
    assert list(asked) == [KEY] and asked[KEY].candidates == (DEFAULT, OTHER)
    with tuning.trial({"made_up": DEFAULT}):
        assert found() == DEFAULT
    assert found() == OTHER


def test_classes_of_widths_and_degrees():
    assert [tuning.width_class(w) for w in (0, 1, 2, 3, 64, 65, 100)] == [1, 1, 2, 4, 64, 128, 128]
    assert [tuning.degree_class(d) for d in (0, 2, 2.1, 8, 32, 33)] == [2, 2, 8, 8, 32, None]


def report_table(choice: Config) -> list[list[int]]:
    """The table that every rank uses, as numbers, after it looked a choice up there."""
    (sha256,) = tuning.describe().values()
    assert tuning.lookup(SPEC, CPU, torch.float32, 100, 9.5).as_dict() == choice.as_dict()
    return current().all_gather_ints([int(sha256[:15], 16)])


def test_a12_two_ranks_report_the_same_table():
    write(tuning.user_table(CPU), OTHER)
    (sha256,) = tuning.describe().values()
    assert run_ranks(report_table, 2, OTHER) == [[int(sha256[:15], 16)]] * 2
