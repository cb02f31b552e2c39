"""RingCache: regions of layers in blocks, copies of slots, and requests that are moved."""

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from small_models import attention_config, decoder_config, decoder_params

import swa_jax as swa
from pallas_kernels import load_rows, store_rows
from swa_jax import cache as cache_module
from swa_jax import checkpoint
from swa_jax.exported import ExportedSlot
from swa_jax.files import read_safetensors, write_safetensors

GEOMETRY = swa.RingGeometry(window=3, capacity=5)
FORMAT = swa.V41.with_width(32)  # 33 bytes a row, 165 a ring, 192 a region
SLOTS, LAYERS, REGION = 4, 3, 192
ONE_ROW = swa.RingGeometry(window=1, capacity=1)


def empty(slots=SLOTS, layers=LAYERS, geometry=GEOMETRY, fmt=FORMAT) -> swa.RingCache:
    return swa.RingCache.create(slots, layers, geometry, fmt)


def filled(seed: int = 0) -> swa.RingCache:
    """A cache of random bytes, as former owners leave it."""
    cache = empty()
    data = np.random.default_rng(seed).integers(0, 256, cache.blocks[0].shape, np.uint8)
    return dataclasses.replace(cache, blocks=(jnp.asarray(data),))


def random_rows(count: int, seed: int, fmt: swa.KVCacheFormat = FORMAT) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, fmt.row_bytes), np.uint8)


def bytes_of(cache: swa.RingCache) -> list[np.ndarray]:
    return [np.array(block) for block in cache.blocks]


# --- regions and blocks


def test_every_layer_has_a_region_of_whole_32_byte_units_in_one_block():
    cache = empty()
    assert [block.shape for block in cache.blocks] == [(4, 576)]
    assert cache.nbytes == 2304
    assert cache.slots == 4
    assert (cache.memory.mode, cache.memory.bytes_per_device) == ("one device", 2304)
    for i, start in enumerate([0, 192, 384]):
        rows = cache.layer(i)
        assert (int(rows.start), rows.rows_per_slot, rows.fmt) == (start, 5, FORMAT)
        assert rows.data is cache.blocks[0]
    assert not any(np.any(block) for block in cache.blocks)


@pytest.mark.parametrize(
    ("fmt", "region"),
    # 134 rows of 528, 583 + 1 pad, 1024, 2048 and 288 bytes
    [(swa.V41, 70752), (swa.V4, 78272), (swa.BF16, 137216), (swa.F32, 274432),
     (swa.V41_FP4, 38592)],
    ids=lambda value: getattr(value, "name", None),
)  # fmt: skip
def test_regions_of_the_default_ring(fmt, region):
    geometry = swa.RingGeometry.for_drafts(128)
    cache = jax.eval_shape(lambda: swa.RingCache.create(2, 3, geometry, fmt))
    assert [block.shape for block in cache.blocks] == [(2, 3 * region)]
    assert region % 32 == 0


def test_layers_of_one_block_never_mix():
    cache = empty()
    expected = np.zeros((SLOTS, LAYERS * REGION), np.uint8)
    for layer in (1, 0, 2, 1):
        new = random_rows(SLOTS * 5, seed=layer + 10)
        stored = store_rows(cache.layer(layer), jnp.asarray(new), np.arange(SLOTS * 5))
        cache = cache.with_layer(layer, stored)
        expected[:, layer * REGION : layer * REGION + 165] = new.reshape(SLOTS, 165)
        np.testing.assert_array_equal(cache.blocks[0], expected)
    for layer in range(LAYERS):
        rows = load_rows(cache.layer(layer), np.arange(SLOTS * 5))
        region = expected[:, layer * REGION : layer * REGION + 165]
        np.testing.assert_array_equal(rows, region.reshape(-1, 33))


