"""The kinds of files that are read: one that is whole of each, and what reads it.

What a corrupted file says is found out by readers of the tests' own.
"""

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import batch_lines
import benchmark_lines
import benchmark_table
import jax
import jax.numpy as jnp
import numpy as np
import training_checkpoints
from byte_model import load_model
from checkpoint_cases import (
    ATTENTION,
    ATTENTION_SHAPES,
    DECODER,
    DECODER_SHAPES,
    INDEX,
    block_scaled,
    every_dtype,
    expected_attention,
    expected_decoder,
    random_tensors,
    write_file,
    write_sharded,
)
from corruptions import (
    corrupt_bytes,
    corrupt_json,
    corrupt_json_file,
    corrupt_json_lines,
    corrupt_safetensors,
)
from own_readers import contents, flat, same, says, values_of
from small_models import attention_config, decoder_config, decoder_params
from test_presets import DENSE, V4_FLASH_JSON

import swa_jax as swa
from swa_jax.exported import ExportedSlot
from swa_jax.files import read_safetensors, write_safetensors
from swa_jax.prefixes import PrefixStore

SMALL = swa.DecoderConfig(257, 1, attention_config(8, swa.V41), mlp_size=16)
RINGS = decoder_config(attention_config(8, swa.V41), num_layers=2)
LINES = (
    {"started": "2026-11-30T14:41:45+0000", "device": "cpu", "machine": "a machine", "cores": 2,
     "python": "3.11.7", "versions": {"jax": "0.10.2", "numpy": "2.4.6"}},
    {"suite": "read", "case": "N=1", "parameters": {"requests": 1}, "program": "swa_jax",
     "us": {"median": 41.5, "p20": 30.3, "p80": 43.2, "best": 26.2}, "temporary_bytes": 8192,
     "share": {"product": {"median": 0.11, "p20": 0.09, "p80": 0.14}}},
    {"suite": "read", "case": "N=1", "parameters": {"requests": 1}, "program": "torch, same bytes",
     "us": {"median": 49.6, "p20": 48.6, "p80": 52.4, "best": 47.3}, "temporary_bytes": None,
     "ratio": {"median": 1.29, "p20": 1.1, "p80": 1.74}, "slower_is_better": True},
    {"suite": "compile", "figure": "compile, 1 unrolled layers", "value": 1.5, "unit": "s",
     "parameters": {}},
)  # fmt: skip
"""Of a benchmark."""


@dataclasses.dataclass
class Kind:
    """A file that can be corrupted.

    Attributes:
      path: the file.
      load: reads it; gives what can be compared by `same`.
      corrupt: makes other bytes of its bytes.
      holds: whether what was read is what corrupted bytes say, by a reader of the test's own.
        Where digests cover what is read, never.
      named: what every error says.
    """

    path: Path
    load: Callable[[], Any]
    corrupt: Callable[[np.random.Generator, bytes], bytes]
    holds: Callable[[Any, bytes], bool] = lambda value, data: False
    named: str = ""

    def __post_init__(self):
        self.named = self.named or str(self.path)
        self.whole = self.path.read_bytes()
        self.value = self.load()
        assert same(self.value, self.load())


def _copied(path: Path) -> dict[str, np.ndarray]:
    """A checkpoint's tensors, which stay as they are when the files change."""
    return {name: np.array(array) for name, array in swa.checkpoint.open_tensors(path).items()}


def single_file(folder: Path) -> Kind:
    path = write_file(folder / "one.safetensors", every_dtype() | {"none": np.zeros((0, 3))})
    return Kind(
        path,
        lambda: _copied(path),
        corrupt_safetensors,
        lambda value, data: same(value, contents(data)[0]),
    )


def parameters(folder: Path) -> Kind:
    path = folder / "params.safetensors"
    params = decoder_params(SMALL)["params"]
    swa.checkpoint.save_params(path, params, {"config": SMALL.to_json()}, "bfloat16")

    def load():
        tree, texts = swa.checkpoint.load_params(path)
        return flat(tree), texts

    return Kind(path, load, corrupt_safetensors, lambda value, data: same(value, contents(data)))


