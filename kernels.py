"""The memory recurrence of ATLAS: one small network per head whose weights change while the sequence is read.

Read downwards: features, the memory and its gradient, Newton-Schulz; the stock form (the coefficients of a chunk, the sequential pass
over chunks, the outputs: `by_ops`); a first layer that is kept by its tokens (`expanded`, for features=exp); matrices inside a kernel, and
the recurrence in one (`fused`); and `memory`, which takes one of the three.  Equation numbers are those of arXiv 2505.23735.

For token t, with M' the memory just before the first token of t's chunk (`base`):

  G_t = sum_j gamma[t,j] * grad loss(M'; k[t-j], v[t-j])      window of c tokens, reaching back over the chunk's border (Eq. 9)
  S_t = theta_t S_{t-1} + G_t                                 momentum (Eq. 33), S_t = G_t without
  M_t = alpha_t M_{t-1} - eta_t U_t                           U_t = S_t, or Newton-Schulz of S_t with Muon (Eq. 32)
  y_t = M_t(phi(q_t))

Where forgetting is to lead to a memory R and not to zero, (1 - alpha_t) R is added to M_t: the forms below then keep the distance from R, for
which the rule is the one above, and take gradients and outputs at R + that (`toward`).

Inside a chunk every gradient is an outer product u x^T taken at M', so M_t and S_t are weighted sums of the same few outer
products.  Only the weights, small matrices of tokens by tokens, depend on t: `coefficients` makes them for all chunks at once.
Axes: B batch, H heads, T tokens, N chunks, b tokens of a chunk, E = those and their halo, R Muon steps of a chunk,
d key size, D features, o and i the rows and columns of a weight matrix.
"""
from __future__ import annotations
import contextlib, functools, itertools, math, os, shutil, sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, NamedTuple, cast
from tinygrad import Device, Tensor, UOp, codegen, dtypes
from tinygrad.codegen import to_program
from tinygrad.dtype import AddrSpace
from tinygrad.engine.jit import JitError
from tinygrad.function import function
from tinygrad.helpers import disable_gc
from tinygrad.mixin.gradient import compute_gradient
from tinygrad.renderer import Estimates
from tinygrad.tensor import transform_precompiled_call
from tinygrad.uop.ops import AxisType, KernelInfo, Ops, PatternMatcher

# tinygrad's CPU device calls clang; the `cpu` extra puts one beside this Python, a folder that PATH holds only in an activated environment
if "CC" not in os.environ and shutil.which("clang") is None and (clang := Path(sys.executable).parent / "clang").exists():
  os.environ["CC"] = str(clang)

from rule import _monomials, _scales, feature_size, phi

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)   # section 2 of the paper takes them from Muon

# *** the memory and the gradient of its loss: for Tensors, and for the matrices inside a kernel (below), which have the same operators ***

def _gelu(z:Any) -> tuple[Any, Any]:
  """gelu in its tanh form, and its derivative."""
  s = (2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z ** 3)).sigmoid()
  return z * s, s + z * s * (1 - s) * (2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z))

def apply(cfg, read, x:Any, raw:Any) -> Any:
  """M(x): `read(name, x)` multiplies x (...,i) by the weight matrix of that name -> (...,o).  raw: the un-lifted key or query, added
  when its size is the value's."""
  if cfg.memory == "linear": return read("W", x)
  h = _gelu(read("W2", x).contiguous())[0]
  if cfg.memory == "gated": h = h * read("W3", x)
  y = read("W1", h.contiguous())
  return y + raw if raw.shape[-1] == y.shape[-1] else y

def gradients(cfg, W:dict[str, Any], x:Any, k:Any, v:Any, z:Any=None) -> dict[str, tuple[Any, Any]]:
  """grad loss(M; k, v) at every token, as factors (u, x) with gradient u x^T, per weight matrix.
  W (B,H,o,i), x = phi(k) (B,H,E,D), k (B,H,E,d), v (B,H,E,value_dim) -> u (B,H,E,o), x (B,H,E,i).
  z (B,H,E,o): what the first layer gives, where it is no matrix (features=exp) and x is None."""
  def error(y): return y - v if cfg.loss == "l2" else -v
  if z is None: z = x @ W["W" if cfg.memory == "linear" else "W2"].transpose(-1, -2)
  if cfg.memory == "linear": return {"W": (error(z).contiguous(), x)}
  act, slope = _gelu(z := z.contiguous())
  gate = (x @ W["W3"].transpose(-1, -2)).contiguous() if cfg.memory == "gated" else None
  h = (act if gate is None else act * gate).contiguous()
  y = h @ W["W1"].transpose(-1, -2)
  e = error(y + k if k.shape[-1] == v.shape[-1] else y).contiguous()
  dh = (e @ W["W1"]).contiguous_backward()
  if gate is None: return {"W1": (e, h), "W2": ((dh * slope).contiguous(), x)}
  dh = dh.contiguous()
  return {"W1": (e, h), "W2": ((dh * gate * slope).contiguous(), x), "W3": ((dh * act).contiguous(), x)}

# *** Newton-Schulz ***

def _eye(x:Any) -> Any:
  if isinstance(x, Tensor): return Tensor.eye(cast(int, x.shape[-2]))
  return Matrix(x.k, (x.shape[0], x.shape[0]), (), lambda i, j: i.eq(j).where(1.0, 0.0))

def _iterate(steps:int, body:Callable, *carry:Any) -> tuple:
  """carry = body(*carry), `steps` times: unrolled for Tensors, a loop inside a kernel."""
  if not isinstance(carry[0], Tensor) and steps: return carry[0].k.iterate(steps, body, carry)
  for _ in range(steps): carry = tuple(x.contiguous() for x in body(*carry))
  return carry

def newton_schulz(S:Any, steps:int) -> Any:
  """Muon's U (Eq. 32): S (...,o,i) with its singular values brought near 1 by an odd polynomial, applied `steps` times.

  X_0 = S / sqrt(|S|^2 + 1e-14) keeps value and gradient finite at S = 0.  All iterates are p(A) X_0 with A = X_0 X_0^T, and
  polynomials of one matrix commute: where the sides differ enough to pay, only the small p and A are iterated."""
  if S.shape[-2] > S.shape[-1]: return newton_schulz(S.transpose(-1, -2).contiguous(), steps).transpose(-1, -2)
  a, b, c = NS_COEFFICIENTS
  def polynomial(A): return (a * _eye(A) + b * A + c * (A @ A)).contiguous()
  def gram(X): return (X @ X.transpose(-1, -2)).contiguous()
  X = (S * (S.square().sum((-1, -2), keepdim=True) + 1e-14).rsqrt()).contiguous()
  if S.shape[-1] < 1.5 * S.shape[-2]: return _iterate(steps, lambda X: (polynomial(gram(X)) @ X,), X)[0]       # nearly square: iterate X
  if steps == 0: return X
  def step(A, q, p):
    A = (q @ (q @ A).contiguous()).contiguous()
    q = polynomial(A)
    return A, q, q @ p
  q = polynomial(A := gram(X))
  return _iterate(steps - 1, step, A, q, q)[2] @ X

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

def _pack(parts, lead:int) -> Tensor:
  """Tensors that share their first `lead` axes, as one row of numbers each."""
  return Tensor.cat(*[z.flatten(lead) if z.ndim > lead else z.unsqueeze(-1) for z in parts], dim=-1)

def _unpack(row:Tensor, shapes, sums=lambda n: True) -> list[Tensor]:
  """The parts of a row.  Where the gradient of part n is a sum (a product, for example) it is stored before the gradients are packed in their
  turn: fused with that, sums would be computed for every number of the row."""
  ends = list(itertools.accumulate(map(math.prod, shapes)))
  parts = [row[..., end - math.prod(shape):end].reshape(*row.shape[:-1], *shape) for end, shape in zip(ends, shapes)]
  return [part.contiguous_backward() if sums(n) else part for n, part in enumerate(parts)]

def _scalar(x:Tensor) -> Tensor: return x.reshape(*x.shape, 1, 1)            # one number, beside the matrices it multiplies

def chunk_step(cfg, base:dict, M:dict, S:dict, x:Tensor, k:Tensor, v:Tensor, a:Tensor, P:Tensor, C:Tensor|None=None) -> list[Tensor]:
  """One chunk: the memory and momentum after its last token, and what its outputs need.
  base, M, S: weights (B,H,o,i); gradients are taken at base, which holds R where M is the distance from it.  x, k, v: the chunk with its halo
  (B,H,E,.).  a (B,H), what is left of M.
  P (B,H,R,[1+]E): R rows of weights over [S and] the gradients.  gd: for what M gains, and for S (momentum).  muon: for S at every step; C (B,H,R).
  Returns every M, every S, then for gd every u (B,H,E,o) and the hidden layer (B,H,E,i), if there is one; for muon every U (B,H,R,o,i)."""
  skip, new_M, new_S, kept = int(cfg.momentum), [], [], []
  factors = gradients(cfg, base, x, k, v)
  for name, (u, inp) in factors.items():
    weighted = P[..., skip:].unsqueeze(-2) * u.transpose(-1, -2).unsqueeze(-3)                             # (B,H,R,o,E)
    sums = (weighted.flatten(-3, -2) @ inp).reshape(*weighted.shape[:-1], inp.shape[-1])                   # (B,H,R,o,i)
    if cfg.momentum: sums = sums + _scalar(P[..., 0]) * S[name].unsqueeze(-3)
    sums = sums.contiguous()
    if cfg.momentum: new_S.append(sums[..., -1, :, :])
    kept.append(u if C is None else newton_schulz(sums, cfg.ns_steps).contiguous())
    new_M.append(_scalar(a) * M[name] + (sums[..., 0, :, :] if C is None else -(_scalar(C) * kept[-1]).sum(-3).contiguous()))
  return [*new_M, *new_S, *kept, *[inp for name, (_, inp) in factors.items() if name == "W1" and C is None]]

@functools.cache
def _compiled_step(cfg, weights, streams):
  """chunk_step from rows of numbers to a row, as one call that tinygrad schedules and compiles once, forward and backward, for all chunks.
  weights: names and shapes of every M, then of every S; streams: shapes of x, k, v, a, P[, C].  Gradients are taken at the sum of `bases`."""
  names, shapes = zip(*weights)
  many = len(weights) // (1 + cfg.momentum)             # matrices of M
  @function(precompile=True, precompile_backward=True)
  def step(state, chunk, *bases):
    states, size = _unpack(state, shapes, lambda n: cfg.optimizer == "muon"), sum(map(math.prod, shapes[:many]))
    base = functools.reduce(Tensor.add, [z[..., :size] for z in bases])
    out = chunk_step(cfg, dict(zip(names, _unpack(base, shapes[:many]))), dict(zip(names, states[:many])), dict(zip(names, states[many:])),
                     *_unpack(chunk, streams, lambda n: n not in (1, 2)))
    return _pack(out, 2).contiguous(), *out[len(names):]
  return step

