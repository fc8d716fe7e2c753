"""ATLAS (arXiv 2505.23735) and its family: language models whose token mixer is a memory that learns while it reads.

Glossary                 shape                    paper    meaning
  B, T, V                                                  batch, tokens, vocabulary
  q, k                   (B,H,T,key_dim)          q, k     query and key, unit vectors, one per head and token
  v, y                   (B,H,T,value_dim)        v, y     value to be stored, output of the memory
  phi                    key_dim -> D             phi      features: identity, or all monomials up to `degree`
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
import numpy as np
from tinygrad import Tensor, dtypes
import kernels

# *** settings ***

CHOICES = {"mixer": ("memory", "attention"), "memory": ("linear", "mlp", "gated"), "features": ("identity", "poly"), "loss": ("l2", "dot"),
           "optimizer": ("gd", "muon"), "backend": ("auto", "ops")}
LEAST = {"window": 1, "conv": 0, "attn_window": 0, "ns_steps": 0, "degree": 0}        # every other whole number is at least 1

@dataclass(frozen=True)
class Config:
  """Every setting of a model.  ValueError, in one line, for a wrong type, an unknown choice or an impossible combination."""
  vocab: int = 256            # number of tokens; 256: bytes
  dim: int = 64               # width of the residual stream
  layers: int = 2             # blocks
  heads: int = 4              # memories (or attention heads) per block
  key_dim: int = 16           # size of a head's keys and queries
  value_dim: int = 16         # size of a head's values
  mixer: str = "memory"       # token mixer: memory | attention (softmax)
  memory: str = "mlp"         # architecture: linear | mlp (two layers, gelu) | gated (three matrices)
  expand: int = 4             # hidden size of the memory, in units of value_dim
  features: str = "identity"  # phi: identity | poly
  degree: int = 2             # highest degree of poly
  loss: str = "l2"            # attentional bias: l2 (delta rule) | dot (Hebbian)
  window: int = 1             # c: tokens in each step's loss
  forget: bool = False        # forget gate alpha (else 1)
  momentum: bool = False      # momentum theta
  optimizer: str = "gd"       # memory's step: gd | muon (Newton-Schulz of the momentum)
  ns_steps: int = 5           # Newton-Schulz iterations
  muon_every: int = 1         # Muon steps at every r-th token only; divides chunk
  chunk: int = 32             # b: tokens whose gradients share a memory
  conv: int = 4               # length of the causal convolution on q, k, v (0: none)
  attn_window: int = 0        # attention sees that many tokens (0: all)
  mlp_ratio: float = 2.0      # hidden size of the SwiGLU MLP, in units of dim
  backend: str = "auto"       # form of the recurrence: auto | ops

  def __post_init__(self):
    for f in dataclasses.fields(self):
      x, kind = getattr(self, f.name), type(f.default)
      if kind is float and type(x) is int: object.__setattr__(self, f.name, x := float(x))
      if type(x) is not kind: raise ValueError(f"{f.name}={x!r} is not {_KINDS[kind]}: its default is {f.default!r}")
      if f.name in CHOICES and x not in CHOICES[f.name]: raise ValueError(f"{f.name}={x!r} is unknown{_near(x, CHOICES[f.name])}")
      if kind is int and x < (least := LEAST.get(f.name, 1)): raise ValueError(f"{f.name}={x} is too small: take {least} or more")
    if not 0 < self.mlp_ratio < math.inf: raise ValueError(f"mlp_ratio={self.mlp_ratio} must be a positive number, 2 for example")
    if self.mixer == "attention":
      if self.key_dim % 2: raise ValueError(f"key_dim={self.key_dim} is odd, and rotary positions turn pairs: take {self.key_dim + 1}")
      return
    kernels.feature_size(self.key_dim, self.features, self.degree)
    if self.optimizer == "muon" and self.chunk % self.muon_every:
      divisors = ", ".join(str(n) for n in range(1, self.chunk + 1) if self.chunk % n == 0)
      raise ValueError(f"muon_every={self.muon_every} does not divide chunk={self.chunk}: take one of {divisors}")

_KINDS = {int: "a whole number", float: "a number", bool: "true or false (1 or 0)", str: "a word"}

def _near(name, known) -> str:
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
  "swla":             dict(memory="linear",                   loss="dot", **_OMEGA),
  "omeganet":         dict(                                               **_OMEGA),
  "atlas":            dict(                                               **_OMEGA, momentum=True, optimizer="muon"),
  "atlas++":          dict(memory="gated",                                **_OMEGA, momentum=True, optimizer="muon"),
  "transformer++":    dict(mixer="attention"),
  "swa":              dict(mixer="attention", attn_window=64),
}

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
  """The named model at a size: explicit fields > size > preset > Config's defaults.  ValueError names near presets, sizes or fields."""
  if name not in PRESETS: raise ValueError(f"preset={name!r} is unknown{_near(name, PRESETS)}")
  if size not in SIZES: raise ValueError(f"size={size!r} is unknown{_near(size, SIZES)}")
  known = [f.name for f in dataclasses.fields(Config)]
  for f in fields:
    if f not in known: raise ValueError(f"{f} is not a setting{_near(f, known)}")
  return Config(**{**PRESETS[name], **SIZES[size], **fields})

# *** initial values: one row each, with its reason ***

@dataclass(frozen=True)
class Init:
  weight: float = 0.02        # std of embedding and gates: small next to a normalised input, so that gates start at their biases
  alpha: float = 0.99         # forget gate: half of M_0 is left after 69 tokens; at 0.5 a chunk would erase it
  theta: float = 0.9          # momentum gate: the usual momentum
  gamma: float = 0.9          # window gates, before 1/c: a step weighs its window's tokens about alike
  eta: float = 0.5            # memory step: half of its bound, where the sigmoid is steepest
  # Bound of eta.  A chunk of b equal keys applies one stale gradient b times: gd stays stable while eta * b * lambda < 2, where lambda is
  # about |phi(k)|^2 <= 2.5, and momentum multiplies the sum by 1/(1-theta) = 10.  Muon's step has singular values near 1 whatever the
  # gradient's size, so its bound is a length in units of M_0's, whose singular values are near 1 as well.
  eta_gd: float = 0.5         # over b
  eta_momentum: float = 0.1   # over b
  eta_muon: float = 0.1       # times muon_every over b, so that a chunk moves M by at most about a tenth of its size per singular value
INIT = Init()

def eta_bound(cfg:Config) -> float:
  """The largest memory step a token may take."""
  if cfg.optimizer == "muon": return INIT.eta_muon
  return (INIT.eta_momentum if cfg.momentum else INIT.eta_gd) / cfg.chunk
