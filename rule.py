"""The memory rule of ATLAS in stock tensor operations: a small network per head whose weights change while it reads.

Read downwards: the types that travel together; features; losses; the memory and its gradient; Newton-Schulz and the
steps; the coefficients of a chunk; the pass over chunks; the outputs (`by_ops` joins these); the form for features=exp
(`by_expansion`).  Equation numbers are those of arXiv 2505.23735.  For token t, with M' the memory just before the
first token of t's chunk (`base`):

  G_t = sum_j gamma[t,j] * grad loss(M'; k[t-j], v[t-j])      a window of c tokens, across the chunk's border (Eq. 9)
  S_t = theta_t S_{t-1} + G_t                                 momentum (Eq. 33); without momentum S_t = G_t
  M_t = alpha_t M_{t-1} + (1 - alpha_t) R - eta_t U_t         U_t = S_t, or Newton-Schulz of S_t with Muon (Eq. 32)
  y_t = M_t(phi(q_t))                                         the memory is read after it was written

In the paper R is zero.  If forgetting leads to R, `M` and `base` are stored as their differences from R: for these the
rule is the one with R = 0.  Gradients and outputs are taken at R plus the difference.

Inside a chunk every gradient is an outer product u x^T taken at M'.  M_t and S_t are therefore weighted sums of the
same few outer products.  Only the weights depend on t: `coefficients` computes them for all chunks at once.

Axes: B batch, H heads, T tokens, N chunks, b tokens of a chunk, E those tokens and their halo (the c - 1 tokens
before), d key size, D features, o and i the rows and columns of a weight matrix.  by_ops rounds E up to a multiple of
8, by tokens of weight 0.  `.contiguous()` stores a tensor (`.contiguous_backward()` its gradient) for all readers.
"""
from __future__ import annotations
import functools, itertools, math
from typing import Any, Callable, NamedTuple, cast
import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.function import function

Weights = dict[str, Tensor]   # the matrices of a memory by name: "W", or "W1" and "W2", and "W3" of a gated one

class Rule:
  """The settings that the memory reads; atlas.Config has them."""
  memory: str       # linear | mlp | gated
  features: str     # a row of FEATURES
  degree: int       # of features=poly
  loss: str         # a row of LOSSES
  window: int       # c
  momentum: bool    # whether there is S
  optimizer: str    # a row of STEPS
  ns_steps: int     # Newton-Schulz iterations
  muon_every: int   # a step that is not linear comes at every r-th token only
  chunk: int        # b
  backend: str      # ops | fused | auto, for kernels.py

class Gates(NamedTuple):
  """The gates of every token, final (no squashing follows)."""
  alpha: Tensor   # (B,H,T)         forget gate
  theta: Tensor   # (B,H,T)         momentum gate
  eta: Tensor     # (B,H,T)         memory step
  gamma: Tensor   # (B,H,T,window)  gamma[...,j] weighs the gradient at token t-j

class Memory(NamedTuple):
  """The memory between two calls.  M, S and base are (B,H,o,i), or (H,o,i) while the batch still shares them."""
  R: Weights      # (H,o,i); forgetting leads to it; empty where it is zero
  base: Weights   # the memory at which the gradients of the current chunk are taken, as its difference from R
  M: Weights      # the memory now, as its difference from R
  S: Weights      # its momentum; empty without momentum
  shared: bool    # the batch shares M, S and base

class Chunks(NamedTuple):
  """How the tokens of a call are cut."""
  size: int               # b
  every: int              # tokens to a Muon step
  first: int|Tensor = 0   # features=exp: where the key cache holds the first key of the first chunk's halo

# *** features ***

MAX_FEATURES = 65_536

