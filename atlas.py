"""ATLAS (arXiv 2505.23735) and its family: language models whose token mixer is a memory that learns while it reads.

Glossary         shape               paper  meaning
  B, T, H, V                                batch, tokens, heads, vocabulary
  q, k           (B,H,T,key_dim)     q, k   query and key, unit vectors of size d, one per head and token
  v, y           (B,H,T,value_dim)   v, y   value to be stored, output of the memory
  phi            d -> D              phi    features: identity, all monomials up to `degree`, or exp, without end:
                                            phi(x).phi(y) = exp(x.y); a layer on phi is stored as a sum over tokens
  a              (degree+1,)         a_i    coefficients of poly: phi(x).phi(y) = sum_i a[i] (x.y)^i
  M              (B,H,o,i) each      M      the memory, a small network of matrices; M_0 is learned, one per head
  o, i                                      rows (outputs) and columns (inputs) of a matrix X; A: X X^T (Newton-Schulz)
  S              as M                S      momentum of the memory's gradient
  alpha, theta   (B,H,T)             same   forget gate, momentum gate
  eta            (B,H,T)             eta    memory step, the learning rate of the memory
  gamma          (B,H,T,window)      gamma  gates of the window: gamma[...,j] weighs the gradient at token t-j
  window                             c      tokens whose loss each step minimises; 1 is the delta rule's online step
  chunk                              b      tokens whose gradients are taken at the same memory, in parallel
  halo                                      the window-1 tokens before a chunk; E = b + c - 1 tokens with the chunk
  base           as M                M'     the memory at which a chunk's gradients are taken: M at the chunk's start
  phase, every                              tokens of the chunk that came before the call; tokens to a Muon step
  toward         R, as M                    the memory that forgetting leads to: here M_0
  slow weights                              `params`, trained by AdamW; the memory's own weights are fast

A model is four choices: memory architecture, features, loss, learning rule.  PRESETS is the table of all of them.
"""
from __future__ import annotations
import dataclasses, difflib, functools, math
from pathlib import Path
from typing import cast
import numpy as np
from tinygrad import Tensor, dtypes
import data, kernels, rule
from rule import named, part_of, sizes

State = dict[str, Tensor]                                # flat: "0.memory.M.W1" is a matrix of block 0's memory
Mixed = tuple[Tensor, State, State]                      # of a mixer: y (B,T,.), state after it, inputs of its heads
Layout = dict[str, tuple[tuple[int, ...], float|np.ndarray]]       # of parameters: name -> shape, initial values
Pair = tuple[Tensor, ...]                                # keys and values, or cos and sin
Place = int|Tensor                                       # an index: a Tensor if one compiled step serves all positions

# *** settings ***
CHOICES = {
  "mixer": ("memory", "attention", "mag", "mal", "mac"), "memory": ("linear", "mlp", "gated"),
  "features": tuple(rule.FEATURES), "loss": tuple(rule.LOSSES), "optimizer": tuple(rule.STEPS),
  "backend": ("auto", "ops", "fused"), "dtype": ("float32", "bfloat16")}
KINDS = {int: "a whole number", float: "a number", bool: "true or false (1 or 0)", str: "a word"}
LEAST = {"conv": 0, "attn_window": 0, "ns_steps": 0, "persist": 0, "anchors": 0}        # whole numbers; others: 1
MOST = {"degree": 32} | dict.fromkeys(("layers", "heads", "window", "conv", "ns_steps", "mlp_ratio"), 1024)  # else 2^20

@dataclasses.dataclass(frozen=True)
class Config(rule.Rule):
  """Every setting of a model.  ValueError for a wrong type, an unknown choice or an impossible combination."""
  vocab: int = 256            # number of tokens; 256: bytes
  dim: int = 64               # width of the residual stream
  layers: int = 2             # blocks
  heads: int = 4              # memories (or attention heads) per block
  key_dim: int = 16           # size of a head's keys and queries
  value_dim: int = 16         # size of a head's values
  mixer: str = "memory"       # memory | attention (softmax) | both: mag (gate), mal (layers), mac (memory as context)
  memory: str = "mlp"         # architecture: linear | mlp (two layers, gelu) | gated (three matrices)
  expand: int = 4             # hidden size of the memory, in units of value_dim
  features: str = "identity"  # phi: identity | poly | exp (as long as the stream, like a key-value cache)
  degree: int = 2             # highest degree of poly
  anchors: int = 16           # exp: learned pairs of key and coefficient, the first layer's initial value
  loss: str = "l2"            # attentional bias: l2 (delta rule) | dot (Hebbian)
  window: int = 1             # c: tokens in each step's loss
  forget: bool = False        # forget gate alpha (else 1 up to the horizon)
  horizon: int = 128          # no forget gate: older tokens fade, alpha = 1 - 1/horizon (training: its length or more)
  momentum: bool = False      # momentum theta
  optimizer: str = "gd"       # memory's step: gd | muon (Newton-Schulz of the momentum)
  ns_steps: int = 5           # Newton-Schulz iterations
  muon_every: int = 1         # Muon steps at every r-th token only; divides chunk
  chunk: int = 32             # b: tokens whose gradients share a memory
  conv: int = 4               # length of the causal convolution on q, k, v (0: none; a hybrid's attention: none)
  attn_window: int = 0        # attention sees that many tokens (0: all); for mac the length of a segment
  persist: int = 0            # persistent tokens: learned, in front of the attention's keys
  mlp_ratio: float = 2.0      # hidden size of the SwiGLU MLP, in units of dim
  backend: str = "auto"       # form of the recurrence: ops (stock operations) | fused (one kernel) | auto (the faster)
  dtype: str = "float32"      # of dense products: float32 | bfloat16 (rounded copies; all else stays float32)
  def __post_init__(self):
    for field in dataclasses.fields(self):
      name, x = field.name, getattr(self, field.name)
      kind, least, most = type(getattr(Config, name)), LEAST.get(name, 1), MOST.get(name, 1 << 20)
      if kind is float and type(x) is int: x = float(x)
      if type(x) is not kind: raise ValueError(f"{name}={x!r} is not {KINDS[kind]}: its default is {field.default!r}")
      choices = CHOICES.get(name, (x,))
      if x not in choices: raise ValueError(f"{name}={x!r} is unknown{nearest(x, choices)}")
      if kind is int and x < least: raise ValueError(f"{name}={x} is too small: take {least} or more")
      if kind in (int, float) and x > most: raise ValueError(f"{name}={x} is too large: take {most} or less")
      object.__setattr__(self, name, x)                  # as a float, where an int was given for one
    if not (self.mlp_ratio > 0 and round(self.mlp_ratio * self.dim)):
      raise ValueError(f"mlp_ratio={self.mlp_ratio} leaves no hidden unit at dim={self.dim}: take 2, for example")
    if self.mixer != "memory" and self.key_dim % 2:
      raise ValueError(f"key_dim={self.key_dim} is odd, and rotary positions turn pairs: take {self.key_dim + 1}")
    if self.mixer == "mac" and not self.attn_window:
      raise ValueError("attn_window=0 leaves mac without segments: take 64, for example")
    if self.mixer != "attention": check_memory(self)

