"""Layouts: pages of other engines to rings and back, and rows converted between formats."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from small_models import quick_jit

import swa_jax as swa
from pallas_kernels import ExtraKV, KVRows, fused_store, indexed_attention, load_rows, store_rows
from swa_jax import layouts, paging
from swa_jax.conversion import convert_rows as convert_eagerly
from swa_jax.layouts import PagedRows, page_bytes
from swa_jax.paging import PageAddresses

GEOMETRY = swa.RingGeometry(window=128, capacity=134)
SMALL = swa.RingGeometry(window=3, capacity=5)
NARROW = swa.V41.with_width(64)  # 64 bytes of data and 2 of scales
PAGED_FORMATS = [swa.V41, swa.V4, swa.V41_FP4, swa.BF16, swa.F32]
# Bytes of a row's data, and of its scales with their pad, as the engines document them.
PARTS = {
    "V41": (512, 16),
    "V4": (576, 8),
    "V41_FP4": (256, 32),
    "BF16": (1024, 0),
    "F32": (2048, 0),
}

PAGED = PagedRows.create(2, 4)

load_paged = quick_jit(layouts.load_paged)
store_paged = quick_jit(layouts.store_paged)
rings_from_pages = quick_jit(paging.rings_from_pages)
pages_from_rings = quick_jit(paging.pages_from_rings)
convert_rows = quick_jit(convert_eagerly, static_argnums=(1, 2, 3))


@quick_jit
def copy_both_ways(rows, paged, state_ids, next_positions, table):
    """Rings from pages, and pages from rings, with addresses that are not known."""
    addresses = PageAddresses.build(SMALL, state_ids, next_positions, table, tokens_per_page=4)
    rings = paging.rings_from_pages(rows, paged, addresses)
    return rings, paging.pages_from_rings(paged, rows, addresses)


def random_bytes(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def random_pages(num_pages, tokens, fmt=swa.V41, seed=0) -> PagedRows:
    pages = random_bytes(num_pages, page_bytes(tokens, fmt), seed=seed)
    return PagedRows.view(jnp.asarray(pages), tokens_per_page=tokens, fmt=fmt)


def places(tokens: int, token: int, parts: tuple[int, int]) -> np.ndarray:
    """Where a page has the bytes of a token: its data, then its scales."""
    data, scales = parts
    first = tokens * data + token * scales
    return np.r_[token * data : token * data + data, first : first + scales]


# --- pages


@pytest.mark.parametrize(
    ("fmt", "tokens", "size"),
    [
        (swa.V41, 1, 1024),  # 528
        (swa.V41, 3, 2048),  # 1584
        (swa.V41, 32, 16_896),  # 33 * 512: no padding
        (swa.V41, 64, 33_792),
        (swa.V41, 128, 67_584),
        (swa.V41, 256, 135_168),
        (swa.V4, 1, 1152),  # 584
        (swa.V4, 64, 37_440),  # 37,376
        (swa.V4, 128, 74_880),  # 74,752
        (swa.V4, 256, 149_760),  # 149,504
        (swa.V41_FP4, 1, 512),  # 288
        (swa.V41_FP4, 4, 1536),  # 1152
        (swa.V41_FP4, 64, 18_432),
        (swa.BF16, 3, 3072),
        (swa.F32, 3, 6144),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_page_is_padded_to_a_multiple_of_512_or_576_bytes(fmt, tokens, size):
    assert page_bytes(tokens, fmt) == size
    paged = jax.eval_shape(lambda: PagedRows.create(2, tokens, fmt))
    assert (paged.pages.shape, paged.num_rows) == ((2, size), 2 * tokens)


@pytest.mark.parametrize("fmt", PAGED_FORMATS, ids=lambda fmt: fmt.name)
def test_a_page_has_the_data_of_all_tokens_and_then_the_scales_of_all(fmt):
    paged = random_pages(2, 4, fmt)
    page = np.asarray(paged.pages)[1]
    token_2_of_4 = {
        "V41": [page[1024:1536], page[2080:2096]],  # 4 * 512 = 2048 bytes of data
        "V4": [page[1152:1728], page[2320:2328]],  # 4 * 576 = 2304
        "V41_FP4": [page[512:768], page[1088:1120]],  # 4 * 256 = 1024
        "BF16": [page[2048:3072]],
        "F32": [page[4096:6144]],
    }[fmt.name]
    row = load_paged(paged, jnp.asarray([6]))
    np.testing.assert_array_equal(row, [np.concatenate(token_2_of_4)])
    new = random_bytes(1, fmt.row_bytes, seed=1)
    expected = np.array(paged.pages)
    expected[1, places(4, 2, PARTS[fmt.name])] = new[0]
    np.testing.assert_array_equal(store_paged(paged, new, jnp.asarray([6])).pages, expected)


def test_new_pages_are_zeros():
    assert not np.any(PAGED.pages)
    assert PAGED.fmt == dataclasses.replace(swa.V41, token_interleaved=False)
    assert PAGED.row_format == swa.V41


def test_rows_without_scales_lie_in_pages_as_in_rings():
    paged = random_pages(3, 4, swa.BF16)
    rows = np.asarray(paged.pages).reshape(12, 1024)
    np.testing.assert_array_equal(load_paged(paged, np.arange(12)), rows)


@given(st.permutations(range(12)), st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_a_load_gives_what_was_stored_and_no_other_byte_changes(order, seed):
    """3 pages of 4 tokens, 264 of their 512 bytes used; -1 and 12 name no row."""
    paged = random_pages(3, 4, NARROW, seed)
    data, slots = random_bytes(7, 66, seed=seed + 1), np.array([*order[:5], -1, 12], np.int32)
    expected = np.array(paged.pages)
    for row, slot in zip(data[:5], order[:5], strict=True):
        expected[slot // 4, places(4, slot % 4, (64, 2))] = row
    stored = store_paged(paged, data, slots)
    np.testing.assert_array_equal(stored.pages, expected)
    np.testing.assert_array_equal(load_paged(stored, slots)[:5], data[:5])


@pytest.mark.parametrize("slot", [-1, -(2**31), 12, 2**31 - 1])
def test_a_slot_outside_the_pages_names_no_row(slot):
    paged = random_pages(3, 4, NARROW)
    assert not np.any(load_paged(paged, jnp.asarray([slot])))
    stored = store_paged(paged, random_bytes(1, 66), jnp.asarray([slot]))
    np.testing.assert_array_equal(stored.pages, paged.pages)


def test_slots_have_any_shape():
    paged = random_pages(3, 4, NARROW)
    rows, grid = load_paged(paged, np.arange(12)), load_paged(paged, np.arange(12).reshape(2, 1, 6))
    np.testing.assert_array_equal(grid, rows.reshape(2, 1, 6, 66))
    np.testing.assert_array_equal(load_paged(paged, 7), rows[7])
    assert load_paged(paged, np.zeros((0, 2), np.int32)).shape == (0, 2, 66)
    np.testing.assert_array_equal(store_paged(paged, rows[7], 7).pages, paged.pages)


def test_a_slot_may_come_twice_with_the_same_bytes():
    paged, data = random_pages(3, 4, NARROW), random_bytes(1, 66, seed=1)
    once = store_paged(paged, data, jnp.asarray([5]))
    twice = store_paged(paged, np.repeat(data, 2, axis=0), jnp.asarray([5, 5]))
    np.testing.assert_array_equal(once.pages, twice.pages)


@pytest.mark.donates
def test_a_donated_pool_of_more_than_2_gib_is_stored_into_in_place():
    pages = jax.ShapeDtypeStruct((68_000, 33_792), jnp.uint8)
    paged = PagedRows(pages, 64, PAGED.fmt)
    data, slots = jax.ShapeDtypeStruct((9, 528), jnp.uint8), jax.ShapeDtypeStruct((9,), jnp.int32)
    stored = quick_jit(layouts.store_paged, donate_argnums=0).lower(paged, data, slots).compile()
    memory = stored.memory_analysis()
    assert memory.alias_size_in_bytes == 68_000 * 33_792
    assert memory.temp_size_in_bytes < 100_000


# --- requests

LENGTHS = [1, 127, 128, 134, 135, 64, 5, 1000]  # the ring has 134 rows
STATES = [3, 0, 8, 5, 1, 7, 2, 6]  # of 9; slot 4 belongs to another request


def scattered_blocks(tokens: int, lengths=LENGTHS) -> tuple[np.ndarray, int]:
    """A block table of pages in no order, -1 where the window has passed, and the pool's size."""
    counts = [-(-length // tokens) for length in lengths]
    pool = sum(counts) + 5
    numbers = np.random.default_rng(tokens).permutation(pool).tolist()
    table = np.full((len(lengths), max(counts) + 1), -1, np.int32)
    for row, count, length in zip(table, counts, lengths, strict=True):
        row[:count] = [numbers.pop() for _ in range(count)]
        row[: max(length - 134, 0) // tokens] = -1
    return table, pool


def rows_by_hand(table, tokens, lengths=LENGTHS, states=STATES, capacity=134):
    """(slot of the ring, page, token) of each row that a ring can hold, by a loop."""
    for state, length, blocks in zip(states, lengths, table, strict=True):
        for position in range(max(length - capacity, 0), length):
            slot = state * capacity + position % capacity
            yield slot, blocks[position // tokens], position % tokens


@pytest.mark.parametrize(
    ("fmt", "tokens"),
    [(swa.V41, 32), (swa.V41, 64), (swa.V41, 128), (swa.V4, 64), (swa.V41_FP4, 3)],
    ids=lambda value: getattr(value, "name", value),
)
def test_eight_requests_go_from_pages_to_rings_and_back_with_the_same_bytes(fmt, tokens):
    table, pool = scattered_blocks(tokens)
    paged = random_pages(pool, tokens, fmt)
    block = random_bytes(9, 32 + (134 * fmt.row_bytes + 31) // 32 * 32, seed=1)
    rings = KVRows.view(jnp.asarray(block), start=32, rows_per_slot=134, fmt=fmt)
    addresses = PageAddresses.build(GEOMETRY, STATES, LENGTHS, table, tokens_per_page=tokens)

    ring_bytes = block.copy()
    other = random_pages(pool, tokens, fmt, seed=2)
    page_bytes_back = np.array(other.pages)
    for slot, page, token in rows_by_hand(table, tokens):
        where = places(tokens, token, PARTS[fmt.name])
        row = np.asarray(paged.pages)[page, where]
        first = 32 + slot % 134 * fmt.row_bytes
        ring_bytes[slot // 134, first : first + fmt.row_bytes] = row
        page_bytes_back[page, where] = row

    filled = rings_from_pages(rings, paged, addresses)
    np.testing.assert_array_equal(filled.data, ring_bytes)
    # Other rows and the padding keep what the pages had.
    np.testing.assert_array_equal(pages_from_rings(other, filled, addresses).pages, page_bytes_back)
    np.testing.assert_array_equal(pages_from_rings(paged, filled, addresses).pages, paged.pages)


def test_one_set_of_addresses_serves_all_layers_of_a_cache_within_jit():
    table = np.array([[4, -1], [1, 0]], np.int32)  # of pages of 4
    addresses = PageAddresses.build(SMALL, [2, 0], [3, 6], table, tokens_per_page=4)
    pools = [random_pages(5, 4, NARROW, seed) for seed in range(3)]
    cache = swa.RingCache.create(3, 3, SMALL, NARROW)

    @quick_jit
    def fill(cache, pools, addresses):
        for i, paged in enumerate(pools):
            cache = cache.with_layer(i, paging.rings_from_pages(cache.layer(i), paged, addresses))
        return cache

    cache = fill(cache, pools, addresses)
    for i, paged in enumerate(pools):
        expected = np.zeros((3, 5, 1, 66), np.uint8)
        for slot, page, token in rows_by_hand(table, 4, [3, 6], [2, 0], capacity=5):
            row = np.asarray(paged.pages)[page, places(4, token, (64, 2))]
            expected[slot // 5, slot % 5, 0] = row
        np.testing.assert_array_equal(cache.layer(i).logical(), expected)


NAN_ROW = [0x7F] * 64 + [0xFF] * 2


@pytest.mark.makes_nan
def test_a_row_before_the_window_whose_page_is_gone_is_nan_and_never_a_former_owners():
    # 9 tokens, the ring has 4 to 8, the window before 9 has 7 and 8: page 1 has 4 to 7.
    tokens, table = 2, np.array([[-1, -1, -1, 5, 0]], np.int32)
    paged = random_pages(6, tokens, NARROW)
    rings = KVRows.view(jnp.asarray(random_bytes(1, 352)), start=0, rows_per_slot=5, fmt=NARROW)
    addresses = PageAddresses.build(SMALL, [0], [9], table, tokens_per_page=tokens)
    filled = rings_from_pages(rings, paged, addresses)
    expected = np.asarray(load_paged(paged, np.array([-1, 10, 11, 0, -1])))
    rows = np.asarray(filled.logical())[0, :, 0]
    np.testing.assert_array_equal(rows[[1, 2, 3]], expected[1:4])  # positions 6, 7, 8
    assert rows[4].tolist() == rows[0].tolist() == NAN_ROW  # positions 4 and 5
    back = pages_from_rings(random_pages(6, tokens, NARROW, seed=1), filled, addresses)
    np.testing.assert_array_equal(load_paged(back, np.array([10, 11, 0])), expected[1:4])


@pytest.mark.makes_nan
@pytest.mark.parametrize(
    ("blocks", "position"),
    [([3, -1, 1], 7), ([3, 2, -1], 8), ([3, 2], 8), ([], 7)],
)
def test_a_window_without_its_page_is_refused_where_known_and_nan_where_traced(blocks, position):
    """9 tokens in pages of 4: positions 7 and 8 are the window before the next."""
    table = np.array([blocks], np.int32)
    with pytest.raises(ValueError, match=f"before 9, got none for position {position} of request"):
        PageAddresses.build(SMALL, [0], [9], table, tokens_per_page=4)
    rows, paged = KVRows.create(2, 5, NARROW), random_pages(4, 4, NARROW)
    rings, _ = copy_both_ways(rows, paged, np.array([0]), np.array([9]), table)
    assert np.asarray(rings.logical())[0, position % 5, 0].tolist() == NAN_ROW


@pytest.mark.parametrize("page", [4, 2**29 - 1, 2**30, 2**31 - 1, -(2**31)])
def test_a_page_outside_the_pool_is_no_page(page):
    """The slots of page 2**30, times 4, would wrap to those of page 0."""
    paged, table = random_pages(4, 4, NARROW), np.array([[page]], np.int32)
    empty = KVRows.create(2, 5, NARROW)
    rings, pages = copy_both_ways(empty, paged, np.array([0]), np.array([2]), table)
    rows = np.asarray(rings.logical())[0, :, 0]
    assert rows[0].tolist() == rows[1].tolist() == NAN_ROW
    assert not np.any(rows[2:])
    np.testing.assert_array_equal(pages.pages, paged.pages)


def test_rows_that_rejected_drafts_replaced_do_not_reach_the_pages():
    # 8 tokens were accepted, and drafts 8 and 9 stored and rejected: they took the places of 3
    # and 4, so the ring's oldest row is 9 - 5 + 1 = 5.
    table = np.array([[0, 1]], np.int32)
    paged = random_pages(2, 4, NARROW)
    rings = KVRows.create(1, 5, NARROW)
    new = random_bytes(5, 66, seed=1)
    rings = store_rows(rings, jnp.asarray(new), SMALL.slots([0], [[5, 6, 7, 8, 9]])[0])
    addresses = PageAddresses.build(SMALL, [0], [8], table, tokens_per_page=4, first_positions=[5])
    back = pages_from_rings(paged, rings, addresses)
    expected = np.array(load_paged(paged, np.arange(8)))
    expected[5:] = new[:3]
    np.testing.assert_array_equal(load_paged(back, np.arange(8)), expected)


@pytest.mark.parametrize(("state", "end"), [(-1, 2), (2, 2), (2**31 - 1, 2), (0, -(2**31))])
def test_a_request_without_a_state_slot_or_a_position_is_left_out(state, end):
    paged, table = random_pages(4, 4, NARROW), np.array([[3]], np.int32)
    empty = KVRows.create(2, 5, NARROW)
    rings, pages = copy_both_ways(empty, paged, np.array([state]), np.array([end]), table)
    assert not np.any(rings.data)
    np.testing.assert_array_equal(pages.pages, paged.pages)


def test_a_request_without_tokens_has_no_rows():
    addresses = PageAddresses.build(SMALL, [1, 1], [0, 2], [[-1], [0]], tokens_per_page=4)
    np.testing.assert_array_equal(addresses.ring_slots, [[-1] * 5, [-1, -1, -1, 5, 6]])
    np.testing.assert_array_equal(addresses.page_slots, [[-1] * 5, [-1, -1, -1, 0, 1]])


def test_the_last_page_with_int32_slots_has_an_address():
    addresses = PageAddresses.build(SMALL, [0], [2], [[2**29 - 2]], tokens_per_page=4)
    assert addresses.page_slots[0].tolist() == [-1, -1, -1, 2**31 - 8, 2**31 - 7]


def test_addresses_at_the_last_int32_position():
    table = jnp.full((1, 2**19), 7, jnp.int32)
    addresses = PageAddresses.build(SMALL, [0], [2**31 - 1], table, tokens_per_page=4096)
    last = 2**31 - 2
    assert addresses.ring_slots[0].tolist() == [(last - 4 + i) % 5 for i in range(5)]
    assert addresses.page_slots[0].tolist() == [7 * 4096 + 4090 + i for i in range(5)]


# --- what is refused

ROWS = KVRows.create(2, 5)
ADDRESSES = PageAddresses.build(SMALL, [0], [4], [[1]], tokens_per_page=4)


def build(states=(0,), ends=(4,), table=((1,),), **options):
    return PageAddresses.build(SMALL, states, ends, table, **{"tokens_per_page": 4} | options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load_rows(PAGED, 0), "rows: expected a KVRows, got PagedRows"),
        (
            lambda: indexed_attention(jnp.zeros((1, 2, 512)), PAGED, jnp.zeros((1, 3), int)),
            "rows: expected a KVRows, got PagedRows",
        ),
        (
            lambda: indexed_attention(
                jnp.zeros((1, 2, 512)),
                ROWS,
                jnp.zeros((1, 3), int),
                extra=ExtraKV(PAGED, jnp.zeros((1, 3), int)),
            ),
            "extra.rows: expected a KVRows, got PagedRows",
        ),
        (
            lambda: fused_store(
                PAGED,
                jnp.zeros((1, 512)),
                jnp.zeros(1, int),
                norm_weight=jnp.ones(512),
                norm_eps=1e-6,
                cos=jnp.ones((1, 32)),
                sin=jnp.zeros((1, 32)),
            ),
            "rows: expected a KVRows, got PagedRows",
        ),
        (
            lambda: KVRows.view(PAGED.pages, start=0, rows_per_slot=4, fmt=PAGED.fmt),
            "fmt: expected a token-interleaved format, got page-planar V41",
        ),
        (
            lambda: load_rows(dataclasses.replace(ROWS, fmt=PAGED.fmt), 0),
            "fmt: expected a token-interleaved format, got page-planar V41",
        ),
        (
            lambda: swa.RingCache.create(2, 1, SMALL, PAGED.fmt),
            "fmt: expected a token-interleaved format, got page-planar V41",
        ),
        (
            lambda: swa.RingCache.create(2, 1, SMALL).with_layer(0, PAGED),
            "rows: expected a KVRows, got PagedRows",
        ),
        (
            lambda: convert_eagerly(jnp.zeros(528, jnp.uint8), PAGED.fmt, swa.BF16),
            "fmt: expected a token-interleaved format, got page-planar V41",
        ),
        (lambda: layouts.load_paged(ROWS, 0), "paged: expected a PagedRows, got KVRows"),
        (
            lambda: layouts.store_paged(ROWS, jnp.zeros(528, jnp.uint8), 0),
            "paged: expected a PagedRows, got KVRows",
        ),
        (
            lambda: paging.rings_from_pages(ROWS, ROWS, ADDRESSES),
            "paged: expected a PagedRows, got KVRows",
        ),
        (
            lambda: paging.pages_from_rings(PAGED, PAGED, ADDRESSES),
            "rows: expected a KVRows, got PagedRows",
        ),
    ],
)
def test_a_cache_of_one_layout_is_refused_by_a_reader_of_the_other(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: PagedRows.view(jnp.zeros((2, 2112), jnp.uint8), tokens_per_page=4),
            r"uint8\[num_pages, 2560\] for 4 tokens of V41 in a page, got uint8\(2, 2112\)",
        ),
        (
            lambda: PagedRows.view(jnp.zeros((2, 2560), jnp.int8), tokens_per_page=4),
            r"expected uint8\[num_pages, 2560\] .*, got int8\(2, 2560\)",
        ),
        (
            lambda: PagedRows.view(jnp.zeros((2, 32, 1, 528), jnp.uint8), tokens_per_page=32),
            r"expected uint8\[num_pages, 16896\] .*, got uint8\(2, 32, 1, 528\)",
        ),
        (
            lambda: PagedRows.view([[0] * 2560], tokens_per_page=4),
            r"expected uint8\[num_pages, 2560\] .*, got list\(1, 2560\)",
        ),
        (lambda: PagedRows.create(0, 4), "num_pages: expected an integer of 1 or more, got 0"),
        (lambda: PagedRows.create(2, 4.0), "tokens_per_page: expected an integer .*, got 4.0"),
        (lambda: page_bytes(True, swa.V41), "tokens_per_page: expected an integer .*, got True"),
        (lambda: PagedRows.create(2, 4, "V41"), "fmt: expected a KVCacheFormat, got str"),
        (lambda: PagedRows.create(2, 4, swa.V32), "got V32, which the engines keep token-interl"),
        (
            lambda: page_bytes(5_000_000, swa.V41),
            "tokens_per_page: expected pages of at most 2147483647 bytes, .*, got 2640000000",
        ),
        (
            lambda: PagedRows.create(2**20, 2**11),
            "paged: expected at most 2147483647 rows, .*, got 2147483648",
        ),
        (lambda: layouts.load_paged(PAGED, 0.0), "slots: expected integers, got dtype float64"),
        (
            lambda: layouts.store_paged(PAGED, jnp.zeros((2, 528), jnp.uint8), [0]),
            r"data: expected shape \(1, 528\), got \(2, 528\)",
        ),
        (
            lambda: layouts.store_paged(PAGED, jnp.zeros((1, 528), jnp.float32), [0]),
            "data: expected dtype uint8, got float32",
        ),
        (lambda: build(states=[[0]]), r"state_ids: expected shape \(any\), got \(1, 1\)"),
        (lambda: build(states=[0, 0]), r"next_positions: expected shape \(2\), got \(1,\)"),
        (lambda: build(table=[1]), r"block_table: expected shape \(1, any\), got \(1,\)"),
        (lambda: build(first_positions=0), r"first_positions: expected shape \(1\), got \(\)"),
        (lambda: build(table=[[1.0]]), "block_table: expected integers, got dtype float64"),
        (lambda: build(tokens_per_page=0), "tokens_per_page: expected an integer .*, got 0"),
        (lambda: build(ends=[-1]), r"next_positions: expected 0 or more, got \[-1\]"),
        (
            lambda: build([3, 3], [4, 1], [[0], [1]]),
            r"state_ids: expected distinct state slots .*, got \[3, 3\]",
        ),
        (lambda: build(first_positions=[3]), "before 4, got none for position 2 of request 0"),
        (
            lambda: PageAddresses.build(134, [0], [4], [[1]], tokens_per_page=4),
            "geometry: expected a RingGeometry, got int",
        ),
        (
            lambda: paging.rings_from_pages(KVRows.create(2, 5, swa.BF16), PAGED, ADDRESSES),
            "rows: expected the format of the pages .*V41.*, got .*BF16",
        ),
        (
            lambda: paging.rings_from_pages(KVRows.create(2, 6), PAGED, ADDRESSES),
            "rows: expected rings of 5, got 6",
        ),
        (
            lambda: paging.pages_from_rings(PagedRows.create(2, 8), ROWS, ADDRESSES),
            "paged: expected tokens_per_page 4, got 8",
        ),
        (
            lambda: paging.rings_from_pages(ROWS, PAGED, (1, 2)),
            "addresses: expected PageAddresses, got tuple",
        ),
        (
            lambda: paging.rings_from_pages(ROWS, PAGED, build(states=[2])),
            "state_ids: expected rows of the rings, 0 to 9, got 13",
        ),
        (
            lambda: paging.pages_from_rings(PAGED, ROWS, build(table=[[2]])),
            "block_table: expected rows of the pages, 0 to 7, got 11",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_saved_program_takes_pages_and_addresses():
    exported = export.export(quick_jit(paging.rings_from_pages))(ROWS, PAGED, ADDRESSES)
    again = export.deserialize(exported.serialize())
    paged = dataclasses.replace(PAGED, pages=jnp.asarray(random_bytes(2, 2560)))
    expected = rings_from_pages(ROWS, paged, ADDRESSES)
    np.testing.assert_array_equal(again.call(ROWS, paged, ADDRESSES).data, expected.data)


# --- conversion


def random_rows(fmt, count=6, seed=0) -> np.ndarray:
    """Rows whose groups of 16 values have many magnitudes, in the bytes of a format."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 32, 16)) * 2.0 ** rng.integers(-6, 7, (count, 32, 1))
    return reference.quantize(x.reshape(count, 512).astype(np.float32), fmt)


LOSSLESS = {
    "V41": ("V41", "BF16", "F32"),
    "V4": ("V4", "BF16", "F32"),
    "V41_FP4": ("V41_FP4", "BF16", "F32"),
    "BF16": ("BF16", "F32"),
    "F32": ("F32",),
}


@pytest.mark.parametrize("from_fmt", PAGED_FORMATS, ids=lambda fmt: fmt.name)
def test_rows_are_requantised_from_their_values_and_the_loss_is_measured(from_fmt):
    data = random_rows(from_fmt)
    before = reference.dequantize(data, from_fmt)

    @quick_jit
    def convert_to_all(data):
        return [convert_eagerly(data, from_fmt, to_fmt) for to_fmt in PAGED_FORMATS]

    for to_fmt, (converted, loss) in zip(PAGED_FORMATS, convert_to_all(data), strict=True):
        expected = data
        if to_fmt != from_fmt:
            expected = reference.quantize(before.astype(np.float32), to_fmt)
        np.testing.assert_array_equal(converted, expected)
        error = np.abs(reference.dequantize(expected, to_fmt) - before)
        np.testing.assert_array_equal(loss.changed_values, np.sum(error > 0, axis=1))
        np.testing.assert_array_equal(loss.exact, np.all(error == 0, axis=1))
        np.testing.assert_allclose(loss.largest_error, error.max(axis=1), rtol=1e-6)
        relative = error.max(axis=1) / np.abs(before).max(axis=1)
        np.testing.assert_allclose(loss.relative_error, relative, rtol=1e-6)
        assert np.all(loss.exact) == (to_fmt.name in LOSSLESS[from_fmt.name])


def test_a_loss_worked_out_by_hand():
    # amax 1.0625 gives the scale 2**-8: 272 lies between the codes 256 and 288, and goes to the
    # even one. 1 and 0.5 are codes; the other rows have but zeros and codes.
    x = np.zeros((3, 512), np.float32)
    x[0, :3], x[1, 5] = [1.0625, 1, -0.5], -3
    data, loss = convert_rows(reference.quantize(x, swa.BF16), swa.BF16, swa.V41)
    assert np.asarray(data)[0, :3].tolist() == [0x78, 0x78, 0xF0]
    assert np.asarray(data)[0, 512] == 127 - 8
    assert loss.changed_values.tolist() == [1, 0, 0]
    assert loss.largest_error.tolist() == [0.0625, 0, 0]
    np.testing.assert_allclose(loss.relative_error, [1 / 17, 0, 0], rtol=1e-6)
    assert loss.exact.tolist() == [False, True, True]


def test_the_same_format_gives_the_same_bytes_though_quantising_anew_would_not():
    # 225 / 256 takes the scale 2**-8 and rounds to the code of 224. 224 / 256 would take 2**-9 and
    # the code of 448. Bytes that no quantiser writes stay as well.
    x = np.zeros((1, 512), np.float32)
    x[0, 0] = 225 / 256
    row = reference.quantize(x, swa.V41)
    assert (row[0, 0], row[0, 512]) == (0x76, 119)
    again = reference.quantize(reference.dequantize(row, swa.V41), swa.V41)
    assert (again[0, 0], again[0, 512]) == (0x7E, 118)
    for data in (row, random_bytes(1, 528)):
        same, loss = convert_rows(data, swa.V41, swa.V41)
        np.testing.assert_array_equal(same, data)
        assert np.all(loss.exact)
    data = random_bytes(3, 656)
    np.testing.assert_array_equal(convert_rows(data, swa.V32, swa.V32)[0], data)


def test_values_survive_the_way_through_bf16_and_back():
    data = random_rows(swa.V41, count=64)
    plain, _ = convert_rows(data, swa.V41, swa.BF16)
    again, _ = convert_rows(plain, swa.BF16, swa.V41)
    before, after = (reference.dequantize(np.asarray(x), swa.V41) for x in (data, again))
    np.testing.assert_array_equal(before, after)


@pytest.mark.makes_nan
def test_a_nan_row_stays_nan_and_a_nan_among_numbers_takes_the_row():
    data = random_rows(swa.V41, count=3)
    data[1] = [0x7F] * 512 + [0xFF] * 16
    data[2, 512] = 0xFF  # the first 32 of 512 values
    converted, loss = convert_rows(data, swa.V41, swa.BF16)
    assert np.isnan(reference.dequantize(np.asarray(converted), swa.BF16)[1:]).all()
    assert loss.changed_values.tolist() == [0, 0, 480]
    assert loss.largest_error.tolist() == [0, 0, np.inf]
    assert loss.relative_error.tolist() == [0, 0, np.inf]


def test_the_floor_of_the_scales_may_be_chosen():
    data = reference.quantize(np.zeros((1, 512), np.float32), swa.BF16)
    for floor, code in [("amax", 105), ("scale", 114)]:
        assert np.unique(convert_rows(data, swa.BF16, swa.V41, floor)[0][:, 512:]) == [code]


@pytest.mark.parametrize(
    ("data", "formats", "message"),
    [
        (np.zeros(656, np.uint8), (swa.V32, swa.V41), "from_fmt: .* first 512 of 576"),
        (np.zeros(528, np.uint8), (swa.V41, swa.V32), "to_fmt: .* first 512 of 576"),
        (
            np.zeros(528, np.uint8),
            (swa.V41, NARROW),
            "to_fmt: expected rows of 512 values, as those of V41, got 64",
        ),
        (np.zeros(527, np.uint8), (swa.V41, swa.V41), r"528 bytes, got shape \(527,\)"),
        (np.zeros(528, np.uint8), ("V41", swa.V41), "fmt: expected a KVCacheFormat, got str"),
        (np.zeros(528, np.uint8), (swa.V41, "V41"), "fmt: expected a KVCacheFormat, got str"),
        (np.zeros(528, np.uint8), (swa.V41, swa.V41, "none"), "scale_floor: .*, got 'none'"),
    ],
)
def test_conversions_that_mean_nothing_are_refused(data, formats, message):
    with pytest.raises(ValueError, match=message):
        convert_eagerly(data, *formats)


def test_rings_of_more_bytes_than_an_int32_offset_names_are_refused():
    message = "rows: expected slots of at most 2147483647 bytes.*, got 2640000000"
    with pytest.raises(ValueError, match=message):
        KVRows.create(1, 5_000_000)
    block = jax.ShapeDtypeStruct((1, 2_640_000_000), jnp.uint8)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda block: KVRows.view(block, start=0, rows_per_slot=5), block)