def test_a_traced_layer_index_names_the_same_region():
    new = jnp.asarray(np.stack([random_rows(2, seed=i) for i in range(LAYERS)]))
    slots = jnp.asarray([1, 17])
    expected = empty()
    for i in range(LAYERS):
        expected = expected.with_layer(i, store_rows(expected.layer(i), new[i], slots))

    @jax.jit
    def scanned(cache, new):
        def body(cache, inputs):
            i, rows = inputs
            return cache.with_layer(i, store_rows(cache.layer(i), rows, slots)), None

        return jax.lax.scan(body, cache, (jnp.arange(LAYERS), new))[0]

    np.testing.assert_array_equal(scanned(empty(), new).blocks[0], expected.blocks[0])


def test_a_cache_above_2_gib_is_split_by_layers():
    # a layer of 4096 slots takes 289,800,192 bytes, so 7 fit below 2**31
    cache = jax.eval_shape(lambda: swa.RingCache.create(4096, 43, swa.RingGeometry.for_drafts(128)))
    assert [block.shape for block in cache.blocks] == [(4096, 7 * 70752)] * 6 + [(4096, 70752)]
    assert all(block.size < 2**31 for block in cache.blocks)
    assert cache.nbytes == 43 * 289_800_192


def test_layers_of_several_blocks_never_mix(monkeypatch):
    monkeypatch.setattr(cache_module, "MAX_BLOCK_BYTES", 2 * SLOTS * REGION + 1)
    cache = empty(layers=5)
    assert [block.shape for block in cache.blocks] == [(4, 384), (4, 384), (4, 192)]
    expected = [np.zeros((SLOTS, size), np.uint8) for size in (384, 384, 192)]
    for layer, (block, start) in enumerate([(0, 0), (0, 192), (1, 0), (1, 192), (2, 0)]):
        new = random_rows(SLOTS * 5, seed=layer)
        stored = store_rows(cache.layer(layer), jnp.asarray(new), np.arange(SLOTS * 5))
        cache = cache.with_layer(layer, stored)
        expected[block][:, start : start + 165] = new.reshape(SLOTS, 165)
        for got, want in zip(cache.blocks, expected, strict=True):
            np.testing.assert_array_equal(got, want)
    for layers, blocks in [(5, 3), (3, 2)]:
        with pytest.raises(ValueError, match=f"index needs all layers in one block, got {blocks}"):
            jax.jit(lambda cache, i: cache.layer(i).start)(empty(layers=layers), 1)


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: empty(slots=0), "slots: expected an integer of 1 or more, got 0"),
        (lambda: empty(slots=True), "slots: expected an integer of 1 or more, got True"),
        (lambda: empty(layers=2.0), "layers: expected an integer of 1 or more, got 2.0"),
        (lambda: empty(fmt="V41"), "fmt: expected a KVCacheFormat, got str"),
        # (2**31 - 1) // 192
        (
            lambda: jax.eval_shape(lambda: empty(slots=11_184_811)),
            "slots: expected at most 11184810, the limit of 2 GiB",
        ),
        # one row of 32 bytes in each of 2**26 slots is 2**31 bytes
        (
            lambda: jax.eval_shape(lambda: empty(2**26, 1, ONE_ROW, swa.BF16.with_width(16))),
            "slots: expected at most 67108863, the limit of 2 GiB",
        ),
        (lambda: empty(geometry=(3, 5)), "geometry: expected a RingGeometry, got tuple"),
        (lambda: empty().layer(3), "layer: expected 0 to 2, got 3"),
        (lambda: empty().layer(-1), "layer: expected 0 to 2, got -1"),
        (lambda: empty().layer(True), "layer: expected an integer, got True"),
        (lambda: empty().with_layer(3, empty().layer(0)), "layer: expected 0 to 2, got 3"),
        (lambda: empty().with_layer(0, empty().blocks[0]), "rows: expected a KVRows, got "),
        (
            lambda: empty().with_layer(1, empty().layer(0)),
            "rows: expected layer 1, from byte .* of a slot, got rows from byte 0",
        ),
        (
            lambda: empty().with_layer(0, empty(slots=5).layer(0)),
            r"rows: expected 5 rows of 33 bytes \(V41\) in \(4, 576\), got 5 of 33",
        ),
        (
            lambda: empty().with_layer(0, empty(fmt=swa.BF16.with_width(32)).layer(0)),
            r"rows: expected 5 rows of 33 bytes \(V41\)",
        ),
        (
            lambda: empty().with_layer(0, empty(geometry=swa.RingGeometry(3, 4)).layer(0)),
            r"rows: expected 5 rows of 33 bytes \(V41\) .* got 4 of 33 \(V41\)",
        ),
        # other rows in a block of the same shape
        (
            lambda: empty().with_layer(0, empty(fmt=swa.BF16.with_width(17)).layer(0)),
            r"\(V41\) in \(4, 576\), got 5 of 34 \(BF16\) in \(4, 576\)",
        ),
        (
            lambda: empty().with_layer(0, dataclasses.replace(empty().layer(0), rows_per_slot=4)),
            r"\(V41\) in \(4, 576\), got 4 of 33 \(V41\) in \(4, 576\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(create, message):
    with pytest.raises(ValueError, match=message):
        create()


def test_the_limit_is_of_the_slots_on_one_device():
    # A mesh that names the one device twice will do, as no array is made.
    mesh = Mesh(np.array(jax.devices()[:1] * 2), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    def create(slots):
        return jax.eval_shape(lambda: swa.RingCache.create(slots, 3, GEOMETRY, FORMAT, sharding))

    assert [block.shape for block in create(22_369_620).blocks] == [(22_369_620, 192)] * 3
    with pytest.raises(ValueError, match="slots: expected at most 22369620, the limit of 2 GiB"):
        create(22_369_622)
    with pytest.raises(ValueError, match="slots: expected a multiple of 2, .* got 3"):
        create(3)


# --- copies


@pytest.mark.donates
def test_a_snapshot_outlives_the_donation_of_the_cache():
    cache = filled()
    expected = bytes_of(cache)
    snapshot = cache.snapshot()
    invert = jax.jit(lambda cache: jax.tree.map(jnp.invert, cache), donate_argnums=0)
    invert(cache)
    assert cache.blocks[0].is_deleted()
    np.testing.assert_array_equal(snapshot.blocks[0], expected[0])
    assert (snapshot.layers, snapshot.geometry, snapshot.fmt) == (LAYERS, GEOMETRY, FORMAT)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    ("src", "dst", "sources"),
    [
        ([2], [0], [2, 1, 2, 3]),
        ([0, 1], [1, 0], [1, 0, 2, 3]),  # both are read before either is written
        ([3, 3], [0, 2], [3, 1, 3, 3]),
        ([3, -1, 1, 0], [-1, 2, 0, -1], [1, 1, 2, 3]),  # -1 skips a pair
        ([4, 0], [1, 4], [0, 1, 2, 3]),  # so does a slot outside
        ([3, -1], [1, 1], [0, 3, 2, 3]),  # what is skipped may name any slot
        ([0, 1], [4, 4], [0, 1, 2, 3]),  # and so may what lies outside
        ([], [], [0, 1, 2, 3]),
    ],
)
def test_slots_are_copied_as_they_are_before_the_call(src, dst, sources, jitted):
    cache = filled()
    copy = jax.jit(swa.RingCache.copy_slots) if jitted else swa.RingCache.copy_slots
    copied = copy(cache, np.array(src, np.int32), np.array(dst, np.int32))
    np.testing.assert_array_equal(copied.blocks[0], bytes_of(cache)[0][sources])


def test_slots_of_all_blocks_are_copied(monkeypatch):
    monkeypatch.setattr(cache_module, "MAX_BLOCK_BYTES", SLOTS * REGION)
    cache = empty()
    for i in range(LAYERS):
        rows = store_rows(cache.layer(i), jnp.asarray(random_rows(20, seed=i)), np.arange(20))
        cache = cache.with_layer(i, rows)
    copied = cache.copy_slots([1], [3])
    assert len(copied.blocks) == 3
    for got, before in zip(copied.blocks, bytes_of(cache), strict=True):
        np.testing.assert_array_equal(got, before[[0, 1, 2, 1]])


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([0, 1], [2], r"dst: expected shape \(2\), got \(1,\)"),
        (0, 1, r"src: expected shape \(any\), got \(\)"),
        ([0.0], [1], "src: expected integers"),
        ([0], [True], "dst: expected integers"),
        ([0, 1, 2], [1, 3, 1], r"dst: expected distinct state slots, got \[1, 3, 1\]"),
    ],
)
def test_wrong_slot_lists_are_refused(src, dst, message):
    with pytest.raises(ValueError, match=message):
        empty().copy_slots(src, dst)


