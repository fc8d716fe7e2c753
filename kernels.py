"""The memory recurrence of ATLAS: one small network per head whose weights change while the sequence is read.

Read downwards: features, the memory and its gradient, Newton-Schulz, the coefficients of a chunk, the sequential pass over
chunks, the outputs, and `memory`, which puts them together.  Equation numbers are those of arXiv 2505.23735.

For token t, with M' the memory just before the first token of t's chunk (`base`):

  G_t = sum_j gamma[t,j] * grad loss(M'; k[t-j], v[t-j])      window of c tokens, reaching back over the chunk's border (Eq. 9)
  S_t = theta_t S_{t-1} + G_t                                 momentum (Eq. 33), S_t = G_t without
  M_t = alpha_t M_{t-1} - eta_t U_t                           U_t = S_t, or Newton-Schulz of S_t with Muon (Eq. 32)
  y_t = M_t(phi(q_t))

Inside a chunk every gradient is an outer product u x^T taken at M', so M_t and S_t are weighted sums of the same few outer
products.  Only the weights, small matrices of tokens by tokens, depend on t: `coefficients` makes them for all chunks at once.
Axes: B batch, H heads, T tokens, N chunks, b tokens of a chunk, E = those and their halo, R Muon steps of a chunk,
d key size, D features, o and i the rows and columns of a weight matrix.
"""
from __future__ import annotations
import functools, itertools, math, os, shutil, sys
from pathlib import Path
from typing import cast
import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.engine.jit import JitError
from tinygrad.function import function

# tinygrad's CPU device calls clang; the `cpu` extra puts one beside this Python, a folder that PATH holds only in an activated environment
if "CC" not in os.environ and shutil.which("clang") is None and (clang := Path(sys.executable).parent / "clang").exists():
  os.environ["CC"] = str(clang)

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)   # section 2 of the paper takes them from Muon
MAX_FEATURES = 65_536

# *** features ***

def feature_size(d:int, features:str, degree:int) -> int:
  """D, the length of phi(x) for x of size d.  ValueError when it exceeds MAX_FEATURES."""
  if features == "identity": return d
  if (D := math.comb(d + degree, degree)) > MAX_FEATURES:
    raise ValueError(f"degree={degree} with key_dim={d} makes {D:,} features, more than {MAX_FEATURES:,}: lower degree or key_dim")
  return D

@functools.cache
def _monomials(d:int, degree:int, device:str) -> tuple[list[Tensor], Tensor, Tensor]:
  """Selectors and constants of the monomials of degree <= p: column n of the j-th selector picks the j-th factor of monomial n
  from [x, 1]; scale[n] is the square root of its multinomial coefficient; order (degree+1, D) is one-hot in its degree."""
  factors = [c + (d,) * (degree - p) for p in range(degree + 1) for c in itertools.combinations_with_replacement(range(d), p)]
  orders = np.array([sum(i < d for i in f) for f in factors])
  multinomial = [math.factorial(o) / math.prod(math.factorial(f.count(i)) for i in set(f) - {d}) for f, o in zip(factors, orders)]
  eye = np.eye(d + 1, dtype=np.float32)
  selectors = [Tensor(np.ascontiguousarray(eye[:, [f[j] for f in factors]]), device=device).realize() for j in range(degree)]
  order = np.ascontiguousarray(np.eye(degree + 1, dtype=np.float32)[:, orders])
  return selectors, Tensor(np.sqrt(multinomial).astype(np.float32), device=device).realize(), Tensor(order, device=device).realize()

def phi(cfg, x:Tensor, a:Tensor|None) -> Tensor:
  """The features of a key or query (Eq. 17-18): x (...,d) -> (...,D).

  `poly`: all monomials of degree <= cfg.degree, by degree, then combinations_with_replacement, scaled so that
  phi(x).phi(y) = sum_i a[i] (x.y)^i.  The root of a has gradient 0 at a = 0, where its slope is infinite."""
  if cfg.features == "identity": return x
  assert a is not None
  selectors, scale, order = _monomials(x.shape[-1], cfg.degree, x.device)
  root = (a > 0).where((a > 0).where(a, 1).sqrt(), 0)
  x1 = x.pad((*[None] * (x.ndim - 1), (0, 1)), value=1.0).contiguous()       # [x, 1]: lower degrees take the 1 for a factor
  return functools.reduce(Tensor.mul, [(x1 @ s).contiguous() for s in selectors]) * (scale * (root @ order))

# *** the memory and the gradient of its loss ***

