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
from rule import FEATURES, LOSSES, Memory, chunk_step, named, over_chunks
from rule import STEPS as DIRECTIONS
from tinygrad import Context, Device, Tensor, TinyJit, UOp, dtypes
from tinygrad.codegen.late.linearizer import CFGContext
from tinygrad.nn.state import get_state_dict
from tinygrad.uop.ops import Ops

gc.set_threshold(100_000, 20, 100)       # Graphs are many objects that live long: searching them often costs time.
slow, runs, devices = pytest.mark.slow, pytest.mark.runs, pytest.mark.devices
cases, rng = pytest.mark.parametrize, np.random.default_rng
def marked(mark, *values): return [pytest.param(value, marks=mark) for value in values]
worst: dict[str, float] = {}

def output(command, **fields):
  done = subprocess.run(command, text=True, capture_output=True, **fields)
  assert done.returncode == 0, done.stderr[-2000:]
  return done.stdout

def array(x): return (x.float().numpy() if isinstance(x, Tensor) else np.asarray(x)).astype(np.float64)
def relative(x, y): return float(np.linalg.norm(array(x) - array(y)) / np.linalg.norm(array(y)))
def finite(*results): return all(np.isfinite(array(x)).all() for x in results)
def types(*results): return {z.dtype for z in results}
def source(program): return next(u.arg for u in program.src if u.op is Ops.SOURCE)

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
  return W, dict(zip(INPUTS, (q, k, v, alpha, theta, eta, r.uniform(size=(B, H, T, cfg.window)))))

def by_oracle(cfg, W, x, toward=None):
  """The oracle for every head and row: y (B,H,T,value_dim)."""
  def of_head(W, h):
    weights = {n: w if n == "a" else w[h] for n, w in W.items()}
    if cfg.features == "exp":
      first = "W" if cfg.memory == "linear" else "W2"
      weights[first] = Expansion(weights.pop("anchor_k"), weights.pop("anchor_u"))
    return weights
  B, H = x["q"].shape[:2]
  heads = [oracle(cfg, of_head(W, h), *[x[n][b, h] for n in INPUTS], toward=toward and of_head(toward, h))
           for b, h in np.ndindex(B, H)]
  return np.reshape(heads, (B, H, *heads[0].shape))

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
FORMS = ["ops", "fused"]
AXES = ("linear", "mlp", "gated"), ("identity", "poly"), ("l2", "dot"), STEPS, ("1", "3", "5"), ("1", "4", "16"), FORMS
CASES = ["-".join(choices) for choices in itertools.product(*AXES)]
CASES = [case for case in CASES if not re.search("muon_every-.-1-", case)]             # 2 does not divide 1
def from_case(case, **fields):
  """The rule of "memory-features-loss-step-window-chunk", and of the form that may follow."""
  memory, features, loss, step, window, chunk, *form = case.split("-")
  fields |= dict(memory=memory, features=features, loss=loss, window=int(window), chunk=int(chunk))
  return rule(**fields | STEPS[step] | dict(zip(["backend"], form)))

def forms(case):
  """The rule in each form that has it, or in the one that the case names."""
  if case.endswith(tuple(FORMS)): return [from_case(case)]
  return [from_case(case, backend=form) for form in FORMS if form == "ops" or "-exp-" not in case]

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
  """With the weights in another order than theirs.
  Newton-Schulz amplifies the rounding of small singular values, up to 3.4445^5 = 480 times."""
  cfg = from_case(case)
  W, x = problem(cfg, **sizes)
  kind, expected = "Muon" if cfg.window > 1 else "Muon of low rank", by_oracle(cfg, W, x)
  if cfg.optimizer == "gd": kind, bound = "gradient steps", 1e-5
  for form in forms(case):
    y = read(form, dict(reversed(W.items())), x)
    assert record(f"memory against the oracle, {kind}", relative(y, expected)) < bound, form.backend

SIZES: list[tuple[str, dict]] = [         # expansions with and without anchors; lengths and sizes that divide nothing
  ("linear-exp-l2-gd-1-4", {}), ("linear-exp-l2-momentum-3-16", dict(anchors=0, dv=2)),
  ("mlp-exp-dot-momentum-3-1", dict(anchors=1, T=5, dv=2)), ("mlp-exp-dot-gd-1-16", dict(B=2, T=18)),
  ("mlp-exp-l2-momentum-3-4", dict(B=2, T=1)), ("mlp-poly-l2-momentum-3-4-fused", dict(B=2, T=1)),
  ("mlp-poly-l2-momentum-3-4-ops", dict(B=2, T=4, dv=4)), ("mlp-poly-l2-momentum-3-4-fused", dict(B=2, T=9, dv=2))]

def test_covering_set_is_small(): assert len(PAIRWISE) <= 24

@cases("case,sizes", [*[(case, {}) for case in PAIRWISE], *SIZES])
def test_memory_is_the_definition_at_any_length_and_value_size(case, sizes): check_case(case, **sizes)

@slow
@cases("case", CASES)
def test_memory_is_the_definition_in_every_combination(case):
  """With a window of 1 the momentum has a low rank: there the bound is that of Newton-Schulz on such matrices."""
  cfg = from_case(case)
  check_case(case, 1e-4 if cfg.window > 1 else 1e-3, B=2, T=11, dv=4 if cfg.loss == "l2" else 3)

def test_slow_forgetting_is_not_rounded_away_token_by_token():
  """M = R + a small difference: 500 tokens of alpha = 1 - 2^-20 without a write, each of which float32 rounds."""
  cfg = rule(memory="linear", chunk=1, momentum=False)
  W, x = problem(cfg, H=1, T=1)
  R, alpha = np.ones_like(W["W"]), np.full_like(x["alpha"], 1 - 2.0 ** -20)
  inputs = tensors(x | {"alpha": alpha, "eta": 0 * alpha})
  memory: Any = functools.partial(kernels.memory, cfg, {"W": tensor(1.01 * R)}, **inputs, toward={"W": tensor(R)})
  (_, state), step = memory(), TinyJit(memory)
  for _ in range(499): _, state = step(state=state)
  difference = array(state["M.W"]) - 1 + array(state["low.W"])
  assert relative(difference, 0.01 * alpha ** 500 * R) < 1e-4 < relative(difference, 0.01 * R)

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

