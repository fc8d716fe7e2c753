"""The claims of this project, in the paper's order.  The oracle is a per-token float64 loop of the definition; everything else is held to it.

python -m pytest -q test_atlas.py            the suite;  add -m slow for every combination and longer streams"""
import os
os.environ.setdefault("NOOPT", "1")                      # values matter here, not speed: kernels compile in half the time
import functools, gc, itertools, math, re, shutil, subprocess, sys
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import kernels, atlas, evaluate, experiments, train
from tinygrad import Context, Device, GlobalCounters, Tensor, TinyJit, dtypes
from tinygrad.device import Buffer
from tinygrad.nn.state import get_state_dict

gc.set_threshold(100_000, 20, 100)        # graphs are many objects that live long: gone through seldom, they are built in 80% of the time

slow = pytest.mark.slow
worst: dict[str, float] = {}

def relative(x, y): return float(np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y))

def record(what:str, error:float) -> float:
  worst[what] = max(worst.get(what, 0.0), error)
  return error

@pytest.fixture(scope="session", autouse=True)
def report(request):
  yield
  with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
    if worst:                                            # each of pytest-xdist's processes reports its own, to where they all can: stderr
      print("\nworst relative errors: " + ", ".join(f"{what} {error:.1e}" for what, error in worst.items()), file=sys.stderr, flush=True)

# *** the oracle: one head, one token after the other, every weight of every token written out ***

def gelu(z):
  s = 1 / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z ** 3)))
  return z * s, s + z * s * (1 - s) * 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z)

class Expansion:
  """The first layer of features=exp, W phi*(x) = sum_i coef_i exp(key_i . x), with the operations of a matrix."""
  __array_ufunc__ = None                                 # numpy's numbers leave products to this class
  def __init__(self, out, items): self.out, self.items = out, list(items)
  def __add__(self, o): return Expansion(self.out, self.items + getattr(o, "items", []))
  def __mul__(self, weight): return Expansion(self.out, [(weight * coef, key) for coef, key in self.items])
  def __sub__(self, o): return self + o * -1.0
  def __matmul__(self, x): return sum((coef * np.exp(key @ x) for coef, key in self.items), np.zeros(self.out))
  __radd__, __rmul__ = __add__, __mul__

def lift(cfg, x, a):
  if cfg.features != "poly": return x
  monomials = [f for p in range(cfg.degree + 1) for f in itertools.combinations_with_replacement(range(len(x)), p)]
  ways = [math.factorial(len(f)) / math.prod(math.factorial(f.count(i)) for i in set(f)) for f in monomials]
  return np.array([math.sqrt(a[len(f)] * n) * math.prod(x[i] for i in f) for f, n in zip(monomials, ways)])

def recall(cfg, M, x, raw):
  if cfg.memory == "linear": return M["W"] @ x
  y = M["W1"] @ (gelu(M["W2"] @ x)[0] * (M["W3"] @ x if cfg.memory == "gated" else 1))
  return y + raw if len(raw) == len(y) else y

def gradient(cfg, M, k, v, a):
  x = lift(cfg, k, a)
  def outer(u, x): return Expansion(len(u), [(u, x)]) if cfg.features == "exp" else np.outer(u, x)
  e = recall(cfg, M, x, k) - v if cfg.loss == "l2" else -v
  if cfg.memory == "linear": return {"W": outer(e, x)}
  act, slope = gelu(M["W2"] @ x)
  gate, dh = M["W3"] @ x if cfg.memory == "gated" else np.ones_like(act), M["W1"].T @ e
  g = {"W1": np.outer(e, act * gate), "W2": outer(dh * gate * slope, x)}
  return g | {"W3": np.outer(dh * act, x)} if cfg.memory == "gated" else g

def muon(S, steps):
  if S.shape[0] > S.shape[1]: return muon(S.T, steps).T
  X = S / np.sqrt((S * S).sum() + 1e-14)
  for _ in range(steps): X = 3.4445 * X + (-4.7750 * X @ X.T + 2.0315 * X @ X.T @ X @ X.T) @ X
  return X

def oracle(cfg, weights, q, k, v, alpha, theta, eta, gamma, *, toward=None):
  """Section 2 of the method, literally: weights (out,in), q, k (T,key_dim), v (T,value_dim), gates (T,), gamma (T,window) -> y (T,value_dim).
  toward: weights that forgetting leads to, in place of zeros."""
  a = weights.get("a")
  M = {n: w for n, w in weights.items() if n != "a"}
  S, ys = {n: w * 0.0 for n, w in M.items()}, []
  for t in range(len(q)):
    if t % cfg.chunk == 0: base = M                      # M': every gradient of the chunk is taken here, the halo's too
    lags = [(gamma[t, j], gradient(cfg, base, k[t - j], v[t - j], a)) for j in range(min(cfg.window, t + 1))]
    S = {n: (theta[t] * S[n] if cfg.momentum else 0) + sum(w * g[n] for w, g in lags) for n in M}
    step = {n: S[n] if cfg.optimizer == "gd" else muon(S[n], cfg.ns_steps) for n in M}
    takes = cfg.optimizer == "gd" or (t + 1) % cfg.muon_every == 0
    M = {n: alpha[t] * M[n] + ((1 - alpha[t]) * toward[n] if toward else 0) - (eta[t] * step[n] if takes else 0) for n in M}
    ys.append(recall(cfg, M, lift(cfg, q[t], a), q[t]))
  return np.stack(ys)

NAMES = ("q", "k", "v", "alpha", "theta", "eta", "gamma")

def problem(cfg, B=1, H=2, T=10, d=3, dv=3, hidden=4, seed=0, anchors=3):
  """Random weights (H,out,in) and inputs (B,H,T,.) in float64; two gates are exactly 0."""
  r = np.random.default_rng(seed)
  def normal(*shape): return r.normal(size=shape) * 0.6
  D = kernels.feature_size(d, cfg.features, cfg.degree)
  W = {"W": normal(H, dv, D)} if cfg.memory == "linear" else {"W1": normal(H, dv, hidden), "W2": normal(H, hidden, D)}
  if cfg.memory == "gated": W["W3"] = normal(H, hidden, D)
  if cfg.features == "exp":
    out = W.pop("W" if cfg.memory == "linear" else "W2").shape[1]
    W |= {"anchor_k": normal(H, anchors, d), "anchor_u": normal(H, anchors, out)}
  if cfg.features == "poly": W["a"] = r.uniform(0.2, 1, size=cfg.degree + 1)
  gates = [r.uniform(low, high, size=(B, H, T)) for low, high in ((0.7, 1), (0, 1), (0, 0.2))]
  if T > 4: gates[0][:, :, 3] = gates[1][:, :, 2] = 0
  return W, dict(zip(NAMES, [normal(B, H, T, d), normal(B, H, T, d), normal(B, H, T, dv), *gates, r.uniform(size=(B, H, T, cfg.window))]))

def by_oracle(cfg, W, x, toward=None):
  B, H = x["q"].shape[:2]
  def of_head(W, h):
    weights = {n: w if n == "a" else w[h] for n, w in W.items()}
    if cfg.features == "exp":
      keys, coefs = weights.pop("anchor_k"), weights.pop("anchor_u")
      weights["W" if cfg.memory == "linear" else "W2"] = Expansion(coefs.shape[1], zip(coefs, keys))
    return weights
  def head(b, h): return oracle(cfg, of_head(W, h), *[x[n][b, h] for n in NAMES], toward=of_head(toward, h) if toward else None)
  return np.stack([np.stack([head(b, h) for h in range(H)]) for b in range(B)])

