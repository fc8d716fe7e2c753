"""What models read, and files of weights: text, token files, synthetic tasks, safetensors.

Batches and examples are pure functions of (seed, step).  Without `data=`, the text is Python's own standard library.
`python data.py TASK [key=value ...]` prints two examples of a task."""
from __future__ import annotations
import collections, functools, hashlib, inspect, itertools, json, os, re, sys, sysconfig, uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, NamedTuple
import numpy as np
from numpy.random import Generator, default_rng
from tinygrad import Tensor
from tinygrad.nn.state import inverse_safe_dtypes, safe_load

VALIDATION = 10                                          # the last one of so many parts is for validation
IN_MEMORY = 2 << 30                                      # bytes: a file up to this size is read at once, not mapped
FOLDER = (100_000, 1 << 32)                              # files and bytes that a folder of text may have
BLOCKS, BLOCK = 1024, 1 << 16                            # blocks, and tokens in each, that Text.sample_digest covers
SKIPPED = {"site-packages", "dist-packages", "test", "idlelib", "lib2to3", "__pycache__"}
HEADERS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}   # magic number of a token file: its version and type
UINT32_FILE = "256 int32 (20240801, 7, number of tokens, zeros), then uint32"
CONTROLS = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")             # without whitespace and escape
# How files begin that are neither text nor token ids; the name of the group is the format.
BINARY = re.compile(rb"""(?P<gzip>\x1f\x8b\x08)|(?P<zip>PK(\x03\x04|\x05\x06|\x07\x08))|(?P<bzip2>BZh[1-9]1AY&SY)|
  (?P<xz>\xfd7zXZ)|(?P<zstd>\x28\xb5\x2f\xfd)|(?P<SevenZip>7z\xbc\xaf)|(?P<tar>.{257}ustar)|(?P<Ogg>OggS\x00)|
  (?P<NumPy>\x93NUMPY)|(?P<Parquet>PAR1)|(?P<Arrow>ARROW1\x00)|(?P<HDF5>\x89HDF)|(?P<SQLite>SQLite\ format\ 3)|
  (?P<safetensors>.{5}\x00{3}\{)|(?P<GGUF>GGUF.\x00)|(?P<pickle>\x80[\x02-\x05][\x95\x8a(\])}KXc])|(?P<ELF>\x7fELF)|
  (?P<PDF>%PDF-)|(?P<PNG>\x89PNG)|(?P<JPEG>\xff\xd8\xff)|(?P<GIF>GIF8[79]a)|(?P<FLAC>fLaC\x00)|(?P<MP3>ID3[\x02-\x04])|
  (?P<MP4>.{4}ftyp)|(?P<RIFF>RIFF.{4}(WAVE|AVI\ |WEBP))""", re.VERBOSE | re.DOTALL)
Arrays = tuple[np.ndarray, np.ndarray]                   # inputs, and targets or labels

def refuse(fault:Any, message:str) -> None:
  """ValueError with the message if there is the fault."""
  if fault: raise ValueError(message)

# *** text ***
@dataclass(frozen=True)
class Text:
  """A stream of tokens, cut in two."""
  name: str                 # what was read, and how much of a folder was left out
  train: np.ndarray
  val: np.ndarray
  is_bytes: bool            # False for token ids
  digest: str               # sha256 of the validation part, as little-endian integers of its own width
  sample_digest: str        # the same of the training part, or of BLOCKS blocks spread evenly over a large one
  stamp: tuple|None         # path, size and time of a mapped file (see `unchanged`), None for a text in memory

def python_source() -> bytes:
  """The *.py files of the running Python's standard library, by sorted relative path, joined."""
  root = Path(sysconfig.get_paths()["stdlib"])
  files = [p for p in root.rglob("*.py") if not SKIPPED & set(p.relative_to(root).parts)]
  return b"".join(p.read_bytes() for p in sorted(files, key=lambda p: p.relative_to(root).as_posix()))

def _is_text(content:bytes) -> bool:
  """Whether bytes are text: without NUL, in no binary format, and in UTF-8 or without control characters."""
  if b"\0" in content or BINARY.match(content): return False
  return "\ufffd" not in content.decode(errors="replace") or not CONTROLS.search(content)
def _header(content:bytes) -> list[int]:                  # magic number, version, number of tokens
  return np.frombuffer(content[:12].ljust(12, b"\0"), "<i4").tolist()
def _highest(tokens:np.ndarray) -> int:                   # in parts: a mapped file may be larger than the memory
  return max(int(tokens[i:i + (1 << 24)].max()) for i in range(0, len(tokens), 1 << 24))

