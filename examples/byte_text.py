"""Bytes as tokens, and the text of the byte model: the sources of Python's standard library."""

import dataclasses
import hashlib
import sysconfig
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int, UInt16

BOUNDARY = 256  # the token before each file; 0 to 255 are the bytes themselves
VOCAB_SIZE = 257

# Tests, encoding tables and installed packages are left out, and so is what differs from one build
# of the same Python version to the next.
EXCLUDED_FOLDERS = frozenset(
    ("test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3", "ensurepip")
    + ("site-packages", "dist-packages")
)
EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")
SMALLEST_FILE = 200  # bytes; below that are stubs


def encode(text: bytes) -> UInt16[np.ndarray, " bytes"]:
    """Tokens of a text, one per byte and no boundary.

    Args:
        text: any bytes.

    Returns:
        uint16[len(text)], values 0 to 255.
    """
    return np.frombuffer(text, np.uint8).astype(np.uint16)


def decode(tokens: Int[np.ndarray, " tokens"]) -> bytes:
    """The text of tokens; boundaries have no text and are left out.

    Args:
        tokens: integers 0 to 256, any integer dtype.

    Returns:
        The bytes.

    Raises:
        ValueError: a token is not of this vocabulary.
    """
    tokens = np.asarray(tokens)
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < VOCAB_SIZE:
        raise ValueError(
            f"tokens: expected 0 to {VOCAB_SIZE - 1}, got {tokens.min()} to {tokens.max()}"
        )
    return tokens[tokens != BOUNDARY].astype(np.uint8).tobytes()


def is_held_out(path: str) -> bool:
    """Whether a file belongs to the held-out sixteenth: by its path, so never by its content.

    Args:
        path: path relative to the corpus, with forward slashes.

    Returns:
        True for held out, False for training.
    """
    return hashlib.sha256(path.encode()).digest()[-1] % 16 == 0


@dataclasses.dataclass(frozen=True)
class Split:
    """One side of the corpus: its files in path order and the token stream they make."""

    paths: tuple[str, ...]
    tokens: UInt16[np.ndarray, " tokens"]
    sha256: str  # of all paths and contents, in order: two equal hashes are the same text

    @property
    def num_bytes(self) -> int:
        """Bytes of text, without the boundaries."""
        return len(self.tokens) - len(self.paths)


def make_split(files: dict[str, bytes]) -> Split:
    """Joins files into one stream, a boundary before each.

    Args:
        files: content by relative path.

    Returns:
        The split, files in path order.
    """
    digest = hashlib.sha256()
    pieces = []
    for path, text in sorted(files.items()):
        digest.update(f"{path}\0{len(text)}\0".encode() + text)
        pieces += [np.array([BOUNDARY], np.uint16), encode(text)]
    tokens = np.concatenate(pieces) if pieces else np.zeros(0, np.uint16)
    return Split(tuple(sorted(files)), tokens, digest.hexdigest())


def read_sources(folder: Path) -> dict[str, bytes]:
    """Python sources below a folder, as the corpus takes them.

    Args:
        folder: the standard library's folder, or any other folder of ``.py`` files.

    Returns:
        Content by relative path with forward slashes, in path order.
    """
    files = {}
    for file in folder.rglob("*.py"):
        path = file.relative_to(folder)
        if not EXCLUDED_FOLDERS.isdisjoint(path.parts[:-1]):
            continue
        if any(part.startswith(EXCLUDED_PREFIXES) for part in path.parts):
            continue
        text = file.read_bytes()
        if len(text) >= SMALLEST_FILE:
            files[path.as_posix()] = text
    return dict(sorted(files.items()))


def load_corpus(folder: Path | None = None) -> tuple[Split, Split]:
    """Training and held-out text: the standard library of the Python that runs this.

    The text differs between Python versions; ``Split.sha256`` tells whether two are the same.

    Args:
        folder: another folder of ``.py`` files; None for the standard library.

    Returns:
        (training, held out).

    Raises:
        FileNotFoundError: one of the two would be empty.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    files = read_sources(folder)
    held_out = {path: text for path, text in files.items() if is_held_out(path)}
    training = {path: text for path, text in files.items() if path not in held_out}
    if not training or not held_out:
        raise FileNotFoundError(f"too few Python sources in {folder}: {len(files)} files")
    return make_split(training), make_split(held_out)


def scoring_rows(
    tokens: UInt16[np.ndarray, " tokens"], context: int, row: int = 4096
) -> tuple[
    Int[np.ndarray, "rows length"], Int[np.ndarray, "rows length"], Bool[np.ndarray, "rows length"]
]:
    """Cuts a stream into equal rows in which every token but the first is scored exactly once.

    Args:
        tokens: the stream, at least two tokens.
        context: tokens before each row's first scored one that the row carries along; at least
            ``num_layers * (window - 1)``, the receptive field, or scores depend on the cut.
        row: scored tokens per row.

    Returns:
        (inputs, targets, scored), int32, int32 and bool, each [rows, context + row]: the model
        reads inputs and predicts targets, and ``scored`` selects which predictions count. The last
        row is filled up with boundaries that do not count.
    """
    predictions = len(tokens) - 1
    rows = -(-predictions // row)
    starts = np.arange(rows) * row
    places = np.maximum(starts - context, 0)[:, None] + np.arange(context + row)
    scored = (places >= starts[:, None]) & (places < np.minimum(starts + row, predictions)[:, None])
    padded = np.concatenate([tokens, np.full(context + row + 1, BOUNDARY, tokens.dtype)])
    padded = padded.astype(np.int32)
    return padded[places], padded[places + 1], scored
