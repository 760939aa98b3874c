"""Find the fastest configuration of every kernel on this machine and write it to a table that tgnn looks up.

On a GPU each kernel's configurations are timed within the op that launches it, on blocks made here or sampled
from a store (cold L2 cache, warm-up, median of interleaved rounds); on a CPU the strategies of the torch path
are. A time counts only if the result agrees with a float64 reference. Outputs are fresh; no user data is
touched. What a table holds already is not measured again, so a tool that was stopped goes on where it was.

    python tools/autotune.py                              # this machine, into the user's cache
    python tools/autotune.py --store papers.store --fanouts 15,10,5
    python tools/autotune.py --compile-only --arch sm_90  # no GPU needed: which configurations do not spill
    python tools/autotune.py --compile-only --defaults --arch sm_80,gfx942 --dtypes float32,float64 --widths 16,64
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _options
import torch
from _blocks import mean_degree
from _cases import CASES, Case, Workload, difference, jobs_of
from _compile_only import compile_all, dropped_choices
from _timing import Clock, device_of
from tqdm import tqdm

from tgnn.errors import run_command, wrong
from tgnn.kernels import backend, tuning
from tgnn.kernels.aot import TARGETS
from tgnn.training.metrics import provenance, write_json

# A candidate must be faster than the default by this much to be taken: less is noise.
GAIN = 0.98
KERNELS = Path(tuning.__file__).parent


def main(argv: Sequence[str] | None = None) -> int:
    """Tune as the command line says; returns the exit status."""
    args = _parser().parse_args(argv)
    _options.check_ops(args.ops, [case.op for case in CASES])
    if args.arch and not args.compile_only:
        raise wrong(
            "--arch", args.arch, "--compile-only beside it", "add it: a GPU that is there is tuned as it is"
        )
    if args.defaults and not args.compile_only:
        raise wrong("--defaults", "it alone", "--compile-only beside it", "add it")
    if args.compile_only:
        return compile_all(args)
    if args.rounds < 1:
        raise wrong("--rounds", args.rounds, "at least 1", "give a positive number")
    device = device_of(args.device)
    path = Path(args.out) if args.out else tuning.user_table(device)
    return Tuner(path, device, args).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    _options.add_workload_options(parser, widths=(32, 64, 128, 256), degrees=(1.5, 6, 20, 100))
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:1, cpu (auto)")
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of each candidate (20)")
    parser.add_argument(
        "--out", help="table to write (the user's, which tgnn looks up, in $TGNN_CACHE/tuning)"
    )
    parser.add_argument("--candidates", help="a file of --compile-only: leave out what it dropped")
    parser.add_argument(
        "--compile-only", action="store_true", help="compile for --arch and drop what spills; no GPU needed"
    )
    parser.add_argument(
        "--defaults", action="store_true", help="with --compile-only: the default configurations alone; status 1 if "
        "one does not do",
    )  # fmt: skip
    parser.add_argument(
        "--arch", type=_options.listed(str), help=f"with --compile-only: of {', '.join(TARGETS)} (sm_90)"
    )
    return parser


class Tuner:
    """Measures what the table at `path` lacks, and writes it after every key."""

    def __init__(self, path: Path, device: torch.device, args: argparse.Namespace) -> None:
        self.path, self.device, self.args = path, device, args
        self.backend = "triton" if device.type == "cuda" else "torch"
        self.clock = Clock(device)
        self.machine = tuning.machine(device)
        self.table = self._start()
        self.dropped = dropped_choices(args.candidates) if args.candidates else {}
        self.rows: list[str] = []

    def _start(self) -> dict[str, Any]:
        """The table so far; an unusable one at the default place is begun anew, one given by --out is
        refused.
        """
        table = {"format": tuning.FORMAT, **self.machine, "provenance": provenance(self.device)}
        table |= {"entries": {}, "done": {}}
        try:
            old = tuning.read_table(self.path, self.machine)
        except FileNotFoundError:
            return table
        except tuning.BadTable as error:
            if self.args.out:
                raise wrong(
                    f"--out {self.path}", error, "a table of this machine, or no file", "remove it"
                ) from error
            print(f"{self.path}: {error}; it is begun anew", file=sys.stderr)
            return table
        return table | {"entries": dict(old.entries), "done": dict(old.done)}

    def run(self) -> int:
        """Measure and print best against default; 0."""
        jobs = self._jobs()
        left = [job for job in jobs if self.table["done"].get(job[0]) != job[1]]
        print(f"{len(jobs)} workloads, {len(jobs) - len(left)} of them measured already: {self.path}")
        with tqdm(total=len(left), unit="workload", disable=None) as bar:
            for label, source, case, work in left:
                bar.set_postfix_str(label)
                self._tune_case(label, case, work)
                self.table["done"][label] = source
                self._write()
                bar.update()
        tuning.forget_tables()
        if self.rows:
            print("| key | default us | best us | gain | best |\n|---|---|---|---|---|")
            print("\n".join(self.rows))
        return 0

    def _jobs(self) -> list[tuple[str, str, Case, Workload]]:
        """(label, hash of the op's source, case, workload) of all that is asked for."""
        args, found = self.args, {}
        blocks = _options.blocks_of(args, self.device)
        for case, work in jobs_of(
            blocks, _options.dtypes_of(args), _options.widths_of(args), self.device, args.ops
        ):
            label = tuning.key_of(case.name, work.dtype, work.width, mean_degree(work.block))
            found.setdefault(label, (label, source_hash(case.op), case, work))
        return list(found.values())

    def _tune_case(self, label: str, case: Case, work: Workload) -> None:
        """Measure every key that the case asks for and that no case before it did."""
        with tuning.trial({}) as asked:
            case.prepare(work, self.backend)()
        for key, question in asked.items():
            source = source_hash(question.spec.op if question.spec else "segment")
            old = self.table["entries"].get(key)
            if len(question.candidates) > 1 and (old is None or old.get("source") != source):
                entry = self._measure(key, question, case, work)
                self.table["entries"][key] = entry | {"measured_in": label, "source": source}
                self._write()

    def _measure(self, key: str, asked: tuning.Asked, case: Case, work: Workload) -> dict[str, Any]:
        """Time every candidate of one key that gives the right result; the entry of the table."""
        name, expected = key.split(" ", 1)[0], case.reference(work)
        calls, failed = {}, {}
        for number, candidate in enumerate(asked.candidates):
            call = _forced(case, work, self.backend, {name: candidate})
            reason = self.dropped.get((name, str(candidate))) if number else None
            try:
                reason = reason or difference(call(), expected, work.dtype)
            except Exception as error:  # a configuration may not compile, or not fit the GPU
                reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if reason:
                failed[number] = reason
            else:
                calls[number] = call
        if 0 not in calls:
            raise RuntimeError(f"{key}: the default fails in {case.name}: {failed[0]}")
        times = {n: statistics.median(t) for n, t in self.clock.measure(calls, self.args.rounds).items()}
        best = min(times, key=times.__getitem__)
        best = best if times[best] < GAIN * times[0] else 0
        self._say(key, times[0], times[best], asked.candidates[best])
        return {
            "choice": _plain(asked.candidates[best]),
            "best_us": round(times[best] * 1e6, 2),
            "default_us": round(times[0] * 1e6, 2),
            "candidates": [
                {"choice": _plain(c)}
                | ({"failed": failed[n]} if n in failed else {"us": round(times[n] * 1e6, 2)})
                for n, c in enumerate(asked.candidates)
            ],
        }

    def _say(self, key: str, default: float, best: float, choice: object) -> None:
        row = f"| {key} | {default * 1e6:.1f} | {best * 1e6:.1f} | {default / best:.2f}x | {choice} |"
        self.rows.append(row)

    def _write(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.table)
        except OSError as error:
            do = "give another --out, or set TGNN_CACHE"
            raise wrong(f"the table {self.path}", error.strerror, "a place to write to", do) from error


def _forced(case: Case, work: Workload, chosen: str, forced: Mapping[str, Any]):
    """A call of the case with these choices; what a backward needs of its forward is made once."""
    with tuning.trial(forced):
        call = case.prepare(work, chosen)

    def run():
        with tuning.trial(forced):
            return call()

    return run


def _plain(candidate: tuning.Config | str) -> Any:
    return candidate.as_dict() if isinstance(candidate, tuning.Config) else candidate


def source_hash(op: str) -> str:
    """A hash of the files that an op's paths lie in: what changes it makes old times worthless."""
    names = {op, "segment", "segment_triton", "spmm"}
    triton = backend.TRITON_MODULES.get(op, "").rpartition(".")[2]
    stem = triton.removesuffix("_triton")
    names |= {path.stem for path in KERNELS.glob(f"{stem}*_triton.py")} if stem else set()
    files = sorted(path for name in names if (path := KERNELS / f"{name}.py").exists())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(run_command(main))