def state_pass(cfg, toward:dict, base:dict, M:dict, S:dict, *streams:Tensor):
  """chunk_step over all N chunks, axis 2 of the streams x, k, v, a, P[, C].  Returns the last chunk's base, the last M and S, and, on axis 2 for
  every chunk, the M and S it began with and what chunk_step kept."""
  N, E, R = streams[0].shape[2], streams[0].shape[3], streams[4].shape[3]
  weights = tuple((n, w.shape[2:]) for part in (M, S) for n, w in part.items())
  if cfg.optimizer == "muon": kept = [(R, *w.shape[2:]) for w in M.values()]
  else: kept = [(E, w.shape[2]) for w in M.values()] + [(E, w.shape[3]) for n, w in M.items() if n == "W1"]
  step, shapes = _compiled_step(cfg, weights, tuple(z.shape[3:] for z in streams)), [shape for _, shape in weights]
  chunks = _pack(streams, 3).permute(2, 0, 1, 3).contiguous()
  first, rows = _pack(base.values(), 2).contiguous(), [_pack([*M.values(), *S.values()], 2).contiguous()]
  home = [_pack(toward.values(), 2).contiguous()] if toward else []
  for n in range(N): rows.append(step(rows[-1], chunks[n].contiguous(), rows[-1] if n else first, *home)[0])
  def states(row): return dict(zip(M, parts := _unpack(row, shapes))), dict(zip(S, parts[len(M):]))
  size = rows[0].shape[-1]
  starts, after = [Tensor.stack(*part, dim=2).contiguous() for part in ([r[..., :size] for r in rows[:-1]], [r[..., size:] for r in rows[1:]])]
  return states(rows[-2])[0] if N > 1 else base, *states(rows[-1]), *states(starts), _unpack(after, kept)

# *** the outputs ***

def outputs(cfg, toward:dict, M:dict, S:dict, kept:list, x:Tensor, r:Tensor, q:Tensor, a:Tensor, C:Tensor) -> Tensor:
  """y_t = M_t(phi(q_t)) for every token, without any M_t: x = phi(k) (B,H,N,E,D), r = phi(q) (B,H,N,b,D), q (B,H,N,b,d); the rest as
  state_pass and `coefficients` made it -> (B,H,N,b,value_dim)."""
  a, places = a.unsqueeze(-1), list(M)
  def read(name, z):
    y = a * (z @ M[name].transpose(-1, -2))
    if toward: y = y + z @ toward[name].unsqueeze(2).transpose(-1, -2)
    if cfg.optimizer == "gd":
      u, inp, skip = kept[places.index(name)], kept[-1] if name == "W1" else x, int(cfg.momentum)
      y = y - (C[..., skip:] * (z @ inp.transpose(-1, -2)).contiguous()).contiguous() @ u
      return y - C[..., :1] * (z @ S[name].transpose(-1, -2)) if skip else y
    U = kept[places.index(name)]
    steps = (z @ U.flatten(-3, -2).transpose(-1, -2)).contiguous().reshape(*z.shape[:-1], U.shape[-3], U.shape[-2])
    return y - (C.unsqueeze(-1) * steps).sum(-2)
  return apply(cfg, read, r, q)

def for_batch(part:dict[str, Tensor], B:int, x:Tensor|None=None) -> dict[str, Tensor]:
  """A state, or a part of one, with matrices (H,out,in) that the rows of the batch share given to each of them, (B,H,out,in).
  x (B,...): where it is cut along B over several devices so is the result, which tinygrad's Tensor.stack could not take beside cut ones otherwise."""
  def rows(w):
    w = w.unsqueeze(0).expand(B, *w.shape).contiguous()
    if x is None or isinstance(x.device, str): return w
    return w.flatten(1).cat(x.flatten(1)[:, :1], dim=1).contiguous()[:, :-1].reshape(w.shape).contiguous()       # cut, as its neighbour is
  return {n: rows(w) if w.ndim == 3 else w for n, w in part.items()}