def check_memory(cfg:Config) -> None:
  """ValueError where the settings of the memory do not go together."""
  rule.feature_size(cfg.key_dim, cfg.features, cfg.degree)
  is_linear, exp = rule.STEPS[cfg.optimizer].linear, f"features={cfg.features}"
  data.refuse(expands(cfg) and cfg.memory == "gated",
              f"memory=gated has two first layers to expand, and {exp} keeps one: take mlp or linear")
  data.refuse(expands(cfg) and not is_linear, f"optimizer={cfg.optimizer} has no matrix to orthogonalise with {exp}, "
              "whose expansion is as long as the stream: take gd")
  data.refuse(expands(cfg) and cfg.backend == "fused",
              f"backend=fused keeps matrices, and the expansion of {exp} grows with the stream: take ops or auto")
  data.refuse(expands(cfg) and cfg.memory == "mlp" and not cfg.anchors,
              f"anchors=0 leaves the first layer of memory=mlp at 0 with {exp}: take 1 or more, or memory=linear")
  if not is_linear and cfg.chunk % cfg.muon_every:
    divisors = ", ".join(str(n) for n in range(1, cfg.chunk + 1) if cfg.chunk % n == 0)
    raise ValueError(f"muon_every={cfg.muon_every} does not divide chunk={cfg.chunk}: take one of {divisors}")

def nearest(name, known) -> str:
  """The end of a message on an unknown name: the known names that are close to it, or all of them."""
  close = difflib.get_close_matches(str(name), list(known), n=3)
  return f": did you mean {' or '.join(close)}?" if close else f": take one of {', '.join(known)}"

# The named models.  A row holds only what makes a model different: everything else is Config's default.
_OMEGA = dict(features="poly", window=4, forget=True)
_ATLAS = dict(**_OMEGA, momentum=True, optimizer="muon")
_HYBRID = dict(attn_window=64, persist=4)
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
  "atlas":            dict(                                               **_ATLAS),
  "atlas++":          dict(memory="gated",                                **_ATLAS),
  "transformer++":    dict(mixer="attention", conv=0),
  "swa":              dict(mixer="attention", conv=0, attn_window=64),
  **{f"atlas_{mixer}": dict(mixer=mixer, **_HYBRID, **_ATLAS) for mixer in ("mag", "mal", "mac")},
  "titans_mac":       dict(mixer="mac", **_HYBRID,                        forget=True, momentum=True)}

# `tiny`, and Table 7 of the paper, without key size, window, chunk, degree.  Quadratic features stay below 2,200.
_PAPER = dict(vocab=32_000, mlp_ratio=8 / 3, chunk=64, muon_every=16)
SIZES: dict[str, dict] = {
  "tiny": dict(dim=64, layers=2, heads=4, key_dim=16, value_dim=16, expand=1, chunk=32, muon_every=4),
  "170m": dict(dim=768, layers=12, heads=16, key_dim=48, value_dim=48, **_PAPER),
  "340m": dict(dim=1024, layers=24, heads=16, key_dim=32, value_dim=64, **_PAPER),
  "760m": dict(dim=1536, layers=24, heads=16, key_dim=32, value_dim=96, **_PAPER),
  "1.3b": dict(dim=2048, layers=18, heads=8, key_dim=64, value_dim=256, **_PAPER)}

def preset(name:str="atlas", size:str="tiny", **fields) -> Config:
  """The named model at a size: explicit fields > size > preset > Config's defaults.  ValueError for unknown names.
  Where the size's muon_every does not divide an explicit chunk, their greatest common divisor is taken."""
  if name not in PRESETS: raise ValueError(f"preset={name!r} is unknown{nearest(name, PRESETS)}")
  if size not in SIZES: raise ValueError(f"size={size!r} is unknown{nearest(size, SIZES)}")
  known = [field.name for field in dataclasses.fields(Config)]
  for field in fields:
    if field not in known: raise ValueError(f"{field} is not a setting{nearest(field, known)}")
  settings, chunk = PRESETS[name] | SIZES[size] | fields, fields.get("chunk")
  if type(chunk) is int and "muon_every" not in fields: settings["muon_every"] = math.gcd(settings["muon_every"], chunk)
  return Config(**settings)

