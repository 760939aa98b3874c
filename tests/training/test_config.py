"""The command line, the TOML file and config.json: what resolves to what; every refusal is one sentence."""

from __future__ import annotations

import builtins
import dataclasses
import json
import warnings
from pathlib import Path

import pytest

from tgnn import errors
from tgnn.errors import UserError, run_command
from tgnn.training import flags
from tgnn.training.config import TrainConfig
from tgnn.training.resolve import Resolved, as_toml, make_parser, read_run, resolve

FLAGS = """
--model --aggregator --hidden --heads --output-heads --dropout --attention-dropout --activation
--norm --residual --fanouts --sampler --replace --batch-size --epochs --optimizer --lr
--weight-decay --patience --eval-every --metric --ranks --parallel --device --backend --dtype
--partitioner --store --replicas --presample --feature-cache --halo-cache
--graph-placement --exchange-dtype --prefetch --seed --timeout --run-dir --checkpoint-every --progress
--inference-edges --num-vertices --feature-file --label-file --split-file --delimiter
--weight-column --relabel --add-inverse-edge --duplicates --add-reverse --self-loops --largest-component --split
--split-seed --feature-norm --config --resume --print-config --help
""".split()


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_warned", set())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory of `cora` with a GCN, as training leaves it."""
    folder = tmp_path / "run"
    folder.mkdir()
    record = resolve(["cora", "--model", "gcn", "--self-loops", "--seed", "3", "--ranks", "2"]).record()
    (folder / "config.json").write_text(json.dumps(record))
    (folder / "last.pt").write_bytes(b"")
    return folder


def refusal(*argv: str) -> str:
    """The one sentence with which a command line is refused."""
    with pytest.raises(UserError) as caught:
        resolve(list(argv))
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    assert ": got " in sentence and ", expected " in sentence and "; " in sentence
    return sentence


def test_flag_list_is_frozen() -> None:
    known = {
        flag for action in make_parser()._actions for flag in action.option_strings if flag.startswith("--")
    }
    assert {flag for flag in known if not flag.startswith("--no-")} == set(FLAGS)


def test_every_option_has_help_and_a_valid_default() -> None:
    for spec in flags.specs(TrainConfig).values():
        assert spec.help
    assert TrainConfig() == TrainConfig.from_dict({})
    assert not hasattr(TrainConfig(), "__dict__")
    with pytest.raises(TypeError):
        TrainConfig("gcn")


