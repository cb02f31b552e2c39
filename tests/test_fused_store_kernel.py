"""The fused store's kernel: its bytes beside XLA's, what it lowers to, and what it refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

import pallas_kernels
from pallas_kernels import (
    BF16,
    F32,
    V4,
    V41,
    V41_FP4,
    KVRows,
    quantize_rows,
    transforms,
    triton_launch,
    triton_rows,
)
from pallas_kernels.fused_store import triton

pytestmark = pytest.mark.slow

EPS = 1e-6
TRITON_CALL = "__gpu$xla.gpu.triton"
# Groups of another size than the raw tail, and no byte of pad.
MIXED = dataclasses.replace(
    V4, name="mixed", quantized_elements=384, elements_per_scale=32, raw_elements=128, pad_bytes=0
)
FORMATS = [V41, V41.with_width(64), V4, V4.with_width(128), BF16, F32, V41_FP4, MIXED]


def format_id(value):
    return f"{value.name}-{value.num_elements}" if hasattr(value, "num_elements") else str(value)


def by_format(formats):
    return pytest.mark.parametrize("fmt", formats, ids=format_id)


# --- the cast of float32 rows


def cast_kernel(row_ref, out_ref, *, fmt, floor):
    row = pl.program_id(0) * 64 + jnp.arange(64, dtype=jnp.int32)
    column = jnp.arange(fmt.num_elements, dtype=jnp.int32)[None, :]
    exists = row < row_ref.shape[0]
    values = plgpu.load(row_ref.at[row[:, None], column], mask=exists[:, None], other=0)
    triton_rows.store_row(out_ref, (row,), jnp.zeros_like(row), values, fmt, floor, exists)


@functools.partial(jax.jit, static_argnames=("fmt", "floor"))
def cast_by_kernel(rows, fmt, floor="amax"):
    return triton_launch.launch(
        functools.partial(cast_kernel, fmt=fmt, floor=floor),
        [rows],
        jax.ShapeDtypeStruct((len(rows), fmt.row_bytes), jnp.uint8),
        grid=(pl.cdiv(len(rows), 64),),
        num_warps=1,
        interpret=True,
    )


cast_by_xla = jax.jit(quantize_rows, static_argnames=("fmt", "scale_floor"))


def assert_same_bytes(values, fmt, floor="amax"):
    """The values, in rows of the format, have the bytes that XLA gives them."""
    values = np.asarray(values, np.float32).reshape(-1)
    rows = np.resize(values, (-(-len(values) // fmt.num_elements), fmt.num_elements))
    expected = cast_by_xla(rows, fmt, floor)
    np.testing.assert_array_equal(cast_by_kernel(rows, fmt, floor), expected)
    return np.asarray(expected)


def float32_of_bits(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def around(values, steps=2):
    """Values and their nearest float32 neighbours on both sides, of both signs."""
    values = np.asarray(values, np.float32)
    bits = values.view(np.uint32)[:, None] + np.arange(-steps, steps + 1)
    near = float32_of_bits(bits.astype(np.uint32))
    return np.concatenate([near, -near], axis=1)


@pytest.mark.parametrize("floor", ["amax", "scale"])
@by_format(FORMATS)
def test_every_bfloat16_has_the_bytes_of_xla(fmt, floor):
    patterns = np.arange(65536, dtype=np.uint32) << 16
    assert_same_bytes(float32_of_bits(patterns), fmt, floor)  # neighbours share a group
    assert_same_bytes(float32_of_bits(np.random.default_rng(0).permutation(patterns)), fmt, floor)


def test_every_rounding_boundary_of_e4m3_has_the_bytes_of_xla():
    codes = np.arange(0x7F, dtype=np.uint8)
    values = np.asarray(jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32))
    middles = (values[1:] + values[:-1]) / 2
    # Below a bfloat16's last bit is a second rounding, whose boundaries lie around the first's.
    half_bit = 2.0 ** (np.floor(np.log2(middles)) - 8)
    boundaries = np.concatenate([around(middles + step * half_bit) for step in (-1, 0, 1)], axis=1)
    groups = np.zeros((len(boundaries), 32), np.float32)
    groups[:, : boundaries.shape[1]] = boundaries
    groups[:, -1] = 448  # which makes the scale 1
    codes = assert_same_bytes(groups, V41)
    assert (codes[:, 512:] == 127).all()
    for scale in (-20, -1, 1, 60):
        assert_same_bytes(groups * np.float32(2.0**scale), V41)
        assert_same_bytes(groups * np.float32(2.0**scale), MIXED)


@pytest.mark.parametrize(
    ("fmt", "floor"),
    [(V41, "amax"), (V41, "scale"), (V4, "scale"), (V4.with_width(128), "amax"), (V41_FP4, "amax")],
    ids=format_id,
)
def test_every_boundary_of_a_scale_has_the_bytes_of_xla(fmt, floor):
    largest = 448 if fmt.quantized_dtype == "e4m3" else 6
    # Near it in bfloat16, and near the tie that bfloat16 rounds up to the next.
    multiples = np.asarray([1, 1 + 2.0**-9, 1 + 2.0**-7, 1 - 2.0**-8, 17 / 16, 1.25, 1.75])
    for steps in (1, 3):
        amax = largest * multiples[:, None] * 2.0 ** np.arange(-135.0, 119)
        edges = around(amax.reshape(-1), steps)
        groups = np.zeros((edges.size, fmt.elements_per_scale), np.float32)
        groups[:, 0] = edges.reshape(-1)
        groups[:, 1] = groups[:, 0] / 3
        assert_same_bytes(groups, fmt, floor)


@by_format(FORMATS)
def test_the_largest_and_the_smallest_numbers_have_the_bytes_of_xla(fmt):
    saturating = around([240 * 2.0**120, 255 * 2.0**120, 448 * 2.0**119, 3e38])
    subnormal = around([2.0**-149 * 8, 2.0**-140, 2.0**-127, 2.0**-126], steps=4)
    assert_same_bytes(saturating, fmt)
    assert_same_bytes(subnormal, fmt)
    assert_same_bytes(np.asarray([float32_of_bits(0x7F7FFFFF), -0.0, 0.0, 2.0**-126]), fmt)


@by_format(FORMATS)
def test_one_value_that_is_not_finite_makes_its_row_nan(fmt):
    rows = np.random.default_rng(0).normal(size=(12, fmt.num_elements)).astype(np.float32)
    clean = assert_same_bytes(rows, fmt)
    signalling, negative = float32_of_bits([0x7F800001, 0xFFC00000])
    for bad in (np.nan, signalling, negative, np.inf, -np.inf):
        # The first value, the last, and two beside larger ones.
        spoiled = rows.copy()
        spoiled[[0, 3, 6, 9], [0, fmt.num_elements - 1, 5, fmt.num_elements // 2]] = bad
        got = assert_same_bytes(spoiled, fmt)
        whole = np.delete(np.arange(12), [0, 3, 6, 9])
        np.testing.assert_array_equal(got[whole], clean[whole])
        assert len(np.unique(got[[0, 3, 6, 9]], axis=0)) == 1
    assert_same_bytes(np.full_like(rows, np.nan), fmt)


@by_format(FORMATS)
def test_every_byte_of_a_live_row_is_written_once_and_no_other(fmt, monkeypatch):
    """The interpreter hides a mask that is too wide: it drops what lies outside an array."""
    size, written = fmt.row_bytes, []
    writes = np.zeros((4, 4 * size), int)

    class Block:
        shape = writes.shape
        at = property(lambda self: self)

        def __getitem__(self, place):
            return place

    def store(place, data, mask):
        written.append([jnp.broadcast_to(part, data.shape) for part in (*place, mask)])

    @jax.jit
    def places(slots, first, row, live):
        triton_rows.store_row(Block(), (slots,), first, row, fmt, "amax", live)
        return written

    monkeypatch.setattr(plgpu, "store", store)
    slots, first = np.asarray([2, 0, 1, 3]), np.asarray([32, 0, 2 * size, size])
    row, live = np.ones((4, fmt.num_elements), np.float32), np.asarray([True, False, True, False])
    for slot, byte, mask in jax.tree.map(np.asarray, places(slots, first, row, live)):
        np.add.at(writes, (slot[mask], byte[mask]), 1)
    expected = np.zeros_like(writes)
    expected[2, 32 : 32 + size] = expected[1, 2 * size : 3 * size] = 1
    np.testing.assert_array_equal(writes, expected)


# --- the whole store


@functools.partial(jax.jit, static_argnames=("implementation", "pairing", "hadamard", "floor"))
def store(
    rows, latents, slots, weight, cos, sin,
    implementation, pairing="interleaved", hadamard=False, floor="amax",
):  # fmt: skip
    return pallas_kernels.fused_store(
        rows, latents, slots, norm_weight=weight, norm_eps=EPS, cos=cos, sin=sin,
        pairing=pairing, hadamard=hadamard, scale_floor=floor, implementation=implementation,
    )  # fmt: skip


def tokens(n, width, half=32, seed=0, dtype=jnp.float32):
    """Latents, norm weight, cosines and sines of n tokens."""
    random = np.random.default_rng(seed)
    half = min(half, width // 2)
    size = np.exp(random.normal(size=(n, 1)) + random.normal(size=(1, width)))
    angles = random.uniform(-np.pi, np.pi, (n, half))
    return (
        jnp.asarray(random.normal(size=(n, width)) * size, dtype),
        jnp.asarray(random.uniform(0.5, 1.5, width), jnp.float32),
        jnp.asarray(np.cos(angles), jnp.float32),
        jnp.asarray(np.sin(angles), jnp.float32),
    )


def both(rows, arguments, slots, **options):
    latents, *others = arguments
    by_xla, by_kernel = (
        store(rows, latents, slots, *others, implementation=implementation, **options)
        for implementation in ("xla", "interpret")
    )
    return np.asarray(by_xla.logical()), np.asarray(by_kernel.logical())


@pytest.mark.parametrize(
    ("fmt", "pairing", "hadamard"),
    [
        *[(F32, pairing, had) for pairing in transforms.PAIRINGS for had in (False, True)],
        *[(fmt, "interleaved", False) for fmt in (V41, V41.with_width(64), V4, BF16, V41_FP4)],
        (V41, "half_split", True),
        *[
            pytest.param(fmt, "half_split", True, marks=pytest.mark.slow)
            for fmt in (V41.with_width(64), V4, BF16, V41_FP4)
        ],
    ],
    ids=format_id,
)
def test_rows_are_those_of_xla(fmt, pairing, hadamard):
    """Bit for bit, where 1 row in 1,000 may differ: no sum of the transform depends on a program.

    Float32 rows show the last bit of each value.
    """
    slots = np.random.default_rng(1).permutation(512).astype(np.int32)
    arguments = tokens(512, fmt.num_elements)
    rows = KVRows.create(64, 8, fmt)
    expected, got = both(rows, arguments, slots, pairing=pairing, hadamard=hadamard)
    np.testing.assert_array_equal(got, expected)


@by_format([V41.with_width(64), V4])
def test_a_row_does_not_depend_on_the_other_tokens(fmt):
    latents, weight, cos, sin = tokens(9, fmt.num_elements)
    rows = KVRows.create(3, 3, fmt)
    together = store(rows, latents, np.arange(9), weight, cos, sin, "interpret")
    alone = rows
    for i in (4, 0, 8, 2):
        one = slice(i, i + 1)
        alone = store(
            alone, latents[one], jnp.asarray([i]), weight, cos[one], sin[one], "interpret"
        )
    flat = [np.asarray(r.logical()).reshape(9, -1) for r in (together, alone)]
    np.testing.assert_array_equal(flat[1][[0, 2, 4, 8]], flat[0][[0, 2, 4, 8]])
    assert not flat[1][[1, 3, 5, 6, 7]].any()


@pytest.mark.parametrize("pairing", ["interleaved", "half_split"])
def test_zeros_that_do_not_rotate_keep_their_sign(pairing):
    random = np.random.default_rng(0)
    latents, weight, cos, sin = tokens(64, 128, half=16)
    latents = jnp.asarray(random.choice([-0.0, 0.0, 1.0, -1.0], (64, 128)), jnp.float32)
    rows = KVRows.create(8, 8, V41.with_width(128))
    expected, got = both(rows, (latents, weight, cos, sin), np.arange(64), pairing=pairing)
    kept = np.asarray(latents)[:, :96]
    np.testing.assert_array_equal(got[..., :96], expected[..., :96])
    codes = got.reshape(64, -1)[:, :96]
    np.testing.assert_array_equal(codes[kept == 0], np.where(np.signbit(kept[kept == 0]), 0x80, 0))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_latents_may_be_of_any_floating_dtype(dtype):
    arguments = tokens(17, 256, dtype=dtype)
    rows = KVRows.create(17, 1, V41.with_width(256))
    expected, got = both(rows, arguments, np.arange(17))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "last", [-1, 6, 2**31 - 1, -(2**31)], ids=["none", "past_the_end", "largest", "smallest"]
)
def test_a_skipped_token_after_a_stored_one_does_not_undo_it(last):
    """Whether its place is clamped to the first row or to the last, which were just written."""
    rows = KVRows.create(2, 3, V41.with_width(64))
    slots = np.asarray([0, 5, last, last], np.int32)
    expected, got = both(rows, tokens(4, 64), slots)
    np.testing.assert_array_equal(got, expected)
    assert got[0, 0].any()
    assert got[1, 2].any()


def test_only_tokens_that_have_a_slot_are_stored(monkeypatch):
    """The interpreter drops what is written outside an array, where a GPU would write it."""

    def store_live(ref, leading, first, row, fmt, scale_floor, live):
        token = pl.program_id(0) * len(live) + jnp.arange(len(live), dtype=jnp.int32)
        plgpu.store(ref.at[token, jnp.zeros_like(token)], live.astype(jnp.uint8))

    monkeypatch.setattr(triton_rows, "store_row", store_live)
    slots = np.asarray([0, 95, -1, 96, 2**31 - 1, -(2**31), 97, 50, 3, -2, 96, 0, 95], np.int32)
    latents, weight, cos, sin = tokens(13, 64)
    rows = KVRows.create(32, 3, V41.with_width(64))
    stored = triton.fused_store(
        rows, latents, slots, weight, cos, sin, norm_eps=EPS, pairing="interleaved",
        hadamard=False, scale_floor="amax", card="NVIDIA H200", interpret=True,
    )  # fmt: skip
    stores = np.asarray(stored.data[:, 0])
    np.testing.assert_array_equal(stores[:13], (slots >= 0) & (slots < 96))
    assert not stores[13:].any()  # the last program has room for more tokens than there are


# --- lowering


def abstract_arguments(fmt=V41, n=5, half=32, slots=4, rows_per_slot=134, dtype=jnp.bfloat16):
    shape = jax.ShapeDtypeStruct
    width = fmt.num_elements
    slot_bytes = -(-rows_per_slot * fmt.row_bytes // 32) * 32
    data = shape((slots, slot_bytes), jnp.uint8)
    angles = shape((n, half), jnp.float32)
    return (
        KVRows(data, shape((), jnp.int32), rows_per_slot, fmt),
        shape((n, width), dtype),
        shape((n,), jnp.int32),
        shape((width,), jnp.float32),
        angles,
        angles,
    )


def lowered_for_cuda(arguments, implementation=None, **options):
    call = functools.partial(store, implementation=implementation, **options)
    return jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        (V41, {}),
        (V41, {"pairing": "half_split", "floor": "scale"}),
        (V41, {"hadamard": True}),
        *[(fmt, {}) for fmt in FORMATS[1:]],
    ],
    ids=format_id,
)
def test_a_store_is_one_kernel_on_cuda(fmt, options):
    arguments = abstract_arguments(fmt, half=min(32, fmt.num_elements // 2))
    for implementation in (None, "triton"):
        text = lowered_for_cuda(arguments, implementation, **options)
        assert text.count(TRITON_CALL) == 1
        assert "fused_store_kernel" in text
        assert "stablehlo.scatter" not in text
        assert "output_operand_alias<" in text  # the block is written in place


def test_a_store_of_no_tokens_is_no_kernel():
    assert TRITON_CALL not in lowered_for_cuda(abstract_arguments(n=0), "triton")


def test_a_store_without_rotation_is_a_kernel():
    assert TRITON_CALL in lowered_for_cuda(abstract_arguments(half=0), "triton")


# --- what the kernel does not do

REFUSED = {
    "width": (V41.with_width(96), {}, "stores rows of 64, 128, 256 or 512 values, got 96"),
    "half": (
        V41,
        {"half": 12, "pairing": "half_split"},
        r"rotates pairs \(i, i \+ half\) where half is a power of two, got 12",
    ),
    "bytes": (
        V41,
        {"slots": 2**15},
        r"arrays of at most 2147483647 bytes, got uint8\(32768, 70752\)",
    ),
    "raw dtype": (
        dataclasses.replace(V4, raw_dtype="float32"),
        {},
        "stores e4m3 with ue8m0 scales, e2m1, bfloat16 or float32 rows, got KVCacheFormat",
    ),
    "order": (
        dataclasses.replace(V4, scales_last=False),
        {},
        "stores scales after all data, for groups of a power of two, got",
    ),
    "group": (
        dataclasses.replace(V4, quantized_elements=384, elements_per_scale=48, raw_elements=128),
        {},
        "stores scales after all data, for groups of a power of two, got",
    ),
    "raw values": (
        dataclasses.replace(V4, quantized_elements=416, elements_per_scale=32, raw_elements=96),
        {},
        "stores a power of two of raw values, got 96",
    ),
    "pad": (dataclasses.replace(V41, pad_bytes=1), {}, "pads a row with a byte for each scale"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_cannot_do_is_refused_when_named(name):
    fmt, changes, message = REFUSED[name]
    pairing = changes.get("pairing", "interleaved")
    arguments = abstract_arguments(fmt, **{k: v for k, v in changes.items() if k != "pairing"})
    for implementation in ("triton", "interpret"):
        with pytest.raises(NotImplementedError, match=f"'{implementation}' .*{message}"):
            jax.eval_shape(
                functools.partial(store, implementation=implementation, pairing=pairing), *arguments
            )
    text = lowered_for_cuda(arguments, pairing=pairing)
    assert TRITON_CALL not in text
    assert "stablehlo.scatter" in text