def byte_model(folder: Path) -> Kind:
    path = folder / "model.safetensors"
    params = decoder_params(SMALL)["params"]
    swa.checkpoint.save_params(path, params, {"config": SMALL.to_json()}, "bfloat16")

    def load():
        model, variables = load_model(path)
        return model.config.to_json(), flat(variables["params"])

    def holds(value, data):
        tensors, texts = contents(data)
        config, found = value
        return same(found, values_of(tensors)) and says(config, texts["config"])

    return Kind(path, load, corrupt_safetensors, holds)


def decoder(folder: Path) -> Kind:
    path = write_file(folder / "decoder.safetensors", random_tensors(DECODER_SHAPES))
    return Kind(
        path,
        lambda: swa.checkpoint.load_decoder(path, DECODER),
        corrupt_safetensors,
        lambda value, data: same(value, expected_decoder(values_of(contents(data)[0]))),
    )


def scaled_layer(folder: Path) -> Kind:
    prefix = "model.layers.3.self_attn."
    tensors = random_tensors({prefix + name: shape for name, shape in ATTENTION_SHAPES.items()})
    path = write_file(folder / "layer.safetensors", block_scaled(tensors, 32, "float32")[0])
    return Kind(
        path,
        lambda: swa.checkpoint.load_attention(path, ATTENTION, 3)["params"],
        corrupt_safetensors,
        lambda value, data: same(value, expected_attention(values_of(contents(data)[0]), prefix)),
    )


def _sharded(folder: Path) -> Path:
    tensors = every_dtype()
    names = list(tensors)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    shards = {file: {name: tensors[name] for name in part} for file, part in parts.items()}
    (folder / "secret.safetensors").write_bytes(b"not to be read")
    return write_sharded(folder / "sharded", shards)


def index(folder: Path) -> Kind:
    directory = _sharded(folder)
    whole = _copied(directory)

    def listed(data):  # a file of which it lists nothing is none of the checkpoint's
        return json.loads(data)["weight_map"]

    return Kind(
        directory / INDEX,
        lambda: _copied(directory),
        corrupt_json_file,
        lambda value, data: same(value, {name: whole[name] for name in listed(data)}),
        str(directory),
    )


def shard(folder: Path) -> Kind:
    directory = _sharded(folder)
    path, other = directory / "b.safetensors", directory / "a.safetensors"
    kept = contents(other.read_bytes())[0]
    return Kind(
        path,
        lambda: _copied(directory),
        corrupt_safetensors,
        lambda value, data: same(value, kept | contents(data)[0]),
        str(directory),
    )


def own_config(folder: Path) -> Kind:
    swa.hf_config.write_config(folder, decoder_config(attention_config(8, swa.V41)))
    return Kind(
        folder / "config.json",
        lambda: swa.read_config(folder).to_json(),
        corrupt_json_file,
        lambda value, data: says(value, data.decode()),
    )


FIELDS = {
    "hidden_size": "hidden_size", "num_heads": "num_attention_heads", "head_dim": "head_dim",
    "q_lora_rank": "q_lora_rank", "o_groups": "o_groups", "o_lora_rank": "o_lora_rank",
    "window": "sliding_window", "norm_eps": "rms_norm_eps",
}  # fmt: skip
"""Of a layer's configuration in a published config.json."""


def _published(folder: Path, fields: dict) -> Kind:
    path = folder / "config.json"
    path.write_text(json.dumps(fields))

    def holds(value, data):
        said = json.loads(data)
        said = said.get("text_config", said)
        return len(value) == said["num_hidden_layers"] and all(
            getattr(layer, ours) == said[theirs]
            for layer in value
            for ours, theirs in FIELDS.items()
        )

    return Kind(path, lambda: swa.read_attention(folder), corrupt_json_file, holds)


def published_config(folder: Path) -> Kind:
    return _published(folder, V4_FLASH_JSON)


def dense_config(folder: Path) -> Kind:
    return _published(folder, {**DENSE, "partial_rotary_factor": 0.125, "qk_rope_head_dim": None})


def _slot(position: int) -> ExportedSlot:
    cache = swa.RingCache.create(1, 2, RINGS.geometry, RINGS.fmt)
    block = np.random.default_rng(0).integers(0, 256, cache.blocks[0].shape, np.uint8)
    return dataclasses.replace(cache, blocks=(jnp.asarray(block),)).export_slot(0, position)


