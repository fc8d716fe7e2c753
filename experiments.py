"""Experiments at small scale, one function and one command each: python experiments.py NAME

  speed          the memory alone, forward and backward: one kernel against stock operations, in one process (6 minutes)
  recall         what each rule and feature map still knows of the pairs it has read once, without any training (2 minutes)
  learnability   which mappings a network learns while it reads: the paper's section 6.4 (1 minute)
  capacity       how many pairs a memory can hold at all: its section 3.1 and Theorem 1 (2 minutes)
  heatmap        what a memory knows of every pair, at every time (10 seconds)

and those that train, three seeds each, in as many processes as there are cores:

  text           six models on text, at equal parameters
  ablation       ATLAS without each of its parts: the paper's Table 6, on text and on a small MQAR
  window         OmegaNet with windows of 1 to 16: its Figure 5, the same
  mqar           multi-query associative recall, seven models: its Figure 7
  niah           a needle in a haystack, to 16 times the trained length: its Table 3
  scaling        loss against compute, three sizes: its Figure 8
  streams        text after 16,384 tokens of repeats, of noise, of both in turn: does the memory recover?"""
from __future__ import annotations
import dataclasses, math, multiprocessing, os, resource, sys, time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, cast
import numpy as np
from tinygrad import Context, Device, Tensor, TinyJit
from tinygrad.helpers import GlobalCounters
from tinygrad.nn.optim import Adam
from tinygrad.nn.state import get_state_dict
import atlas, data, evaluate, kernels, train

@dataclasses.dataclass(frozen=True)
class Layer:
  """A memory and the stream it reads."""
  rule: dict
  heads: int
  d: int
  hidden: int
  batch: int
  length: int
  ops: bool                   # also in stock operations, which need minutes to compile the larger ones

LAYERS = {
  "mlp, window 9, momentum": Layer(dict(window=9, chunk=64), 4, 32, 128, 4, 512, True),
  "atlas, heads of 16": Layer(dict(features="poly", window=4, chunk=32, optimizer="muon"), 4, 16, 32, 2, 128, True),
  "titans, dim 256": Layer(dict(window=1, chunk=64), 4, 64, 256, 4, 2048, False),
  "omega 16 with Muon": Layer(dict(window=16, chunk=64, optimizer="muon"), 4, 64, 256, 1, 512, False),
}

def layer_step(layer:Layer, backend:str):
  """A jitted forward and backward pass of kernels.memory, and its inputs: random, keys and queries of length 1."""
  cfg = atlas.Config(memory="mlp", forget=True, momentum=True, key_dim=layer.d, value_dim=layer.d, backend=backend, **layer.rule)
  rng, (B, H, T, d), D = np.random.default_rng(0), (layer.batch, layer.heads, layer.length, layer.d), kernels.feature_size(layer.d, cfg.features, 2)
  def normal(*shape): return rng.normal(size=shape) * shape[-1] ** -0.5
  def uniform(low, high, *shape): return rng.uniform(low, high, size=shape)
  weights = {"W1": normal(H, d, layer.hidden), "W2": normal(H, layer.hidden, D)} | ({"a": uniform(0.5, 1, 3)} if cfg.features == "poly" else {})
  q, k, v = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (normal(B, H, T, d) for _ in range(3))]
  gates = [uniform(*bounds, B, H, T) for bounds in ((0.97, 1), (0.8, 0.95), (0, 0.01))]
  inputs = [Tensor(x.astype(np.float32)).realize() for x in (*weights.values(), q, k, v, *gates, uniform(0, 1 / cfg.window, B, H, T, cfg.window))]
  @TinyJit
  def step(*x):
    q, k, v, alpha, theta, eta, gamma = x[len(weights):]
    y, _ = kernels.memory(cfg, dict(zip(weights, x)), q, k, v, alpha, theta, eta, gamma)
    out = (y, *y.square().sum().gradient(*x))
    Tensor.realize(*out)
    return out
  return step, inputs

def speed() -> None:
  """tokens/s of a layer's memory, medians of 7 passes after compilation; GFLOP of its matrix products, as the kernel counts them."""
  print(f"device {Device.DEFAULT}\n{'layer':26s}{'form':8s}{'first s':>8s}{'ms':>9s}{'tokens/s':>10s}{'GFLOP':>8s}{'GFLOP/s':>9s}{'kernels':>9s}")
  for name, layer in LAYERS.items():
    found: dict = {}
    for form in ("fused", "ops") if layer.ops else ("fused",):
      step, inputs = layer_step(layer, form)
      times = []
      for _ in range(10):
        GlobalCounters.reset()
        tick = time.perf_counter()
        out = step(*inputs)
        Device[Device.DEFAULT].synchronize()
        times.append(time.perf_counter() - tick)
      seconds, gflop = float(np.median(times[3:])), GlobalCounters.global_ops / 1e9
      found[form] = layer.batch * layer.length / seconds, [x.numpy() for x in out]
      print(f"{name:26s}{form:8s}{times[0]:8.1f}{seconds * 1e3:9.1f}{found[form][0]:10.0f}{gflop:8.2f}{gflop / seconds:9.1f}"
            f"{GlobalCounters.kernel_count:9d}", flush=True)
    if layer.ops:
      worst = max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found["fused"][1], found["ops"][1]))
      print(f"{'':26s}fused is {found['fused'][0] / found['ops'][0]:.1f} times as fast; "
            f"largest relative difference of outputs and gradients {worst:.1e}")
    print(f"{'':26s}peak memory of the process so far {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB", flush=True)

# *** shared by the experiments below ***