def test_help_names_choices_and_defaults(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        resolve(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--model {sage,gcn,gat,gatv2,gin,transformer}" in text
    assert "seeds per step over all ranks (default: 1024)" in text


def test_defaults() -> None:
    resolved = resolve([])
    assert resolved.data is None and resolved.source == "sbm"
    assert resolved.config == TrainConfig()
    assert resolved.given == frozenset()


@pytest.mark.parametrize(
    "argv, fanouts",
    [
        (["--fanouts", "-1,-1"], (-1, -1)),
        (["--fanouts=-1,-1"], (-1, -1)),
        (["--fanouts", "-1"], (-1,)),
        (["--fanouts", "all,5"], (-1, 5)),
        (["--fanouts", "10, 0"], (10, 0)),
        (["--fanouts", "-1,10", "--residual"], (-1, 10)),
    ],
)
@pytest.mark.parametrize("data_first", [True, False])
def test_fanouts_parse(argv: list[str], fanouts: tuple[int, ...], data_first: bool) -> None:
    resolved = resolve(["cora", *argv] if data_first else [*argv, "cora"])
    assert resolved.data == "cora"
    assert resolved.config.fanouts == fanouts


def test_switches_turn_on_and_off() -> None:
    assert resolve(["--residual"]).config.residual is True
    assert resolve(["--residual", "--no-residual"]).config.residual is False


def test_bare_flag_does_not_swallow_data() -> None:
    for argv in (["--self-loops", "cora"], ["cora", "--self-loops"], ["--self-loops", "add", "cora"]):
        resolved = resolve(argv)
        assert (resolved.data, resolved.data_options.self_loops) == ("cora", "add")
    assert resolve(["--self-loops", "remove", "cora"]).data_options.self_loops == "remove"


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--hidden", "0"], "--hidden: got 0, expected at least 1"),
        (["--hidden", "many"], "--hidden: got 'many', expected an integer"),
        (["--heads", "-2"], "--heads: got -2"),
        (["--output-heads", "0"], "--output-heads: got 0"),
        (["--dropout", "1"], "--dropout: got 1.0, expected a share in [0, 1)"),
        (["--dropout", "nan"], "--dropout: got nan"),
        (["--attention-dropout", "-0.1"], "--attention-dropout: got -0.1"),
        (["--fanouts", "-2,3"], "--fanouts: got -2,3"),
        (["--fanouts", "3,,4"], "--fanouts: got '3,,4'"),
        (["--fanouts", "few"], "--fanouts: got 'few'"),
        (["--batch-size", "0"], "--batch-size: got 0"),
        (["--epochs", "0"], "--epochs: got 0"),
        (["--lr", "0"], "--lr: got 0.0, expected a positive finite number"),
        (["--lr", "-1e-3"], "--lr: got -0.001"),
        (["--lr", "inf"], "--lr: got inf"),
        (["--weight-decay", "-1"], "--weight-decay: got -1.0"),
        (["--patience", "-1"], "--patience: got -1"),
        (["--eval-every", "0"], "--eval-every: got 0"),
        (["--ranks", "0"], "--ranks: got 0"),
        (["--prefetch", "-1"], "--prefetch: got -1"),
        (["--seed", "-1"], "--seed: got -1"),
        (["--timeout", "0"], "--timeout: got 0.0"),
        (["--checkpoint-every", "-1"], "--checkpoint-every: got -1"),
        (["--inference-edges", "0"], "--inference-edges: got 0"),
        (
            ["--model", "gcnn"],
            "--model: got 'gcnn', expected one of sage, gcn, gat, gatv2, gin, transformer; perhaps you meant gcn",
        ),
        (["--duplicates", "merged"], "perhaps you meant merge"),
        (["--norm", "batch", "--parallel", "data"], "--norm: got batch together with --parallel data"),
        (
            ["--hiden", "3"],
            "--hiden: got an unknown flag, expected a flag that --help lists; perhaps you meant --hidden",
        ),
        (["--fanouts"], "--fanouts: got no value"),
        (["--resid"], "--resid: got an unknown flag"),
        (["--residual=3"], "--residual: got the value '3'"),
        (["cora", "citeseer"], "got the extra argument 'citeseer'"),
        (["--resume"], "--resume: got no run"),
        (["--config", "absent.toml"], "--config: got absent.toml"),
    ],
)
def test_bad_command_lines_are_one_sentence(argv: list[str], words: str) -> None:
    assert words in refusal(*argv)


