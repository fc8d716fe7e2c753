
# *** nothing wrong in silence ***

def checked_problem():
  cfg = rule(memory="linear", chunk=4, window=2)
  W, x = problem(cfg, B=2, T=4)
  return cfg, tensors(W), tensors(x)

def test_arguments_of_other_dtypes_are_cast_and_their_gradients_come_back():
  cfg, W, x = checked_problem()
  expected = kernels.memory(cfg, W, **x)[0].numpy()
  for dtype, bound in ((dtypes.half, 1e-2), (dtypes.bfloat16, 5e-2), (dtypes.double, 1e-6)):
    cast = {n: z.cast(dtype).realize() for n, z in x.items()}
    weights = {n: z.cast(dtype).realize() for n, z in W.items()}
    y, state = kernels.memory(cfg, weights, **cast)
    gradient = y.square().sum().gradient(cast["k"])[0]
    assert y.dtype == dtypes.float and all(z.dtype == dtypes.float for n, z in state.items() if n != "position")
    assert relative(y.numpy(), expected) < bound and gradient.dtype == dtype and np.isfinite(gradient.float().numpy()).all()

@pytest.mark.parametrize("backend", ["ops", "fused"])
def test_arguments_of_other_shapes_are_named_with_the_right_shape(backend):
  cfg, W, x = checked_problem()
  cfg = rule(memory="linear", chunk=4, window=2, backend=backend)
  wrong = {"k": x["k"][:1], "q": x["q"][:, :1], "alpha": x["alpha"][:, :, :3], "gamma": x["gamma"][..., :1], "v": x["v"][:, :, :2],
           "eta": x["eta"].unsqueeze(-1), "theta": None}
  for name, z in wrong.items():
    with pytest.raises(ValueError, match=rf"^({name}|k) (has shape .* takes \(2, 2, 4|is a NoneType)"):
      kernels.memory(cfg, W, **x | {name: z})
  for name, weights in (("narrow", {"W": W["W"][:, :, :2]}), ("other heads", {"W": W["W"][:1]}), ("none", {})):
    with pytest.raises(ValueError, match="weights"): kernels.memory(cfg, weights, **x)
  with pytest.raises(ValueError, match=r"toward\['W'\] has shape"):
    kernels.memory(cfg, W, **x, toward={"W": W["W"][:, :, :2]})
  state = kernels.initial_state(cfg, W, 1, 3)
  with pytest.raises(ValueError, match=r"state\['base.W'\] has shape \(1,"): kernels.memory(cfg, W, **x, state=state)
  with pytest.raises(ValueError, match="state has no 'M.W'"):
    kernels.memory(cfg, W, **x, state={n: z for n, z in state.items() if "W" not in n} | {"base.W": W["W"]})

def test_recall_before_the_first_token_reads_the_initial_memory_of_every_row():
  cfg, W, x = checked_problem()
  y = kernels.recall(cfg, W, kernels.initial_state(cfg, W, 2, 3), x["q"]).numpy()
  assert relative(y, np.einsum("hoi,bhti->bhto", W["W"].numpy(), x["q"].numpy())) < 1e-6

def test_matmul_broadcasts_leading_axes_as_numpy_does_or_says_that_it_cannot():
  r = np.random.default_rng(0)
  for a, b in (((3, 4, 5), (1, 5, 8)), ((4, 5), (2, 5, 8)), ((2, 1, 4, 5), (3, 5, 8)), ((2, 4, 5), (5, 8))):
    x, y = r.normal(size=a), r.normal(size=b)
    assert relative(kernels.matmul(tensor(x), tensor(y)).numpy(), x @ y) < 1e-6
  z = kernels.matmul(tensor(r.normal(size=(4, 5))).half(), tensor(r.normal(size=(5, 8))))
  assert z.dtype == dtypes.float and np.isfinite(z.numpy()).all()
  for a, b, message in (((3, 4, 5), (2, 5, 8), "do not broadcast"), ((4, 5), (4, 8), "do not meet"), ((5,), (5, 8), "two axes")):
    with pytest.raises(ValueError, match=message): kernels.matmul(Tensor.zeros(*a), Tensor.zeros(*b))