def in_pieces(cfg, weights, x, sizes, toward):
  """y of calls of so many tokens each."""
  state, ys, start = None, [], 0
  for size in sizes:
    y, state = kernels.memory(cfg, weights, **part_of(x, start, start + size), state=state, toward=toward)
    ys.append(y)
    start += size
  return Tensor.cat(*ys, dim=2)

def check_gradients(case, sizes):
  """Values and gradients of calls of so many tokens each. Forgetting leads to a second memory, whose gradients are
  checked as well."""
  cfg, small = from_case(case), dict(H=1, T=7, d=2, dv=2, hidden=3)
  W, x = problem(cfg, **small)
  R = destination(cfg, W, **small)
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
    y = in_pieces(form, weights, variables, sizes, toward)
    variables |= weights | {f"toward {n}": z for n, z in toward.items()}
    gradients = (y * tensor(cotangent)).sum().gradient(*[variables[n] for n in expected])
    Tensor.realize(y, *gradients)
    error = record("memory against the oracle, forgetting towards M_0", relative(y, by_oracle(cfg, W, x, R)))
    assert error < (1e-5 if cfg.optimizer == "gd" else bound / 10)
    for (name, derivative), g in zip(expected.items(), gradients):
      assert np.linalg.norm(derivative) > 0, name
      error = record(f"gradients against the oracle, {kind}", relative(g, derivative))
      assert error < bound, (name, form.backend)

@cases("case", ["mlp-poly-l2-muon-3-4-fused", "gated-identity-l2-momentum-2-3-fused", "linear-identity-dot-gd-5-2",
                "linear-identity-l2-muon_every-3-4", "mlp-exp-dot-momentum-3-4", "linear-exp-l2-gd-2-3",
                *marked(slow, *PAIRWISE)])
def test_gradients_are_the_finite_differences_of_the_oracle(case): check_gradients(case, [7])

@cases("case", ["linear-identity-l2-momentum-3-4", *marked(slow, "mlp-poly-l2-muon_every-3-4"),
                *marked(runs, "gated-poly-l2-momentum-3-4", "mlp-exp-l2-momentum-3-4")])
def test_gradients_flow_through_the_state_of_an_earlier_call(case):
  """The second call starts inside a chunk: through base, M, S and the window's tail."""
  check_gradients(case, [5, 2])

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
def test_without_a_step_only_forgetting_is_left(step):
  cfg = from_case(f"linear-identity-l2-{step}-1-4")
  W, x = problem(cfg)
  forgetting = np.cumprod(x["alpha"], -1)[..., None] * np.einsum("hoi,bhti->bhto", W["W"], x["q"])
  assert relative(read(cfg, W, x, eta=0 * x["eta"]), forgetting) < 1e-5

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
@cases("shape", [(8, 8), (8, 9), (8, 20), (20, 8)])
def test_newton_schulz_flattens_singular_values_equals_float64_and_is_finite_everywhere(shape):
  """Nearly square matrices are iterated themselves, for others it is their Gram matrix."""
  r, rank = rng(0), np.arange(min(shape))
  U, _, V = np.linalg.svd(r.normal(size=(3, *shape)), full_matrices=False)
  well, poor = [U * scale @ V for scale in (np.linspace(0.3, 1, len(rank)), rank < 3)]
  def flattened(S): return kernels.newton_schulz(tensor(S), 5).numpy()
  def error(S): return relative(flattened(S), np.stack([muon(s, 5) for s in S]))
  assert (np.abs(np.linalg.svd(flattened(well), compute_uv=False) - 1) < 0.35).all()
  assert record("Newton-Schulz, well-conditioned", error(well)) < 1e-5
  assert record("Newton-Schulz, rank-deficient", error(poor)) < 1e-3
  x = tensor(np.stack([0 * well[0], 1e-12 * well[0], (U * (rank < 1) @ V)[0]]))          # zero, tiny, of rank one
  y = kernels.newton_schulz(x, 5)
  g, = (y * tensor(well)).sum().gradient(x)
  assert finite(y, g) and not y.numpy()[0].any()

# *** kernels ***
@cases("G,R,K,C", [(1, 5, 7, 3), (2, 8, 12, 16), (3, 1, 16, 20), (1, 6, 33, 29), (1, 24, 520, 48)])
@cases("xt", [False, True])
@cases("yt", [False, True])
def test_matmul_is_the_product_and_so_are_its_gradients(G, R, K, C, xt, yt):
  def turn(z, yes): return z.swapaxes(1, 2) if yes else z
  X, Y = rng(0).normal(size=(G, R, K)), rng(1).normal(size=(G, K, C))
  x, y = tensor(turn(X, xt)), tensor(turn(Y, yt))
  product, slope = kernels.matmul(x, y, xt, yt), np.cos(X @ Y)
  expected = [X @ Y, turn(slope @ turn(Y, True), xt), turn(turn(X, True) @ slope, yt)]
  assert all(relative(z, e) < 1e-5 for z, e in zip([product, *product.sin().sum().gradient(x, y)], expected))

@cases("optimizer,low,high", [("gd", 0, 1 / 4), ("muon", 1, math.inf)])
def test_without_muon_nothing_of_size_tokens_by_weights_exists(optimizer, low, high):
  """The largest intermediate of a read of 256 tokens by one head of 16 with a hidden size of 64."""
  T, d, hidden = 256, 16, 64
  cfg = rule(memory="mlp", window=3, chunk=64, key_dim=d, value_dim=d, backend="ops", optimizer=optimizer)
  W, x = problem(cfg, B=1, H=1, T=T, d=d, dv=d, hidden=hidden)
  y, _ = kernels.memory(cfg, tensors(W), **tensors(x))
  stored = [u for u in y.uop.toposort(enter_calls=True) if u.op.name in ("CONTIGUOUS", "GETTUPLE", "STACK")]
  assert low <= max(u.max_numel() for u in stored) / (T * d * hidden) < high

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
def new_row(monkeypatch, choice, name, like, **changed):
  """A row of rule's tables like another one, and the choice of it; an edited table is read when atlas is imported."""
  table: Any = {"loss": LOSSES, "optimizer": DIRECTIONS, "features": FEATURES}[choice]
  monkeypatch.setitem(table, name, table[like]._replace(**changed))
  monkeypatch.setitem(atlas.CHOICES, choice, tuple(table))

def checked(**fields):
  cfg = rule(memory="linear", chunk=4, window=2, **fields)
  W, x = problem(cfg, B=2, T=4)
  return cfg, tensors(W), tensors(x)

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