def exported(folder: Path) -> Kind:
    path = folder / "slot.safetensors"
    path.write_bytes(_slot(20).to_bytes("a model"))
    return Kind(
        path,
        lambda: ExportedSlot.from_bytes(path.read_bytes(), "a model"),
        corrupt_safetensors,
        named="exported slot",
    )


def forged_slot(folder: Path) -> Kind:
    """With a digest of what it holds, and put into a cache."""
    path = folder / "slot.safetensors"
    path.write_bytes(_slot(20).to_bytes("a model"))
    cache = swa.RingCache.create(1, 2, RINGS.geometry, RINGS.fmt)

    def corrupt(rng, data):
        tensors, texts = read_safetensors(data)
        if rng.integers(2):
            texts["format"] = corrupt_json(rng, json.loads(texts["format"]))
        else:
            name = rng.choice(["window", "capacity", "next_position"])
            texts[name] = rng.choice(["0", "-1", "7", "9", "1_0", " 8", "2147483647", 99 * "9",
                                      5000 * "9", "NaN", "8.0", "٨", ""])  # fmt: skip
        header = json.dumps([texts[name] for name in ORDER]).encode()
        texts["sha256"] = hashlib.sha256(header + tensors["rows"].tobytes()).hexdigest()
        return write_safetensors(tensors, texts)

    def load():
        slot = ExportedSlot.from_bytes(path.read_bytes(), "a model")
        return slot, cache.import_slot(0, slot)

    def holds(value, data):
        position = contents(data)[1]["next_position"]
        return value[0].next_position == int(position) == value[1][1]

    return Kind(path, load, corrupt, holds, "exported")


ORDER = ("window", "capacity", "format", "next_position", "model")


def prefix(folder: Path) -> Kind:
    directory = Path(tempfile.mkdtemp(dir=folder))
    store, tokens = PrefixStore(directory, "a model"), np.arange(20)
    path = store.save(tokens, _slot(20))
    return Kind(path, lambda: store.longest(np.append(tokens, 7)), corrupt_safetensors)


def request_lines(folder: Path) -> Kind:
    path = folder / "requests.jsonl"
    lines = (
        {"prompt": "import ", "stop": ["\n", "#"], "id": "first"},
        {"prompt": "a é", "max_tokens": 9, "temperature": 0.7, "top_k": 3, "top_p": 0.5, "seed": 1},
    )
    path.write_text("\n".join(json.dumps(line) for line in lines))

    def load():
        requests, errors = batch_lines.read_lines(path.read_bytes())
        for error in errors:
            batch_lines.encode_line(error)
        plain = {
            request.name.line: (
                request.name.id,
                bytes(request.prompt[1:]),
                request.max_new_tokens,
                request.stop_tokens,
                request.sampling,
            )
            for request in requests
        }
        return plain | {error["line"]: None for error in errors}

    def holds(value, data):
        for number, line in enumerate(data.split(b"\n"), 1):
            if value.get(number) is None:
                continue
            said = json.loads(line)
            name, prompt, most, stops, sampling = value[number]
            found = {
                "id": name,
                "prompt": prompt.decode(),
                "max_tokens": most,
                "temperature": np.float32(sampling.temperature[0]),
                "top_k": int(sampling.top_k[0]),
                "top_p": np.float32(sampling.top_p[0]),
            }
            wanted = {key: said[key] for key in found.keys() & said.keys()}
            for key in wanted.keys() & {"temperature", "top_p"}:
                wanted[key] = np.float32(wanted[key])
            if wanted.get("id", 0) is None:
                wanted["id"] = number
            if wanted != {key: found[key] for key in wanted}:
                return False
            if stops[1:] != [ord(stop) for stop in said.get("stop", [])]:
                return False
        return True

    return Kind(path, load, corrupt_json_lines, holds)