def to_multiple(n:int, m:int) -> int: return -(-n // m) * m
def sizes(x:Tensor) -> tuple[int, ...]: return cast(tuple[int, ...], x.shape)

@functools.cache
def monomial_table(d:int, degree:int, device:str) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
  """Every monomial up to `degree` is a product of `degree` elements of [x, 1].  Returns for n = 1..degree the index of
  the n-th element of each monomial, all in one row (degree * D); the same as one-hot matrices (d+1,D), one for each n;
  the root of each monomial's multinomial coefficient (D); its degree, one-hot (degree+1,D)."""
  by_degree = [itertools.combinations_with_replacement(range(d), p) for p in range(degree + 1)]
  factors = [c + (d,) * (degree - p) for p, monomials in enumerate(by_degree) for c in monomials]
  degrees = [sum(i < d for i in f) for f in factors]
  orders = [math.prod(math.factorial(f.count(i)) for i in set(f) - {d}) for f in factors]
  roots = np.sqrt([math.factorial(p) / order for p, order in zip(degrees, orders)]).astype(np.float32)
  places = np.array(factors, np.int32).T
  def one_hot(rows:Any, n:int) -> np.ndarray: return np.eye(n, dtype=np.float32)[:, rows]
  def tensor(x:np.ndarray) -> Tensor: return Tensor(np.ascontiguousarray(x), device=device).realize()
  selectors = [tensor(one_hot(row, d + 1)) for row in places]
  return tensor(places.reshape(-1)), selectors, tensor(roots), tensor(one_hot(degrees, degree + 1))

def monomial_scales(d:int, degree:int, a:Tensor) -> Tensor:
  """The factor of each monomial, (D).  The root's slope is infinite at a = 0: the inner `where` takes that at 1."""
  _, _, roots, degrees = monomial_table(d, degree, cast(str, a.device))
  return roots * ((a > 0).where((a > 0).where(a, 1).sqrt(), 0) @ degrees)

def monomials(x:Tensor, a:Tensor, degree:int) -> Tensor:
  """All monomials up to `degree`, by degree, then combinations_with_replacement, scaled so that
  phi(x).phi(y) = sum_i a[i] (x.y)^i (Eq. 17-18)."""
  d = sizes(x)[-1]
  x1 = x.pad((*[None] * (x.ndim - 1), (0, 1)), value=1.0).contiguous()   # (...,d+1): the 1 is for lower degrees
  selectors = monomial_table(d, degree, cast(str, x.device))[1]
  product = functools.reduce(Tensor.mul, [(x1 @ s).contiguous() for s in selectors])
  return product * monomial_scales(d, degree, a)                         # (...,D)

class Features(NamedTuple):
  """A feature map phi.  A new one needs `size` and `map`; `map` takes keys or queries (...,d) and returns (...,D)."""
  size: Callable[[int, int], int]   # key_dim, degree -> D
  map: Callable[[Any], Any]         # Tensors, and the matrices inside a kernel, which have the same operations
  coefficients: bool = False        # the features are monomials weighted by `a`, and `map` is not called
  expansion: bool = False           # D is infinite: the first layer is stored as coefficients of the keys read so far

FEATURES: dict[str, Features] = {
  "identity": Features(lambda d, degree: d, lambda x: x),
  "poly": Features(lambda d, degree: math.comb(d + degree, degree), lambda x: x, coefficients=True),
  "exp": Features(lambda d, degree: d, lambda x: x, expansion=True),      # phi*(x).phi*(y) = exp(x.y) (Eq. 22)
}

def feature_size(d:int, features:str, degree:int) -> int:
  """D, the length of phi(x) for x of size d.  ValueError when it exceeds MAX_FEATURES."""
  if (D := FEATURES[features].size(d, degree)) <= MAX_FEATURES: return D
  raise ValueError(f"degree={degree} with key_dim={d} makes {D:,} features, more than {MAX_FEATURES:,}: "
                   "lower degree or key_dim")

def phi(cfg:Rule, x:Tensor, a:Tensor|None) -> Tensor:
  """The features of a key or query: x (...,d) -> (...,D).  a (degree+1,): the coefficients of features=poly."""
  row = FEATURES[cfg.features]
  return monomials(x, cast(Tensor, a), cfg.degree) if row.coefficients else row.map(x)

# *** losses ***

class Loss(NamedTuple):
  """The loss that a memory descends, for y = M(phi(k))."""
  error: Callable[[Any, Any], Any]   # y, v (...,o) -> dL/dy (...,o)
  bound: float                       # the largest eta is bound / chunk; atlas.eta_bound has the exceptions
  fixed_point: bool = True           # the loss has a minimum, so that repeated steps stay bounded

LOSSES: dict[str, Loss] = {
  # 1/2 |y - v|^2, Eq. 11.  b equal keys apply one stale gradient b times, stable while eta b lambda < 2.  lambda, the
  # largest curvature, is about |phi|^2 |W1 gelu'|^2 + |h|^2: near 2 at first, and with eta = 0.2 / b it may reach 10.
  "l2": Loss(lambda y, v: y - v, 0.2),
  # -<y, v>, Eq. 19-20.  The loss has no minimum, so M grows with every step.  atlas.eta_bound says what bounds it.
  "dot": Loss(lambda y, v: -v, 0.5, fixed_point=False),
}

# *** the memory and the gradient of its loss: for Tensors, and for the matrices inside a kernel ***

def gelu(z:Any) -> tuple[Any, Any]:
  """gelu in its tanh form, and its derivative."""
  s = (2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z ** 3)).sigmoid()
  return z * s, s + z * s * (1 - s) * (2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z))

