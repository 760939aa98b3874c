"""From DATA to a partition store for this run: load, partition, write, or find what an earlier run has
written.

Stores live in a cache folder (`$TGNN_CACHE`, else `~/.cache/tgnn`), one per key: the data's fingerprint, the
data options, partitioner, parts, seed and presampling. A store takes its place in one rename, so two runs that
prepare the same one at once do not disturb each other. Preparing takes as long as it takes: it happens outside
collectives.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tgnn.data.graph import Dataset
from tgnn.data.load import data_fingerprint, load
from tgnn.data.options import DataOptions
from tgnn.errors import UserError, warn_once, wrong
from tgnn.parallel.comm import torchrun_int, under_torchrun
from tgnn.partition.store import FORMAT_VERSION, Store, check_target, write_store
from tgnn.training.partitioning import PresampleOptions, partitioned

if TYPE_CHECKING:  # config.py imports this module
    from tgnn.training.config import TrainConfig
    from tgnn.training.resolve import Resolved

KEY_VERSION = 2
"""Raised when the same key would no longer mean the same store, for example after a partitioner changed."""


def prepare(
    data: str | os.PathLike | Dataset | Store,
    parts: int,
    *,
    data_options: DataOptions | None = None,
    partitioner: str = "lp",
    seed: int = 0,
    presample: PresampleOptions | None = None,
    store: str | os.PathLike | None = None,
    progress: bool = False,
    check: Callable[[Dataset | Store], object] | None = None,
) -> Store:
    """A store of `parts` parts of `data`: a dataset's name or path, a Dataset, or a store (which must fit).

    `presample`: how the runs to come will sample; the parts are then balanced by the work that this makes, few rows
    travel between them, and the store knows which rows are hot. It is of no use, and ignored, for one part or data
    without training vertices. Reuses what an earlier call has written to the cache for the same data, options,
    partitioner, parts, seed and presampling, or to `store`, where a store that was presampled otherwise is used with a
    warning; a damaged store in the cache is made anew. `check` is called with the store that was found, or with the
    dataset before anything is written, and may refuse it. Raises UserError for data that cannot be loaded, a store of
    another number of parts, and a `store` path that holds something else.
    """
    options = data_options or DataOptions()
    if isinstance(data, Store) or is_store(data):
        found = data if isinstance(data, Store) else Store.open(data)
        return _checked(_as_given(found, options, store).require_parts(parts), check)
    if parts < 1:
        raise wrong("parts", parts, "at least 1", "ask for one part per rank")
    presample = presample if parts > 1 else None
    key, name = _key(data, options, partitioner, parts, seed)
    sampling = None if presample is None else presample.as_dict()
    if store is None:
        full = hashlib.sha256(json.dumps([key, sampling], sort_keys=True).encode()).hexdigest()
        path = _cache_folder() / f"{name}-{parts}-{full[:16]}"
        found = _open_cached(path, key, sampling)
    else:
        path = Path(store)
        found = _open_kept(path, key, sampling)
    if found is not None:
        return _checked(found, check)
    if progress and sys.stderr.isatty():
        print(f"preparing {name} for {parts} ranks", file=sys.stderr)
    dataset = _checked(data if isinstance(data, Dataset) else load(os.fspath(data), options), check)
    made_how = {
        "partitioner": partitioner, "seed": seed, "key": key, "presample": sampling, "data_options": options.as_dict(),
    }  # fmt: skip
    return _write(dataset, parts, path, made_how, presample, is_cache=store is None, progress=progress)


def prepare_for_ranks(
    resolved: Resolved, ranks: int, check: Callable[[Dataset | Store], object] | None = None
) -> Store:
    """The store that a resolved run trains on, of as many parts as there are ranks; `check` as in `prepare`.

    Under torchrun rank 0 prepares it and the others wait, outside collectives. The partitioning does not
    follow the run's seed: no result depends on it, and runs that differ in their seed share one store.
    """
    config, parts = resolved.config, resolved.num_parts(ranks)

    def make() -> Store:
        return prepare(
            resolved.source, parts, data_options=resolved.data_options, partitioner=config.partitioner,
            presample=presampling(config), store=config.store, progress=config.progress != "never", check=check,
        )  # fmt: skip

    if not under_torchrun():
        return make()
    return wait_for_store(make, torchrun_int("RANK"), ranks)


def presampling(config: TrainConfig) -> PresampleOptions | None:
    """What a run's partition is to be weighed by: a group's steps, as the run samples them; None where it says 0."""
    if not config.presample:
        return None
    return PresampleOptions(
        fanouts=config.fanouts, batch_size=-(-config.batch_size // config.replicas), sampler=config.sampler,
        replace=config.replace, epochs=config.presample,
    )  # fmt: skip


def _checked(found: Any, check: Callable[[Any], object] | None) -> Any:
    """What was found, if `check` has nothing against it."""
    if check is not None:
        check(found)
    return found


def is_store(data: Any) -> bool:
    """Whether `data` is the path of a partition store, whole or not."""
    return isinstance(data, (str, os.PathLike)) and (Path(data) / "store.json").is_file()


def _as_given(found: Store, options: DataOptions, store: Any) -> Store:
    """A store given as DATA, refused together with what only makes sense for other data."""
    if store is not None:
        raise wrong(
            "--store", f"{store} beside DATA that is a store already", "no --store", "leave --store out"
        )
    record = found.meta["options"]
    recorded = record.get("dataset", {}) | record.get("partition", {}).get("data_options", {})
    for name in options.given():
        if recorded.get(name) != getattr(options, name):
            raise wrong(
                "--" + name.replace("_", "-"),
                f"{getattr(options, name)} for the store {found.path}",
                f"what that was made with ({recorded.get(name, 'not recorded')})",
                "leave the option out, or give the dataset instead of the store",
            )
    return found


def _write(
    dataset: Dataset, parts: int, path: Path, made_how: dict[str, Any], presample: PresampleOptions | None,
    is_cache: bool, progress: bool,
) -> Store:  # fmt: skip
    """Partition `dataset` and write it to `path`; where another process was faster, use what it wrote."""
    made = partitioned(dataset, parts, made_how["partitioner"], made_how["seed"], presample, progress)
    try:
        return write_store(
            dataset,
            made.part_of,
            path,
            options=made_how,
            report=made.report,
            progress=progress,
            presampled=made.hotness,
            num_parts=parts,
            overwrite=is_cache,
        )
    except (UserError, OSError):
        # The rename fails where the folder has appeared meanwhile.
        winner = _open_kept(path, made_how["key"], made_how["presample"])
        if winner is None:
            raise
        return winner


def _open_cached(path: Path, key: str, sampling: dict[str, Any] | None) -> Store | None:
    """The cached store at `path`; None where there is none, or it was damaged and is removed."""
    if not path.exists():
        return None
    try:
        found = Store.open(path)
        if (_made_how(found).get("key"), _made_how(found).get("presample")) == (key, sampling):
            return found
    except UserError:
        pass
    damaged = path.with_name(f".{path.name}.damaged-{secrets.token_hex(4)}")
    try:
        os.rename(path, damaged)
    except FileNotFoundError:
        # Another process has seen the damage, too.
        return None
    shutil.rmtree(damaged, ignore_errors=True)
    return None


def _open_kept(path: Path, key: str, sampling: dict[str, Any] | None) -> Store | None:
    """The store that `--store` names; None where the path is free. UserError where it holds another.

    How it was presampled changes the speed of a run, not its results, so another way is no reason to refuse it.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    if not is_store(path):
        check_target(path, overwrite=False)
    found = Store.open(path)
    if _made_how(found).get("key") != key:
        raise wrong(
            "--store",
            f"{path}, a store made from other data, with other options or for another number of parts",
            "the store this run would make, or a free path",
            "choose another path, or remove it",
        )
    if _made_how(found).get("presample") != sampling:
        warn_once(
            f"presampled otherwise {path}",
            f"the store {path} was presampled with other options than this run's; remove it to have it made anew",
        )
    return found