# --- requests that are moved


def with_request(cache: swa.RingCache, slot: int, positions: int) -> swa.RingCache:
    """Positions 0 .. positions - 1 of a request, with rows that depend on the position only."""
    for layer in range(LAYERS):
        for position in range(positions):
            row = jnp.asarray(random_rows(1, seed=1000 * layer + position))
            place = GEOMETRY.slots(jnp.asarray([slot]), jnp.asarray([position]))
            cache = cache.with_layer(layer, store_rows(cache.layer(layer), row, place))
    return cache


def request_row(layer: int, position: int) -> np.ndarray:
    return random_rows(1, seed=1000 * layer + position)[0]


@pytest.mark.parametrize("positions", [0, 1, 2, 4, 5, 13])
def test_equal_prefixes_give_equal_bytes_whoever_had_the_slot(positions):
    first = with_request(filled(seed=1), 0, positions).export_slot(0, positions)
    second = with_request(filled(seed=2), 3, positions).export_slot(3, positions)
    assert first.to_bytes() == second.to_bytes()
    assert first.data.shape == (3, 2, 33)
    for layer in range(LAYERS):
        for i, position in enumerate([positions - 2, positions - 1]):
            want = request_row(layer, position) if position >= 0 else np.zeros(33, np.uint8)
            np.testing.assert_array_equal(first.data[layer, i], want)