def elsewhere(cfg, W, **sizes):
  """Another initial memory of the same sizes, for forgetting to lead to; the features are the memory's own."""
  return problem(cfg, seed=1, **sizes)[0] | {n: W[n] for n in ("a", "anchor_k") if n in W}

def tensors(arrays): return {n: Tensor(np.ascontiguousarray(x, dtype=np.float32)).realize() for n, x in arrays.items()}

def rule(**fields): return atlas.Config(**{"key_dim": 3, "value_dim": 3, "heads": 2, "momentum": True, **fields})

# *** 1. the chunked form is the definition ***

AXES = dict(memory=("linear", "mlp", "gated"), features=("identity", "poly"), loss=("l2", "dot"), step=("gd", "momentum", "muon", "muon_every"),
            window=(1, 3, 5), chunk=(1, 4, 16))

def cases():
  for values in itertools.product(*AXES.values()):
    case = dict(zip(AXES, values))
    if not (case["step"] == "muon_every" and case["chunk"] == 1): yield case

def covering():
  """A small set of cases in which every pair of choices occurs, picked greedily."""
  pairs = {tuple(case.items()): set(itertools.combinations(case.items(), 2)) for case in cases()}
  left: set = set().union(*pairs.values())
  while left:
    best = max(pairs, key=lambda case: len(pairs[case] & left))
    left -= pairs[best]
    yield dict(best)

STEPS: dict[str, dict] = dict(gd=dict(momentum=False), momentum=dict(), muon=dict(optimizer="muon"), muon_every=dict(optimizer="muon", muon_every=2))

def from_case(case): return rule(**{k: v for k, v in case.items() if k != "step"} | STEPS[case["step"]])

def label(case): return "-".join(map(str, case.values()))

BOTH = pytest.mark.parametrize("backend", ["ops", "fused"])

def check_case(case, backend, bound=1e-4, **sizes):
  """Newton-Schulz amplifies the rounding of small singular values, up to 3.4445^5 = 480 times; without it float32 is exact."""
  cfg = from_case(case | {"backend": backend})
  W, x = problem(cfg, **sizes)
  y, _ = kernels.memory(cfg, tensors(W), *tensors(x).values())
  kind = "gradient steps" if cfg.optimizer == "gd" else "Muon" if case["window"] > 1 else "Muon of low rank"
  assert record(f"memory against the oracle, {kind}", relative(y.numpy(), by_oracle(cfg, W, x))) < (1e-5 if cfg.optimizer == "gd" else bound)

PAIRWISE = list(covering())

def test_covering_set_is_small(): assert len(PAIRWISE) <= 24

@BOTH
@pytest.mark.parametrize("case", PAIRWISE, ids=label)
def test_memory_is_the_definition(case, backend): check_case(case, backend)

@slow
@BOTH
@pytest.mark.parametrize("case", list(cases()), ids=label)
def test_memory_is_the_definition_in_every_combination(case, backend):
  """With a window of 1 the momentum has a low rank: there the bound is the one that Newton-Schulz itself is held to on such matrices."""
  check_case(case, backend, 1e-4 if case["window"] > 1 else 1e-3, B=2, T=11, dv=4 if case["loss"] == "l2" else 3)

@BOTH
@pytest.mark.parametrize("T,dv", [(1, 3), (4, 4), (9, 2)])
def test_memory_takes_any_length_and_value_size(T, dv, backend):
  check_case(dict(memory="mlp", features="poly", loss="l2", step="momentum", window=3, chunk=4), backend, B=2, T=T, dv=dv)

def test_a_jitted_step_of_the_memory_itself_streams():
  cfg = rule(memory="linear", window=2, chunk=3)
  W, x = problem(cfg)
  weights, ys = tensors(W), []
  state: Any = None
  step = TinyJit(lambda state, *z: kernels.memory(cfg, weights, **dict(zip(NAMES, z)), state=state))
  for t in range(10):
    z = tensors({n: x[n][:, :, t:t + 1] for n in NAMES}).values()
    y, state = kernels.memory(cfg, weights, *z) if t == 0 else step(state, *z)
    ys.append(y.numpy())
  assert relative(np.concatenate(ys, 2), by_oracle(cfg, W, x)) < 1e-5

def test_features_come_by_degree_then_combination():
  x = np.random.default_rng(0).normal(size=(2, 4))
  cfg, a = rule(features="poly", degree=3, key_dim=4), np.array([1, 0.5, 0.3, 0.1])
  got = kernels.phi(cfg, Tensor(x.astype(np.float32)), Tensor(a.astype(np.float32))).numpy()
  assert relative(got, np.stack([lift(cfg, row, a) for row in x])) < 1e-6
  assert np.allclose(got[0] @ got[1], sum(c * (x[0] @ x[1]) ** p for p, c in enumerate(a)), rtol=1e-5)

TOWARD = [dict(memory="gated", features="poly", loss="l2", step="momentum", window=3, chunk=4),
          dict(memory="mlp", features="poly", loss="l2", step="muon_every", window=3, chunk=4),
          dict(memory="linear", features="identity", loss="dot", step="gd", window=1, chunk=4),
          dict(memory="mlp", features="exp", loss="l2", step="momentum", window=3, chunk=4)]

@pytest.mark.parametrize("case,backend", [(c, b) for c in TOWARD for b in ("ops", "fused") if (c["features"], b) != ("exp", "fused")],
                         ids=lambda x: x if isinstance(x, str) else label(x))
def test_forgetting_leads_to_where_it_is_told_whole_and_in_pieces(case, backend):
  """Two calls, the second starting inside a chunk, then one of a token; and the whole stream in one."""
  cfg = from_case(case | {"backend": backend})
  W, x = problem(cfg, B=2, T=11)
  R, weights = elsewhere(cfg, W), tensors(W)
  toward, expected = tensors(R), by_oracle(cfg, W, x, R)
  assert relative(expected, by_oracle(cfg, W, x)) > 0.01
  bound = 1e-5 if cfg.optimizer == "gd" else 1e-4
  assert record("memory against the oracle, forgetting towards M_0",
                relative(kernels.memory(cfg, weights, *tensors(x).values(), toward=toward)[0].numpy(), expected)) < bound
  state: Any = None
  ys = []
  for part in (slice(6), slice(6, 10), slice(10, 11)):
    y, state = kernels.memory(cfg, weights, **tensors({n: z[:, :, part] for n, z in x.items()}), state=state, toward=toward)
    ys.append(y.numpy())
  assert relative(np.concatenate(ys, 2), expected) < bound

EXPANSIONS = [
  (dict(memory="linear", loss="l2", step="gd", window=1, chunk=4), dict(anchors=3)),
  (dict(memory="mlp", loss="l2", step="momentum", window=3, chunk=4), dict(anchors=3, B=2)),
  (dict(memory="mlp", loss="dot", step="momentum", window=3, chunk=1), dict(anchors=1, T=5, dv=2)),
  (dict(memory="linear", loss="l2", step="momentum", window=3, chunk=16), dict(anchors=0, dv=2)),
  (dict(memory="mlp", loss="dot", step="gd", window=1, chunk=16), dict(anchors=3, T=18))]

