"""Claims about text, tasks, the command line and runs.

python -m pytest -q test_train.py            add -m runs for drawn bad input, kills, full disks, caches and experiments"""
import os
os.environ.setdefault("NOOPT", "1")                      # values matter here, not speed: kernels compile in half the time
import csv, dataclasses, functools, importlib.util, inspect, itertools, json, math, re, resource, shlex, shutil, signal, subprocess, sys, time
from pathlib import Path
import numpy as np
import hypothesis, pytest
from hypothesis import given, strategies as st
import atlas, data, evaluate, experiments, train
from tinygrad import Device, Tensor, TinyJit, dtypes
from tinygrad.nn.state import get_state_dict, safe_load, safe_save
from test_atlas import PRESETS, SMALL, relative, resident_mb, slow, small

# *** the text ***

def test_batches_are_a_function_of_seed_and_step_and_targets_are_the_next_tokens():
  tokens = np.arange(1000, dtype=np.uint16)
  x, y = data.batch(tokens, 4, 10, seed=3, step=7)
  assert x.shape == y.shape == (4, 10) and (y == x + 1).all()
  assert np.array_equal(x, data.batch(tokens, 4, 10, 3, 7)[0]) and not np.array_equal(x, data.batch(tokens, 4, 10, 3, 8)[0])

def test_validation_windows_are_fixed_and_each_counts_once():
  batches = list(data.windows(np.arange(103, dtype=np.uint8), 4, 10, 1000))
  targets = np.concatenate([y for _, y in batches])
  assert (targets >= 0).all(1).sum() == 10 and ((targets == -100).all(1) | (targets >= 0).all(1)).all() and targets.max() == 102

def test_the_default_text_is_the_standard_library():
  text = data.load("python", 256, 128)
  assert text.is_bytes and len(text.train) > 5e6 and 4 < data.entropy(text.val) < 5.2 and b"import" in text.train[:20_000].tobytes()

@pytest.mark.parametrize("magic,version,dtype", [(20240520, 1, "<u2"), (20240801, 7, "<u4"), (None, None, "<u2")])
def test_token_files_are_read_by_their_header(tmp_path, magic, version, dtype):
  tokens = np.arange(500) % 300
  header = np.zeros(256, "<i4")
  if magic: header[:3] = magic, version, len(tokens)
  (tmp_path / "t.bin").write_bytes((header.tobytes() if magic else b"") + tokens.astype(dtype).tobytes())
  text = data.load(str(tmp_path / "t.bin"), 300, 16)
  assert not text.is_bytes and np.array_equal(np.concatenate([text.train, text.val]), tokens)
  with pytest.raises(ValueError, match="token 299, outside vocab=299"): data.load(str(tmp_path / "t.bin"), 299, 16)

def test_a_folder_is_its_files_in_order(tmp_path, monkeypatch):
  for name, text in (("b.txt", b"2" * 300), ("a/c.txt", b"1" * 300)):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(text)
  assert data.load(str(tmp_path), 256, 16).train.tobytes().startswith(b"1" * 300 + b"2")
  for bounds in ((1, 1 << 32), (9, 599)):                # data=/ must not read the whole disk
    monkeypatch.setattr(data, "FOLDER", bounds)
    with pytest.raises(ValueError, match="give a smaller folder"): data.read(str(tmp_path))

# *** tasks ***

def latest_values(tokens, labels):
  """What every scored key was followed by last, before its place."""
  found, known = [], dict[int, int]()
  for t, (token, label) in enumerate(zip(tokens, labels)):
    if label >= 0: found.append(known[token])
    elif t % 2 == 0 and t + 1 < len(tokens): known[token] = tokens[t + 1]
  return found

@pytest.mark.parametrize("task", data.TASKS.values(), ids=data.TASKS)
def test_a_task_is_a_function_of_seed_and_index(task):
  (x, y), again, other, third = task(5, 1, 2), task(5, 1, 2), task(5, 1, 3), task(5, 2, 2)
  assert x.shape == y.shape and x.dtype == y.dtype == np.int32 and np.array_equal(x, again[0]) and np.array_equal(y, again[1])
  assert not np.array_equal(x, other[0]) and not np.array_equal(x, third[0]) and (y >= 0).any(1).all()

@pytest.mark.parametrize("settings", [{}, dict(again=3), dict(again=8, noise=True), dict(crowd=1.0)], ids=str)
def test_mqar_asks_for_every_key_once_and_the_latest_value_counts(settings):
  x, y = data.mqar(50, 0, 0, vocab=128, length=64, pairs=8, **settings)
  start = 2 * (8 + settings.get("again", 0))
  for tokens, labels in zip(x, y):
    keys, asked = set(tokens[:start:2]), tokens[labels >= 0]
    assert len(keys) == 8 and set(asked) == keys and len(asked) == 8 and not (set(tokens[start:][labels[start:] < 0]) & keys)
    assert latest_values(tokens[:start], labels[:start]) == [] and (labels[:start] < 0).all() and max(keys) < 64 <= min(tokens[1:start:2])
    assert latest_values(np.concatenate([tokens[:start], np.stack([asked, asked], 1).ravel()]),
                         np.concatenate([labels[:start], np.stack([asked, asked * 0 - 100], 1).ravel()])) == list(labels[labels >= 0])

def test_mqar_crowds_its_queries_to_the_front():
  def middle(crowd): return np.nonzero(data.mqar(200, 0, 0, 512, 256, 8, crowd=crowd)[1] >= 0)[1].mean()
  assert middle(0.01) < 80 < 120 < middle(1.0)

def test_recall_asks_for_what_was_seen_and_copies_keep_their_order():
  for task in (data.in_context_recall, data.noisy_recall):
    x, y = task(20, 0, 0)
    for tokens, labels in zip(x, y):
      at = np.nonzero(labels >= 0)[0]
      assert (at % 2 == 0).all() and (labels[at] == tokens[at + 1]).all() and all(tokens[t] in tokens[:t:2] for t in at)
  assert 0.15 < (data.noisy_recall(200, 0, 0)[0][:, ::2] >= 16).mean() < 0.25
  x, y = data.selective_copying(20, 0, 0)
  for tokens, labels in zip(x, y): assert list(tokens[:240][tokens[:240] < 14]) == list(labels[240:]) and (tokens[240:] == 15).all()
  x, y = data.copy(3, 0, 0, length=10)
  assert (x[:, 5] == 0).all() and np.array_equal(y[:, 5:], x[:, :5]) and np.array_equal(x[:, 6:], x[:, :4])

def test_memorized_values_are_the_same_in_every_example():
  def mapping(index):
    x, y = data.memorization(200, 7, index)
    return {key: set(y[:, 1::2][x[:, ::2] == key]) for key in range(127)}
  first, second = mapping(0), mapping(1)
  assert first == second and all(len(values) == 1 for values in first.values())

@pytest.mark.parametrize("words,message", {
  "": "name a task: mqar", "mqar length=7": "take 8", "mqar vocab=8 length=32": "take more than 32", "mqar pairs=40": "take 160 or more",
  "mqar again=9": "take 0 to 4", "mqar pears=3": "take one of seed, vocab", "mqar pairs=many": "not a number", "copy length=3": "even",
  "noisy_recall noise=0": "leaves no noise", "selective_copying copies=200": "take 128 or fewer", "mqra": "mqra is none: name a task: mqar",
  "fuzzy_recall shortest=4": "take 1 to 3", "fuzzy_recall vocab=15": "an even number", "fuzzy_recall length=11": "take 12 or more",
  "compression length=1": "nothing to compress", "niah kind=x": "take pk, n or w", "niah length=74": "take 75 or more",
  "niah kind=w length=128": "take 129 or more", "niah kind=n text=/no/such": "text=/no/such does not exist", "babi question=6": "take 1 to 5",
  "babi length=323": "take 324 or more", "babi facts=-1": "takes 0 to 65536", "babi question=3 facts=2": "take 3 or more",
  "babi question=4 facts=3": "question=4: take 2", "babi question=one": "not a number"}.items())
def test_a_task_says_what_is_wrong_in_one_line(words, message, capsys):
  assert data.shown(words.split()) == 2 and message in last_error(capsys)

def test_two_examples_of_a_task_are_shown(capsys):
  assert data.shown("mqar pairs=2 length=16 vocab=32 seed=3".split()) == 0
  assert capsys.readouterr().out.count("(2 of 16 places scored)") == 2
  assert data.shown(["niah", "kind=w"]) == 0 and re.search(r"\nThe code of \w+-\w+ is >[0-9a-f-]{36}\n<\n\(37 of 512", capsys.readouterr().out)