def test_a_bad_command_line_ends_with_status_2(capsys: pytest.CaptureFixture) -> None:
    assert run_command(lambda argv: resolve(argv) and 0, ["--hiden", "3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1 and captured.err.startswith("error: --hiden")


@pytest.mark.parametrize(
    "field, value",
    [("hidden", "64"), ("hidden", 64.0), ("hidden", True), ("lr", "0.1"), ("fanouts", (1, 2.0)),
     ("fanouts", ()),      ("residual", 1), ("model", None), ("seed", 2**63)],
)  # fmt: skip
def test_python_values_are_checked_too(field: str, value: object) -> None:
    with pytest.raises(UserError, match=r"^--[a-z]+: got [^\n]*\.$"):
        TrainConfig(**{field: value})


def test_python_values_are_normalised() -> None:
    config = TrainConfig(fanouts=[5, "all"], lr=1, ranks=None)
    assert config.fanouts == (5, -1)
    assert isinstance(config.lr, float)


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[data]\nsource = "cora"\nself_loops = "add"\n'
        '[train]\nmodel = "gcn"\nbatch-size = 140\nlr = 1\nfanouts = ["all", 5]\n'
    )
    resolved = resolve(["--config", str(file), "--lr", "0.5"])
    assert resolved.data == "cora"
    assert resolved.data_options.self_loops == "add"
    assert (resolved.config.model, resolved.config.batch_size) == ("gcn", 140)
    assert (resolved.config.lr, resolved.config.fanouts) == (0.5, (-1, 5))
    assert resolved.given == {"model", "batch_size", "lr", "fanouts", "self_loops"}
    assert resolve(["pubmed", "--config", str(file)]).data == "pubmed"


@pytest.mark.parametrize(
    "text, words",
    [
        ("[train]\nhiden = 3", "hiden in [train] of {file}: got an unknown key"),
        ("[train]\nhiden = 3", "perhaps you meant hidden"),
        ("[train]\nhidden = 'wide'", "hidden in [train] of {file}: got 'wide', expected an integer"),
        ("[train]\nresidual = 1", "residual in [train] of {file}: got 1, expected true or false"),
        ("[train]\nfanouts = [1.5]", "fanouts in [train] of {file}: got (1.5,)"),
        ("[train]\nmodel = 'gnc'", "expected one of sage"),
        ("[train]\nbatch_size = 1\nbatch-size = 2", "the same key twice"),
        ("[train]\nresume = true", "resume in [train] of {file}: got an unknown key"),
        ("[train]\nepochs = 0", "--epochs: got 0"),
        ("[data]\nself_loop = 'add'", "perhaps you meant self_loops"),
        ("[data]\nsource = 3", "source in [data] of {file}: got 3"),
        ("[trian]\nepochs = 1", "trian in {file}"),
        ("train = 3", "train in {file}: got 3, expected a table [train]"),
        ("epochs = 3", "epochs in {file}"),
        ("[train\n", "expected a file in TOML syntax"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert words.format(file=file) in refusal("--config", str(file))


def test_a_python_without_toml_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_toml(name: str, *args: object, **kwargs: object) -> object:
        if name in ("tomllib", "tomli"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_toml)
    sentence = refusal("--config", "run.toml")
    assert "Python 3.11" in sentence and "pip install tgnn[toml]" in sentence


def test_printed_config_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    argv = ['we"ird', "--model", "gat", "--fanouts", "all,3", "--lr", "1e-5", "--split", "random:2,3"]
    with pytest.raises(SystemExit) as caught:
        resolve([*argv, "--print-config"])
    assert caught.value.code == 0
    file = tmp_path / "printed.toml"
    file.write_text(capsys.readouterr().out)
    before, after = resolve(argv), resolve(["--config", str(file)])
    assert after[:3] == before[:3]
    assert as_toml(after) == as_toml(before)


def test_record_round_trips_through_json(run: Path) -> None:
    resolved = read_run(run)
    assert resolved.data == "cora"
    assert resolved.config == TrainConfig(model="gcn", seed=3, ranks=2)
    assert resolved.data_options.self_loops == "add"
    assert json.loads(json.dumps(resolved.record())) == json.loads((run / "config.json").read_text())
    assert TrainConfig.from_dict(resolved.config.as_dict()) == resolved.config
    with pytest.raises(UserError, match="hiden in config.json: got an unknown key"):
        TrainConfig.from_dict({"hiden": 3})


def test_resume_takes_everything_from_the_run(run: Path) -> None:
    for argv in (
        ["--resume", str(run)],
        ["--resume", "--run-dir", str(run)],
        ["--run-dir", str(run), "--resume"],
    ):
        resolved = resolve(argv)
        assert resolved.config == TrainConfig(model="gcn", seed=3, ranks=2, run_dir=str(run), resume=True)
        assert (resolved.data, resolved.data_options.self_loops) == ("cora", "add")


def test_resume_may_change_how_but_not_what_is_trained(run: Path) -> None:
    resolved = resolve(["--resume", str(run), "--ranks", "3", "--epochs", "9", "--seed", "3", "--self-loops"])
    assert (resolved.config.ranks, resolved.config.epochs) == (3, 9)
    changes = {
        "--model": "sage", "--hidden": "8", "--fanouts": "5,5", "--seed": "4", "--batch-size": "7",
        "--lr": "0.1", "--dropout": "0.1", "--optimizer": "sgd", "--dtype": "float64", "--metric": "f1",
        "--weight-decay": "0", "--self-loops": "keep", "--split": "random:1,1",
    }  # fmt: skip
    for flag, value in changes.items():
        assert refusal("--resume", str(run), flag, value).startswith(f"{flag}: got ")
    unchanged = {field.name for field in dataclasses.fields(TrainConfig) if field.metadata.get("resumable")}
    assert unchanged == {
        "epochs", "patience", "eval_every", "ranks", "parallel", "device", "backend", "partitioner", "store",
        "prefetch", "timeout", "run_dir", "checkpoint_every", "progress", "inference_edges", "replicas", "presample",
        "feature_cache", "halo_cache", "graph_placement",
    }  # fmt: skip


def test_resume_value_is_data_where_run_dir_names_the_run(run: Path) -> None:
    resolved = resolve(["--run-dir", str(run), "--resume", "copy-of-cora"])
    assert (resolved.data, resolved.config.run_dir) == ("copy-of-cora", str(run))
    resolved = resolve(["--resume", str(run), "copy-of-cora"])
    assert (resolved.data, resolved.config.run_dir) == ("copy-of-cora", str(run))


def test_resuming_from_a_store_leaves_its_options_to_it(run: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "store.json").write_text("{}")
    assert resolve(["--resume", str(run), str(store)]).data_options.given() == []


def test_runs_that_cannot_be_resumed(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((run / "config.json").read_text())
    assert "one run directory" in refusal("--resume", str(run), "--run-dir", str(other))
    assert f"{other} without last.pt" in refusal("--resume", str(other))
    assert "no readable config.json" in refusal("--resume", str(tmp_path / "absent"))
    (other / "config.json").write_text('{"format": 1, "train": {"hid')
    assert "a damaged file" in refusal("--resume", str(other))
    (other / "config.json").write_text('{"format": 99}')
    assert "got format 99" in refusal("--resume", str(other))
    (other / "config.json").write_text('{"format": 1, "train": {"depth": 3}}')
    assert "depth in" in refusal("--resume", str(other))


def test_options_without_effect_warn_once_and_only_when_given() -> None:
    argv = ["--model", "gcn", "--heads", "2", "--attention-dropout", "0.1", "--aggregator", "max"]
    with pytest.warns(UserWarning) as caught:
        resolve(argv)
    assert sorted(str(w.message).split()[0] for w in caught) == [
        "--aggregator",
        "--attention-dropout",
        "--heads",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(argv)
        resolve(["--model", "gat", "--heads", "2"])
        resolve(["--model", "gcn"])
    for argv in (["--fanouts", "-1", "--replace"], ["--fanouts", "5", "--hidden", "8"]):
        with pytest.warns(UserWarning, match="has no effect"):
            resolve(argv)


def test_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)

    def ranks(resolved: Resolved) -> int:
        return resolved.num_ranks()

    assert ranks(resolve(["--device", "cpu"])) == 2
    assert ranks(resolve(["cora", "--device", "cpu"])) == 1
    assert ranks(resolve(["cora", "--ranks", "3"])) == 3
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert ranks(resolve([])) == ranks(resolve(["cora"])) == 4
    assert ranks(resolve(["cora", "--device", "cpu"])) == 1
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "5"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "localhost"),
    ):
        monkeypatch.setenv(name, value)
    assert ranks(resolve(["cora"])) == ranks(resolve(["cora", "--ranks", "5"])) == 5
    with pytest.raises(UserError, match="--ranks: got 3, expected 5, the number torchrun started"):
        ranks(resolve(["cora", "--ranks", "3"]))