@pytest.mark.parametrize("case,sizes", EXPANSIONS, ids=lambda x: label(x))
def test_an_expansion_over_the_tokens_is_the_definition(case, sizes): check_case(case | dict(features="exp", backend="ops"), "ops", **sizes)

def test_an_expansion_streams_from_anywhere_in_a_chunk_and_grows_when_full():
  """Calls that end and start inside chunks, over the border of the capacity, then token by token."""
  cfg = from_case(dict(memory="mlp", features="exp", loss="l2", step="momentum", window=3, chunk=4))
  W, x = problem(cfg, T=66)
  weights, at = tensors(W), 0
  ys: list = []
  sizes: list[int] = []
  state: Any = None
  for n in (6, 3, 55, 1, 1):
    y, state = kernels.memory(cfg, weights, state=state, **tensors({name: z[:, :, at:at + n] for name, z in x.items()}))
    ys, at, sizes = [*ys, y.numpy()], at + n, [*sizes, state["keys"].shape[2] - 3]
  assert record("memory against the oracle, gradient steps", relative(np.concatenate(ys, 2), by_oracle(cfg, W, x))) < 1e-5
  assert sizes == [64, 64, 64, 256, 256]

def peak_bytes(cfg, T):
  """The most that is allocated at once in an eager forward and backward pass."""
  W, x = map(tensors, problem(cfg, T=T, d=8, dv=8, hidden=16))
  y = kernels.memory(cfg, W, *x.values())[0]
  grads = y.square().sum().gradient(*W.values(), *x.values())
  most, allocate, start = [0], Buffer.allocate, GlobalCounters.mem_used
  def watched(self, *args, **kwargs):
    done = allocate(self, *args, **kwargs)
    most[0] = max(most[0], GlobalCounters.mem_used - start)
    return done
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Buffer, "allocate", watched)
    Tensor.realize(y, *grads)
  return most[0]

def test_the_memory_of_an_expansion_grows_with_the_stream_and_not_with_its_square():
  """Kept for every chunk, the expansion would take 9 times as much for 4 times the tokens."""
  cfg = rule(memory="mlp", features="exp", window=3, forget=True, chunk=16)
  assert peak_bytes(cfg, 1024) < 5 * peak_bytes(cfg, 256)

def largest_tensor(cfg):
  """Elements of the largest intermediate of a read of 256 tokens by one head of 16 with a hidden size of 64."""
  W, x = problem(cfg, B=1, H=1, T=256, d=16, dv=16, hidden=64)
  y, _ = kernels.memory(cfg, tensors(W), *tensors(x).values())
  return max(u.max_numel() for u in y.uop.toposort(enter_calls=True) if u.op.name in ("CONTIGUOUS", "GETTUPLE", "STACK"))

def test_without_muon_nothing_of_size_tokens_by_weights_exists():
  settings = dict(memory="mlp", window=3, chunk=64, key_dim=16, value_dim=16)
  weights_per_token = 256 * 16 * 64
  assert largest_tensor(rule(**settings, backend="ops")) < weights_per_token / 4
  assert largest_tensor(rule(**settings, backend="ops", optimizer="muon")) >= weights_per_token        # the probe does see them where they are

# *** 2. gradients ***

GRADIENT_CASES = [dict(memory="mlp", features="poly", loss="l2", step="muon", window=3, chunk=4),
                  dict(memory="gated", features="poly", loss="l2", step="momentum", window=2, chunk=3),
                  dict(memory="mlp", features="identity", loss="dot", step="gd", window=5, chunk=2),
                  dict(memory="linear", features="poly", loss="l2", step="muon_every", window=1, chunk=4)]

EXPANSION_CASES = [dict(memory="mlp", features="exp", loss="l2", step="momentum", window=3, chunk=4),
                   dict(memory="linear", features="exp", loss="dot", step="gd", window=2, chunk=3)]

@pytest.mark.parametrize("case", EXPANSION_CASES, ids=label)
def test_gradients_of_an_expansion_are_the_finite_differences_of_the_oracle(case):
  test_gradients_are_the_finite_differences_of_the_oracle(case, "ops")

@BOTH
@pytest.mark.parametrize("case", [*GRADIENT_CASES, *[pytest.param(case, marks=slow) for case in PAIRWISE]], ids=label)
def test_gradients_are_the_finite_differences_of_the_oracle(case, backend):
  """Forgetting leads towards another memory, whose gradients are checked as well."""
  low_rank = case["step"] == "muon" and case["window"] == 1                    # where rounding is amplified most
  cfg, sizes = from_case(case | {"backend": backend}), dict(H=1, T=7, d=2, dv=2, hidden=3)
  W, x = problem(cfg, **sizes)
  R = elsewhere(cfg, W, **sizes)
  direction = np.random.default_rng(1).normal(size=x["v"].shape)
  tw, tx, to = tensors(W), tensors(x), tensors(R)
  y, _ = kernels.memory(cfg, tw, *tx.values(), toward=to)
  own = {f"toward {n}": n for n in R if n not in ("a", "anchor_k")}
  used = {n: t for n, t in (tw | tx).items() if n != "theta" or cfg.momentum} | {name: to[n] for name, n in own.items()}
  got = dict(zip(used, (y * Tensor(direction.astype(np.float32))).sum().gradient(*used.values())))
  Tensor.realize(*got.values())
  for name, g in got.items():
    where = R[own[name]] if name in own else (W if name in W else x)[name]
    numeric = np.zeros(where.shape)
    for i in np.ndindex(where.shape):
      for sign in (1, -1):
        where[i] += sign * 1e-6
        numeric[i] += sign * (by_oracle(cfg, W, x, R) * direction).sum() / 2e-6
        where[i] -= sign * 1e-6
    assert np.linalg.norm(numeric) > 0, name
    kind = f"gradients against finite differences{', Muon of low rank' if low_rank else ''}"
    assert record(kind, relative(g.numpy(), numeric)) < (1e-2 if low_rank else 1e-3), name

def test_the_kernels_gradients_are_those_of_the_operations_through_the_state_too():
  """Two calls, the second starting inside a chunk: gradients flow back through base, M, S and the window's tail."""
  case = dict(memory="mlp", features="identity", loss="l2", step="momentum", window=3, chunk=4)
  cfgs = [from_case(case | {"backend": backend}) for backend in ("ops", "fused")]
  W, x = problem(cfgs[0], B=2, T=13, d=2, dv=2)
  tw, first, second = tensors(W), *[tensors({n: z[:, :, part] for n, z in x.items()}) for part in (slice(6), slice(6, 13))]
  inputs, found = [*tw.values(), *first.values(), *second.values()], []
  for cfg in cfgs:
    y, state = kernels.memory(cfg, tw, *first.values())
    z, _ = kernels.memory(cfg, tw, **second, state=state)
    found.append((y.cat(z, dim=2).sin().sum()).gradient(*inputs))
    Tensor.realize(*found[-1])
  for a, b in zip(*found): assert record("one kernel against stock operations", relative(a.numpy(), b.numpy())) < 1e-5