@pytest.mark.parametrize("settings", [{}, dict(shortest=3), dict(vocab=64, length=401), dict(vocab=4, length=12)], ids=str)
def test_fuzzy_recall_asks_for_the_values_of_keys_seen_before(settings):
  half, lengths = settings.get("vocab", 16) // 2, set()
  x, y = data.fuzzy_recall(50, 3, 0, **settings)
  assert x.shape == y.shape == (50, settings.get("length", 128)) and x.min() == 0 and x.max() == 2 * half - 1
  for tokens, labels in zip(x.tolist(), y.tolist()):
    runs = [tuple(run) for _, run in itertools.groupby(tokens, key=lambda token: token >= half)]
    known, told = dict[tuple, tuple](), list[int]()
    for key, value in list(zip(runs[::2], runs[1::2]))[:-1]:                             # the last one may be cut
      told += [-100] * (len(key) - 1) + (list(known[key]) if key in known else [-100] * len(value)) + [-100]
      assert known.setdefault(key, value) == value and len(value) <= 3
      lengths.add(len(key))
    assert labels[:len(told)] == told and all(label in (-100, token) for label, token in zip(labels, tokens[1:]))
  assert lengths == set(range(settings.get("shortest", 1), 4))

def test_compression_asks_for_every_token_but_the_summary():
  x, y = data.compression(100, 0, 0)
  assert (x[:, -1] == 15).all() and (y[:, -1] == -100).all() and np.array_equal(x[:, :-1], y[:, :-1]) and set(x[:, :-1].flat) == set(range(15))

def spoken(length, x, y):
  """Prompts and answers of a task in bytes: every prompt has the same length, x goes on with the answer, and its newline is a label too."""
  n = data.prompt_length(y)
  prompts, answers = ([bytes(row[row >= 0].tolist()).decode(errors="replace") for row in rows] for rows in (x[:, :n], y))
  for tokens, labels, answer in zip(x, y, answers):
    assert len(tokens) == len(labels) == length and bytes(tokens[n:].tolist()).decode() == answer.ljust(length - n + 1, "\n")[:-1]
    assert answer.endswith("\n") and (np.nonzero(labels >= 0)[0] == np.arange(n - 1, n - 1 + len(answer))).all()
  return prompts, [answer[:-1] for answer in answers]

