"""Experiments at small scale, one function and one command each: python experiments.py NAME

  speed    the memory alone, forward and backward: one kernel against stock operations, in one process (6 minutes on 2 cores)"""
from __future__ import annotations
import dataclasses, resource, sys, time
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

EXPERIMENTS = {"speed": speed}

if __name__ == "__main__":
  if len(sys.argv) != 2 or sys.argv[1] not in EXPERIMENTS:
    print(f"error: name one experiment: python experiments.py {' | '.join(EXPERIMENTS)}", file=sys.stderr)
    sys.exit(2)
  EXPERIMENTS[sys.argv[1]]()
