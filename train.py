"""Train, resume, sample and evaluate, on text and on tasks: python train.py [key=value ...]; --help lists every key.

Without arguments it trains the small `atlas` preset on the source text of Python's own library and prints a sample."""
from __future__ import annotations
import csv, fcntl, functools, hashlib, inspect, io, itertools, math, multiprocessing, os, pickle, platform, re, resource
import shutil, signal, sqlite3, sys, tempfile, time
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple
import numpy as np
from tinygrad import Context, Device, Tensor, TinyJit, UOp
from tinygrad.device import Buffer
from tinygrad.helpers import BEAM, CACHEDB, CACHELEVEL, NUM_CPU_THREADS, ContextVar, GlobalCounters, ansistrip
from tinygrad.helpers import diskcache_put
from tinygrad.nn.optim import AdamW, OptimizerGroup
from tinygrad.nn.state import get_state_dict
from tqdm import tqdm
import atlas, data, evaluate, kernels, rule, tinygrad, watch
from atlas import Config
from data import Saved, Task, Text, refuse

Source = Text | Task

@dataclass(frozen=True)
class Run:  # the command's own settings; a model's are those of atlas.Config
  mode: str = "train"           # train | sample | watch | eval | export | bench | plot | params
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
  cores: int = 0                # of a CPU (0: all, or what the variable NUM_CPU_THREADS says); the result is the same
  cache: bool = True            # keep compiled training steps: the next run of the same settings starts at once
  presets: str = ""             # bench: presets to time, a,b,... (empty: preset)
  lengths: str = ""             # bench: lengths to time, n,m,... (empty: length)
  prompt: str = ""              # sample, watch: text (empty: "def ") or @FILE; token files: ids as 1,2 (empty: 0)
  tokens: int = 0               # sample: tokens to generate (0: 200); eval: to read, by setting of a task (0: 65,536)
  skip_bad: bool = False        # eval: leave out lines of a .jsonl file that are malformed
  temperature: float = 0.8      # sample: 0 takes the likeliest token
  top_k: int = 40               # sample: choose among that many (0: all)

BAND = (2.76, 2.96)           # validation bits per byte of the run without arguments
SOLVED = 0.99                 # share of a task's places right at which training ends
MODES = ("train", "sample", "eval", "export", "bench", "plot", "params", "watch")
READERS = ("sample", "watch", "eval", "export")        # modes that need a checkpoint
WEIGHTS = Path(__file__).parent / "assets" / "atlas.safetensors"         # of sample and watch, where out has none
LEAST = {"batch": 1, "accum": 1, "devices": 1, "length": 1}      # any other number is at least 0
MOST = {"devices": 64, "cores": 1024}                            # any other whole number is at most 2^31 - 1
SAMPLING = {"prompt", "tokens", "temperature", "top_k"}
# FREE: keys that may differ from the checkpoint's.  QUIET: those of them that do not change the result of training.
FIXED = set("preset size data task seed batch length lr warmup weight_decay clip".split())
FREE = Run.__annotations__.keys() - FIXED | {"dtype"}
QUIET = FREE - {"steps", "init_from", "dtype"}

# *** the command line ***
def parse(argv:list[str]) -> tuple[dict, dict]:  # key=value words -> settings of Run, and of Config, as their types
  for word in argv:
    refuse(re.search(r"[\0\ud800-\udfff]", word), f"{word!r} is not text: write it in UTF-8, without zero bytes")
    advice = f"write {word.strip('-=') or 'steps'}=... (--help lists the keys)"
    refuse(word.find("=") < 1, f"{word!r} is not key=value: {advice}")
  pairs = [word.split("=", 1) for word in argv]
  kinds:dict[str, Any] = {f.name: type(f.default) for cls in (Config, Run) for f in fields(cls)}
  for key, _ in pairs: refuse(key not in kinds, f"{key} is not a setting{atlas.nearest(key, kinds)}")
  settings = dict[str, Any]()
  for key, word in pairs:
    kind, truth = kinds[key], {"1": True, "true": True, "0": False, "false": False}
    try: settings[key] = truth[word.lower()] if kind is bool else kind(word)
    except (ValueError, KeyError): raise ValueError(f"{key}={word!r} is not {atlas.KINDS[kind]}: give one") from None
  own = {key: x for key, x in settings.items() if hasattr(Run, key)}
  return own, {key: x for key, x in settings.items() if key not in own}

def check_run(run:Run, own:dict) -> None:                # numbers are in range, and no keys exclude each other
  refuse(run.mode not in MODES, f"mode={run.mode!r} is unknown{atlas.nearest(run.mode, MODES)}")
  for name, x in vars(run).items():
    if type(x) not in (int, float): continue
    least, most, default = LEAST.get(name, 0), MOST.get(name, 2 ** 31 - 1), getattr(Run, name)
    refuse(not least <= x < math.inf, f"{name}={x} must be {least} or more: its default is {default}")
    refuse(type(x) is int and x > most, f"{name}={x} is too large: take {most} or less")
  refuse(run.mode in READERS and run.init_from, f"init_from={run.init_from} is for training: name a folder with out=")
  several, both = run.mode == "bench" and run.devices > 1, {"task", "data"} <= own.keys()
  refuse(several, f"devices={run.devices} is for training, and mode=bench times one: leave it out")
  refuse(both, f"data={run.data} and task={run.task} are two things to read: give one of them")

def warn(line:str) -> None: print(line, file=sys.stderr)
def ended(line:str, code:int=0) -> int:  # the last line of a command, on stderr if it failed, and its exit code
  (warn if code else print)(line)
  return code
def reason(e:Exception) -> str: return (str(e).splitlines() or [type(e).__name__])[0][:120]
def attempt(compute:Callable, fault:str, advice:str) -> None:  # past the caches; ValueError for what a driver raises
  try:
    with Context(CACHELEVEL=0): assert compute() == [3.0, 5.0]
  except Exception as e: raise ValueError(f"{fault} ({reason(e)}): {advice}") from None
def computed(device:str|None=None) -> Any: return (Tensor([1.0, 2.0], device=device) * 2 + 1).tolist()

