"""Claims about text, tasks, the command line and runs.

python -m pytest -q test_train.py            the main paths
python -m pytest -q test_train.py -m runs    drawn bad input, kills and full disks, the step cache, experiments"""
import os
os.environ.setdefault("NOOPT", "1")                      # values matter here, not speed: kernels compile sooner
os.environ.setdefault("PARALLEL", "0")                    # its worker processes cost more than they save here
import contextlib, csv, dataclasses, functools, gzip, importlib.util, inspect, io, itertools, json, math, pickle, re
import resource, shlex, shutil, signal, sqlite3, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy as np
import hypothesis, pytest
from hypothesis import given, strategies as st
import atlas, data, evaluate, experiments, train
from tinygrad import Device, Tensor, TinyJit, dtypes, helpers
from tinygrad.nn.state import get_state_dict, safe_load, safe_save
from test_atlas import PRESETS, SMALL, relative, resident_mb, runs, slow, small

pytestmark = pytest.mark.xdist_group("train")            # in one process, which compiles every training step once
def experiment(test): return runs(pytest.mark.xdist_group("experiments")(test))
def slowly(value): return pytest.param(value, marks=slow)
def rarely(value): return pytest.param(value, marks=runs)

HERE = Path(__file__).parent
same = np.array_equal
def raises(message): return pytest.raises(ValueError, match=message)

def table(text):
  """The rows of a table in text: what stands before and after each arrow.  A bar ends a row, as a new line does."""
  return [[cell.strip() for cell in row.split("->")] for row in re.split(r"[|\n]", text.strip())]

TINY = " ".join(f"{key}={value}" for key, value in SMALL.items() if key != "vocab")     # that of bytes or of a task
READ = HERE / "README.md", HERE / "RESULTS.md"
DOCUMENTS = "\n".join(path.read_text().replace("\\\n", " ") for path in READ)

def commands(program):
  """The arguments of every command of README.md and RESULTS.md that runs one of the programs."""
  found = re.findall(rf"\bpython3? {program}\.py([^`\n]*)", DOCUMENTS)
  return [shlex.split(line, comments=True) for line in found if "..." not in line]

@pytest.fixture(scope="module", autouse=True)
def settings(tmp_path_factory):
  """All tests share one step cache, kernels that were compiled before, and a short validation."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    patch.setenv("CACHEDB", helpers.CACHEDB)             # of other processes
    patch.setattr(evaluate, "VALIDATION_TOKENS", 64)
    patch.setattr(data, "python_source", functools.cache(data.python_source))
    yield

@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  return tmp_path

def error_line(capsys):
  """The one line on stderr beside progress bars."""
  lines = [line for line in re.split("[\r\n]", capsys.readouterr().err) if line.strip(" \x1b[A") and "%|" not in line]
  assert len(lines) == 1, lines
  return lines[0]

@pytest.fixture
def run(capsys):
  """A function of a command line and its exit code: returns what the command prints, or its line of error."""
  def command(line, code=0):
    capsys.readouterr()
    assert train.main(line.split()) == code
    return error_line(capsys) if code else capsys.readouterr().out
  return command

@pytest.fixture
def refused(run): return lambda line: run(line, code=2)

# *** text ***

def test_batches_are_a_function_of_seed_and_step_and_targets_are_the_next_tokens():
  tokens = np.arange(1000, dtype=np.uint16)
  def batch(step): return data.batch(tokens, 4, 10, seed=3, step=step)
  x, y = batch(7)
  assert x.shape == (4, 10) and same(y, x + 1) and same(x, batch(7)[0]) and not same(x, batch(8)[0])

def test_validation_windows_are_fixed_and_each_counts_once():
  targets = np.concatenate([y for _, y in data.windows(np.arange(103, dtype=np.uint8), 4, 10, 1000)])
  counted, empty = (targets >= 0).all(1), (targets == -100).all(1)
  assert counted.sum() == 10 and (counted | empty).all() and targets.max() == 102

def test_the_default_text_is_the_standard_library():
  text = data.load("python", 256, 128)
  assert text.is_bytes and len(text.train) > 5e6 and 4 < data.entropy(text.val) < 5.2
  assert b"import" in text.train[:20_000].tobytes()

def shard(magic, version, count, size=0):
  """A token file: its header, then `size` zero bytes."""
  return np.array([magic, version, count] + [0] * 253, "<i4").tobytes() + bytes(size)

def written(name, content):
  Path(name).write_bytes(content)
  return name

GPT2 = shard(20240520, 1, 500, 1000)
@pytest.mark.parametrize("name,header,dtype", [
  ("t.bin", GPT2[:1024], "<u2"), ("t.txt", GPT2[:1024], "<u2"), ("t.bin", shard(20240801, 7, 500), "<u4"),
  ("t.bin", b"", "<u2")])
@pytest.mark.parametrize("place", [3, 499])              # in training, in validation
def test_token_files_are_read_by_their_header_and_not_outside_the_vocabulary(name, header, dtype, place):
  tokens = np.arange(500) % 290
  tokens[place] = 299
  text = data.load(written(name, header + tokens.astype(dtype).tobytes()), 300, 16)
  assert not text.is_bytes and same(np.concatenate([text.train, text.val]), tokens)
  with raises("token 299, outside vocab=299: give vocab=300"): data.load(name, 299, 16)

@pytest.mark.parametrize("dtype", ["<u4", "<i8"])
def test_wide_ids_without_a_header_are_refused_and_any_narrow_ones_are_read(dtype):
  for vocab, highest, message in ((50257, 50000, "looks like ids of 32 bits"), (200, 150, "looks like ids of 32 bits"),
                                  (1 << 18, 1 << 18, "uint16 is too small for vocab=262144: write 256 int32")):
    ids = np.random.default_rng(0).integers(0, highest - 1, 4000)
    with raises(message): data.load(written("t.bin", ids.astype(dtype).tobytes()), vocab, 16)
    for narrow in (ids % 200, ids % 2, ids * 0, ids % 65_536):
      assert len(data.load(written("t.bin", narrow.astype("<u2").tobytes()), 65_536, 16).val) == 400

FORMATS = {
  "zstd": b"\x28\xb5\x2f\xfd", "SevenZip": b"7z\xbc\xaf\x27\x1c", "Parquet": b"PAR1", "HDF5": b"\x89HDF\r\n\x1a\n",
  "SQLite": b"SQLite format 3\0", "PDF": b"%PDF-1.7\n", "PNG": b"\x89PNG\r\n\x1a\n", "JPEG": b"\xff\xd8\xff\xe0",
  "ELF": b"\x7fELF\2\1\1", "GGUF": b"GGUF\3\0", "RIFF": b"RIFF\0\0\0\0WAVEfmt ", "Ogg": b"OggS\0", "GIF": b"GIF89a",
  "Arrow": b"ARROW1\0\0"}

def packed():
  """Files that are not text, each made by the tool that makes them, with the name of their format."""
  Path("folder").mkdir()
  written("folder/some.txt", b"some text " * 300)
  for archive in ("zip", "tar", "gztar", "bztar", "xztar"): shutil.make_archive("folder", archive, "folder")
  with contextlib.closing(sqlite3.connect("a.db")) as database: database.execute("create table t (x)")
  np.save("a.npy", np.arange(999))
  safe_save({"w": Tensor([1.0])}, "w")
  written("p", pickle.dumps(list(range(999))))
  return [(kind, Path(name).read_bytes()) for kind, name in table("""
    zip -> folder.zip | gzip -> folder.tar.gz | bzip2 -> folder.tar.bz2 | xz -> folder.tar.xz | tar -> folder.tar
    pickle -> p       | NumPy -> a.npy        | safetensors -> w        | SQLite -> a.db""")]

@pytest.mark.parametrize("ending", ["txt", rarely("bin")])
def test_a_binary_format_is_named_and_refused_whatever_the_ending(ending):
  for kind, content in [*packed(), *FORMATS.items()]:
    written(f"t.{ending}", content + bytes(range(256)) * 8)
    with raises(f"is a {kind} file.*: unpack it, or convert it") as fault: data.load(f"t.{ending}", 256, 16)
    assert "\n" not in str(fault.value)

@pytest.mark.parametrize("content", [
  b"PARADE 1\n", b"MZ is a country code\n", "\u00e4\u00f6\u00fc\n".encode(), b"\xe4\xf6\xfc\n", bytes(range(1, 256)),
  "\ufefftext\n".encode("utf-16-le")], ids=repr)
def test_other_bytes_are_text(content): assert data.load(written("t.txt", content * 99), 256, 8).is_bytes

def test_a_folder_is_its_text_in_order_and_says_what_it_leaves_out(folder, monkeypatch):
  root, outside = Path("clone"), folder / "outside.txt"
  for name in (".git/objects", "sub", ".hidden"): (root / name).mkdir(parents=True)
  written(outside, b"3" * 100)
  files = {
    "b.py": b"2" * 100, "a.txt": b"1" * 100, "sub/latin1.txt": b"\xe4" * 100, "sub/empty": b"",
    ".env": b"secret", ".hidden/a.txt": b"hidden", ".git/objects/pack": os.urandom(999), "sub/nul.txt": b"text\0text",
    "sub/x.gz": gzip.compress(b"text"), "sub/random": np.random.default_rng(0).bytes(100).replace(b"\0", b"\1")}
  for name, content in files.items(): written(root / name, content)
  links = {"z_again": "a.txt", "c_link": outside, "c_twice": outside, "sub/loop": root.absolute(), "gone": "nowhere"}
  for name, target in links.items(): (root / name).symlink_to(target)
  os.mkfifo(root / "pipe")
  text = data.load("clone", 256, 16)
  assert np.concatenate([text.train, text.val]).tobytes() == b"".join(c * 100 for c in (b"1", b"2", b"3", b"\xe4"))
  left_out = re.fullmatch(r"clone \(left out: (.*)\)", text.name)
  assert left_out and sorted(left_out[1].split(", ")) == ["2 read already", "3 hidden", "3 not files", "3 not text"]
  assert same(data.load("clone/.hidden/..", 256, 16).train, text.train)
  for limits in ((1, 1 << 32), (99, 599)):               # data=/ must not read all of a disk
    with monkeypatch.context() as patch:
      patch.setattr(data, "FOLDER", limits)
      with raises("give a smaller folder"): data.read("clone")
  for name in ("a.txt", "b.py", "c_link", "c_twice", "z_again", "sub/latin1.txt"): (root / name).unlink()
  with raises("holds no text .left out: 3 hidden"): data.read("clone")
  written(root / "shard.bin", shard(20240520, 1, 0))
  with raises("holds token files: name one, data=.*shard.bin"): data.read("clone")

def test_a_file_that_cannot_be_read_is_named(folder, monkeypatch):
  for name in ("a.txt", "b.txt"): written(name, b"text" * 99)
  original = Path.read_bytes
  def denied(path):
    if path.name == "b.txt": raise PermissionError(13, "Permission denied", str(path))
    return original(path)
  monkeypatch.setattr(type(folder), "read_bytes", denied)
  Path("loop").symlink_to("loop")
  for spec, message in ((".", "b.txt cannot be read .Permission denied.: give"), ("b.txt", "b.txt cannot be read"),
                        ("loop", "does not exist, or is neither a file nor a folder")):
    with raises(message): data.read(spec)

def numbers(low, high, count, dtype): return np.random.default_rng(0).integers(low, high, count).astype(dtype).tobytes()

@pytest.mark.parametrize("name", ["t.txt", "t.bin"])
def test_a_file_rewritten_while_it_is_read_cannot_harm(name, monkeypatch):
  content, path = numbers(1, 200, 40_000, "<u2"), Path(name)
  text = data.load(written(name, content), 256, 16)
  before = data.batch(text.train, 4, 16, 0, 0)
  path.write_bytes(b"")
  data.unchanged(text)                                   # it is in memory
  assert text.stamp is None and same(data.batch(text.train, 4, 16, 0, 0), before)
  monkeypatch.setattr(data, "IN_MEMORY", 1000)
  text = data.load(written(name, content), 256, 16)
  data.unchanged(text)
  assert isinstance(text.train, np.memmap) and same(data.batch(text.train, 4, 16, 0, 0), before)
  for change in (lambda: os.utime(path, (1, 1)), lambda: path.write_bytes(content + b"more"), path.unlink):
    change()
    with raises("was changed while it is read: copy it"): data.unchanged(text)

def test_the_digest_of_the_training_part_notices_other_text_of_the_same_length(monkeypatch):
  content = numbers(97, 105, 400_000, np.uint8)
  def digests(content):
    text = data.load(written("t.txt", content), 256, 16)
    return text.sample_digest, text.digest
  first = digests(content)
  for place in (0, 65_536, 200_001, 359_999):            # all of a small text
    changed = digests(content[:place] + b"z" + content[place + 1:])
    assert changed[0] != first[0] and changed[1] == first[1]
  assert digests(content) == first
  monkeypatch.setattr(data, "BLOCK", 16)                 # 1,024 blocks of a large one: 1 byte of 22
  backwards = content[:360_000][::-1] + content[360_000:]
  assert digests(content)[0] != digests(backwards)[0]

# *** tasks ***

SPECIAL = """mqar:vocab=128,length=64,pairs=8,again=8,noise=1 copy:vocab=2 in_context_recall:vocab=4,length=4
  in_context_recall:vocab=6 noisy_recall:noise=0.9,vocab=20,length=4 noisy_recall:vocab=144
  fuzzy_recall:vocab=7,length=18 fuzzy_recall:vocab=128,length=1024 selective_copying:vocab=3,length=3,copies=1
  compression:vocab=3,length=2 memorization:vocab=3 memorization:vocab=9 babi:question=5"""

@pytest.mark.parametrize("spec", [*data.TASKS, *SPECIAL.split()])
def test_a_task_is_a_function_of_seed_and_index_whose_tokens_and_labels_are_in_its_vocabulary(spec):
  task = data.task(spec)
  for index in (1, data.HELD_OUT):
    x, y = task.batch(40, 3, index)
    assert x.shape == y.shape and x.dtype == y.dtype == np.int32 and (y >= 0).any(1).all()
    assert x.min() >= 0 and x.max() < task.vocab and y.max() < task.vocab and set(y[y < 0]) <= {-100}
    assert same((x, y), task.batch(40, 3, index))
    assert ":" in spec or not same(x, task.batch(40, 3, index + 1)[0]) and not same(x, task.batch(40, 4, index)[0])

TASK_FAULTS = """
  -> name a task: mqar                  | mqar length=7 -> take 8               | mqar pairs=40 -> take 160 or more
  mqar again=9 -> take 0 to 4           | mqar pairs=many -> not a number       | copy length=3 -> not even: take 4
  mqar seed=x -> invalid literal        | niah kind=x -> take pk, n or w        | niah length=74 -> take 75 or more
  babi question=6 -> take 1 to 5        | babi question=one -> not a number     | babi length=323 -> take 324 or more
  babi facts=-1 -> takes 0 to 65536     | copy length=100000 -> takes 0 to 65536
  babi length=1048577 -> takes 0 to 1048576                 | niah length=1048577 -> takes 0 to 1048576
  mqra -> mqra is none: name a task: mqar                   | mqar vocab=8 length=32 -> take more than 32
  mqar pears=3 -> take one of seed, vocab                   | noisy_recall noise=0 -> leaves no noise
  selective_copying copies=200 -> take 127 or fewer         | fuzzy_recall shortest=4 -> take 1 to 3
  fuzzy_recall vocab=6 -> take 7 and 18                     | fuzzy_recall length=17 -> take 7 and 18
  in_context_recall vocab=7 -> take an even number of 4 or more
  noisy_recall vocab=18 -> take an even number of 20 or more
  in_context_recall length=2 -> asks for nothing
  compression length=1 -> nothing to compress               | niah kind=w length=128 -> take 129 or more
  babi question=3 facts=2 -> take 3 or more                 | babi question=4 facts=3 -> question=4: take 2
  niah kind=n text=/no/such -> text=/no/such does not exist"""
@pytest.mark.parametrize("line,message", table(TASK_FAULTS))
def test_a_task_says_what_is_wrong_in_one_line(line, message, capsys):
  assert data.shown(line.split()) == 2 and message in error_line(capsys)

def test_two_examples_of_a_task_are_shown_with_their_settings_and_seed(capsys):
  assert data.shown("mqar pairs=2 length=16 vocab=32 seed=3".split()) == 0
  printed, (x, y) = capsys.readouterr().out, data.mqar(2, 3, 0, pairs=2, length=16, vocab=32)
  assert printed.count("(2 of 16 places scored)") == 2
  for token, label in zip(x[y >= 0], y[y >= 0]): assert f" {token}>{label}" in printed
  assert data.shown(["niah", "kind=w"]) == 0
  assert re.search(r"\nThe code of \w+-\w+ is >[0-9a-f-]{36}\n<\n\(37 of 512", capsys.readouterr().out)

# Scored places of a test example, as the paper's generators have them: means of 300 examples.
PLACES_OF_MAD = """
  in_context_recall -> 56 | noisy_recall -> 43.6 | noisy_recall:vocab=48 -> 36.1 | noisy_recall:vocab=144 -> 16.4
  fuzzy_recall -> 4.2     | fuzzy_recall:vocab=32 -> 2.2 | selective_copying -> 16 | compression -> 32
  memorization -> 16"""
@pytest.mark.parametrize("spec,places", table(PLACES_OF_MAD))
def test_a_test_example_of_mad_scores_as_many_places_as_the_paper_s(spec, places):
  counts = (data.task(spec).batch(1200, 0, data.HELD_OUT)[1] >= 0).sum(1)
  error = counts.std() * (1 / 300 + 1 / 1200) ** 0.5     # of the difference: the figure is a mean of 300
  assert abs(counts.mean() - float(places)) <= 3 * error + 0.05                 # 0.05: the figure is rounded

@pytest.mark.parametrize("settings", [{}, dict(again=3), dict(again=8, noise=True), dict(crowd=1.0)], ids=str)
def test_mqar_asks_for_every_key_once_and_the_latest_value_counts(settings):
  start = 2 * (8 + settings.get("again", 0))
  for tokens, labels in zip(*data.mqar(50, 0, 0, vocab=128, length=64, pairs=8, **settings)):
    keys, values = tokens[:start:2], tokens[1:start:2]
    scored = labels >= 0
    latest = dict(zip(keys, values))                     # of a key that occurs twice, dict keeps the later value
    assert max(keys) < 64 <= min(values) and len(latest) == 8 and not scored[:start].any()
    assert sorted(tokens[scored]) == sorted(latest)
    assert [latest[key] for key in tokens[scored]] == labels[scored].tolist()
    assert not set(tokens[start:][~scored[start:]]) & set(keys)

def test_mqar_crowds_its_queries_to_the_front():
  early, late = [np.nonzero(data.mqar(200, 0, 0, 512, 256, 8, crowd=x)[1] >= 0)[1].mean() for x in (0.01, 1.0)]
  assert early < 80 < 120 < late

@pytest.mark.parametrize("spec,count", table("""
  in_context_recall -> 8 | in_context_recall:vocab=32,length=64 -> 16
  noisy_recall -> 8      | noisy_recall:vocab=144,noise=0.6 -> 64   | noisy_recall:vocab=48 -> 16"""))
def test_recall_asks_for_the_value_of_every_key_seen_before_and_last_for_one_that_was(spec, count):
  """The last pair's key was seen before.  Noise comes in pairs, has tokens of its own, and is not asked for."""
  task, keys, noisy = data.task(spec), int(count), 0
  x, y = task.batch(100, 2, 0)
  for tokens, labels in zip(x.reshape(100, -1, 2).tolist(), y.reshape(100, -1, 2).tolist()):
    known = dict[int, int]()
    for (key, value), label in zip(tokens, labels):
      if key >= 2 * keys:
        noisy += 1
        assert value >= 2 * keys and label == [-100, -100]
      else:
        assert key < keys <= value < 2 * keys and label == [known.get(key, -100), -100]
        assert known.setdefault(key, value) == value
    assert labels[-1][0] == tokens[-1][1]
  assert abs(noisy / (x.size / 2) - task.settings["noise"]) < 0.05