def unit(rng:np.random.Generator, *shape:int, shared:Any=0.0) -> np.ndarray:
  """Random vectors of length 1; `shared` is a component that they have in common."""
  return (x := rng.normal(size=shape) + shared) / np.linalg.norm(x, axis=-1, keepdims=True)

def adam_step(weights:list[Tensor], losses:Callable[..., Tensor]) -> Callable[..., Tensor]:
  """A jitted step of Adam for a batch of independent networks: step(rate, *x) gives losses(*x), (networks), before the step.  rate broadcasts
  against the weights.  What descends is the sum of the losses: no network's gradient depends on another."""
  adam = Adam(weights)
  @TinyJit
  def step(rate, *x):
    adam.lr, loss = rate, losses(*x)
    adam.zero_grad()
    loss.sum().backward()
    with Context(TRAINING=1): Tensor.realize(loss, *adam.schedule_step())
    return loss
  return step

def picture(path:Path, panels:int, size:tuple[float, float], draw:Callable[[Any, Any], None]) -> None:
  """draw(figure, axes) fills the panels of a row, `size` inches, where matplotlib is there."""
  try: import matplotlib.pyplot as plt
  except ImportError: return print("for the picture: pip install '.[plot]'")
  figure, axes = plt.subplots(1, panels, figsize=size, sharey=True, squeeze=False, layout="constrained")
  draw(figure, axes[0])
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=110)
  plt.close(figure)
  print(f"written to {path}")

# *** recall without training ***

RULES: dict[str, dict] = {"Hebbian": dict(loss="dot"), "delta": {}, "Omega, window 16": dict(window=16), "delta, Muon": dict(optimizer="muon")}
KINDS, STEPS = ("independent", "correlated", "overwritten"), (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)

def recall_pairs(rng:np.random.Generator, kind:str, trials:int, N:int, d:int, T:int) -> list[np.ndarray]:
  """N pairs of unit vectors to store, in a stream of T: keys, values (trials,T,d), whether a place writes (T), and what is to be known at the end,
  keys and values (trials,N,d).  correlated: all keys share a component, their cosines are about 1/2.  overwritten: half of the keys are given a
  second value, and the latest counts."""
  keys = unit(rng, trials, N, d, shared=rng.normal(size=(trials, 1, d)) if kind == "correlated" else 0.0)
  values, again = unit(rng, trials, N, d), N // 2 if kind == "overwritten" else 0
  newer = unit(rng, trials, again, d)
  stream = [np.concatenate([*z, np.zeros((trials, T - N - again, d))], axis=1) for z in ((keys, keys[:, :again]), (values, newer))]
  return [*stream, np.arange(T) < N + again, keys, np.concatenate([newer, values[:, again:]], axis=1)]