@pytest.mark.parametrize("positions", [0, 1, 2, 13])
def test_an_imported_request_has_its_rows_in_the_new_slot_and_touches_nothing_else(positions):
    exported = with_request(filled(seed=1), 0, positions).export_slot(0, positions)
    before = filled(seed=3)
    cache, following = before.import_slot(2, ExportedSlot.from_bytes(exported.to_bytes()))
    assert int(following) == positions
    expected = bytes_of(before)[0]
    for layer in range(LAYERS):
        for position in range(max(0, positions - 2), positions):
            start = layer * REGION + position % 5 * 33
            expected[2, start : start + 33] = request_row(layer, position)
    np.testing.assert_array_equal(cache.blocks[0], expected)
    again = cache.export_slot(2, following)
    assert again.to_bytes() == exported.to_bytes()


def test_export_and_import_run_under_jit_for_any_slot_and_position():
    cache = with_request(filled(), 1, 9)
    traces = []

    @jax.jit
    def move(cache, source, position, target):
        traces.append(None)
        return cache.import_slot(target, cache.export_slot(source, position))

    for source, position, target in [(1, 9, 2), (1, 8, 0), (2, 1, 3)]:
        moved, following = move(cache, source, position, target)
        want, _ = cache.import_slot(target, cache.export_slot(source, position))
        np.testing.assert_array_equal(moved.blocks[0], want.blocks[0])
        assert int(following) == position
    assert len(traces) == 1


def test_a_window_of_one_exports_no_rows():
    cache = empty(geometry=swa.RingGeometry(1, 4))
    exported = cache.export_slot(0, 7)
    assert exported.data.shape == (3, 0, 33)
    moved, following = cache.import_slot(1, ExportedSlot.from_bytes(exported.to_bytes()))
    assert int(following) == 7
    np.testing.assert_array_equal(moved.blocks[0], cache.blocks[0])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"fmt": swa.BF16.with_width(32)}, "exported: expected fmt .*V41.* got .*BF16"),
        ({"fmt": swa.V41.with_width(64)}, "exported: expected fmt .*=32.* got .*=64"),
        ({"geometry": swa.RingGeometry(4, 5)}, "exported: expected geometry .*window=3.*window=4"),
        ({"geometry": swa.RingGeometry(3, 6)}, "expected geometry .*capacity=5.*capacity=6"),
        ({"layers": 2}, r"exported.data: expected shape \(3, 2, 33\), got \(2, 2, 33\)"),
    ],
)
def test_a_request_of_another_cache_is_refused(other, message):
    exported = empty(**other).export_slot(0, 3)
    with pytest.raises(ValueError, match=message):
        empty().import_slot(0, ExportedSlot.from_bytes(exported.to_bytes()))


