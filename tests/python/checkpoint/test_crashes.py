"""Kills and power failures at every change of the disk; crash_states.py describes the method.

The target has its old content or the complete new one, or loading it is refused.
"""

import itertools
import os
import shutil
from pathlib import Path

import crash_actions
import crash_states
import pytest
import torch
from checkpoints import load
from crash_actions import ACTIONS, CONFIG, JOURNALS, journal_layers
from crash_states import DIRECTORY, killed, make, tree_of, without_power
from lowbit.calibration.journal import Journal
from needs import lacking

pytestmark = pytest.mark.first

if shutil.which("strace") is None:
    lacking("there is no strace; scripts/need.sh test installs it")
# All subsets of up to this many uncertain changes, and this many random subsets of more. `make soak` takes more.
MOST = int(os.environ.get("LOWBIT_CRASH_CHANGES", 4))
TARGETS = {
    "quantize": "packed", "quantize into": "packed", "gguf": "m.gguf", "import": "imported", "pte": "m.pte",
    "pt2": "m.pt2", "report": "figures.json",
}  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("sources")
    crash_actions.make_sources(base)
    return base


@pytest.fixture(scope="module")
def files(sources, tmp_path_factory) -> dict:
    """The changes that each action of TARGETS made in its directory, which starts with a file or a directory."""
    base = tmp_path_factory.mktemp("files")
    places = {name: base / name for name in ACTIONS if name in TARGETS}
    for place in places.values():
        place.mkdir()
    for name in places.keys() & {"gguf", "pte", "pt2", "report"}:
        (places[name] / TARGETS[name]).write_bytes(b"what was there")
    (places["quantize into"] / "packed").mkdir()
    return recorded(sources, base, places)


@pytest.fixture(scope="module")
def recordings(sources, tmp_path_factory) -> dict:
    """The same of the other actions; two of them write over a saved model."""
    base = tmp_path_factory.mktemp("recorded")
    places = {name: base / name for name in ACTIONS if name not in TARGETS}
    for place in places.values():
        place.mkdir()
    older = load(sources / "older", quantization_config=CONFIG)
    for name in ("one over one", "shards over one"):
        older.save_pretrained(places[name] / "saved")
    return recorded(sources, base, places)


def recorded(sources: Path, base: Path, places: dict[str, Path]) -> dict:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "support"), "OMP_NUM_THREADS": "1"}
    script = Path(crash_actions.__file__)
    made = crash_states.record(script, [sources, base, *places], list(places.values()), base / "log", **environment)
    return dict(zip(places, made, strict=True))


def below(tree: dict, target: str) -> dict:
    """The content of the target, by relative path."""
    return {path[len(target) :]: found for path, found in tree.items() if (path + "/").startswith(target + "/")}


@pytest.mark.more
@pytest.mark.parametrize("name", [name for name in TARGETS if name in ACTIONS])
def test_the_old_or_the_new(name, sources, files, tmp_path):
    recording, target = files[name], TARGETS[name]
    old, new = (below(crash_states.tree_after(recording, e), target) for e in ([], recording.events))
    assert new not in ({}, old)
    counts = {}
    leftovers = {}
    for how, states in (("killed", killed(recording)), ("power", without_power(recording, MOST))):
        for tree in states:
            found = below(tree, target)
            # While a rename is rehearsed, the target is an empty directory, which every loader refuses.
            verdict = "old" if found in (old, {"": DIRECTORY}) else "new" if found == new else "neither"
            if verdict == "neither":
                make(tree, tmp_path / "neither")
                pytest.fail(f"{how}: {sorted(found)} is neither the old nor the new, in {tmp_path / 'neither'}")
            counts[how, verdict] = counts.get((how, verdict), 0) + 1
            leftovers.setdefault(frozenset(path for path in tree if not path.startswith(target)), (verdict, tree))
    assert all(counts.get((how, verdict)) for how in ("killed", "power") for verdict in ("old", "new")), counts
    # The next run removes leftovers and gives the same bytes.
    unfinished = [tree for paths, (verdict, tree) in leftovers.items() if paths and verdict == "old"]
    assert unfinished
    for number, tree in enumerate(unfinished[:: len(unfinished) if name in ("pte", "pt2") else max(1, len(unfinished) // 3)]):
        place = tmp_path / f"{number}"
        make(tree, place)
        ACTIONS[name](sources, place)
        found = tree_of(place)
        assert all(path.startswith(target) for path in found)
        if name == "pt2":  # two exports of one model differ in AOTInductor's file names
            torch._inductor.aoti_load_package(str(place / target))
        else:
            assert below(found, target) == new


def test_a_calibration_resumes_only_its_own_layers(recordings, tmp_path):
    """A resumed run uses only complete results of runs with the same settings."""
    recording = recordings["journal"]
    expected = {
        key: {
            names[0]: packed
            for identity, first in JOURNALS
            if identity["config"] == key
            for names, _, packed in journal_layers(first)
        }
        for key in "ab"
    }
    taken_up, seen = {"a": 0, "b": 0}, set()
    for number, tree in enumerate(itertools.chain(killed(recording), without_power(recording, MOST))):
        key = hash(frozenset(tree.items()))
        if key in seen:
            continue
        seen.add(key)
        for name in "ab":
            place = tmp_path / f"{number}{name}"
            make(tree, place)
            with pytest.raises(OSError, match="stays"), Journal(place / "target", {"config": name}) as journal:
                for layer, (_, packed) in journal.packed.items():
                    assert layer in expected[name] and torch.equal(packed, expected[name][layer]), (layer, place)
                assert journal.widths() in (None, {"of": name}), place
                taken_up[name] += len(journal.packed)
                raise OSError("so that what is there stays")
            shutil.rmtree(place)
    assert min(taken_up.values()) > 0
    # After keep() returns, the kept results are on the disk, whatever else is lost.
    missing = set(crash_states.uncertain(recording.events))
    there = [event for number, event in enumerate(recording.events) if number not in missing]
    make(crash_states.tree_after(recording, there), tmp_path / "end")
    with Journal(tmp_path / "end" / "target", {"config": "b"}) as journal:
        assert journal.packed.keys() == expected["b"].keys()


def test_saved_models_are_whole_or_refused(sources, recordings, tmp_path):
    """transformers' save_pretrained writes in place and does not sync. If it is killed, the model is either loaded as saved or
    refused; a model that it overwrites may be lost."""
    old, new = (load(sources / name, quantization_config=CONFIG).state_dict() for name in ("older", "model"))
    for name in ("saved", "one over one", "shards over one"):
        outcomes, seen = [], set()
        for tree in killed(recordings[name]):
            weights = frozenset(item for item in tree.items() if not item[0].endswith("generation_config.json"))
            if weights in seen:
                continue
            seen.add(weights)
            place = tmp_path / f"{name} {len(seen)}"
            make(tree, place)
            try:
                found = load(place / "saved").state_dict()
            except (OSError, ValueError):
                outcomes.append("refused")
                continue
            same = [all(torch.equal(found[key], state[key]) for key in state) for state in (old, new)]
            assert any(same), place
            outcomes.append("old" if same[0] else "new")
            shutil.rmtree(place)
        # If shards replace a single file, transformers leaves the single file and would load it.
        assert outcomes[-1] == ("refused" if name == "shards over one" else "new"), name
        assert outcomes[0] == ("refused" if name == "saved" else "old"), name
