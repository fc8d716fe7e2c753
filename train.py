"""Train, resume, sample and evaluate, on text and on tasks: python train.py [key=value ...]; --help lists every key.

With no arguments it trains the small `atlas` preset on the source text of Python's own library and lets it speak."""
from __future__ import annotations
import codecs, contextlib, csv, dataclasses, hashlib, importlib.metadata, itertools, json, math, multiprocessing, os, pickle, platform, re, signal
import sys, time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, NamedTuple, cast
import numpy as np
from tinygrad import Context, Device, Tensor, TinyJit, UOp
from tinygrad.device import Buffer
from tinygrad.helpers import ContextVar, GlobalCounters
from tinygrad.nn.optim import AdamW, OptimizerGroup
from tinygrad.nn.state import get_state_dict
from tqdm import tqdm
import atlas, data, kernels
try: import fcntl, resource
except ImportError: fcntl = resource = None              # type: ignore[assignment]  # not on Windows: nothing keeps two runs out of a folder there

BAND = (2.76, 2.96)      # validation bits per byte of the run without arguments

@dataclass(frozen=True)
class Run:
  """The command's own settings; a model's are those of atlas.Config."""
  mode: str = "train"           # train | sample | eval | export | bench | plot | params
  preset: str = "atlas"         # named model, see atlas.PRESETS
  size: str = "tiny"            # tiny | 170m | 340m | 760m | 1.3b
  data: str = "python"          # text: python (the standard library's source), a file, a folder, or a .bin token file; eval: .jsonl too
  task: str = ""                # in place of text: mqar:pairs=32,again=8 for example (python data.py lists them); ends early at 99% right
  out: str = "out"              # folder of checkpoints and log.csv
  resume: bool = False          # continue from the newest checkpoint in out
  init_from: str = ""           # a checkpoint to take the weights from, at step 0
  seed: int = 0                 # of the initial weights, the batches and the sample
  steps: int = 200              # optimizer steps; 0 checks everything and stops
  batch: int = 4                # sequences in a step
  accum: int = 1                # parts that a step's batch is taken in, one after the other: the same step with less memory
  devices: int = 1              # train: devices that share each part of a batch; each holds all weights
  length: int = 128             # tokens of a sequence; eval looks as far again beyond
  lr: float = 0.008             # peak learning rate: linear warm-up, then cosine down to a tenth
  warmup: int = 20              # steps of warm-up
  weight_decay: float = 0.1     # of matrices; norms, gates, biases and embeddings have none
  clip: float = 1.0             # largest global norm of the gradient (0: any)
  save_every: int = 50          # steps between checkpoints (0: at the end only); the last two are kept
  eval_every: int = 200         # steps between validations, and one at the end (0: never)
  cache: bool = True            # keep compiled training steps, so that the next run of the same settings starts at once
  presets: str = ""             # bench: presets to time, a,b,... (empty: preset)
  lengths: str = ""             # bench: lengths to time, n,m,... (empty: length)
  prompt: str = ""              # sample: text to continue (empty: "def "); comma-separated ids with token files (empty: 0)
  tokens: int = 0               # sample: tokens to generate (0: 200); eval: tokens to read, of text or for each setting of a task (0: 65,536)
  skip_bad: bool = False        # eval: leave out lines of a .jsonl file that are malformed
  temperature: float = 0.8      # sample: 0 takes the likeliest token
  top_k: int = 40               # sample: choose among that many (0: all)

VALIDATION_TOKENS = 65_536
SOLVED = 0.99                 # share of a task's places right at which training ends
ANSWER_TOKENS = 48            # longest answer that is generated in evaluation
MODES = ("train", "sample", "eval", "export", "bench", "plot", "params")
READERS = ("sample", "eval", "export")                 # modes that need a checkpoint
LEAST = {"batch": 1, "accum": 1, "devices": 1, "length": 1}      # every other number of Run is at least 0
MOST, MOST_DEVICES = 2 ** 31 - 1, 64                   # of a whole number
FREE = {"mode", "out", "resume", "init_from", "steps", "save_every", "eval_every", "cache", "presets", "lengths", "prompt", "tokens", "temperature",
        "top_k", "skip_bad", "accum", "devices", "dtype"}
QUIET = FREE - {"steps", "init_from", "dtype"}         # keys that leave the result of training as it is

# *** the command line ***

def parse(argv:list[str]) -> tuple[dict, dict]:
  """key=value words -> the Run keys and the Config keys that were given, as their types.  ValueError in one line."""
  for word in argv:
    if re.search(r"[\0\ud800-\udfff]", word): raise ValueError(f"{word!r} is not text: write it in UTF-8, without zero bytes")
    if word.find("=") < 1: raise ValueError(f"{word!r} is not key=value: write {word.strip('-=') or 'steps'}=... (--help lists the keys)")
  pairs = [word.split("=", 1) for word in argv]
  fields = {f.name: (f, cls) for cls in (atlas.Config, Run) for f in dataclasses.fields(cls)}
  for key, _ in pairs:
    if key not in fields: raise ValueError(f"{key} is not a setting{atlas.near(key, fields)}")
  own, model = [{key: value(key, word, type(fields[key][0].default)) for key, word in pairs if fields[key][1] is cls} for cls in (Run, atlas.Config)]
  return own, model

def value(key:str, word:str, kind:type):
  try:
    if kind is bool: return {"1": True, "true": True, "0": False, "false": False}[word.lower()]
    return kind(word)
  except (ValueError, KeyError): raise ValueError(f"{key}={word!r} is not {atlas.KINDS[kind]}: give one") from None

def check_run(run:Run) -> None:
  if run.mode not in MODES: raise ValueError(f"mode={run.mode!r} is unknown{atlas.near(run.mode, MODES)}")
  for f in dataclasses.fields(run):
    x = getattr(run, f.name)
    if type(x) in (int, float) and not LEAST.get(f.name, 0) <= x < math.inf:
      raise ValueError(f"{f.name}={x} must be {LEAST.get(f.name, 0)} or more: its default is {f.default}")
    if type(x) is int and x > MOST: raise ValueError(f"{f.name}={x} is too large: take {MOST} or less")

