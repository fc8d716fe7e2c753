"""Claims about the rule, its kernels, the model and its training, in the paper's order.

The oracle is the definition: one head, one token after the other, in float64. All else is compared with it.

python -m pytest -q test_atlas.py     the suite
  -m runs                             the presets that the suite leaves out, and README's changes of the rule
  -m slow                             every combination of choices, and longer streams
  -m devices                          OpenCL, and the code for GPUs"""
import os
os.environ.setdefault("NOOPT", "1")      # Kernels compile in half the time. Values matter here, not speed.
os.environ.setdefault("PARALLEL", "0")   # A process that compiles for tinygrad first compiles tinygrad's own patterns.
import functools, gc, inspect, itertools, json, math, re, shutil, subprocess, sys, threading, time
from pathlib import Path
from typing import Any, NamedTuple
import numpy as np
import pytest
import atlas, evaluate, experiments, kernels, train
from rule import FEATURES, LOSSES
from rule import STEPS as DIRECTIONS
from tinygrad import Context, Device, Tensor, TinyJit, UOp, codegen, dtypes
from tinygrad.codegen.late.linearizer import CFGContext
from tinygrad.helpers import NUM_CPU_THREADS
from tinygrad.nn.state import get_state_dict
from tinygrad.uop.ops import Ops

gc.set_threshold(100_000, 20, 100)       # Graphs are many objects that live long: searching them often costs time.
slow, runs, devices = pytest.mark.slow, pytest.mark.runs, pytest.mark.devices
cases, rng = pytest.mark.parametrize, np.random.default_rng
def marked(mark, *values): return [pytest.param(value, marks=mark) for value in values]
worst: dict[str, float] = {}

def output(command, **fields):
  """What a program prints."""
  done = subprocess.run(command, text=True, capture_output=True, **fields)
  assert done.returncode == 0, done.stderr[-2000:]
  return done.stdout

def array(x): return (x.float().numpy() if isinstance(x, Tensor) else np.asarray(x)).astype(np.float64)
def relative(x, y): return float(np.linalg.norm(array(x) - array(y)) / np.linalg.norm(array(y)))
def finite(*results): return all(np.isfinite(array(x)).all() for x in results)

def record(claim:str, error:float) -> float:
  worst[claim] = max(worst.get(claim, 0.0), error)
  return error

@pytest.fixture(scope="session", autouse=True)
def report(request):
  """Prints the worst error of each claim. Each of pytest-xdist's processes has its own: stderr is what they share."""
  yield
  with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
    if worst:
      errors = ", ".join(f"{claim} {error:.1e}" for claim, error in worst.items())
      print(f"\nworst relative errors: {errors}", file=sys.stderr, flush=True)

# *** the oracle: one head, one token after the other, every weight of every token written out ***
def gelu(z):
  """gelu in its tanh form, and its derivative."""
  slope = 2 * math.sqrt(2 / math.pi)
  s = 1 / (1 + np.exp(-slope * (z + 0.044715 * z ** 3)))
  return z * s, s + z * s * (1 - s) * slope * (1 + 3 * 0.044715 * z * z)

@functools.cache
def monomials(d, degree):
  """Places of the factors of every monomial, and in how many orders they can be multiplied."""
  def orders(f): return math.factorial(len(f)) / math.prod(math.factorial(f.count(i)) for i in set(f))
  places = [f for p in range(degree + 1) for f in itertools.combinations_with_replacement(range(d), p)]
  return [(f, orders(f)) for f in places]

def lift(cfg, x, a):
  """phi(x): phi(x).phi(y) = sum_p a[p] (x.y)^p."""
  if cfg.features != "poly": return x
  features = []
  for places, orders in monomials(len(x), cfg.degree):
    features.append(np.sqrt(a[len(places)] * orders) * math.prod(x[i] for i in places))
  return np.array(features)

def recall(cfg, M, x, raw):
  """M(x). raw: the key or query before the features, which a deep memory adds where the sizes agree."""
  if cfg.memory == "linear": return M["W"] @ x
  gate = M["W3"] @ x if cfg.memory == "gated" else 1
  y = M["W1"] @ (gelu(M["W2"] @ x)[0] * gate)
  return y + raw if len(raw) == len(y) else y

def error(cfg, y, v):
  """The derivative of the loss with respect to the memory's output y."""
  return y - v if cfg.loss == "l2" else -v

def gradient(cfg, M, k, v, a):
  """The gradient of the loss of one pair with respect to every matrix of M."""
  x = lift(cfg, k, a)
  e = error(cfg, recall(cfg, M, x, k), v)
  def outer(u): return Expansion(x[None], u[None]) if cfg.features == "exp" else np.outer(u, x)
  if cfg.memory == "linear": return {"W": outer(e)}
  act, slope = gelu(M["W2"] @ x)
  gate = M["W3"] @ x if cfg.memory == "gated" else np.ones_like(act)
  dh = M["W1"].T @ e
  g = {"W1": np.outer(e, act * gate), "W2": outer(dh * gate * slope)}
  if cfg.memory == "gated": g["W3"] = outer(dh * act)
  return g

def muon(S, steps):
  if S.shape[0] > S.shape[1]: return muon(S.T, steps).T
  X = S / np.sqrt((S * S).sum() + 1e-14)
  for _ in range(steps):
    A = X @ X.T
    X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
  return X

def direction(cfg, S): return S if cfg.optimizer == "gd" else muon(S, cfg.ns_steps)

def oracle(cfg, weights, q, k, v, alpha, theta, eta, gamma, *, toward=None):
  """Section 2 of the method, literally.
  weights (out,in), q, k (T,key_dim), v (T,value_dim), alpha, theta, eta (T,), gamma (T,window) -> y (T,value_dim).
  toward: the weights that forgetting leads to; None: zeros."""
  a, ys = weights.get("a"), []
  M = {n: w for n, w in weights.items() if n != "a"}
  S = {n: w * 0.0 for n, w in M.items()}
  for t in range(len(q)):
    if t % cfg.chunk == 0: base = M      # M': every gradient of the chunk is taken here, those of the halo too
    lags = range(min(cfg.window, t + 1))
    gradients = [gradient(cfg, base, k[t - j], v[t - j], a) for j in lags]
    G = {n: sum(gamma[t, j] * gradients[j][n] for j in lags) for n in M}
    S = {n: theta[t] * S[n] + G[n] if cfg.momentum else G[n] for n in M}
    M = {n: alpha[t] * M[n] for n in M}
    if toward: M = {n: M[n] + (1 - alpha[t]) * toward[n] for n in M}
    if cfg.optimizer == "gd" or (t + 1) % cfg.muon_every == 0:
      M = {n: M[n] - eta[t] * direction(cfg, S[n]) for n in M}
    ys.append(recall(cfg, M, lift(cfg, q[t], a), q[t]))
  return np.stack(ys)

# *** problems for it ***
class Expansion:
  """The first layer of features=exp, W phi*(x) = sum_i coef_i exp(key_i . x), with the operators of a matrix."""
  __array_ufunc__ = None                 # numpy leaves products with its numbers to this class
  def __init__(self, keys, coefs): self.keys, self.coefs = keys, coefs       # (n,d), (n,out); a key may come twice
  def __add__(self, term):
    if not isinstance(term, Expansion): return self               # sum() starts with 0
    return Expansion(np.concatenate([self.keys, term.keys]), np.concatenate([self.coefs, term.coefs]))
  def __mul__(self, weight): return Expansion(self.keys, weight * self.coefs)
  def __sub__(self, term): return self + term * -1.0
  def __matmul__(self, x): return np.exp(self.keys @ x) @ self.coefs
  __radd__, __rmul__ = __add__, __mul__

INPUTS = ("q", "k", "v", "alpha", "theta", "eta", "gamma")
def rule(**fields): return atlas.Config(**{"key_dim": 3, "value_dim": 3, "heads": 2, "momentum": True, **fields})

def problem(cfg, B=1, H=2, T=10, d=3, dv=3, hidden=4, seed=0, anchors=3):
  """Random weights (H,out,in) and inputs (B,H,T,.) in float64; two gates are exactly 0."""
  r = rng(seed)
  def normal(*shape): return r.normal(size=shape) * 0.6
  D = kernels.feature_size(d, cfg.features, cfg.degree)
  if cfg.memory == "linear": W = {"W": normal(H, dv, D)}
  else: W = {"W1": normal(H, dv, hidden), "W2": normal(H, hidden, D)}
  if cfg.memory == "gated": W["W3"] = normal(H, hidden, D)
  if cfg.features == "exp":
    out = W.pop("W" if cfg.memory == "linear" else "W2").shape[1]
    W |= {"anchor_k": normal(H, anchors, d), "anchor_u": normal(H, anchors, out)}
  if cfg.features == "poly": W["a"] = r.uniform(0.2, 1, size=cfg.degree + 1)
  alpha, theta, eta = [r.uniform(low, high, size=(B, H, T)) for low, high in ((0.7, 1.0), (0.0, 1.0), (0.0, 0.2))]
  if T > 4: alpha[:, :, 3] = theta[:, :, 2] = 0
  q, k, v = [normal(B, H, T, size) for size in (d, d, dv)]
  gamma = r.uniform(size=(B, H, T, cfg.window))
  return W, dict(zip(INPUTS, (q, k, v, alpha, theta, eta, gamma)))

def by_oracle(cfg, W, x, toward=None):
  """The oracle for every head and row: y (B,H,T,value_dim)."""
  def of_head(W, h):
    weights = {n: w if n == "a" else w[h] for n, w in W.items()}
    if cfg.features == "exp":
      first = "W" if cfg.memory == "linear" else "W2"
      weights[first] = Expansion(weights.pop("anchor_k"), weights.pop("anchor_u"))
    return weights
  def head(b, h):
    target = of_head(toward, h) if toward else None
    return oracle(cfg, of_head(W, h), *[x[n][b, h] for n in INPUTS], toward=target)
  B, H = x["q"].shape[:2]
  return np.stack([np.stack([head(b, h) for h in range(H)]) for b in range(B)])

