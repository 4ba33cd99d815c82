"""Manifests, headers and trackers by anyone: an error that says so, never a crash, a hang or a wild allocation."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megackpt.config.checkpoint_folder import in_order_of_trust
from megackpt.config.errors import UsageError
from megackpt.persist import CheckpointError, load, save
from megackpt.persist.manifest import Manifest, read_whole
from megackpt.persist.tensor_reader import TensorReader, parse_header
from tests.persist.tiny import lone_mesh, state_of

SETTINGS = settings(max_examples=100, deadline=None, database=None, derandomize=True)
EDGES = st.sampled_from([-1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**200])
NUMBERS = st.one_of(st.integers(), EDGES, st.floats(), st.booleans())
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(autouse=True)
def _little_memory() -> Any:
    """An allocation of more than a GiB beyond what is mapped now fails, and with it the test."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def sealed(body: Any) -> bytes:
    """A manifest with the digest that fits: a forger can compute one too."""
    text = json.dumps(body, separators=(",", ":"))
    return f'{{"crc32":"{zlib.crc32(text.encode()):08x}","manifest":{text}}}'.encode()


def good_body() -> dict[str, Any]:
    return {
        "format_version": 3,
        "format": "torch_dist",
        "iteration": 10,
        "files": {"run.json": {"size": 9, "crc32": "00000000"}, "a.safetensors": {"size": 99, "crc32": "0123abcd"}},
        "tensors": {
            "model.w": {
                "dtype": "F32",
                "shape": [2, 3],
                "parts": [["a.safetensors", [0, 0], [1, 3], ""], ["a.safetensors", [1, 0], [1, 3], "model.w#1"]],
            }
        },
    }


def test_the_body_that_is_spoiled_below_is_a_good_one() -> None:
    manifest = Manifest.from_bytes(sealed(good_body()))
    assert [part.entry for part in manifest.tensors["model.w"].parts] == ["", "model.w#1"]
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


PLACES = [place for place in places(good_body()) if place]


@SETTINGS
@given(st.binary(max_size=200) | st.builds(lambda v: json.dumps(v).encode(), JSON) | st.builds(sealed, JSON))
def test_any_manifest_is_an_error(content: bytes) -> None:
    with pytest.raises(CheckpointError):
        Manifest.from_bytes(content)


@SETTINGS
@given(st.sampled_from(PLACES), JSON)
def test_one_wrong_value_in_a_manifest_is_an_error_or_harmless(place: tuple[Any, ...], value: Any) -> None:
    body = good_body()
    inner = body
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    try:
        manifest = Manifest.from_bytes(sealed(body))
    except CheckpointError:
        return
    for name, digest in manifest.files.items():
        assert not os.path.isabs(name) and ".." not in name and digest.size >= 0
    for tensor in manifest.tensors.values():
        held = 0
        for part in tensor.parts:
            assert part.file in manifest.files
            box = zip(part.offsets, part.shape, tensor.shape, strict=True)
            assert all(a >= 0 and a + n <= whole for a, n, whole in box)
            held += torch.Size(part.shape).numel()
        assert held == torch.Size(tensor.shape).numel()


ESCAPES = ["../a", "/etc/passwd", "a/../../b", "a/b/c", "", ".", "..", ".hidden", "a\0b", "a\nb", "a" * 300, "ä", "a/"]


@pytest.mark.parametrize("name", ESCAPES)
def test_a_name_cannot_lead_out_of_the_folder(name: str) -> None:
    body = good_body()
    body["files"][name] = body["files"].pop("a.safetensors")
    for part in body["tensors"]["model.w"]["parts"]:
        part[0] = name
    with pytest.raises(CheckpointError, match="a file cannot be named"):
        Manifest.from_bytes(sealed(body))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: b["tensors"]["model.w"].update(shape=[2**40, 2**40]), "larger than any"),
        (lambda b: b["tensors"]["model.w"].update(shape=[1] * 10**5), "larger than any"),
        (lambda b: b["tensors"]["model.w"]["parts"].pop(), "do not cover it once"),
        (lambda b: b["tensors"]["model.w"]["parts"].append(["a.safetensors", [0, 0], [1, 3], ""]), "do not cover it"),
        (lambda b: b["tensors"]["model.w"]["parts"][1].__setitem__(1, [2, 0]), "not inside of it"),
        (lambda b: b["files"]["a.safetensors"].update(size=11), "cannot be in a.safetensors"),
        (lambda b: b["files"].pop("run.json"), "no run.json"),
        (lambda b: b.update(format="pickle"), "format 'pickle' is none of torch_dist, torch"),
        (lambda b: b.update(format_version=1), "format version 1, not 3"),
    ],
)
def test_what_a_manifest_cannot_say(change: Any, reason: str) -> None:
    body = good_body()
    change(body)
    with pytest.raises(CheckpointError, match=reason):
        Manifest.from_bytes(sealed(body))