def test_matmul_broadcasts_leading_axes_as_numpy_does_or_says_that_it_cannot():
  for a, b in (((4, 5), (2, 5, 8)), ((2, 1, 4, 5), (3, 5, 8)), ((2, 4, 5), (5, 8))):
    x, y = rng(0).normal(size=a), rng(1).normal(size=b)
    assert relative(kernels.matmul(tensor(x), tensor(y)), x @ y) < 1e-6
  assert types(kernels.matmul(tensor(x).half(), tensor(y))) == {dtypes.float}
  wrong: tuple = ((3, 4, 5), (2, 5, 8), "do not broadcast"), ((4, 5), (4, 8), "do not meet"), ((5,), (5, 8), "two axes")
  for a, b, message in wrong:
    with pytest.raises(ValueError, match=message): kernels.matmul(Tensor.zeros(*a), Tensor.zeros(*b))

def test_an_operation_that_a_kernel_does_not_have_is_refused():
  scratch, vectors = UOp.placeholder((64,), dtypes.float, 0), kernels.vectors(Device.DEFAULT)
  m: Any = kernels.Kernel(scratch, None, True, vectors).new((2, 3))
  for call in (lambda: m.sum(-1), lambda: m.transpose(0, 0), lambda: m ** 0.5, lambda: m.cat(m, dim=0), lambda: m @ m,
               lambda: m + m.transpose(), lambda: m.eye(2, dtype=dtypes.half), lambda: m.flatten()):
    with pytest.raises((NotImplementedError, ValueError, AttributeError)): call()
  assert m.sum(-1, keepdim=True).shape == (2, 1) and m.sum((-1, -2), keepdim=True).shape == (1, 1)

def recorded(monkeypatch):
  """The graph and the program of every kernel that kernels.py compiles from now on; those it has are forgotten."""
  result, compiled = [], kernels.compiled
  def recording(args, size, sink, device):
    kernel = compiled(args, size, sink, device)
    result.append((sink, kernel.program))
    return kernel
  monkeypatch.setattr(kernels, "compiled", recording)
  for cached in (kernels.memory_kernel, kernels.matmul_kernel): cached.cache_clear()
  return result

@cases("step", ["momentum", "muon"])
def test_loops_of_a_kernel_have_tinygrads_order(step, monkeypatch):
  """Those of a memory kernel and of its backward kernel; with the order, the code is the same."""
  edges = []
  class Compared(kernels.LoopOrder):
    def __init__(self, sink):
      super().__init__(sink)
      edges.append((self.edges, CFGContext(sink).edges))
  monkeypatch.setattr(kernels, "LoopOrder", Compared)
  recorded(monkeypatch)
  cfg = from_case(f"linear-identity-l2-{step}-2-2", backend="fused")
  W, x = map(tensors, problem(cfg, T=4))
  kernels.memory(cfg, W, **x)[0].sum().gradient(x["k"])
  assert len(edges) == 2 and all(len(expected) > 4 and order == expected for order, expected in edges)

@cases("name,direction", {"side": lambda S, cfg: S * max(S.shape[-2:]) ** 0.5,
                          "mean": lambda S, cfg: S * S.square().mean((-1, -2), True)}.items())
def test_a_step_that_asks_how_large_its_momentum_is_is_the_same_in_both_forms(name, direction, monkeypatch):
  new_row(monkeypatch, "optimizer", name, "gd", direction=direction, linear=False)
  stock, fused = [rule(memory="mlp", features="poly", optimizer=name, backend=form) for form in FORMS]
  W, x = problem(stock)
  assert relative(read(fused, W, x), read(stock, W, x)) < 1e-4

# *** all cores of a CPU ***
@pytest.fixture
def cores(monkeypatch):
  """A function that sets how many cores kernels use, and how long a kernel must take before it is handed to threads."""
  def setting(number, hand_over=0.0):
    monkeypatch.setattr(kernels, "HAND_OVER", hand_over)
    monkeypatch.setattr(kernels.NUM_CPU_THREADS, "value", number)
  return setting

def test_results_are_the_same_to_the_bit_for_every_number_of_cores(cores):
  """Six heads and rows of 36: 2 and 3 cores share them, and 5 cores divide neither.  Outputs and all gradients, with
  the oracle beside; each pass three times, since parts run side by side from the third call of a kernel on, or one
  after another if the kernel is too short to be handed over."""
  cfg = from_case("linear-identity-l2-muon-3-4-fused", heads=6)
  W, x = problem(cfg, B=1, H=6, T=9)
  factors = rng(0).normal(size=(36, 40)).astype(np.float32), rng(1).normal(size=(40, 24)).astype(np.float32)
  def results(*setting):
    cores(*setting)
    inputs, (left, right) = [z.realize() for z in (tensors(W) | tensors(x)).values()], map(Tensor, factors)
    for _ in range(3):
      y = kernels.memory(cfg, dict(zip(W, inputs)), *inputs[len(W):])[0]
      values = [y, *y.square().sum().gradient(*inputs), kernels.matmul(left, right)]
      Tensor.realize(*values)
    return [z.numpy() for z in values]
  one = results(1)
  assert record("one core against the oracle", relative(one[0], by_oracle(cfg, W, x))) < 1e-4
  for setting in ([2], [2, math.inf], [3], [5]): assert all(map(np.array_equal, results(*setting), one))

class Program:
  """A program as kernels.parallel_call takes it: two buffers, one of them scratch memory, and the number of a part."""
  runtimevars, lvp = {"core_id": 2}, False
  signature = ("values", 0, dtypes.float, (12,)), (None, 1, dtypes.float, (5,)), ("core_id", 2, dtypes.int, ())
  def __init__(self, fxn): self.seconds, self.fxn = [1.0, 1.0], fxn
class Buffer: va_addr = 1000

def test_parts_of_a_kernel_run_in_threads_with_scratch_of_their_own(cores):
  """This fails if a later tinygrad calls its CPU programs in another way."""
  seen = []
  def fxn(*numbers): seen.append((threading.get_ident(), *[n.value for n in numbers]))
  cores(3)
  kernels.parallel_call(Program(fxn), Buffer, Buffer, global_size=(3, 1, 1), vals=(None,))
  assert sorted(numbers for _, *numbers in seen) == [[1000, 1000, 0], [1016, 1000, 1], [1032, 1000, 2]]
  assert vars(kernels.CPUProgram)["__call__"] is kernels.parallel_call and len({thread for thread, *_ in seen}) > 1
  kernel = kernels.matmul_kernel(4, 8, 8, 8, False, False, 2, "CPU")
  assert kernel.program.arg.global_size[0] == 2 and [v.expr for v in kernel.program.arg.vars] == ["core_id"]
  names = list(inspect.signature(kernels.serial_call).parameters)
  assert names == ["self", "bufs", "global_size", "local_size", "vals", "wait", "timeout"]