def _gelu(z:Tensor) -> tuple[Tensor, Tensor]:
  """gelu in its tanh form, and its derivative."""
  s = (2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z ** 3)).sigmoid()
  return z * s, s + z * s * (1 - s) * (2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z))

def apply(cfg, read, x:Tensor, raw:Tensor) -> Tensor:
  """M(x): `read(name, x)` multiplies x (...,i) by the weight matrix of that name -> (...,o).  raw: the un-lifted key or query, added
  when its size is the value's."""
  if cfg.memory == "linear": return read("W", x)
  h = _gelu(read("W2", x))[0]
  if cfg.memory == "gated": h = h * read("W3", x)
  y = read("W1", h.contiguous())
  return y + raw if raw.shape[-1] == y.shape[-1] else y

def gradients(cfg, W:dict[str, Tensor], x:Tensor, k:Tensor, v:Tensor) -> dict[str, tuple[Tensor, Tensor]]:
  """grad loss(M; k, v) at every token, as factors (u, x) with gradient u x^T, per weight matrix.
  W (B,H,o,i), x = phi(k) (B,H,E,D), k (B,H,E,d), v (B,H,E,value_dim) -> u (B,H,E,o), x (B,H,E,i)."""
  def error(y): return y - v if cfg.loss == "l2" else -v
  if cfg.memory == "linear": return {"W": (error(x @ W["W"].transpose(-1, -2)).contiguous(), x)}
  z = (x @ W["W2"].transpose(-1, -2)).contiguous()
  act, slope = _gelu(z)
  gate = (x @ W["W3"].transpose(-1, -2)).contiguous() if cfg.memory == "gated" else None
  h = (act if gate is None else act * gate).contiguous()
  y = h @ W["W1"].transpose(-1, -2)
  e = error(y + k if k.shape[-1] == v.shape[-1] else y).contiguous()
  dh = (e @ W["W1"]).contiguous()
  if gate is None: return {"W1": (e, h), "W2": ((dh * slope).contiguous(), x)}
  return {"W1": (e, h), "W2": ((dh * gate * slope).contiguous(), x), "W3": ((dh * act).contiguous(), x)}

# *** Newton-Schulz ***

def newton_schulz(S:Tensor, steps:int) -> Tensor:
  """Muon's U (Eq. 32): S (...,o,i) with its singular values brought near 1 by an odd polynomial, applied `steps` times.

  X_0 = S / sqrt(|S|^2 + 1e-14) keeps value and gradient finite at S = 0.  All iterates are p(A) X_0 with A = X_0 X_0^T, and
  polynomials of one matrix commute: where the sides differ enough to pay, only the small p and A are iterated."""
  if S.shape[-2] > S.shape[-1]: return newton_schulz(S.transpose(-1, -2).contiguous(), steps).transpose(-1, -2)
  a, b, c = NS_COEFFICIENTS
  X = (S * (S.square().sum((-1, -2), keepdim=True) + 1e-14).rsqrt()).contiguous()
  A, eye = (X @ X.transpose(-1, -2)).contiguous(), Tensor.eye(cast(int, S.shape[-2]))
  if S.shape[-1] < 1.5 * S.shape[-2]:                                        # nearly square: iterate X itself
    for step in range(steps):
      if step: A = (X @ X.transpose(-1, -2)).contiguous()
      X = (a * X + (b * A + c * (A @ A)).contiguous() @ X).contiguous()
    return X
  p: Tensor|None = None
  for step in range(steps):
    q = (a * eye + b * A + c * (A @ A)).contiguous()
    p = q if p is None else (q @ p).contiguous()
    if step < steps - 1: A = (q @ (q @ A).contiguous()).contiguous()
  return X if p is None else p @ X

# *** the coefficients of a chunk ***

def decay(gate:Tensor) -> Tensor:
  """Products of gates inside a chunk: (...,b) -> (...,b,b+1).  Column 0: prod gate[0..t], what is left at t of the chunk's start;
  column n+1: prod gate[n+1..t], what is left of token n, and 0 where n > t.  A literal product: exact at gates of 0."""
  b = gate.shape[-1]
  t, n, j = Tensor.arange(b).reshape(b, 1, 1), Tensor.arange(b + 1).reshape(1, b + 1, 1), Tensor.arange(b).reshape(1, 1, b)
  kept = ((n <= j) * (j <= t)).where(gate.reshape(*gate.shape[:-1], 1, 1, b), 1.0).prod(-1)
  return (n.reshape(1, b + 1) <= t.reshape(b, 1) + 1).where(kept, 0.0).contiguous()

