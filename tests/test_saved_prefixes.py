"""Saved prefixes: imports that go on exactly, partial hits, another process, refusals."""

import dataclasses
import hashlib
import json
from pathlib import Path

import byte_text
import jax
import jax.numpy as jnp
import numpy as np
import prefix_rebuild
import prefix_reuse as example
import pytest
from flax.linen import Partitioned
from quick_compilation import quick_environment
from small_models import attention_config, decoder_config, decoder_params

import swa_jax as swa
from pallas_kernels import dequantize_rows
from swa_jax import decoding, prefilling, prefixes
from swa_jax.files import read_safetensors, write_safetensors
from swa_jax.prefixes import PrefixStore, model_fingerprint, prefill_from_prefixes

pytestmark = [pytest.mark.quick_compilation, pytest.mark.makes_nan]

WINDOW, CHUNK, VOCABULARY, SLOTS = 8, 6, 50, 3  # the ring has 14 rows
CONFIG = decoder_config(attention_config(WINDOW, swa.V41), num_layers=2)
MODEL = swa.Decoder(CONFIG)
PARAMS = decoder_params(CONFIG)
NAME = "a model"
STEPS = 5


def random_tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.int32)


def poisoned() -> swa.RingCache:
    """Rings whose free rows are NaN: 0xFF is one, as value and as scale."""
    cache = swa.RingCache.for_decoder(CONFIG, SLOTS)
    cache = jax.tree.map(lambda block: jnp.full_like(block, 255), cache)
    assert np.all(np.isnan(dequantize_rows(cache.layer(0).logical(), CONFIG.fmt)))
    return cache


def prefilled(slot: int, prompt: np.ndarray):
    """A cache with the prompt in a slot, prefilled undisturbed, and the last hidden state."""
    return decoding.prefill(MODEL, PARAMS, poisoned(), [slot], [prompt], chunk=CHUNK)


def scores_after(cache: swa.RingCache, slot: int, position: int) -> np.ndarray:
    """Scores of STEPS known tokens that go on there, one by one."""
    tokens = random_tokens(STEPS, seed=99)[None]
    ids, starts = np.full(1, slot, np.int32), np.full(1, position, np.int32)
    return np.asarray(decoding.replay(MODEL, PARAMS, cache, ids, tokens, starts)[0])


def rows_of(cache: swa.RingCache, slot: int, position: int) -> bytes:
    return cache.export_slot(slot, position).to_bytes()


@pytest.fixture
def store(tmp_path) -> PrefixStore:
    return PrefixStore(tmp_path, NAME)


def with_prefixes(store: PrefixStore, prompt, save_at, slot: int = 0):
    return prefill_from_prefixes(
        MODEL, PARAMS, poisoned(), slot, prompt, store, save_at=save_at, chunk=CHUNK
    )


# --- going on from a saved prefix


@pytest.mark.slow
def test_an_imported_prefix_goes_on_with_the_same_bytes_hidden_states_and_scores(store):
    # up to five windows; chunks that begin at multiples of CHUNK are prefill's own
    for length in (7, 8, 13, 24, 40):
        prompt = random_tokens(length, seed=length)
        whole, want = prefilled(1, prompt)
        cut = (length - 1) // CHUNK * CHUNK
        _, first, reused = with_prefixes(store, prompt, [cut])
        assert reused == 0
        np.testing.assert_array_equal(first, want)
        cache, last, reused = with_prefixes(store, prompt, [], slot=2)
        assert reused == cut
        np.testing.assert_array_equal(last, want)
        assert rows_of(cache, 2, length) == rows_of(whole, 1, length)
        got = scores_after(cache, 2, length)
        assert np.all(np.isfinite(got))
        np.testing.assert_array_equal(got, scores_after(whole, 1, length))


