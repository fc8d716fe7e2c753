"""ATLAS (arXiv 2505.23735) and its family: language models whose token mixer is a memory that learns while it reads.

Glossary                 shape                    paper    meaning
  B, T, V                                                  batch, tokens, vocabulary
  q, k                   (B,H,T,key_dim)          q, k     query and key, unit vectors, one per head and token
  v, y                   (B,H,T,value_dim)        v, y     value to be stored, output of the memory
  phi                    key_dim -> D             phi      features: identity, all monomials up to `degree`, or exp: without end,
                                                           phi*(x).phi*(y) = exp(x.y); a layer on it is kept by its tokens (kernels.expanded)
  M                      (B,H,out,in) per matrix  M        the memory, a small network; M_0 is learned, one per head
  S                      as M                     S        momentum of the memory's gradient
  alpha, theta, eta      (B,H,T)                  alpha .. forget gate, momentum gate, memory step (its learning rate)
  gamma                  (B,H,T,window)           gamma    gates of the window: gamma[...,j] weighs the gradient at token t-j
  window                                          c        tokens whose loss each step minimises: 1 is the delta rule's online step
  chunk                                           b        tokens whose gradients are taken at the same memory, in parallel
  slow weights                                             `params`: what AdamW trains; the memory's own weights are fast

A model is four choices: memory architecture, features, loss, learning rule.  PRESETS is the table of all of them.
"""
from __future__ import annotations
import dataclasses, difflib, functools, math
from dataclasses import dataclass
from pathlib import Path
from typing import cast
import numpy as np
from tinygrad import Tensor, dtypes
import data, kernels, rule

# *** settings ***

CHOICES = {"mixer": ("memory", "attention", "mag", "mal", "mac"), "memory": ("linear", "mlp", "gated"), "features": ("identity", "poly", "exp"),
           "loss": ("l2", "dot"), "optimizer": ("gd", "muon"), "backend": ("auto", "ops", "fused"),
           "dtype": ("float32", "bfloat16")}
LEAST = {"conv": 0, "attn_window": 0, "ns_steps": 0, "persist": 0, "anchors": 0}                    # every other whole number is at least 1
# Every other number is at most 2^20: what is more is no model, but a slip, and these make a part each, or a factorial.
MOST = {"degree": 32} | dict.fromkeys(("layers", "heads", "window", "conv", "ns_steps", "mlp_ratio"), 1024)

@dataclass(frozen=True)
class Config(rule.Rule):
  """Every setting of a model.  ValueError, in one line, for a wrong type, an unknown choice or an impossible combination."""
  vocab: int = 256            # number of tokens; 256: bytes
  dim: int = 64               # width of the residual stream
  layers: int = 2             # blocks
  heads: int = 4              # memories (or attention heads) per block
  key_dim: int = 16           # size of a head's keys and queries
  value_dim: int = 16         # size of a head's values
  mixer: str = "memory"       # token mixer: memory | attention (softmax) | both: mag (gated), mal (in layers), mac (memory as context)
  memory: str = "mlp"         # architecture: linear | mlp (two layers, gelu) | gated (three matrices)
  expand: int = 4             # hidden size of the memory, in units of value_dim
  features: str = "identity"  # phi: identity | poly | exp (as long as the stream, like a key-value cache)
  degree: int = 2             # highest degree of poly
  anchors: int = 16           # exp: learned pairs of key and coefficient that stand for the first layer's initial value
  loss: str = "l2"            # attentional bias: l2 (delta rule) | dot (Hebbian)
  window: int = 1             # c: tokens in each step's loss
  forget: bool = False        # forget gate alpha (else 1 up to the horizon)
  horizon: int = 128          # no forget gate: tokens kept whole (in training at least its length); older ones fade, alpha = 1 - 1/horizon
  momentum: bool = False      # momentum theta
  optimizer: str = "gd"       # memory's step: gd | muon (Newton-Schulz of the momentum)
  ns_steps: int = 5           # Newton-Schulz iterations
  muon_every: int = 1         # Muon steps at every r-th token only; divides chunk
  chunk: int = 32             # b: tokens whose gradients share a memory
  conv: int = 4               # length of the causal convolution on q, k, v (0: none)
  attn_window: int = 0        # attention sees that many tokens (0: all); for mac the length of a segment
  persist: int = 0            # persistent tokens: learned, in front of the attention's keys
  mlp_ratio: float = 2.0      # hidden size of the SwiGLU MLP, in units of dim
  backend: str = "auto"       # form of the recurrence: ops (stock tensor operations) | fused (one kernel) | auto (the faster)
  dtype: str = "float32"      # what dense layers multiply: float32 | bfloat16 (rounded copies; the weights and all else stay float32)

  def __post_init__(self):
    for f in dataclasses.fields(self):
      x, kind = getattr(self, f.name), type(f.default)
      if kind is float and type(x) is int: object.__setattr__(self, f.name, x := float(x))
      if type(x) is not kind: raise ValueError(f"{f.name}={x!r} is not {KINDS[kind]}: its default is {f.default!r}")
      if f.name in CHOICES and x not in CHOICES[f.name]: raise ValueError(f"{f.name}={x!r} is unknown{near(x, CHOICES[f.name])}")
      if type(x) is int and x < (least := LEAST.get(f.name, 1)): raise ValueError(f"{f.name}={x} is too small: take {least} or more")
      if isinstance(x, (int, float)) and x > (most := MOST.get(f.name, 1 << 20)): raise ValueError(f"{f.name}={x} is too large: take {most} or less")
    if not (self.mlp_ratio > 0 and round(self.mlp_ratio * self.dim)):
      raise ValueError(f"mlp_ratio={self.mlp_ratio} leaves no hidden unit at dim={self.dim}: take 2, for example")
    if self.mixer != "memory" and self.key_dim % 2:
      raise ValueError(f"key_dim={self.key_dim} is odd, and rotary positions turn pairs: take {self.key_dim + 1}")
    if self.mixer == "mac" and not self.attn_window: raise ValueError("attn_window=0 leaves mac without segments: take 64, for example")
    if self.mixer == "attention": return
    kernels.feature_size(self.key_dim, self.features, self.degree)
    if self.features == "exp":
      if self.memory == "gated": raise ValueError("memory=gated has two first layers to expand, and features=exp keeps one: take mlp or linear")
      if self.optimizer == "muon":
        raise ValueError("optimizer=muon has no matrix to orthogonalise with features=exp, whose expansion is as long as the stream: take gd")
      if self.backend == "fused":
        raise ValueError("backend=fused keeps matrices, and the expansion of features=exp grows with the stream: take ops or auto")
      if self.memory == "mlp" and not self.anchors:
        raise ValueError("anchors=0 leaves the first layer of memory=mlp at 0 with features=exp: take 1 or more, or memory=linear")
    if self.optimizer == "muon" and self.chunk % self.muon_every:
      divisors = ", ".join(str(n) for n in range(1, self.chunk + 1) if self.chunk % n == 0)
      raise ValueError(f"muon_every={self.muon_every} does not divide chunk={self.chunk}: take one of {divisors}")