def apply(cfg:Rule, read:Callable[[str, Any], Any], x:Any, raw:Any) -> Any:
  """M(x).  read(name, x): x (...,i) times the weight matrix of that name -> (...,o).  raw: the key or query before phi;
  a deep memory adds it where it has the size of a value."""
  if cfg.memory == "linear": return read("W", x)
  h, _ = gelu(read("W2", x).contiguous())
  if cfg.memory == "gated": h = h * read("W3", x)
  y = read("W1", h.contiguous())
  return y + raw if raw.shape[-1] == y.shape[-1] else y

def gradients(cfg:Rule, W:dict[str, Any], x:Any, k:Any, v:Any) -> dict[str, tuple[Any, Any]]:
  """grad loss(M; k, v) at every token, as factors (u, x) of the outer product u x^T, for each weight matrix.
  W (B,H,o,i), x = phi(k) (B,H,E,D), k (B,H,E,d), v (B,H,E,value_dim) -> u (B,H,E,o), x (B,H,E,i)."""
  error = LOSSES[cfg.loss].error
  if cfg.memory == "linear": return {"W": (error(x @ W["W"].transpose(-1, -2), v).contiguous(), x)}
  z = (x @ W["W2"].transpose(-1, -2)).contiguous()                             # (B,H,E,hidden)
  act, slope = gelu(z)
  if cfg.memory == "gated": gate = (x @ W["W3"].transpose(-1, -2)).contiguous()
  h = (act * gate if cfg.memory == "gated" else act).contiguous()              # (B,H,E,hidden)
  y = h @ W["W1"].transpose(-1, -2)                                            # (B,H,E,value_dim)
  e = error(y + k if k.shape[-1] == v.shape[-1] else y, v).contiguous()
  dh = (e @ W["W1"]).contiguous_backward()
  if cfg.memory == "mlp": return {"W1": (e, h), "W2": ((dh * slope).contiguous(), x)}
  dh = dh.contiguous()                                                         # a gated memory reads it twice
  return {"W1": (e, h), "W2": ((dh * gate * slope).contiguous(), x), "W3": ((dh * act).contiguous(), x)}

# *** Newton-Schulz, and the learning steps ***

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)   # section 2 of the paper takes them from Muon

def iterate(steps:int, body:Callable, *carry:Any) -> tuple:
  """carry = body(*carry), `steps` times.  Tensors are unrolled; matrices inside a kernel bring their own loop."""
  if steps and hasattr(carry[0], "iterate"): return carry[0].iterate(steps, body, carry)
  for _ in range(steps): carry = tuple(x.contiguous() for x in body(*carry))
  return carry

def newton_schulz(S:Any, steps:int) -> Any:
  """Muon's U (Eq. 32): S (...,o,i) with its singular values brought near 1 by an odd polynomial, applied `steps` times.
  X_0 = S / sqrt(|S|^2 + 1e-14) keeps value and gradient finite at S = 0.  All iterates are p(A) X_0 with A = X_0 X_0^T,
  and polynomials of one matrix commute: where the sides differ enough to pay, only the small p and A are iterated."""
  if S.shape[-2] > S.shape[-1]: return newton_schulz(S.transpose(-1, -2).contiguous(), steps).transpose(-1, -2)
  c1, c3, c5 = NS_COEFFICIENTS
  def polynomial(A):
    eye = A.eye(A.shape[-2], dtype=A.dtype)
    return (c1 * eye + c3 * A + c5 * (A @ A)).contiguous()
  def gram(X): return (X @ X.transpose(-1, -2)).contiguous()
  X = (S * (S.square().sum((-1, -2), keepdim=True) + 1e-14).rsqrt()).contiguous()
  if S.shape[-1] < 1.5 * S.shape[-2]: return iterate(steps, lambda X: (polynomial(gram(X)) @ X,), X)[0]
  if steps == 0: return X
  def step(A, q, p):   # A: Gram matrix of an iterate; q: its polynomial; p: product of all q; p X_0 is the next iterate
    A = (q @ (q @ A).contiguous()).contiguous()
    q = polynomial(A)
    return A, q, q @ p
  A = gram(X)
  q = polynomial(A)
  return iterate(steps - 1, step, A, q, q)[2] @ X

