"""What a trained model is worth: sampling, loss by position, scores of tasks, question files, pictures of a run."""
from __future__ import annotations
import codecs, csv, math, time
from pathlib import Path
from typing import Callable, Iterable, cast
import numpy as np
from tinygrad import Tensor, TinyJit
from tqdm import tqdm
import atlas, data, kernels

VALIDATION_TOKENS = 65_536
ANSWER_TOKENS = 48            # longest answer that is generated in evaluation

def predictions(params:dict, cfg:atlas.Config, x:Tensor) -> tuple[Tensor, Tensor]:
  """Logits (B,T,vocab) for the labels of x, and the mean memory step.  For task=compression they are said by a decoder, an MLP that is given the
  model's state at the last token and a position (MAD)."""
  h, _, eta = atlas.hidden(params, cfg, x)
  if near := params.get("decoder"):
    z = (h[:, -1:] + near["position"]).contiguous()
    gate, value = atlas.linear(cfg, z, near["in"]).contiguous().chunk(2, dim=-1)
    h = z + atlas.linear(cfg, gate.silu() * value, near["out"])
  return atlas.linear(cfg, h, params["embed"]).float(), eta

# *** validation ***

def evaluator(params:dict, cfg:atlas.Config, tokens:np.ndarray, batch:int, length:int) -> Callable[[int], np.ndarray]:
  """A function of the number of tokens to read -> mean loss in bits per token at each position of the context, (length,).  It reads params as they
  are when it is called, and is compiled once."""
  @TinyJit
  def losses(x:Tensor, y:Tensor) -> Tensor: return atlas.token_losses(atlas.forward(params, cfg, x)[0], y).realize()
  def evaluate(total:int) -> np.ndarray:
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