def _file(path:Path, spec:str, vocab:int) -> tuple[np.ndarray, bool, str]:
  """See _source.  Token ids are GPT-2 or Llama-3 shards, or uint16 in a .bin file."""
  large = path.stat().st_size > IN_MEMORY
  raw = np.memmap(path, np.uint8, "r") if large else np.frombuffer(path.read_bytes(), np.uint8)
  start, size = raw[:1024].tobytes(), len(raw)
  refuse(size == 0, f"data={spec} is empty: give a file with text in it")
  if kind := BINARY.match(start):
    raise ValueError(f"data={spec} is a {kind.lastgroup} file, not text: unpack it, or convert it to text or token ids")
  magic, version, count = _header(start)
  if magic in HEADERS:
    expected, dtype = HEADERS[magic]
    cut_short = len(start) < 1024 or size != 1024 + count * np.dtype(dtype).itemsize
    refuse(version != expected, f"data={spec} has a header of version {version}, not {expected}: make it anew")
    refuse(cut_short, f"data={spec} has {size:,} bytes, and its header promises {count:,} tokens: copy it again")
    return raw[1024:].view(dtype), False, ""
  if path.suffix != ".bin": return raw, True, ""
  refuse(size % 2, f"data={spec} has no known header, and {size} bytes are no whole number of uint16: copy it again")
  refuse(vocab > 1 << 16, f"data={spec} has no header, and uint16 is too small for vocab={vocab}: write {UINT32_FILE}")
  tokens = raw.view("<u2")
  # Of ids of 32 bits, every second uint16 is the high half: zero, or small.
  if size % 4 == 0 and (high := _highest(tokens[1::2])) < 16 and _highest(tokens[::2]) > 16 * high:
    raise ValueError(f"data={spec} has no header and looks like ids of 32 bits: write uint16, or {UINT32_FILE}")
  return tokens, False, ""

def _folder(root:Path, spec:str) -> tuple[np.ndarray, bool, str]:
  """See _source.  The files are joined by relative path, but for hidden files and folders, files that are not text,
  links to folders, and links to files that are read already."""
  def stop(error:OSError): raise error
  paths, contents, left_out = list[Path](), dict[str, bytes](), collections.Counter[str]()
  for folder, folders, files in os.walk(root, onerror=stop):
    for path in [Path(folder, name) for name in folders + files]:
      if path.name.startswith("."): left_out["hidden"] += 1
      elif path.is_file(): paths.append(path)
      elif path.is_symlink() or not path.is_dir(): left_out["not files"] += 1
    folders[:] = [name for name in folders if not name.startswith(".")]
    if len(paths) > FOLDER[0]: break
  refuse(len(paths) > FOLDER[0] or sum(path.stat().st_size for path in paths) > FOLDER[1],
         f"data={spec} holds more than {FOLDER[0]:,} files or {FOLDER[1] >> 30} GiB: give a smaller folder")
  for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
    content, target = path.read_bytes(), os.path.realpath(path)
    refuse(_header(content)[0] in HEADERS, f"data={spec} holds token files: name one, data={path} for example")
    if target in contents: left_out["read already"] += 1
    elif _is_text(content): contents[target] = content
    else: left_out["not text"] += 1
  note = f" (left out: {', '.join(f'{n} {what}' for what, n in left_out.items())})" if left_out else ""
  tokens = np.frombuffer(b"".join(contents.values()), np.uint8)
  refuse(not len(tokens), f"data={spec} holds no text{note}: give a folder of text, or name a token file")
  return tokens, True, note

def _source(spec:str, vocab:int) -> tuple[np.ndarray, bool, str]:
  """The tokens of `data=spec`, whether they are bytes, and a note of what was left out."""
  if spec == "python": return np.frombuffer(python_source(), np.uint8), True, ""
  path, advice = Path(os.path.expanduser(spec)), "give a file, a folder, or leave it out for Python's own source"
  try:
    exists = spec and (path.is_file() or path.is_dir())
    refuse(not exists, f"data={spec} does not exist, or is neither a file nor a folder: {advice}")
    return _folder(path, spec) if path.is_dir() else _file(path, spec, vocab)
  except OSError as e: raise ValueError(f"data={e.filename or spec} cannot be read ({e.strerror}): {advice}") from None

def read(spec:str) -> tuple[np.ndarray, bool]:
  """The tokens of `data=spec`, and whether they are bytes: "python", a file, a folder, or a .bin token file.
  ValueError, in one line with the fix, for what is missing, unreadable, empty, cut short, or in a binary format."""
  return _source(spec, 0)[:2]

def _stamp(tokens:Any) -> tuple|None:
  if not isinstance(tokens, np.memmap): return None
  status = os.stat(str(tokens.filename))
  return tokens.filename, status.st_size, status.st_mtime_ns

