"""Claims about runs that meet trouble: variables of tinygrad, caches, signals, terminals, files from elsewhere, scores."""
import contextlib, io, json, os, pickle, re, shutil, signal, subprocess, sys, threading, time
from pathlib import Path
import numpy as np
import pytest
import atlas, data, evaluate, train
from tinygrad import Tensor
from tinygrad.helpers import CACHELEVEL
from tinygrad.nn.state import get_state_dict, safe_save
from test_atlas import small
from test_train import TASKED, TINY, last_error, process, result, text, ten, mine, together, rows  # noqa: F401

RUNS = pytest.mark.runs
QUICK = ["preset=deltanet", "layers=1", "dim=16", "heads=1", "key_dim=4", "value_dim=4", "chunk=4", "length=16", "batch=1", "tokens=3",
         "eval_every=0", "save_every=0"]

def alone(words, folder, **env):
  """A command line in a process of its own, with a cache of its own; what it printed."""
  made = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **env}
  return subprocess.run([sys.executable, train.__file__, *words], cwd=folder, env=made, capture_output=True)

# *** tinygrad's variables ***

@pytest.mark.parametrize("name,word", {"DEFAULT_FLOAT": "HALF", "DEFAULT_INT": "INT64", "OPTIM_DTYPE": "bfloat16", "SUM_DTYPE": "half",
                                       "CONST_LR": "1"}.items())
def test_a_variable_that_changes_types_is_refused_before_anything_is_written(name, word, text, tmp_path, monkeypatch, capsys):
  monkeypatch.setenv(name, word)
  assert train.main([*QUICK, text, f"out={tmp_path / 'o'}"]) == 2
  assert last_error(capsys).startswith(f"error: {name}={word} changes the types") and not (tmp_path / "o").exists()
  monkeypatch.setenv(name, "float32")
  assert train.main([*QUICK, text, f"out={tmp_path / 'o'}", "steps=0"]) == 0

@RUNS
def test_a_run_without_the_jit_ends_as_one_with_it(text, tmp_path):
  for name, env in (("with", {}), ("without", {"JIT": "0"})):
    assert alone([*QUICK, text, "steps=3", f"out={tmp_path / name}"], tmp_path, **env).returncode == 0
  first, second = (data.read_file(train.checkpoints(tmp_path / name)[-1]).tensors for name in ("with", "without"))
  assert all(np.allclose(first[n].numpy(), second[n].numpy(), atol=1e-6) for n in first)

# *** the step cache ***

def test_the_key_of_a_step_knows_tinygrads_files_its_variables_and_the_compiler(tmp_path, monkeypatch):
  run, cfg = train.Run(), small("deltanet")
  key, package = train.cache_key(run, cfg), tmp_path / "tinygrad"
  (package / "nn").mkdir(parents=True)
  (package / "nn" / "optim.py").write_text("rate = getenv('SECRET_RATE')")
  with monkeypatch.context() as patch:
    patch.setattr(train.tinygrad, "__path__", [str(package)])
    keys = [key, train.cache_key(run, cfg)]
    patch.setenv("SECRET_RATE", "1")
    keys.append(train.cache_key(run, cfg))
    (package / "nn" / "optim.py").write_text("rate = getenv('SECRET_RATE') ")
    keys.append(train.cache_key(run, cfg))
  for name in ("JITBEAM", "BEAM_UPCAST_MAX", "CC"):
    with monkeypatch.context() as patch:
      patch.setenv(name, "/bin/sh" if name == "CC" else "7")
      keys.append(train.cache_key(run, cfg))
  assert len(set(keys)) == len(keys) and train.cache_key(run, cfg) == key

def test_a_cache_that_cannot_be_used_is_no_error(tmp_path, monkeypatch):
  cfg = small("deltanet")
  params = atlas.init(cfg)
  optimizer = train.optimizer_for(get_state_dict(params), 0.1)
  step = train.Step(lambda: None, params, optimizer)     # which cannot be pickled
  (tmp_path / "file").write_text("no folder")
  for folder in (tmp_path, tmp_path / "file"):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    train.cache_step("key", step)
    assert train.cached_step("key", {}, optimizer) is None
  monkeypatch.delenv("XDG_CACHE_HOME")
  def no_home(): raise RuntimeError("Could not determine home directory.")
  monkeypatch.setattr(Path, "home", no_home)
  train.cache_step("key", step)
  assert train.cached_step("key", {}, optimizer) is None

