"""Checkpoints of a decode state: bit for bit, compared on restore, and whole or refused."""

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import attention_config, decoder_config, decoder_params

import swa_jax as swa
from swa_jax.decoding import DecodeState, begin
from swa_jax.generation import first_tokens, go_on
from swa_jax.state_checkpoint import (
    latest_step,
    restore_state,
    save_state,
)

pytestmark = [pytest.mark.quick_compilation, pytest.mark.makes_nan]

WINDOW, CAPACITY, LAYERS, BATCH, SLOTS = 8, 14, 2, 3, 4
TOKENS = [[5, 0, 49], [], [7]]
SETTINGS = {"prompt": "ab12", "temperature": 0.7}


def make_model(fmt: swa.KVCacheFormat = swa.V41, **fields) -> swa.Decoder:
    attention = attention_config(**{"window": WINDOW, "fmt": fmt} | fields)
    return swa.Decoder(decoder_config(attention, LAYERS))


def make_state(model: swa.Decoder, kind: str = "threefry2x32", seed: int = 0) -> DecodeState:
    """A state of any values: what is saved does not have to make sense."""
    rng = np.random.default_rng(seed)
    config = model.config
    cache = swa.RingCache.create(SLOTS, LAYERS, config.geometry, config.fmt)
    blocks = tuple(
        jnp.asarray(rng.integers(0, 256, block.shape, dtype=np.uint8)) for block in cache.blocks
    )
    numbers = jnp.asarray(rng.integers(-(2**31), 2**31, (6, BATCH), dtype=np.int32))
    keys = jax.random.split(jax.random.key(seed, impl=kind), BATCH)
    return DecodeState(
        dataclasses.replace(cache, blocks=blocks),
        *numbers,
        stop_tokens=jnp.asarray(rng.integers(-1, 50, (BATCH, 2), dtype=np.int32)),
        sampling=swa.Sampling.build(
            BATCH, temperature=[0.0, 0.3, 1e-30], top_k=[0, 3, 9], top_p=[1.0, 0.1, 0.5], keys=keys
        ),
    )


def make_params() -> dict:
    """Every dtype that parameters come in, with values that casts would lose."""
    bits = np.random.default_rng(1).integers(0, 256, 96, dtype=np.uint8)
    return {
        "params": {
            "layer_0": {
                "float32": bits.view(np.float32).reshape(4, 6),
                "bfloat16": jnp.asarray(bits.view(jnp.bfloat16)),
                "e4m3": jnp.asarray(bits.view(jnp.float8_e4m3fn)),
            },
            "scales": jnp.asarray(bits.view(jnp.float8_e8m0fnu)),
            "bytes": jnp.asarray(bits),
            "scalar": jnp.float32(0.1),
        }
    }