def motifs_of(tokens, vocab):
  """The padding of an example of fuzzy recall, and its (key, value): their tokens are of two halves, and take turns."""
  half, padding = (vocab - 1) // 2, vocab - 1
  content = list(itertools.dropwhile(lambda token: token == padding, tokens))
  motifs = [tuple(motif) for _, motif in itertools.groupby(content, key=lambda token: token >= half)]
  assert padding not in content and len(motifs) % 2 == 0
  return len(tokens) - len(content), list(zip(motifs[::2], motifs[1::2]))

@pytest.mark.parametrize("index", [0, data.HELD_OUT])
@pytest.mark.parametrize("settings", ["", "shortest=3", "vocab=32,length=401", "vocab=7,length=18"])
def test_fuzzy_recall_asks_for_the_values_of_motifs_seen_before(settings, index):
  task = data.task(f"fuzzy_recall:{settings}")
  shortest = 3 if index else task.settings["shortest"]
  key_lengths, value_lengths, probes = [0] * 4, [0] * 4, list[float]()
  x, y = task.batch(100, 3, index)
  for tokens, labels in zip(x.tolist(), y.tolist()):
    padding, pairs = motifs_of(tokens, task.vocab)
    assert padding >= 6
    known, expected = dict[tuple, tuple](), [-100] * padding
    for key, value in pairs:
      for motif in (key, value): assert len(set(motif)) == len(motif) <= 3
      expected += [-100] * len(key) + list(known.get(key, [-100] * len(value)))
      assert known.setdefault(key, value) == value
      key_lengths[len(key)] += 1
      value_lengths[len(value)] += 1
    assert labels == expected[1:] + [-100]               # one place before
    assert labels[-2] == tokens[-1]                      # the last pair is asked for
    probes.append([key for key, _ in pairs].index(pairs[-1][0]) / len(pairs))
  keys, values = key_lengths[shortest:], value_lengths[1:]
  assert all(keys) and not any(key_lengths[:shortest]) and all(values)
  if "vocab" not in settings:                            # a drawn length, then one of its motifs; a drawn place
    assert max(values) < 1.25 * min(values) and max(keys) < 1.25 * min(keys)
    assert max(probes) > 0.8 and (index == 0 or 0.35 < np.mean(probes) < 0.55)

def test_motifs_of_one_length_are_all_as_likely():
  motifs = data._motifs(np.random.default_rng(0), (42_000,), 0, 7, 2)
  for length, kinds in ((2, 7 * 6), (3, 7 * 6 * 5)):
    counts = np.unique(motifs[(motifs >= 0).sum(1) == length], axis=0, return_counts=True)[1]
    assert len(counts) == kinds and abs(counts.sum() - 21_000) < 600            # as many of each length
    chi_squared = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert chi_squared < kinds + 5 * (2 * kinds) ** 0.5

