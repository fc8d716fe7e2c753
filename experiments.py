"""Experiments at small scale, one function and one command each: python experiments.py NAME

  speed    the memory alone, forward and backward: one kernel against stock operations, in one process (6 minutes on 2 cores)
  recall   what each rule and feature map still knows of the pairs it has read once, without any training (2 minutes)"""
from __future__ import annotations
import dataclasses, math, resource, sys, time
from pathlib import Path
from typing import Any, Callable, cast
import numpy as np
from tinygrad import Device, Tensor, TinyJit
from tinygrad.helpers import GlobalCounters
import atlas, kernels

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

# *** recall without training ***

RULES: dict[str, dict] = {"Hebbian": dict(loss="dot"), "delta": {}, "Omega, window 16": dict(window=16), "delta, Muon": dict(optimizer="muon")}
KINDS, STEPS = ("independent", "correlated", "overwritten"), (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)

def recall_pairs(rng:np.random.Generator, kind:str, trials:int, N:int, d:int, T:int) -> list[np.ndarray]:
  """N pairs of unit vectors to store, in a stream of T: keys, values (trials,T,d), whether a place writes (T), and what is to be known at the end,
  keys and values (trials,N,d).  correlated: all keys share a component, their cosines are about 1/2.  overwritten: half of the keys are given a
  second value, and the latest counts."""
  def unit(*shape, shared=0.0): return (x := rng.normal(size=shape) + shared) / np.linalg.norm(x, axis=-1, keepdims=True)
  keys = unit(trials, N, d, shared=rng.normal(size=(trials, 1, d)) if kind == "correlated" else 0.0)
  values, again = unit(trials, N, d), N // 2 if kind == "overwritten" else 0
  newer = unit(trials, again, d)
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
    begin, step = kernels.for_batch(kernels.initial_state(cfg, weights, B, d), B), TinyJit(call)
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
  try: import matplotlib.pyplot as plt
  except ImportError: print("for the picture: pip install '.[plot]'")
  else:
    figure, axes = plt.subplots(1, len(KINDS), figsize=(11, 3.6), sharey=True, layout="constrained")
    for (name, features), hits in found.items():
      style: Any = dict(color=f"C{list(RULES).index(name)}", linestyle={"identity": ":", "poly": "-", "exp": "--"}[features], marker=".")
      for axis, kind, row in zip(axes, KINDS, hits): axis.plot(sizes, row.mean(-1), label=f"{name}, {features}", **style)
    for axis, kind in zip(axes, KINDS):
      axis.set(title=f"{kind} keys", xlabel="pairs written once", xscale="log", xticks=sizes, xticklabels=sizes)
      axis.minorticks_off()
    axes[0].set(ylabel="values recalled", ylim=(0, 1.02))
    axes[-1].legend(fontsize=7, handlelength=4, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(path := Path(folder) / "recall.png", dpi=110)
    print(f"written to {path}")
  return found

EXPERIMENTS: dict[str, Callable[[], Any]] = {"speed": speed, "recall": recall}

if __name__ == "__main__":
  if len(sys.argv) != 2 or sys.argv[1] not in EXPERIMENTS:
    print(f"error: name one experiment: python experiments.py {' | '.join(EXPERIMENTS)}", file=sys.stderr)
    sys.exit(2)
  EXPERIMENTS[sys.argv[1]]()