def test_random_prompts_that_share_prefixes_never_differ_from_undisturbed_ones(store):
    rng = np.random.default_rng(0)
    stems = [random_tokens(5 * WINDOW, seed) for seed in (1, 2)]
    stems.append(np.concatenate([stems[0][:20], random_tokens(20, 3)]))
    marks = range(CHUNK, 5 * WINDOW, CHUNK)
    reused_tokens, cache = 0, poisoned()
    saved: list[np.ndarray] = []  # prefixes saved so far
    for turn in range(24):
        stem = stems[rng.integers(3)][
            : rng.integers(4, 5 * WINDOW + 1)
        ]  # of 5 on, prefill is CHUNK wide
        prompt = np.concatenate([stem, random_tokens(rng.integers(1, 4), 100 + turn)])
        slot = int(rng.integers(SLOTS))
        cache, last, reused = prefill_from_prefixes(
            MODEL, PARAMS, cache, slot, prompt, store, save_at=marks, chunk=CHUNK
        )
        shared = [len(one) for one in saved if np.array_equal(one, prompt[: len(one)])]
        assert reused == max([n for n in shared if n < len(prompt)], default=0)
        saved += [prompt[:n] for n in marks if n <= len(prompt)]
        reused_tokens += reused
        whole, want = prefilled(0, prompt)
        np.testing.assert_array_equal(last, want)
        assert rows_of(cache, slot, len(prompt)) == rows_of(whole, 0, len(prompt))
    assert reused_tokens > 100


def test_chunks_cut_elsewhere_agree_as_two_prefills_do(store):
    prompt, other = random_tokens(37, 1), random_tokens(37, 2)
    prompt[:21] = other[:21]
    with_prefixes(store, other, [10, 21, 30])
    cache, _, reused = with_prefixes(store, prompt, [])
    assert reused == 21
    got = scores_after(cache, 0, 37)
    want = scores_after(prefilled(0, prompt)[0], 0, 37)  # cut at multiples of CHUNK
    assert np.max(np.abs(got - want)) <= 3e-2 * np.max(np.abs(want))
    assert np.median(np.abs(got - want)) <= 1e-3 * np.max(np.abs(want))


def test_one_program_serves_every_prompt(store):
    def sizes():
        programs = prefilling.prefill_chunk, prefixes._import, prefixes._export
        return [program._cache_size() for program in programs]

    with_prefixes(store, random_tokens(20, 1), [7, 11])
    with_prefixes(store, random_tokens(20, 1), [])
    before = sizes()
    with_prefixes(store, random_tokens(33, 1), [8, 30], slot=1)
    with_prefixes(store, random_tokens(35, 1), [3], slot=2)
    assert sizes() == before


# --- the store


def exported_at(position: int) -> "swa.ExportedSlot":
    cache = swa.RingCache.create(1, 2, CONFIG.geometry, CONFIG.fmt)
    data = np.random.default_rng(position).integers(0, 256, cache.blocks[0].shape, np.uint8)
    return dataclasses.replace(cache, blocks=(jnp.asarray(data),)).export_slot(0, position)


def test_the_longest_prefix_that_leaves_a_token_over_is_found(store, tmp_path):
    tokens = np.arange(20)
    assert store.longest(tokens) is None
    for n in (3, 10, 11):
        store.save(tokens[:n], exported_at(n))
    store.save(np.append(tokens[:14], 0), exported_at(15))
    (tmp_path / "12-notes.safetensors").write_bytes(b"not a prefix")
    for length, want in [(20, 11), (12, 11), (11, 10), (10, 3), (4, 3)]:
        found = store.longest(tokens[:length])
        assert found.to_bytes() == exported_at(want).to_bytes()
    assert store.longest(tokens[:3]) is None
    assert store.longest(tokens[1:]) is None
    assert int(store.longest(np.append(tokens[:14], [0, 7])).next_position) == 15
    assert PrefixStore(tmp_path, "another").longest(tokens) is None


