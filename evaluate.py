"""What a trained model is worth: sampling, loss by position, scores of tasks, question files, pictures of a run."""
from __future__ import annotations
import codecs, contextlib, csv, functools, json, math, os, sys, time
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator
import numpy as np
from tinygrad import Tensor, TinyJit
from tqdm import tqdm
import atlas, data, kernels

VALIDATION_TOKENS = 65_536
ANSWER_TOKENS = 48            # longest answer that is generated in evaluation
PIECE = 2048                  # tokens of a long row of a question file that are read at once

def predictions(params:dict, cfg:atlas.Config, x:Tensor) -> tuple[Tensor, Tensor]:
  """Logits (B,T,vocab) for the labels of x, and the mean memory step.  For task=compression a decoder computes them: an
  MLP whose input is the model's output at the last token plus a learned vector for each position (MAD)."""
  h, _, inputs = atlas.hidden(params, cfg, x)
  etas = [z.mean() for name, z in inputs.items() if name.endswith(".eta")] or [Tensor(0.0, dtype="float32")]
  if decoder := params.get("decoder"):
    z = (h[:, -1:] + decoder["position"]).contiguous()
    gate, value = atlas.linear(cfg, z, decoder["in"]).contiguous().chunk(2, dim=-1)
    h = z + atlas.linear(cfg, gate.silu() * value, decoder["out"])
  return atlas.linear(cfg, h, params["embed"]).float(), Tensor.stack(*etas).mean()

# *** validation ***
def evaluator(params:dict, cfg:atlas.Config, tokens:np.ndarray, batch:int, length:int) -> Callable[[int], np.ndarray]:
  """A function of the number of tokens to read -> mean loss in bits per token at each position of the context,
  (length,).  It is compiled once, and reads params as they are when it is called."""
  @TinyJit
  def losses(x, y): return atlas.token_losses(atlas.forward(params, cfg, x)[0], y).realize()
  def evaluate(total):
    bits, rows = np.zeros(length), 0
    batches = list(data.windows(tokens, batch, length, total))
    for x, y in tqdm(batches, desc="validation", unit="batch", leave=False, disable=len(batches) < 2):
      bits += losses(Tensor(x), Tensor(y)).numpy().astype(np.float64).sum(0) / math.log(2)
      rows += int((y[:, 0] >= 0).sum())
    return bits / rows
  return evaluate
def quarters(curve:np.ndarray) -> list[tuple[str, float]]:
  """The mean of each quarter of the context that has a position."""
  names = ("first quarter", "second quarter", "third quarter", "last quarter")
  return [(name, float(q.mean())) for name, q in zip(names, np.array_split(curve, 4)) if len(q)]