def check_parts(run:Run) -> None:  # a batch can be taken in parts, and each part shared by devices that exist
  part = run.batch // run.accum
  for name, n, whole, size in ("accum", run.accum, "batch", run.batch), ("devices", run.devices, "batch/accum", part):
    divisors = ", ".join(str(d) for d in range(1, min(size, 1024) + 1) if size % d == 0)
    refuse(size % n, f"{name}={n} does not divide {whole}={size}: take one of {divisors}")
  for i, name in enumerate(device_names(run)[1:], 1):
    attempt(lambda: computed(name), f"devices={run.devices}: {name} cannot be used", f"take devices={i}")
def listed(run:Run) -> tuple[list[str], list[int]]:      # of a bench
  names, lengths = (run.presets or run.preset).split(","), (run.lengths or str(run.length)).split(",")
  for name in names:
    hint = atlas.nearest(name, atlas.PRESETS)
    refuse(name not in atlas.PRESETS, f"presets={run.presets}: {name!r} is unknown{hint}")
  for n in lengths:
    sound = re.fullmatch("(?!0+$)[0-9]{1,9}", n)
    refuse(not sound, f"lengths={run.lengths}: {n!r} is not a number of tokens: write lengths=256,2048")
  return names, [int(n) for n in lengths]

@functools.cache
def open_cache() -> None:  # tinygrad's database of kernels, for all threads; one that cannot be used is named
  try:
    refuse(CACHEDB.startswith(os.path.abspath("~")), "there is no home folder")
    fault = kernels.database().execute("PRAGMA quick_check(1)").fetchone()[0] if CACHELEVEL else "ok"
    refuse(fault != "ok", fault)
    diskcache_put("atlas_check", "written", True)
  except (sqlite3.Error, OSError, ValueError) as e:
    CACHELEVEL.value, os.environ["CACHELEVEL"] = 0, "0"  # here, and in the processes that compile
    warn(f"warning: tinygrad's cache {CACHEDB} cannot be used ({reason(e)}): every kernel is compiled anew; "
         "CACHEDB=FILE names another")

def check_device(run:Run) -> None:
  """Sets the cores of this process and of those that it starts.  ValueError for a device or variables that fail."""
  NUM_CPU_THREADS.value = run.cores or kernels.ALL_CORES
  os.environ["NUM_CPU_THREADS"] = str(NUM_CPU_THREADS.value)
  for name in ("DEFAULT_FLOAT", "DEFAULT_INT", "OPTIM_DTYPE", "SUM_DTYPE", "CONST_LR"):
    word, advice = os.environ.get(name) or "float32", "the types of tensors, float32 and int32 here: unset it"
    refuse(word.lower() not in ("float32", "int32"), f"{name}={word} changes {advice}")
  open_cache()
  attempt(computed, "no usable tinygrad device", "for the CPU install clang (pip install '.[cpu]' or apt-get install "
          "clang), or name another, DEV=CUDA for example")
def check_dtype(cfg:Config) -> None:                     # no device must have another than float32
  x, w, fault = Tensor([[1.0, 2.0]]), Tensor([[3.0, 5.0]]), f"dtype={cfg.dtype} does not run on {Device.DEFAULT}"
  def gradient(): return atlas.linear(cfg, x, w).sum().gradient(x)[0][0].tolist()
  if cfg.dtype != "float32": attempt(gradient, fault, "take dtype=float32")

def check_out(out:Path) -> None:                         # whether files can be written into out, without writing any
  nearest = next(p for p in (out, *out.absolute().parents) if os.path.lexists(p))
  holds, folders = Path.cwd().is_relative_to(os.path.realpath(out)), [nearest]
  if used(out): folders.append(out.absolute().parent)    # an earlier run moves aside, into it
  advice = "so an earlier run could not be moved aside: name a folder of its own"
  refuse(holds, f"out={out} holds the working folder, {advice}")
  refuse(not nearest.is_dir(), f"out={out} cannot be a folder, {nearest} is a file: give another out")
  for folder in folders:
    closed = not os.access(folder, os.W_OK | os.X_OK)
    refuse(closed, f"out={out} is not writable: give another out, or change the rights of {folder}")
  with held(out) if out.is_dir() else nullcontext(): pass
def usage() -> str:  # every key with its default and meaning, from the comments beside the fields
  lines, model = [__doc__], "The model (a preset and a size set these; what is given here wins)"
  for title, cls in (("The command", Run), (model, Config)):
    keys = re.findall(r'^  (\w+): \w+ = "?(.*?)"? +# (.*)', inspect.getsource(cls), re.M)
    lines += [f"\n{title}:", *(f"  {key + '=' + default:22s} {meaning}" for key, default, meaning in keys)]
  return "\n".join([*lines, f"\nPresets: {', '.join(atlas.PRESETS)}", f"Sizes: {', '.join(atlas.SIZES)}"])

# *** the folder of a run: checkpoints, one file each (see atlas.save), and log.csv ***
def checkpoints(out:Path) -> list[Path]: return sorted(out.glob("step_*.safetensors"))
def checkpoint(out:Path, step:int) -> Path: return out / f"step_{step:08d}.safetensors"
def used(out:Path) -> bool: return bool(checkpoints(out)) or (out / "log.csv").exists()
def read_weights(path:Path) -> Saved:
  saved, advice = data.read_file(path), "another tool wrote it, and nothing tells whether it is whole"
  if not saved.signed: warn(f"warning: {path} is unsigned: {advice}")
  return saved
def newest(out:Path) -> Saved:                           # the newest checkpoint that is whole; others are named
  faults = list[str]()
  for path in reversed(checkpoints(out)):
    try: saved = read_weights(path)
    except ValueError as e: faults.append(str(e))
    else:
      for fault in faults: warn(f"warning: {fault}; {path} is taken instead")
      return saved
  raise ValueError(faults[0])
class Taken(ValueError): pass
@contextmanager
def held(out:Path) -> Iterator[None]:                    # no other run may take it; its lock moves with it
  with ExitStack() as stack:
    folder = os.open(out, os.O_RDONLY)
    stack.callback(os.close, folder)
    message = f"out={out} is in use by another run: give another out, or stop that run first"
    try: fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError: raise Taken(message) from None
    except OSError: pass                                 # a file system without locks
    yield