def test_nesting_without_end_is_an_error() -> None:
    deep = b"[" * 200_000
    with pytest.raises(CheckpointError, match="damaged"):
        Manifest.from_bytes(deep)
    with pytest.raises(ValueError, match="damaged"):
        parse_header(deep, 8 + len(deep), 10 + len(deep))


# -- safetensors headers -----------------------------------------------------------------------------------------------

ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "I64", "F99"]) | JSON,
        "shape": st.lists(NUMBERS | st.integers(0, 4), max_size=4) | JSON,
        "data_offsets": st.lists(NUMBERS | st.integers(0, 64), max_size=3) | JSON,
    },
)


@SETTINGS
@given(st.dictionaries(st.text(max_size=5), ENTRY, max_size=3) | JSON, st.integers(0, 100))
def test_any_header_gives_tensors_inside_the_file_or_an_error(header: Any, data: int) -> None:
    text = json.dumps(header).encode()
    begin, end = 8 + len(text), 8 + len(text) + data
    try:
        entries = parse_header(text, begin, end)
    except ValueError:
        return
    for entry in entries.values():
        assert begin <= entry.begin <= entry.end <= end
        assert entry.end - entry.begin == torch.Size(entry.shape).numel() * entry.dtype.itemsize


@SETTINGS
@given(st.binary(max_size=64), st.integers(0, 2**64 - 1) | st.integers(0, 64))
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes, length: int) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + content)
    with contextlib.suppress(ValueError):
        TensorReader(path).close()


def test_a_header_that_names_a_tensor_twice_is_refused() -> None:
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    with pytest.raises(ValueError, match="a name is given twice"):
        parse_header(text, 8 + len(text), 9 + len(text))


# -- other files -------------------------------------------------------------------------------------------------------


@SETTINGS
@given(st.binary(max_size=60))
def test_any_tracker_leaves_the_checkpoints_loadable(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    root = tmp_path_factory.getbasetemp() / "tracked"
    if not root.exists():
        save(root, 5, state_of(lone_mesh(), 5), lone_mesh())
    (root / "latest_checkpointed_iteration.txt").write_bytes(content)
    assert root / "iter_0000005" in in_order_of_trust(root)[0]
    report = load(root, state_of(lone_mesh(), None), lone_mesh())
    assert report is not None and report.iteration == 5


@pytest.mark.parametrize("name", ["manifest.json", "run.json", "rank_00000.safetensors"])
def test_a_pipe_in_the_place_of_a_file_does_not_hang(tmp_path: Path, name: str) -> None:
    directory = save(tmp_path, 5, state_of(lone_mesh(), 5), lone_mesh())
    (directory / name).unlink()
    os.mkfifo(directory / name)
    with pytest.raises(UsageError, match=name.partition(".")[0]):
        load(tmp_path, state_of(lone_mesh(), None), lone_mesh())


def test_a_file_of_terabytes_is_not_read_into_memory(tmp_path: Path) -> None:
    directory = save(tmp_path, 5, state_of(lone_mesh(), 5), lone_mesh())
    os.truncate(directory / "manifest.json", 1 << 40)  # sparse: takes no room
    with pytest.raises(UsageError, match=r"manifest\.json has more than \d+ bytes"):
        load(tmp_path, state_of(lone_mesh(), None), lone_mesh())
    with pytest.raises(CheckpointError, match="more than 10 bytes"):
        read_whole(directory / "run.json", 10)


def test_files_that_changed_places_are_found(tmp_path: Path) -> None:
    """Whole files, each with the right size, in the wrong place."""
    mesh = lone_mesh()
    older, newer = (save(tmp_path, i, state_of(mesh, i), mesh) for i in (5, 6))
    name = "rank_00000.safetensors"
    assert (older / name).stat().st_size == (newer / name).stat().st_size
    kept = (older / name).read_bytes()
    (older / name).write_bytes((newer / name).read_bytes())
    (newer / name).write_bytes(kept)
    said = r"(?s)iter_0000006 is not whole: rank_00000\.\S+ has changed.*iter_0000005 is not whole"
    with pytest.raises(UsageError, match=said):
        load(tmp_path, state_of(mesh, None), mesh)