@pytest.mark.parametrize("vocab,length,copies", [(16, 256, 16), (64, 64, 31), (3, 3, 1)])
def test_selective_copying_has_one_copy_token_and_labels_under_blanks(vocab, length, copies):
  x, y = data.selective_copying(50, 0, 0, vocab, length, copies)
  start, blank, copy = length - copies, vocab - 2, vocab - 1
  for tokens, labels in zip(x.tolist(), y.tolist()):
    assert tokens.index(copy) == start - 1 and tokens[start:] == [blank] * copies and tokens.count(copy) == 1
    assert labels == [-100] * start + [token for token in tokens[:start] if token < blank]
  if length == 256: assert abs(np.nonzero(x[:, :239] < 14)[1].mean() - 119) < 8 # drawn places, everywhere

def test_copy_and_compression_ask_for_tokens_in_their_order():
  x, y = data.copy(3, 0, 0, length=10)
  assert (x[:, 5] == 0).all() and same(y[:, 5:], x[:, :5]) and same(x[:, 6:], x[:, :4])
  x, y = data.compression(100, 0, 0)                     # every token, and the summary at the end
  assert same(x, y) and (x[:, -1] == 15).all() and set(x[:, :-1].flat) == set(range(15))

def test_memorized_values_are_one_to_one_and_the_same_in_all_runs():
  def mapping(seed, index):
    x, y = data.memorization(400, seed, index)
    assert (x[:, 1::2] == 255).all() and (y[:, ::2] == -100).all()
    return sorted(set(zip(x[:, ::2].flat, y[:, 1::2].flat)))
  pairs = mapping(7, 0)
  assert pairs == mapping(8, 3) == mapping(0, data.HELD_OUT)
  keys, values = map(list, zip(*pairs))
  assert keys == list(range(127)) and sorted(values) == list(range(127, 254)) != values           # shuffled

def decoded(tokens): return bytes(tokens.tolist()).decode(errors="replace")
def spoken(length, x, y):
  """Prompts of one length and answers of a task in bytes; x continues with the answer and its newline."""
  n = data.prompt_length(y)
  prompts, answers = [decoded(row[:n]) for row in x], [decoded(row[row >= 0]) for row in y]
  for tokens, labels, answer in zip(x, y, answers):
    assert len(tokens) == len(labels) == length and answer.endswith("\n")
    assert decoded(tokens[n:]) == answer.ljust(length - n + 1, "\n")[:-1]
    assert (labels[n - 1:n - 1 + len(answer)] >= 0).all()
  return prompts, [answer[:-1] for answer in answers]

@pytest.mark.parametrize("kind,value", table("pk -> [0-9]{7} | n -> [0-9]{7} | w -> [0-9a-f]{8}(-[0-9a-f]{4}){3}.{13}"))
@pytest.mark.parametrize("length", [133, 512, 2048])
def test_niah_hides_the_value_once_beside_its_key(kind, value, length):
  prompts, answers = spoken(length, *data.niah(200, 1, 0, kind, length))
  depths = []
  for prompt, answer in zip(prompts, answers):
    question = prompt.splitlines()[-1]
    assert re.fullmatch(r"The \w+ of \w{5}-\w{5} is ", question)
    assert re.fullmatch(value, answer) and f"\n{question}{answer}.\n" in f"\n{prompt}"
    assert prompt.endswith(f"\n{question}") and prompt.count(question) == 2 and prompt.count(answer) == 1
    depths.append(prompt.index(answer) / (length - 2 * len(question) - 2 * len(answer)))
  if length == 2048: assert min(np.histogram(depths, 4, (0, 1.1))[0]) > 25

def test_a_haystack_is_any_text_of_bytes_and_no_token_ids():
  Path("page.txt").write_text("It was late. Nobody came! " * 400)               # one line: needles go between sentences
  prompts, _ = spoken(400, *data.niah(20, 0, 0, "n", 400, "page.txt"))
  assert all(re.search(r"(^|[.!] |\n)The number", prompt) for prompt in prompts)
  assert len({prompt.index("The number") for prompt in prompts}) > 5
  Path("digits.txt").write_bytes(np.random.default_rng(0).integers(48, 58, 200_000, dtype=np.uint8).tobytes())
  prompts, answers = spoken(200_000, *data.niah(40, 0, 0, "n", 200_000, "digits.txt"))
  assert all(prompt.count(answer) == 1 for prompt, answer in zip(prompts, answers))
  with raises("10,400 bytes and 19,924 are needed"): data.niah(1, 0, 0, "n", 19998, "page.txt")
  np.arange(999, dtype="<u2").tofile("t.bin")
  with raises("holds token ids"): data.babi(1, 0, 0, text="t.bin")

FACT = re.compile(r"(\w+) (went to|took|dropped|gave) the (\w+)(?: to (\w+))?\.|The (\w+) is (\w+) of the (\w+)\.")
WHERE = re.compile(r"Where (?:is|was)(?: the)? (\w+)(?: before it last came to the (\w+))?\?")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east", "": ""}
def room_of(person, facts): return next((fact[2] for fact in reversed(facts) if fact[:2] == (person, "went to")), None)
def place_of(thing, facts):
  """The room of an object: where the person is who took it, or where it was dropped."""
  for n, (person, action, what, *_) in reversed(list(enumerate(facts))):
    if (action, what) == ("took", thing): return room_of(person, facts)
    if (action, what) == ("dropped", thing): return room_of(person, facts[:n])
  return None

def solved(prompt):
  """The answer to the question in a story's last line, looked up from the end of the story backwards."""
  question = prompt.splitlines()[-1].strip()
  facts = FACT.findall(prompt)
  for giver, _, thing, receiver, here, direction, there in reversed(facts):
    answers = {
      f"Who last gave the {thing} to {receiver}?": giver, f"What did {giver} last give to {receiver}?": thing,
      f"To whom did {giver} last give the {thing}?": receiver, f"What is {direction} of the {there}?": here,
      f"What is the {here} {direction} of?": there, f"What is {OPPOSITE[direction]} of the {here}?": there,
      f"What is the {there} {OPPOSITE[direction]} of?": here}
    if question in answers: return answers[question]
  name, later = WHERE.findall(question)[0]
  if not later: return room_of(name, facts) or place_of(name, facts)
  rooms = [room for room, _ in itertools.groupby(place_of(name, facts[:end]) for end in range(len(facts) + 1))]
  return rooms[len(rooms) - 2 - rooms[::-1].index(later)]

@pytest.mark.parametrize("question,shortest", [(1, 324), (2, 376), (3, 376), (4, 136), (5, 285)])
def test_a_solver_that_reads_the_story_agrees_with_babi(question, shortest):
  usual, _, longest = data.STORIES[question]
  for length, facts, text in ((512, usual, "filler"), (1500, usual, "python"), (shortest, usual, "filler"),
                              (3000, 2 if question == 4 else 60, "filler")):
    prompts, answers = spoken(length, *data.babi(100, 2, 0, question, length, text, facts))
    assert [solved(prompt) for prompt in prompts] == answers
    assert set(answers) <= set(data.BABI_LABELS[question]) and len(set(answers)) > 4
    stories = [[fact.group() for fact in FACT.finditer(prompt)] for prompt in prompts]
    assert {len(story) for story in stories} == {facts}
  assert max(len(fact) for fact in sum(stories, [])) + 1 == longest             # these two make the least length
  assert max(len(prompt.splitlines()[-1]) for prompt in prompts) <= 55

def test_a_story_of_a_million_bytes_is_made_in_a_moment_and_solved():
  task, start = data.task("babi:question=2,length=1000000"), time.process_time()
  x, y = task.batch(1, 0, data.HELD_OUT)
  assert time.process_time() - start < 2 and task.variants() == [{}]
  prompts, answers = spoken(1_000_000, x, y)
  assert [solved(prompt) for prompt in prompts] == answers
  assert [v.get("length") for v in data.task("babi:length=262144").variants()] == [None, 524288, 1048576]

# *** files of weights ***

def rewritten(content, change):
  """A file of weights as another tool writes it again, with a changed header."""
  size = 8 + int.from_bytes(content[:8], "little")
  header = json.dumps(change(json.loads(content[8:size]))).encode()
  return len(header).to_bytes(8, "little") + header + content[size:]

def with_meta(**changed):
  """A change of entries of the metadata; None leaves one out."""
  def change(header):
    meta = header["__metadata__"] | changed
    return header | {"__metadata__": {name: x for name, x in meta.items() if x is not None}}
  return change

unsigned = with_meta(sha256=None)

@pytest.fixture
def weights():
  numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
  data.save_file("w", {"a": Tensor(numbers), "b": Tensor([7.0])}, {"step": 3, "config": {"dim": 8}})
  return Path("w").read_bytes()

def test_weights_without_our_checksum_load_and_are_called_unsigned(weights):
  def reordered(header): return dict(reversed(unsigned(header).items()))
  assert data.read_file("w").signed
  for change in (reordered, unsigned):
    saved = data.read_file(written("w", rewritten(weights, change)))
    assert not saved.signed and saved.meta == {"step": 3, "config": {"dim": 8}}
    assert saved.tensors["a"].tolist() == [[0, 1, 2], [3, 4, 5]]