def test_ctrl_c_waits_for_the_parts_that_run(cores):
  """Their buffers would be freed under them."""
  done = []
  def fxn(first, second, part):
    if part.value == 0: raise KeyboardInterrupt
    time.sleep(0.2)
    done.append(part.value)
  cores(2)
  with pytest.raises(KeyboardInterrupt):
    kernels.parallel_call(Program(fxn), Buffer, Buffer, global_size=(2, 1, 1), vals=(None,))
  assert done == [1]

@pytest.mark.skipif(Device.DEFAULT != "CPU", reason="clang is the CPU device's compiler")
def test_an_old_compiler_gets_long_loop_counters_and_the_same_results(monkeypatch):
  """clang 14 and 15 take minutes for those of 32 bits."""
  x, y = [tensor(rng(seed).normal(size=(3, 16, 24))) for seed in range(2)]
  expected, vectors = kernels.matmul(x, y, yt=True).numpy(), kernels.vectors("CPU")
  monkeypatch.setattr(kernels, "vectors", lambda device: vectors._replace(long_counters=True))
  compiled = recorded(monkeypatch)
  assert np.array_equal(kernels.matmul(x, y, yt=True).numpy(), expected)
  (_, program), = compiled
  assert re.search("for .long Lidx", source(program)) and not re.search(r"\bint (Lidx|alu)", source(program))
  kernels.matmul_kernel.cache_clear()

@cases("lanes,registers,shape,expected", [
  (16, 32, (64, 256), (4, 64)), (8, 32, (64, 256), (4, 32)), (8, 16, (64, 256), (2, 32)),
  (8, 16, (96, 24), (4, 24)), (4, 32, (64, 256), (4, 16)), (4, 16, (7, 9), (1, 9))])
def test_the_sums_of_a_tile_stay_in_registers(lanes, registers, shape, expected):
  """AVX-512, AVX-512 with half its vectors, AVX2, NEON and SSE."""
  rows, columns = kernels.tile_shape(*shape, kernels.Vectors(lanes, registers))
  assert (rows, columns) == expected and shape[0] % rows == shape[1] % columns == 0
  assert (rows + 1) * math.ceil(columns / lanes) < registers

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
t.check_gradients(CASE, [7])
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
SMALL = dict(vocab=16, dim=16, layers=1, heads=2, key_dim=4, value_dim=4, mlp_ratio=1.0, chunk=8, muon_every=2,
             horizon=11)
PRESETS = list(atlas.PRESETS)
VARIANTS = ["transformer++ conv=4", "swa conv=4", "dot memory=linear anchors=0", "titans layers=2",
            *[f"dot mixer={mixer} persist=2 attn_window=12" for mixer in ("mag", "mal", "mac")],
            *[f"{x} @CPU:1" for x in ("linear_attention", "transformer++", "swa", "titans_mac", "atlas_mag", "dot")]]
COVERED = "gated_deltanet", "deep_transformer", "swdt", "omeganet", "atlas_mac"         # by presets of the suite
SUITE = [name for name in PRESETS if name not in COVERED] + VARIANTS[:3]
T = 24                                   # tokens of a call: whole chunks of 8, and whole segments of 12
def presets(*names, rest:Any=None, variants=()):
  """A test of these models; of the other presets with the mark `rest`, where it is given; of the other variants, which
  are slow.  One process has all tests of a preset."""
  def parameter(name):
    marks = [pytest.mark.xdist_group(name.split()[0])]
    if name not in names: marks.append(rest if name in PRESETS else slow)
    return pytest.param(name, marks=marks)
  return cases("name", [parameter(name) for name in dict.fromkeys([*names, *(PRESETS if rest else []), *variants])])

def windows(name, w): return {"attn_window": w} if "attn_window" in atlas.PRESETS[name.split()[0]] else {}

def small(name, **fields):
  """A preset, or one with settings, as in "titans layers=2"."""
  name, *settings = name.split()
  of_name = {key: int(x) if x.isdigit() else x for key, x in (setting.split("=") for setting in settings)}
  return atlas.preset(name, **SMALL | windows(name, 12) | of_name | fields)    # 8 does not divide windows and segments

def random_tokens(rows, columns, seed=0): return rng(seed).integers(0, 16, (rows, columns)).astype(np.int32)

class Model:
  """A small model, and tokens (4,2T). `first` reads T tokens, `more` as many after a state (jitted unless it grows),
  `step` one, each compiled once; `anywhere` is for the rest. `eager` and `state`: after the first T tokens."""
  def __init__(self, cfg, device=Device.DEFAULT):
    self.cfg, self.device, self.tokens = cfg, device, random_tokens(4, 2 * T)
    on_device = {n: p.to(device).realize() for n, p in get_state_dict(atlas.init(cfg, seed=1)).items()}
    self.params = atlas.unflatten(on_device)
    self.jit_first, self.jit_more, self.jit_step = [TinyJit(self.forward) for _ in range(3)]
    self.eager, self.state = self.first(self.tokens[:, :T])
  @functools.cached_property
  def jitted(self):
    """`eager` once more, while a jit captures the call and by its replay."""
    return [self.first(self.tokens[:, :T])[0] for _ in range(2)]
  def forward(self, tokens, *state): return atlas.forward(self.params, self.cfg, tokens, *state)
  def call(self, forward, tokens, *state):
    logits, after = forward(Tensor(np.ascontiguousarray(tokens), device=self.device), *state)
    Tensor.realize(logits, *after.values())
    assert {z.device for z in (logits, *after.values())} == {self.device}
    return logits.numpy(), after
  def anywhere(self, tokens, *state): return self.call(self.forward, tokens, *state)
  def first(self, tokens): return self.call(self.jit_first, tokens)
  def step(self, token, state): return self.call(self.jit_step, token, state)
  def more(self, tokens, state):
    return self.call(self.forward if atlas.growing(self.cfg) else self.jit_more, tokens, state)

