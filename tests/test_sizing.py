"""Bytes of a cache: the generic formula, the rows of a format, and what the cache really takes."""

import pytest

from pallas_kernels.formats import BF16, F32, V4, V41, V41_FP4
from swa_jax.cache import RingCache
from swa_jax.ring import RingGeometry
from swa_jax.sizing import format_bytes, ring_cache_bytes, rows_bytes, separate_kv_bytes

DEFAULT = RingGeometry(window=128, capacity=134)


@pytest.mark.parametrize(
    ("kv_heads", "bytes_per_element", "window", "expected"),
    [
        (8, 2, None, 536_870_912),
        (8, 2, 128, 16_777_216),
        (1, 2, None, 67_108_864),
        (1, 2, 128, 2_097_152),
        (8, 1, None, 268_435_456),
        (8, 1, 128, 8_388_608),
        (8, 2, 8192, 536_870_912),  # a window beyond the context saves nothing
    ],
)
def test_separate_keys_and_values_of_32_layers(kv_heads, bytes_per_element, window, expected):
    assert separate_kv_bytes(32, kv_heads, 128, 4096, bytes_per_element, window) == expected


def test_one_token_of_one_layer():
    assert separate_kv_bytes(1, 8, 128, 1, 2) == 4096
    assert rows_bytes(V41, 1) == 528


@pytest.mark.parametrize(
    ("fmt", "rows", "expected"),
    [
        (V41, 128, 67_584),
        (V41, 134, 70_752),
        (V4, 128, 74_752),  # 584 bytes: 448 + 7 scales + 64 * 2 + 1 pad
        (BF16, 128, 131_072),
        (F32, 128, 262_144),
        (V41_FP4, 128, 36_864),  # 288 bytes: 256 + 32 scales
        (V41.with_width(64), 3, 198),
        (V41, 0, 0),
    ],
)
def test_rows_include_their_scales_and_pad(fmt, rows, expected):
    assert rows_bytes(fmt, rows) == expected


@pytest.mark.parametrize(
    ("fmt", "geometry", "layers", "slots", "expected"),
    [
        (V41, DEFAULT, 1, 1, 70_752),
        (V41, DEFAULT, 3, 1000, 212_256_000),
        (V41.with_width(32), RingGeometry(3, 5), 1, 1, 192),  # 5 * 33 = 165, padded to 32s
        (V41.with_width(32), RingGeometry(3, 5), 2, 3, 1152),
        (V41, DEFAULT, 0, 1, 0),
    ],
)
def test_a_ring_cache_counts_whole_padded_rings(fmt, geometry, layers, slots, expected):
    assert ring_cache_bytes(fmt, geometry, layers, slots) == expected


@pytest.mark.parametrize("fmt", [V41, V4, BF16.with_width(3), V41.with_width(32)])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_count_is_what_the_cache_takes(fmt, layers):
    geometry = RingGeometry(3, 5)
    cache = RingCache.create(2, layers, geometry, fmt=fmt)
    assert cache.nbytes == ring_cache_bytes(fmt, geometry, layers, 2)


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"),
        (528, "528 B"),
        (70_752, "70,752 B"),
        (1_048_575, "1,048,575 B"),
        (1_048_576, "1,048,576 B = 1 MiB"),
        (16_777_216, "16,777,216 B = 16 MiB"),
        (2_264_064, "2,264,064 B = 2.16 MiB"),
        (536_870_912, "536,870,912 B = 512 MiB"),
        (1_610_612_736, "1,610,612,736 B = 1,536 MiB"),
        (10_485_760, "10,485,760 B = 10 MiB"),
    ],
)
def test_bytes_for_people(nbytes, expected):
    assert format_bytes(nbytes) == expected


@pytest.mark.parametrize("bad", [-1, 2.0, True, "3", None])
def test_only_counts_are_taken(bad):
    for call in (
        lambda: separate_kv_bytes(bad, 8, 128, 4096, 2),
        lambda: separate_kv_bytes(32, 8, 128, 4096, bad),
        lambda: rows_bytes(V41, bad),
        lambda: ring_cache_bytes(V41, DEFAULT, bad, 1),
        lambda: ring_cache_bytes(V41, DEFAULT, 1, bad),
        lambda: format_bytes(bad),
    ):
        with pytest.raises(ValueError, match=r"expected an int of 0 or more, got"):
            call()


@pytest.mark.parametrize("window", [0, -1, 2.0, True])
def test_a_window_has_at_least_one_row(window):
    with pytest.raises(ValueError, match=r"window: expected .*, got"):
        separate_kv_bytes(32, 8, 128, 4096, 2, window)