def _band(gamma:Tensor, E:int) -> Tensor:
  """gamma (...,b,c) by lag -> (...,b,E) by token of the chunk with its halo: row t holds its lags, the newest at column E-b+t."""
  *lead, b, c = gamma.shape
  rows = gamma.flip(-1).pad((*[None] * (gamma.ndim - 1), (E - b - c + 1, b)))       # rows of E+1: each lies one further to the right
  return rows.reshape(*lead, b * (E + 1))[..., :b * E].reshape(*lead, b, E)

def coefficients(cfg, E:int, every:int, alpha:Tensor, theta:Tensor, eta:Tensor, gamma:Tensor) -> tuple[Tensor, Tensor, Tensor]:
  """What M_t and S_t hold, for every chunk at once: alpha, theta, eta (B,H,N,b), gamma (B,H,N,b,c) -> a, C, P.

  a (B,H,N,b): the weight of the chunk's first memory in M_t.
  P: the weights in S_t of [S at the chunk's start (with momentum only), the E gradients].
  gd: P and C (B,H,N,b,[1+]E), M_t = a_t M - sum_i C[t,i] source_i with the same sources.
  muon: P (B,H,N,R,[1+]E) at the tokens that take a step, C (B,H,N,b,R), M_t = a_t M - sum_n C[t,n] U_n."""
  P = _band(gamma, E)
  if cfg.momentum:
    kept = decay(theta)
    P = kept[..., :1].cat((kept[..., 1:] @ P.contiguous()), dim=-1).contiguous()
  left = decay(alpha)
  a, C = left[..., 0], left[..., 1:] * eta.unsqueeze(-2)
  if cfg.optimizer == "gd": return a.contiguous(), (C.contiguous() @ P).contiguous(), P
  return a.contiguous(), C[..., every - 1::every].contiguous(), P[..., every - 1::every, :].contiguous()

# *** the sequential pass: moves the states from chunk to chunk, and nothing else ***

def _row(x:Tensor) -> Tensor: return x.reshape(*x.shape, 1, 1)               # a scalar per head, beside its matrices

def chunk_step(cfg, base:dict, M:dict, S:dict, x:Tensor, k:Tensor, v:Tensor, a:Tensor, C:Tensor, P:Tensor) -> tuple[Tensor, ...]:
  """One chunk: the memory and momentum after its last token, and what its outputs need.
  base, M, S: weights (B,H,o,i); gradients are taken at base.  x, k, v: the chunk with its halo (B,H,E,.).  a (B,H), C (B,H,.): last rows of
  `coefficients`.  P: last row (B,H,[1+]E) for gd, the steps' rows (B,H,R,[1+]E) for muon.
  Returns every M, then every S, then per weight the pair u (B,H,E,o), x (B,H,E,i) for gd, or the steps U (B,H,R,o,i) for muon."""
  skip = int(cfg.momentum)                               # with momentum the first source is S itself
  new_M, new_S, kept = [], [], []
  for name, (u, inp) in gradients(cfg, base, x, k, v).items():
    if cfg.optimizer == "gd":
      W = _row(a) * M[name] - (u * C[..., skip:].unsqueeze(-1)).contiguous().transpose(-1, -2) @ inp
      if cfg.momentum:
        W = W - _row(C[..., 0]) * S[name]
        new_S.append((_row(P[..., 0]) * S[name] + (u * P[..., 1:].unsqueeze(-1)).contiguous().transpose(-1, -2) @ inp).contiguous())
      kept += [u, inp]
    else:
      weighted = (P[..., skip:].unsqueeze(-2) * u.transpose(-1, -2).unsqueeze(-3)).contiguous()                # (B,H,R,o,E)
      steps = (weighted.flatten(-3, -2) @ inp).reshape(*weighted.shape[:-1], inp.shape[-1])                  # (B,H,R,o,i)
      if cfg.momentum:
        steps = (steps + _row(P[..., 0]) * S[name].unsqueeze(-3)).contiguous()
        new_S.append(steps[..., -1, :, :].contiguous())
      U = newton_schulz(steps.contiguous(), cfg.ns_steps).contiguous()
      W = _row(a) * M[name] - (_row(C) * U).sum(-3)
      kept.append(U)
    new_M.append(W.contiguous())
  return (*new_M, *new_S, *kept)

@functools.cache
def _compiled_step(cfg):
  """chunk_step as one call that tinygrad schedules and compiles once, forward and backward, however many chunks there are."""
  @function(precompile=True, precompile_backward=True)
  def step(*args): return chunk_step(cfg, *args)
  return step

