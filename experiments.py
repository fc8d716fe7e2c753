"""The paper's experiments at small scale, one function and one command each: python experiments.py NAME

speed, expansion, recall, learnability, capacity and heatmap measure the memory alone, or networks as small.
The others train models, in a process for each core.  Finished runs are kept in runs/results.jsonl, or LEDGER=FILE: a
command that was stopped goes on from there, and TRAIN=0 prints what there is."""
from __future__ import annotations
import bisect, contextlib, dataclasses, functools, gc, itertools, json, math, multiprocessing, os, platform, re, shlex
import subprocess, sys, time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple
from unittest.mock import patch
import numpy as np
from tinygrad import Context, Device, Tensor, TinyJit
from tinygrad.helpers import GlobalCounters, getenv
from tinygrad.nn.optim import Adam
from tinygrad.nn.state import get_state_dict
import atlas, data, evaluate, kernels, rule, train, watch

# *** shared by the experiments: random vectors, the choice of a rate, tables, pictures ***

def tensor(x) -> Tensor: return Tensor(np.ascontiguousarray(x, dtype=np.float32)).realize()

def unit(rng:np.random.Generator, *shape:int, shared:Any=0.0) -> np.ndarray:
  """Random vectors of length 1.  `shared` is a component that they have in common before they are normalised."""
  x = rng.normal(size=shape) + shared
  return x / np.linalg.norm(x, axis=-1, keepdims=True)

def at_best_rate(results:np.ndarray, merit:np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Results (cases, rates, seeds, ...) at the rate of each case's greatest merit (cases, rates), and that rate's index.
  The merit is that of the first seed, which only chooses: the results are those of the other seeds."""
  best = merit.argmax(1)
  return results[np.arange(len(best)), best, 1:], best

def spread(x:np.ndarray) -> str:                         # over seeds; one seed has none
  return f"{x.mean():.3f}" + (f" +- {x.std():.3f}" if len(x) > 1 else "")

def table(columns:dict[str, str]) -> Callable[..., None]:
  """Prints the headings of a table and returns the function that prints a row of cells.
  columns: heading -> format of the cells, which begins with alignment and width, as in ">9.1f"."""
  def row(*cells): print("".join(f"{cell:{form}}" for cell, form in zip(cells, columns.values())), flush=True)
  print("".join(f"{name:{re.findall('[<>][0-9]+', form)[0]}}" for name, form in columns.items()), flush=True)
  return row

def picture(file:str, label:str, panels:dict[str, Any], log:bool=True, colors:int=10) -> None:
  """Draws panels in a row into assets/.  label: of the y axis.  panels: title, which names the x axis -> an image of
  values from 0 to 1, or curves {name: (x, y (seeds, len(x)))}.  After `colors` curves, the colors repeat in another
  line style."""
  try: import matplotlib.pyplot as plt
  except ImportError: return print("for the picture: pip install '.[plot]'")
  panels = {title: panel for title, panel in panels.items() if len(panel)}
  if not panels: return
  size = 2 + 3 * len(panels), 3.6
  figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
  axes[0, 0].set_ylabel(label)
  for axis, (title, panel) in zip(axes[0], panels.items()):
    axis.set_title(title, fontsize=8)
    if isinstance(panel, np.ndarray):
      shades = plt.matplotlib.colors.ListedColormap(watch.shades(np.linspace(0, 1, 64)[None])[0] / 255)
      figure.colorbar(axis.imshow(panel, vmin=0, vmax=1, cmap=shades), ax=axis)
      continue
    for i, (name, (x, y)) in enumerate(panel.items()):
      style = ("-", "--", ":")[i // colors]
      axis.errorbar(x, y.mean(0), y.std(0), label=name, color=f"C{i % colors}", linestyle=style, marker=".")
    if log: axis.set(xscale="log", xticks=x, xticklabels=x)
    axis.minorticks_off()
  figure.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=7, frameon=False, loc="outside right upper")
  path = Path("assets", file)
  path.parent.mkdir(exist_ok=True)
  figure.savefig(path, dpi=110)
  print(f"written to {path}")

# *** speed of the memory, and what features=exp costs ***

SIZES: dict[str, Any] = dict(key_dim=64, value_dim=64, expand=4, chunk=64)
LAYERS = {                                               # the memory of a preset, and the sequences that it reads
  "mlp, window 9, momentum": (atlas.preset("titans", **SIZES | dict(key_dim=32, value_dim=32, window=9)), 4, 512),
  "atlas, heads of 16": (atlas.preset("atlas", expand=2, muon_every=1), 2, 128),
  "titans, dim 256": (atlas.preset("titans", **SIZES), 4, 2048),
  "omega 16 with Muon": (atlas.preset("titans", **SIZES, window=16, optimizer="muon", muon_every=1), 1, 512),
}

def layer_step(cfg:atlas.Config, B:int, T:int) -> tuple[Callable, list[Tensor]]:
  """A jitted forward and backward pass of kernels.memory, inputs -> (y, *their gradients); and random inputs."""
  rng, H = np.random.default_rng(0), cfg.heads
  weights = {name: rng.normal(size=shape) * shape[-1] ** -0.5 for name, shape in atlas.memory_shapes(cfg).items()}
  if cfg.features == "poly": weights["a"] = rng.uniform(0.5, 1, 3)
  q, k, v = unit(rng, 3, B, H, T, cfg.key_dim)
  gates = [rng.uniform(low, high, (B, H, T)) for low, high in ((0.97, 1), (0.8, 0.95), (0, 0.01))]
  gates.append(rng.uniform(0, 1 / cfg.window, (B, H, T, cfg.window)))
  @TinyJit
  def step(*x):
    y, _ = kernels.memory(cfg, dict(zip(weights, x)), *x[len(weights):])
    results = y, *y.square().sum().gradient(*x)
    Tensor.realize(*results)
    return results
  return step, [tensor(x) for x in (*weights.values(), q, k, v, *gates)]

NUMPY = """import numpy, timeit
x = numpy.ones((1024, 1024), numpy.float32)
print(2 * 1024 ** 3 / 1e9 / min(timeit.repeat(lambda: x @ x, number=1, repeat=30)))"""

def numpy_speed() -> float:
  """GFLOP/s of numpy's product with as many threads as kernels have, which numpy reads when it is imported."""
  threads = str(kernels.NUM_CPU_THREADS.value)
  names = "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"
  environment = os.environ | dict.fromkeys(names, threads)
  speed = float(subprocess.check_output([sys.executable, "-c", NUMPY], env=environment))
  print(f"numpy's product of 1,024 x 1,024 numbers on {threads} cores: {speed:.0f} GFLOP/s")
  return speed

def cost_table() -> Callable[..., tuple[float, list]]:
  """Prints the headings of a table.  Returns a function that prints what a memory costs, and returns tokens/s and the
  results.  first s: the pass that compiles.  ms: the median of 7 passes after compilation.  of numpy: GFLOP/s in units
  of numpy's.  MB: all buffers of a captured pass, with its inputs and results."""
  fastest = numpy_speed()
  row = table({"layer": "<26s", "form": "<6s", "first s": ">9.1f", "ms": ">9.1f", "tokens/s": ">10.0f",
               "GFLOP": ">8.2f", "GFLOP/s": ">9.1f", "of numpy": ">10.2f", "kernels": ">9d", "MB": ">9.1f"})
  def cost(name:str, cfg:atlas.Config, B:int, T:int) -> tuple[float, list]:
    gc.collect()                                         # frees the buffers of the layer before
    before, times = GlobalCounters.mem_used, []
    step, inputs = layer_step(cfg, B, T)
    for _ in range(10):
      GlobalCounters.reset()
      start = time.perf_counter()
      results = step(*inputs)
      Device[Device.DEFAULT].synchronize()
      times.append(time.perf_counter() - start)
    seconds, gflop = float(np.median(times[3:])), GlobalCounters.global_ops / 1e9
    speed, megabytes = B * T / seconds, (GlobalCounters.mem_used - before) / 1e6
    row(name, cfg.backend, times[0], seconds * 1e3, speed, gflop, gflop / seconds, gflop / seconds / fastest,
        GlobalCounters.kernel_count, megabytes)
    return speed, [x.numpy() for x in results]
  return cost

def speed() -> None:
  """The memory of each layer in one kernel.  Those with small keys in stock operations too: others compile slowly."""
  cost = cost_table()
  for name, (cfg, *sizes) in LAYERS.items():
    fast, fused = cost(name, dataclasses.replace(cfg, backend="fused"), *sizes)
    if cfg.key_dim > 32: continue
    slow, ops = cost(name, dataclasses.replace(cfg, backend="ops"), *sizes)
    error = max(np.linalg.norm(x - z) / np.linalg.norm(z) for x, z in zip(fused, ops))
    print(f"{'':26s}fused is {fast / slow:.1f} times as fast; "
          f"largest relative difference of outputs and gradients {error:.1e}", flush=True)

def expansion() -> None:
  """What features=exp costs against the length of the sequence, with the rule of the preset `dot`."""
  cost = cost_table()
  for T in (128, 256, 512, 1024): cost(f"exp, {T} tokens", atlas.preset("dot", backend="ops"), 2, T)

# *** recall without training ***

RULES: dict[str, dict] = {
  "Hebbian": dict(loss="dot"),
  "delta": {},
  "Omega, window 16": dict(window=16),
  "delta, Muon": dict(optimizer="muon"),
}
KINDS = ("independent", "correlated", "overwritten")
STEPS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)