def destination(cfg, W, **sizes):
  """An initial memory of the same sizes for forgetting to lead to; the features are those of W."""
  R, _ = problem(cfg, seed=1, **sizes)
  return R | {n: W[n] for n in ("a", "anchor_k") if n in W}

def tensor(x): return Tensor(np.ascontiguousarray(x, dtype=np.float32)).realize()
def tensors(arrays): return {n: tensor(x) for n, x in arrays.items()}
def part_of(x, start, stop): return {n: z[:, :, start:stop] for n, z in x.items()}

def read(cfg, W, x, **changed):
  """y of kernels.memory, for inputs of which some may be changed."""
  return kernels.memory(cfg, tensors(W), **tensors(x | changed))[0].numpy()

# *** the rule: the chunked form is the definition ***
STEPS: dict[str, dict] = {"gd": dict(momentum=False), "momentum": {}, "muon": dict(optimizer="muon"),
                          "muon_every": dict(optimizer="muon", muon_every=2)}
AXES = ("linear", "mlp", "gated"), ("identity", "poly"), ("l2", "dot"), STEPS, ("1", "3", "5"), ("1", "4", "16")
CASES = ["-".join(choices) for choices in itertools.product(*AXES)]
CASES = [case for case in CASES if not ("muon_every" in case and case.endswith("-1"))]       # which does not divide 1
def from_case(case, **fields):
  """The rule of "memory-features-loss-step-window-chunk"."""
  memory, features, loss, step, window, chunk = case.split("-")
  fields |= dict(memory=memory, features=features, loss=loss, window=int(window), chunk=int(chunk))
  return rule(**fields | STEPS[step])

def forms(case):
  """The rule in each form that has it."""
  return [from_case(case, backend=backend) for backend in (["ops"] if "-exp-" in case else ["ops", "fused"])]

def covering():
  """A small set of cases in which every pair of choices occurs, picked greedily."""
  pairs = {case: set(itertools.combinations(enumerate(case.split("-")), 2)) for case in CASES}
  missing = set().union(*pairs.values())
  while missing:
    best = max(pairs, key=lambda case: len(pairs[case] & missing))
    missing -= pairs[best]
    yield best
PAIRWISE = list(covering())
def check_case(case, bound=1e-4, **sizes):
  """In every form, with the weights in another order than theirs.
  Newton-Schulz amplifies the rounding of small singular values, up to 3.4445^5 = 480 times."""
  cfg = from_case(case)
  W, x = problem(cfg, **sizes)
  kind, expected = "Muon" if cfg.window > 1 else "Muon of low rank", by_oracle(cfg, W, x)
  if cfg.optimizer == "gd": kind, bound = "gradient steps", 1e-5
  for form in forms(case):
    y = read(form, dict(reversed(W.items())), x)
    assert record(f"memory against the oracle, {kind}", relative(y, expected)) < bound, form.backend

EXPANSIONS = {"linear-exp-l2-gd-1-4": {}, "mlp-exp-dot-momentum-3-1": dict(anchors=1, T=5, dv=2),
              "linear-exp-l2-momentum-3-16": dict(anchors=0, dv=2), "mlp-exp-dot-gd-1-16": dict(T=18)}

def test_covering_set_is_small(): assert len(PAIRWISE) <= 24

@cases("case", PAIRWISE + [*EXPANSIONS])
def test_memory_is_the_definition(case): check_case(case, **EXPANSIONS.get(case, {}))

@cases("case", ["mlp-poly-l2-momentum-3-4", "mlp-exp-l2-momentum-3-4"])
@cases("T,dv", [(1, 3), (4, 4), (9, 2)])
def test_memory_takes_any_length_and_value_size(case, T, dv): check_case(case, B=2, T=T, dv=dv)

@slow
@cases("case", CASES)
def test_memory_is_the_definition_in_every_combination(case):
  """With a window of 1 the momentum has a low rank: there the bound is that of Newton-Schulz on such matrices."""
  cfg = from_case(case)
  check_case(case, 1e-4 if cfg.window > 1 else 1e-3, B=2, T=11, dv=4 if cfg.loss == "l2" else 3)

@cases("size", [1, 3])
def test_jitted_calls_of_the_memory_stream_and_one_that_starts_elsewhere_gives_nan_in_its_state_too(size):
  cfg = rule(memory="linear", window=2, chunk=3)
  W, x = problem(cfg, T=12)
  pieces = [tensors(part_of(x, t, t + size)) for t in range(0, 12, size)]
  memory: Any = functools.partial(kernels.memory, cfg, tensors(W))
  (y, state), step, ys = memory(**pieces[0]), TinyJit(memory), []
  for piece in pieces[1:]:
    ys.append(y.numpy())
    y, state = step(**piece, state=state)
  assert relative(np.concatenate([*ys, y.numpy()], 2), by_oracle(cfg, W, x)) < 1e-5
  y, after = step(**piece, state=state | {"position": Tensor(13).clone()})
  assert all(np.isnan(z.numpy()).all() == (size > 1) for z in (y, *after.values()) if z.ndim)

def test_slow_forgetting_is_not_rounded_away_token_by_token():
  """M = R + a small difference: 2,000 tokens of alpha = 1 - 2^-20 without a write, each of which float32 rounds."""
  cfg = rule(memory="linear", chunk=1, momentum=False)
  W, x = problem(cfg, H=1, T=1)
  R, alpha = np.ones_like(W["W"]), np.full_like(x["alpha"], 1 - 2.0 ** -20)
  inputs = tensors(x | {"alpha": alpha, "eta": 0 * alpha})
  memory: Any = functools.partial(kernels.memory, cfg, {"W": tensor(1.01 * R)}, **inputs, toward={"W": tensor(R)})
  (_, state), step = memory(), TinyJit(memory)
  for _ in range(1999): _, state = step(state=state)
  difference = array(state["M.W"]) - 1 + array(state["low.W"])
  assert relative(difference, 0.01 * alpha ** 2000 * R) < 1e-4 < relative(difference, 0.01 * R)

def in_pieces(cfg, W, x, sizes, toward=None):
  """Calls of so many tokens each: y of all, and the weights and inputs that were given."""
  weights, state, start = tensors(W), None, 0
  memory: Any = functools.partial(kernels.memory, cfg, weights, toward=toward and tensors(toward))
  variables, ys = list(weights.values()), []
  for size in sizes:
    inputs = tensors(part_of(x, start, start + size)).values()
    y, state = memory(*inputs, state=state)
    variables += inputs
    ys.append(y)
    start += size
  return Tensor.cat(*ys, dim=2), variables

@cases("case", ["mlp-poly-l2-muon_every-3-4", "linear-identity-dot-gd-1-4", "mlp-exp-l2-momentum-3-4",
                *marked(runs, "gated-poly-l2-momentum-3-4")])
def test_forgetting_leads_to_where_it_is_told_also_in_pieces(case):
  """The second call starts inside a chunk. The test of gradients has the same in one call."""
  W, x = problem(from_case(case), T=11)
  R = destination(from_case(case), W)
  expected = by_oracle(from_case(case), W, x, R)
  assert relative(expected, by_oracle(from_case(case), W, x)) > 0.01
  for cfg in forms(case):
    y, _ = in_pieces(cfg, W, x, (6, 5), R)
    error = record("memory against the oracle, forgetting towards M_0", relative(y, expected))
    assert error < (1e-5 if cfg.optimizer == "gd" else 1e-4)

def test_features_come_by_degree_then_combination():
  x = rng(0).normal(size=(2, 4))
  cfg, a = rule(features="poly", degree=3, key_dim=4), np.array([1, 0.5, 0.3, 0.1])
  result = kernels.phi(cfg, tensor(x), tensor(a)).numpy()
  assert relative(result, np.stack([lift(cfg, row, a) for row in x])) < 1e-6
  series = np.polynomial.Polynomial(a)   # sum_p a[p] z^p
  assert np.allclose(result[0] @ result[1], series(x[0] @ x[1]), rtol=1e-5)

# *** its gradients ***
def slopes(loss, x):
  """The derivative of loss() with respect to each element of a complex array.
  Im loss(x + ih) / h is a finite difference without cancellation, since nothing is subtracted."""
  result = np.zeros(x.shape)
  for i in np.ndindex(x.shape):
    x[i] += 1e-30j
    result[i] = loss().imag / 1e-30
    x[i] -= 1e-30j
  return result

GRADIENT_CASES = ["mlp-poly-l2-muon-3-4", "gated-poly-l2-momentum-2-3", "mlp-identity-dot-gd-5-2",
                  "linear-poly-l2-muon_every-1-4", "mlp-exp-l2-momentum-3-4", "linear-exp-dot-gd-2-3"]
@cases("case", GRADIENT_CASES + marked(slow, *PAIRWISE))
def test_gradients_are_the_finite_differences_of_the_oracle(case):
  """Forgetting leads to a second memory, whose gradients are checked as well."""
  cfg, sizes = from_case(case), dict(H=1, T=7, d=2, dv=2, hidden=3)
  W, x = problem(cfg, **sizes)
  R = destination(cfg, W, **sizes)
  cotangent = rng(1).normal(size=x["v"].shape)
  low_rank = case.split("-")[3] == "muon" and cfg.window == 1    # where rounding is amplified most
  kind, bound = ("Muon of low rank", 1e-2) if low_rank else ("all others", 1e-3)

  W64, x64, R64 = [{n: z.astype(complex) for n, z in arrays.items()} for arrays in (W, x, R)]
  R64 |= {n: W64[n] for n in ("a", "anchor_k") if n in W64}
  def loss(): return (by_oracle(cfg, W64, x64, R64) * cotangent).sum()
  inputs = W64 | x64 | {f"toward {n}": z for n, z in R64.items() if n not in ("a", "anchor_k")}
  if not cfg.momentum: del inputs["theta"]
  expected = {n: slopes(loss, z) for n, z in inputs.items()}

  for form in forms(case):
    weights, toward, variables = tensors(W), tensors(R), tensors(x)
    y, _ = kernels.memory(form, weights, **variables, toward=toward)
    variables |= weights | {f"toward {n}": z for n, z in toward.items()}
    scalar = (y * tensor(cotangent)).sum()
    gradients = scalar.gradient(*[variables[n] for n in expected])
    Tensor.realize(y, *gradients)
    assert relative(y, by_oracle(cfg, W, x, R)) < bound / 10
    for (name, derivative), g in zip(expected.items(), gradients):
      assert np.linalg.norm(derivative) > 0, name
      error = record(f"gradients against the oracle, {kind}", relative(g, derivative))
      assert error < bound, (name, form.backend)

