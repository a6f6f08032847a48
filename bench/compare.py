"""Compares lowbit with other libraries on the same matrices, and with this machine's peak rates.

    make bench                                  all; prints the tables, writes build/bench/compare.{json,md,png}
    make bench DOC=1                            the same, written to the part of this kind of CPU in docs/bench.{json,md}
    python3 bench/compare.py --roofs build/bench/bench/roofs [OPTION...]

Each library runs in a separate process, one at a time, so that no thread pool spins while another library is timed. All
contenders take turns in every round; a figure is the median over the rounds. With up to 32 rows of activations, a turn is one
pass over copies of the weights, and a round reads more than 1 GB of them, so they come from memory. Threads are not pinned.
Peers that cannot run are listed with the reason.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import compare_report

MODULES = {"torch": "peers.torch_peers", "onnxruntime": "peers.onnxruntime_peers", "ggml": "peers.ggml_peers"}
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))  # outputs x inputs
SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 512)  # rows of activations
SWEEP_CONTENDERS = ("lowbit 4 bits g128", "lowbit 4 bits g128 bf16", "torch bfloat16")
SEVERAL_ROWS = 128
MOST_ROWS_FROM_MEMORY = 32
CYCLED_BYTES = 1.1e9  # of weights read between two uses of the same copy
LEAST_PASS_BYTES = 30e6  # a millisecond or more
LEAST_SECONDS = 0.02  # of calls in a turn with cached weights, and of untimed calls before every turn
PAUSE = 0.01  # seconds for the threads of the last contender to stop spinning
SLOW_SECONDS, MOST_SECONDS = 1.0, 8.0  # a longer call is timed in one round only, or not at all
PREPARE_SECONDS, TIME_SECONDS = 300, 120  # a process that takes longer has failed


class Failed(Exception):
    """A contender could not be prepared or timed."""


class Process:
    """One library's process."""

    def __init__(self, module: str, threads: list[int]):
        from peers.contender import serve

        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, module, threads), daemon=True)
        self.process.start()
        theirs.close()
        self.dead = ""
        self.description = self._receive(PREPARE_SECONDS)

    def call(self, seconds: float, method: str, *arguments):
        if self.dead:
            raise Failed(self.dead)
        try:
            self.connection.send((method, arguments))
        except OSError:
            raise Failed(self._died()) from None
        return self._receive(seconds)

    def _receive(self, seconds: float):
        try:
            if not self.connection.poll(seconds):
                self.process.kill()
                self.dead = f"no answer in {seconds:.0f} s"
                raise Failed(self.dead)
            ok, result = self.connection.recv()
        except (EOFError, OSError):
            raise Failed(self._died()) from None
        if not ok:
            raise Failed(result)
        return result

    def _died(self) -> str:
        self.process.join(5)
        code = self.process.exitcode
        self.dead = f"its process ended by signal {-code}" if code is not None and code < 0 else f"its process ended ({code})"
        return self.dead

    def end(self) -> None:
        self.connection.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()