def test_a_file_is_refused_whatever_bit_of_it_is_flipped_and_whoever_wrote_it(weights):
  def flipped(place): return weights[:place] + bytes([weights[place] ^ 1 << place % 8]) + weights[place + 1:]
  def no_meta(header): return {name: x for name, x in header.items() if name != "__metadata__"}
  def refuses(message, content):
    with raises(message) as fault: data.read_file(written("bad", content))
    assert str(fault.value).startswith("bad ") and "\n" not in str(fault.value)
  for place in range(len(weights)): refuses("is damaged|is not a checkpoint|has the format", flipped(place))
  for place in (0, 4, 8, 100, -4, -1): refuses("is damaged|is not a checkpoint", weights[:place])
  whole = rewritten(weights, unsigned)                   # what can be told without a checksum
  for content in (whole[:-1], whole + b"x", weights + b"\0", weights[:-4] + b"abcd"): refuses("is damaged", content)
  for change, message in (
      (with_meta(), "is damaged, its checksum does not match"), (with_meta(sha256="ab" * 32), "is damaged"),
      (with_meta(step="4"), "is damaged"), (no_meta, "is not a checkpoint of this project"),
      (with_meta(format="pt"), "is not a checkpoint"), (with_meta(format="atlas-1"), "format atlas-1, not atlas-2")):
    refuses(message, rewritten(weights, change))
  refuses("is not a checkpoint", b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04echo\x85R.")    # a pickle
  with raises("cannot be read"): atlas.load(".")

@runs
def test_a_file_that_cannot_be_written_leaves_nothing_behind(weights, monkeypatch):
  def full(_): raise OSError(28, "No space left on device")
  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(OSError): data.save_file("w", {"a": Tensor([1.0])}, {})
  assert Path("w").read_bytes() == weights and os.listdir() == ["w"]

# *** the command line ***

BAD = """
  steps -> is not key=value             | --steps 3 -> write steps=...          | =3 -> write 3=...
  chunks=8 -> did you mean chunk        | tasks=mqar -> did you mean task       | steps=many -> not a whole number
  forget=maybe -> true or false         | lr=nan -> lr=nan                      | batch=0 -> 1 or more
  mode=training -> did you mean train   | preset=atlass -> did you mean atlas   | size=big -> take one of tiny
  window=0 -> window=0 is too small     | layers=2000 -> take 1024 or less      | mlp_ratio=inf -> take 1024 or less
  preset=dot anchors=0 -> 1 or more     | batch=999 devices=999 -> 64 or less   | mode=bench devices=2 -> for training
  task=mqar:pairs=0 -> take 1 or more   | task=mqar:seed=1 -> give seed=1       | task=mqar length=63 -> take 64
  task=niah vocab=99 -> made of bytes   | data= -> does not exist               | data=/nowhere -> does not exist
  length=9000000 -> too short           | vocab=50 -> outside vocab=50          | mode=sample -> has no checkpoint
  mode=eval -> has no checkpoint        | mode=export -> has no checkpoint      | mode=plot -> no log.csv
  init_from=/nowhere -> does not exist  | out=/dev/null/x -> is a file          | data=/dev/zero -> is neither a file
  data=/dev/null -> is neither a file
  steps=3000000000 -> take 2147483647 or less               | mixer=mix -> take one of memory, attention
  dtype=half -> take one of float32, bfloat16               | backend=fast -> take one of auto, ops, fused
  persist=-1 -> persist=-1 is too small                     | muon_every=3 -> does not divide chunk=32
  mixer=mac -> attn_window=0 leaves mac without segments    | preset=atlas_mag key_dim=5 -> key_dim=5 is odd
  preset=swa key_dim=5 -> key_dim=5 is odd                  | degree=9 key_dim=64 -> features, more than 65,536
  preset=dot memory=gated -> two first layers               | preset=dot optimizer=muon -> no matrix to orthogonalise
  preset=dot backend=fused -> take ops or auto              | batch=2147483646 accum=4 -> take one of 1, 2, 3,
  batch=6 accum=3 devices=4 -> batch/accum=2                | mode=bench presets=atlas,titan -> did you mean titans
  mode=bench lengths=16,x -> 'x' is not a number of tokens  | task=mqra -> mqra is none: name a task: mqar
  task=mqar:pears=3 -> pears=3 is not a setting of mqar     | task=mqar:length=64 length=32 -> length=32 contradicts
  task=mqar vocab=20 -> vocab=20 is too small               | task=mqar data=python -> give one of them
  task=in_context_recall length=2 -> asks for nothing       | task=copy:length=100000 -> takes 0 to 65536
  accum=3 -> accum=3 does not divide batch=4: take one of 1, 2, 4
  devices=3 -> devices=3 does not divide batch/accum=4: take one of 1, 2, 4
  mode=bench lengths=9999999999 -> is not a number of tokens"""
@pytest.mark.parametrize("line,message", table(BAD))
def test_bad_input_gets_one_line_that_names_it(line, message, refused, folder):
  assert message in refused(line) and not list(folder.iterdir())

def test_the_first_fault_in_the_stated_order_is_reported(refused):
  faults = ["oops", "nokey=1", "steps=x", "muon_every=3", "data=/nowhere", "out=/dev/null/x"]
  for i, fault in enumerate(faults): assert re.match(f"error: '?{fault.split('=')[0]}", refused(" ".join(faults[i:])))

@pytest.mark.parametrize("name,content,more,message", [
  ("t.txt", b"", "", "is empty"), ("t.txt", b"x" * 100, "", "too short"), ("t.bin", GPT2[:-2], "", "copy it again"),
  ("t.bin", GPT2[:900], "", "copy it again"), ("t.bin", shard(20240520, 2, 500, 1000), "", "version 2, not 1"),
  ("t.bin", GPT2, "length=8", "give vocab="), ("t.bin", GPT2, "length=8 vocab=9 prompt=abc", "token ids")])
def test_bad_text_is_named(name, content, more, message, refused):
  assert message in refused(f"data={written(name, content)} {more}") and not Path("out").exists()

def test_a_precision_and_devices_that_are_not_there_are_named(refused, monkeypatch):
  def refuse(*_): raise NotImplementedError("no such type")
  monkeypatch.setattr(atlas, "linear", refuse)
  message = f"dtype=bfloat16 does not run on {Device.DEFAULT} (no such type): take dtype=float32"
  assert refused("dtype=bfloat16 steps=0") == f"error: {message}"
  monkeypatch.setattr(train, "device_names", lambda run: (Device.DEFAULT, "NOWHERE:1"))
  assert re.match("error: devices=2: NOWHERE:1 cannot be used.* take devices=1$", refused("devices=2 steps=0"))

@pytest.mark.skipif(Device.DEFAULT != "CPU", reason="clang is the CPU device's compiler")
@pytest.mark.parametrize("clang", ["/nonexistent", rarely("/bin/false")])
def test_no_usable_device_says_how_to_get_clang(clang, folder):
  environment = {**os.environ, "CC": clang, "DEV": "CPU"}
  done = subprocess.run([sys.executable, train.__file__], env=environment, capture_output=True, text=True)
  message, = done.stderr.strip().splitlines()
  assert done.returncode == 2 and "pip install '.[cpu]'" in message and not list(folder.iterdir())

def test_a_compiler_that_is_known_to_be_slow_is_named():
  assert "clang 14 needs minutes" in train.slow_compiler("Debian clang version 14.0.6\nTarget: x86_64-pc-linux-gnu\n")
  for version in ("clang version 16.0.6", "Apple clang version 15.0.0 (clang-1500.3.9.4)", "clang version 23.1.4", ""):
    assert train.slow_compiler(version) == ""

FIELDS = [*dataclasses.fields(train.Run), *dataclasses.fields(atlas.Config)]
def test_help_lists_every_key(run):
  shown = run("--help")
  assert all(f"  {field.name}=" in shown for field in FIELDS)

def test_explicit_keys_win_over_size_over_preset_in_any_order():
  line = "dim=32 size=170m preset=titans vocab=256 steps=0".split()
  for order in (line, line[::-1]):
    assert train.resolve(*train.parse(order)).cfg == atlas.preset("titans", "170m", dim=32, vocab=256)
  assert (atlas.preset("titans", "170m").dim, atlas.preset("titans", "170m", dim=64).dim) == (768, 64)
  assert (atlas.preset("titans").window, atlas.preset("titans", window=3).window) == (1, 3)
  with raises("did you mean window"): atlas.preset("titans", windows=3)
  assert [atlas.preset("atlas", chunk=chunk).muon_every for chunk in (atlas.Config.chunk, 6, 5)] == [4, 2, 1]

def test_parameter_counts_match_what_init_makes():
  for cfg in map(small, PRESETS):
    assert atlas.parts(cfg)["total"] == sum(p.numel() for p in get_state_dict(atlas.init(cfg)).values())

def test_the_commands_of_readme_and_results_are_accepted(folder, capsys):
  """Each is checked to its last setting, and none takes a step."""
  for path in READ: shutil.copy(path, folder)
  Path("lines.jsonl").write_text(DOCUMENTS.split("```json\n")[1].split("```")[0])
  kinds = [kind for kind, _ in evaluate.json_lines(Path("lines.jsonl"))[0]]
  assert kinds == ["choice", "choice", "recall", "last"] and len(commands("train")) > 10
  added = re.findall(r'^\+ *"(\w+)": ', DOCUMENTS, re.M)  # rows that README.md adds to the rule: not there before
  for line in commands("train"):
    if any(word.partition("=")[2] in added for word in line): continue
    assert train.main([*line, "steps=0"]) == 0 or re.search("has no (checkpoint|log)", error_line(capsys)), line
  for line in commands("data"): assert line == ["TASK"] or data.shown(line) == 0, line
  for line in commands("experiments"): assert line == ["NAME"] or line[0] in experiments.EXPERIMENTS, line

# *** runs: ten steps, and what is made of them ***

TEN = f"{TINY} preset=titans steps=10 batch=2 length=16 eval_every=5 tokens=1 warmup=2 lr=0.01 save_every=2"
FIRST_LOSSES = "5.843181 6.285585 6.044867 6.170926 5.733029 5.481681 5.537999 5.393571 5.312129 5.672997"

@pytest.fixture(scope="module")
def ten(tmp_path_factory):
  """The command of ten steps on generated text, and the folder that it wrote."""
  text, out = [tmp_path_factory.mktemp("ten") / name for name in ("text.txt", "out")]
  text.write_bytes(bytes(np.random.default_rng(0).integers(97, 105, 4000, dtype=np.uint8)))
  command = f"{TEN} data={text}"
  assert train.main([*command.split(), f"out={out}"]) == 0
  return command, out

@pytest.fixture
def command(ten, folder):
  """The command, and a copy of its folder as the default `out`."""
  shutil.copytree(ten[1], folder / "out")
  return ten[0]

def log_rows(out): return [row[:7] for row in csv.reader((Path(out) / "log.csv").open())]       # without times

def result(out):
  """What a run ends with: its tensors and its log."""
  tensors = data.read_file(train.checkpoints(Path(out))[-1]).tensors
  return {name: t.numpy().tobytes() for name, t in tensors.items()}, log_rows(out)

def process(line, **more):
  """A command line in a process of its own, with the same short validation."""
  script = "import sys, train, evaluate; evaluate.VALIDATION_TOKENS = 64; sys.exit(train.main(sys.argv[1:]))"
  environment, arguments = {**os.environ, "PYTHONPATH": str(HERE)} | more, [sys.executable, "-c", script, *line.split()]
  with open("output.txt", "w") as f: return subprocess.Popen(arguments, env=environment, stdout=f, stderr=f)

def test_the_first_losses_are_these_and_the_last_two_checkpoints_are_kept(ten):
  losses = np.array([row[2] for row in log_rows(ten[1])[1:]], float)
  assert losses == pytest.approx(np.array(FIRST_LOSSES.split(), float), rel=1e-4)     # rounding differs by device
  assert [path.name for path in train.checkpoints(ten[1])] == ["step_00000008.safetensors", "step_00000010.safetensors"]

@pytest.fixture
def at_step(monkeypatch):
  """A function that has `act` called once, before the batch of a step is made."""
  def register(step, act):
    original = data.batch
    def batch(*args):
      if args[-1] == step:
        monkeypatch.setattr(data, "batch", original)
        act()
      return original(*args)
    monkeypatch.setattr(data, "batch", batch)
  return register

def test_a_run_that_was_stopped_continues_bit_for_bit_and_a_fresh_one_loses_nothing(ten, command, run, at_step):
  at_step(4, lambda: signal.raise_signal(signal.SIGTERM))
  assert "stopped at step 5, saved" in run(command)
  assert result("out.1") == result(ten[1])               # the earlier run was moved aside
  with Path("out/log.csv").open("a") as log: log.write("6,0,9,,9,9,9,9,9\n")    # a row after the checkpoint: a crash
  run(f"{command} resume=1")
  assert result("out") == result(ten[1])

@pytest.mark.parametrize("name", ["SIGINT", rarely("SIGHUP")])
def test_a_stop_is_acknowledged_at_once_and_saves_after_the_step(name, command, at_step, capfd):
  at_step(11, lambda: signal.raise_signal(getattr(signal, name)))
  assert train.main(f"{command} resume=1 steps=20".split()) == 0
  printed = capfd.readouterr()
  assert "stopping after this step" in printed.err and "stopped at step 12, saved" in printed.out
  assert train.checkpoints(Path("out"))[-1].name == "step_00000012.safetensors"

def test_a_stop_while_compiling_takes_effect_at_once_and_loses_nothing(ten, monkeypatch, capfd):
  monkeypatch.setattr(evaluate, "predictions", lambda *_: signal.raise_signal(signal.SIGTERM))
  assert train.main(f"{ten[0]} cache=0".split()) == 0
  printed = capfd.readouterr()
  assert "stopping" in printed.err and "stopped while compiling" in printed.out
  assert not train.checkpoints(Path("out")) and signal.getsignal(signal.SIGINT) is signal.default_int_handler

def interrupted(*_): raise KeyboardInterrupt
def test_what_was_trained_is_saved_before_it_is_validated_and_the_log_ends_the_same(ten, run, monkeypatch):
  with monkeypatch.context() as patch:                   # a second Ctrl-C, in the validation
    patch.setattr(evaluate.HeldOut, "validate", interrupted)
    assert "resume=1 continues from out/step_00000005.safetensors" in run(f"{ten[0]} save_every=5", code=1)
  run(f"{ten[0]} resume=1 save_every=5")
  assert log_rows("out") == log_rows(ten[1])             # the row that was not validated is, after all

@pytest.mark.parametrize("name", ["resolve", "train"])
def test_an_interrupt_before_the_first_checkpoint_ends_the_command_in_one_line(name, ten, run, monkeypatch):
  monkeypatch.setattr(train, name, interrupted)
  assert run(ten[0], code=1) == "stopped at once"

def test_a_run_in_another_thread_than_the_first_one_ends_well(ten, monkeypatch):
  monkeypatch.setattr(helpers.CACHELEVEL, "value", helpers.CACHELEVEL.value)
  for _ in range(2):
    with ThreadPoolExecutor(1) as pool: assert pool.submit(train.main, [*ten[0].split(), "steps=0"]).result() == 0

@pytest.mark.parametrize("name,word", table(
  "DEFAULT_FLOAT -> HALF | DEFAULT_INT -> INT64 | OPTIM_DTYPE -> bfloat16 | SUM_DTYPE -> half | CONST_LR -> 1"))
def test_a_variable_that_changes_types_is_refused_before_anything_is_written(name, word, ten, run, monkeypatch):
  monkeypatch.setenv(name, word)
  assert f"error: {name}={word} changes the types" in run(ten[0], 2) and not Path("out").exists()
  monkeypatch.setenv(name, "float32")
  run(f"{ten[0]} steps=0")

def test_a_checkpoint_continues_a_prompt_by_its_seed_and_is_evaluated_by_position_and_beyond(command, run):
  samples = [run(f"mode=sample prompt=ab tokens=12 seed={seed}").split("---")[2] for seed in (4, 4, 5)]
  assert samples[0] == samples[1] != samples[2] and samples[0].startswith("\nab")
  shown = run("mode=eval tokens=320 horizon=9")          # no weight depends on the horizon
  assert re.search(r"validation loss \d\.\d+ nats, \d\.\d+ bits per byte", shown) and "beyond, to 32" in shown

def test_what_contradicts_a_checkpoint_is_refused(command, refused):
  for line, key in (("preset=titans dim=32", "dim=32"), ("lr=3", "lr=3.0"), ("horizon=9", "horizon=9")):
    assert f"{key} contradicts" in refused(f"{line} resume=1")
  newest, path = train.checkpoints(Path("out"))[-1], Path(command.split("data=")[1])
  assert "has shape" in refused(f"{command} dim=24 out=new init_from={newest}") and not Path("new").exists()
  text = path.read_bytes()
  path.write_bytes(b"z" + text[1:])                      # another text of the same length
  try: assert "has changed since" in refused("resume=1 steps=19")
  finally: path.write_bytes(text)

def test_a_data_file_that_changes_ends_a_run_in_one_line_with_its_steps_saved(command, run, at_step, monkeypatch):
  def changed(text): raise ValueError("data=x was changed while it is read: copy it, and train on the copy")
  at_step(12, lambda: monkeypatch.setattr(data, "unchanged", changed))
  error, path = run(f"{command} resume=1 steps=20 save_every=0", code=1), train.checkpoints(Path("out"))[-1]
  assert "was changed" in error and str(path) in error and path.name == "step_00000013.safetensors"

def test_a_file_that_is_not_signed_is_loaded_with_a_line_that_says_so(command, capsys):
  path = train.checkpoints(Path("out"))[-1]
  path.write_bytes(rewritten(path.read_bytes(), unsigned))                      # as by another tool
  capsys.readouterr()
  assert train.main(f"{command} resume=1 steps=0".split()) == 0 and f"{path} is unsigned" in error_line(capsys)

def test_init_from_brings_its_settings_and_names_those_that_contradict(ten, refused, capsys):
  cfg, path = small("titans", vocab=256, chunk=8, horizon=300), Path("w.safetensors")
  atlas.save(path, get_state_dict(atlas.init(cfg)), {"config": dataclasses.asdict(cfg)})
  line = f"data={ten[0].split('data=')[1]} length=16 steps=0 init_from={path}"
  def resolved(more=""): return train.resolve(*train.parse(f"{line} {more}".split())).cfg, capsys.readouterr().out
  settings, printed = resolved()
  assert settings == cfg and "warning" not in printed
  settings, printed = resolved("chunk=4 preset=gated_deltanet memory=mlp momentum=1")
  assert settings.chunk == 4 and settings.momentum and printed.count("warning") == 1
  assert f"chunk=4 here, and {path} was made with chunk=8" in printed
  refused(f"{line} preset=linear_attention")

def test_a_damaged_checkpoint_is_named_and_the_one_before_it_continued(ten, command, run, refused, capsys):
  older, newer = train.checkpoints(Path("out"))
  newer.write_bytes(newer.read_bytes()[:-5])
  assert train.main(f"{command} resume=1 steps=0".split()) == 0
  warning = error_line(capsys)
  assert f"{newer} is damaged" in warning and f"{older} is taken instead" in warning
  run(f"{command} resume=1")
  assert result("out") == result(ten[1])
  assert set(os.listdir("out")) == {"log.csv", "positions.csv", older.name, newer.name, f"{newer.stem}.damaged"}
  for path in train.checkpoints(Path("out")): path.write_bytes(b"")
  assert f"{newer} is not a checkpoint" in refused(f"{command} resume=1")
  assert "data=/nowhere" in refused("mode=eval data=/nowhere")                  # the fault of data comes first

def test_an_exported_file_is_loaded_with_its_settings_and_can_be_trained_on(command, run, refused):
  path, newest = Path("out/weights.safetensors"), train.checkpoints(Path("out"))[-1]
  assert str(path) in run("mode=export")
  saved = data.read_file(newest).tensors
  for file in (path, newest):
    cfg, params = atlas.load(file)
    weights = get_state_dict(params)
    assert cfg == small("titans", vocab=256) and list(weights) == list(atlas.layout(cfg))
    for name, t in weights.items(): assert same(t.numpy(), saved[f"weights.{name}"].numpy())
    run(f"{command} out=new init_from={file} steps=0")
  assert safe_load(path).keys() == weights.keys()        # anything that reads safetensors reads these names
  path.rename("step_00000011.safetensors")               # weights alone are nothing to continue
  assert "holds weights and no run" in refused("resume=1 out=.")

def test_two_runs_do_not_share_a_folder(command, run, refused, folder):
  before = sorted(folder.rglob("*"))
  with train.held(Path("out")):
    for more in ("", "resume=1 steps=12"): assert "is in use by another run" in refused(f"{command} {more}")
  assert sorted(folder.rglob("*")) == before
  run(f"{command} resume=1")

def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(command, run, monkeypatch):
  """The step whose loss is not finite is named.  The checkpoint whose weights gave that loss is removed."""
  monkeypatch.setattr(train, "rate", lambda run, step: 1e-3 if step < 3 else 1e30)
  message = run(f"{command} out=new save_every=1 eval_every=0", code=1)
  step, good = int(re.findall(r"at step (\d+) is not finite", message)[0]), train.checkpoints(Path("new"))[-1]
  assert step >= 5 and data.read_file(good).meta["step"] == step - 2 and str(good) in message
  assert len(log_rows("new")) == step                    # the header and every step before

@pytest.mark.parametrize("line,horizon", table("""
  length=16 -> 128 | length=300 -> 300 | length=300 horizon=20 -> 20 | task=copy:length=400 -> 400"""))
def test_what_is_trained_on_lies_within_the_horizon_unless_another_is_given(line, horizon, run):
  assert f" horizon={horizon} " in run(f"{line} preset=deltanet steps=0")

FUSED = "fused" if Device.DEFAULT == "CPU" else "ops"
@pytest.mark.parametrize("preset,form", [("transformer++", "softmax"), pytest.param("deltanet", FUSED, marks=runs)])
def test_bench_prints_and_writes_a_row_per_preset_and_length(preset, form, run):
  line = f"mode=bench {TINY} batch=2 lengths=16,100000000 presets={preset}"
  run(f"{line},titans steps=0")
  assert not Path("out").exists()
  run(line)
  measured, too_long = csv.DictReader(Path("out/bench.csv").open())
  assert tuple(measured) == train.COLUMNS and all(measured.values()) and float(measured["tok_s"]) > 0
  assert (measured["backend"], measured["length"], too_long["length"]) == (form, "16", "100000000")
  assert too_long["params"] == "does not fit" and not any(too_long[name] for name in train.COLUMNS[5:])

def test_a_task_is_trained_on_until_it_is_solved_evaluated_beyond_and_drawn(run, refused, monkeypatch):
  monkeypatch.setitem(data.BEYOND, "mqar", [dict(pairs=2, again=2, length=2)])
  monkeypatch.setattr(train, "SOLVED", 0.0)              # the first look at held-out examples ends the run
  task = "task=mqar:pairs=2 vocab=40 length=12 batch=2 tokens=64"
  shown = run(f"{TINY} preset=transformer++ {task} steps=6 eval_every=3")
  assert "done early" in shown and data.read_file(train.checkpoints(Path("out"))[-1]).meta["step"] == 3
  scores = list(csv.DictReader(Path("out/accuracy.csv").open()))
  assert [row["setting"] for row in scores] == ["as given", "pairs=4,again=0,length=24"]
  assert all(0 <= float(row["micro"]) <= 1 for row in scores)
  assert run("mode=eval tokens=64").splitlines()[-2:] == shown.splitlines()[-3:-1]
  assert "99 tokens" in refused("mode=eval task=copy:vocab=99") and "contradicts" in refused("resume=1 task=copy")
  if importlib.util.find_spec("matplotlib"):
    run("mode=plot")
    assert Path("out/log.png").stat().st_size > 5_000
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  assert "pip install '.[plot]'" in refused("mode=plot")

def test_a_task_without_validation_is_never_scored_and_compression_is_answered_from_one_state(run, refused):
  line = f"{TINY} preset=deltanet task=compression:vocab=5 length=8 batch=2 tokens=64 eval_every=0"
  assert "as given" not in run(f"{line} steps=2") and not Path("out/accuracy.csv").exists()
  assert "as given" in run("mode=eval tokens=64")
  run(f"{line} steps=3 resume=1")                        # by the compiled step of the cache
  for other in ("copy:vocab=5", "compression:vocab=5,length=9"):
    assert "for its own length" in refused(f"mode=eval task={other}")
  job = train.resolve(*train.parse(["mode=eval"]))
  params, (x, _) = job.params or {}, data.compression(2, 0, 0, vocab=5, length=8)
  def logits(decoder): return evaluate.predictions(params | {"decoder": decoder}, job.cfg, Tensor(x))[0].numpy()
  decoder = params["decoder"]
  mirrored = decoder | {"position": decoder["position"].flip(0)}
  assert logits(decoder).shape == (2, 8, 5) and np.allclose(logits(mirrored)[:, ::-1], logits(decoder), atol=1e-6)

# *** what a trained model is worth ***

def test_a_score_counts_places_labels_examples_and_answers():
  cfg, task = small("deltanet", vocab=40), data.task("in_context_recall:vocab=8,length=16")
  params = atlas.init(cfg)
  score = evaluate.scorer(params, cfg, task, 4, 0)(64, {})
  x, y = np.concatenate([task.batch(4, 0, data.HELD_OUT + i) for i in range(8)], axis=1)
  hit = atlas.forward(params, cfg, Tensor(x))[0].argmax(-1).numpy() == y
  assert score["micro"] == pytest.approx(hit[y >= 0].mean())
  assert score["macro"] == pytest.approx(np.mean([hit[y == label].mean() for label in np.unique(y[y >= 0])]))
  assert score["exact"] == pytest.approx((hit | (y < 0)).all(1).mean())

@pytest.mark.parametrize("text", ["the hall.", "hall or study", "hall or attic", "", "attic"])
def test_an_answer_counts_if_it_names_the_target_alone_beside_what_the_question_names(text):
  story = b"Ada is in the study.\nIs Ada in the study? "
  assert evaluate.judged(data.task("babi"), story, text, "hall") == (text in ("the hall.", "hall or study"))
  assert evaluate.judged(data.task("niah"), b"", text.upper(), "hall") == ("hall" in text)

@pytest.mark.parametrize("name", ["deltanet", "transformer++", *map(slowly, ("titans", "titans_mac", "dot"))])
def test_what_a_model_says_is_the_likeliest_next_byte_of_reading_everything_anew(name):
  cfg = small(name, vocab=256)
  params, prompt = atlas.init(cfg, 1), np.random.default_rng(0).integers(97, 123, (1, 19)).astype(np.uint8)
  forward = TinyJit(lambda x: atlas.forward(params, cfg, x)[0].realize())
  ids = prompt[0].tolist()                               # two chunks and three bytes
  for n in range(19, 26):                                # one shape for all: what comes later changes nothing
    ids.append(int(forward(Tensor([ids + [0] * (26 - n)])).numpy()[0, n - 1].argmax()))
  assert evaluate.speaker(params, cfg)(prompt, 7)[0] == bytes(ids[19:]).split(b"\n")[0].decode(errors="replace")

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
  monkeypatch.setattr(evaluate, "drawn", lambda *_: pytest.fail("drawn for nobody"))
  cfg = small("deltanet", vocab=256)
  assert train.main(["--help"]) == 0
  with evaluate.shown(): evaluate.sample(atlas.init(cfg), cfg, [1, 2, 3], True, tokens=50)

def test_text_named_for_evaluation_is_evaluated_whole_and_a_short_one_in_a_shorter_window(capsys):
  cfg = small("deltanet", vocab=256)
  params, path = atlas.init(cfg), Path("t.txt")
  def named(vocab=256):
    return train.opened(train.Run(mode="eval", data=str(path)), small("deltanet", vocab=vocab), None, True)
  for content, line in ((b"abcdefgh" * 5 + b"!", "40 of 41 bytes read, in windows of 20"),
                        (b"abc", "2 of 3 bytes read, in windows of 2")):
    path.write_bytes(content)
    assert len(named().val) == len(content) and len(named().train) == 0
    evaluate.positions(params, cfg, named(), Path("step").absolute(), 2, 10)
    assert line in capsys.readouterr().out
  with raises("token 99, outside vocab=99"): named(99)
  with raises("leave 3 .* give 4 for length=3"): data.load("t.txt", 256, 3, parts=1)

def test_a_prompt_comes_from_a_file():
  cfg, path = small("deltanet", vocab=256), Path("p")
  def ids(prompt, is_bytes=True): return evaluate.prompt_ids(prompt, cfg, is_bytes)
  path.write_bytes(b"\xff" * 200_000)
  assert ids("@p") == [255] * 200_000 and ids("@@a") == [64, 97]
  path.write_text("3,4\n")
  assert ids("@p", is_bytes=False) == [3, 4]
  path.write_bytes(b"")
  for prompt, message in (("@no", "cannot be read"), ("@", "cannot be read"), ("@p", "is empty")):
    with raises(message): ids(prompt)

@runs
@pytest.mark.parametrize("name", ["titans", "titans_mac", "transformer++"])
def test_long_rows_are_read_in_pieces_with_the_same_values(name, monkeypatch):
  cfg = small(name, vocab=256)
  params, pairs = atlas.init(cfg, 1), [(b"ab" * 40, b"c" * 50), (b"x", b"yz"), (b"", b"q" * 90)]
  expected = evaluate.likelihoods(params, cfg, pairs, 2)
  monkeypatch.setattr(evaluate, "PIECE", 30)
  for (score, greedy), (before, same_greedy) in zip(evaluate.likelihoods(params, cfg, pairs, 2), expected):
    assert score == pytest.approx(before, rel=1e-4) and greedy == same_greedy

def test_task_tokens_outside_the_vocabulary_are_refused(refused, monkeypatch):
  def outside(*args, **settings): return tuple(z + 300 for z in data.copy(*args, **settings))
  monkeypatch.setitem(data.TASKS, "copy", outside)
  monkeypatch.setattr(data, "task", lambda *_: data.Task("copy", {"vocab": 32, "length": 8}, 32, False))
  assert re.search("token 3[0-9][0-9], outside .*vocab=32", refused("task=copy")) and not Path("out").exists()

QUESTIONS = """{"context": "It is ", "choices": ["abc", "zz", "q"], "answer": 1}
{"context": "So", "choices": ["he", "the other one"], "suffix": " was here", "answer": "he"}

{"context": "x", "question": "y?", "answers": [ANSWER, "no"]}
{"text": "one two three"}
"""

def test_questions_are_scored_by_likelihood_by_what_is_said_and_by_the_last_word(capsys):
  cfg = small("deltanet", vocab=256)
  params = atlas.init(cfg, 2)
  forward = TinyJit(lambda x: atlas.forward(params, cfg, x)[0].log_softmax(-1).realize())
  def expected(before, after):
    ids = np.frombuffer(before + after, np.uint8).astype(np.int32)
    places = np.arange(len(before) - 1, len(ids) - 1)
    logits = forward(Tensor(np.pad(ids, (0, 80 - len(ids)))[None])).numpy()[0, places]
    return logits[np.arange(len(after)), ids[places + 1]].sum(), same(logits.argmax(-1), ids[places + 1])
  choices = [(b"It is", b" abc"), (b"It is", b" zz"), (b"It is", b" q")]
  suffixes = [(b"So he", b" was here"), (b"So the other one", b" was here")]
  pairs = [*choices, *suffixes, (b"one two", b" three"), (b"a", b"b" * 70), (b"", b"z")]
  scores = evaluate.likelihoods(params, cfg, pairs, 2)
  for (score, greedy), (before, after) in zip(scores, pairs):
    assert (pytest.approx(score, rel=1e-4), greedy) == expected(before or b"\n", after)
  said = evaluate.speaker(params, cfg)(np.frombuffer(b"x\ny? ", np.uint8)[None], 48)[0]
  Path("lines.jsonl").write_text(QUESTIONS.replace("ANSWER", json.dumps(said[:4])))
  evaluate.evaluate_lines(params, cfg, *evaluate.json_lines(Path("lines.jsonl")), 2)
  shown = capsys.readouterr().out
  first, second, (last, greedy) = np.array(scores[:3])[:, 0], np.array(scores[3:5])[:, 0], scores[5]
  right = [np.mean([x.argmax() == 1, second.argmax() == 0]) for x in (first, first / [3, 2, 1])]
  assert "multiple choice: 2 lines, acc {:.4f}, acc_norm {:.4f}".format(*right) in shown
  assert "recall: 1 lines, contains 1.0000" in shown
  assert f"last word: 1 lines, acc {float(greedy):.4f}, perplexity {np.exp(-last):.4g}" in shown

@pytest.mark.parametrize("line,message", [("[" * 100_000, "is not JSON"), ("\xff", "is not JSON"), *table("""
  {"x" -> is not JSON | [1] -> is not an object       | {"text": "one"} -> a text of two words
  {"context": "", "choices": ["a"], "answer": 0}      -> choices
  {"context": "", "choices": ["a", "b"], "answer": 2} -> answer
  {"context": "", "question": "q", "answers": []}     -> answers
  {"choices": ["a", "b"], "answer": 0}                -> context""")])
def test_a_malformed_line_is_named_and_left_out_only_when_asked(line, message):
  path = Path("lines.jsonl")
  path.write_bytes(b'{"text": "one two"}\n\n' + line.encode("latin1") + b'\n{"text": "three four"}')
  with raises(f"line 3 .*{message}.*skip_bad=1"): evaluate.json_lines(path)
  lines, skipped = evaluate.json_lines(path, skip_bad=True)
  assert [row["text"] for _, row in lines] == ["one two", "three four"] and skipped == 1

# *** -m runs: drawn bad input; settings are those of the dataclasses and tasks, values mostly of their kind ***

NUMBERS = ["-1", "1e9", str(10 ** 9), str(10 ** 30), str(-10 ** 30), "9" * 5000, "nan", "inf", "1e308", "1e-320"]
STRANGE = ["", " ", "=", ",", "\0", "\ud800", "a\nb", "\u2028", "\u0663", "x" * 300, "x/" * 3000, "~", "--help"]
HOSTILE = st.sampled_from(NUMBERS + STRANGE) | st.text(st.characters(), max_size=8)
CHECKPOINT = "out/step_00000010.safetensors"
PLACES = ["text.txt", "out", "empty", "nowhere", "text.txt/x", CHECKPOINT, ".", "..", "/dev/null", "/dev/zero", "loop"]
NAMES = atlas.CHOICES | {
  "mode": train.MODES, "preset": list(atlas.PRESETS), "size": list(atlas.SIZES), "text": ["filler", "python", *PLACES],
  "presets": ["atlas,dot", "swa", ",", "atlas,"], "lengths": ["8,16", "8,x", "8,,9", "0"], "kind": ["pk", "n", "w"]}
INTEGERS = st.integers(-1, 40) | st.sampled_from([64, 256, 4096, 65536, 10 ** 6, 2 ** 31 - 1])
KINDS = {int: INTEGERS, float: st.floats(0, 4) | st.floats(), bool: st.booleans(), str: st.sampled_from(PLACES)}

def mostly(sound, share=10):
  """One value in `share` is hostile."""
  return st.integers(1, share).flatmap(lambda i: HOSTILE if i == share else sound)

def setting(name, default):
  sound = st.sampled_from(NAMES[name]) if name in NAMES else KINDS[type(default)]
  return mostly(sound).map(lambda x: f"{name}={x}")

def spec(name):
  parameters = inspect.signature(data.TASKS[name]).parameters.values()
  keys = [setting(p.name, p.default) for p in parameters if p.default is not p.empty]
  return st.lists(mostly(st.one_of(keys), 20), max_size=4).map(lambda line: f"task={name}:{','.join(line)}")

SPECS = st.one_of(*map(spec, data.TASKS))
SETTINGS = SPECS | st.one_of(*[setting(field.name, field.default) for field in FIELDS])
STARTS = st.sampled_from(["", "data=text.txt", f"{TINY} data=text.txt length=8", "mode=eval", "mode=sample", "resume=1",
                          "length=64", "vocab=65536", "length=9999999", f"{TINY} preset=titans init_from={CHECKPOINT}"])

def drawn(cases, **strategies):
  """A test of many cases, which are the same in every run."""
  fixed = hypothesis.settings(max_examples=cases, derandomize=True, deadline=None, database=None,
                              suppress_health_check=list(hypothesis.HealthCheck))
  return lambda test: runs(fixed(given(**strategies)(test)))

@pytest.fixture
def attempt(command, folder, monkeypatch, capsys):
  """A function of a command line: main returns 0, or 2 with one line that says how to mend it, and writes no file."""
  monkeypatch.setenv("HOME", str(folder.parent / "home"))
  for name in ("log.csv", "step_00000008.safetensors"): Path("out", name).unlink()                   # one checkpoint
  Path("empty").mkdir()
  Path("text.txt").write_bytes(b"abcdefgh" * 500)
  Path("loop").symlink_to("loop")
  def files(): return sorted((str(path), path.lstat().st_mtime_ns) for path in Path().rglob("*"))
  def try_it(line):
    before = files()
    signal.alarm(5)
    code = train.main([*line, "steps=0"])
    signal.alarm(0)
    error = capsys.readouterr().err
    assert re.fullmatch("error: .*(: .|the settings).*\n" if code else "", error) and code in (0, 2), (line, error)
    assert files() == before, line
  signal.signal(signal.SIGALRM, lambda *_: pytest.fail("more than 5 s"))
  yield try_it
  signal.alarm(0)

@drawn(900, start=STARTS, more=st.lists(mostly(SETTINGS, 30), max_size=5))
def test_no_command_line_ends_in_a_traceback_a_hang_or_a_file(attempt, start, more): attempt([*start.split(), *more])

HEADERS = st.builds(shard, st.sampled_from([20240520, 20240801, 0, -1]), st.sampled_from([0, 1, 7, -1]),
                    st.sampled_from([0, 1, -1, 400, 500, 2 ** 31 - 1, -2 ** 31]))
READING = st.sampled_from(["mode=eval", "vocab=1", "vocab=300", "vocab=65536", "length=1", "length=8", "size=170m"])
@drawn(200, name=st.sampled_from(["t.bin", "t.txt", "folder/t.bin", "folder/t.txt", "folder.bin/t"]), header=HEADERS,
       cut=st.sampled_from([0, 4, 8, 1023, 1024]), filler=st.binary(min_size=1, max_size=2),
       size=st.sampled_from([0, 1, 2, 3, 100, 800, 1000, 2000, 4000]), more=st.lists(READING, max_size=4))
def test_nor_does_damaged_data(attempt, name, header, cut, filler, size, more):
  path = Path(name)
  path.parent.mkdir(exist_ok=True)
  path.write_bytes(header[:cut] + (filler * size)[:size])
  attempt([f"data={name.split('/')[0]}", *more])
  path.unlink()

KEYS = st.sampled_from(["context", "choices", "answer", "suffix", "question", "answers", "text"])
LEAVES = st.sampled_from([None, True, "a b"]) | st.integers(-1, 3) | st.floats() | st.text(st.characters(), max_size=5)
VALUES = st.recursive(LEAVES, lambda x: st.lists(x, max_size=3) | st.dictionaries(KEYS, x), max_leaves=8)
BYTES = st.binary(max_size=9) | st.sampled_from([b'{"text": "a b"}', b"1,2,", b"9" * 5000])
LINES = st.lists(BYTES | VALUES.map(lambda x: json.dumps(x).encode()), max_size=3)
@drawn(150, lines=LINES, skip_bad=st.booleans())
def test_nor_do_malformed_questions_or_logs(attempt, lines, skip_bad):
  Path("lines.jsonl").write_bytes(b"\n".join(lines))
  attempt(["mode=eval", "data=lines.jsonl", f"skip_bad={skip_bad}"])
  Path("out/log.csv").write_bytes(b"step,loss,val_bpb\n" + b"\n".join(lines))
  attempt(["mode=plot"])

READERS = st.sampled_from(["mode=sample", "mode=eval", "mode=export", "resume=1", f"init_from={CHECKPOINT} out=new"])
@drawn(200, line=READERS, start=st.floats(0, 1), size=st.sampled_from([0, 1, 8, 100, 10 ** 9]),
       junk=st.binary(max_size=9) | st.just(b"9" * 9000))
def test_nor_does_a_damaged_checkpoint(attempt, line, start, size, junk):
  path, good = Path(CHECKPOINT), Path(CHECKPOINT).read_bytes()
  place = int(start ** 4 * len(good))                    # mostly in the header
  bad = good[:place] + junk + good[place + size:]
  path.write_bytes(bad)
  if bad != good:
    with pytest.raises(ValueError): data.read_file(path)
  attempt(line.split())
  path.write_bytes(good)

# *** -m runs: parts, devices, caches, kills and full disks ***

@runs
def test_a_run_goes_on_in_other_parts_and_another_precision(command, run, refused):
  run("resume=1 steps=11 accum=2 dtype=bfloat16")
  _, meta, tensors, _ = data.read_file(train.checkpoints(Path("out"))[-1])
  assert (meta["step"], meta["run"]["accum"], meta["config"]["dtype"]) == (11, 2, "bfloat16")
  assert {t.dtype for t in tensors.values()} == {dtypes.float}
  assert "batch=2: take one of 1, 2" in refused("resume=1 accum=4")

@runs
def test_a_checkpoint_of_two_devices_is_one_of_one_device_and_the_reverse(command, run):
  """The folder `one` is trained on one device; `two` on two, one, two."""
  def train_on(out, more): run(f"{command} preset=deltanet eval_every=0 out={out} {more}")
  def weights(out): return get_state_dict(atlas.load(train.checkpoints(Path(out))[-1])[1])
  def close():
    one, two = weights("one"), weights("two")
    return all(relative(t.numpy(), two[name].numpy()) < 1e-5 for name, t in one.items())
  train_on("one", "steps=3")
  train_on("two", "steps=2 devices=2")
  assert not close()
  train_on("two", "steps=3 resume=1 devices=1")
  assert close()
  train_on("one", "steps=4 resume=1")                    # both from the step cache
  assert not close()
  train_on("two", "steps=4 resume=1 devices=2")
  assert close()

@runs
def test_another_process_gives_the_same_log_and_weights_byte_for_byte(ten, folder):
  assert process(f"{ten[0]} out=again", XDG_CACHE_HOME=str(folder)).wait() == 0                   # it compiles anew
  assert result("again") == result(ten[1])

@runs
def test_the_step_cache_changes_nothing_and_a_damaged_or_foreign_entry_is_made_anew(ten, folder, run, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
  def hits(more=""):
    shutil.rmtree("out", ignore_errors=True)
    return "the compiled step is in" in run(f"{ten[0]} {more}")
  def unchanged(): return result("out") == result(ten[1])
  assert not hits() and unchanged()
  entry, = Path("cache").rglob("*.pickle")
  good = entry.read_bytes()
  assert hits() and unchanged() and not hits("cache=0") and not hits("lr=0.01 clip=0.5")
  for bad in (good[:1000], good[:-1] + bytes([good[-1] ^ 1]), b"x" * 64 + good[64:]):
    entry.write_bytes(bad)
    assert not hits() and unchanged() and entry.read_bytes() != bad
  entry.write_bytes(good)
  entry.chmod(0o666)                                     # others may write it: it is not trusted
  assert not hits() and not hits("accum=2")
  in_parts = result("out")
  assert hits("accum=2") and result("out") == in_parts

@runs
def test_a_write_that_fails_loses_nothing_and_the_run_goes_on_to_the_same_end(ten, run, at_step):
  command, limits = ten[0], resource.getrlimit(resource.RLIMIT_FSIZE)
  def full(): resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))    # bytes of a file
  at_step(5, full)
  try: message = run(command, code=1)
  finally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert "cannot be written" in message and "make room" in message
  assert sorted(os.listdir("out")) == ["log.csv", "step_00000002.safetensors", "step_00000004.safetensors"]
  assert len(log_rows("out")) == 7                       # the header, and six steps
  Path("out/step_00000006.tmp").write_bytes(b"half")     # as a kill in the middle of a write leaves it
  run(f"{command} resume=1")
  assert result("out") == result(ten[1]) and not list(Path("out").glob("*.tmp"))

