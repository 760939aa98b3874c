"""`python -m tgnn.export RUN --to dgl|pyg --out DIR [--verify]`: a trained run as a folder for DGL or PyG.

`--to dgl-graph` and `--to dgl-partition` write the data of a run, or a store, as DGL files: `dgl_files.py`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tgnn.export.verify as verification
from tgnn.errors import ReportedError, run_command, wrong
from tgnn.export.dgl_files import FORMATS, IDS, export_files
from tgnn.export.folder import Origin, check_free, new_folder, write_folder
from tgnn.export.frameworks import FRAMEWORKS
from tgnn.nn.model import GNN
from tgnn.partition.store import Store
from tgnn.training.checkpoint import CheckpointState, dataset_fingerprint
from tgnn.training.config import BEST_FILE, LAST_FILE
from tgnn.training.flags import Parser
from tgnn.training.metrics import RunLog, provenance, write_json
from tgnn.training.prepare import is_store, prepare_for_ranks
from tgnn.training.resolve import Resolved, read_run
from tgnn.training.trainer import build_model, check_trainable


def make_parser() -> Parser:
    """The parser of `python -m tgnn.export`."""
    parser = Parser(
        prog="python -m tgnn.export",
        description="Write a trained run as a folder that needs only torch and DGL, or torch and PyG; or its "
        "data as DGL's files.",
    )
    run = "directory of a run that python -m tgnn.train has written; for DGL's files also a store"
    parser.add_argument("run", metavar="RUN", help=run)
    to = "the framework it is for, or dgl-graph, dgl-partition: the data as DGL's files"
    parser.add_argument("--to", choices=(*FRAMEWORKS, *FORMATS), required=True, help=to)
    out = "a new or empty directory; for dgl-graph a new file"
    parser.add_argument("--out", metavar="DIR", required=True, help=out)
    ids = "vertex ids of DGL's files (default: original in a graph, the store's new ones in a partition)"
    parser.add_argument("--ids", choices=IDS, help=ids)
    compare = "run the folder in a process of its own on the whole graph and compare"
    parser.add_argument("--verify", action="store_true", help=compare)
    with_it = "--verify with this Python, of an environment that has the framework"
    parser.add_argument("--python", metavar="FILE", help=with_it)
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best", help="which weights (best)")
    data = "another place of the run's dataset, or a store of it; a name is fetched into $TGNN_DATA, from "
    data += "$TGNN_DATA_URL where that is set"
    parser.add_argument("--data", metavar="DATA", help=data)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Export as the command line says; returns the exit status."""
    args = make_parser().parse_args(argv)
    if args.to in FORMATS:
        return export_files(args)
    if args.ids is not None:
        raise wrong("--ids", f"it beside --to {args.to}", f"--to {' or '.join(FORMATS)}", "leave --ids out")
    framework, out, run = FRAMEWORKS[args.to], Path(args.out), Path(args.run)
    if args.python is not None and not args.verify:
        raise wrong("--python", args.python, "it beside --verify only", "add --verify, or leave it out")
    python = args.python or sys.executable
    check_free(out)
    resolved = read_run(run)
    checkpoint = run / (BEST_FILE if args.checkpoint == "best" else LAST_FILE)
    state = CheckpointState.load(checkpoint)
    model = trained_model(resolved, state, checkpoint)
    versions = verification.probe(framework, python) if args.verify else {}
    if args.data is not None:
        resolved = resolved._replace(data=args.data)
        resolved.config.store = None
        resolved.config.ranks = None if is_store(args.data) else resolved.config.ranks
    store = prepare_for_ranks(resolved, resolved.num_ranks(), check=check_trainable)
    state.check_dataset(dataset_fingerprint(store))
    with new_folder(out) as folder:
        config = write_folder(
            folder, framework, model, origin_of(resolved, state, store, run, args.checkpoint)
        )
        if args.verify:
            verdict = verification.verify(
                framework, folder, resolved, store, checkpoint, versions=versions, python=python
            )
            print(describe(verdict))
            if not verdict.good:
                raise ReportedError(
                    "the exported model gives other outputs than the trained one; nothing was written"
                )
            write_json(folder / "config.json", {**config, "verified": verdict.as_dict()})
    print(f"exported     {out}  ({config['model']['kind']} for {framework.title} {framework.versions})")
    return 0


def trained_model(resolved: Resolved, state: CheckpointState, checkpoint: Path) -> GNN:
    """The checkpoint's model, ready to score; UserError where the two do not fit each other."""
    what = f"checkpoint {checkpoint}"
    try:
        sizes = types.SimpleNamespace(
            **{name: state.dataset[name] for name in ("num_features", "num_classes")}
        )
        model = build_model(resolved.config, sizes)
        model.load_state_dict(state.model)
    except KeyError as error:
        raise wrong(
            what, f"no {error.args[0]} in it", "the sizes of its dataset", "use a newer checkpoint"
        ) from None
    except (RuntimeError, TypeError):
        do = "use the checkpoint and config.json of one run"
        raise wrong(
            what, "weights of another model", f"those of the {resolved.config.model} in config.json", do
        ) from None
    return model.eval()


def origin_of(resolved: Resolved, state: CheckpointState, store: Store, run: Path, checkpoint: str) -> Origin:
    """What the export says of where the model comes from."""
    epoch = state.epoch - 1
    log = RunLog(run)
    line = next((line for line in log.lines() if line["epoch"] == epoch and state.step == 0), {})
    figures = {name: line.get(name) for name in ("metric", "train_acc", "val_acc", "test_acc", "val_loss")}
    training: dict[str, Any] = {
        "run": run.resolve().name, "checkpoint": checkpoint, "epoch": epoch, "step": state.step, **figures,
        "ranks": line.get("ranks"), "options": resolved.config.as_dict(),
    }  # fmt: skip
    made_with = provenance()
    versions = {**made_with["versions"], "commit": made_with["commit"]}
    return Origin(
        kind=resolved.config.model,
        dataset=dataset_fingerprint(store),
        options=store.meta["options"]["dataset"],
        weighted=store.has_edge_weight,
        training=training,
        versions=versions,
    )


def describe(verdict: verification.Verdict) -> str:
    """The line that says what --verify found."""
    word = "verified    " if verdict.good else "not equal   "
    share = verdict.largest_difference / verdict.largest_output if verdict.largest_output else 0.0
    versions = ", ".join(f"{name} {version}" for name, version in verdict.versions.items())
    return (
        f"{word} largest difference {verdict.largest_difference:.3g}, {share:.2g} of the largest output "
        f"(allowed {verdict.allowed:g}); {versions}"
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