@slow
def test_gradients_of_an_expansion_flow_through_its_state():
  cfg = from_case(EXPANSION_CASES[0])
  W, x = map(tensors, problem(cfg, T=11, d=2, dv=2))
  y, state = kernels.memory(cfg, W, **{n: z[:, :, :6] for n, z in x.items()})
  halves = y.cat(kernels.memory(cfg, W, **{n: z[:, :, 6:] for n, z in x.items()}, state=state)[0], dim=2)
  found = [z.sin().sum().gradient(*W.values(), *x.values()) for z in (halves, kernels.memory(cfg, W, *x.values())[0])]
  for a, b in zip(*found): assert relative(a.numpy(), b.numpy()) < 1e-5

def test_the_stock_form_launches_few_kernels_a_chunk():
  """What a GPU pays for a longer sequence: 24 kernels a chunk, forward and backward."""
  cfg, found = rule(memory="mlp", window=3, forget=True, chunk=4, backend="ops"), []
  for T in (16, 32):
    W, x = map(tensors, problem(cfg, T=T))
    y = kernels.memory(cfg, W, *x.values())[0]
    grads = y.square().sum().gradient(*W.values(), *x.values())
    GlobalCounters.reset()
    Tensor.realize(y, *grads)
    found.append(GlobalCounters.kernel_count)
  assert (found[1] - found[0]) / 4 <= 24

def test_weights_come_in_any_order():
  for backend, step in (("ops", "momentum"), ("fused", "muon")):
    cfg = from_case(dict(memory="gated", features="identity", loss="l2", step=step, window=1, chunk=4, backend=backend))
    W, x = problem(cfg)
    reordered = kernels.memory(cfg, tensors(dict(reversed(W.items()))), *tensors(x).values())[0]
    assert relative(reordered.numpy(), by_oracle(cfg, W, x)) < 1e-4

def test_ignored_gates_get_zero_gradients_and_feature_coefficients_of_zero_finite_ones():
  cfg = rule(memory="linear", features="poly", momentum=False)
  W, x = problem(cfg, T=5)
  W["a"][1] = 0
  tw, tx = tensors(W), tensors(x)
  loss = kernels.memory(cfg, tw, *tx.values())[0].square().sum()
  g_theta, g_a = loss.gradient(tx["theta"], tw["a"])
  assert (g_theta.numpy() == 0).all() and np.isfinite(g_a.numpy()).all() and np.abs(g_a.numpy()).max() > 0

# *** 3 to 5. causality, streaming, special cases: one small model per preset, one compiled forward ***

SMALL = dict(vocab=16, dim=16, layers=1, heads=2, key_dim=4, value_dim=4, mlp_ratio=1.0, chunk=8, muon_every=2, horizon=11)
PRESETS = list(atlas.PRESETS)
# where compiling takes longest, presets whose parts others have too are left to -m slow
FEWER = [n if n in ("linear_attention", "titans", "dla", "dot", "atlas", "transformer++", "swa", "atlas_mag", "titans_mac") else
         pytest.param(n, marks=slow) for n in PRESETS]
T = 21

def windows(name, w): return {"attn_window": w} if "attn_window" in atlas.PRESETS[name] else {}

def small(name, **fields): return atlas.preset(name, **SMALL | windows(name, 6) | fields)       # windows and segments that chunks do not divide

@functools.cache
def model(name):
  """cfg, params, jitted forward of (2,T) tokens -> logits, tokens and their logits."""
  cfg = small(name)
  params = atlas.init(cfg, seed=1)
  forward = TinyJit(lambda tokens: atlas.forward(params, cfg, tokens)[0].realize())
  tokens = np.random.default_rng(0).integers(0, cfg.vocab, (2, T)).astype(np.int32)
  first, second, third = [forward(Tensor(tokens)).numpy() for _ in range(3)]            # eager, captured, replayed
  return cfg, params, lambda x: forward(Tensor(np.ascontiguousarray(x))).numpy(), tokens, (first, second, third)

@pytest.mark.parametrize("name", PRESETS)
def test_no_leak_inside_a_chunk_nor_between_rows(name):
  _, _, forward, tokens, (_, _, y) = model(name)
  for t in (3, 7, 8, 13, T - 1):                         # inside chunks, at their last and first token, at the end
    changed = tokens.copy()
    changed[1, t] = (changed[1, t] + 1) % 16
    z = forward(changed)
    assert np.array_equal(z[0], y[0]), "a row of the batch saw another"
    assert np.array_equal(z[1, :t], y[1, :t]), f"an output before token {t} saw it"
    assert (np.abs(z[1, t:] - y[1, t:]).max(-1) > 0).any()

@pytest.mark.parametrize("name", PRESETS)
def test_jit_equals_eager(name):
  eager, captured, replayed = model(name)[4]
  assert np.array_equal(captured, replayed) and record("jit against eager", relative(replayed, eager)) < 1e-6

@pytest.mark.parametrize("name", [n if n not in ("swdt", "deep_transformer", "atlas++", "atlas_mal", "atlas_mac") else
                                  pytest.param(n, marks=slow) for n in PRESETS])
def test_two_halves_equal_the_whole(name):
  """Cut inside a chunk, at a border, and then token by token in a jitted step; the state keeps its size."""
  cfg, params, _, tokens, (whole, _, _) = model(name)
  state: Any = None
  got: list = []
  at = 0
  for n in (5, 3, 9):
    logits, state = atlas.forward(params, cfg, Tensor(tokens[:, at:at + n].copy()), state)
    Tensor.realize(logits, *state.values())
    got, at = [*got, logits.numpy()], at + n
  shapes = {n: s.shape for n, s in state.items()}
  step = TinyJit(lambda token, state: atlas.forward(params, cfg, token, state))
  for t in range(at, T):
    logits, state = step(Tensor(tokens[:, t:t + 1].copy()), state)
    got.append(logits.numpy())
  assert record("streamed against whole", relative(np.concatenate(got, 1), whole)) < 2e-4
  assert int(state["position"].item()) == T and shapes == {n: s.shape for n, s in state.items()}

@pytest.mark.parametrize("name", ["titans", "transformer++"])
def test_a_sample_is_what_reading_the_whole_context_anew_for_every_token_gives(name, capsys):
  cfg, params, forward, *_ = model(name)
  ids = [1, 2, 3]
  evaluate.sample(params, cfg, [1, 2, 3], False, tokens=T - 3, temperature=0.0)
  while len(ids) < T: ids.append(int(forward(np.array([ids + [0] * (T - len(ids))] * 2, np.int32))[0, len(ids) - 1].argmax()))
  assert capsys.readouterr().out.splitlines()[1] == ",".join(map(str, ids)) and len(set(ids)) > 3

def test_layers_keep_their_own_states_and_a_state_is_never_changed_in_place():
  cfg = small("titans", layers=2)
  params, tokens = atlas.init(cfg), np.arange(12, dtype=np.int32).reshape(1, 12)
  whole = atlas.forward(params, cfg, Tensor(tokens))[0].numpy()
  _, state = atlas.forward(params, cfg, Tensor(tokens[:, :5].copy()))
  before = {n: s.numpy() for n, s in state.items()}
  for _ in range(2): second = atlas.forward(params, cfg, Tensor(tokens[:, 5:].copy()), state)[0].numpy()
  assert relative(second, whole[:, 5:]) < 1e-5
  assert all(np.array_equal(before[n], s.numpy()) for n, s in state.items())

