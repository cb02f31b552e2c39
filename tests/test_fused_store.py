"""fused_store: the bytes of new rows against an independent transform, and those around them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from small_models import quick_jit

import pallas_kernels
from pallas_kernels import BF16, F32, V4, V32, V41, V41_FP4, KVRows, dequantize_rows

EPS = 1e-6
HALF = 12  # rotated pairs
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
SMALL = V41.with_width(64)
STORABLE = [SMALL, V4.with_width(128), BF16.with_width(64), F32.with_width(64)]
STORABLE += [V41_FP4.with_width(64)]
by_format = pytest.mark.parametrize("fmt", STORABLE, ids=lambda fmt: fmt.name)

# 9 tokens into 15 rows: the first row, the last, and every kind of slot that means none.
SLOTS = np.asarray([14, -1, 3, 15, 0, INT_MAX, 7, INT_MIN, 4], np.int32)

_fused_store = quick_jit(
    pallas_kernels.fused_store,
    static_argnames=("norm_eps", "pairing", "hadamard", "scale_floor", "implementation"),
)


@pytest.fixture(params=["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def implementation(request):
    return request.param


def half_of(pairing, implementation):
    """Rotated pairs; the kernel takes those of a half split only where they are a power of two."""
    return 16 if pairing == "half_split" and implementation != "xla" else HALF


@dataclasses.dataclass
class Tokens:
    """What a store is given, and what is expected of its rows before the cast."""

    latents: jnp.ndarray
    norm_weight: jnp.ndarray
    angles: np.ndarray

    @property
    def cos_sin(self):
        parts = np.cos(self.angles), np.sin(self.angles)
        return [jnp.asarray(part.round(9), jnp.float32) for part in parts]

    def transformed(self, pairing="interleaved", hadamard=False):
        rows = reference.norm(np.asarray(self.latents, np.float64), self.norm_weight, EPS)
        rows = reference.rotate(rows, self.angles, pairing)
        if hadamard:
            rows = rows @ reference.hadamard_matrix(rows.shape[1])
        return rows.astype(np.float32)


def random_tokens(n=9, width=64, half=HALF, seed=0):
    random = np.random.default_rng(seed)
    size = np.exp(random.normal(size=(n, 1)) + random.normal(size=(1, width)))
    return Tokens(
        jnp.asarray(random.normal(size=(n, width)) * size, jnp.float32),
        jnp.asarray(random.uniform(0.5, 1.5, width), jnp.float32),
        random.uniform(-np.pi, np.pi, (n, half)),
    )


def exact_tokens(width=64, half=HALF, dtype=jnp.float32):
    """Tokens whose transform has no rounding, though its results are not bfloat16.

    The mean of the squares 1, 1, 1, 9, 9, 9, 49 and 49 is 16, beside whose multiples EPS is lost;
    rotations are quarter turns, and weights have 10 bits.
    """
    random = np.random.default_rng(0)
    values = np.tile([1.0, 1, 1, 3, 3, 3, 7, 7], (9, width // 8))
    signs = random.choice([-1, 1], (9, width))
    size = 2.0 ** random.integers(3, 20, (9, 1))
    return Tokens(
        jnp.asarray(random.permuted(values, axis=1) * signs * size, dtype),
        jnp.asarray(random.integers(512, 1024, width) * 2.0 ** random.integers(-14, -6, width)),
        random.integers(0, 4, (9, half)) * np.pi / 2,
    )


def fused_store(
    rows, tokens, slots, implementation, pairing="interleaved", hadamard=False, floor="amax"
):
    cos, sin = tokens.cos_sin
    return _fused_store(
        rows, tokens.latents, slots, norm_weight=tokens.norm_weight, norm_eps=EPS, cos=cos, sin=sin,
        pairing=pairing, hadamard=hadamard, scale_floor=floor, implementation=implementation,
    )  # fmt: skip


def view(fmt=SMALL, start=64, seed=9):
    """5 slots of 3 rows in a block whose other bytes are random; its size is the same for all."""
    slot_bytes = 128 + 3 * fmt.row_bytes + -3 * fmt.row_bytes % 32
    block = np.random.default_rng(seed).integers(0, 256, (5, slot_bytes), np.uint8)
    return KVRows.view(jnp.asarray(block), start=start, rows_per_slot=3, fmt=fmt)


def block_after(rows, data, slots):
    """The block with `data` written by hand."""
    block, size = np.array(rows.data), rows.fmt.row_bytes
    for row, slot in zip(data, np.asarray(slots).tolist(), strict=True):
        if 0 <= slot < rows.num_rows:
            first = int(rows.start) + slot % rows.rows_per_slot * size
            block[slot // rows.rows_per_slot, first : first + size] = row
    return block


def rows_of(stored):
    return np.asarray(stored.logical()).reshape(stored.num_rows, -1)


# --- bytes


@pytest.mark.parametrize(
    ("fmt", "pairing", "hadamard", "floor"),
    [
        (SMALL, "interleaved", False, "amax"),
        (SMALL, "interleaved", True, "amax"),
        (SMALL, "half_split", False, "scale"),
        (SMALL, "half_split", True, "amax"),
        (V4.with_width(128), "interleaved", False, "amax"),
        (V4.with_width(128), "half_split", False, "scale"),
        *[
            (fmt, *choice, "amax")
            for fmt in STORABLE[2:]
            for choice in (("interleaved", False), ("half_split", True))
        ],
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_bytes_are_exact_where_the_transform_has_no_rounding(
    fmt, pairing, hadamard, floor, implementation
):
    half = half_of(pairing, implementation)
    tokens, rows = exact_tokens(fmt.num_elements, half), view(fmt)
    before = np.array(rows.data)
    stored = fused_store(rows, tokens, SLOTS, implementation, pairing, hadamard, floor)
    data = reference.quantize(tokens.transformed(pairing, hadamard), fmt, floor)
    np.testing.assert_array_equal(stored.data, block_after(rows, data, SLOTS))
    np.testing.assert_array_equal(rows.data, before)  # the input is a value


@pytest.mark.parametrize(
    ("pairing", "hadamard", "floor", "most"),
    [
        ("interleaved", False, "amax", 2),
        ("half_split", False, "scale", 2),
        # Its nine stages of sums round too; 64 of 20,000 rows were found to differ.
        ("interleaved", True, "amax", 13),
    ],
)
def test_few_rows_of_a_float64_transform_differ_by_one_step(
    pairing, hadamard, floor, most, implementation
):
    tokens = random_tokens(2000, 512, half=32)
    slots = np.random.default_rng(1).permutation(2000).astype(np.int32)
    rows = KVRows.create(500, 4)
    stored = fused_store(rows, tokens, slots, implementation, pairing, hadamard, floor)
    got = rows_of(stored)[slots]
    expected = reference.quantize(tokens.transformed(pairing, hadamard), V41, floor)
    assert (got != expected).any(axis=1).sum() <= most
    assert np.abs(got[:, 512:].astype(int) - expected[:, 512:]).max() <= 1
    ours, theirs = reference.dequantize(got, V41), reference.dequantize(expected, V41)
    step = np.repeat(np.ldexp(1.0, expected[:, 512:].astype(int) - 127 - 8), 32, axis=1)
    assert (np.abs(ours - theirs) <= np.maximum(np.abs(theirs) / 8, step)).all()


def assert_rows_follow_the_transform(fmt, implementation):
    width = fmt.num_elements
    tokens = random_tokens(65, width, half=width // 2)
    stored = fused_store(KVRows.create(13, 5, fmt), tokens, np.arange(65), implementation)
    got, row = rows_of(stored), tokens.transformed()
    if fmt.quantized_dtype is not None:
        assert (got != reference.quantize(row, fmt)).any(axis=1).sum() <= 1
    else:
        relative = 1e-5 if fmt.raw_dtype == "float32" else 2**-8
        np.testing.assert_allclose(reference.dequantize(got, fmt), row, rtol=relative, atol=1e-6)


@pytest.mark.parametrize(
    ("fmt", "width"), [(V41, 128), (V41, 256), (V41_FP4, 256), (BF16, 256), (F32, 128)],
    ids=lambda value: getattr(value, "name", str(value)),
)  # fmt: skip
def test_rows_follow_the_transform_at_other_widths(fmt, width, implementation):
    assert_rows_follow_the_transform(fmt.with_width(width), implementation)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_a_width_need_not_be_a_power_of_two(implementation):
    assert_rows_follow_the_transform(V41.with_width(96), implementation)


def test_bfloat16_latents_are_transformed_in_float32(implementation):
    tokens, rows = exact_tokens(dtype=jnp.bfloat16), view()
    stored = fused_store(rows, tokens, SLOTS, implementation)
    data = reference.quantize(tokens.transformed(), SMALL)
    np.testing.assert_array_equal(stored.data, block_after(rows, data, SLOTS))


def test_no_rotation_is_a_rotation_of_no_pair(implementation):
    tokens, rows = exact_tokens(half=0), view()
    stored = fused_store(rows, tokens, SLOTS, implementation)
    data = reference.quantize(tokens.transformed(), SMALL)
    np.testing.assert_array_equal(stored.data, block_after(rows, data, SLOTS))


def test_another_start_and_other_slots_give_the_same_rows(implementation):
    tokens = random_tokens()
    data = rows_of(fused_store(view(), tokens, np.arange(9), implementation))[:9]
    for start in (0, 32, 128):
        slots = np.random.default_rng(start).permutation(15)[:9].astype(np.int32)
        rows = view(start=start)
        stored = fused_store(rows, tokens, slots, implementation)
        np.testing.assert_array_equal(stored.data, block_after(rows, data, slots))


# --- rows that are not finite, and tokens that are not stored


NAN_ROWS = {
    "V41": [0x7F] * 64 + [0xFF] * 2,
    "V4": [0x7F] * 64 + [0xC0, 0x7F] * 64 + [0xFF, 0],
    "BF16": [0xC0, 0x7F] * 64,
    "F32": [0, 0, 0xC0, 0x7F] * 64,
    "V41_FP4": [0x7F] * (32 + 4),
}


@pytest.mark.makes_nan
@by_format
def test_a_bad_activation_makes_its_row_nan_and_touches_no_other(fmt, implementation):
    tokens, rows = random_tokens(width=fmt.num_elements), view(fmt)
    data = rows_of(fused_store(rows, tokens, SLOTS, implementation))[np.clip(SLOTS, 0, 14)]
    data[[2, 4]] = NAN_ROWS[fmt.name]
    for bad in (np.nan, np.inf, -np.inf, 3e38):  # the last overflows in the norm
        latents = np.array(tokens.latents)
        latents[2, 40] = latents[4, 63] = bad  # slots 3 and 0
        latents[[1, 3, 5, 7]] = bad  # skipped
        spoiled = dataclasses.replace(tokens, latents=jnp.asarray(latents))
        stored = fused_store(rows, spoiled, SLOTS, implementation)
        np.testing.assert_array_equal(stored.data, block_after(rows, data, SLOTS))


@pytest.mark.makes_nan
def test_a_weight_that_is_not_finite_makes_every_row_nan(implementation):
    tokens, rows = random_tokens(), view()
    tokens.norm_weight = tokens.norm_weight.at[3].set(np.inf)
    stored = fused_store(rows, tokens, np.arange(9), implementation)
    np.testing.assert_array_equal(rows_of(stored)[:9], np.tile(NAN_ROWS["V41"], (9, 1)))
    assert np.isnan(dequantize_rows(stored.logical()[0], SMALL)).all()


@pytest.mark.parametrize(("floor", "code"), [("amax", 105), ("scale", 114)])
def test_zero_latents_are_zero_rows(floor, code, implementation):
    tokens = random_tokens(half=half_of("half_split", implementation))
    tokens.latents = jnp.zeros((9, 64))
    stored = fused_store(view(), tokens, np.arange(9), implementation, "half_split", floor=floor)
    data = rows_of(stored)[:9]
    assert not (data[:, :64] & 0x7F).any()
    np.testing.assert_array_equal(data[:, 64:], code)


@pytest.mark.makes_nan
@pytest.mark.parametrize("slot", [-1, INT_MIN, 15, INT_MAX])
def test_skipped_tokens_change_no_byte(slot, implementation):
    tokens = dataclasses.replace(random_tokens(), latents=jnp.full((9, 64), np.nan))
    rows = view()
    stored = fused_store(rows, tokens, np.full(9, slot, np.int32), implementation)
    np.testing.assert_array_equal(stored.data, rows.data)


def test_no_tokens_change_no_byte(implementation):
    rows = view()
    stored = fused_store(rows, random_tokens(n=0), np.zeros(0, np.int32), implementation)
    np.testing.assert_array_equal(stored.data, rows.data)


# --- transformations and types


def test_vmap_is_a_loop(implementation):
    views = [view(seed=seed) for seed in (1, 2)]
    tokens = [random_tokens(seed=seed) for seed in (3, 4)]
    slots = [SLOTS, SLOTS[::-1]]

    def store(rows, latents, norm_weight, slots, cos, sin):
        return pallas_kernels.fused_store(
            rows, latents, slots, norm_weight=norm_weight, norm_eps=EPS, cos=cos, sin=sin,
            implementation=implementation,
        )  # fmt: skip

    each = [
        (rows, t.latents, t.norm_weight, jnp.asarray(s), *t.cos_sin)
        for rows, t, s in zip(views, tokens, slots, strict=True)
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    got = jax.jit(jax.vmap(store))(*stacked)
    for i in range(2):
        one = fused_store(views[i], tokens[i], slots[i], implementation)
        np.testing.assert_array_equal(got.data[i], one.data)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int16])
def test_slots_may_be_integers_of_any_kind(dtype, implementation):
    tokens, rows = random_tokens(), view()
    cos, sin = tokens.cos_sin
    stored = jax.eval_shape(
        lambda: pallas_kernels.fused_store(
            rows, tokens.latents, np.arange(9).astype(dtype), norm_weight=tokens.norm_weight,
            norm_eps=EPS, cos=cos, sin=sin, implementation=implementation,
        )
    )  # fmt: skip
    assert jax.tree.structure(stored) == jax.tree.structure(rows)
    assert stored.data.shape == rows.data.shape


# --- errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latents": jnp.zeros((9, 63))}, r"latents: expected shape \(any, 64\), got \(9, 63\)"),
        ({"latents": jnp.zeros((3, 3, 64))}, r"\(any, 64\), got \(3, 3, 64\)"),
        ({"latents": jnp.zeros((9, 64), jnp.int8)}, "latents: expected a floating .*got int8"),
        ({"slots": jnp.arange(8)}, r"slots: expected shape \(9\), got \(8,\)"),
        ({"slots": jnp.zeros(9, jnp.float32)}, "slots: expected integers, got dtype float32"),
        ({"slots": np.full(9, 2**31)}, "slots: expected int32 values, got 2147483648"),
        ({"norm_weight": jnp.zeros(63)}, r"norm_weight: expected shape \(64\), got \(63,\)"),
        ({"norm_weight": jnp.zeros(64, bool)}, "norm_weight: expected a floating .*got bool"),
        ({"cos": jnp.zeros((8, 12))}, r"cos: expected shape \(9, any\), got \(8, 12\)"),
        ({"sin": jnp.zeros((9, 11))}, r"the same shape .*got \(9, 12\) and \(9, 11\)"),
        ({"sin": jnp.zeros((9, 12), jnp.int32)}, "sin: expected a floating .*got int32"),
        (
            {"cos": jnp.zeros((9, 33)), "sin": jnp.zeros((9, 33))},
            r"at most 32 pairs, got \(9, 33\)",
        ),
        ({"norm_eps": -1.0}, "norm_eps: expected a finite number of 0 or more, got -1.0"),
        ({"norm_eps": 1e39}, r"norm_eps: expected a finite number of 0 or more, got 1e\+39"),
        ({"pairing": "half"}, "pairing: expected one of 'interleaved', 'half_split', got 'half'"),
        ({"scale_floor": "none"}, "scale_floor: expected one of 'amax', 'scale', got 'none'"),
        ({"rows": jnp.zeros((5, 320), jnp.uint8)}, "rows: expected a KVRows, got ArrayImpl"),
        (
            {"rows": KVRows.create(5, 3, V32.with_width(192)), "latents": jnp.zeros((9, 192))},
            "format V32 is for conversion only",
        ),
        (
            {
                "rows": KVRows.create(5, 3, V41.with_width(96)),
                "latents": jnp.zeros((9, 96)),
                "norm_weight": jnp.ones(96),
                "hadamard": True,
            },
            "hadamard: expected a row width that is a power of two, got 96",
        ),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    tokens = random_tokens()
    arguments = dict(
        rows=view(),
        latents=tokens.latents,
        slots=SLOTS,
        norm_weight=tokens.norm_weight,
        norm_eps=EPS,
        **dict(zip(("cos", "sin"), tokens.cos_sin, strict=True)),
    )
    with pytest.raises(ValueError, match=message):
        pallas_kernels.fused_store(**(arguments | changes))