# *** initial values: one row each, with its reason.  The rows of rule.LOSSES and rule.STEPS hold the bounds of eta ***
class INIT:
  gates = 0.02        # Standard deviation of the gates' projection: small, so that gates start at their biases.
  out_gate = 1.0      # Bias of the gate on y: open.  Near 0 its sign would differ by token and scramble the output.
  first = 0.1         # M_0's first layer in units of its parameter: its noise and AdamW's steps must not drown a write.
  alpha = 0.99        # Forget gate: half of a write is left after 69 tokens.  At 0.5 a chunk would erase it.
  theta = 0.9         # Momentum gate: the usual momentum.
  gamma = 0.9         # Window gates, before 1/c: a step weighs the tokens of its window about alike.
  eta = 0.5           # Memory step: half of its bound, where the sigmoid is steepest.
  scale = 1.0         # exp: |q|^2 = |k|^2 at first.  exp(q.k) from 1/e to e tells keys apart and is nearly linear.
  scale_bound = 4.0   # exp: the largest |q|^2 = |k|^2.  exp(q.k) from exp(-4) to exp(4) is as sharp as attention.

def eta_bound(cfg:Config, alpha:Tensor, position:Tensor|int=0) -> Tensor|float:
  """The largest memory step that a token may take; the gate eta picks a part of it.
  alpha (B,H,T): forget gates; position: tokens before the first.  A number, or a Tensor that broadcasts to (B,H,T)."""
  step, loss = rule.STEPS[cfg.optimizer], rule.LOSSES[cfg.loss]
  if step.bound is not None: return step.bound
  # A linear memory without a fixed point (Hebbian) grows by at most a constant a token: the same bound serves.
  if loss.fixed_point or cfg.memory == "linear": return loss.bound / cfg.chunk
  # The matrices of a deep Hebbian memory grow in proportion to each other, by a factor of at most 1 + 2 eta a token.
  # Forgetting shrinks them by the factor alpha a token, and must outrun the growth.
  if cfg.forget: return loss.bound * (1 - alpha)
  # Without a forget gate, constant steps would let them grow exponentially.  If steps fall with the position, they grow
  # as a power of it.  From the horizon on fading outruns the growth: the step falls no further.
  tokens_before = position + indices(sizes(alpha)[2])
  return loss.bound / (cfg.chunk + tokens_before.minimum(cfg.horizon)).cast(dtypes.float32)

def memory_shapes(cfg:Config) -> dict[str, tuple[int, int, int]]:
  """The matrices of one block's memory, (heads, out, in); exp: anchors (heads, number, size) for the first layer."""
  H, dv, hidden = cfg.heads, cfg.value_dim, cfg.expand * cfg.value_dim
  D = rule.feature_size(cfg.key_dim, cfg.features, cfg.degree)
  second = {} if cfg.memory == "linear" else {"W1": (H, dv, hidden)}
  if expands(cfg):
    return {"anchor_k": (H, cfg.anchors, D), "anchor_u": (H, cfg.anchors, hidden if second else dv)} | second
  if cfg.memory == "linear": return {"W": (H, dv, D)}
  return second | dict.fromkeys(("W2", "W3") if cfg.memory == "gated" else ("W2",), (H, hidden, D))

def expands(cfg:Config) -> bool: return rule.FEATURES[cfg.features].expansion
def has_residual(cfg:Config) -> bool:
  """Whether the memory is x + M'(x): a deep memory whose keys and values have one size."""
  return cfg.memory != "linear" and cfg.key_dim == cfg.value_dim
def stores_key(cfg:Config) -> bool:
  """Whether its target is v + k: then M' stores v, as without a residual, and `answer` subtracts q."""
  return has_residual(cfg) and rule.LOSSES[cfg.loss].fixed_point
def gate_sizes(cfg:Config) -> dict[str, int]:
  """Columns of the gates' projection, in order.  A rule has no gate that it has no use for."""
  heads = {"eta": 1, "gamma": cfg.window, "alpha": int(cfg.forget), "theta": int(cfg.momentum)}
  return {gate: cfg.heads * n for gate, n in heads.items() if n}

def layout(cfg:Config) -> Layout:
  """Every parameter: name -> (shape, initial values).  A float is the standard deviation of normal noise, an array the
  values themselves.  Matrices are (out, in).  Nothing large is allocated: a size can be counted before it is built."""
  table: Layout = {"embed": ((cfg.vocab, cfg.dim), cfg.dim ** -0.5), "norm": _ones(cfg.dim)}
  for i in range(cfg.layers): table |= named(f"layers.{i}", _block_layout(cfg))
  return {name: row for name, row in table.items() if 0 not in row[0]}

def _ones(n): return (n,), np.ones(1)
def _dense(out, columns, scale=1.0): return (out, columns), scale * columns ** -0.5
def _logit(x): return math.log(x / (1 - x))
def _block_layout(cfg:Config) -> Layout:
  H, d, dv, dim, gates = cfg.heads, cfg.key_dim, cfg.value_dim, cfg.dim, gate_sizes(cfg)
  wide, stream_scale = round(cfg.mlp_ratio * dim), (2 * cfg.layers) ** -0.5    # the stream must not grow with depth
  qkv, out, onto_dim = _dense(H * (2 * d + dv), dim), _dense(dim, H * dv, stream_scale), _dense(dim, H * dv)
  table: Layout = {"norm1": _ones(dim), "qkv": qkv, "out": out, "norm2": _ones(dim),
                   "mlp_in": _dense(2 * wide, dim), "mlp_out": _dense(dim, wide, stream_scale),
                   "conv": ((cfg.conv, H * (2 * d + dv)), max(1, cfg.conv) ** -0.5)}
  attention: Layout = {"qkv": qkv, "persist": ((cfg.persist, dim), 1.0)}                # as large as a normalised input
  if cfg.mixer == "attention": return table | attention
  bias = np.repeat([_logit(getattr(INIT, gate)) for gate in gates], list(gates.values()))
  table |= {"gates": ((len(bias), dim), INIT.gates), "gate_bias": (bias.shape, bias), "out_norm": _ones(dv),
            "out_gate": _dense(H * dv, dim), "out_gate_bias": ((H * dv,), np.full(1, INIT.out_gate))}
  if has_residual(cfg): table["out_skip"] = _ones(dv)
  for name, shape in memory_shapes(cfg).items():
    table[f"memory.{name}"] = shape, max(1, shape[1 if name == "anchor_u" else 2]) ** -0.5
  if expands(cfg): table["memory.scale"] = (H,), np.array([_logit(INIT.scale / INIT.scale_bound)])
  if rule.FEATURES[cfg.features].coefficients:           # a_i = root_i^2 >= 0; with 1/i! they are those of exp(x.y)
    table["memory.a_root"] = (cfg.degree + 1,), np.array([math.factorial(i) ** -0.5 for i in range(cfg.degree + 1)])
  if cfg.mixer == "memory": return table
  if cfg.mixer == "mag": attention |= {"norm": _ones(H * dv), "memory_norm": _ones(H * dv)}
  else: attention |= {"norm": _ones(dim), "out": out if cfg.mixer == "mal" else onto_dim}
  if cfg.mixer == "mac": attention |= {"read_q": _dense(H * d, dim), "read_norm": _ones(dv), "read_out": onto_dim}
  if cfg.mixer == "mac" and has_residual(cfg): attention["read_skip"] = _ones(dv)
  return table | named("attention", attention)