def state_pass(cfg, base:dict, M:dict, S:dict, x:Tensor, k:Tensor, v:Tensor, a:Tensor, C:Tensor, P:Tensor):
  """chunk_step over all N chunks, axis 2 of x, k, v, a, C, P.  Returns the last chunk's base, the last M and S, and, stacked on axis 2 for
  every chunk, the M and S it began with and what chunk_step kept."""
  names, N, starts, kept = list(M), x.shape[2], [], []
  step = _compiled_step(cfg) if N > 1 else functools.partial(chunk_step, cfg)
  for n in range(N):
    if n: base = M
    starts.append((*M.values(), *S.values()))
    out = step(base, M, S, *[z[:, :, n].contiguous() for z in (x, k, v, a, C, P)])
    M, S, out = dict(zip(names, out)), dict(zip(S, out[len(M):])), out[len(M) + len(S):]
    kept.append(out)
  def stacked(parts): return [z[0].unsqueeze(2) if N == 1 else Tensor.stack(*z, dim=2).contiguous() for z in zip(*parts)]
  if N > 1: M, S = [{n: z.clone() for n, z in state.items()} for state in (M, S)]        # a jit may reuse the outputs of a compiled call
  first, sources = stacked(starts), stacked(kept)
  per = len(sources) // len(names)
  return base, M, S, dict(zip(names, first)), dict(zip(S, first[len(M):])), {n: sources[i * per:(i + 1) * per] for i, n in enumerate(names)}

# *** the outputs ***

def outputs(cfg, M:dict, S:dict, kept:dict, r:Tensor, q:Tensor, a:Tensor, C:Tensor) -> Tensor:
  """y_t = M_t(phi(q_t)) for every token, without any M_t: r = phi(q) (B,H,N,b,D), q (B,H,N,b,d); the rest as state_pass stacked it
  and `coefficients` made it -> (B,H,N,b,value_dim)."""
  a = a.unsqueeze(-1)
  def read(name, z):
    y = a * (z @ M[name].transpose(-1, -2))
    if cfg.optimizer == "gd":
      u, inp = kept[name]
      skip = int(cfg.momentum)
      y = y - (C[..., skip:] * (z @ inp.transpose(-1, -2)).contiguous()).contiguous() @ u
      return y - C[..., :1] * (z @ S[name].transpose(-1, -2)) if skip else y
    U, = kept[name]
    steps = (z @ U.flatten(-3, -2).transpose(-1, -2)).contiguous().reshape(*z.shape[:-1], U.shape[-3], U.shape[-2])
    return y - (C.unsqueeze(-1) * steps).sum(-2)
  return apply(cfg, read, r, q)

# *** all of it ***

def _part(state:dict, part:str) -> dict: return {n.split(".")[1]: z for n, z in state.items() if n.startswith(part + ".")}

def read_position(state:dict[str, Tensor]) -> int|None:
  """Tokens read so far, or None while a jit is being captured and no value can be read."""
  try: return int(state["position"].item())
  except JitError: return None

def initial_state(cfg, weights:dict[str, Tensor], B:int, key_dim:int) -> dict[str, Tensor]:
  """The state before the first token: M_0 for every row of the batch, S_0 = 0, position 0.  A flat dict of Tensors: "position" (), "M.*",
  "S.*" (momentum) and "base.*" (B,H,out,in), "k" and "v" (B,H,window-1,.), the keys and values that a window still reaches (window > 1)."""
  M = {n: w.unsqueeze(0).expand(B, *w.shape).contiguous() for n, w in weights.items() if n != "a"}
  first = weights["W" if cfg.memory == "linear" else "W1"]
  def zeros(*shape): return Tensor.zeros(*shape, device=first.device).contiguous()
  state = {"position": Tensor(0, dtype=dtypes.int32, device=first.device), **{f"{p}.{n}": m for p in ("base", "M") for n, m in M.items()}}
  if cfg.momentum: state |= {f"S.{n}": zeros(*m.shape) for n, m in M.items()}
  if cfg.window > 1: state |= {n: zeros(B, first.shape[0], cfg.window - 1, d) for n, d in (("k", key_dim), ("v", first.shape[1]))}
  return state