@runs
def test_a_run_without_the_jit_ends_as_one_with_it(ten):
  for jit in "10": assert process(f"{ten[0]} steps=3 out={jit}", JIT=jit).wait() == 0
  with_jit, without = [data.read_file(train.checkpoints(Path(out))[-1]).tensors for out in "10"]
  for name, t in with_jit.items(): assert np.allclose(t.numpy(), without[name].numpy(), atol=1e-6), name

@runs
@pytest.mark.parametrize("path", ["damaged.db", "a/folder", "~/cache.db", "/proc/cache.db", "/dev/null/cache.db"])
def test_a_database_that_cannot_be_used_is_named_in_one_line_and_the_run_goes_on(path, ten, folder):
  """A path that starts with ~ is what tinygrad makes of a home that does not exist."""
  written("damaged.db", os.urandom(5000))
  Path("a/folder").mkdir(parents=True)
  assert process(f"{ten[0]} steps=2", CACHEDB=str(folder / path)).wait() == 0
  printed = Path("output.txt").read_text()
  assert printed.count("cannot be used") == 1 and "Traceback" not in printed

@runs
def test_pipes_that_close_and_names_that_are_not_ascii_end_in_no_traceback(ten, folder):
  name = "t\u00e9xt_\u0416.txt"
  shutil.copy(ten[0].split("data=")[1], name)
  assert process(f"{TEN} data={name} steps=2", PYTHONIOENCODING="ascii").wait() == 0
  printed = Path("output.txt").read_text()
  assert "t\\xe9xt_\\u0416.txt" in printed and "Traceback" not in printed
  sample = f"{sys.executable} -u {train.__file__} mode=sample tokens=200 temperature=5 top_k=0 | head -c 40 >/dev/null"
  done = subprocess.run(["bash", "-c", f"set -o pipefail; {sample}"], capture_output=True, text=True)
  assert done.returncode == 0 and not re.search("Traceback|Broken|Exception", done.stderr)