def recall_pairs(rng:np.random.Generator, kind:str, trials:int, N:int, d:int, T:int) -> list[np.ndarray]:
  """N pairs of unit vectors in each of `trials` streams: keys and values (trials,T,d), which are zero after the last
  pair; and what should be recalled for the first N keys (trials,N,d).  correlated: all keys share a component, and
  cosines are about 1/2.  overwritten: half of the keys get a second value, which is the one to recall."""
  shared = rng.normal(size=(trials, 1, d)) if kind == "correlated" else 0.0
  keys = unit(rng, trials, N, d, shared=shared)
  values = unit(rng, trials, N, d)
  again = N // 2 if kind == "overwritten" else 0
  newer = unit(rng, trials, again, d)
  padding = np.zeros((trials, T - N - again, d))
  parts = [keys, keys[:, :again], padding], [values, newer, padding], [newer, values[:, again:]]
  return [np.concatenate(part, axis=1) for part in parts]

def answers(fields:dict, k:np.ndarray, v:np.ndarray, q:np.ndarray, eta:np.ndarray, alpha:Any=1.0) -> np.ndarray:
  """What linear memories, empty at first, recall for q (B,H,N,d) after they have read k, v (B,H,T,d) in steps of eta
  (B,H,T).  Of the polynomial features the quadratic ones count."""
  _, H, _, d = k.shape
  cfg = atlas.Config(memory="linear", chunk=1, heads=H, key_dim=d, value_dim=d, anchors=0, **fields)
  weights = {name: Tensor.zeros(*shape).contiguous() for name, shape in atlas.memory_shapes(cfg).items()}
  if cfg.features == "poly": weights["a"] = Tensor([0.0, 0.0, 1.0])
  ones = np.ones_like(eta)
  gates = tensor(ones * alpha), tensor(ones), tensor(eta), tensor(np.ones((*eta.shape, cfg.window)))
  _, state = kernels.memory(cfg, weights, tensor(k), tensor(k), tensor(v), *gates)
  return kernels.recall(cfg, weights, state, tensor(q)).numpy()

def recalled(fields:dict, sizes:tuple, trials:int, seeds:int, d:int=16) -> np.ndarray:
  """The share of hits (kinds, sizes, seeds) after every pair was written once: keys for which the memory's output is
  nearest to the right value.  One more seed chooses the step size.  Batch: step sizes; heads: (seeds, trials)."""
  steps, T, hits = np.reshape(STEPS, (-1, 1, 1)), 3 * max(sizes) // 2, []
  length = 2.0 if fields["features"] == "exp" else 1.0   # of keys: exp(4 cos), as sharp as a trained model's may become
  largest = math.exp(4.0) if fields["features"] == "exp" else 1.0          # phi(k).phi(k), over which a step is taken
  for kind, N in itertools.product(KINDS, sizes):
    drawn = [recall_pairs(np.random.default_rng([seed, N]), kind, trials, N, d, T) for seed in range(1 + seeds)]
    k, v, targets = [np.stack([np.concatenate(x)] * len(STEPS)) for x in zip(*drawn)]
    eta = steps * v.any(-1) / largest                    # a token of padding takes no step
    outputs = answers(fields, k * length, v, k[:, :, :N] * length, eta)
    nearest = (outputs @ targets.swapaxes(-1, -2)).argmax(-1)              # all values have length 1
    hits.append((nearest == np.arange(N)).reshape(len(STEPS), 1 + seeds, -1).mean(-1))
  results = np.stack(hits)
  return at_best_rate(results, results[..., 0])[0].reshape(len(KINDS), len(sizes), seeds)