@functools.cache
def model(name):
  """That of a preset or a variant; a device may follow, after @."""
  settings, _, device = name.partition(" @")
  return Model(small(settings), device or Device.DEFAULT)

@presets(*SUITE, rest=runs, variants=VARIANTS)
def test_jit_equals_eager_and_no_output_leaks_inside_a_chunk_nor_between_rows(name):
  m, (captured, y) = model(name), model(name).jitted
  assert np.array_equal(captured, y) and record("jit against eager", relative(y, m.eager)) < 1e-6
  for t in (3, 7, 8, 13, T - 1):         # inside chunks, at their last and first token, at the end
    changed = m.tokens[:, :T].copy()
    changed[1, t] = (changed[1, t] + 1) % m.cfg.vocab
    z, _ = m.first(changed)
    assert np.array_equal(np.delete(z, 1, 0), np.delete(y, 1, 0)), "a row of the batch saw another"
    assert np.array_equal(z[1, :t], y[1, :t]), f"an output before token {t} saw it"
    assert (np.abs(z[1, t:] - y[1, t:]).max(-1) > 0).any()

@presets("linear_attention", "titans layers=2", "atlas", "transformer++", "swa", "titans_mac",
         "linear_attention @CPU:1", "transformer++ @CPU:1", "swa @CPU:1", rest=runs, variants=VARIANTS)
def test_a_stream_may_be_cut_anywhere_and_a_captured_call_that_starts_elsewhere_gives_nan(name):
  """After one token, inside a chunk, at a border also in a jitted call, and token by token, beyond the horizon, in a
  jitted step that was captured on the first state; the state keeps its size."""
  m = model(name)
  logits, state = m.anywhere(m.tokens[:, :1])
  if m.cfg.mixer in ("memory", "mac"):
    for _ in range(2): m.step(m.tokens[:, 1:2], state)       # the second call captures it
  inside, _ = m.anywhere(m.tokens[:, 1:T + 1], state)
  for _ in range(3): border, _ = m.more(m.tokens[:, T:], m.state)              # the third replays what was captured
  if m.cfg.mixer != "attention" and not atlas.growing(m.cfg):
    nan, after = m.more(m.tokens[:, T:], m.state | {"position": (m.state["position"] + 1).realize()})
    assert np.isnan(nan).all() and all(np.isnan(z.numpy()).all() for n, z in after.items() if ".M." in n)
  steps, shapes = [logits], []
  for t in range(1, 2 * T):
    logits, state = m.step(m.tokens[:, t:t + 1], state)
    steps.append(logits)
    shapes.append({n: z.shape for n, z in state.items()})
  stream = np.concatenate(steps, 1)
  kind, bound = ("Muon", 1e-3) if m.cfg.optimizer == "muon" else ("gradient steps", 1e-5)
  for result, expected in ((stream[:, :T], m.eager), (inside, stream[:, 1:T + 1]), (border, stream[:, T:]),
                           (m.eager, model(name.partition(" @")[0]).eager)):
    assert record(f"streamed against at once, {kind}", relative(result, expected)) < bound
  assert all(after == shapes[0] for after in shapes)
  assert int(state["position"].item()) == 2 * T

@presets("deltanet", rest=slow)
def test_a_sample_is_what_reading_the_context_anew_for_every_token_gives(name, capsys):
  """Two chunks and a token are read before. `speaker` generates bytes for many rows, `sample` also numbers, for one."""
  m, n = model(name), 17
  context = m.tokens[:, :T].copy()
  for t in range(n, T): context[:, t] = m.first(context)[0][:, t - 1].argmax(-1)
  answers = [bytes(row.tolist()).split(b"\n")[0].decode() for row in context[:, n:]]
  assert evaluate.speaker(m.params, m.cfg)(m.tokens[:, :n].astype(np.uint8), T - n) == answers and len(set(answers)) > 1
  evaluate.sample(m.params, m.cfg, m.tokens[3, :n].tolist(), False, tokens=T - n, temperature=0.0)
  assert capsys.readouterr().out.splitlines()[1] == ",".join(map(str, context[3]))

@presets("transformer++", "dot")
def test_a_full_cache_doubles_and_a_jit_past_its_end_says_so(name):
  m, tokens = model(name), random_tokens(4, 3 * T)
  _, state = m.first(tokens[:, :T])
  expected, longer = m.more(tokens[:, T:], state)
  assert atlas.room(m.cfg, state) == 64 and atlas.room(m.cfg, longer) == 256
  for t in range(T, 66):
    logits, state = m.step(tokens[:, t:t + 1], state)
    if t < 64: assert relative(logits[:, 0], expected[:, t - T]) < 1e-5
  assert np.isnan(logits).all() and not any(finite(z) for n, z in state.items() if n.endswith((".k", ".M.u")))
  several = TinyJit(m.forward)
  with pytest.raises(ValueError, match="cannot jit a call of several tokens"):
    for _ in range(2): m.call(several, tokens[:, :T], m.state)

@cases("name", ["linear_attention", "ttt", *marked(runs, "deltanet", "dot")])
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

@presets("linear_attention", "transformer++")
@cases("default", [{"DEFAULT_FLOAT": "HALF"}, *marked(runs, {"DEFAULT_FLOAT": "DOUBLE"}, {"DEFAULT_INT": "INT64"})])
def test_default_types_of_tinygrad_change_no_bit(name, default, monkeypatch):
  def results(m):
    second, state = m.anywhere(m.tokens[:, T:T + 1], m.state)
    loss = atlas.cross_entropy(tensor(m.eager), Tensor(m.tokens[:, 1:T + 1].copy()))
    return [m.eager, second, *[z.numpy() for z in (loss, *state.values())]]
  plain = results(model(name))
  recorded(monkeypatch)                  # nothing that was compiled before serves here
  with Context(SCACHE=0, **default): changed = results(Model(small(name)))
  assert all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(changed, plain, strict=True))

@cases("dtype", [dtypes.half, dtypes.double, dtypes.bfloat16], ids=str)
def test_parameters_of_another_precision_are_used_as_float32(dtype):
  cfg = small("transformer++", persist=2)
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
  new_row(monkeypatch, "loss", "sharp", "l2", bound=0.3)
  new_row(monkeypatch, "loss", "hebb", "dot", bound=0.7)
  new_row(monkeypatch, "optimizer", "sign", "muon", bound=0.05)
  new_row(monkeypatch, "features", "double", "poly")
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
  def after(position):
    place = {"position": Tensor(position, dtype=dtypes.int32)}
    return atlas.windowed(cfg, [tensor(z[:, :, :1]) for z in qkv], None, state | place)[0].numpy()
  assert np.array_equal(after(T), after(10_000_000))

