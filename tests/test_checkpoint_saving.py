"""Saving a decoder: what the files hold, and that they come back."""

import dataclasses
import errno
import io
import json
import math
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from checkpoint_cases import (
    ATTENTION,
    DECODER,
    DECODER_SHAPES,
    DTYPES,
    INDEX,
    e4m3_values,
    equal_trees,
    expected_decoder,
    fault_text,
    original_name,
    renamed,
    rounded_to_bfloat16,
)
from flax.linen import Partitioned
from small_models import decoder_params

from swa_jax import block_scales, weight_saving
from swa_jax.checkpoint import load_decoder, load_params, save_decoder, save_params
from swa_jax.files import open_new


def parse_file(path):
    """Header and tensors of a file, read here."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    tensors, ends = {}, [0]
    for name, field in header.items():
        if name != "__metadata__":
            start, stop = field["data_offsets"]
            raw = np.frombuffer(data[8 + size + start : 8 + size + stop], dtypes[field["dtype"]])
            tensors[name] = raw.reshape(field["shape"])
            assert (8 + size + start) % raw.dtype.itemsize == 0
            ends.append(stop)
    assert max(ends) == len(data) - 8 - size
    return header, tensors


def decoder(scan_layers=False, param_dtype="float32"):
    attention = dataclasses.replace(ATTENTION, param_dtype=param_dtype)
    config = dataclasses.replace(DECODER, attention=attention, scan_layers=scan_layers)
    return config, decoder_params(config)


by_decoder = pytest.mark.parametrize(
    ("scan_layers", "param_dtype"),
    [(False, "float32"), (True, "float32"), (False, "bfloat16"), (True, "bfloat16")],
)


@by_decoder
@pytest.mark.parametrize("names", ["huggingface", "original"])
@pytest.mark.parametrize("max_shard_bytes", [50_000, 10**9], ids=["sharded", "one file"])
def test_a_saved_decoder_comes_back_bit_for_bit(
    tmp_path, scan_layers, param_dtype, names, max_shard_bytes
):
    config, params = decoder(scan_layers, param_dtype)
    save_decoder(tmp_path, params, config, names=names, max_shard_bytes=max_shard_bytes)
    equal_trees(load_decoder(tmp_path, config), params)


@pytest.mark.parametrize("names", ["huggingface", "original"])
def test_a_saved_file_holds_the_public_names_shapes_and_values(tmp_path, names):
    config, params = decoder()
    save_decoder(tmp_path / "new" / "folder", params, config, names=names)
    (path,) = (tmp_path / "new" / "folder").iterdir()
    assert path.name == "model.safetensors"
    header, tensors = parse_file(path)
    naming = str if names == "huggingface" else original_name
    assert header["__metadata__"] == {"format": "pt"}
    assert {name: value.shape for name, value in tensors.items()} == {
        naming(name): shape for name, shape in DECODER_SHAPES.items()
    }
    want = renamed(tensors, dict(zip(map(naming, DECODER_SHAPES), DECODER_SHAPES, strict=True)).get)
    equal_trees(expected_decoder(want), params)
    with safetensors.safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == set(tensors)


def test_unrolled_and_scanned_parameters_give_the_same_file(tmp_path):
    config, params = decoder()
    scanned = dataclasses.replace(config, scan_layers=True)
    save_decoder(tmp_path / "a", params, config)
    save_decoder(tmp_path / "b", load_decoder(tmp_path / "a", scanned), scanned)
    file = "model.safetensors"
    assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "e4m3"])
def test_equal_parameters_give_equal_bytes(tmp_path, dtype):
    config, params = decoder()
    on_host = jax.tree.map(np.asarray, params)
    for name, tree in (("a", params), ("b", on_host)):
        save_decoder(tmp_path / name, tree, config, dtype=dtype, max_shard_bytes=60_000)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "b").iterdir())
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_several_files_hold_at_most_so_many_bytes_and_have_an_index(tmp_path):
    config, params = decoder()
    save_decoder(tmp_path, params, config, max_shard_bytes=50_000)
    files = sorted(file.name for file in tmp_path.iterdir())
    count = len(files) - 1
    assert count > 5
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] + [
        INDEX
    ]
    index = json.loads((tmp_path / INDEX).read_text())
    weight_map, total = {}, 0
    for file in files[:-1]:
        _, tensors = parse_file(tmp_path / file)
        size = sum(value.nbytes for value in tensors.values())
        assert size <= 50_000 or len(tensors) == 1
        weight_map |= dict.fromkeys(tensors, file)
        total += size
    assert index == {"metadata": {"total_size": total}, "weight_map": weight_map}
    assert set(weight_map) == set(DECODER_SHAPES)
    # No two neighbours would have fitted in one file.
    sizes = [(tmp_path / file).stat().st_size for file in files[:-1]]
    assert all(a + b > 50_000 for a, b in zip(sizes, sizes[1:], strict=False))


@by_decoder
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dtype_is_that_of_the_matrices_alone(tmp_path, scan_layers, param_dtype, dtype):
    config, params = decoder(scan_layers, param_dtype)
    save_decoder(tmp_path, params, config, dtype=dtype)
    _, tensors = parse_file(tmp_path / "model.safetensors")
    for name, value in tensors.items():
        assert value.dtype == (jnp.float32 if value.ndim == 1 else jnp.dtype(dtype)), name

    def rounded(value):
        vector = value.ndim - (scan_layers and value.shape[0] == 2) == 1
        return value if vector or dtype == "float32" else rounded_to_bfloat16(np.asarray(value))

    loaded = load_decoder(tmp_path, config)
    want = jax.tree.map(rounded, params)
    jax.tree.map(np.testing.assert_array_equal, loaded, want)


@by_decoder
@pytest.mark.parametrize("names", ["huggingface", "original"])
def test_e4m3_is_for_the_matrices_of_attention_and_swiglu(
    tmp_path, scan_layers, param_dtype, names
):
    config, params = decoder(scan_layers, param_dtype)
    save_decoder(tmp_path, params, config, names=names, dtype="e4m3")
    _, tensors = parse_file(tmp_path / "model.safetensors")
    naming = str if names == "huggingface" else original_name
    want = {}
    for name, shape in DECODER_SHAPES.items():
        inner = len(shape) == 2 and (".mlp." in name or ".self_attn." in name)
        kept = jnp.float32 if len(shape) == 1 else jnp.dtype(param_dtype)
        want[naming(name)] = (shape, jnp.dtype(ml_dtypes.float8_e4m3fn) if inner else kept)
        if inner:
            blocks = tuple(-(-size // 128) for size in shape)
            want[naming(f"{name}_scale_inv")] = (blocks, np.dtype(ml_dtypes.float8_e8m0fnu))
    assert {name: (value.shape, value.dtype) for name, value in tensors.items()} == want


def test_saving_what_was_loaded_from_e4m3_gives_equal_values(tmp_path):
    config, params = decoder(param_dtype="bfloat16")
    save_decoder(tmp_path / "a", params, config, dtype="e4m3")
    first = load_decoder(tmp_path / "a", config)
    save_decoder(tmp_path / "b", first, config, dtype="e4m3", max_shard_bytes=30_000)
    equal_trees(load_decoder(tmp_path / "b", config), first)
    for got, want in zip(jax.tree.leaves(first), jax.tree.leaves(params), strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.max(np.abs(got - want)) <= 2**-4 * np.max(np.abs(want))


def nearest_e4m3(values):
    """Codes of the nearest e4m3 values, ties to the even code; found by search in float64."""
    table = e4m3_values()[:127]
    size = np.abs(values)
    upper = np.clip(np.searchsorted(table, size), 1, 126)
    below, above = size - table[upper - 1], table[upper] - size
    nearest = np.where((below < above) | ((below == above) & (upper % 2 == 1)), upper - 1, upper)
    return (nearest | np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def test_a_blocks_scale_is_the_least_power_of_two_that_saturates_nothing():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(300, 200)).astype(np.float32)
    values *= np.exp2(rng.integers(-6, 6, (300, 1))).astype(np.float32)
    values[0, 0] = 448.0 * 2**4  # exactly: the quotient is 448
    values[0, 130] = np.nextafter(np.float32(448.0 * 2**4), np.float32(np.inf))  # just past it
    values[256:, :128] = 0
    values[256:, 128:] *= np.float32(2.0**-140)  # subnormal
    values[130, 7], values[131, 7], values[132, 150] = np.nan, np.inf, -np.inf
    codes, scales = block_scales.quantize(values)
    assert codes.shape == (300, 200)
    assert scales.view(np.uint8).tolist()[0] == [127 + 4, 127 + 5]
    assert scales.view(np.uint8).tolist()[2] == [1, 1]
    for i in range(3):
        for j in range(2):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            part = values[block].astype(np.float64)
            amax = np.max(np.abs(part[np.isfinite(part)]))
            mantissa, exponent = math.frexp(amax / 448)
            least = exponent - (mantissa == 0.5) if amax else -127
            assert int(scales.view(np.uint8)[i, j]) == max(127 + least, 1)
            quotient = part / 2.0 ** (int(scales.view(np.uint8)[i, j]) - 127)
            want = np.where(np.isfinite(part), nearest_e4m3(np.nan_to_num(quotient)), 127)
            got = codes.view(np.uint8)[block]
            np.testing.assert_array_equal(np.where(np.isfinite(part), got, got & 127), want)


def test_a_directory_with_a_checkpoint_is_left_as_it_is(tmp_path):
    config, params = decoder()
    save_decoder(tmp_path / "one", params, config)
    save_decoder(tmp_path / "several", params, config, max_shard_bytes=50_000)
    for folder in ("one", "several"):
        before = {file: file.read_bytes() for file in (tmp_path / folder).iterdir()}
        with pytest.raises(FileExistsError, match="expected no checkpoint in it, got model"):
            save_decoder(tmp_path / folder, params, config, dtype="bfloat16")
        assert {file: file.read_bytes() for file in (tmp_path / folder).iterdir()} == before


def test_a_file_of_a_shards_name_is_left_as_it_is(tmp_path):
    config, params = decoder()
    shard = tmp_path / "model-00001-of-00002.safetensors"
    shard.write_text("precious")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) * 2 // 3
    with pytest.raises(FileExistsError, match="got model-00001-of-00002.safetensors"):
        save_decoder(tmp_path, params, config, max_shard_bytes=size)
    assert [file.name for file in tmp_path.iterdir()] == [shard.name]
    assert shard.read_text() == "precious"


def test_a_link_in_the_way_is_replaced_and_not_followed(tmp_path):
    config, params = decoder()
    (tmp_path / "precious").write_text("as it was")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors.partial").symlink_to(tmp_path / "precious")
    save_decoder(tmp_path / "model", params, config)
    assert (tmp_path / "precious").read_text() == "as it was"
    equal_trees(load_decoder(tmp_path / "model", config), params)


@pytest.mark.parametrize("failing", [1, 9, 16])
def test_a_save_that_fails_leaves_no_file(tmp_path, monkeypatch, failing):
    config, params = decoder()
    calls = iter(range(1, 100))
    quantize = weight_saving.quantize

    def fail(values):
        if next(calls) == failing:
            raise OSError(errno.ENOSPC, "no space")
        return quantize(values)

    monkeypatch.setattr(weight_saving, "quantize", fail)
    with pytest.raises(OSError, match="no space"):
        save_decoder(tmp_path, params, config, dtype="e4m3", max_shard_bytes=20_000)
    assert list(tmp_path.iterdir()) == []


def test_partitioning_boxes_are_taken_off(tmp_path):
    config, params = decoder()
    boxed = jax.tree.map(lambda leaf: Partitioned(leaf, names=(None,) * leaf.ndim), params)
    save_decoder(tmp_path, boxed, config)
    equal_trees(load_decoder(tmp_path, config), params)
    save_params(tmp_path / "tree", boxed["params"])
    equal_trees(load_params(tmp_path / "tree")[0], params["params"])


def test_parameters_of_one_name_and_dtypes_that_lose_them_are_refused(tmp_path):
    ones = np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match=r"expected a name for each parameter, got a.b twice"):
        save_params(tmp_path / "tree", {"a.b": ones, "a": {"b": ones}})
    with pytest.raises(ValueError, match=r"dtype: expected .*, got 'int8'"):
        save_params(tmp_path / "tree", {"a": ones / 2}, dtype="int8")
    assert not list(tmp_path.iterdir())


ONES = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("params", "metadata", "message"),
    [
        (None, None, "params: expected a Mapping, got NoneType"),
        (ONES, None, "params: expected a Mapping, got ndarray"),
        ({"a": {}}, None, "params: expected at least one array, got none"),
        ({"a": ONES, "a.b": ONES}, None, "params: expected 'a.b' to lie in a tree"),
        ({".".join("a" * 70): ONES}, None, "params: expected a tree of at most 64 levels, got 69"),
        ({"a": ONES, "b": {"c": np.complex64([1])}}, None, "params: b.c: .*, got complex64"),
        ({"a": np.ones(2, ml_dtypes.float8_e5m2)}, None, "params: a: .*, got float8_e5m2"),
        ({"a": jnp.ones(2, jnp.int4)}, None, "params: a: .*, got int4"),
        ({"a": jax.random.key(0)}, None, "params: a: .*, got key<fry>"),
        ({"a": "one"}, None, "params: a: .*, got <U3"),
        ({"a": object()}, None, "params: a: .*, got object"),
        ({"__metadata__": ONES}, None, "tensors: expected other names than '__metadata__'"),
        ({"a": ONES}, {"k": 5}, "metadata: expected texts by name, got 'k': 5"),
        ({"a": ONES}, {5: "k"}, "metadata: expected texts by name, got 5: 'k'"),
        ({"a": ONES}, "text", "metadata: expected a Mapping, got str"),
    ],
)
def test_what_would_not_come_back_is_not_written(tmp_path, params, metadata, message):
    with pytest.raises(ValueError, match=message):
        save_params(tmp_path / "tree", params, metadata)
    assert not list(tmp_path.iterdir())


def test_scalars_and_dtypes_come_back_as_they_were(tmp_path):
    values = [
        np.float32(3),
        jnp.bfloat16(2),
        np.ones(2, ml_dtypes.float8_e4m3fn),
        np.eye(3).T[:, ::2],
    ]
    save_params(tmp_path / "tree", {"a": values})
    for i, value in enumerate(values):
        loaded = load_params(tmp_path / "tree")[0]["a"][str(i)]
        assert (loaded.dtype, loaded.shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(loaded, np.asarray(value))


@pytest.mark.parametrize("name", ["write", "replace"])
def test_a_file_that_cannot_be_written_whole_is_left_as_it_was(tmp_path, monkeypatch, name):
    def fail(*_):
        raise OSError(errno.ENOSPC, "no space")

    path = tmp_path / "params.safetensors"
    save_params(path, {"a": np.float32([1])})
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        if name == "replace":
            patch.setattr(os, "replace", fail)
        else:
            full = type("Full", (io.BytesIO,), {"write": fail})
            patch.setattr(Path, "open", lambda path, mode: path.touch() or full())
        with pytest.raises(OSError, match="no space"):
            save_params(path, {"a": np.float32([2])})
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


@pytest.mark.parametrize("link", [False, True])
def test_no_file_takes_the_place_of_a_pipe_or_a_device(tmp_path, link):
    path = pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    if link:
        path = tmp_path / "link"
        path.symlink_to(pipe)
    for write in (lambda: save_params(path, {"a": np.float32([1])}), lambda: open_new(path)):
        with pytest.raises(ValueError, match="expected a file, got a pipe or a device"):
            write()
    assert pipe.is_fifo()
    assert path.is_symlink() == link


def test_the_index_appears_last(tmp_path, monkeypatch):
    config, params = decoder()
    order = []
    replace = os.replace

    def record(source, target):
        order.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(weight_saving.os, "replace", record)
    save_decoder(tmp_path, params, config, max_shard_bytes=50_000)
    assert order[-1] == INDEX
    assert len(order) == len(list(tmp_path.iterdir()))


def test_one_error_lists_every_parameter_that_does_not_fit(tmp_path):
    config, params = decoder()
    tree = dict(params["params"])
    del tree["head"]
    tree["norm"] = {"weight": np.zeros(3, np.float32)}
    tree["layers_0"] = tree["layers_0"] | {"mlp": tree["layers_0"]["mlp"] | {"x": np.zeros(1)}}
    tree["embedding"] = np.zeros((50, 160), np.int32)
    text = fault_text(lambda: save_decoder(tmp_path / "model", {"params": tree}, config))
    assert text == (
        "params: missing head; embedding: expected a floating dtype of 16 bits or more, got int32; "
        "norm.weight: expected shape (160,), got (3,); unexpected layers_0.mlp.x"
    )
    assert not (tmp_path / "model").exists()
    assert fault_text(lambda: save_decoder(tmp_path, tree, config)) == (
        "params: expected {'params': ...}, got ['embedding', 'layers_0', 'layers_1', 'norm']"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"names": "hf"}, "names: expected one of 'huggingface', 'original', got 'hf'"),
        ({"dtype": "float16"},
         "dtype: expected one of None, 'float32', 'bfloat16', 'e4m3', got 'float16'"),
        ({"config": ATTENTION}, "config: expected a DecoderConfig, got AttentionConfig"),
        ({"directory": None}, "directory: expected a path, got NoneType"),
        ({"max_shard_bytes": 0}, "max_shard_bytes: expected 1 or more, got 0"),
        ({"max_shard_bytes": 1.5}, "max_shard_bytes: expected an integer, got 1.5"),
    ],
)  # fmt: skip
def test_another_argument_that_is_wrong_is_refused(tmp_path, arguments, text):
    config, params = decoder()
    usual = {"directory": tmp_path, "params": params, "config": config}
    assert fault_text(lambda: save_decoder(**usual | arguments)) == text