@contextmanager
def run_folder(out:Path, start:Saved|None) -> Iterator[None]:  # an earlier run moves aside
  if not start and used(out):
    aside = next(p for n in itertools.count(1) if not (p := Path(f"{out}.{n}")).exists())
    with held(out): out.rename(aside)
    print(f"moved the earlier run to {aside}")
  out.mkdir(parents=True, exist_ok=True)
  with held(out):
    for half in out.glob("*.tmp"): half.unlink()         # a killed run left them
    damaged = [path for path in checkpoints(out) if start and path > start.path]            # see `newest`
    for path in damaged: path.replace(path.with_suffix(".damaged"))
    yield

def decoded_length(run:Run) -> int: return run.length if run.task.partition(":")[0] == "compression" else 0
def layout(run:Run, cfg:Config) -> dict:  # with the decoder of task=compression (see evaluate.predictions)
  length, width = decoded_length(run), round(cfg.mlp_ratio * cfg.dim)
  shapes = {"position": (length, cfg.dim), "in": (2 * width, cfg.dim), "out": (cfg.dim, width)} if length else {}
  return atlas.layout(cfg) | {f"decoder.{n}": (shape, shape[1] ** -0.5) for n, shape in shapes.items()}
def identity(source:Source) -> dict:                     # what a checkpoint says of its text or task, to know it again
  if isinstance(source, Task): return {"is_bytes": source.is_bytes, "task": source.name} | source.settings
  digests = {"val_sha256": source.digest, "sample_sha256": source.sample_digest}
  return {"is_bytes": source.is_bytes, "tokens": len(source.train) + len(source.val)} | digests

LOG = "step tokens loss val_bpb lr grad_norm eta tok_s seconds".split()
class Log:  # out/log.csv without the rows after a restored step; `row` is the last one
  def __init__(self, out:Path, step:int):
    path = out / "log.csv"
    rows = csv.reader(path.open() if step and path.exists() else [])
    kept = [row for row in rows if len(row) == len(LOG) and row[0].isdecimal() and int(row[0]) <= step]
    evaluate.write_rows(path, LOG, kept)
    self.file, self.row = path.open("a", buffering=1, newline=""), kept[-1] if kept else []    # flushed at line ends
    self.seconds = float(self.row[-1]) if kept else 0.0
  def write(self, row:list[str]) -> None:
    self.row = row
    csv.writer(self.file).writerow(row)
  def amend(self, bits:float) -> None:                   # writes the last row again, with what a validation gave
    self.file.truncate(self.file.tell() - len(",".join(self.row) + "\r\n"))
    self.write([*self.row[:3], f"{bits:.6f}", *self.row[4:]])

# *** one training step ***
def optimizer_for(flat:dict[str, Tensor], weight_decay:float) -> OptimizerGroup:
  """AdamW in two groups; norms, gates, biases, embeddings and the features' coefficients do not decay."""
  plain = [n for n, p in flat.items() if p.ndim == 1 or n == "embed" or n.endswith("gates")]
  decaying = [n for n in flat if n not in plain]
  optimizer = OptimizerGroup(*[AdamW([flat[n] for n in names], lr=0.0, b2=0.95, weight_decay=decay, fused=True)
                               for names, decay in ((decaying, weight_decay), (plain, 0.0))])
  Tensor.realize(*optimizer_state(optimizer).values(), *[o.lr for o in optimizer.optimizers])     # buffers of their own
  return optimizer
def optimizer_state(optimizer:Any) -> dict[str, Tensor]:  # moments, flat over a group, and powers of decay rates
  moments = [{"m": o.m[0], "v": o.v[0], "b1_t": o.b1_t, "b2_t": o.b2_t} for o in optimizer.optimizers]
  return {f"adam.{i}.{name}": t for i, group in enumerate(moments) for name, t in group.items()}
def overwrite(t:Tensor, values:np.ndarray) -> None:      # in memory: an assignment would stay in the tensor's graph
  buffers = t.uop.base.buffer                            # on several devices: one for each
  for buffer in [buffers] if isinstance(buffers, Buffer) else buffers.bufs:
    buffer.copy_from(Buffer("PYTHON", buffer.size, buffer.dtype, opaque=memoryview(bytearray(values.tobytes()))))
def set_rate(optimizer:OptimizerGroup, lr:float) -> None:
  for group in optimizer.optimizers: overwrite(group.lr, np.array([lr], np.float32))
def rate(run:Run, step:int) -> float:  # of a step (from 0): linear warm-up, then a cosine from lr to lr/10
  if step < run.warmup: return run.lr * (step + 1) / run.warmup
  done = (step - run.warmup) / max(1, run.steps - run.warmup)
  return run.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))

def device_names(run:Run) -> tuple[str, ...]: return tuple(f"{Device.DEFAULT}:{n}" for n in range(run.devices))
def shared(run:Run, x:Tensor, axis:int|None=None) -> Tensor:  # on all devices of the run, whole or cut along an axis
  return x.shard(device_names(run), axis).realize() if run.devices > 1 else x

def captured(f:Callable) -> Callable:  # jitted at its first call: TinyJit would run it once before, in more memory
  jit = TinyJit(f)
  jit.cnt = 1
  return jit
def in_parts(add:Callable, update:Callable, parts:int, x:Tensor, y:Tensor) -> tuple[Tensor, Tensor, Tensor]:
  """A step in parts.  `add` adds the sums of a part (x, y), anew where `first` is 1; `update` takes the step."""
  for n in range(parts):                                 # every parts-th sequence: an equal number from each device
    part = [z.reshape(-1, parts, *z.shape[1:])[:, n].clone().realize() for z in (x, y)]
    add(*part, Tensor([float(n == 0)], device=x.device).realize())
  return update()