@pytest.mark.parametrize("name", ["titans", "swa"])
def test_a_jitted_call_of_whole_chunks_streams_and_one_that_starts_inside_a_chunk_says_so(name):
  cfg = small(name)
  params, tokens = atlas.init(cfg), np.random.default_rng(0).integers(0, 16, (1, 48)).astype(np.int32)
  whole = atlas.forward(params, cfg, Tensor(tokens))[0].numpy()
  step = TinyJit(lambda tokens, state: atlas.forward(params, cfg, tokens, state))
  _, state = atlas.forward(params, cfg, Tensor(tokens[:, :8].copy()))
  for i in range(8, 48, 8):
    logits, state = step(Tensor(tokens[:, i:i + 8].copy()), state)
    assert relative(logits.numpy(), whole[:, i:i + 8]) < 1e-5
  if cfg.mixer == "memory":
    state["position"] = Tensor(51).clone()
    assert np.isnan(step(Tensor(tokens[:, :8].copy()), state)[0].numpy()).all()

@pytest.mark.parametrize("name", ["transformer++", "swdt"])
def test_a_full_cache_doubles_and_a_jit_past_its_end_says_so(name):
  cfg = small(name)
  params, tokens = atlas.init(cfg), np.random.default_rng(0).integers(0, 16, (1, 70)).astype(np.int32)
  whole = atlas.forward(params, cfg, Tensor(tokens))[0].numpy()
  _, state = atlas.forward(params, cfg, Tensor(tokens[:, :30].copy()))
  assert atlas.room(cfg, state) == 64
  logits, longer = atlas.forward(params, cfg, Tensor(tokens[:, 30:].copy()), state)
  assert relative(logits.numpy(), whole[:, 30:]) < 1e-5 and atlas.room(cfg, longer) == 256
  step = TinyJit(lambda token, state: atlas.forward(params, cfg, token, state))
  for t in range(30, 66): logits, state = step(Tensor(tokens[:, t:t + 1].copy()), state)
  assert np.isnan(logits.numpy()).all()
  several = TinyJit(lambda tokens, state: atlas.forward(params, cfg, tokens, state)[0])
  several(Tensor(tokens[:, :8].copy()), state)
  with pytest.raises(ValueError, match="cannot jit a call of several tokens"): several(Tensor(tokens[:, :8].copy()), state)

def test_an_expansion_needs_no_anchors_where_the_memory_is_linear():
  cfg = small("dot", memory="linear", anchors=0)
  params, tokens = atlas.init(cfg), Tensor(np.arange(12, dtype=np.int32).reshape(1, 12))
  assert "anchor_u" not in params["layers"]["0"]["memory"] and atlas.parts(cfg)["total"] == sum(p.numel() for p in get_state_dict(params).values())
  assert np.isfinite(atlas.forward(params, cfg, tokens)[0].numpy()).all()

def test_rotary_scores_depend_on_distance_only():
  cos, sin = atlas._rope_table(12, 6, Device.DEFAULT)
  q, k = (Tensor(np.random.default_rng(s).normal(size=(1, 1, 1, 6)).astype(np.float32)) for s in (0, 1))
  def score(i, j): return (atlas.rotate(q, cos[i:i + 1], sin[i:i + 1]) * atlas.rotate(k, cos[j:j + 1], sin[j:j + 1])).sum().item()
  assert score(5, 2) == pytest.approx(score(11, 8), abs=1e-5) != pytest.approx(score(5, 4), abs=1e-2)

def turned(x, position):
  """Rotary positions, one vector."""
  a, b = np.split(x, 2)
  angle = position * 10_000.0 ** (-np.arange(0, len(x), 2) / len(x))
  return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)])

def attended(q, k, v):
  """One query over keys and values (L,.)."""
  weights = np.exp(k @ q * len(q) ** -0.5)
  return weights @ v / weights.sum()

def test_windowed_attention_is_masked_attention_and_no_tensor_is_tokens_by_tokens():
  T, w, d = 100, 5, 4
  cfg = atlas.preset("swa", attn_window=w)
  q, k, v = np.random.default_rng(0).normal(size=(3, 1, 1, T, d))
  y, state = atlas.windowed(cfg, [Tensor(z.astype(np.float32)) for z in (q, k, v)], None, None)
  assert max(u.max_numel() for u in y.uop.toposort() if u._shape is not None) < T * T
  q, k, v = q[0, 0], k[0, 0], v[0, 0]
  seen = [slice(max(0, t - w + 1), t + 1) for t in range(T)]
  right = [attended(turned(q[t], t), np.stack([turned(k[s], s) for s in range(*s.indices(T))]), v[s]) for t, s in enumerate(seen)]
  assert relative(y.numpy()[0], np.stack(right)) < 1e-5
  one = [Tensor(z[None, None, :1].astype(np.float32)) for z in (q, k, v)]      # the same far into the stream as behind its first tokens
  near, far = (atlas.windowed(cfg, one, None, state | {"position": Tensor(n, dtype=dtypes.int32)})[0].numpy() for n in (T, 10_000_000))
  assert np.array_equal(near, far)