def test_what_is_not_an_exported_slot_is_refused():
    with pytest.raises(ValueError, match="exported: expected an ExportedSlot, got KVRows"):
        empty().import_slot(0, empty().layer(0))
    with pytest.raises(ValueError, match="b: expected integers"):
        empty().export_slot(0.5, 3)
    with pytest.raises(ValueError, match=r"b: expected shape \(\), got \(1,\)"):
        empty().export_slot([0], 3)
    with pytest.raises(ValueError, match=r"next_position: expected shape \(\), got \(1,\)"):
        empty().export_slot(0, [3])
    for slot in (-1, 4):
        with pytest.raises(ValueError, match=f"b: expected a state slot from 0 to 3, got {slot}"):
            empty().export_slot(slot, 3)
    with pytest.raises(ValueError, match="next_position: expected 0 or more, got -1"):
        empty().export_slot(0, -1)


@pytest.mark.parametrize("keep", [0, 8, 60, -1])
def test_bytes_that_are_cut_short_are_refused(keep):
    data = filled().export_slot(0, 3).to_bytes()
    with pytest.raises(ValueError, match="expected a whole safetensors file"):
        ExportedSlot.from_bytes(data[:keep])


def test_text_is_not_taken_for_bytes():
    with pytest.raises(ValueError, match="data: expected a bytes, got str"):
        ExportedSlot.from_bytes("xx")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": "4"}, r"expected shape \(any, 3, 33\), got \(3, 2, 33\)"),
        (
            {"format": json.dumps(dataclasses.asdict(swa.V41.with_width(64)))},
            r"expected shape \(any, 2, 66\), got \(3, 2, 33\)",
        ),
        ({"capacity": "2"}, "capacity: expected window"),
        ({"format": "V41"}, "exported slot: expected another header, got .*Expecting value"),
        ({"format": "[3]"}, "exported slot: expected another header, got "),
        ({"format": '{"size": 3}'}, "exported slot: expected another header, got .*'size'"),
        ({"next_position": "-1"}, "expected a position from 0, got -1"),
        ({"next_position": str(2**31)}, "next_position: expected int32"),
        ({"next_position": "soon"}, "invalid literal"),
    ],
)
def test_bytes_whose_header_does_not_fit_are_refused(change, message):
    tensors, metadata = read_safetensors(filled().export_slot(0, 3).to_bytes())
    with pytest.raises(ValueError, match=message):
        ExportedSlot.from_bytes(write_safetensors(tensors, metadata | change))


@pytest.mark.parametrize(
    "entry", ["window", "capacity", "format", "next_position", "model", "sha256"]
)
def test_bytes_without_an_entry_are_refused(entry):
    tensors, metadata = read_safetensors(filled().export_slot(0, 3).to_bytes())
    del metadata[entry]
    with pytest.raises(ValueError, match=f"expected an entry '{entry}', got none"):
        ExportedSlot.from_bytes(write_safetensors(tensors, metadata))


@pytest.mark.parametrize(("saved", "asked"), [("a", "b"), ("a", ""), ("", "b")])
def test_rows_of_another_model_of_the_same_shape_are_refused(saved, asked):
    exported = filled().export_slot(0, 3)
    data = exported.to_bytes(model=saved)
    assert ExportedSlot.from_bytes(data, model=saved).to_bytes() == exported.to_bytes()
    with pytest.raises(ValueError, match=f"expected rows of model '{asked}', got '{saved}'"):
        ExportedSlot.from_bytes(data, model=asked)


def test_a_model_is_named_by_text():
    exported = filled().export_slot(0, 3)
    with pytest.raises(ValueError, match="model: expected a str, got NoneType"):
        exported.to_bytes(None)
    with pytest.raises(ValueError, match="model: expected a str, got int"):
        ExportedSlot.from_bytes(exported.to_bytes(), 5)


