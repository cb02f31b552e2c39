"""Opening a checkpoint's files: what is mapped, and what is refused before anything is read."""

import json
import struct

import numpy as np
import pytest
from checkpoint_cases import (
    DTYPES,
    INDEX,
    entry,
    equal_bits,
    every_dtype,
    fault_text,
    file_bytes,
    write_file,
    write_sharded,
)

from swa_jax import checkpoint
from swa_jax.checkpoint import open_tensors


def test_tensors_of_every_dtype_are_read_only_views(tmp_path):
    tensors = {"odd": np.arange(3, dtype=np.uint8)} | every_dtype()  # all others lie unaligned
    tensors |= {"scalar": np.float32(3.5), "none": np.zeros((0, 3), np.float32)}
    opened = open_tensors(write_file(tmp_path / "file", tensors))
    assert list(opened) == list(tensors)
    assert len(opened) == len(tensors)
    for name, value in tensors.items():
        equal_bits(opened[name].reshape(-1), np.reshape(value, -1))
        assert opened[name].shape == value.shape
        assert not opened[name].flags.owndata
        assert not opened[name].flags.writeable
    assert "other" not in opened
    with pytest.raises(KeyError):
        opened["other"]


def test_arrays_outlive_the_mapping(tmp_path):
    array = open_tensors(write_file(tmp_path / "file", every_dtype()))["tensor 1"]
    equal_bits(array, every_dtype()["tensor 1"])


def test_a_directory_holds_one_file_or_those_of_its_index(tmp_path):
    tensors = every_dtype()
    one = tmp_path / "one"
    one.mkdir()
    write_file(one / "model.safetensors", tensors)
    names = list(tensors)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    several = write_sharded(
        tmp_path / "several",
        {file: {name: tensors[name] for name in part} for file, part in parts.items()},
    )
    write_file(several / "not_of_the_index.safetensors", {"x": np.zeros(1, np.float32)})
    for directory in (one, several, str(several)):
        opened = open_tensors(directory)
        assert list(opened) == names
        for name, value in tensors.items():
            equal_bits(opened[name], value)


def test_an_index_needs_no_metadata(tmp_path):
    shards = {"a.safetensors": every_dtype()}
    directory = write_sharded(tmp_path / "model", shards, metadata={})
    fields = json.loads((directory / INDEX).read_text())
    assert len(open_tensors(directory)) == len(DTYPES)
    del fields["metadata"]
    (directory / INDEX).write_text(json.dumps(fields))
    assert len(open_tensors(directory)) == len(DTYPES)


def test_pickled_weights_are_refused_with_the_reason(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(
        ValueError,
        match=r"expected model\.safetensors or model\.safetensors\.index\.json, got "
        r"pytorch_model\.bin: reading pickled weights runs code from the file",
    ):
        open_tensors(tmp_path)


def test_a_directory_without_weights_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected model\.safetensors or .*, got neither"):
        open_tensors(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_tensors(tmp_path / "none")


def test_a_directory_with_both_kinds_is_refused(tmp_path):
    directory = write_sharded(tmp_path / "model", {"a.safetensors": every_dtype()})
    write_file(directory / "model.safetensors", every_dtype())
    with pytest.raises(ValueError, match=r"expected one of model\.safetensors and .*, got both"):
        open_tensors(directory)


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "sub/a.safetensors", "/etc/secret.safetensors", "", ".", "..",
     "sub\\a.safetensors", "a\0.safetensors", 7, None, ["a.safetensors"]],
)  # fmt: skip
def test_an_index_names_files_beside_it_and_nothing_else(tmp_path, name):
    tensors = {"x": np.zeros(2, np.float32)}
    write_file(tmp_path / "secret.safetensors", tensors)
    directory = write_sharded(tmp_path / "model", {"a.safetensors": tensors})
    (directory / "sub").mkdir()
    write_file(directory / "sub" / "a.safetensors", tensors)
    index = {"weight_map": {"x": name}}
    (directory / INDEX).write_text(json.dumps(index))
    text = fault_text(lambda: open_tensors(directory))
    assert text == f"{directory / INDEX}: expected names of files beside it, got {name!r}"


@pytest.mark.parametrize("linked", ["shard", "index", "single"])
def test_a_link_out_of_the_directory_is_refused(tmp_path, linked):
    tensors = {"x": np.zeros(2, np.float32)}
    outside = write_sharded(tmp_path / "outside", {"a.safetensors": tensors})
    write_file(outside / "model.safetensors", tensors)
    directory = write_sharded(tmp_path / "model", {"a.safetensors": tensors})
    name = {"shard": "a.safetensors", "index": INDEX, "single": "model.safetensors"}[linked]
    if linked == "single":
        (directory / INDEX).unlink()
    else:
        (directory / name).unlink()
    (directory / name).symlink_to(outside / name)
    text = fault_text(lambda: open_tensors(directory))
    assert text == f"{directory}: expected files of its own, got {name}, a link out of it"


def test_a_link_within_the_directory_and_one_to_the_directory_are_followed(tmp_path):
    directory = write_sharded(tmp_path / "model", {"a.safetensors": every_dtype()})
    (directory / "a.safetensors").rename(directory / "b.safetensors")
    (directory / "a.safetensors").symlink_to("b.safetensors")
    (tmp_path / "link").symlink_to(directory)
    assert len(open_tensors(tmp_path / "link")) == len(DTYPES)