@pytest.mark.parametrize("kind,value", {"pk": "[0-9]{7}", "n": "[0-9]{7}", "w": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"}.items())
@pytest.mark.parametrize("length", [133, 512, 2048])
def test_niah_hides_the_value_once_beside_its_key(kind, value, length):
  prompts, answers = spoken(length, *data.niah(200, 1, 0, kind, length))
  depths = []
  for prompt, answer in zip(prompts, answers):
    asked = prompt.splitlines()[-1]
    assert re.fullmatch(value, answer) and prompt.count(answer) == 1 and re.fullmatch(r"The \w+ of \w{5}-\w{5} is ", asked)
    assert f"\n{asked}{answer}.\n" in "\n" + prompt and prompt.count(asked) == 2 and prompt.endswith(f"\n{asked}")
    depths.append(prompt.index(answer) / (length - 2 * len(asked) - 2 * len(answer)))
  if length == 2048: assert (np.histogram(depths, 4, (0, 1.1))[0] > 25).all()

def test_niah_takes_any_text_of_bytes(tmp_path):
  (tmp_path / "page.txt").write_text("It was late. Nobody came! " * 400)                        # one line: needles stand between sentences
  prompts, _ = spoken(400, *data.niah(20, 0, 0, "n", 400, str(tmp_path / "page.txt")))
  assert all(re.search(r"(^|[.!] |\n)The number", prompt) for prompt in prompts) and len({prompt.index("The number") for prompt in prompts}) > 5
  (tmp_path / "digits.txt").write_bytes(np.random.default_rng(0).integers(48, 58, 200_000, dtype=np.uint8).tobytes())
  for prompt, answer in zip(*spoken(200_000, *data.niah(40, 0, 0, "n", 200_000, str(tmp_path / "digits.txt")))): assert prompt.count(answer) == 1
  with pytest.raises(ValueError, match="10,400 bytes and 19,924 are needed"): data.niah(1, 0, 0, "n", 19998, str(tmp_path / "page.txt"))
  np.arange(999, dtype="<u2").tofile(tmp_path / "t.bin")
  with pytest.raises(ValueError, match="holds token ids"): data.babi(1, 0, 0, text=str(tmp_path / "t.bin"))

FACT = re.compile(r"(\w+) (went to|took|dropped|gave) the (\w+)(?: to (\w+))?\.|The (\w+) is (north|south|east|west) of the (\w+)\.")

def solved(prompt):
  """The answer to the question in a story's last line, looked up from the end of the story backwards."""
  *lines, question = prompt.splitlines()
  facts = [m.groups() for line in lines if (m := FACT.fullmatch(line))]
  words = question.strip(" ?").replace(" the ", " ").split()
  def room(person, end): return next((f[2] for f in reversed(facts[:end]) if f[:2] == (person, "went to")), None)
  def place(thing, end):
    found = next((i for i in reversed(range(end)) if facts[i][1] in ("took", "dropped") and facts[i][2] == thing), None)
    return None if found is None else room(facts[found][0], end if facts[found][1] == "took" else found)
  if words[:2] == ["Where", "is"]: return room(words[2], len(facts)) or place(words[2], len(facts))
  if words[:2] == ["Where", "was"]:
    rooms = [r for r, _ in itertools.groupby(place(words[2], end) for end in range(len(facts) + 1))]
    return rooms[len(rooms) - 2 - rooms[::-1].index(words[-1])]
  if words[:2] == ["What", "is"]:
    opposite = dict(north="south", south="north", east="west", west="east")
    beside = {(f[4], f[5], f[6]) for f in facts} | {(f[6], opposite[f[5]], f[4]) for f in facts}
    answer, = [a for a, d, b in beside if [d, "of", b] == words[2:]] + [b for a, d, b in beside if [a, d, "of"] == words[2:]]
    return answer
  given = [(f[0], f[2], f[3]) for f in reversed(facts)]
  if words[0] == "Who": return next(giver for giver, thing, receiver in given if [thing, "to", receiver] == words[3:])
  if words[0] == "What": return next(thing for giver, thing, receiver in given if [giver, receiver] == words[2::4])
  return next(receiver for giver, thing, receiver in given if [giver, thing] == words[3::3])

@pytest.mark.parametrize("question,shortest", {1: 324, 2: 376, 3: 376, 4: 136, 5: 285}.items())
def test_a_solver_that_reads_the_story_agrees_with_babi(question, shortest):
  for settings in (dict(length=shortest), {}, dict(text="python", length=1500), dict(length=3000, facts=2 if question == 4 else 60)):
    prompts, answers = spoken(settings.get("length", 512), *data.babi(100, 2, 0, question, **settings))
    facts = [[fact.group() for fact in FACT.finditer(prompt)] for prompt in prompts]
    assert [solved(prompt) for prompt in prompts] == answers and set(answers) <= set(data.BABI_LABELS[question]) and len(set(answers)) > 4
    assert {len(told) for told in facts} == {settings.get("facts", data.STORIES[question][0])}
  # what the least length is made of
  assert max(len(fact) for told in facts for fact in told) + 1 == data.STORIES[question][2] and max(len(p.splitlines()[-1]) for p in prompts) <= 55

# *** 10. the command line ***

TINY = [f"{k}={v}" for k, v in (SMALL | {"vocab": 256}).items()]
TASKED = [w for w in TINY if not w.startswith("vocab=")]

@pytest.fixture
def text(tmp_path):
  (tmp_path / "text.txt").write_bytes(bytes(np.random.default_rng(0).integers(97, 105, 4000, dtype=np.uint8)))
  return f"data={tmp_path / 'text.txt'}"

def last_error(capsys):
  lines = capsys.readouterr().err.strip().splitlines()
  assert len(lines) == 1, lines
  return lines[0]

BAD = {                                                  # a command line and what its one line of error must say
  "steps": "is not key=value", "--steps 3": "write steps=...", "chunks=8": "did you mean chunk", "mixer=mix": "take one of memory, attention",
  "mixer=mac": "attn_window=0 leaves mac without segments", "persist=-1": "persist=-1 is too small", "preset=atlas_mag key_dim=5": "key_dim=5 is odd",
  "task=mqra": "mqra is none: name a task: mqar", "task=mqar:pears=3": "pears=3 is not a setting of mqar", "task=mqar length=63": "take 64",
  "task=mqar:length=64 length=32": "length=32 contradicts", "task=mqar vocab=20": "vocab=20 is too small", "task=mqar:seed=1": "give seed=1",
  "task=mqar data=python": "give one of them", "task=niah vocab=99": "made of bytes",
  "task=in_context_recall length=2": "asks for nothing", "mode=plot": "no log.csv", "tasks=mqar": "did you mean task",
  "steps=many": "not a whole number", "forget=maybe": "true or false", "lr=nan": "lr=nan",
  "batch=0": "1 or more", "mode=bench devices=2": "for training", "batch=2147483646 accum=4": "take one of 1, 2, 3,",
  "batch=999 devices=999": "64 or less",
  "devices=3": "devices=3 does not divide batch/accum=4: take one of 1, 2, 4", "batch=6 accum=3 devices=4": "batch/accum=2",
  "accum=3": "accum=3 does not divide batch=4: take one of 1, 2, 4",
  "mode=training": "did you mean train", "preset=atlass": "did you mean atlas", "size=big": "take one of tiny",
  "muon_every=3": "does not divide chunk=32", "degree=9 key_dim=64": "features, more than 65,536", "preset=swa key_dim=5": "key_dim=5 is odd",
  "window=0": "window=0 is too small", "dtype=half": "take one of float32, bfloat16",
  "backend=fast": "take one of auto, ops, fused", "data=/nowhere": "does not exist",
  "mode=sample": "has no checkpoint", "mode=eval": "has no checkpoint", "length=9000000": "too short", "vocab=50": "outside vocab=50",
  "preset=dot memory=gated": "two first layers", "preset=dot optimizer=muon": "no matrix to orthogonalise", "preset=dot anchors=0": "1 or more",
  "preset=dot backend=fused": "take ops or auto", "init_from=/nowhere": "does not exist", "out=/dev/null/x": "is a file",
  "layers=2000": "take 1024 or less", "mlp_ratio=inf": "take 1024 or less", "steps=3000000000": "take 2147483647 or less", "=3": "write 3=...",
  "data=": "does not exist", "task=copy:length=100000": "takes 0 to 65536", "task=mqar:pairs=0": "take 1 or more",
  "mode=bench lengths=9999999999": "is not a number of tokens"}

@pytest.mark.parametrize("words,message", BAD.items())
def test_bad_input_gets_one_line_that_names_it(words, message, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert train.main(words.split()) == 2
  assert message in last_error(capsys) and not list(tmp_path.iterdir())

def test_the_first_fault_in_the_stated_order_is_reported(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  faults = ["oops", "nokey=1", "steps=x", "muon_every=3", "data=/nowhere", "out=/dev/null/x"]
  for i, word in enumerate(("oops", "nokey", "steps", "muon_every", "data", "out")):
    assert train.main(faults[i:]) == 2 and last_error(capsys).startswith(f"error: {word if i else chr(39) + word}")

def test_a_device_without_bfloat16_is_named(capsys, tmp_path, monkeypatch):
  def refuse(*_): raise NotImplementedError("no such type")
  monkeypatch.setattr(atlas, "linear", refuse)
  assert train.main(["dtype=bfloat16", "steps=0", f"out={tmp_path / 'o'}"]) == 2
  assert last_error(capsys) == f"error: dtype=bfloat16 does not run on {Device.DEFAULT} (no such type): take dtype=float32"

@slow
def test_a_run_goes_on_in_other_parts_and_another_precision_and_not_with_another_rate(tmp_path, text, capsys):
  words = [*TINY, text, "preset=deltanet", "batch=2", "length=16", "tokens=1", "eval_every=0", f"out={tmp_path / 'o'}"]
  assert train.main([*words, "steps=1"]) == 0
  assert train.main(["resume=1", "steps=2", "accum=2", "dtype=bfloat16", text, f"out={tmp_path / 'o'}"]) == 0
  _, meta, weights = data.read_file(train.checkpoints(tmp_path / "o")[-1])
  assert (meta["step"], meta["run"]["accum"], meta["config"]["dtype"]) == (2, 2, "bfloat16") and {t.dtype for t in weights.values()} == {dtypes.float}
  capsys.readouterr()
  for word, message in (("accum=4", "batch=2: take one of 1, 2"), ("lr=3", "contradicts")):
    assert train.main(["resume=1", word, text, f"out={tmp_path / 'o'}"]) == 2 and message in last_error(capsys)

def test_a_checkpoint_of_two_devices_is_one_of_one_device_and_the_reverse(tmp_path, text, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  words = [*TINY, text, "preset=deltanet", "batch=2", "length=16", "tokens=1", "warmup=9", "eval_every=0"]
  def weights(steps, out, *more):
    assert train.main([*words, f"steps={steps}", f"out={tmp_path / out}", *more]) == 0
    return {n: t.numpy() for n, t in safe_load(train.checkpoints(tmp_path / out)[-1]).items()}
  def same(a, b): return all(a[n].shape == b[n].shape and relative(a[n], b[n]) < 1e-5 for n in b if n.startswith("weights."))
  one, two = weights(3, "one"), weights(2, "two", "devices=2")
  assert not same(two, one) and same(weights(3, "two", "resume=1", "devices=1"), one)
  more, again = weights(4, "one", "resume=1"), weights(4, "two", "resume=1", "devices=2")                # from the step cache, both
  assert same(again, more) and not same(again, one)

def test_devices_that_are_not_there_are_named(capsys, tmp_path, monkeypatch):
  monkeypatch.setattr(train, "device_names", lambda run: (Device.DEFAULT, "NOWHERE:1"))
  assert train.main(["devices=2", "steps=0", f"out={tmp_path / 'o'}"]) == 2
  error = last_error(capsys)
  assert error.startswith("error: devices=2: NOWHERE:1 cannot be used") and error.endswith("take devices=1")

@pytest.mark.parametrize("content,message", [(b"", "is empty"), (b"x" * 100, "too short")])
def test_bad_text_is_named(content, message, capsys, tmp_path):
  (tmp_path / "t.txt").write_bytes(content)
  assert train.main([f"data={tmp_path / 't.txt'}", f"out={tmp_path / 'o'}"]) == 2 and message in last_error(capsys)
  header = np.array([20240520, 1, 500] + [0] * 253, "<i4").tobytes()
  (tmp_path / "t.bin").write_bytes(header + bytes(998))
  assert train.main([f"data={tmp_path / 't.bin'}", f"out={tmp_path / 'o'}"]) == 2 and "copy it again" in last_error(capsys)
  (tmp_path / "t.bin").write_bytes(np.array([20240520, 2, 500] + [0] * 253, "<i4").tobytes() + bytes(1000))
  assert train.main([f"data={tmp_path / 't.bin'}", f"out={tmp_path / 'o'}"]) == 2 and "not of version 1" in last_error(capsys)
  (tmp_path / "t.bin").write_bytes(header + bytes(1000))
  assert train.main([f"data={tmp_path / 't.bin'}", "length=8", f"out={tmp_path / 'o'}"]) == 2 and "give vocab=" in last_error(capsys)
  assert train.main([f"data={tmp_path / 't.bin'}", "length=8", "vocab=9", "prompt=abc", f"out={tmp_path / 'o'}"]) == 2
  assert "token ids" in last_error(capsys)
  assert not (tmp_path / "o").exists()

# *** bad input, drawn: the settings are those of the dataclasses and of the tasks' signatures, the values mostly of their kind ***

HOSTILE = st.sampled_from(["", " ", "=", ",", "-1", "1e9", str(10 ** 9), str(10 ** 30), str(-10 ** 30), "9" * 5000, "nan", "inf", "1e308", "1e-320",
  "\0", "\ud800", "a\nb", "\u2028", "\u0663", "x" * 300, "x/" * 3000, "~", "--help"]) | st.text(st.characters(), max_size=8)
PLACES = ["text.txt", "made", "empty", "nowhere", "text.txt/x", "made/step_00000003.safetensors", ".", "..", "/dev/null", "/dev/zero", "loop"]
WORDS = {"mode": train.MODES, "preset": list(atlas.PRESETS), "size": list(atlas.SIZES), **atlas.CHOICES, "kind": ("pk", "n", "w"),
         "presets": ("atlas,dot", "swa", ",", "atlas,"), "lengths": ("8", "8,16", "8,x", "8,,9", "0"), "text": ("filler", "python", *PLACES)}
KINDS = {int: st.integers(-1, 40) | st.sampled_from([64, 256, 4096, 65536, 10 ** 6, 2 ** 31 - 1]), float: st.floats(0, 4) | st.floats(),
         bool: st.sampled_from([0, 1, False]), str: st.sampled_from(PLACES)}

def mostly(sound, share=10): return st.integers(1, share).flatmap(lambda i: HOSTILE if i == share else sound)

def setting(name, default):
  sound = SPECS if name == "task" else st.sampled_from(WORDS[name]) if name in WORDS else KINDS[type(default)]
  return mostly(sound).map(lambda x: f"{name}={x}")

def spec(name):
  keys = [setting(p.name, p.default) for p in inspect.signature(data.TASKS[name]).parameters.values() if p.default is not p.empty]
  return st.lists(mostly(st.one_of(keys), 20), max_size=4).map(lambda words: f"{name}:{','.join(words)}")
SPECS = st.one_of(*map(spec, data.TASKS))
SETTINGS = st.one_of(*[setting(f.name, f.default) for cls in (train.Run, atlas.Config) for f in dataclasses.fields(cls)])
STARTS = st.sampled_from([["data=text.txt"], [*TINY, "data=text.txt", "length=8"], [], ["out=made", "mode=eval"], ["out=made", "mode=sample"],
                          ["out=made", "resume=1"], [*TINY, "preset=deltanet", "init_from=made/step_00000003.safetensors"]])

def drawn(cases):
  return hypothesis.settings(max_examples=cases, derandomize=True, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))

@pytest.fixture
def attempt(tmp_path, monkeypatch, capsys):
  """A function of a command line: main must say 0, or 2 and in one line what is wrong and how to mend it, at once, and leave no file."""
  (tmp_path / "work" / "empty").mkdir(parents=True)
  monkeypatch.chdir(tmp_path / "work")
  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  monkeypatch.setattr(data, "python_source", functools.cache(data.python_source))
  Path("text.txt").write_bytes(b"abcdefgh" * 500)
  Path("loop").symlink_to("loop")
  cfg, run, source = small("deltanet", vocab=256), train.Run(preset="deltanet", data="text.txt", length=8), data.load("text.txt", 256, 8)
  params, folder = get_state_dict(atlas.init(cfg)), Path("made")
  folder.mkdir()
  tensors = {f"weights.{n}": p for n, p in params.items()} | train.optimizer_state(train.optimizer_for(params, 0.1))
  meta = {"step": 3, "config": dataclasses.asdict(cfg), "run": dataclasses.asdict(run), "text": train.identity(source)}
  data.save_file(folder / "step_00000003.safetensors", tensors, meta)
  def files(): return sorted((str(p), p.lstat().st_mtime_ns) for p in Path().rglob("*"))
  def run_it(words):
    before = files()
    signal.setitimer(signal.ITIMER_REAL, 5)
    code = train.main([*words, "steps=0"])
    signal.setitimer(signal.ITIMER_REAL, 0)
    error = capsys.readouterr().err
    assert (code, error) == (0, "") or code == 2 and len(error.splitlines()) == 1 and re.match("error: .*(: .|the settings)", error), (words, error)
    assert files() == before, words
  old = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("more than 5 s"))
  yield run_it
  signal.setitimer(signal.ITIMER_REAL, 0)
  signal.signal(signal.SIGALRM, old)

@drawn(600)
@given(start=STARTS, words=st.lists(mostly(SETTINGS, 30), max_size=5))
def test_no_command_line_ends_in_a_traceback_a_hang_or_a_file(attempt, start, words): attempt([*start, *words])

@drawn(300)
@given(start=st.sampled_from([[], ["mode=eval", "out=made"], ["length=64"], ["vocab=65536"], ["length=1000000000"]]), task=mostly(SPECS))
def test_nor_does_any_task(attempt, start, task): attempt([*start, f"task={task}"])

HEADER = st.builds(lambda numbers, size: np.array([*numbers, *[0] * 253], "<i4").tobytes()[:size], st.tuples(
  st.sampled_from([20240520, 20240801, 0, -1]), st.sampled_from([0, 1, 7, -1]), st.sampled_from([0, 1, -1, 400, 500, 2 ** 31 - 1, -2 ** 31])),
  st.sampled_from([0, 4, 8, 1023, 1024, 1024, 1024]))

@drawn(200)
@given(name=st.sampled_from(["t.bin", "t.txt", "folder/t.bin", "folder/t.txt", "folder.bin/t"]), header=HEADER,
       filler=st.binary(min_size=1, max_size=2), size=st.sampled_from([0, 1, 2, 3, 100, 800, 1000, 2000, 4000]), words=st.lists(
         st.sampled_from(["mode=eval", "out=made", "vocab=1", "vocab=300", "vocab=65536", "length=1", "length=8", "size=170m"]), max_size=4))
def test_nor_does_damaged_data(attempt, name, header, filler, size, words):
  (path := Path(name)).parent.mkdir(exist_ok=True)
  path.write_bytes(header + (filler * size)[:size])
  attempt([f"data={path if path.parent == Path('.') else path.parent}", *words])
  shutil.rmtree(path.parent) if path.parent != Path(".") else path.unlink()

JSON = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(-1, 3), st.floats(), st.text(st.characters(), max_size=5), st.just("a b")),
  lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["context", "choices", "answer", "suffix", "question", "answers", "text"]), x),
  max_leaves=8)