class Roofs:
    """The process of bench/roofs.cpp, which takes turns with the contenders."""

    def __init__(self, program: Path, mebibytes: int, threads: list[int]):
        command = [str(program), "--serve", "--mebibytes", str(mebibytes), *map(str, threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.at_start = json.loads(self._line())

    def read_gbs(self, threads: int) -> float:
        try:
            print(threads, file=self.process.stdin, flush=True)
        except OSError:
            pass  # it has ended; the next line says so
        return float(self._line())

    def _line(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"compare: {shlex.join(self.process.args)} ended with code {self.process.wait()}")
        return line

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True)
class Section:
    """Contenders on one shape: they take turns for each number of rows and threads, in several rounds."""

    title: str
    n: int
    k: int
    rows: tuple[int, ...]
    rounds: dict[int, int]  # rows -> rounds
    names: list[str]


class Comparison:
    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.processes: dict[str, Process] = {}
        self.ended: set[str] = set()  # contenders whose process ended; they are not started again
        self.library_of: dict[str, str] = {}
        self.begin = time.monotonic()
        self.samples: dict[tuple, list[float]] = {}
        self.roofs: Roofs | None = None
        self.reads: dict[tuple, list[float]] = {}  # GB/s just before each sample of one row
        self.results = {
            "complete": False,
            "command": shlex.join(["python3", *sys.argv]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
            "machine": describe_machine(),
            "versions": {"python": platform.python_version()},
            "settings": {
                "threads": options.threads,
                "shapes": [list(shape) for shape in options.shapes],
                "rounds": options.rounds,
                "rounds_of_several_rows": options.rounds_of_several_rows,
                "most_rows_from_memory": MOST_ROWS_FROM_MEMORY,
                "least_bytes_between_uses": int(options.cycled_bytes),
            },
            "roofs": {},
            "contenders": [],
            "absent": [],
            "results": [],
        }

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    def absent(self, name: str, reason: str) -> None:
        self.say(f"absent: {name}: {reason}")
        if not any(entry["name"] == name for entry in self.results["absent"]):
            self.results["absent"].append({"name": name, "reason": reason})

    def start(self) -> None:
        for library, module in MODULES.items():
            if library not in self.options.libraries:
                self.absent(library, "left out by --libraries")
                continue
            try:
                process = Process(module, self.options.threads)
            except Failed as failure:
                if library == "torch":
                    sys.exit(f"compare: lowbit cannot run: {failure}")
                self.absent(library, str(failure))
                continue
            self.processes[library] = process
            self.results["versions"] |= process.description["versions"]
            for entry in process.description["absent"]:
                self.absent(entry["name"], entry["reason"])
            for spec in process.description["specs"]:
                self.library_of[spec["name"]] = library
                self.results["contenders"].append(spec | {"relative_error": None, "bytes": {}})

    def start_roofs(self) -> None:
        self.roofs = Roofs(self.options.roofs, self.options.mebibytes, self.options.threads)
        self.results["roofs"] = found = self.roofs.at_start
        peak = "" if found["int8_gops"] is None else f", int8 {found['int8_isa']} {found['int8_gops']} GOPS"
        self.say(f"roofs by threads: read {found['read_gbs']} GB/s{peak}")

    def prepare(self, section: Section) -> list[dict]:
        """Returns the contenders that can run a section, with packed weights and checked results."""
        ready = []
        for spec in self.results["contenders"]:
            if spec["name"] in section.names and spec["name"] not in self.ended:
                made = self.prepare_one(section, spec, [entry["name"] for entry in ready])
                if made is None:
                    ready = [entry for entry in ready if entry["name"] not in self.ended]
                    continue
                # Written so that NaN fails too.
                if spec["relative_error"] is None or not made["relative_error"] <= spec["relative_error"]:
                    spec["relative_error"] = made["relative_error"]
                spec["bytes"][f"{section.n}x{section.k}"] = made["bytes"]
                ready.append(spec | {"copies": made["copies"], "seconds_per_row": made["seconds_per_row"]})
        cycled = sum(spec["copies"] * spec["bytes"][f"{section.n}x{section.k}"] for spec in ready)
        self.say(f"{section.title}: {len(ready)} contenders packed and checked, {cycled / 1e9:.1f} GB of weights in a round")
        return ready

    def prepare_one(self, section: Section, spec: dict, ready: list[str]) -> dict | None:
        """Packs one contender's weights; on failure records the reason and returns None."""
        bytes_per_pass = max(self.options.least_pass_bytes, self.options.cycled_bytes / max(1, len(section.names)))
        try:
            return self.processes[self.library_of[spec["name"]]].call(
                PREPARE_SECONDS, "prepare", spec["name"], section.n, section.k, max(section.rows), int(bytes_per_pass)
            )
        except Failed as failure:
            self.absent(f"{spec['name']}, {section.n} x {section.k}", str(failure))
            self.replace_process(section, spec["name"], ready)
            return None

    def replace_process(self, section: Section, name: str, ready: list[str]) -> None:
        """After a contender's process has ended, starts a new one for the library's other contenders."""
        library = self.library_of[name]
        if not self.processes[library].dead:
            return
        self.ended.add(name)
        try:
            self.processes[library] = Process(MODULES[library], self.options.threads)
        except Failed as failure:
            others = [other for other, of in self.library_of.items() if of == library and other not in self.ended]
            self.ended.update(others)
            for other in others:
                self.absent(other, str(failure))
            return
        for spec in self.results["contenders"]:
            others = [other for other in ready if self.library_of[other] == library and other not in self.ended]
            if spec["name"] in others and self.prepare_one(section, spec, others[: others.index(spec["name"])]) is None:
                self.ended.add(spec["name"])

    def turns(self, section: Section, ready: list[dict]) -> Iterator[tuple[int, int, int, dict]]:
        """Yields round, rows, threads and contender."""
        for m in section.rows:
            for spec in ready:
                if (seconds := m * spec["seconds_per_row"]) > MOST_SECONDS:
                    self.absent(f"{spec['name']}, {section.n} x {section.k}, {m} rows", f"a call takes about {seconds:.0f} s")
        for number in range(max(section.rounds.values())):
            for m in section.rows:
                if number < section.rounds[m]:
                    for threads in self.options.threads:
                        for spec in ready:
                            if m * spec["seconds_per_row"] <= (MOST_SECONDS if number == 0 else SLOW_SECONDS):
                                yield number, m, threads, spec

    def run(self, section: Section) -> None:
        ready = self.prepare(section)
        failed = set()
        said = None
        for number, m, threads, spec in self.turns(section, ready):
            if number != said:
                self.say(f"{section.title}: round {number + 1} of {max(section.rounds.values())}")
                said = number
            name = spec["name"]
            if name in failed or name in self.ended:
                continue
            read = None
            if m == 1:  # other virtual machines take a changing part of the bandwidth
                time.sleep(PAUSE)
                read = self.roofs.read_gbs(threads)
            time.sleep(PAUSE)
            from_memory = m <= MOST_ROWS_FROM_MEMORY
            process = self.processes[self.library_of[name]]
            try:
                seconds = process.call(TIME_SECONDS, "time", name, m, threads, from_memory, self.options.least_seconds)
            except Failed as failure:
                failed.add(name)
                self.absent(f"{name}, {section.n} x {section.k}, {m} rows", str(failure))
                self.replace_process(section, name, [entry["name"] for entry in ready])
                continue
            key = (section.title, name, section.n, section.k, m, threads)
            self.samples.setdefault(key, []).append(seconds / spec["copies"] if from_memory else seconds)
            if read is not None:
                self.reads.setdefault(key, []).append(read)
        for process in self.processes.values():
            if not process.dead:
                process.call(PREPARE_SECONDS, "release")

    def conclude(self) -> dict:
        """Medians of the measurements so far."""
        specs = {spec["name"]: spec for spec in self.results["contenders"]}
        self.results["results"] = []
        for threads in {key[-1] for key in self.reads}:
            every = [gbs for key, reads in self.reads.items() if key[-1] == threads for gbs in reads]
            self.results["roofs"]["read_gbs"][str(threads)] = statistics.median(every)
        for key, samples in self.samples.items():
            title, name, n, k, m, threads = key
            seconds = statistics.median(samples)
            moved = specs[name]["bytes"][f"{n}x{k}"]
            reads = self.reads.get(key)
            shares = [moved / sample * 1e-9 / read for sample, read in zip(samples, reads or [])]
            self.results["results"].append(
                {
                    "section": title,
                    "contender": name,
                    "n": n,
                    "k": k,
                    "m": m,
                    "threads": threads,
                    "seconds": seconds,
                    "samples": samples,
                    "weights_per_ns": n * k / seconds * 1e-9,
                    "gops": 2 * m * n * k / seconds * 1e-9,
                    "read_gbs": reads,
                    "share_of_bandwidth": statistics.median(shares) if shares else None,
                }
            )
        self.results["seconds"] = time.monotonic() - self.begin
        return self.results

    def everything(self) -> None:
        self.start()
        self.start_roofs()
        names = [spec["name"] for spec in self.results["contenders"]]
        options = self.options
        sections = [
            Section(
                f"{n} x {k}", n, k, (1, SEVERAL_ROWS), {1: options.rounds, SEVERAL_ROWS: options.rounds_of_several_rows}, names
            )
            for n, k in options.shapes
        ]
        if options.sweep:
            n, k = options.shapes[0]
            sections.append(
                Section(
                    f"{n} x {k}, by rows",
                    n,
                    k,
                    options.sweep,
                    dict.fromkeys(options.sweep, options.rounds_of_several_rows),
                    [name for name in names if name in SWEEP_CONTENDERS],
                )
            )
        for section in sections:
            self.run(section)
            self.save()
        self.results["complete"] = True

    def save(self) -> None:
        compare_report.write_json(self.conclude(), self.options.output.with_suffix(".json"))

    def end(self) -> None:
        for process in self.processes.values():
            process.end()
        if self.roofs is not None:
            self.roofs.end()


def last_level_cache() -> int | None:
    """Bytes of the largest cache of CPU 0, or None if the system does not tell."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes, default=None)


def describe_machine() -> dict:
    import lowbit
    from lowbit.machine.cpus import available_cpus
    from lowbit.machine.facts import cpu_name

    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "system": platform.platform(),
        "cpus": available_cpus(),
        "isa": lowbit.isa(),
        "last_level_cache_bytes": last_level_cache(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def numbers(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if not found or min(found) < 1:
        raise ValueError
    return found


def shapes(text: str) -> list[tuple[int, int]]:
    found = [tuple(int(size) for size in part.split("x")) for part in text.split(",")]
    if any(len(shape) != 2 or min(shape) < 256 or max(s % 256 for s in shape) for shape in found):
        raise ValueError
    return found


def parse() -> argparse.Namespace:
    from lowbit.machine.cpus import available_cpus

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--roofs", type=Path, required=True, metavar="PROGRAM", help="built from bench/roofs.cpp")
    parser.add_argument("--output", type=Path, default=Path("build/bench/compare"), help="without suffix")
    parser.add_argument("--document", type=Path, help="likewise, a document of several kinds of CPU: replaces this CPU's part")
    parser.add_argument("--threads", type=numbers, help="numbers of threads; default 1, and 2 with two or more CPUs")
    parser.add_argument("--shapes", type=shapes, default=list(SHAPES), metavar="NxK,...", help="multiples of 256")
    parser.add_argument("--sweep", type=numbers, default=list(SWEEP), metavar="M,...", help="rows of the table by rows")
    parser.add_argument("--rounds", type=int, default=11, help="with one row")
    parser.add_argument("--rounds-of-several-rows", type=int, default=5)
    parser.add_argument(
        "--libraries",
        type=lambda text: text.split(","),
        default=list(MODULES),
        help=f"of {','.join(MODULES)}; torch includes lowbit and must be there",
    )
    parser.add_argument(
        "--quick", action="store_true", help="weights from caches instead of memory: to try this program, not for figures"
    )
    options = parser.parse_args()
    options.threads = sorted(set(options.threads or range(1, min(2, available_cpus()) + 1)))
    if unknown := set(options.libraries) - set(MODULES):
        parser.error(f"unknown libraries: {', '.join(sorted(unknown))}")
    if "torch" not in options.libraries:
        parser.error("--libraries must include torch, where lowbit is")
    if options.rounds < 1 or options.rounds_of_several_rows < 1:
        parser.error("--rounds and --rounds-of-several-rows must be 1 or more")
    if not options.roofs.exists():
        parser.error(f"{options.roofs} does not exist; `make bench` builds it")
    options.cycled_bytes, options.least_pass_bytes, options.least_seconds = (CYCLED_BYTES, LEAST_PASS_BYTES, LEAST_SECONDS)
    cache = last_level_cache() or 32 << 20
    options.cycled_bytes = max(CYCLED_BYTES, 8 * cache)
    options.mebibytes = max(256, 8 * cache >> 20)
    if options.quick:
        options.cycled_bytes, options.least_pass_bytes, options.least_seconds, options.mebibytes = 0, 1, 0.0, 8
    options.sweep = tuple(options.sweep)
    return options


def main() -> int:
    options = parse()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    # For libraries that read it when they start; every call also sets its number.
    os.environ["OMP_NUM_THREADS"] = str(max(options.threads))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    comparison = Comparison(options)
    print(compare_report.machine_lines(comparison.results), flush=True)
    try:
        comparison.everything()
    except KeyboardInterrupt:
        comparison.say("interrupted: the results so far are written")
    finally:
        comparison.end()
    if not comparison.samples:
        return 1
    results = comparison.conclude()
    written = compare_report.write(results, options.output)
    if options.document is not None:
        written += compare_report.write_document(results, options.document)
    for path in written:
        comparison.say(f"wrote {path}")
    print(compare_report.markdown(results))
    wrong = compare_report.wrong(results)
    for line in wrong:
        print(f"compare: {line}", file=sys.stderr)
    return 1 if wrong or not results["complete"] else 0


if __name__ == "__main__":
    sys.exit(main())