def test_bytes_whose_rows_were_changed_are_refused():
    tensors, metadata = read_safetensors(filled().export_slot(0, 3).to_bytes())
    rows = np.array(tensors["rows"])
    rows[0, 1, 2] ^= 1
    with pytest.raises(ValueError, match="expected rows and header of its sha256, got others"):
        ExportedSlot.from_bytes(write_safetensors({"rows": rows}, metadata))


def test_bytes_without_rows_are_refused():
    tensors, metadata = read_safetensors(filled().export_slot(0, 3).to_bytes())
    with pytest.raises(ValueError, match="expected an entry 'rows', got none"):
        ExportedSlot.from_bytes(write_safetensors({"row": tensors["rows"]}, metadata))


# --- a moved request goes on as if it had stayed

PROMPT = np.random.default_rng(5).integers(0, 50, (2, 19), dtype=np.int32)
STEPS = 4


@functools.cache
def decode_step(config: swa.DecoderConfig):
    model = swa.Decoder(config)

    @functools.partial(jax.jit, donate_argnames="cache")
    def step(params, cache, tokens, state_ids, positions):
        meta = swa.DecodeMetadata.build(config.geometry, state_ids, positions)
        return model.apply(params, tokens, cache, meta)

    return step


def continue_request(config, params, cache, slot, position, tokens):
    """Hidden states of single steps from `position` on; the other row of the call is padding."""
    outputs = []
    for i in range(STEPS):
        hidden, cache = decode_step(config)(
            params,
            cache,
            np.int32([[tokens[i]], [0]]),
            np.int32([slot, -1]),
            np.int32([[position + i], [-1]]),
        )
        outputs.append(np.asarray(hidden)[0, 0])
    return np.stack(outputs)


ANOTHER_PROCESS = """
import sys
import numpy as np
import swa_jax as swa
from swa_jax.exported import ExportedSlot
from swa_jax import checkpoint

sys.path.insert(0, sys.argv[2])
import test_cache

folder = test_cache.Path(sys.argv[1])
config = swa.DecoderConfig.from_json((folder / "config.json").read_text())
params, _ = checkpoint.load_params(folder / "params")
exported = ExportedSlot.from_bytes((folder / "slot").read_bytes())
cache = swa.RingCache.for_decoder(config, 3)
cache, position = cache.import_slot(1, exported)
tokens = np.load(folder / "tokens.npy")
outputs = test_cache.continue_request(config, params, cache, 1, int(position), tokens)
np.save(folder / "outputs.npy", outputs)
"""


def test_a_moved_request_goes_on_bit_for_bit_in_another_slot_and_another_process(tmp_path):
    config = decoder_config(attention_config(3, swa.V41), num_layers=2)
    params = decoder_params(config)
    cache = swa.RingCache.create(3, 2, config.geometry, config.fmt)
    state_ids = np.int32([2, 0])
    for position in range(15):  # past the end of the ring of 9 rows
        _, cache = decode_step(config)(
            params,
            cache,
            PROMPT[:, position : position + 1],
            state_ids,
            np.full((2, 1), position, np.int32),
        )
    exported = cache.export_slot(2, 15)
    tokens = PROMPT[0, 15:]
    moved, position = cache.import_slot(1, exported)
    stayed = continue_request(config, params, cache, 2, 15, tokens)
    elsewhere = continue_request(config, params, moved, 1, int(position), tokens)
    np.testing.assert_array_equal(elsewhere, stayed)

    (tmp_path / "config.json").write_text(config.to_json())
    checkpoint.save_params(tmp_path / "params", params)
    (tmp_path / "slot").write_bytes(exported.to_bytes())
    np.save(tmp_path / "tokens.npy", tokens)
    subprocess.run(
        [sys.executable, "-c", ANOTHER_PROCESS, str(tmp_path), str(Path(__file__).parent)],
        cwd=Path(__file__).parent.parent,
        check=True,
    )
    np.testing.assert_array_equal(np.load(tmp_path / "outputs.npy"), stayed)