def training_step(params:dict, cfg:Config, optimizer:OptimizerGroup, clip:float, accum:int=1) -> Callable:
  """x, y (batch,length) -> loss (nats), gradient norm before clipping, mean memory step, jitted.  The learning rate is
  in a buffer.  accum: parts of the batch, whose gradients are summed; every target counts alike."""
  weights = list(get_state_dict(params).values())
  def gradients(loss_of, x, y):
    with Context(CAPTURING=0): evaluate.predictions(params, cfg, x)    # makes the model's constants, once
    logits, eta = evaluate.predictions(params, cfg, x)
    loss = loss_of(logits, y)
    return loss, eta, [g.contiguous() for g in loss.gradient(*weights)]
  def update(loss, eta, grads):                          # takes the step
    norm = Tensor.stack(*[g.square().sum() for g in grads]).sum().sqrt()
    for w, g in zip(weights, grads): w.grad = g * (clip / (norm + 1e-6)).minimum(1.0) if clip else g
    Tensor.realize(loss, norm, eta, *optimizer.schedule_step())
    return loss, norm, eta
  if accum == 1: return captured(lambda x, y: update(*gradients(atlas.cross_entropy, x, y)))
  sums = [w.zeros_like().contiguous().realize() for w in weights]
  counts = Tensor.zeros(3, device=weights[0].device).contiguous().realize()       # targets, loss, eta
  def total_loss(logits, y): return atlas.token_losses(logits, y).sum()
  def add(x, y, first):
    loss, eta, grads = gradients(total_loss, x, y)
    new = [Tensor.stack((y != -100).sum().float(), loss, eta), *grads]
    Tensor.realize(*[z.assign((first > 0).where(0, z) + more) for z, more in zip([counts, *sums], new)])
  def updated():
    targets, loss, eta = counts.split(1)
    return update(loss / targets, eta / accum, [g / targets for g in sums])
  return functools.partial(in_parts, captured(add), captured(updated), accum)

def takes_fused(cfg:Config, batch:int) -> bool:
  numbers = sum(o * i for _, o, i in atlas.memory_shapes(cfg).values())
  return kernels.takes_fused(cfg, Tensor.empty(1), batch * cfg.heads, numbers)