def parts(cfg:Config) -> dict[str, int]:
  """Number of parameters by part of the model, and in all ("total")."""
  labels = dict(embed="embedding (tied)", memory="memories M_0", norm="norms", norm1="norms", norm2="norms",
                mlp_in="MLP", mlp_out="MLP")
  count: dict[str, int] = {}
  for name, (shape, _) in layout(cfg).items():
    label = labels.get(name.split(".")[2] if "." in name else name, "mixer projections")
    count[label] = count.get(label, 0) + math.prod(shape)
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
def filled(table:Layout, seed:int) -> dict:
  """A table like layout's as a nested dict of float32 Tensors.  Each depends on its own row and the seed only."""
  def values(name, shape, fill):
    if isinstance(fill, np.ndarray): return np.broadcast_to(fill, shape).astype(np.float32)
    return np.random.default_rng([seed, *name.encode()]).standard_normal(shape, dtype=np.float32) * np.float32(fill)
  return unflatten({name: Tensor(np.ascontiguousarray(values(name, *row))).realize() for name, row in table.items()})

# *** what all mixers use.  `.contiguous()` stores a tensor, or every product that reads it would compute it anew ***
def zeros(*shape:int, like:Tensor) -> Tensor: return Tensor.zeros(*shape, dtype=dtypes.float32, device=like.device)
def indices(n:int) -> Tensor: return Tensor.arange(n, dtype=dtypes.int32)

def linear(cfg:Config, x:Tensor, w:Tensor) -> Tensor:
  """x (...,in) @ w (out,in)^T -> (...,out) float32, of x and w rounded to cfg.dtype, which nothing else uses."""
  if cfg.dtype != "float32": x, w = x.cast(cfg.dtype), w.cast(cfg.dtype).contiguous()
  return kernels.matmul(x.contiguous(), w, yt=True).contiguous_backward()
def rms_norm(x:Tensor, w:Tensor) -> Tensor:
  return (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w).contiguous()
def unit(x:Tensor) -> Tensor: return (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).contiguous()
def heads_of(cfg:Config, x:Tensor) -> Tensor: return x.reshape(*x.shape[:2], cfg.heads, -1).transpose(1, 2).contiguous()
def joined(y:Tensor) -> Tensor: return y.transpose(1, 2).flatten(2)          # (B,H,T,n) -> (B,T,H*n)
def split_heads(cfg:Config, z:Tensor, keys:int=2) -> list[Tensor]:
  """(B,T,H*(keys*key_dim+value_dim)) -> `keys` times (B,H,T,key_dim), such as q and k, and v (B,H,T,value_dim)."""
  return [heads_of(cfg, x) for x in z.split([cfg.heads * cfg.key_dim] * keys + [cfg.heads * cfg.value_dim], dim=-1)]

# A state is None before the first token.  Its parts (a block, a memory) have prefixes; the position is common to them.
def position_of(state:State|None) -> Tensor: return state["position"] if state else Tensor(0, dtype=dtypes.int32)
def part(state:State|None, name:str) -> State|None:
  return state and {"position": state["position"]} | part_of(state, name)

# *** the memory behind its projections ***
def causal_conv(x:Tensor, w:Tensor, tail:Tensor|None) -> tuple[Tensor, Tensor]:
  """Depthwise: out_t = sum_j w[j] x_{t-j}; x (B,T,channels), w (length,channels).  tail: the length-1 inputs before x,
  None at the start of the stream, where they are zeros.  Returns the outputs, and the tail of the next call."""
  past, T = sizes(w)[0] - 1, sizes(x)[1]
  x = (x.pad((None, (past, 0), None)) if tail is None else tail.cat(x, dim=1)).contiguous()
  lags = [w[j] * x[:, past - j:past - j + T] for j in range(past + 1)]
  return functools.reduce(Tensor.add, lags), x[:, T:].contiguous()
def queries_keys_values(p:dict, cfg:Config, x:Tensor, state:State|None) -> tuple[list[Tensor], State]:
  """q, k and v (B,H,T,.) of x (B,T,dim), after the convolution where there is one; and its state."""
  z, after = linear(cfg, x, p["qkv"]), cast(State, {})
  if "conv" in p: z, after["conv"] = causal_conv(z, p["conv"], (state or {}).get("conv"))
  return split_heads(cfg, z.contiguous()), after
def memory_weights(p:dict, cfg:Config) -> dict[str, Tensor]:
  """M_0 and what belongs to it, as kernels.memory takes them."""
  weights: dict[str, Tensor] = {}
  for name, shape in memory_shapes(cfg).items():
    weights[name] = zeros(*shape, like=p["qkv"]) if 0 in shape else p["memory"][name]
    if name in ("W", "W2", "anchor_u"): weights[name] = weights[name] * INIT.first
  if rule.FEATURES[cfg.features].coefficients: weights["a"] = p["memory"]["a_root"].square()
  return weights