KINDS = {int: "a whole number", float: "a number", bool: "true or false (1 or 0)", str: "a word"}

def near(name, known) -> str:
  """The end of a message on an unknown name: the near ones, or all."""
  near = difflib.get_close_matches(str(name), list(known), n=3)
  return f": did you mean {' or '.join(near)}?" if near else f": take one of {', '.join(known)}"

# The named models.  Only what makes them different: everything not named is Config's default.
_OMEGA = dict(features="poly", window=4, forget=True)
PRESETS: dict[str, dict] = {
  #                        memory           features          loss        window, forget, momentum, step
  "linear_attention": dict(memory="linear",                   loss="dot"),
  "deltanet":         dict(memory="linear"),
  "gated_deltanet":   dict(memory="linear",                               forget=True),
  "ttt":              dict(),
  "titans":           dict(                                               forget=True, momentum=True),
  "dla":              dict(                 features="poly",  loss="dot", forget=True),
  "deep_transformer": dict(                 features="exp",   loss="dot"),
  "swdt":             dict(                 features="exp",   loss="dot", window=4),
  "dot":              dict(                 features="exp",               window=4),
  "swla":             dict(memory="linear",                   loss="dot", **_OMEGA),
  "omeganet":         dict(                                               **_OMEGA),
  "atlas":            dict(                                               **_OMEGA, momentum=True, optimizer="muon"),
  "atlas++":          dict(memory="gated",                                **_OMEGA, momentum=True, optimizer="muon"),
  "transformer++":    dict(mixer="attention"),
  "swa":              dict(mixer="attention", attn_window=64),
}
for _mixer in ("mag", "mal", "mac"): PRESETS[f"atlas_{_mixer}"] = PRESETS["atlas"] | dict(mixer=_mixer, attn_window=64, persist=4)
PRESETS["titans_mac"] = PRESETS["titans"] | dict(mixer="mac", attn_window=64, persist=4)

# Sizes: `tiny` and the four of the paper's Table 7, which gives neither key_dim, c, b nor p.  Quadratic features of a key of 64 are 2,145:
# key_dim is chosen to stay below 2,200 and to come near the size's name.
SIZES: dict[str, dict] = {
  "tiny": dict(dim=64, layers=2, heads=4, key_dim=16, value_dim=16, expand=1, chunk=32, muon_every=4),
  "170m": dict(vocab=32_000, dim=768, layers=12, heads=16, key_dim=48, value_dim=48, mlp_ratio=8 / 3, chunk=64, muon_every=16),
  "340m": dict(vocab=32_000, dim=1024, layers=24, heads=16, key_dim=32, value_dim=64, mlp_ratio=8 / 3, chunk=64, muon_every=16),
  "760m": dict(vocab=32_000, dim=1536, layers=24, heads=16, key_dim=32, value_dim=96, mlp_ratio=8 / 3, chunk=64, muon_every=16),
  "1.3b": dict(vocab=32_000, dim=2048, layers=18, heads=8, key_dim=64, value_dim=256, mlp_ratio=8 / 3, chunk=64, muon_every=16),
}

def preset(name:str="atlas", size:str="tiny", **fields) -> Config:
  """The named model at a size: explicit fields > size > preset > Config's defaults.  A size's muon_every yields to an explicit chunk that it does
  not divide.  ValueError names near presets, sizes or fields."""
  if name not in PRESETS: raise ValueError(f"preset={name!r} is unknown{near(name, PRESETS)}")
  if size not in SIZES: raise ValueError(f"size={size!r} is unknown{near(size, SIZES)}")
  known = [f.name for f in dataclasses.fields(Config)]
  for f in fields:
    if f not in known: raise ValueError(f"{f} is not a setting{near(f, known)}")
  merged = PRESETS[name] | SIZES[size] | fields
  if type(chunk := fields.get("chunk")) is int and "muon_every" not in fields: merged["muon_every"] = math.gcd(merged["muon_every"], chunk)
  return Config(**merged)

# *** initial values: one row each, with its reason ***