def _made_how(store: Store) -> dict[str, Any]:
    return store.meta["options"].get("partition", {})


def _key(
    data: str | os.PathLike | Dataset, options: DataOptions, partitioner: str, parts: int, seed: int
) -> tuple[str, str]:
    """What tells this store from others but its presampling, as a hex digest, and a readable name for it."""
    if isinstance(data, Dataset):
        fingerprint, name = _dataset_digest(data), data.name
    else:
        fingerprint, name = data_fingerprint(os.fspath(data), options), Path(data).name
    facts = {
        "versions": [KEY_VERSION, FORMAT_VERSION],
        "data": fingerprint,
        "options": options.as_dict(),
        "partitioner": partitioner,
        "parts": parts,
        "seed": seed,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return digest, "".join(c if c.isalnum() or c in "._" else "-" for c in name).strip(".-") or "data"


def _dataset_digest(dataset: Dataset) -> str:
    """A digest of everything in `dataset`; reads all its arrays."""
    digest = hashlib.sha256(
        json.dumps([dataset.name, dataset.num_classes, dataset.options], sort_keys=True, default=str).encode()
    )
    graph = dataset.graph
    arrays = (graph.indptr, graph.indices, graph.edge_weight, dataset.x, dataset.y, dataset.original_names)
    for array in (*arrays, dataset.train, dataset.val, dataset.test):
        if array is None:
            digest.update(b"none")
        else:
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _cache_folder() -> Path:
    """The folder of cached stores, made if need be."""
    folder = Path(os.environ.get("TGNN_CACHE") or Path.home() / ".cache" / "tgnn")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise wrong(
            "the store cache",
            f"{folder} ({error.strerror})",
            "a folder that can be written",
            "set TGNN_CACHE to one, or give --store",
        ) from None
    return folder


def wait_for_store(
    make: Callable[[], Store],
    rank: int,
    ranks: int,
    *,
    mailbox: Any = None,
    timeout_s: float | None = None,
    poll_s: float = 0.2,
) -> Store:
    """The store that rank 0 gets from `make()`, on every rank; for ranks that torchrun started.

    The others poll a key-value store, outside collectives, for as long as rank 0 needs (at most `timeout_s`,
    for ever by default), and fail at once when it fails: with its UserError, or with a RuntimeError that
    names its error. `mailbox` is a `torch.distributed.Store`, by default the one that the environment
    (MASTER_ADDR, MASTER_PORT) names. Every rank calls this equally often. The path that rank 0 answers must
    exist on every rank's machine.
    """
    if ranks == 1:
        return make()
    mailbox = mailbox or _mailbox(rank, ranks)
    key = f"tgnn/prepared/{mailbox.add(f'tgnn/calls/{rank}', 1)}"
    if rank == 0:
        try:
            store = make()
        except BaseException as error:
            kind = "user" if isinstance(error, UserError) else "fault"
            text = str(error) if kind == "user" else f"{type(error).__name__}: {error}"
            mailbox.set(key, json.dumps({kind: text}))
            raise
        mailbox.set(key, json.dumps({"path": str(store.path)}))
        return store
    return Store.open(_answer(mailbox, key, timeout_s, poll_s))


def _answer(mailbox: Any, key: str, timeout_s: float | None, poll_s: float) -> str:
    """Rank 0's path, once it is there; raises what `wait_for_store` says."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        while not mailbox.check([key]):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 has not prepared the store within {timeout_s:g} seconds")
            time.sleep(poll_s)
        answer = json.loads(mailbox.get(key))
    except RuntimeError as error:
        raise RuntimeError("rank 0 ended while it prepared the store") from error
    if "user" in answer:
        raise UserError(answer["user"])
    if "fault" in answer:
        raise RuntimeError(f"rank 0 failed to prepare the store: {answer['fault']}")
    return answer["path"]


@functools.cache
def _mailbox(rank: int, ranks: int) -> Any:
    """The key-value store of the environment's rendezvous, which knows nothing of earlier runs.

    Kept for the process's life: where rank 0 is the one that serves it, dropping it would cut the others off.
    """
    from torch.distributed.rendezvous import rendezvous

    mailbox, _, _ = next(rendezvous("env://", rank, ranks))
    return mailbox