def mac_by_definition(p, cfg, x):
  """Memory as context for one row x (T,dim), token by token in float64, without convolution: method as in atlas.mac_mixer's docstring."""
  H, d, w, ys = cfg.heads, cfg.key_dim, cfg.attn_window, list[np.ndarray]()
  p = {n: z.numpy().astype(np.float64) for n, z in get_state_dict(p).items()}
  def sigmoid(z): return 1 / (1 + np.exp(-z))
  def silu(z): return z * sigmoid(z)
  def unit(z): return z / np.sqrt((z * z).sum(-1, keepdims=True) + 1e-6)
  def norm(z): return z / np.sqrt((z * z).mean(-1, keepdims=True) + 1e-6)
  def heads(z): return z.reshape(len(z), H, z.shape[-1] // H)
  def split(z): return [heads(part) for part in np.split(z, [H * d, 2 * H * d], axis=-1)]
  weights = [{"W1": p["memory.W1"][h], "W2": p["memory.W2"][h] * atlas.INIT.first} for h in range(H)]
  def inputs(y, h):
    """What the memory of head h takes, of all tokens y."""
    q, k, v = [z[:, h] for z in split(y @ p["qkv"].T)]
    q, k, v = unit(q), unit(k), silu(v)
    gates = np.split(sigmoid(y @ p["gates"].T + p["gate_bias"]), [H, H + H * cfg.window, 2 * H + H * cfg.window], axis=-1)
    eta, gamma, alpha, theta = gates[0][:, h] * atlas.INIT.eta_l2 / cfg.chunk, heads(gates[1])[:, h] / cfg.window, gates[2][:, h], gates[3][:, h]
    return q, k, k + v / np.sqrt(1 + (v * v).sum(-1, keepdims=True)), alpha, theta, eta, gamma * (1 - theta)[:, None]
  def answer(y, q, name): return norm(y - q) * p[f"{name}_norm"] + d ** 0.5 * q * p[f"{name}_skip"]
  def memory_read(h, query, past):
    """M(query) after the tokens `past`."""
    if not len(past): return recall(cfg, weights[h], query, query)
    q, *rest = inputs(past, h)
    return oracle(cfg, weights[h], np.concatenate([q[:-1], query[None]]), *rest, toward=weights[h])[-1]
  for start in range(0, len(x), w):
    xs, before = x[start:start + w], np.array(ys)
    queries = unit(heads(xs @ p["attention.read_q"].T))
    hs = np.stack([[answer(memory_read(h, query[h], before), query[h], "attention.read") for h in range(H)] for query in queries])
    hs = hs.reshape(len(xs), -1) @ p["attention.read_out"].T
    (_, pk, pv), (_, hk, hv), (q, xk, xv) = [split(z @ p["attention.qkv"].T) for z in (p["attention.persist"], hs, xs)]
    for i in range(len(xs)):
      y = []
      for h in range(H):
        k = np.concatenate([[turned(z[j, h], j) for j in range(i + 1)] for z in (hk, xk)])
        scores = np.concatenate([pk[:, h] @ q[i, h], k @ turned(q[i, h], i)]) * d ** -0.5
        y.append(np.exp(scores) @ np.concatenate([pv[:, h], hv[:i + 1, h], xv[:i + 1, h]]) / np.exp(scores).sum())
      ys.append(norm(p["attention.out"] @ np.concatenate(y)) * p["attention.norm"])
  stored = np.array(ys)
  m = [answer(oracle(cfg, weights[h], *given, toward=weights[h]), given[0], "out") for h in range(H) for given in [inputs(stored, h)]]
  return stored * ((np.concatenate(m, axis=1) * silu(stored @ p["out_gate"].T + p["out_gate_bias"])) @ p["out"].T)

@pytest.mark.parametrize("persist", [2, 0])
def test_memory_as_context_is_its_definition(persist):
  cfg = small("titans_mac", conv=0, chunk=2, window=2, attn_window=3, persist=persist, backend="ops")
  p, x = atlas.init(cfg, seed=2)["layers"]["0"], np.random.default_rng(0).normal(size=(1, 8, cfg.dim))
  if not persist: p["attention"]["persist"] = Tensor.zeros(0, cfg.dim)
  y = atlas.mac_mixer(p, cfg, Tensor(x.astype(np.float32)), None)[0].numpy()
  assert record("MAC against its definition", relative(y[0], mac_by_definition(p, cfg, x[0]))) < 1e-4

@slow
@pytest.mark.parametrize("mixer", ["mag", "mal", "mac"])
def test_an_expansion_goes_into_a_hybrid(mixer):
  cfg = small("dot", mixer=mixer, attn_window=6, persist=2)
  params, tokens = atlas.init(cfg), np.random.default_rng(0).integers(0, 16, (1, 14)).astype(np.int32)
  whole = atlas.forward(params, cfg, Tensor(tokens))[0].numpy()
  first, state = atlas.forward(params, cfg, Tensor(tokens[:, :9].copy()))
  got = [first.numpy()]
  for t in range(9, 14):
    logits, state = atlas.forward(params, cfg, Tensor(tokens[:, t:t + 1].copy()), state)
    got.append(logits.numpy())
  assert relative(np.concatenate(got, 1), whole) < 1e-5

def read(cfg, W, x, **changed):
  return kernels.memory(cfg, tensors(W), *tensors(x | changed).values())[0].numpy()

@pytest.mark.parametrize("step", ["momentum", "muon"])
def test_without_a_step_only_forgetting_is_left_and_twice_the_step_moves_twice_as_far(step):
  cfg = rule(memory="linear", chunk=4, **STEPS[step])
  W, x = problem(cfg, T=5)
  kept = np.cumprod(x["alpha"], -1)[..., None] * np.einsum("hoi,bhti->bhto", W["W"], x["q"])
  assert relative(read(cfg, W, x, eta=0 * x["eta"]), kept) < 1e-5
  once, twice = (read(cfg, W, x, eta=f * x["eta"]) - kept for f in (1, 2))
  assert relative(twice[:, :, 0], 2 * once[:, :, 0]) < 1e-4 and np.abs(once[:, :, 0]).max() > 1e-3

def test_a_chunk_seen_twice_is_remembered_better_the_second_time():
  cfg = rule(memory="mlp", features="poly", chunk=4, window=2, momentum=False)
  W, x = problem(cfg, T=4, hidden=8)
  x = {n: np.concatenate([z, z], 2) for n, z in (x | {"alpha": np.ones_like(x["alpha"]), "eta": np.full_like(x["eta"], 0.1)}).items()}
  error = ((read(cfg, W, x, q=x["k"]) - x["v"]) ** 2).sum((0, 1, 3))
  assert error[4:].sum() < 0.8 * error[:4].sum()

def test_window_1_chunk_1_linear_is_the_textbook_delta_rule():
  cfg = rule(memory="linear", chunk=1, momentum=False)
  W, x = problem(cfg, H=1)
  M, ys = W["W"][0], []
  for t in range(10):
    q, k, v = (x[n][0, 0, t] for n in "qkv")
    beta = x["eta"][0, 0, t] * x["gamma"][0, 0, t, 0]
    M = x["alpha"][0, 0, t] * M - beta * np.outer(M @ k - v, k)
    ys.append(M @ q)
  assert relative(read(cfg, W, x)[0, 0], np.stack(ys)) < 1e-5

def test_dot_loss_is_linear_attention():
  cfg = rule(memory="linear", loss="dot", chunk=4, momentum=False)
  W, x = problem(cfg)
  ones = np.ones_like(x["alpha"])
  y = read(cfg, {"W": 0 * W["W"]}, x, alpha=ones, eta=ones, gamma=np.ones_like(x["gamma"]))
  assert relative(y, np.einsum("bhts,bhsv->bhtv", np.tril(np.einsum("bhtd,bhsd->bhts", x["q"], x["k"])), x["v"])) < 1e-5

def test_an_expansion_with_dot_loss_is_unnormalised_attention():
  cfg = rule(memory="linear", features="exp", loss="dot", chunk=4, momentum=False)
  W, x = problem(cfg, anchors=0)
  ones = np.ones_like(x["alpha"])
  y = read(cfg, W, x, alpha=ones, eta=ones, gamma=np.ones_like(x["gamma"]))
  assert relative(y, np.einsum("bhts,bhsv->bhtv", np.tril(np.exp(np.einsum("bhtd,bhsd->bhts", x["q"], x["k"]))), x["v"])) < 1e-5

def test_quadratic_features_recall_more_pairs_than_the_key_is_long_and_identity_does_not():
  r = np.random.default_rng(3)
  d, pairs, rounds = 4, 10, 40
  keys, values = r.normal(size=(pairs, d)), r.normal(size=(pairs, d))
  keys /= np.linalg.norm(keys, axis=1, keepdims=True)
  def recalled(features):
    """Pairs whose own value is the nearest to what is read for their key, after all were written `rounds` times."""
    cfg = rule(memory="linear", features=features, chunk=pairs, momentum=False, key_dim=d, value_dim=d)
    W = tensors({"W": np.zeros((1, d, kernels.feature_size(d, features, 2)))} | ({"a": np.array([1, 1, 0.5])} if features == "poly" else {}))
    def call(eta, times, state):
      k, v = (np.tile(z, (times, 1))[None, None] for z in (keys, values))
      gates = [np.full((1, 1, times * pairs), g) for g in (1, 0, eta)]
      inputs = dict(zip(NAMES, (k, k, v, *gates, np.ones((1, 1, times * pairs, 1)))))
      return kernels.memory(cfg, W, **tensors(inputs), state=state)
    answers = call(0.0, 1, call(0.15, rounds, None)[1])[0].numpy()[0, 0]                  # a step of 0 only reads
    return int((((answers[:, None] - values) ** 2).sum(-1).argmin(1) == np.arange(pairs)).sum())
  assert recalled("poly") == pairs > recalled("identity")

# *** 6. Newton-Schulz ***

def flattened(S, steps=5): return kernels.newton_schulz(Tensor(S.astype(np.float32)), steps).numpy()

@pytest.mark.parametrize("shape", [(8, 8), (8, 9), (8, 20), (20, 8)])                     # the plain loop, and the one on the Gram matrix
def test_newton_schulz_flattens_singular_values_and_equals_float64(shape):
  r = np.random.default_rng(0)
  U, _, V = np.linalg.svd(r.normal(size=(3, *shape)), full_matrices=False)
  well = U * np.linspace(0.3, 1, min(shape)) @ V
  poor = (U * (np.arange(min(shape)) < 3)) @ V
  out = flattened(well)
  assert (np.abs(np.linalg.svd(out, compute_uv=False) - 1) < 0.35).all()
  assert record("Newton-Schulz, well-conditioned", relative(out, np.stack([muon(s, 5) for s in well]))) < 1e-5
  assert record("Newton-Schulz, rank-deficient", relative(flattened(poor), np.stack([muon(s, 5) for s in poor]))) < 1e-3

@pytest.mark.parametrize("shape", [(4, 5), (4, 12)])
def test_newton_schulz_and_its_gradient_are_finite_at_zero_tiny_and_rank_one(shape):
  r = np.random.default_rng(0)
  S = np.stack([np.zeros(shape), 1e-12 * r.normal(size=shape), np.outer(r.normal(size=shape[0]), r.normal(size=shape[1]))])
  x = Tensor(S.astype(np.float32))
  y = kernels.newton_schulz(x, 5)
  g, = (y * Tensor(r.normal(size=S.shape).astype(np.float32))).sum().gradient(x)
  assert np.isfinite(y.numpy()).all() and np.isfinite(g.numpy()).all() and (y.numpy()[0] == 0).all()

# *** products ***

@pytest.mark.parametrize("G,R,K,C", [(1, 5, 7, 3), (2, 8, 12, 16), (3, 1, 16, 20), (1, 6, 33, 29), (1, 24, 520, 48)])
def test_matmul_is_the_product_and_so_are_its_gradients(G, R, K, C):
  rng = np.random.default_rng(0)
  for xt, yt in itertools.product((False, True), repeat=2):
    x, y = [Tensor(rng.normal(size=(G, *(s[::-1] if t else s))).astype(np.float32)).realize() for s, t in (((R, K), xt), ((K, C), yt))]
    def all_of(z): return [t.numpy() for t in (z.contiguous(), *z.sin().sum().gradient(x, y))]
    theirs = (x.transpose(-1, -2) if xt else x) @ (y.transpose(-1, -2) if yt else y)
    for a, b in zip(all_of(kernels.matmul(x, y, xt, yt)), all_of(theirs)): assert relative(a, b) < 1e-5

# *** 7. stress ***

def check_stress(name, tokens):
  cfg, resident = small(name, chunk=32, muon_every=4, horizon=128, **windows(name, 64)), math.inf
  for at, logits, state in experiments.in_pieces(atlas.init(cfg), cfg, experiments.hostile(tokens, cfg.vocab)):
    if at == 4096: resident = resident_mb()
    assert np.isfinite(logits).all(), f"not finite within {at + logits.shape[1]} tokens"
  largest = max([float(np.abs(z.numpy()).max()) for n, z in state.items() if "M." in n], default=0.0)
  assert largest < 10                                    # a sum of v k^T over the horizon: 128 times eta's bound, 0.5 / chunk, at most
  assert resident_mb() < resident + 20, "memory grows with the stream"

def resident_mb(): return int(Path("/proc/self/statm").read_text().split()[1]) // 256 if Path("/proc").exists() else 0

@pytest.mark.parametrize("name", FEWER)
def test_long_hostile_streams_stay_finite(name): check_stress(name, 8192)

@pytest.mark.parametrize("name", ["linear_attention", "deltanet", "ttt", "dot"])
def test_without_a_forget_gate_nothing_fades_up_to_the_horizon_and_what_is_far_beyond_is_gone(name):
  tokens = np.random.default_rng(0).integers(0, 16, (2, 168)).astype(np.int32)
  tokens[1, 8:] = tokens[0, 8:]                          # two beginnings, then 20 horizons of the same
  def logits(horizon):
    cfg = small(name, horizon=horizon)
    return atlas.forward(atlas.init(cfg, seed=1), cfg, Tensor(tokens))[0].numpy()
  fading, keeping = logits(8), logits(1 << 20)
  assert relative(fading[:, :8], keeping[:, :8]) < 1e-6 and relative(fading[:, 8:], keeping[:, 8:]) > 1e-4
  assert relative(fading[1, -8:], fading[0, -8:]) < 1e-6 and relative(keeping[1, -8:], keeping[0, -8:]) > 1e-4

@slow
@pytest.mark.parametrize("name", [name for name in PRESETS if not atlas.growing(small(name))])             # others cost the square of the stream
def test_very_long_hostile_streams_stay_finite(name): check_stress(name, 65536)

@slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_trained_model_stays_finite_and_recovers_from_a_hostile_stream(name):
  """64K tokens (8K where they cost their square) of each hostile kind, and of text; then another text: from its 1,024th token on, the loss is that
  with nothing before it, to 5%.  Attention to everything has no memory that could recover: it stays finite."""
  wanted = experiments.Trial(name, dict(dim=32, layers=1, heads=2) | windows(name, 64), seeds=(0,))
  normal, *ours = experiments.trained(wanted, measure=functools.partial(experiments.recovery, tokens=65_536)).scores[0]
  print(f"{name}: {max(ours) / normal - 1:+.1%} of {normal:.2f} bits", file=sys.stderr)
  assert np.isfinite(ours).all()
  if name != "transformer++": assert max(ours) < 1.05 * normal, (ours, normal)

# *** 8. other devices: pytest -m devices ***

devices = pytest.mark.devices

def one_step(backend):
  """Loss and gradients, not yet computed, of a small titans and a small atlas."""
  out = []
  for name in ("titans", "atlas"):
    cfg = small(name, backend=backend)
    params = atlas.init(cfg, seed=1)
    # an M_0 that is not small: from a fresh one, Newton-Schulz amplifies rounding until two forms on one CPU differ by 2.7e-4
    for block in params["layers"].values(): block["memory"]["W2"] = (block["memory"]["W2"] / atlas.INIT.first).realize()
    tokens = np.random.default_rng(0).integers(0, cfg.vocab, (2, 17)).astype(np.int32)
    loss = atlas.loss(params, cfg, Tensor(tokens[:, :-1].copy()), Tensor(tokens[:, 1:].copy()))
    out.append([loss, *loss.gradient(*get_state_dict(params).values())])
  return out

@devices
def test_a_training_step_on_opencl_is_that_on_the_cpu(tmp_path):
  script = "import sys; sys.path.insert(0, sys.argv[1]); import numpy as np, test_atlas as t; Tensor = t.Tensor; steps = t.one_step('auto')\n"
  script += "np.savez(sys.argv[2], *[x.contiguous().numpy().ravel() for step in steps for x in step])"
  env = {**os.environ, "DEV": "CL", "NOOPT": "1"}
  done = subprocess.run([sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path / "cl.npz")], env=env, capture_output=True, text=True)
  if "no usable devices" in done.stderr or "OpenCL" in done.stderr: pytest.skip("no OpenCL here")
  assert done.returncode == 0, done.stderr[-2000:]
  theirs = np.load(tmp_path / "cl.npz")
  ours = [x.contiguous().numpy().ravel() for step in one_step("ops") for x in step]
  assert len(theirs.files) == len(ours)
  for n, x in zip(theirs.files, ours): assert record("OpenCL against CPU", relative(theirs[n], x)) < 1e-4

