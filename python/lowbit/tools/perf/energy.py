"""Measures the energy used by the CPU or the board, with the counters and power sensors of Linux."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from ...files.untrusted import one_line

_SYSTEM = Path("/sys/class")
# Drivers whose sensors are those of the CPU or the whole board; others are of GPUs, disks and batteries.
_ENERGY_DRIVERS = {"amd_energy"}
_POWER_DRIVERS = {
    *("ina219", "ina220", "ina226", "ina230", "ina231", "ina238", "ina3221"),  # boards
    *("power_meter", "macsmc_hwmon", "fam15h_power"),  # servers, Macs with Linux, older CPUs of AMD
}
_TOTALS = ("VDD_IN", "Total System Power")  # labels of sensors whose power includes that of the others
_SAMPLE_SECONDS = 0.05


@dataclass(frozen=True)
class Sensor:
    """A file with a counter of microjoules, or with the current power in microwatts."""

    name: str
    file: Path
    is_power: bool
    range: int = 1 << 64  # microjoules after which a counter restarts from 0

    def read(self) -> int:
        """Raises OSError if the file cannot be read, ValueError if it is not a number."""
        return int(self.file.read_text())


def _text(path: Path) -> str:
    try:
        return one_line(path.read_text(errors="replace").strip(), 60)
    except OSError:
        return ""


def _rapl(root: Path) -> list[Sensor]:
    """CPU packages, which include their cores and graphics, and memory if it has a separate counter."""
    found = []
    for zone in sorted((root / "powercap").glob("intel-rapl:*")):
        name = _text(zone / "name")
        if name.startswith("package") or name == "dram":
            most = _text(zone / "max_energy_range_uj")
            found.append(Sensor(f"RAPL {name}", zone / "energy_uj", False, int(most) + 1 if most.isdigit() else 1 << 64))
    return found


def _hwmon(root: Path) -> list[Sensor]:
    counters, powers = list[Sensor](), list[Sensor]()
    for directory in sorted((root / "hwmon").glob("hwmon*")):
        driver = _text(directory / "name")
        if driver in _ENERGY_DRIVERS:  # has counters for sockets and for cores
            files = sorted(directory.glob("energy*_input"))
            labels = {file: _text(file.with_name(file.name.replace("_input", "_label"))) for file in files}
            counters += [Sensor(f"{driver} {labels[file]}", file, False) for file in files if "socket" in labels[file].lower()]
        elif driver in _POWER_DRIVERS:
            for file in sorted([*directory.glob("power*_input"), *directory.glob("power*_average")]):
                label = _text(file.with_name(file.name.rpartition("_")[0] + "_label"))
                powers.append(Sensor(f"{driver} {label}".strip(), file, True))
    # A rail of a board may supply another one, so adding sensors could count energy twice.
    totals = [sensor for sensor in powers if sensor.name.endswith(_TOTALS)]
    return counters or (totals or powers)[:1]


def sensors(root: Path = _SYSTEM) -> tuple[list[Sensor], str]:
    """The sensors whose sum is the energy of the CPU or the board, and if there are none, the reason."""
    found = _rapl(root) or _hwmon(root)
    if not found:
        return [], "this machine has no counter of energy and no power sensor that is known"
    try:
        for sensor in found:
            sensor.read()
    except PermissionError:
        return [], f"{found[0].name} can only be read by root"
    except (OSError, ValueError):
        return [], f"{found[0].name} cannot be read"
    return found, ""


class Meter:
    """Measures ``joules`` between begin and end of a ``with`` statement."""

    joules = 0.0

    def __init__(self, found: Iterable[Sensor]):
        self._counters = [sensor for sensor in found if not sensor.is_power]
        self._powers = [sensor for sensor in found if sensor.is_power]
        self._end = Event()

    def __enter__(self) -> Meter:
        self._before = [sensor.read() for sensor in self._counters]
        if self._powers:
            self._thread = Thread(target=self._sample)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for sensor, before in zip(self._counters, self._before, strict=True):
            self.joules += (sensor.read() - before) % sensor.range / 1e6
        if self._powers:
            self._end.set()
            self._thread.join()

    def _watts(self) -> float:
        return sum(sensor.read() for sensor in self._powers) / 1e6

    def _sample(self) -> None:
        """Adds power times time; between two samples the mean of both."""
        at, watts = time.perf_counter(), self._watts()
        ended = False
        while not ended:
            ended = self._end.wait(_SAMPLE_SECONDS)
            now, watts_now = time.perf_counter(), self._watts()
            self.joules += (watts + watts_now) / 2 * (now - at)
            at, watts = now, watts_now
