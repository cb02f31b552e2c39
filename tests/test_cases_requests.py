"""Cases of tests/cases.md: requests in one batch, padding, and the slots that they leave."""

import float64_reference
import jax.numpy as jnp
import numpy as np
import pytest
from ring_layers import RingLayer, ShowLayer
from small_models import activations, attention_config, largest_error

import swa_jax as swa
from swa_jax.exported import ExportedSlot
from swa_jax.files import read_safetensors, write_safetensors

pytestmark = pytest.mark.quick_compilation

EXACT = attention_config(3, swa.F32)  # rings of 9 rows
OTHER = 60  # a tag that is no position


# --- E: batches


def test_E01_padding_of_a_shorter_prompt_is_not_stored():
    show = ShowLayer(3, 5, fill=0x5A)
    before = show.layer.data
    got = show.prefill([0, 0], [2, 5], 5, state_ids=[0, 2])
    assert got[0] == [{0}, {0, 1}, set(), set(), set()]
    assert got[1] == [{0}, {0, 1}, {0, 1, 2}, {1, 2, 3}, {2, 3, 4}]
    assert show.held(0)[:2] == [0, 1]
    assert show.held(2) == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(show.layer.data[0, 2:], before[0, 2:])
    np.testing.assert_array_equal(show.layer.data[[1, 3]], before[[1, 3]])


def test_E02_each_request_is_rotated_by_its_own_position():
    x = activations(EXACT, 2, 3)
    together, alone = RingLayer(EXACT), [RingLayer(EXACT) for _ in range(2)]
    together.prefill(x[:, :2], [1, 2], [28, 23], [2, 2])
    got = together.decode(x[:, 2:], [1, 2], [[30], [25]])
    for i, (layer, position) in enumerate(zip(alone, (30, 25), strict=True)):
        layer.prefill(x[[i, i], :2], [0, -1], [position - 2, 0], [2, 0])
        single = layer.decode(x[[i, i], 2:], [0, -1], [[position], [-1]])[0]
        np.testing.assert_array_equal(got[i], single)
        positions = np.arange(position - 2, position + 1)
        params = layer.params["params"]
        want = float64_reference.attention_layer(params, x[i], EXACT, positions)
        assert largest_error(got[i, 0], want[2]) <= 3e-5
        stored = together.data[i + 1, position % 9].view(np.float32)
        want = float64_reference.shared_rows(params, x[i], EXACT, positions)
        assert largest_error(stored, want[2]) <= 3e-5


def test_E03_a_request_is_the_same_beside_a_short_and_a_long_neighbour():
    config = attention_config(8, swa.F32)  # rings of 14 rows
    x = activations(config, 2, 50)
    found = []
    for neighbour in (0, 1, 50):
        layer = RingLayer(config)
        first = layer.prefill(x, [2, 0], [0, 0], [10, neighbour])[0, :10]
        place = [[10], [neighbour if neighbour else -1]]
        found.append((first, layer.decode(x[:, 10:11], [2, 0], place)[0], layer.data[2]))
    for got in found[1:]:
        for part, alone in zip(got, found[0], strict=True):
            np.testing.assert_array_equal(part, alone)


def test_E05_a_request_that_pads_the_batch_reads_and_writes_nothing():
    padded, plain = (ShowLayer(3, 5, fill=0x5A) for _ in range(2))
    before = padded.layer.data
    for position in range(2):
        positions = [[position], [position], [position], [-1]]
        tags = [[position], [10 + position], [20 + position], [OTHER]]
        got = padded.decode(positions, tags, state_ids=[2, 0, 1, -1])
        want = plain.decode(positions[:3], tags[:3], state_ids=[2, 0, 1])
        assert got == [*want, [set()]]
        assert want[1] == [{10, 11} if position else {10}]
        np.testing.assert_array_equal(padded.layer.data, plain.layer.data)
    np.testing.assert_array_equal(padded.layer.data[3], before[3])


# --- F: slots that pass from one request to another