@devices
def test_every_kernel_of_a_training_step_renders_for_gpus(tmp_path, monkeypatch):
  from tinygrad.codegen import do_to_program
  from tinygrad.device import Compiler
  from tinygrad.helpers import Target
  from tinygrad.renderer.cstyle import CUDARenderer, MetalRenderer
  from tinygrad.renderer.wgsl import WGSLRenderer
  from tinygrad.uop.ops import Ops
  class Metal(MetalRenderer):
    def __init__(self): self.target, self.compiler = Target("METAL"), Compiler()       # without Apple's compiler
  graphs: dict[bytes, Any] = {}
  program = kernels._program
  monkeypatch.setattr(kernels, "_program", lambda sink, args, device: (graphs.setdefault(sink.key, sink), program(sink, args, device))[1])
  for cached in (kernels._compiled_kernel, kernels._matmul_kernel): cached.cache_clear()
  for backend in ("ops", "fused"):
    for step in one_step(backend):
      linear = step[0].schedule_linear(*step[1:])
      graphs |= {u.src[0].key: u.src[0] for u in linear.toposort() if u.op is Ops.CALL and u.src[0].op is Ops.SINK}
  assert len(graphs) > 60 and {"memory", "memory_backward"} <= {g.arg.name for g in graphs.values()}
  code = []
  for renderer in (CUDARenderer(Target("CUDA", arch="sm_80"), use_nvcc=True), Metal(), WGSLRenderer(Target("WEBGPU"))):
    renderer.compiler = Compiler()
    sources = [next(u.arg for u in do_to_program(g, renderer).src if u.op is Ops.SOURCE) for g in graphs.values()]
    assert all(len(source) > 50 for source in sources)
    if isinstance(renderer, CUDARenderer): code = sources
  if not (nvcc := shutil.which("nvcc")): pytest.skip("rendered; no nvcc here to compile the CUDA sources")
  heads, bodies = zip(*[source.split('extern "C"', 1) for source in code])
  renamed = [re.sub(r"(__launch_bounds__\(\d+\)\s+)\w+\(", rf"\1kernel_{n}(", 'extern "C"' + body, count=1) for n, body in enumerate(bodies)]
  helpers = dict.fromkeys(line for head in heads for line in head.splitlines())
  (tmp_path / "all.cu").write_text("\n".join([*helpers, *renamed]))
  done = subprocess.run([nvcc, "-arch=sm_80", "-cubin", "-o", str(tmp_path / "all.cubin"), str(tmp_path / "all.cu")], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr[-2000:]

# *** 9. training ***

def trained(name, batches, lr=0.02, accum=1, devices=1, **fields):
  """Losses of steps on batches (tokens and targets), the optimizer's first moments by parameter after the first, and the weights after the last."""
  cfg, run = small(name, vocab=8, **fields), train.Run(devices=devices)
  params = atlas.init(cfg)
  flat = get_state_dict(params)
  for p in flat.values(): p.replace(train.shared(run, p))
  optimizer = train.optimizer_for(flat, 0.0)
  train.set_rate(optimizer, lr)
  step, losses = train.training_step(params, cfg, optimizer, 1.0, accum), []
  moments: dict[str, np.ndarray] = {}
  with Context(TRAINING=1):
    for x, y in batches:
      losses.append(step(*[train.shared(run, Tensor(z), 0) for z in (x, y)])[0].item())
      if not moments:
        for g, o in enumerate(optimizer.optimizers):
          m = train.optimizer_state(optimizer)[f"adam.{g}.m"].numpy()
          moments |= {next(n for n, q in flat.items() if q is p): m[a:a + p.numel()] for p, a in zip(o.params, o.pos_params)}
  return np.array(losses), moments, {n: p.numpy() for n, p in flat.items()}

def noise(steps):
  tokens = np.random.default_rng(5).integers(0, 8, (steps, 8, 17)).astype(np.int32)
  return [(np.ascontiguousarray(t[:, :-1]), np.ascontiguousarray(t[:, 1:])) for t in tokens]

@pytest.mark.parametrize("name", FEWER)
def test_noise_is_not_predicted_and_every_parameter_learns(name):
  """On fresh uniform tokens no model gets below ln(V): where one does, it sees its targets."""
  losses, moments, _ = trained(name, noise(120), **windows(name, 8))
  assert losses[-50:].mean() > math.log(8) - 4 * losses[-50:].std() / 50 ** 0.5
  assert losses[-50:].mean() < math.log(8) + 0.2         # and it has learned that there is nothing to predict
  assert all(np.abs(m).max() > 0 for m in moments.values()), [n for n, m in moments.items() if np.abs(m).max() == 0]

def test_one_batch_is_learned_by_heart():
  losses, *_ = trained("atlas", noise(1) * 150)
  assert losses[-1] < 0.5 < losses[0]

def agree(what, one, other, bound=1e-5):
  """Two results of `trained`: losses, first moments by parameter, and all weights."""
  def parts(result): return [result[0], *result[1].values(), np.concatenate([w.ravel() for w in result[2].values()])]
  for a, b in zip(parts(one), parts(other), strict=True): assert record(what, relative(a, b)) < bound

def test_a_batch_taken_in_parts_gives_the_same_steps_however_many_targets_each_has():
  asked = np.random.default_rng(1).random((5, 8, 16)) < np.linspace(0, 0.7, 8)[:, None]                  # of the first sequence none
  batches = [(x, y if i < 2 else np.where(asked[i], y, -100)) for i, (x, y) in enumerate(noise(5))]      # text, then a task
  whole = trained("deltanet", batches)
  agree("in parts against whole", trained("deltanet", batches, accum=4), whole)

@slow
@pytest.mark.parametrize("name", PRESETS)
def test_several_devices_take_the_same_steps_as_one(name):
  one, two = [trained(name, noise(2), devices=n, accum=n, backend="ops", **windows(name, 8)) for n in (1, 2)]
  agree("two devices against one", two, one, 1e-3 if small(name).optimizer == "muon" else 1e-4)         # Newton-Schulz amplifies rounding: 5e-4

def test_dense_products_in_bfloat16_train_like_float32_and_every_parameter_learns():
  full, half = [trained("titans", noise(12), dtype=dtype) for dtype in ("float32", "bfloat16")]
  assert 0 < np.abs(half[0] / full[0] - 1).max() < 0.02
  assert all(np.abs(m).max() > 0 for m in half[1].values()) and all(w.dtype == np.float32 for w in half[2].values())
  cfg = small("titans", vocab=8, dtype="bfloat16")
  logits, state = atlas.forward(atlas.init(cfg), cfg, Tensor(noise(1)[0][0]))
  assert logits.dtype == dtypes.float and all(z.dtype == dtypes.float for n, z in state.items() if n != "position")