@drawn(150)
@given(lines=st.lists(st.one_of(JSON.map(lambda x: json.dumps(x).encode()), st.binary(max_size=9),
                                st.sampled_from([b'{"text": "a b"}', b"1,2,", b"9" * 5000])), max_size=3), log=st.booleans(), skip_bad=st.booleans())
def test_nor_do_malformed_lines_or_logs(attempt, lines, log, skip_bad):
  Path(name := "made/log.csv" if log else "lines.jsonl").write_bytes(b"step,loss,val_bpb\n" * log + b"\n".join(lines))
  attempt(["out=made", *(["mode=plot"] if log else ["mode=eval", f"data={name}", f"skip_bad={skip_bad}"])])
  Path(name).unlink()

@drawn(200)
@given(words=st.sampled_from(["mode=sample out=made", "mode=eval out=made", "mode=export out=made", "resume=1 out=made preset=deltanet",
                              "init_from=made/step_00000003.safetensors"]),
       start=st.floats(0, 1), size=st.sampled_from([0, 1, 8, 100, 10 ** 9]), junk=st.one_of(st.binary(max_size=9), st.just(b"9" * 9000)))
def test_nor_does_a_damaged_checkpoint(attempt, words, start, size, junk):
  """Some bytes of it, or all after a place, replaced by others.  Exit code 2, unless nothing has changed."""
  good = (path := train.checkpoints(Path("made"))[0]).read_bytes()
  at = int(start ** 4 * len(good))                       # mostly in the header
  path.write_bytes(bad := good[:at] + junk + good[at + size:])
  if bad != good:
    with pytest.raises(ValueError): data.read_file(path)
  attempt(words.split())
  path.write_bytes(good)

@pytest.mark.skipif(Device.DEFAULT != "CPU", reason="clang is the CPU device's compiler")
@pytest.mark.parametrize("clang", ["/nonexistent", "/bin/false"])
def test_no_usable_device_says_how_to_get_clang(clang, tmp_path):
  done = subprocess.run([sys.executable, train.__file__], cwd=tmp_path, env={**os.environ, "CC": clang, "DEV": "CPU"}, capture_output=True, text=True)
  assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and "pip install '.[cpu]'" in done.stderr
  assert not list(tmp_path.iterdir())

def test_help_lists_every_key(capsys):
  assert train.main(["--help"]) == 0
  shown = capsys.readouterr().out
  for f in (*dataclasses.fields(train.Run), *dataclasses.fields(atlas.Config)): assert f"  {f.name}=" in shown

def test_explicit_keys_win_over_size_over_preset_in_any_order():
  words = ["dim=32", "size=170m", "preset=titans", "vocab=256", "steps=0"]
  configs = [train.resolve(*train.parse(order)).cfg for order in (words, words[::-1])]
  assert configs[0] == configs[1] == atlas.preset("titans", "170m", dim=32, vocab=256)
  assert atlas.preset("titans").window == 1 and atlas.preset("atlas").muon_every == 4 and atlas.preset("titans", window=3).window == 3
  assert atlas.preset("atlas", chunk=6).muon_every == 2 and atlas.preset("atlas", chunk=5).muon_every == 1
  assert atlas.preset("titans", "170m").dim == 768 and atlas.preset("titans", "170m", dim=64).dim == 64
  with pytest.raises(ValueError, match="did you mean window"): atlas.preset("titans", windows=3)

def test_parameter_counts_match_what_init_makes():
  for name in PRESETS: assert atlas.parts(small(name))["total"] == sum(p.numel() for p in get_state_dict(atlas.init(small(name))).values())

def rows(out): return [[x for i, x in enumerate(row) if i < 7] for row in csv.reader((out / "log.csv").open())]

