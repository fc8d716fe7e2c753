"""Tests of the model's devices, dtypes and tables, to be merged into test_atlas.py."""
import os, subprocess, sys
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import atlas, rule
from tinygrad import Device, Tensor, TinyJit, dtypes
from tinygrad.nn.state import get_state_dict
from test_atlas import FEWER, T, model, relative, small

def moved(params:dict, device:str) -> dict:
  return {name: moved(x, device) if isinstance(x, dict) else x.to(device).realize() for name, x in params.items()}

@pytest.mark.skipif(Device.DEFAULT != "CPU", reason="CPU:1 needs the CPU device")
@pytest.mark.parametrize("name", FEWER)
def test_a_model_on_a_second_device_streams_as_on_the_first(name):
  """One call; several tokens and single ones, eager and jitted, that resume it; every state stays on the device."""
  cfg, params, _, tokens, (whole, _, _) = model(name)
  params = moved(params, "CPU:1")
  def on_device(start, end): return Tensor(tokens[:, start:end].copy(), device="CPU:1")
  state: Any = None
  logits = []
  for start, end in ((0, 5), (5, 8), (8, 9)):
    y, state = atlas.forward(params, cfg, on_device(start, end), state)
    assert {z.device for z in (y, *state.values())} == {"CPU:1"}
    logits.append(y.numpy())
  step = TinyJit(lambda token, state: atlas.forward(params, cfg, token, state))
  for t in range(9, 13):
    y, state = step(on_device(t, t + 1), state)
    assert {z.device for z in (y, *state.values())} == {"CPU:1"}
    logits.append(y.numpy())
  assert relative(np.concatenate(logits, 1), whole[:, :13]) < 2e-4

PRINTS_LOGITS = """
import numpy as np, atlas
from tinygrad import Tensor, dtypes
tokens = (np.arange(15, dtype=np.int32) * 7 % 16).reshape(1, 15)
for name in ("linear_attention", "titans_mac", "transformer++"):
  fields = {"attn_window": 6} if name == "titans_mac" else {}
  cfg = atlas.preset(name, vocab=16, dim=16, layers=1, heads=2, key_dim=4, value_dim=4, chunk=8, horizon=11, **fields)
  params = atlas.init(cfg, seed=1)
  first, state = atlas.forward(params, cfg, Tensor(tokens[:, :13].copy()))
  second, state = atlas.forward(params, cfg, Tensor(tokens[:, 13:14].copy()), state)
  loss = atlas.loss(params, cfg, Tensor(tokens[:, :13].copy()), Tensor(tokens[:, 1:14].copy()))
  assert {z.dtype for z in (first, second, loss, *state.values())} == {dtypes.float32, dtypes.int32}
  print(name, *[z.numpy().tobytes().hex() for z in (first, second, loss)])
"""

def printed(**environment) -> str:
  folder = Path(atlas.__file__).parent
  result = subprocess.run([sys.executable, "-c", PRINTS_LOGITS], capture_output=True, text=True, cwd=folder,
                          env=os.environ | environment)
  assert result.returncode == 0, result.stderr[-2000:]
  return result.stdout

@pytest.mark.parametrize("variable,dtype", [("DEFAULT_FLOAT", "HALF"), ("DEFAULT_FLOAT", "DOUBLE"), ("DEFAULT_INT", "INT64")])
def test_default_types_of_tinygrad_change_no_bit(variable, dtype): assert printed(**{variable: dtype}) == printed()

@pytest.mark.parametrize("name", ["titans_mac", "transformer++"])
@pytest.mark.parametrize("dtype", [dtypes.half, dtypes.double, dtypes.bfloat16], ids=str)
def test_parameters_of_another_precision_are_used_as_float32(name, dtype):
  cfg, tokens = small(name), Tensor(np.arange(7, dtype=np.int32).reshape(1, 7))
  params = atlas.init(cfg)
  for p in get_state_dict(params).values(): p.replace(p.cast(dtype).realize())
  rounded = atlas.unflatten({name: p.cast(dtypes.float32).realize() for name, p in get_state_dict(params).items()})
  logits, state = atlas.forward(params, cfg, tokens)
  expected, _ = atlas.forward(rounded, cfg, tokens)
  assert logits.dtype == dtypes.float32 and {z.dtype for z in state.values()} == {dtypes.float32, dtypes.int32}
  assert relative(logits.numpy(), expected.numpy()) < 1e-6

def test_unknown_tokens_are_embedded_as_zeros_and_negative_ones_count_from_the_end():
  cfg = small("swa")
  params = atlas.init(cfg)
  table = params["embed"].numpy()
  longer = params | {"embed": Tensor(np.vstack([table, np.zeros((1, cfg.dim), np.float32)]))}          # a last row of zeros
  def hidden(params, token): return atlas.hidden(params, cfg, Tensor(np.array([[1, 2, token, 4]], np.int32)))[0].numpy()
  zeros = hidden(longer, cfg.vocab)
  for token in (cfg.vocab, 10 ** 6, -cfg.vocab - 1): assert relative(hidden(params, token), zeros) < 1e-6
  assert relative(hidden(params, -1), hidden(params, cfg.vocab - 1)) < 1e-6 < relative(hidden(params, -1), zeros)

def test_targets_outside_the_vocabulary_count_as_loss_0():
  logits = Tensor(np.random.default_rng(0).normal(size=(1, 4, 16)).astype(np.float32))
  targets = Tensor(np.array([[3, -100, 16, -1]], np.int32))
  losses = atlas.token_losses(logits, targets).numpy()
  assert losses[0, 0] > 0 and not losses[0, 1:].any()
  mean = atlas.cross_entropy(logits, targets).item()     # -100 is left out of the mean, the others count
  assert mean == pytest.approx(losses[0, 0] / 3)

def test_a_new_row_of_a_table_is_a_choice_of_the_model_and_sets_the_bound_of_eta(monkeypatch):
  monkeypatch.setitem(rule.LOSSES, "sharp", rule.LOSSES["l2"]._replace(bound=0.3))
  monkeypatch.setitem(rule.LOSSES, "hebb", rule.LOSSES["dot"]._replace(bound=0.7))
  monkeypatch.setitem(rule.STEPS, "sign", rule.STEPS["muon"]._replace(bound=0.05))
  monkeypatch.setitem(rule.FEATURES, "double", rule.FEATURES["poly"])
  for name, table in (("loss", rule.LOSSES), ("optimizer", rule.STEPS), ("features", rule.FEATURES)):
    monkeypatch.setitem(atlas.CHOICES, name, tuple(table))                     # an edited table is read when atlas is imported
  alpha = Tensor(np.full((1, 1, T), 0.9, np.float32))
  def bound(name, **fields):
    eta = atlas.eta_bound(small(name, **fields), alpha)
    return eta.numpy() if isinstance(eta, Tensor) else eta
  assert bound("titans", loss="sharp") == 0.3 / 8 and bound("titans", optimizer="sign") == 0.05
  assert bound("linear_attention", loss="hebb") == 0.7 / 8
  assert np.allclose(bound("dla", loss="hebb"), 0.07)
  assert np.allclose(bound("ttt", loss="hebb"), 0.7 / (8 + np.minimum(np.arange(T), 11)))
  with pytest.raises(ValueError, match="does not divide"): small("titans", optimizer="sign", muon_every=3)
  with pytest.raises(ValueError, match="no matrix to orthogonalise"): small("dot", optimizer="sign")
  assert "layers.0.memory.a_root" in atlas.layout(small("titans", features="double"))
