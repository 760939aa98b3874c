"""Named data sets: found in the data folder, or fetched there, with progress, resume and checksums.

The data folder is `$TGNN_DATA`, else `~/.cache/tgnn/data`. Each file has a place in it, such as
`planetoid/cora/ind.cora.x`; what is there is used as it is. What is not is fetched from where it was
published, or, where `$TGNN_DATA_URL` names a mirror (http, https or file), from that address and the same
place. A file is fetched beside its place under the name `.<name>.part`, goes on where it broke off if the
server allows that, is compared with its checksum where one is known, and takes its place in one rename.
Processes that want the same file wait for the one that fetches it.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import secrets
import shutil
import ssl
import stat
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from tqdm import tqdm

from tgnn.data.catalogue import CATALOGUE, Remote
from tgnn.errors import UserError, wrong

try:
    import fcntl
except ImportError:  # not on Windows: there, two processes at once fetch twice
    fcntl = None

_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 30.0
_TRIES = 4
_WAIT_S = 1.0
# Other OSErrors are the disk's.
_NETWORK_ERRORS = (
    urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError,
)  # fmt: skip


class _Damaged(Exception):
    """What came is not what was asked for."""


def data_folder() -> Path:
    """Where named data sets are kept."""
    return Path(os.environ.get("TGNN_DATA") or Path.home() / ".cache" / "tgnn" / "data")


def fetch(name: str) -> Path:
    """The path of the named data set (a key of `CATALOGUE`), fetched where it is not in the data folder yet.

    Raises:
        UserError: the data set cannot be fetched: no network, no such file, another checksum, a folder that
            cannot be written. Says what to put where by hand.
    """
    entry, folder = CATALOGUE[name], data_folder()
    for place in (entry.path, *entry.also):
        path = folder / place
        if path.exists() and (entry.unzip or all((path / file.name).exists() for file in entry.files)):
            return path
        if len(entry.files) == 1 and path.is_file():
            return path
    target = folder / entry.path
    if entry.unzip:
        _fetch_unzipped(entry.files[0], target)
    else:
        for file in entry.files:
            # One file is the data set itself; several are files of its folder.
            _fetch_file(file, target if len(entry.files) == 1 else target / file.name)
    return target


def _fetch_file(remote: Remote, path: Path) -> None:
    """Fetch one file to `path` unless it is there."""
    with _writable(path.parent), _locked(path):
        if not path.exists():
            part = _partial(remote, path)
            os.replace(part, path)


def _fetch_unzipped(remote: Remote, target: Path) -> None:
    """Fetch a zip file and unpack its one folder as `target`; `<target>.source.json` keeps what it was."""
    with _writable(target.parent), _locked(target):
        if target.exists():
            return
        archive = target.with_name(target.name + ".zip")
        if not archive.exists():
            os.replace(_partial(remote, archive), archive)
        unpacked = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            unzip(archive, unpacked)
            inside = list(unpacked.iterdir())
            if len(inside) != 1 or not inside[0].is_dir():
                raise _wrong_zip(archive, f"{len(inside)} entries at its top", "one folder")
            record = {"url": url_of(remote), "bytes": archive.stat().st_size, "sha256": _sha256(archive)}
            source = target.with_name(target.name + ".source.json")
            source.write_text(json.dumps(record, indent=1), encoding="utf-8")
            os.replace(inside[0], target)
        finally:
            shutil.rmtree(unpacked, ignore_errors=True)
        archive.unlink()


def unzip(archive: Path, folder: Path) -> None:
    """Unpack a zip file into the new folder `folder`, nothing outside it, links and such refused.

    Raises:
        UserError: a damaged file, or an entry that would be outside or is no plain file or folder.
    """
    try:
        with zipfile.ZipFile(archive) as packed:
            for entry in packed.infolist():
                place = PurePosixPath(entry.filename.replace("\\", "/"))
                outside = place.is_absolute() or ".." in place.parts or ":" in entry.filename
                kind = stat.S_IFMT(entry.external_attr >> 16)
                if outside or kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                    what = "leads outside" if outside else "is no plain file"
                    raise _wrong_zip(archive, f"the entry {entry.filename!r}, which {what}", "files inside")
                goal = folder.joinpath(*place.parts)
                if entry.is_dir():
                    goal.mkdir(parents=True, exist_ok=True)
                    continue
                goal.parent.mkdir(parents=True, exist_ok=True)
                with packed.open(entry) as source, open(goal, "wb") as file:
                    shutil.copyfileobj(source, file, _CHUNK_BYTES)
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, UserError):
            raise
        raise _wrong_zip(archive, f"a damaged file ({error})", "a whole zip file") from error


def _wrong_zip(archive: Path, got: str, expected: str) -> UserError:
    return wrong(str(archive), got, expected, f"remove {archive} and fetch it again")


def url_of(remote: Remote) -> str:
    """Where a file is fetched from: its publisher, or the same place below `$TGNN_DATA_URL`."""
    base = os.environ.get("TGNN_DATA_URL")
    if not base:
        return remote.url
    if urllib.parse.urlsplit(base).scheme not in ("http", "https", "file"):
        expected = "an address that starts with http, https or file"
        raise wrong("TGNN_DATA_URL", repr(base), expected, "correct it")
    return base.rstrip("/") + "/" + urllib.parse.quote(remote.place)


def _partial(remote: Remote, path: Path) -> Path:
    """The whole file, fetched and checked, under its temporary name."""
    url, part = url_of(remote), path.with_name(f".{path.name}.part")
    trouble: Exception | None = None
    failures = 0
    while failures < _TRIES:
        before = part.stat().st_size if part.exists() else 0
        try:
            _transfer(url, part, f"fetching {path.name}", resume_unproved=remote.checksum is not None)
            _check(remote, part)
            return part
        except _Damaged as error:
            # A file put together from two versions has another checksum, too: once more from its start.
            part.unlink(missing_ok=True)
            if not before:
                raise _failed(url, path, str(error), part) from None
            trouble, failures = error, failures + 1
        except urllib.error.HTTPError as error:
            error.close()
            if error.code < 500 and error.code not in (408, 429):
                raise _failed(url, path, f"status {error.code} ({error.reason})", part) from None
            trouble, failures = error, failures + 1
        except _NETWORK_ERRORS as error:
            trouble = error
            gained = (part.stat().st_size if part.exists() else 0) > before
            failures = 0 if gained else failures + 1
        time.sleep(_WAIT_S * 2**failures if failures < _TRIES else 0)
    reason = getattr(trouble, "reason", None) or trouble
    raise _failed(url, path, str(reason) or type(trouble).__name__, part)


def _failed(url: str, path: Path, why: str, part: Path) -> UserError:
    kept = " (what came is kept and gone on with)" if part.exists() else ""
    do = f"try again, put the file at {path} by hand, or set TGNN_DATA_URL to a mirror"
    return wrong(url, f"{why}{kept}", "the file", do)


def _transfer(url: str, part: Path, title: str, resume_unproved: bool) -> None:
    """Fetch `url` into `part`, going on from what it holds where the server sends the rest of the same file.

    Raises OSError or HTTPException where the transfer fails or ends early.
    """
    validator_file = part.with_name(part.name + "-of")
    have = part.stat().st_size if part.exists() else 0
    validator = validator_file.read_text(encoding="utf-8") if validator_file.exists() else ""
    request = urllib.request.Request(url, headers={"User-Agent": "tgnn", "Accept-Encoding": "identity"})
    if have and (validator or resume_unproved):
        request.add_header("Range", f"bytes={have}-")
        if validator:
            request.add_header("If-Range", validator)
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        # Nothing is left of the range: the file has another size than what is here, or this is all of it.
        error.close()
        if error.headers.get("Content-Range", "").rpartition("/")[2] == str(have):
            return
        raise _Damaged("a file of another size than before") from None
    with response:
        start = _start_of(response, have)
        validator_file.write_text(_validator(response), encoding="utf-8")
        length = response.headers.get("Content-Length")
        total = start + int(length) if length is not None else None
        with open(part, "ab" if start else "wb") as file:
            _copy(response, file, start, total, title)
    validator_file.unlink(missing_ok=True)


def _start_of(response: Any, have: int) -> int:
    """Where in the file the answer starts: 0, or `have` if the server sends the rest."""
    if getattr(response, "status", None) != 206:
        return 0
    sent = response.headers.get("Content-Range", "")
    if not sent.startswith(f"bytes {have}-"):
        raise _Damaged(f"the range {sent!r} for bytes from {have}")
    return have


def _validator(response: Any) -> str:
    """What tells this version of the file from others: a strong ETag, or the time of change."""
    tag = response.headers.get("ETag", "")
    return tag if tag.startswith('"') else response.headers.get("Last-Modified", "")


def _copy(response: Any, file: BinaryIO, start: int, total: int | None, title: str) -> None:
    """Append the answer to the file, showing a bar over it after two seconds on a terminal."""
    with tqdm(
        total=total, initial=start, unit="B", unit_scale=True, desc=title, delay=2, disable=None
    ) as bar:
        while chunk := response.read(_CHUNK_BYTES):
            file.write(chunk)
            bar.update(len(chunk))
        file.flush()
        os.fsync(file.fileno())
        if total is not None and file.tell() != total:
            raise http.client.IncompleteRead(b"", total - file.tell())


def _check(remote: Remote, part: Path) -> None:
    """Compare with the checksum where one is known."""
    if remote.checksum is None:
        return
    kind, _, expected = remote.checksum.partition(":")
    if kind == "sha256":
        digest = hashlib.sha256()
    else:
        # How git names a file's content.
        digest = hashlib.sha1(f"blob {part.stat().st_size}\0".encode(), usedforsecurity=False)
    found = _hexdigest(part, digest)
    if found != expected:
        raise _Damaged(f"{part.stat().st_size} bytes with {kind} {found} instead of {expected}")


def _sha256(path: Path) -> str:
    return _hexdigest(path, hashlib.sha256())


def _hexdigest(path: Path, digest: Any) -> str:
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Make `folder`; UserError where the disk refuses that or anything in the block."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise wrong(
            "the data folder",
            f"{error.filename or folder} ({error.strerror or error})",
            "a folder that can be written",
            "set TGNN_DATA to one with enough space",
        ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of what is fetched to `path`; ends with the process that holds it."""
    if fcntl is None:
        yield
        return
    with open(path.with_name(f".{path.name}.lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