@runs
def test_the_key_of_a_step_knows_tinygrads_files_its_variables_and_the_compiler(folder, monkeypatch):
  def key(): return train.cache_key(train.Run(), small("deltanet"))
  source, first = Path("nn/optim.py"), key()
  keys = [first]
  source.parent.mkdir()
  with monkeypatch.context() as patch:
    patch.setattr(train.tinygrad, "__path__", [str(folder)])
    for text, value in (("getenv('RATE')", "0"), ("getenv('RATE')", "1"), ("getenv('RATE') ", "1")):
      source.write_text(text)
      patch.setenv("RATE", value)
      keys.append(key())
  for name, value in table("JITBEAM -> 7 | BEAM_UPCAST_MAX -> 7 | CC -> /bin/sh"):
    with monkeypatch.context() as patch:
      patch.setenv(name, value)
      keys.append(key())
  assert len(set(keys)) == 7 and key() == first

@runs
def test_a_cache_that_cannot_be_used_is_no_error(folder, monkeypatch):
  def no_home(): raise RuntimeError("Could not determine home directory.")
  monkeypatch.setattr(Path, "home", no_home)
  params = atlas.init(small("deltanet"))
  optimizer = train.optimizer_for(get_state_dict(params), 0.1)
  for path in (str(folder), str(written(folder / "file", b"no folder")), ""):
    monkeypatch.setenv("XDG_CACHE_HOME", path)
    train.cache_step("key", train.Step(lambda: None, params, optimizer))        # which cannot be pickled
    assert train.cached_step("key", {}, optimizer) is None