def test_F01_rows_of_an_earlier_owner_are_never_seen():
    show, clean = ShowLayer(3, 5), ShowLayer(3, 5)
    show.prefill([0], [10], 12, [[*range(20, 30), -1, -1]])
    for layer in (show, clean):
        assert [layer.decode([[p]])[0][0] for p in range(3)] == [{0}, {0, 1}, {0, 1, 2}]
    clean = ShowLayer(3, 5)
    show.prefill([0], [10], 12, [[*range(20, 30), -1, -1]])
    assert show.prefill([0], [3], 12) == clean.prefill([0], [3], 12)


def test_F02_requests_with_one_prefix_have_rows_of_their_own():
    show, alone = ShowLayer(3, 5), ShowLayer(3, 5)
    prefix = [0, 1, 2, 3]
    for position in range(4):
        tags = [[prefix[position]]] * 2
        show.decode([[position]] * 2, tags, state_ids=[1, 3])
        alone.decode([[position]], tags[:1], state_ids=[1])
    np.testing.assert_array_equal(show.layer.data[1], show.layer.data[3])
    for position in (4, 5):
        before = show.layer.data
        assert show.decode([[position]], [[40 + position]], state_ids=[3])[0][0] >= {40 + position}
        np.testing.assert_array_equal(show.layer.data[:3], before[:3])
    got = show.decode([[4]], [[14]], state_ids=[1])
    assert got == alone.decode([[4]], [[14]], state_ids=[1]) == [[{2, 3, 14}]]
    assert show.decode([[6]], [[46]], state_ids=[3]) == [[{44, 45, 46}]]


@pytest.mark.parametrize("fmt", [swa.V41, pytest.param(swa.BF16, marks=pytest.mark.slow)])
def test_F04_bytes_of_a_former_owner_that_are_nan_reach_nobody(fmt):
    config = attention_config(3, fmt)
    x = activations(config, 2, 3)
    found = []
    for fill in (0x00, 0xFF):
        layer = RingLayer(config, fill=fill)
        steps = [layer.decode(x, [2, 0], [[p, -1, -1]] * 2)[:, :1] for p in range(2)]
        chunk = layer.prefill(x, [1, 3], [0, 0], [2, 2])[:, :2]
        found.append(np.concatenate([*steps, chunk], axis=1))
    assert np.all(np.isfinite(found[1]))
    np.testing.assert_array_equal(*found)


# --- N07: a slot that moves


def test_N07_an_exported_slot_has_all_that_a_request_still_sees():
    geometry = swa.RingGeometry(128, 134)
    cache = swa.RingCache.create(3, 1, geometry)
    assert cache.blocks[0].shape == (3, 70_752)  # 134 rows of 528 bytes
    block = np.random.default_rng(0).integers(0, 256, (3, 70_752), np.uint8)
    cache = swa.RingCache((jnp.asarray(block),), 1, geometry, swa.V41)
    sent = cache.export_slot(2, 1000).to_bytes(model="a")

    received = ExportedSlot.from_bytes(sent, model="a")
    moved, position = swa.RingCache.create(2, 1, geometry).import_slot(0, received)
    assert position == 1000
    ring, other = (np.asarray(rows.layer(0).logical())[:, :, 0] for rows in (moved, cache))
    visible = np.arange(1000 - 127, 1000) % 134  # with its own row a query at 1000 sees 128
    np.testing.assert_array_equal(ring[0, visible], other[2, visible])
    assert not np.any(np.delete(ring[0], visible, axis=0))
    assert not np.any(ring[1])

    tensors, metadata = read_safetensors(sent)
    for name in metadata:
        rest = {key: value for key, value in metadata.items() if key != name}
        with pytest.raises(ValueError, match=f"expected an entry '{name}', got none"):
            ExportedSlot.from_bytes(write_safetensors(tensors, rest), model="a")
    with pytest.raises(ValueError, match="expected an entry 'rows', got none"):
        ExportedSlot.from_bytes(write_safetensors({}, metadata), model="a")
    cut = {"rows": tensors["rows"][:, 1:]}
    with pytest.raises(ValueError, match=r"expected shape \(any, 127, 528\), got \(1, 126, 528\)"):
        ExportedSlot.from_bytes(write_safetensors(cut, metadata), model="a")