def scorer(params:dict, cfg:atlas.Config, task:data.Task, rows:int, seed:int) -> Callable[[int, dict], dict]:
  """A function (tokens, settings) -> scores on a task's held-out examples, about `tokens` tokens of them and at least
  32 examples, with `settings` in place of the task's own.  It reads params as they are when it is called.
  bits: mean loss of a scored place.  micro: share of the places right.  macro: its mean over the labels that occur.
  exact: share of the examples with all places right.  answer, for tasks in bytes: that of the answers that count."""
  def read(x, y):
    logits = predictions(params, cfg, x)[0]
    return logits.argmax(-1).cast("int32").realize(), atlas.token_losses(logits, y).realize()
  compiled: dict[int, Callable] = {}
  speak = speaker(params, cfg) if task.is_bytes else None
  def score(tokens, settings):
    length = task.batch(1, 0, 0, **settings)[0].shape[1]
    count = -(-max(32, tokens // length) // rows)
    predict = compiled.setdefault(length, TinyJit(read))
    batches, answers = list[tuple](), list[bool]()
    for i in tqdm(range(count), desc="held out", unit="batch", leave=False, disable=count < 4):
      x, y = task.batch(rows, seed, data.HELD_OUT + i, **settings)
      likeliest, losses = [z.numpy() for z in predict(Tensor(x), Tensor(y))]
      right, scored = likeliest == y, y >= 0
      batches.append((losses[scored] / math.log(2), right[scored], y[scored], (right | ~scored).all(1)))
      if speak: answers += answered(speak, task, x, y)
    bits, micro, labels, exact = map(np.concatenate, zip(*batches))
    macro = np.mean([micro[labels == label].mean() for label in np.unique(labels)])
    scores = {"bits": bits.mean(dtype=np.float64), "micro": micro.mean(), "macro": macro, "exact": exact.mean()}
    if speak: scores["answer"] = np.mean(answers)
    return {name: float(x) for name, x in scores.items()}
  return score
def answered(speak:Callable, task:data.Task, x:np.ndarray, y:np.ndarray) -> list[bool]:
  """Which rows of a task in bytes are answered right, if the model generates its answer to the prompt."""
  prompts = x[:, :data.prompt_length(y)]
  targets = [bytes(labels[labels >= 0].tolist()).decode().strip() for labels in y]
  texts = speak(prompts, ANSWER_TOKENS)
  return [judged(task, bytes(prompt.tolist()), text, target) for prompt, text, target in zip(prompts, texts, targets)]
def judged(task:data.Task, prompt:bytes, text:str, target:str) -> bool:
  """Whether an answer counts.  niah: it contains the value.  babi: of the labels that the question does not name, it
  names the target and no other."""
  if task.name == "niah": return target.lower() in text.lower()
  question = prompt.split(b"\n")[-1].decode()
  return {w for w in data.BABI_LABELS[task.settings["question"]] if w in text and w not in question} == {target}

def table(score:Callable, task:data.Task, tokens:int) -> list[dict]:
  """Prints and returns the scores (see scorer) of every variant of the task."""
  rows: list[dict] = []
  for settings in task.variants():
    name = ",".join(f"{n}={x}" for n, x in settings.items()) or "as given"
    scores = {n: f"{x:.4f}" for n, x in score(tokens, settings).items()}
    if not rows: print(f"{'setting':>24s}" + "".join(f"{n:>9s}" for n in scores))
    print(f"{name:>24s}" + "".join(f"{x:>9s}" for x in scores.values()), flush=True)
    rows.append({"setting": name} | scores)
  return rows
def unit(source:data.Text|data.Task) -> str:
  if isinstance(source, data.Task): return "label"
  return "byte" if source.is_bytes else "token"

class HeldOut:
  """A text's last part, or a task's held-out examples.  What the last validation gave: bits, the mean loss at each
  position of a text, or of a task; right, a task's micro."""
  def __init__(self, params:dict, cfg:atlas.Config, source:data.Text|data.Task, rows:int, length:int, seed:int):
    self.source, self.bits, self.right = source, np.zeros(0), 0.0
    if isinstance(source, data.Task): self.score = scorer(params, cfg, source, rows, seed)
    else: self.curve = evaluator(params, cfg, source.val, rows, length)

  def validate(self, step:int) -> None:
    """Sets bits and right; prints a task's scores."""
    if isinstance(self.source, data.Text): self.bits = self.curve(VALIDATION_TOKENS)
    else:
      scores = self.score(VALIDATION_TOKENS // 4, {})
      self.bits, self.right = np.array([scores["bits"]]), scores["micro"]
      tqdm.write(f"step {step}: held-out examples: " + ", ".join(f"{name} {x:.3f}" for name, x in scores.items()))

  def report(self, folder:Path, step:int, tokens:int) -> None:
    """Prints what the trained model is worth, and writes it into the run's folder, as mode=plot reads it."""
    if isinstance(self.source, data.Task):
      rows = table(self.score, self.source, tokens or VALIDATION_TOKENS)
      write_rows(folder / "accuracy.csv", rows[0], [row.values() for row in rows])
    elif len(self.bits):
      write_positions(folder, self.bits)
      name, alone = unit(self.source), data.entropy(self.source.val)
      print(f"step {step}: validation {self.bits.mean():.3f} bits per {name}; "
            f"each {name}'s frequency alone would give {alone:.3f}")
      print("by position in the context: " + ", ".join(f"{name} {bits:.3f}" for name, bits in quarters(self.bits)))

# *** output ***
class Output:
  """A stream for text that shows other characters than its encoding has as \\x.., and nothing once nobody reads it."""
  def __init__(self, stream:Any): self.stream, self.open = stream, stream is not None

  def write(self, text:str) -> int:
    encoding = getattr(self.stream, "encoding", None) or "utf-8"
    self.attempt(lambda: self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding)))
    return len(text)

  def flush(self) -> None: self.attempt(lambda: self.stream.flush())

  def attempt(self, use:Callable) -> None:
    try:
      if self.open: use()
    except (OSError, ValueError):                          # a closed pipe or terminal; ValueError: a closed file
      self.open = False
      with contextlib.suppress(OSError, ValueError):       # else Python would report it once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

  def __getattr__(self, name:str) -> Any: return getattr(self.stream, name)

@contextlib.contextmanager
def shown() -> Iterator[None]:
  """Standard output and error as `Output`."""
  with contextlib.redirect_stdout(Output(sys.stdout)) as out, contextlib.redirect_stderr(Output(sys.stderr)) as err:
    try: yield
    finally:
      for stream in (out, err): stream.flush()

# *** sampling ***
def prompt_ids(prompt:str, cfg:atlas.Config, is_bytes:bool) -> list[int]:
  """The tokens of prompt=, of the file in prompt=@FILE (@@ begins a text with @), or of a default that the vocabulary
  has.  ValueError for a file that cannot be read, or a token outside the vocabulary."""
  default = "0"
  if is_bytes: default = "def " if cfg.vocab > ord("f") else "\0"
  if prompt[:1] != "@" or prompt[:2] == "@@":
    return data.encode(prompt.removeprefix("@") or default, is_bytes, cfg.vocab)
  try: content = Path(os.path.expanduser(prompt[1:])).read_bytes()
  except OSError as e:
    raise ValueError(f"prompt={prompt} cannot be read ({e.strerror}): name a file; text begins with @@") from None
  data.refuse(not content, f"prompt={prompt} is empty: name a file with text in it")
  if not is_bytes: return data.encode(content.decode(errors="replace").strip(), is_bytes, cfg.vocab)
  highest = max(content)
  data.refuse(highest >= cfg.vocab, f"prompt={prompt} has token {highest}, outside vocab={cfg.vocab}: name another")
  return list(content)

def token_step(cfg:atlas.Config, forward:Callable) -> Callable:
  """forward(token (B,1), state) -> results, state, jitted for every capacity of the caches that it meets, but not at
  the stream's start, nor for the step that fills a cache, which doubles it."""
  compiled: dict[int|None, Callable] = {}
  def step(token, state):
    room = state and atlas.room(cfg, state)
    grows = state is None or room is not None and kernels.read_position(state) == room
    return (TinyJit(forward) if grows else compiled.setdefault(room, TinyJit(forward)))(token, state)
  return step
def aligned(cfg:atlas.Config) -> int:
  """The number of tokens after which a chunk and a segment end together."""
  return math.lcm(cfg.chunk, cfg.attn_window if cfg.mixer == "mac" else 1)
def reader(params:dict, cfg:atlas.Config, step:Callable) -> Callable[[np.ndarray], tuple[Tensor, dict]]:
  """A function of tokens (B,P) -> logits of its last call and the state after the tokens.  One compiled call reads
  whole chunks (segments), and `step` (see token_step) the rest, so that memory does not grow with P.  If caches grow,
  one call reads all tokens, compiled anew for every length."""
  def forward(x, state=None): return atlas.forward(params, cfg, x, state)
  piece, first, more = aligned(cfg), TinyJit(forward), TinyJit(forward)
  def copied(logits, state): return logits, {n: z.clone().realize() for n, z in state.items()}
  def read(x):
    length = x.shape[1]
    ends = [length] if atlas.growing(cfg) else list(range(piece, length + 1, piece)) or [1]
    def part(start, end): return Tensor(np.ascontiguousarray(x[:, start:end], dtype=np.int32))
    logits, state = copied(*(first if ends[0] == piece else forward)(part(0, ends[0])))
    for start, end in zip(ends, ends[1:]): logits, state = copied(*more(part(start, end), state))
    for i in range(ends[-1], length): logits, state = step(part(i, i + 1), state)
    return logits, state
  return read

def speaker(params:dict, cfg:atlas.Config) -> Callable[[np.ndarray, int], list[str]]:
  """A function of prompts (B,P) of bytes and n -> the likeliest continuations, up to a newline or n bytes."""
  step = token_step(cfg, functools.partial(atlas.forward, params, cfg))
  read = reader(params, cfg, step)
  def speak(prompts, n):
    logits, state = read(prompts)
    text = np.zeros((len(prompts), 0), np.int32)
    for _ in range(n):
      token = logits[:, -1, :256].argmax(-1).numpy().astype(np.int32)[:, None]
      text = np.concatenate([text, token], axis=1)
      if (text == ord("\n")).any(1).all(): break
      logits, state = step(Tensor(token), state)
    return [bytes(row.tolist()).split(b"\n")[0].decode(errors="replace") for row in text]
  return speak
def drawn(scores:np.ndarray, temperature:float, top_k:int, rng:np.random.Generator) -> int:
  """A token drawn from the softmax of scores / temperature over the top_k largest (0: all); at 0 the likeliest."""
  if temperature == 0: return int(scores.argmax())
  scores = (scores.astype(np.float64) - scores.max()) / temperature
  if 0 < top_k < len(scores): scores[scores < np.sort(scores)[-top_k]] = -np.inf
  return int(rng.choice(len(scores), p=np.exp(scores) / np.exp(scores).sum()))

def sample(params:dict, cfg:atlas.Config, prompt_ids:list[int], is_bytes:bool, tokens:int=200, temperature:float=0.8,
           top_k:int=40, seed:int=0) -> None:
  """Prints a continuation of the prompt.  Memory grows with its length only where the state's caches do."""
  rng, seconds = np.random.default_rng(seed), list[float]()
  known = min(256, cfg.vocab) if is_bytes else cfg.vocab           # a vocabulary may be larger than there are bytes
  decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")      # keeps the bytes of an incomplete character
  def show(ids, separator=","):
    print(decoder.decode(bytes(ids)) if is_bytes else separator + ",".join(map(str, ids)), end="", flush=True)
  print(f"--- sample, temperature {temperature}, seed {seed} ---")
  step = token_step(cfg, functools.partial(atlas.forward, params, cfg))
  logits, state = reader(params, cfg, step)(np.array([prompt_ids]))
  scores = logits[0, -1, :known].numpy()
  show(prompt_ids, "")
  for _ in range(tokens):
    if not getattr(sys.stdout, "open", True): break        # nobody reads on
    token = drawn(scores, temperature, top_k, rng)
    show([token])
    tick = time.perf_counter()
    logits, state = step(Tensor([[token]]), state)
    scores = logits[0, -1, :known].numpy()
    seconds.append(time.perf_counter() - tick)
  speed = f"{1 / np.median(seconds[3:]):.0f} tokens/s" if len(seconds) > 3 else "too short to time"
  print(f"\n--- {len(seconds)} tokens, {speed} ---")

# *** files for evaluation: text, and lines of questions ***
def positions(params:dict, cfg:atlas.Config, text:data.Text, start_path:Path, batch:int, length:int,
              tokens:int=0) -> None:
  """Prints the validation loss by position in the context, and beyond the trained length where the text is long enough;
  writes positions.csv beside the checkpoint start_path."""
  reach = min(2 * length, len(text.val) - 1)
  read = max(1, min(tokens or VALIDATION_TOKENS, len(text.val) - 1) // reach) * reach
  curve = evaluator(params, cfg, text.val, batch, reach)(tokens or VALIDATION_TOKENS)
  trained, beyond, name = curve[:length], curve[length:], unit(text)
  print(f"{text.name}: {read:,} of {len(text.val):,} {name}s read, in windows of {reach}")
  print(f"{start_path}: validation loss {trained.mean() * math.log(2):.4f} nats, {trained.mean():.4f} bits per {name}")
  for quarter, bits in quarters(trained): print(f"  {quarter} of {min(length, reach)}: {bits:.4f}")
  if len(beyond): print(f"  beyond, to {reach}: {beyond.mean():.4f}")
  write_positions(start_path.parent, curve)

def likelihoods(params:dict, cfg:atlas.Config, rows:list[tuple[bytes, bytes]], batch:int) -> list[tuple[float, bool]]:
  """(context, continuation) -> log-likelihood of the continuation in nats, and whether it is the likeliest one, byte by
  byte.  Rows are padded at their end to powers of two, which does not change a causal model's values, and read in
  pieces of PIECE tokens or a little more, so that memory grows with a row only where caches do."""
  piece = 1 << 62 if atlas.growing(cfg) else -(-PIECE // aligned(cfg)) * aligned(cfg)
  def measured(x, y, state=None):
    logits, after = atlas.forward(params, cfg, x, state)
    likeliest = ((logits.argmax(-1) == y) | (y < 0)).min(1)
    return atlas.token_losses(logits, y).sum(1).realize(), likeliest.realize(), after
  first, more = TinyJit(measured), TinyJit(measured)
  rows = [(context or b"\n", continuation) for context, continuation in rows]
  sizes = [max(64, 1 << (len(b"".join(row)) - 2).bit_length()) for row in rows]
  sizes = [size if size <= piece else -(-size // piece) * piece for size in sizes]
  nats, greedy = np.zeros(len(rows)), np.ones(len(rows), bool)
  with tqdm(total=len(rows), desc="reading", unit="row", leave=False) as bar:
    for size in sorted(set(sizes)):
      alike = [i for i, s in enumerate(sizes) if s == size]
      for jit in (first, more): jit.reset()                # one shape at a time
      for at in range(0, len(alike), batch):
        some = alike[at:at + batch]
        x, y = np.zeros((batch, size), np.int32), np.full((batch, size), -100, np.int32)
        for row, i in enumerate(some):
          ids, start = np.frombuffer(b"".join(rows[i]), np.uint8), len(rows[i][0])
          x[row, :len(ids) - 1] = ids[:-1]
          y[row, start - 1:len(ids) - 1] = ids[start:]
        state: dict[str, Tensor] = {}
        for here in range(0, size, piece):
          part = [Tensor(np.ascontiguousarray(z[:, here:here + piece])) for z in (x, y)]
          lost, likeliest, after = more(*part, state) if here else first(*part)
          nats[some] -= lost.numpy()[:len(some)]
          greedy[some] &= likeliest.numpy()[:len(some)].astype(bool)
          state = {n: z.clone().realize() for n, z in after.items()}       # the next call may write over these
        bar.update(len(some))
  return list(zip(nats.tolist(), greedy.tolist()))

# *** question files ***
def _are_texts(x:Any, least:int=1) -> bool:
  return isinstance(x, list) and len(x) >= least and all(isinstance(text, str) and text.strip() for text in x)
def _kind(row:Any) -> str:
  """The kind of a line: choice, recall or last.  ValueError says what is wrong with it."""
  data.refuse(not isinstance(row, dict), "is not an object")
  has_context = isinstance(row.get("context"), str)
  if "choices" in row:
    choices, answer = row["choices"], row.get("answer")
    data.refuse(not has_context or not _are_texts([row.get("suffix", "x")]), "context (or suffix) is not text")
    data.refuse(not _are_texts(choices, 2), "choices is no list of texts")
    number = choices.index(answer) if answer in choices else answer
    has_answer = type(number) is int and 0 <= number < len(choices)
    data.refuse(not has_answer, "answer is neither one of the choices nor the number of one, from 0")
    return "choice"
  if "question" in row:
    data.refuse(not has_context or not _are_texts([row["question"]]), "context or question is not text")
    data.refuse(not _are_texts(row.get("answers")), "answers is not a list of texts")
    return "recall"
  is_text = isinstance(row.get("text"), str) and len(row["text"].split()) > 1
  data.refuse(not is_text, "has neither choices, nor question, nor a text of two words or more")
  return "last"

def json_lines(path:Path, skip_bad:bool=False) -> tuple[list[tuple[str, dict]], int]:
  """(kind, line) of every line that is not blank, and how many bad ones were skipped.  ValueError for the first one."""
  rows, skipped = list[tuple[str, dict]](), 0
  try: lines = path.read_bytes().split(b"\n")
  except OSError as e: raise ValueError(f"data={path} cannot be read ({e.strerror}): give another path") from None
  for n, line in enumerate(lines, 1):
    if not line.strip(): continue
    try:
      try: json.dumps(row := json.loads(line), ensure_ascii=False).encode()      # "\ud800" is JSON, and no text
      except (ValueError, RecursionError): raise ValueError("is not JSON in UTF-8") from None
      rows.append((_kind(row), row))
    except ValueError as e:
      data.refuse(not skip_bad, f"data={path}, line {n} {e}: mend it, or leave such lines out with skip_bad=1")
      skipped += 1
  data.refuse(not rows, f"data={path} has no line to evaluate: give one with context, choices and answer, for example")
  return rows, skipped

def evaluate_lines(params:dict, cfg:atlas.Config, lines:list[tuple[str, dict]], skipped:int, batch:int) -> None:
  """Prints the scores of a .jsonl file, by the kinds of its lines (see json_lines)."""
  if skipped: print(f"{skipped} malformed lines left out")
  choice, recall, last = [[row for kind, row in lines if kind == name] for name in ("choice", "recall", "last")]
  if choice: multiple_choice(params, cfg, choice, batch)
  if recall: answers(params, cfg, recall)
  if last: last_words(params, cfg, last, batch)
def multiple_choice(params:dict, cfg:atlas.Config, lines:list[dict], batch:int) -> None:
  """acc: the answer is the likeliest continuation.  acc_norm: it is the likeliest one per character."""
  rows, sizes = list[tuple[bytes, bytes]](), list[int]()
  for line in lines:
    context = line["context"].rstrip()                     # blanks at its end belong to what follows
    gap = line["context"][len(context):] or (" " if context else "")
    for choice in [z.strip() for z in line["choices"]]:
      before, scored = (context + gap + choice, line["suffix"]) if "suffix" in line else (context, gap + choice)
      rows.append((before.encode(), scored.encode()))
      sizes.append(len(scored.strip()))
  ends, hits = np.cumsum([len(line["choices"]) for line in lines]), list[tuple[bool, bool]]()
  scores = np.array([[nats for nats, _ in likelihoods(params, cfg, rows, batch)], sizes])
  for line, (nats, size) in zip(lines, np.split(scores, ends, axis=1)):
    answer = line["choices"].index(line["answer"]) if isinstance(line["answer"], str) else line["answer"]
    hits.append((nats.argmax() == answer, (nats / size).argmax() == answer))
  acc, acc_norm = np.mean(hits, axis=0)
  print(f"multiple choice: {len(lines)} lines, acc {acc:.4f}, acc_norm {acc_norm:.4f}")
def answers(params:dict, cfg:atlas.Config, lines:list[dict]) -> None:
  """Recall: one of the answers is contained in what the model generates after context and question."""
  speak, right = speaker(params, cfg), 0
  for line in tqdm(lines, desc="answering", unit="line", leave=False):
    prompt = "\n".join(z for z in (line["context"], line["question"]) if z) + " "
    text = speak(np.frombuffer(prompt.encode(), np.uint8)[None], ANSWER_TOKENS)[0].lower()
    right += any(z.strip().lower() in text for z in line["answers"])
  print(f"recall: {len(lines)} lines, contains {right / len(lines):.4f}")
def last_words(params:dict, cfg:atlas.Config, lines:list[dict], batch:int) -> None:
  """acc: all bytes of a text's last word are the likeliest ones.  perplexity: that of the word."""
  rows: list[tuple[bytes, bytes]] = []
  for line in lines:
    text = line["text"].rstrip()
    context = text[:-len(text.split()[-1])].rstrip()
    rows.append((context.encode(), text[len(context):].encode()))
  scores = likelihoods(params, cfg, rows, batch)
  perplexity = np.exp(-np.mean([nats for nats, _ in scores]))
  print(f"last word: {len(lines)} lines, acc {np.mean([hit for _, hit in scores]):.4f}, perplexity {perplexity:.4g}")

# *** tables and pictures of a run ***
def write_rows(path:Path, names:Iterable[str], rows:Iterable[Iterable]) -> None:
  """A .csv file, whole or not at all."""
  temporary = path.with_suffix(".tmp")
  with temporary.open("w", newline="") as file: csv.writer(file).writerows([names, *rows])
  temporary.replace(path)
def write_positions(folder:Path, curve:np.ndarray) -> None:
  write_rows(folder / "positions.csv", ("position", "bits"), [(i + 1, f"{x:.6f}") for i, x in enumerate(curve)])
def column(path:Path, x:str, y:str, kind:type=int) -> list[tuple[Any, float]]:
  """Two columns of a .csv file, without the rows in which y is empty; none where there is no file."""
  try: return [(kind(row[x]), float(row[y])) for row in csv.DictReader(path.read_text().splitlines()) if row[y]]
  except FileNotFoundError: return []
  except (KeyError, TypeError, ValueError, csv.Error):
    raise ValueError(f"{path} is damaged: move it away, or train anew") from None
def curves(out:Path) -> tuple[list, list, list, list]:
  """What there is to draw, in pairs: step and bits, step and held-out bits, position and bits, setting and accuracy."""
  log = [(step, nats / math.log(2)) for step, nats in column(out / "log.csv", "step", "loss")]
  return (log, column(out / "log.csv", "step", "val_bpb"), column(out / "positions.csv", "position", "bits"),
          column(out / "accuracy.csv", "setting", "micro", str))
def check_plot(out:Path) -> None:
  """Raises ValueError unless there is something to draw, and matplotlib to draw it with."""
  log, advice = curves(out)[0], "train first, or name the folder of a run"
  data.refuse(not log, f"out={out} has no log.csv to draw, or no step in it: {advice}")
  try: import matplotlib  # noqa: F401
  except ImportError:
    raise ValueError("mode=plot draws with matplotlib: pip install '.[plot]' (or pip install matplotlib)") from None

def smooth(points:list, parts:int) -> tuple[np.ndarray, np.ndarray, int]:
  """Running means over one part of the points: the last x of each, the means, and the number of points in one."""
  (x, y), width = np.array(points, float).T, max(1, len(points) // parts)
  return x[width - 1:], np.convolve(y, np.ones(width) / width, "valid"), width
def plot(out:Path) -> None:
  """Draws out/log.csv: loss and validation against steps; beside it the loss by position in the context, or the
  accuracy of a task in every setting it was evaluated at.  Writes out/log.png."""
  import matplotlib.pyplot as plt
  log, validations, by_position, accuracy = curves(out)
  panels = 2 if by_position or accuracy else 1
  figure, axes = plt.subplots(1, panels, figsize=(1 + 4 * panels, 3.4), layout="constrained", squeeze=False)
  left, right = axes[0, 0], axes[0, -1]
  steps, bits, width = smooth(log, 20)
  left.plot(*zip(*log), color="C0", alpha=0.3, linewidth=0.8)
  left.plot(steps, bits, color="C0", label=f"training, mean of {width}")
  if validations: left.plot(*zip(*validations), "o-", color="C1", label="held out")
  left.set(xlabel="step", ylabel="bits per token" if by_position else "bits", title=out.name)
  left.legend(frameon=False, fontsize=8)
  if by_position:
    places, bits, width = smooth(by_position, 16)
    right.plot(places, bits, color="C2")
    right.set(xlabel="position in the context", ylabel="bits", title=f"held-out loss by position, mean of {width}")
  elif accuracy:
    right.barh(*zip(*accuracy), color="C2")
    right.set(xlabel="share of scored places right", xlim=(0, 1), title="held-out examples")
    right.invert_yaxis()
  figure.savefig(out / "log.png", dpi=110)
  print(f"written to {out / 'log.png'}")