# *** tinygrad's database ***

@RUNS
@pytest.mark.parametrize("how", ["damaged", "a folder", "no home", "read-only"])
def test_a_database_that_cannot_be_used_is_named_in_one_line_and_the_run_goes_on(how, text, tmp_path):
  (folder := tmp_path / "cache" / "tinygrad").mkdir(parents=True)
  env = {}
  if how == "damaged": (folder / "cache.db").write_bytes(os.urandom(5000))
  if how == "a folder": (folder / "cache.db").mkdir()
  if how == "read-only": env = {"CACHEDB": "/proc/cache.db"}
  if how == "no home":
    env = {"CACHEDB": "/nowhere/at/all/cache.db"} if os.getuid() else {"CACHEDB": "/dev/null/cache.db"}
  done = alone([*QUICK, text, "steps=2", f"out={tmp_path / 'o'}"], tmp_path, **env)
  warnings = [line for line in done.stderr.decode().replace("\r", "\n").splitlines() if "cache" in line]
  assert done.returncode == 0 and len(warnings) == 1 and "cannot be used" in warnings[0] and b"Traceback" not in done.stderr

def test_a_run_in_another_thread_than_the_first_one_ends_well(text, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(CACHELEVEL, "value", CACHELEVEL.value)
  codes = []
  for i in range(2):
    thread = threading.Thread(target=lambda: codes.append(train.main([*QUICK, text, "steps=0", f"out={tmp_path / 'o'}"])))
    thread.start()
    thread.join()
  assert codes == [0, 0]

# *** stopping ***

def test_a_stop_while_compiling_takes_effect_at_once_and_loses_nothing(text, tmp_path, monkeypatch, capfd):
  def compiling(*_): signal.raise_signal(signal.SIGTERM)
  monkeypatch.setattr(evaluate, "predictions", compiling)
  assert train.main([*QUICK, text, "cache=0", f"out={tmp_path / 'o'}"]) == 0
  shown = capfd.readouterr()
  assert "stopping" in shown.err and "stopped while compiling" in shown.out and not train.checkpoints(tmp_path / "o")
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

@together
@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_a_stop_is_acknowledged_at_once_and_saves_after_the_step(mine, name, monkeypatch, capfd):
  command, out = mine
  original = data.batch
  def interrupted(*args):
    if args[-1] == 11: signal.raise_signal(getattr(signal, name))
    return original(*args)
  monkeypatch.setattr(data, "batch", interrupted)
  assert train.main([*command, "resume=1", "steps=20"]) == 0
  shown = capfd.readouterr()
  assert "stopping after this step" in shown.err and "stopped at step 12, saved" in shown.out
  assert train.checkpoints(out)[-1].name == "step_00000012.safetensors"

@together
def test_what_was_trained_is_saved_before_it_is_validated_and_the_log_ends_the_same(mine, ten, monkeypatch, capsys):
  command, out = mine
  shutil.rmtree(out)
  original = evaluate.HeldOut.validate
  def killed(self, step):
    if step == 5: raise KeyboardInterrupt                # a second Ctrl-C, in the validation
    original(self, step)
  monkeypatch.setattr(evaluate.HeldOut, "validate", killed)
  assert train.main([*command, "save_every=5"]) == 1
  assert f"resume=1 continues from {out / 'step_00000005.safetensors'}" in capsys.readouterr().err
  monkeypatch.setattr(evaluate.HeldOut, "validate", original)
  assert train.main([*command, "resume=1", "save_every=5"]) == 0
  assert result(out)[1] == result(ten[0] / "out")[1]     # the row that was not validated is, after all

def test_a_second_interrupt_names_no_checkpoint_that_is_not_there(text, tmp_path, monkeypatch, capsys):
  def stopped(*_): raise KeyboardInterrupt
  monkeypatch.setattr(train, "train", stopped)
  assert train.main([*QUICK, text, f"out={tmp_path / 'o'}"]) == 1 and last_error(capsys) == "stopped at once"

# *** terminals ***

@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_any_terminal_shows_any_character(encoding, monkeypatch):
  stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
  monkeypatch.setattr(sys, "stdout", stream)
  with evaluate.shown(): print("a\u0416\ud800\U0001f600")
  assert stream.buffer.getvalue().startswith(b"a\\u0416")

def test_a_closed_pipe_ends_a_sample_and_no_run(monkeypatch):
  class Closed(io.StringIO):
    def write(self, _): raise BrokenPipeError
  monkeypatch.setattr(sys, "stdout", Closed())
  cfg, calls = small("deltanet", vocab=256), []
  monkeypatch.setattr(evaluate, "drawn", lambda *_: calls.append(1) or 0)
  assert train.main(["--help"]) == 0
  with evaluate.shown(): evaluate.sample(atlas.init(cfg), cfg, [1, 2, 3], True, tokens=50)
  assert not calls

@RUNS
def test_pipes_that_close_and_names_that_are_not_ascii_end_in_no_traceback(text, tmp_path):
  shutil.copy(text[5:], tmp_path / "t\u00e9xt \u0416.txt")
  words = [*QUICK, f"data={tmp_path}/t\u00e9xt \u0416.txt", "steps=2", f"out={tmp_path / 'o'}"]
  done = alone(words, tmp_path, PYTHONIOENCODING="ascii")
  assert done.returncode == 0 and b"t\\xe9xt \\u0416.txt" in done.stdout and b"Traceback" not in done.stderr
  line = f"{sys.executable} -u {train.__file__} mode=sample tokens=200 temperature=5 top_k=0 out={tmp_path / 'o'} | head -c 40 >/dev/null"
  done = subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], cwd=tmp_path, capture_output=True)
  assert done.returncode == 0 and not re.search(b"Traceback|Broken|Exception", done.stderr)