def squared_length(p:dict, cfg:Config) -> Tensor:
  """features=exp: the squared length of a head's keys and queries, (H,1,1)."""
  return (INIT.scale_bound * p["memory"]["scale"].sigmoid()).reshape(cfg.heads, 1, 1)

def memory_gates(p:dict, cfg:Config, x:Tensor, position:Tensor, fades:bool) -> State:
  """alpha, theta, eta (B,H,T), gamma (B,H,T,window) of x (B,T,dim).  fades: whether alpha may differ from 1."""
  (B, T, _), H, c, columns = sizes(x), cfg.heads, cfg.window, gate_sizes(cfg)
  z = (linear(cfg, x, p["gates"]) + p["gate_bias"]).sigmoid().transpose(1, 2).contiguous()     # (B,gates,T)
  gate = dict(zip(columns, z.split(list(columns.values()), dim=1)))
  one = Tensor.ones(B, H, T, dtype=dtypes.float32, device=x.device)
  alpha, theta = gate.get("alpha", one), gate.get("theta", one)
  if fades and not cfg.forget:
    alpha = (position + indices(T) < cfg.horizon).where(one, 1 - 1 / cfg.horizon).contiguous()
  eta = gate["eta"] * eta_bound(cfg, alpha, position)
  gamma = gate["gamma"].reshape(B, H, c, T).transpose(2, 3) / c                                # (B,H,T,c)
  # differs from the paper: S averages gradients, where it sums them: a theta near 1 would lift eta's bound without end
  if cfg.momentum: gamma = gamma * (1 - theta).unsqueeze(-1)
  if expands(cfg): eta = eta * (-squared_length(p, cfg).squeeze(-1)).exp()     # over exp(k.k), the largest exp(q.k)
  return {"alpha": alpha, "theta": theta, "eta": eta, "gamma": gamma}

def answer(cfg:Config, y:Tensor, q:Tensor, norm:Tensor, skip:Tensor|None) -> Tensor:
  """y = M(q) normalised, heads side by side: (B,H,T,value_dim) -> (B,T,H*value_dim).  differs from the paper: the two
  terms of a memory q + M'(q) are normalised apart, because q is about 100 times as long as one write."""
  return joined(rms_norm(y, norm) if skip is None else rms_norm(y - q, norm) + q * skip * cfg.key_dim ** 0.5)

def memory_inputs(p:dict, cfg:Config, x:Tensor, state:State|None, fades:bool) -> tuple[State, State]:
  """What kernels.memory takes for x (B,T,dim), normalised: q, k, v and gates, by name.  The convolution's state."""
  (q, k, v), after = queries_keys_values(p, cfg, x, state)
  q, k, v = unit(q), unit(k), v.silu()                   # choice: q, k without SiLU, which would make keys similar
  # differs from the paper: values stay inside the unit ball, because no bound of eta is safe for values of any length
  v = (v * (v.square().sum(-1, keepdim=True) + 1).rsqrt()).contiguous()
  if expands(cfg): q, k = [z * squared_length(p, cfg).sqrt() for z in (q, k)]
  if stores_key(cfg): v = v + k
  return {"q": q, "k": k, "v": v} | memory_gates(p, cfg, x, position_of(state), fades), after
def memory_heads(p:dict, cfg:Config, x:Tensor, state:State|None, phase:int|None=None) -> Mixed:
  """The memory behind its projections (method: Titans' block).  x (B,T,dim), normalised; y (B,T,H*value_dim).
  phase: tokens of the current chunk before x; None: read from the state."""
  # differs from the paper: without a forget gate, tokens beyond the horizon fade, or old tokens would drown new ones
  fades = cfg.forget or state is not None or sizes(x)[1] > cfg.horizon         # else no token is beyond it
  inputs, after = memory_inputs(p, cfg, x, state, fades)
  # differs from the paper: forgetting leads to M_0 and not to zero, where a deep memory has no gradient and would stay
  weights = memory_weights(p, cfg)
  y, memory = kernels.memory(cfg, weights, **inputs, state=state, phase=phase, toward=weights if fades else None)
  del memory["position"]
  y = answer(cfg, y, inputs["q"], p["out_norm"], p.get("out_skip"))
  return y * (linear(cfg, x, p["out_gate"]) + p["out_gate_bias"]).silu(), after | memory, inputs
# *** attention.  place: the index of the first query's own key; where it is a Tensor, the keys are a whole cache ***
@functools.cache
def _rope_table(length:int, d:int, device:str) -> Pair:
  """cos and sin (length, d/2) of the angles of rotary positions, computed in float64."""
  angles = np.outer(np.arange(length), 10_000.0 ** (-np.arange(0, d, 2) / d))
  return tuple(Tensor(f(angles).astype(np.float32), device=device).realize() for f in (np.cos, np.sin))
def rotate(x:Tensor, cos:Tensor, sin:Tensor) -> Tensor:
  """Rotary positions: pairs (x_i, x_{i+d/2}) turned by their angle; x (B,H,T,d), cos and sin (T,d/2)."""
  first, second = x.chunk(2, dim=-1)
  return (first * cos - second * sin).cat(first * sin + second * cos, dim=-1).contiguous()