def sigmoid(z): return 1 / (1 + np.exp(-z))
def unit(z): return z / np.sqrt(np.square(z).sum(-1, keepdims=True) + 1e-6)
def norm(z): return z / np.sqrt(np.square(z).mean(-1, keepdims=True) + 1e-6)

def memory_as_context(p, cfg, x):
  """atlas.mac_mixer by its definition, for one row x (T,dim), token by token in float64, without convolution."""
  p, H, c, scale = {n: array(z) for n, z in get_state_dict(p).items()}, cfg.heads, cfg.window, cfg.key_dim ** 0.5
  W = {"W1": p["memory.W1"], "W2": p["memory.W2"] * atlas.INIT.first}
  def projected(x, name, parts=1):
    """Queries, keys or values (H,n,.) of tokens x (n,dim), which have one size here."""
    return np.einsum("nc,ghdc->ghnd", x, p[name].reshape(parts, H, -1, cfg.dim))
  def inputs(y):
    """What the memory is given for tokens y (n,dim)."""
    q, k, v = projected(y, "qkv", 3)
    gates = sigmoid(p["gates"] @ y.T + p["gate_bias"][:, None])                          # (gates,n)
    eta, gamma, alpha, theta = np.split(gates, np.cumsum([H, H * c, H]))
    gamma = gamma.reshape(H, c, -1).swapaxes(1, 2) / c * (1 - theta)[..., None]
    v, k = v * sigmoid(v), unit(k)
    v = k + v / np.sqrt(1 + np.square(v).sum(-1, keepdims=True))
    gathered = unit(q), k, v, alpha, theta, eta * LOSSES["l2"].bound / cfg.chunk, gamma
    return {n: z[None] for n, z in zip(INPUTS, gathered)}
  def answer(y, q, name):
    """What the memory returns for queries, heads side by side: (H,n,.) -> (n,H*.)."""
    y = norm(y - q) * p[f"{name}_norm"] + scale * q * p[f"{name}_skip"]
    return y.swapaxes(0, 1).reshape(len(y[0]), -1)
  def context(x, stored):
    """h of a segment x: what the memory of the segment's start returns to tokens that write nothing."""
    z, start, queries = inputs(np.concatenate([stored, x])), len(stored), unit(projected(x, "attention.read_q")[0])
    z["q"][0, :, start:], z["alpha"][..., start:], z["eta"][..., start:] = queries, 1, 0
    return answer(by_oracle(cfg, W, z, W)[0, :, start:], queries, "attention.read") @ p["attention.read_out"].T
  def attention(x, h):
    """Token i of a segment attends to the persistent tokens, h_1..h_i and x_1..x_i."""
    (_, kp, vp), (_, kh, vh), (q, kx, vx) = [projected(z, "attention.qkv", 3) for z in (p["attention.persist"], h, x)]
    y = np.zeros(q.shape)
    for n, i in np.ndindex(y.shape[:2]):
      k = np.stack([turned(z[n, j], j) for z in (kh, kx) for j in range(i + 1)])
      scores = np.concatenate([kp[n] @ q[n, i], k @ turned(q[n, i], i)])
      y[n, i] = attended(scores / scale, np.concatenate([vp[n], vh[n, :i + 1], vx[n, :i + 1]]))
    return norm(y.swapaxes(0, 1).reshape(len(x), -1) @ p["attention.out"].T) * p["attention.norm"]
  stored = np.zeros((0, cfg.dim))
  for segment in np.split(x, range(cfg.attn_window, len(x), cfg.attn_window)):
    stored = np.concatenate([stored, attention(segment, context(segment, stored))])
  z = inputs(stored)
  gate = stored @ p["out_gate"].T + p["out_gate_bias"]
  return stored * ((answer(by_oracle(cfg, W, z, W)[0], z["q"][0], "out") * gate * sigmoid(gate)) @ p["out"].T)

@cases("persist", [2, 0])
def test_memory_as_context_is_its_definition(persist):
  cfg = small("titans_mac", conv=0, chunk=2, window=2, attn_window=3, persist=persist)
  p = atlas.init(cfg, seed=2)["layers"]["0"]
  x = rng(0).normal(size=(8, cfg.dim))
  if not persist: p["attention"]["persist"] = Tensor.zeros(0, cfg.dim)
  y = atlas.mac_mixer(p, cfg, tensor(x[None]), None)[0]
  assert record("MAC against its definition", relative(y[0], memory_as_context(p, cfg, x))) < 1e-4

# *** stress ***
def resident_mb(): return int(Path("/proc/self/statm").read_text().split()[1]) // 256 if Path("/proc").exists() else 0

def check_stress(pieces):
  """pieces: place of the first token, logits and state of every call."""
  resident: list[int] = []
  for start, logits, state in pieces:
    if start >= 4096: resident.append(resident_mb())
    assert finite(logits), f"not finite within {start + logits.shape[1]} tokens"
  assert all(np.abs(z.numpy()).max() < 10 for name, z in state.items() if "M." in name)
  assert not resident or resident[-1] < resident[0] + 20, "memory grows with the stream"

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

@presets("dla", "atlas", "transformer++", "swa", "titans_mac", rest=runs)
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
  assert finite(after)
  if name != "transformer++": assert record(f"{name} after a hostile stream", max(after) / fresh - 1) < 0.05

# *** training ***
class Trained(NamedTuple):
  losses: np.ndarray                     # of every step
  moments: dict[str, np.ndarray]         # the optimizer's first moments by parameter, after the first step
  weights: dict[str, np.ndarray]         # after the last step
  def all_learn(self): return all(m.any() for m in self.moments.values())

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
      if len(losses) == 1: state = {n: z.numpy() for n, z in train.optimizer_state(optimizer).items()}
  names, moments = {id(p): n for n, p in params.items()}, {}
  for g, group in enumerate(optimizer.optimizers):
    for p, start in zip(group.params, group.pos_params):
      moments[names[id(p)]] = state[f"adam.{g}.m"][start:start + p.numel()]
  return Trained(np.array(losses), moments, {n: p.numpy() for n, p in params.items()})