# *** weights from elsewhere ***

def test_init_from_brings_its_settings_and_names_those_that_contradict(text, tmp_path, capsys):
  cfg, path = small("titans", vocab=256, chunk=8, horizon=300), tmp_path / "w.safetensors"
  atlas.save(path, get_state_dict(atlas.init(cfg)), {"config": train.asdict(cfg)})
  words = [text, "length=16", "steps=0", f"out={tmp_path / 'o'}", f"init_from={path}"]
  job = train.resolve(*train.parse(words))
  assert job.cfg == cfg and "warning" not in capsys.readouterr().out
  job = train.resolve(*train.parse([*words, "chunk=4", "preset=gated_deltanet", "memory=mlp", "momentum=1"]))
  shown = capsys.readouterr().out
  assert job.cfg.chunk == 4 and job.cfg.momentum and f"chunk=4 here, and {path} was made with chunk=8" in shown
  assert shown.count("warning") == 1
  assert train.main([*words, "preset=linear_attention"]) == 2

# *** scores ***

def test_text_named_for_evaluation_is_evaluated_whole_and_a_short_one_in_a_shorter_window(tmp_path, monkeypatch, capsys):
  cfg, path = small("deltanet", vocab=256), tmp_path / "t.txt"
  params, start = atlas.init(cfg), tmp_path / "step"
  path.write_bytes(b"abcdefgh" * 5 + b"!")
  def whole(vocab): return train.opened(train.Run(mode="eval", data=str(path)), small("deltanet", vocab=vocab), None, True)
  source = whole(256)
  assert len(source.val) == 41
  evaluate.positions(params, cfg, source, start, 2, 10)
  shown = capsys.readouterr().out
  assert "40 of 41 bytes read, in windows of 20" in shown
  path.write_bytes(b"abc")
  evaluate.positions(params, cfg, whole(256), start, 2, 10)
  assert "2 of 3 bytes read, in windows of 2" in capsys.readouterr().out
  with pytest.raises(ValueError, match="token 99, outside vocab=99"): whole(99)

