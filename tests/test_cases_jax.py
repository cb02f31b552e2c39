"""Cases of tests/cases.md: donation, compilation, 64-bit mode, and kernels as JAX lowers them."""

import copy
import functools
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
import triton_ir
from jax.sharding import AbstractDevice, AbstractMesh
from quick_compilation import QUICK_COMPILATION
from ring_layers import RingLayer, ShowLayer
from small_models import (
    activations,
    attention_config,
    decoder_config,
    largest_error,
    quick_jit,
)

import swa_jax as swa
from pallas_kernels import (
    BF16,
    F32,
    V4,
    V41,
    V41_FP4,
    ExtraKV,
    KVRows,
    dequantize_rows,
    fused_store,
    indexed_attention,
)
from swa_jax import cache as cache_module

pytestmark = pytest.mark.quick_compilation

ROOT = Path(__file__).parents[1]
TRITON_CALL = "__gpu$xla.gpu.triton"
CARDS = ["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA L40", "NVIDIA B200"]
abstract = jax.ShapeDtypeStruct


@pytest.fixture(params=["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def implementation(request):
    return request.param


def store(rows, latents, slots, **options):
    """A fused store without rotation."""
    angles = jnp.zeros((len(latents), 0))
    return fused_store(
        rows, latents, slots, norm_weight=jnp.ones(latents.shape[1]), norm_eps=1e-6, cos=angles,
        sin=angles, **options,
    )  # fmt: skip


def lowered_for_cuda(call, *arguments) -> str:
    return jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


# --- Q: donation


@functools.partial(jax.jit, donate_argnums=0)
def donated_step(cache, position):
    """A token for slot 0 in every layer of a cache."""
    for i in range(cache.layers):
        geometry = cache.geometry
        slots = geometry.slots(jnp.zeros(1, jnp.int32), position[None])
        latents = jnp.full((1, cache.fmt.num_elements), 1.0) + jnp.float32(i)
        cache = cache.with_layer(i, store(cache.layer(i), latents, slots))
    return cache


def small_cache(layers=1):
    return swa.RingCache.create(2, layers, swa.RingGeometry(3, 5), V41.with_width(64))


@pytest.mark.donates
def test_Q01_a_donated_cache_cannot_be_read_or_used_again():
    old = small_cache()
    kept = old.snapshot()
    new = donated_step(old, jnp.int32(0))
    for use in (
        lambda: np.asarray(old.blocks[0]),
        lambda: donated_step(old, jnp.int32(1)),
        lambda: old.snapshot(),
    ):
        with pytest.raises((RuntimeError, ValueError), match="deleted"):
            use()
    assert np.any(new.blocks[0])
    assert not np.any(kept.blocks[0])


def test_Q02_no_two_leaves_of_a_fresh_state_are_one_array(monkeypatch):
    monkeypatch.setattr(cache_module, "MAX_BLOCK_BYTES", 2 * 352)
    cache = small_cache(layers=3)
    assert [block.shape for block in cache.blocks] == [(2, 352)] * 3
    pointers = {block.unsafe_buffer_pointer() for block in cache.blocks}
    assert len(pointers) == 3
    assert all(np.any(block) for block in donated_step(cache, jnp.int32(0)).blocks)
    sampling = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf, x), donate_argnums=0)(
        swa.Sampling.build(2)
    )
    assert sampling.temperature.tolist() == [0, 0]


@pytest.mark.donates
def test_Q04_a_donated_cache_of_one_gibibyte_is_not_copied():
    slots = 15_177
    rows = KVRows(abstract((slots, 70_752), jnp.uint8), abstract((), jnp.int32), 134, V41)
    nbytes = slots * 70_752
    assert nbytes >= 2**30

    def step(rows, q, position):
        place = jnp.arange(8, dtype=jnp.int32) * 134 + position
        rows = store(rows, q[:, 0], place)
        out, _ = indexed_attention(q, rows, place[:, None] - jnp.arange(4, dtype=jnp.int32)[None])
        return rows, out

    def loop(rows, q, position):
        return jax.lax.fori_loop(
            0, 8, lambda i, carry: step(carry[0], carry[1], position + i), (rows, q)
        )

    q = abstract((8, 1, 512), jnp.float32)
    for program in (step, loop):
        lowered = jax.jit(program, donate_argnums=0).lower(rows, q, abstract((), jnp.int32))
        memory = lowered.compile(compiler_options=QUICK_COMPILATION).memory_analysis()
        assert memory.alias_size_in_bytes >= nbytes
        assert memory.temp_size_in_bytes < nbytes / 100


# --- Q: what compiles again


