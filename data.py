"""Text for training: bytes of any file or folder, token files, and batches that are a pure function of (seed, step).

Without `data=`, the text is Python's own standard library: every machine that runs this has it, offline.  The last tenth is for validation."""
from __future__ import annotations
import hashlib, os, sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator
import numpy as np

VALIDATION = 10                                          # one part in so many, at the end
SKIPPED = {"site-packages", "dist-packages", "test", "idlelib", "lib2to3", "__pycache__"}
HEADERS = {(20240520, 1): np.uint16, (20240801, 7): np.uint32}          # (magic, version) of a token file's 256 int32 -> its tokens

@dataclass(frozen=True)
class Text:
  """A stream of tokens, cut in two.  digest: sha256 of the validation part as little-endian bytes of its own width."""
  name: str
  train: np.ndarray
  val: np.ndarray
  is_bytes: bool            # else token ids, whose length in bytes is not known
  digest: str

def python_source() -> bytes:
  """The *.py files of the running Python's standard library, by sorted relative path, joined."""
  root = Path(sysconfig.get_paths()["stdlib"])
  files = [p for p in root.rglob("*.py") if not SKIPPED & set(p.relative_to(root).parts)]
  return b"".join(p.read_bytes() for p in sorted(files, key=lambda p: p.relative_to(root).as_posix()))

def token_file(path:Path) -> np.ndarray:
  """The tokens of a .bin file, mapped, not read: GPT-2 or Llama-3 shards with a header, or headerless uint16.  ValueError if cut short."""
  size = path.stat().st_size
  header = np.fromfile(path, dtype="<i4", count=256)
  kind = HEADERS.get((int(header[0]), int(header[1]))) if len(header) == 256 else None
  if kind is None:
    if size % 2: raise ValueError(f"data={path}: {size} bytes are no whole number of uint16 tokens, and it has no known header: is it cut short?")
    return np.memmap(path, dtype="<u2", mode="r")
  count, width = int(header[2]), np.dtype(kind).itemsize
  if size != 1024 + count * width:
    raise ValueError(f"data={path}: its header promises {count:,} tokens, {1024 + count * width:,} bytes, but it has {size:,}: copy it again")
  return np.memmap(path, dtype=np.dtype(kind).newbyteorder("<"), mode="r", offset=1024)

def read(spec:str) -> tuple[np.ndarray, bool]:
  """The tokens of `data=spec`, and whether they are bytes: "python", a file, a folder (every file in it, by path), or a .bin token file.
  ValueError, in one line with the fix, for what is missing, empty or cut short."""
  if spec == "python": return np.frombuffer(python_source(), dtype=np.uint8), True
  try:
    path = Path(os.path.expanduser(spec))
    if not path.exists(): raise ValueError(f"data={spec} does not exist: give a file, a folder, or leave it out for Python's own source")
    if path.is_file():
      if path.stat().st_size == 0: raise ValueError(f"data={spec} is empty: give a file with text in it")
      return (token_file(path), False) if path.suffix == ".bin" else (np.memmap(path, dtype=np.uint8, mode="r"), True)
    files = sorted((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.relative_to(path).as_posix())
    if shards := [p for p in files if p.suffix == ".bin"]: raise ValueError(f"data={spec} holds token files: name one, data={shards[0]} for example")
    tokens = np.frombuffer(b"".join(p.read_bytes() for p in files), dtype=np.uint8)
  except OSError as e: raise ValueError(f"data={spec} cannot be read ({e.strerror}): give another path") from None
  if not len(tokens): raise ValueError(f"data={spec} holds no text: give a folder with files in it")
  return tokens, True

def load(spec:str, vocab:int, length:int) -> Text:
  """The text of `data=spec` (see read), cut in two.  ValueError where it is too short for sequences of `length`, or has a token id >= vocab."""
  tokens, is_bytes = read(spec)
  cut = len(tokens) - len(tokens) // VALIDATION
  train, val = tokens[:cut], tokens[cut:]
  if len(val) < length + 1:
    raise ValueError(f"data={spec} is too short: {len(tokens):,} tokens leave {len(val):,} for validation and length={length} needs "
                     f"{length + 1}: give {(length + 1) * VALIDATION:,} tokens or a smaller length")
  highest = max(int(tokens[i:i + (1 << 24)].max()) for i in range(0, len(tokens), 1 << 24))
  if highest >= vocab: raise ValueError(f"data={spec} has token {highest}, outside vocab={vocab}: give vocab={highest + 1} or more")
  return Text(spec, train, val, is_bytes, hashlib.sha256(val.tobytes()).hexdigest())

def batch(tokens:np.ndarray, rows:int, length:int, seed:int, step:int) -> tuple[np.ndarray, np.ndarray]:
  """Inputs and targets (rows, length) int32 of a training step, at places drawn from (seed, step) alone: resuming needs no state."""
  starts = np.random.default_rng([seed, step]).integers(0, len(tokens) - length, size=rows)
  picked = np.stack([tokens[s:s + length + 1] for s in starts]).astype(np.int32)
  return np.ascontiguousarray(picked[:, :-1]), np.ascontiguousarray(picked[:, 1:])

def windows(tokens:np.ndarray, rows:int, length:int, total:int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Validation batches: about `total` tokens in windows spread evenly over the text, the same ones every time.  A last batch that is not
  full is filled up with targets of -100."""
  count = max(1, min(total, len(tokens) - 1) // length)
  starts = np.linspace(0, len(tokens) - length - 1, count).astype(np.int64)
  for i in range(0, count, rows):
    picked = np.stack([tokens[s:s + length + 1] for s in starts[i:i + rows]]).astype(np.int32)
    x, y = np.zeros((rows, length), np.int32), np.full((rows, length), -100, np.int32)
    x[:len(picked)], y[:len(picked)] = picked[:, :-1], picked[:, 1:]
    yield x, y

def entropy(tokens:np.ndarray) -> float:
  """Order-0 entropy in bits per token: what a model reaches that knows only how often each token occurs."""
  _, counts = np.unique(tokens, return_counts=True)
  return float(-(counts / len(tokens) * np.log2(counts / len(tokens))).sum())

def encode(text:str, is_bytes:bool, vocab:int) -> list[int]:
  """A prompt as tokens: its UTF-8 bytes, or comma-separated ids for models of token files.  ValueError for an id outside vocab."""
  if is_bytes: ids = list(text.encode())
  else:
    try: ids = [int(t) for t in text.split(",")]
    except ValueError: raise ValueError(f"prompt={text!r}: this model reads token ids: give them as 15,7,32") from None
  if bad := [i for i in ids if not 0 <= i < vocab]: raise ValueError(f"prompt={text!r} has token {bad[0]}, outside vocab={vocab}: leave it out")
  return ids