def noise(steps):
  tokens = rng(5).integers(0, 8, (steps, 8, 17)).astype(np.int32)
  return [(np.ascontiguousarray(t[:, :-1]), np.ascontiguousarray(t[:, 1:])) for t in tokens]

@presets("linear_attention", "atlas", "swa", rest=runs)
def test_noise_is_not_predicted_and_every_parameter_learns(name):
  """On fresh uniform tokens no model gets below ln(V): where one does, it sees its targets."""
  result = trained(name, noise(120), **windows(name, 8))
  last = result.losses[-50:]
  assert last.mean() > math.log(8) - 4 * last.std() / 50 ** 0.5
  assert last.mean() < math.log(8) + 0.2 # and it has learned that there is nothing to predict
  assert result.all_learn()

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

@pytest.mark.xdist_group("linear_attention")
def test_a_batch_taken_in_parts_gives_the_same_steps_however_many_targets_each_has():
  """Two batches as of text, and three as of a task; there the first row has no targets."""
  text, task = noise(5)[:2], noise(5)[2:]
  asked = rng(1).random((3, 8, 16)) < np.linspace(0, 0.7, 8)[:, None]
  batches = text + [(x, np.where(mask, y, -100)) for (x, y), mask in zip(task, asked)]
  in_parts, at_once = [trained("linear_attention", batches, accum=accum) for accum in (4, 1)]
  agree("in parts against at once", in_parts, at_once)

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
  assert half.all_learn() and all(w.dtype == np.float32 for w in half.weights.values())
  cfg = small(name, vocab=8, dtype="bfloat16")
  logits, state = atlas.forward(atlas.init(cfg), cfg, Tensor(noise(1)[0][0]))
  assert types(logits) == {dtypes.float} and types(*state.values()) == {dtypes.float, dtypes.int}

def test_a_step_sees_the_shape_of_its_matrices_in_every_form(monkeypatch):
  """Ten features, which the kernel of a CPU pads to 16."""
  direction = DIRECTIONS["muon"]._replace(direction=lambda S, cfg: S * (1 / S.shape[-1]), padded=False)
  monkeypatch.setitem(DIRECTIONS, "muon", direction)
  ops, fused = [from_case("mlp-poly-l2-muon-3-4", backend=backend, ns_steps=7) for backend in ("ops", "fused")]
  W, x = problem(ops)
  assert relative(read(fused, W, x), read(ops, W, x)) < 1e-6

# *** other devices: pytest -m devices ***
ON_DEVICE = """import sys; sys.path.insert(0, sys.argv[1])
import numpy, test_atlas
numpy.savez(sys.argv[2], *getattr(test_atlas, sys.argv[3])(*map(int, sys.argv[4:])))"""
def on_opencl(path, function, *numbers):
  """The arrays of a function here, computed by OpenCL.  Without optimizing PoCL compiles several times faster."""
  command = [sys.executable, "-c", ON_DEVICE, str(Path(__file__).parent), str(path / "cl.npz"), function]
  environment = os.environ | {"DEV": "CL", "POCL_EXTRA_BUILD_FLAGS": "-cl-opt-disable"}
  done = subprocess.run([*command, *map(str, numbers)], env=environment, capture_output=True, text=True)
  if "no usable devices" in done.stderr or "library opencl" in done.stderr: pytest.skip("no OpenCL here")
  assert done.returncode == 0, done.stderr[-2000:]
  return list(np.load(path / "cl.npz").values())

def one_step():
  """Loss and gradients of a small titans and a small atlas."""
  results = []
  for name in ("titans", "atlas"):
    cfg = small(name)
    params = atlas.init(cfg, seed=1)
    # From a fresh, small M_0 Newton-Schulz amplifies rounding until two forms on one CPU differ by 2.7e-4.
    M = params["layers"]["0"]["memory"]
    M["W2"] = (M["W2"] / atlas.INIT.first).realize()
    loss = atlas.loss(params, cfg, Tensor(random_tokens(2, 16)), Tensor(random_tokens(2, 16, seed=1)))
    results += [x.contiguous().numpy().ravel() for x in (loss, *loss.gradient(*get_state_dict(params).values()))]
  return results

@devices
def test_a_training_step_on_opencl_is_that_on_the_cpu(tmp_path):
  for x, expected in zip(on_opencl(tmp_path, "one_step"), one_step(), strict=True):
    assert record("OpenCL against CPU", relative(x, expected)) < 1e-4

# threads of a work-group, E, d, value_dim, hidden, D: sizes that the threads divide, and sizes that they do not
PASSES = {"linear": (8, 4, 3, 3, 0, 3), "mlp": (16, 8, 4, 4, 8, 15), "gated": (32, 9, 4, 3, 7, 5)}
def state_pass(number, times=1):
  """States, what the outputs need, and all gradients of the sequential pass over three chunks, so many times."""
  memory, (kernels.THREADS, E, d, dv, hidden, D) = list(PASSES.items())[number]
  cfg, r = rule(memory=memory, momentum=memory != "linear", backend="fused"), rng(number)
  def normal(*shape): return tensor(r.normal(size=(2, 2, *shape)) * 0.25)
  shapes = {"W": (dv, D)} if memory == "linear" else {"W1": (dv, hidden), "W2": (hidden, D), "W3": (hidden, D)}
  if memory == "mlp": del shapes["W3"]
  def part(): return {n: normal(*shape) for n, shape in shapes.items()}
  sources = {n: (E, shape[0]) for n, shape in shapes.items()}
  results = named("u", sources) | ({"h": (E, hidden)} if hidden else {})
  R, base, M, S = part() if memory != "gated" else {}, part(), part(), part() if cfg.momentum else {}
  streams = {"x": normal(3, E, D), "k": normal(3, E, d), "v": normal(3, E, dv), "kept_M": normal(3)}
  streams["rows"] = normal(3, 1 + cfg.momentum, E + cfg.momentum)
  form = over_chunks if kernels.on_cpu(Device.DEFAULT) else kernels.states_by_kernel
  arrays = []
  for _ in range(times):
    after, starts, kept = form(chunk_step, cfg, Memory(R, base, M, S, False), streams, named("R", R), results)
    y = [*after.base.values(), *after.M.values(), *after.S.values(), *starts.M.values(), *starts.S.values(),
         *dict(sorted(kept.items())).values()]
    loss = Tensor.stack(*[(z * (n + 1) + z * z).sum() for n, z in enumerate(y)]).sum()
    inputs = [*R.values(), *base.values(), *M.values(), *S.values(), *streams.values()]
    y += loss.gradient(*[z for z in inputs if z is not streams["k"] or d == dv and memory != "linear"])
    Tensor.realize(*[z.contiguous() for z in y])
    arrays += [z.numpy() for z in y]
  return arrays