def benchmark(folder: Path) -> Kind:
    path = folder / "old.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)) + "\n")

    def load():
        lines = benchmark_lines.load(path, benchmark_table.WHERE)
        benchmark_lines.compare(lines[1:], LINES[1:])
        benchmark_table.tables(lines)
        return json.dumps(lines)

    def holds(value, data):
        return value == json.dumps([json.loads(line) for line in data.splitlines()])

    return Kind(path, load, corrupt_json_lines, holds)


def training_state(folder: Path) -> Kind:
    path, identity = folder / "state.safetensors", {"run": "{}", "training_text": "ab12"}
    values = np.arange(6, dtype=np.float32)
    state = training_checkpoints.TrainingState(3, {"a": values}, {"b": values[:2]}, [{"step": 2}])
    training_checkpoints.save_state(path, state, identity)

    def load():
        found = training_checkpoints.load_state(path, state, identity)
        tree = {"params.a": found.params["a"], "optimizer.b": found.optimizer["b"]}
        return tree, found.step, json.dumps(found.evaluations)

    def holds(value, data):
        tensors, texts = contents(data)
        said = int(texts["step"]), json.dumps(json.loads(texts["evaluations"]))
        return same(value[0], tensors) and value[1:] == said

    return Kind(path, load, corrupt_safetensors, holds)


# --- checkpoints of a decode state


def _saved_state(folder: Path):
    from test_resume import SETTINGS, TOKENS, make_model, make_params, make_state, restore

    from swa_jax.state_checkpoint import save_state

    directory, model = Path(tempfile.mkdtemp(dir=folder)), make_model()
    save_state(directory, 3, model, make_params(), make_state(model), TOKENS, SETTINGS)
    return directory / "state_3", lambda: dataclasses.astuple(restore(directory, model))


def state_header(folder: Path) -> Kind:
    path, load = _saved_state(folder)
    return Kind(path / "header.json", load, corrupt_json_file, named=str(path))


def state_file(folder: Path) -> Kind:
    """The largest of orbax's own."""
    path, load = _saved_state(folder)
    files = [file for file in (path / "arrays").rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    return Kind(largest, load, corrupt_bytes, named=str(path))


def forged_state_file(folder: Path) -> Kind:
    """Any of orbax's own, under a header with its digest: the file is in the header's place."""
    path, load = _saved_state(folder)
    header = path / "header.json"
    files = {
        str(file.relative_to(path / "arrays")): file.read_bytes()
        for file in sorted((path / "arrays").rglob("*"))
        if file.is_file()
    }

    def corrupt(rng, data):
        for name, whole in files.items():
            (path / "arrays" / name).write_bytes(whole)
        name = list(files)[rng.integers(len(files))]
        changed = corrupt_bytes(rng, files[name])
        (path / "arrays" / name).write_bytes(changed)
        said = json.loads(data)["header"]
        said["files"][name] = hashlib.sha256(changed).hexdigest()
        return _signed(said)

    def holds(value, data):  # values, of which orbax has no checksum, and nothing else
        return jax.tree.map(np.shape, value) == jax.tree.map(np.shape, kind.value)

    kind = Kind(header, load, corrupt, holds, str(path))
    return kind


def _signed(header: dict) -> bytes:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
    return json.dumps({"header": header, "digest": digest}).encode()


def forged_state_header(folder: Path) -> Kind:
    """With a digest of what it holds."""
    path, load = _saved_state(folder)

    def corrupt(rng, data):
        text = corrupt_json(rng, json.loads(data)["header"])
        try:
            header = json.loads(text)
        except (RecursionError, ValueError):
            return text.encode()
        return _signed(header)

    def holds(value, data):  # what it says of parameters is a cast, as anybody may ask for
        dtypes = json.loads(data)["header"]["arrays"]["params"]
        found = jax.tree.map(lambda leaf: [str(leaf.dtype), *leaf.shape], value[1])
        return found == dtypes

    return Kind(path / "header.json", load, corrupt, holds, str(path))


KINDS: dict[str, Callable[[Path], Kind]] = {
    make.__name__: make
    for make in (
        single_file, parameters, decoder, scaled_layer, index, shard, own_config, published_config,
        dense_config, exported, forged_slot, prefix, request_lines, benchmark, training_state,
        byte_model, state_header, state_file, forged_state_header, forged_state_file,
    )
}  # fmt: skip