def load(spec:str, vocab:int, length:int, parts:int=VALIDATION) -> Text:
  """The text of `data=spec` (see read).  The last one of so many parts is for validation: all of it with parts=1.
  ValueError if it is too short for sequences of `length`, or has a token id >= vocab."""
  tokens, is_bytes, note = _source(spec, vocab)
  cut = len(tokens) - len(tokens) // parts
  train, val = tokens[:cut], tokens[cut:]
  refuse(len(val) <= length, f"data={spec} is too short: {len(tokens):,} tokens leave {len(val):,} for validation: "
         f"give {(length + 1) * parts:,} for length={length}, or a smaller length")
  highest, digest = _highest(tokens), hashlib.sha256(val.tobytes()).hexdigest()
  refuse(highest >= vocab, f"data={spec} has token {highest}, outside vocab={vocab}: give vocab={highest + 1} or more")
  starts, sample = np.linspace(0, max(0, cut - BLOCK), min(BLOCKS, -(-cut // BLOCK))).astype(np.int64), hashlib.sha256()
  for start in starts: sample.update(train[start:start + BLOCK].tobytes())
  return Text(spec + note, train, val, is_bytes, digest, sample.hexdigest(), _stamp(tokens))

def unchanged(text:Text) -> None:
  """ValueError if the file of a text that is mapped, not in memory, is no longer the one that `load` read."""
  try: same = _stamp(text.val) == text.stamp
  except OSError: same = False
  refuse(not same, f"data={text.name} was changed while it is read: copy it, and train on the copy")

def batch(tokens:np.ndarray, rows:int, length:int, seed:int, step:int) -> Arrays:
  """Inputs and targets (rows, length) int32 of a training step, at places drawn from (seed, step) alone."""
  starts = default_rng([seed, step]).integers(0, len(tokens) - length, size=rows)
  sequences = np.stack([tokens[s:s + length + 1] for s in starts]).astype(np.int32)
  return np.ascontiguousarray(sequences[:, :-1]), np.ascontiguousarray(sequences[:, 1:])

def windows(tokens:np.ndarray, rows:int, length:int, total:int) -> Iterator[Arrays]:
  """Validation batches: about `total` tokens in windows spread evenly over the text.  Targets of -100 fill the last."""
  count = max(1, min(total, len(tokens) - 1) // length)
  starts = np.linspace(0, len(tokens) - length - 1, count).astype(np.int64)
  for i in range(0, count, rows):
    sequences, (x, y) = np.stack([tokens[s:s + length + 1] for s in starts[i:i + rows]]), _blank(rows, length)
    x[:len(sequences)], y[:len(sequences)] = sequences[:, :-1], sequences[:, 1:]
    yield x, y

def entropy(tokens:np.ndarray) -> float:
  """Order-0 entropy in bits per token: what a model reaches that knows only how often each token occurs."""
  share = np.unique(tokens, return_counts=True)[1] / len(tokens)
  return float(-(share * np.log2(share)).sum())

def encode(text:str, is_bytes:bool, vocab:int) -> list[int]:
  """A prompt as tokens: its UTF-8 bytes, or comma-separated ids for models of token files.  ValueError."""
  words = text.encode() if is_bytes else text.split(",")
  try: ids = [int(word) for word in words]
  except ValueError: raise ValueError(f"prompt={text!r}: this model reads token ids: give them as 15,7,32") from None
  for i in ids: refuse(not 0 <= i < vocab, f"prompt={text!r} has token {i}, outside vocab={vocab}: leave it out")
  return ids

# *** tasks: rows examples of (seed, index) -> tokens and labels (rows, length) int32, -100 where nothing is scored ***
# Our choice: training scores the places that tests score, where MAD trains on every next token.
HELD_OUT = 1 << 32                                       # training takes examples from 0 on, evaluation from here on
NOISE_TOKENS = 16                                        # of noisy recall, whatever the vocabulary
MAPPING_SEED = 0x6d6164                                  # of memorization: one shuffle of the values for all seeds

def _blank(rows:int, length:int, token:int=0) -> Arrays:  # inputs of one token, and labels of -100
  return np.full((rows, length), token, np.int32), np.full((rows, length), -100, np.int32)
def _half(length:int) -> int:
  refuse(length % 2, f"length={length} is not even: take {length + 1}")
  return length // 2
def _drawn(rng:Generator, rows:int, low:int, high:int, n:int) -> np.ndarray:
  """n different numbers of low..high-1 in every row, in random order: (rows, n)."""
  return low + rng.random((rows, high - low)).argsort(1)[:, :n]
def _first_places(x:np.ndarray) -> np.ndarray:
  """For every number of x (rows, n), all of them 0 or more, the place where it stands first in its row."""
  order = x.argsort(1, kind="stable")
  is_new = np.diff(np.take_along_axis(x, order, 1), prepend=-1) != 0
  group_start = np.maximum.accumulate(np.where(is_new, np.arange(x.shape[1]), 0), axis=1)
  return np.take_along_axis(np.take_along_axis(order, group_start, 1), order.argsort(1), 1)

def mqar(rows:int, seed:int, index:int, vocab:int=8192, length:int=64, pairs:int=4, again:int=0, crowd:float=0.01,
         noise:bool=False) -> Arrays:
  """Multi-query associative recall (Zoology): k1 v1 ... kN vN, then queries.  The label at a key is its value, which is
  not shown again.  Keys are 1..vocab/2-1 and values vocab/2..vocab-1, each once in an example.
  crowd: queries stand at places drawn with probability ~ i^(crowd-1): 0.01 has most in front, 1 is uniform.
  noise: tokens that are no key replace the zeros.  again: so many keys get a second value, which then counts."""
  start, half, slots = 2 * (pairs + again), vocab // 2, _half(length) - pairs - again
  refuse(vocab <= length, f"vocab={vocab} is too small for length={length}: take more than {length}")
  refuse(pairs < 1, f"pairs={pairs} leaves nothing to ask for: take 1 or more")
  refuse(not 0 <= again <= pairs, f"again={again} keys of pairs={pairs} cannot be written again: take 0 to {pairs}")
  refuse(slots < pairs, f"length={length} has no room for pairs={pairs} and queries: take {start + 2 * pairs} or more")
  rng, (x, y) = default_rng([seed, index]), _blank(rows, length)
  keys, values = _drawn(rng, rows, 1, half, pairs), _drawn(rng, rows, half, vocab, pairs + again)
  if noise:
    filler, is_key = rng.integers(1, vocab, (rows, length)), np.zeros((rows, vocab), bool)
    np.put_along_axis(is_key, keys, True, 1)
    x[:] = np.where(np.take_along_axis(is_key, filler, 1), 0, filler)
  x[:, 0:start:2], x[:, 1:start:2] = np.concatenate([keys, keys[:, :again]], axis=1), values
  # The largest of log p plus Gumbel noise are a draw without replacement.
  order = (-(crowd - 1) * np.log(np.arange(1, slots + 1)) - rng.gumbel(size=(rows, slots))).argsort(1)[:, :pairs]
  np.put_along_axis(x, start + 2 * order, keys, 1)
  np.put_along_axis(y, start + 2 * order, np.concatenate([values[:, pairs:], values[:, again:pairs]], axis=1), 1)
  return x, y

def copy(rows:int, seed:int, index:int, vocab:int=32, length:int=64) -> Arrays:
  """length/2 random tokens of 1..vocab-1, a 0, and the same tokens again: each is the label at the place before it."""
  refuse(vocab < 2 or length < 2, f"vocab={vocab} length={length} leave nothing to copy: take 2 and 2, or more")
  half, (x, y) = _half(length), _blank(rows, length)
  x[:, :half] = y[:, half:] = default_rng([seed, index]).integers(1, vocab, (rows, half))
  x[:, half + 1:] = x[:, :half - 1]
  return x, y

def in_context_recall(rows:int, seed:int, index:int, vocab:int=16, length:int=128, noise:float=0.0) -> Arrays:
  """MAD: pairs of a key (the lower half of the vocabulary) and the value (the upper half) that it has in this example;
  the last pair repeats a key.  The label at a key that was seen before is its value.
  noise: that share of the pairs is noise, two of the highest 16 tokens; keys and values are halves of the others."""
  n, high = _half(length), vocab - (NOISE_TOKENS if noise else 0)
  refuse(n < 2, f"length={length} asks for nothing: take 4 or more")
  refuse(high < 4 or high % 2, f"vocab={vocab} has no halves: take an even number of {vocab - high + 4} or more")
  refuse(not 0 <= noise < 1, f"noise={noise} is no share: take 0 to 0.9")
  rng, places, (x, y) = default_rng([seed, index]), np.arange(n), _blank(rows, length)
  keys, value_of = rng.integers(0, high // 2, (rows, n)), rng.integers(high // 2, high, (rows, high // 2))
  is_noise, repeated = rng.random((rows, n)) < noise, rng.integers(0, n - 1, (rows, 1))
  np.put_along_axis(is_noise, repeated, False, 1)
  keys[:, -1:], is_noise[:, -1] = np.take_along_axis(keys, repeated, 1), False
  values = np.take_along_axis(value_of, keys, 1)
  x[:, ::2], x[:, 1::2] = np.where(is_noise, rng.integers(high, max(vocab, high + 1), (2, rows, n)), [keys, values])
  seen = _first_places(np.where(is_noise, high + places, keys)) < places                  # noise repeats nothing
  y[:, ::2] = np.where(seen, values, -100)
  return x, y

def noisy_recall(rows:int, seed:int, index:int, vocab:int=32, length:int=128, noise:float=0.2) -> Arrays:
  """MAD: in_context_recall where a share of the pairs is noise."""
  refuse(noise <= 0, f"noise={noise} leaves no noise: take 0.2, or in_context_recall")
  return in_context_recall(rows, seed, index, vocab, length, noise)

def _motifs(rng:Generator, shape:tuple[int, ...], low:int, high:int, shortest:int) -> np.ndarray:
  """Motifs (*shape, 3): a length is drawn from shortest..3, then so many different tokens, in order; then stands -1."""
  first, second, third = [rng.integers(low, high - taken, shape) for taken in range(3)]
  second += second >= first
  third += third >= np.minimum(first, second)
  third += third >= np.maximum(first, second)
  return np.where(np.arange(3) < rng.integers(shortest, 4, (*shape, 1)), np.stack([first, second, third], axis=-1), -1)

def fuzzy_recall(rows:int, seed:int, index:int, vocab:int=16, length:int=128, shortest:int=1) -> Arrays:
  """MAD: recall of motifs (see _motifs).  Padding (vocab-1) stands in front.  Keys are motifs of `shortest` to 3 tokens
  of the lower half of the others, in tests (from HELD_OUT on) of 3; values are motifs of 1 to 3 tokens of the rest.
  The last pair repeats a drawn one.  The values of keys that were seen before are labels, each one place before."""
  refuse(vocab < 7 or length < 18, f"vocab={vocab} length={length} leave no room for motifs: take 7 and 18, or more")
  refuse(not 1 <= shortest <= 3, f"shortest={shortest} is no length of a motif: take 1 to 3")
  if index >= HELD_OUT: shortest = 3
  rng, half, n = default_rng([seed, index]), (vocab - 1) // 2, length // (shortest + 1)
  keys, values = _motifs(rng, (rows, n), 0, half, shortest), _motifs(rng, (rows, n), half, vocab - 1, 1)
  first = _first_places((keys + 1) @ [vocab * vocab, vocab, 1])                           # a key keeps its first value
  pairs = np.concatenate([keys, np.take_along_axis(values, first[..., None], 1)], axis=2)                 # (rows,n,6)
  # There is room for two pairs of 3 + 3 tokens after those that are taken: the last pair, and padding.
  is_taken = (pairs >= 0).sum(2).cumsum(1) <= length - 12
  last = np.take_along_axis(pairs, (rng.random(rows) * is_taken.sum(1)).astype(int)[:, None, None], 1)
  tokens = np.concatenate([np.where(is_taken[..., None], pairs, -1), last], axis=1)       # (rows,n+1,6)
  seen = np.pad(first < np.arange(n), ((0, 0), (0, 1)), constant_values=True)
  labels = np.where(seen[..., None] & (tokens >= half), tokens, -100).reshape(rows, -1)
  tokens = tokens.reshape(rows, -1)
  order = (tokens >= 0).argsort(1, kind="stable")[:, -length:]                            # the gaps move to the front
  x, y = np.take_along_axis(tokens, order, 1), np.take_along_axis(labels, np.roll(order, -1, 1), 1)
  return np.where(x < 0, vocab - 1, x).astype(np.int32), y.astype(np.int32)

def selective_copying(rows:int, seed:int, index:int, vocab:int=16, length:int=256, copies:int=16) -> Arrays:
  """MAD: `copies` tokens among blanks (vocab-2), one copy token (vocab-1), then blanks with them as labels."""
  refuse(vocab < 3, f"vocab={vocab} leaves nothing to copy beside blank and copy token: take 3 or more")
  refuse(2 * copies >= length, f"copies={copies} do not fit length={length} twice: take {(length - 1) // 2} or fewer")
  rng, prompt, (x, y) = default_rng([seed, index]), length - copies - 1, _blank(rows, length, vocab - 2)
  y[:, prompt + 1:] = content = rng.integers(0, vocab - 2, (rows, copies))
  np.put_along_axis(x, np.sort(_drawn(rng, rows, 0, prompt, copies), axis=1), content, 1)
  x[:, prompt] = vocab - 1
  return x, y

def compression(rows:int, seed:int, index:int, vocab:int=16, length:int=32) -> Arrays:
  """MAD: random tokens, then the summary token (vocab-1), whose state a decoder reads.  All are labels in place."""
  refuse(vocab < 3 or length < 2, f"vocab={vocab} length={length} leave nothing to compress: take 3 and 2, or more")
  x = default_rng([seed, index]).integers(0, vocab - 1, (rows, length)).astype(np.int32)
  x[:, -1] = vocab - 1
  return x, x.copy()

def memorization(rows:int, seed:int, index:int, vocab:int=256, length:int=32) -> Arrays:
  """MAD: keys, each followed by the insert token (vocab-1), whose label is the key's value, always the same."""
  refuse(vocab < 3, f"vocab={vocab} has no key and value beside the insert token: take 3 or more")
  half, (x, y) = (vocab - 1) // 2, _blank(rows, length, vocab - 1)
  x[:, ::2] = default_rng([seed, index]).integers(0, half, (rows, _half(length)))
  y[:, 1::2] = half + default_rng(MAPPING_SEED).permutation(half)[x[:, ::2]]
  return x, y

# *** tasks in bytes: prompts of one length, an answer, a newline; what fills the row after them is not scored ***
_read_once = functools.lru_cache(maxsize=None)(read)
FILLER = np.frombuffer(b"A kettle hums on the stove.\nTwo boats drift past the pier.\nSnow melts along the fence.\n"
                       b"Somebody whistles an old tune.\n", np.uint8)
# Adjectives and nouns have five letters each, so that all questions have one length.
ADJECTIVES = "amber brave brisk crisp eager early faint fresh happy light lucky proud quiet rapid solid sunny".split()
NOUNS = "beach bench canal cloud coast field forge grove hotel lodge mount ocean plaza ridge river tower".split()
PEOPLE, OBJECTS = ("Ada", "Ben", "Cleo", "Dirk"), ("coin", "lamp", "rope")
ROOMS = ("attic", "cellar", "garden", "hall", "kitchen", "study")
BABI_LABELS = dict.fromkeys((1, 2, 3, 4), ROOMS) | {5: PEOPLE + OBJECTS}                  # all answers to a question
STORIES = {1: (10, 1, 26), 2: (12, 2, 26), 3: (12, 3, 26), 4: (2, 2, 36), 5: (8, 1, 28)}  # facts: usual, least, bytes
def _pick(rng:Generator, options): return options[rng.integers(len(options))]

def _background(rng:Generator, text:str, size:int) -> bytes:
  """`size` bytes of text= from a drawn place, or of the filler sentences over and over; the last one is a newline."""
  try: source, is_bytes = (np.resize(FILLER, size), True) if text == "filler" else _read_once(text)
  except ValueError as e: raise ValueError(str(e).replace("data=", "text=")) from None
  refuse(not is_bytes, f"text={text} holds token ids, and this task is made of bytes: give a file of text")
  refuse(len(source) < size, f"text={text} has {len(source):,} bytes and {size:,} are needed: give a longer one")
  start = rng.integers(0, len(source) - size + 1)
  return source[start:start + size - 1].tobytes() + b"\n"

def _scattered(rng:Generator, facts:list[bytes], background:bytes) -> bytes:
  """The facts in their order, each in a drawn gap between lines, or between sentences where lines are paragraphs."""
  lines = re.findall(rb"[^\n]*\n", background)
  if len(lines) * 200 < len(background): lines = re.findall(rb"[^\n]*?(?:[.!?] |\n)", background)
  cuts = [0, *np.sort(rng.integers(0, len(lines) + 1, len(facts))).tolist(), len(lines)]
  return b"".join(b"".join(lines[a:b]) + fact for a, b, fact in zip(cuts, cuts[1:], [*facts, b""]))

def _answered(examples:list[tuple[bytes, bytes]], room:int) -> Arrays:
  """Inputs and labels of prompts of one length and their answers, with `room` bytes for an answer and its newline."""
  start, (x, y) = len(examples[0][0]), _blank(len(examples), len(examples[0][0]) + room - 1)
  for tokens, labels, (prompt, answer) in zip(x, y, examples):
    tokens[:] = list((prompt + answer.ljust(room, b"\n"))[:-1])
    labels[start - 1:start + len(answer)] = list(answer + b"\n")
  return x, y

def prompt_length(y:np.ndarray) -> int:
  """How many tokens stand before the answer, where that is the same in every row: x[:, :this] are the prompts."""
  return int((y >= 0).any(0).argmax()) + 1

def niah(rows:int, seed:int, index:int, kind:str="pk", length:int=512, text:str="python") -> Arrays:
  """A needle in a haystack (RULER's single needles), in bytes: a sentence at a uniformly drawn depth gives a key its
  value; the question at the end names the key; the answer is the value, which stands nowhere else, and a newline.
  kind: pk, filler sentences and a number of 7 digits; n, lines of text= and a number; w, lines of text= and a uuid."""
  refuse(kind not in ("pk", "n", "w"), f"kind={kind} is not known: take pk, n or w")
  rng, (name, width) = default_rng([seed, index]), ("code", 36) if kind == "w" else ("number", 7)
  fixed = 2 * len(f"The {name} of quiet-river is ") + 2 * width + len(".\n")              # needle, question and answer
  refuse(length <= fixed, f"length={length} has no room for the needle of kind={kind}: take {fixed + 1} or more")
  def example() -> tuple[bytes, bytes]:
    haystack = value = _background(rng, "filler" if kind == "pk" else text, length - fixed)
    question = f"The {name} of {_pick(rng, ADJECTIVES)}-{_pick(rng, NOUNS)} is ".encode()
    while value in haystack:
      value = str(uuid.UUID(bytes=rng.bytes(16)) if kind == "w" else rng.integers(10 ** 6, 10 ** 7)).encode()
    return _scattered(rng, [question + value + b".\n"], haystack) + question, value
  return _answered([example() for _ in range(rows)], width + 1)

def _story(rng:Generator, question:int, count:int) -> tuple[list[str], dict[str, str]]:
  """The facts of a story, and what can be asked after the last of them, with the answers."""
  facts, asked, room_of, holder = list[str](), dict[str, str](), dict[str, str](), dict[str, str]()
  trail = dict[str, list[str]]()                         # the rooms of an object: anywhere, until somebody takes it
  if question == 4:
    first, middle, last = rng.permutation(ROOMS)[:3].tolist()
    ahead, behind = _pick(rng, (("north", "south"), ("west", "east")))
    for a, b in ((first, middle), (middle, last)):
      facts.append(_pick(rng, (f"The {a} is {ahead} of the {b}.", f"The {b} is {behind} of the {a}.")))
    return rng.permutation(facts).tolist(), {
      f"What is {ahead} of the {middle}?": first, f"What is {behind} of the {middle}?": last,
      f"What is the {middle} {behind} of?": first, f"What is the {middle} {ahead} of?": last}
  for _ in range(count):
    if question == 5:
      thing = _pick(rng, OBJECTS)
      giver = holder.get(thing) or _pick(rng, PEOPLE)
      holder[thing] = receiver = _pick(rng, [person for person in PEOPLE if person != giver])
      facts.append(f"{giver} gave the {thing} to {receiver}.")
      asked |= {f"Who last gave the {thing} to {receiver}?": giver, f"What did {giver} last give to {receiver}?": thing,
                f"To whom did {giver} last give the {thing}?": receiver}
      continue
    moves = [(p, "went to", room) for p in PEOPLE for room in ROOMS if room_of.get(p) != room]
    free = [o for o in OBJECTS if question > 1 and o not in holder]
    takes = [(p, "took", o) for p, room in room_of.items() for o in free if trail.get(o, [room])[-1] == room]
    drops = [(p, "dropped", o) for o, p in holder.items()]
    person, verb, what = _pick(rng, _pick(rng, [actions for actions in (moves, takes, drops) if actions]))
    facts.append(f"{person} {verb} the {what}.")
    if verb == "dropped": del holder[what]
    elif verb == "took":
      holder[what] = person
      trail.setdefault(what, [room_of[person]])
    else:
      room_of[person] = what
      for thing in [o for o, p in holder.items() if p == person]: trail[thing].append(what)
  steps = [(o, a, b) for o, rooms in trail.items() for a, b in zip(rooms, rooms[1:])]
  if question == 1: asked = {f"Where is {p}?": room for p, room in room_of.items()}
  if question == 2: asked = {f"Where is the {o}?": rooms[-1] for o, rooms in trail.items()}
  if question == 3: asked = {f"Where was the {o} before it last came to the {b}?": a for o, a, b in steps}
  return facts, asked

def babi(rows:int, seed:int, index:int, question:int=1, length:int=512, text:str="filler", facts:int=0) -> Arrays:
  """BABILong, with stories of our own, in bytes: facts scattered over lines of background (text=, or filler sentences),
  then a question; the answer is one word of BABI_LABELS[question] and a newline.
  question: 1, where somebody is; 2, where an object is that was carried; 3, where it was before; 4, what lies beside a
  room, of three in a line; 5, who gave what to whom.  facts: how many a story has, 0 for as many as is usual."""
  refuse(question not in STORIES, f"question={question} is not known: take 1 to 5")
  usual, fewest, longest = STORIES[question]
  rng, count, room = default_rng([seed, index]), facts or usual, max(map(len, BABI_LABELS[question])) + 1
  refuse(question == 4 and count != 2, f"facts={facts} do not fit question=4: take 2")
  refuse(count < fewest, f"facts={facts} do not fit question={question}: take {fewest} or more")
  least = count * longest + 56 + room                    # 55 for the longest question, 1 of background
  refuse(length < least, f"length={length} has no room for {count} facts and the question: take {least} or more")
  def example() -> tuple[bytes, bytes]:
    told, asked = _story(rng, question, count)
    while not asked: told, asked = _story(rng, question, count)
    words, answer = _pick(rng, list(asked.items()))
    lines, end = [f"{fact}\n".encode() for fact in told], f"{words} ".encode()
    background = _background(rng, text, length + 1 - room - len(end) - sum(map(len, lines)))
    return _scattered(rng, lines, background) + end, answer.encode()
  return _answered([example() for _ in range(rows)], room)

TASKS = {task.__name__: task for task in (mqar, copy, in_context_recall, noisy_recall, fuzzy_recall, selective_copying,
                                          compression, memorization, niah, babi)}
BYTE_TASKS = ("niah", "babi")
LONGEST = 1 << 20                                        # bytes of an example
BEYOND: dict[str, list[dict]] = {                         # factors of a task's own settings, to evaluate it beyond them
  "mqar": [dict(pairs=2, again=2, length=2), dict(length=2), dict(length=4)], "compression": [],
  "selective_copying": [dict(length=2), dict(copies=2, length=2)],
  "niah": [dict(length=n) for n in (2, 4, 8, 16)], "babi": [dict(length=n) for n in (2, 4, 8)]}

@dataclass(frozen=True)
class Task:
  """A task with its settings, length and vocab among them."""
  name: str
  settings: dict[str, Any]
  vocab: int
  is_bytes: bool
  def batch(self, rows:int, seed:int, index:int, **changed) -> Arrays:
    """Inputs and labels (rows, length), -100: not scored; changed: settings in place of its own."""
    return TASKS[self.name](rows, seed, index, **self.settings | changed)
  def variants(self) -> list[dict]:
    """The settings to evaluate at: its own, then those beyond, as far as the task can be made with them."""
    variants: list[dict] = [{}]
    for factors in BEYOND.get(self.name, [dict(length=2), dict(length=4)]):
      changed = {name: self.settings[name] * factor for name, factor in factors.items()}
      if changed["length"] > LONGEST: continue
      try: self.batch(1, 0, 0, **changed)
      except ValueError: continue
      variants.append(changed)
    return variants

def task(spec:str, length:int|None=None, vocab:int|None=None) -> Task:
  """The task of `task=spec`, such as mqar:pairs=32,again=8; length and vocab have keys of their own.  ValueError."""
  name, _, words = spec.partition(":")
  refuse(name not in TASKS, f"{name + ' is none: ' if name else ''}name a task: {', '.join(TASKS)}")
  parameters, is_bytes = inspect.signature(TASKS[name]).parameters.values(), name in BYTE_TASKS
  defaults, settings = {p.name: p.default for p in parameters if p.default is not p.empty}, dict[str, Any]()
  for word in filter(None, words.split(",")):
    key, _, value = word.partition("=")
    refuse(key == "seed", f"task={spec}: seed is a key of its own: give {word}")
    refuse(key not in defaults, f"{word} is not a setting of {name}: take one of seed, {', '.join(defaults)}")
    kind = type(defaults[key])
    try: settings[key] = kind(int(value) if kind is bool else value)
    except ValueError: raise ValueError(f"{word}: {value!r} is not a number: give one") from None
  for key, x in (("length", length), ("vocab", vocab)):
    if x is None: continue
    refuse(settings.get(key, x) != x, f"{key}={x} contradicts task={spec}: give one of them")
    if key in defaults: settings[key] = x
  for key, x in settings.items():
    most = LONGEST if is_bytes and key == "length" else 1 << 16
    refuse(not isinstance(x, str) and not 0 <= x <= most, f"{key}={x} is out of range: {name} takes 0 to {most}")
  refuse(is_bytes and (vocab or 256) < 256, f"vocab={vocab} is too small for task={name}, made of bytes: take 256")
  settings = defaults | settings
  result = Task(name, settings, settings.get("vocab", vocab or 256), is_bytes)
  rows = 1 if is_bytes else max(1, min(64, (1 << 18) // (settings["length"] + result.vocab)))
  refuse((result.batch(rows, 0, 0)[1] < 0).all(), f"task={spec} asks for nothing: take a greater length")
  return result

def shown(argv:list[str]) -> int:
  """Prints two examples of the task argv[0], its settings and seed as key=value, labels and answers behind a >."""
  words, seeds = [w for w in argv if not w.startswith("seed=")], [w[5:] for w in argv if w.startswith("seed=")]
  try:
    example = task(f"{''.join(words[:1])}:{','.join(words[1:])}")
    x, y = example.batch(2, int((seeds or ["0"])[-1]), 0)
  except ValueError as e:
    print("error:", e, file=sys.stderr)
    return 2
  print(inspect.getdoc(TASKS[example.name]), end="\n\n")
  for tokens, labels in zip(x, y):
    if example.is_bytes:
      parts = tokens[:prompt_length(y)], labels[labels >= 0]
      print(*[bytes(part.tolist()).decode(errors="replace") for part in parts], sep=">", end="<\n")
    else: print(*[f"{token}>{label}" if label >= 0 else token for token, label in zip(tokens, labels)])
    print(f"({(labels >= 0).sum()} of {len(labels)} places scored)\n")
  return 0

# *** weights in files: safetensors, with settings and a checksum of the whole file in the metadata ***
FORMAT, UNSIGNED = "atlas-2", "0" * 64

class Saved(NamedTuple):
  """A file of weights.  signed: with its checksum, which a tool that wrote the file again may have left out."""
  path: Path
  meta: dict[str, Any]
  tensors: dict[str, Tensor]                             # on disk until they are used
  signed: bool

def save_file(path:str|Path, tensors:dict[str, Tensor], meta:dict[str, Any]) -> None:
  """Writes a file under a temporary name, syncs it, and renames it.  OSError where there is no room: tinygrad's own
  safe_save maps the file, and a full disk is a signal.  The checksum is that of the file with zeros in its place."""
  texts, end = {name: json.dumps(x) for name, x in meta.items()}, 0
  header: dict[str, dict] = {"__metadata__": {"format": FORMAT, "sha256": UNSIGNED} | texts}
  for name, t in tensors.items():
    start, end = end, end + t.nbytes()
    header[name] = {"dtype": inverse_safe_dtypes[t.dtype], "shape": list(t.shape), "data_offsets": [start, end]}
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  size, temporary, checksum = len(text).to_bytes(8, "little"), Path(path).with_suffix(".tmp"), hashlib.sha256()
  try:
    with temporary.open("wb") as file:
      for content in itertools.chain((size, text), (t.numpy().tobytes() for t in tensors.values())):
        file.write(content)
        checksum.update(content)
      file.seek(8 + text.index(UNSIGNED.encode()))
      file.write(checksum.hexdigest().encode())
      file.flush()
      os.fsync(file.fileno())
    temporary.replace(path)
  finally: temporary.unlink(missing_ok=True)

def read_file(path:str|Path) -> Saved:
  """What `save_file` wrote, also if another tool wrote it again without the checksum.  Nothing in it is executed.
  ValueError for a file of another kind or version, or one that is damaged."""
  path, version, intact = Path(path), "", False
  try:
    with path.open("rb") as file:
      size = file.read(8)
      text = file.read(min(int.from_bytes(size, "little"), path.stat().st_size))
      header = json.loads(text)
      meta = header.pop("__metadata__")
      version, signature = str(meta.pop("format")), meta.pop("sha256", UNSIGNED)
      checksum = hashlib.sha256(size + text.replace(signature.encode(), UNSIGNED.encode(), 1))
      while content := file.read(1 << 24): checksum.update(content)
      intact = file.tell() == 8 + len(text) + max(entry["data_offsets"][1] for entry in header.values())
    if version == FORMAT and intact and signature in (UNSIGNED, checksum.hexdigest()):
      return Saved(path, {n: json.loads(x) for n, x in meta.items()}, safe_load(path), signature != UNSIGNED)
  except OSError as e: raise ValueError(f"{path} cannot be read ({e.strerror}): name another") from None
  except Exception: version = ""                         # whatever a foreign file holds, the user needs the same advice
  refuse(version == FORMAT, f"{path} is damaged, its checksum does not match: move it away or name another")
  refuse("atlas-" in version, f"{path} has the format {version}, not {FORMAT}: use the version that wrote it")
  raise ValueError(f"{path} is not a checkpoint of this project, or is damaged: move it away or name another")

if __name__ == "__main__": sys.exit(shown(sys.argv[1:]))