def test_Q06_positions_of_every_kind_are_one_program():
    config = attention_config(3, V41)
    layer, x = RingLayer(config), jnp.asarray(activations(config, 1, 1))
    traces = []

    @functools.partial(jax.jit, donate_argnums=1)
    def step(params, rows, x, meta):
        traces.append(meta)
        return swa.SlidingWindowAttention(config).apply(params, x, rows, meta)

    kinds = [int, np.int32, np.int64, jnp.int32, jnp.asarray, lambda p: jnp.asarray([p])[0]]
    rows = layer.rows
    for position in range(200):
        place = kinds[position % len(kinds)](position)
        place = place[None, None] if isinstance(place, jax.Array) else [[place]]
        meta = swa.DecodeMetadata.build(config.geometry, [0], place)
        _, rows = step(layer.params, rows, x, meta)
    assert len(traces) == 1
    assert step._cache_size() == 1


def test_Q07_with_64_bit_mode_on_nothing_is_wider():
    config = attention_config(3, V41)
    x = activations(config, 2, 3)

    def run():
        layer = RingLayer(config)
        return layer.decode(x, [2, 0], [[0, 1, 2], [5, 6, -1]]), layer.data

    def results():
        cache = swa.RingCache.create(1, 1, config.geometry, config.fmt)
        meta = swa.PrefillMetadata.build(config.geometry, [0], [0], [2], max_tokens=2)
        y, rows = swa.SlidingWindowAttention(config).apply(
            params, jnp.asarray(x[:1, :2]), cache.layer(0), meta
        )
        exported = cache.with_layer(0, rows).export_slot(0, 2)
        return meta, rows, exported, swa.Sampling.build(1).top_k, y

    params, want = RingLayer(config).params, run()
    with jax.enable_x64(True):
        got = run()
        *integers, y = jax.tree.leaves(jax.eval_shape(results))
    assert {leaf.dtype.name for leaf in integers} == {"int32", "uint8"}
    for a, b in zip((*got, y), (*want, want[0]), strict=True):
        assert a.dtype == b.dtype
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_Q09_equal_configurations_are_one_program_and_a_list_is_refused():
    traces = []

    @functools.partial(jax.jit, static_argnames="config")
    def call(config):
        traces.append(config)
        return jnp.zeros(config.geometry.capacity)

    first, second = (decoder_config(attention_config(3, V41)) for _ in range(2))
    assert first is not second
    # as from a list, which is a tuple then; copied as pickle copies
    third = swa.DecoderConfig(50, 3, [attention_config(3, V41)] * 3, mlp_size=48)
    for config in (first, second, copy.deepcopy(first)):
        call(config)
    assert len(traces) == 1
    for config in (third, copy.deepcopy(third)):
        call(config)
    assert len(traces) == 2
    with pytest.raises((TypeError, ValueError), match="unhashable|hashable"):
        call([first])


@pytest.mark.donates
def test_Q10_a_state_that_was_dropped_cannot_be_gone_on_from():
    cache = small_cache()
    for position in range(3):
        cache = donated_step(cache, jnp.int32(position))
    donated_step(cache, jnp.int32(3))  # its result is dropped
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        donated_step(cache, jnp.int32(4))
    # Without donation it is the caller's mistake: a ring does not record which positions it holds.
    show = ShowLayer(3, 5)
    show.prefill([0], [10], 12, [[*range(20, 30), -1, -1]])  # an earlier request
    show.prefill([0], [3], 12)
    before = show.layer.rows
    show.decode([[3]])
    show.layer.rows = before
    assert show.decode([[4]]) == [[{2, 28, 4}]]


# --- R: kernels

SHAPES = [(1, 1), (2, 100), (8, 134), (24, 1), (43, 134)]  # heads, columns


@pytest.mark.parametrize(("heads", "columns"), SHAPES)
@pytest.mark.parametrize(
    "implementation",
    [
        "xla",
        pytest.param("interpret", marks=pytest.mark.slow),
        pytest.param("triton", marks=pytest.mark.gpu),
    ],
)
def test_R01_heads_and_columns_need_not_be_powers_of_two(heads, columns, implementation):
    random = np.random.default_rng(heads)
    fmt = V41.with_width(64)
    data = reference.quantize(random.normal(size=(140, 64)), fmt)
    rows = KVRows.view(jnp.asarray(data), start=0, rows_per_slot=1, fmt=fmt)
    q = jnp.asarray(random.normal(size=(1, heads, 64)), jnp.bfloat16)
    indices = random.permutation(140)[None, :columns].astype(np.int32)
    call = quick_jit(functools.partial(indexed_attention, implementation=implementation))
    out, lse = call(q, rows, indices)
    values = reference.dequantize(data, fmt)
    want, want_lse = reference.attention(q, [(values, indices, None)])
    assert largest_error(np.asarray(out, np.float32), want) <= 1e-2
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=1e-5)