def test_a_file_is_named_by_length_and_sha256_of_model_and_tokens_and_replaced(store, tmp_path):
    path = store.save([5, 1], exported_at(2))
    want = hashlib.sha256(b'"a model"\n' + bytes([5, 0, 0, 0, 1, 0, 0, 0])).hexdigest()
    assert path == tmp_path / f"2-{want}.safetensors"
    other = dataclasses.replace(exported_at(2), data=exported_at(2).data ^ 1)
    assert store.save(np.int64([5, 1]), other) == path
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert store.longest([5, 1, 1]).to_bytes() == other.to_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": np.zeros((2, 6, 66), np.uint8)}, r"expected shape \(any, 7, 66\)"),
        ({"rows": np.zeros((2, 7, 66), np.int8)}, "expected uint8 rows, got int8"),
        ({"tokens": np.int32([0, 1, 3])}, "expected the tokens that its name stands for"),
        ({"tokens": np.int32([0, 1])}, "expected the tokens that its name stands for"),
        ({"tokens": None}, "expected the tokens that its name stands for"),
        ({"model": "another"}, "expected rows of model 'a model', got 'another'"),
        ({"next_position": "4"}, "expected rows and header of its sha256, got others"),
        ({"cut": 100}, "prefix: expected a whole safetensors file"),
        ({"cut": -1}, "prefix: expected a whole safetensors file"),
    ],
)
def test_a_file_that_was_changed_is_refused_by_name(store, change, message):
    path = store.save([0, 1, 2], exported_at(3))
    tensors, metadata = read_safetensors(path.read_bytes())
    if "cut" in change:
        path.write_bytes(path.read_bytes()[: change["cut"]])
    else:
        texts = {name: value for name, value in change.items() if isinstance(value, str)}
        arrays = {name: value for name, value in change.items() if name not in texts}
        kept = {name: value for name, value in (tensors | arrays).items() if value is not None}
        path.write_bytes(write_safetensors(kept, metadata | texts))
    with pytest.raises(ValueError, match=f"{path.name}: .*{message}"):
        store.longest([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fmt": swa.BF16}, "exported: expected fmt .*V41.* got .*BF16"),
        ({"window": 9}, "exported: expected geometry .*window=8.*window=9"),
        ({"draft_tokens": 4}, "expected geometry .*capacity=14.*capacity=13"),
        ({"head_dim": 128}, "exported: expected fmt .*=64.* got .*=128"),
        ({"layers": 3}, r"exported.data: expected shape \(2, 7, 66\), got \(3, 7, 66\)"),
    ],
)
def test_a_prefix_of_another_cache_is_refused_before_anything_is_changed(store, fields, message):
    values = {"fmt": swa.V41, "window": 8, "draft_tokens": 5, "head_dim": 64, "layers": 2} | fields
    geometry = swa.RingGeometry.for_drafts(values["window"], values["draft_tokens"])
    fmt = values["fmt"].with_width(values["head_dim"])
    other = swa.RingCache.create(1, values["layers"], geometry, fmt)
    store.save([0, 1, 2], other.export_slot(0, 3))
    cache = poisoned()
    with pytest.raises(ValueError, match=message):
        prefill_from_prefixes(MODEL, PARAMS, cache, 0, [0, 1, 2, 3], store, chunk=CHUNK)
    assert np.all(np.asarray(cache.blocks[0]) == 255)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.save([1, 2], exported_at(3)), "tokens: expected 3, exported.next_position"),
        (lambda s: s.save(np.int32([]), exported_at(0)), "tokens: expected at least one token"),
        (lambda s: s.longest([]), "tokens: expected at least one token, got none"),
        (lambda s: s.longest([1, [2]]), r"tokens: expected values of one shape, got \[1, \[2\]\]"),
        (lambda s: s.save([0.5], exported_at(1)), "tokens: expected integers"),
        (lambda s: s.save([1], None), "exported: expected an ExportedSlot, got NoneType"),
        (lambda s: with_prefixes("dir", [1], []), "store: expected a PrefixStore, got str"),
        (lambda s: with_prefixes(s, [1], 3), "save_at: expected an Iterable, got int"),
        (lambda s: s.longest([[1, 2]]), r"tokens: expected shape \(any\), got \(1, 2\)"),
        (lambda s: PrefixStore(None, NAME), "directory: expected a path, got NoneType"),
        (lambda s: model_fingerprint(CONFIG.attention, PARAMS), "config: expected a DecoderConfig"),
        (lambda s: model_fingerprint(CONFIG, None), "params: expected a Mapping, got NoneType"),
        (lambda s: prefill_from_prefixes(None, PARAMS, None, 0, [1], s), "model: expected a Dec"),
        (lambda s: prefill_from_prefixes(MODEL, None, None, 0, [1], s), "params: .* got NoneType"),
        (lambda s: prefill_from_prefixes(MODEL, PARAMS, s, 0, [1], s), "cache: expected a RingC"),
        (lambda s: PrefixStore(s.directory / "none", NAME), "directory: expected an existing one"),
        (lambda s: PrefixStore(s.directory, ""), "model: expected the name of a model, got ''"),
        (lambda s: with_prefixes(s, [], []), "prompt: expected at least one token"),
        (lambda s: with_prefixes(s, [50], []), "prompt: expected token ids from 0 to 49"),
        (lambda s: with_prefixes(s, [1], [0]), "save_at: expected an integer of 1 or more"),
        (lambda s: with_prefixes(s, [1], [], slot=3), "slot: expected 0 to 2, got 3"),
    ],
)
def test_bad_input_is_refused(store, call, message):
    with pytest.raises(ValueError, match=message):
        call(store)
    assert not list(store.directory.iterdir())