def test_a_snapshot_of_a_hugging_face_cache_may_link_to_its_blobs_alone(tmp_path):
    """A snapshot is what lies in a folder of that name: no other may link to blobs beside it."""
    snapshot = tmp_path / "models--x--y" / "snapshots" / "0123"
    blobs = tmp_path / "models--x--y" / "blobs"
    snapshot.parent.mkdir(parents=True)
    blobs.mkdir()
    write_sharded(snapshot, {"a.safetensors": every_dtype()})
    for name in ("a.safetensors", INDEX):
        (snapshot / name).rename(blobs / name[:4])
        (snapshot / name).symlink_to(f"../../blobs/{name[:4]}")
    assert len(open_tensors(snapshot)) == len(DTYPES)
    snapshot.parent.rename(tmp_path / "models--x--y" / "others")
    with pytest.raises(ValueError, match="a link out of it"):
        open_tensors(tmp_path / "models--x--y" / "others" / "0123")
    (tmp_path / "models--x--y" / "others").rename(snapshot.parent)
    (blobs / "a.sa").rename(tmp_path / "models--x--y" / "a")
    (snapshot / "a.safetensors").unlink()
    (snapshot / "a.safetensors").symlink_to("../../a")
    with pytest.raises(ValueError, match="a link out of it"):
        open_tensors(snapshot)


INDEX_FAULTS = {
    "a missing file": (
        {"weight_map": {"x": "a.safetensors", "y": "a.safetensors", "z": "c.safetensors"}},
        "expected its files beside it, got no c.safetensors",
    ),
    "a tensor that its file lacks": (
        {"weight_map": {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors",
                        "w": "b.safetensors"}},
        "expected what its files hold, got b.safetensors lacks w",
    ),
    "a tensor that is not listed": (
        {"weight_map": {"x": "a.safetensors", "z": "b.safetensors"}},
        "expected what its files hold, got a.safetensors holds y, which the index does not list "
        "there",
    ),
    "a tensor in another file": (
        {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "b.safetensors"}},
        "expected what its files hold, got a.safetensors holds y, which the index does not list "
        "there; b.safetensors lacks y",
    ),
    "a map of another kind": (
        {"weight_map": ["x"]},
        "expected an object with a weight_map, got none",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "text"), INDEX_FAULTS.values(), ids=INDEX_FAULTS)
def test_an_index_that_differs_from_its_files_is_refused(tmp_path, change, text):
    shards = {
        "a.safetensors": {"x": np.zeros(2, np.float32), "y": np.zeros(3, np.float32)},
        "b.safetensors": {"z": np.zeros(4, np.float32)},
    }
    directory = write_sharded(tmp_path / "model", shards)
    assert len(open_tensors(directory)) == 3
    write_sharded(directory, shards, **change)
    assert fault_text(lambda: open_tensors(directory)) == f"{directory / INDEX}: {text}"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "expected JSON text, got "),
        (b"[1, 2]", "expected an object with a weight_map, got none"),
        (b"{}", "expected an object with a weight_map, got none"),
        (b'{"weight_map": {}', "expected JSON text, got "),
        (b'{"weight_map": {"x": "a", "x": "b"}}', "expected JSON text, got 'x' twice"),
        (b'{"weight_map": {}, "weight_map": {}}', "expected JSON text, got 'weight_map' twice"),
        (b"[" * 100_000, "expected JSON text, got JSON that is nested too deep"),
        (b"\xff\xfe\xfd", "expected JSON text, got "),
    ],
    ids=["empty", "a list", "no map", "cut short", "a tensor twice", "two maps", "deep", "binary"],
)
def test_an_index_of_another_kind_is_refused(tmp_path, data, text):
    (tmp_path / INDEX).write_bytes(data)
    assert fault_text(lambda: open_tensors(tmp_path)).startswith(f"{tmp_path / INDEX}: {text}")


@pytest.mark.parametrize("keep", [0, 7, 8, 60, -8, -1])
def test_a_shard_that_is_cut_short_is_refused_by_name(tmp_path, keep):
    directory = write_sharded(
        tmp_path / "model", {"a.safetensors": every_dtype(), "b.safetensors": {"x": np.ones(9)}}
    )
    path = directory / "b.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    text = fault_text(lambda: open_tensors(directory))
    assert text.startswith(f"{path}: expected a whole safetensors file, got ")


F32_PAIR = entry("F32", (2,), 0, 8)
BAD_FILES = {
    "a name twice": file_bytes(
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
        b' "a": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}', bytes(8)
    ),
    "a text twice": file_bytes(
        b'{"__metadata__": {"k": "1", "k": "2"},'
        b' "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', bytes(8)
    ),
    "an overlap": file_bytes({"a": F32_PAIR, "b": F32_PAIR}, bytes(8)),
    "a hole": file_bytes({"a": F32_PAIR, "b": entry("F32", (2,), 12, 20)}, bytes(20)),
    "more bytes": file_bytes({"a": F32_PAIR}, bytes(9)),
    "fewer bytes": file_bytes({"a": F32_PAIR}, bytes(7)),
    "another shape": file_bytes({"a": entry("F32", (3,), 0, 8)}, bytes(8)),
    "a negative size": file_bytes({"a": entry("F32", (-2,), 0, 8)}, bytes(8)),
    "a size past 64 bits": file_bytes({"a": entry("F32", (2**62, 4), 0, 0)}),
    "an unknown dtype": file_bytes({"a": entry("F33", (2,), 0, 8)}, bytes(8)),
    "a header past the end": struct.pack("<Q", 2**62) + b"{}",
    "a zip": b"PK\x03\x04" + bytes(60),
    "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
}  # fmt: skip


@pytest.mark.parametrize("data", BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_is_not_whole_safetensors_is_refused(tmp_path, data):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    for call in (open_tensors, checkpoint.load_params):
        text = fault_text(lambda call=call: call(path))
        assert text.startswith(f"{path}: expected a whole safetensors file, got ")
    if data in (BAD_FILES["a name twice"], BAD_FILES["a text twice"]):
        assert text.endswith((" 'a' twice", " 'k' twice"))
