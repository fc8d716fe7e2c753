"""Text for training: bytes of any file or folder, token files, and batches that are a pure function of (seed, step); and small tasks, as pure.

Without `data=`, the text is Python's own standard library: every machine that runs this has it, offline.  The last tenth is for validation.
`python data.py TASK [key=value ...]` prints two examples of a task."""
from __future__ import annotations
import functools, hashlib, inspect, itertools, json, os, re, sys, sysconfig, uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, cast
import numpy as np
from tinygrad import Tensor
from tinygrad.nn.state import inverse_safe_dtypes, safe_load

VALIDATION = 10                                          # one part in so many, at the end
SKIPPED = {"site-packages", "dist-packages", "test", "idlelib", "lib2to3", "__pycache__"}
HEADERS = {(20240520, 1): np.uint16, (20240801, 7): np.uint32}          # (magic, version) of a token file's 256 int32 -> its tokens
FOLDER = (100_000, 1 << 32)                              # files and bytes that a folder of text may have

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
    if len(header) > 1 and (known := [version for magic, version in HEADERS if magic == header[0]]):
      raise ValueError(f"data={path}: its header is cut short, or not of version {known[0]}: copy it again, or make it of that version")
    if size % 2: raise ValueError(f"data={path}: {size} bytes are no whole number of uint16 tokens, and it has no known header: copy it again")
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
    if not spec or not path.exists(): raise ValueError(f"data={spec} does not exist: give a file, a folder, or leave it out for Python's own source")
    if path.is_file():
      if path.stat().st_size == 0: raise ValueError(f"data={spec} is empty: give a file with text in it")
      return (token_file(path), False) if path.suffix == ".bin" else (np.memmap(path, dtype=np.uint8, mode="r"), True)
    files = list(itertools.islice((p for p in path.rglob("*") if p.is_file()), FOLDER[0] + 1))
    if len(files) > FOLDER[0] or sum(p.stat().st_size for p in files) > FOLDER[1]:
      raise ValueError(f"data={spec} holds more than {FOLDER[0]:,} files or {FOLDER[1] >> 30} GiB, which are read at once: give a smaller folder")
    files.sort(key=lambda p: p.relative_to(path).as_posix())
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

# *** tasks: rows examples of (seed, index) -> tokens and labels (rows, length) int32; a label is what is to be said at that place, -100: nothing ***

def _drawn(rng:np.random.Generator, rows:int, low:int, high:int, n:int) -> np.ndarray:
  """n different numbers of low..high-1 in every row, in random order."""
  return low + rng.random((rows, high - low)).argsort(1)[:, :n]

def _again(x:np.ndarray) -> np.ndarray:
  """Where a number stands that stood earlier in its row."""
  order, found = x.argsort(1, kind="stable"), np.zeros(x.shape, bool)
  np.put_along_axis(found, order[:, 1:], np.diff(np.take_along_axis(x, order, 1)) == 0, 1)
  return found