class Step(NamedTuple):
  """The direction U that a memory moves in."""
  direction: Callable[[Any, Rule], Any]   # S (...,o,i), settings -> U
  linear: bool                            # U is linear in S: M_t sums weighted gradients, without any U (dual form)
  bound: float|None = None                # the largest eta; None: the loss decides
  padded: bool = False                    # S with columns of zeros beside it gives U with columns of zeros beside it

STEPS: dict[str, Step] = {
  "gd": Step(lambda S, cfg: S, linear=True),
  # Newton-Schulz steps have singular values near 1 whatever the gradient is, and those of M_0 are as large.
  "muon": Step(lambda S, cfg: newton_schulz(S, cfg.ns_steps), linear=False, bound=0.1, padded=True),
}

# *** the coefficients of a chunk ***

def decay(gate:Tensor) -> Tensor:
  """Products of gates inside a chunk: (...,b) -> (...,b,b+1).  Column 0, prod gate[0..t], is what is left at t of the
  chunk's start; column n+1, prod gate[n+1..t], what is left of token n, 0 where n > t.  No gate divides: 0 is exact."""
  b = gate.shape[-1]
  t = Tensor.arange(b, dtype=dtypes.int).reshape(b, 1, 1)
  n = Tensor.arange(b + 1, dtype=dtypes.int).reshape(1, b + 1, 1)
  j = Tensor.arange(b, dtype=dtypes.int).reshape(1, 1, b)
  factors = ((n <= j) * (j <= t)).where(gate.reshape(*gate.shape[:-1], 1, 1, b), 1.0)
  return (n.reshape(1, b + 1) <= t.reshape(b, 1) + 1).where(factors.prod(-1), 0.0).contiguous()

def banded(gamma:Tensor, E:int) -> Tensor:
  """gamma (...,b,c) by lag -> (...,b,E) by token of the chunk with its halo.  In row t lag 0 has column E-b+t: rows of
  E+1, read again as rows of E, move by one column each.  b = c = 2, E = 3, gtj = gamma[t,j]: [g01 g00 0] [0 g11 g10]"""
  *lead, b, c = gamma.shape
  rows = gamma.flip(-1).pad((*[None] * (gamma.ndim - 1), (E - b - c + 1, b)))                  # (...,b,E+1)
  return rows.reshape(*lead, b * (E + 1))[..., :b * E].reshape(*lead, b, E)

class Coefficients(NamedTuple):
  """What M_t and S_t consist of.  The sources of a chunk are [S at its start (with momentum only), its E gradients]."""
  kept_M: Tensor   # (B,H,N,b): the weight of the chunk's first memory in M_t
  C: Tensor        # linear steps: (B,H,N,b,[1+]E), M_t = kept_M[t] M - sum_s C[t,s] source_s
                   # other steps: (B,H,N,b,n),      M_t = kept_M[t] M - sum_n C[t,n] U_n
  P: Tensor        # (B,H,N,b,[1+]E), S_t = sum_s P[t,s] source_s; other steps: (B,H,N,n,[1+]E), tokens with one

def coefficients(cfg:Rule, gates:Gates, E:int, every:int) -> Coefficients:
  """The coefficients of every chunk at once, for gates (B,H,N,b) and (B,H,N,b,c).  Linear steps: C = B diag(eta) P with
  B the decay of alpha; P = Theta Gamma with Theta the decay of theta and Gamma the banded gamma (Eq. 16)."""
  P = banded(gates.gamma, E)                                                   # (B,H,N,b,E)
  if cfg.momentum:
    left_S = decay(gates.theta)
    P = left_S[..., :1].cat((left_S[..., 1:] @ P.contiguous()), dim=-1).contiguous()
  left_M = decay(gates.alpha)
  kept_M = left_M[..., 0].contiguous()
  steps = left_M[..., 1:] * gates.eta.unsqueeze(-2)                            # (B,H,N,b,b)
  if STEPS[cfg.optimizer].linear: return Coefficients(kept_M, (steps.contiguous() @ P).contiguous(), P)
  return Coefficients(kept_M, steps[..., every - 1::every].contiguous(), P[..., every - 1::every, :].contiguous())

# *** the sequential pass: it moves the states from chunk to chunk, and nothing else ***

def pack(parts:dict[str, Tensor], lead:int) -> Tensor:
  """Tensors that share their first `lead` axes, as one row of numbers for each of these."""
  return Tensor.cat(*[z.flatten(lead) if z.ndim > lead else z.unsqueeze(-1) for z in parts.values()], dim=-1)