def memory(cfg, weights:dict[str, Tensor], q:Tensor, k:Tensor, v:Tensor, alpha:Tensor, theta:Tensor, eta:Tensor, gamma:Tensor,
           state:dict[str, Tensor]|None=None) -> tuple[Tensor, dict[str, Tensor]]:
  """Reads a stretch of the stream: updates the memory at every token, then reads it (Eq. 9, 10, 15, 16, 32, 33).

  q, k (B,H,T,key_dim); v, y (B,H,T,value_dim); alpha, theta, eta (B,H,T), final; gamma (B,H,T,window), gamma[...,j] gates token t-j.
  weights: the initial memory, (H,out,in) per head: {"W"} for linear, {"W1","W2"} for mlp, and "W3" for gated; "a" (degree+1,) with poly.
  state: what an earlier call returned, or None at the start of the stream.  Returns y and the state after the last token; any way of cutting
  a stream into calls gives the same y.  Under TinyJit a call of one token goes anywhere; one of more tokens with a state must start at a chunk's
  border, since the position cannot be read there, and gives NaN elsewhere."""
  (B, H, T, d), b, c, r = cast(tuple[int, ...], q.shape), cfg.chunk, cfg.window, cfg.muon_every if cfg.optimizer == "muon" else 1
  feature_size(d, cfg.features, cfg.degree)              # refuses what would not fit
  known = 0 if state is None or T == 1 else read_position(state)
  phase = 0 if known is None else known % b
  if state is None: state = initial_state(cfg, weights, B, d)
  position, M, S, base = state["position"], _part(state, "M"), _part(state, "S"), _part(state, "base")
  # Rows: the call is padded to whole chunks of `size` tokens, `front` before it and `back` behind.  With chunk=4, a call of 6 tokens at position 7
  # (phase 3) is padded to 3 + 6 + 3 = 3 chunks.  A call that ends within its first chunk needs no padding: its tokens are the only chunk's rows.
  # Gradients are taken at the memory of the chunk's start; one token's graph must hold for any position.
  if T == 1: base = {n: (position % b == 0).where(M[n], w) for n, w in base.items()}
  elif phase == 0: base = M
  if phase + T <= b:                                     # inside one chunk: its rows are the tokens
    size, front, every = T, 0, r if T > 1 and phase % r == 0 and T % r == 0 else 1
  else: size, front, every = b, phase, r
  N = -(-(front + T) // size)
  back, E = N * size - front - T, c if size == 1 else -(-(size + c - 1) // 8) * 8              # multiples of 8 tile well

  # gates: no window reaches before the stream, Muon steps at every r-th token, padding leaves the memory as it is
  index = position + Tensor.arange(T)
  gamma = (index.unsqueeze(-1) >= Tensor.arange(c)).where(gamma, 0)
  if r > 1: eta = ((index + 1) % r == 0).where(eta, 0)
  def chunked(z, fill=0.0): return z.pad((None, None, (front, back), *[None] * (z.ndim - 3)), value=fill).reshape(B, H, N, size, *z.shape[3:])
  a, C, P = coefficients(cfg, E, every, chunked(alpha, 1.0), chunked(theta, 1.0), chunked(eta), chunked(gamma))

  # keys and values, each chunk behind its halo: (B,H,T,d) -> (B,H,N,E,d)
  stream = {n: state[n].cat(z, dim=2) if c > 1 else z for n, z in (("k", k), ("v", v))}
  keys, values = [z.pad((None, None, (front + E - size - c + 1, back), None)).unfold(2, E, size).transpose(-1, -2).contiguous().contiguous_backward()
                  for z in stream.values()]
  last = (a[..., -1], C[..., -1, :], P[..., -1, :] if cfg.optimizer == "gd" else P)
  base, M, S, M_starts, S_starts, kept = state_pass(cfg, base, M, S, phi(cfg, keys, weights.get("a")).contiguous(), keys, values, *last)
  queries = chunked(q).contiguous()
  y = outputs(cfg, M_starts, S_starts, kept, phi(cfg, queries, weights.get("a")).contiguous(), queries, a, C)
  y = y.reshape(B, H, N * size, v.shape[-1])[:, :, front:front + T]
  if known is None: y = (position % b == 0).where(y, math.nan)
  # clones: the base may be the caller's own M and the tail the caller's own keys, which a jit must not return
  if T > 1: base = {n: z.clone() for n, z in base.items()}
  after = {"position": (position + T).clone(), **{f"{p}.{n}": m for p, ms in (("base", base), ("M", M), ("S", S)) for n, m in ms.items()}}
  if c > 1: after |= {n: z[:, :, z.shape[2] - c + 1:].clone() for n, z in stream.items()}
  return y, after