def mqar(rows:int, seed:int, index:int, vocab:int=8192, length:int=64, pairs:int=4, again:int=0, crowd:float=0.01, noise:bool=False):
  """Multi-query associative recall (Zoology): k1 v1 ... kN vN, then queries: keys in places drawn with probability ~ i^(crowd-1), so that
  crowd=0.01 has most of them in front, and crowd=1 none; the label at a key is its value, which is not shown again.  Keys are 1..vocab/2-1, values
  vocab/2..vocab-1, each once in an example.  again: the forgetting variant, that many keys are written again with another value, and the latest
  counts.  Between the queries stand zeros, or with noise tokens that are no key of the example."""
  if length % 2: raise ValueError(f"length={length} is odd, and mqar is made of pairs: take {length + 1}")
  if vocab <= length: raise ValueError(f"vocab={vocab} is too small for length={length}: take more than {length}")
  if pairs < 1: raise ValueError(f"pairs={pairs} leaves nothing to ask for: take 1 or more")
  if not 0 <= again <= pairs: raise ValueError(f"again={again} keys of pairs={pairs} cannot be written again: take 0 to {pairs}")
  if 2 * (pairs + again) + 2 * pairs > length:
    raise ValueError(f"length={length} has no room for pairs={pairs} and as many queries: take {4 * pairs + 2 * again} or more")
  rng, half = np.random.default_rng([seed, index]), vocab // 2
  keys, values = _drawn(rng, rows, 1, half, pairs), _drawn(rng, rows, half, vocab, pairs + again)
  written = np.concatenate([keys, keys[:, :again]], axis=1)
  x, y = np.zeros((rows, length), np.int32), np.full((rows, length), -100, np.int32)
  start, slots = 2 * (pairs + again), (length - 2 * (pairs + again)) // 2
  if noise:
    filler, is_key = rng.integers(1, vocab, (rows, length)), np.zeros((rows, vocab), bool)
    np.put_along_axis(is_key, keys, True, 1)
    x[:] = np.where(np.take_along_axis(is_key, filler, 1), 0, filler)
  x[:, 0:start:2], x[:, 1:start:2] = written, values
  # the largest of log p + Gumbel noise are a draw without replacement
  order = (-(crowd - 1) * np.log(np.arange(1, slots + 1)) - rng.gumbel(size=(rows, slots))).argsort(1)[:, :pairs]
  latest = np.concatenate([values[:, pairs:], values[:, again:pairs]], axis=1)
  at = start + 2 * order
  np.put_along_axis(x, at, keys.astype(np.int32), 1)
  np.put_along_axis(y, at, latest.astype(np.int32), 1)
  return x, y