def test_a_run_stops_cleanly_resumes_bit_for_bit_samples_and_evaluates(tmp_path, text, capsys, monkeypatch):
  run = [*TINY, text, "preset=titans", "steps=5", "batch=2", "length=16", "save_every=2", "tokens=3", "warmup=2"]
  assert train.main([*run, f"out={tmp_path / 'a'}", "eval_every=4"]) == 0
  assert [p.name for p in train.checkpoints(tmp_path / "a")] == ["step_00000004.safetensors", "step_00000005.safetensors"]
  original = data.batch
  def interrupted(*args):
    if args[-1] == 2: signal.raise_signal(signal.SIGTERM)
    return original(*args)
  monkeypatch.setattr(data, "batch", interrupted)
  assert train.main([*run, f"out={tmp_path / 'b'}", "eval_every=4"]) == 0 and "stopped at step 3, saved" in capsys.readouterr().out
  monkeypatch.setattr(data, "batch", original)
  (tmp_path / "b" / "log.csv").open("a").write("4,0,9,,9,9,9,9,9\n")               # a row after the checkpoint, as a crash may leave it
  assert train.main([*run, f"out={tmp_path / 'b'}", "eval_every=4", "resume=1"]) == 0
  a, b = (safe_load(train.checkpoints(tmp_path / o)[-1]) for o in "ab")
  assert a.keys() == b.keys() and all(a[n].numpy().tobytes() == b[n].numpy().tobytes() for n in a)
  assert rows(tmp_path / "a") == rows(tmp_path / "b") and len(rows(tmp_path / "a")) == 6

  for path in train.checkpoints(tmp_path / "b"): path.write_bytes(b"damaged")
  capsys.readouterr()
  assert train.main(["mode=eval", "data=/nowhere", f"out={tmp_path / 'b'}"]) == 2 and "data=/nowhere" in last_error(capsys)      # data comes first

  said = []
  for seed in (4, 4, 5):
    assert train.main(["mode=sample", f"out={tmp_path / 'a'}", "prompt=ab", "tokens=12", f"seed={seed}"]) == 0
    said.append(capsys.readouterr().out.split("---\n", 1)[1].split("\n---")[0])
  assert said[0] == said[1] != said[2] and said[0].startswith("ab")
  assert train.main(["mode=eval", f"out={tmp_path / 'a'}", text, "tokens=320", "horizon=9"]) == 0           # which no weight depends on
  shown = capsys.readouterr().out
  assert re.search(r"validation loss \d\.\d+ nats, \d\.\d+ bits per byte", shown) and "beyond, to 32" in shown
  (tmp_path / "other.txt").write_bytes(b"other text" * 400)
  (tmp_path / "text.txt").rename(tmp_path / "kept.txt")
  (tmp_path / "other.txt").rename(tmp_path / "text.txt")
  assert train.main(["resume=1", "steps=9", f"out={tmp_path / 'a'}"]) == 2 and "has changed since" in last_error(capsys)
  (tmp_path / "kept.txt").rename(tmp_path / "text.txt")
  contradictions = (["preset=titans", "dim=32"], "dim=32"), (["lr=3"], "lr=3.0"), (["horizon=9"], "horizon=9")
  for words, what in contradictions:
    assert train.main([*words, "resume=1", text, f"out={tmp_path / 'a'}"]) == 2 and f"{what} contradicts" in last_error(capsys)
  assert train.main([*run, f"out={tmp_path / 'n'}", "dim=24", f"init_from={train.checkpoints(tmp_path / 'a')[-1]}"]) == 2
  assert "has shape" in last_error(capsys) and not (tmp_path / "n").exists()
  assert train.main([*run, f"out={tmp_path / 'n'}", "steps=0", f"init_from={train.checkpoints(tmp_path / 'a')[-1]}"]) == 0
  capsys.readouterr()
  assert train.main([*run, f"out={tmp_path / 'a'}", "steps=1"]) == 0 and (tmp_path / "a.1" / "log.csv").exists()      # a fresh run loses nothing

def test_what_is_trained_on_lies_within_the_horizon_unless_another_is_given(tmp_path, text, capsys):
  for words, horizon in (("length=16", 128), ("length=300", 300), ("length=300 horizon=20", 20), ("task=copy:length=400", 400)):
    source = [] if "task" in words else [text]
    assert train.main([*words.split(), *source, "preset=deltanet", "steps=0", f"out={tmp_path / 'o'}"]) == 0
    assert f" horizon={horizon} " in capsys.readouterr().out

def test_the_step_cache_changes_nothing_and_a_damaged_or_foreign_entry_is_made_anew(tmp_path, text, monkeypatch, capsys):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  run = [*TINY, text, "preset=deltanet", "steps=4", "batch=2", "length=16", "tokens=1", "warmup=2", "eval_every=0"]
  def weights(out, *more):
    assert train.main([*run, f"out={tmp_path / out}", *more]) == 0
    return safe_load(train.checkpoints(tmp_path / out)[-1]), "the compiled step is in" in capsys.readouterr().out
  first, hit = weights("a")
  entries = list((tmp_path / "cache").rglob("*.pickle"))
  assert not hit and len(entries) == 1
  good = entries[0].read_bytes()
  def same(x): return all(x[n].numpy().tobytes() == first[n].numpy().tobytes() for n in first)
  second, hit = weights("b")
  assert hit and same(second)
  assert not weights("c", "cache=0")[1] and not weights("d", "lr=0.01", "clip=0.5")[1]
  for bad in (good[:1000], good[:-1] + bytes([good[-1] ^ 1]), b"x" * 64 + good[64:]):
    entries[0].write_bytes(bad)
    third, hit = weights("e")
    assert not hit and same(third) and entries[0].read_bytes() != bad
  entries[0].write_bytes(good)
  entries[0].chmod(0o666)
  assert not weights("f")[1]                             # others may write it: not trusted
  parts, again = weights("g", "accum=2"), weights("h", "accum=2")
  assert not parts[1] and again[1] and all(parts[0][n].numpy().tobytes() == again[0][n].numpy().tobytes() for n in first)

def test_bench_prints_and_writes_a_row_per_preset_and_length(tmp_path, capsys):
  argv = ["mode=bench", *TINY, "batch=2", f"out={tmp_path / 'o'}", "presets=deltanet,transformer++", "lengths=16,32"]
  assert train.main([*argv, "steps=0"]) == 0 and not (tmp_path / "o").exists()
  assert train.main(argv[:-2] + ["presets=deltanet", "lengths=16,100000000"]) == 0
  table = list(csv.DictReader((tmp_path / "o" / "bench.csv").open()))
  assert tuple(table[0]) == train.COLUMNS and [r["length"] for r in table] == ["16", "100000000"]
  assert table[0]["backend"] == ("fused" if Device.DEFAULT == "CPU" else "ops") and all(table[0].values()) and float(table[0]["tok_s"]) > 0
  assert table[1]["params"] == "does not fit" and not any(table[1][c] for c in train.COLUMNS[5:])
  for words, message in (("presets=atlas,titan", "did you mean titans"), ("lengths=16,x", "'x' is not a number of tokens")):
    capsys.readouterr()
    assert train.main(["mode=bench", *words.split()]) == 2 and message in last_error(capsys)

def test_a_task_is_trained_on_until_it_is_solved_evaluated_beyond_and_drawn(tmp_path, capsys, monkeypatch):
  out = tmp_path / "a"
  words = [*TASKED, "preset=deltanet", "task=mqar:pairs=2", "vocab=40", "length=12", "batch=2", "tokens=64", f"out={out}"]
  monkeypatch.setitem(data.BEYOND, "mqar", [dict(pairs=2, again=2, length=2)])
  monkeypatch.setattr(train, "SOLVED", 0.0)              # the first look at held-out examples ends it
  assert train.main([*words, "steps=6", "eval_every=3"]) == 0
  shown = capsys.readouterr().out
  assert "done early" in shown and data.read_file(train.checkpoints(out)[-1]).meta["step"] == 3
  found = list(csv.DictReader((out / "accuracy.csv").open()))
  assert [r["setting"] for r in found] == ["as given", "pairs=4,again=0,length=24"] and all(0 <= float(r["micro"]) <= 1 for r in found)
  assert train.main(["mode=eval", f"out={out}", "tokens=64"]) == 0
  assert capsys.readouterr().out.splitlines()[-2:] == shown.splitlines()[-3:-1]
  assert train.main(["mode=eval", f"out={out}", "task=copy:vocab=99"]) == 2 and "99 tokens" in last_error(capsys)
  assert train.main(["resume=1", f"out={out}", "task=copy"]) == 2 and "contradicts" in last_error(capsys)
  if importlib.util.find_spec("matplotlib"):
    assert train.main(["mode=plot", f"out={out}"]) == 0 and (out / "log.png").stat().st_size > 5_000
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  capsys.readouterr()
  assert train.main(["mode=plot", f"out={out}"]) == 2 and "pip install '.[plot]'" in last_error(capsys)

def test_compression_is_answered_from_one_state(tmp_path, capsys):
  out = tmp_path / "c"
  words = [*TASKED, "preset=deltanet", "task=compression:vocab=5", "length=8", "batch=2", "tokens=64", f"out={out}"]
  assert train.main([*words, "steps=1", "eval_every=0"]) == 0
  assert train.main(["mode=eval", f"out={out}", "tokens=64"]) == 0 and "as given" in capsys.readouterr().out
  assert train.main([*words, "steps=2", "resume=1", "eval_every=0"]) == 0
  start = train.checkpoints(out)[-1]
  saved = data.read_file(start)
  run, cfg = train.from_checkpoint(saved, train.Run(mode="eval"), {}, {})
  params = atlas.weights_of(saved, train.layout(run, cfg))
  x, _ = data.task(run.task, 8, 5).batch(2, 0, 0)
  logits = evaluate.predictions(params, cfg, Tensor(x))[0].numpy()
  other = dict(params, decoder=dict(params["decoder"], position=params["decoder"]["position"].flip(0)))
  assert logits.shape == (2, 8, 5) and np.allclose(evaluate.predictions(other, cfg, Tensor(x))[0].numpy()[:, ::-1], logits, atol=1e-6)       # places
  capsys.readouterr()
  assert train.main(["mode=eval", f"out={out}", "task=copy:vocab=5"]) == 2 and "for its own length" in last_error(capsys)
  assert train.main(["mode=eval", f"out={out}", "task=compression:vocab=5,length=9"]) == 2 and "for its own length" in last_error(capsys)

