"""A compressed cache in the layer and in the decoder, and what makes it: hooks as named inputs."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import float64_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import (
    activations,
    attention_config,
    decoder_config,
    decoder_params,
    largest_error,
    layer_params,
    quick_jit,
)

import swa_jax as swa
from pallas_kernels import ExtraKV, KVRows, dequantize_rows, quantize_rows

WINDOW, BATCH, TOKENS, COLUMNS, ENTRIES = 3, 2, 8, 5, 20
FORMATS = [swa.V41, swa.V41_FP4, swa.BF16]
YARN = swa.YarnScaling(factor=4.0, original_max_positions=64)


def config_of(fmt: swa.KVCacheFormat, window_fmt=swa.F32, **fields: Any) -> swa.AttentionConfig:
    fields = {"rope_theta": 160000.0, "rope_scaling": YARN, **fields}
    return attention_config(WINDOW, window_fmt, extra_fmt=fmt.with_width(64), **fields)


def compressed(fmt: swa.KVCacheFormat, seed: int = 7) -> tuple[KVRows, np.ndarray]:
    """Rows in slots of 7, and the indices of each query: some none, some beyond a length of 4."""
    rng = np.random.default_rng(seed)
    fmt = fmt.with_width(64)
    data = quantize_rows(jnp.asarray(rng.normal(size=(21, 64)), jnp.float32), fmt)
    data = jnp.pad(data.reshape(3, -1), ((0, 0), (0, -7 * fmt.row_bytes % 32)))
    indices = rng.integers(-1, ENTRIES, (BATCH, TOKENS, COLUMNS)).astype(np.int32)
    indices[0, 2] = -1
    return KVRows.view(data, start=0, rows_per_slot=7, fmt=fmt), indices


def extra_of(rows: KVRows, indices, lengths=None) -> ExtraKV:
    lengths = None if lengths is None else jnp.asarray(lengths).reshape(-1)
    return ExtraKV(rows, jnp.asarray(indices).reshape(-1, COLUMNS), lengths)


@functools.cache
def compiled(config: swa.AttentionConfig, implementation=None):
    """The layer, fed from a start in calls of a width: [2, width, hidden] and its indices."""
    layer = swa.SlidingWindowAttention(config, implementation=implementation)
    params = layer_params(config)

    @functools.partial(quick_jit, static_argnames="form")
    def call(cache, x, extra, start, form):
        states, count = np.int32([2, 0]), x.shape[1]
        if form == "decode":
            positions = start + jnp.tile(jnp.arange(count, dtype=jnp.int32), (BATCH, 1))
            meta: Any = swa.DecodeMetadata.build(config.geometry, states, positions)
        else:
            starts = jnp.full(BATCH, start, jnp.int32)
            lengths = np.full(BATCH, count, np.int32)
            meta = swa.PrefillMetadata.build(
                config.geometry, states, starts, lengths, max_tokens=count
            )
        y, rows = layer.apply(params, x, cache.layer(0), meta, extra=extra)
        return y, cache.with_layer(0, rows)

    return call


@functools.cache
def compiled_whole(config: swa.AttentionConfig):
    layer, params = swa.SlidingWindowAttention(config), layer_params(config)
    return quick_jit(lambda x, extra: layer.apply(params, x, extra=extra))


def feed(config, form, width, x, rows, indices, lengths=None, implementation=None):
    cache = swa.RingCache.create(3, 1, config.geometry, config.fmt)
    outputs = []
    for start in range(0, TOKENS, width):
        part = slice(start, start + width)
        extra = extra_of(rows, indices[:, part], None if lengths is None else lengths[:, part])
        call = compiled(config, implementation)
        y, cache = call(cache, x[:, part], extra, np.int32(start), form)
        outputs.append(np.asarray(y))
    return np.concatenate(outputs, axis=1)


def whole(config, x, rows, indices, lengths=None):
    extra = extra_of(rows, indices, lengths)
    return np.asarray(compiled_whole(config)(x, extra))


def reference(config, x, rows, indices):
    values = np.asarray(dequantize_rows(rows.logical()[:, :, 0], rows.fmt), np.float64)
    params = layer_params(config)["params"]
    return np.stack(
        [
            float64_reference.attention_layer(
                params, x[b], config, extra=(values.reshape(-1, 64), indices[b])
            )
            for b in range(BATCH)
        ]
    )


@pytest.mark.parametrize(
    "fmt",
    [
        pytest.param(fmt, id=fmt.name, marks=pytest.mark.slow if i else ())
        for i, fmt in enumerate(FORMATS)
    ],
)
def test_every_form_is_one_softmax_over_window_and_compressed_rows(fmt):
    config = config_of(fmt)
    x = activations(config, BATCH, TOKENS)
    rows, indices = compressed(fmt)
    want = reference(config, x, rows, indices)
    without = reference(config, x, rows, np.full_like(indices, -1))
    assert largest_error(without, want) > 0.1  # the rows matter
    forms = [("decode", 4), ("prefill", 8)]
    if fmt == swa.V41_FP4:
        forms += [("decode", 1), ("prefill", 2)]
    for form, width in forms:
        assert largest_error(feed(config, form, width, x, rows, indices), want) <= 2e-6
    assert largest_error(whole(config, x, rows, indices), want) <= 2e-6


@pytest.mark.parametrize(
    "options",
    [{"query_norm": True}, pytest.param({"hadamard": True}, marks=pytest.mark.slow)],
    ids=str,
)
def test_options_of_the_query_hold_for_compressed_rows_as_well(options):
    config = config_of(swa.BF16, **options)
    x = activations(config, BATCH, TOKENS)
    rows, indices = compressed(swa.BF16)
    decoded = feed(config, "decode", 4, x, rows, indices)
    assert largest_error(feed(config, "prefill", 8, x, rows, indices), decoded) <= 3e-6
    assert largest_error(whole(config, x, rows, indices), decoded) <= 3e-6
    if not config.hadamard:  # the rows of the cache would be the transformed ones
        assert largest_error(decoded, reference(config, x, rows, indices)) <= 2e-6


@pytest.mark.parametrize("form", ["decode", "prefill", "sequence"])
def test_entries_beyond_a_length_do_not_count(form):
    config = config_of(swa.V41_FP4)
    x = activations(config, BATCH, TOKENS)
    rows, indices = compressed(swa.V41_FP4)
    lengths = np.arange(BATCH * TOKENS, dtype=np.int32).reshape(BATCH, TOKENS) % 7
    cut = np.where(np.arange(COLUMNS) < lengths[..., None], indices, -1)
    run = functools.partial(whole, config)
    if form != "sequence":
        run = functools.partial(feed, config, form, 4)
    np.testing.assert_array_equal(run(x, rows, indices, lengths), run(x, rows, cut))


@pytest.mark.makes_nan
@pytest.mark.parametrize("form", ["decode", "prefill", "sequence"])
def test_a_compressed_row_of_nan_reaches_exactly_the_queries_that_name_it(form):
    config = config_of(swa.V41)
    x = activations(config, BATCH, TOKENS)
    rows, indices = compressed(swa.V41)
    assert ENTRIES not in indices  # so row 20 is free
    run = functools.partial(whole, config)
    if form != "sequence":
        run = functools.partial(feed, config, form, 4)
    clean = run(x, rows, indices)
    poisoned = dataclasses.replace(rows, data=rows.data.at[2, -rows.fmt.row_bytes - 12 :].set(255))
    np.testing.assert_array_equal(run(x, poisoned, indices), clean)
    indices = indices.copy()
    indices[1, 5, 3] = ENTRIES
    named = np.array(run(x, poisoned, indices))
    assert np.all(np.isnan(named[1, 5]))
    named[1, 5] = clean[1, 5]
    np.testing.assert_array_equal(named, clean)


def test_quantised_rows_give_the_same_answer_in_every_form():
    config = config_of(swa.V41_FP4, window_fmt=swa.V41)
    x = activations(config, BATCH, TOKENS)
    rows, indices = compressed(swa.V41_FP4)
    want = whole(config, x, rows, indices)
    for form, width in (("decode", 1), ("prefill", 8)):
        assert largest_error(feed(config, form, width, x, rows, indices), want) <= 3e-2


@pytest.mark.parametrize(
    ("form", "width"), [("decode", 4), pytest.param("prefill", 8, marks=pytest.mark.slow)]
)
def test_the_kernels_read_compressed_rows(form, width):
    config = config_of(swa.V41_FP4, window_fmt=swa.V41, dtype="bfloat16")
    x = activations(config, BATCH, TOKENS)
    rows, indices = compressed(swa.V41_FP4)
    got = feed(config, form, width, x, rows, indices, implementation="interpret")
    want = feed(config, form, width, x, rows, indices, implementation="xla")
    assert largest_error(got, want) <= 1e-2  # two units in the last place of bfloat16


def test_gradients_pass_through_the_softmax_over_both():
    config = config_of(swa.BF16)
    rows, indices = compressed(swa.BF16)
    layer, params = swa.SlidingWindowAttention(config), layer_params(config)
    x = jnp.asarray(activations(config, BATCH, TOKENS))
    extra = extra_of(rows, indices)
    weights = jnp.asarray(activations(config, BATCH, TOKENS, seed=3))

    def loss(x):
        return jnp.sum(layer.apply(params, x, extra=extra) * weights)

    gradient = np.asarray(quick_jit(jax.grad(loss))(x), np.float64)
    direction = activations(config, BATCH, TOKENS, seed=4)
    values = [reference(config, np.float64(x) + step * direction, rows, indices) for step in (
        1e-5, -1e-5)]  # fmt: skip
    slope = np.sum((values[0] - values[1]) * np.asarray(weights)) / 2e-5
    assert np.sum(gradient * direction) == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda extra: None, "extra: expected a compressed cache of V41_FP4 rows"),
        (
            lambda extra: dataclasses.replace(extra, rows=compressed(swa.V41)[0]),
            "extra.rows: expected format V41_FP4 of 64 values, got V41 of 64",
        ),
        (
            lambda extra: dataclasses.replace(extra, indices=extra.indices[1:]),
            r"extra.indices: expected shape \(16, .*\), got \(15, 5\)",
        ),
        (
            lambda extra: dataclasses.replace(extra, indices=extra.indices.astype(jnp.float32)),
            "extra.indices: expected integers, got dtype float32",
        ),
        (
            lambda extra: dataclasses.replace(extra, lengths=jnp.zeros(3, jnp.int32)),
            r"extra.lengths: expected shape \(16\), got \(3,\)",
        ),
    ],
)
@pytest.mark.parametrize("form", ["sequence", "prefill"])
def test_a_cache_that_is_not_the_layers_is_refused(form, change, message):
    config = config_of(swa.V41_FP4)
    extra = change(extra_of(*compressed(swa.V41_FP4)))
    x = jnp.asarray(activations(config, BATCH, TOKENS))
    layer, params = swa.SlidingWindowAttention(config), layer_params(config)
    arguments: tuple = ()
    if form == "prefill":
        rows = swa.RingCache.create(3, 1, config.geometry, config.fmt).layer(0)
        ends = [TOKENS] * BATCH
        meta = swa.PrefillMetadata.build(config.geometry, [2, 0], [0, 0], ends, max_tokens=TOKENS)
        arguments = (rows, meta)
    with pytest.raises(ValueError, match=message):
        layer.apply(params, x, *arguments, extra=extra)


def test_a_layer_without_one_takes_none():
    config = attention_config(WINDOW, swa.F32)
    extra = extra_of(*compressed(swa.V41))
    with pytest.raises(ValueError, match="extra: expected none, as extra_fmt is None, got a comp"):
        swa.SlidingWindowAttention(config).apply(
            layer_params(config), jnp.ones((BATCH, TOKENS, 32)), extra=extra
        )


# --- the decoder's named inputs

LAYERS = 3
TOKEN_IDS = np.random.default_rng(5).integers(0, 50, (BATCH, TOKENS)).astype(np.int32)


def mixed_decoder() -> tuple[swa.DecoderConfig, Any]:
    """The first layer reads its window only."""
    window = attention_config(WINDOW, swa.F32)
    layer = config_of(swa.V41_FP4)
    config = decoder_config((window, layer, layer), LAYERS)
    return config, decoder_params(config)


def test_each_layer_gets_its_own_compressed_cache():
    config, params = mixed_decoder()
    extras = [None, *(extra_of(*compressed(swa.V41_FP4, seed)) for seed in (1, 2))]
    model = swa.Decoder(config)
    apply = quick_jit(model.apply)
    hidden = apply(params, TOKEN_IDS, extra=extras)
    swapped = apply(params, TOKEN_IDS, extra=[None, *extras[:0:-1]])
    assert largest_error(swapped, hidden) > 1e-2
    cache = swa.RingCache.create(BATCH, LAYERS, config.geometry, config.fmt)
    meta = swa.PrefillMetadata.build(
        config.geometry, [0, 1], [0, 0], [TOKENS] * BATCH, max_tokens=TOKENS
    )
    cached, cache = apply(params, TOKEN_IDS, cache, meta, extra=extras)
    assert largest_error(cached, hidden) <= 3e-5


@pytest.mark.slow
def test_scanned_layers_share_a_compressed_cache():
    config = decoder_config(config_of(swa.V41), LAYERS)
    params = decoder_params(config)
    extra = extra_of(*compressed(swa.V41))
    want = quick_jit(swa.Decoder(config).apply)(params, TOKEN_IDS, extra=extra)
    tree = dict(params["params"])
    layers = [tree.pop(f"layers_{i}") for i in range(LAYERS)]
    tree["layers"] = {"layer": jax.tree.map(lambda *x: np.stack(x), *layers)}
    scanned = swa.Decoder(dataclasses.replace(config, scan_layers=True))
    got = quick_jit(scanned.apply)({"params": tree}, TOKEN_IDS, extra=extra)
    assert largest_error(got, want) <= 1e-6
    with pytest.raises(ValueError, match="extra: expected one for all layers with scan_layers"):
        scanned.apply({"params": tree}, TOKEN_IDS, extra=[extra] * LAYERS)


def test_a_hook_makes_a_compressed_cache_and_later_layers_share_it():
    config, params = mixed_decoder()
    rows, indices = compressed(swa.V41_FP4)
    calls = []

    def source(hidden, meta, extra, cross_layer):
        calls.append((hidden.shape, extra, cross_layer))
        # A selection that depends on the hidden states and the positions.
        chosen = jnp.where(hidden[..., :1] > 0, indices, -1)
        chosen = jnp.where(meta.positions[..., None] > 1, chosen, -1)
        made = extra_of(rows, chosen)
        return made, {"selected": made, "given": cross_layer, "hidden": hidden}

    def reuse(hidden, meta, extra, cross_layer):
        return cross_layer["selected"], cross_layer

    model = swa.Decoder(config, extra_hooks=(None, source, reuse))
    hidden, left = quick_jit(model.apply)(params, TOKEN_IDS, cross_layer=jnp.float32(3))
    assert [call[:2] for call in calls] == [((BATCH, TOKENS, 32), None)]
    assert left["given"] == 3
    weight = params["params"]["layers_1"]["attention_norm"]["weight"]
    normalised = np.asarray(left["hidden"]) / np.asarray(weight)  # the hook gets them so
    size = np.mean(normalised**2, axis=-1)
    np.testing.assert_allclose(size, 1, rtol=1e-4)
    extras = [None, left["selected"], left["selected"]]
    assert 0 < np.sum(np.asarray(extras[1].indices) >= 0) < np.sum(indices >= 0)
    want = quick_jit(swa.Decoder(config).apply)(params, TOKEN_IDS, extra=extras)
    assert largest_error(hidden, want) <= 1e-6


def test_a_value_comes_back_to_who_gave_one_and_to_nobody_else():
    config, params = mixed_decoder()
    rows, indices = compressed(swa.V41_FP4)
    extra = extra_of(rows, indices)
    model = swa.Decoder(
        config, extra_hooks=(None, *(lambda hidden, meta, given, left: (extra, "left"),) * 2)
    )
    cache = swa.RingCache.create(BATCH, LAYERS, config.geometry, config.fmt)
    ends = [TOKENS] * BATCH
    meta = swa.PrefillMetadata.build(config.geometry, [0, 1], [0, 0], ends, max_tokens=TOKENS)

    def kinds(*arguments, **named):
        results = []

        def call(params):
            found = model.apply(params, TOKEN_IDS, *arguments, **named)
            found = found if isinstance(found, tuple) else (found,)
            results.extend(type(part).__name__ for part in found[1:])
            return found[0]

        jax.eval_shape(call, params)
        return results

    assert kinds() == []
    assert kinds(cache, meta) == ["RingCache"]
    assert kinds(cross_layer={}) == ["str"]
    assert kinds(cache, meta, cross_layer={}) == ["RingCache", "str"]


class Bigrams(nn.Module):
    """Adds an embedding of each pair of tokens; the first follows the token that is handed over."""

    @nn.compact
    def __call__(self, embedded, tokens, meta, cross_layer, draft_input):
        before = jnp.concatenate([cross_layer[:, None], tokens[:, :-1]], axis=1)
        shape = 64, embedded.shape[-1]
        table: Any = self.param("table", nn.initializers.normal(), shape, embedded.dtype)
        return embedded + table[(before * 50 + tokens) % 64]


def test_an_embedding_hook_adds_what_it_looks_up_and_has_parameters():
    config = decoder_config(attention_config(WINDOW, swa.F32), 1)
    model = swa.Decoder(config, embed_hook=Bigrams())
    previous = np.int32([7, 9])
    init = quick_jit(lambda key: model.init(key, TOKEN_IDS, cross_layer=previous))
    params = init(jax.random.key(0))
    table = np.asarray(params["params"]["embed_hook"]["table"])
    hidden, left = quick_jit(model.apply)(params, TOKEN_IDS, cross_layer=previous)
    np.testing.assert_array_equal(left, previous)
    before = np.concatenate([previous[:, None], TOKEN_IDS[:, :-1]], axis=1)
    added = table[(before * 50 + TOKEN_IDS) % 64]

    def add(embedded, tokens, meta, cross_layer, draft_input):
        return embedded + added

    plain = {"params": {k: v for k, v in params["params"].items() if k != "embed_hook"}}
    want = quick_jit(swa.Decoder(config, embed_hook=add).apply)(plain, TOKEN_IDS)
    np.testing.assert_array_equal(want, hidden)
    without = quick_jit(swa.Decoder(config).apply)(plain, TOKEN_IDS)
    assert largest_error(without, hidden) > 1e-4


def test_a_draft_model_reads_the_hidden_states_it_is_given():
    config = decoder_config(attention_config(WINDOW, swa.F32), 1)
    params = decoder_params(config)
    given = jnp.asarray(activations(config.layers[0], BATCH, TOKENS))

    def join(embedded, tokens, meta, cross_layer, draft_input):
        return embedded + 2 * draft_input

    def add(embedded, tokens, meta, cross_layer, draft_input):
        assert draft_input is None
        return embedded + 2 * given

    joined = quick_jit(swa.Decoder(config, embed_hook=join).apply)
    got = joined(params, TOKEN_IDS, draft_input=given)
    want = quick_jit(swa.Decoder(config, embed_hook=add).apply)(params, TOKEN_IDS)
    assert largest_error(got, want) <= 1e-6
    with pytest.raises(ValueError, match="draft_input: expected an embed_hook that reads it"):
        swa.Decoder(config).apply(params, TOKEN_IDS, draft_input=given)


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ({"extra_hooks": (None,)}, {}, "extra_hooks: expected one for each of 3 layers"),
        ({}, {"extra": [None]}, "extra: expected an ExtraKV or one for each of 3 layers, got 1"),
        ({}, {"extra": 3}, "extra: expected an ExtraKV or one for each of 3 layers, got int"),
        ({}, {}, "extra: expected a compressed cache of V41_FP4 rows, as extra_fmt says, got none"),
        (
            {"embed_hook": lambda embedded, *others: embedded[..., :3]},
            {},
            r"embed_hook's result: expected shape \(2, 8, 32\), got \(2, 8, 3\)",
        ),
        (
            {"embed_hook": lambda *inputs: None},
            {},
            "embed_hook's result: expected a floating dtype of 16 bits or more, got NoneType",
        ),
        (
            {"extra_hooks": (None, lambda *inputs: None, None)},
            {},
            r"extra_hook's result: expected \(extra, cross_layer\), got NoneType",
        ),
    ],
)
def test_named_inputs_that_do_not_fit_are_refused(fields, arguments, message):
    config, params = mixed_decoder()
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            lambda params: swa.Decoder(config, **fields).apply(params, TOKEN_IDS, **arguments),
            params,
        )


def test_scanned_layers_take_no_hooks():
    config = decoder_config(attention_config(WINDOW, swa.F32), LAYERS, scan_layers=True)
    model = swa.Decoder(config, extra_hooks=(None, None, lambda *inputs: (None, None)))
    with pytest.raises(ValueError, match="extra_hooks: expected none with scan_layers, got some"):
        model.init(jax.random.key(0), TOKEN_IDS)


@pytest.mark.slow
def test_a_decoder_loop_runs_with_hooks_that_hand_a_value_from_layer_to_layer():
    config, params = mixed_decoder()
    rows, _ = compressed(swa.V41_FP4)

    def source(hidden, meta, extra, cross_layer):
        chosen = jnp.maximum(meta.positions, 0).reshape(-1, 1) % ENTRIES
        made = ExtraKV(rows, jnp.where(meta.positions.reshape(-1, 1) >= 0, chosen, -1))
        return made, made

    def reuse(hidden, meta, extra, cross_layer):
        return cross_layer, cross_layer

    model = swa.Decoder(config, extra_hooks=(None, source, reuse))
    [tokens] = swa.generate(model, params, [[1, 2, 3]], max_new_tokens=6)
    found = swa.compare_with_recompute(model, params, [1, 2, 3], tokens)
    assert (found.equal, found.tokens) == (True, 6)


def test_a_decoder_loop_without_the_named_inputs_says_what_is_missing():
    config, params = mixed_decoder()
    with pytest.raises(ValueError, match="extra: expected a compressed cache"):
        swa.generate(swa.Decoder(config), params, [[1, 2]], max_new_tokens=2)