def by_ops(cfg, a:Tensor|None, toward:dict, base:dict, M:dict, S:dict, q:Tensor, k:Tensor, v:Tensor, alpha:Tensor, theta:Tensor, eta:Tensor,
           gamma:Tensor, b:int, every:int) -> tuple[Tensor, dict, dict, dict]:
  """The recurrence over whole chunks of b tokens in stock tensor operations: large products over all chunks, but for the sequential pass.
  toward: R (H,out,in), base and M the distance from it; or empty, and they are the memory itself.
  k, v (B,H,T,.), or (B,H,window-1+T,.) with the tokens before the first; a Muon step at every `every`-th token; M, S, base (B,H,out,in), or
  (H,out,in) where the batch shares them.  Returns y (B,H,T,value_dim) and the last chunk's base, the last M and the last S."""
  B, _, T, _ = cast(tuple[int, ...], q.shape)
  reach = b + cfg.window - 1
  E = reach if b == 1 else _to_multiple(reach, 8)          # multiples of 8 tile well
  toward, base, M, S = [for_batch(part, B, q) for part in (toward, base, M, S)]
  def chunked(z): return z.reshape(*z.shape[:2], T // b, b, *z.shape[3:])
  alphas, C, P = coefficients(cfg, E, every, *map(chunked, (alpha, theta, eta, gamma)))
  keys, values = [z.pad((None, None, (T + E - b - z.shape[2], 0), None)).unfold(2, E, b).transpose(-1, -2).contiguous().contiguous_backward()
                  for z in (k, v)]                         # each chunk behind its halo: (B,H,N,E,.)
  x = phi(cfg, keys, a).contiguous()
  last = (P, C[..., -1, :]) if cfg.optimizer == "muon" else (Tensor.stack(-C[..., -1, :], *[P[..., -1, :]] * cfg.momentum, dim=3),)
  base, M, S, M_starts, S_starts, kept = state_pass(cfg, toward, base, M, S, x, keys, values, alphas[..., -1], *last)
  queries = chunked(q).contiguous()
  y = outputs(cfg, toward, M_starts, S_starts, kept, x, phi(cfg, queries, a).contiguous(), queries, alphas, C)
  return y.flatten(2, 3), base, M, S

# *** features exp: the first layer as an expansion over the tokens ***

def _stored(x:Tensor) -> Tensor: return x.contiguous().contiguous_backward()

def _expansion(z:dict) -> dict:
  """The coefficients (B,H,L+N*E,o) of the first layer of M, and of S, where a chunk starts: of the past's L keys, then of the call's gradients U.
  mm, ms, ss (B,H,N+1): how much of M, and of S, is left there in M, and of S in S, of the call's start and of every chunk."""
  def items(past, weights): return _stored(past.cat(weights.flatten(-2).unsqueeze(-1) * z["U"], dim=2))
  def left(name): return _scalar(z[name][..., 0]), z[name][..., 1:].unsqueeze(-1)
  old, new = left("mm")
  if "S" not in z: return {"M": items(old * z["M"], -new * z["lastC"])}
  (of_s, new_s), (old_s, own_s) = left("ms"), left("ss")
  return {"M": items(old * z["M"] + of_s * z["S"], new_s * z["lastP"] - new * z["lastC"]), "S": items(old_s * z["S"], own_s * z["lastP"])}

def expansion_step(cfg, z:dict) -> dict:
  """One chunk: its outputs y (B,H,b,value_dim), the gradients u (B,H,E,o) of its tokens, which are new items of the expansion, and for mlp M1 and S1,
  the second layer after it.  z: the chunk's k, v, q, a, C, P, mm, ms, ss and n, its number; the keys of the past and of the call (B,H,L+N*E,d); the
  past's coefficients M, S and base (B,H,L,o); lastC, lastP (B,H,N,E); U (B,H,N*E,o), the gradients of the chunks before, zeros behind."""
  skip, E, coefs, base1 = int(cfg.momentum), z["k"].shape[2], _expansion(z), z.get("M1")
  coefs["base"] = coefs["M"]
  if "base" in z:                                        # the call starts inside a chunk
    is_first = _scalar(z["n"] == 0)
    coefs["base"] = is_first.where(z["base"].pad((None, None, (0, z["U"].shape[2]), None)), coefs["M"]).contiguous()
    if base1 is not None: base1 = is_first.where(z["base1"], base1).contiguous()
  if "toward" in z:
    coefs["toward"] = z["toward"].pad((None, None, (0, z["U"].shape[2]), None)).contiguous()
    coefs["base"] = _stored(coefs["base"] + coefs["toward"])
    if base1 is not None: base1 = _stored(base1 + z["toward1"])
  def kernel(x, keys): return (x @ keys.transpose(-1, -2)).contiguous_backward().exp().contiguous()
  near = kernel(z["k"].cat(z["q"], dim=2).contiguous(), z["keys"])
  factors = gradients(cfg, {"W1": base1}, None, z["k"], z["v"], _stored(near[:, :, :E].contiguous_backward() @ coefs["base"]))
  u, (e, h) = factors["W" if cfg.memory == "linear" else "W2"][0], factors.get("W1", (None, None))
  a, C, C0 = z["a"].unsqueeze(-1), z["C"][..., skip:], z["C"][..., :1]
  def read(name, x):
    second = name == "W1"
    def old(part): return (x @ z[part + "1"].transpose(-1, -2) if second else near[:, :, E:].contiguous_backward() @ coefs[part]).contiguous()
    now = a * old("M") + old("toward") if "toward" in z else a * old("M")
    y = now - _stored(C * (x @ h.transpose(-1, -2) if second else kernel(z["q"], z["k"]))) @ (e if second else u)
    return (y - C0 * old("S") if skip else y).contiguous_backward()
  out = {"y": apply(cfg, read, None, z["q"]), "u": u}
  def sums(w): return e.transpose(-1, -2) @ _stored(w.unsqueeze(-1) * h)
  if e is not None: out["M1"] = a[..., -1:, :] * z["M1"] - sums(C[..., -1, :])
  if e is not None and skip:
    out["M1"] = out["M1"] - _scalar(C0[..., -1, 0]) * z["S1"]
    out["S1"] = _scalar(z["P"][..., 0]) * z["S1"] + sums(z["P"][..., 1:])
  return out

def _body(fxn:Callable, *args:Tensor) -> UOp:
  """The graph of fxn over parameters, as tinygrad's `function` makes it, whose time grows with the square of the graph where it holds scratch."""
  inputs = [x.uop.empty_like() for x in args]
  out = fxn(*map(Tensor, inputs))
  body = UOp.maketuple(*[x.uop for x in (out if isinstance(out, tuple) else (out,))])
  scratch = [u for u in body.toposort(enter_calls=False) if u.op is Ops.BUFFER and u not in inputs]
  numbered = {u: u.replace(arg=replace(u.arg, slot=n)) for n, u in enumerate(scratch)}
  return body.substitute(numbered | {u: u.param_like(n) for n, u in enumerate(inputs)})

def _traced(fxn:Callable, *args:Tensor) -> Callable:
  """fxn as a call inside a _body, scheduled and compiled once however often it is called.  Its results lie in scratch of that body, where those of a
  precompiled `function` would all be held to the end."""
  if not isinstance(args[0].device, str):                # scratch cannot be cut over several devices: scheduled anew at every call
    return lambda *args: fxn(*[x.detach() for x in args])
  body = _body(fxn, *args)
  whole = cast(UOp, transform_precompiled_call(body.call(*[x.uop.empty_like() for x in args], precompile=True)))
  sink = whole.src[0].src[1].src[0]                      # of the first result, (buffer after (call of (sink, ...)))
  def call(*args):
    room = [Tensor.invalids(*u.shape, dtype=u.dtype, device=args[0].device) for u in body.src]
    done = sink.call(*[x.uop for x in (*args, *room)], name=fxn.__name__)
    return [Tensor(x.uop.after(done)) for x in room]
  return call

def expansion_pass(cfg, kept:dict, second:dict, streams:dict) -> tuple[Tensor, Tensor, list, list]:
  """expansion_step over all N chunks, axis 2 of the streams; kept: what it takes that is the same for all; second: M1 and S1.
  Returns y (B,H,N,b,value_dim), the gradients U (B,H,N*E,o), and second where every chunk starts (B,H,N,.,.) and at the end.

  Each step reads the gradients of all before it.  Reverse mode would keep a copy for every chunk, and memory would grow with the square of the
  stream: this gradient keeps the last one only, where items that were not there yet have weight 0.  It walks the chunks backwards, each step run
  anew, and adds to sums.  Arguments and results are one row of numbers each, as a gradient comes only for results that are used."""
  B, H, N, E, _ = cast(tuple[int, ...], streams["k"].shape)
  o, b = cast(int, kept["M"].shape[-1]), streams["q"].shape[3]
  kept = kept | {"U": Tensor.zeros(B, H, N * E, o, buffer=False)}
  names, many, carried = [*kept, *second], len(kept), len(second)
  shapes = [z.shape[3:] for z in streams.values()]
  before = [*[z.shape[2:] for z in (*kept.values(), *second.values())], (N, sum(map(math.prod, shapes))), (1,)]     # (1,): a chunk's number
  ends = [z.shape[2:] for z in second.values()]
  after = [(N, b, streams["v"].shape[-1]), (N * E, o), *[(N, *shape) for shape in ends], *ends]
  def whole(row, shapes): return [z.contiguous() for z in _unpack(row, shapes, lambda n: False)]
  def own(z, n): return (Tensor.arange(N) == n.cast(dtypes.int32)).reshape(B, H, N, *[1] * (z.ndim - 3)).where(z, 0)
  def chunk_of(z, n): return own(z, n).sum(2).contiguous()
  def step(x, chunk, n): return expansion_step(cfg, dict(zip(names, x)) | dict(zip(streams, _unpack(chunk, shapes))) | {"n": n.squeeze(-1)})
  def stored(*x): return tuple(z.contiguous() for z in x)
  def chunk_forward(*args):
    *x, chunks, n = args
    out = step(x, chunk_of(chunks, n), n)
    U = x[many - 1].reshape(B, H, N, E, o) + own(out["u"].unsqueeze(2), n)
    return stored(out["y"], U.flatten(2, 3), *[out[z] for z in second], n + 1)
  def forward(row):
    *x, chunks, n = whole(row, before)
    call = _traced(chunk_forward, *x, chunks, n)
    ys:list[Tensor] = []
    starts:list[list[Tensor]] = []
    for _ in range(N):
      starts.append(x[many:])
      y, U, *rest, n = call(*x, chunks, n)
      ys, x = [*ys, y], [*x[:many - 1], U, *rest]
    return _pack([Tensor.stack(*ys, dim=2), *x[many - 1:many], *[Tensor.stack(*z, dim=2) for z in zip(*starts)], *x[many:]], 2).contiguous()
  def chunk_backward(*args):
    fixed, starts, (chunks, dy), dstarts, dends, sums = [args[m:m + s] for m, s in zip(places, sizes)]
    n = args[-1]
    x = [*fixed, *[chunk_of(z, n) for z in starts], chunk_of(chunks, n)]
    out, given = step(x[:-1], x[-1], n), [chunk_of(dy, n), chunk_of(sums[-1].reshape(B, H, N, E, o), n), *dends]
    found = sum(((out[z] * g).sum() for z, g in zip(("y", "u", *second), given)), Tensor(0.0)).gradient(*x)
    begun = [g + chunk_of(dz, n) for g, dz in zip(found[many:], dstarts)]
    return stored(*[z + g for z, g in zip(sums, found)], *begun, found[-1], n - 1)
  sizes = (many, carried, 2, carried, carried, many)
  places = [0, *itertools.accumulate(sizes)]
  def gradient(row, result, grad, zeros):
    x, (_, U, *rest), (dy, dU, *drest) = whole(row, before), whole(result, after), whole(grad, after)
    fixed, dends, sums = [*x[:many - 1], U], drest[carried:], [*whole(zeros, before)[:many - 1], dU]
    found:list[Tensor] = []
    same, n = [*fixed, *rest[:carried], x[-2], dy, *drest[:carried]], (x[-1] + (N - 1)).contiguous()
    call = _traced(chunk_backward, *same, *dends, *sums, n)
    for _ in range(N):
      *sums, dchunk, n = call(*same, *dends, *sums, n)
      sums, dends, found = sums[:many], sums[many:], [dchunk, *found]
    return _pack([*sums, *dends, Tensor.stack(*found, dim=2), n], 2).contiguous()
  def backward(grad, call):
    args = [row := Tensor(call.src[1]), Tensor(call.gettuple(0)), Tensor(grad), row.zeros_like()]
    return (_body(gradient, *args).call(*[x.uop for x in args], precompile=True).gettuple(0),)
  row = _pack([*kept.values(), *second.values(), _pack(streams.values(), 3), Tensor.zeros(B, H, 1, buffer=False)], 2).contiguous()
  y, U, *rest = _unpack(Tensor(_body(forward, row).call(row.uop, precompile=True, grad_fxn=backward).gettuple(0)), after)
  return y, U, rest[:carried], rest[carried:]

def expanded(cfg, old:Tensor, toward:dict, base:dict, M:dict, S:dict, q:Tensor, k:Tensor, v:Tensor, alpha:Tensor, theta:Tensor, eta:Tensor,
             gamma:Tensor, b:int, starts:bool, place:Any, capacity:int) -> tuple[Tensor, dict, dict, dict]:
  """by_ops for features=exp, but that "u" (B,H,L,o) of base, M and S are the coefficients of the keys old (B,H,L,d) in place of the first layer's
  matrix, and come back for `capacity` keys, the call's first row at `place`.  starts: base is M.
  Costs an attention over the past and the call's stream per chunk, without softmax; memory grows linearly with the stream."""
  B, _, T, _ = cast(tuple[int, ...], q.shape)
  E, N, skip = b + cfg.window - 1, T // b, int(cfg.momentum)
  (old,), toward, base, M, S = for_batch({"": old}, B, q).values(), *[for_batch(part, B, q) for part in (toward, base, M, S)]
  def chunked(z): return z.reshape(*z.shape[:2], N, b, *z.shape[3:])
  alphas, C, P = coefficients(cfg, E, 1, *map(chunked, (alpha, theta, eta, gamma)))
  keys, values = [z.pad((None, None, (T + E - b - z.shape[2], 0), None)).unfold(2, E, b).transpose(-1, -2).contiguous() for z in (k, v)]
  last, lastP = C[..., -1, :], P[..., -1, :]
  def table(gate):                                       # what is left at every chunk's start, and at the end, of the call's start and of every chunk
    return (Tensor.arange(N + 1) == 0).float().reshape(1, 1, 1, N + 1).expand(*gate.shape[:2], 1, N + 1).cat(decay(gate), dim=2).contiguous()
  tables = {"mm": table(alphas[..., -1])}
  if skip:
    tables["ss"] = table(lastP[..., 0])
    tables["ms"] = (tables["mm"][..., 1:] * -last[..., 0].unsqueeze(-2)).contiguous() @ tables["ss"][..., :-1, :]
  kept = {"keys": old.cat(keys.flatten(2, 3), dim=2), "lastC": last[..., skip:], "M": M["u"]}
  if skip: kept |= {"lastP": lastP[..., 1:], "S": S["u"]}
  if not starts: kept |= {"base": base["u"]} | ({"base1": base["W1"]} if "W1" in base else {})
  if toward: kept["toward"] = toward["u"].pad((None, None, (0, old.shape[2] - toward["u"].shape[2]), None))
  if "W1" in toward: kept["toward1"] = toward["W1"]
  second = {f"{n}1": part["W1"] for n, part in (("M", M), ("S", S)) if "W1" in part}
  streams = {"k": keys, "v": values, "q": chunked(q), "a": alphas, "C": C, "P": lastP} | {n: z[..., :-1, :] for n, z in tables.items()}
  y, U, begun, ended = expansion_pass(cfg, kept, second, streams)
  # one coefficient a token: the gradients that one token's key has in several chunks, as halo and as its own, are added
  first = place - (E - b)                                # the place of the first row's oldest key
  def merged(name, row):
    past, new = _expansion(kept | {"U": U} | {n: z[..., row, :] for n, z in tables.items()})[name].split([old.shape[2], N * E], dim=2)
    new, reach = new.reshape(*new.shape[:2], N, E, new.shape[3]), -(-E // b) if N > 1 else 1
    size = b if N > 1 else E
    blocks = new.pad((None, None, None, (0, reach * size - E), None)).split(size, dim=3)
    new = sum(z.flatten(2, 3).pad((None, None, (n * size, (reach - 1 - n) * size), None)) for n, z in enumerate(blocks)).contiguous()
    if not isinstance(place, int):
      return longer(past) + (Tensor.arange(capacity).reshape(capacity, 1) == first + Tensor.arange(new.shape[2])).where(1.0, 0.0) @ new
    new = new[:, :, max(-first, 0):capacity - first]
    return longer(past) + new.pad((None, None, (max(first, 0), capacity - max(first, 0) - new.shape[2]), None))
  def longer(z): return z.pad((None, None, (0, capacity - z.shape[2]), None))
  after = {p: {"u": merged(p, N)} | ({"W1": ended[n]} if ended else {}) for n, p in enumerate(("M", "S")[:1 + skip])}
  if N > 1: base = {"u": merged("M", N - 1)} | ({"W1": begun[0][:, :, -1]} if begun else {})
  else: base = base | {"u": longer(base["u"])}
  return y.flatten(2, 3), base, after["M"], after.get("S", {})

# *** matrices inside a kernel ***

@functools.cache
def _symbol(name:str) -> UOp: return UOp.variable(name, -1.0, 1.0, dtypes.float)
_I, _J = UOp.variable("i", 0, 1 << 24), UOp.variable("j", 0, 1 << 24)

def _put(u:UOp, known:dict[UOp, UOp]) -> UOp:
  """u with its symbols replaced; what replaces them may lie deep inside other loops, and is not looked into."""
  if u not in known: known[u] = u.replace(src=tuple(_put(s, known) for s in u.src)) if u.src else u
  return known[u]

def _divisor(n:int, *liked:int) -> int:
  return next((s for s in liked if n % s == 0), max(s for s in range(1, max(liked) + 1) if n % s == 0))

def _constant(x:float) -> UOp: return UOp.const(x, dtypes.float)

class Matrix:
  """An expression: element (i, j) is f(i, j, *elements (i, j) of the stored matrices `leaves`); a leaf of one row or column repeats it."""
  def __init__(self, k:Kernel, shape:tuple[int, int], leaves:tuple[Stored, ...], f:Any): self.k, self.shape, self.leaves, self.f = k, shape, leaves, f
  def map(self, op:Callable, *others:Any) -> Matrix:
    """op on every element, and on those of the others, matrices or numbers."""
    parts = [x.stored() if isinstance(x, Product) else x if isinstance(x, Matrix) else Matrix(self.k, (1, 1), (), lambda i, j, x=x: x)
             for x in (self, *others)]
    leaves = tuple(dict.fromkeys(leaf for p in parts for leaf in p.leaves))
    places = [[leaves.index(leaf) for leaf in p.leaves] for p in parts]
    def f(i, j, *x): return op(*[p.f(i, j, *[x[n] for n in at]) for p, at in zip(parts, places)])
    return Matrix(self.k, (max(p.shape[0] for p in parts), max(p.shape[1] for p in parts)), leaves, f)
  def __add__(self, o): return o + self if isinstance(o, Product) else self.map(lambda a, b: a + b, o)
  def __sub__(self, o): return -o + self if isinstance(o, Product) else self.map(lambda a, b: a - b, o)
  def __mul__(self, o): return self.map(lambda a, b: a * b, o)
  def __neg__(self): return self * -1.0
  def __radd__(self, o): return self + o
  def __rsub__(self, o): return -self + o
  def __rmul__(self, o): return self * o
  def __pow__(self, n:int): return self.map(lambda a: functools.reduce(lambda x, y: x * y, [a] * n))
  def __matmul__(self, o:Matrix): return Product(self.k, self.stored(), o.stored())
  def square(self): return self ** 2
  def rsqrt(self): return self.map(lambda a: 1 / a.sqrt())
  def sigmoid(self): return self.k.sigmoid(self)
  def sum(self, *_, **__): return self.k.sum(self)
  def transpose(self, *_): return self.stored().transpose()
  def contiguous(self): return self.stored()
  def contiguous_backward(self): return self
  def stored(self) -> Stored: return self.k.assign(self.k.new(self.shape, self.leaves), self)
  def flip(self): return Matrix(self.k, self.shape[::-1], tuple(m.transpose() for m in self.leaves), lambda i, j, *x: self.f(j, i, *x))

class Product(Matrix):
  """start + scale x y, computed where it is first needed: added terms are where its sums start."""
  def __init__(self, k:Kernel, x:Stored, y:Stored, start:Matrix|None=None, scale:float=1.0):
    super().__init__(k, (x.shape[0], y.shape[1]), (), None)
    self.x, self.y, self.start, self.scale = x, y, start, scale
    self.place:Stored|None = None
  def __add__(self, o):
    if isinstance(o, Product): o = o.stored()
    return Product(self.k, self.x, self.y, o if self.start is None else self.start + o, self.scale)
  def __sub__(self, o): return self + -o
  def __mul__(self, o):
    return Product(self.k, self.x, self.y, self.start and self.start * o, self.scale * o) if isinstance(o, float) else self.stored() * o
  def stored(self) -> Stored:
    if self.place is None:                                 # column by column where that saves copying the larger factor
      tall = self.y.cols != 1 and self.shape[0] > 1 and (self.x.rows == 1 or self.x.shape[0] < self.y.shape[1])
      self.place = self.k.assign(self.k.new(self.shape[::-1]).transpose() if tall else self.k.new(self.shape), self)
    return self.place

class Stored(Matrix):
  """Element (i, j) lies at start + i rows + j cols of a buffer (None: its value is not wanted); its gradient, if it has one, in `grad`."""
  def __init__(self, k:Kernel, buffer:UOp|None, shape:tuple[int, int], start:Any, rows:int, cols:int=1, grad:Any=None, row:Any=None):
    super().__init__(k, shape, (self,), lambda i, j, x: x)
    self.buffer, self.start, self.rows, self.cols, self.grad, self.row = buffer, start, rows, cols, grad, row
    self.tall = cols != 1 == rows                          # columns lie along memory
  def at(self, i, j):
    i, j = 0 if self.shape[0] == 1 else i, 0 if self.shape[1] == 1 else j
    return self.start + (self.row(i) if self.row else i) * self.rows + j * self.cols
  def view(self, shape:tuple[int, int], start:Any, rows:int, cols:int) -> Stored:
    """Other rows and columns of the same memory, and of its gradient."""
    return self.k.memo((self, shape, start, rows, cols), lambda: Stored(
      self.k, self.buffer, shape, self.start + start, rows, cols, self.grad and self.grad.view(shape, start, rows, cols)))
  def transpose(self, *_): return self.view(self.shape[::-1], 0, self.cols, self.rows)
  def block(self, i:Any, R:int, j:int=0, C:int|None=None) -> Stored:
    return self.view((R, self.shape[1] if C is None else C), i * self.rows + j * self.cols, self.rows, self.cols)
  def stored(self): return self

class Kernel:
  """Loop nests in program order: each waits for the one before.

  The nests: fill, each (elementwise), add (elementwise, onto what is there), gather (a sum), product.  Statements are made of them (assign, sigmoid,
  sum, scan), and each puts its adjoint, nests again, on the tape.  So the backward pass of a recurrence is its own tape in reverse:
    Z = expression       dleaf += dexpression/dleaf * dZ, summed where the leaf repeats
    Z = start + s X Y    dX += s dZ Y^T,  dY += s X^T dZ,  dstart += dZ
    loop, with a carry   the loop in reverse, from what every turn has kept"""
  def __init__(self, values:UOp, grads:UOp|None, quiet:bool):
    self.ids, self.wait, self.tape, self.memos = itertools.count(), cast(tuple[UOp, ...], ()), cast(list|None, None), [cast(dict, {})]
    self.values, self.grads, self.origin, self.grads_origin, self.used, self.used_grads = values, grads, cast(Any, 0), cast(Any, 0), 0, 0
    self.quiet, self.keeping, self.times, self.flops = quiet, False, 1, 0      # quiet: only count the memory that is needed
  def memo(self, key, make:Callable):
    for known in self.memos:
      if key in known: return known[key]
    return self.memos[-1].setdefault(key, make())
  @contextlib.contextmanager
  def loop(self, size:int, kind=AxisType.LOOP):
    if size == 1 or self.quiet:
      yield UOp.const(0)
      return
    r, self.times = UOp.range(size, next(self.ids), kind), self.times * size
    self.wait = (*self.wait, r)
    yield r
    self.wait, self.times = (self.wait[0].end(r),), self.times // size
  def code(self, name:str, numbers:int) -> UOp|None:
    """All of it, for the compiler; numbers: how many its arguments hold.  None when it was quiet."""
    if not self.wait: return None
    return self.wait[0].sink(arg=KernelInfo(name, opts_to_apply=(), estimates=Estimates(self.flops, 4 * numbers, 4 * numbers)), tag=1)
  def load(self, m:Stored, i, j, wait=None) -> UOp:
    assert m.buffer is not None
    return m.buffer.after(*(self.wait if wait is None else wait))[m.at(i, j)]
  def store(self, m:Stored, i, j, value:UOp):
    if not self.quiet and m.buffer is not None: self.wait = (m.buffer.after(*self.wait)[m.at(i, j)].store(value),)
  def new(self, shape:tuple[int, int], like:tuple=()) -> Stored:
    """Scratch memory for a matrix, in the order of the one it is made of; with a gradient while there is a tape."""
    if any(m.shape == shape and m.tall for m in like[:1]): return self.new(shape[::-1]).transpose()
    size, grad = shape[0] * shape[1], None
    if self.tape is not None:
      grad = Stored(self, self.grads, shape, self.grads_origin + self.used_grads, shape[1])
      self.used_grads += size
    self.used += size
    return Stored(self, self.values, shape, self.origin + (self.used - size), shape[1], 1, grad)

  # nests
  def fill(self, buffer:UOp, start, size:int):
    if self.quiet: return
    with self.loop(size) as j: self.store(Stored(self, buffer, (1, size), start, size), 0, j, _constant(0.0))
  def elements(self, leaves, i, j, wait) -> list[UOp]: return [self.load(m, i, j, wait) for m in leaves]
  def each(self, out:Stored, f:Callable, leaves):
    """out[i,j] = f(i, j, elements); the inner loop runs along out's memory."""
    if self.quiet: return
    before, tall = self.wait, out.tall
    with self.loop(out.shape[tall]) as a:
      with self.loop(out.shape[not tall]) as b:
        i, j = (b, a) if tall else (a, b)
        self.store(out, i, j, f(i, j, *self.elements(leaves, i, j, before)))
  def add(self, outs:list[Stored], fs:list[Callable], leaves, shape:tuple[int, int]):
    """Every out[i,j] += its f(i, j, elements), over shape; an out of one row or column takes the sum."""
    if self.quiet: return
    before, tall = self.wait, leaves[0].tall
    with self.loop(shape[tall]) as a:
      with self.loop(shape[not tall]) as b:
        i, j = (b, a) if tall else (a, b)
        values = self.elements(leaves, i, j, before)
        sums = [self.load(out, i, j) + f(i, j, *values) for out, f in zip(outs, fs)]
        for out, total in zip(outs, sums): self.store(out, i, j, total)
  def gather(self, out:Stored, f:Callable, leaves, shape:tuple[int, int]):
    """out[i] += sum_j f(i, j, elements), for every row, or one sum for all when out has one element.  Where the inner loop would add to one place
    it adds to several side by side, which do not wait for each other."""
    if self.quiet: return
    tall = leaves[0].tall and shape[0] > 1
    if out.shape[1] > 1 or out.shape[0] > 1 and tall: return self.add([out], [f], leaves, shape)
    if tall: return self.gather(out, lambda i, j, *x: f(j, i, *x), [m.transpose() for m in leaves], shape[::-1])
    before, n, whole = self.wait, _divisor(shape[1], 16, 8, 4), out.shape[0] == 1
    lanes, total = self.register(n, n), self.register(1, 0)
    def clear():
      with self.loop(n) as l: self.store(lanes, 0, l, _constant(0.0))
    def finish(i):
      self.store(total, 0, 0, self.load(out, i, 0))
      with self.loop(n) as l: self.store(total, 0, 0, self.load(total, 0, 0) + self.load(lanes, 0, l))
      self.store(out, i, 0, self.load(total, 0, 0))
    if whole: clear()
    with self.loop(shape[0]) as i:
      if not whole: clear()
      with self.loop(shape[1] // n) as m:
        with self.loop(n) as l:
          self.store(lanes, 0, l, self.load(lanes, 0, l) + f(i, m * n + l, *self.elements(leaves, i, m * n + l, before)))
      if not whole: finish(i)
    if whole: finish(0)
  def register(self, n:int, slot:int) -> Stored: return Stored(self, UOp.placeholder((n,), dtypes.float, slot, addrspace=AddrSpace.REG), (1, n), 0, n)
  def copied(self, m:Stored) -> Stored:
    def make():
      tape, self.tape = self.tape, None
      copy = self.new(m.shape)
      self.tape = tape
      self.each(copy, m.f, m.leaves)
      return copy
    return self.memo(("copied", m), make)
  def product(self, out:Stored, x:Stored, y:Stored, start:Matrix|None=None, scale:float=1.0, add:bool=False, large:bool=False):
    """out = start + scale x y, or out += scale x y.  Tiles of out stay in registers; the inner loop runs along the memory of out and of y.
    large: what does not fit the caches is read in blocks, a panel of y at a time copied to where it lies together."""
    if out.tall: out, x, y, start = out.transpose(), y.transpose(), x.transpose(), start and start.flip()
    (R, C), K = out.shape, x.shape[1]
    if R == 1 and y.tall and start is None:                # a row times columns that lie along memory: dot products
      if not add: self.each(out, lambda i, j: _constant(0.0), ())
      return self.gather(out.transpose(), lambda i, j, a, b: a * b * scale, (y.transpose(), x), (C, K))
    if y.cols != 1 and C > 1: y = self.copied(y)
    rm, rn, depth = _divisor(R, 4, 3, 2), _divisor(C, 24, 32, 16, 8), K
    if large and K > 256: depth = max(n for n in range(1, 257) if K % n == 0)
    panel = self.new((depth, rn)) if large and R > 16 else None
    if self.quiet: return
    self.flops += 2 * R * C * K * self.times
    tile = [self.register(rn, 100 * (r + 1) + rn) for r in range(rm)]
    def first(block, i, j, before):
      if start: return start.f(i, j, *self.elements(start.leaves, i, j, before))
      return self.load(out, i, j) if add else block.eq(0).where(0.0, self.load(out, i, j)) if depth < K else _constant(0.0)
    with self.loop(K // depth) as o:
      with self.loop(C // rn) as c:
        part = y.block(o * depth, depth, c * rn, rn)
        if panel: self.each(panel, part.f, (part,))
        part, before = panel or part, self.wait
        with self.loop(R // rm) as r:                      # rows apart: those side by side would be loaded as vectors, which compile slowly
          rows = [r * rm + n if large else n * (R // rm) + r for n in range(rm)]
          with self.loop(rn) as l:
            for i, t in zip(rows, tile): self.store(t, 0, l, first(o, i, c * rn + l, before) if scale == 1.0 else _constant(0.0))
          with self.loop(depth) as n:
            with self.loop(rn) as l:
              for i, t in zip(rows, tile):
                self.store(t, 0, l, self.load(t, 0, l) + self.load(x, i, o * depth + n, before) * self.load(part, n, l, before))
          with self.loop(rn) as l:
            for i, t in zip(rows, tile):
              total = self.load(t, 0, l)
              self.store(out, i, c * rn + l, total if scale == 1.0 else total * scale + first(o, i, c * rn + l, before))

  # statements
  def record(self, adjoint:Callable):
    if self.tape is not None: self.tape.append(adjoint)
  def spread(self, e:Matrix, g:Stored):
    """The adjoint of an expression whose gradient is g: adds to the gradient of each of its leaves."""
    symbols = [_symbol(f"x{n}") for n in range(len(e.leaves))]
    slopes = compute_gradient(e.f(_I, _J, *symbols), _symbol("g"), set(symbols)) if e.leaves else {}
    def f(slope): return lambda i, j, *values: _put(slope, dict(zip((_I, _J, _symbol("g"), *symbols), (i, j, *values))))
    wanted = [(leaf, leaf.grad, f(slopes[x])) for leaf, x in zip(e.leaves, symbols) if leaf.grad is not None and x in slopes]
    same = [(grad, value) for leaf, grad, value in wanted if leaf.shape == e.shape]
    if same: self.add([grad for grad, _ in same], [value for _, value in same], (g, *e.leaves), e.shape)
    for leaf, grad, value in wanted:
      if leaf.shape != e.shape: self.gather(grad, value, (g, *e.leaves), e.shape)
  def assign(self, out:Stored, e:Matrix) -> Stored:
    if out.buffer is not None:
      if isinstance(e, Product): self.product(out, e.x, e.y, e.start, e.scale)
      else: self.each(out, e.f, e.leaves)
    def adjoint():
      if not isinstance(e, Product): return self.spread(e, out.grad)
      if e.x.grad: self.product(e.x.grad, out.grad, e.y.transpose(), scale=e.scale, add=True)
      if e.y.grad: self.product(e.y.grad, e.x.transpose(), out.grad, scale=e.scale, add=True)
      if e.start: self.spread(e.start, out.grad)
    self.record(adjoint)
    return out
  def sigmoid(self, e:Matrix) -> Stored:
    """Stored, since its slope is made of it: exp is the dearest of the elementwise operations."""
    s = self.new(e.shape, e.leaves)
    self.each(s, lambda i, j, *x: 1 / (1 + (e.f(i, j, *x) * (-1 / math.log(2))).exp2()), e.leaves)
    def adjoint():
      self.each(s.grad, lambda i, j, y, g: y * (1 - y) * g, (s, s.grad))
      self.spread(e, s.grad)
    self.record(adjoint)
    return s
  def sum(self, e:Matrix) -> Stored:
    out = self.new((1, 1))
    self.fill(self.values, out.start, 1)
    self.gather(out, e.f, e.leaves, e.shape)
    self.record(lambda: self.spread(e, out.grad))
    return out
  def backward(self, body:Callable):
    """body, recorded, and then its adjoints in reverse; the gradients of all that it makes start at zero."""
    outer, self.tape, first = self.tape, cast(list|None, []), self.used_grads
    self.memos.append({})
    body()
    if self.used_grads > first: self.fill(cast(UOp, self.grads), self.grads_origin + first, self.used_grads - first)
    tape, self.tape = cast(list, self.tape), outer
    for adjoint in reversed(tape): adjoint()
    self.memos.pop()
  def scan(self, size:int, body:Callable, carry) -> Callable:
    """body(t, now, then) for every t: reads the matrices `now` (at first: carry) and assigns `then`.  Returns t -> the matrices after t turns.
    Under a tape all that a turn computes is kept for the adjoint.  (A loop without a carry is only run there: nothing else needs it.)"""
    stacks = []
    for m in carry:
      R, C = m.shape[::-1] if m.tall else m.shape
      stacks.append((self.new(((size + 1) * R, C)), R, m.tall))
    def at(t) -> list[Stored]: return [s.block(t * R, R).transpose() if tall else s.block(t * R, R) for s, R, tall in stacks]
    for s, m in zip(at(0), carry): self.assign(s, m)
    base, tape, keeping, grads = self.origin + self.used, self.tape, self.keeping, self.used_grads
    recorded = tape is not None or keeping
    kept = recorded and len(carry) > 0
    def turn(t, stride, quiet) -> int:
      frame = self.origin, self.used, self.quiet
      self.origin, self.used, self.quiet = base + t * stride, 0, quiet or self.quiet
      body(t, at(t), at(t + 1))
      (self.origin, self.used, self.quiet), needed = frame, self.used
      return needed
    def forward(t, stride, quiet) -> int:
      self.memos.append({})
      needed = turn(t, stride, quiet)
      self.memos.pop()
      return needed
    self.tape, self.keeping = [] if recorded else None, recorded
    needed = forward(UOp.const(0), 0, True)                # quiet: how much memory does a turn take?
    stride, self.used_grads, self.tape = needed if kept else 0, grads, None
    self.used += size * stride or needed
    if kept or not recorded:
      with self.loop(size) as t: forward(t, stride, False)
    self.tape, self.keeping = tape, keeping
    def adjoint():
      with self.loop(size) as s: self.backward(lambda: turn(size - 1 - s, stride, kept))
    self.record(adjoint)
    return at
  def iterate(self, steps:int, body:Callable, carry) -> tuple:
    def turn(_, now, then):
      for m, value in zip(then, body(*now)): self.assign(m, value)
    return tuple(self.scan(steps, turn, carry)(steps))

# *** compiled kernels as Tensors ***

def on_cpu(device:Any) -> bool: return isinstance(device, str) and device.startswith("CPU")              # a tuple: several devices

@disable_gc()
def _program(sink:UOp, args:list[str], device:str) -> tuple[list[str], UOp]:
  """A compiled kernel and the arguments that it uses.  Its code is kept, its thousands of operations are not: every pass over the graph would walk
  them.  The search for barriers around LOCAL memory is left out, for there is none: it walks all that is before each loop's end, 40% of the time."""
  search, codegen.pm_implicit_barriers = codegen.pm_implicit_barriers, PatternMatcher([])
  try: program = to_program(sink, Device[device].renderer)
  finally: codegen.pm_implicit_barriers = search
  place = {slot: n for n, slot in enumerate(program.arg.globals)}
  params = tuple(u.replace(arg=replace(u.arg, slot=place[u.arg.slot])) for u in program.src[1].src if u.op is Ops.PARAM)
  info = replace(program.arg, **{name: tuple(place[slot] for slot in getattr(program.arg, name)) for name in ("globals", "outs", "ins")})
  light = (UOp(Ops.SINK, arg=program.src[0].arg), program.src[1].replace(src=params), *program.src[2:])
  return [args[slot] for slot in place], program.replace(arg=info, src=light)

def _call(compiled, given:dict[str, Tensor], device:str, grad_fxn=None) -> dict[str, Tensor]:
  args, size, program = compiled
  buffers = [given[n] if n in given else Tensor.empty(size[n], dtype=dtypes.float, device=device) for n in args]
  call = program.call(*[t.uop for t in buffers], grad_fxn=grad_fxn)
  return {n: Tensor(t.uop.after(call)) for n, t in zip(args, buffers)}

# *** dense products ***

@functools.cache
def _matmul_kernel(G:int, R:int, C:int, K:int, xt:bool, yt:bool, device:str):
  def build(scratch:int):
    size = dict(out=G * R * C, values=max(scratch, 1), x=G * R * K, y=G * K * C)
    out, values, x, y = [UOp.placeholder((n,), dtypes.float, slot=slot) for slot, n in enumerate(size.values())]
    k = Kernel(values, None, scratch < 0)
    with k.loop(G) as g:
      def matrix(buffer, R, C, transposed):
        return matrix(buffer, C, R, False).transpose() if transposed else Stored(k, buffer, (R, C), g * (R * C), C)
      k.product(matrix(out, R, C, False), matrix(x, R, K, xt), matrix(y, K, C, yt), large=True)
    return list(size), size, k.code(f"matmul_{G}_{R}_{C}_{K}", sum(size.values())), k.used
  args, size, sink, _ = build(build(-1)[3])
  args, program = _program(sink, args, device)
  return args, size, program

def matmul(x:Tensor, y:Tensor, xt:bool=False, yt:bool=False) -> Tensor:
  """x @ y over the last two axes, each first transposed if asked (xt, yt); other axes equal, or y has none; the result is float32.  On a CPU
  with the register tile of Kernel.product, several times faster than a stock product (its gradients too); elsewhere, and for sizes that no tile
  divides, a stock product."""
  if y.ndim == 2 and not xt: x, lead = x.reshape(-1, x.shape[-1]), x.shape[:-1]
  else: lead = x.shape[:-2] + (x.shape[-1 if xt else -2],)
  (R, K), (K2, C) = [cast(tuple[int, int], z.shape[-2:][::-1 if t else 1]) for z, t in ((x, xt), (y, yt))]
  if K != K2: raise ValueError(f"matmul: {K} columns do not meet {K2} rows")
  if x.dtype == dtypes.bfloat16 and on_cpu(x.device): x, y = x.float(), y.float()        # their products are exact in float32
  fits = on_cpu(x.device) and x.dtype == y.dtype == dtypes.float and (C < 8 or _divisor(C, 24, 32, 16, 8) >= 4)
  if not fits: return (x.transpose(-1, -2) if xt else x).dot(y.transpose(-1, -2) if yt else y, dtype=dtypes.float).reshape(*lead, C)
  G, device = math.prod(cast(tuple[int, ...], x.shape[:-2])), cast(str, x.device)
  def backward(g, call):
    shapes = (K, R) if xt else (R, K), (C, K) if yt else (K, C), (R, C)
    a, b, g = [Tensor(z).reshape(G, *shape) for z, shape in zip((*call.src[-2:], g), shapes)]
    da = matmul(b, g, yt, True) if xt else matmul(g, b, False, not yt)
    db = matmul(g, a, True, xt) if yt else matmul(a, g, not xt, False)
    return (*[None] * (len(call.src) - 3), da.reshape(-1).uop, db.reshape(-1).uop)
  kernel = _matmul_kernel(G, R, C, K, xt, yt, device)
  out = _call(kernel, dict(x=x.reshape(-1).contiguous(), y=y.reshape(-1).contiguous()), device, backward)["out"]
  return out.reshape(*lead, C)

# *** the whole recurrence in one kernel, and its backward pass in another ***

def _to_multiple(n:int, m:int) -> int: return -(-n // m) * m

class _Shapes(NamedTuple):
  """What a kernel is compiled for.  heads: B*H; given: heads of the first state (H where the batch shares it); every: tokens to a Muon step."""
  heads: int
  given: int
  toward: int                                            # heads of the memory that forgetting leads to: H, or 0 where that is zero
  chunks: int
  chunk: int
  halo: bool
  d: int
  dv: int
  D: int
  every: int
  weights: tuple[tuple[str, int, int], ...]              # name, rows, columns

class _Layout:
  """Where the matrices M (out,in) of one head lie in a row of numbers, and behind them those of S: each along its longer side, so that
  Newton-Schulz and the products with it run along memory."""
  def __init__(self, cfg, weights):
    self.weights, sizes = weights, [o * i for _, o, i in weights]
    self.half = sum(sizes)
    self.size = self.half * (1 + cfg.momentum)
    self.starts = {name: sum(sizes[:n]) for n, (name, _, _) in enumerate(weights)}
  def views(self, k:Kernel, buffer:UOp|None, start, grad:tuple[UOp, Any]|None=None) -> dict[str, Stored]:
    def view(name, o, i) -> Stored:
      R, C, at = (i, o, self.starts[name]) if i >= o else (o, i, self.starts[name])
      m = Stored(k, buffer, (R, C), start + at, C, 1, grad and Stored(k, grad[0], (R, C), grad[1] + at, C))
      return m.transpose() if i >= o else m
    return {name: view(name, o, i) for name, o, i in self.weights}
  def pack(self, parts:list[dict[str, Tensor]]) -> Tensor:
    """Dicts of (heads,out,in) -> (heads, numbers); rows are padded with zeros to the size that the layout has for them."""
    rows = []
    for part in parts:
      for name, o, i in self.weights:
        w = part[name].pad((None, None, (0, i - part[name].shape[-1])))
        rows.append((w.transpose(-1, -2) if i >= o else w).reshape(w.shape[0], o * i))
    return Tensor.cat(*rows, dim=-1)
  def unpack(self, rows:Tensor, like:dict[str, Tensor]) -> dict[str, Tensor]:
    """(heads, numbers) -> matrices of the shapes of `like`."""
    out = {}
    for name, o, i in self.weights:
      w = rows[:, self.starts[name]:self.starts[name] + o * i]
      w = w.reshape(-1, i, o).transpose(-1, -2) if i >= o else w.reshape(-1, o, i)
      out[name] = w[..., :like[name].shape[-1]].reshape(like[name].shape)
    return out

def _gd_chunk(k:Kernel, cfg, b:int, E:int, kept, r, queries, y, band, alpha, theta, eta, toward, M, S, then):
  """The dual form: rows P_t and C_t of weights over the chunk's gradients (column E: over S), then outputs and the next state as products."""
  W, one = band.shape[1], Matrix(k, (1, 1), (), lambda i, j: _constant(1.0))
  start = [Matrix(k, (1, W), (), lambda i, j: _constant(0.0)).stored(), one.stored()]      # C, what is left of M, and P
  if cfg.momentum: start.append(Matrix(k, (1, W), (), lambda i, j: j.eq(E).where(1.0, 0.0)).stored())
  def token(t, now, then):
    p = band.block(t, 1)
    if cfg.momentum: p = k.assign(then[2], theta.block(t, 1) * now[2] + p)                  # S_t = theta_t S_{t-1} + G_t
    k.assign(then[0], alpha.block(t, 1) * now[0] - eta.block(t, 1) * p)                     # M_t = alpha_t M_{t-1} - eta_t S_t
    k.assign(then[1], alpha.block(t, 1) * now[1])
  rows = k.scan(b, token, start)
  (C, left), last = [m.block(0, b) for m in rows(1)[:2]], rows(b)
  def read(name, z):
    u, x = kept[name]
    state = left * (z @ M[name].transpose())
    if toward: state = z @ toward[name].transpose() + state
    if cfg.momentum: state = state + C.block(0, b, E, 1) * (z @ S[name].transpose())
    return (C.block(0, b, 0, E) * (z @ x.transpose())) @ u + state
  k.assign(y, apply(cfg, read, r, queries))
  for name, (u, x) in kept.items():
    def weighted(row): return (row.block(0, 1, 0, E).transpose() * u).stored().transpose() @ x
    state = last[1] * M[name]
    if cfg.momentum:
      state = state + last[0].block(0, 1, E, 1) * S[name]
      k.assign(then[1][name], weighted(last[2]) + last[2].block(0, 1, E, 1) * S[name])
    k.assign(then[0][name], weighted(last[0]) + state)

def _muon_chunk(k:Kernel, cfg, b:int, every:int, kept, r, queries, y, band, alpha, theta, eta, toward, M, S, then):
  """Newton-Schulz is not linear: S and M are written out at every step.  A group is the `every` tokens up to a step; between steps M only fades, so
  a group's tokens before its step, and the last of the group before, read the same M.  r, queries: one row of zeros, the tokens, every - 1 zeros."""
  weights, fall, stay = band, alpha, theta                 # over a group: weights of its gradients in S, what is left of M, and of S
  if every > 1:
    def token(t, now, then):
      first = (t % every).eq(0)
      k.assign(then[0], alpha.block(t, 1) * now[0].map(lambda x: first.where(1.0, x)))
      if not cfg.momentum: return
      k.assign(then[1], theta.block(t, 1) * now[1].map(lambda x: first.where(1.0, x)))
      k.assign(then[2], theta.block(t, 1) * now[2].map(lambda x: first.where(0.0, x)) + band.block(t, 1))
    start = [Matrix(k, (1, n), (), lambda i, j: _constant(0.0)).stored() for n in (1, 1, band.shape[1])[:3 if cfg.momentum else 1]]
    stack = [m.block(0, b) for m in k.scan(b, token, start)(1)]
    fall, stay, weights = stack if cfg.momentum else (stack[0], theta, band)
  names, n, window = list(M), len(M), every + cfg.window - 1
  def group(g, now, then):
    t = g * every + every - 1
    for a, (u, x) in enumerate(kept.values()):
      w = weights.block(t, 1, g * every, window).transpose()
      s = (w * u.block(g * every, window)).stored().transpose() @ x.block(g * every, window)
      if cfg.momentum: s = k.assign(then[n + a], s + stay.block(t, 1) * now[n + a])
      k.assign(then[a], fall.block(t, 1) * now[a] - eta.block(t, 1) * newton_schulz(s.stored(), cfg.ns_steps))
  states = k.scan(b // every, group, [*M.values(), *S.values()])
  left, out = k.new((b + every, 1)), k.new((b + every, y.shape[1]))
  k.assign(left, Matrix(k, left.shape, (), lambda i, j: _constant(1.0)))
  if every > 1: k.assign(left.block(1, b), Matrix(k, (b, 1), (fall,), lambda i, j, x: (i % every).eq(every - 1).where(1.0, x)))
  def reads(g, *_):
    if every == 1: g = g + 1
    def lines(m): return m.block(g * every, every)
    now = dict(zip(names, states(g)))
    def read(name, z):
      y = lines(left) * (z @ now[name].transpose())
      return z @ toward[name].transpose() + y if toward else y
    k.assign(lines(out), apply(cfg, read, lines(r), lines(queries)))
  k.scan(b // every + (every > 1), reads, [])
  k.assign(y, out.block(1, b))
  for m, last in zip([*then[0].values(), *then[1].values()], states(b // every)): k.assign(m, last)

def _kernel(cfg, s:_Shapes, parallel:bool, backward:bool, given:bool, scratch:tuple[int, int]):
  """The kernel over all heads and chunks: its arguments, their sizes, its code and the scratch memory it needs (scratch (0,0): only that).
  Forward it leaves the state at every chunk's start in `states` (0: the base of the first chunk, then M and S); backward it goes from the last
  chunk to the first, computing each anew from there.  given: the states have a gradient of their own."""
  b, c, d, dv, D, N, muon, poly = s.chunk, cfg.window, s.d, s.dv, s.D, s.chunks, cfg.optimizer == "muon", cfg.features == "poly"
  T, lay, reach = N * b, _Layout(cfg, s.weights), b + c - 1
  E, wide = _to_multiple(reach, 8), _to_multiple(D, 16) if poly else D      # tiles like multiples; the rest is zero
  Tk, copies, raw = T + (c - 1 if s.halo else 0), s.heads if parallel else 1, d + poly
  size = dict(y=T * dv, states=(N + 2) * lay.size, q=T * d, k=Tk * d, v=Tk * dv, alpha=T, theta=T, eta=T, gamma=T * c)
  size = {n: x * s.heads for n, x in size.items()} | dict(first=s.given * (lay.half + lay.size), toward=s.toward * lay.half, scales=D,
                                                          places=cfg.degree * D)
  ins = ["first", *["toward"] * (s.toward > 0), "q", "k", "v", "alpha", *["theta"] * cfg.momentum, "eta", "gamma", *["scales", "places"] * poly]
  outs = ["d" + n for n in ins if n != "places"]
  size |= {"d" + n: x for n, x in size.items()} | dict(dfirst=s.heads * (lay.half + lay.size), dscales=s.heads * D, dtoward=s.heads * lay.half)
  size |= dict(values=max(1, copies * scratch[0]), grads=max(1, copies * scratch[1]))
  args = [*outs, "values", "grads", "states", "dy", *["dstates"] * given, *ins[1:]] if backward else ["y", "states", "values", *ins]
  P = {n: UOp.placeholder((size[n],), dtypes.int if n == "places" else dtypes.float, slot=slot) for slot, n in enumerate(args)}
  k = Kernel(P["values"], P.get("grads"), scratch == (0, 0))
  def line(name, start, n) -> Stored: return Stored(k, P[name], (1, n), start, n)
  def features(x:Stored, out:Stored) -> Stored:
    """phi of the rows x = [raw, 1]"""
    scales = Stored(k, P["scales"], (1, D), 0, D, 1, line("dscales", g * D, D) if backward else None)
    def place(j, n): return P["places"][j * D + n].load()
    if not k.quiet:
      with k.loop(x.shape[0]) as i:
        with k.loop(D) as n:
          k.store(out, i, n, functools.reduce(UOp.__mul__, [k.load(x, i, place(j, n)) for j in range(cfg.degree)], k.load(scales, 0, n)))
    def adjoint():
      if k.quiet: return
      with k.loop(x.shape[0]) as i:
        with k.loop(D) as n:
          before, dout = k.wait, k.load(out.grad, i, n)
          factors, by_scale = [k.load(x, i, place(j, n), before) for j in range(cfg.degree)], dout * k.load(scales, 0, n)
          k.store(scales.grad, 0, n, k.load(scales.grad, 0, n) + functools.reduce(UOp.__mul__, factors, dout))
          for j in range(cfg.degree):
            total = k.load(x.grad, i, place(j, n)) + functools.reduce(UOp.__mul__, factors[:j] + factors[j + 1:], by_scale)
            k.store(x.grad, i, place(j, n), total)
    k.record(adjoint)
    return out

  with k.loop(s.heads, AxisType.GLOBAL if parallel else AxisType.LOOP) as g:
    if parallel: k.origin, k.grads_origin = g * scratch[0], g * scratch[1]
    front, rows = (1, b + s.every) if muon else (0, b)
    padded = dict(raw_k=k.new((E, raw)), raw_q=k.new((rows, raw)), v=k.new((E, dv)), band=k.new((b, E + (0 if muon or not cfg.momentum else 8))))
    if poly: padded |= dict(x=k.new((E, wide)), r=k.new((rows, wide)))
    k.fill(P["values"], k.origin, k.used)                  # what no chunk writes stays zero
    for n in ("raw_k", "raw_q") if poly else (): k.each(padded[n].block(0, padded[n].shape[0], d, 1), lambda i, j: _constant(1.0), ())

    def chunk(n, base, M, S, then):
      def stream(name, width, many=b, row=None) -> Stored:
        def place(buffer, grad=None):
          return Stored(k, buffer, (many, width), (g * (Tk if row else T) + (0 if row else n * b)) * width, width, 1, grad, row)
        return place(P.get(name), place(P["d" + name]) if backward else None)
      def with_grad(m): return Stored(k, m.buffer, m.shape, m.start, m.rows, 1, k.new(m.shape).grad) if backward else m
      pads = {name: with_grad(m) for name, m in padded.items()}
      raw_k, raw_q, v, band = pads["raw_k"], pads["raw_q"], pads["v"], pads["band"]
      def row(i): return n * b + i if s.halo else (n * b + i - (c - 1)).maximum(0)           # before the stream: any token, gamma is 0
      k.assign(raw_k.block(0, reach, 0, d), stream("k", d, reach, row))
      k.assign(v.block(0, reach), stream("v", dv, reach, row))
      k.assign(raw_q.block(front, b, 0, d), stream("q", d))
      x, r = raw_k, raw_q
      if poly: x, r = features(raw_k, pads["x"]), (features(raw_q.block(front, b), pads["r"].block(front, b)), pads["r"])[1]
      alpha, theta, eta = [stream(name, 1) if name in ins else None for name in ("alpha", "theta", "eta")]
      gamma = stream("gamma", c)                           # row t of band: token t's gates over its window, the oldest at column t
      k.assign(band.view((b, c), 0, band.rows + 1, 1), gamma.view((b, c), c - 1, c, -1))
      if toward: base = {name: (w + toward[name]).stored() for name, w in base.items()}
      kept = gradients(cfg, base, x, raw_k.block(0, E, 0, d), v)
      queries, y = raw_q.block(0, rows, 0, d), stream("y", dv)
      if muon: _muon_chunk(k, cfg, b, s.every, kept, r, queries, y, band, alpha, theta, eta, toward, M, S, then)
      else: _gd_chunk(k, cfg, b, E, kept, r, queries, y, band, alpha, theta, eta, toward, M, S, then)

    def state(buffer, n, grad=None) -> tuple[dict, dict]:
      at = (g * (N + 2) + n) * lay.size
      M = lay.views(k, buffer, at, grad)
      return M, lay.views(k, buffer, at + lay.half, grad and (grad[0], grad[1] + lay.half)) if cfg.momentum else {}
    def copy(out, x, add=False): k.add([out], [x.f], (x,), out.shape) if add else k.each(out, x.f, (x,))
    home, length = (g % s.given if s.given != s.heads else g) * (lay.half + lay.size), lay.half + lay.size
    toward = lay.views(k, P["toward"], g % s.toward * lay.half, (P["dtoward"], g * lay.half) if backward else None) if s.toward else {}
    if not backward:
      copy(line("states", g * (N + 2) * lay.size, lay.half), line("first", home, lay.half))
      copy(line("states", (g * (N + 2) + 1) * lay.size, lay.size), line("first", home + lay.half, lay.size))
      with k.loop(N) as n:
        k.memos.append({})
        chunk(n, state(P["states"], n.eq(0).where(0, n + 1))[0], *state(P["states"], n + 1), state(P["states"], n + 2))
    else:
      ring = k.grads_origin + k.used_grads                 # gradients of two states, taking turns, and of the first base
      k.used_grads += 3 * lay.size
      def at(n): return P["grads"], ring + n * lay.size
      k.fill(P["grads"], ring, 3 * lay.size)
      for name in outs[1:]: k.fill(P[name], g * (size[name] // s.heads), size[name] // s.heads)
      def add_given(slot, n, many=lay.size):
        if given: copy(line("grads", at(slot)[1], many), line("dstates", (g * (N + 2) + n) * lay.size, many), add=True)
      add_given(N % 2, N + 1)
      add_given(2, 0, lay.half)
      with k.loop(N) as turn:
        n = N - 1 - turn
        k.fill(P["grads"], at(n % 2)[1], lay.size)
        add_given(n % 2, n + 1)
        base = state(P["states"], n.eq(0).where(0, n + 1), at(n.eq(0).where(2, n % 2)))[0]
        k.backward(lambda: chunk(n, base, *state(P["states"], n + 1, at(n % 2)), state(None, 0, at((n + 1) % 2))))
      copy(line("dfirst", g * length, lay.half), line("grads", at(2)[1], lay.half))
      copy(line("dfirst", g * length + lay.half, lay.size), line("grads", at(0)[1], lay.size))
  return args, size, k.code("memory_backward" if backward else "memory", sum(size[n] for n in args)), (k.used, k.used_grads)

@functools.cache
def _compiled_kernel(cfg, s:_Shapes, device:str, backward:bool, given:bool):
  """-> names of the arguments, their sizes, the program.  Built twice: the first time to see how much scratch memory it needs."""
  shape = (cfg, s, not on_cpu(device), backward, given)
  args, size, sink, _ = _kernel(*shape, _kernel(*shape, (0, 0))[3])
  args, program = _program(sink, args, device)
  return args, size, program

def fused(cfg, a:Tensor|None, toward:dict, base:dict, M:dict, S:dict, q:Tensor, k:Tensor, v:Tensor, alpha:Tensor, theta:Tensor, eta:Tensor,
          gamma:Tensor, b:int, every:int):
  """by_ops in one kernel, with one for its backward pass."""
  B, H, T, d = cast(tuple[int, ...], q.shape)
  device, D, shared = cast(str, q.device), feature_size(d, cfg.features, cfg.degree), next(iter(M.values())).ndim == 3
  wide = _to_multiple(D, 16) if cfg.features == "poly" else D
  sides = {n: (w.shape[-2], wide if n in ("W", "W2", "W3") else w.shape[-1]) for n, w in M.items()}
  shapes = _Shapes(B * H, H if shared else B * H, H if toward else 0, T // b, b, bool(k.shape[2] != T), d, cast(int, v.shape[3]), D, every,
                   tuple((n, *x) for n, x in sides.items()))
  lay = _Layout(cfg, shapes.weights)
  first = lay.pack([{n: w.reshape(shapes.given, *w.shape[-2:]) for n, w in part.items()} for part in ((base, M, S) if cfg.momentum else (base, M))])
  ins = dict(first=first, q=q, k=k, v=v, alpha=alpha, eta=eta, gamma=gamma) | (dict(theta=theta) if cfg.momentum else {})
  if toward: ins["toward"] = lay.pack([toward])
  if a is not None: ins |= dict(scales=_scales(d, cfg.degree, a), places=_monomials(d, cfg.degree, device)[0])
  ins = {n: t.reshape(-1).contiguous() for n, t in ins.items()}
  forward = _compiled_kernel(cfg, shapes, device, False, False)
  def backward(*grads, call=None):
    """Gradients come for the outputs that are used: y is flat, states a matrix."""
    if call is None: grads, call = grads[:-1], grads[-1]
    sources = dict(zip(forward[0], call.src[1:]))
    dy, dstates = [[Tensor(g).reshape(-1).contiguous() for g in grads if len(g.shape) == n] for n in (1, 2)]
    given = {n: Tensor(sources[n]) for n in ins if n != "first"} | dict(states=Tensor(sources["states"].after(call)).reshape(-1))
    given["dy"] = dy[0] if dy else Tensor.zeros(forward[1]["y"], device=device).contiguous()
    if dstates: given["dstates"] = dstates[0]
    out = _call(_compiled_kernel(cfg, shapes, device, True, bool(dstates)), given, device)
    def gradient(n):
      if n not in ins or n == "places": return None
      heads = {"first": B * H // shapes.given, "toward": B, "scales": B * H}.get(n, 1)       # what several heads share
      return out["d" + n].reshape(heads, -1).sum(0).uop if heads > 1 else out["d" + n].uop
    return tuple(gradient(n) for n in forward[0])
  states = Tensor.empty(1, forward[1]["states"], device=device)
  out = _call(forward, ins | dict(states=states), device, backward)
  rows = out["states"].reshape(B * H, -1, lay.size)
  like = {n: w if not shared else w.unsqueeze(0).expand(B, *w.shape) for n, w in M.items()}
  M = lay.unpack(rows[:, -1], like)
  S = lay.unpack(rows[:, -1, lay.half:], like) if cfg.momentum else {}
  base = lay.unpack(rows[:, 0 if T == b else -2], like)
  return out["y"].reshape(B, H, T, v.shape[3]), base, M, S

# *** all of it ***

def _part(state:dict, part:str) -> dict: return {n.split(".")[1]: z for n, z in sorted(state.items()) if n.startswith(part + ".")}

def _added(part:dict, home:dict, sign:int=1) -> dict:
  """part + sign * home; exp: home has coefficients for the anchors only."""
  def longer(z, like): return z.pad((None, (0, like.shape[-2] - z.shape[-2]), None))
  return {n: w + sign * longer(home[n], w) for n, w in part.items()}

def read_position(state:dict[str, Tensor]) -> int|None:
  """Tokens read so far, or None while a jit is being captured and no value can be read (but a constant)."""
  if (position := state["position"].uop.simplify()).op is Ops.CONST: return int(position.arg)
  try: return int(state["position"].item())
  except JitError: return None

def capacity_for(needed:int) -> int:
  """Places of a cache that must hold `needed` tokens: a power of two, with room for as many again."""
  return max(64, 2 ** math.ceil(math.log2(2 * needed)))

def initial_state(cfg, weights:dict[str, Tensor], B:int, key_dim:int) -> dict[str, Tensor]:
  """The state before the first token: M_0, S_0 = 0, position 0.  A flat dict of Tensors: "position" (), "M.*", "S.*" (momentum) and "base.*",
  (H,out,in) here, where the rows of the batch still share them, and (B,H,out,in) after the first call; "k" and "v" (B,H,window-1,.), the keys
  and values that a window still reaches (window > 1).  exp: "keys" (H,L,d), the anchors' and then the tokens', and "*.u" (H,L,out), their
  coefficients, for the first layer; without anchors one empty place, since no tensor is empty."""
  M = {n: w for n, w in weights.items() if n not in ("a", "anchor_k", "anchor_u")}
  first = weights["W1" if "W1" in M else "anchor_u" if cfg.features == "exp" else "W"]
  H, dv = first.shape[0], first.shape[2 if first is weights.get("anchor_u") else 1]
  def zeros(*shape): return Tensor.zeros(*shape, device=first.device).contiguous()
  if cfg.features == "exp": M["u"] = weights["anchor_u"] if weights["anchor_u"].shape[1] else zeros(H, 1, weights["anchor_u"].shape[2])
  state = {"position": Tensor(0, dtype=dtypes.int32, device=first.device), **{f"{p}.{n}": m for p in ("base", "M") for n, m in M.items()}}
  if cfg.momentum: state |= {f"S.{n}": zeros(*m.shape) for n, m in M.items()}
  if cfg.features == "exp": state["keys"] = weights["anchor_k"] if weights["anchor_k"].shape[1] else zeros(H, 1, key_dim)
  if cfg.window > 1: state |= {n: zeros(B, H, cfg.window - 1, d) for n, d in (("k", key_dim), ("v", dv))}
  return state

def recall(cfg, weights:dict[str, Tensor], state:dict[str, Tensor], q:Tensor) -> Tensor:
  """M(phi(q)), with the memory of a state as it is: q (B,H,T,key_dim) -> (B,H,T,value_dim)."""
  M = _part(state, "M")
  if cfg.features != "exp": return apply(cfg, lambda name, z: matmul(z.contiguous(), M[name], yt=True), phi(cfg, q, weights.get("a")), q)
  x = matmul(q, state["keys"], yt=True).exp()
  return apply(cfg, lambda name, z: matmul(z.contiguous(), M[name], yt=True) if name == "W1" else matmul(z.contiguous(), M["u"]), x, q)

def takes_fused(cfg, x:Tensor) -> bool:
  """auto: on CPUs one kernel is faster than many; on a GPU its loops would run in a single thread a head, and nothing has been measured there."""
  if not isinstance(x.device, str) or x.dtype != dtypes.float or cfg.features == "exp": return False
  return cfg.backend == "fused" or cfg.backend == "auto" and on_cpu(x.device)

def memory(cfg, weights:dict[str, Tensor], q:Tensor, k:Tensor, v:Tensor, alpha:Tensor, theta:Tensor, eta:Tensor, gamma:Tensor,
           state:dict[str, Tensor]|None=None, phase:int|None=None, *, toward:dict[str, Tensor]|None=None) -> tuple[Tensor, dict[str, Tensor]]:
  """Reads a stretch of the stream: updates the memory at every token, then reads it (Eq. 9, 10, 15, 16, 32, 33).

  q, k (B,H,T,key_dim); v, y (B,H,T,value_dim); alpha, theta, eta (B,H,T), final; gamma (B,H,T,window), gamma[...,j] gates token t-j.
  weights: the initial memory, (H,out,in) per head: {"W"} for linear, {"W1","W2"} for mlp, and "W3" for gated; "a" (degree+1,) with poly;
  with exp "anchor_k" (H,P,key_dim) and "anchor_u" (H,P,out), keys and coefficients, in place of the first layer's.
  state: what an earlier call returned, or None at the start of the stream.  Returns y and the state after the last token; any way of cutting
  a stream into calls gives the same y.  toward: weights R that forgetting leads to, M_t = alpha_t M_{t-1} + (1 - alpha_t) R - eta_t U_t; None: zero.
  phase: how many tokens of the chunk came before, read from the state unless given.  Under TinyJit, where it cannot be read, a call of one token
  goes anywhere; one of more tokens with a state must start at a chunk's border, or `phase` tokens behind it, and gives NaN elsewhere.
  cfg.backend: ops, fused (one kernel), or auto, the faster one."""
  (B, _, T, d), b, c, r = cast(tuple[int, ...], q.shape), cfg.chunk, cfg.window, cfg.muon_every if cfg.optimizer == "muon" else 1
  feature_size(d, cfg.features, cfg.degree)              # refuses what would not fit
  exp, is_first = cfg.features == "exp", state is None
  known = 0 if state is None or T == 1 and not exp else read_position(state) if phase is None or exp else None
  phase = 0 if T == 1 else (phase or 0) if known is None else known % b
  if state is None: state = initial_state(cfg, weights, B, d)
  position, M, S, base = state["position"], _part(state, "M"), _part(state, "S"), _part(state, "base")
  # Gradients are taken at the memory of the chunk's start; one token's graph must hold for any position.
  if T == 1 and not is_first: base = {n: (position % b == 0).where(M[n], w) for n, w in base.items()}
  elif phase == 0: base = M
  starts, home = base is M, {}
  if toward is not None:                                 # the forms below keep the distance from it, D_t = alpha_t D_{t-1} - eta_t U_t
    home = _part(initial_state(cfg, toward, B, d), "M")
    M, base = [_added(part, home, -1) for part in (M, base)]
    if starts: base = M
  # Rows: the call is padded to whole chunks of `size` tokens, `front` before it and `back` behind.  With chunk=4, a call of 6 tokens at position 7
  # (phase 3) is padded to 3 + 6 + 3 = 3 chunks.  A call that ends within its first chunk needs no padding: its tokens are the only chunk's rows.
  if phase + T <= b: size, front, every = T, 0, r if T > 1 and phase % r == 0 and T % r == 0 else 1
  else: size, front, every = b, phase, r
  back = -(front + T) % size
  def padded(z, fill=0.0): return z.pad((None, None, (front, back), *[None] * (z.ndim - 3)), value=fill) if front + back else z

  # gates: no window reaches before the stream, Muon steps at every r-th token, padding leaves the memory as it is
  index = position + Tensor.arange(T)
  gamma = (index.unsqueeze(-1) >= Tensor.arange(c)).where(gamma, 0)
  if r > 1: eta = ((index + 1) % r == 0).where(eta, 0)
  stream = {n: state[n].cat(z, dim=2) if c > 1 else z for n, z in (("k", k), ("v", v))}
  keys, values = [padded(z) for z in ((k, v) if is_first else stream.values())]
  inputs = padded(q), keys, values, padded(alpha, 1.0), padded(theta, 1.0), padded(eta), padded(gamma)
  after = {}
  if exp:
    old, P = state["keys"], cast(int, weights["anchor_u"].shape[1])
    place, capacity = P + (position if known is None or T == 1 and not is_first else known), cast(int, old.shape[-2])
    if known is None and T > 1: raise ValueError("features=exp cannot jit a call of several tokens with a state: its expansion grows")
    if known is not None and P + known + T > capacity: capacity = P + capacity_for(known + T)
    y, base, M, S = expanded(cfg, old, home, base, M, S, *inputs, size, starts, place - front, capacity)
    here = Tensor.arange(capacity).reshape(capacity, 1)
    new = k.pad((None, None, (place, capacity - place - T), None)) if isinstance(place, int) else (here == place).where(k, 0)
    after["keys"] = old.pad((*[None] * (old.ndim - 2), (0, capacity - old.shape[-2]), None)) + new
    if known is None: y = (P + position < capacity).where(y, math.nan)
  else: y, base, M, S = (fused if takes_fused(cfg, q) else by_ops)(cfg, weights.get("a"), home, base, M, S, *inputs, size, every)
  if home: M, base = [_added(part, home) for part in (M, base)]
  y = y[:, :, front:front + T]
  if known is None and T > 1: y = (position % b == phase).where(y, math.nan)
  # clones: a jit must not return what is the caller's, nor what a later call in it may overwrite
  after |= {"position": position + T, **{f"{p}.{n}": m for p, ms in (("base", base), ("M", M), ("S", S)) for n, m in ms.items()}}
  if c > 1: after |= {n: z[:, :, z.shape[2] - c + 1:] for n, z in stream.items()}
  return y, {n: z.clone() for n, z in after.items()}