# --- the model's name


def test_a_fingerprint_is_the_sha256_of_configuration_and_weights():
    params = {"params": {"b": np.float32([[1.5]]), "a": np.uint8([7])}}
    config = json.loads(CONFIG.to_json())
    del config["attention"]["fmt"]["note"]
    config["attention"] = {str(i): config["attention"] for i in range(CONFIG.num_layers)}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode())
    digest.update(b'\n["params.a","uint8",[1]]\n\x07["params.b","float32",[1,1]]\n\x00\x00\xc0\x3f')
    assert model_fingerprint(CONFIG, params) == digest.hexdigest()
    on_device = jax.tree.map(jnp.asarray, params)
    assert model_fingerprint(CONFIG, on_device) == digest.hexdigest()
    boxed = jax.tree.map(lambda leaf: Partitioned(leaf, names=(None,) * leaf.ndim), params)
    assert model_fingerprint(CONFIG, boxed) == digest.hexdigest()
    each_layer = dataclasses.replace(CONFIG, attention=CONFIG.layers)
    assert model_fingerprint(each_layer, params) == digest.hexdigest(), "the same model"


def test_any_other_weight_dtype_name_or_setting_is_another_model():
    kernel = np.float32([[1.0, 2.0]])
    names = {
        model_fingerprint(config, {"params": params})
        for config, params in [
            (CONFIG, {"a": kernel}),
            (CONFIG, {"b": kernel}),
            (CONFIG, {"a": kernel.T}),
            (CONFIG, {"a": np.nextafter(kernel, np.float32(9))}),
            (CONFIG, {"a": kernel.astype(jnp.bfloat16)}),
            (CONFIG, {"a": kernel.view(np.int32)}),
            (CONFIG.replace_attention(rope_theta=20000.0), {"a": kernel}),
        ]
    }
    assert len(names) == 7


# --- what prefilling only the last tokens leaves wrong

L3 = decoder_config(attention_config(WINDOW, swa.F32), num_layers=3)


@pytest.mark.slow
def test_layer_l_is_right_after_l_plus_1_windows_less_a_token_each_and_not_before(monkeypatch):
    create = swa.RingCache.create

    def poisoned(*arguments):  # rows before the last tokens would be seen if they were read
        return jax.tree.map(lambda block: jnp.full_like(block, 255), create(*arguments))

    monkeypatch.setattr(swa.RingCache, "create", poisoned)
    prefix, following = random_tokens(60, 1), random_tokens(6, 2)
    # (l + 1) * (W - 1): 7, 14, 21
    found = prefix_rebuild.measure(
        swa.Decoder(L3), decoder_params(L3), prefix, following, [7, 13, 14, 20, 21, 24]
    )
    wrong = np.array([line["mean_by_layer"] for line in found]) > 1e-4
    assert wrong.tolist() == [
        [False, True, True],
        [False, True, True],
        [False, False, True],
        [False, False, True],
        [False, False, False],
        [False, False, False],
    ]
    scores = np.array([line["score_difference"] for line in found])
    assert np.all(scores[:4] > 1e-4)
    assert np.all(scores[4:] < 1e-4)
    for line in found:
        assert np.all(np.array(line["mean_by_layer"]) <= line["largest_by_layer"])


