"""The training loop of one rank: sample, forward, backward, sum the gradients, step; evaluate; checkpoint."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from tgnn.data.graph import Dataset
from tgnn.errors import UserError, wrong
from tgnn.kernels.backend import all_ran, set_backend, use_backend
from tgnn.nn.model import GNN
from tgnn.nn.precision import mixed_precision
from tgnn.parallel.comm import current
from tgnn.parallel.exchange import all_reduce_gradients
from tgnn.partition.store import Store
from tgnn.sampling.loader import Loader
from tgnn.sampling.minibatch import MiniBatch
from tgnn.sampling.samplers import check_sampler
from tgnn.training.checkpoint import CheckpointState, dataset_fingerprint
from tgnn.training.config import BEST_FILE, LAST_FILE, TrainConfig, size_in_bytes
from tgnn.training.inference import LayerwiseInference
from tgnn.training.loss import check_metric, evaluate, loss_sum, mean_loss
from tgnn.training.metrics import (
    RunLog,
    StageClock,
    WorkCounters,
    best_figures,
    epoch_line,
    memory,
    provenance,
    summarise,
)
from tgnn.training.resolve import Resolved

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
# Least seconds between progress lines where there is no terminal for a bar: after epochs, inside long ones.
LINE_SECONDS, STEP_LINE_SECONDS = 2.0, 30.0


def train_rank(resolved: Resolved, store: Store, run_dir: Path | None) -> dict[str, Any] | None:
    """Train as one of the current ranks; returns the run's summary on rank 0, None on the others. Collective.

    `run_dir` holds the run's files, written by rank 0; None writes none (and such a run cannot resume).
    """
    return Trainer(resolved, store, run_dir).fit()


def build_model(config: TrainConfig, store: Store) -> GNN:
    """The model of a run, its weights drawn from the run's seed: the same on every rank."""
    torch.manual_seed(config.seed)
    model = GNN.build(
        config.model, store.num_features, config.hidden, store.num_classes, len(config.fanouts),
        heads=config.heads, output_heads=config.output_heads, aggregator=config.aggregator,
        dropout=config.dropout, attention_dropout=config.attention_dropout, activation=config.activation,
        norm=config.norm, residual=config.residual,
    )  # fmt: skip
    return model.double() if config.dtype == "float64" else model


def exchange_dtype(config: TrainConfig) -> torch.dtype | None:
    """The number format of rows on the wire: None where the rows' own is as narrow or asked for."""
    return torch.bfloat16 if config.exchange_dtype == "bfloat16" else None


def build_optimizer(config: TrainConfig, model: GNN) -> torch.optim.Optimizer:
    """The optimizer of a run; Adam and AdamW in their fused form."""
    parameters, rate, decay = model.parameters(), config.lr, config.weight_decay
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate, weight_decay=decay)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=rate, weight_decay=decay, fused=True)