def softmax_attention(q:Tensor, k:Tensor, v:Tensor, place:Place, persist:Pair|None, oldest:Place=0, runs=1) -> Tensor:
  """Causal, with rotary positions: q (...,T,d), k (...,L,d), v (...,L,value_dim) -> (...,T,value_dim).
  mac has two `runs` of keys, h and x, each at positions 0, 1, ...; a query sees the keys of every run from `oldest`
  (a number, or (...,T,1)) to its own position.  persist: keys and values (H,number,.) for all queries, no positions."""
  (T, d), length = sizes(q)[-2:], sizes(k)[-2] // runs
  row, column = place + indices(T).reshape(T, 1), indices(length * runs) % length
  table = _rope_table(length, d, cast(str, q.device))
  q_rope = [z[place:place + T] if isinstance(place, int) else z[place.reshape(1)] for z in table]
  q = q * d ** -0.5
  scores = kernels.matmul(rotate(q, *q_rope), rotate(k, *[z.repeat(runs, 1) for z in table]), yt=True)
  scores = ((column <= row) * (column >= oldest)).where(scores, -math.inf)                     # (...,T,L)
  if persist is not None:
    heads = [z.reshape(len(z), *[1] * (q.ndim - 4), *z.shape[1:]) for z in persist]
    persist_k, persist_v = [z.expand(*q.shape[:-2], *z.shape[-2:]).contiguous() for z in heads]
    scores = kernels.matmul(q.contiguous(), persist_k, yt=True).cat(scores, dim=-1)
    v = persist_v.cat(v, dim=-2)
  return kernels.matmul(scores.softmax(-1).contiguous(), v.contiguous()).contiguous_backward()
def persistent(p:dict, cfg:Config) -> Pair|None:
  """Keys and values (H,number,.) of the persistent tokens."""
  if not cfg.persist: return None
  _, k, v = split_heads(cfg, linear(cfg, p["persist"].unsqueeze(0), p["qkv"]))
  return k[0], v[0]
def attention_heads(p:dict, cfg:Config, x:Tensor, state:State|None) -> Mixed:
  """Attention over all tokens or the last attn_window.  x (B,T,dim), normalised; y (B,T,H*value_dim)."""
  qkv, tail = queries_keys_values(p, cfg, x, state)
  y, cache = (windowed if cfg.attn_window else full)(cfg, qkv, persistent(p, cfg), state)
  return y, tail | cache, dict(zip("qkv", qkv))