@dataclass(frozen=True)
class Init:
  gates: float = 0.02         # std of the gates' projection: small next to a normalised input, so that gates start at their biases
  out_gate: float = 1.0       # bias of the gate on y, which starts open: around 0 its sign would differ from token to token and scramble what was
                              # recalled
  first: float = 0.1          # M_0's first layer is that times its parameter (of variance 1/columns): AdamW's steps move M_0 too, and neither they
                              # nor its initial noise may drown a write, which is small (eta's bound)
  alpha: float = 0.99         # forget gate: half of M_0 is left after 69 tokens; at 0.5 a chunk would erase it
  theta: float = 0.9          # momentum gate: the usual momentum
  gamma: float = 0.9          # window gates, before 1/c: a step weighs its window's tokens about alike
  eta: float = 0.5            # memory step: half of its bound, where the sigmoid is steepest
  # Bounds of eta, with |k| = 1, |v| < 1 and S an average of gradients.
  eta_l2: float = 0.2         # over chunk: b equal keys apply one stale gradient b times, stable while eta b lambda < 2; lambda, about
                              # |phi|^2 |W1 gelu'|^2 + |h|^2, starts near 2; 10 would do
  eta_dot: float = 0.5        # the Hebbian rule has no fixed point.  linear: over chunk, it grows linearly at most, up to the horizon.  mlp, gated:
                              # times 1 - alpha, as each matrix grows in proportion to the other, by at most 2 eta a token, and forgetting must
                              # outrun it; without a forget gate over chunk + position, where constant steps would let both grow exponentially
                              # and these let them grow as a power of the position, up to the horizon, from where on that fading outruns them
  # features=exp: keys and queries have the squared length scale_bound * sigmoid(scale), and eta is divided by exp of it, the kernel's largest value
  scale: float = 1.0          # at the start: a kernel between 1/e and e, which tells keys apart and is nearly linear still
  scale_bound: float = 4.0    # a kernel between exp(-4) and exp(4): as sharp as attention, and far from float32's end
  eta_muon: float = 0.1       # Newton-Schulz steps have singular values near 1 whatever the gradient, as M_0's largest
INIT = Init()

def eta_bound(cfg:Config, alpha:Tensor, position:Tensor|int=0) -> Tensor|float:
  """The largest memory step a token may take, of which the gate eta picks a part; alpha (B,H,T), its first token's position."""
  if cfg.optimizer == "muon": return INIT.eta_muon
  if cfg.loss == "l2": return INIT.eta_l2 / cfg.chunk
  if cfg.memory == "linear": return INIT.eta_dot / cfg.chunk
  if cfg.forget: return INIT.eta_dot * (1 - alpha)
  return INIT.eta_dot / (cfg.chunk + (position + Tensor.arange(alpha.shape[2])).minimum(cfg.horizon))

def memory_shapes(cfg:Config) -> dict[str, tuple[int, int, int]]:
  """The matrices of one block's memory, (heads, out, in); exp: with anchors (heads, number, size) in place of the first layer."""
  D, hidden = kernels.feature_size(cfg.key_dim, cfg.features, cfg.degree), cfg.expand * cfg.value_dim
  if cfg.features == "exp":
    out = cfg.value_dim if cfg.memory == "linear" else hidden
    shapes = {"anchor_k": (cfg.heads, cfg.anchors, D), "anchor_u": (cfg.heads, cfg.anchors, out)}
    return shapes | ({"W1": (cfg.heads, cfg.value_dim, hidden)} if cfg.memory == "mlp" else {})
  if cfg.memory == "linear": return {"W": (cfg.heads, cfg.value_dim, D)}
  shapes = {"W1": (cfg.heads, cfg.value_dim, hidden), "W2": (cfg.heads, hidden, D)}
  return shapes | {"W3": shapes["W2"]} if cfg.memory == "gated" else shapes

def has_residual(cfg:Config) -> bool:
  """Whether the memory is [x +] something (method: where keys and values are of one size)."""
  return cfg.memory != "linear" and cfg.key_dim == cfg.value_dim

def gate_sizes(cfg:Config) -> dict[str, int]:
  """Columns of the gate projection, in order; a rule has no gates that it has no use for."""
  sizes = {"eta": cfg.heads, "gamma": cfg.heads * cfg.window}
  return sizes | ({"alpha": cfg.heads} if cfg.forget else {}) | ({"theta": cfg.heads} if cfg.momentum else {})

def layout(cfg:Config) -> dict[str, tuple[tuple[int, ...], float|np.ndarray]]:
  """Every parameter: name -> (shape, initial values): a float is the standard deviation of normal noise, an array the values themselves.
  Matrices are (out, in).  Nothing big is allocated, so sizes can be counted before they are paid for."""
  def dense(out, inp, scale=1.0): return (out, inp), scale * inp ** -0.5
  def ones(n): return (n,), np.ones(1)
  H, d, dv, wide = cfg.heads, cfg.key_dim, cfg.value_dim, round(cfg.mlp_ratio * cfg.dim)
  table: dict = {"embed": ((cfg.vocab, cfg.dim), cfg.dim ** -0.5), "norm": ones(cfg.dim)}
  start = {"eta": INIT.eta, "gamma": INIT.gamma, "alpha": INIT.alpha, "theta": INIT.theta}
  bias = np.repeat([math.log(start[g] / (1 - start[g])) for g in gate_sizes(cfg)], list(gate_sizes(cfg).values()))
  into_stream = (2 * cfg.layers) ** -0.5                 # what is added to the residual stream: its variance does not grow with depth
  for i in range(cfg.layers):
    block: dict = {"norm1": ones(cfg.dim), "qkv": dense(H * (2 * d + dv), cfg.dim), "out": dense(cfg.dim, H * dv, into_stream),
                   "norm2": ones(cfg.dim), "mlp_in": dense(2 * wide, cfg.dim), "mlp_out": dense(cfg.dim, wide, into_stream)}
    persist = {"persist": ((cfg.persist, cfg.dim), 1.0)} if cfg.persist else {}                # as large as a normalised input
    if cfg.mixer == "attention": block |= persist
    else:
      if cfg.conv: block["conv"] = (cfg.conv, H * (2 * d + dv)), cfg.conv ** -0.5
      block |= {"gates": ((len(bias), cfg.dim), INIT.gates), "gate_bias": (bias.shape, bias),
                "out_norm": ones(dv), "out_gate": dense(H * dv, cfg.dim), "out_gate_bias": ((H * dv,), np.full(1, INIT.out_gate))}
      if has_residual(cfg): block["out_skip"] = ones(dv)
      block |= {f"memory.{n}": (shape, shape[1 if n == "anchor_u" else 2] ** -0.5) for n, shape in memory_shapes(cfg).items() if 0 not in shape}
      if cfg.features == "exp": block["memory.scale"] = (H,), np.array([math.log(INIT.scale / (INIT.scale_bound - INIT.scale))])
      if cfg.features == "poly":                         # a_i = root_i^2: never negative; 1/i! makes phi(x).phi(y) the start of exp(x.y)
        block["memory.a_root"] = (cfg.degree + 1,), np.array([math.factorial(i) ** -0.5 for i in range(cfg.degree + 1)])
    if cfg.mixer in ("mag", "mal", "mac"):
      near = {"qkv": dense(H * (2 * d + dv), cfg.dim), **persist}
      if cfg.mixer == "mag": near |= {"norm": ones(H * dv), "memory_norm": ones(H * dv)}
      else: near |= {"norm": ones(cfg.dim), "out": dense(cfg.dim, H * dv, into_stream if cfg.mixer == "mal" else 1.0)}
      if cfg.mixer == "mac": near |= {"read_q": dense(H * d, cfg.dim), "read_norm": ones(dv), "read_out": dense(cfg.dim, H * dv)}
      if cfg.mixer == "mac" and has_residual(cfg): near["read_skip"] = ones(dv)
      block |= {f"attention.{n}": row for n, row in near.items()}
    table |= {f"layers.{i}.{n}": row for n, row in block.items()}
  return table

