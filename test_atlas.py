"""The claims of this project, in the paper's order.  The oracle is a per-token float64 loop of the definition; everything else is held to it.

python -m pytest -q test_atlas.py            the suite;  add -m slow for every combination and longer streams"""
import os
os.environ.setdefault("NOOPT", "1")                      # values matter here, not speed: kernels compile in half the time
import csv, dataclasses, functools, itertools, json, math, re, signal
from pathlib import Path
import numpy as np
import pytest
import kernels, atlas, data, train
from tinygrad import Context, Tensor, TinyJit
from tinygrad.nn.state import get_state_dict, safe_load

slow = pytest.mark.slow
relative = lambda x, y: float(np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y))
worst: dict[str, float] = {}

def record(what:str, error:float) -> float:
  worst[what] = max(worst.get(what, 0.0), error)
  return error

@pytest.fixture(scope="session", autouse=True)
def report():
  yield
  print("\nworst relative errors: " + ", ".join(f"{what} {error:.1e}" for what, error in worst.items()))

# *** the oracle: one head, one token after the other, every weight of every token written out ***

def gelu(z):
  s = 1 / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z ** 3)))
  return z * s, s + z * s * (1 - s) * 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z)

def lift(cfg, x, a):
  if cfg.features == "identity": return x
  monomials = [f for p in range(cfg.degree + 1) for f in itertools.combinations_with_replacement(range(len(x)), p)]
  ways = [math.factorial(len(f)) / math.prod(math.factorial(f.count(i)) for i in set(f)) for f in monomials]
  return np.array([math.sqrt(a[len(f)] * n) * math.prod(x[i] for i in f) for f, n in zip(monomials, ways)])

def recall(cfg, M, x, raw):
  if cfg.memory == "linear": return M["W"] @ x
  y = M["W1"] @ (gelu(M["W2"] @ x)[0] * (M["W3"] @ x if cfg.memory == "gated" else 1))
  return y + raw if len(raw) == len(y) else y

def gradient(cfg, M, k, v, a):
  x = lift(cfg, k, a)
  e = recall(cfg, M, x, k) - v if cfg.loss == "l2" else -v
  if cfg.memory == "linear": return {"W": np.outer(e, x)}
  act, slope = gelu(M["W2"] @ x)
  gate, dh = M["W3"] @ x if cfg.memory == "gated" else np.ones_like(act), M["W1"].T @ e
  g = {"W1": np.outer(e, act * gate), "W2": np.outer(dh * gate * slope, x)}
  return g | {"W3": np.outer(dh * act, x)} if cfg.memory == "gated" else g

def muon(S, steps):
  if S.shape[0] > S.shape[1]: return muon(S.T, steps).T
  X = S / np.sqrt((S * S).sum() + 1e-14)
  for _ in range(steps): X = 3.4445 * X + (-4.7750 * X @ X.T + 2.0315 * X @ X.T @ X @ X.T) @ X
  return X

def oracle(cfg, weights, q, k, v, alpha, theta, eta, gamma):
  """Section 2 of the method, literally: weights (out,in), q, k (T,key_dim), v (T,value_dim), gates (T,), gamma (T,window) -> y (T,value_dim)."""
  a = weights.get("a")
  M = {n: w for n, w in weights.items() if n != "a"}
  S, ys = {n: np.zeros_like(w) for n, w in M.items()}, []
  for t in range(len(q)):
    if t % cfg.chunk == 0: base = M                      # M': every gradient of the chunk is taken here, the halo's too
    lags = [(gamma[t, j], gradient(cfg, base, k[t - j], v[t - j], a)) for j in range(min(cfg.window, t + 1))]
    S = {n: (theta[t] * S[n] if cfg.momentum else 0) + sum(w * g[n] for w, g in lags) for n in M}
    step = {n: S[n] if cfg.optimizer == "gd" else muon(S[n], cfg.ns_steps) for n in M}
    takes = cfg.optimizer == "gd" or (t + 1) % cfg.muon_every == 0
    M = {n: alpha[t] * M[n] - (eta[t] * step[n] if takes else 0) for n in M}
    ys.append(recall(cfg, M, lift(cfg, q[t], a), q[t]))
  return np.stack(ys)