def unpack(row:Tensor, shapes:dict[str, tuple], plain:tuple[str, ...]=()) -> dict[str, Tensor]:
  """The parts of a row, by name.  The gradient of each part, but for the plain ones, is stored before it is packed:
  where it is a sum (of a product, say), the scheduler would compute it anew for every number of the row."""
  parts, at = {}, 0
  for name, shape in shapes.items():
    part = row[..., at:at + math.prod(shape)].reshape(*row.shape[:-1], *shape)
    parts[name] = part if name in plain else part.contiguous_backward()
    at += math.prod(shape)
  return parts

def named(prefix:str, parts:dict) -> dict: return {f"{prefix}.{n}": z for n, z in parts.items()}
def part_of(parts:dict, prefix:str) -> dict:
  return {n.removeprefix(f"{prefix}."): z for n, z in parts.items() if n.startswith(f"{prefix}.")}

def number(x:Tensor) -> Tensor: return x.reshape(*x.shape, 1, 1)     # one number, beside the matrices that it scales
def of_S(weights:Tensor) -> Tensor: return weights[..., :1]          # of the sources (see Coefficients)
def of_gradients(cfg:Rule, weights:Tensor) -> Tensor: return weights[..., int(cfg.momentum):]

def weighted_sums(cfg:Rule, P:Tensor, S:Tensor|None, u:Tensor, x:Tensor) -> Tensor:
  """sum_s P[r,s] source_s, (B,H,n,o,i), of S and all u_e x_e^T: P (B,H,n,[1+]E), u (B,H,E,o), x (B,H,E,i)."""
  weighted = of_gradients(cfg, P).unsqueeze(-2) * u.transpose(-1, -2).unsqueeze(-3)            # (B,H,n,o,E)
  sums = (weighted.flatten(-3, -2) @ x).reshape(*weighted.shape[:-1], x.shape[-1])             # (B,H,n,o,i)
  return (sums if S is None else sums + number(P[..., 0]) * S.unsqueeze(-3)).contiguous()

def chunk_step(cfg:Rule, z:dict[str, Tensor]) -> dict[str, Tensor]:
  """One chunk.  z: the state M.* and S.*, base.* and R.*; x, k, v of the chunk with its halo (B,H,E,.); kept_M (B,H);
  `rows` (B,H,n,[1+]E), weights of the sources.  Linear steps: row 0 is what M gains up to the chunk's last token, and
  with momentum row 1 is S there.  Other steps: each row is S at a token that takes a step; C (B,H,n) weighs the steps.
  Returns M.* and S.*; u.* (B,H,E,o) and the hidden layer h (B,H,E,i), or U.* (B,H,n,o,i)."""
  step, new, kept = STEPS[cfg.optimizer], {}, {}
  for name, (u, x) in gradients(cfg, at_base(z), z["x"], z["k"], z["v"]).items():
    sums = weighted_sums(cfg, z["rows"], z.get(f"S.{name}"), u, x)
    if step.linear:
      kept[f"u.{name}"] = u
      if name == "W1": kept["h"] = x
      change = sums[..., 0, :, :]
    else:
      U = kept[f"U.{name}"] = step.direction(sums, cfg).contiguous()
      change = -(number(z["C"]) * U).sum(-3).contiguous()
    new[f"M.{name}"] = number(z["kept_M"]) * z[f"M.{name}"] + change
    if cfg.momentum: new[f"S.{name}"] = sums[..., -1, :, :]
  return new | kept

def at_base(z:dict[str, Tensor]) -> Weights:
  """Where the gradients are taken.  If forgetting leads to R, the memory is stored as its difference from R."""
  R = part_of(z, "R")
  return {n: (w + R[n] if R else w).contiguous_backward() for n, w in part_of(z, "base").items()}

Shapes = tuple[tuple[str, tuple], ...]          # names and shapes, hashable
def shapes_of(parts:Weights, lead:int) -> Shapes: return tuple((n, sizes(z)[lead:]) for n, z in parts.items())

