"""Train, resume, sample and evaluate, on text and on tasks: python train.py [key=value ...]; --help lists every key.

Without arguments it trains the small `atlas` preset on the source text of Python's own library and prints a sample."""
from __future__ import annotations
import contextlib, csv, dataclasses, functools, hashlib, itertools, json, math, multiprocessing, os, pickle, platform
import re, shutil, signal, sqlite3, subprocess, sys, time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, cast
import numpy as np
import tinygrad
from tinygrad import Context, Device, Tensor, TinyJit, UOp, helpers
from tinygrad.device import Buffer
from tinygrad.helpers import BEAM, CACHEDB, CACHELEVEL, ContextVar, GlobalCounters
from tinygrad.nn.optim import AdamW, OptimizerGroup
from tinygrad.nn.state import get_state_dict
from tqdm import tqdm
import atlas, data, evaluate, kernels, rule
from data import refuse
try: import fcntl, resource
except ImportError: fcntl = resource = None          # type: ignore[assignment]  # Windows: folders are not locked there

Source = data.Text | data.Task

@dataclass(frozen=True)
class Run:
  """The command's own settings; a model's are those of atlas.Config."""
  mode: str = "train"           # train | sample | eval | export | bench | plot | params
  preset: str = "atlas"         # named model, see atlas.PRESETS
  size: str = "tiny"            # tiny | 170m | 340m | 760m | 1.3b
  data: str = "python"          # python: the standard library's source; a file, a folder, .bin of tokens; eval: .jsonl
  task: str = ""                # in place of text: mqar:pairs=32,again=8 for example (see data.py); ends at 99%
  out: str = "out"              # folder of checkpoints and log.csv
  resume: bool = False          # continue from the newest checkpoint in out
  init_from: str = ""           # a file to take weights from, and the model's settings where none are given, at step 0
  seed: int = 0                 # of the initial weights, the batches and the sample
  steps: int = 200              # optimizer steps; 0 checks everything and stops
  batch: int = 4                # sequences in a step
  accum: int = 1                # parts of a step's batch, taken one after the other: the same step with less memory
  devices: int = 1              # train: devices that share each part of a batch; each holds all weights
  length: int = 128             # tokens of a sequence; eval looks as far again beyond
  lr: float = 0.008             # peak learning rate: linear warm-up, then cosine down to a tenth
  warmup: int = 20              # steps of warm-up
  weight_decay: float = 0.1     # of matrices; norms, gates, biases and embeddings have none
  clip: float = 1.0             # largest global norm of the gradient (0: any)
  save_every: int = 50          # steps between checkpoints (0: at the end only); the last two are kept
  eval_every: int = 200         # steps between validations, and one at the end (0: never)
  cache: bool = True            # keep compiled training steps: the next run of the same settings starts at once
  presets: str = ""             # bench: presets to time, a,b,... (empty: preset)
  lengths: str = ""             # bench: lengths to time, n,m,... (empty: length)
  prompt: str = ""              # sample: text to continue (empty: "def "), or @FILE; token files: ids as 1,2 (empty: 0)
  tokens: int = 0               # sample: tokens to generate (0: 200); eval: to read, by setting of a task (0: 65,536)
  skip_bad: bool = False        # eval: leave out lines of a .jsonl file that are malformed
  temperature: float = 0.8      # sample: 0 takes the likeliest token
  top_k: int = 40               # sample: choose among that many (0: all)

BAND = (2.76, 2.96)           # validation bits per byte of the run without arguments
SOLVED = 0.99                 # share of a task's places right at which training ends
MODES = ("train", "sample", "eval", "export", "bench", "plot", "params")
READERS = ("sample", "eval", "export")                 # modes that need a checkpoint
LEAST = {"batch": 1, "accum": 1, "devices": 1, "length": 1}      # every other number of Run is at least 0
MOST, MOST_DEVICES = 2 ** 31 - 1, 64                   # of a whole number
SAMPLING = {"prompt", "tokens", "temperature", "top_k"}
# Keys that may differ from the checkpoint's, and those of them that do not change the result of training.
FREE = SAMPLING | {"mode", "out", "resume", "init_from", "steps", "save_every", "eval_every", "cache", "presets",
                   "lengths", "skip_bad", "accum", "devices", "dtype"}
QUIET = FREE - {"steps", "init_from", "dtype"}
TYPES = ("DEFAULT_FLOAT", "DEFAULT_INT", "OPTIM_DTYPE", "SUM_DTYPE", "CONST_LR")     # variables of tinygrad

# *** the command line ***

def parse(argv:list[str]) -> tuple[dict, dict]:
  """key=value words -> the Run keys and the Config keys that were given, as their types.  ValueError in one line."""
  for word in argv:
    key = word.strip("-=") or "steps"
    refuse(re.search(r"[\0\ud800-\udfff]", word), f"{word!r} is not text: write it in UTF-8, without zero bytes")
    refuse(word.find("=") < 1, f"{word!r} is not key=value: write {key}=... (--help lists the keys)")
  pairs = [word.split("=", 1) for word in argv]
  kinds = {f.name: type(f.default) for cls in (atlas.Config, Run) for f in dataclasses.fields(cls)}
  for key, _ in pairs:
    if key not in kinds: raise ValueError(f"{key} is not a setting{atlas.nearest(key, kinds)}")
  own = {key: value(key, word, kinds[key]) for key, word in pairs if hasattr(Run, key)}
  return own, {key: value(key, word, kinds[key]) for key, word in pairs if not hasattr(Run, key)}

def value(key:str, word:str, kind:type) -> Any:
  try: return {"1": True, "true": True, "0": False, "false": False}[word.lower()] if kind is bool else kind(word)
  except (ValueError, KeyError): raise ValueError(f"{key}={word!r} is not {atlas.KINDS[kind]}: give one") from None

def check_run(run:Run, own:dict) -> None:
  """Raises ValueError for a number out of range, or for keys of the command line that exclude each other."""
  refuse(run.mode not in MODES, f"mode={run.mode!r} is unknown{atlas.nearest(run.mode, MODES)}")
  for f in dataclasses.fields(run):
    x, least = getattr(run, f.name), LEAST.get(f.name, 0)
    number = type(x) in (int, float)
    refuse(number and not least <= x < math.inf, f"{f.name}={x} must be {least} or more: its default is {f.default}")
    refuse(type(x) is int and x > MOST, f"{f.name}={x} is too large: take {MOST} or less")
  from_file, data_and_task = run.mode in READERS and run.init_from, {"task", "data"} <= own.keys()
  refuse(from_file, f"init_from={run.init_from} is for training: name a folder with out=")
  refuse(run.mode == "bench" and run.devices > 1,
         f"devices={run.devices} is for training, and mode=bench times one: leave it out")
  refuse(data_and_task, f"data={run.data} and task={run.task} are two things to read: give one of them")