@runs
def test_memory_and_speed_are_flat_in_training(command, run, monkeypatch):
  original, resident = data.batch, []
  def watched(*args):
    resident.append(resident_mb())
    return original(*args)
  monkeypatch.setattr(data, "batch", watched)
  run(f"{command} steps=400 save_every=20 eval_every=0")
  assert resident[399] <= resident[100] + 5, resident
  speed = [float(row["tok_s"]) for row in csv.DictReader(Path("out/log.csv").open())]
  assert np.median(speed[-100:]) > np.median(speed[20:120]) / 2

@slow
@pytest.mark.parametrize("tokens,more", [(20_000, 500), (1_000_000, 20_000)], ids=["20,000", "million"])
def test_memory_is_flat_in_a_long_sample(tokens, more):
  """A prompt of many tokens, then a sample: what is resident after a few of them is resident at the end."""
  cfg, ids = small("titans", chunk=32), np.random.default_rng(0).integers(0, 16, (1, tokens))
  params = atlas.init(cfg)
  step = evaluate.token_step(params, cfg)
  read = evaluate.reader(params, cfg, step)
  read(ids[:, :1000])
  early = resident_mb()
  logits, state = read(ids)
  assert resident_mb() <= early + 5
  for i in range(more):
    logits, state = step(Tensor(ids[:, i:i + 1].astype(np.int32)), state)
    if i == 100: early = resident_mb()
  assert resident_mb() <= early + 5 and np.isfinite(logits.numpy()).all()