def memory_estimate(cfg:Config, batch:int, length:int) -> float:
  """About how many bytes a process holds in training, fitted to ten settings: weights, gradients and moments; what the
  backward pass keeps of each token; and Python with the code of kernels on a CPU, where a core adds next to nothing."""
  token = 6.0 * cfg.dim + 4 * round(cfg.mlp_ratio * cfg.dim) + 3 * cfg.heads * (2 * cfg.key_dim + cfg.value_dim)
  process = 110e6 if kernels.on_cpu(Device.DEFAULT) else 0.0
  if cfg.mixer != "memory": token += 2.6 * cfg.heads * (min(length, 2 * cfg.attn_window) if cfg.attn_window else length)
  if cfg.mixer != "attention":
    rows = 1 + (cfg.window - 1) / cfg.chunk              # of a chunk with the tokens before it that its windows reach
    stored = 1 / cfg.chunk if cfg.features == "exp" or takes_fused(cfg, batch) else 4       # matrices
    token += sum(heads * (rows * (o + i) + o * i * stored) for heads, o, i in atlas.memory_shapes(cfg).values())
    if process: process += (120e6 if cfg.memory != "linear" else 0) + (80e6 if cfg.optimizer == "muon" else 0)
    if process and cfg.mixer == "mac": process += 90e6 * cfg.layers * -(-length // cfg.attn_window)    # segments
  return process + 24 * atlas.parts(cfg)["total"] + 4 * batch * length * (cfg.layers * token + 2 * cfg.vocab)

# *** the step cache ***
# Compilation takes most of a short run.  So a captured TinyJit is pickled with the tensors that it uses, into a file
# that is named by a hash of all that it depends on.  A later run of the same settings copies its values into them, or
# compiles if anything is wrong.  tinygrad tells buffers apart by a number, which a pickled buffer keeps: each process
# counts from a random start, or a loaded buffer could have the number of one in use.
UOp.unique_num = itertools.count(int.from_bytes(os.urandom(6), "little"))

# A training step, and the tensors that it changes: its buffers are theirs.
Step = NamedTuple("Step", [("run", Callable), ("params", dict), ("optimizer", OptimizerGroup)])
def cache_folder() -> Path: return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atlas-tinygrad"
def sealed(key:str, pickled:bytes) -> bytes: return hashlib.sha256(key.encode() + pickled).digest() + pickled
def cache_key(run:Run, cfg:Config) -> str:  # a hash of settings, sources here and tinygrad's, variables and device
  settings = cfg, layout(run, cfg).keys(), run.batch, run.accum, run.devices, run.length, run.weight_decay, run.clip
  modules = [Path(p) for p in (rule.__file__, kernels.__file__, atlas.__file__, evaluate.__file__, __file__)]
  sources = b"".join(p.read_bytes() for p in (*modules, *sorted(Path(tinygrad.__path__[0]).rglob("*.py"))))
  names = {*ContextVar._cache, *map(bytes.decode, re.findall(rb"getenv\(f?[\"'](\w+)", sources))}
  variables = [(name, os.environ.get(name), getattr(ContextVar._cache.get(name), "value", None))
               for name in sorted(names - {"DEBUG", "CACHELEVEL", "CACHEDB"})]
  compiler = shutil.which(os.environ.get("CC", "clang")) or ""
  files = [(os.path.realpath(p), os.stat(p).st_size, os.stat(p).st_mtime_ns) for p in (compiler, sys.executable) if p]
  cpu = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else platform.platform()
  machine = sys.version, files, re.findall(r"^(?:flags|Features)\s*:.*", cpu, re.M)[:1] or cpu
  key = settings, variables, machine, str(Device[Device.DEFAULT].renderer.target), Device.DEFAULT, __name__
  return hashlib.sha256(repr(key).encode() + sources).hexdigest()
def cached_step(key:str, weights:dict[str, Tensor], optimizer:OptimizerGroup) -> Step|None:
  """That step with the values of weights and optimizer, or None.  A pickle is read only if no one else may write it."""
  with suppress(Exception):
    path = cache_folder() / f"{key}.pickle"
    if any(z.st_uid != os.getuid() or z.st_mode & 0o022 for z in (path.parent.stat(), path.stat())): return None
    content = path.read_bytes()
    if content != sealed(key, content[32:]): return None
    os.utime(path)
    step = Step(*pickle.loads(content[32:]))
    tensors = get_state_dict(step.params) | optimizer_state(step.optimizer)
    for name, t in (weights | optimizer_state(optimizer)).items(): overwrite(tensors[name], t.numpy())
    return step
  return None
def cache_step(key:str, step:Step) -> None:              # or goes on without; the 8 used last are kept
  step.optimizer.zero_grad()
  with suppress(Exception):
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    content = sealed(key, pickle.dumps(tuple(step)))
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as f: f.write(content)
    os.replace(f.name, folder / f"{key}.pickle")
    for old in sorted(folder.glob("*.pickle"), key=os.path.getmtime)[:-8]: old.unlink()

# *** training ***
class Stop(ExitStack):
  """The first SIGTERM, SIGHUP or Ctrl-C stops after the step, the second, or one while it is `compiling`, at once."""
  asked = compiling = False
  def handle(self, *_) -> None:
    at_once, self.asked = self.asked or self.compiling, True
    line = b"\nstopping\n" if at_once else b"\nstopping after this step; once more stops at once\n"
    with suppress(OSError): os.write(2, line)            # a signal may come in the middle of a print
    if at_once: raise KeyboardInterrupt
  def __enter__(self) -> Stop:
    numbers = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN: numbers.remove(signal.SIGHUP)         # by nohup
    with suppress(ValueError):                           # not in the main thread: signals go elsewhere
      for number in numbers: self.callback(signal.signal, number, signal.signal(number, self.handle))
    return self

class Job(NamedTuple):                                   # a command line that was found to be sound
  run: Run
  cfg: Config
  source: Source|None = None
  start: Saved|None = None                    # the checkpoint to continue, sample or evaluate
  params: dict|None = None                    # the weights of start or init_from
  prompt: tuple[int, ...] = ()
  check_band: bool = False
  lines: tuple[list, int]|None = None         # those of a .jsonl file, and how many bad ones were skipped

def prepared(job:Job) -> tuple[Step, str]:  # the step to start with; the key to keep it under, empty where none is to
  run, cfg, start, params = job.run, job.cfg, job.start, job.params or {}
  flat = get_state_dict(params)
  for weight in flat.values(): weight.replace(shared(run, weight))
  optimizer = optimizer_for(flat, run.weight_decay)
  for name, t in optimizer_state(optimizer).items():
    if start: overwrite(t, start.tensors[name].numpy())
  key = cache_key(run, cfg) if run.cache else ""
  if key and (cached := cached_step(key, flat, optimizer)): return cached, ""
  return Step(training_step(params, cfg, optimizer, run.clip, run.accum), params, optimizer), key
def take_step(run:Run, source:Source, step:Step, n:int, lr:float) -> list[float]:
  """Optimizer step n on the batch of (seed, n): loss, gradient norm, memory step.  FloatingPointError if not finite."""
  set_rate(step.optimizer, lr)
  GlobalCounters.reset()
  if isinstance(source, Task): batch = source.batch(run.batch, run.seed, n)
  else: batch = data.batch(source.train, run.batch, run.length, run.seed, n)
  loss, norm, eta = [z.item() for z in step.run(*[shared(run, Tensor(z), 0) for z in batch])]
  if not math.isfinite(loss + norm): raise FloatingPointError(f"loss {loss} (gradient norm {norm}) at step {n + 1}", n)
  return [loss, norm, eta]

def changed(source:Source) -> str:  # what is wrong with the file of a text that is no longer what it was
  try:
    if isinstance(source, Text): data.unchanged(source)
  except ValueError as e: return str(e)
  return ""
def speak(job:Job, params:dict, is_bytes:bool) -> None:
  run, prompt = job.run, list(job.prompt)
  evaluate.sample(params, job.cfg, prompt, is_bytes, run.tokens or 200, run.temperature, run.top_k, run.seed)

def train(job:Job, source:Source, stop:Stop) -> int:
  """Trains job.params, from job.start or from step 0; saves, validates, prints a sample.  Returns the exit code."""
  began, run, cfg, out = time.perf_counter(), job.run, job.cfg, Path(job.run.out)
  (step, key), n, solved = prepared(job), 0, False       # n: optimizer steps taken
  if job.start: n, solved = job.start.meta["step"], job.start.meta.get("solved", False)
  first, cached, log, params = n, run.cache and not key, Log(out, n), step.params
  if run.devices > 1:                                    # copies, on the one device that validates
    params = atlas.unflatten({name: Tensor(w.numpy()).realize() for name, w in get_state_dict(params).items()})
  held_out = evaluate.HeldOut(params, cfg, source, run.batch, run.length, run.seed)
  def gather():
    for copy, w in zip(get_state_dict(params).values(), get_state_dict(step.params).values()):
      if copy is not w: overwrite(copy, w.numpy())
  def save():                                            # and the last two checkpoints are kept
    os.fsync(log.file.fileno())                          # its rows are on the disk before a checkpoint of their step
    weights = {f"weights.{name}": w for name, w in get_state_dict(step.params).items()}
    meta = {"step": n, "solved": solved, "config": asdict(cfg), "run": asdict(run), "text": identity(source)}
    atlas.save(checkpoint(out, n), weights | optimizer_state(step.optimizer), meta)
    for old in checkpoints(out)[:-2]: old.unlink()

  if cached: print(f"the compiled step is in {cache_folder()}")
  elif BEAM: print(f"compiling: BEAM={BEAM.value} times many forms of each kernel before the first step: an hour or so")
  else: print("compiling: the first step takes half a minute or so, and the time left is known after the second")
  bar = tqdm(total=run.steps, initial=n, unit="step", dynamic_ncols=True, smoothing=0.1)
  try:
    with Context(TRAINING=1), log.file, bar:
      while True:
        due = run.eval_every and (n % run.eval_every == 0 or n == run.steps) and not changed(source)
        if due and log.row[3:4] == [""]:                 # after a step, or where the run before was stopped after it
          gather()
          held_out.validate(n)
          log.amend(held_out.bits.mean())
          solved = held_out.right >= SOLVED
          if solved: save()
        if n >= run.steps or stop.asked or solved or changed(source): break
        stop.compiling, tick, lr = n == first and not cached, time.perf_counter(), rate(run, n)
        loss, norm, eta = take_step(run, source, step, n, lr)
        n, seconds = n + 1, time.perf_counter() - tick
        tokens, all_seconds = run.batch * run.length, log.seconds + time.perf_counter() - began
        row = f"{n},{n * tokens},{loss:.6f},,{lr:.8g},{norm:.6f},{eta:.8g},{tokens / seconds:.1f},{all_seconds:.2f}"
        log.write(row.split(","))
        bar.update()
        bar.set_postfix_str(f"loss {loss:.3f}, {loss / math.log(2):.3f} bits/{evaluate.unit(source)}, memory step "
                            f"{eta:.4f}, {seconds * 1e3:.0f} ms, {tokens / seconds:.0f} tok/s, "
                            f"{GlobalCounters.mem_used / 1e6:.0f} MB")
        if n == first + 1 and key: cache_step(key, step)
        stop.compiling = False
        if n == run.steps or run.save_every and n % run.save_every == 0: save()
      if not checkpoint(out, n).exists(): save()
    left, ends_early = checkpoints(out)[-1], n < run.steps
    if changed(source): return ended(f"error: {changed(source)}; resume=1 continues from {left}", 1)
    if stop.asked and ends_early and not solved: return ended(f"stopped at step {n}, saved: continue with resume=1")
    gather()
    if run.eval_every and isinstance(source, Text) and not len(held_out.bits): held_out.validate(n)
    bits, (least, most) = held_out.bits, BAND
    if not np.isfinite(bits).all(): raise FloatingPointError(f"the validation loss after step {n}", n)
    if solved and ends_early: print(f"{SOLVED:.0%} right after {n} steps: done early")
    if run.eval_every: held_out.report(out, n, run.tokens)
    if isinstance(source, Text) and not stop.asked: speak(job, params, source.is_bytes)
    print(f"{time.perf_counter() - began:.0f} s in all, at most {peak_mb():.0f} MB; checkpoint: {left}")
    if not (job.check_band and len(bits)) or least <= bits.mean() <= most: return 0
    return ended(f"error: {bits.mean():.3f} bits per byte is outside the band {least} to {most} of this run", 1)
  except FloatingPointError as e:                        # a checkpoint of these weights that this run wrote is removed
    what, last = e.args
    if last > first: checkpoint(out, last).unlink(missing_ok=True)
    kept = f"the last good checkpoint is {checkpoints(out)[-1]}" if checkpoints(out) else "no good checkpoint was saved"
    return ended(f"error: {what} is not finite; {kept}: lower lr or clip", 1)
  except KeyboardInterrupt:
    if not stop.compiling: raise
    return ended("stopped while compiling, before a step was taken: nothing is lost")

# *** bench ***
COLUMNS = tuple("preset backend length batch params first_step_s step_ms tok_s kernels gflop gbytes peak_mb "
                "decode_tok_s cores memory products rest".split())
def peak_mb() -> float:                                  # the most memory that this process has held so far
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2 ** 20 if sys.platform == "darwin" else 1024)
def shares(step:Callable[[], Any]) -> list[str]:
  """Shares of kernels.py's memory and products, and of the rest, in a step; empty where kernels run as one."""
  with Context(DEBUG=2, TRAINING=1), redirect_stdout(io.StringIO()) as shown: step()
  text, seconds = ansistrip(shown.getvalue()), {"memory": 0.0, "matmul": 0.0, "": 1e-12}
  for name, number, unit in re.findall(r" (memory|matmul|)\S* +arg .* tm +([\d.]+)([mu]?)s/", text):
    seconds[name] += float(number) / {"": 1, "m": 1e3, "u": 1e6}[unit]
  return ["" if "batched" in text else f"{x / sum(seconds.values()):.3f}" for x in seconds.values()]