@functools.cache
def compiled_chunk(body:Callable, cfg:Any, states:Shapes, streams:Shapes, fixed:Shapes) -> Callable:
  """body(cfg, z) for one chunk, from rows of numbers to a row: the state after it, then body's other results.  tinygrad
  compiles it once for all chunks.  All is in one row because only results that are used get gradients, as a row is."""
  M_shapes = {n: shape for n, shape in states if n.startswith("M.")}
  @function(precompile=True, precompile_backward=True)
  def step(state:Tensor, base:Tensor, chunk:Tensor, *constants:Tensor):
    before = unpack(state, dict(states), tuple(dict(states) if STEPS[cfg.optimizer].linear else M_shapes))
    base_M = part_of(unpack(base[..., :sum(map(math.prod, M_shapes.values()))], M_shapes, tuple(M_shapes)), "M")
    z = before | named("base", base_M) | unpack(chunk, dict(streams), ("k", "v"))
    for row in constants: z |= unpack(row, dict(fixed), () if STEPS[cfg.optimizer].linear else tuple(dict(fixed)))
    result = body(cfg, z)
    extra = [x for n, x in result.items() if n not in before]    # as results they are stored before they are packed
    return pack({n: result[n] for n in before} | result, 2).contiguous(), *extra
  return step

def over_chunks(body:Callable, cfg:Rule, memory:Memory, streams:dict[str, Tensor], fixed:dict[str, Tensor], results:dict
                ) -> tuple[Memory, Memory, dict[str, Tensor]]:
  """body(cfg, z) over all N chunks, axis 2 of the streams.  z: state, base.*, the chunk's part of the streams, `fixed`.
  results: the shapes of what body returns beside the state.  Returns the memory after the last chunk; and, with the
  chunks on axis 2, the memory that each chunk starts with, and the results."""
  first = named("M", memory.M) | named("S", memory.S)
  states = dict(shapes_of(first, 2))
  step = compiled_chunk(body, cfg, tuple(states.items()), shapes_of(streams, 3), shapes_of(fixed, 2))
  rows, base = [pack(first, 2).contiguous()], pack(memory.base, 2).contiguous()
  chunks = pack(streams, 3).permute(2, 0, 1, 3).contiguous()                                   # (N,B,H,.)
  constants = [pack(fixed, 2).contiguous()] if fixed else []
  for n in range(sizes(chunks)[0]):
    rows.append(step(rows[-1], rows[-1] if n else base, chunks[n].contiguous(), *constants)[0])
  size = rows[0].shape[-1]
  starts = unpack(Tensor.stack(*[row[..., :size] for row in rows[:-1]], dim=2).contiguous(), states)
  kept = unpack(Tensor.stack(*[row[..., size:] for row in rows[1:]], dim=2).contiguous(), results)
  # a later call may go on inside the last chunk: its gradients are taken where this chunk's were
  last, last_base = unpack(rows[-1], states), unpack(rows[-2], states)
  new_base = part_of(last_base, "M") if len(rows) > 2 else memory.base
  after = Memory(memory.R, new_base, part_of(last, "M"), part_of(last, "S"), False)
  return after, Memory(memory.R, {}, part_of(starts, "M"), part_of(starts, "S"), False), kept

# *** the outputs ***

def outputs(cfg:Rule, starts:Memory, kept:dict[str, Tensor], x:Tensor, r:Tensor, q:Tensor, weights:Coefficients
            ) -> Tensor:
  """y_t = M_t(phi(q_t)) for every token, without any M_t.  starts and kept are those of over_chunks; x = phi(k)
  (B,H,N,E,D), r = phi(q) (B,H,N,b,D), q (B,H,N,b,d) -> (B,H,N,b,value_dim)."""
  kept_M, C = weights.kept_M.unsqueeze(-1), weights.C
  def read(name:str, z:Tensor) -> Tensor:
    y = kept_M * (z @ starts.M[name].transpose(-1, -2))                        # (B,H,N,b,o)
    if starts.R: y = y + z @ starts.R[name].unsqueeze(2).transpose(-1, -2)
    if STEPS[cfg.optimizer].linear:
      inputs = kept["h"] if name == "W1" else x                                # (B,H,N,E,i)
      scores = of_gradients(cfg, C) * (z @ inputs.transpose(-1, -2)).contiguous()
      y = y - scores.contiguous() @ kept[f"u.{name}"]
      return y - of_S(C) * (z @ starts.S[name].transpose(-1, -2)) if cfg.momentum else y
    U = kept[f"U.{name}"]                                                      # (B,H,N,n,o,i)
    steps = (z @ U.flatten(-3, -2).transpose(-1, -2)).contiguous().reshape(*z.shape[:-1], U.shape[-3], U.shape[-2])
    return y - (C.unsqueeze(-1) * steps).sum(-2)
  return apply(cfg, read, r, q)