def test_a_score_counts_places_labels_examples_and_answers():
  cfg, task = small("deltanet", vocab=40), data.task("in_context_recall:vocab=8,length=16")
  params = atlas.init(cfg)
  found = evaluate.scorer(params, cfg, task, 4, 0)(64, {})
  x, y = (np.concatenate(z) for z in zip(*(task.batch(4, 0, data.HELD_OUT + i) for i in range(8))))
  hit = atlas.forward(params, cfg, Tensor(x))[0].argmax(-1).numpy() == y
  assert found["micro"] == pytest.approx(hit[y >= 0].mean()) and found["exact"] == pytest.approx((hit | (y < 0)).all(1).mean())
  assert found["macro"] == pytest.approx(np.mean([hit[y == label].mean() for label in np.unique(y[y >= 0])]))
  story = data.task("babi")
  for text, right in (("the hall.", True), ("hall or attic", False), ("hall or study", True), ("", False), ("attic", False)):
    assert evaluate.judged(story, b"Ada is in the study.\nIs Ada in the study? ", text, "hall") == right, text
  assert evaluate.judged(data.task("niah"), b"", "it is ABC-1!", "abc-1") and not evaluate.judged(data.task("niah"), b"", "abc", "abc-1")

@pytest.mark.parametrize("name", ["titans", "transformer++", *(pytest.param(n, marks=slow) for n in ("titans_mac", "dot"))])
def test_what_a_model_says_is_the_likeliest_next_byte_of_reading_everything_anew(name):
  cfg = small(name, vocab=256)
  params, prompt = atlas.init(cfg, 1), np.random.default_rng(0).integers(97, 123, (1, 19)).astype(np.uint8)      # two chunks and three bytes
  said = evaluate.speaker(params, cfg)(prompt, 7)[0].encode(errors="surrogateescape")
  ids = prompt[0].tolist()
  whole = TinyJit(lambda x: atlas.forward(params, cfg, x)[0].realize())
  for n in range(7):                                     # one shape for all: what comes later changes nothing
    ids.append(int(whole(Tensor([ids + [0] * (26 - len(ids))])).numpy()[0, len(ids) - 1].argmax()))
  assert said == bytes(ids[19:]).split(b"\n")[0].decode(errors="replace").encode()

LINES = """{"context": "It is ", "choices": ["abc", "zz", "q"], "answer": 1}
{"context": "So", "choices": ["he", "the other one"], "suffix": " was here", "answer": "he"}

{"context": "x", "question": "y?", "answers": ["%s", "no"]}
{"text": "one two three"}
"""

def test_lines_of_json_are_scored_by_likelihood_by_what_is_said_and_by_the_last_word(tmp_path, capsys):
  cfg = small("titans", vocab=256)
  params = atlas.init(cfg, 2)
  read = TinyJit(lambda x: atlas.forward(params, cfg, x)[0].log_softmax(-1).realize())
  def log_likelihood(before, after):
    ids = np.frombuffer(before + after, np.uint8).astype(np.int32)
    logits, at = read(Tensor(np.pad(ids, (0, 80 - len(ids)))[None])).numpy()[0], np.arange(len(before) - 1, len(ids) - 1)
    return logits[at, ids[at + 1]].sum(), bool((logits[at].argmax(-1) == ids[at + 1]).all())
  pairs = [(b"It is", b" abc"), (b"a", b"b" * 70), (b"It is", b" q"), (b"", b"z")]
  for (found, likeliest), (before, after) in zip(evaluate.likelihoods(params, cfg, pairs, 2), pairs):
    expected, greedy = log_likelihood(before or b"\n", after)
    assert found == pytest.approx(expected, rel=1e-4) and likeliest == greedy
  path, said = tmp_path / "lines.jsonl", evaluate.speaker(params, cfg)(np.frombuffer(b"x\ny? ", np.uint8)[None], 48)[0]
  path.write_text(LINES % json.dumps(said[:4])[1:-1])
  choices = [log_likelihood(b"It is", b" " + c)[0] for c in (b"abc", b"zz", b"q")]
  suffix = [log_likelihood(b"So " + c, b" was here")[0] for c in (b"he", b"the other one")]
  normal = [np.argmax(np.array(choices) / [3, 2, 1]) == 1, np.argmax(suffix) == 0]
  evaluate.evaluate_lines(params, cfg, *evaluate.json_lines(path), 2)
  shown = capsys.readouterr().out
  acc = np.mean([np.argmax(choices) == 1, np.argmax(suffix) == 0])
  assert f"multiple choice: 2 lines, acc {acc:.4f}, acc_norm {np.mean(normal):.4f}" in shown and "recall: 1 lines, contains 1.0000" in shown
  last, greedy = log_likelihood(b"one two", b" three")
  assert f"last word: 1 lines, acc {float(greedy):.4f}, perplexity {np.exp(-last):.4g}" in shown

@pytest.mark.parametrize("line,message", [
  ('{"x"', "is not JSON"), ("[1]", "is not an object"), ('{"text": "one"}', "a text of two words"), ("[" * 100_000, "is not JSON"),
  ('{"context": "", "choices": ["a"], "answer": 0}', "choices"), ('{"context": "", "choices": ["a", "b"], "answer": 2}', "answer"),
  ('{"context": "", "question": "q", "answers": []}', "answers"), ("\xff", "is not JSON"), ('{"choices": ["a", "b"], "answer": 0}', "context")])
def test_a_malformed_line_is_named_and_left_out_only_when_asked(line, message, tmp_path):
  path = tmp_path / "lines.jsonl"
  path.write_bytes(b'{"text": "one two"}\n\n' + line.encode("latin1") + b'\n{"text": "three four"}')
  with pytest.raises(ValueError, match="line 3 .*skip_bad=1") as e: evaluate.json_lines(path)
  assert message in str(e.value)
  found, skipped = evaluate.json_lines(path, skip_bad=True)
  assert [row["text"] for _, row in found] == ["one two", "three four"] and skipped == 1

def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path, text, capsys, monkeypatch):
  """The step whose loss is not finite is named; the checkpoint whose weights gave that loss goes, the one before stays and is good."""
  monkeypatch.setattr(train, "rate", lambda run, step: 1e-3 if step < 3 else 1e30)
  run = [*TINY, text, "preset=gated_deltanet", "steps=9", "batch=2", "length=16", "save_every=1", "eval_every=0", f"out={tmp_path / 'o'}"]
  assert train.main(run) == 1
  message = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if line.startswith("error")]
  step, kept = int(re.findall(r"at step (\d+) is not finite", message[0])[0]), train.checkpoints(tmp_path / "o")[-1]
  assert len(message) == 1 and step >= 5 and data.read_file(kept).meta["step"] == step - 2 and str(kept) in message[0]
  assert len(rows(tmp_path / "o")) == step               # the header and every step before

# *** 11. runs that can be trusted ***

TEN = [*TINY, "preset=titans", "steps=10", "batch=2", "length=16", "eval_every=5", "tokens=1", "warmup=2", "lr=0.01", "save_every=2"]
FIRST = [5.843181, 6.285585, 6.044867, 6.170926, 5.733029, 5.481681, 5.537999, 5.393571, 5.312129, 5.672997]    # losses

together = pytest.mark.xdist_group("ten")               # in one process, which compiles it once

@pytest.fixture(scope="module")
def ten(tmp_path_factory):
  """A folder with ten steps of training on generated text, checkpoints of the last two even steps, and the command that made it."""
  folder = tmp_path_factory.mktemp("ten")
  (folder / "text.txt").write_bytes(bytes(np.random.default_rng(0).integers(97, 105, 4000, dtype=np.uint8)))
  command = [*TEN, f"data={folder / 'text.txt'}"]
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.setattr(evaluate, "VALIDATION_TOKENS", 64)
    assert train.main([*command, f"out={folder / 'out'}"]) == 0
  return folder, command

@pytest.fixture
def mine(ten, tmp_path, monkeypatch):
  """A copy of it: the command, and its out."""
  folder, command = ten
  monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
  monkeypatch.setattr(evaluate, "VALIDATION_TOKENS", 64)
  shutil.copytree(folder / "out", tmp_path / "out")
  return [*command, f"out={tmp_path / 'out'}"], tmp_path / "out"

def result(out):
  """What a run ends with: tensors and log, but for the columns that tell the time."""
  saved = data.read_file(train.checkpoints(out)[-1])
  return {n: z.numpy().tobytes() for n, z in saved.tensors.items()}, rows(out)