NAMES = ("q", "k", "v", "alpha", "theta", "eta", "gamma")

def problem(cfg, B=1, H=2, T=10, d=3, dv=3, hidden=4, seed=0):
  """Random weights (H,out,in) and inputs (B,H,T,.) in float64; two gates are exactly 0."""
  r = np.random.default_rng(seed)
  def normal(*shape): return r.normal(size=shape) * 0.6
  D = kernels.feature_size(d, cfg.features, cfg.degree)
  W = {"W": normal(H, dv, D)} if cfg.memory == "linear" else {"W1": normal(H, dv, hidden), "W2": normal(H, hidden, D)}
  if cfg.memory == "gated": W["W3"] = normal(H, hidden, D)
  if cfg.features == "poly": W["a"] = r.uniform(0.2, 1, size=cfg.degree + 1)
  gates = [r.uniform(low, high, size=(B, H, T)) for low, high in ((0.7, 1), (0, 1), (0, 0.4))]
  if T > 4: gates[0][:, :, 3] = gates[1][:, :, 2] = 0
  return W, dict(zip(NAMES, [normal(B, H, T, d), normal(B, H, T, d), normal(B, H, T, dv), *gates, r.uniform(size=(B, H, T, cfg.window))]))

def by_oracle(cfg, W, x):
  B, H = x["q"].shape[:2]
  return np.stack([np.stack([oracle(cfg, {n: w if n == "a" else w[h] for n, w in W.items()}, *[x[n][b, h] for n in NAMES]) for h in range(H)]) for b in range(B)])

def tensors(arrays): return {n: Tensor(np.ascontiguousarray(x, dtype=np.float32)).realize() for n, x in arrays.items()}

def rule(**fields): return atlas.Config(**{"key_dim": 3, "value_dim": 3, "heads": 2, "momentum": True, **fields})

# *** 1. the chunked form is the definition ***

AXES = dict(memory=("linear", "mlp", "gated"), features=("identity", "poly"), loss=("l2", "dot"), step=("gd", "momentum", "muon", "muon_every"),
            window=(1, 3, 5), chunk=(1, 4, 16))
STEPS = dict(gd=dict(momentum=False), momentum=dict(), muon=dict(optimizer="muon"), muon_every=dict(optimizer="muon", muon_every=2))

def cases():
  for values in itertools.product(*AXES.values()):
    case = dict(zip(AXES, values))
    if not (case["step"] == "muon_every" and case["chunk"] == 1): yield case

def covering():
  """A small set of cases in which every pair of choices occurs, picked greedily."""
  pairs = {case_: {p for p in itertools.combinations(case_, 2)} for case_ in (tuple(c.items()) for c in cases())}
  left = set().union(*pairs.values())
  while left:
    best = max(pairs, key=lambda c: len(pairs[c] & left))
    left -= pairs[best]
    yield dict(best)

def from_case(case): return rule(**{k: v for k, v in case.items() if k != "step"}, **STEPS[case["step"]])

def check_case(case, **sizes):
  cfg = from_case(case)
  W, x = problem(cfg, **sizes)
  y, _ = kernels.memory(cfg, tensors(W), *tensors(x).values())
  assert record("memory against the oracle", relative(y.numpy(), by_oracle(cfg, W, x))) < 1e-4

PAIRWISE = list(covering())

def test_covering_set_is_small(): assert len(PAIRWISE) <= 24

@pytest.mark.parametrize("case", PAIRWISE, ids=lambda c: "-".join(map(str, c.values())))
def test_memory_is_the_definition(case): check_case(case)