def parts(cfg:Config) -> dict[str, int]:
  """Number of parameters by part of the model, and in all ("total")."""
  group = {"embed": "embedding (tied)", "memory": "memories M_0"} | dict.fromkeys(("norm", "norm1", "norm2"), "norms")
  group |= dict.fromkeys(("mlp_in", "mlp_out"), "MLP")
  count: dict[str, int] = {}
  for name, (shape, _) in layout(dataclasses.replace(cfg, layers=1)).items():
    part = group.get(name.split(".")[2] if "." in name else name, "mixer projections")
    count[part] = count.get(part, 0) + math.prod(shape) * (cfg.layers if "." in name else 1)
  return count | {"total": sum(count.values())}

def unflatten(flat:dict) -> dict:
  """{"layers.0.qkv": x} -> {"layers": {"0": {"qkv": x}}}"""
  tree: dict = {}
  for name, x in flat.items():
    *path, last = name.split(".")
    functools.reduce(lambda node, key: node.setdefault(key, {}), path, tree)[last] = x
  return tree

def init(cfg:Config, seed:int=0) -> dict:
  """The slow weights as a nested dict of float32 Tensors; a pure function of (cfg, seed)."""
  return filled(layout(cfg), seed)

def filled(table:dict, seed:int) -> dict:
  """A table like layout's as a nested dict of float32 Tensors, each of its name and seed alone."""
  def values(name, shape, fill):
    if isinstance(fill, np.ndarray): return np.broadcast_to(fill, shape).astype(np.float32)
    return np.random.default_rng([seed, *name.encode()]).standard_normal(shape, dtype=np.float32) * np.float32(fill)
  return unflatten({name: Tensor(np.ascontiguousarray(values(name, *row))).realize() for name, row in table.items()})

# *** the model, from the inside out.  x: the residual stream (B,T,dim) ***

def linear(cfg:Config, x:Tensor, w:Tensor) -> Tensor:
  """x (...,in) @ w (out,in)^T, float32, of x and w rounded to cfg.dtype: the only place where another precision is used.
  Input and incoming gradient are stored first, or the scheduler computes them anew inside every product."""
  if cfg.dtype != "float32": x, w = x.cast(cfg.dtype), w.cast(cfg.dtype).contiguous()
  return kernels.matmul(x.contiguous(), w, yt=True).contiguous_backward()

def rms_norm(x:Tensor, weight:Tensor) -> Tensor: return (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight).contiguous()

def unit(x:Tensor) -> Tensor: return (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).contiguous()

def heads_of(cfg:Config, x:Tensor) -> Tensor: return x.reshape(*x.shape[:2], cfg.heads, -1).transpose(1, 2).contiguous()      # (B,H,T,.)

def split_heads(cfg:Config, z:Tensor) -> list[Tensor]:
  """(B,T,H*(2*key_dim+value_dim)) -> q, k (B,H,T,key_dim), v (B,H,T,value_dim)"""
  H, d, dv = cfg.heads, cfg.key_dim, cfg.value_dim
  return [heads_of(cfg, part) for part in z.split([H * d, H * d, H * dv], dim=-1)]

def joined(y:Tensor) -> Tensor: return y.transpose(1, 2).flatten(2)          # (B,H,T,value_dim) -> (B,T,H*value_dim)

def part(state:dict|None, name:str) -> dict|None:
  """What belongs to one part of a block, with the position."""
  return state and {"position": state["position"]} | {n.split(".", 1)[1]: z for n, z in state.items() if n.startswith(name + ".")}

def named(name:str, state:dict) -> dict: return {f"{name}.{n}": z for n, z in state.items()}

def causal_conv(x:Tensor, w:Tensor, tail:Tensor|None) -> tuple[Tensor, Tensor]:
  """Depthwise: out_t = sum_j w[j] x_{t-j}; tail (B,len(w)-1,channels): the inputs before x, zeros at the start of the stream."""
  past = w.shape[0] - 1
  x = (x.pad((None, (past, 0), None)) if tail is None else tail.cat(x, dim=1)).contiguous()
  T = x.shape[1] - past
  return functools.reduce(Tensor.add, [w[j] * x[:, past - j:past - j + T] for j in range(past + 1)]), x[:, T:].contiguous()

def memory_weights(p:dict, cfg:Config) -> dict[str, Tensor]:
  """M_0 and what belongs to it, as kernels.memory takes them."""
  weights = {n: w * INIT.first if n in ("W", "W2", "anchor_u") else w for n, w in p["memory"].items() if n not in ("a_root", "scale")}
  if cfg.features == "poly": weights["a"] = p["memory"]["a_root"].square()
  return {n: Tensor.zeros(*shape) for n, shape in memory_shapes(cfg).items() if 0 in shape} | weights