def process(words, folder, **settings):
  """A command line in a process of its own, with a small validation."""
  script = "import sys, train, evaluate; evaluate.VALIDATION_TOKENS = 64; sys.exit(train.main(sys.argv[1:]))"
  env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(Path(__file__).parent)}
  return subprocess.Popen([sys.executable, "-c", script, *words], env=env, **settings)

@together
def test_the_first_losses_are_these(ten):
  losses = [float(row[2]) for row in result(ten[0] / "out")[1][1:]]
  assert losses == pytest.approx(FIRST, rel=1e-4)        # other devices and compilers round otherwise

@together
def test_another_process_gives_the_same_log_and_weights_byte_for_byte(ten, tmp_path):
  folder, command = ten
  assert process([*command, f"out={tmp_path / 'again'}"], tmp_path).wait() == 0                   # with a cache of its own: it compiles anew
  assert result(tmp_path / "again") == result(folder / "out")

@together
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_continued_to_the_same_end(ten, mine, capsys):
  command, out = mine
  older, newer = train.checkpoints(out)
  newer.write_bytes(newer.read_bytes()[:-5])
  assert train.main([*command, "resume=1", "steps=0"]) == 0
  warning = last_error(capsys)
  assert f"{newer} is damaged" in warning and f"{older} is taken instead" in warning
  assert train.main([*command, "resume=1"]) == 0 and result(out) == result(ten[0] / "out")
  assert sorted(p.name for p in out.iterdir()) == ["log.csv", "positions.csv", older.name, newer.with_suffix(".damaged").name, newer.name]
  for path in train.checkpoints(out): path.write_bytes(b"")
  capsys.readouterr()
  assert train.main([*command, "resume=1"]) == 2 and f"{newer} is not a checkpoint" in last_error(capsys)

@together
def test_a_file_is_refused_whatever_bit_of_it_is_flipped_and_whoever_wrote_it(ten, tmp_path):
  good, path, rng = train.checkpoints(ten[0] / "out")[-1].read_bytes(), tmp_path / "f.safetensors", np.random.default_rng(0)
  header = 8 + int.from_bytes(good[:8], "little")
  def refused(content, message):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as fault: atlas.load(path)
    assert str(path) in str(fault.value) and "\n" not in str(fault.value)
  for at in (*range(0, header, 5), *rng.integers(header, len(good), 100)):
    bad = bytearray(good)
    bad[at] ^= 1 << int(rng.integers(8))
    refused(bytes(bad), "is damaged|is not a checkpoint|has the format|cannot be read")
  for cut in (0, 4, 8, 100, header, len(good) - 1): refused(good[:cut], "is damaged|is not a checkpoint")
  refused(good + b"\0", "is damaged")
  refused(good.replace(b'"atlas-2"', b'"atlas-3"'), "has the format atlas-3, and this version reads atlas-2")
  safe_save({"embed": Tensor([1.0])}, str(tmp_path / "foreign"))
  refused((tmp_path / "foreign").read_bytes(), "is not a checkpoint")
  refused(b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04echo\x85R.", "is not a checkpoint")         # a pickle
  with pytest.raises(ValueError, match="cannot be read"): atlas.load(tmp_path)

@together
def test_an_exported_file_is_loaded_with_its_settings_and_can_be_trained_on(mine, capsys):
  command, out = mine
  path = out / "weights.safetensors"
  assert train.main(["mode=export", f"out={out}"]) == 0 and str(path) in capsys.readouterr().out
  for cfg, params in (atlas.load(path), atlas.load(train.checkpoints(out)[-1])):
    assert cfg == small("titans", vocab=256)
    flat, saved = get_state_dict(params), data.read_file(train.checkpoints(out)[-1])
    assert list(flat) == list(atlas.layout(cfg)) and all((z.numpy() == saved.tensors[f"weights.{n}"].numpy()).all() for n, z in flat.items())
  assert safe_load(path).keys() == flat.keys()           # plain: anything that reads safetensors reads these names
  assert train.main([*command, f"out={out}.new", f"init_from={path}", "steps=0"]) == 0
  path.rename(out / "step_00000011.safetensors")         # weights alone are nothing to continue
  capsys.readouterr()
  assert train.main([*command, "resume=1", "steps=0"]) == 0 and "holds weights and no run" in last_error(capsys)
  assert train.main(["mode=export", f"out={out}.none"]) == 2 and "has no checkpoint" in last_error(capsys)

@together
def test_two_runs_do_not_share_a_folder(mine, capsys):
  command, out = mine
  before = sorted(p.name for p in out.iterdir())
  with train.held(out):
    for more in ([], ["resume=1", "steps=12"]): assert train.main([*command, *more]) == 2 and "is in use by another run" in last_error(capsys)
  assert sorted(p.name for p in out.iterdir()) == before and not Path(f"{out}.1").exists()
  assert train.main([*command, "resume=1"]) == 0

@together
def test_a_write_that_fails_loses_nothing_and_the_run_goes_on_to_the_same_end(ten, mine, monkeypatch, capsys):
  command, out = mine
  shutil.rmtree(out)
  original, limits = data.batch, resource.getrlimit(resource.RLIMIT_FSIZE)
  def full(*args):                                       # from the sixth step on no file may have more than 20,000 bytes
    if args[-1] == 5: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    return original(*args)
  monkeypatch.setattr(data, "batch", full)
  try: assert train.main(command) == 1
  finally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  error = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if line.startswith("error")]
  assert len(error) == 1 and "cannot be written" in error[0] and "make room" in error[0]
  assert sorted(p.name for p in out.iterdir()) == ["log.csv", "step_00000002.safetensors", "step_00000004.safetensors"]
  assert len(result(out)[1]) == 7                        # the header, and the log to its last row
  monkeypatch.setattr(data, "batch", original)
  (out / "step_00000006.tmp").write_bytes(b"half")       # as a kill in the middle of a write leaves it
  assert train.main([*command, "resume=1"]) == 0 and result(out) == result(ten[0] / "out") and not list(out.glob("*.tmp"))

@together
def test_memory_and_speed_are_flat_in_training(mine, monkeypatch):
  command, original, held = mine[0], data.batch, dict[int, int]()
  def watched(*args):
    held[args[-1]] = resident_mb()
    return original(*args)
  monkeypatch.setattr(data, "batch", watched)
  assert train.main([*command, "steps=400", "save_every=20", "eval_every=0"]) == 0
  assert held[399] <= held[100] + 5, held
  speed = [float(row[7]) for row in csv.reader((mine[1] / "log.csv").open()) if row[7] != "tok_s"]
  assert np.median(speed[-100:]) > np.median(speed[20:120]) / 2          # a step from the cache had grown longer with each step
  assert len(train.checkpoints(mine[1])) == 2            # older ones are removed

def check_flat(tokens, more):
  """A prompt of many tokens, then a sample: what is resident after a few of them is resident at the end."""
  cfg = small("titans", chunk=32, layers=1)
  params, held = atlas.init(cfg), list[int]()
  step = evaluate.token_step(params, cfg)
  read, ids = evaluate.reader(params, cfg, step), np.random.default_rng(0).integers(0, cfg.vocab, (1, tokens))
  read(ids[:, :1000])
  held.append(resident_mb())
  logits, state = read(ids)
  held.append(resident_mb())
  for i in range(more):
    logits, state = step(Tensor(np.array([[i % cfg.vocab]], np.int32)), state)
    if i in (100, more - 1): held.append(resident_mb())
  assert np.isfinite(logits.numpy()).all() and held[1] <= held[0] + 5 and held[3] <= held[2] + 5, held
  return held

@slow
def test_memory_is_flat_in_a_long_sample(): check_flat(20_000, 500)

@slow
def test_memory_is_flat_in_a_million_tokens(): print(check_flat(1_000_000, 20_000), "MB")