def gradients_in_pieces(cfg, W, x, sizes):
  """Gradients to all weights and inputs, to every piece of an input for itself."""
  y, variables = in_pieces(cfg, W, x, sizes)
  gradients = y.sin().sum().gradient(*variables)
  Tensor.realize(*gradients)
  return [g.numpy() for g in gradients]

@cases("case", ["linear-identity-l2-momentum-3-4", *marked(runs, "mlp-identity-l2-momentum-3-4"),
                *marked(slow, "mlp-exp-l2-momentum-3-4")])
def test_gradients_flow_through_the_state_in_every_form(case):
  """Two calls, the second starting inside a chunk: gradients flow back through base, M, S and the window's tail."""
  W, x = problem(from_case(case), T=12, d=2, dv=2)
  n, m = len(W), len(INPUTS)
  expected = gradients_in_pieces(from_case(case, backend="ops"), W, x, (12,))
  for cfg in forms(case):
    pieces = gradients_in_pieces(cfg, W, x, (6, 6))
    inputs = [np.concatenate(pair, 2) for pair in zip(pieces[n:n + m], pieces[n + m:])]
    for g, e in zip(pieces[:n] + inputs, expected, strict=True):
      assert record("gradients in pieces against at once", relative(g, e)) < 1e-5

def test_ignored_gates_get_zero_gradients_and_feature_coefficients_of_zero_finite_ones():
  cfg = rule(memory="linear", features="poly", momentum=False)
  W, x = problem(cfg, T=5)
  W["a"][1] = 0
  weights, inputs = tensors(W), tensors(x)
  loss = kernels.memory(cfg, weights, **inputs)[0].square().sum()
  g_theta, g_a = [g.numpy() for g in loss.gradient(inputs["theta"], weights["a"])]
  assert not g_theta.any() and finite(g_a) and np.abs(g_a).max() > 0

# *** its special cases ***
@cases("step", ["momentum", "muon"])
def test_without_a_step_only_forgetting_is_left_and_twice_the_step_moves_twice_as_far(step):
  cfg = from_case(f"linear-identity-l2-{step}-1-4")
  W, x = problem(cfg, T=5)
  forgetting = np.cumprod(x["alpha"], -1)[..., None] * np.einsum("hoi,bhti->bhto", W["W"], x["q"])
  def added(factor): return read(cfg, W, x, eta=factor * x["eta"]) - forgetting
  assert np.linalg.norm(added(0)) < 1e-5 * np.linalg.norm(forgetting)
  once, twice = added(1)[:, :, 0], added(2)[:, :, 0]
  assert relative(twice, 2 * once) < 1e-4 and np.abs(once).max() > 1e-3

def test_a_chunk_seen_twice_is_remembered_better_the_second_time():
  cfg = from_case("mlp-poly-l2-gd-2-4")
  W, x = problem(cfg, T=4, hidden=8)
  x |= {"alpha": np.ones_like(x["alpha"]), "eta": np.full_like(x["eta"], 0.1)}
  x = {n: np.concatenate([z, z], 2) for n, z in x.items()}
  errors = np.square(read(cfg, W, x, q=x["k"]) - x["v"])
  assert errors[:, :, 4:].sum() < 0.8 * errors[:, :, :4].sum()

def test_window_1_chunk_1_linear_is_the_textbook_delta_rule():
  cfg = from_case("linear-identity-l2-gd-1-1")
  W, x = problem(cfg, H=1)
  M, ys = W["W"][0], []
  for q, k, v, alpha, _, eta, gamma in zip(*[x[n][0, 0] for n in INPUTS]):
    M = alpha * M - eta * gamma[0] * np.outer(M @ k - v, k)
    ys.append(M @ q)
  assert relative(read(cfg, W, x)[0, 0], np.stack(ys)) < 1e-5

@cases("features,similarity", [("identity", np.positive), ("exp", np.exp)])
def test_dot_loss_is_linear_attention_and_with_an_expansion_unnormalised_attention(features, similarity):
  cfg = from_case(f"linear-{features}-dot-gd-1-4")
  W, x = problem(cfg, anchors=0)
  if features == "identity": W["W"] *= 0
  y = read(cfg, W, x, **{gate: np.ones_like(x[gate]) for gate in ("alpha", "eta", "gamma")})
  weights = np.tril(similarity(np.einsum("bhtd,bhsd->bhts", x["q"], x["k"])))
  assert relative(y, np.einsum("bhts,bhsv->bhtv", weights, x["v"])) < 1e-5

def test_quadratic_features_recall_more_pairs_than_the_key_is_long_and_identity_does_not():
  """Counts the pairs whose value is the nearest to what is read for their key, after all were written 40 times."""
  d, pairs = 4, 10
  keys, values = rng(3).normal(size=(2, pairs, d))
  keys /= np.linalg.norm(keys, axis=1, keepdims=True)
  k, v = [np.tile(z, (41, 1))[None, None] for z in (keys, values)]
  ones = np.ones(k.shape[:3])
  eta = 0.15 * ones
  eta[..., -pairs:] = 0                  # a step of 0 only reads
  def recalled(features, **weights):
    cfg = rule(memory="linear", features=features, chunk=pairs, momentum=False, key_dim=d, value_dim=d)
    W = {"W": np.zeros((1, d, kernels.feature_size(d, features, 2)))} | weights
    answers = read(cfg, W, dict(zip(INPUTS, (k, k, v, ones, 0 * ones, eta, ones[..., None]))))[0, 0, -pairs:]
    return (np.square(answers[:, None] - values).sum(-1).argmin(1) == np.arange(pairs)).sum()
  assert recalled("poly", a=np.array([1, 1, 0.5])) == pairs > recalled("identity")

# *** Newton-Schulz ***
def flattened(S): return kernels.newton_schulz(tensor(S), 5).numpy()

@cases("shape", [(8, 8), (8, 9), (8, 20), (20, 8)])
def test_newton_schulz_flattens_singular_values_and_equals_float64(shape):
  """Nearly square matrices are iterated themselves, for others it is their Gram matrix."""
  r = rng(0)
  U, _, V = np.linalg.svd(r.normal(size=(3, *shape)), full_matrices=False)
  well = U * np.linspace(0.3, 1, min(shape)) @ V
  poor = (U * (np.arange(min(shape)) < 3)) @ V
  def error(S): return relative(flattened(S), np.stack([muon(s, 5) for s in S]))
  assert (np.abs(np.linalg.svd(flattened(well), compute_uv=False) - 1) < 0.35).all()
  assert record("Newton-Schulz, well-conditioned", error(well)) < 1e-5
  assert record("Newton-Schulz, rank-deficient", error(poor)) < 1e-3

@cases("shape", [(4, 5), (4, 12)])
def test_newton_schulz_and_its_gradient_are_finite_at_zero_tiny_and_rank_one(shape):
  r = rng(0)
  rank_one = np.outer(r.normal(size=shape[0]), r.normal(size=shape[1]))
  S = np.stack([np.zeros(shape), 1e-12 * r.normal(size=shape), rank_one])
  x = tensor(S)
  y = kernels.newton_schulz(x, 5)
  g, = (y * tensor(r.normal(size=S.shape))).sum().gradient(x)
  assert finite(y, g) and not y.numpy()[0].any()

# *** kernels ***
@cases("G,R,K,C", [(1, 5, 7, 3), (2, 8, 12, 16), (3, 1, 16, 20), (1, 6, 33, 29), (1, 24, 520, 48)])
@cases("xt", [False, True])
@cases("yt", [False, True])
def test_matmul_is_the_product_and_so_are_its_gradients(G, R, K, C, xt, yt):
  def turn(z, yes): return z.swapaxes(1, 2) if yes else z
  X, Y = rng(0).normal(size=(G, R, K)), rng(1).normal(size=(G, K, C))
  x, y = tensor(turn(X, xt)), tensor(turn(Y, yt))
  product = kernels.matmul(x, y, xt, yt)
  dx, dy = product.sin().sum().gradient(x, y)
  cosine = np.cos(X @ Y)
  assert relative(product, X @ Y) < 1e-5
  assert relative(turn(array(dx), xt), cosine @ Y.swapaxes(1, 2)) < 1e-5
  assert relative(turn(array(dy), yt), X.swapaxes(1, 2) @ cosine) < 1e-5

def largest_tensor(cfg):
  """Elements of the largest intermediate of a read of 256 tokens by one head of 16 with a hidden size of 64."""
  W, x = problem(cfg, B=1, H=1, T=256, d=16, dv=16, hidden=64)
  y, _ = kernels.memory(cfg, tensors(W), **tensors(x))
  stored = [u for u in y.uop.toposort(enter_calls=True) if u.op.name in ("CONTIGUOUS", "GETTUPLE", "STACK")]
  return max(u.max_numel() for u in stored)

def test_without_muon_nothing_of_size_tokens_by_weights_exists():
  settings = dict(memory="mlp", window=3, chunk=64, key_dim=16, value_dim=16, backend="ops")
  weights_per_token = 256 * 16 * 64
  assert largest_tensor(rule(**settings)) < weights_per_token / 4
  assert largest_tensor(rule(**settings, optimizer="muon")) >= weights_per_token         # the probe sees them there

