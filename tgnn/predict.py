"""`python -m tgnn.predict RUN [--out scores.npy]`: exact predictions of a trained run for every vertex."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tgnn.data.graph import Dataset
from tgnn.errors import run_command, wrong
from tgnn.parallel.comm import check_device, current
from tgnn.parallel.launch import launch
from tgnn.partition.store import Store
from tgnn.training.checkpoint import CheckpointState, atomic_file, dataset_fingerprint
from tgnn.training.config import BEST_FILE, LAST_FILE
from tgnn.training.flags import Parser
from tgnn.training.inference import LayerwiseInference, gather_by_original_id, predict
from tgnn.training.loss import check_metric, evaluate
from tgnn.training.prepare import is_store, prepare_for_ranks
from tgnn.training.resolve import Resolved, read_run
from tgnn.training.trainer import DTYPES, build_model, check_trainable, writing


def make_parser() -> Parser:
    """The parser of `python -m tgnn.predict`."""
    parser = Parser(
        prog="python -m tgnn.predict",
        description="Score every vertex with a trained run, layer by layer over all in-edges, in original id "
        "order.",
    )
    parser.add_argument("run", metavar="RUN", help="directory of a run that python -m tgnn.train has written")
    parser.add_argument("--data", metavar="DATA", help="another place of the run's dataset, or a store of it")
    out = (
        "write the scores (logits), [vertices, classes] float; where the source's ids have gaps (--relabel), "
        "those go beside it as FILE.names.npy"
    )
    parser.add_argument("--out", metavar="FILE.npy", help=out)
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best", help="which weights (best)")
    parser.add_argument("--ranks", type=int, help="ranks on this machine (default: as in training)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (auto)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Predict as the command line says; returns the exit status."""
    args = make_parser().parse_args(argv)
    resolved = read_run(args.run)
    checkpoint = Path(args.run) / (BEST_FILE if args.checkpoint == "best" else LAST_FILE)
    state = CheckpointState.load(checkpoint)
    resolved = _elsewhere(resolved, args.data, args.ranks)
    if args.out is not None and (Path(args.out).is_dir() or not Path(args.out).resolve().parent.is_dir()):
        raise wrong("--out", args.out, "a file in an existing directory", "give a file's name there")
    ranks = resolved.num_ranks()
    check_device(args.device, ranks)
    store = prepare_for_ranks(resolved, ranks, check=functools.partial(_check_scorable, state))
    # One group of ranks: another one would compute the same.
    how = {"ranks": store.num_parts, "device": args.device, "timeout": resolved.config.timeout}
    figures = launch(predict_rank, resolved, store, checkpoint, args.out, **how)
    if figures is not None:
        print(
            f"{figures.pop('metric'):<12} " + "  ".join(f"{name} {value}" for name, value in figures.items())
        )
        if args.out is not None:
            print(f"scores       {args.out}")
            _write_names(store, Path(args.out))
    return 0


def _elsewhere(resolved: Resolved, data: str | None, ranks: int | None) -> Resolved:
    """The run on other data or ranks than it was trained with: its store may not fit these."""
    config, given = resolved.config, resolved.given
    if data is not None:
        resolved = resolved._replace(data=data)
        config.store = None
        config.ranks = None if is_store(data) else config.ranks
    if ranks is not None:
        if ranks < 1:
            raise wrong("--ranks", ranks, "at least 1", "give a positive number")
        config.store = config.store if ranks == config.ranks else None
        config.ranks, given = ranks, given | {"ranks"}
    return resolved._replace(given=given)


def _check_scorable(state: CheckpointState, data: Store | Dataset) -> None:
    """Refuse data that the trained model does not fit, before any work."""
    check_trainable(data)
    state.check_dataset(dataset_fingerprint(data))


def predict_rank(
    resolved: Resolved, store: Store, checkpoint: Path, out: str | None
) -> dict[str, str] | None:
    """Predict as one of the current ranks; rank 0 writes `out` and returns the figures per split.
    Collective.
    """
    comm, config = current(), resolved.config
    model = build_model(config, store)
    model.load_state_dict(CheckpointState.load(checkpoint).model)
    inference = LayerwiseInference(store, chunk_edges=config.inference_edges, dtype=DTYPES[config.dtype])
    logits = inference(model.to(comm.device))
    metric = check_metric(config.metric, store.task, store.num_classes)
    labels, figures = torch.from_numpy(inference.part.labels).to(comm.device), {"metric": metric}
    for split in ("train", "val", "test"):
        rows = torch.from_numpy(getattr(inference.part, split)).to(comm.device)
        value, _ = evaluate(logits[rows], labels[rows], metric, comm)
        figures[split] = "-" if value is None else f"{value:.4f}"
    scores = gather_by_original_id(logits, store, comm) if out is not None else None
    if comm.rank != 0:
        return None
    if scores is not None:
        with writing(Path(out).parent), atomic_file(Path(out)) as file:
            np.save(file, scores.numpy(), allow_pickle=False)
    return figures


def _write_names(store: Store, out: Path) -> None:
    """Write what the source calls the vertices of the rows of `out`, where that is not 0 .. N - 1."""
    names = store.original_names()
    if names is None:
        return
    file = out.with_suffix(".names.npy")
    with writing(file.parent), atomic_file(file) as opened:
        np.save(opened, names, allow_pickle=False)
    print(f"names        {file}")


class _CallableModule(types.ModuleType):
    """Importing this module makes it the package's attribute `predict`, where the function of that name
    stands too.
    """

    __call__ = staticmethod(predict)


sys.modules[__name__].__class__ = _CallableModule


if __name__ == "__main__":
    sys.exit(run_command(main))