@devices
@cases("number", range(len(PASSES)))
def test_the_sequential_pass_by_work_groups_is_that_on_the_cpu(number, tmp_path):
  for x, expected in zip(on_opencl(tmp_path, "state_pass", number), state_pass(number), strict=True):
    assert record("the sequential pass on OpenCL against CPU", relative(x, expected)) < 2e-6

@devices
def test_threads_do_not_race(tmp_path):
  results = on_opencl(tmp_path, "state_pass", 1, 20)
  once = len(results) // 20
  for n, z in enumerate(results): assert np.array_equal(z, results[n % once])

def directions(number):
  """Newton-Schulz of 6 wide and 6 tall matrices, and its gradient."""
  kernels.THREADS = (8, 32)[number]
  cfg, S = rule(optimizer="muon"), {"W1": rng(0).normal(size=(3, 2, 5, 9)), "W2": rng(1).normal(size=(3, 2, 16, 6))}
  matrices = tensors(S)
  if kernels.on_cpu(Device.DEFAULT):
    U = Tensor.cat(*[kernels.newton_schulz(s, cfg.ns_steps).flatten(2) for s in matrices.values()], dim=-1)
  else: U = kernels.directions_by_kernel(cfg, matrices)
  return [z.contiguous().numpy() for z in (U, *(U[..., 5:].sum() + U.square().sum()).gradient(*matrices.values()))]

@devices
@cases("number", range(2))
def test_newton_schulz_by_work_groups_is_that_on_the_cpu(number, tmp_path):
  for x, expected in zip(on_opencl(tmp_path, "directions", number), directions(number), strict=True):
    assert record("Newton-Schulz on OpenCL against CPU", relative(x, expected)) < 5e-4

def pieces_of_memory(number):
  """Output and gradients of calls of 6 and 7 tokens, of which the second starts inside a chunk."""
  case = ["mlp-poly-l2-momentum-3-4", "gated-poly-l2-muon_every-3-4"][number]
  cfg = from_case(case, backend="ops" if kernels.on_cpu(Device.DEFAULT) else "fused")
  W, x = problem(cfg, T=13)
  weights, inputs, R = tensors(W), tensors(x), tensors(destination(cfg, W))
  del R["a"]                                               # the features are those of the weights
  y = in_pieces(cfg, weights, inputs, (6, 7), R)
  gradients = y.square().sum().gradient(*weights.values(), *inputs.values(), *R.values())
  return [z.contiguous().numpy() for z in (y, *gradients)]

@devices
@cases("number", range(2))
def test_the_memory_in_pieces_on_opencl_is_that_on_the_cpu(number, tmp_path):
  results = on_opencl(tmp_path, "pieces_of_memory", number)
  for x, expected in zip(results, pieces_of_memory(number), strict=True):
    assert record("memory on OpenCL against CPU", relative(x, expected)) < (5e-4 if number else 2e-6)

@devices
def test_kernels_of_work_groups_compile_for_gpus_with_barriers_that_order_global_memory(tmp_path, monkeypatch):
  from tinygrad.device import Compiler
  from tinygrad.helpers import Target
  from tinygrad.renderer.cstyle import CUDARenderer, MetalRenderer
  from tinygrad.renderer.wgsl import WGSLRenderer
  class Metal(MetalRenderer):
    def __init__(self): self.target, self.compiler = Target("METAL"), Compiler()       # without Apple's compiler
  cuda, metal, web = CUDARenderer(Target("CUDA", arch="sm_80"), use_nvcc=True), Metal(), WGSLRenderer(Target("WEBGPU"))
  weights = ("W1", 16, 64), ("W2", 64, 24)
  shapes = kernels.KernelShapes(4, 4, 4, 4, 3, 72, False, 16, 16, 24, 1, weights)
  codes = {}
  for renderer, barrier in ((cuda, "__syncthreads();"), (metal, "mem_threadgroup | mem_flags::mem_device"),
                            (web, "storageBarrier(); workgroupBarrier();")):
    renderer.compiler = Compiler()
    renderer.barrier = kernels.BARRIERS.get(renderer.barrier, renderer.barrier)
    monkeypatch.setattr(kernels, "renderer_of", lambda device, renderer=renderer: renderer)
    monkeypatch.setattr(kernels, "vectors", lambda device: kernels.Vectors(1, 32, threads=256, local=8192))
    recorded(monkeypatch)
    kernels.direction_kernel.cache_clear()
    programs = []
    for back in (False, True):
      programs.append(kernels.memory_kernel(kernels.StatePass, rule(memory="mlp"), shapes, "GPU", back, True))
      programs.append(kernels.direction_kernel(rule(optimizer="muon"), weights, 8, "GPU", back))
    codes[renderer] = [source(kernel.program) for kernel in programs]
    assert all(code.count(barrier) > 4 for code in codes[renderer])
  for cached in (kernels.memory_kernel, kernels.direction_kernel): cached.cache_clear()
  if not (nvcc := shutil.which("nvcc")): pytest.skip("rendered; no nvcc here to compile the CUDA sources")
  for n, code in enumerate(codes[cuda]): (tmp_path / f"{n}.cu").write_text(code)
  for arch in ("sm_80", "sm_90"): output([nvcc, f"-arch={arch}", "-cubin", *tmp_path.glob("*.cu")], cwd=tmp_path)

def kernels_of_a_step():
  """How many kernels compute loss and gradients of titans, for streams of 4 and of 8 chunks."""
  counts = []
  for chunks in (4, 8):
    cfg = small("titans", chunk=8)
    params = atlas.init(cfg, seed=1)
    tokens = Tensor(random_tokens(2, 8 * chunks))
    loss = atlas.loss(params, cfg, tokens, tokens)
    linear = loss.schedule_linear(*loss.gradient(*get_state_dict(params).values()))
    counts.append(np.array(sum(u.op is Ops.CALL for u in linear.toposort())))
  return counts

@devices
def test_the_number_of_kernels_of_gradient_steps_does_not_grow_with_the_stream(tmp_path):
  short, long = on_opencl(tmp_path, "kernels_of_a_step")
  assert short == long < 400