def test_a_jitted_call_that_starts_elsewhere_gives_nan_in_its_state_too():
  cfg, W, x = checked_problem()
  step = TinyJit(lambda state, *z: kernels.memory(cfg, W, *z, state=state))
  _, state = kernels.memory(cfg, W, **x)
  for _ in range(3): y, later = step({n: z.clone().realize() for n, z in state.items()}, *x.values())
  assert np.isfinite(y.numpy()).all()
  moved = {n: z.clone().realize() for n, z in state.items()} | {"position": Tensor(6, dtype=dtypes.int).clone().realize()}
  y, later = step(moved, *x.values())
  assert np.isnan(y.numpy()).all() and all(np.isnan(z.numpy()).all() for n, z in later.items() if n != "position")

def test_slow_forgetting_is_not_rounded_away_token_by_token():
  """M = R + a small difference: 2,000 tokens of alpha = 1 - 2^-20 without a write."""
  cfg = rule(memory="linear", chunk=1, window=1, momentum=False, heads=1)
  R, W = {"W": tensor(np.ones((1, 3, 3)))}, {"W": tensor(np.full((1, 3, 3), 1.01))}
  one, zeros = tensor(np.ones((1, 1, 1))), tensor(np.zeros((1, 1, 1, 3)))
  alpha = tensor(np.full((1, 1, 1), 1 - 2.0 ** -20))
  step = TinyJit(lambda state: kernels.memory(cfg, W, zeros, zeros, zeros, alpha, one, one * 0, one.unsqueeze(-1), state,
                                              toward=R)[1])
  _, state = kernels.memory(cfg, W, zeros, zeros, zeros, alpha, one, one * 0, one.unsqueeze(-1), toward=R)
  for _ in range(1999): state = step({n: z.clone().realize() for n, z in state.items()})
  difference = (state["M.W"].numpy().astype(np.float64) - 1 + state["low.W"].numpy()).mean()
  assert difference == pytest.approx(float(np.float32(1.01) - 1) * (1 - 2.0 ** -20) ** 2000, rel=1e-6)

def test_an_operation_that_a_kernel_does_not_have_is_refused():
  m = kernels.Kernel(UOp.placeholder((64,), dtypes.float, 0), None, True).new((2, 3))
  for call in (lambda: m.sum(-1), lambda: m.transpose(0, 0), lambda: m ** 0.5, lambda: m.cat(m, dim=0), lambda: m @ m,
               lambda: m + m.transpose(), lambda: m.eye(2, dtype=dtypes.half)):
    with pytest.raises((NotImplementedError, ValueError)): call()
  with pytest.raises(AttributeError): m.flatten()
  assert m.sum(-1, keepdim=True).shape == (2, 1) and m.sum((-1, -2), keepdim=True).shape == (1, 1)

CHANGES = {"huber": "mlp-identity-huber-momentum-2-3", "rms": "mlp-identity-l2-rms-2-3",
           "squares": "mlp-squares-l2-momentum-2-3"}
ORACLE_OF_CHANGES = """
import numpy as np, test_atlas as t
error, direction, lift = t.error, t.direction, t.lift
def norm(e): return np.sqrt((e * e).sum())
def huber(e): return e if norm(e).real <= 1 else e / norm(e)
t.error = lambda cfg, y, v: huber(y - v) if cfg.loss == "huber" else error(cfg, y, v)
t.direction = lambda cfg, S: S / np.sqrt((S * S).mean() + 1e-6) if cfg.optimizer == "rms" else direction(cfg, S)
t.lift = lambda cfg, x, a: np.concatenate([x, x * x]) if cfg.features == "squares" else lift(cfg, x, a)
t.STEPS["rms"] = dict(optimizer="rms")
"""

@runs
@pytest.mark.parametrize("change,case", CHANGES.items())
def test_a_change_of_the_rule_as_the_readme_shows_it_equals_the_oracle_in_both_forms(change, case, tmp_path):
  """A copy of the project, with one diff applied: values and gradients, in stock operations and in one kernel."""
  home = Path(__file__).parent
  diffs = re.findall(r"```diff\n(.*?)```", (home / "README.md").read_text(), re.S)
  diff, = [d for d in diffs if f'"{change}"' in d]
  assert sum(line.startswith("+") for line in diff.splitlines()) - 1 <= 8
  for path in home.glob("*.py"): shutil.copy(path, tmp_path)
  done = subprocess.run(["git", "apply", "--unidiff-zero", "--recount"], input=diff, text=True, cwd=tmp_path, capture_output=True)
  assert done.returncode == 0, done.stderr
  script = f"{ORACLE_OF_CHANGES}\nt.check_gradients({case!r}, 'ops', 'fused')\nprint(t.worst)"
  done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr[-2000:]
  record(f"{change}, a changed rule", max(json.loads(done.stdout.replace("'", '"')).values()))