def attempt(compute:Callable, fault:str, advice:str) -> None:
  """Runs a small computation past the caches.  ValueError, with fault and advice, for whatever a driver raises."""
  try:
    with Context(CACHELEVEL=0): assert compute() == [3.0, 5.0]
  except Exception as e: raise ValueError(f"{fault} ({reason(e)}): {advice}") from None

def reason(e:Exception) -> str: return (str(e).splitlines() or [type(e).__name__])[0][:120]

def check_parts(run:Run) -> None:
  """Raises ValueError unless a batch can be taken in parts, and each part be shared by devices that exist."""
  def divisors(n:int) -> str:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return "take one of " + ", ".join(map(str, sorted({*small, *(n // d for d in small)})))
  batch, accum, n = run.batch, run.accum, run.devices
  rows = batch // accum
  refuse(batch % accum, f"accum={accum} does not divide batch={batch}: {divisors(batch)}")
  refuse(n > MOST_DEVICES, f"devices={n} is too large: take {MOST_DEVICES} or less")
  refuse(rows % n, f"devices={n} does not divide batch/accum={rows}: {divisors(rows)}")
  for i, name in enumerate(device_names(run)[1:], 1):
    attempt(lambda: (Tensor([1.0, 2.0], device=name) * 2 + 1).tolist(), f"devices={n}: {name} cannot be used",
            f"take devices={i}")

def listed(run:Run) -> tuple[list[str], list[int]]:
  """The presets and lengths of a bench.  ValueError names what is wrong."""
  names, lengths = (run.presets or run.preset).split(","), (run.lengths or str(run.length)).split(",")
  for name in names:
    near = atlas.nearest(name, atlas.PRESETS)
    refuse(name not in atlas.PRESETS, f"presets={run.presets}: {name!r} is unknown{near}")
  for n in lengths:
    sound = n.isdecimal() and len(n) < 10 and int(n) > 0
    refuse(not sound, f"lengths={run.lengths}: {n!r} is not a number of tokens: write lengths=256,2048")
  return names, [int(n) for n in lengths]

@functools.cache
def open_cache() -> None:
  """Opens tinygrad's database of kernels for all threads.  If it cannot be read or written, one line says so, and the
  process does without it."""
  try:
    refuse(CACHEDB.startswith(os.path.abspath("~")), "there is no home folder")
    fault = kernels.database().execute("PRAGMA quick_check(1)").fetchone()[0] if CACHELEVEL else "ok"
    refuse(fault != "ok", fault)
    helpers.diskcache_put("atlas_check", "written", True)
  except (sqlite3.Error, OSError, ValueError) as e:
    CACHELEVEL.value, os.environ["CACHELEVEL"] = 0, "0"  # here, and in the processes that compile
    print(f"warning: tinygrad's cache {CACHEDB} cannot be used ({reason(e)}): every kernel is compiled anew; "
          "CACHEDB=FILE names another", file=sys.stderr)

def check_device() -> None:
  """A device may open and still have no compiler."""
  for name in TYPES:
    word = os.environ.get(name) or "float32"
    typical = word.lower() in ("float32", "int32")
    refuse(not typical, f"{name}={word} changes the types of tensors, float32 and int32 here: unset it")
  open_cache()
  attempt(lambda: (Tensor([1, 2]) * 2 + 1).tolist(), "no usable tinygrad device", "for the CPU install clang (pip "
          "install '.[cpu]' or apt-get install clang), or name another, DEV=CUDA for example")
  if kernels.on_cpu(Device.DEFAULT):
    version = subprocess.run([os.environ.get("CC", "clang"), "--version"], capture_output=True, text=True).stdout
    if line := slow_compiler(version): print(line, file=sys.stderr)

def slow_compiler(version:str) -> str:
  """What to say of a compiler: clang 14 and 15 need minutes for a kernel that clang 16 to 23 compile in seconds."""
  number = re.search(r"^(?!Apple).*clang version (\d+)", version)
  if not number or int(number[1]) > 15: return ""
  return f"warning: clang {number[1]} needs minutes for some kernels: pip install '.[cpu]' brings a newer one"

def check_dtype(cfg:atlas.Config) -> None:
  """A device may have no other precision than float32 for dense products, forward or backward."""
  def gradient() -> Any:
    x = Tensor([[1.0, 2.0]])
    return atlas.linear(cfg, x, Tensor([[3.0, 5.0]])).sum().gradient(x)[0][0].tolist()
  if cfg.dtype != "float32":
    attempt(gradient, f"dtype={cfg.dtype} does not run on {Device.DEFAULT}", "take dtype=float32")

def check_out(out:Path) -> None:
  """Raises ValueError unless files can be written into out, without writing any."""
  refuse(Path(os.path.realpath(out)) in (Path.cwd(), *Path.cwd().parents), f"out={out} holds the working folder, so an "
         "earlier run could not be moved aside: name a folder of its own")
  nearest = next(p for p in (out, *out.absolute().parents) if os.path.lexists(p))
  refuse(not nearest.is_dir(), f"out={out} cannot be a folder, {nearest} is a file: give another out")
  for folder in {nearest, out.absolute().parent} if used(out) else {nearest}:
    sound = os.access(folder, os.W_OK | os.X_OK)
    refuse(not sound, f"out={out} is not writable: give another out, or change the rights of {folder}")
  if out.is_dir():
    with held(out): pass

def usage() -> str:
  """Every key with its default and meaning, from the comments beside the fields."""
  lines = [__doc__ or ""]
  model = "The model (a preset and a size set these; what is given here wins)"
  for name, module, title in (("Run", __file__, "The command"), ("Config", atlas.__file__, model)):
    source = Path(module).read_text(encoding="utf-8")
    lines.append(f"\n{title}:")
    for line in source[source.index(f"class {name}"):].splitlines()[2:]:
      if ":" not in line or "#" not in line: break
      field, meaning = line.split("#", 1)
      key, default = field.split(":")[0].strip(), field.split("=", 1)[1].strip().strip('"')
      lines.append(f"  {key + '=' + default:22s} {meaning.strip()}")
  return "\n".join([*lines, f"\nPresets: {', '.join(atlas.PRESETS)}", f"Sizes: {', '.join(atlas.SIZES)}"])

# *** the folder of a run: checkpoints, one file each (see atlas.save), and log.csv ***

def checkpoints(out:Path) -> list[Path]: return sorted(out.glob("step_*.safetensors"))
def used(out:Path) -> bool: return bool(checkpoints(out)) or (out / "log.csv").exists()

def read_weights(path:Path) -> data.Saved:
  saved = data.read_file(path)
  unsigned = f"warning: {path} is unsigned: another tool wrote it, and nothing tells whether it is whole"
  if not saved.signed: print(unsigned, file=sys.stderr)
  return saved

def newest(out:Path) -> data.Saved|None:
  """The newest checkpoint that is whole; others are named.  None if there is none, ValueError if none is whole."""
  faults: list[str] = []
  for path in reversed(checkpoints(out)):
    try:
      saved = read_weights(path)
      refuse({"step", "run", "text", "config"} - saved.meta.keys(), f"{path} holds weights and no run to continue: "
             f"name a checkpoint, or give init_from={path}")
    except ValueError as e: faults.append(str(e))
    else:
      for fault in faults: print(f"warning: {fault}; {path} is taken instead", file=sys.stderr)
      return saved
  refuse(faults, "".join(faults[:1]))
  return None

class Taken(ValueError): pass

@contextlib.contextmanager
def held(out:Path) -> Iterator[None]:
  """Keeps every other run out of a folder until this one ends or is killed.  Raises Taken if another run holds it.
  The folder itself is locked: such a lock moves with the folder, needs no file and cannot be left behind."""
  with contextlib.ExitStack() as stack:
    if fcntl:
      folder = os.open(out, os.O_RDONLY)
      stack.callback(os.close, folder)
      try: fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        raise Taken(f"out={out} is in use by another run: give another out, or stop that run first") from None
      except OSError: pass                               # a file system without locks
    yield

@contextlib.contextmanager
def run_folder(out:Path, fresh:bool) -> Iterator[None]:
  """The folder of a run, for it alone.  A fresh run moves an earlier one aside; a killed run's half files are
  removed."""
  if fresh and used(out):
    with held(out):
      n = next(n for n in range(1, sys.maxsize) if not Path(f"{out}.{n}").exists())
      out.rename(f"{out}.{n}")
    print(f"moved the earlier run to {out}.{n}")
  out.mkdir(parents=True, exist_ok=True)
  with held(out):
    for half in out.glob("*.tmp"): half.unlink()
    yield

def layout(run:Run, cfg:atlas.Config) -> dict:
  """atlas.layout, and for task=compression its decoder (see evaluate.predictions)."""
  if run.task.partition(":")[0] != "compression": return atlas.layout(cfg)
  width = round(cfg.mlp_ratio * cfg.dim)
  shapes = {"position": (run.length, cfg.dim), "in": (2 * width, cfg.dim), "out": (cfg.dim, width)}
  return atlas.layout(cfg) | {f"decoder.{n}": (shape, shape[1] ** -0.5) for n, shape in shapes.items()}

def identity(source:Source) -> dict:
  """What a checkpoint says of its text or task, by which a resumed run knows it again."""
  if isinstance(source, data.Task): return {"is_bytes": source.is_bytes, "task": source.name} | source.settings
  tokens = len(source.train) + len(source.val)
  digests = {"val_sha256": source.digest, "sample_sha256": source.sample_digest}
  return {"is_bytes": source.is_bytes, "tokens": tokens} | digests

LOG = ("step", "tokens", "loss", "val_bpb", "lr", "grad_norm", "eta", "tok_s", "seconds")

class Log:
  """out/log.csv, open for the row after `step`; rows after a restored step are dropped.  `row` is the last one."""
  def __init__(self, out:Path, step:int):
    path = out / "log.csv"
    rows = list(csv.reader(path.open())) if step and path.exists() else []
    kept = [row for row in rows if len(row) == len(LOG) and row[0].isdecimal() and int(row[0]) <= step]
    evaluate.write_rows(path, LOG, kept[:-1])
    self.file, self.row = path.open("a", newline=""), list[str]()
    if kept: self.write(kept[-1])
    self.seconds = float(self.row[-1]) if kept else 0.0

  def write(self, row:list[str]) -> None:
    self.row, self.start = row, self.file.tell()
    csv.writer(self.file).writerow(row)
    self.file.flush()

  def amend(self, name:str, word:str) -> None:
    """Writes the last row again, with another value in one column."""
    self.file.seek(self.start)
    self.file.truncate()
    self.write([word if column == name else x for column, x in zip(LOG, self.row)])

# *** one training step ***

def optimizer_for(flat:dict[str, Tensor], weight_decay:float) -> OptimizerGroup:
  """AdamW in two groups; norms, gates, biases, embeddings and the features' coefficients do not decay."""
  plain = [n for n, p in flat.items() if p.ndim == 1 or n == "embed" or n.endswith("gates")]
  decaying = [n for n in flat if n not in plain]
  optimizer = OptimizerGroup(*[AdamW([flat[n] for n in names], lr=0.0, b2=0.95, weight_decay=decay, fused=True)
                               for names, decay in ((decaying, weight_decay), (plain, 0.0))])
  Tensor.realize(*optimizer_state(optimizer).values(), *[o.lr for o in optimizer.optimizers])     # buffers of their own
  return optimizer

def optimizer_state(optimizer:OptimizerGroup) -> dict[str, Tensor]:
  """AdamW's moments, flattened over each group, and the powers of its two decay rates."""
  state: dict[str, Tensor] = {}
  for i, group in enumerate(optimizer.optimizers):
    o = cast(Any, group)
    state |= {f"adam.{i}.m": o.m[0], f"adam.{i}.v": o.v[0], f"adam.{i}.b1_t": o.b1_t, f"adam.{i}.b2_t": o.b2_t}
  return state

def overwrite(t:Tensor, values:np.ndarray) -> None:
  """Writes into the memory of a realized tensor.  (An assignment stays in its graph, and is made at every read.)"""
  buffers = t.uop.base.buffer                            # on several devices: one for each
  for buffer in [buffers] if isinstance(buffers, Buffer) else buffers.bufs:
    buffer.copy_from(Buffer("PYTHON", buffer.size, buffer.dtype, opaque=memoryview(bytearray(values.tobytes()))))

def set_rate(optimizer:OptimizerGroup, lr:float) -> None:
  for group in optimizer.optimizers: overwrite(group.lr, np.array([lr], np.float32))

def rate(run:Run, step:int) -> float:
  """Learning rate of a step (from 0): linear warm-up, then a cosine from lr to lr/10."""
  if step < run.warmup: return run.lr * (step + 1) / run.warmup
  done = (step - run.warmup) / max(1, run.steps - run.warmup)
  return run.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))

def device_names(run:Run) -> tuple[str, ...]: return tuple(f"{Device.DEFAULT}:{n}" for n in range(run.devices))

def shared(run:Run, x:Tensor, axis:int|None=None) -> Tensor:
  """x on all devices of the run, whole or cut along an axis.  With one device it is left where it is."""
  return x.shard(device_names(run), axis).realize() if run.devices > 1 else x

@dataclass(frozen=True)
class Accumulated:
  """A step in parts.  `add` adds the sums of a part (x, y), anew where `first` is 1; `update` takes the step."""
  add: Callable
  update: Callable
  parts: int
  def __call__(self, x:Tensor, y:Tensor) -> tuple[Tensor, Tensor, Tensor]:
    for n in range(self.parts):                          # every parts-th sequence: an equal number from each device
      part = [z.reshape(-1, self.parts, *z.shape[1:])[:, n].clone().realize() for z in (x, y)]
      self.add(*part, Tensor([float(n == 0)], device=x.device).realize())
    return self.update()

def captured(f:Callable) -> Callable:
  """f, jitted at its first call: TinyJit would run it once before, kernel by kernel, with several times the memory."""
  jit = TinyJit(f)
  jit.cnt = 1
  return jit

def training_step(params:dict, cfg:atlas.Config, optimizer:OptimizerGroup, clip:float, accum:int=1) -> Callable:
  """x, y (batch,length) -> loss (nats), gradient norm before clipping, mean memory step, jitted.  The learning rate is
  in a buffer.  accum: parts of the batch, whose gradients are summed; every target counts alike."""
  weights = list(get_state_dict(params).values())
  def forward(x:Tensor) -> tuple[Tensor, Tensor]:
    with Context(CAPTURING=0): evaluate.predictions(params, cfg, x)    # makes the model's constants, once
    return evaluate.predictions(params, cfg, x)
  def update(loss:Tensor, eta:Tensor, grads:list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    norm = Tensor.stack(*[g.square().sum() for g in grads]).sum().sqrt()
    for w, g in zip(weights, grads): w.grad = g * (clip / (norm + 1e-6)).minimum(1.0) if clip else g
    Tensor.realize(loss, norm, eta, *optimizer.schedule_step())
    return loss, norm, eta
  def at_once(x:Tensor, y:Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, eta = forward(x)
    loss = atlas.cross_entropy(logits, y)
    return update(loss, eta, [g.contiguous() for g in loss.gradient(*weights)])
  if accum == 1: return captured(at_once)

  counts = Tensor.zeros(3, device=weights[0].device).contiguous().realize()       # targets, loss, eta
  sums = [w.zeros_like().contiguous().realize() for w in weights]
  def add(x:Tensor, y:Tensor, first:Tensor) -> None:
    logits, eta = forward(x)
    loss = atlas.token_losses(logits, y).sum()
    new = [Tensor.stack((y != -100).sum().float(), loss, eta), *[g.contiguous() for g in loss.gradient(*weights)]]
    Tensor.realize(*[z.assign((first > 0).where(0, z) + more) for z, more in zip([counts, *sums], new)])
  def updated() -> tuple[Tensor, Tensor, Tensor]:
    targets, loss, eta = counts.split(1)
    return update(loss / targets, eta / accum, [g / targets for g in sums])
  return Accumulated(captured(add), captured(updated), accum)

def memory_estimate(cfg:atlas.Config, batch:int, length:int) -> float:
  """About how many bytes a process holds in training, fitted to ten settings: weights, gradients and moments; what the
  backward pass keeps of each token, by layer and of the logits; and on a CPU Python with the code of the kernels."""
  token = 6.0 * cfg.dim + 4 * round(cfg.mlp_ratio * cfg.dim) + 3 * cfg.heads * (2 * cfg.key_dim + cfg.value_dim)
  process = 110e6 if kernels.on_cpu(Device.DEFAULT) else 0.0
  if cfg.mixer != "memory": token += 2.6 * cfg.heads * (min(length, 2 * cfg.attn_window) if cfg.attn_window else length)
  if cfg.mixer != "attention":
    rows = 1 + (cfg.window - 1) / cfg.chunk              # of a chunk with the tokens before it that its windows reach
    stored = 1 / cfg.chunk if cfg.features == "exp" or kernels.takes_fused(cfg, Tensor.empty(1)) else 4       # matrices
    token += sum(heads * (rows * (o + i) + o * i * stored) for heads, o, i in atlas.memory_shapes(cfg).values())
    if process: process += (120e6 if cfg.memory != "linear" else 0) + (80e6 if cfg.optimizer == "muon" else 0)
    if process and cfg.mixer == "mac": process += 90e6 * cfg.layers * -(-length // cfg.attn_window)    # segments
  return process + 24 * atlas.parts(cfg)["total"] + 4 * batch * length * (cfg.layers * token + 2 * cfg.vocab)

# *** the step cache ***
# Compiling takes longer than a short run, and a captured TinyJit can be pickled with the tensors that it reads and
# writes.  So a compiled step is kept in a file named by a hash of everything that it depends on; a later run of the
# same settings copies its values into the step's tensors.  If anything is wrong with an entry, the run compiles.

class Step(NamedTuple):
  """A training step and the tensors that it changes: its buffers are theirs."""
  run: Callable
  params: dict
  optimizer: OptimizerGroup

# tinygrad tells buffers apart by a number that every process counts from 0, and a pickled buffer keeps its own: where
# both are in use, two tensors become one.  So every process counts from a random start.
UOp.unique_num = itertools.count(int.from_bytes(os.urandom(6), "little"))

def cache_folder() -> Path: return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atlas-tinygrad"

def cache_key(run:Run, cfg:atlas.Config) -> str:
  """Everything that a compiled step depends on: settings, sources here and tinygrad's, variables, device, machine."""
  settings = [asdict(cfg), list(layout(run, cfg)), run.batch, run.accum, run.devices, run.length]
  modules = [Path(p) for p in (rule.__file__, kernels.__file__, atlas.__file__, evaluate.__file__, __file__)]
  sources = [p.read_bytes() for p in (*modules, *sorted(Path(tinygrad.__path__[0]).rglob("*.py")))]
  names = set(re.findall(rb"getenv\(f?[\"'](\w+)", b"".join(sources))) - {b"DEBUG", b"CACHELEVEL", b"CACHEDB"}
  variables = {k: v.value for k, v in ContextVar._cache.items() if k not in ("DEBUG", "CACHELEVEL")}
  variables |= {name: os.environ.get(name) for name in sorted(map(bytes.decode, names))}
  compiler = shutil.which(os.environ.get("CC", "clang")) or ""
  files = [(os.path.realpath(p), os.stat(p).st_size, os.stat(p).st_mtime_ns) for p in (compiler, sys.executable) if p]
  cpu = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
  machine = [platform.platform(), sys.version, files, re.findall(r"^(?:flags|Features)\s*:.*", cpu, re.M)[:1]]
  device = [Device.DEFAULT, str(Device[Device.DEFAULT].renderer.target), __name__, run.weight_decay, run.clip]
  key = json.dumps([settings, variables, machine, device], default=str)
  return hashlib.sha256(b"".join([key.encode(), *sources])).hexdigest()

def cached_step(key:str, weights:dict[str, Tensor], optimizer:OptimizerGroup) -> Step|None:
  """The compiled step of that key, with the values of weights and optimizer; or None.  It is a pickle, so it is read
  only from a folder and a file that are this user's and that no one else may write, and only if it is whole."""
  try:
    path = cache_folder() / f"{key}.pickle"
    for p in (path.parent, path):
      if hasattr(os, "getuid") and (p.stat().st_uid != os.getuid() or p.stat().st_mode & 0o022): return None
    content = path.read_bytes()
    if hashlib.sha256(key.encode() + content[64:]).hexdigest().encode() != content[:64]: return None
    os.utime(path)
    step = Step(*pickle.loads(content[64:]))
  except Exception: return None
  values = weights | optimizer_state(optimizer)
  for name, t in (get_state_dict(step.params) | optimizer_state(step.optimizer)).items():
    overwrite(t, values[name].numpy())
  return step

def cache_step(key:str, step:Step) -> None:
  """Keeps a captured step, and the 8 used last."""
  for p in get_state_dict(step.params).values(): p.grad = None
  try:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    pickled, temporary = pickle.dumps(tuple(step)), folder / f"{key}.{os.getpid()}.tmp"
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as f:
      f.write(hashlib.sha256(key.encode() + pickled).hexdigest().encode() + pickled)
    temporary.replace(folder / f"{key}.pickle")
    for old in sorted(folder.glob("*.pickle"), key=lambda p: -p.stat().st_mtime)[8:]: old.unlink()
  except Exception: return

# *** training ***

class Stop:
  """The first SIGTERM, SIGHUP or Ctrl-C asks to stop after the current step, the second stops at once; so does the
  first while the step is `compiling`, when there is nothing to lose."""
  def __init__(self): self.asked, self.compiling = False, False

  def handle(self, *_) -> None:
    again, self.asked = self.asked, True
    line = b"\nstopping\n" if again or self.compiling else b"\nstopping after this step; once more stops at once\n"
    with contextlib.suppress(OSError): os.write(2, line)           # a signal may come in the middle of a print
    if again or self.compiling: raise KeyboardInterrupt

  def __enter__(self) -> Stop:
    names = [signal.SIGTERM, signal.SIGINT]
    hang_up = getattr(signal, "SIGHUP", None)            # which nohup has ignored
    if hang_up and signal.getsignal(hang_up) != signal.SIG_IGN: names.append(hang_up)
    try: self.old = {s: signal.signal(s, self.handle) for s in names}
    except ValueError: self.old = {}                     # not in the main thread: signals go elsewhere
    return self

  def __exit__(self, *_) -> None:
    for s, h in self.old.items(): signal.signal(s, h)

class Job(NamedTuple):
  """A command line that was found to be sound."""
  run: Run
  cfg: atlas.Config
  source: Source|None = None
  start: data.Saved|None = None               # the checkpoint to continue, sample or evaluate
  params: dict|None = None                    # the weights of start or init_from
  prompt: tuple[int, ...] = ()
  check_band: bool = False
  lines: tuple[list, int]|None = None         # those of a .jsonl file, and how many bad ones were skipped

class Training:
  """A run while it trains.  `step` is the number of optimizer steps taken, `first` that at the start of this process,
  `saved` that of the newest checkpoint; `weights` are on the one device that validates and saves; `key` is empty if no
  step is to be cached."""
  def __init__(self, job:Job):
    self.began, self.run, self.cfg, self.out = time.perf_counter(), job.run, job.cfg, Path(job.run.out)
    assert job.source is not None and job.params is not None
    run, start, self.source, self.text = job.run, job.start, job.source, identity(job.source)
    self.first = self.step = start.meta["step"] if start else 0
    self.saved, self.solved = self.step if start else -1, bool(start and start.meta.get("solved"))
    flat = get_state_dict(job.params)
    for weight in flat.values(): weight.replace(shared(run, weight))
    optimizer = optimizer_for(flat, run.weight_decay)
    if start:
      for path in checkpoints(self.out):                 # `newest` passed over these: they are damaged
        if path > start.path: path.replace(path.with_suffix(".damaged"))
      for name, t in optimizer_state(optimizer).items(): overwrite(t, start.tensors[name].numpy())
    self.key = cache_key(run, self.cfg) if run.cache else ""
    cached = cached_step(self.key, flat, optimizer) if self.key else None
    if cached: self.key = ""
    step = training_step(job.params, self.cfg, optimizer, run.clip, run.accum)
    self.compiled = cached or Step(step, job.params, optimizer)
    self.weights = get_state_dict(self.compiled.params)
    if run.devices > 1: self.weights = {n: w.to(Device.DEFAULT).contiguous().realize() for n, w in self.weights.items()}
    self.params = atlas.unflatten(self.weights)
    self.held_out = evaluate.HeldOut(self.params, self.cfg, self.source, run.batch, run.length, run.seed)
    self.log = Log(self.out, self.step)

  def gather(self) -> None:
    """Copies the weights from the devices that share a batch to the one that validates and saves."""
    flat = get_state_dict(self.compiled.params)
    if self.run.devices > 1: Tensor.realize(*[w.assign(flat[n].to(Device.DEFAULT)) for n, w in self.weights.items()])

  def save(self) -> None:
    """Writes a checkpoint and keeps the last two.  What the log says of their steps is on the disk before them."""
    os.fsync(self.log.file.fileno())
    self.gather()
    tensors = {f"weights.{n}": p for n, p in self.weights.items()}
    tensors |= {n: p.to(Device.DEFAULT) for n, p in optimizer_state(self.compiled.optimizer).items()}
    settings = {"config": asdict(self.cfg), "run": asdict(self.run), "text": self.text}
    meta = {"step": self.step, "solved": self.solved} | settings
    atlas.save(self.out / f"step_{self.step:08d}.safetensors", tensors, meta)
    for old in checkpoints(self.out)[:-2]: old.unlink()
    self.saved = self.step

  def changed(self) -> str:
    """What is wrong with the file of a text that is no longer what it was."""
    try:
      if isinstance(self.source, data.Text): data.unchanged(self.source)
    except ValueError as e: return str(e)
    return ""

  def take_step(self, bar:tqdm) -> float:
    """One optimizer step on the batch of (seed, step), and its row in the log.  Returns the seconds that it took.
    FloatingPointError, with the number of steps before, if the loss or the gradient is not finite."""
    tick, run, source, tokens = time.perf_counter(), self.run, self.source, self.run.batch * self.run.length
    lr = rate(run, self.step)
    set_rate(self.compiled.optimizer, lr)
    GlobalCounters.reset()
    if isinstance(source, data.Task): x, y = source.batch(run.batch, run.seed, self.step)
    else: x, y = data.batch(source.train, run.batch, run.length, run.seed, self.step)
    scalars = self.compiled.run(shared(run, Tensor(x), 0), shared(run, Tensor(y), 0))
    loss, norm, eta = [float(z.item()) for z in scalars]
    if not (math.isfinite(loss) and math.isfinite(norm)):
      raise FloatingPointError(f"loss {loss} (gradient norm {norm}) at step {self.step + 1}", self.step)
    self.step += 1
    now = time.perf_counter()
    speed, all_seconds = tokens / (now - tick), self.log.seconds + now - self.began
    self.log.write([str(self.step), str(self.step * tokens), f"{loss:.6f}", "", f"{lr:.8g}", f"{norm:.6f}",
                    f"{eta:.8g}", f"{speed:.1f}", f"{all_seconds:.2f}"])
    bar.update()
    bar.set_postfix_str(f"loss {loss:.3f}, {loss / math.log(2):.3f} bits/{self.held_out.unit()}, memory step "
                        f"{eta:.4f}, {(now - tick) * 1e3:.0f} ms, {speed:.0f} tok/s, "
                        f"{GlobalCounters.mem_used / 1e6:.0f} MB")
    return now - tick

  def due(self) -> bool:
    """Whether the weights are to be validated after the current step."""
    return self.run.eval_every > 0 and (self.step % self.run.eval_every == 0 or self.step == self.run.steps)

  def validate(self) -> None:
    """Validates the weights as they are; the log's last row gets the result.  A solved task is saved as such."""
    self.gather()
    self.held_out.validate(self.step)
    self.log.amend("val_bpb", f"{self.held_out.bits.mean():.6f}")
    self.solved = self.held_out.right >= SOLVED
    if self.solved: self.save()

def train(job:Job, stop:Stop) -> int:
  """Trains job.params, from job.start or from step 0; saves, validates, prints a sample.  Returns the exit code."""
  t, run = Training(job), job.run
  cached = run.cache and not t.key
  if cached: print(f"the compiled step is in {cache_folder()}")
  elif BEAM: print(f"compiling: BEAM={BEAM.value} times many forms of each kernel before the first step: an hour or so")
  else: print("compiling: the first step takes half a minute or so, and the time left is known after the second")
  try:
    bar = tqdm(total=run.steps, initial=t.step, unit="step", dynamic_ncols=True, smoothing=0.1)
    with Context(TRAINING=1), t.log.file, bar:
      if t.first and t.due() and t.log.row and not t.log.row[3]: t.validate()          # stopped after it was saved
      while t.step < run.steps and not (stop.asked or t.solved or t.changed()):
        stop.compiling = t.step == t.first and not cached
        seconds = t.take_step(bar)
        if t.step == t.first + 1 and t.key: cache_step(t.key, t.compiled)
        stop.compiling = False
        if t.step == t.first + 2:                        # the first step compiles
          compiling, flop = time.perf_counter() - t.began - seconds, GlobalCounters.global_ops
          bar.write(f"compiled in {compiling:.0f} s: {GlobalCounters.kernel_count:,} kernels and {flop / 1e9:.2f} "
                    f"GFLOP a step, {run.batch * run.length / seconds:.0f} tokens/s")
        if run.save_every and t.step % run.save_every == 0 or t.due() and t.step == run.steps: t.save()
        if t.due() and not t.changed(): t.validate()
      if t.saved != t.step: t.save()
    if t.changed():
      print(f"error: {t.changed()}; resume=1 continues from {checkpoints(t.out)[-1]}", file=sys.stderr)
      return 1
    if stop.asked and t.step < run.steps and not t.solved:
      print(f"stopped at step {t.step}, saved: continue with resume=1")
      return 0
    return conclude(t, job, not stop.asked)
  except FloatingPointError as e:                        # a checkpoint of these weights that this run wrote is removed
    what, step = e.args
    if step > t.first: (t.out / f"step_{step:08d}.safetensors").unlink(missing_ok=True)
    left = checkpoints(t.out)
    kept = f"the last good checkpoint is {left[-1]}" if left else "no good checkpoint was saved"
    print(f"error: {what} is not finite; {kept}: lower lr or clip", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    if not stop.compiling: raise
    print("stopped while compiling, before a step was taken: nothing is lost")
    return 0

def conclude(t:Training, job:Job, spoken:bool) -> int:
  """Prints what the trained model is worth, and a sample of it if `spoken`.  Returns the exit code."""
  run, held_out, is_text = t.run, t.held_out, isinstance(t.source, data.Text)
  if run.eval_every and is_text and not len(held_out.bits): held_out.validate(t.step)
  bits = held_out.bits
  if not np.isfinite(bits).all(): raise FloatingPointError(f"the validation loss after step {t.step}", t.step)
  if t.solved and t.step < run.steps: print(f"{SOLVED:.0%} right after {t.step} steps: done early")
  if run.eval_every: held_out.report(t.out, t.step, run.tokens)
  if spoken and is_text: speak(job, t.params, t.source.is_bytes)
  seconds = time.perf_counter() - t.began
  print(f"{seconds:.0f} s in all, at most {peak_mb():.0f} MB; checkpoint: {checkpoints(t.out)[-1]}")
  if job.check_band and len(bits) and not BAND[0] <= bits.mean() <= BAND[1]:
    print(f"error: {bits.mean():.3f} bits per byte is outside the band {BAND[0]} to {BAND[1]} of this run",
          file=sys.stderr)
    return 1
  return 0

def speak(job:Job, params:dict, is_bytes:bool) -> None:
  """Prints a sample as the command line asks for it."""
  run, prompt = job.run, list(job.prompt)
  evaluate.sample(params, job.cfg, prompt, is_bytes, run.tokens or 200, run.temperature, run.top_k, run.seed)

# *** bench ***

COLUMNS = ("preset", "backend", "length", "batch", "params", "first_step_s", "step_ms", "tok_s", "kernels", "gflop",
           "gbytes", "peak_mb", "decode_tok_s")

def peak_mb() -> float:
  """The most memory that this process has held so far; 0 where the system does not say."""
  if not resource: return 0.0
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2 ** 20 if sys.platform == "darwin" else 1024)

def timed(f:Callable, *args) -> tuple[float, Any]:
  """Seconds until the first result of a call is there, and its results."""
  GlobalCounters.reset()
  tick = time.perf_counter()
  result = f(*args)
  result[0].numpy()
  return time.perf_counter() - tick, result

def bench_row(run:Run, cfg:atlas.Config, length:int) -> dict[str, Any]:
  """One configuration, alone in its process: medians of 5 steps after the compiled ones, and of 30 tokens decoded."""
  params, rng = atlas.init(cfg, run.seed), np.random.default_rng(run.seed)
  optimizer = optimizer_for(get_state_dict(params), run.weight_decay)
  step = training_step(params, cfg, optimizer, run.clip, run.accum)
  x, y = [Tensor(rng.integers(0, cfg.vocab, (run.batch, length)).astype(np.int32)).realize() for _ in range(2)]
  with Context(TRAINING=1): times = [timed(step, x, y)[0] for _ in range(8)]
  seconds = float(np.median(times[3:]))
  row = dict(params=atlas.parts(cfg)["total"], first_step_s=f"{times[0]:.1f}", step_ms=f"{seconds * 1e3:.1f}",
             tok_s=f"{run.batch * length / seconds:.0f}", kernels=GlobalCounters.kernel_count,
             gflop=f"{GlobalCounters.global_ops / 1e9:.2f}", gbytes=f"{GlobalCounters.global_mem / 1e9:.3f}")
  one_token, decoding = TinyJit(lambda token, state: atlas.forward(params, cfg, token, state)), list[float]()
  _, state = atlas.forward(params, cfg, Tensor([[0]]))
  Tensor.realize(*state.values())
  for _ in range(33):
    seconds, (_, state) = timed(one_token, Tensor([[1]]), state)
    decoding.append(seconds)
  return row | dict(peak_mb=f"{peak_mb():.0f}", decode_tok_s=f"{1 / np.median(decoding[3:]):.0f}")

def bench(run:Run, model:dict) -> None:
  """Times every preset at every length, each in a process of its own; prints a table and writes it to out/bench.csv."""
  path, rows, (names, lengths) = Path(run.out) / "bench.csv", list[list](), listed(run)
  available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
  path.parent.mkdir(parents=True, exist_ok=True)
  print("  ".join(f"{c:>12s}" for c in COLUMNS))
  for name, length in itertools.product(names, lengths):
    cfg = atlas.preset(name, run.size, **model)
    form = "fused" if kernels.takes_fused(cfg, Tensor.empty(1)) else "ops"
    row = dict(preset=name, backend="softmax" if cfg.mixer == "attention" else form, length=length, batch=run.batch)
    try:
      estimate = memory_estimate(cfg, run.batch // run.accum, length)
      if kernels.on_cpu(Device.DEFAULT) and estimate > available: raise MemoryError
      with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        row |= pool.submit(bench_row, run, cfg, length).result()
    except (MemoryError, BrokenProcessPool): row |= dict(params="does not fit")
    rows.append([row.get(c, "") for c in COLUMNS])
    evaluate.write_rows(path, COLUMNS, rows)
    print("  ".join(f"{x!s:>12s}" for x in rows[-1]), flush=True)
  print(f"written to {path}")

# *** the commands ***

def parts_line(cfg:atlas.Config) -> str:
  count = atlas.parts(cfg)
  return f"{count['total']:14,d} = " + " + ".join(f"{n:,} {part}" for part, n in count.items() if part != "total")

def show_params(own:dict, model:dict) -> None:
  """Parameters by part of every size and preset, or of those given, with the model's settings that were given."""
  for size in [own["size"]] if "size" in own else atlas.SIZES:
    print(f"{size}: " + ", ".join(f"{k}={v}" for k, v in (atlas.SIZES[size] | model).items()))
    for name in [own["preset"]] if "preset" in own else atlas.PRESETS:
      print(f"  {name:17s} {parts_line(atlas.preset(name, size, **model))}")

def describe(run:Run, cfg:atlas.Config, source:Source|None) -> None:
  """The resolved configuration, the parameters by part, and an estimate of memory."""
  settings = asdict(run) | asdict(cfg)
  print("settings: " + " ".join(f"{k}={v}" for k, v in settings.items() if v != ""))
  print(f"parameters: {parts_line(cfg).strip()}")
  megabytes = memory_estimate(cfg, run.batch // run.accum // run.devices, run.length) / 1e6
  parts = f", in {run.accum} parts," if run.accum > 1 else ""
  where = f"on {Device.DEFAULT}" if run.devices == 1 else f"on each of {', '.join(device_names(run))}"
  print(f"memory: about {megabytes:.0f} MB for a training step of {run.batch} x {run.length} tokens{parts} {where}")
  if isinstance(source, data.Task):
    print(f"task: {source.name}, " + ", ".join(f"{n}={x}" for n, x in source.settings.items()))
  elif source:
    print(f"text: {source.name}, {len(source.train):,} tokens to train on, {len(source.val):,} to validate "
          f"(sha256 {source.digest[:16]})")

def resolve(own:dict, model:dict) -> Job:
  """Finds what is wrong, with parse in this order: syntax, keys, types, combinations, device, data, checkpoint, out."""
  run = Run(**own)
  check_run(run, own)
  run = replace(run, out=os.path.expanduser(run.out))
  out, reads, named = Path(run.out), run.mode in ("train", "eval"), "data" in own
  if run.mode == "plot":
    evaluate.check_plot(out)
    return Job(run, atlas.preset(run.preset, run.size, **model))
  task = data.task(run.task, own.get("length"), model.get("vocab")) if run.task and reads else None
  if task and run.mode == "train":
    run, model = replace(run, length=task.settings["length"]), model | {"vocab": task.vocab}
  continued = bool(checkpoints(out)) and (run.mode in READERS or run.resume)
  cfg = None if continued else fresh_config(run, own, model)           # with a checkpoint, its settings count
  check_device()
  lines = None
  if run.mode == "eval" and run.data.endswith(".jsonl"):
    lines = evaluate.json_lines(Path(os.path.expanduser(run.data)), run.skip_bad)
  elif named and reads and (continued or run.mode == "eval"): data.read(run.data)    # faults of data come first
  start = newest(out) if continued else None
  if start: run, cfg = from_checkpoint(start, run, own, model)
  refuse(not start and run.mode in READERS, f"out={run.out} has no checkpoint: train first, or name the folder of one")
  assert cfg is not None
  if run.mode in ("train", "bench"): check_parts(run)
  check_dtype(cfg)
  if run.task and reads and not task and not named: task = data.task(run.task, run.length, cfg.vocab)
  if task: run = replace(run, length=task.settings["length"])
  source = opened(run, cfg, task, named) if reads and not lines else None
  ids = isinstance(source, data.Text) and not source.is_bytes
  sized = start or run.init_from or "vocab" in atlas.SIZES[run.size] | model
  refuse(ids and not sized, f"data={run.data} holds token ids: give vocab=, the number of tokens of its tokenizer")
  params = restored(run, cfg, start, source, bool(lines)) if start else None
  is_bytes = start.meta["text"]["is_bytes"] if start else not ids
  prompt = tuple(evaluate.prompt_ids(run.prompt, cfg, is_bytes)) if not task else ()
  if run.init_from and not start: params = imported(run, cfg)
  if run.mode in ("train", "bench"): check_out(out)
  check_band = run.mode == "train" and not start and not (own.keys() | model.keys()) - QUIET
  return Job(run, cfg, source, start, params, prompt, check_band, lines)

def fresh_config(run:Run, own:dict, model:dict) -> atlas.Config:
  """The model's settings where no checkpoint has them: those of init_from unless a key, a size or a preset differs.
  Without horizon=, what is trained on lies within the horizon."""
  if run.mode == "bench": return [atlas.preset(name, run.size, **model) for name in listed(run)[0]][0]
  horizon = min(max(atlas.Config.horizon, run.length), 1 << 20)
  cfg = atlas.preset(run.preset, run.size, **{"horizon": horizon} | model)
  if not run.init_from: return cfg
  try: before = atlas.config_of(data.read_file(os.path.expanduser(run.init_from)))
  except ValueError: return cfg                          # its fault is reported in its turn, see imported
  asked = set(model) | (set(atlas.SIZES[run.size]) if "size" in own else set())
  if "preset" in own: asked |= {name for preset in atlas.PRESETS.values() for name in preset}
  changes = {"horizon": max(before.horizon, horizon), "muon_every": math.gcd(before.muon_every, cfg.chunk)}
  if "chunk" not in asked: del changes["muon_every"]
  return replace(before, **changes | {name: getattr(cfg, name) for name in asked})

def from_checkpoint(start:data.Saved, run:Run, own:dict, model:dict) -> tuple[Run, atlas.Config]:
  """The settings of a checkpoint, with the free ones of the command line.  ValueError for a key that contradicts it."""
  path, cfg, recorded = start.path, atlas.config_of(start), start.meta["run"]
  free = FREE if run.mode == "train" else FREE | {"data", "batch", "seed", "horizon"}
  if run.mode != "train" and run.task: free = free | {"task", "length"}
  known = recorded | start.meta["config"]
  for key, x in (own | model).items():
    refuse(key not in free and known.get(key) != x, f"{key}={x} contradicts the checkpoint {path}, made with "
           f"{key}={known.get(key)}: leave {key} out, or train anew in another out")
  now = {"mode", "out", "resume", "init_from"} | (SAMPLING | {"seed"} if run.mode != "train" else set())
  cfg = replace(cfg, **{k: x for k, x in model.items() if k in free})
  try: return Run(**recorded | own | {k: getattr(run, k) for k in now}), cfg
  except TypeError:
    raise ValueError(f"{path} has settings that are unknown here: use the version that made it") from None

def opened(run:Run, cfg:atlas.Config, task:data.Task|None, named:bool) -> Source:
  """What the run reads: text named for evaluation whole.  ValueError for a token outside the vocabulary."""
  if not task: return data.load(run.data, cfg.vocab, *((1, 1) if named and run.mode == "eval" else (run.length,)))
  advice = f"the model vocab={cfg.vocab}: give the task vocab="
  refuse(task.vocab > cfg.vocab, f"task={run.task} has {task.vocab} tokens, {advice}")
  highest = max(int(z.max()) for z in task.batch(1, run.seed, 0))
  refuse(highest >= cfg.vocab, f"task={run.task} has token {highest}, outside vocab={cfg.vocab}: give the task vocab=")
  return task

def restored(run:Run, cfg:atlas.Config, start:data.Saved, source:Source|None, lines:bool) -> dict:
  """The weights of a checkpoint.  ValueError if they do not fit what is read: another text than before, ids for a
  model of bytes, or a task with another decoder (it belongs to the task that it was trained for)."""
  before, text = Run(**start.meta["run"]), start.meta["text"]
  params = atlas.weights_of(start, layout(before, cfg))
  what = f"task={run.task}" if isinstance(source, data.Task) else f"data={run.data}"
  if source and run.mode == "train":
    now = identity(source)
    refuse(any(now.get(name) != x for name, x in text.items()), f"{what} has changed since {start.path} was written: "
           f"give the same, or init_from={start.path} to go on with another")
  refuse(lines and (not text["is_bytes"] or cfg.vocab < 256),
         f"{what} is text, and {start.path} is not: train on bytes first")
  shapes, asked = [{n: shape for n, (shape, _) in layout(r, cfg).items()} for r in (before, run)]
  refuse(isinstance(source, data.Task) and shapes != asked, f"{what} does not fit {start.path}, made with "
         f"task={before.task}: compression has a decoder for its own length")
  return params

def imported(run:Run, cfg:atlas.Config) -> dict:
  """The weights of init_from; prints which of its settings are not those of this run."""
  path = Path(os.path.expanduser(run.init_from))
  refuse(not path.is_file(), f"init_from={path} does not exist: name a checkpoint or an exported file")
  saved = read_weights(path)
  params, before = atlas.weights_of(saved, layout(run, cfg)), asdict(atlas.config_of(saved))
  for name, x in asdict(cfg).items():
    if x != before[name]: print(f"warning: {name}={x} here, and {path} was made with {name}={before[name]}")
  return params

def export(out:Path, cfg:atlas.Config, params:dict, start:data.Saved) -> None:
  """Writes out/weights.safetensors: the weights by the names of atlas.layout, with the settings, for atlas.load."""
  flat, path = get_state_dict(params), out / "weights.safetensors"
  atlas.save(path, {n: flat[n] for n in atlas.layout(cfg)}, {n: start.meta[n] for n in ("config", "text", "step")})
  print(f"written to {path}, {path.stat().st_size / 1e6:.1f} MB, of {start.path}: atlas.load(path) reads it")

def perform(job:Job, own:dict, model:dict) -> int:
  """What the command line asks for, once it is known to be sound.  Returns the exit code."""
  run, cfg, start, source = job.run, job.cfg, job.start, job.source
  if run.mode == "params": show_params(own, model)
  if run.mode == "train": describe(run, cfg, source)
  if run.mode == "params" or run.steps == 0: return 0
  params = job.params
  if run.mode == "bench": bench(run, model)
  elif run.mode == "plot": evaluate.plot(Path(run.out))
  elif run.mode == "train":
    params = params or atlas.filled(layout(run, cfg), run.seed)
    with Stop() as stop, run_folder(Path(run.out), not start): return train(job._replace(params=params), stop)
  elif start and params:
    if run.mode == "export": export(Path(run.out), cfg, params, start)
    elif job.lines: evaluate.evaluate_lines(params, cfg, *job.lines, run.batch)
    elif isinstance(source, data.Task):
      score = evaluate.scorer(params, cfg, source, run.batch, run.seed)
      evaluate.table(score, source, run.tokens or evaluate.VALIDATION_TOKENS)
    elif source: evaluate.positions(params, cfg, source, start.path, run.batch, run.length, run.tokens)
    else: speak(job, params, start.meta["text"]["is_bytes"])
  return 0

def fault(e:Exception) -> str:
  """What is wrong, in one line that any terminal can show: a name may hold line ends."""
  text = str(e)
  if isinstance(e, MemoryError): text = "there is not enough memory: take a smaller batch, length or model"
  elif isinstance(e, sqlite3.Error): text = f"tinygrad's cache {CACHEDB} cannot be used ({e}): set CACHELEVEL=0"
  elif isinstance(e, OSError) and e.filename: text = f"{e.filename} cannot be used ({e.strerror}): give another path"
  elif isinstance(e, OSError):
    text = f"a file cannot be written ({e.strerror}): make room; what was saved before is whole"
  return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)

def main(argv:list[str]) -> int:
  """Runs a command line in this process.  Exit code: 0 done, 1 stopped, disk full, not finite, band missed, 2 input."""
  with evaluate.shown(): return command(argv)

def command(argv:list[str]) -> int:
  if {"--help", "-h", "help"} & set(argv):
    print(usage())
    return 0
  job:Job|None = None
  try:
    own, model = parse(argv)
    job = resolve(own, model)
    return perform(job, own, model)
  except (ValueError, OSError, MemoryError, sqlite3.Error) as e:
    asked = job is None or job.run.mode == "params" or isinstance(e, Taken)      # by a run that began just now
    if isinstance(e, ValueError) and not asked: raise    # a fault of ours
    print("error:", fault(e), file=sys.stderr)
    return 2 if asked else 1
  except KeyboardInterrupt:
    left = checkpoints(Path(job.run.out)) if job and job.run.mode == "train" else []
    print("\nstopped at once" + (f": resume=1 continues from {left[-1]}" if left else ""), file=sys.stderr)
    return 1

if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