def squared_length(p:dict, cfg:Config) -> Tensor:
  """exp: of a head's keys and queries, (H,1,1)."""
  return (INIT.scale_bound * p["memory"]["scale"].sigmoid()).reshape(cfg.heads, 1, 1)

def answer(cfg:Config, y:Tensor, q:Tensor, norm:Tensor, skip:Tensor|None) -> Tensor:
  """y = M(q) normalised, heads side by side: (B,H,T,value_dim) -> (B,T,H*value_dim).
  differs from the paper: the two terms of a memory q + M'(q) are normalised apart, because q has length 1 and what one step stores 1/100 of it."""
  return joined(rms_norm(y, norm) if skip is None else rms_norm(y - q, norm) + q * skip * cfg.key_dim ** 0.5)

def memory_heads(p:dict, cfg:Config, x:Tensor, state:dict|None, phase:int|None=None) -> tuple[Tensor, dict, Tensor]:
  """The memory behind its projections (method: Titans' block).  x (B,T,dim), normalised -> heads side by side (B,T,H*value_dim), state, eta."""
  B, T, H, after = *x.shape[:2], cfg.heads, {}
  z = linear(cfg, x, p["qkv"])
  if cfg.conv: z, after["conv"] = causal_conv(z, p["conv"], None if state is None else state["conv"])
  q, k, v = split_heads(cfg, z.contiguous())
  q, k, v = unit(q), unit(k), v.silu()                   # choice: before phi, the same for both, and without SiLU, which would make keys alike
  # differs from the paper: values are kept inside the unit ball, because no bound on eta is safe for values of any length
  v = (v * (v.square().sum(-1, keepdim=True) + 1).rsqrt()).contiguous()

  gates = (linear(cfg, x, p["gates"]) + p["gate_bias"]).sigmoid().transpose(1, 2).contiguous()                        # (B,gates,T)
  gate = dict(zip(gate_sizes(cfg), gates.split(list(gate_sizes(cfg).values()), dim=1)))
  one, position = Tensor.ones(B, H, T, device=x.device), 0 if state is None else state["position"]
  alpha, theta = gate.get("alpha", one), gate.get("theta", one)
  # differs from the paper: without a forget gate what is older than the horizon fades, or what a long stream has left would drown what comes then
  fades = cfg.forget or state is not None or T > cfg.horizon                     # else no token is that old
  if fades and not cfg.forget: alpha = (position + Tensor.arange(T) < cfg.horizon).where(one, 1 - 1 / cfg.horizon).contiguous()
  eta = gate["eta"] * eta_bound(cfg, alpha, position)
  gamma = gate["gamma"].reshape(B, H, cfg.window, T).transpose(2, 3) / cfg.window                                # (B,H,T,window)
  # differs from the paper: S averages gradients instead of summing them, because a learned theta near 1 would lift eta's bound without end
  if cfg.momentum: gamma = gamma * (1 - theta).unsqueeze(-1)
  if cfg.features == "exp":
    scale = squared_length(p, cfg)
    q, k, eta = q * scale.sqrt(), k * scale.sqrt(), eta * (-scale.squeeze(-1)).exp()
  if has_residual(cfg) and cfg.loss == "l2": v = v + k   # so that the memory's own layers store v, as they do without [x +] (see answer)
  # differs from the paper: forgetting leads back to M_0, not to zero, where a deep memory has no gradient and would be dead for good
  weights = memory_weights(p, cfg)
  y, memory = kernels.memory(cfg, weights, q, k, v, alpha, theta, eta, gamma, state, phase, toward=weights if fades else None)
  y = answer(cfg, y, q, p["out_norm"], p.get("out_skip")) * (linear(cfg, x, p["out_gate"]) + p["out_gate_bias"]).silu()
  return y, after | {n: s for n, s in memory.items() if n != "position"}, eta.mean()

@functools.cache
def _rope_table(length:int, d:int, device:str) -> tuple[Tensor, Tensor]:
  """cos and sin (length, d/2) of the angles of rotary positions, computed in float64."""
  angles = np.outer(np.arange(length), 10_000.0 ** (-np.arange(0, d, 2) / d))
  cos, sin = [Tensor(f(angles).astype(np.float32), device=device).realize() for f in (np.cos, np.sin)]
  return cos, sin

def rotate(x:Tensor, cos:Tensor, sin:Tensor) -> Tensor:
  """Rotary positions: pairs (x_i, x_{i+d/2}) turned by their angle; x (B,H,T,d), cos and sin (T,d/2)."""
  a, b = x.chunk(2, dim=-1)
  return (a * cos - b * sin).cat(a * sin + b * cos, dim=-1).contiguous()

def softmax_attention(q:Tensor, k:Tensor, v:Tensor, turn:tuple[Tensor, ...], turns:tuple[Tensor, ...], seen:Tensor, persist:tuple|None) -> Tensor:
  """q (...,T,d), k, v (...,L,.), seen (...,T,L): which keys a query sees; turn and turns: cos and sin of the positions of queries and keys;
  persist: keys and values (H,P,.) that all see, without positions -> (...,T,value_dim)."""
  q = q * cast(int, q.shape[-1]) ** -0.5
  # scores and probabilities are stored, or the backward pass computes them anew inside its products
  scores = seen.where(kernels.matmul(rotate(q, *turn), rotate(k, *turns), yt=True), -math.inf)
  if persist is not None:
    H, P, _ = persist[0].shape
    k, v0 = [z.reshape(1, H, *[1] * (q.ndim - 4), P, -1).expand(*q.shape[:-2], P, z.shape[-1]).contiguous() for z in persist]
    scores, v = kernels.matmul(q.contiguous(), k, yt=True).cat(scores, dim=-1), v0.cat(v, dim=-2)
  return kernels.matmul(scores.softmax(-1).contiguous(), v.contiguous()).contiguous_backward()