class Trainer:
    """One rank's run. Its state between steps is a `CheckpointState`, so stopping and resuming change
    nothing.
    """

    def __init__(self, resolved: Resolved, store: Store, run_dir: Path | None) -> None:
        config = self.config = resolved.config
        self.comm, self.store, self.record = current(), store, resolved.record()
        self.metric = check_run(store, config)
        set_backend(config.backend)
        self.dtype, self.clock = DTYPES[config.dtype], StageClock()
        self.model = build_model(config, store).to(self.comm.device)
        self.loader = Loader(
            store, config.fanouts, config.batch_size, parallel=config.parallel, sampler=config.sampler,
            replicas=config.replicas, replace=config.replace, seed=config.seed, prefetch=config.prefetch,
            feature_cache=size_in_bytes(config.feature_cache), halo_cache=size_in_bytes(config.halo_cache),
            dtype=self.dtype, exchange_dtype=exchange_dtype(config), graph_placement=config.graph_placement,
            stage=self.clock.stage, in_place=self.model.reads_in_place,
        )  # fmt: skip
        # Every group of ranks holds the whole graph, and evaluates it alike.
        self.group = self.loader.group
        how = {"chunk_edges": config.inference_edges, "dtype": self.dtype}
        self.inference = LayerwiseInference(store, self.group, **how)
        self.optimizer = build_optimizer(config, self.model)
        self.run_dir = run_dir
        self.log = RunLog(run_dir) if run_dir is not None and self.comm.rank == 0 else None
        self.state = self._resume() if config.resume else CheckpointState(model={}, optimizer={}, epoch=1)
        self.lines = self.log.lines() if self.log is not None else []
        self.stop_signal: int | None = None
        self._has_stepped = False
        self._said_at = time.monotonic()

    def fit(self) -> dict[str, Any] | None:
        """Run the epochs that are left; returns the summary on rank 0. Collective."""
        state, config, steps, stopped = self.state, self.config, len(self.loader), None
        done, total = (state.epoch - 1) * steps + state.step, config.epochs * steps
        self.clock.start()
        with _stop_signals(self), _progress(config.progress, done, total, self.comm.rank) as bar:
            while stopped is None and state.epoch <= config.epochs:
                if config.patience and state.stale >= config.patience:
                    why = f"no better validation metric for {config.patience} epochs"
                    stopped = {"why": why, "signal": None}
                elif not self._epoch(bar):
                    name = signal.Signals(self.stop_signal or signal.SIGTERM)
                    stopped = {"why": f"{name.name} in epoch {state.epoch}", "signal": int(name)}
        placement = self._placement()
        if self.comm.rank != 0:
            return None
        if not self.lines:  # a signal came before the first epoch's end
            return {"stopped": stopped}
        summary = summarise(
            self.lines, state.best_epoch, state.best_figures, stopped=stopped, kernels=all_ran(),
            config=self.record, provenance=provenance(self.comm.device), placement=placement,
        )  # fmt: skip
        if self.log is not None:
            with writing(self.run_dir):
                self.log.write_summary(summary)
        return summary

    def _placement(self) -> dict[str, Any]:
        """Where the data lie and the bytes they take there on the rank that has most of each. Collective."""
        mine = self.loader.placement()
        sizes = [name for name in mine if name.endswith("_bytes")]
        every = self.comm.all_gather_ints([mine[name] for name in sizes])
        return {**mine, **{name: max(row[place] for row in every) for place, name in enumerate(sizes)}}

    def _epoch(self, bar: tqdm) -> bool:
        """One epoch, or what is left of it; False where a signal stopped it (after a checkpoint)."""
        state, every = self.state, self.config.checkpoint_every
        work, earlier = WorkCounters(), state.work
        self.model.train()
        for batch in self.loader.iterate(state.epoch - 1, state.step):
            loss, stop = self._step(batch)
            if not self._has_stepped:
                self._has_stepped = True
                self.loader.fill_device()
            state.step += 1
            state.loss_sum += loss
            state.seeds += batch.global_seeds
            for name, count in batch.work.items():
                setattr(work, name, getattr(work, name) + count)
            bar.update()
            so_far = {"loss": state.loss_sum / state.seeds}
            self._say(bar, f"step {state.step}/{len(self.loader)}", so_far, STEP_LINE_SECONDS)
            if stop or (every and state.step % every == 0 and state.step < len(self.loader)):
                with self.clock.stage("update"):
                    self._checkpoint(work, earlier)
            if stop:
                return False
        self._finish_epoch(work, earlier, bar)
        return True

    def _step(self, batch: MiniBatch) -> tuple[float, bool]:
        """One optimizer step; returns (sum of the batch's losses over all ranks, whether any rank is to
        stop).
        """
        clock, sent = self.clock, self.group.bytes_sent
        with clock.stage("forward"), mixed_precision(self.dtype, self.comm.device):
            total = loss_sum(self.model(batch), batch.y, self.store.task)
        with clock.stage("backward"):
            self.optimizer.zero_grad(set_to_none=True)
            (total / batch.global_seeds).backward()
        with clock.stage("update"):
            # The stop flag travels with the gradients: all ranks stop after the same step.
            extra = torch.stack(
                [total.detach().double(), total.new_tensor(self.stop_signal is not None).double()]
            )
            loss, stop = all_reduce_gradients(self.model, extra=extra).tolist()
            if not math.isfinite(loss):
                raise self._diverged("the loss", loss)
            self.optimizer.step()
        batch.work["exchange_bytes"] += self.group.bytes_sent - sent
        return loss, stop > 0

    def _diverged(self, what: str, got: object) -> UserError:
        """Every rank raises it after the same step, before anything of that state is saved."""
        where, rate = f"{what} in epoch {self.state.epoch}, step {self.state.step + 1}", self.config.lr
        do = f"train with a smaller --lr than {rate:g}, or with smaller features (--feature-norm column)"
        return wrong(where, got, "finite numbers", do)

    def _finish_epoch(self, work: WorkCounters, earlier: Mapping[str, list[int]], bar: tqdm) -> None:
        state, config, epoch = self.state, self.config, self.state.epoch
        loss = state.loss_sum / max(state.seeds, 1)
        self._check_weights()
        figures: dict[str, float | None] = dict.fromkeys(("train_acc", "val_acc", "test_acc", "val_loss"))
        better = False
        with self.clock.stage("eval"):
            if epoch % config.eval_every == 0 or epoch == config.epochs:
                figures = self._evaluate()
                better = self._is_better(figures)
                # Only an evaluation says how stale the best is: patience never ends a run between two.
                state.stale = 0 if better else epoch - (state.best_epoch or 0)
            counts, used = work.sum_over_ranks(self.comm, earlier), memory(self.comm.device, self.comm)
        if better:
            state.best_epoch, state.best_metric, state.best_loss = (
                epoch,
                figures["val_acc"],
                figures["val_loss"],
            )
        line = epoch_line(
            epoch=epoch, loss=loss, metric=self.metric, ranks=self.comm.ranks, parallel=config.parallel,
            seconds=self.clock.seconds(), work=counts, memory=used, **figures,
        )  # fmt: skip
        if better:
            state.best_figures = best_figures(line)
        self.clock.start()
        self.lines.append(line)
        state.epoch, state.step, state.loss_sum, state.seeds, state.work = epoch + 1, 0, 0.0, 0, {}
        # The line before the checkpoint: whatever comes between, resuming writes the line again and loses
        # none. So the time of this checkpoint counts in the next epoch.
        with self.clock.stage("eval"), writing(self.run_dir):
            if self.log is not None:
                self.log.append(line)
            self._save(*([BEST_FILE] if better else []), LAST_FILE)
        shown = {"loss": loss, "val_acc": figures["val_acc"], "test_acc": figures["test_acc"]}
        self._say(bar, "", shown, LINE_SECONDS)

    def _say(self, bar: tqdm, step: str, figures: Mapping[str, float | None], every: float) -> None:
        """Progress: on the bar after an epoch; or where `auto` shows none as a line, `every` few seconds at
        most.
        """
        epoch = f"epoch {self.state.epoch if step else self.state.epoch - 1}/{self.config.epochs}"
        shown = {name: f"{value:.4f}" for name, value in figures.items() if value is not None}
        if not step:
            bar.set_description(epoch, refresh=False)
            bar.set_postfix(shown)
        quiet = self.comm.rank != 0 or self.config.progress != "auto" or not bar.disable
        if not quiet and time.monotonic() - self._said_at > every:
            self._said_at = time.monotonic()
            words = [epoch, *([step] if step else []), *(f"{name} {value}" for name, value in shown.items())]
            print("  ".join(words), file=sys.stderr, flush=True)

    def _evaluate(self) -> dict[str, float | None]:
        """Metric on every split and the validation loss, by exact inference."""
        logits = self.inference(self.model)
        part, figures = self.inference.part, {}
        labels = torch.from_numpy(part.labels).to(logits.device)
        for split in ("train", "val", "test"):
            rows = torch.from_numpy(getattr(part, split)).to(logits.device)
            figures[f"{split}_acc"] = evaluate(logits[rows], labels[rows], self.metric, self.group)[0]
            if split == "val":
                figures["val_loss"] = mean_loss(logits[rows], labels[rows], self.store.task, self.group)
        return figures

    def _is_better(self, figures: dict[str, float | None]) -> bool:
        """Whether the validation metric is the best so far, ties broken by validation loss; without one the
        newest is the best.
        """
        state, value, loss = self.state, figures["val_acc"], figures["val_loss"]
        if value is None:
            return True
        if not math.isfinite(value) or not math.isfinite(loss):
            return False
        if state.best_metric is None:
            return True
        tied = value == state.best_metric and loss is not None and state.best_loss is not None
        return value > state.best_metric or (tied and loss < state.best_loss)

    def _checkpoint(self, work: WorkCounters, earlier: Mapping[str, list[int]]) -> None:
        """Write `last.pt` in the middle of an epoch. Collective."""
        self._check_weights()
        self.state.work = work.per_rank(self.comm, earlier)
        with writing(self.run_dir):
            self._save(LAST_FILE)

    def _check_weights(self) -> None:
        """Refuse to go on with weights that the last step has spoilt; the same on every rank."""
        if not all(bool(weight.isfinite().all()) for weight in self.model.parameters()):
            raise self._diverged("the weights", "NaN or infinity")

    def _save(self, *names: str) -> None:
        """Write the run's state, rank 0's copy of what all ranks have."""
        if self.log is not None:
            self.state.model, self.state.optimizer = self.model.state_dict(), self.optimizer.state_dict()
            self.state.config, self.state.dataset = self.record, dataset_fingerprint(self.store)
            for name in names:
                self.state.save(self.run_dir / name)

    def _resume(self) -> CheckpointState:
        state = CheckpointState.load(self.run_dir / LAST_FILE)
        state.check_dataset(dataset_fingerprint(self.store))
        self.model.load_state_dict(state.model)
        self.optimizer.load_state_dict(state.optimizer)
        if self.log is not None:
            with writing(self.run_dir):
                self.log.rewind(state.epoch)
        return state


