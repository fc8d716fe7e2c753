"""The memory rule in stock operations."""
from __future__ import annotations
import functools, itertools, math
from typing import cast
import numpy as np
from tinygrad import Tensor

MAX_FEATURES = 65_536

# *** features ***

def feature_size(d:int, features:str, degree:int) -> int:
  """D, the length of phi(x) for x of size d.  ValueError when it exceeds MAX_FEATURES."""
  if features != "poly": return d                        # exp lifts nothing: its first layer is kept as an expansion
  if (D := math.comb(d + degree, degree)) > MAX_FEATURES:
    raise ValueError(f"degree={degree} with key_dim={d} makes {D:,} features, more than {MAX_FEATURES:,}: lower degree or key_dim")
  return D

@functools.cache
def _monomials(d:int, degree:int, device:str) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
  """The monomials of degree <= p as products of `degree` elements of [x, 1]: their places (degree * D) and, the same as matrices, one-hot
  selectors (d+1,D); the square roots of their multinomial coefficients (D); their degrees, one-hot (degree+1,D)."""
  factors = [c + (d,) * (degree - p) for p in range(degree + 1) for c in itertools.combinations_with_replacement(range(d), p)]
  orders = [sum(i < d for i in f) for f in factors]
  multinomial = [math.factorial(o) / math.prod(math.factorial(f.count(i)) for i in set(f) - {d}) for f, o in zip(factors, orders)]
  places, eye = np.array(factors, np.int32).T, np.eye(max(d, degree) + 1, dtype=np.float32)
  def tensor(x) -> Tensor: return Tensor(np.ascontiguousarray(x), device=device).realize()
  return (tensor(places.reshape(-1)), [tensor(eye[:d + 1, row]) for row in places], tensor(np.sqrt(multinomial).astype(np.float32)),
          tensor(eye[:degree + 1, orders]))

def _scales(d:int, degree:int, a:Tensor) -> Tensor:
  """The factor of each monomial, (D).  The root of a has gradient 0 at a = 0, where its slope is infinite."""
  _, _, multinomial, order = _monomials(d, degree, cast(str, a.device))
  return multinomial * ((a > 0).where((a > 0).where(a, 1).sqrt(), 0) @ order)

def phi(cfg, x:Tensor, a:Tensor|None) -> Tensor:
  """The features of a key or query (Eq. 17-18): x (...,d) -> (...,D).

  `poly`: all monomials of degree <= cfg.degree, by degree, then combinations_with_replacement, scaled so that
  phi(x).phi(y) = sum_i a[i] (x.y)^i."""
  if cfg.features == "identity": return x
  assert a is not None
  d = cast(int, x.shape[-1])
  x1 = x.pad((*[None] * (x.ndim - 1), (0, 1)), value=1.0).contiguous()       # [x, 1]: lower degrees take the 1 for a factor
  selectors = _monomials(d, cfg.degree, cast(str, x.device))[1]
  return functools.reduce(Tensor.mul, [(x1 @ s).contiguous() for s in selectors]) * _scales(d, cfg.degree, a)