def bench_row(run:Run, cfg:Config) -> list:              # COLUMNS from params on; the median of 5 steps
  tokens, times, count = np.random.default_rng(run.seed).integers(0, cfg.vocab, 4096 + run.length), [], GlobalCounters
  text, job = Text("", tokens, tokens, False, "", "", None), Job(run, cfg, params=atlas.init(cfg, run.seed))
  step, _ = prepared(job)
  def one_step(): take_step(run, text, step, 0, 0.0)
  for _ in range(8):
    began = time.perf_counter()
    with Context(TRAINING=1): one_step()
    times.append(time.perf_counter() - began)
  seconds = float(np.median(times[3:]))
  row = [atlas.parts(cfg)["total"], f"{times[0]:.1f}", f"{seconds * 1e3:.1f}",
         f"{run.batch * run.length / seconds:.0f}", count.kernel_count, f"{count.global_ops / 1e9:.2f}"]
  row += [f"{count.global_mem / 1e9:.3f}", f"{peak_mb():.0f}"]
  one_token = evaluate.token_step(cfg, functools.partial(atlas.forward, step.params, cfg))
  state, times = None, []
  for _ in range(33):
    began = time.perf_counter()
    logits, state = one_token(Tensor([[1]]), state)
    logits.numpy()
    times.append(time.perf_counter() - began)
  return [*row, f"{1 / np.median(times[3:]):.0f}", NUM_CPU_THREADS.value, *shares(one_step)]