def test_a_prompt_comes_from_a_file(tmp_path):
  cfg, path = small("deltanet", vocab=256), tmp_path / "p"
  path.write_bytes(b"\xff" * 200_000)
  assert evaluate.prompt_ids(f"@{path}", cfg, True) == [255] * 200_000
  assert evaluate.prompt_ids("@@a", cfg, True) == [64, 97]
  path.write_text("3,4\n")
  assert evaluate.prompt_ids(f"@{path}", cfg, False) == [3, 4]
  for word, message in ((f"@{path}.no", "cannot be read"), ("@", "cannot be read")):
    with pytest.raises(ValueError, match=message): evaluate.prompt_ids(word, cfg, True)
  path.write_bytes(b"")
  with pytest.raises(ValueError, match="is empty"): evaluate.prompt_ids(f"@{path}", cfg, True)

@pytest.mark.parametrize("name", ["titans", pytest.param("titans_mac", marks=RUNS), pytest.param("transformer++", marks=RUNS)])
def test_long_rows_are_read_in_pieces_with_the_same_values(name, monkeypatch):
  cfg = small(name, vocab=256)
  params, pairs = atlas.init(cfg, 1), [(b"ab" * 40, b"c" * 50), (b"x", b"yz"), (b"", b"q" * 90)]
  whole = evaluate.likelihoods(params, cfg, pairs, 2)
  monkeypatch.setattr(evaluate, "PIECE", 30)
  for (a, b), (c, d) in zip(evaluate.likelihoods(params, cfg, pairs, 2), whole): assert a == pytest.approx(c, rel=1e-4) and b == d

def test_a_task_without_validation_is_never_scored(tmp_path, capsys):
  words = [*TASKED, "preset=deltanet", "task=mqar:pairs=2", "vocab=40", "length=12", "batch=2", "steps=1", "eval_every=0", f"out={tmp_path}"]
  assert train.main(words) == 0 and "as given" not in capsys.readouterr().out and not (tmp_path / "accuracy.csv").exists()

def test_task_tokens_outside_the_vocabulary_are_refused(tmp_path, monkeypatch, capsys):
  original = data.copy
  def outside(*args, **settings):
    x, y = original(*args, **settings)
    return x + 300, y
  monkeypatch.setitem(data.TASKS, "copy", outside)
  monkeypatch.setattr(data, "task", lambda *_: data.Task("copy", {"vocab": 32, "length": 8}, 32, False))
  assert train.main(["task=copy", f"out={tmp_path / 'o'}"]) == 2
  assert re.search("token 3[0-9][0-9], outside vocab=32", last_error(capsys)) and not (tmp_path / "o").exists()

@together
def test_a_file_that_is_not_signed_is_loaded_with_a_line_that_says_so(mine, ten, capsys):
  command, out = mine
  path = train.checkpoints(out)[-1]
  saved = data.read_file(path)
  meta = {"format": data.FORMAT} | {name: json.dumps(x) for name, x in saved.meta.items()}
  tensors = {name: Tensor(t.numpy()) for name, t in saved.tensors.items()}
  safe_save(tensors, str(path), meta)                    # as another tool writes it
  assert train.main([*command, "resume=1", "steps=0"]) == 0
  assert f"{path} is unsigned" in last_error(capsys)

@together
def test_a_data_file_that_changes_ends_a_run_in_one_line_with_its_steps_saved(mine, monkeypatch, capsys):
  command, out = mine
  def changed(text): raise ValueError("data=x was changed while it is read: copy it, and train on the copy")
  original = data.batch
  def batch(*args):
    if args[-1] == 12: monkeypatch.setattr(data, "unchanged", changed)
    return original(*args)
  monkeypatch.setattr(data, "batch", batch)
  assert train.main([*command, "resume=1", "steps=20", "save_every=0"]) == 1
  error = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if line.startswith("error")]
  path = train.checkpoints(out)[-1]
  assert len(error) == 1 and "was changed" in error[0] and str(path) in error[0] and path.name == "step_00000013.safetensors"

@together
def test_a_resumed_run_notices_another_text_of_the_same_length(mine, ten, tmp_path, capsys):
  command, out = mine
  path = ten[0] / "text.txt"
  good = path.read_bytes()
  path.write_bytes(b"z" + good[1:])
  try: assert train.main([*command, "resume=1", "steps=12"]) == 2 and "has changed since" in last_error(capsys)
  finally: path.write_bytes(good)