def bits_of(tree) -> list:
    """Paths, dtypes, shapes and bytes; of random keys their kind and data."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        kind = None
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            kind, leaf = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
        array = np.asarray(leaf)
        found.append((jax.tree_util.keystr(path), kind, array.dtype, array.shape, array.tobytes()))
    return found


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A directory with checkpoints 3 and 7 of one model, of different states."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    model = make_model()
    for step in (3, 7):
        state = make_state(model, seed=step)
        save_state(folder, step, model, make_params(), state, TOKENS, SETTINGS)
    return folder


def restore(folder: Path, model: swa.Decoder | None = None, **changed):
    expected = {"batch": BATCH, "slots": SLOTS, "settings": SETTINGS} | changed
    return restore_state(folder, model or make_model(), **expected)


# --- round trips


@pytest.mark.parametrize(
    ("fmt", "kind"),
    [
        (swa.V41, "threefry2x32"),
        (swa.V41_FP4, "rbg"),
        (swa.BF16, "unsafe_rbg"),
        (swa.F32, "threefry2x32"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_everything_comes_back_bit_for_bit(tmp_path, fmt, kind):
    model, params = make_model(fmt), make_params()
    state = make_state(model, kind)
    save_state(tmp_path, 0, model, params, state, TOKENS)
    found = restore(tmp_path, model, settings=None)
    assert (found.step, found.tokens) == (0, TOKENS)
    assert jax.tree.structure(found.state) == jax.tree.structure(state)
    assert bits_of(found.state) == bits_of(state)
    assert bits_of(found.params) == bits_of(params)


def test_format_and_geometry_are_readable_beside_the_arrays(saved):
    header = json.loads((saved / "state_7" / "header.json").read_text())["header"]
    fmt = header["format"]
    assert (fmt["name"], fmt["quantized_dtype"], fmt["quantized_elements"]) == ("V41", "e4m3", 64)
    assert (fmt["elements_per_scale"], fmt["scale_dtype"]) == (32, "ue8m0")
    assert header["geometry"] == {"window": WINDOW, "capacity": CAPACITY}
    assert (header["layers"], header["slots"], header["requests"]) == (LAYERS, SLOTS, BATCH)
    assert header["config"]["vocab_size"] == 50
    assert header["settings"] == SETTINGS


@pytest.mark.slow
def test_a_run_that_is_restored_goes_on_with_the_same_tokens_and_the_same_bits(tmp_path):
    # greedy and sampled, one that stops in the meantime, and parameters in bfloat16
    model = make_model(param_dtype="bfloat16")
    params = decoder_params(model.config)
    assert jnp.dtype(jnp.bfloat16) in {leaf.dtype for leaf in jax.tree.leaves(params)}
    sampling = swa.Sampling.build(BATCH, temperature=[0.0, 0.8, 0.8], top_k=[0, 0, 9])
    state = begin(
        model,
        params,
        swa.RingCache.create(BATCH, LAYERS, model.config.geometry, model.config.fmt),
        [[1, 2, 3], list(range(20)), [9]],
        max_new_tokens=[30, 30, 5],
        sampling=sampling,
    )
    tokens = first_tokens(state)
    assert [len(line) for line in tokens] == [1, 1, 1]
    at_the_end = None
    for number, (latest, new) in enumerate(go_on(model, params, state, block_steps=6)):
        tokens = [line + more for line, more in zip(tokens, new, strict=True)]
        if number == 1:
            save_state(tmp_path, 13, model, params, latest, tokens)
        at_the_end = bits_of(latest)
    assert [len(line) for line in tokens] == [30, 30, 5]
    assert tokens == swa.generate(
        model,
        params,
        [[1, 2, 3], list(range(20)), [9]],
        max_new_tokens=[30, 30, 5],
        sampling=sampling,
        block_steps=6,
    )
    for _ in range(2):  # the buffers that came back are the caller's, to be donated
        found = restore_state(tmp_path, model, batch=BATCH)
        assert [len(line) for line in found.tokens] == [13, 13, 5]
        resumed, bits = found.tokens, None
        for latest, new in go_on(model, found.params, found.state, block_steps=6):
            resumed = [line + more for line, more in zip(resumed, new, strict=True)]
            bits = bits_of(latest)
        assert resumed == tokens
        assert bits == at_the_end


def test_a_first_token_that_is_a_stop_token_is_not_part_of_the_text():
    state = make_state(make_model())
    tokens, stops = jnp.asarray([4, 5, 6], jnp.int32), jnp.asarray([[-1], [5], [4]], jnp.int32)
    state = dataclasses.replace(state, tokens=tokens, stop_tokens=stops)
    assert first_tokens(state) == [[4], [], [6]]


# --- what is kept


def test_the_last_two_are_kept_and_restoring_writes_nothing(saved, tmp_path):
    folder = tmp_path / "new" / "folder"
    assert latest_step(folder) is None
    model = make_model()
    for step in (5, 6, 20):
        state = make_state(model, seed=step)
        save_state(folder, step, model, make_params(), state, TOKENS, SETTINGS)
    assert sorted(path.name for path in folder.iterdir()) == ["state_20", "state_6"]
    assert latest_step(folder) == 20
    before = files_of(folder)
    for step, want in ((None, 20), (6, 6)):
        found = restore(folder, step=step)
        assert found.step == want
        assert bits_of(found.state) == bits_of(make_state(model, seed=want))
    assert files_of(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_what_a_killed_process_left_is_neither_taken_nor_kept(saved, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    shutil.copytree(folder / "state_7", folder / "state_9.partial")
    assert latest_step(folder) == 7
    assert restore(folder).step == 7
    model = make_model()
    save_state(folder, 8, model, make_params(), make_state(model), TOKENS, SETTINGS)
    assert sorted(path.name for path in folder.iterdir()) == ["state_7", "state_8"]


def test_a_save_that_fails_leaves_the_checkpoints_as_they_were(saved, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    before, model = files_of(folder), make_model()
    state = make_state(model)
    other = make_model(swa.BF16)
    cases = [
        ("step: expected more than 7, the last one, got 7", (7, model, {}, state, TOKENS)),
        ("step: expected an integer of 0 or more, got -1", (-1, model, {}, state, TOKENS)),
        ("state.cache: expected format ", (8, other, {}, state, TOKENS)),
        ("tokens: expected a list for each of 3 requests, got 2", (8, model, {}, state, [[], []])),
        ("tokens\\[1\\]: expected token ids", (8, model, {}, state, [[], [-1], []])),
        (
            r"params\.head: expected an array or a dictionary, got list",
            (8, model, {"head": [1.0]}, state, TOKENS),
        ),
    ]
    for message, (step, decoder, params, value, tokens) in cases:
        with pytest.raises(ValueError, match=message):
            save_state(folder, step, decoder, params, value, tokens)
    with pytest.raises(ValueError, match="settings: expected JSON values, got "):
        save_state(folder, 8, model, {}, state, TOKENS, {"seed": np.int32(1)})
    assert files_of(folder) == before


def test_a_directory_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "thesis.txt").write_text("text")
    model = make_model()
    with pytest.raises(ValueError, match=r"expected nothing but checkpoints, got \['7'\]"):
        save_state(tmp_path, 8, model, make_params(), make_state(model), TOKENS)
    assert files_of(tmp_path) == {"7/thesis.txt": b"text"}


# --- what is refused


def write_header(path: Path, header: dict) -> None:
    """A header with the digest that it says is its own: SHA-256 of its text with sorted names."""
    text = json.dumps(header, sort_keys=True).encode()
    whole = {"header": header, "digest": hashlib.sha256(text).hexdigest()}
    (path / "header.json").write_text(json.dumps(whole))


@pytest.mark.parametrize(
    ("model", "changed", "message"),
    [
        (make_model(swa.BF16), {}, "expected format.name 'BF16', got 'V41'"),
        (
            make_model(dataclasses.replace(swa.V41, pad_bytes=16)),
            {},
            "expected format.pad_bytes 16, got 0",
        ),
        (make_model(window=9), {}, "expected geometry.window 9, got 8"),
        (make_model(draft_tokens=3), {}, "expected geometry.capacity 12, got 14"),
        (
            swa.Decoder(decoder_config(attention_config(WINDOW, swa.V41), 3)),
            {},
            "expected layers 3, got 2",
        ),
        (None, {"batch": 2}, "expected requests 2, got 3"),
        (None, {"slots": None}, "expected slots 3, got 4"),
        (
            make_model(rope_theta=5.0),
            {},
            "expected config.attention.0.rope_theta 5.0, got 10000.0",
        ),
        (make_model(hadamard=True), {}, "expected config.attention.0.hadamard True, got False"),
        (
            None,
            {"settings": SETTINGS | {"temperature": 0.5}},
            "expected settings.temperature 0.5, got 0.7",
        ),
        (None, {"settings": None}, "expected settings.prompt None, got 'ab12'"),
        (None, {"settings": SETTINGS | {"seed": 1}}, "expected settings.seed 1, got None"),
        (None, {"step": 4}, r"expected one of the steps \[3, 7\], got 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_format_geometry_size_configuration_or_setting_is_refused(
    saved, model, changed, message
):
    with pytest.raises(ValueError, match=rf"checkpoints(/state_7)?: {message}$"):
        restore(saved, model, **changed)


def test_the_same_model_said_in_other_words_is_not_refused(saved):
    noted = dataclasses.replace(swa.V41, note="other words")
    attention = attention_config(WINDOW, noted)
    model = swa.Decoder(decoder_config((attention, attention), LAYERS))
    assert restore(saved, model).step == 7


def test_a_checkpoint_without_a_field_that_has_a_default_is_of_that_default(saved, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    header = json.loads((folder / "state_7" / "header.json").read_text())["header"]
    del header["config"]["attention"]["hadamard"]
    write_header(folder / "state_7", header)
    assert restore(folder).step == 7
    with pytest.raises(ValueError, match="hadamard True, got False"):
        restore(folder, make_model(hadamard=True))


def test_a_file_that_is_missing_cut_or_changed_is_refused_in_one_line(saved, tmp_path):
    rng, names = np.random.default_rng(0), sorted(files_of(saved / "state_7"))
    assert {"header.json", "arrays/manifest.ocdbt", "arrays/_METADATA"} < set(names)
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    for name in names:
        path = folder / "state_7" / name
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[rng.integers(len(whole))] ^= 1 << int(rng.integers(8))
        for damaged in (None, b"", whole[: len(whole) // 2], whole[:-1], whole + b"0", flipped):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(ValueError, match="state_7: expected a whole checkpoint") as caught:
                restore(folder)
            assert "\n" not in str(caught.value)
            path.write_bytes(whole)
    (folder / "state_7" / "arrays" / "more").write_text("text")
    with pytest.raises(ValueError, match=r"got missing, other or changed files \['more'\]"):
        restore(folder)
    assert restore(folder, step=3).step == 3
    (folder / "state_7" / "arrays" / "more").unlink()
    assert restore(folder).step == 7


def test_arrays_under_the_header_of_others_are_refused(saved, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    shutil.rmtree(folder / "state_7" / "arrays")
    shutil.copytree(folder / "state_3" / "arrays", folder / "state_7" / "arrays")
    with pytest.raises(ValueError, match="got missing, other or changed files"):
        restore(folder)


MADE_UP = {
    "no files": (lambda header: header.pop("files"), "header.json with files None"),
    "files of another kind": (lambda header: header.update(files=3), "header.json with files 3"),
    "no configuration": (lambda header: header.pop("config"), "DecoderConfig: expected a JSON obj"),
    "no keys": (lambda header: header.pop("keys"), "keys: expected one of 'threefry2x32', "),
    "other keys": (lambda header: header.update(keys="rbg"), r"keys: expected shape \(3, 4\)"),
    "no arrays": (lambda header: header.pop("arrays"), "header.json with arrays None"),
    "arrays of another kind": (
        lambda header: header.update(arrays=[[[]]]),
        r"header.json with arrays \[\[\[\]\]\]",
    ),
    "empty trees": (lambda header: header.update(arrays={"params": {}, "state": {}}), ""),
    "a dtype that is none": (
        lambda header: header["arrays"]["state"].update(positions=["float33", 3]),
        "TypeError: ",
    ),
    "another dtype": (
        lambda header: header["arrays"]["state"].update(positions=["int8", 3]),
        "positions: expected int32, got int8",
    ),
    "a larger shape": (
        lambda header: header["arrays"]["state"].update(positions=["int32", 2**40]),
        "ValueError: ",
    ),
    "a negative shape": (
        lambda header: header["arrays"]["state"].update(positions=["int32", -3]),
        "",
    ),
    "an array less": (lambda header: header["arrays"]["state"].pop("positions"), ""),
    "an array more": (lambda header: header["arrays"]["state"].update(more=["int32", 3]), ""),
    "no parameters": (lambda header: header["arrays"].pop("params"), ""),
}


@pytest.mark.parametrize(("change", "message"), MADE_UP.values(), ids=MADE_UP)
def test_a_header_that_somebody_made_up_is_refused_in_one_line(saved, tmp_path, change, message):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    header = json.loads((folder / "state_7" / "header.json").read_text())["header"]
    change(header)
    write_header(folder / "state_7", header)
    want = f"state_7: expected a whole checkpoint of a decode state, got {message}"
    with pytest.raises(ValueError, match=want) as caught:
        restore(folder)
    assert "\n" not in str(caught.value)


def test_nothing_is_read_elsewhere_or_waited_for(saved, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    path = folder / "state_7"
    for name in ("header.json", "arrays", "arrays/manifest.ocdbt"):
        (path / name).rename(tmp_path / "elsewhere")
        (path / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match="state_7: expected a whole checkpoint"):
            restore(folder)
        (path / name).unlink()
        if name != "arrays":
            os.mkfifo(path / name)
            with pytest.raises(ValueError, match="state_7: expected a whole checkpoint"):
                restore(folder)
            (path / name).unlink()
        (tmp_path / "elsewhere").rename(path / name)
    assert restore(folder).step == 7


def test_what_is_not_a_checkpoint_is_refused(saved, tmp_path):
    with pytest.raises(ValueError, match="expected a directory with checkpoints, got none"):
        restore(tmp_path / "missing")
    notes = tmp_path / "notes.txt"
    notes.write_text("text")
    for call in (latest_step, restore):
        with pytest.raises(ValueError, match=r"expected nothing but checkpoints, got \['notes.txt"):
            call(tmp_path)
    with pytest.raises(NotADirectoryError):
        restore(notes)
    notes.rename(tmp_path / ".notes")
    with pytest.raises(ValueError, match="expected a directory with checkpoints, got none"):
        restore(tmp_path)
    (tmp_path / "state_5").mkdir()
    with pytest.raises(ValueError, match="state_5: expected a whole checkpoint of a decode state"):
        restore(tmp_path)
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    for text in ("[]", "{}", "text", '{"header": {}}', '{"header": 1, "digest": 2}', "[" * 99999):
        (folder / "state_7" / "header.json").write_text(text)
        with pytest.raises(ValueError, match="state_7: expected a whole checkpoint"):
            restore(folder)
    header = json.loads((folder / "state_3" / "header.json").read_text())["header"]
    write_header(folder / "state_3", header | {"version": 2})
    with pytest.raises(ValueError, match="state_3: expected version 1, got 2"):
        restore(folder, step=3)


def test_importing_the_package_does_not_import_orbax():
    folder = Path(swa.__file__).parent
    for path in sorted(folder.glob("*.py")):
        if path.name != "state_checkpoint.py":
            assert "import orbax" not in path.read_text(), path
            assert "state_checkpoint" not in path.read_text(), path