def recalled(fields:dict, sizes:tuple[int, ...], trials:int, seeds:int, d:int=16) -> np.ndarray:
  """Share of the values that are the nearest to what is read for their key after every pair was written once, online: (kinds, sizes, seeds),
  with the step size that was best for one more seed, which only chooses it.  The rule is kernels.memory; everything else is a batch."""
  cfg = atlas.Config(memory="linear", chunk=1, heads=trials * (1 + seeds), key_dim=d, value_dim=d, **fields)
  T, H, D = -(-3 * max(sizes) // 16) * 8, cfg.heads, kernels.feature_size(d, cfg.features, 2)
  long = 2.0 if cfg.features == "exp" else 1.0           # of keys and queries: exp(4 cos), as sharp as a model's may become
  made = [[[recall_pairs(np.random.default_rng([seed, n]), kind, trials, n, d, T) for seed in range(1 + seeds)] for n in sizes] for kind in KINDS]
  cases = [[np.concatenate([seed[part] for seed in case]) for part in (0, 1)] + [case[0][2]] for kind in made for case in kind]
  scale = math.exp(long ** 2) if cfg.features == "exp" else 1.0                # phi(k).phi(k)
  keys, values, writes = [np.stack([case[part] for case in cases for _ in STEPS]) for part in range(3)]
  eta = np.array([step / (1 if cfg.optimizer == "muon" else scale) for _ in cases for step in STEPS])
  B, one = len(eta), np.ones((len(eta), H, T))
  gates = dict(alpha=one, theta=one, eta=one * writes[:, None] * eta[:, None, None], gamma=np.ones((B, H, T, cfg.window)))
  inputs = dict(q=keys, k=keys * long, v=values) | gates
  if cfg.features == "exp": shapes = {"anchor_k": (H, 0, d), "anchor_u": (H, 0, d)}
  else: shapes = {"W": (H, d, D)}
  weights = {n: Tensor.zeros(*shape).contiguous() for n, shape in shapes.items()}
  if cfg.features == "poly": weights["a"] = Tensor([0.0, 0.0, 1.0])     # the quadratic monomials alone
  def call(state, q, k, v, alpha, theta, eta, gamma): return kernels.memory(cfg, weights, q, k, v, alpha, theta, eta, gamma, state)[1]
  def part(*at): return [Tensor(np.ascontiguousarray(x[:, :, slice(*at)], dtype=np.float32)) for x in inputs.values()]
  if cfg.features == "exp": state = call(None, *part(T))
  else:                                                  # in calls of 8 tokens, all alike
    begin, step = kernels.initial_state(cfg, weights, B, d), TinyJit(call)
    state = {n: z.clone() for n, z in begin.items()}
    for t in range(0, T, 8): state = step(state, *part(t, t + 8))
  hits = np.zeros((len(KINDS), len(sizes), len(STEPS), 1 + seeds))
  for row, (k, n) in enumerate(np.ndindex(hits.shape[:2])):
    asked, right = [np.concatenate([seed[which] for seed in made[k][n]]) for which in (3, 4)]
    rows = slice(row * len(STEPS), (row + 1) * len(STEPS))
    mine = {name: z if name == "position" else z[rows].contiguous() for name, z in state.items()}
    said = kernels.recall(cfg, weights, mine, Tensor(np.stack([asked * long] * len(STEPS)).astype(np.float32))).numpy()
    nearest = (said @ right.swapaxes(-1, -2)).argmax(-1)                       # values have length 1
    hits[k, n] = (nearest == np.arange(sizes[n])).reshape(len(STEPS), 1 + seeds, -1).mean(-1)
  best = hits[..., 0].argmax(2)
  return np.take_along_axis(hits, best[:, :, None, None], axis=2)[:, :, 0, 1:]

def recall(sizes:tuple[int, ...]=(8, 16, 32, 64), trials:int=4, seeds:int=3, rules:tuple[str, ...]=tuple(RULES), folder:str="assets") -> dict:
  """Prints, and plots where matplotlib is there, the hits against the number of pairs for keys of 16: mean over seeds, spread at the third size."""
  began, found = time.perf_counter(), cast(dict[tuple[str, str], np.ndarray], {})
  print(f"device {Device.DEFAULT}; keys, values of 16; {trials} trials for each of {seeds} seeds, and of one more that chooses the step of {STEPS}")
  print(f"{'rule':18s}{'features':10s}" + "".join(f"{kind + ' ' + ', '.join(map(str, sizes)):>34s}" for kind in KINDS))
  for features in ("identity", "poly", "exp"):
    for name in rules:
      if features == "exp" and RULES[name].get("optimizer") == "muon": continue            # an expansion is no matrix
      hits = found[name, features] = recalled(RULES[name] | {"features": features}, sizes, trials, seeds)
      columns = [" ".join(f"{x:.2f}" for x in row.mean(-1)) + f" (+-{row[-2].std():.2f})" for row in hits]
      print(f"{name:18s}{features:10s}" + "".join(f"{column:>34s}" for column in columns), flush=True)
  print(f"{time.perf_counter() - began:.0f} s")
  def draw(figure, axes):
    for (name, features), hits in found.items():
      style: Any = dict(color=f"C{list(RULES).index(name)}", linestyle={"identity": ":", "poly": "-", "exp": "--"}[features], marker=".")
      for axis, row in zip(axes, hits): axis.plot(sizes, row.mean(-1), label=f"{name}, {features}", **style)
    for axis, kind in zip(axes, KINDS):
      axis.set(title=f"{kind} keys", xlabel="pairs written once", xscale="log", xticks=sizes, xticklabels=sizes)
      axis.minorticks_off()
    axes[0].set(ylabel="values recalled", ylim=(0, 1.02))
    axes[-1].legend(fontsize=7, handlelength=4, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
  picture(Path(folder) / "recall.png", len(KINDS), (11, 3.6), draw)
  return found

# *** learnability: which mappings a memory learns while it reads ***

MAPPINGS, RATES = ("low-rank", "MLP", "attention + MLP", "attention outputs as inputs", "sliding window + MLP"), (3e-4, 1e-3, 3e-3, 1e-2)

def mapped(rng:np.random.Generator, d:int, T:int, window:int) -> list[tuple[np.ndarray, np.ndarray]]:
  """Inputs and targets (T,d) for each of MAPPINGS (section 6.4), from Gaussian tokens.  Ranks of d/8, MLPs with one hidden layer."""
  def matrix(rows, columns=d): return rng.normal(size=(rows, columns)) * rows ** -0.5
  def mlp(x): return (z := x @ matrix(d)) * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z ** 3))) @ matrix(d)
  def attention(x, reach):
    q, k, v = [x @ matrix(d) for _ in range(3)]
    lag = np.subtract.outer(np.arange(T), np.arange(T))
    weights = np.where((lag >= 0) & (lag < reach), np.exp(q @ k.T * d ** -0.5), 0)
    return weights / weights.sum(-1, keepdims=True) @ v
  x, rank = rng.normal(size=(T, d)), max(1, d // 8)
  after = mlp(mixed := attention(x, T))
  return [(x, x @ matrix(d, rank) @ matrix(rank)), (x, mlp(x)), (x, after), (mixed, after), (x, mlp(attention(x, window)))]

def learnability(d:int=64, T:int=2000, seeds:int=3, window:int=64, hidden_layers:int=2, expansion:int=1, folder:str="assets") -> np.ndarray:
  """An MLP without biases is trained online, one step of Adam a token, on |M(i_t) - o_t|^2 / |o_t|^2 (section 6.4, Figure 6: there d=256 and a
  window of 512, scaled down here with T).  Prints and plots that loss, before the step, against the position; returns it, (mappings, seeds, T).
  All networks are one batch, (mappings, rates, seeds); one more seed only chooses each mapping's rate, by its mean loss."""
  began, shape = time.perf_counter(), (len(MAPPINGS), len(RATES), 1 + seeds)
  print(f"device {Device.DEFAULT}; d {d}, {hidden_layers} hidden layers of {expansion * d}, {T} tokens, sliding window {window}; {seeds} seeds, "
        f"and one more that chooses the rate of {RATES}\n{'mapping':30s}{'rate':>8s}  mean loss of the last quarter", flush=True)
  data = np.array([mapped(np.random.default_rng([seed, d]), d, T, window) for seed in range(1 + seeds)], np.float32)
  stream = data.transpose(3, 2, 1, 0, 4)[:, :, :, None, :, None]             # (T, input or target, mappings, 1, seeds, 1, d)
  rng, widths, weights = np.random.default_rng(0), [d, *[expansion * d] * hidden_layers, d], cast(list[Tensor], [])
  for i, o in zip(widths, widths[1:]):                   # the last layer starts small: what attention gives is short, and 0 loses 1
    w = rng.normal(size=(1 + seeds, i, o)) * (i ** -0.5 if len(weights) < hidden_layers else 1e-3)
    weights.append(Tensor(np.broadcast_to(w, (*shape, i, o)).astype(np.float32)).realize())
  def loss(x, target):
    for w in weights[:-1]: x = (x @ w).gelu()
    return (x @ weights[-1] - target).square().sum((-1, -2)) / target.square().sum((-1, -2))
  step, rate = adam_step(weights, loss), Tensor(RATES).reshape(-1, 1, 1, 1).contiguous().realize()
  losses = np.stack([step(rate, *[Tensor(np.ascontiguousarray(x)) for x in pair]).numpy() for pair in stream], axis=-1)
  best = losses[:, :, 0].mean(-1).argmin(1)
  found = losses[np.arange(len(MAPPINGS)), best, 1:]
  ends = found[..., -(T // 4):].mean(-1)
  for name, i, end in zip(MAPPINGS, best, ends): print(f"{name:30s}{RATES[i]:8.0e}  {end.mean():.3f} (+-{end.std():.3f})")
  mean = ends.mean(-1)
  print(f"low-rank is easiest: {'yes' if mean.argmin() == 0 else 'no, ' + MAPPINGS[mean.argmin()]}; attention outputs as inputs are learned faster "
        f"than attention + MLP: {'yes' if found[3].mean() < found[2].mean() and mean[3] < mean[2] else 'no'}\n{time.perf_counter() - began:.0f} s")
  def draw(figure, axes):
    wide = max(1, T // 40)
    for y in found.mean(1): axes[0].plot(np.arange(wide, T + 1), np.convolve(y, np.full(wide, 1 / wide), "valid"))
    axes[0].set(xlabel="position", ylabel=f"loss, mean of {wide} tokens", ylim=(0, 1.1))
    figure.legend(axes[0].lines, MAPPINGS, fontsize=8, frameon=False, loc="outside right upper")
  picture(Path(folder) / "learnability.png", 1, (7.5, 3.6), draw)
  return found

# *** capacity: how many pairs a memory can hold at all ***

def linear_capacity(d:int, degree:int, seeds:int, threshold:float) -> list[int]:
  """The largest N, for each seed, whose N pairs W phi(k) fits by least squares with a squared error below `threshold` of the values'."""
  cfg, found = atlas.Config(features="identity" if degree == 1 else "poly", degree=degree), []
  D, a = kernels.feature_size(d, cfg.features, degree), Tensor([1 / math.factorial(i) for i in range(degree + 1)])
  for seed in range(seeds):
    keys, values = unit(np.random.default_rng([seed, d, degree]), 2, 2 * D, d)
    x, stored, broken = kernels.phi(cfg, Tensor(keys.astype(np.float32)), a).numpy().astype(np.float64), 0, 2 * D
    while broken - stored > 1:
      N = (stored + broken) // 2
      K = x[:N] @ x[:N].T
      ridge = 1e-12 * np.trace(K)                        # features are float32: directions shorter than 1e-6 of all are rounding
      errors = ridge * np.linalg.solve(K + ridge * np.eye(N), values[:N])    # values - W phi(k), 40 times as fast as by lstsq
      stored, broken = (N, broken) if (errors ** 2).sum() < threshold * N else (stored, N)
    found.append(stored)
  return found

def deep_capacity(d:int, hidden:int, seeds:int, threshold:float, steps:int) -> list[int]:
  """The same for an mlp memory, as far as Adam finds it, on all pairs at once: N = hidden/2 ... 5/2 hidden by eighths, a batch of (sizes, seeds)."""
  cfg, sizes = atlas.Config(memory="mlp", key_dim=d, value_dim=d), np.unique([hidden * i // 8 for i in range(4, 21)])
  N, rng = int(sizes[-1]), np.random.default_rng([d, hidden])
  made = *unit(rng, 2, seeds, N, d), rng.normal(size=(seeds, d, hidden)) * hidden ** -0.5, rng.normal(size=(seeds, hidden, d))
  k, v, W1, W2 = [Tensor(np.stack([x] * len(sizes)).astype(np.float32)).realize() for x in made]
  counts, W = Tensor(sizes.astype(np.float32)).reshape(-1, 1, 1).contiguous().realize(), {"W1": W1, "W2": W2}
  def error():
    said = kernels.apply(cfg, lambda name, x: x @ W[name].transpose(-1, -2), k, k)
    return (Tensor.arange(N) < counts).where((said - v).square().sum(-1) / counts, 0).sum(-1)        # values have length 1
  step = adam_step([W1, W2], error)
  for i in range(steps): errors = step(Tensor([0.02 * (1 - i / steps)]).realize())
  stores = np.logical_and.accumulate(errors.numpy() < threshold)             # and so do all smaller sizes
  return np.append(0, sizes)[stores.sum(0)].tolist()

def capacity(dims:tuple[int, ...]=(4, 8, 16), degrees:tuple[int, ...]=(1, 2, 3), deep:dict[int, tuple[int, ...]]={1: (8,), 2: (8,), 4: (4, 8, 16)},
             seeds:int=3, threshold:float=0.01, steps:int=3000) -> dict[str, dict[int, list[int]]]:
  """Prints how many random pairs of unit vectors, d_k = d_v = d, memories hold with a relative squared error below `threshold` (section
  3.1, Theorem 1): linear in phi(k), and mlps of {expand: d}.  On unit keys |k|^2 = 1 makes C(d+p-2,p-2) of the C(d+p,p) monomials superfluous,
  and the rest is what fits exactly.  Returns {memory: {d: N of each seed}}."""
  began, found = time.perf_counter(), cast(dict[str, dict[int, list[int]]], {})
  print(f"device {Device.DEFAULT}; error below {threshold:.0%}; {seeds} seeds; mlp: {steps} steps of Adam\n"
        f"{'memory':18s}{'d':>4s}{'parameters/d':>14s}{'pairs N':>16s}{'N d/parameters':>16s}{'N/d^2':>8s}", flush=True)
  def power(of): return np.polyfit(np.log(list(of)), np.log([np.mean(n) for n in of.values()]), 1)[0]
  cases = [(f"linear, degree {p}", f"O(d_k^{p})", {d: math.comb(d + p, p) - (p == 1) for d in dims}, p) for p in degrees]
  for name, claim, sizes, p in cases + [(f"mlp, expand {e}", "at least O(d_k d_v)", {d: 2 * e * d for d in of}, e) for e, of in deep.items()]:
    held = found[name] = {}
    for d, size in sizes.items():
      held[d] = linear_capacity(d, p, seeds, threshold) if "linear" in name else deep_capacity(d, p * d, seeds, threshold, steps)
      mean, spread = np.mean(held[d]), f"(+-{np.std(held[d]):.1f})"
      print(f"{name:18s}{d:4d}{size:14d}{f'{mean:.1f} {spread}':>16s}{mean / size:16.2f}{mean / d ** 2:8.2f}", flush=True)
    if len(sizes) == 1: continue
    shown = power(held) > (power(sizes) if "linear" in name else 2) - 0.1
    print(f"  N grows as d^{power(held):.2f}, parameters/d as d^{power(sizes):.2f}; {claim}: {'shown' if shown else 'not shown'}")
  print(f"{time.perf_counter() - began:.0f} s")
  return found

# *** heatmap: what a memory knows of every pair, at every time ***

PANELS: dict[str, tuple[dict, float, float]] = {         # settings, step, alpha
  "window 1 (delta rule)": ({}, 1.0, 1.0),
  "window 16 (Omega)": (dict(window=16), 0.1, 1.0),
  "quadratic, window 16": (dict(window=16, features="poly"), 0.2, 1.0),
  "quadratic, window 16, alpha 0.95": (dict(window=16, features="poly", forget=True), 0.2, 0.95),
}

def heatmap(N:int=48, draws:int=16, d:int=16, folder:str="assets") -> dict[str, np.ndarray]:
  """N pairs with correlated keys (cosines of about 1/2) are written once each, in order, into linear memories (Eq. 9), a pair a token; after each,
  every pair is asked for.  Errors |M_t(phi(k_n)) - v_n|^2 / |v_n|^2, mean of `draws`, (time t, pair n): printed in parts, shown as a picture."""
  began, found = time.perf_counter(), cast(dict[str, np.ndarray], {})
  print(f"device {Device.DEFAULT}; {N} pairs of {d}, mean of {draws} draws\n{'error of':34s}" +
        "".join(f"{part:>16s}" for part in ("pairs just read", "end: first 8", "last 16 to 9", "last 8", "all")))
  k, v = [Tensor(x[None].astype(np.float32)).realize() for x in recall_pairs(np.random.default_rng(0), "correlated", draws, N, d, N)[:2]]
  def full(x, *more): return Tensor.full((1, draws, 1, *more), x).contiguous()
  for name, (fields, eta, alpha) in PANELS.items():
    cfg = atlas.Config(memory="linear", chunk=1, heads=draws, key_dim=d, value_dim=d, **fields)
    weights = {"W": Tensor.zeros(draws, d, kernels.feature_size(d, cfg.features, 2)).contiguous(), "a": Tensor([0.0, 0.0, 1.0])}
    def write(state, key, value):
      _, state = kernels.memory(cfg, weights, key, key, value, full(alpha), full(1.0), full(eta), full(1.0, cfg.window), state)
      return state, (kernels.recall(cfg, weights, state, k) - v).square().sum(-1).mean((0, 1))       # values have length 1
    state, rows, step = kernels.initial_state(cfg, weights, 1, d), cast(list[np.ndarray], []), TinyJit(write)
    state = {n: z.clone() for n, z in state.items()}     # a jit's inputs share no buffer
    for t in range(N):
      state, error = step(state, *[x[:, :, t:t + 1].clone() for x in (k, v)])
      rows.append(error.numpy())
    e = found[name] = np.stack(rows)
    print(f"{name:34s}" + "".join(f"{x.mean():16.2f}" for x in (np.diag(e), e[-1, :8], e[-1, -16:-8], e[-1, -8:], e[-1])), flush=True)
  print(f"{time.perf_counter() - began:.0f} s")
  def draw(figure, axes):
    for axis, (name, e) in zip(axes, found.items()):
      image = axis.imshow(e, vmin=0, vmax=1, cmap="magma")
      axis.set_title(name, fontsize=10)
      axis.set(xlabel="pair n")
    axes[0].set(ylabel="pairs written, t")
    figure.colorbar(image, ax=axes, label="error of pair n (1: 1 or more)", pad=0.01)
  picture(Path(folder) / "memory.png", len(found), (13, 3.6), draw)
  return found

# *** training runs ***

class Trial(NamedTuple):
  """A model and what it is trained on: a task, or text where task is empty.  rates: learning rates to choose from, with the first seed."""
  preset: str
  fields: dict = {}
  task: str = ""
  steps: int = 200
  batch: int = 4
  length: int = 128           # of text
  rates: tuple[float, ...] = (0.008,)
  seeds: tuple[int, ...] = (0, 1, 2)

class Found(NamedTuple):
  """What came of it: scores (seeds; more, for a task's variants); the rate that was best; the most steps it took; GFLOP of a step; minutes."""
  scores: np.ndarray
  rate: float
  steps: int
  parameters: int
  gflop: float
  minutes: float

def trained(trial:Trial, variants:list[dict]=[{}], measure:Callable|None=None) -> Found:
  """Trains at every rate with the first seed, then with the other seeds at the best rate; compiled once.  Scores: validation bits per byte of text
  (lower is better), or for each of a task's variants (the first one chooses the rate) the share of the places of held-out examples that are right,
  for tasks in bytes of the answers that count.  99% of that ends a run early.  measure(params, cfg, text): other scores."""
  began, task = time.perf_counter(), data.task(trial.task) if trial.task else None
  cfg = atlas.preset(trial.preset, **{"vocab": task.vocab if task else 256} | trial.fields)
  length = task.settings["length"] if task else trial.length
  text = None if task else data.load("python", cfg.vocab, length)
  params = atlas.init(cfg)
  optimizer = train.optimizer_for(get_state_dict(params), train.Run.weight_decay)
  step, state = train.training_step(params, cfg, optimizer, train.Run.clip), train.optimizer_state(optimizer)
  fresh = {n: z.numpy().copy() for n, z in state.items()}
  score, which = evaluate.scorer(params, cfg, task, trial.batch, 0) if task else None, "answer" if task and task.is_bytes else "micro"
  validate = evaluate.evaluator(params, cfg, text.val, trial.batch, length) if text else None
  longest, gflop = 0, 0.0
  def once(rate:float, seed:int) -> np.ndarray:
    nonlocal longest, gflop
    for own, values in ((get_state_dict(params), {n: z.numpy() for n, z in get_state_dict(atlas.init(cfg, seed)).items()}), (state, fresh)):
      for n, z in own.items(): train.overwrite(z, values[n])
    run = train.Run(steps=trial.steps, lr=rate, warmup=trial.steps // 10)
    for i in range(trial.steps):
      train.set_rate(optimizer, train.rate(run, i))
      x, y = task.batch(trial.batch, seed, i) if task else data.batch(cast(data.Text, text).train, trial.batch, length, seed, i)
      GlobalCounters.reset()
      with Context(TRAINING=1): step(Tensor(x), Tensor(y))
      gflop, longest = GlobalCounters.global_ops / 1e9, max(longest, i + 1)
      if score and (i + 1) % 100 == 0 and score(4096, {})[which] >= train.SOLVED: break
    if measure: return measure(params, cfg, text)
    if validate: return np.array([validate(evaluate.VALIDATION_TOKENS).mean()])
    return np.array([cast(Callable, score)(evaluate.VALIDATION_TOKENS // 2, other)[which] for other in variants])
  first = {rate: once(rate, trial.seeds[0]) for rate in trial.rates}
  rate = (min if text else max)(first, key=lambda r: first[r][0])
  scores = np.array([first[rate], *[once(rate, seed) for seed in trial.seeds[1:]]])
  return Found(scores, rate, longest, atlas.parts(cfg)["total"], gflop, (time.perf_counter() - began) / 60)

def all_trained(trials:list[Trial], variants:list[dict]=[{}], measure:Callable|None=None) -> Iterator[Found]:
  """trained, for each, in order; in as many processes as there are cores (tinygrad's CPU device uses one)."""
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
  workers = min(len(trials), cores) if kernels.on_cpu(Device.DEFAULT) else 1
  several = trials, [variants] * len(trials), [measure] * len(trials)
  if workers == 1: yield from map(trained, *several)
  else:
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool: yield from pool.map(trained, *several)

def spread(x:np.ndarray) -> str: return f"{x.mean():.3f} +- {x.std():.3f}"

def heading(what:str, trial:Trial) -> None:
  source = trial.task or f"Python source, sequences of {trial.length}"
  print(f"{what}: {source}; {trial.steps} steps of {trial.batch}, rates {trial.rates}, seeds {trial.seeds}; device {Device.DEFAULT}", flush=True)

# mlp_ratio makes up for smaller memories: equal parameters within 1%
EQUAL = {"omeganet": {}, "atlas": {}, "deltanet": dict(mlp_ratio=2.9), "linear_attention": dict(mlp_ratio=2.9), "titans": dict(mlp_ratio=2.75),
         "transformer++": dict(mlp_ratio=3.4)}

def text(trial:Trial=Trial("atlas")) -> dict[str, Found]:
  """Six models on text, at equal parameters, data, steps and seeds."""
  heading("text, bits per byte", trial)
  print(f"{'':18s}{'parameters':>12s}" + "".join(f"{f'seed {n}':>9s}" for n in trial.seeds) + f"{'mean':>9s}{'minutes':>9s}")
  found = {}
  for name, row in zip(EQUAL, all_trained([trial._replace(preset=name, fields=fields) for name, fields in EQUAL.items()])):
    found[name] = row
    scores = "".join(f"{x:9.3f}" for x in (*row.scores[:, 0], row.scores.mean()))
    print(f"{name:18s}{row.parameters:12,d}{scores}{row.minutes:9.1f}", flush=True)
  return found

# Heads of 8, and a short chunk: the bound of a gradient step is one over it
SMALL = dict(dim=32, layers=1, heads=4, key_dim=8, value_dim=8, expand=1, chunk=4, muon_every=4)
RECALL = Trial("atlas", SMALL, "mqar:vocab=256,length=128,pairs=32", 1200, 32, rates=(0.01, 0.02))
NEEDLE = Trial("deltanet", dict(chunk=4, horizon=2048), "niah:length=128", 1200, 16, rates=(0.01,))
EASIER = RECALL._replace(task="mqar:vocab=128,length=64,pairs=16", steps=300, rates=(0.02,))

def both(names:dict[str, tuple[str, dict]], text:Trial=Trial("atlas"), recall:Trial=EASIER) -> dict[str, tuple[Found, Found]]:
  """Trains each (preset, fields) on text and on a small MQAR, and prints a row for each."""
  heading("text, bits per byte", text)
  heading("MQAR, share right", recall)
  print(f"{'':18s}{'parameters':>12s}{'bits per byte':>18s}{'minutes':>9s}{'MQAR':>18s}{'steps':>7s}{'minutes':>9s}")
  trials = [t._replace(preset=preset, fields=t.fields | fields) for preset, fields in names.values() for t in (text, recall)]
  found, results = {}, all_trained(trials)
  for name in names:
    a, b = found[name] = next(results), next(results)
    print(f"{name:18s}{a.parameters:12,d}{spread(a.scores):>18s}{a.minutes:9.1f}{spread(b.scores):>18s}{b.steps:7d}{b.minutes:9.1f}", flush=True)
  return found

def ablation() -> dict:
  """The paper's Table 6: ATLAS without each of its parts, and with a gated memory or attention beside it."""
  return both({"atlas": ("atlas", {}), "linear memory": ("atlas", dict(memory="linear")), "no Muon": ("atlas", dict(optimizer="gd")),
               "window 1": ("atlas", dict(window=1)), "no poly": ("atlas", dict(features="identity")), "gated (atlas++)": ("atlas++", {}),
               "MAG": ("atlas_mag", {}), "MAL": ("atlas_mal", {})})

def window(widths:tuple[int, ...]=(1, 2, 4, 8, 16)) -> dict:
  """The paper's Figure 5: OmegaNet with windows of 1 to 16 tokens."""
  return both({f"window {c}": ("omeganet", dict(window=c)) for c in widths}, recall=EASIER._replace(steps=900))

def mqar(presets:tuple[str, ...]=("atlas", "omeganet", "swla", "titans", "deltanet", "linear_attention", "transformer++"), trial:Trial=RECALL,
         sized:tuple[str, ...]=("atlas", "swla", "deltanet"), sizes:tuple[int, ...]=(4, 16), folder:str="assets") -> dict:
  """The paper's Figure 7: multi-query associative recall.  All models at one size of keys and values, the same learning rates for all, asked with
  fewer pairs too; then some of them with smaller and larger memories, at the rate that was best."""
  heading("MQAR, share right", trial)
  most, usual = cast(data.Task, data.task(trial.task)).settings["pairs"], trial.fields["key_dim"]
  counts = [most, *[most * n // 8 for n in (6, 4, 2, 1)]]
  columns = {"": 18, "key_dim": 8, "M": 7, "parameters": 11, "rate": 7, "steps": 7, "minutes": 9} | {f"{n} pairs": 18 for n in counts}
  print("".join(f"{name:>{width}s}" for name, width in columns.items()))
  found: dict[tuple[str, int], Found] = {}
  def run(trials:list[Trial]):
    for t, row in zip(trials, all_trained(trials, [{"pairs": n} for n in counts])):
      cfg, cells = atlas.preset(t.preset, **t.fields), "".join(f"{spread(x):>18s}" for x in row.scores.T)
      numbers = sum(map(math.prod, atlas.memory_shapes(cfg).values())) if cfg.mixer == "memory" else 0
      found[t.preset, cfg.key_dim] = row
      print(f"{t.preset:18s}{cfg.key_dim:8d}{numbers:7d}{row.parameters:11,d}{row.rate:7.3f}{row.steps:7d}{row.minutes:9.1f}{cells}", flush=True)
  run([trial._replace(preset=name) for name in presets])
  run([trial._replace(preset=name, rates=(found[name, usual].rate,), fields=trial.fields | dict(key_dim=d, value_dim=d))
       for name in sized for d in sizes])
  def draw(_, axes):
    for name in presets:
      row = found[name, usual]
      axes[0].errorbar(counts, row.scores.mean(0), row.scores.std(0), label=name, marker=".", capsize=2)
    for name in sized:
      d = sorted(d for n, d in found if n == name)
      scores = [found[name, x].scores[:, 0] for x in d]
      axes[1].errorbar(d, [x.mean() for x in scores], [x.std() for x in scores], color=f"C{presets.index(name)}", marker=".", capsize=2)
    axes[0].set(xlabel=f"pairs (trained with {most})", ylabel="queries answered", ylim=(0, 1.02))
    axes[1].set(xlabel=f"size of keys and values, {most} pairs", xscale="log", xticks=(ticks := (*sizes, usual)), xticklabels=ticks)
    axes[1].minorticks_off()
    axes[1].legend(*axes[0].get_legend_handles_labels(), fontsize=7, frameon=False, loc="lower right")
  picture(Path(folder) / "mqar.png", 2, (8, 3.6), draw)
  return found

def niah(presets:tuple[str, ...]=("deltanet", "gated_deltanet", "titans", "omeganet", "atlas"),
         kinds:tuple[str, ...]=("pk",), trial:Trial=NEEDLE) -> dict:
  """The paper's Table 3 at small scale: a needle in a haystack, trained at one length, asked at up to 16 times that; the value must be said."""
  found = {}
  for kind in kinds:
    asked = trial._replace(task=trial.task.replace("niah:", f"niah:kind={kind},"))
    heading("needle in a haystack, share of answers right", asked)
    task = data.task(asked.task)
    lengths = [v.get("length", task.settings["length"]) for v in task.variants()]
    print(f"{'':18s}{'rate':>7s}{'steps':>7s}{'minutes':>9s}" + "".join(f"{n:>18d}" for n in lengths))
    for name, row in zip(presets, all_trained([asked._replace(preset=name) for name in presets], task.variants())):
      found[name, kind] = row
      print(f"{name:18s}{row.rate:7.3f}{row.steps:7d}{row.minutes:9.1f}" + "".join(f"{spread(x):>18s}" for x in row.scores.T), flush=True)
  return found

def scaling(presets:tuple[str, ...]=("transformer++", "deltanet", "atlas"), dims:tuple[int, ...]=(32, 64, 128), trial:Trial=Trial("atlas")) -> dict:
  """The paper's Figure 8: validation loss on text against compute, three sizes of each model."""
  heading("text, bits per byte", trial)
  print(f"{'':18s}{'dim':>5s}{'parameters':>12s}{'TFLOP':>9s}{'bits per byte':>18s}{'minutes':>9s}")
  cases = [(name, dim) for name in presets for dim in dims]
  trials = [trial._replace(preset=name, fields=trial.fields | dict(dim=dim, heads=dim // 16)) for name, dim in cases]
  found = dict(zip(cases, all_trained(trials)))
  for (name, dim), row in found.items():
    print(f"{name:18s}{dim:5d}{row.parameters:12,d}{row.gflop * row.steps / 1e3:9.2f}{spread(row.scores):>18s}{row.minutes:9.1f}", flush=True)
  return found

# *** streams far longer than the trained ones ***

def hostile(tokens:int, vocab:int) -> np.ndarray:
  """Four rows (4,tokens): one token repeated, a short pattern repeated, noise, and blocks of noise and of one token in turn."""
  noise, place = np.random.default_rng(0).integers(0, vocab, tokens), np.arange(tokens)
  return np.stack([np.full(tokens, 7), place % 5, noise, np.where(place // 512 % 2, 7, noise)]).astype(np.int32)

def in_pieces(params:dict, cfg:atlas.Config, tokens:np.ndarray) -> Iterator[tuple[int, np.ndarray, dict]]:
  """A stream (B,T) read 256 tokens a call: the place of the first of them, their logits, the state.  Where the state grows with the stream a jit
  cannot hold it: whole then, without the state."""
  if atlas.growing(cfg):                                 # attention row by row, whose scores are the square of a row
    rows = [tokens] if cfg.mixer == "memory" else [row[None] for row in tokens]
    yield 0, np.concatenate([atlas.forward(params, cfg, Tensor(row.copy()))[0].numpy() for row in rows]), {}
    return
  read_on, state = TinyJit(lambda x, state: atlas.forward(params, cfg, x, state)), cast(Any, None)
  for at in range(0, tokens.shape[1], 256):
    x = Tensor(tokens[:, at:at + 256].copy())
    logits, state = atlas.forward(params, cfg, x) if state is None else read_on(x, state)
    state = {n: z.clone().realize() for n, z in state.items()}
    yield at, logits.numpy(), state

AFTER = 4096                                             # tokens of text behind what is hostile; the first 1,024 do not count

def recovery(params:dict, cfg:atlas.Config, text:data.Text, tokens:int=16_384) -> np.ndarray:
  """Bits per byte of a text from its 1,024th token on: with nothing before it; after `tokens` of each hostile kind; after as much of another text.
  At most 8,192 tokens where the cost is their square."""
  if atlas.growing(cfg): tokens = min(tokens, 8192)
  def bits(rows):
    found = []
    for at, logits, _ in in_pieces(params, cfg, rows):
      if not np.isfinite(logits).all(): return np.full(len(rows), math.nan)
      skip = max(0, rows.shape[1] - AFTER + 1024 - at)
      x, z = rows[:, at + skip + 1:at + logits.shape[1], None], logits[:, skip:-1].astype(np.float64)
      found.append(np.log(np.exp(z).sum(-1)) - np.take_along_axis(z, x, -1)[..., 0])
    return np.concatenate(found, axis=1).mean(1) / math.log(2)
  before, after = [*hostile(tokens, cfg.vocab), text.train[:tokens].astype(np.int32)], text.val[None, :AFTER].astype(np.int32)
  return np.concatenate([bits(after), bits(np.concatenate([before, np.tile(after, (len(before), 1))], axis=1))])

STREAMS: dict[str, tuple[str, dict]] = {name: (name, {}) for name in atlas.PRESETS if not name.endswith(("mag", "mal", "mac"))}
STREAMS |= {f"{name}, no horizon": (name, dict(horizon=1 << 20)) for name in ("linear_attention", "deltanet", "ttt")}

def streams(names:dict[str, tuple[str, dict]]=STREAMS, trial:Trial=Trial("atlas", dict(dim=32, layers=1, heads=2))) -> dict:
  """What each (preset, fields), trained on short sequences, makes of text after a long stream of something else."""
  heading("streams, bits per byte of text", trial)
  columns = ("nothing before", "one byte", "a pattern", "noise", "in turn", "text")
  print(f"{'':30s}" + "".join(f"{name:>18s}" for name in columns) + f"{'minutes':>9s}")
  found, trials = {}, [trial._replace(preset=name, fields=trial.fields | more) for name, more in names.values()]
  for name, row in zip(names, all_trained(trials, measure=recovery)):
    found[name] = row
    print(f"{name:30s}" + "".join(f"{spread(x):>18s}" for x in row.scores.T) + f"{row.minutes:9.1f}", flush=True)
  return found

EXPERIMENTS: dict[str, Callable[[], Any]] = {
  f.__name__: f for f in (speed, recall, learnability, capacity, heatmap, text, ablation, window, mqar, niah, scaling, streams)}

if __name__ == "__main__":
  if len(sys.argv) != 2 or sys.argv[1] not in EXPERIMENTS:
    print(f"error: name one experiment: python experiments.py {' | '.join(EXPERIMENTS)}", file=sys.stderr)
    sys.exit(2)
  EXPERIMENTS[sys.argv[1]]()
