"""Saved prefixes: exported slots in a directory, by their tokens, and prefill that uses them."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Int32

from pallas_kernels import checks
from swa_jax.cache import RingCache
from swa_jax.config import DecoderConfig, plain_config
from swa_jax.exported import ExportedSlot
from swa_jax.files import checked_path, read_safetensors, write_safetensors, write_whole
from swa_jax.modules import Decoder, check_model
from swa_jax.placement import DeviceAxes
from swa_jax.prefilling import Params, prefill_chunk
from swa_jax.prompts import Prompt, token_ids
from swa_jax.reading import read_regular
from swa_jax.weight_names import parameter_name

_NAME = re.compile(r"(\d+)-[0-9a-f]{64}\.safetensors")


def model_fingerprint(config: DecoderConfig, params: Params) -> str:
    """A name of a model by its content: rows of two models of one shape are told apart.

    Every weight is read once, on the host: compute it once a process.

    Args:
      config: of the decoder; all of it counts but the notes of formats.
      params: its variables, whole on this process's devices. Name, dtype, shape and bytes of each
        count: weights that were rounded to another dtype are another model.

    Returns:
      A sha256 in hexadecimal.

    Raises:
      ValueError: the one is no DecoderConfig, or the other no tree.
    """
    checks.check_type("config", config, DecoderConfig)
    checks.check_type("params", params, Mapping)
    digest = hashlib.sha256(_encode(plain_config(config)))
    for keys, value in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(jax.device_get(value))
        name = parameter_name(keys)
        digest.update(_encode([name, array.dtype.name, array.shape]))
        digest.update(array.tobytes())
    return digest.hexdigest()


class PrefixStore:
    """Prefixes of one model in a directory, one safetensors file each.

    A file is named by the number of its tokens and a sha256 over model and tokens, and holds the
    tokens themselves: they are compared one by one when it is read. There is no index and nothing
    is kept in memory, so processes may share a directory; and nothing is ever deleted: what has to
    go is for the directory's owner to say.

    Args:
      directory: an existing directory.
      model: `model_fingerprint` of the model whose rows are saved; others' are never found.

    Raises:
      ValueError: there is no such directory, or no name of a model.
    """

    def __init__(self, directory: str | os.PathLike[str], model: str):
        self.directory = checked_path("directory", directory)
        self.model = model
        if not self.directory.is_dir():
            raise ValueError(f"directory: expected an existing one, got {directory}")
        if not isinstance(model, str) or not model:
            raise ValueError(f"model: expected the name of a model, got {model!r}")

    def save(self, tokens: Int[ArrayLike, " n"], exported: ExportedSlot) -> Path:
        """Writes a prefix; one of the same tokens is replaced. It appears whole or not at all.

        Args:
          tokens: integers[n], all tokens of the request before exported.next_position.
          exported: `export_slot` of a cache that holds their rows.

        Returns:
          The file.

        Raises:
          ValueError: no exported slot, another number of tokens than its next_position, or none.
        """
        tokens = _checked_tokens(tokens)
        checks.check_type("exported", exported, ExportedSlot)
        if len(tokens) != int(exported.next_position):
            raise ValueError(
                f"tokens: expected {int(exported.next_position)}, exported.next_position, got "
                f"{len(tokens)}"
            )
        tensors, metadata = exported.to_tensors(self.model)
        data = write_safetensors(tensors | {"tokens": tokens}, metadata)
        target = self.directory / self._name(len(tokens), self._digests(tokens, [len(tokens)])[0])
        write_whole(target, data)
        return target

    def longest(self, tokens: Int[ArrayLike, " n"]) -> ExportedSlot | None:
        """The longest saved prefix with which these tokens begin.

        At least one token is left over: the scores of what follows a prompt come from its last
        token, and rows do not hold them.

        Args:
          tokens: integers[n], a whole prompt.

        Returns:
          What `RingCache.import_slot` takes; its next_position says how many tokens it stands for.
          None where no saved prefix fits.

        Raises:
          ValueError: there is no token; or the file of this name is cut short or changed, or holds
            other tokens or another model's rows.
          OSError: it cannot be read.
        """
        tokens = _checked_tokens(tokens)
        names = [_NAME.fullmatch(file.name) for file in self.directory.iterdir()]
        present = {match.group(): int(match.group(1)) for match in names if match}
        lengths = sorted({n for n in present.values() if 0 < n < len(tokens)})
        fits = [
            name
            for n, digest in zip(lengths, self._digests(tokens, lengths), strict=True)
            if (name := self._name(n, digest)) in present
        ]
        return self._read(fits[-1], tokens[: present[fits[-1]]]) if fits else None

    def _read(self, name: str, tokens: Int32[np.ndarray, " n"]) -> ExportedSlot:
        path = self.directory / name
        data = read_regular(path)
        try:
            tensors, metadata = read_safetensors(data, "prefix")
            exported = ExportedSlot.from_tensors(tensors, metadata, self.model)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        saved = tensors.get("tokens", np.zeros(0))
        same = saved.dtype == np.int32 and np.array_equal(saved, tokens)
        if not same or int(exported.next_position) != len(tokens):
            raise ValueError(f"{path}: expected the tokens that its name stands for, got others")
        return exported

    def _name(self, length: int, digest: str) -> str:
        return f"{length}-{digest}.safetensors"

    def _digests(self, tokens: Int32[np.ndarray, " n"], lengths: Sequence[int]) -> list[str]:
        """sha256 over the model and the first n tokens, for rising lengths n."""
        digest, start, digests = hashlib.sha256(_encode(self.model)), 0, []
        for length in lengths:
            digest.update(tokens[start:length].astype("<i4").tobytes())
            digests.append(digest.hexdigest())
            start = length
        return digests


def prefill_from_prefixes(
    model: Decoder,
    params: Params,
    cache: RingCache,
    slot: int,
    prompt: Prompt,
    store: PrefixStore,
    *,
    save_at: Sequence[int] = (),
    chunk: int = 256,
) -> tuple[RingCache, Float[Array, "1 hidden"], int]:
    """Puts a whole prompt into a state slot: the longest saved prefix, then only what follows it.

    The rest is prefilled in chunks that end at `save_at`, where the prefix is saved for later
    prompts. Chunks of one width that begin and end at the same positions write the same bytes
    whether the rows before them were imported or not, so that `save_at` at multiples of `chunk`
    keeps every prompt's bytes; chunks cut elsewhere agree as any two prefills do, up to the last
    bits of the matrix products.

    Args:
      model: the decoder.
      params: its variables.
      cache: the rings; donated.
      slot: the state slot. Whatever rows it held are free.
      prompt: token ids of one request, or bytes.
      store: of this model.
      save_at: numbers of tokens at which to save, in any order; those outside the prompt, and those
        that the saved prefix stands for already, are left out.
      chunk: most tokens in one call, and the width of each: one compilation for all prompts.

    Returns:
      The new cache; the hidden state of the prompt's last token, as `prefill` returns it; and how
      many tokens did not have to be prefilled.

    Raises:
      ValueError: an empty prompt, a token id or a slot out of range, or as `PrefixStore.longest`
        and `RingCache.import_slot`.
      NotImplementedError: the state slots are split over devices.
    """
    check_model(model, params)
    checks.check_type("cache", cache, RingCache)
    checks.check_count("chunk", chunk)
    tokens = token_ids(model, "prompt", prompt)
    if checks.known_int("slot", slot) not in range(cache.slots):
        raise ValueError(f"slot: expected 0 to {cache.slots - 1}, got {slot}")
    if DeviceAxes.of(cache.sharding).slot_shards > 1:
        raise NotImplementedError(
            f"cache: expected state slots that are not split, as one request goes in at a time, "
            f"got {cache.sharding}"
        )
    checks.check_type("store", store, PrefixStore)
    checks.check_type("save_at", save_at, Iterable)
    for position in save_at:
        checks.check_count("save_at", position)
    state_ids = np.full(1, slot, np.int32)
    last = jnp.zeros((1, model.config.hidden_size), model.config.layers[0].dtype)
    found, start = store.longest(tokens), 0
    if found is not None:
        cache, _ = _import(cache, state_ids[0], found)
        start = int(found.next_position)
    reused, cuts = start, {position for position in save_at if position <= len(tokens)}
    while start < len(tokens):
        end = min([cut for cut in cuts if cut > start] + [start + chunk, len(tokens)])
        padded = np.zeros((1, chunk), np.int32)
        padded[0, : end - start] = tokens[start:end]
        starts, lengths = np.full(1, start, np.int32), np.full(1, end - start, np.int32)
        cache, last = prefill_chunk(model, params, cache, last, state_ids, padded, starts, lengths)
        if end in cuts:
            store.save(tokens[:end], _export(cache, state_ids[0], np.int32(end)))
        start = end
    return cache, last, reused


def _checked_tokens(tokens: Any) -> Int32[np.ndarray, " n"]:
    tokens = checks.as_int32("tokens", tokens)
    checks.check_shape("tokens", tokens, (None,))
    if tokens.size == 0:
        raise ValueError("tokens: expected at least one token, got none")
    return np.asarray(tokens)


def _encode(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


_export = jax.jit(RingCache.export_slot)
_import = jax.jit(RingCache.import_slot, donate_argnums=0)