def check_parts(run:Run) -> None:
  """Raises ValueError unless a batch can be taken in parts, and each be shared by devices that there are."""
  def divisors(of): return ", ".join(map(str, sorted({d for n in range(1, math.isqrt(of) + 1) if of % n == 0 for d in (n, of // n)})))
  if run.batch % run.accum: raise ValueError(f"accum={run.accum} does not divide batch={run.batch}: take one of {divisors(run.batch)}")
  if run.devices > MOST_DEVICES: raise ValueError(f"devices={run.devices} is too large: take {MOST_DEVICES} or less")
  if (rows := run.batch // run.accum) % run.devices:
    raise ValueError(f"devices={run.devices} does not divide batch/accum={rows}: take one of {divisors(rows)}")
  for n, device in enumerate(device_names(run)[1:], 1):
    try: assert (Tensor([1.0], device=device) + 1).tolist() == [2.0]
    except Exception as e: raise ValueError(f"devices={run.devices}: {device} cannot be used ({reason(e)}): take devices={n}") from None

def listed(run:Run) -> tuple[list[str], list[int]]:
  """The presets and lengths of a bench.  ValueError names what is wrong."""
  names, lengths = run.presets.split(",") if run.presets else [run.preset], run.lengths.split(",") if run.lengths else [str(run.length)]
  for name in names:
    if name not in atlas.PRESETS: raise ValueError(f"presets={run.presets}: {name!r} is unknown{atlas.near(name, atlas.PRESETS)}")
  for n in lengths:
    if not n.isdecimal() or len(n) > 9 or int(n) < 1:
      raise ValueError(f"lengths={run.lengths}: {n!r} is not a number of tokens: write lengths=256,2048")
  return names, [int(n) for n in lengths]

def check_device() -> None:
  """Compiles and runs one small kernel, past the caches: a device may open and still have no compiler."""
  try:
    with Context(CACHELEVEL=0): assert (Tensor([1, 2, 3]) * 2 + 1).tolist() == [3, 5, 7]
  except Exception as e:                                 # whatever a driver throws, the user needs the same advice
    raise ValueError(f"no usable tinygrad device ({reason(e)}): for the CPU install clang (pip install '.[cpu]' or apt-get install clang), "
                     f"or name another, DEV=CUDA for example") from None

def reason(e:Exception) -> str: return (str(e).splitlines() or [type(e).__name__])[0][:120]

def check_dtype(cfg:atlas.Config) -> None:
  """Compiles and runs a small dense product in another precision than float32, forward and backward: not every device has one."""
  if cfg.dtype == "float32": return
  try:
    x = Tensor([[1.0, 2.0]])
    with Context(CACHELEVEL=0): assert atlas.linear(cfg, x, x).sum().gradient(x)[0].tolist() == [[2.0, 4.0]]
  except Exception as e: raise ValueError(f"dtype={cfg.dtype} does not run on {Device.DEFAULT} ({reason(e)}): take dtype=float32") from None

def check_out(out:Path) -> None:
  """Raises ValueError unless files can be written into out, without writing any."""
  if Path(os.path.realpath(out)) in (Path.cwd(), *Path.cwd().parents):
    raise ValueError(f"out={out} holds the working folder, so an earlier run could not be moved aside: name a folder of its own")
  there = next(p for p in (out, *out.absolute().parents) if os.path.lexists(p))
  if not there.is_dir(): raise ValueError(f"out={out} cannot be a folder, {there} is a file: give another out")
  for folder in {there, out.absolute().parent} if used(out) else {there}:
    if not os.access(folder, os.W_OK | os.X_OK): raise ValueError(f"out={out} is not writable: give another out, or change the rights of {folder}")
  if out.is_dir():
    with held(out): pass

def usage() -> str:
  """Every key with its default and meaning, from the comments beside the fields."""
  lines = [__doc__ or "", "\nThe command:"]
  for cls, module in ((Run, __file__), (atlas.Config, atlas.__file__)):
    if cls is atlas.Config: lines.append("\nThe model (a preset and a size set these; what is given here wins):")
    source = Path(module).read_text()
    for line in source[source.index(f"class {cls.__name__}:"):].splitlines()[2:]:
      if ":" not in line or "#" not in line: break
      field, meaning = line.split("#", 1)
      name, default = field.split(":")[0].strip(), field.split("=", 1)[1].strip().strip('"')
      lines.append(f"  {name + '=' + default:22s} {meaning.strip()}")
  return "\n".join(lines + [f"\nPresets: {', '.join(atlas.PRESETS)}", f"Sizes: {', '.join(atlas.SIZES)}"])

# *** checkpoints: one file each, see atlas.save; and the folder that they are in ***

def checkpoints(out:Path) -> list[Path]: return sorted(out.glob("step_*.safetensors"))
def used(out:Path) -> bool: return bool(checkpoints(out)) or (out / "log.csv").exists()

def newest(out:Path) -> atlas.Saved|None:
  """The newest checkpoint that is whole, naming those that it passes over; None where there is none at all.  ValueError where all are damaged."""
  faults: list[str] = []
  for path in reversed(checkpoints(out)):
    try: saved = read_checkpoint(path)
    except ValueError as e: faults.append(str(e))
    else:
      for fault in faults: print(f"warning: {fault}; {path} is taken instead", file=sys.stderr)
      return saved
  if faults: raise ValueError(faults[0])
  return None

def read_checkpoint(path:Path) -> atlas.Saved:
  """A checkpoint of training.  ValueError for anything else, an exported file too."""
  saved = atlas.read(path)
  if {"step", "run", "text", "config"} <= saved.meta.keys(): return saved
  raise ValueError(f"{path} holds weights and no run to continue: name a checkpoint, or give init_from={path}")

class Taken(ValueError): pass

@contextlib.contextmanager
def held(out:Path):
  """Keeps every other run out of a folder, until it ends or is killed.  Taken, if there is one.  It is the folder itself that is locked: a lock that
  moves with it, needs no file and can't be left behind."""
  if not fcntl: yield
  else:
    folder = os.open(out, os.O_RDONLY)
    try:
      try: fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError: raise Taken(f"out={out} is in use by another run: give another out, or stop that run first") from None
      except OSError: pass                               # a file system without locks
      yield
    finally: os.close(folder)

def layout(run:Run, cfg:atlas.Config) -> dict:
  """atlas.layout, and for task=compression its decoder (see predictions)."""
  if run.task.partition(":")[0] != "compression": return atlas.layout(cfg)
  wide = round(cfg.mlp_ratio * cfg.dim)
  shapes = {"position": (run.length, cfg.dim), "in": (2 * wide, cfg.dim), "out": (cfg.dim, wide)}
  return atlas.layout(cfg) | {f"decoder.{n}": (shape, shape[1] ** -0.5) for n, shape in shapes.items()}

def identity(source:data.Text|data.Task) -> dict:
  if isinstance(source, data.Task): return {"is_bytes": source.is_bytes, "task": source.name} | source.settings
  return {"is_bytes": source.is_bytes, "tokens": len(source.train) + len(source.val), "val_sha256": source.digest}

# *** training ***

def optimizer_for(flat:dict[str, Tensor], weight_decay:float) -> OptimizerGroup:
  """AdamW in two groups; norms, gates, biases, embeddings and the features' coefficients do not decay."""
  plain = [n for n, p in flat.items() if p.ndim == 1 or n == "embed" or n.endswith("gates")]
  groups = [([p for n, p in flat.items() if n not in plain], weight_decay), ([p for n, p in flat.items() if n in plain], 0.0)]
  optimizers = [AdamW(weights, lr=0.0, b2=0.95, weight_decay=decay, fused=True) for weights, decay in groups]
  for o in optimizers: o.lr.realize()                    # a buffer of its own, for `overwrite`
  return OptimizerGroup(*optimizers)

def optimizer_state(optimizer:OptimizerGroup) -> dict[str, Tensor]:
  """AdamW's moments, flattened over each group, and the powers of its two decay rates."""
  groups: list = list(optimizer.optimizers)
  return {f"adam.{g}.{n}": t for g, o in enumerate(groups) for n, t in zip(("m", "v", "b1_t", "b2_t"), (o.m[0], o.v[0], o.b1_t, o.b2_t))}

def rate(run:Run, step:int) -> float:
  """Learning rate of a step (from 0): linear warm-up, then a cosine from lr to lr/10."""
  if step < run.warmup: return run.lr * (step + 1) / run.warmup
  done = (step - run.warmup) / max(1, run.steps - run.warmup)
  return run.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))

def predictions(params:dict, cfg:atlas.Config, x:Tensor) -> tuple[Tensor, Tensor]:
  """Logits (B,T,vocab) for the labels of x, and the mean memory step.  For task=compression they are said by a decoder, an MLP that is given the
  model's state at the last token and a position (MAD)."""
  h, _, eta = atlas.hidden(params, cfg, x)
  if near := params.get("decoder"):
    z = (h[:, -1:] + near["position"]).contiguous()
    gate, value = atlas.linear(cfg, z, near["in"]).contiguous().chunk(2, dim=-1)
    h = z + atlas.linear(cfg, gate.silu() * value, near["out"])
  return atlas.linear(cfg, h, params["embed"]).float(), eta

@dataclass(frozen=True)
class Accumulated:
  """A step in parts: `add` sums what a part (x, y) gives, anew where `first` is 1; `update` takes the step with the sums."""
  add: Callable
  update: Callable
  parts: int
  def __call__(self, x:Tensor, y:Tensor) -> tuple[Tensor, Tensor, Tensor]:
    for n in range(self.parts):                            # every parts-th sequence: an equal number from each device
      self.add(*[z.reshape(-1, self.parts, *z.shape[1:])[:, n].clone().realize() for z in (x, y)], Tensor([float(n == 0)], device=x.device).realize())
    return self.update()

def device_names(run:Run) -> tuple[str, ...]: return tuple(f"{Device.DEFAULT}:{n}" for n in range(run.devices))

def shared(run:Run, x:Tensor, axis:int|None=None) -> Tensor:
  """x on all devices of the run, whole or cut along an axis.  With one device it is left where it is."""
  return x.shard(device_names(run), axis).realize() if run.devices > 1 else x

def training_step(params:dict, cfg:atlas.Config, optimizer:OptimizerGroup, clip:float, accum:int=1) -> Callable:
  """x, y (batch,length) -> loss (nats), gradient norm before clipping (0: none), mean memory step, jitted.  The learning rate is in a buffer.
  accum: parts of the batch, whose gradients are summed before one update; targets count alike, whichever part they are in."""
  weights = list(get_state_dict(params).values())
  def update(loss:Tensor, eta:Tensor, grads:list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    norm = Tensor.stack(*[g.square().sum() for g in grads]).sum().sqrt()
    for w, g in zip(weights, grads): w.grad = g * (clip / (norm + 1e-6)).minimum(1.0) if clip else g
    Tensor.realize(loss, norm, eta, *optimizer.schedule_step())
    return loss, norm, eta
  def whole(x:Tensor, y:Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, eta = predictions(params, cfg, x)
    loss = atlas.cross_entropy(logits, y)
    return update(loss, eta, [g.contiguous() for g in loss.gradient(*weights)])
  if accum == 1: return TinyJit(whole)

  sums = [z.zeros_like().contiguous().realize() for z in (Tensor.zeros(3, device=weights[0].device), *weights)]
  def add(x:Tensor, y:Tensor, first:Tensor) -> None:
    logits, eta = predictions(params, cfg, x)
    loss = atlas.token_losses(logits, y).sum()
    found = Tensor.stack((y != -100).sum().float(), loss, eta), *[g.contiguous() for g in loss.gradient(*weights)]
    Tensor.realize(*[total.assign((first > 0).where(0, total) + new) for total, new in zip(sums, found)])
  def updated() -> tuple[Tensor, Tensor, Tensor]:
    (targets, loss, eta), grads = sums[0].split(1), sums[1:]
    return update(loss / targets, eta / accum, [g / targets for g in grads])
  return Accumulated(TinyJit(add), TinyJit(updated), accum)

def cache_folder() -> Path:
  return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atlas-tinygrad"

def cache_key(run:Run, cfg:atlas.Config) -> str:
  """Everything that a compiled step depends on: settings, sources, versions, the device and what its compiler may assume of it."""
  flags = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")][:1] if Path("/proc/cpuinfo").exists() else []
  sources = [hashlib.sha256(Path(cast(str, m.__file__)).read_bytes()).hexdigest() for m in (kernels, atlas, sys.modules[__name__])]
  tinygrad = [importlib.metadata.version("tinygrad"), {k: v.value for k, v in ContextVar._cache.items() if k not in ("DEBUG", "CACHELEVEL")}]
  what = [dataclasses.asdict(cfg), list(layout(run, cfg)), run.batch, run.accum, run.devices, run.length, run.weight_decay, run.clip, sources,
          __name__, tinygrad, sys.version, platform.platform(), flags, Device.DEFAULT, str(Device[Device.DEFAULT].renderer.target)]
  return hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()

# tinygrad tells buffers apart by a number that every process counts from 0, and a pickled buffer keeps its own: where both are in use, two tensors
# become one.  Counted from a random start, the numbers of a cached step are not given out again.
UOp.unique_num = itertools.count(int.from_bytes(os.urandom(6), "little"))

class Step(NamedTuple):
  """A training step and the tensors that it changes: its buffers are theirs."""
  run: Callable
  params: dict
  optimizer: OptimizerGroup

def overwrite(t:Tensor, values:np.ndarray) -> None:
  """Writes into the memory of a realized tensor.  (An assignment stays in its graph, and would be made again whenever it is read.)"""
  whole = t.uop.base.buffer                              # on several devices: one for each
  for buffer in [whole] if isinstance(whole, Buffer) else whole.bufs:
    buffer.copy_from(Buffer("PYTHON", buffer.size, buffer.dtype, opaque=memoryview(bytearray(values.tobytes()))))

def set_rate(optimizer:OptimizerGroup, lr:float) -> None:
  for group in optimizer.optimizers: overwrite(group.lr, np.array([lr], np.float32))

def cached_step(key:str) -> Step|None:
  """The compiled step of that key, or None.  It is a pickle, so it is read only from a folder and a file that are this user's and that no one else
  may write, and only if it is whole."""
  path = cache_folder() / f"{key}.pickle"
  try:
    for p in (path.parent, path):
      if hasattr(os, "getuid") and (p.stat().st_uid != os.getuid() or p.stat().st_mode & 0o022): return None
    digest, content = (blob := path.read_bytes())[:64], blob[64:]
    if hashlib.sha256(key.encode() + content).hexdigest().encode() != digest: return None
    os.utime(path)
    return Step(*pickle.loads(content))
  except Exception: return None                          # whatever is wrong with an entry: it is made anew

def cache_step(key:str, step:Step) -> None:
  """Keeps a captured step, and the 8 used last.  A cache that cannot be written is no error: the next run compiles."""
  for p in get_state_dict(step.params).values(): p.grad = None
  try:
    (folder := cache_folder()).mkdir(parents=True, exist_ok=True, mode=0o700)
    content, temporary = pickle.dumps(tuple(step)), folder / f"{key}.{os.getpid()}.tmp"
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as f:
      f.write(hashlib.sha256(key.encode() + content).hexdigest().encode() + content)
    temporary.replace(folder / f"{key}.pickle")
    for old in sorted(folder.glob("*.pickle"), key=lambda p: -p.stat().st_mtime)[8:]: old.unlink()
  except (OSError, pickle.PicklingError, AttributeError, TypeError, RecursionError): pass

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

def memory_estimate(cfg:atlas.Config, batch:int, length:int) -> float:
  """A rough count of the bytes that a training step holds: weights, gradients and moments, and what the backward pass keeps."""
  weights = atlas.parts(cfg)["total"] * 4 * 6
  token: float = 12 * cfg.dim + 6 * round(cfg.mlp_ratio * cfg.dim) + 6 * cfg.heads * (2 * cfg.key_dim + cfg.value_dim)
  if cfg.mixer != "memory": token += 3 * cfg.heads * (min(length, 2 * cfg.attn_window) if cfg.attn_window else length)
  if cfg.mixer != "attention":
    rows, steps = 1 + (cfg.window - 1) / cfg.chunk, 3 / cfg.muon_every if cfg.optimizer == "muon" else 0   # of a chunk with its halo; Muon's S, U
    token += sum(h * (4 * rows * (o + i) + (4 / cfg.chunk + steps) * o * i) for h, o, i in atlas.memory_shapes(cfg).values())
  return weights + 4 * batch * length * (cfg.layers * token + 4 * cfg.vocab)

class Stop:
  """Turns the first SIGTERM or Ctrl-C into a wish to stop after the current step; a second one stops at once."""
  def __init__(self): self.asked = False
  def __enter__(self):
    def handler(*_):
      if self.asked: raise KeyboardInterrupt
      self.asked = True
    try: self.old = {s: signal.signal(s, handler) for s in (signal.SIGTERM, signal.SIGINT)}
    except ValueError: self.old = {}                     # not in the main thread: signals go elsewhere
    return self
  def __exit__(self, *_):
    for s, h in self.old.items(): signal.signal(s, h)

LOG = ("step", "tokens", "loss", "val_bpb", "lr", "grad_norm", "eta", "tok_s", "seconds")

def open_log(out:Path, step:int):
  """out/log.csv, ready for the row after `step`, and the seconds that its last row has; rows after a restored step are dropped."""
  path = out / "log.csv"
  found = list(csv.reader(path.open())) if step and path.exists() else []
  kept = [row for row in found if len(row) == len(LOG) and row[0].isdecimal() and int(row[0]) <= step]
  write_rows(path, LOG, kept)
  file = path.open("a", newline="")
  return file, csv.writer(file), float(kept[-1][-1]) if kept else 0.0

@contextlib.contextmanager
def run_folder(out:Path, fresh:bool):
  """The folder of a run, for it alone.  A fresh run moves an earlier one aside; what a killed one left half written is removed."""
  if fresh and used(out):
    with held(out):
      n = next(n for n in range(1, sys.maxsize) if not Path(f"{out}.{n}").exists())
      out.rename(f"{out}.{n}")
    print(f"moved the earlier run to {out}.{n}")
  out.mkdir(parents=True, exist_ok=True)
  with held(out):
    for half in out.glob("*.tmp"): half.unlink()
    yield

def train(run:Run, cfg:atlas.Config, source:data.Text|data.Task, params:dict, start:atlas.Saved|None, check_band:bool, stop:Stop) -> int:
  """Trains params, from `start` (the checkpoint that they are of) or from step 0; saves, validates, samples.  Returns the exit code."""
  out, step, began = Path(run.out), start.meta["step"] if start else 0, time.perf_counter()
  for t in get_state_dict(params).values(): t.replace(shared(run, t))
  optimizer = optimizer_for(get_state_dict(params), run.weight_decay)
  for path in checkpoints(out):                          # `newest` passed over these
    if start and path > start.path: path.replace(path.with_suffix(".damaged"))
  if start:
    for name, t in optimizer_state(optimizer).items(): t.assign(shared(run, Tensor(start.tensors[name].numpy()))).realize()
  key = cache_key(run, cfg) if run.cache else ""
  if found := cached_step(key) if key else None:         # the step's own tensors take the values
    for mine, its in ((get_state_dict(params), get_state_dict(found.params)), (optimizer_state(optimizer), optimizer_state(found.optimizer))):
      for name, t in its.items(): overwrite(t, mine[name].numpy())
    train_step, params, optimizer = found
  else: train_step = training_step(params, cfg, optimizer, run.clip, run.accum)
  flat = get_state_dict(params)
  near = {n: p.to(Device.DEFAULT).contiguous().realize() for n, p in flat.items()} if run.devices > 1 else flat
  one = atlas.unflatten(near)                            # the weights on one device: it validates and samples
  def gather() -> None:
    if run.devices > 1: Tensor.realize(*[t.assign(flat[n].to(Device.DEFAULT)) for n, t in near.items()])
  meta = {"config": dataclasses.asdict(cfg), "run": dataclasses.asdict(run), "text": identity(source)}
  def save_now():
    """Keeps the last two checkpoints.  What the log says of their steps is on the disk before them."""
    os.fsync(log.fileno())
    gather()
    tensors = {f"weights.{n}": p for n, p in near.items()} | {n: t.to(Device.DEFAULT) for n, t in optimizer_state(optimizer).items()}
    atlas.save(out / f"step_{step:08d}.safetensors", tensors, {"step": step, "solved": solved} | meta)
    for old in checkpoints(out)[:-2]: old.unlink()
  def not_finite(what:str, bad:int) -> int:
    """The weights after step `bad` gave a loss or gradient that is not finite: their checkpoint, if this run wrote one, is no good."""
    if bad > first: (out / f"step_{bad:08d}.safetensors").unlink(missing_ok=True)
    left = checkpoints(out)
    print(f"error: {what} is not finite; {f'the last good checkpoint is {left[-1]}' if left else 'no good checkpoint was saved'}: lower lr or clip",
          file=sys.stderr)
    return 1

  per_step, first, solved = run.batch * run.length, step, bool(start and start.meta.get("solved"))
  text, curve = source if isinstance(source, data.Text) else None, cast(np.ndarray|None, None)
  unit = "label" if isinstance(source, data.Task) else "byte" if source.is_bytes else "token"
  validate = evaluator(one, cfg, text.val, run.batch, run.length) if text else None
  score = None if text else scorer(one, cfg, cast(data.Task, source), run.batch, run.seed)
  def batch(i:int):
    return source.batch(run.batch, run.seed, i) if isinstance(source, data.Task) else data.batch(source.train, run.batch, run.length, run.seed, i)
  log, writer, before = open_log(out, step)
  saved_at = step if start else -1
  print(f"the compiled step is in {cache_folder()}" if found else
        "compiling: the first two steps take half a minute or so, and the time left is known after the third")
  with Context(TRAINING=1), log, tqdm(total=run.steps, initial=step, unit="step", dynamic_ncols=True, smoothing=0.1) as bar:
    while step < run.steps and not stop.asked and not solved:
      tick = time.perf_counter()
      lr = rate(run, step)
      set_rate(optimizer, lr)
      GlobalCounters.reset()
      loss, norm, eta = [float(t.item()) for t in train_step(*[shared(run, Tensor(z), 0) for z in batch(step)])]
      step += 1
      if not (math.isfinite(loss) and math.isfinite(norm)):
        bar.close()
        return not_finite(f"loss {loss} (gradient norm {norm}) at step {step}", step - 1)
      seconds = time.perf_counter() - tick
      if step == first + 2 and key and not found: cache_step(key, Step(train_step, params, optimizer))
      if step == first + 3:                                # the first step compiles and the second is captured; this one is replayed
        bar.write(f"compiled in {time.perf_counter() - began - seconds:.0f} s: {GlobalCounters.kernel_count:,} kernels and "
                  f"{GlobalCounters.global_ops / 1e9:.2f} GFLOP a step, {per_step / seconds:.0f} tokens/s")
      due = run.eval_every and (step % run.eval_every == 0 or step == run.steps)
      if due: gather()
      curve = validate(VALIDATION_TOKENS) if due and validate else None
      if due and score:
        now = score(VALIDATION_TOKENS // 4, {})
        curve, solved = np.array([now["bits"]]), now["micro"] >= SOLVED
        bar.write(f"step {step}: held-out examples: " + ", ".join(f"{n} {x:.3f}" for n, x in now.items()))
      writer.writerow([step, step * per_step, f"{loss:.6f}", "" if curve is None else f"{curve.mean():.6f}", f"{lr:.8g}", f"{norm:.6f}", f"{eta:.8g}",
                       f"{per_step / seconds:.1f}", f"{before + time.perf_counter() - began:.2f}"])
      log.flush()
      bar.update()
      bar.set_postfix_str(f"loss {loss:.3f}, {loss / math.log(2):.3f} bits/{unit}, memory step {eta:.4f}, {seconds * 1e3:.0f} ms, "
                          f"{per_step / seconds:.0f} tok/s, {GlobalCounters.mem_used / 1e6:.0f} MB")
      if run.save_every and step % run.save_every == 0:
        save_now()
        saved_at = step
    if saved_at != step: save_now()
  if stop.asked and step < run.steps and not solved:
    print(f"stopped at step {step}, saved: continue with resume=1")
    return 0

  if curve is None and run.eval_every and validate: curve = validate(VALIDATION_TOKENS)        # a run that had been stopped after its last step
  if curve is not None and not np.isfinite(curve).all(): return not_finite(f"the validation loss after step {step}", step)
  if solved and step < run.steps: print(f"{SOLVED:.0%} right after {step} steps: done early")
  if isinstance(source, data.Task) and score: write_table(out, table(score, source, run.tokens or VALIDATION_TOKENS))
  elif curve is not None and text:
    write_positions(out, curve)
    print(f"step {step}: validation {curve.mean():.3f} bits per {unit}; each {unit}'s frequency alone would give {data.entropy(text.val):.3f}")
    print("by position in the context: " + ", ".join(f"{name} {bits:.3f}" for name, bits in quarters(curve)))
  if not stop.asked and text: sample(run, cfg, one, text.is_bytes)
  print(f"{time.perf_counter() - began:.0f} s in all, at most {peak_mb():.0f} MB; checkpoint: {checkpoints(out)[-1]}")
  if check_band and curve is not None and not BAND[0] <= curve.mean() <= BAND[1]:
    print(f"error: {curve.mean():.3f} bits per byte is outside the band {BAND[0]} to {BAND[1]} of this run", file=sys.stderr)
    return 1
  return 0

# *** sampling ***

def prompt_ids(run:Run, cfg:atlas.Config, is_bytes:bool) -> list[int]:
  default = "def " if is_bytes and cfg.vocab > ord("f") else "\0" if is_bytes else "0"
  return data.encode(run.prompt or default, is_bytes, cfg.vocab)

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

def sample(run:Run, cfg:atlas.Config, params:dict, is_bytes:bool) -> None:
  """Prints a continuation of run.prompt.  The state streams: memory does not grow with the length, but for full attention's keys."""
  rng, ids = np.random.default_rng(run.seed), prompt_ids(run, cfg, is_bytes)
  known = min(256, cfg.vocab) if is_bytes else cfg.vocab    # a vocabulary may be larger than there are bytes
  text = codecs.getincrementaldecoder("utf-8")(errors="replace")           # holds back the bytes of a character that is not complete yet
  def show(new, comma=","): print(text.decode(bytes(new)) if is_bytes else comma + ",".join(map(str, new)), end="", flush=True)
  print(f"--- sample, temperature {run.temperature}, seed {run.seed} ---")
  step, times = token_step(params, cfg), cast(list[float], [])
  logits, state = reader(params, cfg, step)(np.array([ids]))
  scores = logits[0, -1, :known].numpy()
  show(ids, "")
  for _ in range(run.tokens or 200):
    if run.temperature == 0: token = int(scores.argmax())
    else:
      scores = (scores.astype(np.float64) - scores.max()) / run.temperature
      if 0 < run.top_k < len(scores): scores[scores < np.sort(scores)[-run.top_k]] = -np.inf
      token = int(rng.choice(len(scores), p=np.exp(scores) / np.exp(scores).sum()))
    show([token])
    tick = time.perf_counter()
    logits, state = step(Tensor([[token]]), state)
    scores = logits[0, -1, :known].numpy()
    times.append(time.perf_counter() - tick)
  speed = f"{1 / np.median(times[3:]):.0f} tokens/s" if len(times) > 3 else "too short to time"
  print(f"\n--- {len(times)} tokens, {speed} ---")

# *** bench ***

COLUMNS = ("preset", "backend", "length", "batch", "params", "first_step_s", "step_ms", "tok_s", "kernels", "gflop", "gbytes", "peak_mb",
           "decode_tok_s")

def form(cfg:atlas.Config) -> str:
  """Which form of the recurrence a configuration takes on this device."""
  return "softmax" if cfg.mixer == "attention" else "fused" if kernels.takes_fused(cfg, Tensor.empty(1)) else "ops"

def agreement(cfg:atlas.Config) -> str:
  """Values and a gradient of a small memory under the rule of cfg: both forms on this device against stock operations on the CPU."""
  small, rng = dataclasses.replace(cfg, heads=2, key_dim=4, value_dim=4, chunk=8, muon_every=min(cfg.muon_every, 2)), np.random.default_rng(0)
  shapes = {n: (2, *s[1:]) for n, s in atlas.memory_shapes(small).items()} | ({"a": (small.degree + 1,)} if small.features == "poly" else {})
  numbers = [rng.normal(size=s) for s in (*shapes.values(), *[(1, 2, 20, 4)] * 3)] + [rng.uniform(0, 0.3, size=s) for s in [(1, 2, 20)] * 3]
  numbers = [np.abs(x) if x.ndim == 1 else x for x in (*numbers, rng.uniform(size=(1, 2, 20, small.window)))]
  def result(backend, device) -> list[np.ndarray]:
    z = [Tensor(x.astype(np.float32), device=device).realize() for x in numbers]
    q, k, v, alpha, theta, eta, gamma = z[len(shapes):]
    y, _ = kernels.memory(dataclasses.replace(small, backend=backend), dict(zip(shapes, z)), q, k, v, alpha, theta, eta, gamma)
    return [x.numpy() for x in (y.contiguous(), y.sin().sum().gradient(k)[0])]
  exact = result("ops", "CPU")
  def error(backend):
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(result(backend, Device.DEFAULT), exact))
  return f"ops {error('ops'):.1e}" + ("" if cfg.features == "exp" else f", fused {error('fused'):.1e}")

def peak_mb() -> float:
  """The most memory that this process has held so far; 0 where the system does not say."""
  if not resource: return 0.0
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2 ** 20 if sys.platform == "darwin" else 1024)

def bench_row(run:Run, cfg:atlas.Config, length:int) -> dict[str, Any]:
  """One configuration, alone in its process: medians of 5 steps after the step was compiled and captured, and of 30 tokens decoded."""
  params = atlas.init(cfg, run.seed)
  optimizer = optimizer_for(get_state_dict(params), run.weight_decay)
  step, rng = training_step(params, cfg, optimizer, run.clip, run.accum), np.random.default_rng(run.seed)
  x, y = [Tensor(rng.integers(0, cfg.vocab, (run.batch, length)).astype(np.int32)).realize() for _ in range(2)]
  def timed(f, *args) -> tuple[float, Any]:
    GlobalCounters.reset()
    tick = time.perf_counter()
    result = f(*args)
    result[0].numpy()
    return time.perf_counter() - tick, result
  with Context(TRAINING=1): times = [timed(step, x, y)[0] for _ in range(8)]
  row = dict(params=atlas.parts(cfg)["total"], first_step_s=f"{times[0]:.1f}", step_ms=f"{np.median(times[3:]) * 1e3:.1f}",
             tok_s=f"{run.batch * length / np.median(times[3:]):.0f}", kernels=GlobalCounters.kernel_count,
             gflop=f"{GlobalCounters.global_ops / 1e9:.2f}", gbytes=f"{GlobalCounters.global_mem / 1e9:.3f}")
  one_token, decode = TinyJit(lambda token, state: atlas.forward(params, cfg, token, state)), []
  _, state = atlas.forward(params, cfg, Tensor([[0]]))
  Tensor.realize(*state.values())
  for _ in range(33):
    seconds, (_, state) = timed(one_token, Tensor([[1]]), state)
    decode.append(seconds)
  return row | dict(peak_mb=f"{peak_mb():.0f}", decode_tok_s=f"{1 / np.median(decode[3:]):.0f}")

def bench(run:Run, model:dict) -> None:
  """Times every preset at every length, each in a process of its own; prints a table and writes it to out/bench.csv."""
  names, lengths = listed(run)
  cfgs, path = {name: atlas.preset(name, run.size, **model) for name in names}, Path(run.out) / "bench.csv"
  for name, cfg in cfgs.items():
    if cfg.mixer == "memory": print(f"{name} on {Device.DEFAULT}, relative error against stock operations on the CPU: {agreement(cfg)}", flush=True)
  path.parent.mkdir(parents=True, exist_ok=True)
  available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
  with path.with_suffix(".tmp").open("w", newline="") as file:
    writer = csv.DictWriter(file, COLUMNS)
    writer.writeheader()
    print("  ".join(f"{c:>12s}" for c in COLUMNS))
    for name, length in [(n, t) for n in names for t in lengths]:
      cfg = cfgs[name]
      row = dict(preset=name, backend=form(cfg), length=length, batch=run.batch)
      try:
        if kernels.on_cpu(Device.DEFAULT) and memory_estimate(cfg, run.batch // run.accum, length) > available: raise MemoryError
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool: row |= pool.submit(bench_row, run, cfg, length).result()
      except (MemoryError, BrokenProcessPool): row["params"] = "does not fit"
      writer.writerow(row)
      file.flush()
      print("  ".join(f"{row.get(c, '')!s:>12s}" for c in COLUMNS), flush=True)
  path.with_suffix(".tmp").replace(path)
  print(f"written to {path}")

# *** the commands ***

def parts_line(cfg:atlas.Config) -> str:
  count = atlas.parts(cfg)
  return f"{count['total']:14,d} = " + " + ".join(f"{n:,} {part}" for part, n in count.items() if part != "total")

def show_params(own:dict, model:dict) -> None:
  """Parameters by part of every size and preset, or of those given, with the model's settings that were given; nothing is allocated."""
  for size in [own["size"]] if "size" in own else atlas.SIZES:
    print(f"{size}: " + ", ".join(f"{k}={v}" for k, v in (atlas.SIZES[size] | model).items()))
    for name in [own["preset"]] if "preset" in own else atlas.PRESETS: print(f"  {name:17s} {parts_line(atlas.preset(name, size, **model))}")

def describe(run:Run, cfg:atlas.Config, source:data.Text|data.Task|None) -> None:
  """The resolved configuration, the parameters by part, and an estimate of memory."""
  print("settings: " + " ".join(f"{k}={v}" for k, v in (dataclasses.asdict(run) | dataclasses.asdict(cfg)).items() if v != ""))
  print(f"parameters: {parts_line(cfg).strip()}")
  megabytes = memory_estimate(cfg, run.batch // run.accum // run.devices, run.length) / 1e6
  parts = f", in {run.accum} parts," if run.accum > 1 else ""
  where = f"on {Device.DEFAULT}" if run.devices == 1 else f"on each of {', '.join(device_names(run))}"
  print(f"memory: about {megabytes:.0f} MB for a training step of {run.batch} x {run.length} tokens{parts} {where}")
  if isinstance(source, data.Task): print(f"task: {source.name}, " + ", ".join(f"{n}={x}" for n, x in source.settings.items()))
  elif source:
    print(f"text: {source.name}, {len(source.train):,} tokens to train on, {len(source.val):,} to validate (sha256 {source.digest[:16]})")

class Job(NamedTuple):
  """A command line that was found to be sound; start: the checkpoint to continue, sample or evaluate; lines: those of a .jsonl file."""
  run: Run
  cfg: atlas.Config
  source: data.Text|data.Task|None
  start: atlas.Saved|None
  params: dict|None           # the weights of start or init_from
  check_band: bool
  lines: tuple[list, int]|None = None

def resolve(own:dict, model:dict) -> Job:
  """Everything that can be wrong is found here or in parse, in this order: syntax, keys, types, combinations, device, data, checkpoint, out."""
  run = Run(**own)
  check_run(run)
  if run.mode in READERS and run.init_from: raise ValueError(f"init_from={run.init_from} is for training: name a folder with out=")
  if run.mode == "bench" and run.devices > 1: raise ValueError(f"devices={run.devices} is for training, and mode=bench times one: leave it out")
  if "task" in own and "data" in own: raise ValueError(f"data={run.data} and task={run.task} are two things to read: give one of them")
  out, reads = Path(os.path.expanduser(run.out)), run.mode in ("train", "eval")
  run = dataclasses.replace(run, out=str(out))
  if run.mode == "plot":
    check_plot(out)
    return Job(run, atlas.preset(run.preset, run.size, **model), None, None, None, False)
  task = data.task(run.task, own.get("length"), model.get("vocab")) if run.task and reads else None
  if task and run.mode == "train": run, model = dataclasses.replace(run, length=task.settings["length"]), model | {"vocab": task.vocab}
  found = bool(checkpoints(out)) and (run.mode in READERS or run.resume)
  if run.mode == "bench": cfg = [atlas.preset(name, run.size, **model) for name in listed(run)[0]][0]
  elif not found:                                        # with a checkpoint, its settings count
    within = {"horizon": min(max(atlas.Config.horizon, run.length), 1 << 20)}                     # what it is trained on
    cfg = atlas.preset(run.preset, run.size, **within | model)
  check_device()
  lines = data.json_lines(Path(os.path.expanduser(run.data)), run.skip_bad) if run.mode == "eval" and run.data.endswith(".jsonl") else None
  if "data" in own and reads and not lines and (found or run.mode == "eval"): data.read(run.data)       # its fault comes before the checkpoint's
  start = newest(out) if found else None
  if start: run, cfg = from_checkpoint(start, run, own, model)                 # its batch counts, where none is given
  elif run.mode in READERS: raise ValueError(f"out={run.out} has no checkpoint: train first, or name the folder of one")
  if run.mode in ("train", "bench"): check_parts(run)
  check_dtype(cfg)
  if run.task and reads and not task and "data" not in own: task = data.task(run.task, run.length, cfg.vocab)       # the checkpoint's
  if task: run = dataclasses.replace(run, length=task.settings["length"])
  if task and task.vocab > cfg.vocab: raise ValueError(f"task={run.task} has {task.vocab} tokens, the model vocab={cfg.vocab}: give the task vocab=")
  source = task or (data.load(run.data, cfg.vocab, run.length) if reads and not lines else None)
  text, params = source if isinstance(source, data.Text) else None, cast(dict|None, None)
  if text and not text.is_bytes and not start and "vocab" not in atlas.SIZES[run.size] | model:
    raise ValueError(f"data={run.data} holds token ids: give vocab=, the number of tokens of its tokenizer")
  is_bytes = source.is_bytes if source else True
  if start:
    made, saved = Run(**start.meta["run"]), start.meta["text"]        # a decoder belongs to the task that it was trained for
    params = atlas.weights_of(start, layout(made, cfg))
    is_bytes = saved["is_bytes"]
    if source and run.mode == "train" and saved != identity(source):
      what = f"task={run.task}" if task else f"data={run.data}"
      raise ValueError(f"{what} has changed since {start.path} was written: give the same, or init_from={start.path} to go on with another")
    if lines and (not is_bytes or cfg.vocab < 256): raise ValueError(f"data={run.data} is text, and {start.path} is not: train on bytes first")
    if task and [(n, shape) for n, (shape, _) in layout(made, cfg).items()] != [(n, shape) for n, (shape, _) in layout(run, cfg).items()]:
      raise ValueError(f"task={run.task} does not fit {start.path}, made with task={made.task}: compression has a decoder for its own length")
  if not isinstance(source, data.Task): prompt_ids(run, cfg, is_bytes)
  if run.init_from and not start:
    path = Path(os.path.expanduser(run.init_from))
    if not path.is_file(): raise ValueError(f"init_from={path} does not exist: name a checkpoint or an exported file")
    params = atlas.weights_of(atlas.read(path), layout(run, cfg))
  if run.mode in ("train", "bench"): check_out(out)
  return Job(run, cfg, source, start, params, run.mode == "train" and not start and not (own.keys() | model.keys()) - QUIET, lines)

def from_checkpoint(start:atlas.Saved, run:Run, own:dict, model:dict) -> tuple[Run, atlas.Config]:
  """The settings of a checkpoint, with the free ones of the command line.  ValueError for a key that contradicts it."""
  path, cfg, made = start.path, atlas.config_of(start), start.meta["run"]
  free = FREE if run.mode == "train" else FREE | {"data", "batch", "seed", "horizon"} | ({"task", "length"} if run.task else set())
  for key, x in (own | model).items():
    if key not in free and (was := (made | start.meta["config"]).get(key)) != x:
      raise ValueError(f"{key}={x} contradicts the checkpoint {path}, made with {key}={was}: leave {key} out, or train anew in another out")
  now = {"mode", "out", "resume", "init_from"} | (set() if run.mode == "train" else {"prompt", "tokens", "temperature", "top_k", "seed"})
  cfg = dataclasses.replace(cfg, **{k: x for k, x in model.items() if k in free})
  try: return Run(**made | own | {k: getattr(run, k) for k in now}), cfg
  except TypeError: raise ValueError(f"{path} has settings that are unknown here: use the version that made it") from None

def export(out:Path, cfg:atlas.Config, params:dict, start:atlas.Saved) -> None:
  """Writes out/weights.safetensors: the weights under the names of atlas.layout, and the settings in the metadata, for atlas.load."""
  flat, path = get_state_dict(params), out / "weights.safetensors"
  atlas.save(path, {n: flat[n] for n in atlas.layout(cfg)}, {n: start.meta[n] for n in ("config", "text", "step")})
  print(f"written to {path}, {path.stat().st_size / 1e6:.1f} MB, of {start.path}: atlas.load(path) reads it")

def evaluate(run:Run, cfg:atlas.Config, params:dict, text:data.Text, start:Path) -> None:
  """Prints the validation loss by position in the context, and beyond the trained length where the text is long enough; and writes positions.csv."""
  reach = min(2 * run.length, len(text.val) - 1)
  curve = evaluator(params, cfg, text.val, run.batch, reach)(run.tokens or VALIDATION_TOKENS)
  trained, beyond, unit = curve[:run.length], curve[run.length:], "byte" if text.is_bytes else "token"
  print(f"{start}: validation loss {trained.mean() * math.log(2):.4f} nats, {trained.mean():.4f} bits per {unit}")
  for name, bits in quarters(trained): print(f"  {name} of {run.length}: {bits:.4f}")
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

def evaluate_lines(run:Run, cfg:atlas.Config, params:dict, lines:list[tuple[str, dict]], skipped:int) -> None:
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
    sums, at, hits = [z for z, _ in likelihoods(params, cfg, rows, run.batch)], 0, []
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
    found = likelihoods(params, cfg, [(t[:c].rstrip().encode(), t[len(t[:c].rstrip()):].encode()) for t, c in zip(last, cut)], run.batch)
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

def said(e:Exception) -> str:
  """What is wrong, in one line that any terminal can show: a name may hold line ends."""
  text = str(e)
  if isinstance(e, OSError) and e.filename: text = f"{e.filename} cannot be used ({e.strerror}): give another path"
  elif isinstance(e, OSError): text = f"a file cannot be written ({e.strerror}): make room; what was saved before is whole"
  if isinstance(e, MemoryError): text = "there is not enough memory: take a smaller batch, length or model"
  return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)

def perform(job:Job, own:dict, model:dict) -> int:
  """What the command line asks for, once it is known to be sound.  Returns the exit code."""
  run, cfg = job.run, job.cfg
  if run.mode == "params": show_params(own, model)
  if run.mode == "train": describe(run, cfg, job.source)
  if run.mode == "params" or run.steps == 0: return 0
  if run.mode in ("bench", "plot"):
    bench(run, model) if run.mode == "bench" else plot(Path(run.out))
    return 0
  params = job.params or atlas.filled(layout(run, cfg), run.seed)
  if run.mode == "train" and job.source:
    with Stop() as stop, run_folder(Path(run.out), not job.start): return train(run, cfg, job.source, params, job.start, job.check_band, stop)
  assert job.start is not None
  if run.mode == "export": export(Path(run.out), cfg, params, job.start)
  elif job.lines: evaluate_lines(run, cfg, params, *job.lines)
  elif isinstance(job.source, data.Task):
    table(scorer(params, cfg, job.source, run.batch, run.seed), job.source, run.tokens or VALIDATION_TOKENS)
  elif job.source: evaluate(run, cfg, params, job.source, job.start.path)
  else: sample(run, cfg, params, job.start.meta["text"]["is_bytes"])
  return 0

def main(argv:list[str]) -> int:
  """Runs a command line in this process.  Exit code: 0 done, 1 stopped, disk full, loss not finite or band missed, 2 the user's input."""
  if {"--help", "-h", "help"} & set(argv):
    print(usage())
    return 0
  job:Job|None = None
  try:
    own, model = parse(argv)
    job = resolve(own, model)
    return perform(job, own, model)
  except (ValueError, OSError, MemoryError) as e:
    asked = job is None or job.run.mode == "params" or isinstance(e, Taken)              # Taken: by a run that began at the same moment
    if isinstance(e, ValueError) and not asked: raise    # a fault of ours
    print("error:", said(e), file=sys.stderr)
    return 2 if asked else 1
  except KeyboardInterrupt:
    print("\nstopped at once" + (": resume=1 continues from the newest checkpoint" if job and job.run.mode == "train" else ""), file=sys.stderr)
    return 1

if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