def check_trainable(data: Store | Dataset) -> None:
    """Refuse, before any work, data that no model can train on or score: UserError."""
    what, do = f"training on {data.name}", "give them, for example with"
    if data.num_features == 0:
        raise wrong(what, "no features", "a feature row per vertex", f"{do} --feature-file FILE")
    if data.num_classes == 0:
        raise wrong(what, "no labels", "labels of the training vertices", f"{do} --label-file FILE")


def check_run(data: Store | Dataset, config: TrainConfig) -> str:
    """Refuse, before any work, a run that cannot go on with this data: UserError. Returns the metric's
    name.
    """
    check_trainable(data)
    train = data.train if isinstance(data, Dataset) else data.split_ids("train")
    if len(train) == 0:
        what, do = f"training on {data.name}", "give one, for example --split random:20,30"
        raise wrong(what, "no training vertices", "a split", do)
    weighted = data.has_edge_weight if isinstance(data, Store) else data.graph.edge_weight is not None
    check_sampler(config.sampler, config.replace, weighted)
    with _flag_named("backend"), use_backend(config.backend):
        return check_metric(config.metric, data.task, data.num_classes)


def check_draw_weights(data: Store | Dataset, config: TrainConfig) -> None:
    """Refuse, before any work, weights that `--sampler weighted` cannot draw by: UserError. Reads them all."""
    if config.sampler != "weighted":
        return
    if isinstance(data, Store):
        found = (data.part(part).edge_weight for part in range(data.num_parts))
    else:
        found = iter([data.graph.edge_weight])
    for weights in (piece for array in found for piece in _pieces(array)):
        bad = weights[~((weights >= 0) & np.isfinite(weights))]
        if len(bad):
            got, do = f"an edge weight of {bad[0]:g}", "correct the weights, or use another sampler"
            raise wrong("--sampler weighted", got, "finite numbers, none negative", do)