def test_the_stock_form_launches_few_kernels_a_chunk():
  """What a GPU pays for a longer sequence: 24 kernels a chunk, forward and backward."""
  cfg, launches = rule(memory="mlp", window=3, forget=True, chunk=4, backend="ops"), []
  for T in (16, 32):
    W, x = map(tensors, problem(cfg, T=T))
    y = kernels.memory(cfg, W, **x)[0]
    gradients = y.square().sum().gradient(*W.values(), *x.values())
    launches.append(len(y.schedule_linear(*gradients).src))
  assert 4 < (launches[1] - launches[0]) / 4 <= 24

# *** nothing wrong in silence ***
def checked(**fields):
  cfg = rule(memory="linear", chunk=4, window=2, **fields)
  W, x = problem(cfg, B=2, T=4)
  return cfg, tensors(W), tensors(x)

def types(*results): return {z.dtype for z in results}

@cases("dtype,bound", [(dtypes.half, 1e-2), (dtypes.bfloat16, 5e-2), (dtypes.double, 1e-6)], ids=str)
def test_arguments_of_another_dtype_are_cast_and_their_gradients_come_back(dtype, bound):
  cfg, W, x = checked()
  def cast(arguments): return {n: z.cast(dtype).realize() for n, z in arguments.items()}
  inputs = cast(x)
  y, state = kernels.memory(cfg, cast(W), **inputs)
  gradient, = y.square().sum().gradient(inputs["k"])
  assert types(y, *state.values()) == {dtypes.float, dtypes.int}
  assert gradient.dtype == dtype and finite(gradient)
  assert relative(y, kernels.memory(cfg, W, **x)[0]) < bound

@cases("backend", ["ops", "fused"])
def test_arguments_of_other_shapes_are_named_with_the_right_shape(backend):
  cfg, W, x = checked(backend=backend)
  wrong = {"k": x["k"][:1], "v": x["v"][:, :, :2], "gamma": x["gamma"][..., :1],
           "alpha": x["alpha"][:, :, :3], "eta": x["eta"].unsqueeze(-1), "theta": None}
  narrow, state = {"W": W["W"][:, :, :2]}, kernels.initial_state(cfg, W, 1, 3)
  lacking = {n: z for n, z in state.items() if "W" not in n} | {"base.W": W["W"]}
  def refused(message, weights=W, **changed):
    with pytest.raises(ValueError, match=message): kernels.memory(cfg, weights, **x | changed)
  for name, z in wrong.items(): refused(rf"^{name} (has shape .* takes \(2, 2, 4|is a NoneType)", **{name: z})
  refused(r"^k has shape \(2, .* takes \(1, 2, 4, 3", q=x["q"][:1])           # q is what tells B, H and T
  for weights in (narrow, {"W": W["W"][:1]}, {}): refused("weights", weights)
  refused(r"toward\['W'\] has shape", toward=narrow)
  refused(r"state\['base.W'\] has shape \(1,", state=state)
  refused("state has no 'M.W'", state=lacking)

def test_recall_before_the_first_token_reads_the_initial_memory_of_every_row():
  cfg, W, x = checked()
  y = kernels.recall(cfg, W, kernels.initial_state(cfg, W, 2, 3), x["q"])
  assert relative(y, np.einsum("hoi,bhti->bhto", array(W["W"]), array(x["q"]))) < 1e-6

def test_matmul_broadcasts_leading_axes_as_numpy_does_or_says_that_it_cannot():
  r = rng(0)
  for a, b in (((4, 5), (2, 5, 8)), ((2, 1, 4, 5), (3, 5, 8)), ((2, 4, 5), (5, 8))):
    x, y = r.normal(size=a), r.normal(size=b)
    assert relative(kernels.matmul(tensor(x), tensor(y)), x @ y) < 1e-6
  z = kernels.matmul(tensor(x).half(), tensor(y))
  assert z.dtype == dtypes.float and finite(z)
  wrong: tuple = ((3, 4, 5), (2, 5, 8), "do not broadcast"), ((4, 5), (4, 8), "do not meet"), ((5,), (5, 8), "two axes")
  for a, b, message in wrong:
    with pytest.raises(ValueError, match=message): kernels.matmul(Tensor.zeros(*a), Tensor.zeros(*b))

def test_an_operation_that_a_kernel_does_not_have_is_refused():
  scratch, vectors = UOp.placeholder((64,), dtypes.float, 0), kernels.vectors(Device.DEFAULT)
  m: Any = kernels.Kernel(scratch, None, True, vectors).new((2, 3))
  for call in (lambda: m.sum(-1), lambda: m.transpose(0, 0), lambda: m ** 0.5, lambda: m.cat(m, dim=0), lambda: m @ m,
               lambda: m + m.transpose(), lambda: m.eye(2, dtype=dtypes.half)):
    with pytest.raises((NotImplementedError, ValueError)): call()
  with pytest.raises(AttributeError): m.flatten()
  assert m.sum(-1, keepdim=True).shape == (2, 1)
  assert m.sum((-1, -2), keepdim=True).shape == (1, 1)

@pytest.mark.skipif(Device.DEFAULT != "CPU" or NUM_CPU_THREADS.value < 2, reason="needs two cores of a CPU")
def test_parts_of_a_kernel_give_the_same_side_by_side_as_one_after_another(monkeypatch):
  """A kernel's third call is the first that may run its parts side by side."""
  W, x = map(tensors, problem(from_case("mlp-poly-l2-muon-3-4"), T=9))
  def results(hand_over):
    monkeypatch.setattr(kernels, "HAND_OVER", hand_over)
    for _ in range(3):
      y, _ = kernels.memory(from_case("mlp-poly-l2-muon-3-4", backend="fused"), W, **x)
      gradients = y.square().sum().gradient(*W.values(), *x.values())
      Tensor.realize(y, *gradients)
    return [z.numpy() for z in (y, *gradients)]
  assert all(map(np.array_equal, results(0.0), results(math.inf)))

def recorded(monkeypatch):
  """The graph and the program of every kernel that kernels.py compiles from now on; those it has are forgotten."""
  result, compiled = [], kernels.compiled
  def recording(args, size, sink, device):
    kernel = compiled(args, size, sink, device)
    result.append((sink, kernel.program))
    return kernel
  monkeypatch.setattr(kernels, "compiled", recording)
  codegen.to_program_cache.clear()
  for cached in (kernels.memory_kernel, kernels.matmul_kernel): cached.cache_clear()
  return result

def source(program): return next(u.arg for u in program.src if u.op is Ops.SOURCE)

@cases("step", ["momentum", "muon"])
def test_loops_of_a_kernel_have_tinygrads_order_and_its_code_is_the_same(step, monkeypatch):
  cfg = from_case(f"linear-identity-l2-{step}-2-2", backend="fused")
  edges = []
  class Compared(kernels.LoopOrder):
    def __init__(self, sink):
      super().__init__(sink)
      edges.append((self.edges, CFGContext(sink).edges))
  def code(order):
    """The C code of a memory kernel and of its backward kernel."""
    W, x = map(tensors, problem(cfg, T=4))
    with monkeypatch.context() as patch:
      patch.setattr(kernels, "LoopOrder", order)
      programs = recorded(patch)
      kernels.memory(cfg, W, **x)[0].sum().gradient(x["k"])
    return [source(program) for _, program in programs]
  codes = code(Compared)
  assert len(codes) == len(edges) == 2
  assert all(len(expected) > 4 and order == expected for order, expected in edges)
  assert codes == code(CFGContext)

# *** all cores of a CPU ***

@pytest.fixture
def cores(monkeypatch):
  """A function that sets how many cores kernels use; even the smallest kernel is then handed to threads."""
  monkeypatch.setattr(kernels, "HAND_OVER", 0.0)
  return lambda number: monkeypatch.setattr(kernels.NUM_CPU_THREADS, "value", number)

def test_results_are_the_same_to_the_bit_for_every_number_of_cores(cores):
  """Six heads and rows of 36: 2 and 3 cores share them, and 5 cores divide neither.  Outputs and all gradients, with
  the oracle beside; each pass three times, since parts run side by side from the third call of a kernel on."""
  cfg = from_case("gated-poly-l2-muon-3-4", backend="fused", heads=6)
  W, x = problem(cfg, B=1, H=6, T=9)
  factors = rng(0).normal(size=(36, 40)).astype(np.float32), rng(1).normal(size=(40, 24)).astype(np.float32)
  def results(number):
    cores(number)
    inputs, (left, right) = [z.realize() for z in (tensors(W) | tensors(x)).values()], map(Tensor, factors)
    for _ in range(3):
      y = kernels.memory(cfg, dict(zip(W, inputs)), *inputs[len(W):])[0]
      values = [y, *y.square().sum().gradient(*inputs), kernels.matmul(left, right)]
      Tensor.realize(*values)
    return [z.numpy() for z in values]
  one = results(1)
  assert record("one core against the oracle", relative(one[0], by_oracle(cfg, W, x))) < 1e-4
  for number in (2, 3, 5):
    for z, expected in zip(results(number), one): assert np.array_equal(z, expected)

def test_parts_of_a_kernel_run_in_threads_with_scratch_of_their_own(cores, monkeypatch):
  """This fails if a later tinygrad calls its CPU programs in another way."""
  seen = []
  class Program:
    runtimevars, lvp = {"core_id": 2}, False
    signature = ("values", 0, dtypes.float, (12,)), (None, 1, dtypes.float, (5,)), ("core_id", 2, dtypes.int, ())
    def __init__(self): self.seconds = [1.0, 1.0]
    def fxn(self, *numbers): seen.append((threading.get_ident(), *[n.value for n in numbers]))
  class Buffer:
    va_addr = 1000
  cores(3)
  kernels.parallel_call(Program(), Buffer, Buffer, global_size=(3, 1, 1), vals=(None,))
  assert sorted(numbers for _, *numbers in seen) == [[1000, 1000, 0], [1016, 1000, 1], [1032, 1000, 2]]
  assert vars(kernels.CPUProgram)["__call__"] is kernels.parallel_call and len({thread for thread, *_ in seen}) > 1
  kernel = kernels.matmul_kernel(4, 8, 8, 8, False, False, 2, "CPU")
  assert kernel.program.arg.global_size[0] == 2 and [v.expr for v in kernel.program.arg.vars] == ["core_id"]
  names = list(inspect.signature(kernels.serial_call).parameters)
  assert names == ["self", "bufs", "global_size", "local_size", "vals", "wait", "timeout"]