def for_batch(weights:Weights, like:Tensor) -> Weights:
  """Matrices (H,o,i) that the batch shares, repeated to (B,H,o,i) for like (B,...).  Where `like` is cut along B over
  several devices, the result is cut as well; tinygrad's Tensor.stack cannot join cut and whole tensors."""
  def repeated(w:Tensor) -> Tensor:
    w = w.unsqueeze(0).expand(sizes(like)[0], *w.shape).contiguous()
    if isinstance(like.device, str): return w
    cut = w.flatten(1).cat(like.flatten(1)[:, :1], dim=1).contiguous()         # (B,H*o*i+1), cut as `like` is
    return cut[:, :-1].reshape(w.shape).contiguous()
  return {n: repeated(w) for n, w in weights.items()}

def memory_for_batch(memory:Memory, like:Tensor) -> Memory:
  R = for_batch(memory.R, like)
  if not memory.shared: return memory._replace(R=R)
  base, M, S = [for_batch(part, like) for part in (memory.base, memory.M, memory.S)]
  return Memory(R, base, M, S, False)

def with_halo(z:Tensor, T:int, E:int, b:int) -> Tensor:
  """Keys or values (B,H,T,.), or with the tokens before the first, cut in chunks behind their halo: (B,H,N,E,.)."""
  z = z.pad((None, None, (T + E - b - sizes(z)[2], 0), None))
  return z.unfold(2, E, b).transpose(-1, -2).contiguous()