def copy(rows:int, seed:int, index:int, vocab:int=32, length:int=64):
  """length/2 random tokens of 1..vocab-1, then a 0, and the same tokens again: every one of them is the label at the place before it."""
  if length % 2 or length < 2: raise ValueError(f"length={length} cannot be halved: take an even one")
  if vocab < 2: raise ValueError(f"vocab={vocab} leaves nothing to copy: take 2 or more")
  content = np.random.default_rng([seed, index]).integers(1, vocab, (rows, length // 2))
  x = np.concatenate([content, np.zeros((rows, 1)), content[:, :-1]], axis=1).astype(np.int32)
  return x, np.where(np.arange(length) < length // 2, -100, np.concatenate([content, content], axis=1)).astype(np.int32)

def in_context_recall(rows:int, seed:int, index:int, vocab:int=16, length:int=128, noise:float=0.0):
  """MAD: pairs of a key (the lower half of the vocabulary) and the value it has in this example (the upper half); the label at a key that was seen
  before is its value.  noise: that share of the pairs is noise, two tokens of the upper half of the vocabulary, keys and values of the lower."""
  if length % 2: raise ValueError(f"length={length} is odd, and the task is made of pairs: take {length + 1}")
  if vocab < 4 or vocab % 4: raise ValueError(f"vocab={vocab} has no halves of keys and values: take a multiple of 4")
  if not 0 <= noise < 1: raise ValueError(f"noise={noise} is no share: take 0 to 0.9")
  rng, known = np.random.default_rng([seed, index]), vocab // 2 if noise else vocab
  n, half = length // 2, known // 2
  keys = rng.integers(0, half, (rows, n))
  values = np.take_along_axis(rng.integers(half, known, (rows, half)), keys, 1)
  noisy = rng.random((rows, n)) < noise
  other = rng.integers(known, max(vocab, known + 1), (rows, n, 2))
  x = np.where(noisy[..., None], other, np.stack([keys, values], axis=-1)).reshape(rows, length).astype(np.int32)
  y = np.full((rows, n, 2), -100, np.int32)
  y[..., 0] = np.where(_again(np.where(noisy, half + np.arange(n), keys)), values, -100)         # noise repeats nothing
  return x, y.reshape(rows, length)

def noisy_recall(rows:int, seed:int, index:int, vocab:int=32, length:int=128, noise:float=0.2):
  """MAD: in_context_recall where a share of the pairs is noise."""
  if noise <= 0: raise ValueError(f"noise={noise} leaves no noise: take 0.2, or in_context_recall")
  return in_context_recall(rows, seed, index, vocab, length, noise)

def selective_copying(rows:int, seed:int, index:int, vocab:int=16, length:int=256, copies:int=16):
  """MAD: `copies` tokens among blanks (vocab-2), then as many copy tokens (vocab-1), each of them with the next of those tokens as its label."""
  if vocab < 3: raise ValueError(f"vocab={vocab} leaves nothing to copy beside blank and copy token: take 3 or more")
  if 2 * copies > length: raise ValueError(f"copies={copies} and their copies do not fit length={length}: take {length // 2} or fewer")
  rng = np.random.default_rng([seed, index])
  content = rng.integers(0, vocab - 2, (rows, copies))
  x, y = np.full((rows, length), vocab - 2, np.int32), np.full((rows, length), -100, np.int32)
  np.put_along_axis(x, np.sort(_drawn(rng, rows, 0, length - copies, copies), axis=1), content.astype(np.int32), 1)
  x[:, length - copies:], y[:, length - copies:] = vocab - 1, content
  return x, y

def memorization(rows:int, seed:int, index:int, vocab:int=256, length:int=32):
  """MAD: keys, each followed by the insert token (vocab-1), whose label is the value that the key has in all examples of a seed."""
  if length % 2: raise ValueError(f"length={length} is odd, and the task is made of pairs: take {length + 1}")
  if vocab < 3: raise ValueError(f"vocab={vocab} has no key and value beside the insert token: take 3 or more")
  half = (vocab - 1) // 2
  values = np.random.default_rng([seed, 0x6d6164]).integers(half, 2 * half, half)              # the same for every index
  keys = np.random.default_rng([seed, index]).integers(0, half, (rows, length // 2))
  x, y = np.full((rows, length), vocab - 1, np.int32), np.full((rows, length), -100, np.int32)
  x[:, ::2], y[:, 1::2] = keys, values[keys]
  return x, y

def _motifs(rng:np.random.Generator, shape:tuple[int, ...], low:int, high:int, shortest:int) -> np.ndarray:
  """Motifs of shortest..3 tokens of low..high-1: (*shape, 3), with -1 after the last token."""
  return np.where(np.arange(3) < rng.integers(shortest, 4, (*shape, 1)), rng.integers(low, high, (*shape, 3)), -1)

def fuzzy_recall(rows:int, seed:int, index:int, vocab:int=16, length:int=128, shortest:int=1):
  """MAD: recall where vocab/2 keys are motifs of `shortest` to 3 tokens (of the lower half of the vocabulary), no two the same, and their values
  motifs of 1 to 3 (of the upper half), drawn for every example; pairs follow each other, cut at the end.  Where a key was seen before, each token of
  its value is the label at the place before it, the first one at the key's last token.  A test takes shortest=3."""
  if vocab < 4 or vocab % 2: raise ValueError(f"vocab={vocab} has no halves of keys and values: take an even number of 4 or more")
  if not 1 <= shortest <= 3: raise ValueError(f"shortest={shortest} is no length of a motif: take 1 to 3")
  if length < 12: raise ValueError(f"length={length} has no room for a pair and its return: take 12 or more")
  rng, half, n = np.random.default_rng([seed, index]), vocab // 2, length // 2 + 1              # a pair has 2 tokens or more
  keys, values = _motifs(rng, (rows, half), 0, half, shortest), _motifs(rng, (rows, half), half, vocab, 1)
  while (twice := _again(keys @ [(half + 1) ** 2, half + 1, 1])).any():
    keys[twice] = _motifs(rng, (int(twice.sum()),), 0, half, shortest)
  drawn = rng.integers(0, half, (rows, n))
  pairs = np.take_along_axis(np.concatenate([keys, values], axis=2), drawn[..., None], 1).reshape(rows, -1)
  labels = np.where(_again(drawn).repeat(6, axis=1) & (pairs >= half), pairs, -100)
  at = (pairs < 0).argsort(1, kind="stable")[:, :length + 1]                                    # the tokens without the gaps
  return np.take_along_axis(pairs, at[:, :-1], 1).astype(np.int32), np.take_along_axis(labels, at[:, 1:], 1).astype(np.int32)

def compression(rows:int, seed:int, index:int, vocab:int=16, length:int=32):
  """MAD: length-1 random tokens of 0..vocab-2, then the summary token (vocab-1); every token but that one is the label at its own place.  Not the
  reading of the other tasks: a decoder that is given only the model's state at the summary token, and a place, is to say what stood there."""
  if vocab < 3 or length < 2: raise ValueError(f"vocab={vocab} length={length} leave nothing to compress: take 3 and 2, or more")
  x = np.random.default_rng([seed, index]).integers(0, vocab - 1, (rows, length)).astype(np.int32)
  x[:, -1] = vocab - 1
  return x, np.where(np.arange(length) < length - 1, x, -100).astype(np.int32)

# *** tasks in bytes: a prompt, as long in every row, its answer and a newline; what fills a shorter answer's row up to the length is not scored ***
_read_once = functools.lru_cache(maxsize=None)(read)
FILLER = b"A kettle hums on the stove.\nTwo boats drift past the pier.\nSnow melts along the fence.\nSomebody whistles an old tune.\n"
ADJECTIVES = tuple("amber brave brisk crisp eager early faint fresh happy light lucky proud quiet rapid solid sunny".split())
NOUNS = tuple("beach bench canal cloud coast field forge grove hotel lodge mount ocean plaza ridge river tower".split())     # all of five letters
PEOPLE, ROOMS, OBJECTS = ("Ada", "Ben", "Cleo", "Dirk"), ("attic", "cellar", "garden", "hall", "kitchen", "study"), ("coin", "lamp", "rope")
BABI_LABELS = {1: ROOMS, 2: ROOMS, 3: ROOMS, 4: ROOMS, 5: PEOPLE + OBJECTS}                      # every answer that a question can have
STORIES = {1: (10, 1, 26), 2: (12, 2, 26), 3: (12, 3, 26), 4: (2, 2, 36), 5: (8, 1, 28)}        # facts: usual, fewest, bytes of the longest

def _background(rng:np.random.Generator, text:str, size:int) -> bytes:
  """`size` bytes (1 or more) of text= from a place that is drawn, or the filler sentences over and over; the last one is a newline."""
  try: source, is_bytes = (np.resize(np.frombuffer(FILLER, dtype=np.uint8), size), True) if text == "filler" else _read_once(text)
  except ValueError as e: raise ValueError(str(e).replace("data=", "text=")) from None
  if not is_bytes: raise ValueError(f"text={text} holds token ids, and this task is made of bytes: give a file of text")
  if len(source) < size: raise ValueError(f"text={text} has {len(source):,} bytes and {size:,} are needed: give a longer one or a smaller length")
  start = rng.integers(0, len(source) - size + 1)
  return source[start:start + size - 1].tobytes() + b"\n"

def _scattered(rng:np.random.Generator, facts:list[bytes], background:bytes) -> bytes:
  """The facts in their order, each in a gap between two lines that is drawn with replacement; between sentences where lines are paragraphs."""
  lines = re.findall(rb"[^\n]*\n", background)
  if len(lines) * 200 < len(background): lines = re.findall(rb"[^\n]*?(?:[.!?] |\n)", background)
  cuts = [0, *np.sort(rng.integers(0, len(lines) + 1, len(facts))).tolist(), len(lines)]
  return b"".join(b"".join(lines[a:b]) + fact for a, b, fact in zip(cuts, cuts[1:], [*facts, b""]))

def _answered(prompts:list[bytes], answers:list[bytes], room:int):
  """Inputs and labels of prompts of one length, with `room` bytes for an answer and its newline; the last byte is a label only."""
  whole = np.frombuffer(b"".join(p + a.ljust(room, b"\n") for p, a in zip(prompts, answers)), np.uint8).reshape(len(prompts), -1).astype(np.int32)
  after = np.arange(whole.shape[1] - 1) - len(prompts[0]) + 1                                   # 0 where the answer's first byte is the label
  return whole[:, :-1].copy(), np.where((after >= 0) & (after <= np.array([[len(a)] for a in answers])), whole[:, 1:], -100).astype(np.int32)

def prompt_length(y:np.ndarray) -> int:
  """How many tokens of x stand before the answer, in tasks where that is the same in every row: x[:, :this] are the prompts."""
  return int((y >= 0).any(0).argmax()) + 1

def _pick(rng:np.random.Generator, options): return options[rng.integers(len(options))]

def niah(rows:int, seed:int, index:int, kind:str="pk", length:int=512, text:str="python"):
  """A needle in a haystack (RULER's single needles), in bytes: one sentence, at a depth drawn uniformly, gives a key its value; the question at the
  end names the key, and the answer is the value and a newline.  kind: pk, filler sentences and a number of 7 digits; n, lines of text= and a number;
  w, lines of text= and a uuid.  The value is nowhere else in the haystack."""
  if kind not in ("pk", "n", "w"): raise ValueError(f"kind={kind} is not known: take pk, n or w")
  name, width = ("code", 36) if kind == "w" else ("number", 7)
  fixed = 2 * len(f"The {name} of quiet-river is ") + 2 * width + len(".\n")                    # the needle, the question and the answer
  if length <= fixed: raise ValueError(f"length={length} has no room for needle, question and answer of kind={kind}: take {fixed + 1} or more")
  rng, prompts, answers = np.random.default_rng([seed, index]), [], []
  for _ in range(rows):
    haystack = _background(rng, "filler" if kind == "pk" else text, length - fixed)
    question = f"The {name} of {_pick(rng, ADJECTIVES)}-{_pick(rng, NOUNS)} is ".encode()
    while (value := str(uuid.UUID(bytes=rng.bytes(16)) if kind == "w" else rng.integers(10 ** 6, 10 ** 7)).encode()) in haystack: pass
    prompts.append(_scattered(rng, [question + value + b".\n"], haystack) + question)
    answers.append(value)
  return _answered(prompts, answers, width + 1)

def _story(rng:np.random.Generator, question:int, facts:int) -> tuple[list[str], dict[str, str]]:
  """The facts of a story, and what can be asked after the last of them, with the answers: a later fact replaces an earlier one's."""
  told, asked = list[str](), dict[str, str]()
  if question == 4:
    first, middle, last = rng.permutation(ROOMS)[:3].tolist()
    ahead, behind = _pick(rng, (("north", "south"), ("west", "east")))
    told = [_pick(rng, (f"The {a} is {ahead} of the {b}.", f"The {b} is {behind} of the {a}.")) for a, b in ((first, middle), (middle, last))]
    return rng.permutation(told).tolist(), {f"What is {ahead} of the {middle}?": first, f"What is {behind} of the {middle}?": last,
                                            f"What is the {middle} {behind} of?": first, f"What is the {middle} {ahead} of?": last}
  # trail: the rooms that an object was in; one that nobody took yet is found wherever somebody takes it
  where, holder, trail = dict[str, str](), dict[str, str](), dict[str, list[str]]()
  for _ in range(facts):
    if question == 5:
      thing = _pick(rng, OBJECTS)
      giver = holder.get(thing) or _pick(rng, PEOPLE)
      holder[thing] = receiver = _pick(rng, [p for p in PEOPLE if p != giver])
      told.append(f"{giver} gave the {thing} to {receiver}.")
      asked |= {f"Who last gave the {thing} to {receiver}?": giver, f"What did {giver} last give to {receiver}?": thing,
                f"To whom did {giver} last give the {thing}?": receiver}
      continue
    moves = [(p, "went to", room) for p in PEOPLE for room in ROOMS if where.get(p) != room]
    takes = [(p, "took", o) for p, r in where.items() for o in OBJECTS if question > 1 and o not in holder and trail.get(o, [r])[-1] == r]
    drops = [(p, "dropped", o) for o, p in holder.items()]
    who, did, what = _pick(rng, _pick(rng, [actions for actions in (moves, takes, drops) if actions]))
    told.append(f"{who} {did} the {what}.")
    if did == "took": holder[what], trail[what] = who, trail.get(what, [where[who]])
    elif did == "dropped": del holder[what]
    else:
      where[who] = what
      for thing in [o for o, p in holder.items() if p == who]: trail[thing].append(what)
  if question == 1: asked = {f"Where is {p}?": room for p, room in where.items()}
  if question == 2: asked = {f"Where is the {o}?": rooms[-1] for o, rooms in trail.items()}
  if question == 3: asked = {f"Where was the {o} before it last came to the {b}?": a for o, t in trail.items() for a, b in zip(t, t[1:])}
  return told, asked

def babi(rows:int, seed:int, index:int, question:int=1, length:int=512, text:str="filler", facts:int=0):
  """BABILong, with stories of our own, in bytes: facts scattered over lines of background (text=, or filler sentences), then a question; the answer
  is one word of BABI_LABELS[question] and a newline.  question: 1, where somebody is; 2, where an object is that was carried; 3, where it was before;
  4, what lies beside a room, of three in a line; 5, who gave what to whom.  facts: how many a story has, 0 for as many as is usual."""
  if question not in STORIES: raise ValueError(f"question={question} is not known: take 1 to 5")
  (usual, fewest, longest), room = STORIES[question], max(map(len, BABI_LABELS[question])) + 1
  count = facts or usual
  if count < fewest or question == 4 and count > 2:
    raise ValueError(f"facts={facts} do not fit question={question}: take {fewest}{' or more' if question != 4 else ''}")
  least = count * longest + 56 + room                                                           # 55 for the longest question, 1 of background
  if length < least: raise ValueError(f"length={length} has no room for {count} facts and the question: take {least} or more, or fewer facts")
  rng, prompts, answers = np.random.default_rng([seed, index]), [], []
  for _ in range(rows):
    told, asked = _story(rng, question, count)
    while not asked: told, asked = _story(rng, question, count)
    words, answer = _pick(rng, list(asked.items()))
    lines, end = [f"{fact}\n".encode() for fact in told], f"{words} ".encode()
    prompts.append(_scattered(rng, lines, _background(rng, text, length + 1 - room - len(end) - sum(map(len, lines)))) + end)
    answers.append(answer.encode())
  return _answered(prompts, answers, room)

TASKS = {f.__name__: f for f in (mqar, copy, in_context_recall, noisy_recall, fuzzy_recall, selective_copying, compression, memorization, niah, babi)}
BYTE_TASKS = ("niah", "babi")
HELD_OUT = 1 << 32                                       # training takes the examples from index 0 on, evaluation those from here on
# What a task is evaluated at beyond its own settings: factors, and for shortest its value.
BEYOND: dict[str, list[dict]] = {
  "mqar": [dict(pairs=2, again=2, length=2), dict(length=2), dict(length=4)], "fuzzy_recall": [dict(shortest=3), dict(shortest=3, length=2)],
  "selective_copying": [dict(length=2), dict(copies=2, length=2)], "compression": [], "niah": [dict(length=n) for n in (2, 4, 8, 16)],
  "babi": [dict(length=n) for n in (2, 4, 8)]}

@dataclass(frozen=True)
class Task:
  """A task with its settings, length and vocab among them."""
  name: str
  settings: dict
  vocab: int
  is_bytes: bool
  def batch(self, rows:int, seed:int, index:int, **other) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels (rows, length), -100: not scored; other: settings in place of its own."""
    return TASKS[self.name](rows, seed, index, **self.settings | other)
  def variants(self) -> list[dict]:
    """The settings to evaluate at: its own, then those beyond, as far as the task can be made with them."""
    found: list[dict] = [{}]
    for row in BEYOND.get(self.name, [dict(length=2), dict(length=4)]):
      other = {n: by if n == "shortest" else self.settings[n] * by for n, by in row.items()}
      try: self.batch(1, 0, 0, **other)
      except ValueError: continue
      found.append(other)
    return found

def task(spec:str, length:int|None=None, vocab:int|None=None) -> Task:
  """The task of `task=spec`: its name, then settings as in mqar:pairs=32,again=8; length and vocab may come from their own keys.  ValueError."""
  name, _, words = spec.partition(":")
  made, settings = task_settings(name, [w for w in words.split(",") if w])
  known = {n: p.default for n, p in inspect.signature(made).parameters.items() if p.default is not p.empty}
  for key, x in (("length", length), ("vocab", vocab)):
    if x is not None and settings.get(key, x) != x: raise ValueError(f"{key}={x} contradicts task={spec}: give one of them")
    if x is not None and key in known: settings |= task_settings(name, [f"{key}={x}"])[1]
  if name in BYTE_TASKS and (vocab or 256) < 256: raise ValueError(f"vocab={vocab} is too small for task={name}, which is made of bytes: take 256")
  if "seed" in settings: raise ValueError(f"task={spec}: seed is a key of its own: give seed={settings['seed']}")
  settings = known | settings
  found = Task(name, settings, settings.get("vocab", max(vocab or 256, 256)), name in BYTE_TASKS)
  size = settings["length"] + found.vocab
  if not (found.batch(1 if found.is_bytes else max(1, min(64, (1 << 18) // size)), 0, 0)[1] >= 0).any():
    raise ValueError(f"task={spec} asks for nothing: take a greater length")
  return found

# *** weights in files: safetensors, with settings and a checksum of the whole file in the metadata ***

FORMAT, UNSIGNED = "atlas-2", "0" * 64

class Saved(NamedTuple):
  """A file that was found whole: its metadata, and its tensors, which stay on disk until they are used."""
  path: Path
  meta: dict[str, Any]
  tensors: dict[str, Tensor]

def save_file(path:str|Path, tensors:dict[str, Tensor], meta:dict[str, Any]) -> None:
  """Writes a file under a temporary name, syncs, renames: whole or not at all.  OSError where there is no room.
  The checksum is that of the file with zeros in its place.  (Not tinygrad's safe_save: a full disk is a signal to its memory map, not an error.)"""
  path = Path(path)
  header, at = cast(dict[str, dict], {"__metadata__": {"format": FORMAT, "sha256": UNSIGNED} | {n: json.dumps(x) for n, x in meta.items()}}), 0
  for name, t in tensors.items():
    header[name] = {"dtype": inverse_safe_dtypes[t.dtype], "shape": list(t.shape), "data_offsets": [at, at := at + t.nbytes()]}
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  temporary, checksum = path.with_suffix(".tmp"), hashlib.sha256()
  try:
    with temporary.open("wb") as file:
      for part in itertools.chain((len(text).to_bytes(8, "little"), text), (t.numpy().tobytes() for t in tensors.values())):
        file.write(part)
        checksum.update(part)
      file.seek(8 + text.index(UNSIGNED.encode()))
      file.write(checksum.hexdigest().encode())
      file.flush()
      os.fsync(file.fileno())
    temporary.replace(path)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise

def read_file(path:str|Path) -> Saved:
  """What `save_file` wrote.  Nothing in the file is executed.  ValueError for anything else, and for a file that is not whole to the last bit."""
  path = Path(path)
  foreign = f"{path} is not a checkpoint of this project, or is damaged: move it away or name another"
  try:
    with path.open("rb") as file:
      size = file.read(8)
      text = file.read(min(int.from_bytes(size, "little"), path.stat().st_size))
      meta = json.loads(text)["__metadata__"]
      version, said = meta.pop("format"), meta.pop("sha256", "")
      checksum = hashlib.sha256(size + text.replace(said.encode(), UNSIGNED.encode(), 1))
      while part := file.read(1 << 24): checksum.update(part)
    if version == FORMAT and checksum.hexdigest() == said: return Saved(path, {n: json.loads(x) for n, x in meta.items()}, safe_load(path))
  except OSError as e: raise ValueError(f"{path} cannot be read ({e.strerror}): name another") from None
  except Exception: raise ValueError(foreign) from None                        # whatever a foreign file holds, the user needs the same advice
  if version == FORMAT: raise ValueError(f"{path} is damaged, its checksum does not match: move it away or name another")
  if not str(version).startswith("atlas-"): raise ValueError(foreign)
  raise ValueError(f"{path} has the format {version}, and this version reads {FORMAT}: use the version that wrote it")

# *** lines of JSON for evaluation ***

def _is_word(x) -> bool: return isinstance(x, str) and bool(x.strip())

def _sound(row) -> str:
  """The kind of a line: choice, recall or last.  ValueError says what is wrong with it."""
  if not isinstance(row, dict): raise ValueError("is not an object")
  if "choices" in row:
    context, choices, answer = row.get("context"), row["choices"], row.get("answer")
    if not isinstance(context, str) or not _is_word(row.get("suffix", "x")): raise ValueError("context (or suffix) is not text")
    if not isinstance(choices, list) or len(choices) < 2 or not all(map(_is_word, choices)): raise ValueError("choices is no list of texts")
    if not (answer in choices if isinstance(answer, str) else type(answer) is int and 0 <= answer < len(choices)):
      raise ValueError("answer is neither one of the choices nor the number of one, from 0")
    return "choice"
  if "question" in row:
    if not isinstance(row.get("context"), str) or not _is_word(row["question"]): raise ValueError("context or question is not text")
    if not isinstance(row.get("answers"), list) or not row["answers"] or not all(map(_is_word, row["answers"])):
      raise ValueError("answers is not a list of texts")
    return "recall"
  if not isinstance(row.get("text"), str) or len(row["text"].split()) < 2:
    raise ValueError("has neither choices, nor question, nor a text of two words or more")
  return "last"

def json_lines(path:Path, skip_bad:bool=False) -> tuple[list[tuple[str, dict]], int]:
  """(kind, line) of every line that is not blank, and how many bad ones were skipped.  ValueError names the first bad line and what is wrong."""
  found, skipped = list[tuple[str, dict]](), 0
  try: lines = path.read_bytes().split(b"\n")
  except OSError as e: raise ValueError(f"data={path} cannot be read ({e.strerror}): give another path") from None
  for n, line in enumerate(lines, 1):
    if not line.strip(): continue
    try:
      try: json.dumps(row := json.loads(line), ensure_ascii=False).encode()                     # "\ud800" is JSON, and no text
      except (ValueError, RecursionError): raise ValueError("is not JSON in UTF-8") from None
      found.append((_sound(row), row))
    except ValueError as e:
      if not skip_bad: raise ValueError(f"data={path}, line {n} {e}: mend it, or leave such lines out with skip_bad=1") from None
      skipped += 1
  if not found: raise ValueError(f"data={path} has no line to evaluate: give one with context, choices and answer, for example")
  return found, skipped

def task_settings(name:str, words:list[str]) -> tuple[Callable, dict]:
  """The task of that name, and its settings from words like pairs=3 (seed is one of them).  ValueError for what it does not have or cannot be."""
  if name not in TASKS: raise ValueError(f"{name + ' is none: ' if name else ''}name a task: {', '.join(TASKS)}")
  known = {n: type(p.default) for n, p in inspect.signature(TASKS[name]).parameters.items() if p.default is not p.empty}
  settings: dict = {}
  for word in words:
    key, _, value = word.partition("=")
    if key not in known and key != "seed": raise ValueError(f"{word} is not a setting of {name}: take one of seed, {', '.join(known)}")
    try: x = settings[key] = known.get(key, int)(int(value) if known.get(key) is bool else value)
    except ValueError: raise ValueError(f"{word}: {value!r} is not a number: give one") from None
    most = 2 ** 31 - 1 if key == "seed" else 1 << 16
    if not isinstance(x, str) and not 0 <= x <= most: raise ValueError(f"{word} is out of range: {name} takes 0 to {most}")
  return TASKS[name], settings

def shown(argv:list[str]) -> int:
  """Prints two examples of the task argv[0], its settings as key=value: a scored token is followed by >label, a scored answer in bytes by <."""
  try:
    task, settings = task_settings("".join(argv[:1]), argv[1:])
    x, y = task(2, index=0, **{"seed": 0} | settings)
  except ValueError as e:
    print("error:", e, file=sys.stderr)
    return 2
  print((task.__doc__ or "").replace("\n  ", "\n") + "\n")
  for tokens, labels in zip(x, y):
    if task.__name__ in BYTE_TASKS:
      print(*(bytes(part.tolist()).decode(errors="replace") for part in (tokens[:prompt_length(y)], labels[labels >= 0])), sep=">", end="<\n")
    else: print(" ".join(f"{t}>{label}" if label >= 0 else str(t) for t, label in zip(tokens, labels)))
    print(f"({(labels >= 0).sum()} of {len(labels)} places scored)\n")
  return 0

if __name__ == "__main__": sys.exit(shown(sys.argv[1:]))