@slow
def test_a_run_that_is_killed_again_and_again_ends_like_one_that_is_not(ten, tmp_path):
  """SIGKILL at random moments, most of them in training or in the writing of a checkpoint, which this run does at every second step."""
  folder, command = ten
  command, kills, rng = [*command, "steps=600", "eval_every=100"], 0, np.random.default_rng()
  began = time.perf_counter()
  assert process([*command, f"out={tmp_path / 'whole'}"], folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait() == 0
  usual, out = time.perf_counter() - began, tmp_path / "killed"
  code = None
  while code is None:
    with (tmp_path / "said").open("w") as said: run = process([*command, "resume=1", f"out={out}"], folder, stdout=said, stderr=said)
    try: code = run.wait(rng.uniform(0, usual / 4) if kills < 25 else None)
    except subprocess.TimeoutExpired:
      run.kill()
      run.wait()
      kills += 1
  assert code == 0, (tmp_path / "said").read_text()[-3000:]
  assert kills >= 20 and result(out) == result(tmp_path / "whole")
  print(f"killed {kills} times")

def commands():
  """The arguments of every command of the README that runs train.py."""
  return [shlex.split(c, comments=True) for c in re.findall(r"\bpython train\.py([^`\n]*)", (Path(__file__).parent / "README.md").read_text())]

def test_the_recall_experiment_shows_what_windows_and_features_buy(tmp_path, capsys):
  found = experiments.recall(sizes=(4, 16), trials=8, seeds=1, rules=("delta", "Omega, window 16"), folder=str(tmp_path))
  correlated = {name: hits[1, 1].mean() for name, hits in found.items()}
  for features, much in (("identity", 0.2), ("poly", 0.0)): assert correlated["Omega, window 16", features] > correlated["delta", features] + much
  assert correlated["delta", "exp"] > correlated["delta", "poly"] > correlated["delta", "identity"]
  printed = capsys.readouterr().out
  assert "0." in printed and ("pip install" in printed or (tmp_path / "recall.png").stat().st_size > 10_000)

def test_the_learnability_experiment_learns_the_low_rank_mapping(tmp_path, capsys):
  found = experiments.learnability(d=32, T=256, seeds=1, window=8, folder=str(tmp_path))
  assert found.shape == (5, 1, 256) and found[0, 0, -64:].mean() < 0.8 * found[0, 0, :64].mean()
  printed = capsys.readouterr().out
  for name in experiments.MAPPINGS: assert re.search(rf"^{re.escape(name)} +[1-9]e-0\d +\d\.\d+ ", printed, re.M)
  assert "low-rank is easiest" in printed

def test_the_capacity_experiment_counts_what_least_squares_can_fit(capsys):
  """On unit keys the 15 monomials of 4 components up to degree 2 have one sum, |k|^2, that is constant: 14 are left.  A network of 16 parameters
  for 2 components holds 8 pairs at the most, and the 5 eighths that it tries first."""
  found = experiments.capacity(dims=(4,), degrees=(1, 2), deep={2: (2,)}, seeds=1, threshold=1e-3, steps=400)
  assert found["linear, degree 1"] == {4: [4]} and found["linear, degree 2"] == {4: [14]}
  assert 2 <= found["mlp, expand 2"][2][0] <= 8 and "mlp, expand 2" in capsys.readouterr().out

def test_the_heatmap_shows_storing_the_window_and_forgetting(tmp_path, capsys):
  found = experiments.heatmap(N=24, draws=4, d=8, folder=str(tmp_path))
  (delta, window, quadratic, forgets), n = found.values(), np.arange(1, 24)
  for e in found.values(): assert e[n, n].mean() < e[n - 1, n].mean()        # lower than before the pair was written
  assert np.diag(delta).max() < 1e-6                     # a step of 1 writes a pair exactly
  assert window[n[:16] + 6, n[:16]].mean() < window[n[:16], n[:16]].mean() - 0.1          # the window goes on correcting a pair
  assert forgets[-1, :6].mean() > quadratic[-1, :6].mean() + 0.1
  printed = capsys.readouterr().out
  assert all(name in printed for name in found) and ("pip install" in printed or (tmp_path / "memory.png").stat().st_size > 10_000)

@pytest.mark.parametrize("task", [pytest.param("", marks=slow), "mqar:vocab=40,length=12,pairs=2"])
def test_a_trial_is_the_best_rate_of_the_first_seed_and_each_seed_is_that_training_run(task, tmp_path, capsys, monkeypatch):
  """Compiled once for all seeds and rates: the second seed gives what a run of its own gives."""
  monkeypatch.setattr(evaluate, "VALIDATION_TOKENS", 64)
  trial = experiments.Trial("deltanet", SMALL | {"vocab": 40 if task else 256}, task, steps=3, batch=2, length=8, rates=(1e-9, 0.05), seeds=(0, 1))
  found = experiments.trained(trial, [{}, {"pairs": 1}] if task else [{}])
  assert found.scores.shape == (2, 2 if task else 1) and found.steps == 3 and found.parameters > 1000 and found.gflop > 0
  if task:
    alone = experiments.trained(trial._replace(rates=(found.rate,), seeds=(1,)))
    assert found.scores[1, 0] == alone.scores[0, 0]
    row = experiments.mqar(("deltanet",), trial._replace(task="mqar:vocab=40,length=32,pairs=8", seeds=(0,)),
                           ("deltanet",), (2,), str(tmp_path))["deltanet", SMALL["key_dim"]]
    printed = capsys.readouterr().out
    assert "8 pairs" in printed and "1 pairs" in printed and f"{row.scores[0, 0]:.3f} +- 0.000" in printed
  else:
    words = [f"{k}={v}" for k, v in trial.fields.items()]
    run = ["preset=deltanet", *words, "steps=3", "batch=2", "length=8", "lr=0.05", "warmup=0", "seed=1", f"out={tmp_path / 'o'}"]
    assert found.rate == 0.05 and train.main(run) == 0 and float(rows(tmp_path / "o")[-1][3]) == pytest.approx(found.scores[1, 0], abs=1e-5)

@pytest.mark.parametrize("name,rows,columns", [
  ("text", 6, 4), ("ablation", 8, 2), ("window", 5, 2), ("mqar", 13, 5), ("niah", 5, 5), ("scaling", 9, 1),
  ("streams", 18, 6)])
def test_an_experiment_prints_a_row_for_every_model_that_it_trains(name, rows, columns, capsys, monkeypatch, tmp_path):
  """The training itself replaced: every configuration and task is made, and every score is in the table."""
  scores = itertools.count(101)
  def made(trials, variants=[{}], measure=None):
    for trial in trials:
      task = data.task(trial.task) if trial.task else None
      cfg = atlas.preset(trial.preset, **{"vocab": task.vocab if task else 256} | trial.fields)
      assert not task or all(task.batch(1, 0, 0, **other)[0].size for other in variants)
      found = np.array([[next(scores) / 1000 for _ in (range(6) if measure else variants)] for _ in trial.seeds])
      yield experiments.Found(found, 0.01, 7, atlas.parts(cfg)["total"], 2.0, 0.1)
  monkeypatch.setattr(experiments, "all_trained", made)
  monkeypatch.chdir(tmp_path)
  experiments.EXPERIMENTS[name]()
  shown = [line for line in capsys.readouterr().out.splitlines() if re.search(r"0\.\d{3}( |$)", line) and "rates" not in line]
  assert len(shown) == rows
  for line in shown: assert len(re.findall(r"\b0\.\d{3}\b", re.sub(r" \+- 0\.\d+|0\.010", "", line))) == columns, line

def test_an_interrupt_before_the_run_ends_it_in_one_line(monkeypatch, capsys):
  def interrupted(*_): raise KeyboardInterrupt
  monkeypatch.setattr(train, "resolve", interrupted)
  assert train.main([]) == 1 and last_error(capsys) == "stopped at once"

def test_what_is_measured_after_a_hostile_stream_is_the_loss_of_the_text_there(monkeypatch):
  monkeypatch.setattr(experiments, "AFTER", 1280)
  cfg, text = small("linear_attention", vocab=256, chunk=1, horizon=1 << 20), data.load("python", 256, 128)         # which lets nothing go
  params, after = atlas.init(cfg), text.val[:1280].astype(np.int32)
  found = experiments.recovery(params, cfg, text, tokens=1024)
  for got, before in zip(found, ([], *experiments.hostile(1024, 256), text.train[:1024])):
    whole = np.concatenate([np.asarray(before, np.int32), after])[None]
    losses = atlas.token_losses(atlas.forward(params, cfg, Tensor(whole[:, :-1].copy()))[0], Tensor(whole[:, 1:].copy())).numpy()
    assert got == pytest.approx(losses[0, len(before) + 1024:].mean() / math.log(2), abs=1e-5)
  assert len(found) == 6 and np.diff(np.sort(found)).min() > 1e-4, found

def test_the_speed_experiment_compares_both_forms(capsys, monkeypatch):
  monkeypatch.setattr(experiments, "LAYERS", {"small": experiments.Layer(dict(window=2, chunk=4), 2, 4, 4, 1, 12, True)})
  experiments.speed()
  shown = capsys.readouterr().out
  assert re.search(r"small +fused .*\nsmall +ops .*\n +fused is [\d.]+ times as fast", shown)
  assert float(shown.split("outputs and gradients ")[1].split()[0]) < 1e-5

def test_the_readmes_commands_are_accepted(tmp_path, monkeypatch, capsys):
  readme = Path(shutil.copy(Path(__file__).parent / "README.md", tmp_path)).read_text()
  monkeypatch.chdir(tmp_path)
  Path("lines.jsonl").write_text(readme.split("```json\n")[1].split("```")[0])
  assert len(commands()) > 10 and [kind for kind, _ in evaluate.json_lines(Path("lines.jsonl"))[0]] == ["choice", "choice", "recall", "last"]
  for words in commands(): assert train.main([*words, "steps=0"]) == 0 or re.search("has no (checkpoint|log)", last_error(capsys)), words
  assert set(re.findall(r"python experiments\.py (\w+)", readme)) <= set(experiments.EXPERIMENTS)
  for words in re.findall(r"python data\.py ([^`\n#]*)", readme): assert words.isupper() or data.shown(words.split()) == 0