def bench(run:Run, model:dict) -> None:                  # each preset and length in a process of its own
  path, rows = Path(run.out) / "bench.csv", list[list]()
  available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if kernels.on_cpu(Device.DEFAULT) else math.inf
  path.parent.mkdir(parents=True, exist_ok=True)
  print("  ".join(f"{c:>12s}" for c in COLUMNS))
  for name, length in itertools.product(*listed(run)):
    cfg = atlas.preset(name, run.size, **model)
    form = "fused" if takes_fused(cfg, run.batch // run.accum) else "ops"
    rows.append([name, "softmax" if cfg.mixer == "attention" else form, length, run.batch])
    try:
      if memory_estimate(cfg, run.batch // run.accum, length) > available: raise MemoryError
      with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        rows[-1] += pool.submit(bench_row, replace(run, length=length, cache=False), cfg).result()
    except (MemoryError, BrokenExecutor): rows[-1] += ["does not fit", *[""] * (len(COLUMNS) - 5)]
    evaluate.write_rows(path, COLUMNS, rows)
    print("  ".join(f"{x!s:>12s}" for x in rows[-1]), flush=True)
  print(f"written to {path}")

# *** the commands ***
def listing(settings:dict) -> str: return ", ".join(f"{k}={v}" for k, v in settings.items())
def parts_line(cfg:Config) -> str:
  count = atlas.parts(cfg)
  return f"{count.pop('total'):14,d} = " + " + ".join(f"{n:,} {part}" for part, n in count.items())
def show_params(own:dict, model:dict) -> None:           # of every size and preset, or of those that are named
  for size in [own["size"]] if "size" in own else atlas.SIZES:
    print(f"{size}: {listing(atlas.SIZES[size] | model)}")
    for name in [own["preset"]] if "preset" in own else atlas.PRESETS:
      print(f"  {name:17s} {parts_line(atlas.preset(name, size, **model))}")
def describe(run:Run, cfg:Config, source:Source|None) -> None:
  print("settings:", *[f"{k}={v}" for k, v in (asdict(run) | asdict(cfg)).items() if v != ""])
  print(f"parameters: {parts_line(cfg).strip()}")
  megabytes = memory_estimate(cfg, run.batch // run.accum // run.devices, run.length) / 1e6
  parts = f", in {run.accum} parts," if run.accum > 1 else ""
  where = f"on {Device.DEFAULT}" if run.devices == 1 else f"on each of {', '.join(device_names(run))}"
  print(f"memory: about {megabytes:.0f} MB for a training step of {run.batch} x {run.length} tokens{parts} {where}")
  if isinstance(source, Task): print(f"task: {source.name}, {listing(source.settings)}")
  elif source: print(f"text: {source.name}, {len(source.train):,} tokens to train on, {len(source.val):,} to validate "
                     f"(sha256 {source.digest[:16]})")

def fresh_config(run:Run, model:dict) -> Config:         # the model's settings where no file of weights has them
  if run.mode == "bench": return [atlas.preset(name, run.size, **model) for name in listed(run)[0]][0]
  horizon = min(max(Config.horizon, run.length), 1 << 20)                       # what is trained on lies within it
  return atlas.preset(run.preset, run.size, **{"horizon": horizon} | model)
def imported(run:Run, cfg:Config, own:dict, model:dict) -> tuple[Config, dict]:
  """The settings of init_from, but those that a key, a size or a preset asks for, which are printed; its weights."""
  path = Path(os.path.expanduser(run.init_from))
  refuse(not path.is_file(), f"init_from={path} does not exist: name a checkpoint or an exported file")
  saved = read_weights(path)
  before, asked = atlas.config_of(saved), set(model)
  if "size" in own: asked |= atlas.SIZES[run.size].keys()
  if "preset" in own: asked = asked.union(*atlas.PRESETS.values())
  changes = {"horizon": max(before.horizon, cfg.horizon)} | {name: getattr(cfg, name) for name in asked}
  if "chunk" in asked: changes.setdefault("muon_every", math.gcd(before.muon_every, cfg.chunk))
  cfg = replace(before, **changes)
  params, settings = atlas.weights_of(saved, layout(run, cfg)), asdict(before)
  for name, x in asdict(cfg).items():
    if x != settings[name]: print(f"warning: {name}={x} here, and {path} was made with {name}={settings[name]}")
  return cfg, params
def from_checkpoint(start:Saved, run:Run, own:dict, model:dict) -> tuple[Run, Config]:
  """The settings of a checkpoint, with the free ones of the command line.  ValueError for a key that contradicts it."""
  path, advice = start.path, f"name a checkpoint, or give init_from={start.path}"
  missing = {"step", "run", "text", "config"} - start.meta.keys()
  refuse(missing, f"{path} holds weights and no run to continue: {advice}")
  recorded, free, now = start.meta["run"], FREE, {"mode", "out", "resume", "init_from", "cores"}
  if run.mode != "train": free, now = free | {"data", "batch", "seed", "horizon"}, now | SAMPLING | {"seed"}
  if run.mode != "train" and run.task: free = free | {"task", "length"}
  for key, x in (own | model).items():
    before = (recorded | start.meta["config"]).get(key)
    refuse(key not in free and before != x, f"{key}={x} contradicts the checkpoint {path}, made with {key}={before}: "
           f"leave {key} out, or train anew in another out")
  unknown, cfg = recorded.keys() - vars(run).keys(), atlas.config_of(start)
  refuse(unknown, f"{path} has settings that are unknown here: use the version that made it")
  settings = recorded | own | {k: getattr(run, k) for k in now}
  return Run(**settings), replace(cfg, **{k: x for k, x in model.items() if k in free})
def opened(run:Run, cfg:Config, task:Task|None, named:bool) -> Source:  # text named for evaluation is read whole
  if named and run.mode == "eval": return data.load(run.data, cfg.vocab, 1, parts=1)
  if not task: return data.load(run.data, cfg.vocab, run.length)
  highest, advice = max(int(z.max()) for z in task.batch(1, run.seed, 0)), "give the task vocab="
  refuse(task.vocab > cfg.vocab, f"task={run.task} has {task.vocab} tokens, the model vocab={cfg.vocab}: {advice}")
  refuse(highest >= cfg.vocab, f"task={run.task} has token {highest}, outside vocab={cfg.vocab}: {advice}")
  return task
def restored(run:Run, cfg:Config, start:Saved, source:Source|None, lines:bool) -> dict:
  """The weights of a checkpoint.  ValueError for another text than before, ids for bytes, or another decoder."""
  before, text, is_task = Run(**start.meta["run"]), start.meta["text"], isinstance(source, Task)
  what, now = f"task={run.task}" if is_task else f"data={run.data}", identity(source) if source else {}
  refuse(source and run.mode == "train" and now | text != now, f"{what} has changed since {start.path} was written: "
         f"give the same, or init_from={start.path} to go on with another")
  refuse(lines and (not text["is_bytes"] or cfg.vocab < 256),
         f"{what} is text, and {start.path} is not: train on bytes first")
  refuse(is_task and decoded_length(before) != decoded_length(run), f"{what} does not fit {start.path}, made with "
         f"task={before.task}: compression has a decoder for its own length")
  return atlas.weights_of(start, layout(before, cfg))

def resolve(own:dict, model:dict) -> Job:
  """Finds what is wrong, with parse in this order: syntax, keys, types, combinations, device, data, checkpoint, out."""
  run = Run(**own | {"out": os.path.expanduser(own.get("out", Run.out))})
  check_run(run, own)
  out, named = Path(run.out), "data" in own
  reads, trains = run.mode in ("train", "eval"), run.mode in ("train", "bench")
  if run.mode == "plot":
    evaluate.check_plot(out)
    return Job(run, atlas.preset(run.preset, run.size, **model))
  task = data.task(run.task, own.get("length"), model.get("vocab")) if run.task and reads else None
  if task and run.mode == "train":
    run, model = replace(run, length=task.settings["length"]), model | {"vocab": task.vocab}
  if run.mode in ("sample", "watch") and "out" not in own and not checkpoints(out) and WEIGHTS.is_file():
    run = replace(run, init_from=str(WEIGHTS))
  continued = bool(checkpoints(out)) and (run.mode in READERS or run.resume)
  cfg = Config() if continued else fresh_config(run, model)         # with a checkpoint, its settings count
  check_device(run)
  lines = start = params = source = None
  if run.mode == "eval" and run.data.endswith(".jsonl"):
    lines = evaluate.json_lines(Path(os.path.expanduser(run.data)), run.skip_bad)
  elif named and reads and (continued or run.init_from or run.mode == "eval"): data.read(run.data)  # its faults first
  if continued:
    start = newest(out)
    run, cfg = from_checkpoint(start, run, own, model)
  elif run.init_from: cfg, params = imported(run, cfg, own, model)
  lacks = run.mode in READERS and not start and not run.init_from
  refuse(lacks, f"out={run.out} has no checkpoint: train first, or name the folder of one")
  if trains: check_parts(run)
  check_dtype(cfg)
  if run.task and reads and not task and not named: task = data.task(run.task, run.length, cfg.vocab)
  if task: run = replace(run, length=task.settings["length"])
  if reads and not lines: source = opened(run, cfg, task, named)
  ids = isinstance(source, Text) and not source.is_bytes
  sized = start or run.init_from or "vocab" in atlas.SIZES[run.size] | model
  refuse(ids and not sized, f"data={run.data} holds token ids: give vocab=, the number of tokens of its tokenizer")
  if start: params = restored(run, cfg, start, source, bool(lines))
  is_bytes = start.meta["text"]["is_bytes"] if start else not ids
  prompt = () if task else tuple(evaluate.prompt_ids(run.prompt, cfg, is_bytes))
  too_long = run.mode == "watch" and len(prompt) > watch.TOKENS
  refuse(too_long, f"prompt has {len(prompt)} tokens, and mode=watch reads {watch.TOKENS}: give a shorter text")
  if trains: check_out(out)
  check_band = run.mode == "train" and not start and not (own.keys() | model.keys()) - QUIET
  return Job(run, cfg, source, start, params, prompt, check_band, lines)

def perform(job:Job, own:dict, model:dict) -> int:       # what a sound command line asks for; returns the exit code
  run, cfg, start, source, params, out = job.run, job.cfg, job.start, job.source, job.params, Path(job.run.out)
  if run.mode == "train": describe(run, cfg, source)
  if run.mode == "params": show_params(own, model)
  elif run.steps == 0: return 0
  elif run.mode == "bench": bench(run, model)
  elif run.mode == "plot": evaluate.plot(out)
  elif run.mode == "train" and source:
    job = job._replace(params=params or atlas.filled(layout(run, cfg), run.seed))
    with Stop() as stop, run_folder(out, start): return train(job, source, stop)
  elif params and run.mode in ("sample", "watch"):
    if not start: print(f"out={run.out} has no checkpoint: the weights are those of {WEIGHTS}")
    is_bytes = not start or start.meta["text"]["is_bytes"]
    if run.mode == "sample": speak(job, params, is_bytes)
    else: watch.watch(params, cfg, list(job.prompt), is_bytes, out, start.path if start else WEIGHTS)
  elif not (start and params): pass
  elif run.mode == "export":
    path, flat = out / "weights.safetensors", get_state_dict(params)
    atlas.save(path, {n: flat[n] for n in atlas.layout(cfg)}, {n: start.meta[n] for n in ("config", "text", "step")})
    print(f"written to {path}, {path.stat().st_size / 1e6:.1f} MB, of {start.path}: atlas.load(path) reads it")
  elif job.lines: evaluate.evaluate_lines(params, cfg, *job.lines, run.batch)
  elif isinstance(source, Task):
    score = evaluate.scorer(params, cfg, source, run.batch, run.seed)
    evaluate.table(score, source, run.tokens or evaluate.VALIDATION_TOKENS)
  elif source: evaluate.positions(params, cfg, source, start.path, run.batch, run.length, run.tokens)
  return 0
def fault(e:Exception) -> str:  # what is wrong, in one line that any terminal can show: a name may hold line ends
  why = str(e)
  if isinstance(e, MemoryError): why = "there is not enough memory: take a smaller batch, length or model"
  if isinstance(e, sqlite3.Error): why = f"tinygrad's cache {CACHEDB} cannot be used ({e}): set CACHELEVEL=0"
  if isinstance(e, OSError): why = f"a file cannot be written ({e.strerror}): make room; what was saved before is whole"
  if isinstance(e, OSError) and e.filename: why = f"{e.filename} cannot be used ({e.strerror}): give another path"
  if isinstance(e, BrokenPipeError): why = "the processes that compile kernels cannot start: set PARALLEL=0"
  return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in why)

@evaluate.shown()
def main(argv:list[str]) -> int:
  """Runs a command line in this process.  Exit code: 0 done, 1 stopped, disk full, not finite, band missed, 2 input."""
  if {"--help", "-h", "help"} & set(argv): return ended(usage())
  job:Job|None = None
  try:
    own, model = parse(argv)
    job = resolve(own, model)
    return perform(job, own, model)
  except (ValueError, OSError, MemoryError, sqlite3.Error) as e:
    asked = job is None or job.run.mode == "params" or isinstance(e, Taken)      # by a run that began just now
    if isinstance(e, ValueError) and not asked: raise    # a fault of ours
    return ended(f"error: {fault(e)}", 2 if asked else 1)
  except KeyboardInterrupt:
    left = checkpoints(Path(job.run.out)) if job and job.run.mode == "train" else []
    return ended("\nstopped at once" + (f": resume=1 continues from {left[-1]}" if left else ""), 1)

if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