def recall(sizes:tuple=(8, 16, 32, 64), trials:int=4, seeds:int=3, rules:tuple=tuple(RULES)) -> dict:
  """Prints and draws the share of hits against the number of pairs, keys of 16: mean over seeds, and their spread at
  the last size but one.  Returns {(rule, features): hits (kinds, sizes, seeds)}."""
  print(f"{trials} trials for each of {seeds} seeds, and of one more that chooses the step of {STEPS}; pairs: {sizes}")
  row, results = table({"rule": "<18s", "features": "<9s"} | dict.fromkeys(KINDS, ">32s")), {}
  for features, name in itertools.product(("identity", "poly", "exp"), rules):
    if features == "exp" and RULES[name].get("optimizer") == "muon": continue    # an expansion is no matrix
    hits = results[name, features] = recalled(RULES[name] | {"features": features}, sizes, trials, seeds)
    means = [" ".join(f"{x:.2f}" for x in kind.mean(-1)) for kind in hits]
    row(name, features, *[f"{mean} (+-{kind[-2].std():.2f})" for mean, kind in zip(means, hits)])
  panels = {f"pairs written once, {kind} keys": {", ".join(key): (sizes, hits[i].T) for key, hits in results.items()}
            for i, kind in enumerate(KINDS)}
  picture("recall.png", "values recalled", panels, colors=len(rules))
  return results

# *** learnability: which mappings a memory learns while it reads ***

MAPPINGS = ("low-rank", "MLP", "attention + MLP", "attention outputs as inputs", "sliding window + MLP")
RATES = (3e-4, 1e-3, 3e-3, 1e-2)

def adam_step(weights:list[Tensor], losses:Callable[..., Tensor]) -> Callable[..., Tensor]:
  """A jitted step of Adam for a batch of networks: step(rate, *x) -> losses(*x), (networks), before the step.  The rate
  broadcasts against the weights.  The sum of the losses descends: no network's gradient depends on another network."""
  adam = Adam(weights)
  @TinyJit
  def step(rate, *x):
    adam.lr = rate
    adam.zero_grad()
    loss = losses(*x)
    loss.sum().backward()
    with Context(TRAINING=1): Tensor.realize(loss, *adam.schedule_step())
    return loss
  return step