def test_ctrl_c_waits_for_the_parts_that_run(cores):
  """Their buffers would be freed under them."""
  done = []
  class Program:
    runtimevars, lvp, signature = {"core_id": 0}, False, (("core_id", 0, dtypes.int, ()),)
    def __init__(self): self.seconds = [1.0, 1.0]
    def fxn(self, part):
      if part.value == 0: raise KeyboardInterrupt
      time.sleep(0.2)
      done.append(part.value)
  cores(2)
  with pytest.raises(KeyboardInterrupt): kernels.parallel_call(Program(), global_size=(2, 1, 1), vals=(None,))
  assert done == [1]

@cases("vectors,shape,expected", [
  (kernels.Vectors(16, 32), (64, 256), (4, 64)), (kernels.Vectors(8, 32), (64, 256), (4, 32)),
  (kernels.Vectors(8, 16), (64, 256), (2, 32)), (kernels.Vectors(8, 16), (96, 24), (4, 24)),
  (kernels.Vectors(4, 32), (64, 256), (4, 16)), (kernels.Vectors(4, 16), (7, 9), (1, 9))])
def test_the_sums_of_a_tile_stay_in_registers(vectors, shape, expected):
  """AVX-512, AVX-512 with half its vectors, AVX2, NEON and SSE."""
  rows, columns = kernels.tile_shape(*shape, vectors)
  assert (rows, columns) == expected and shape[0] % rows == 0 and shape[1] % columns == 0
  assert rows * -(-columns // vectors.lanes) + -(-columns // vectors.lanes) < vectors.registers

# *** the README's changes of the rule ***

CHANGES = {"huber": "mlp-identity-huber-momentum-2-3", "rms": "mlp-identity-l2-rms-2-3",
           "squares": "mlp-squares-l2-momentum-2-3"}
CHANGED_ORACLE = """
import numpy as np, test_atlas as t
error, direction, lift = t.error, t.direction, t.lift
def norm(e): return np.sqrt((e * e).sum())
def huber(e): return e if norm(e).real <= 1 else e / norm(e)
t.error = lambda cfg, y, v: huber(y - v) if cfg.loss == "huber" else error(cfg, y, v)
t.direction = lambda cfg, S: S / np.sqrt((S * S).mean() + 1e-6) if cfg.optimizer == "rms" else direction(cfg, S)
t.lift = lambda cfg, x, a: np.concatenate([x, x * x]) if cfg.features == "squares" else lift(cfg, x, a)
t.STEPS["rms"] = dict(optimizer="rms")
t.test_gradients_are_the_finite_differences_of_the_oracle(CASE)
import json; print(json.dumps(t.worst))
"""
@runs
@cases("change,case", CHANGES.items())
def test_a_change_of_the_rule_as_the_readme_shows_it_is_the_oracle_in_both_forms(change, case, tmp_path):
  """A copy of the project with one diff applied: values and gradients, in stock operations and in one kernel."""
  folder = Path(__file__).parent
  diffs = re.findall(r"```diff\n(.*?)```", (folder / "README.md").read_text(), re.S)
  diff, = [diff for diff in diffs if f'"{change}"' in diff]
  assert sum(line.startswith("+") for line in diff.splitlines()) - 1 <= 8
  for path in folder.glob("*.py"): shutil.copy(path, tmp_path)
  output(["git", "apply", "--unidiff-zero", "--recount"], input=diff, cwd=tmp_path)
  worst_errors = output([sys.executable, "-c", CHANGED_ORACLE.replace("CASE", repr(case))], cwd=tmp_path)
  record(f"{change}, a changed rule", max(json.loads(worst_errors).values()))

# *** the model: one small model per preset, whose compiled calls serve all its tests ***
SMALL = dict(vocab=16, dim=16, layers=1, heads=2, key_dim=4, value_dim=4, mlp_ratio=1.0, chunk=8,
             muon_every=2, horizon=11)
PRESETS = list(atlas.PRESETS)
CONVOLVED = ["transformer++ conv=4", "swa conv=4"]       # attention behind the convolution of the memories
T = 24                                   # tokens of a call: whole chunks of 8, and whole segments of 12
def presets(*names, rest:Any=None):
  """A test of these presets, and with the mark `rest` of all others. One process has all tests of a preset."""
  def parameter(name):
    marks = [pytest.mark.xdist_group(name)]
    if name not in names: marks.append(rest)
    return pytest.param(name, marks=marks)
  return cases("name", [parameter(name) for name in PRESETS + CONVOLVED if name in names or rest])

def windows(name, w): return {"attn_window": w} if "attn_window" in atlas.PRESETS[name] else {}

def small(name, **fields):
  name, _, conv = name.partition(" conv=")
  if conv: fields["conv"] = int(conv)
  return atlas.preset(name, **SMALL | windows(name, 12) | fields)   # chunks of 8 do not divide windows and segments

def random_tokens(rows, columns, seed=0): return rng(seed).integers(0, 16, (rows, columns)).astype(np.int32)

class Model:
  """A small model, and tokens (4,2T). `first` reads T tokens, `more` as many after a state, `step` one, each compiled
  once; `anywhere` is for everything else. The logits of the first T tokens are read by an eager call, while a jit
  captures it, and by its replay; `state` is that behind them."""
  def __init__(self, cfg):
    self.cfg, self.params, self.tokens = cfg, atlas.init(cfg, seed=1), random_tokens(4, 2 * T)
    self.jit_first, self.jit_more, self.jit_step = [TinyJit(self.forward) for _ in range(3)]
    self.eager, self.state = self.first(self.tokens[:, :T])
    self.captured, _ = self.first(self.tokens[:, :T])
    self.replayed, _ = self.first(self.tokens[:, :T])
  def forward(self, tokens, *state): return atlas.forward(self.params, self.cfg, tokens, *state)
  def call(self, forward, tokens, *state):
    logits, after = forward(Tensor(np.ascontiguousarray(tokens)), *state)
    Tensor.realize(logits, *after.values())
    return logits.numpy(), after
  def anywhere(self, tokens, *state): return self.call(self.forward, tokens, *state)
  def first(self, tokens): return self.call(self.jit_first, tokens)
  def step(self, token, state): return self.call(self.jit_step, token, state)
  def more(self, tokens, state):
    growing = atlas.growing(self.cfg)    # which a jit cannot hold
    return self.call(self.forward if growing else self.jit_more, tokens, state)

@functools.cache
def model(name): return Model(small(name))

@presets(*PRESETS, *CONVOLVED)
def test_no_leak_inside_a_chunk_nor_between_rows(name):
  m, y = model(name), model(name).replayed
  for t in (3, 7, 8, 13, T - 1):         # inside chunks, at their last and first token, at the end
    changed = m.tokens[:, :T].copy()
    changed[1, t] = (changed[1, t] + 1) % m.cfg.vocab
    z, _ = m.first(changed)
    assert np.array_equal(np.delete(z, 1, 0), np.delete(y, 1, 0)), "a row of the batch saw another"
    assert np.array_equal(z[1, :t], y[1, :t]), f"an output before token {t} saw it"
    assert (np.abs(z[1, t:] - y[1, t:]).max(-1) > 0).any()

@presets(*PRESETS, *CONVOLVED)
def test_jit_equals_eager(name):
  m = model(name)
  assert np.array_equal(m.captured, m.replayed) and record("jit against eager", relative(m.replayed, m.eager)) < 1e-6

@presets("linear_attention", "titans", "atlas", "transformer++", "swa", *CONVOLVED, "atlas_mag", "titans_mac",
         rest=runs)
def test_a_stream_may_be_cut_anywhere(name):
  """After one token, inside a chunk, at a border also in a jitted call, and token by token in a jitted step; the state
  keeps its size."""
  m = model(name)
  logits, state = m.anywhere(m.tokens[:, :1])
  inside, _ = m.anywhere(m.tokens[:, 1:T + 1], state)
  for _ in range(3): border, _ = m.more(m.tokens[:, T:], m.state)              # the third replays what was captured
  steps, shapes = [logits], []
  for t in range(1, 2 * T):
    logits, state = m.step(m.tokens[:, t:t + 1], state)
    steps.append(logits)
    shapes.append({n: z.shape for n, z in state.items()})
  stream = np.concatenate(steps, 1)
  kind, bound = ("Muon", 1e-3) if m.cfg.optimizer == "muon" else ("gradient steps", 1e-5)
  for result, expected in ((stream[:, :T], m.eager), (inside, stream[:, 1:T + 1]), (border, stream[:, T:])):
    assert record(f"streamed against at once, {kind}", relative(result, expected)) < bound
  assert all(after == shapes[0] for after in shapes)
  assert int(state["position"].item()) == 2 * T

@cases("name", ["deltanet", "titans"])
def test_a_step_captured_on_the_first_state_serves_beyond_the_horizon(name):
  m, stream = Model(small(name, horizon=8)), []
  _, state = m.anywhere(m.tokens[:, :1])
  for _ in range(2): m.step(m.tokens[:, 1:2], state)         # the second call captures it
  for t in range(1, 20):
    logits, state = m.step(m.tokens[:, t:t + 1], state)
    stream.append(logits)
  assert relative(np.concatenate(stream, 1), m.eager[:, 1:20]) < 1e-5

@presets("titans", "transformer++", rest=slow)
def test_a_sample_is_what_reading_the_context_anew_for_every_token_gives(name, capsys):
  """Two chunks and a token are read before. `speaker` generates bytes for many rows, `sample` also numbers, for one."""
  m, n = model(name), 17
  context = m.tokens[:, :T].copy()
  for t in range(n, T): context[:, t] = m.first(context)[0][:, t - 1].argmax(-1)
  answers = [bytes(row.tolist()).split(b"\n")[0].decode() for row in context[:, n:]]
  assert evaluate.speaker(m.params, m.cfg)(m.tokens[:, :n].astype(np.uint8), T - n) == answers and len(set(answers)) > 1
  evaluate.sample(m.params, m.cfg, m.tokens[3, :n].tolist(), False, tokens=T - n, temperature=0.0)
  assert capsys.readouterr().out.splitlines()[1] == ",".join(map(str, context[3]))

@pytest.mark.xdist_group("titans")
def test_layers_keep_their_own_states_and_a_state_is_never_changed_in_place():
  m = Model(small("titans", layers=2))
  _, state = m.anywhere(m.tokens[:, :1])
  before = {n: z.numpy() for n, z in state.items()}
  for _ in range(2): logits, _ = m.anywhere(m.tokens[:, 1:T + 1], state)
  assert relative(logits[:, :-1], m.eager[:, 1:]) < 1e-5
  assert all(np.array_equal(before[n], z.numpy()) for n, z in state.items())

@presets("transformer++", "dot")
def test_a_full_cache_doubles_and_a_jit_past_its_end_says_so(name):
  m, tokens = model(name), random_tokens(4, 3 * T)
  expected, _ = m.anywhere(tokens)
  _, state = m.first(tokens[:, :T])
  _, longer = m.more(tokens[:, T:2 * T], state)
  logits, longer = m.more(tokens[:, 2 * T:], longer)
  assert relative(logits, expected[:, 2 * T:]) < 1e-5
  assert atlas.room(m.cfg, state) == 64 and atlas.room(m.cfg, longer) == 256
  step, several = TinyJit(m.forward), TinyJit(m.forward)
  for t in range(T, 66):
    logits, state = m.call(step, tokens[:, t:t + 1], state)
    if t < 64: assert relative(logits[:, 0], expected[:, t]) < 1e-5
  assert np.isnan(logits).all() and not any(finite(z) for n, z in state.items() if n.endswith((".k", ".M.u")))
  m.call(several, tokens[:, :T], m.state)
  with pytest.raises(ValueError, match="cannot jit a call of several tokens"):
    m.call(several, tokens[:, :T], m.state)

def test_an_expansion_needs_no_anchors_where_the_memory_is_linear():
  cfg = small("dot", memory="linear", anchors=0)
  params = atlas.init(cfg)
  assert "anchor_u" not in params["layers"]["0"]["memory"]
  assert finite(atlas.forward(params, cfg, Tensor(random_tokens(1, 12)))[0])

@slow
@cases("mixer", ["mag", "mal", "mac"])
def test_an_expansion_goes_into_a_hybrid(mixer):
  m = Model(small("dot", mixer=mixer, attn_window=6, persist=2))
  state: list = []
  result = []
  for start, end in itertools.pairwise((0, 9, 10, 11, 14)):
    logits, *state = m.anywhere(m.tokens[:, start:end], *state)
    result.append(logits)
  assert relative(np.concatenate(result, 1), m.eager[:, :14]) < 1e-5

@cases("name", ["linear_attention", "deltanet", "ttt", *marked(runs, "dot")])
def test_without_a_forget_gate_nothing_fades_up_to_the_horizon_and_what_is_far_beyond_is_gone(name):
  tokens = random_tokens(2, 168)
  tokens[1, 8:] = tokens[0, 8:]          # two beginnings, then 20 horizons of the same
  def logits(horizon):
    cfg = small(name, horizon=horizon)
    return atlas.forward(atlas.init(cfg, seed=1), cfg, Tensor(tokens))[0].numpy()
  fading, keeping = logits(8), logits(1 << 20)
  assert relative(fading[:, :8], keeping[:, :8]) < 1e-6
  assert relative(fading[:, 8:], keeping[:, 8:]) > 1e-4
  assert relative(fading[1, -8:], fading[0, -8:]) < 1e-6
  assert relative(keeping[1, -8:], keeping[0, -8:]) > 1e-4

@pytest.mark.skipif(Device.DEFAULT != "CPU", reason="CPU:1 needs the CPU device")
@presets("titans", "dot", "transformer++", "swa", "titans_mac", rest=runs)
def test_a_model_on_a_second_device_streams_as_on_the_first(name):
  """Several tokens and single ones, eager and jitted, that resume a first call; every state stays on the device."""
  m, result = model(name), []
  state: list = []
  params = atlas.unflatten({n: p.to("CPU:1").realize() for n, p in get_state_dict(m.params).items()})
  forward: Any = functools.partial(atlas.forward, params, m.cfg)
  step = TinyJit(forward)
  for start, end in itertools.pairwise((0, 5, 8, 9, 10, 11, 12, 13)):
    tokens = Tensor(m.tokens[:, start:end].copy(), device="CPU:1")
    logits, *state = (forward if start < 9 else step)(tokens, *state)
    assert {z.device for z in (logits, *state[0].values())} == {"CPU:1"}
    result.append(logits.numpy())
  assert relative(np.concatenate(result, 1), m.eager[:, :13]) < 2e-4
PRINTS_LOGITS = """
import sys, numpy as np, atlas
from tinygrad import Tensor, dtypes
tokens = (np.arange(15, dtype=np.int32) * 7 % 16).reshape(1, 15)
for name in sys.argv[1:]:
  fields = {"attn_window": 6} if name == "titans_mac" else {}
  cfg = atlas.preset(name, vocab=16, dim=16, layers=1, heads=2, key_dim=4, value_dim=4, chunk=8, horizon=11, **fields)
  params = atlas.init(cfg, seed=1)
  first, state = atlas.forward(params, cfg, Tensor(tokens[:, :13].copy()))
  second, state = atlas.forward(params, cfg, Tensor(tokens[:, 13:14].copy()), state)
  loss = atlas.loss(params, cfg, Tensor(tokens[:, :13].copy()), Tensor(tokens[:, 1:14].copy()))
  assert {z.dtype for z in (first, second, loss, *state.values())} == {dtypes.float32, dtypes.int32}
  print(name, *[z.numpy().tobytes().hex() for z in (first, second, loss)])
"""
CHEAP = "linear_attention", "transformer++"

@cases("setting,names", [("DEFAULT_FLOAT=HALF", CHEAP), *[pytest.param(setting, (*CHEAP, "titans_mac"), marks=runs)
                         for setting in ("DEFAULT_FLOAT=HALF", "DEFAULT_FLOAT=DOUBLE", "DEFAULT_INT=INT64")]], ids=str)
def test_default_types_of_tinygrad_change_no_bit(setting, names):
  script = [sys.executable, "-c", PRINTS_LOGITS, *names]
  plain, changed = [output(["env", *words, *script], cwd=Path(__file__).parent) for words in ([], [setting])]
  assert plain == changed

@cases("name", ["titans_mac", "transformer++"])
@cases("dtype", [dtypes.half, dtypes.double, dtypes.bfloat16], ids=str)
def test_parameters_of_another_precision_are_used_as_float32(name, dtype):
  cfg = small(name)
  params = {n: p.cast(dtype).realize() for n, p in get_state_dict(atlas.init(cfg)).items()}
  rounded = {n: p.cast(dtypes.float).realize() for n, p in params.items()}
  def forward(flat): return atlas.forward(atlas.unflatten(flat), cfg, Tensor(random_tokens(1, 7)))
  logits, state = forward(params)
  assert types(logits) == {dtypes.float} and types(*state.values()) == {dtypes.float, dtypes.int}
  assert relative(logits, forward(rounded)[0]) < 1e-6

def test_unknown_tokens_are_embedded_as_zeros_and_negative_ones_count_from_the_end():
  cfg = small("swa")
  params = atlas.init(cfg)
  longer = params | {"embed": params["embed"].pad(((0, 1), None)).realize()}             # a last row of zeros
  def hidden(params, token): return atlas.hidden(params, cfg, Tensor([[1, 2, token, 4]], dtype=dtypes.int))[0]
  zeros, last = hidden(longer, cfg.vocab), hidden(params, cfg.vocab - 1)
  for token in (cfg.vocab, 10 ** 6, -cfg.vocab - 1): assert relative(hidden(params, token), zeros) < 1e-6
  assert relative(hidden(params, -1), last) < 1e-6 < relative(last, zeros)

def test_targets_outside_the_vocabulary_count_as_loss_0():
  logits, targets = tensor(rng(0).normal(size=(1, 4, 16))), Tensor([[3, -100, 16, -1]])
  first, *others = atlas.token_losses(logits, targets).numpy()[0]
  assert first > 0 and not any(others)
  assert atlas.cross_entropy(logits, targets).item() == pytest.approx(first / 3)         # the mean leaves out -100 only

def test_a_new_row_of_a_table_is_a_choice_of_the_model_and_sets_the_bound_of_eta(monkeypatch):
  for name, table, row, choice in (("sharp", LOSSES, LOSSES["l2"]._replace(bound=0.3), "loss"),
                                   ("hebb", LOSSES, LOSSES["dot"]._replace(bound=0.7), "loss"),
                                   ("sign", DIRECTIONS, DIRECTIONS["muon"]._replace(bound=0.05), "optimizer"),
                                   ("double", FEATURES, FEATURES["poly"], "features")):
    monkeypatch.setitem(table, name, row)
    monkeypatch.setitem(atlas.CHOICES, choice, tuple(table))     # an edited table is read when atlas is imported
  alpha = tensor(np.full((1, 1, T), 0.9))
  def bounded(expected, name, **fields):
    return np.allclose((0 * alpha + atlas.eta_bound(small(name, **fields), alpha)).numpy(), expected)
  assert bounded(0.3 / 8, "titans", loss="sharp")
  assert bounded(0.05, "titans", optimizer="sign")
  assert bounded(0.7 / 8, "linear_attention", loss="hebb")
  assert bounded(0.07, "dla", loss="hebb")
  assert bounded(0.7 / (8 + np.minimum(np.arange(T), 11)), "ttt", loss="hebb")
  with pytest.raises(ValueError, match="does not divide"): small("titans", optimizer="sign", muon_every=3)
  with pytest.raises(ValueError, match="no matrix to orthogonalise"): small("dot", optimizer="sign")
  assert "layers.0.memory.a_root" in atlas.layout(small("titans", features="double"))

# *** attention and the hybrids ***
def turned(x, position):
  """Rotary positions, one vector."""
  a, b = np.split(x, 2)
  angle = position * 10_000.0 ** (-np.arange(0, len(x), 2) / len(x))
  cos, sin = np.cos(angle), np.sin(angle)
  return np.concatenate([a * cos - b * sin, a * sin + b * cos])

def attended(scores, values):
  """Softmax attention of one query: scores (L), values (L,.)."""
  weights = np.exp(scores)
  return weights @ values / weights.sum()

def test_windowed_attention_is_masked_attention_and_no_tensor_is_tokens_by_tokens():
  T, w, d = 100, 5, 4
  cfg = atlas.preset("swa", attn_window=w)
  qkv = rng(0).normal(size=(3, 1, 1, T, d))
  y, state = atlas.windowed(cfg, [tensor(z) for z in qkv], None, None)
  assert max(u.max_numel() for u in y.uop.toposort() if u._shape is not None) < T * T
  q, k, v = qkv[:, 0, 0]
  expected = []
  for t in range(T):
    seen = range(max(0, t - w + 1), t + 1)
    scores = np.array([turned(k[s], s) @ turned(q[t], t) for s in seen]) / d ** 0.5
    expected.append(attended(scores, v[seen.start:seen.stop]))
  assert relative(y[0], np.stack(expected)) < 1e-5
  one = [tensor(z[:, :, :1]) for z in qkv]
  def after(position):
    place = {"position": Tensor(position, dtype=dtypes.int32)}
    return atlas.windowed(cfg, one, None, state | place)[0].numpy()
  assert np.array_equal(after(T), after(10_000_000))

def sigmoid(z): return 1 / (1 + np.exp(-z))
def unit(z): return z / np.sqrt(np.square(z).sum(-1, keepdims=True) + 1e-6)
def norm(z): return z / np.sqrt(np.square(z).mean(-1, keepdims=True) + 1e-6)

class MemoryAsContext:
  """atlas.mac_mixer by its definition, for one row x (T,dim), token by token in float64, without convolution."""
  def __init__(self, p, cfg):
    self.cfg = cfg
    self.p = {n: array(z) for n, z in get_state_dict(p).items()}
    W1, W2 = self.p["memory.W1"], self.p["memory.W2"] * atlas.INIT.first
    self.weights = [{"W1": W1[h], "W2": W2[h]} for h in range(cfg.heads)]
  def heads(self, z): return z.reshape(len(z), self.cfg.heads, z.shape[-1] // self.cfg.heads)
  def qkv(self, x, name):
    """Queries, keys and values (n,H,.) of tokens x (n,dim); keys and values have one size here."""
    return [self.heads(z) for z in np.split(x @ self.p[name].T, 3, axis=-1)]
  def inputs(self, y, h):
    """What the memory of head h is given for all tokens y (n,dim)."""
    cfg, H = self.cfg, self.cfg.heads
    q, k, v = [z[:, h] for z in self.qkv(y, "qkv")]
    q, k, v = unit(q), unit(k), v * sigmoid(v)
    gates = sigmoid(y @ self.p["gates"].T + self.p["gate_bias"])
    pieces = np.split(gates, np.cumsum([H, H * cfg.window, H]), axis=-1)
    eta, gamma, alpha, theta = [self.heads(z)[:, h] for z in pieces]             # (n,1), (n,window), (n,1), (n,1)
    eta, gamma = eta * LOSSES["l2"].bound / cfg.chunk, gamma / cfg.window * (1 - theta)
    v = v / np.sqrt(1 + np.square(v).sum(-1, keepdims=True))
    return q, k, k + v, alpha[:, 0], theta[:, 0], eta[:, 0], gamma
  def answer(self, y, q, name):
    return norm(y - q) * self.p[f"{name}_norm"] + self.cfg.key_dim ** 0.5 * q * self.p[f"{name}_skip"]
  def recalled(self, query, h, stored):
    """M(query) of head h after the tokens stored before."""
    if not len(stored): return recall(self.cfg, self.weights[h], query, query)
    q, *writes = self.inputs(stored, h)
    q = np.concatenate([q[:-1], query[None]])
    return oracle(self.cfg, self.weights[h], q, *writes, toward=self.weights[h])[-1]
  def context(self, x, stored):
    """h of a segment x (n,dim): what the memory of the segment's start answers."""
    queries = unit(self.heads(x @ self.p["attention.read_q"].T))
    hs = [[self.answer(self.recalled(query, h, stored), query, "attention.read") for h, query in enumerate(row)]
          for row in queries]
    return np.reshape(hs, (len(x), -1)) @ self.p["attention.read_out"].T
  def attention(self, x, hs):
    """Token i of a segment attends to the persistent tokens, h_1..h_i and x_1..x_i."""
    persist = self.p["attention.persist"]
    _, kp, vp = self.qkv(persist, "attention.qkv")
    _, kh, vh = self.qkv(hs, "attention.qkv")
    q, kx, vx = self.qkv(x, "attention.qkv")
    y = np.zeros(q.shape)
    for i, h in np.ndindex(y.shape[:2]):
      k = np.stack([turned(z[j, h], j) for z in (kh, kx) for j in range(i + 1)])
      scores = np.concatenate([kp[:, h] @ q[i, h], k @ turned(q[i, h], i)])
      values = np.concatenate([vp[:, h], vh[:i + 1, h], vx[:i + 1, h]])
      y[i, h] = attended(scores / self.cfg.key_dim ** 0.5, values)
    return norm(y.reshape(len(x), -1) @ self.p["attention.out"].T) * self.p["attention.norm"]
  def __call__(self, x):
    stored = np.zeros((0, self.cfg.dim))
    for segment in np.split(x, range(self.cfg.attn_window, len(x), self.cfg.attn_window)):
      y = self.attention(segment, self.context(segment, stored))
      stored = np.concatenate([stored, y])
    answers = []
    for h, weights in enumerate(self.weights):
      q, *writes = self.inputs(stored, h)
      answers.append(self.answer(oracle(self.cfg, weights, q, *writes, toward=weights), q, "out"))
    gate = stored @ self.p["out_gate"].T + self.p["out_gate_bias"]
    return stored * ((np.concatenate(answers, axis=1) * gate * sigmoid(gate)) @ self.p["out"].T)

@cases("persist", [2, 0])
def test_memory_as_context_is_its_definition(persist):
  cfg = small("titans_mac", conv=0, chunk=2, window=2, attn_window=3, persist=persist, backend="ops")
  p = atlas.init(cfg, seed=2)["layers"]["0"]
  x = rng(0).normal(size=(1, 8, cfg.dim))
  if not persist: p["attention"]["persist"] = Tensor.zeros(0, cfg.dim)
  y = atlas.mac_mixer(p, cfg, tensor(x), None)[0]
  assert record("MAC against its definition", relative(y[0], MemoryAsContext(p, cfg)(x[0]))) < 1e-4

# *** stress ***
def resident_mb(): return int(Path("/proc/self/statm").read_text().split()[1]) // 256 if Path("/proc").exists() else 0

def check_stress(pieces):
  """pieces: place of the first token, logits and state of every call."""
  resident = math.inf
  for start, logits, state in pieces:
    if resident == math.inf and start >= 4096: resident = resident_mb()
    assert finite(logits), f"not finite within {start + logits.shape[1]} tokens"
  for name, z in state.items():
    if "M." in name: assert np.abs(z.numpy()).max() < 10, name
  assert resident_mb() < resident + 20, "memory grows with the stream"

def calls(m, tokens):
  """The tokens, T a call, as check_stress wants them.  If the state grows, a row is one call."""
  if atlas.growing(m.cfg):
    for row in tokens: yield 0, m.forward(Tensor(row[None]))[0].numpy(), {}
    return
  logits, state = m.first(tokens[:, :T])
  yield 0, logits, state
  for start in range(T, tokens.shape[1], T):
    logits, state = m.more(tokens[:, start:start + T], state)
    yield start, logits, state

@presets("linear_attention", "titans", "dla", "dot", "atlas", "transformer++", "swa", "titans_mac", rest=runs)
def test_long_hostile_streams_stay_finite(name):
  """8K tokens; few where the state grows, and with it the cost of a token."""
  m = model(name)
  check_stress(calls(m, experiments.hostile(256 if atlas.growing(m.cfg) else 8184, m.cfg.vocab)))

@slow
@cases("name", PRESETS)
def test_very_long_hostile_streams_stay_finite(name):
  """64K tokens; 4K where they cost their square."""
  m = Model(small(name, horizon=128))
  check_stress(calls(m, experiments.hostile(4096 if atlas.growing(m.cfg) else 65520, m.cfg.vocab)))

@slow
@cases("name", PRESETS)
def test_a_trained_model_stays_finite_and_recovers_from_a_hostile_stream(name, monkeypatch):
  """64K tokens (4K where they cost their square) of each hostile kind and of text, then another text. From its 1,024th
  token on the loss is that with nothing before it, to 5%. Full attention has no memory that could recover."""
  monkeypatch.setattr(evaluate, "PIECE", 256)            # a call of a few segments: each segment of MAC is compiled
  sizes = dict(dim=32, layers=1, heads=2) | windows(name, 64)
  trial = experiments.Trial(name, sizes, measure=functools.partial(experiments.recovery, tokens=65_536))
  [trained] = experiments.trained(trial, [(0.008, 0)])
  fresh, *after = trained["scores"]
  print(f"{name}: {max(after) / fresh - 1:+.1%} of {fresh:.2f} bits", file=sys.stderr)
  assert finite(after)
  if name != "transformer++": assert max(after) < 1.05 * fresh, (after, fresh)

# *** other devices: pytest -m devices ***
def one_step(backend):
  """Loss and gradients, not yet computed, of a small titans and a small atlas."""
  steps = []
  for name in ("titans", "atlas"):
    cfg = small(name, backend=backend)
    params = atlas.init(cfg, seed=1)
    # From a fresh, small M_0 Newton-Schulz amplifies rounding until two forms on one CPU differ by 2.7e-4.
    M = params["layers"]["0"]["memory"]
    M["W2"] = (M["W2"] / atlas.INIT.first).realize()
    tokens, targets = random_tokens(2, 16), random_tokens(2, 16, seed=1)
    loss = atlas.loss(params, cfg, Tensor(tokens), Tensor(targets))
    steps.append([loss, *loss.gradient(*get_state_dict(params).values())])
  return steps

def numbers(steps): return [x.contiguous().numpy().ravel() for step in steps for x in step]
ON_OPENCL = """import sys; sys.path.insert(0, sys.argv[1])
import numpy, test_atlas
numpy.savez(sys.argv[2], *test_atlas.numbers(test_atlas.one_step('auto')))"""
@devices
def test_a_training_step_on_opencl_is_that_on_the_cpu(tmp_path):
  command = [sys.executable, "-c", ON_OPENCL, str(Path(__file__).parent), str(tmp_path / "cl.npz")]
  done = subprocess.run(command, env=os.environ | {"DEV": "CL"}, capture_output=True, text=True)
  if "no usable devices" in done.stderr or "library opencl" in done.stderr: pytest.skip("no OpenCL here")
  assert done.returncode == 0, done.stderr[-2000:]
  on_opencl = list(np.load(tmp_path / "cl.npz").values())
  for x, expected in zip(on_opencl, numbers(one_step("ops")), strict=True):
    assert record("OpenCL against CPU", relative(x, expected)) < 1e-4

def kernels_of_a_step(monkeypatch):
  """The graphs of all kernels of a training step in both forms, before they are compiled."""
  graphs = []
  with monkeypatch.context() as patch:
    from_kernels = recorded(patch)
    for step in [*one_step("ops"), *one_step("fused")]:
      linear = step[0].schedule_linear(*step[1:])
      graphs += [u.src[0] for u in linear.toposort() if u.op is Ops.CALL and u.src[0].op is Ops.SINK]
  graphs += [graph for graph, _ in from_kernels]
  return list({graph.key: graph for graph in graphs}.values())

FUSED_ON_OPENCL = """import sys; sys.path.insert(0, sys.argv[1])
import numpy, test_atlas
numpy.savez(sys.argv[2], *test_atlas.memory_of_many_heads())"""
def memory_of_many_heads():
  """Output and gradients of the memory in one kernel, for 16 heads that work side by side, ten times."""
  cfg = from_case("mlp-identity-l2-momentum-2-3", backend="fused", heads=8)
  W, x = problem(cfg, B=2, H=8, T=90)
  inputs = [z.realize() for z in (tensors(W) | tensors(x)).values()]
  results = []
  for _ in range(10):
    y = kernels.memory(cfg, dict(zip(W, inputs)), *inputs[len(W):])[0]
    results += [z.numpy() for z in (y, *y.square().sum().gradient(*inputs))]
  return results

@devices
def test_work_groups_of_one_kernel_do_not_share_scratch_memory(tmp_path):
  command = [sys.executable, "-c", FUSED_ON_OPENCL, str(Path(__file__).parent), str(tmp_path / "cl.npz")]
  done = subprocess.run(command, env=os.environ | {"DEV": "CL"}, capture_output=True, text=True)
  if "no usable devices" in done.stderr or "library opencl" in done.stderr: pytest.skip("no OpenCL here")
  assert done.returncode == 0, done.stderr[-2000:]
  on_opencl = list(np.load(tmp_path / "cl.npz").values())
  for z, expected in zip(on_opencl, memory_of_many_heads(), strict=True):
    assert record("one kernel on OpenCL against CPU", relative(z, expected)) < 1e-6

@devices
def test_every_kernel_of_a_training_step_renders_for_gpus(tmp_path, monkeypatch):
  from tinygrad.device import Compiler
  from tinygrad.helpers import Target
  from tinygrad.renderer.cstyle import CUDARenderer, MetalRenderer
  from tinygrad.renderer.wgsl import WGSLRenderer
  class Metal(MetalRenderer):
    def __init__(self): self.target, self.compiler = Target("METAL"), Compiler()       # without Apple's compiler
  graphs = kernels_of_a_step(monkeypatch)
  assert len(graphs) > 60 and {"memory", "memory_backward"} <= {g.arg.name for g in graphs}
  cuda, metal, web = CUDARenderer(Target("CUDA", arch="sm_80"), use_nvcc=True), Metal(), WGSLRenderer(Target("WEBGPU"))
  for renderer in (cuda, metal, web): renderer.compiler = Compiler()
  codes = {r: [source(codegen.do_to_program(graph, r)) for graph in graphs] for r in (cuda, metal, web)}
  assert all(len(code) > 50 for r in codes for code in codes[r])
  if not (nvcc := shutil.which("nvcc")): pytest.skip("rendered; no nvcc here to compile the CUDA sources")
  for n, code in enumerate(codes[cuda]): (tmp_path / f"{n}.cu").write_text(code)
  output([nvcc, "-arch=sm_80", "-cubin", *tmp_path.glob("*.cu")], cwd=tmp_path)

# *** training ***
class Trained(NamedTuple):
  losses: np.ndarray                     # of every step
  moments: dict[str, np.ndarray]         # the optimizer's first moments by parameter, after the first step
  weights: dict[str, np.ndarray]         # after the last step

def first_moments(optimizer, params):
  names = {id(p): n for n, p in params.items()}
  moments: dict[str, np.ndarray] = {}
  state = train.optimizer_state(optimizer)
  for g, group in enumerate(optimizer.optimizers):
    m = state[f"adam.{g}.m"].numpy()
    for p, start in zip(group.params, group.pos_params):
      moments[names[id(p)]] = m[start:start + p.numel()]
  return moments

def trained(name, batches, lr=0.02, accum=1, devices=1, **fields):
  """A small model after one step on each of the batches (tokens, targets)."""
  cfg, run = small(name, vocab=8, **fields), train.Run(devices=devices)
  tree = atlas.init(cfg)
  params = get_state_dict(tree)
  for p in params.values(): p.replace(train.shared(run, p))
  optimizer = train.optimizer_for(params, 0.0)
  train.set_rate(optimizer, lr)
  step = train.training_step(tree, cfg, optimizer, 1.0, accum)
  losses: list[float] = []
  with Context(TRAINING=1):
    for batch in batches:
      losses.append(step(*[train.shared(run, Tensor(z), 0) for z in batch])[0].item())
      if len(losses) == 1: moments = first_moments(optimizer, params)
  return Trained(np.array(losses), moments, {n: p.numpy() for n, p in params.items()})

def noise(steps):
  tokens = rng(5).integers(0, 8, (steps, 8, 17)).astype(np.int32)
  return [(np.ascontiguousarray(t[:, :-1]), np.ascontiguousarray(t[:, 1:])) for t in tokens]

def all_learn(result): return all(np.abs(m).max() > 0 for m in result.moments.values())

@presets("linear_attention", "dot", "atlas", "swa", rest=runs)
def test_noise_is_not_predicted_and_every_parameter_learns(name):
  """On fresh uniform tokens no model gets below ln(V): where one does, it sees its targets."""
  result = trained(name, noise(120), **windows(name, 8))
  last = result.losses[-50:]
  assert last.mean() > math.log(8) - 4 * last.std() / 50 ** 0.5
  assert last.mean() < math.log(8) + 0.2 # and it has learned that there is nothing to predict
  assert all_learn(result)

@pytest.mark.xdist_group("atlas")
def test_one_batch_is_learned_by_heart():
  losses = trained("atlas", noise(1) * 150).losses
  assert losses[-1] < 0.5 < losses[0]

def agree(claim, result, expected, bound=1e-5):
  """Losses, first moments by parameter, and all weights."""
  def parts(r):
    weights = np.concatenate([w.ravel() for w in r.weights.values()])
    return [r.losses, *r.moments.values(), weights]
  for x, e in zip(parts(result), parts(expected), strict=True):
    assert record(claim, relative(x, e)) < bound

def test_a_batch_taken_in_parts_gives_the_same_steps_however_many_targets_each_has():
  """Two batches as of text, and three as of a task; there the first row has no targets."""
  text, task = noise(5)[:2], noise(5)[2:]
  asked = rng(1).random((3, 8, 16)) < np.linspace(0, 0.7, 8)[:, None]
  batches = text + [(x, np.where(mask, y, -100)) for (x, y), mask in zip(task, asked)]
  agree("in parts against at once", trained("deltanet", batches, accum=4), trained("deltanet", batches))

@slow
@cases("name", PRESETS)
def test_several_devices_take_the_same_steps_as_one(name):
  def on(n): return trained(name, noise(2), devices=n, accum=n, backend="ops", **windows(name, 8))
  agree("two devices against one", on(2), on(1), 1e-3 if small(name).optimizer == "muon" else 1e-4)

@pytest.mark.xdist_group("linear_attention")
@cases("name", ["linear_attention", *marked(runs, "titans")])
def test_dense_products_in_bfloat16_train_like_float32_and_every_parameter_learns(name):
  full, half = [trained(name, noise(12), dtype=dtype) for dtype in ("float32", "bfloat16")]
  assert 0 < np.abs(half.losses / full.losses - 1).max() < 0.02
  assert all_learn(half) and all(w.dtype == np.float32 for w in half.weights.values())
  cfg = small(name, vocab=8, dtype="bfloat16")
  logits, state = atlas.forward(atlas.init(cfg), cfg, Tensor(noise(1)[0][0]))
  assert types(logits) == {dtypes.float} and types(*state.values()) == {dtypes.float, dtypes.int}