@slow
@pytest.mark.parametrize("case", list(cases()), ids=lambda c: "-".join(map(str, c.values())))
def test_memory_is_the_definition_in_every_combination(case): check_case(case, B=2, T=11, dv=4 if case["loss"] == "l2" else 3)

@pytest.mark.parametrize("T,dv", [(1, 3), (4, 4), (9, 2)])
def test_memory_takes_any_length_and_value_size(T, dv):
  check_case(dict(memory="mlp", features="poly", loss="l2", step="momentum", window=3, chunk=4), B=2, T=T, dv=dv)

def test_features_come_by_degree_then_combination():
  x = np.random.default_rng(0).normal(size=(2, 4))
  cfg, a = rule(features="poly", degree=3, key_dim=4), np.array([1, 0.5, 0.3, 0.1])
  got = kernels.phi(cfg, Tensor(x.astype(np.float32)), Tensor(a.astype(np.float32))).numpy()
  assert relative(got, np.stack([lift(cfg, row, a) for row in x])) < 1e-6
  assert np.allclose(got[0] @ got[1], sum(c * (x[0] @ x[1]) ** p for p, c in enumerate(a)), rtol=1e-5)

def test_without_muon_no_weights_per_token_exist():
  """Peak memory while a long chunk is read stays far below tokens x weights."""
  cfg = rule(memory="mlp", window=3, chunk=64, key_dim=16, value_dim=16)
  W, x = problem(cfg, B=1, H=1, T=256, d=16, dv=16, hidden=256)
  y, _ = kernels.memory(cfg, tensors(W), *tensors(x).values())
  biggest = max(u.numel() for u in y.uop.toposort() if u.op.name == "CONTIGUOUS")
  assert biggest < 256 * 16 * 256 / 4

# *** 2. gradients ***

@pytest.mark.parametrize("case", [dict(memory="mlp", features="poly", loss="l2", step="muon", window=3, chunk=4),
                                  dict(memory="gated", features="poly", loss="l2", step="momentum", window=2, chunk=3),
                                  dict(memory="mlp", features="identity", loss="dot", step="gd", window=5, chunk=2),
                                  dict(memory="linear", features="poly", loss="l2", step="muon_every", window=1, chunk=4)], ids=lambda c: "-".join(map(str, c.values())))
def test_gradients_are_the_finite_differences_of_the_oracle(case):
  cfg = from_case(case)
  W, x = problem(cfg, H=1, T=7, d=2, dv=2, hidden=3)
  direction = np.random.default_rng(1).normal(size=x["v"].shape)
  tw, tx = tensors(W), tensors(x)
  y, _ = kernels.memory(cfg, tw, *tx.values())
  used = {n: t for n, t in (tw | tx).items() if n != "theta" or cfg.momentum}
  got = dict(zip(used, (y * Tensor(direction.astype(np.float32))).sum().gradient(*used.values())))
  Tensor.realize(*got.values())
  for name, g in got.items():
    where, numeric = (W if name in W else x)[name], np.zeros(used[name].shape)
    for i in np.ndindex(where.shape):
      kept, values = where[i], []
      for where[i] in (kept + 1e-6, kept - 1e-6): values.append((by_oracle(cfg, W, x) * direction).sum())
      where[i] = kept
      numeric[i] = (values[0] - values[1]) / 2e-6
    assert np.linalg.norm(numeric) > 0, name
    assert record("gradients against finite differences", relative(g.numpy(), numeric)) < 1e-3, name

def test_ignored_gates_get_zero_gradients_and_feature_coefficients_of_zero_finite_ones():
  cfg = rule(memory="linear", features="poly", momentum=False)
  W, x = problem(cfg, T=5)
  W["a"][1] = 0
  tw, tx = tensors(W), tensors(x)
  loss = kernels.memory(cfg, tw, *tx.values())[0].square().sum()
  g_theta, g_a = loss.gradient(tx["theta"], tw["a"])
  assert (g_theta.numpy() == 0).all() and np.isfinite(g_a.numpy()).all() and np.abs(g_a.numpy()).max() > 0