def _pieces(array: np.ndarray, size: int = 1 << 22) -> Iterator[np.ndarray]:
    return (array[start : start + size] for start in range(0, len(array), size))


@contextmanager
def _flag_named(option: str) -> Iterator[None]:
    """What the API says of its argument `option`, said of the flag."""
    try:
        yield
    except UserError as error:
        if str(error).startswith(f"{option}: "):
            raise UserError(f"--{error}") from None
        raise


@contextmanager
def writing(run_dir: Path | None) -> Iterator[None]:
    """While files of a run are written: what the disk refuses becomes a UserError naming `run_dir`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch wraps what the file said.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        do = "make room there (a run goes on from its last checkpoint with --resume)"
        raise wrong(f"writing to {run_dir}", cause.strerror or cause, "a disk that takes it", do) from error


@contextmanager
def _stop_signals(trainer: Trainer) -> Iterator[None]:
    """While training, SIGTERM asks for a checkpoint and an end after the step; so does a first interrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        if number == signal.SIGINT and trainer.stop_signal is not None:
            raise KeyboardInterrupt
        trainer.stop_signal = number

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(when: str, done: int, steps: int, rank: int) -> Iterator[tqdm]:
    """A bar over all steps on rank 0's stderr: on a terminal, or always, or never; only where it takes 2
    seconds. Elsewhere than on a terminal `auto` writes a line now and then instead of a bar.
    """
    shown = rank == 0 and (when == "always" or (when == "auto" and sys.stderr.isatty()))
    # The default lock is one between processes: a rank that is killed would leave its semaphore behind.
    tqdm.set_lock(threading.RLock())
    with tqdm(initial=done, total=steps, unit="step", disable=not shown, delay=2, dynamic_ncols=True) as bar:
        yield bar