def scorer(params:dict, cfg:atlas.Config, task:data.Task, rows:int, seed:int) -> Callable[[int, dict], dict[str, float]]:
  """A function of tokens and other settings -> what the model makes of a task's held-out examples, about `tokens` tokens of them and at least 32,
  with the other settings in place of its own.  It reads params as they are when it is called, and is compiled once for every length.
  bits: mean loss of a scored place; micro: share of the places right; macro: its mean over the labels that occur; exact: share of the examples
  with all places right; answer, for tasks in bytes: share of the answers that count, spoken freely (see judged)."""
  def say(x:Tensor, y:Tensor) -> tuple[Tensor, Tensor]:
    logits = predictions(params, cfg, x)[0]
    return logits.argmax(-1).cast("int32").realize(), atlas.token_losses(logits, y).realize()
  jits:dict[int, Callable] = {}
  speak = speaker(params, cfg) if task.is_bytes else None
  def score(tokens:int, other:dict) -> dict[str, float]:
    hits, whole, bits, labels, answers = cast(tuple[list, ...], tuple([] for _ in range(5)))
    length = task.batch(1, 0, 0, **other)[0].shape[1]
    count, read = -(-max(32, tokens // length) // rows), jits.setdefault(length, TinyJit(say))
    for i in tqdm(range(count), desc="held out", unit="batch", leave=False, disable=count < 4):
      x, y = task.batch(rows, seed, data.HELD_OUT + i, **other)
      said, lost = [z.numpy() for z in read(Tensor(x), Tensor(y))]
      scored, right = y >= 0, said == y
      for to, z in ((hits, right[scored]), (labels, y[scored]), (bits, lost[scored] / math.log(2)), (whole, (right | ~scored).all(1))): to.append(z)
      if not speak: continue
      prompts = x[:, :data.prompt_length(y)]
      for prompt, text, label in zip(prompts, speak(prompts, ANSWER_TOKENS), y):
        answers.append(judged(task, bytes(prompt.tolist()), text, bytes(label[label >= 0].tolist()).decode().strip()))
    right, of = np.concatenate(hits), np.concatenate(labels)
    macro = np.mean([right[of == label].mean() for label in np.unique(of)])
    found = dict(bits=np.concatenate(bits).mean(dtype=np.float64), micro=right.mean(), macro=macro, exact=np.concatenate(whole).mean())
    return {n: float(z) for n, z in (found | (dict(answer=np.mean(answers)) if speak else {})).items()}
  return score

def judged(task:data.Task, prompt:bytes, text:str, target:str) -> bool:
  """Whether an answer counts: niah, it contains the value; babi, of the labels that the question does not name it names the target alone."""
  if task.name == "niah": return target.lower() in text.lower()
  question = prompt.split(b"\n")[-1].decode()
  return {w for w in data.BABI_LABELS[task.settings["question"]] if w in text and w not in question} == {target}

def table(score:Callable, task:data.Task, tokens:int) -> list[dict]:
  """Prints and returns what `scorer` finds for every variant of the task."""
  found:list[dict] = []
  for other in task.variants():
    name = ",".join(f"{n}={x}" for n, x in other.items()) or "as given"
    row = {"setting": name} | {n: f"{x:.4f}" for n, x in score(tokens, other).items()}
    if not found: print("".join(f"{n:>24s}" if n == "setting" else f"{n:>9s}" for n in row))
    print("".join(f"{x:>24s}" if n == "setting" else f"{x:>9s}" for n, x in row.items()), flush=True)
    found.append(row)
  return found

def write_rows(path:Path, names:Iterable[str], rows:Iterable[Iterable]) -> None:
  """A .csv file, whole or not at all."""
  with path.with_suffix(".tmp").open("w", newline="") as file: csv.writer(file).writerows([names, *rows])
  path.with_suffix(".tmp").replace(path)

def write_table(folder:Path, found:list[dict]) -> None:
  """A task's accuracy in every setting, as mode=plot reads it."""
  write_rows(folder / "accuracy.csv", found[0], [row.values() for row in found])

def write_positions(folder:Path, curve:np.ndarray) -> None:
  """The loss by position in the context, as mode=plot reads it."""
  write_rows(folder / "positions.csv", ("position", "bits"), [(i + 1, f"{x:.6f}") for i, x in enumerate(curve)])

# *** sampling ***

def prompt_ids(prompt:str, cfg:atlas.Config, is_bytes:bool) -> list[int]:
  default = "def " if is_bytes and cfg.vocab > ord("f") else "\0" if is_bytes else "0"
  return data.encode(prompt or default, is_bytes, cfg.vocab)

def token_step(params:dict, cfg:atlas.Config) -> Callable:
  """token (B,1), state -> logits, state; jitted for every capacity of the caches that it meets.  The step that fills one is not, and doubles it."""
  jits:dict = {}
  def step(token:Tensor, state:dict) -> tuple[Tensor, dict]:
    room = atlas.room(cfg, state)
    if room is not None and kernels.read_position(state) == room:
      logits, state = atlas.forward(params, cfg, token, state)
      Tensor.realize(logits, *state.values())
      return logits, state
    return jits.setdefault(room, TinyJit(lambda token, state: atlas.forward(params, cfg, token, state)))(token, state)
  return step

def reader(params:dict, cfg:atlas.Config, step:Callable) -> Callable[[np.ndarray], tuple[Tensor, dict]]:
  """tokens (B,P) -> logits of the last call and the state after them.  They are read in whole chunks (segments) by one compiled call, the rest one by
  one by `step` (see token_step), so that memory does not grow with P; where caches grow, in one call, compiled anew for every length."""
  piece = math.lcm(cfg.chunk, cfg.attn_window if cfg.mixer == "mac" else 1)
  first, more = TinyJit(lambda x: atlas.forward(params, cfg, x)), TinyJit(lambda x, state: atlas.forward(params, cfg, x, state))
  def own(logits, state): return logits, {n: z.clone().realize() for n, z in state.items()}          # a jitted call may write over what it returned
  def read(x:np.ndarray) -> tuple[Tensor, dict]:
    ends = [x.shape[1]] if atlas.growing(cfg) else [*range(piece, x.shape[1] + 1, piece)] or [1]
    def part(at, to): return Tensor(np.ascontiguousarray(x[:, at:to], dtype=np.int32))
    logits, state = own(*(first(part(0, piece)) if ends[0] == piece else atlas.forward(params, cfg, part(0, ends[0]))))
    for at, to in zip(ends, ends[1:]): logits, state = own(*more(part(at, to), state))
    for i in range(ends[-1], x.shape[1]): logits, state = step(part(i, i + 1), state)
    return logits, state
  return read

def speaker(params:dict, cfg:atlas.Config) -> Callable[[np.ndarray, int], list[str]]:
  """prompts (B,P) of bytes, n -> what the model says next, likeliest byte by byte, up to a newline and n bytes at most."""
  read = reader(params, cfg, step := token_step(params, cfg))
  def say(prompts:np.ndarray, n:int) -> list[str]:
    (logits, state), said = read(prompts), np.zeros((len(prompts), 0), np.int32)
    for _ in range(n):
      token = logits[:, -1, :256].argmax(-1).numpy().astype(np.int32)[:, None]
      said = np.concatenate([said, token], axis=1)
      if (said == ord("\n")).any(1).all(): break
      logits, state = step(Tensor(token), state)
    return [bytes(row.tolist()).split(b"\n")[0].decode(errors="replace") for row in said]
  return say

def sample(params:dict, cfg:atlas.Config, prompt:list[int], is_bytes:bool, tokens:int=200, temperature:float=0.8, top_k:int=40,
           seed:int=0) -> None:
  """Prints a continuation of the prompt (token ids).  The state streams: memory does not grow with the length, but for full attention's keys."""
  rng, ids = np.random.default_rng(seed), prompt
  known = min(256, cfg.vocab) if is_bytes else cfg.vocab    # a vocabulary may be larger than there are bytes
  text = codecs.getincrementaldecoder("utf-8")(errors="replace")           # holds back the bytes of a character that is not complete yet
  def show(new, comma=","): print(text.decode(bytes(new)) if is_bytes else comma + ",".join(map(str, new)), end="", flush=True)
  print(f"--- sample, temperature {temperature}, seed {seed} ---")
  step, times = token_step(params, cfg), cast(list[float], [])
  logits, state = reader(params, cfg, step)(np.array([ids]))
  scores = logits[0, -1, :known].numpy()
  show(ids, "")
  for _ in range(tokens):
    if temperature == 0: token = int(scores.argmax())
    else:
      scores = (scores.astype(np.float64) - scores.max()) / temperature
      if 0 < top_k < len(scores): scores[scores < np.sort(scores)[-top_k]] = -np.inf
      token = int(rng.choice(len(scores), p=np.exp(scores) / np.exp(scores).sum()))
    show([token])
    tick = time.perf_counter()
    logits, state = step(Tensor([[token]]), state)
    scores = logits[0, -1, :known].numpy()
    times.append(time.perf_counter() - tick)
  speed = f"{1 / np.median(times[3:]):.0f} tokens/s" if len(times) > 3 else "too short to time"
  print(f"\n--- {len(times)} tokens, {speed} ---")

def positions(params:dict, cfg:atlas.Config, text:data.Text, start:Path, batch:int, length:int, tokens:int=0) -> None:
  """Prints the validation loss by position in the context, and beyond the trained length where the text is long enough; and writes positions.csv."""
  reach = min(2 * length, len(text.val) - 1)
  curve = evaluator(params, cfg, text.val, batch, reach)(tokens or VALIDATION_TOKENS)
  trained, beyond, unit = curve[:length], curve[length:], "byte" if text.is_bytes else "token"
  print(f"{start}: validation loss {trained.mean() * math.log(2):.4f} nats, {trained.mean():.4f} bits per {unit}")
  for name, bits in quarters(trained): print(f"  {name} of {length}: {bits:.4f}")
  if len(beyond): print(f"  beyond, to {reach}: {beyond.mean():.4f}")
  write_positions(start.parent, curve)

def likelihoods(params:dict, cfg:atlas.Config, rows:list[tuple[bytes, bytes]], batch:int) -> list[tuple[float, bool]]:
  """(context, continuation) -> log-likelihood of the continuation after the context in nats, and whether each of its bytes is the likeliest one.
  Rows are filled up to powers of two, which a causal model does not notice."""
  @TinyJit
  def read(x:Tensor, y:Tensor) -> tuple[Tensor, Tensor]:
    logits = atlas.forward(params, cfg, x)[0]
    return atlas.token_losses(logits, y).sum(1).realize(), ((logits.argmax(-1) == y) | (y < 0)).min(1).realize()
  rows, found = [(context or b"\n", more) for context, more in rows], [(0.0, False)] * len(rows)
  sizes = [max(64, 1 << (len(context + more) - 2).bit_length()) for context, more in rows]
  with tqdm(total=len(rows), desc="reading", unit="row", leave=False) as bar:
    for size in sorted(set(sizes)):
      mine = [i for i, s in enumerate(sizes) if s == size]
      read.reset()                                         # one shape at a time
      for at in range(0, len(mine), batch):
        x, y = np.zeros((batch, size), np.int32), np.full((batch, size), -100, np.int32)
        for row, i in enumerate(mine[at:at + batch]):
          ids, start = np.frombuffer(b"".join(rows[i]), np.uint8), len(rows[i][0]) - 1
          x[row, :len(ids) - 1], y[row, start:len(ids) - 1] = ids[:-1], ids[start + 1:]
        lost, likeliest = [z.numpy() for z in read(Tensor(x), Tensor(y))]
        for row, i in enumerate(mine[at:at + batch]): found[i] = -float(lost[row]), bool(likeliest[row])
        bar.update(min(batch, len(mine) - at))
  return found

def evaluate_lines(params:dict, cfg:atlas.Config, lines:list[tuple[str, dict]], skipped:int, batch:int) -> None:
  """Prints what the model makes of a .jsonl file: multiple choice (acc: the likeliest continuation; acc_norm: the likeliest per character), recall
  (an answer is contained in what the model says after context and question), the last word (all its bytes greedy; perplexity of the word)."""
  if skipped: print(f"{skipped} malformed lines left out")
  if chosen := [row for kind, row in lines if kind == "choice"]:
    rows, sizes = [], []
    for row in chosen:
      context = row["context"].rstrip()                  # blanks at its end belong to what follows
      gap = row["context"][len(context):] or (" " if context else "")
      for choice in [z.strip() for z in row["choices"]]:
        before, scored = (context + gap + choice, row["suffix"]) if "suffix" in row else (context, gap + choice)
        rows.append((before.encode(), scored.encode()))
        sizes.append(len(scored.strip()))
    sums, at, hits = [z for z, _ in likelihoods(params, cfg, rows, batch)], 0, []
    for row in chosen:
      n = len(row["choices"])
      answer = row["choices"].index(row["answer"]) if isinstance(row["answer"], str) else row["answer"]
      mine = np.array(sums[at:at + n])
      hits.append((mine.argmax() == answer, (mine / sizes[at:at + n]).argmax() == answer))
      at += n
    print(f"multiple choice: {len(chosen)} lines, acc {np.mean([a for a, _ in hits]):.4f}, acc_norm {np.mean([b for _, b in hits]):.4f}")
  if asked := [row for kind, row in lines if kind == "recall"]:
    say, right = speaker(params, cfg), 0
    for row in tqdm(asked, desc="answering", unit="line", leave=False):
      prompt = "\n".join(z for z in (row["context"], row["question"]) if z) + " "
      text = say(np.frombuffer(prompt.encode(), np.uint8)[None], ANSWER_TOKENS)[0].lower()
      right += any(z.strip().lower() in text for z in row["answers"])
    print(f"recall: {len(asked)} lines, contains {right / len(asked):.4f}")
  if last := [row["text"].rstrip() for kind, row in lines if kind == "last"]:
    cut = [len(text) - len(text.split()[-1]) for text in last]
    found = likelihoods(params, cfg, [(t[:c].rstrip().encode(), t[len(t[:c].rstrip()):].encode()) for t, c in zip(last, cut)], batch)
    perplexity = np.exp(-np.mean([z for z, _ in found]))
    print(f"last word: {len(last)} lines, acc {np.mean([hit for _, hit in found]):.4f}, perplexity {perplexity:.4g}")

# *** pictures ***

def curves(out:Path) -> tuple[list, list, list, list]:
  """What there is to draw, in pairs: step and loss, step and held-out bits, position and bits, setting and accuracy."""
  def pairs(name, x, y, kind:type=int):
    try: return [(kind(r[x]), float(r[y])) for r in csv.DictReader((out / name).read_text().splitlines()) if r[y]]
    except FileNotFoundError: return []
    except (KeyError, TypeError, ValueError, csv.Error): raise ValueError(f"{out / name} is damaged: move it away, or train anew") from None
  return (pairs("log.csv", "step", "loss"), pairs("log.csv", "step", "val_bpb"), pairs("positions.csv", "position", "bits"),
          pairs("accuracy.csv", "setting", "micro", str))

def check_plot(out:Path) -> None:
  if not curves(out)[0]: raise ValueError(f"out={out} has no log.csv to draw, or no step in it: train first, or name the folder of a run")
  try: import matplotlib  # noqa: F401
  except ImportError: raise ValueError("mode=plot draws with matplotlib: pip install '.[plot]' (or pip install matplotlib)") from None

def plot(out:Path) -> None:
  """Draws out/log.csv: loss and validation against steps; beside it the loss by position in the context, or the accuracy of a task in
  every setting it was evaluated at.  Writes out/log.png."""
  import matplotlib.pyplot as plt
  log, held, positions, accuracy = curves(out)
  n = 2 if positions or accuracy else 1
  figure, axes = plt.subplots(1, n, figsize=(1 + 4 * n, 3.4), layout="constrained", squeeze=False)
  left, right = axes[0, 0], axes[0, -1]
  steps, bits = [step for step, _ in log], np.array([loss for _, loss in log]) / math.log(2)
  left.plot(steps, bits, color="C0", alpha=0.3, linewidth=0.8)
  width = max(1, len(bits) // 20)
  left.plot(steps[width - 1:], np.convolve(bits, np.ones(width) / width, "valid"), color="C0", label=f"training, mean of {width}")
  if held: left.plot(*zip(*held), "o-", color="C1", label="held out")
  left.set(xlabel="step", ylabel="bits per token" if positions else "bits", title=out.name)
  left.legend(frameon=False, fontsize=8)
  if positions:
    x, y = [place for place, _ in positions], np.array([bits for _, bits in positions])
    width = max(1, len(y) // 16)
    right.plot(x[width - 1:], np.convolve(y, np.ones(width) / width, "valid"), color="C2")
    right.set(xlabel="position in the context", ylabel="bits", title=f"held-out loss by position, mean of {width}")
  elif accuracy:
    right.barh(*zip(*accuracy), color="C2")
    right.set(xlabel="share of scored places right", xlim=(0, 1), title="held-out examples")
    right.invert_yaxis()
  figure.savefig(out / "log.png", dpi=110)
  print(f"written to {out / 'log.png'}")