def mapped(rng:np.random.Generator, d:int, T:int, window:int) -> list:
  """Inputs and targets (T,d) for each of MAPPINGS (section 6.4), from Gaussian tokens.  Rank d/8; MLPs of d-d-d."""
  def matrix(rows, columns): return rng.normal(size=(rows, columns)) * rows ** -0.5
  def mlp(x):
    z = x @ matrix(d, d)
    return z * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z ** 3))) @ matrix(d, d)
  def attention(x, reach):
    q, k, v = [x @ matrix(d, d) for _ in range(3)]
    lag = np.subtract.outer(np.arange(T), np.arange(T))
    weights = np.where((lag >= 0) & (lag < reach), np.exp(q @ k.T * d ** -0.5), 0)
    return weights / weights.sum(-1, keepdims=True) @ v
  x, rank = rng.normal(size=(T, d)), max(1, d // 8)
  mixed = attention(x, T)
  after = mlp(mixed)
  low_rank = x @ matrix(d, rank) @ matrix(rank, d)
  return [(x, low_rank), (x, mlp(x)), (x, after), (mixed, after), (x, mlp(attention(x, window)))]

def learnability(d:int=64, T:int=2000, seeds:int=3, window:int=64) -> np.ndarray:
  """An MLP of d-d-d-d without biases is trained online, one step of Adam a token, on |M(i_t) - o_t|^2 / |o_t|^2
  (section 6.4, Figure 6, at a quarter of its size).  Prints, draws and returns the loss before each step, (mappings,
  seeds, T).  The networks are one batch, (mappings, rates, seeds).  One more seed chooses a rate by its mean loss."""
  print(f"d {d}, {T} tokens, sliding window {window}; {seeds} seeds, and one more that chooses the rate of {RATES}")
  pairs = np.array([mapped(np.random.default_rng([seed, d]), d, T, window) for seed in range(1 + seeds)], np.float32)
  stream = pairs.transpose(3, 2, 1, 0, 4)[:, :, :, None, :, None]  # (T, input or target, mappings, 1, seeds, 1, d)
  rng, networks = np.random.default_rng(0), (len(MAPPINGS), len(RATES), 1, 1, 1)
  scales = d ** -0.5, d ** -0.5, 1e-3                    # outputs start small, as some targets are: the loss is 1 at 0
  weights = [tensor(np.tile(rng.normal(size=(1 + seeds, d, d)) * scale, networks)) for scale in scales]
  def loss(x, target):
    for w in weights[:-1]: x = (x @ w).gelu()
    return (x @ weights[-1] - target).square().sum((-1, -2)) / target.square().sum((-1, -2))
  step, rates = adam_step(weights, loss), tensor(np.reshape(RATES, (-1, 1, 1, 1)))
  losses = np.stack([step(rates, *map(tensor, pair)).numpy() for pair in stream], axis=-1)
  results, best = at_best_rate(losses, -losses[:, :, 0].mean(-1))
  ends = results[..., -(T // 4):].mean(-1)
  row = table({"mapping": "<30s", "rate": ">8.0e", "mean loss of the last quarter": ">32s"})
  for name, i, end in zip(MAPPINGS, best, ends): row(name, RATES[i], spread(end))
  width = max(1, T // 40)
  blocks = results[..., :T // width * width].reshape(len(MAPPINGS), seeds, -1, width).mean(-1)
  curves = {name: (np.arange(y.shape[1]) * width, y) for name, y in zip(MAPPINGS, blocks)}
  picture("learnability.png", f"loss, mean of {width} tokens", {"position": curves}, log=False)
  return results

# *** capacity: how many pairs a memory can hold ***

def linear_capacity(d:int, degree:int, seeds:int, threshold:float) -> list[int]:
  """For each seed the most pairs that W phi(k) fits by least squares, its relative squared error below `threshold`."""
  cfg, results = atlas.Config(features="identity" if degree == 1 else "poly", degree=degree), []
  most = 2 * kernels.feature_size(d, cfg.features, degree)
  a = Tensor([1 / math.factorial(i) for i in range(degree + 1)])
  for seed in range(seeds):
    keys, values = unit(np.random.default_rng([seed, d, degree]), 2, most, d)
    x = kernels.phi(cfg, tensor(keys), a).numpy().astype(np.float64)
    def error(N):
      gram = x[:N] @ x[:N].T
      ridge = 1e-12 * np.trace(gram)                     # phi is float32: what is shorter than 1e-6 of it is rounding
      return np.square(ridge * np.linalg.solve(gram + ridge * np.eye(N), values[:N])).sum() / N  # values - W phi(k)
    results.append(bisect.bisect_left(range(1, most), threshold, key=error))
  return results

def deep_capacity(d:int, hidden:int, seeds:int, threshold:float, steps:int) -> list[int]:
  """The same for an mlp memory, as far as Adam fits it to all pairs at once, of hidden/2 ... 5/2 hidden pairs by
  eighths.  All networks are one batch, (sizes, seeds)."""
  cfg, sizes = atlas.Config(memory="mlp", key_dim=d, value_dim=d), np.unique([hidden * i // 8 for i in range(4, 21)])
  rng, counts = np.random.default_rng([d, hidden]), tensor(sizes.reshape(-1, 1, 1))
  pairs = unit(rng, 2, seeds, sizes[-1], d)
  layers = rng.normal(size=(seeds, d, hidden)) * hidden ** -0.5, rng.normal(size=(seeds, hidden, d))
  k, v, W1, W2 = [tensor([x] * len(sizes)) for x in (*pairs, *layers)]
  W = {"W1": W1, "W2": W2}
  def error():
    outputs = kernels.apply(cfg, lambda name, x: x @ W[name].transpose(-1, -2), k, k)
    each = (outputs - v).square().sum(-1) / counts       # all values have length 1
    return (Tensor.arange(int(sizes[-1])) < counts).where(each, 0).sum(-1)
  step = adam_step([W1, W2], error)
  for i in range(steps): errors = step(tensor([0.02 * (1 - i / steps)]))
  fits = np.logical_and.accumulate(errors.numpy() < threshold)             # a size counts if all smaller ones fit too
  return np.append(0, sizes)[fits.sum(0)].tolist()

def capacity(dims:tuple=(4, 8, 16), degrees:tuple=(1, 2, 3), deep:dict={1: (8,), 2: (8,), 4: (4, 8, 16)}, seeds:int=3,
             threshold:float=0.01, steps:int=3000) -> dict:
  """Prints how many random pairs N of unit vectors, d_k = d_v = d, memories hold with a relative squared error below
  `threshold`: linear ones, of which section 3.1 claims O(d_k^p), and mlps {expand: d}, of which Theorem 1 claims at
  least O(d_k d_v).  |k|^2 = 1 makes C(d+p-2,p-2) of the C(d+p,p) monomials superfluous, and the others fit exactly.
  Returns {memory: {d: N of each seed}}."""
  print(f"error below {threshold:.1%}; {seeds} seeds; mlp: {steps} steps of Adam")
  row = table({"memory": "<18s", "d": ">4d", "parameters/d": ">14d", "N": ">9.1f", "+-": ">5.1f",
               "N d/parameters": ">16.2f", "N/d^2": ">8.2f"})
  results: dict[str, dict[int, list[int]]] = {}
  def add(name, d, size, N):
    results.setdefault(name, {})[d] = N
    row(name, d, size, np.mean(N), np.std(N), np.mean(N) / size, np.mean(N) / d ** 2)
  for p in degrees:
    for d in dims:
      size = kernels.feature_size(d, "identity" if p == 1 else "poly", p)
      add(f"linear, degree {p}", d, size, linear_capacity(d, p, seeds, threshold))
  for expand, widths in deep.items():
    for d in widths:
      add(f"mlp, expand {expand}", d, 2 * expand * d, deep_capacity(d, expand * d, seeds, threshold, steps))
  return results

# *** heatmap: the error of every pair after every token ***

PANELS: dict[str, tuple[dict, float, float]] = {         # settings of atlas.Config, eta, alpha
  "window 1 (delta rule)": ({}, 1.0, 1.0),
  "window 16 (Omega)": (dict(window=16), 0.1, 1.0),
  "quadratic, window 16": (dict(window=16, features="poly"), 0.2, 1.0),
  "quadratic, window 16, alpha 0.95": (dict(window=16, features="poly", forget=True), 0.2, 0.95),
}

def heatmap(N:int=48, draws:int=16, d:int=16) -> dict:
  """N pairs with correlated keys are written once each, in order, into linear memories (Eq. 9), a pair a token.  Prints
  and draws the errors |M_t(phi(k_n)) - v_n|^2 / |v_n|^2 after each token, mean of `draws`, (time t, pair n)."""
  print(f"{N} pairs of {d}, mean of {draws} draws")
  parts = ("pairs just read", "end: first 8", "last 16 to 9", "last 8", "all")
  row, results = table({"error of": "<34s"} | dict.fromkeys(parts, ">16.2f")), {}
  pairs = recall_pairs(np.random.default_rng(0), "correlated", draws, N, d, N)
  k, v, _ = [np.stack([x] * N) for x in pairs]           # a copy for every t, which takes no step after t
  reads = np.ones((1, draws, 1)) * np.tri(N)[:, None]
  for name, (fields, eta, alpha) in PANELS.items():
    outputs = answers(fields, k, v, k, eta * reads, np.where(reads, alpha, 1))
    e = results[name] = np.square(outputs - v).sum(-1).mean(1)             # all values have length 1
    row(name, *[x.mean() for x in (np.diag(e), e[-1, :8], e[-1, -16:-8], e[-1, -8:], e[-1])])
  picture("memory.png", "pairs written, t", {f"pair n: {name}": e for name, e in results.items()})
  return results

# *** training runs, and the ledger of those that are finished ***

class Trial(NamedTuple):
  """A model and what it is trained on: a task, or text where task is empty."""
  preset: str
  fields: dict = {}
  task: str = ""
  steps: int = 200
  batch: int = 4
  length: int = 128           # of text
  rates: tuple = (0.008,)     # learning rates from which the first seed chooses: if there are several, see all_trained
  seeds: tuple = (0, 1, 2)
  rising: tuple = ({},)       # a task's settings, each for an equal part of the steps
  variants: tuple = ({},)     # a task's settings at which the model is scored
  shares: tuple = ("micro",)  # the scores of evaluate.scorer to report
  measure: Callable|None = None            # of text: (params, cfg, text) -> scores, in place of the usual ones
  theta: float = atlas.INIT.theta          # where the momentum gate starts

MUON = rule.STEPS["muon"]
# Public Muon gives U the root mean square 0.2, whatever its shape.
def rms_matched(S:Any, cfg:rule.Rule) -> Any: return MUON.direction(S, cfg) * (0.2 * max(S.shape[-2:]) ** 0.5)
STEPS_OF_TRIALS = {"Muon's bound 0.03": MUON._replace(bound=0.03),         # rows of rule.STEPS that only a trial has
                   "Muon's bound 0.25": MUON._replace(bound=0.25),
                   "Muon's U of RMS 0.2": MUON._replace(direction=rms_matched)}

def config(trial:Trial) -> atlas.Config:
  """The model's settings.  As in train.py, what is trained on lies within the horizon."""
  if trial.fields.get("optimizer") in STEPS_OF_TRIALS:
    rule.STEPS.update(STEPS_OF_TRIALS)
    atlas.CHOICES["optimizer"] = tuple(rule.STEPS)
  task = data.task(trial.task) if trial.task else None
  length, vocab = (task.settings["length"], task.vocab) if task else (trial.length, 256)
  horizon = max(atlas.Config.horizon, length)
  return atlas.preset(trial.preset, **{"vocab": vocab, "horizon": horizon} | trial.fields)

@functools.cache
def python_text(length:int) -> data.Text: return data.load("python", 256, length)

def text_source(trial:Trial, params:dict, cfg:atlas.Config) -> tuple[Callable, ...]:
  """Three functions: (seed, step) -> a batch; progress, validation bits per byte; and scores: the same of more text,
  and for text of four times the trained length the bits of each of its quarters; or what trial.measure returns."""
  text, (rows, length) = python_text(trial.length), (trial.batch, trial.length)
  validate = evaluate.evaluator(params, cfg, text.val, rows, length)
  beyond = evaluate.evaluator(params, cfg, text.val, max(1, rows // 4), 4 * length)
  def scores():
    if trial.measure: return trial.measure(params, cfg, text)
    return [validate(evaluate.VALIDATION_TOKENS).mean(), *beyond(evaluate.VALIDATION_TOKENS).reshape(4, -1).mean(1)]
  return functools.partial(data.batch, text.train, rows, length), lambda: validate(16_384).mean(), scores

EXAMPLES = 256                # of a task, by which a model is scored
LONGEST = 8192                # tokens that a model is asked about if its state grows

def task_source(trial:Trial, params:dict, cfg:atlas.Config) -> tuple[Callable, ...]:
  """As text_source.  Scores (variants, shares) of held-out examples; of tasks in bytes the share of the generated
  answers that are right, NaN beyond LONGEST if the state grows."""
  task = data.task(trial.task)
  # All seeds are scored on the held-out examples of seed 0, so that only their training differs.  This is right because
  # no task's rule depends on the seed, and no seed trains on these examples: their indices start at data.HELD_OUT.
  score, speak = evaluate.scorer(params, cfg, task, trial.batch, seed=0), evaluate.speaker(params, cfg)
  def shares(examples:int, settings:dict) -> list[float]:
    length = (task.settings | settings)["length"]
    if not task.is_bytes:
      scores = score(examples * length, settings)
      return [scores[share] for share in trial.shares]
    if length > LONGEST and atlas.growing(cfg): return [math.nan]
    batches = [task.batch(trial.batch, 0, data.HELD_OUT + i, **settings) for i in range(-(-examples // trial.batch))]
    return [float(np.mean([evaluate.answered(speak, task, *batch) for batch in batches]))]
  def scores(): return [x for settings in trial.variants for x in shares(EXAMPLES, settings)]
  return functools.partial(task.batch, trial.batch), lambda: shares(32, {})[0], scores

def trained(trial:Trial, runs:list[tuple[float, int]]) -> Iterator[dict]:
  """Trains at each (rate, seed) and yields what is known of each run.  Compiled once.  A solved task ends early."""
  if not runs: return
  began, cfg = sum(os.times()[:4]), config(trial)        # processor time of this process, and of its compiler
  length = data.task(trial.task).settings["length"] if trial.task else trial.length
  def start(seed:int) -> dict:
    with patch.object(atlas.INIT, "theta", trial.theta):
      return atlas.filled(train.layout(train.Run(task=trial.task, length=length), cfg), seed)
  params = start(0)
  batch, progress, scores = (task_source if trial.task else text_source)(trial, params, cfg)
  optimizer = train.optimizer_for(get_state_dict(params), train.Run.weight_decay)
  steps = [train.training_step(params, cfg, optimizer, train.Run.clip) for _ in trial.rising]
  moments = train.optimizer_state(optimizer)
  tensors = get_state_dict(params) | moments
  fresh = {name: z.numpy().copy() for name, z in moments.items()}
  for rate, seed in runs:
    weights = {name: z.numpy() for name, z in get_state_dict(start(seed)).items()}
    for name, values in (weights | fresh).items(): train.overwrite(tensors[name], values)
    settings, times, curve = train.Run(steps=trial.steps, lr=rate, warmup=trial.steps // 10), list[float](), []
    for i in range(trial.steps):
      part = i * len(steps) // trial.steps
      train.set_rate(optimizer, train.rate(settings, i))
      inputs, before = [Tensor(z) for z in batch(seed, i, **trial.rising[part])], time.process_time()
      GlobalCounters.reset()
      with Context(TRAINING=1): steps[part](*inputs)
      Device[Device.DEFAULT].synchronize()
      times.append(time.process_time() - before)
      gflop = GlobalCounters.global_ops / 1e9
      if (i + 1) % 100 == 0: curve.append((i + 1, float(progress())))
      if trial.task and curve and curve[-1][1] >= train.SOLVED: break
    now = sum(os.times()[:4])
    yield {"scores": [float(x) for x in scores()], "curve": curve, "steps": i + 1, "gflop": gflop,
           "seconds": float(np.median(times)), "parameters": atlas.parts(cfg)["total"], "minutes": (now - began) / 60}
    began = now

Runs = dict[tuple[float, int], dict]                     # (rate, seed) -> what the ledger has of that run
LEDGER = Path(getenv("LEDGER", "runs/results.jsonl"))    # a line of JSON for every finished run
TRAIN = getenv("TRAIN", 1)                               # 0: what the ledger does not have is left out

def settings_of(trial:Trial, rate:float, seed:int) -> dict:
  """What decides the result of a run, as the ledger has it."""
  settings = {"model": dataclasses.asdict(config(trial)), "data": f"python {python_text(trial.length).digest[:12]}",
              "steps": trial.steps, "batch": trial.batch, "length": trial.length, "rate": rate, "seed": seed,
              "variants": [trial.measure.__name__] if trial.measure else list(trial.variants)}
  if trial.task: settings |= {"data": trial.task, "rising": list(trial.rising), "shares": list(trial.shares)}
  if trial.theta != atlas.INIT.theta: settings["theta"] = trial.theta
  return settings

@functools.cache
def commit() -> str:
  return subprocess.getoutput(f"git -C {shlex.quote(str(Path(__file__).parent))} describe --always --dirty")

def finished(trial:Trial, runs:list[tuple[float, int]]) -> Runs:
  """The runs of a trial at each (rate, seed).  Those whose settings are all in the ledger come from there, whatever
  commit made them: after a change of the model, LEDGER=FILE starts another.  The others are trained now and added."""
  keys = {run: json.dumps(settings_of(trial, *run)) for run in runs}
  lines = LEDGER.read_text().splitlines() if LEDGER.exists() else []
  records = {json.dumps(record["settings"]): record for record in map(json.loads, lines)}
  missing = [run for run in runs if keys[run] not in records] if TRAIN else []
  for run, result in zip(missing, trained(trial, missing)):
    record = {"settings": settings_of(trial, *run), "preset": trial.preset, "commit": commit(),
              "device": Device.DEFAULT, "python": platform.python_version(), **result}
    LEDGER.parent.mkdir(parents=True, exist_ok=True)
    with LEDGER.open("a") as f: f.write(json.dumps(record) + "\n")
    records[keys[run]] = record
  return {run: records[key] for run, key in keys.items() if key in records}

def best_rate(trial:Trial, runs:Runs) -> float:
  """The rate at which the first seed has the highest first score, or the fewest bits of text.  The middle one, before
  anything is known."""
  def merit(rate):
    score = runs[rate, trial.seeds[0]]["scores"][0] * (1 if trial.task else -1)
    return score if math.isfinite(score) else -math.inf
  tried = [rate for rate, seed in runs if seed == trial.seeds[0]]
  return max(tried, key=merit, default=trial.rates[len(trial.rates) // 2])

def further_rates(trial:Trial, runs:Runs) -> list[float]:
  """The next rate of the grid, where the best one so far is at its end.  A solved task needs none."""
  rates, best = sorted({rate for rate, _ in runs}), best_rate(trial, runs)
  if len(rates) < 2 or trial.task and runs[best, trial.seeds[0]]["scores"][0] >= train.SOLVED: return []
  return {rates[0]: [best / 2], rates[-1]: [best * 2]}.get(best, [])

@contextlib.contextmanager
def workers(jobs:int) -> Iterator[Callable]:
  """A function like `map`.  On a CPU it takes a process for each core."""
  count = min(jobs, kernels.ALL_CORES) if kernels.on_cpu(Device.DEFAULT) else 1
  if count == 1: yield map
  else:
    os.environ.update(NUM_CPU_THREADS="1", PARALLEL="0")   # of the processes: this one has read its own already
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool: yield pool.map

def plan(trial:Trial, runs:Runs) -> Iterator[list[tuple[float, int]]]:
  """Stages of a trial: what to run next, given the finished runs.  The first seed takes the middle rate, then the
  others; where the best rate is at an end of the grid, the grid grows, three times at most.  The other seeds take the
  best rate."""
  first = trial.seeds[0]
  yield [(best_rate(trial, runs), first)]
  yield [(rate, first) for rate in trial.rates]
  for _ in range(3): yield [(rate, first) for rate in further_rates(trial, runs)]
  yield [(best_rate(trial, runs), seed) for seed in trial.seeds]

def all_trained(trials:list[Trial]) -> list[Runs]:
  """For each trial its runs.  Every stage of `plan` ends for all trials before the next one begins, so that an
  unfinished table has the same runs in every row."""
  all_runs: list[Runs] = [{} for _ in trials]
  with workers(len(trials)) as parallel:
    for stage in zip(*map(plan, trials, all_runs)):
      for runs, more in zip(all_runs, parallel(finished, trials, stage)): runs |= more
  return all_runs

def scores_of(records:list[dict]) -> np.ndarray: return np.array([record["scores"] for record in records])

def compare(title:str, trials:dict, headings:list[str]) -> dict[Any, list[dict]]:
  """Trains every trial, all on the same source, and prints a row for each: its key; M, the numbers in a block's
  memories; what training took, minutes of processor time for the runs at all rates; its scores under `headings`.
  Returns what the ledger has of the seeds at the best rate."""
  trial, *_ = trials.values()
  source = trial.task or f"Python source, sequences of {trial.length}"
  print(f"{title}: {source}; {trial.steps} steps of {trial.batch}, rates {trial.rates}, seeds {trial.seeds}")
  row = table({"model": "<30s", "M": ">7d", "parameters": ">12,d", "rate": ">8.4f", "tried": ">7d", "seeds": ">7d",
               "steps": ">7d", "TFLOP": ">8.2f", "ms/step": ">9.1f", "minutes": ">9.1f"}
              | dict.fromkeys(headings, ">17s"))
  results, used = dict[Any, list[dict]](), list[dict]()
  for (key, trial), runs in zip(trials.items(), all_trained(list(trials.values()))):
    if not runs: continue                                # TRAIN=0
    cfg, name = config(trial), key if isinstance(key, str) else ", ".join(map(str, key))
    M = sum(map(math.prod, atlas.memory_shapes(cfg).values())) if cfg.mixer != "attention" else 0
    rate, tried = best_rate(trial, runs), len({rate for rate, _ in runs})
    records = results[key] = [runs[rate, seed] for seed in trial.seeds if (rate, seed) in runs]
    first, minutes = records[0], sum(record["minutes"] for record in runs.values())
    row(name, M, first["parameters"], rate, tried, len(records), first["steps"], first["gflop"] * first["steps"] / 1e3,
        first["seconds"] * 1e3, minutes, *map(spread, scores_of(records).T))
    used += runs.values()
  commits = ", ".join(sorted({record["commit"] for record in used}))
  print(f"{sum(record['minutes'] for record in used):.0f} core-minutes, commits {commits or 'of no finished run'}")
  return results

# *** experiments that train ***

# Heads of 8, and a short chunk: the bound of a gradient step is proportional to 1/chunk.
SMALL = dict(dim=32, layers=1, heads=4, key_dim=8, value_dim=8, expand=1, chunk=4, muon_every=4)
TEXT = Trial("atlas", steps=1200, batch=8, length=256, rates=(0.004, 0.008, 0.016))
RECALL = Trial("atlas", SMALL, "mqar:vocab=256,length=128,pairs=32", 1200, 32, rates=(0.01, 0.02))
EASIER = RECALL._replace(task="mqar:vocab=128,length=64,pairs=16", steps=900)
NEEDLE = Trial("atlas", dict(chunk=4, horizon=8192), "niah:length=128", 1200, 16, rates=(0.005, 0.01))
STORY = NEEDLE._replace(task="babi:question=1,length=512", steps=2400, batch=8,
                        rising=({"length": 160, "facts": 3}, {"length": 256, "facts": 6}, {}))

def model(trial:Trial, preset:str, **fields) -> Trial:
  """The trial with another model that has as many parameters, within 1%: the hidden size of its MLP makes up for the
  rest.  ValueError where it cannot."""
  other = trial._replace(preset=preset, fields=trial.fields | fields)
  cfg, (wanted, total) = config(other), [atlas.parts(config(z))["total"] for z in (trial, other)]
  hidden = round(cfg.mlp_ratio * cfg.dim) + round((wanted - total) / (3 * cfg.dim * cfg.layers))
  equal = other._replace(fields=other.fields | dict(mlp_ratio=hidden / cfg.dim))
  total = atlas.parts(config(equal))["total"]
  data.refuse(abs(total / wanted - 1) > 0.01, f"{preset} has {total:,} parameters, and {trial.preset} {wanted:,}")
  return equal

def models(trial:Trial, *presets:str) -> dict[str, Trial]:
  """The presets on that trial, and attention with the convolution that memories have."""
  return {name: model(trial, name) for name in presets} | {"transformer++, conv": model(trial, "transformer++", conv=4)}

BITS = ["bits per byte"] + [f"quarter {n} of 4x" for n in (1, 2, 3, 4)]

def text() -> None:
  """Models on text, at equal parameters, data and steps."""
  trials = models(TEXT, "omeganet", "swla", "atlas", "deltanet", "transformer++", "titans", "gated_deltanet",
                  "linear_attention", "atlas_mag", "atlas_mal", "atlas++")
  panels:dict[str, dict] = {"bytes read": {}, "seconds on one core": {}}
  for name, records in compare("text", trials, BITS).items():
    curves = np.array([record["curve"] for record in records])             # (seeds, points, step or bits)
    for panel, scale in zip(panels.values(), (TEXT.batch * TEXT.length, records[0]["seconds"])):
      panel[name] = curves[0, :, 0] * scale, curves[..., 1]
  picture("text.png", "bits per byte", panels, log=False)

def longer() -> None:
  """Ten million bytes at twice the length, one seed, one rate."""
  trial = TEXT._replace(steps=2450, length=512, rates=(0.008,), seeds=(0,))
  compare("text", models(trial, "swla", "omeganet", "atlas", "gated_deltanet"), BITS)

def ablation() -> None:
  """The paper's Table 6, and what bounds Muon: atlas without each of its parts, or with another Muon."""
  changes: dict[str, dict[str, Any]] = {
    "atlas": {}, "no momentum (omeganet)": dict(momentum=False, optimizer="gd"),
    "momentum, no Muon": dict(optimizer="gd"), "linear memory": dict(memory="linear"), "window 1": dict(window=1),
    "no poly": dict(features="identity"), "gated (atlas++)": dict(memory="gated"),
    "Muon at every token": dict(muon_every=1), "Newton-Schulz steps 2": dict(ns_steps=2)}
  changes |= {name: dict(optimizer=name) for name in STEPS_OF_TRIALS}
  for trial, headings in ((TEXT, BITS), (EASIER, ["share right"])):
    trials = {name: model(trial, "atlas", **fields) for name, fields in changes.items()}
    trials["theta starts at 0.5"] = trial._replace(theta=0.5)
    compare("atlas without its parts", trials | {"MAG": model(trial, "atlas_mag"), "MAL": model(trial, "atlas_mal")},
            headings)

def window() -> None:
  """The paper's Figure 5: OmegaNet with windows of 1 to 16 tokens.  With 4 numbers for each of 32 keys, no training can
  keep them from resembling each other."""
  alike = RECALL._replace(preset="omeganet", fields=SMALL | dict(key_dim=4, value_dim=4))
  trials = {}
  for features, width in itertools.product(("poly", "identity"), (1, 2, 4, 8, 16)):
    trials[features, f"window {width}"] = model(alike, "omeganet", features=features, window=width)
  compare("keys that resemble each other, share right", trials, ["share right"])

def mqar() -> None:
  """The paper's Figure 7: multi-query associative recall.  First all models at one size of keys and values, scored with
  fewer pairs too; then some of them with smaller and larger memories, each at its best rate."""
  counts = 32, 24, 16, 8, 4
  headings, trial = [f"{n} pairs" for n in counts], RECALL._replace(variants=tuple({"pairs": n} for n in counts))
  trials:dict[Any, Trial] = models(trial, "atlas", "omeganet", "swla", "titans", "deltanet", "linear_attention",
                                   "transformer++")
  trials["transformer++, 2 blocks"] = model(trial, "transformer++", layers=2)
  trials["transformer++, conv, 2 blocks"] = model(trial, "transformer++", layers=2, conv=4)
  results = compare("MQAR, share right", trials, headings)
  by_count = {name: (counts, scores_of(records)) for name, records in results.items()}
  sized, trials = [name for name in ("atlas", "swla", "deltanet") if name in results], {}
  for name, d in itertools.product(sized, (4, 16)):
    at_best = trial._replace(preset=name, rates=(results[name][0]["settings"]["rate"],))
    trials[name, d] = at_best._replace(fields=SMALL | dict(key_dim=d, value_dim=d))
  results |= {(name, 8): results[name] for name in sized}
  if trials: results |= compare("smaller and larger memories, each at its best rate", trials, headings)
  by_size = {}
  for name in sized:
    of_name = [scores_of(results[name, d])[:, 0] for d in (4, 8, 16) if (name, d) in results]
    if len(of_name) == 3: by_size[name] = (4, 8, 16), np.stack(of_name, axis=1)
  panels = {f"pairs (trained with {counts[0]})": by_count, f"size of keys and values, {counts[0]} pairs": by_size}
  picture("mqar.png", "queries answered", panels)

def official() -> None:
  """MQAR at the sizes of Zoology, one seed and one rate, as a check of speed."""
  for length, pairs in {64: 4, 128: 8, 256: 16, 512: 64}.items():
    trial = RECALL._replace(task=f"mqar:length={length},pairs={pairs}", rates=(0.01,), seeds=(0,))
    compare("MQAR, share right", {"swla": trial._replace(preset="swla")}, ["share right"])

def mad() -> None:
  """The paper's Table 4: six synthetic tasks."""
  for task in ("compression", "noisy_recall", "fuzzy_recall", "in_context_recall", "selective_copying", "memorization"):
    trial = Trial("atlas", {}, task, 800, 16, rates=(0.004, 0.008), shares=("micro", "macro"))
    compare("MAD", models(trial, "atlas", "omeganet", "titans", "deltanet", "swla"), ["micro", "macro"])

def needles(trial:Trial, *presets:str) -> None:
  """Models whose answers to a task in bytes are scored at the trained length and beyond."""
  lengths = [str((data.task(trial.task).settings | variant)["length"]) for variant in trial.variants]
  compare("share of answers right", models(trial, *presets), lengths)

def niah() -> None:
  """The paper's Table 3: a needle in a haystack, asked at up to 16 times the trained length."""
  for kind, length in (("pk", 128), ("n", 128), ("w", 256), ("pk", 512), ("n", 512), ("w", 512)):
    task = f"niah:kind={kind},length={length}"
    needles(NEEDLE._replace(task=task, variants=tuple(data.task(task).variants())),
            "atlas", "omeganet", "titans", "deltanet", "gated_deltanet", "transformer++")

def stories() -> None:
  """The paper's Figure 6 (BABILong): where somebody is, asked at up to 64 times the trained length."""
  variants = tuple({"length": 512 * n} for n in (1, 4, 16, 64))
  needles(STORY._replace(variants=variants), "atlas", "titans_mac", "omeganet", "transformer++")

# *** streams far longer than the trained ones ***

def hostile(tokens:int, vocab:int) -> np.ndarray:
  """Four rows (4,tokens): one token repeated; a short pattern repeated; noise; noise and one token in turn."""
  noise, position = np.random.default_rng(0).integers(0, vocab, tokens), np.arange(tokens)
  in_turn = np.where(position // 512 % 2, 7, noise)
  return np.stack([np.full(tokens, 7), position % 5, noise, in_turn]).astype(np.int32)

AFTER = 4096                                             # tokens of text after a stream; the first 1,024 have no score

def recovery(params:dict, cfg:atlas.Config, text:data.Text, tokens:int=16_384) -> np.ndarray:
  """Bits per byte of a text from its 1,024th token on (6): with nothing before it; after `tokens` of each hostile kind;
  after as much of another text.  At most 4,096 tokens where the cost is their square."""
  if atlas.growing(cfg): tokens = min(tokens, 4096)
  first, scored = text.val[:1025].tobytes(), text.val[1025:AFTER].tobytes()
  streams = [*hostile(tokens, cfg.vocab).astype(np.uint8), text.train[:tokens]]
  rows = [(first, scored)] + [(stream.tobytes() + first, scored) for stream in streams]
  scores = evaluate.likelihoods(params, cfg, rows, 1 if atlas.growing(cfg) else len(streams))
  return np.array([-nats for nats, _ in scores]) / len(scored) / math.log(2)

def streams() -> None:
  """Models that were trained on short sequences read text after a long stream of something else."""
  trial = Trial("atlas", dict(dim=32, layers=1, heads=2), measure=recovery)
  presets = [name for name in atlas.PRESETS if not name.endswith(("mag", "mal", "mac"))]
  trials = {name: trial._replace(preset=name) for name in presets}
  for name in ("linear_attention", "deltanet", "ttt"):
    trials[f"{name}, no horizon"] = trial._replace(preset=name, fields=trial.fields | dict(horizon=1 << 20))
  headings = ["nothing before", "one byte", "a pattern", "noise", "in turn", "text"]
  compare("streams, bits per byte of text", trials, headings)

EXPERIMENTS: dict[str, Callable[[], Any]] = {experiment.__name__: experiment for experiment in (
  speed, expansion, recall, learnability, capacity, heatmap, text, longer, ablation, window, mqar, official, mad,
  niah, stories, streams)}

if __name__ == "__main__":
  if len(sys.argv) != 2 or sys.argv[1] not in EXPERIMENTS:
    print(f"error: name one experiment: python experiments.py {' | '.join(EXPERIMENTS)}", file=sys.stderr)
    sys.exit(2)
  began = time.perf_counter()
  print(f"device {Device.DEFAULT}")
  EXPERIMENTS[sys.argv[1]]()
  print(f"{time.perf_counter() - began:.0f} s")
