"""Train, resume, sample and evaluate, on text and on tasks: python train.py [key=value ...]; --help lists every key.

With no arguments it trains the small `atlas` preset on the source text of Python's own library and lets it speak."""
from __future__ import annotations
import contextlib, csv, dataclasses, hashlib, importlib.metadata, itertools, json, math, multiprocessing, os, pickle, platform, re, signal
import sys, time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, NamedTuple, cast
import numpy as np
from tinygrad import Context, Device, Tensor, TinyJit, UOp
from tinygrad.device import Buffer
from tinygrad.helpers import ContextVar, GlobalCounters
from tinygrad.nn.optim import AdamW, OptimizerGroup
from tinygrad.nn.state import get_state_dict
from tqdm import tqdm
import atlas, data, evaluate, kernels, rule
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

SOLVED = 0.99                 # share of a task's places right at which training ends
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
    for line in source[source.index(f"class {cls.__name__}"):].splitlines()[2:]:
      if ":" not in line or "#" not in line: break
      field, meaning = line.split("#", 1)
      name, default = field.split(":")[0].strip(), field.split("=", 1)[1].strip().strip('"')
      lines.append(f"  {name + '=' + default:22s} {meaning.strip()}")
  return "\n".join(lines + [f"\nPresets: {', '.join(atlas.PRESETS)}", f"Sizes: {', '.join(atlas.SIZES)}"])

# *** checkpoints: one file each, see atlas.save; and the folder that they are in ***

def checkpoints(out:Path) -> list[Path]: return sorted(out.glob("step_*.safetensors"))
def used(out:Path) -> bool: return bool(checkpoints(out)) or (out / "log.csv").exists()

def newest(out:Path) -> data.Saved|None:
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

def read_checkpoint(path:Path) -> data.Saved:
  """A checkpoint of training.  ValueError for anything else, an exported file too."""
  saved = data.read_file(path)
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
  """atlas.layout, and for task=compression its decoder (see evaluate.predictions)."""
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
    logits, eta = evaluate.predictions(params, cfg, x)
    loss = atlas.cross_entropy(logits, y)
    return update(loss, eta, [g.contiguous() for g in loss.gradient(*weights)])
  if accum == 1: return TinyJit(whole)

  sums = [z.zeros_like().contiguous().realize() for z in (Tensor.zeros(3, device=weights[0].device), *weights)]
  def add(x:Tensor, y:Tensor, first:Tensor) -> None:
    logits, eta = evaluate.predictions(params, cfg, x)
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
  sources = [hashlib.sha256(Path(cast(str, m.__file__)).read_bytes()).hexdigest() for m in (rule, kernels, atlas, evaluate, sys.modules[__name__])]
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
  evaluate.write_rows(path, LOG, kept)
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

def train(run:Run, cfg:atlas.Config, source:data.Text|data.Task, params:dict, start:data.Saved|None, check_band:bool, stop:Stop) -> int:
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
  validate = evaluate.evaluator(one, cfg, text.val, run.batch, run.length) if text else None
  score = None if text else evaluate.scorer(one, cfg, cast(data.Task, source), run.batch, run.seed)
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
      curve = validate(evaluate.VALIDATION_TOKENS) if due and validate else None
      if due and score:
        now = score(evaluate.VALIDATION_TOKENS // 4, {})
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

  if curve is None and run.eval_every and validate:     # a run that had been stopped after its last step
    curve = validate(evaluate.VALIDATION_TOKENS)
  if curve is not None and not np.isfinite(curve).all(): return not_finite(f"the validation loss after step {step}", step)
  if solved and step < run.steps: print(f"{SOLVED:.0%} right after {step} steps: done early")
  if isinstance(source, data.Task) and score:
    evaluate.write_table(out, evaluate.table(score, source, run.tokens or evaluate.VALIDATION_TOKENS))
  elif curve is not None and text:
    evaluate.write_positions(out, curve)
    print(f"step {step}: validation {curve.mean():.3f} bits per {unit}; each {unit}'s frequency alone would give {data.entropy(text.val):.3f}")
    print("by position in the context: " + ", ".join(f"{name} {bits:.3f}" for name, bits in evaluate.quarters(curve)))
  if not stop.asked and text: evaluate.sample(one, cfg, evaluate.prompt_ids(run.prompt, cfg, text.is_bytes), text.is_bytes, *sampling(run))
  print(f"{time.perf_counter() - began:.0f} s in all, at most {peak_mb():.0f} MB; checkpoint: {checkpoints(out)[-1]}")
  if check_band and curve is not None and not BAND[0] <= curve.mean() <= BAND[1]:
    print(f"error: {curve.mean():.3f} bits per byte is outside the band {BAND[0]} to {BAND[1]} of this run", file=sys.stderr)
    return 1
  return 0

def sampling(run:Run) -> tuple[int, float, int, int]:
  """The arguments of evaluate.sample that the command line sets."""
  return run.tokens or 200, run.temperature, run.top_k, run.seed

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
  start: data.Saved|None
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
    evaluate.check_plot(out)
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
  if not isinstance(source, data.Task): evaluate.prompt_ids(run.prompt, cfg, is_bytes)
  if run.init_from and not start:
    path = Path(os.path.expanduser(run.init_from))
    if not path.is_file(): raise ValueError(f"init_from={path} does not exist: name a checkpoint or an exported file")
    params = atlas.weights_of(data.read_file(path), layout(run, cfg))
  if run.mode in ("train", "bench"): check_out(out)
  return Job(run, cfg, source, start, params, run.mode == "train" and not start and not (own.keys() | model.keys()) - QUIET, lines)

def from_checkpoint(start:data.Saved, run:Run, own:dict, model:dict) -> tuple[Run, atlas.Config]:
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

def export(out:Path, cfg:atlas.Config, params:dict, start:data.Saved) -> None:
  """Writes out/weights.safetensors: the weights under the names of atlas.layout, and the settings in the metadata, for atlas.load."""
  flat, path = get_state_dict(params), out / "weights.safetensors"
  atlas.save(path, {n: flat[n] for n in atlas.layout(cfg)}, {n: start.meta[n] for n in ("config", "text", "step")})
  print(f"written to {path}, {path.stat().st_size / 1e6:.1f} MB, of {start.path}: atlas.load(path) reads it")

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
    bench(run, model) if run.mode == "bench" else evaluate.plot(Path(run.out))
    return 0
  params = job.params or atlas.filled(layout(run, cfg), run.seed)
  if run.mode == "train" and job.source:
    with Stop() as stop, run_folder(Path(run.out), not job.start): return train(run, cfg, job.source, params, job.start, job.check_band, stop)
  assert job.start is not None
  if run.mode == "export": export(Path(run.out), cfg, params, job.start)
  elif job.lines: evaluate.evaluate_lines(params, cfg, *job.lines, run.batch)
  elif isinstance(job.source, data.Task):
    evaluate.table(evaluate.scorer(params, cfg, job.source, run.batch, run.seed), job.source, run.tokens or evaluate.VALIDATION_TOKENS)
  elif job.source: evaluate.positions(params, cfg, job.source, job.start.path, run.batch, run.length, run.tokens)
  else:
    is_bytes = job.start.meta["text"]["is_bytes"]
    evaluate.sample(params, cfg, evaluate.prompt_ids(run.prompt, cfg, is_bytes), is_bytes, *sampling(run))
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