def abstract_read(heads, columns=128, width=512, dtype=jnp.bfloat16, fmt=V41, n=1):
    fmt = fmt.with_width(width)
    size = -(-134 * fmt.row_bytes // 32) * 32
    rows = KVRows(abstract((4, size), jnp.uint8), abstract((), jnp.int32), 134, fmt)
    return abstract((n, heads, width), dtype), rows, abstract((n, columns), jnp.int32)


def test_R01_every_shape_has_a_kernel():
    for heads, columns in SHAPES:
        text = lowered_for_cuda(indexed_attention, *abstract_read(heads, columns, 64))
        assert text.count(TRITON_CALL) == 1


@pytest.mark.parametrize("card", CARDS)
def test_R02_wide_rows_have_a_kernel_for_every_card_and_float32_has_xla(card):
    device = AbstractDevice(device_kind=card, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        for heads in (1, 128):
            assert TRITON_CALL in lowered_for_cuda(indexed_attention, *abstract_read(heads))
        text = lowered_for_cuda(indexed_attention, *abstract_read(128, dtype=jnp.float32))
        assert TRITON_CALL not in text


def test_R05_a_store_leaves_the_other_rows_as_they_are(implementation):
    fmt = V41.with_width(64)
    data = np.random.default_rng(0).integers(0, 256, (1, 8 * 66 + 32), np.uint8)
    rows = KVRows.view(jnp.asarray(data), start=32, rows_per_slot=8, fmt=fmt)
    call = jax.jit(functools.partial(store, implementation=implementation))
    after = np.asarray(call(rows, jnp.ones((1, 64)), np.int32([5])).data)
    row = slice(32 + 5 * 66, 32 + 6 * 66)
    # 1 under the scale 2**-8 is 256
    assert set(after[0, row][:64].tolist()) == {0x78}
    assert after[0, row][64:].tolist() == [119, 119]
    np.testing.assert_array_equal(np.delete(after, row), np.delete(data, row))


def test_R06_the_metadata_names_the_versions_of_jax_that_are_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    limits = {
        line.partition(">=")[2]
        for line in [*project["dependencies"], *extras]
        if line.startswith(("jax>", "jax["))
    }
    assert limits == {"0.10.2,<0.13"}
    assert (0, 10, 2) <= jax.__version_info__ < (0, 13)


def test_R07_kernels_decode_without_an_eight_bit_float_type():
    attend = functools.partial(indexed_attention, implementation="triton")
    write = functools.partial(store, implementation="triton")
    read_arguments = abstract_read(2, 4, 64)
    latents, slots = abstract((1, 64), jnp.bfloat16), abstract((1,), jnp.int32)
    for call, arguments in ((attend, read_arguments), (write, (read_arguments[1], latents, slots))):
        for card in CARDS[:2]:
            [kernel] = triton_ir.kernels_of(call, *arguments, card=card)
            assert "tt.store" in kernel.text
            assert "f8E" not in kernel.text


@pytest.mark.parametrize("fmt", [V41, V4, BF16, F32, V41_FP4], ids=lambda fmt: fmt.name)
def test_R09_every_format_and_option_lowers_for_a_gpu(fmt):
    q, rows, indices = abstract_read(2, 4, 128, fmt=fmt)
    extra = ExtraKV(abstract_read(2, 4, 128, fmt=V41_FP4)[1], indices)
    angles = abstract((1, 16), jnp.float32)

    def read(q, rows, indices, extra, cos, sin):
        plain = indexed_attention(q, rows, indices, implementation="triton")
        fused = indexed_attention(
            q, rows, indices, extra=extra, query_norm_eps=1e-6, cos=cos, sin=sin,
            pairing="half_split", output_format=V41.with_width(128), implementation="triton",
        )  # fmt: skip
        return plain, fused

    def write(rows, latents, slots, cos, sin):
        for options in ({}, {"hadamard": True, "pairing": "half_split", "scale_floor": "scale"}):
            rows = fused_store(
                rows, latents, slots, norm_weight=jnp.ones(128), norm_eps=1e-6, cos=cos, sin=sin,
                implementation="triton", **options,
            )  # fmt: skip
        return rows

    text = lowered_for_cuda(read, q, rows, indices, extra, angles, angles)
    assert text.count(TRITON_CALL) == 2
    assert "stablehlo.gather" not in text
    latents, slots = abstract((1, 128), jnp.bfloat16), abstract((1,), jnp.int32)
    text = lowered_for_cuda(write, rows, latents, slots, angles, angles)
    assert text.count(TRITON_CALL) == 2
    assert "stablehlo.scatter" not in text


@pytest.mark.makes_nan
def test_R10_bytes_are_uint8_and_another_type_is_named():
    block = jnp.zeros((1, 8 * 528), jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"block: expected uint8.* got float8_e4m3fn"):
        KVRows.view(block, start=0, rows_per_slot=8)
    with pytest.raises(ValueError, match="data: expected dtype uint8, got float8_e8m0fnu"):
        dequantize_rows(jnp.zeros((1, 528), jnp.float8_e8m0fnu), V41)