def persistent(p:dict, cfg:Config) -> tuple|None:
  """Keys and values of the persistent tokens."""
  return tuple(z[0] for z in split_heads(cfg, linear(cfg, p["persist"].unsqueeze(0), p["qkv"]))[1:]) if cfg.persist else None

def attention_heads(p:dict, cfg:Config, x:Tensor, state:dict|None) -> tuple[Tensor, dict]:
  """Causal softmax attention with rotary positions, over everything or the last attn_window tokens.
  x (B,T,dim), normalised -> heads side by side (B,T,H*value_dim), state."""
  return (windowed if cfg.attn_window else full)(cfg, split_heads(cfg, linear(cfg, x, p["qkv"]).contiguous()), persistent(p, cfg), state)

def windowed(cfg:Config, qkv:list[Tensor], persist:tuple|None, state:dict|None) -> tuple[Tensor, dict]:
  """In blocks of attn_window queries that see their own block of keys and the one before, so that nothing is T by T.

  State: a rolling cache of the last attn_window keys (not yet rotated) and values.  Positions count from the start of each block's keys: their
  angles are exact wherever in the stream it is."""
  (B, H, T, d), w = cast(tuple[int, ...], qkv[0].shape), cfg.attn_window
  position, s = Tensor(0, dtype=dtypes.int32) if state is None else state["position"], min(w, T)               # s: queries of a block
  N = -(-T // s)
  q, k, v = [z.pad((None, None, (0, N * s - T), None)) for z in qkv]
  past = [z.pad((None, None, (w, 0), None)) if state is None else state[n].cat(z, dim=2) for n, z in (("k", k), ("v", v))]
  after = {n: z[:, :, T:T + w].contiguous() for n, z in zip("kv", past)}
  def blocks(z):                                         # (B,H,w+N*s,.) -> (B,H,N,w+s,.)
    if N == 1: return z.unsqueeze(2).contiguous()
    return z[:, :, :N * w].reshape(B, H, N, w, -1).cat(z[:, :, w:].reshape(B, H, N, w, -1), dim=3).contiguous()
  row, column = w + Tensor.arange(s).reshape(s, 1), Tensor.arange(w + s).reshape(1, w + s)
  seen = (column <= row) * (column > row - w) * (column + s * Tensor.arange(N).reshape(N, 1, 1) >= w - position)          # from the stream's start
  cos, sin = _rope_table(w + s, d, cast(str, q.device))
  k, v = map(blocks, past)
  y = softmax_attention(q.reshape(B, H, N, s, d).contiguous(), k, v, (cos[w:], sin[w:]), (cos, sin), seen, persist)
  return joined(y.flatten(2, 3)[:, :, :T]), after

def full(cfg:Config, qkv:list[Tensor], persist:tuple|None, state:dict|None) -> tuple[Tensor, dict]:
  """State: all keys (not yet rotated) and values, in a cache that doubles when full.  Under TinyJit it cannot grow: a step past its end gives NaN."""
  q, k, v = qkv
  (_, _, T, d), past = cast(tuple[int, ...], q.shape), 0                       # past: columns before the first query
  position = Tensor(0, dtype=dtypes.int32) if state is None else state["position"]
  at: int|Tensor = 0                                     # column of the first query
  if state is not None:
    known = kernels.read_position(state)                 # None only while a jit is captured
    if known is None and T > 1: raise ValueError("full attention cannot jit a call of several tokens with a state: its shapes grow")
    if known is not None:
      past = known
      if past + T > state["k"].shape[2]: state = state | {n: _with_capacity(state[n], past + T) for n in ("k", "v")}
    if T > 1: k, v, at = state["k"][:, :, :past].cat(k, dim=2), state["v"][:, :, :past].cat(v, dim=2), past
    else:
      here, at = (Tensor.arange(state["k"].shape[2]) == position).reshape(-1, 1), position
      k, v = here.where(k, state["k"]), here.where(v, state["v"])
  k, v = k.contiguous(), v.contiguous()
  L = cast(int, k.shape[2])
  after = {n: z if T == 1 and state is not None else _with_capacity(z, L) for n, z in (("k", k), ("v", v))}
  turns = _rope_table(L, d, cast(str, q.device))
  row, column = at + Tensor.arange(T).reshape(T, 1), Tensor.arange(L).reshape(1, L)
  if isinstance(at, Tensor): turn = tuple((column.reshape(L, 1) == at).where(z, 0).sum(0, keepdim=True) for z in turns)
  else: turn = tuple(z[at:at + T] for z in turns)
  y = softmax_attention(q, k, v, turn, turns, column <= row, persist)          # (B,H,T,value_dim)
  if isinstance(at, Tensor): y = (position < L).where(y, math.nan)
  return joined(y), after

def _with_capacity(cache:Tensor, needed:int) -> Tensor:
  """Pads a cache (B,H,L,d) to a power of two with room for as many tokens again."""
  return cache.pad((None, None, (0, kernels.capacity_for(needed) - cast(int, cache.shape[2])), None)).contiguous()

# The mixers: x (B,T,dim), normalised -> (B,T,dim), state, mean eta

def memory_mixer(p:dict, cfg:Config, x:Tensor, state:dict|None) -> tuple[Tensor, dict, Tensor]:
  y, after, eta = memory_heads(p, cfg, x, state)
  return linear(cfg, y, p["out"]), after, eta

def attention_mixer(p:dict, cfg:Config, x:Tensor, state:dict|None) -> tuple[Tensor, dict, Tensor]:
  y, after = attention_heads(p, cfg, x, state)
  return linear(cfg, y, p["out"]), after, Tensor(0.0)

def mag_mixer(p:dict, cfg:Config, x:Tensor, state:dict|None) -> tuple[Tensor, dict, Tensor]:
  """Memory as gate: attention and memory read the same x; both normalised, one gates the other."""
  m, memory, eta = memory_heads(p, cfg, x, part(state, "memory"))
  y, near = attention_heads(p["attention"], cfg, x, part(state, "attention"))
  y = rms_norm(y, p["attention"]["norm"]) * rms_norm(m, p["attention"]["memory_norm"]).silu()
  return linear(cfg, y, p["out"]), named("memory", memory) | named("attention", near), eta

def mal_mixer(p:dict, cfg:Config, x:Tensor, state:dict|None) -> tuple[Tensor, dict, Tensor]:
  """Memory as layer: attention reads what the memory puts out."""
  m, memory, eta = memory_heads(p, cfg, x, part(state, "memory"))
  y, near = attention_heads(p["attention"], cfg, rms_norm(linear(cfg, m, p["out"]), p["attention"]["norm"]), part(state, "attention"))
  return linear(cfg, y, p["attention"]["out"]), named("memory", memory) | named("attention", near), eta

HELD, CACHES = ("memory", "start", "cache"), ("h_k", "h_v", "x_k", "x_v")

def segment(p:dict, cfg:Config, read:Tensor, q:Tensor, of_x:list[Tensor], place:int|Tensor, position:Tensor, phase:int, memory:dict, start:dict,
            cache:dict) -> tuple:
  """n tokens of one segment, the first at `place` in it, at `position` in the stream and `phase` tokens into a chunk of the memory.
  read, q (B,H,n,key_dim): queries to the memory and to attention; of_x: keys and values of the tokens themselves.
  -> y (B,n,dim), the attention's output; m (B,n,H*value_dim), what the memory makes of it; eta; and for the next tokens the memory now, that of
  the segment's start, and the segment's keys and values so far (attn_window places)."""
  near, w, (_, H, n, d) = p["attention"], cfg.attn_window, cast(tuple[int, ...], q.shape)
  now = {name: z for name, z in memory.items() if name.startswith("M.") or name == "keys"}
  if isinstance(place, Tensor):
    longer = {name: z.pad(tuple((0, a - b) for a, b in zip(now[name].shape, z.shape))) for name, z in start.items()}           # exp may have grown
    start = {name: (place == 0).where(now[name], z) for name, z in longer.items()}
  elif place == 0: start = now
  h = kernels.recall(cfg, memory_weights(p, cfg), start, read)
  h = linear(cfg, answer(cfg, h, read, near["read_norm"], near.get("read_skip")), near["read_out"])
  of_h = [heads_of(cfg, z) for z in linear(cfg, h, near["qkv"][H * d:].contiguous()).split([H * d, H * cfg.value_dim], dim=-1)]
  turns, column = _rope_table(w, d, cast(str, q.device)), Tensor.arange(w).reshape(w, 1)
  if isinstance(place, Tensor):
    cache = {name: (column == place).where(z, cache[name]) for name, z in zip(CACHES, (*of_h, *of_x))}
    turn = tuple((column == place).where(z, 0).sum(0, keepdim=True) for z in turns)
  else:
    before = [[cache[name][:, :, :place]] if place else [] for name in CACHES]
    after = [Tensor.cat(*old, z, dim=2).pad((None, None, (0, w - place - n), None)) for old, z in zip(before, (*of_h, *of_x))]
    cache, turn = dict(zip(CACHES, after)), tuple(z[place:place + n] for z in turns)
  k, v = [cache["h_" + name].cat(cache["x_" + name], dim=2).contiguous() for name in "kv"]
  seen = column.reshape(1, w) <= place + Tensor.arange(n).reshape(n, 1)
  y = softmax_attention(q, k, v, turn, tuple(z.cat(z) for z in turns), seen.cat(seen, dim=1), persistent(near, cfg))
  y = rms_norm(linear(cfg, joined(y), near["out"]), near["norm"])
  m, memory, eta = memory_heads(p, cfg, y, {"position": position} | memory, phase)
  return y, m, eta, memory, start, cache

def mac_mixer(p:dict, cfg:Config, x:Tensor, state:dict|None) -> tuple[Tensor, dict, Tensor]:
  """Memory as context, segment by segment of attn_window tokens: h_i is read, for token i, from the memory as it was at the segment's start; token i
  attends to the persistent tokens, h_1..h_i and x_1..x_i; the attention's output y is then stored, and read again: o = y * M_t(y).

  State: the memory now ("memory.") and where the segment began ("start."), and the keys and values of its h and x, attn_window places ("cache.").
  Under TinyJit a call of several tokens with a state must start where both a segment and a chunk do, and gives NaN elsewhere."""
  w, (B, T, _) = cfg.attn_window, cast(tuple[int, ...], x.shape)
  position = Tensor(0, dtype=dtypes.int32) if state is None else state["position"]
  if state is None:                                      # all segments alike: one set of kernels serves them
    begin = kernels.initial_state(cfg, memory_weights(p, cfg), B, cfg.key_dim, x)
    if cfg.conv: begin["conv"] = Tensor.zeros(B, cfg.conv - 1, p["conv"].shape[1], device=x.device)
    memory, start, cache = {n: z.contiguous() for n, z in begin.items() if n != "position"}, {}, {}
  else: memory, start, cache = [{n: z for n, z in cast(dict, part(state, name)).items() if n != "position"} for name in HELD]
  known = kernels.read_position({"position": position})  # None only while a jit is captured
  read_q = unit(heads_of(cfg, linear(cfg, x, p["attention"]["read_q"])))
  if cfg.features == "exp": read_q = read_q * squared_length(p, cfg).sqrt()
  queries = [read_q, *split_heads(cfg, linear(cfg, x, p["attention"]["qkv"]).contiguous())]
  done, outs = 0, cast(list[list], [])
  while done < T:
    place = position % w if T == 1 and state is not None else ((known or 0) + done) % w       # one token may go anywhere in its segment
    n = 1 if isinstance(place, Tensor) else min(w - place, T - done)
    read, q, *of_x = [z[:, :, done:done + n].contiguous() for z in queries]
    *out, memory, start, cache = segment(p, cfg, read, q, of_x, place, position + done, ((known or 0) + done) % cfg.chunk, memory, start, cache)
    outs, done = [*outs, out], done + n
  y, m = [Tensor.cat(*z, dim=1) for z in list(zip(*outs))[:2]]
  y = y * linear(cfg, m, p["out"])
  if known is None and T > 1: y = (position % w == 0).where(y, math.nan)
  return y, named("memory", memory) | named("start", start) | named("cache", cache), Tensor.stack(*[out[2] for out in outs]).mean()

MIXERS = {"memory": memory_mixer, "attention": attention_mixer, "mag": mag_mixer, "mal": mal_mixer, "mac": mac_mixer}

def block(p:dict, cfg:Config, x:Tensor, state:dict|None) -> tuple[Tensor, dict, Tensor]:
  """Pre-norm residual block: token mixer, then SwiGLU MLP."""
  y, state, eta = MIXERS[cfg.mixer](p, cfg, rms_norm(x, p["norm1"]), state)
  x = (x + y).contiguous()
  gate, value = linear(cfg, rms_norm(x, p["norm2"]), p["mlp_in"]).contiguous().chunk(2, dim=-1)
  return (x + linear(cfg, gate.silu() * value, p["mlp_out"])).contiguous(), state, eta

def hidden(params:dict, cfg:Config, tokens:Tensor, state:dict[str, Tensor]|None=None) -> tuple[Tensor, dict[str, Tensor], Tensor]:
  """What the blocks make of the tokens, normalised (B,T,dim); the state; the mean memory step eta over blocks, heads and tokens."""
  x = params["embed"][tokens].contiguous()               # (B,T,dim)
  position = Tensor(0, dtype=dtypes.int32, device=x.device) if state is None else state["position"]
  after, etas = {"position": (position + cast(int, tokens.shape[1])).clone()}, []
  for i in range(cfg.layers):
    mine = None if state is None else {"position": position} | {n.split(".", 1)[1]: s for n, s in state.items() if n.startswith(f"{i}.")}
    x, layer, eta = block(params["layers"][str(i)], cfg, x, mine)
    after |= {f"{i}.{n}": s for n, s in layer.items()}
    etas.append(eta)
  return rms_norm(x, params["norm"]), after, Tensor.stack(*etas).mean()

def forward(params:dict, cfg:Config, tokens:Tensor, state:dict[str, Tensor]|None=None) -> tuple[Tensor, dict[str, Tensor]]:
  """tokens (B,T) of whole numbers below vocab, T >= 1 -> logits (B,T,vocab) float32, and the state after the last token.

  state: what an earlier call returned; forward(a), then forward(b, state) equals forward(a + b).  It is a flat dict of Tensors (so TinyJit
  takes it as it is), never changed in place; a step of one token may be jitted, and room(cfg, state) says for how long."""
  x, after, _ = hidden(params, cfg, tokens, state)
  return linear(cfg, x, params["embed"]).float(), after

def growing(cfg:Config) -> list[tuple[str, int]]:
  """The caches of a state that grow with the stream, of its first block: their names, and how many of their places no token takes."""
  part, near = ("", "") if cfg.mixer in ("memory", "attention") else ("memory.", "attention.")
  found = [(f"0.{near}k", 0)] if cfg.mixer in ("attention", "mag", "mal") and not cfg.attn_window else []
  return found + ([(f"0.{part}keys", cfg.anchors)] if cfg.mixer != "attention" and cfg.features == "exp" else [])

def room(cfg:Config, state:dict[str, Tensor]) -> int|None:
  """How many tokens in all the state has place for before a jitted step must be captured again; None: no end."""
  return min([cast(int, state[name].shape[2]) - taken for name, taken in growing(cfg)], default=None)

def token_losses(logits:Tensor, targets:Tensor) -> Tensor:
  """Cross-entropy in nats of every target (B,T), 0 where it is -100."""
  return logits.sparse_categorical_crossentropy(targets, ignore_index=-100, reduction="none")

def cross_entropy(logits:Tensor, targets:Tensor) -> Tensor:
  """Mean cross-entropy in nats over the targets (B,T) that are not -100."""
  return logits.sparse_categorical_crossentropy(targets, ignore_index=-100)

def loss(params:dict, cfg:Config, tokens:Tensor, targets:Tensor) -> Tensor:
  """Mean cross-entropy in nats of targets (B,T) after tokens (B,T), -100 where none is asked for."""
  return cross_entropy(forward(params, cfg, tokens)[0], targets)

# *** weights in files ***

save = data.save_file          # tensors and settings in a safetensors file, which `load` reads

def weights_of(saved:data.Saved, table:dict) -> dict:
  """The slow weights of a checkpoint or an exported file, as `init` makes them.  ValueError where they are not those of the table (see layout)."""
  found = {n.removeprefix("weights."): t for n, t in saved.tensors.items() if not n.startswith("adam.")}
  if extra := {n for n in found if not n.startswith("decoder.")} - table.keys():
    raise ValueError(f"{saved.path} has a weight {min(extra)} that the settings do not ask for: give the settings it was made with")
  for name, (shape, _) in table.items():
    if name not in found: raise ValueError(f"{saved.path} has no weight {name}: give the settings it was made with")
    if found[name].shape != shape:
      raise ValueError(f"{saved.path}: {name} has shape {found[name].shape}, the settings ask for {shape}: give the settings it was made with")
  return unflatten({n: Tensor(found[n].numpy()).realize() for n in table})

def config_of(saved:data.Saved) -> Config:
  try: return Config(**saved.meta["config"])
  except (TypeError, KeyError): raise ValueError(f"{saved.path} has settings that this version does not know: use the version that made it") from None

def load(path:str|Path) -> tuple[Config, dict]:
  """The settings and weights of a file that `train.py mode=export` wrote, or of a checkpoint.  ValueError, in one line, where it is neither."""
  cfg = config_of(saved := data.read_file(path))
  return cfg, weights_of(saved, layout(cfg))