def cut(z:Tensor, b:int) -> Tensor: return z.reshape(*z.shape[:2], sizes(z)[2] // b, b, *z.shape[3:])

def by_ops(cfg:Rule, a:Tensor|None, memory:Memory, q:Tensor, k:Tensor, v:Tensor, gates:Gates, chunks:Chunks,
           over:Callable=over_chunks) -> tuple[Tensor, Memory]:
  """The recurrence in stock operations.  All but the sequential pass (`over` runs it) is products over all chunks.
  q (B,H,T,d); k, v (B,H,T,.), or (B,H,window-1+T,.) with the tokens before the first; a: coefficients of features=poly;
  chunks.first is not used.  Returns y (B,H,T,value_dim) and the memory after the last token."""
  b, T = chunks.size, sizes(q)[2]
  E = b + cfg.window - 1
  if b > 1: E = to_multiple(E, 8)                                              # multiples of 8 tile well
  memory = memory_for_batch(memory, q)
  weights = coefficients(cfg, Gates(*[cut(gate, b) for gate in gates]), E, chunks.every)
  keys, values = [with_halo(z, T, E, b).contiguous_backward() for z in (k, v)]
  x = phi(cfg, keys, a).contiguous()                                           # (B,H,N,E,D)
  streams = {"x": x, "k": keys, "v": values, "kept_M": weights.kept_M[..., -1]}
  if STEPS[cfg.optimizer].linear:
    last = [-weights.C[..., -1, :], weights.P[..., -1, :]] if cfg.momentum else [-weights.C[..., -1, :]]
    streams["rows"] = Tensor.stack(*last, dim=3)                               # (B,H,N,n,[1+]E)
  else: streams |= {"rows": weights.P, "C": weights.C[..., -1, :]}
  results:dict[str, tuple] = {}                                                # the shapes of what chunk_step returns
  for name, w in memory.M.items():
    if STEPS[cfg.optimizer].linear: results[f"u.{name}"] = (E, w.shape[2])
    else: results[f"U.{name}"] = (streams["rows"].shape[3], *w.shape[2:])
    if STEPS[cfg.optimizer].linear and name == "W1": results["h"] = (E, w.shape[3])
  after, starts, kept = over(chunk_step, cfg, memory, streams, named("R", memory.R), results)
  queries = cut(q, b).contiguous()
  y = outputs(cfg, starts, kept, x, phi(cfg, queries, a).contiguous(), queries, weights)
  return y.flatten(2, 3), after

# *** features=exp: the first layer is a sum over the tokens read so far, W2 phi*(x) = sum_n u_n exp(key_n . x) ***

def expansion_chunk(cfg:Rule, z:dict[str, Tensor]) -> dict[str, Tensor]:
  """One chunk.  z: the state M.* and S.*, base.* and R.*, whose "u" (B,H,L,o) are coefficients of the cached `keys`
  (B,H,L,d); k and v of the chunk with its halo, q, the coefficients kept_M, C and P of every token, and `entries`
  (B,H,E), the cache entries of the chunk's keys.  Returns the state after the chunk and y (B,H,b,value_dim)."""
  M, S, R = [part_of(z, n) for n in ("M", "S", "R")]       # the expanded layer is "u": W or W2 is not in M
  base, keys, E = at_base(z), z["keys"], z["k"].shape[2]
  similar = (z["k"].cat(z["q"], dim=2) @ keys.transpose(-1, -2)).exp().contiguous()            # (B,H,E+b,L)
  by_key, by_query = similar[:, :, :E], similar[:, :, E:]
  in_chunk = (z["q"] @ z["k"].transpose(-1, -2)).exp().contiguous()                            # (B,H,b,E)
  # with exp(key_n . x) as features, u^T is an ordinary first layer, so that `gradients` serves here too
  base["W" if cfg.memory == "linear" else "W2"] = base["u"].transpose(-1, -2)                   # (B,H,o,L)
  factors = gradients(cfg, base, by_key, z["k"], z["v"])
  kept_M, C, P = z["kept_M"].unsqueeze(-1), z["C"], z["P"]
  def read(name:str, x:Tensor) -> Tensor:
    u, inputs = factors[name]
    def at(W:Weights) -> Tensor: return x @ W[name].transpose(-1, -2) if name in M else by_query @ W["u"]
    scores = x @ inputs.transpose(-1, -2) if name in M else in_chunk
    y = kept_M * at(M) - (of_gradients(cfg, C) * scores).contiguous() @ u
    if R: y = y + at(R)
    return y - of_S(C) * at(S) if cfg.momentum else y
  new = {"y": apply(cfg, read, z["q"], z["q"])}
  L, one, zero = sizes(keys)[2], Tensor(1.0, dtype=dtypes.float), Tensor(0.0, dtype=dtypes.float)
  entry = (z["entries"].unsqueeze(-1) == Tensor.arange(L, dtype=dtypes.float)).where(one, zero)        # (B,H,E,L)
  C, P = C[..., -1, :], P[..., -1, :]                                                          # of the last token
  for name, (u, inputs) in factors.items():
    def summed(weights:Tensor) -> Tensor:                  # over the chunk's gradients: a matrix, or coefficients
      if name in M: return u.transpose(-1, -2) @ (weights.unsqueeze(-1) * inputs)
      return entry.transpose(-1, -2) @ (weights.unsqueeze(-1) * u)
    n = name if name in M else "u"
    new[f"M.{n}"] = kept_M[..., -1:, :] * M[n] - summed(of_gradients(cfg, C))
    if not cfg.momentum: continue
    new[f"M.{n}"] = new[f"M.{n}"] - number(C[..., 0]) * S[n]
    new[f"S.{n}"] = number(P[..., 0]) * S[n] + summed(of_gradients(cfg, P))
  return new

def by_expansion(cfg:Rule, keys:Tensor, memory:Memory, q:Tensor, k:Tensor, v:Tensor, gates:Gates, chunks:Chunks
                 ) -> tuple[Tensor, Memory]:
  """by_ops for features=exp.  keys (B,H,L,d): the key cache, the call's keys included; "u" (B,H,<=L,o) of R, base, M
  and S are the coefficients of its first keys.  Every chunk reads the whole cache, and every state of the loop is kept
  for the backward pass: the memory of a training step grows with the square of the stream."""
  (B, H, T, _), b, L = sizes(q), chunks.size, sizes(keys)[2]
  E, N = b + cfg.window - 1, T // b
  memory = memory_for_batch(memory, q)
  R, base, M, S = [with_entries(part, L) for part in (memory.R, memory.base, memory.M, memory.S)]
  entries = chunks.first + Tensor.arange(N, dtype=dtypes.int).reshape(N, 1) * b + Tensor.arange(E, dtype=dtypes.int)
  streams = {"k": with_halo(k, T, E, b), "v": with_halo(v, T, E, b), "q": cut(q, b),
             "entries": entries.cast(dtypes.float).expand(B, H, N, E)}
  streams |= coefficients(cfg, Gates(*[cut(gate, b) for gate in gates]), E, 1)._asdict()
  before, fixed, results = Memory(R, base, M, S, False), {"keys": keys} | named("R", R), {"y": (b, v.shape[3])}
  after, _, kept = over_chunks(expansion_chunk, cfg, before, streams, fixed, results)
  return kept["y"].flatten(2, 3), after

def with_entries(part:Weights, n:int) -> Weights:
  """Coefficients for n entries of the key cache; new entries have 0."""
  return {name: w.pad((None, None, (0, n - w.shape[2]), None)) if name == "u" else w for name, w in part.items()}