@runs
def test_a_run_that_is_killed_again_and_again_ends_like_one_that_is_not(ten):
  """SIGKILL at random moments, most of them in training or while a checkpoint is written, every second step."""
  line, rng, began = f"{ten[0]} steps=600 eval_every=100", np.random.default_rng(), time.perf_counter()
  assert process(f"{line} out=whole").wait() == 0
  usual = time.perf_counter() - began
  for _ in range(25):
    killed = process(f"{line} resume=1 out=killed")
    try: killed.wait(rng.uniform(0, usual / 4))
    except subprocess.TimeoutExpired: killed.kill()
    killed.wait()
  assert process(f"{line} resume=1 out=killed").wait() == 0, Path("output.txt").read_text()
  assert result("killed") == result("whole")

# *** -m runs: experiments ***

def shows(capsys, path):
  """What an experiment printed; it drew its picture, or said how it could."""
  printed = capsys.readouterr().out
  assert "pip install" in printed or Path(path).stat().st_size > 10_000
  return printed

@experiment
def test_the_recall_experiment_shows_what_windows_and_features_buy(capsys):
  omega = "Omega, window 16"
  hits = experiments.recall(sizes=(4, 16), trials=8, seeds=1, rules=("delta", omega), folder=".")
  correlated = {name: scores[1, 1].mean() for name, scores in hits.items()}
  for features, gain in (("identity", 0.2), ("poly", 0.0)):
    assert correlated[omega, features] > correlated["delta", features] + gain
  assert correlated["delta", "exp"] > correlated["delta", "poly"] > correlated["delta", "identity"]
  assert "0." in shows(capsys, "recall.png")

@experiment
def test_the_learnability_experiment_learns_the_low_rank_mapping(capsys):
  losses = experiments.learnability(d=32, T=256, seeds=1, window=8, folder=".")
  assert losses.shape == (5, 1, 256) and losses[0, 0, -64:].mean() < 0.8 * losses[0, 0, :64].mean()
  printed = shows(capsys, "learnability.png")
  for name in experiments.MAPPINGS: assert re.search(rf"^{re.escape(name)} +[1-9]e-0\d +\d\.\d+ ", printed, re.M)
  assert "low-rank is easiest" in printed

@experiment
def test_the_capacity_experiment_counts_what_least_squares_can_fit(capsys):
  """Of the 15 monomials of 4 components up to degree 2, 14 are independent on unit keys, because |k|^2 is constant.
  A network of 16 parameters for 2 components holds 8 pairs at most, and at least the 5 eighths that are tried first."""
  counts = experiments.capacity(dims=(4,), degrees=(1, 2), deep={2: (2,)}, seeds=1, threshold=1e-3, steps=400)
  assert counts["linear, degree 1"] == {4: [4]} and counts["linear, degree 2"] == {4: [14]}
  assert 2 <= counts["mlp, expand 2"][2][0] <= 8 and "mlp, expand 2" in capsys.readouterr().out

@experiment
def test_the_heatmap_shows_storing_the_window_and_forgetting(capsys):
  errors = experiments.heatmap(N=24, draws=4, d=8, folder=".")
  delta, window, quadratic, forgets = errors.values()
  for e in errors.values(): assert np.diag(e).mean() < np.diag(e, 1).mean()   # lower than before the pair was written
  assert np.diag(delta).max() < 1e-6                     # a step of 1 writes a pair exactly
  assert np.diag(window, -6).mean() < np.diag(window).mean() - 0.1            # the window goes on correcting a pair
  assert forgets[-1, :6].mean() > quadratic[-1, :6].mean() + 0.1
  printed = shows(capsys, "memory.png")
  assert all(name in printed for name in errors)

TRIAL = experiments.Trial("deltanet", SMALL | dict(vocab=40), "mqar:vocab=40,length=12,pairs=2", steps=3, batch=2,
                          length=8, rates=(1e-9, 0.05), seeds=(0, 1), variants=({}, {"pairs": 1}))

@experiment
def test_finished_runs_come_from_the_ledger_and_each_is_a_run_of_its_own(capsys, monkeypatch):
  """A trial is compiled once for all seeds and rates: the second seed gives what a run of its own gives."""
  both = experiments.compare("small", {"deltanet": TRIAL}, ["2 pairs", "1 pair"])["deltanet"]
  rate, printed = both.records[0]["settings"]["rate"], capsys.readouterr().out
  assert both.scores.shape == (2, 2) and rate >= 0.05 and f"{both.scores[:, 1].mean():.3f} +- " in printed
  [alone] = experiments.trained(TRIAL, [(rate, 1)])
  assert alone["scores"] == both.records[1]["scores"] and alone["gflop"] > 0 and alone["seconds"] > 0
  asked:list = []
  def trained(trial, runs):
    asked.extend(runs)
    return []
  monkeypatch.setattr(experiments, "trained", trained)
  again = experiments.compare("small", {"deltanet": TRIAL}, ["2 pairs", "1 pair"])["deltanet"]
  assert again.records == both.records and not asked and capsys.readouterr().out == printed
  for change in (dict(steps=4), dict(fields=SMALL | dict(vocab=40, heads=1)), dict(rising=({"pairs": 1},))):
    assert not experiments.finished(TRIAL._replace(**change), [(rate, 1)])
  assert len(asked) == 3
  monkeypatch.setattr(experiments, "TRAIN", 0)
  assert not experiments.finished(TRIAL._replace(steps=4), [(rate, 1)]) and len(asked) == 3

@experiment
def test_a_trial_on_text_is_that_training_run(run):
  trial = TRIAL._replace(task="", fields=SMALL | dict(vocab=256))
  [trained] = experiments.trained(trial, [(0.05, 1)])
  run(f"preset=deltanet {TINY} steps=3 batch=2 length=8 lr=0.05 warmup=0 seed=1 tokens=1")
  assert float(log_rows("out")[-1][3]) == pytest.approx(trained["scores"][0], abs=1e-5)
  assert len(trained["scores"]) == 5

@experiment
def test_a_trial_may_train_at_rising_lengths_and_is_asked_beyond_them(monkeypatch):
  monkeypatch.setattr(experiments, "EXAMPLES", 2)
  monkeypatch.setattr(experiments, "LONGEST", 500)
  stories = TRIAL._replace(preset="gated_deltanet", task="babi:length=400", fields=SMALL | dict(vocab=256),
                           rising=({"length": 160, "facts": 3}, {}), variants=({}, {"length": 800}))
  [trained] = experiments.trained(stories, [(0.01, 0)])
  assert trained["steps"] == 3 and trained["scores"] == [0, 0]
  [trained] = experiments.trained(stories._replace(preset="transformer++"), [(0.01, 0)])
  assert trained["scores"][0] == 0 and math.isnan(trained["scores"][1])

@experiment
def test_the_grid_of_rates_grows_where_the_best_is_at_its_end_and_other_seeds_take_the_best(monkeypatch):
  asked = []
  def finished(trial, runs):
    asked.extend(runs)
    return {(rate, seed): {"scores": [abs(math.log2(rate / 0.064))]} for rate, seed in runs}
  monkeypatch.setattr(experiments, "finished", finished)
  monkeypatch.setattr(experiments, "workers", lambda jobs: contextlib.nullcontext(map))
  [runs] = experiments.all_trained([experiments.TEXT])
  rates = 0.008, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128
  assert asked == [(rate, 0) for rate in rates] + [(0.064, seed) for seed in range(3)]
  assert experiments.best_rate(experiments.TEXT, runs) == 0.064

@experiment
def test_models_of_a_table_have_equal_parameters_or_are_refused():
  for preset in ("deltanet", "atlas_mal"):
    total = atlas.parts(experiments.config(experiments.model(experiments.TEXT, preset)))["total"]
    assert total == pytest.approx(atlas.parts(atlas.preset("atlas"))["total"], rel=0.01)
  with raises("parameters|mlp_ratio"): experiments.model(experiments.TEXT, "atlas", dim=256)

@experiment
@pytest.mark.parametrize("name,count", [("text", 60), ("longer", 25), ("ablation", 90), ("window", 10), ("mqar", 80),
                                        ("official", 4), ("mad", 72), ("niah", 210), ("stories", 20), ("streams", 108)])
def test_an_experiment_prints_the_scores_of_every_model_that_it_trains(name, count, capsys, monkeypatch):
  """The training itself is replaced.  Every configuration and task is made, every mean over the seeds printed."""
  numbers, means = itertools.count(1001), list[str]()
  def runs(trial):
    cfg, scores = experiments.config(trial), 6 if trial.measure else 5
    if trial.task:
      task, scores = data.task(trial.task), len(trial.variants) * len(trial.shares)
      assert all(task.batch(1, 0, 0, **settings)[0].size for settings in trial.variants + trial.rising)
    numbered = [next(numbers) / 1000 for _ in range(scores)]
    means.extend(f"{score:.3f}" for score in numbered)
    record = {"scores": numbered, "curve": [[100, 3.0], [200, 2.0]], "steps": 7, "gflop": 2.0, "seconds": 0.1,
              "parameters": atlas.parts(cfg)["total"], "minutes": 0.1, "commit": "unknown"}
    return {(rate, seed): record | {"settings": experiments.settings_of(trial, rate, seed)}
            for rate in trial.rates for seed in trial.seeds}
  monkeypatch.setattr(experiments, "all_trained", lambda trials: [runs(trial) for trial in trials])
  experiments.EXPERIMENTS[name]()
  printed = capsys.readouterr().out.split()
  assert len(means) == count and set(means) <= set(printed)

@experiment
def test_what_is_measured_after_a_hostile_stream_is_the_loss_of_the_text_there(monkeypatch):
  monkeypatch.setattr(experiments, "AFTER", 1280)
  cfg = small("linear_attention", vocab=256, chunk=1, horizon=1 << 20)         # which forgets nothing
  params, text = atlas.init(cfg), data.load("python", 256, 128)
  measured = experiments.recovery(params, cfg, text, tokens=1024)
  for bits, before in zip(measured, ([], *experiments.hostile(1024, 256), text.train[:1024])):
    tokens = np.concatenate([before, text.val[:1280]]).astype(np.int32)[None]
    logits, _ = atlas.forward(params, cfg, Tensor(tokens[:, :-1].copy()))
    losses = atlas.token_losses(logits, Tensor(tokens[:, 1:].copy())).numpy()
    assert bits == pytest.approx(losses[0, len(before) + 1024:].mean() / math.log(2), abs=1e-5)
  assert len(measured) == 6 and np.diff(np.sort(measured)).min() > 1e-4, measured

@experiment
def test_the_speed_experiment_compares_both_forms(capsys, monkeypatch):
  layer = experiments.Layer(dict(window=2, chunk=4), 2, 4, 4, 1, 12, True)
  monkeypatch.setattr(experiments, "LAYERS", {"small": layer})
  experiments.speed()
  printed = capsys.readouterr().out
  assert re.search(r"small +fused .*\nsmall +ops .*\n +fused is [\d.]+ times as fast", printed)
  assert float(printed.split("outputs and gradients ")[1].split()[0]) < 1e-5