def windowed(cfg:Config, qkv:list[Tensor], persist:Pair|None, state:State|None) -> tuple[Tensor, State]:
  """Blocks of attn_window queries see their own block of keys and the one before, so that nothing is T by T.
  State: the last attn_window keys (not yet rotated) and values.  Positions count from the first key of each block."""
  (B, H, T, d), w = sizes(qkv[0]), cfg.attn_window
  s = min(w, T)                                          # queries of a block
  N = -(-T // s)                                         # blocks; s = w if there are several
  q, k, v = [lengthened(z, N * s) for z in qkv]
  if state is None: k, v = [z.pad((None, None, (w, 0), None)) for z in (k, v)]
  else: k, v = state["k"].cat(k, dim=2), state["v"].cat(v, dim=2)
  after = {name: z[:, :, T:T + w].contiguous() for name, z in (("k", k), ("v", v))}
  def blocks(z):                                         # (B,H,w+N*s,.) -> (B,H,N,w+s,.)
    return z[:, :, :N * w].reshape(B, H, N, w, -1).cat(z[:, :, w:].reshape(B, H, N, s, -1), dim=3).contiguous()
  stream_start = w - position_of(state) - s * indices(N).reshape(N, 1, 1)      # its place among the keys of each block
  oldest = (indices(s).reshape(s, 1) + 1).maximum(stream_start)
  y = softmax_attention(q.reshape(B, H, N, s, d).contiguous(), blocks(k), blocks(v), w, persist, oldest)
  return joined(y.flatten(2, 3)[:, :, :T]), after

def full(cfg:Config, qkv:list[Tensor], persist:Pair|None, state:State|None) -> tuple[Tensor, State]:
  """Every query sees all tokens before it.  State: all keys (not yet rotated) and values; full caches double.  Under
  TinyJit they cannot: a step past their end gives NaN, and several tokens with a state are a ValueError."""
  (q, k, v), cache = qkv, state or {}
  place: Place
  T, past = sizes(q)[2], kernels.read_position({"position": position_of(state)})         # None: a jit is being captured
  if past is None and T > 1:
    raise ValueError("full attention cannot jit a call of several tokens with a state: its shapes grow")
  place, length = past or 0, (past or 0) + T             # length: of the keys
  if state is not None and T == 1:
    place, length = state["position"], sizes(state["k"])[2]
    if past is not None and past >= length: length = kernels.capacity_for(past + 1)
  k, v = [written(cache.get(name), z, place, length) for name, z in (("k", k), ("v", v))]
  if isinstance(place, Tensor): k, v = [(place < length).where(z, math.nan) for z in (k, v)]      # and so is y
  k, v = k.contiguous(), v.contiguous()
  y = softmax_attention(q, k, v, place, persist)         # (B,H,T,value_dim)
  if isinstance(place, Tensor): return joined(y), {"k": k, "v": v}
  k, v = [lengthened(z, kernels.capacity_for(length)).contiguous() for z in (k, v)]      # room for as many again
  return joined(y), {"k": k, "v": v}
def lengthened(z:Tensor, length:int) -> Tensor: return z.pad((None, None, (0, length - sizes(z)[2]), None))
def written(cache:Tensor|None, new:Tensor, place:Place, length:int) -> Tensor:
  """A cache (B,H,length,.) of keys or values with the new ones (B,H,n,.) from `place` on."""
  if isinstance(place, Tensor):
    return (indices(length).reshape(-1, 1) == place).where(new, lengthened(cast(Tensor, cache), length))
  if cache is not None and place: new = cache[:, :, :place].cat(new, dim=2)
  return lengthened(new, length)
# *** the mixers: x (B,T,dim), normalised -> (B,T,dim), state, inputs of the heads ***
def single_mixer(p:dict, cfg:Config, x:Tensor, state:State|None) -> Mixed:       # a memory or attention alone
  y, after, inputs = (attention_heads if cfg.mixer == "attention" else memory_heads)(p, cfg, x, state)
  return linear(cfg, y, p["out"]), after, inputs

def mag_mixer(p:dict, cfg:Config, x:Tensor, state:State|None) -> Mixed:
  """Memory as gate: attention and memory read the same x.  Both are normalised, and the memory gates the attention."""
  m, memory, inputs = memory_heads(p, cfg, x, part(state, "memory"))
  y, cache, _ = attention_heads(p["attention"], cfg, x, part(state, "attention"))
  y = rms_norm(y, p["attention"]["norm"]) * rms_norm(m, p["attention"]["memory_norm"]).silu()
  return linear(cfg, y, p["out"]), named("memory", memory) | named("attention", cache), named("memory", inputs)
def mal_mixer(p:dict, cfg:Config, x:Tensor, state:State|None) -> Mixed:
  """Memory as layer: attention reads the memory's normalised output."""
  m, memory, inputs = memory_heads(p, cfg, x, part(state, "memory"))
  x = rms_norm(linear(cfg, m, p["out"]), p["attention"]["norm"])
  y, cache, _ = attention_heads(p["attention"], cfg, x, part(state, "attention"))
  y = linear(cfg, y, p["attention"]["out"])
  return y, named("memory", memory) | named("attention", cache), named("memory", inputs)

def first_context(p:dict, cfg:Config, x:Tensor) -> State:
  """The state of mac_mixer before the first token.  It is stored: the first segment needs no kernels of its own."""
  B = sizes(x)[0]
  memory = kernels.initial_state(cfg, memory_weights(p, cfg), B, cfg.key_dim, x)
  if cfg.conv: memory["conv"] = zeros(B, cfg.conv - 1, sizes(p["conv"])[1], like=x)
  return {f"memory.{name}": z.contiguous() for name, z in memory.items() if name != "position"}
def start_memory(memory:State, start:State, place:Place) -> State:
  """The memory that a segment's h are read from: at its start; now if place=0.  An expansion may have grown since."""
  now = {name: z for name, z in memory.items() if name.startswith("M.") or name == "keys"}
  if isinstance(place, int): return start if place else now
  return {name: (place == 0).where(now[name], lengthened(z, sizes(now[name])[2])) for name, z in start.items()}

def read_context(p:dict, cfg:Config, start:State, read:Tensor) -> list[Tensor]:
  """Keys and values (B,H,n,.) of h, which the queries `read` recall from the memory at the segment's start."""
  attention, h = p["attention"], kernels.recall(cfg, memory_weights(p, cfg), start, read)
  h = linear(cfg, answer(cfg, h, read, attention["read_norm"], attention.get("read_skip")), attention["read_out"])
  return split_heads(cfg, linear(cfg, h, attention["qkv"][cfg.heads * cfg.key_dim:].contiguous()), keys=1)   # no q

def segment(p:dict, cfg:Config, inputs:list[Tensor], place:Place, position:Tensor, phase:int, context:State) -> list:
  """n tokens of one segment.  inputs (B,H,n,.): queries to the memory; queries, keys and values of attention.
  place, position, phase: tokens before them in the segment, in the stream and in the memory's chunk.
  Returns y (B,n,dim), the attention's output; m (B,n,H*value_dim), the memory's for y; its inputs; next context."""
  (read, q, x_k, x_v), attention = inputs, p["attention"]
  memory, start, cache = [part_of(context, name) for name in ("memory", "start", "cache")]
  start = start_memory(memory, start, place)
  h_k, h_v = read_context(p, cfg, start, read)
  new = {"h_k": h_k, "h_v": h_v, "x_k": x_k, "x_v": x_v}
  cache = {name: written(cache.get(name), z, place, cfg.attn_window).contiguous() for name, z in new.items()}
  k, v = [cache[f"h_{name}"].cat(cache[f"x_{name}"], dim=2).contiguous() for name in ("k", "v")]
  y = softmax_attention(q, k, v, place, persistent(attention, cfg), runs=2)
  y = rms_norm(linear(cfg, joined(y), attention["out"]), attention["norm"])
  m, memory, stored = memory_heads(p, cfg, y, {"position": position} | memory, phase)
  return [y, m, stored, named("memory", memory) | named("start", start) | named("cache", cache)]

def mac_mixer(p:dict, cfg:Config, x:Tensor, state:State|None) -> Mixed:
  """Memory as context, segment by segment of attn_window tokens.  For token i, h_i is read from the memory at the
  segment's start.  Token i attends to the persistent tokens, h_1..h_i and x_1..x_i.  The memory then stores the
  attention's output y and is read again: o = y * M_t(y).  State: "memory.*", now; "start.*", at the segment's start;
  "cache.*": keys and values.  A jitted call of several tokens gives NaN unless a segment and a chunk start there."""
  T, w, position = sizes(x)[1], cfg.attn_window, position_of(state)
  past = kernels.read_position({"position": position})   # None: a jit is being captured
  context = first_context(p, cfg, x) if state is None else state
  read = unit(heads_of(cfg, linear(cfg, x, p["attention"]["read_q"])))
  if expands(cfg): read = read * squared_length(p, cfg).sqrt()
  inputs = [read, *split_heads(cfg, linear(cfg, x, p["attention"]["qkv"]).contiguous())]
  outputs, done = [], 0
  while done < T:
    before = (past or 0) + done
    n = min(w - before % w, T - done)
    place = position % w if T == 1 and state is not None else before % w
    tokens = [z[:, :, done:done + n].contiguous() for z in inputs]
    *output, context = segment(p, cfg, tokens, place, position + done, before % cfg.chunk, context)
    outputs.append(output)
    done += n
  ys, ms, stored = zip(*outputs)
  y = Tensor.cat(*ys, dim=1) * linear(cfg, Tensor.cat(*ms, dim=1), p["out"])
  if past is None and T > 1:
    aligned = position % w == 0                          # the captured call was cut for position 0
    y, context = aligned.where(y, math.nan), {n: aligned.where(z, math.nan) for n, z in context.items()}
  return y, context, {f"memory.{n}": Tensor.cat(*[z[n] for z in stored], dim=2) for n in stored[0]}
MIXERS = {"memory": single_mixer, "attention": single_mixer, "mag": mag_mixer, "mal": mal_mixer, "mac": mac_mixer}
# *** the model ***
def block(p:dict, cfg:Config, x:Tensor, state:State|None) -> Mixed:
  """Pre-norm residual block: token mixer, then SwiGLU MLP.  x (B,T,dim) -> (B,T,dim), state, inputs of the heads."""
  y, after, inputs = MIXERS[cfg.mixer](p, cfg, rms_norm(x, p["norm1"]), state)
  x = (x + y).contiguous()
  gate, value = linear(cfg, rms_norm(x, p["norm2"]), p["mlp_in"]).contiguous().chunk(2, dim=-1)
  return (x + linear(cfg, gate.silu() * value, p["mlp_out"])).contiguous(), after, inputs

def in_float32(tree:dict) -> dict:                       # parameters may have any precision, all else is float32
  return {name: in_float32(x) if isinstance(x, dict) else x.cast(dtypes.float32) for name, x in tree.items()}
def hidden(params:dict, cfg:Config, tokens:Tensor, state:State|None=None) -> Mixed:
  """tokens (B,T) -> the last block's output, normalised (B,T,dim); state; inputs of the heads, with the state's
  prefixes: "0.alpha" (B,H,T) is the forget gate of block 0 (in a hybrid "0.memory.alpha"), "0.k" are its keys."""
  params = in_float32(params)
  x = params["embed"][tokens].contiguous()               # (B,T,dim)
  after, inputs = {"position": (position_of(state) + sizes(tokens)[1]).clone(x.device)}, cast(State, {})
  for i in range(cfg.layers):
    x, block_state, block_inputs = block(params["layers"][str(i)], cfg, x, part(state, str(i)))
    after |= named(str(i), block_state)
    inputs |= named(str(i), block_inputs)
  return rms_norm(x, params["norm"]), after, inputs

def forward(params:dict, cfg:Config, tokens:Tensor, state:State|None=None) -> tuple[Tensor, State]:
  """tokens (B,T) of whole numbers, T >= 1 -> logits (B,T,vocab) float32, and the state after the last token.
  Nothing checks tokens: from vocab on they are embedded as zeros, and negative ones count from the end, as indices do.
  state: what an earlier call returned; forward(a), then forward(b, state) equals forward(a + b).  It is a flat dict of
  Tensors, as TinyJit takes it, never changed in place.  A step of one token may be jitted: see room(cfg, state)."""
  x, after, _ = hidden(params, cfg, tokens, state)
  return linear(cfg, x, params["embed"].cast(dtypes.float32)), after

def growing(cfg:Config) -> list[tuple[str, int]]:
  """The first block's caches that grow with the stream: name, number of entries that belong to no token (anchors)."""
  attention, memory = ("0.", "0.") if cfg.mixer in ("attention", "memory") else ("0.attention.", "0.memory.")
  caches = [(memory + "keys", cfg.anchors)] if cfg.mixer != "attention" and expands(cfg) else []
  if cfg.mixer in ("attention", "mag", "mal") and not cfg.attn_window: caches.insert(0, (attention + "k", 0))
  return caches
def room(cfg:Config, state:State) -> int|None:
  """Length of the stream at which the state's caches are full and a jitted step must be captured anew; None: never."""
  return min([sizes(state[name])[2] - no_token for name, no_token in growing(cfg)], default=None)

def token_losses(logits:Tensor, targets:Tensor) -> Tensor:
  """Cross-entropy in nats of every target (B,T); 0 where it is -100, or outside the vocabulary."""
  return logits.sparse_categorical_crossentropy(targets, ignore_index=-100, reduction="none")
def cross_entropy(logits:Tensor, targets:Tensor) -> Tensor:
  """Mean cross-entropy in nats over the targets (B,T) that are not -100; others outside the vocabulary count as 0."""
  return logits.sparse_categorical_crossentropy(targets, ignore_index=-100)
def loss(params:dict, cfg:Config, tokens:Tensor, targets:Tensor) -> Tensor:
  """The cross_entropy of targets (B,T) after tokens (B,T).  Nothing checks either of them."""
  return cross_entropy(forward(params, cfg, tokens)[0], targets)
# *** weights in files ***
save = data.save_file          # tensors and settings in a safetensors file, which `load` reads
def weights_of(saved:data.Saved, table:Layout) -> dict:
  """The slow weights of a checkpoint or an exported file, as `init` returns them.  ValueError if the table differs."""
  hint = "give the settings it was made with"
  tensors = {name.removeprefix("weights."): x for name, x in saved.tensors.items() if not name.startswith("adam.")}
  unknown = {name for name in tensors if not name.startswith("decoder.")} - table.keys()
  if unknown: raise ValueError(f"{saved.path} has a weight {min(unknown)} that the settings do not ask for: {hint}")
  for name, (shape, _) in table.items():
    if name not in tensors: raise ValueError(f"{saved.path} has no weight {name}: {hint}")
    if tensors[name].shape != shape:
      raise ValueError(f"{saved.path}: {name} has shape {tensors[name].shape}, the settings ask for {shape}: {hint}")
  return unflatten({name: Tensor(tensors[name].numpy()).realize() for name in table})

def config_of(saved:data.Saved) -> Config:
  """The settings in a file's metadata.  ValueError where this version does not know them."""
  try: return Config(**saved.meta["config"])
  except (TypeError, KeyError):
    raise ValueError(f"{saved.path} has settings that this version does not know: "
                     "use the version that made it") from None
def load(path:str|Path) -> tuple[Config, dict]:
  """The settings and weights of a checkpoint or of a file that `train.py mode=export` wrote.  ValueError for others."""
  saved = data.read_file(path)
  cfg = config_of(saved)
  return cfg, weights_of(saved, layout(cfg))