# --- the example

BYTES = swa.DecoderConfig(byte_text.VOCAB_SIZE, 2, attention_config(8, swa.V41), mlp_size=48)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prefixes") / "w.safetensors"
    params = decoder_params(BYTES)["params"]
    swa.checkpoint.save_params(path, params, {"config": BYTES.to_json()})
    return path


@pytest.mark.slow
def test_the_example_reuses_prefixes_here_and_in_another_process(
    weights, tmp_path, capsys, monkeypatch
):
    # the other process compiles as this one does, so that the last bits are the same
    for name, value in quick_environment().items():
        monkeypatch.setenv(name, value)
    report, plot = tmp_path / "report.json", tmp_path / "plot.png"
    arguments = {
        "--prefix": 96,
        "--chunk": 12,
        "--new-tokens": 3,
        "--repeats": 1,
        "--weights": weights,
        "--report": report,
        "--plot": plot,
    }
    status = example.main([str(part) for pair in arguments.items() for part in pair])
    written = json.loads(report.read_text())
    assert status == 0
    assert written["saved_at"] == [24, 48, 72, 96]
    assert written["row_bytes"] == 2 * 7 * 66
    assert written["file_bytes"] > written["row_bytes"] + 4 * 96
    assert [one["reused_tokens"] for one in written["prompts"]] == [96, 96, 96, 24, 72]
    assert all(one["same_rows"] and one["same_tokens"] for one in written["prompts"])
    assert written["another_process"] == {
        "reused_tokens": 96,
        "same_rows": True,
        "same_tokens": True,
    }
    assert [line["tokens"] for line in written["rebuilt"]] == [8, 10, 12, 14, 16]
    assert plot.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("prefix of 96 tokens, saved at 24, 48, 72, 96: ")
    assert lines[-1].endswith(": 7, 14")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--file", "missing"], "No such file or directory: 'missing'"),
        (["--file", "short"], "short: expected 4159 bytes or more, got 3"),
        (["--prefix", "16"], "--prefix: expected more than 16 tokens, got 16"),
        (["--prefix", "7"], "argument --prefix: expected 8 to 2147483647, got 7"),
        (["--chunk", "0"], "argument --chunk: expected 1 to 65536, got 0"),
        (["--chunk", "65537"], "argument --chunk: expected 1 to 65536, got 65537"),
        (["--new-tokens", "1"], "argument --new-tokens: expected 2 to 65536, got 1"),
        (["--new-tokens", "65537"], "argument --new-tokens: expected 2 to 65536, got 65537"),
        (["--directory", "missing"], "directory: expected an existing one, got missing"),
        (["--weights", "short"], "short: expected a whole safetensors file"),
        (["--plot", "missing/p.png"], "argument --plot: expected a file in a folder"),
        (["--plot", "p.nope"], "argument --plot: expected a name in .png, .svg, .pdf, got p.nope"),
        (["--report", "missing/r"], "argument --report: expected a file in a folder"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_bad_command_lines_are_one_line_and_exit_status_two(
    weights, tmp_path, capsys, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_bytes(b"abc")
    try:
        status = example.main(["--weights", str(weights), *arguments])
    except SystemExit as end:
        status = end.code
    output = capsys.readouterr()
    assert (status, output.out) == (2, "")
    assert output.err.startswith("prefix_reuse.py: error: ")
    assert output.err.count("\n") == 1
    assert message in output.err
